"""Prompts have exactly the tokens asked for, are distinct, and are the same every time."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrig.errors import UsageError
from specrig.model.cell import expand
from specrig.model.sweep import parse_sweep
from specrig.tokens import corpus
from specrig.tokens import tokenizer as tokenizers
from specrig.tokens.prompts import PHRASE, Prompt, PromptFactory, for_cell, read_jsonl
from specrig.tokens.tokenizer import Tokenizer

KINDS = ("questions", "prose", "code", "repeat")


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    return tokenizers.load(tokenizer_dir)


def exact(tokenizer: Tokenizer, prompt: Prompt, tokens: int, thinking: bool = False) -> None:
    """The ids, and the messages templated and encoded again, have exactly the tokens asked for."""
    assert prompt.tokens == len(prompt.ids) == tokens
    assert prompt.messages is not None
    assert tokenizer.chat_ids(prompt.messages, thinking) == prompt.ids
    assert tokenizer.encode(prompt.text) == prompt.ids


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_exact_to_the_token(tokenizer: Tokenizer, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(KINDS))
    tokens = data.draw(st.one_of(st.integers(48, 400), st.integers(400, 6_000)))
    thinking = data.draw(st.booleans())
    cache = data.draw(st.sampled_from(["flush", "unique", "shared"]))
    factory = PromptFactory(tokenizer, kind, tokens, data.draw(st.integers(0, 5)), thinking, cache)
    exact(tokenizer, factory.build(data.draw(st.integers(0, 2_000))), tokens, thinking)


@pytest.mark.parametrize(("kind", "turns"), [("questions", None), ("agentic", 3)])
def test_many_at_once_are_the_same_as_one_by_one(tokenizer: Tokenizer, kind: str, turns: int | None) -> None:
    many = PromptFactory(tokenizer, kind, 700, cache="unique", turns=turns).sessions(40)
    one = PromptFactory(tokenizer, kind, 700, cache="unique", turns=turns)
    assert many == [one.session(index) for index in range(40)]
    assert len(many[0]) == (turns or 1)


@pytest.mark.parametrize("kind", ["prose", "code", "repeat"])
def test_very_short_ones(tokenizer: Tokenizer, kind: str) -> None:
    for tokens in range(14, 64, 3):
        exact(tokenizer, PromptFactory(tokenizer, kind, tokens).build(tokens), tokens)


def test_transformers_counts_the_same(tokenizer: Tokenizer, tokenizer_dir: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs: Any = transformers.AutoTokenizer.from_pretrained(str(tokenizer_dir), local_files_only=True)
    for kind in KINDS:
        prompt = PromptFactory(tokenizer, kind, 3_000).build(1)
        ids = theirs.apply_chat_template([*(prompt.messages or ())], add_generation_prompt=True, enable_thinking=False)[
            "input_ids"
        ]
        assert ids == prompt.ids
        assert len(ids) == 3_000


@pytest.mark.parametrize("kind", [*KINDS, "agentic"])
def test_the_same_every_time_and_another_for_another_seed(tokenizer: Tokenizer, kind: str) -> None:
    def first(seed: int) -> list[str]:
        factory = PromptFactory(tokenizer, kind, 2_000, seed, turns=2 if kind == "agentic" else None)
        return [factory.build(i).id for i in (3, 0, 5)]

    assert first(1) == first(1)
    if kind != "repeat":
        assert not set(first(1)) & set(first(2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [120, 700])
@pytest.mark.parametrize("cache", ["flush", "unique", "shared"])
def test_every_index_is_another_prompt(tokenizer: Tokenizer, kind: str, tokens: int, cache: str) -> None:
    factory = PromptFactory(tokenizer, kind, tokens, cache=cache)
    prompts = [factory.build(i) for i in range(60)]
    assert len({p.text for p in prompts}) == len({p.id for p in prompts}) == 60


def common(a: Prompt, b: Prompt) -> int:
    return next((i for i, (x, y) in enumerate(zip(a.ids, b.ids, strict=False)) if x != y), len(a.ids))


@pytest.mark.parametrize("kind", KINDS)
def test_unique_prompts_share_only_the_template(tokenizer: Tokenizer, kind: str) -> None:
    factory = PromptFactory(tokenizer, kind, 600, cache="unique")
    other = PromptFactory(tokenizer, kind, 600, cache="unique", salt="another cell")
    prompts = [f.build(i) for f in (factory, other) for i in range(6)]
    # <|im_start|>user\n and the first hex digits of the tag
    assert max(common(a, b) for i, a in enumerate(prompts) for b in prompts[:i]) <= 3 + 4


@pytest.mark.parametrize("kind", ["questions", "prose", "code"])
def test_shared_prompts_share_most_and_not_all(tokenizer: Tokenizer, kind: str) -> None:
    factory = PromptFactory(tokenizer, kind, 2_000, cache="shared")
    prompts = [factory.build(i) for i in range(8)]
    shared = [common(a, b) for i, a in enumerate(prompts) for b in prompts[:i]]
    assert min(shared) > 1_300
    assert max(shared) < 1_990


def test_eight_long_prompts_share_no_text(tokenizer: Tokenizer) -> None:
    factory = PromptFactory(tokenizer, "prose", 100_000)
    texts = [factory.build(i).text for i in range(8)]
    for i, text in enumerate(texts):
        for at in range(1_000, len(text) - 1_000, len(text) // 12):
            piece = text[at : at + 200]
            assert [j for j, other in enumerate(texts) if piece in other] == [i]


def test_natural_length_and_categories(tokenizer: Tokenizer) -> None:
    factory = PromptFactory(tokenizer, "questions", None)
    count = len(corpus.questions())
    prompts = [factory.build(i) for i in range(count + 5)]
    assert {p.category for p in prompts} == {q.category for q in corpus.questions()}
    assert len({p.text for p in prompts}) == count + 5
    assert {p.messages[0]["content"] for p in prompts[:count] if p.messages} == {q.text for q in corpus.questions()}


def test_repeat_is_periodic_and_says_so(tokenizer: Tokenizer) -> None:
    prompt = PromptFactory(tokenizer, "repeat", 500).build(0)
    assert prompt.periodic
    assert prompt.text.count(PHRASE) >= 9
    own = PromptFactory(tokenizer, "repeat", 500, phrase="one two three four. ").build(0)
    assert own.text.count("one two three four. ") > 60
    assert not PromptFactory(tokenizer, "prose", 500).build(0).periodic


@pytest.mark.parametrize("phrase", ["你好世界，", "😀", "1", "-- ", "a\nb\n", "ünïcödé wörds "])
def test_any_phrase_is_cut_to_length(tokenizer: Tokenizer, phrase: str) -> None:
    for tokens in (100, 777):
        exact(tokenizer, PromptFactory(tokenizer, "repeat", tokens, phrase=phrase).build(0), tokens)


def test_an_agentic_session_grows_to_its_length(tokenizer: Tokenizer) -> None:
    factory = PromptFactory(tokenizer, "agentic", 4_096, turns=4)
    session = factory.session(2)
    assert [p.tokens for p in session] == [1_024, 2_048, 3_072, 4_096]
    assert [(p.session, p.turn) for p in session] == [(2, 0), (2, 1), (2, 2), (2, 3)]
    for earlier, later in itertools.pairwise(session):
        assert earlier.messages is not None
        assert later.messages is not None
        assert later.messages[: len(earlier.messages)] == earlier.messages
        assert [m["role"] for m in later.messages[len(earlier.messages) :]] == ["assistant", "tool"]
        # all but the generation prompt is a prefix that the server's cache can hold
        assert common(earlier, later) >= earlier.tokens - 8
    for prompt in session:
        exact(tokenizer, prompt, prompt.tokens)
    assert factory.build(2 * 4 + 3) == session[3]


def test_lengths_without_room(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match=r"^prompt_tokens: 12 asked for prompts prose; the chat template .* have 12"):
        PromptFactory(tokenizer, "prose", 12).build(0)
    with pytest.raises(UsageError, match=r"^prompt_tokens: 20 asked for prompts questions; the shortest has \d+ after"):
        PromptFactory(tokenizer, "questions", 20).build(0)
    with pytest.raises(UsageError, match=r"^prompt_tokens: 300 asked for 4 agentic turns, so turn 1 has 75, and"):
        PromptFactory(tokenizer, "agentic", 300, turns=4).build(0)
    with pytest.raises(UsageError, match="nothing given for prompts prose"):
        PromptFactory(tokenizer, "prose", None)
    with pytest.raises(UsageError, match="saw 'verse'; expected one of questions"):
        PromptFactory(tokenizer, "verse", 100)


def test_plain_text_for_a_completions_api(tokenizer: Tokenizer) -> None:
    prompt = PromptFactory(tokenizer, "prose", 300, templated=False).build(0)
    assert prompt.messages is None
    assert tokenizer.encode(prompt.text, special=True) == prompt.ids
    assert prompt.tokens == 300
    assert "<|im_start|>" not in prompt.text


ROWS = {
    "openai.jsonl": [{"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "first"}]}],
    "sharegpt.jsonl": [
        {
            "conversations": [
                {"from": "human", "value": "q1"},
                {"from": "gpt", "value": "a1"},
                {"from": "human", "value": "q2"},
            ]
        }
    ],
    "speed.jsonl": [{"category": "code", "turns": ["t1", "t2"]}],
    "prompt.jsonl": [{"prompt": "plain"}, {"question": "asked"}],
    "parts.jsonl": [{"messages": [{"role": "user", "content": [{"type": "text", "text": "part"}]}]}],
}


def write(folder: Path, name: str) -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(r) + "\n" for r in ROWS[name]) + "\n")
    return path


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("openai.jsonl", [["S", "first"]]),
        ("sharegpt.jsonl", [["q1"]]),
        ("speed.jsonl", [["t1"]]),
        ("prompt.jsonl", [["plain"], ["asked"]]),
        ("parts.jsonl", [["part"]]),
    ],
)
def test_shapes_of_a_jsonl_file(tmp_path: Path, name: str, expected: list[list[str]]) -> None:
    rows = read_jsonl(write(tmp_path, name))
    assert [[m["content"] for m in row] for row in rows] == expected
    assert all(row[-1]["role"] == "user" for row in rows)


@pytest.mark.parametrize("name", sorted(ROWS))
def test_a_jsonl_row_is_brought_to_length(tokenizer: Tokenizer, tmp_path: Path, name: str) -> None:
    write(tmp_path, name)
    own = PromptFactory(tokenizer, name, None, base=tmp_path).build(0)
    factory = PromptFactory(tokenizer, name, 900, base=tmp_path)
    for index in range(3):
        exact(tokenizer, factory.build(index), 900)
    assert own.tokens < 60
    assert own.messages is not None
    assert own.messages[-1]["content"] in factory.build(0).text
    with pytest.raises(UsageError, match=rf"10 asked for prompts {name}; row 1 alone has {own.tokens} tokens"):
        PromptFactory(tokenizer, name, 10, base=tmp_path).build(0)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("", "holds no line; expected one JSON object a line"),
        ("nope\n", ":1: is not JSON; expected one object a line"),
        ('{"prompt": "a"}\n[1]\n', ":2: is not an object; expected one with messages"),
        ('{"x": 1}\n', ":1: has none of messages, conversations, turns"),
        ('{"messages": [{"role": "king", "content": "a"}]}\n', ":1: a message without a known role and text"),
        ('{"messages": [{"role": "system", "content": "a"}]}\n', ":1: holds no message of the user"),
    ],
)
def test_files_that_hold_no_prompts(tmp_path: Path, data: str, expected: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(data)
    with pytest.raises(UsageError) as caught:
        read_jsonl(path)
    assert expected in str(caught.value)


def test_cells_of_one_shape_get_one_set_of_prompts(tokenizer: Tokenizer) -> None:
    text = """\
