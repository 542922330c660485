"""Prompts are exact with tokenizers and chat templates of other shapes than Qwen's."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import other_tokenizers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrig.errors import UsageError
from specrig.tokens import agent
from specrig.tokens import tokenizer as tokenizers
from specrig.tokens.prompts import Prompt, PromptFactory
from specrig.tokens.tokenizer import Tokenizer

SHAPES = ("metaspace", "bytes", "wordpiece", "words", "characters", "unigram")
TEMPLATES = ("strips", "no-system", "alternates", "thinks", "none")
KINDS = ("questions", "prose", "code", "repeat", "own.jsonl", "agentic")

Made = Callable[[str, str], Tokenizer]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("tokenizers")
    kept: dict[tuple[str, str], Tokenizer] = {}

    def make(shape: str, template: str) -> Tokenizer:
        if (shape, template) not in kept:
            kept[shape, template] = other_tokenizers.build(folder / f"{shape}-{template}", shape, template)
        return kept[shape, template]

    return make


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    (folder / "own.jsonl").write_text(json.dumps({"prompt": "What is a prime number, and is 91 one?"}) + "\n")
    return folder


def counted(tokenizer: Tokenizer, prompt: Prompt, thinking: bool) -> list[int]:
    """The ids that the prompt has when it is made again from what is sent of it."""
    if prompt.messages is None:
        return tokenizer.encode(prompt.text, special=True)
    return tokenizer.chat_ids(prompt.messages, thinking, tools=prompt.tools)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_stand_ins_are_what_they_are_called(made: Made, shape: str, template: str) -> None:
    tokenizer = made(shape, template)
    around = {"metaspace": 1, "unigram": 1, "bytes": 1, "wordpiece": 2}.get(shape, 0)
    assert len(tokenizer.encode("the house", special=True)) == len(tokenizer.encode("the house")) + around
    assert tokenizer.has_template is (template != "none")
    user = {"role": "user", "content": "  hello "}
    if template == "strips":
        assert "\nhello<|end|>" in tokenizer.render([user])
    if template == "no-system":
        with pytest.raises(UsageError, match="only user and assistant"):
            tokenizer.render([{"role": "system", "content": "s"}, user])
    if template == "alternates":
        with pytest.raises(UsageError, match="roles must alternate"):
            tokenizer.render([user, user])


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_exact_to_the_token(made: Made, base: Path, shape: str, template: str, data: st.DataObject) -> None:
    tokenizer = made(shape, template)
    kind = data.draw(st.sampled_from(KINDS if tokenizer.has_template else KINDS[:-1]))
    least = 2_500 if kind == "agentic" else 150
    tokens = data.draw(st.one_of(st.integers(least, least + 400), st.integers(least, 9_000)))
    thinking = data.draw(st.booleans())
    cache = data.draw(st.sampled_from(["flush", "unique", "shared"]))
    turns = 3 if kind == "agentic" else None
    templated = tokenizer.has_template
    factory = PromptFactory(tokenizer, kind, tokens, 1, thinking, cache, templated=templated, turns=turns, base=base)
    session = factory.session(data.draw(st.integers(0, 500)))
    assert session[-1].tokens == tokens
    for prompt in session:
        assert counted(tokenizer, prompt, thinking) == prompt.ids
        assert len(prompt.ids) == prompt.tokens


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_short_length_from_the_least_on(made: Made, base: Path, shape: str, template: str) -> None:
    """Every shape meets all three kinds, and every template does."""
    tokenizer = made(shape, template)
    kinds = (("prose", "flush"), ("code", "unique"), ("own.jsonl", "shared"))
    kind, cache = kinds[(SHAPES.index(shape) + TEMPLATES.index(template)) % len(kinds)]
    refused = []
    for tokens in range(8, 88):
        factory = PromptFactory(tokenizer, kind, tokens, cache=cache, templated=tokenizer.has_template, base=base)
        try:
            prompt = factory.build(0)
        except UsageError:
            refused.append(tokens)
            continue
        assert counted(tokenizer, prompt, False) == prompt.ids
        assert prompt.tokens == tokens
    assert refused == list(range(8, 8 + len(refused)))  # none beyond the first that fits
    assert len(refused) < 80


@pytest.mark.parametrize("shape", SHAPES)
def test_the_longest(made: Made, shape: str) -> None:
    tokenizer = made(shape, "strips")
    prompt = PromptFactory(tokenizer, "prose", 250_000).build(0)
    assert prompt.tokens == len(counted(tokenizer, prompt, False)) == 250_000


def test_a_session_is_written_as_the_template_has_it(made: Made, tokenizer_dir: Path) -> None:
    qwen = tokenizers.load(tokenizer_dir)
    assert agent.style_of(qwen, False) == agent.Style(tools=True, system=True)
    assert agent.style_of(made("bytes", "strips"), False) == agent.Style(tools=False, system=True)
    for template in ("no-system", "alternates"):
        assert agent.style_of(made("bytes", template), False) == agent.Style(tools=False, system=False)
    with_tools = PromptFactory(qwen, "agentic", 4_096, turns=4)
    assert with_tools.notes == ("agentic: tools, calls and results are written by the chat template",)
    session = with_tools.session(2)
    assert [p.tokens for p in session] == [1_024, 2_048, 3_072, 4_096]
    assert [(p.session, p.turn) for p in session] == [(2, 0), (2, 1), (2, 2), (2, 3)]
    for earlier, later in itertools.pairwise(session):
        assert earlier.messages is not None
        assert later.messages is not None
        assert later.messages[: len(earlier.messages)] == earlier.messages
        call, result = later.messages[len(earlier.messages) :]
        assert call["role"] == "assistant"
        (one,) = call["tool_calls"]  # type: ignore[misc]
        assert (result["role"], result["tool_call_id"]) == ("tool", one["id"])
        assert one["function"]["name"] in {tool["function"]["name"] for tool in agent.TOOLS}
        # all but the generation prompt is a prefix that the server's cache can hold
        assert later.ids[: earlier.tokens - 8] == earlier.ids[:-8]
        assert later.tools == earlier.tools == agent.tools("Session 3. ")
    assert session[-1].text.count("<tool_response>") == 3

    without = PromptFactory(made("bytes", "alternates"), "agentic", 6_000, turns=3)
    assert without.notes == (
        "agentic: the chat template knows no tools: calls and results are text of the assistant and the user",
    )
    last = without.session(0)[-1]
    assert last.tools is None
    assert last.messages is not None
    assert [m["role"] for m in last.messages] == ["user", "assistant", "user", "assistant", "user"]
    assert str(last.messages[0]["content"]).startswith(f"Session 1. {agent.SYSTEM}")
    assert '{"name": "search", "arguments": {"text": "def "}}' not in last.text
    assert '{"name": "read_file", "arguments": {"path": "src/main.py"}}' in last.text


def test_rows_with_tools_need_a_template_with_tools(made: Made, tmp_path: Path) -> None:
    row = {
        "messages": [
            {"role": "user", "content": "do"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
            {"role": "tool", "content": "done"},
        ]
    }
    (tmp_path / "t.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UsageError, match=r"t\.jsonl: has tools or their results, and the .* knows none"):
        PromptFactory(made("bytes", "strips"), "t.jsonl", None, base=tmp_path)
