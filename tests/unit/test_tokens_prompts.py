"""Prompts have exactly the tokens asked for, are distinct, and are the same every time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
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
from specrig.tokens.prompts import PHRASE, Prompt, PromptFactory, for_cell
from specrig.tokens.tokenizer import Tokenizer

KINDS = ("questions", "prose", "code", "repeat")


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    return tokenizers.load(tokenizer_dir)


def exact(tokenizer: Tokenizer, prompt: Prompt, tokens: int, thinking: bool = False) -> None:
    """The ids, and the messages templated and encoded again, have exactly the tokens asked for."""
    assert prompt.tokens == len(prompt.ids) == tokens
    assert prompt.messages is not None
    assert tokenizer.chat_ids(prompt.messages, thinking, tools=prompt.tools) == prompt.ids
    assert tokenizer.encode(prompt.text) == prompt.ids


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_exact_to_the_token(tokenizer: Tokenizer, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from((*KINDS, "agentic")))
    shortest = 600 if kind == "agentic" else 48
    tokens = data.draw(st.one_of(st.integers(shortest, 700), st.integers(700, 6_000), st.integers(6_000, 40_000)))
    thinking = data.draw(st.booleans())
    cache = data.draw(st.sampled_from(["flush", "unique", "shared"]))
    factory = PromptFactory(tokenizer, kind, tokens, data.draw(st.integers(0, 5)), thinking, cache)
    session = factory.session(data.draw(st.integers(0, 2_000)))
    assert session[-1].tokens == tokens
    for prompt in session:
        exact(tokenizer, prompt, prompt.tokens, thinking)


@pytest.mark.parametrize("cache", ["flush", "unique", "shared"])
@pytest.mark.parametrize("templated", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_every_short_length_from_the_least_on(tokenizer: Tokenizer, kind: str, templated: bool, cache: str) -> None:
    for thinking in (False, True) if templated else (False,):
        refused = {}
        for tokens in range(8, 61):
            factory = PromptFactory(tokenizer, kind, tokens, 1, thinking, cache, templated=templated)
            try:
                prompt = factory.build(0)
            except UsageError as error:
                refused[tokens] = str(error)
                continue
            if templated:
                exact(tokenizer, prompt, tokens, thinking)
            else:
                assert tokenizer.encode(prompt.text, special=True) == prompt.ids
                assert prompt.tokens == tokens
        least = 8 + len(refused)
        assert list(refused) == list(range(8, least))  # none beyond the first that fits
        assert all(words.endswith(f"; expected {least} or more") for words in refused.values())
        # the template is 12 tokens without thinking and 10 with it, the tag of unique 9 or 10
        room = (12 if not thinking else 10) if templated else 0
        if kind != "questions":
            assert least <= max(8, room + 1 + (10 if cache == "unique" else 0))


@pytest.mark.parametrize("kind", [*KINDS, "agentic"])
def test_the_longest(tokenizer: Tokenizer, kind: str) -> None:
    exact(tokenizer, PromptFactory(tokenizer, kind, 250_000, turns=2).session(1)[-1], 250_000)


@pytest.mark.parametrize(("kind", "turns"), [("questions", None), ("agentic", 3)])
def test_many_at_once_are_the_same_as_one_by_one(tokenizer: Tokenizer, kind: str, turns: int | None) -> None:
    many = PromptFactory(tokenizer, kind, 700, cache="unique", turns=turns).sessions(40)
    one = PromptFactory(tokenizer, kind, 700, cache="unique", turns=turns)
    assert many == [one.session(index) for index in range(40)]
    assert len(many[0]) == (turns or 1)


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


@pytest.mark.parametrize("kind", [*KINDS, "agentic"])
def test_hundreds_of_unique_prompts_differ_within_64_tokens(tokenizer: Tokenizer, kind: str) -> None:
    factory = PromptFactory(tokenizer, kind, 400, cache="unique", turns=1)
    assert len({tuple(factory.build(i).ids[:64]) for i in range(250)}) == 250


def test_other_processes_make_the_same_bytes(tokenizer_dir: Path) -> None:
    script = (
        "import sys, hashlib; from specrig.tokens.tokenizer import load; "
        "from specrig.tokens.prompts import PromptFactory; folder, *kinds = sys.argv[1:]; tokenizer = load(folder)\n"
        "for kind in kinds:\n"
        "    made = PromptFactory(tokenizer, kind, 700, 3, cache='unique').sessions(20)\n"
        "    print(hashlib.sha256(repr([[(p.id, p.ids, p.text) for p in one] for one in made]).encode()).hexdigest())"
    )
    kinds = [*KINDS, "agentic"]
    found = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", script, str(tokenizer_dir), *kinds]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found.append(done.stdout.split())
    assert found[0] == found[1]
    assert [len(line) for line in found[0]] == [64] * len(kinds)
    assert len(set(found[0])) == len(kinds)


@pytest.mark.parametrize("kind", KINDS)
def test_unique_prompts_share_only_the_template(tokenizer: Tokenizer, kind: str) -> None:
    factory = PromptFactory(tokenizer, kind, 600, cache="unique")
    other = PromptFactory(tokenizer, kind, 600, cache="unique", salt="another cell")
    prompts = [f.build(i) for f in (factory, other) for i in range(6)]
    # <|im_start|>user\n and the first hex digits of the tag
    assert max(common(a, b) for i, a in enumerate(prompts) for b in prompts[:i]) <= 3 + 4


@pytest.mark.parametrize("kind", ["questions", "prose", "code", "agentic"])
def test_shared_prompts_share_most_and_not_all(tokenizer: Tokenizer, kind: str) -> None:
    factory = PromptFactory(tokenizer, kind, 2_000, cache="shared", turns=1)
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


@pytest.mark.parametrize(
    ("kind", "tokens", "expected"),
    [
        ("prose", 12, r"the chat template and the fixed text already have 12, and .*; expected (13) or more"),
        ("questions", 20, r"the shortest has 30 after the chat template; expected (30) or more"),
        ("agentic", 300, r"the messages of turn 4 take \d+ before any text of a file; expected (\d+) or more"),
    ],
)
def test_lengths_without_room_name_the_least_that_has(
    tokenizer: Tokenizer, kind: str, tokens: int, expected: str
) -> None:
    with pytest.raises(UsageError) as caught:
        PromptFactory(tokenizer, kind, tokens).session(0)
    told = re.fullmatch(rf"prompt_tokens: {tokens} asked for prompts {kind}; {expected}", str(caught.value))
    assert told is not None
    least = int(told[1])
    exact(tokenizer, PromptFactory(tokenizer, kind, least).session(0)[-1], least)
    with pytest.raises(UsageError):
        PromptFactory(tokenizer, kind, least - 1).session(0)


def test_kinds_that_are_none(tokenizer: Tokenizer) -> None:
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