name: n
model: M
seed: 4
workloads:
  - {name: w, prompts: prose, prompt_tokens: 500, output_tokens: 8, concurrency: [1, 2], cache: %s}
"""
    one, two = (for_cell(tokenizer, c).build(0) for c in expand(parse_sweep(text % "flush")))
    assert one == two
    one, two = (for_cell(tokenizer, c).build(0) for c in expand(parse_sweep(text % "unique")))
    assert one.ids[:12] != two.ids[:12]


def test_corpora_are_what_the_index_says() -> None:
    corpus.verify()
    assert set(corpus.hashes()) == {"prose", "code", "questions"}
    assert len(corpus.questions()) == 80
    assert len({q.text for q in corpus.questions()}) == 80
    assert sum(f.stat().st_size for f in corpus.FOLDER.iterdir()) < 2_000_000


def test_a_corpus_begins_again_at_its_end() -> None:
    prose = corpus.corpus("prose")
    assert prose.text(prose.chars - 10, prose.chars + 10) == prose.text(prose.chars - 10, prose.chars) + prose.text(
        0, 10
    )
    assert prose.text(3 * prose.chars, 3 * prose.chars + 40) == prose.text(0, 40)
    # over the border of two parts
    border = 684_429
    assert prose.text(border - 5, border + 5) == prose.text(border - 5, border) + prose.text(border, border + 5)
