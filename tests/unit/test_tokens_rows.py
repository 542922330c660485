"""The user's own prompts: what is read of each shape, what is sent of it, and at which length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specrig.errors import UsageError
from specrig.tokens import tokenizer as tokenizers
from specrig.tokens.prompts import Prompt, PromptFactory
from specrig.tokens.rows import read_jsonl
from specrig.tokens.tokenizer import Tokenizer

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
ROWS: dict[str, list[dict[str, Any]]] = {
    "openai.jsonl": [
        {
            "messages": [
                {"role": "system", "content": "S"},
                {"role": "user", "content": "first"},
                {"role": "assistant", "content": "said"},
                {"role": "user", "content": "second"},
                {"role": "assistant", "content": "left out"},
            ]
        }
    ],
    "sharegpt.jsonl": [
        {
            "id": "a_1",
            "conversations": [
                {"from": "gpt", "value": "from an earlier page"},
                {"from": "human", "value": "q1"},
                {"from": "gpt", "value": "a1"},
                {"from": "human", "value": "q2"},
                {"from": "gpt", "value": "a2"},
            ],
        }
    ],
    "roles.jsonl": [
        {
            "system": "S",
            "conversations": [{"role": "user", "content": "q1"}, {"role": "assistant", "content": "a1"}],
        }
    ],
    "speed.jsonl": [
        {
            "question_id": "7",
            "category": "coding",
            "sub_category": "python",
            "turns": ["t1", "t2"],
            "source": "x",
            "src_id": "y",
            "difficulty": "hard",
            "multiturn": True,
        }
    ],
    "mt.jsonl": [{"question_id": 81, "category": "writing", "turns": ["t1", "t2"], "reference": ["r"]}],
    "prompt.jsonl": [{"prompt": "plain"}, {"question": "asked"}, {"text": "t"}],
    "alpaca.jsonl": [{"instruction": "sort it", "input": "3 1 2", "output": "1 2 3"}],
    "parts.jsonl": [
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "part"}, {"type": "text", "text": "two"}]}]}
    ],
    "tools.jsonl": [
        {
            "tools": [LOOK],
            "messages": [
                {"role": "user", "content": "do"},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": "seen"},
            ],
        }
    ],
}


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    return tokenizers.load(tokenizer_dir)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, rows in ROWS.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")
    return tmp_path


def contents(prompt: Prompt) -> list[object]:
    assert prompt.messages is not None
    return [message["content"] for message in prompt.messages]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("openai.jsonl", [["S", "first", "said", "second"]]),
        ("sharegpt.jsonl", [["q1"]]),
        ("roles.jsonl", [["S", "q1"]]),
        ("speed.jsonl", [["t1"]]),
        ("mt.jsonl", [["t1"]]),
        ("prompt.jsonl", [["plain"], ["asked"], ["t"]]),
        ("alpaca.jsonl", [["sort it\n\n3 1 2"]]),
        ("parts.jsonl", [["part\ntwo"]]),
        ("tools.jsonl", [["do", "", "seen"]]),
    ],
)
def test_what_is_sent_of_each_shape(tokenizer: Tokenizer, folder: Path, name: str, expected: list[list[str]]) -> None:
    factory = PromptFactory(tokenizer, name, None, base=folder)
    assert [contents(factory.build(i)) for i in range(len(expected))] == expected


def test_categories_and_tools_are_kept(tokenizer: Tokenizer, folder: Path) -> None:
    assert PromptFactory(tokenizer, "speed.jsonl", None, base=folder).build(0).category == "coding"
    prompt = PromptFactory(tokenizer, "tools.jsonl", None, base=folder).build(0)
    assert prompt.tools == (LOOK,)
    assert prompt.messages is not None
    assert prompt.messages[1]["tool_calls"] == [CALL]
    assert "<function=look>\n<parameter=at>\nx\n</parameter>" in prompt.text
    assert tokenizer.chat_ids(prompt.messages, tools=prompt.tools) == prompt.ids


@pytest.mark.parametrize("name", sorted(ROWS))
@pytest.mark.parametrize("cache", ["flush", "unique"])
def test_a_row_is_brought_to_length(tokenizer: Tokenizer, folder: Path, name: str, cache: str) -> None:
    own = PromptFactory(tokenizer, name, None, base=folder, cache=cache).build(0)
    lengths = range(own.tokens, own.tokens + 60)
    # a row that comes again says so, which takes some tokens
    for index, wanted in ((0, (*lengths, 900)), (3, (*lengths[20::8], 900))):
        for tokens in wanted:
            prompt = PromptFactory(tokenizer, name, tokens, base=folder, cache=cache).build(index)
            assert prompt.messages is not None
            assert prompt.tokens == tokens
            assert tokenizer.chat_ids(prompt.messages, tools=prompt.tools) == prompt.ids
    with pytest.raises(UsageError) as caught:
        PromptFactory(tokenizer, name, 10, base=folder, cache=cache).build(0)
    assert str(caught.value) == (
        f"prompt_tokens: 10 asked for prompts {name}; row 1 alone has {own.tokens} tokens after the chat template; "
        f"expected {own.tokens} or more"
    )


def test_unique_begins_with_its_tag_also_before_a_shared_system_message(tokenizer: Tokenizer, tmp_path: Path) -> None:
    system = {"role": "system", "content": "the same long instructions " * 40}
    rows = [{"messages": [system, {"role": "user", "content": f"question {i}"}]} for i in range(50)]
    (tmp_path / "s.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    factory = PromptFactory(tokenizer, "s.jsonl", 500, base=tmp_path, cache="unique")
    assert len({tuple(factory.build(i).ids[:12]) for i in range(200)}) == 200


def test_turns_are_sent_as_sessions_with_their_recorded_answers(tokenizer: Tokenizer, folder: Path) -> None:
    rows = [*ROWS["sharegpt.jsonl"], *ROWS["openai.jsonl"], *ROWS["mt.jsonl"]]
    (folder / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    factory = PromptFactory(tokenizer, "mixed.jsonl", None, turns=2, base=folder)
    assert [contents(prompt) for prompt in factory.session(0)] == [["q1"], ["q1", "a1", "q2"]]
    assert [contents(prompt) for prompt in factory.session(1)] == [["S", "first"], ["S", "first", "said", "second"]]
    assert [(p.session, p.turn) for p in factory.session(1)] == [(1, 0), (1, 1)]
    assert contents(factory.session(2)[1]) == ["(Request 3) q1", "a1", "q2"]
    assert factory.notes == (
        "mixed.jsonl: 2 rows are sent as sessions of 2 turns with their recorded answers; "
        "1 rows with fewer are left out",
    )
    long = PromptFactory(tokenizer, "mixed.jsonl", 800, turns=2, base=folder, cache="unique").session(0)
    assert long[1].tokens == 800
    assert long[0].tokens < 800
    for prompt in long:
        assert prompt.messages is not None
        assert tokenizer.chat_ids(prompt.messages) == prompt.ids
    assert long[1].messages is not None
    assert long[1].messages[:1] == long[0].messages


def test_turns_without_answers_are_no_sessions(tokenizer: Tokenizer, folder: Path) -> None:
    with pytest.raises(UsageError, match=r"mt\.jsonl: no row has 2 requests with the answers between them"):
        PromptFactory(tokenizer, "mt.jsonl", None, turns=2, base=folder)
    assert PromptFactory(tokenizer, "mt.jsonl", None, base=folder).notes == (
        "mt.jsonl: 1 of 1 rows have more turns: the first is sent (turns: N sends N of each)",
    )
    assert PromptFactory(tokenizer, "openai.jsonl", None, base=folder).notes == ()
    with pytest.raises(UsageError, match="with turns for an API without chat"):
        PromptFactory(tokenizer, "sharegpt.jsonl", None, turns=2, templated=False, base=folder)


def message(**fields: Any) -> str:
    return json.dumps({"messages": [fields]})


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("", ": holds no line; expected one JSON object a line"),
        ("nope", ":1: is not JSON; expected one object a line"),
        ('{"prompt": "a"}\n[1]', ":2: is not an object; expected one with messages, conversations, turns or prompt"),
        (
            '{"x": 1}',
            ":1: has none of messages, conversations, turns, prompt, question, instruction, text",
        ),
        (
            message(role="king", content="a"),
            ":1: a message of the role 'king'; expected system, user, assistant or tool",
        ),
        (message(role="user"), ":1: a message of the user without text"),
        (message(role="system", content="a"), ":1: holds no message of the user that waits for an answer"),
        (message(role="assistant", content="a"), ":1: holds no message of the user that waits for an answer"),
        ('{"messages": ["hello"]}', ":1: a message is not an object"),
        (
            message(role="user", content=[{"type": "image_url", "image_url": {"url": "x"}}]),
            ":1: a message with a part of type 'image_url'; expected text only",
        ),
        (
            message(role="assistant", content="", tool_calls=[{"function": {"name": "f"}}]),
            ":1: tool_calls without a function's name and arguments",
        ),
        ('{"turns": []}', ":1: turns is not a list of texts"),
        ('{"turns": ["a", {"b": 1}]}', ":1: turns is not a list of texts"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": "look"}', ":1: tools is not a list of objects"),
        (
            '{"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"]}',
            ":1: holds a placeholder for its text; fetch the data with the data set's own script",
        ),
    ],
)
def test_a_bad_line_is_one_line(tmp_path: Path, data: str, expected: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(data + "\n" if data else "")
    with pytest.raises(UsageError) as caught:
        read_jsonl(path)
    assert str(caught.value) == f"{path}{expected}"


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.jsonl: cannot be read: No such file"):
        read_jsonl(tmp_path / "none.jsonl")
    (tmp_path / "b.jsonl").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(UsageError, match=r"b\.jsonl: is not UTF-8"):
        read_jsonl(tmp_path / "b.jsonl")
