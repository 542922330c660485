"""Prompts of an exact length after the chat template, of real text, the same for every method.

A prompt is cut from a text at a place given by seed and index; the cut is moved until the whole prompt, templated and
encoded again, has exactly the tokens asked for. Ids (native API) and messages (chat API) are thus the same prompt.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import functools
import hashlib
import itertools
import json
import os
import random
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specrig.errors import UsageError
from specrig.model.cell import Cell, prompt_key
from specrig.model.sweep import KINDS
from specrig.tokens import agent, corpus
from specrig.tokens.rows import Row, read_jsonl
from specrig.tokens.tokenizer import Message, Tokenizer

PHRASE = (
    "The benchmark keeps the window full: every sentence of this paragraph comes again, word for word, until the "
    "prompt has the length that was asked for, and nothing in it is new after the first time it was read. "
)
"""What `prompts: repeat` tiles when the sweep names no phrase of its own."""

_PAD = (
    "Please read the task below with care and think about what is really being asked before you begin to write. "
    "Answer in full sentences, keep to the point, say what you take for granted, and name anything that you are not "
    "sure about. Where a result is a number, give its unit. Where several answers are possible, choose one and say "
    "why you chose it. There is no need to repeat the task, to greet the reader or to close with a summary of it. "
) * 4
_ASKS = {
    "prose": (
        "Who speaks in the passage above, and what do they want?",
        "Describe what happens in the passage above and how the people in it feel about it.",
        "Continue the passage above in the same manner for several paragraphs.",
        "What does the passage above tell us about the society it describes?",
        "Rewrite the end of the passage above in plain modern English.",
    ),
    "code": (
        "Explain what the code above does, function by function.",
        "Write tests for the code above that would catch its most likely mistakes.",
        "Rewrite the last function above so that it is easier to read, and explain each change.",
        "What can go wrong when the code above runs in several threads at once?",
        "Document the code above for a new colleague.",
    ),
    "repeat": ("What does the text above say, and how often does it say it?",),
}
_SLACK = 40
"""Content tokens from which on a context with its label is put before a question; below it, plain padding."""
_ATTEMPTS = 400
_ENCODINGS = 60

_FILLERS = (
    "-", ". ", "- ", "-- ", "Q: ", "Q. ", "So: ", "Now: ", "Next: ", "A task: ", "One task: ", "Here: ", "Here it is: ",
    "Here is a task: ", "Here is one more task: ", "Please answer: ", "Please answer this: ", "And now this one: ",
    "Please read it well: ", "Think first. Then answer: ",
)  # fmt: skip
_ENDINGS = (".", "!", "?", " -", " .")
"""Short beginnings, and endings, that make up a token or a few where a sentence of padding has no room."""
_TRIED = 256
"""Lengths tried to tell the least that works."""


@dataclass(frozen=True, kw_only=True)
class AnyPrompt:
    """One prompt, which a tokenizer may not have seen.

    Attributes:
        id: equal for equal prompts, over all methods, launches and runs that have a tokenizer, or that have none.
        ids: token ids after the chat template, what the native API is sent; None = not known.
        messages: the same as chat messages; None where the prompt is plain text.
        tools: the functions that the chat template is given with them; None without.
        text: the templated text, what a completions API is sent; None = not known.
        tokens: len(ids).
        category: of the question, where there is one.
        session, turn: of a session's prompt; else None.
    """

    id: str
    ids: list[int] | None
    messages: tuple[Message, ...] | None
    text: str | None
    tokens: int | None
    category: str | None = None
    tools: tuple[Mapping[str, Any], ...] | None = None
    session: int | None = None
    turn: int | None = None


@dataclass(frozen=True, kw_only=True)
class Prompt(AnyPrompt):
    """One prompt that the model's tokenizer has counted.

    Attributes:
        periodic: a phrase tiled; acceptance on it says little about real text.
        question_tokens: tokens of the question inside the prompt.
    """

    ids: list[int]
    text: str
    tokens: int
    periodic: bool
    question_tokens: int


class _Source:
    """A cyclic text with the ends of its tokens, found piece by piece as they are needed.

    The counts are those of pieces encoded on their own, so they may be off by one where pieces meet: they say where
    to cut, and the whole prompt is then encoded to see.
    """

    PIECE = 16384

    def __init__(self, tokenizer: Tokenizer, chars: int, read: Callable[[int, int], str]) -> None:
        self.chars = chars
        self.read = read
        self._tokenizer = tokenizer
        self._ends: dict[int, list[int]] = {}

    def ends(self, piece: int) -> list[int]:
        """Return the character ends, from the text's begin, of the tokens of a piece (piece numbers do not wrap)."""
        count = -(-self.chars // self.PIECE)
        turn, own = divmod(piece, count)
        if own not in self._ends:
            start = self._border(own)
            _, ends = self._tokenizer.spans(self.read(start, self._border(own + 1)))
            self._ends[own] = [start + e for e in ends]
        ends = self._ends[own]
        return ends if turn == 0 else [turn * self.chars + e for e in ends]

    def _border(self, own: int) -> int:
        """Where a piece begins: where a word ends, as tokens seldom reach over that."""
        at = own * self.PIECE
        return self.word_end(at) if at < self.chars else self.chars + self.word_end(0)

    def walk(self, start: int, tokens: int) -> int:
        """Return the character at which the `tokens`-th token after character `start` ends."""
        count = -(-self.chars // self.PIECE)
        turn, at = divmod(start, self.chars)
        own = at // self.PIECE
        piece = turn * count + (own - 1 if at < self._border(own) else own)
        ends = self.ends(piece)
        position = bisect_left(ends, start + 1)
        while position + tokens > len(ends):
            tokens -= len(ends) - position
            piece, position = piece + 1, 0
            ends = self.ends(piece)
        return ends[position + tokens - 1]

    def word_start(self, at: int) -> int:
        """Return the first character after `at` that begins a word; at + 1 where there is none near."""
        text = self.read(at, at + 4000)
        for i in range(1, len(text)):
            if text[i].isalnum() and not text[i - 1].isalnum() and text[i - 1] not in "'_":
                return at + i
        return at + 1

    def word_end(self, at: int) -> int:
        """Return the first character from `at` on before which a word ends; `at` where there is none near."""
        return next((i for i in range(at, at + 200) if self.ends_word(i)), at)

    def opening(self, at: int) -> int:
        """Return the first character after `at` that begins a paragraph, or else a sentence, or a word."""
        text = self.read(at, at + 4000)
        for mark in ("\n\n", ". "):
            found = text.find(mark)
            if found != -1:
                rest = text[found:].lstrip("\n. ")
                if rest:
                    return at + len(text) - len(rest)
        return self.word_start(at)

    def ends_word(self, at: int) -> bool:
        """Return whether a cut before character `at` leaves a whole word behind it, followed by white space."""
        around = self.read(at - 1, at + 1)
        return around[0].isalnum() and around[1].isspace()


class _NoRoom(Exception):
    """No prompt of the length asked for; `least` is a length below which none can be."""

    def __init__(self, why: str, least: int) -> None:
        super().__init__(why)
        self.least = least


@dataclass(frozen=True, kw_only=True)
class _Frame:
    """The messages around the text that is cut, and what the prompt says of itself."""

    wrap: Callable[[str], tuple[Message, ...]]
    ask: str = ""
    category: str | None = None
    tools: agent.Tools | None = None


def _fixed(messages: tuple[Message, ...]) -> Callable[[str], tuple[Message, ...]]:
    return lambda _text: messages


def _one(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)


class PromptFactory:
    """Builds prompts by index: a pure function of its arguments and the corpora.

    Args:
        tokenizer: the model's; None makes no prompt but those of :meth:`own`.
        kind: questions, prose, code, repeat, agentic, or the path of a .jsonl file.
        tokens: exact length after the chat template; None = the prompt's own (questions and .jsonl only).
            Of a session the length of the last turn. Turn t of T has round(tokens * (t + 1) / T) where it is agentic,
            or as little as its messages take where that is more, and a file's what its own messages have.
        seed: other seeds choose other texts.
        thinking: passed to the chat template.
        cache: `unique` begins every prompt with a tag no other prompt (of this seed and salt) has; `shared` gives all
            prompts the same first three quarters, so that the prefix cache is warm on purpose.
        salt: told into the tag of `unique`, so that two cells of one launch share no prefix.
        templated: False for a completions API: no chat template, plain text (with BOS where the tokenizer adds one).
        turns: of a session; index = session * turns + turn. None: 4 of an agentic one, and no sessions of a file.
        phrase: what `repeat` tiles.
        base: the folder that a .jsonl path is relative to.

    Raises:
        UsageError: no such kind, no length where the kind needs one, or a file that cannot be used so.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        kind: str,
        tokens: int | None,
        seed: int = 1,
        thinking: bool = False,
        cache: str = "flush",
        *,
        salt: str = "",
        templated: bool = True,
        turns: int | None = None,
        phrase: str | None = None,
        base: Path | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.kind = kind
        self.tokens = tokens
        self.seed = seed
        self.thinking = thinking
        self.cache = cache
        self.salt = salt
        self.templated = templated
        rows = kind.endswith(".jsonl")
        self.turns = (turns or 4) if kind == "agentic" else (turns or 1) if rows else 1
        self.phrase = phrase or PHRASE
        if kind not in (*_ASKS, "questions", "agentic") and not rows:
            raise UsageError(f"prompts: saw {kind!r}; expected one of {', '.join(KINDS)}, or a .jsonl file")
        if tokens is None and kind != "questions" and not rows:
            raise UsageError(f"prompt_tokens: nothing given for prompts {kind}; expected a length")
        if (kind == "agentic" or self.turns > 1) and not templated:
            raise UsageError(f"prompts: saw {kind} with turns for an API without chat; expected a kind without turns")
        self.notes: tuple[str, ...] = ()
        self._rows = self._read((base or Path()) / kind) if rows else ()
        if kind == "agentic":
            self.notes = (f"agentic: {self._style.note}",)
        self._sessions: dict[int, list[Prompt]] = {}

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            UsageError: none was given.
        """
        if self._tokenizer is None:
            raise UsageError(
                f"prompts {self.kind} cannot be cut to a length without the model's tokenizer; give --tokenizer DIR"
            )
        return self._tokenizer

    @property
    def periodic(self) -> bool:
        """Whether the prompts are a phrase tiled."""
        return self.kind == "repeat"

    def build(self, index: int) -> Prompt:
        """Return prompt `index`.

        Raises:
            UsageError: the length asked for has no room for what the prompt has to hold; says the least that has.
        """
        if index < 0:
            raise ValueError(f"index {index}; expected 0 or more")
        try:
            return self._build(index)
        except _NoRoom as error:
            least = self._least(index, error.least)
            raise UsageError(
                f"prompt_tokens: {self.tokens} asked for prompts {self.kind}; {error}; expected {least}"
            ) from None

    def own(self, index: int) -> AnyPrompt:
        """Return prompt `index` at its own length, as :meth:`build` makes it there, but not tokenized.

        Raises:
            UsageError: a length is asked for, or the kind has none of its own.
        """
        if self.tokens is not None:
            raise UsageError(f"prompts {self.kind} of {self.tokens} tokens have no length of their own")
        if self._rows:
            if self.turns > 1:
                raise UsageError(f"prompts {self.kind} with turns need the model's tokenizer; give --tokenizer DIR")
            tag, frame, _ = self._asked_row(index)
        else:
            tag, ask, category = self._asked_question(index)
            frame = _Frame(wrap=_one, ask=ask, category=category)
        messages = frame.wrap(f"{tag}{frame.ask}")
        text = str(messages[-1]["content"])
        digest = hashlib.sha256(json.dumps([messages, self.thinking, self.templated]).encode()).hexdigest()[:12]
        return AnyPrompt(
            id=f"{'jsonl' if self._rows else self.kind}-{digest}",
            ids=None,
            messages=messages if self.templated else None,
            text=None if self.templated else text,
            tokens=None,
            tools=tuple(frame.tools) if frame.tools and self.templated else None,
            category=frame.category,
        )

    def session(self, index: int) -> list[Prompt]:
        """Return the prompts of session `index`, one a turn; of kinds without turns the one prompt."""
        return [self.build(index * self.turns + turn) for turn in range(self.turns)]

    def sessions(self, count: int, start: int = 0) -> list[list[Prompt]]:
        """Return `count` sessions, from number `start` on, by as many threads as there are processors.

        They are the same as one by one. Nearly all the time goes into encoding, during which the interpreter is free.
        """
        threads = min(len(os.sched_getaffinity(0)), count // 8)
        if threads < 2:
            return [self.session(index) for index in range(start, start + count)]
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            return list(pool.map(self.session, range(start, start + count)))

    def _build(self, index: int) -> Prompt:
        if self.kind == "questions":
            return self._question(index)
        if self.kind in _ASKS:
            return self._passage(index)
        session, turn = divmod(index, self.turns)
        if session not in self._sessions:
            if len(self._sessions) > 64:
                self._sessions.clear()
            made = self._replayed(session) if self._rows else self._scripted(session)
            self._sessions[session] = made
            return made[turn]
        return self._sessions[session][turn]

    def _least(self, index: int, least: int) -> str:
        """Return the least length that works, found by trying from a lower bound on."""
        other = copy.copy(self)
        first = max(least, self._target() + 1)
        for tokens in range(first, first + _TRIED):
            other.tokens, other._sessions = tokens, {}
            with contextlib.suppress(_NoRoom):
                other._build(index)
                return f"{tokens} or more"
        return f"more than {first + _TRIED}"

    # kinds

    def _passage(self, index: int) -> Prompt:
        ask = _ASKS[self.kind][index % len(_ASKS[self.kind])]
        if self.cache == "shared":  # what tells the prompts apart comes last
            ask = f"{index + 1}. {ask}"
        target = self._target()
        source = self._source(self.kind)
        start = 0 if self.kind == "repeat" else self._place(source, target, index)
        opening = "```python\n" if self.kind == "code" else ""
        closing = "\n```\n\n" if self.kind == "code" else " [...]\n\n"
        tag = self._tag(index)
        label = f"{tag}Text{self._number(index)}:\n\n"
        if self._empty(f"{label}{opening}{closing}{ask}") + _SLACK <= target:
            head, tail = f"{label}{opening}", f"{closing}{ask}"
        else:  # no room for a question: the text alone
            short = label if self.kind == "repeat" and self._empty(label) + 8 <= target else tag
            head, tail, ask = short, "", ""
        return self._cut(_Frame(wrap=_one, ask=ask), index, target, source, start, head, tail)

    def _question(self, index: int) -> Prompt:
        tried = []
        for step in range(len(corpus.questions())):
            tag, ask, category = self._asked_question(index, step)
            frame = _Frame(wrap=_one, ask=ask, category=category)
            bare = self._finish(frame, f"{tag}{ask}")
            if self.tokens is None or bare.tokens == self.tokens:
                return bare
            tried.append(bare.tokens)
            found = self._around(frame, index, self.tokens, tag, bare.tokens)
            if found is not None:
                return found
        raise _NoRoom(f"the shortest has {min(tried)} after the chat template", min(tried))

    def _asked_question(self, index: int, step: int = 0) -> tuple[str, str, str | None]:
        """Return the tag, the text and the category of the question that is `step` after prompt `index`'s own."""
        everything = corpus.questions()
        order = list(range(len(everything)))
        random.Random(f"specrig/questions/{self.seed}").shuffle(order)
        question = everything[order[(index + step) % len(order)]]
        label = f"Question {index + 1}: " if self.tokens is not None or index >= len(order) else ""
        return self._tag(index), f"{label}{question.text}", question.category

    def _around(self, frame: _Frame, index: int, target: int, tag: str, bare: int) -> Prompt | None:
        """Return the question with as much text before it as makes `target` tokens, or None where it has no room."""
        room = target - bare
        if room < 1:
            return None
        ask = frame.ask
        if room >= _SLACK:
            source = self._source("prose")
            start = self._place(source, target, index)
            head, tail = f"{tag}Background text{self._number(index)}:\n\n", f" [...]\n\n{ask}"
        else:
            fillers = [f"{filler}{ask}" for filler in _FILLERS] + [f"{ask}{filler}" for filler in _ENDINGS]
            for filled in fillers if room < _SLACK // 2 else ():
                if len(self._ids(frame.wrap(f"{tag}{filled}"), frame.tools)[0]) == target:
                    return self._finish(frame, f"{tag}{filled}")
            source = self._source("pad")
            start, head, tail = 0, tag, f"\n\n{ask}"
        try:
            return self._cut(frame, index, target, source, start, head, tail)
        except _NoRoom:
            return None

    def _read(self, path: Path) -> tuple[Row, ...]:
        """Return the rows that can be used, and say in `notes` what is sent of them."""
        everything = read_jsonl(path)
        asked = self.templated and self._tokenizer is not None and any(row.calls_tools for row in everything)
        if asked and not self._style.tools:
            raise UsageError(
                f"{path}: has tools or their results, and the chat template of {self.tokenizer.path} knows none; "
                "expected rows without them"
            )
        if self.turns == 1:
            more = sum(row.turns > 1 and row.single == 0 for row in everything)
            if more:
                rest = f"{more:,} of {len(everything):,} rows have more turns: the first is sent"
                self.notes = (f"{path.name}: {rest} (turns: N sends N of each)",)
            return everything
        rows = tuple(row for row in everything if len(row.ends) >= self.turns)
        if not rows:
            raise UsageError(
                f"{path}: no row has {self.turns} requests with the answers between them; expected conversations or "
                "messages with the assistant's answers, as those are what the later turns are sent with"
            )
        left = len(everything) - len(rows)
        self.notes = (
            f"{path.name}: {len(rows):,} rows are sent as sessions of {self.turns} turns with their recorded answers; "
            f"{left:,} rows with fewer are left out",
        )
        return rows

    def _asked_row(self, session: int) -> tuple[str, _Frame, tuple[int, ...]]:
        """Return the tag before the text that is asked, the row's messages around it, and where its requests end."""
        row = self._rows[session % len(self._rows)]
        ends = row.ends[: self.turns] if self.turns > 1 else (row.ends[row.single],)
        messages = row.messages[: ends[-1]]
        users = [at for at, message in enumerate(messages) if message["role"] == "user"]
        place = users[0] if self.turns > 1 else users[-1]
        again = f"(Request {session + 1}) " if session >= len(self._rows) else ""
        tag = self._tag(session)
        if place:  # the tag stands first in the prompt, and so before what its rows may share
            messages = ({**messages[0], "content": f"{tag}{messages[0]['content']}"}, *messages[1:])
            tag = ""

        def wrap(text: str) -> tuple[Message, ...]:
            whole = (*messages[:place], {**messages[place], "content": text}, *messages[place + 1 :])
            return whole if self.templated else _one("\n\n".join(str(m["content"]) for m in whole))

        ask = f"{again}{messages[place]['content']}"
        return tag, _Frame(wrap=wrap, ask=ask, category=row.category, tools=row.tools), ends

    def _replayed(self, session: int) -> list[Prompt]:
        """Return what is sent of a row: one prompt, or one a turn, each with the answers that the row has before it."""
        tag, frame, ends = self._asked_row(session)
        ask = frame.ask
        last = self._finish(frame, f"{tag}{ask}")
        if self.tokens is not None and last.tokens != self.tokens:
            found = self._around(frame, session, self.tokens, tag, last.tokens)
            if found is None:
                number = session % len(self._rows) + 1
                raise _NoRoom(f"row {number} alone has {last.tokens} tokens after the chat template", last.tokens)
            last = found
        if self.turns == 1:
            return [last]
        sent = last.messages or ()
        earlier = [self._finish(replace(frame, wrap=_fixed(sent[:end])), "") for end in ends[:-1]]
        return [replace(prompt, session=session, turn=turn) for turn, prompt in enumerate([*earlier, last])]

    def _scripted(self, session: int) -> list[Prompt]:
        """Return a session's prompts: before each turn but the first a scripted answer and a tool result are added.

        The answers are scripted, not the model's own, so that every method gets the same prompts.
        """
        prompts: list[Prompt] = []
        final = self._target()
        source = self._source("code")
        start = self._place(source, final, session)
        for turn in range(self.turns):
            earlier = prompts[-1].messages or () if prompts else ()
            prompts.append(self._grown(session, turn, earlier, source, start))
            start = source.opening(start + final * 5 // self.turns)
        return prompts

    def _grown(self, session: int, turn: int, earlier: tuple[Message, ...], source: _Source, start: int) -> Prompt:
        final = self._target()
        target = round(final * (turn + 1) / self.turns)
        style = self._style
        shared = self.cache == "shared"
        which = 0 if shared else session  # where the beginning is shared, what tells the sessions apart comes last
        task = agent.TASKS[(which + self.seed) % len(agent.TASKS)]
        step = which + turn - 1
        number = f"Session {session + 1}."
        mark = "" if shared else self._tag(session) or f"{number} "
        head, tail = "", "\n[end]"
        if not turn:
            head = f"{task}\n\nThe file to begin with:\n\n"
            tail += f"\n{number}" if shared else ""

        def wrap(text: str) -> tuple[Message, ...]:
            if not turn:
                return agent.opening(style, mark, text)
            return (*earlier, agent.called(style, step, turn), agent.result(style, step, turn, text))

        frame = _Frame(wrap=wrap, ask=task, tools=agent.tools(mark) if style.tools else None)
        try:
            prompt = self._cut(frame, session, target, source, start, head, tail, share=shared and not turn)
        except _NoRoom as error:
            if turn + 1 == self.turns:
                raise _NoRoom(
                    f"the messages of turn {turn + 1} take {error.least - 1} before any text of a file", error.least
                ) from None
            prompt = self._cut(frame, session, error.least + _SLACK // 4, source, start, head, tail, share=False)
        return replace(prompt, session=session, turn=turn)

    @functools.cached_property
    def _style(self) -> agent.Style:
        return agent.style_of(self.tokenizer, self.thinking)

    # parts

    def _target(self) -> int:
        assert self.tokens is not None
        return self.tokens

    def _tag(self, index: int) -> str:
        if self.cache != "unique":
            return ""
        return hashlib.sha256(f"{self.seed}/{self.salt}/{index}".encode()).hexdigest()[:12] + "\n\n"

    def _number(self, index: int) -> str:
        return "" if self.cache == "shared" else f" {index + 1}"

    def _source(self, kind: str) -> _Source:
        return _source(self.tokenizer, kind, self.phrase if kind == "repeat" else "")

    def _place(self, source: _Source, target: int, index: int) -> int:
        """Return where prompt `index` begins in a source: slots that do not overlap first, then shifted ones."""
        if self.cache == "shared":
            index = 0
        width = max(target * 5, 400)
        slots = max(source.chars // width, 1)
        base, order = _slots(f"specrig/place/{self.kind}/{self.seed}", source.chars, slots)
        around, slot = divmod(index, slots)
        return source.opening((base + order[slot] * width + around * 7919) % source.chars)

    def _ids(self, messages: tuple[Message, ...], tools: agent.Tools | None = None) -> tuple[list[int], str]:
        if self.templated:
            text = self.tokenizer.render(messages, self.thinking, tools=tools)
            return self.tokenizer.encode(text), text
        text = str(messages[-1]["content"])
        return self.tokenizer.encode(text, special=True), text

    def _empty(self, text: str) -> int:
        return len(self._ids(_one(text))[0])

    def _cut(
        self,
        frame: _Frame,
        index: int,
        target: int,
        source: _Source,
        start: int,
        head: str,
        tail: str,
        *,
        share: bool | None = None,
    ) -> Prompt:
        """Return head + a slice of the source + tail that has exactly `target` tokens once wrapped and encoded.

        Raises:
            _NoRoom: none has.
        """

        def count(text: str) -> int:
            return len(self._ids(frame.wrap(text), frame.tools)[0])

        bare = count(head + tail)
        if (self.cache == "shared" if share is None else share) and target - bare > 4 * _SLACK:
            stop = source.walk(start, (target - bare) * 3 // 4)
            for end in (source.word_end(stop), stop):  # a word may be longer than the room
                longer = f"{head}{source.read(start, end)} [...]\n\n"
                if target - (found := count(longer + tail)) >= _SLACK // 2:
                    head, bare, start = longer, found, source.opening(stop + (index + 1) * 1237)
                    break
        want = target - bare
        if want > 10 * _SLACK:  # what the text and its surroundings make of each other where they meet
            sample = source.read(start, source.word_end(source.walk(start, 2 * _SLACK)))
            want -= count(f"{head}{sample}{tail}") - bare - self.tokenizer.count(sample)
        encoded = 0
        for attempt in range(_ATTEMPTS):
            whole_words = attempt < _ATTEMPTS // 2  # a text without spaces is cut between characters in the end
            if want < 1 or encoded == _ENCODINGS:
                break
            stop = source.walk(start, want)
            if source.ends_word(stop) or not whole_words:
                messages = frame.wrap(f"{head}{source.read(start, stop)}{tail}")
                ids, text = self._ids(messages, frame.tools)
                encoded += 1
                if len(ids) == target:
                    return self._prompt(frame, messages, ids, text)
                want += target - len(ids)  # what the parts make of each other where they meet
                again = source.walk(start, max(want, 1))
                if again != stop and source.ends_word(again):
                    continue
            start = source.word_start(start) if whole_words else start + 1
        if 0 < target - bare < _SLACK:  # little room: character by character, from several places
            for place in range(start, start + 400, 10):
                for stop in range(place + 1, place + 12 * _SLACK):
                    text = f"{head}{source.read(place, stop)}{tail}"
                    found = count(text)
                    if found == target:
                        return self._finish(frame, text)
                    if found > target + 1:
                        break
        raise _NoRoom(
            f"the chat template and the fixed text already have {bare}, and no text makes up the rest", bare + 1
        )

    def _finish(self, frame: _Frame, text: str) -> Prompt:
        messages = frame.wrap(text)
        return self._prompt(frame, messages, *self._ids(messages, frame.tools))

    def _prompt(self, frame: _Frame, messages: tuple[Message, ...], ids: list[int], text: str) -> Prompt:
        digest = hashlib.sha256(json.dumps([text, self.templated]).encode()).hexdigest()[:12]
        return Prompt(
            id=f"{'jsonl' if self._rows else self.kind}-{len(ids)}-{digest}",
            ids=ids,
            messages=messages if self.templated else None,
            tools=tuple(frame.tools) if frame.tools and self.templated else None,
            text=text,
            tokens=len(ids),
            periodic=self.periodic,
            question_tokens=self.tokenizer.count(frame.ask) if frame.ask else 0,
            category=frame.category,
        )


@functools.lru_cache(maxsize=64)
def _slots(seed: str, chars: int, slots: int) -> tuple[int, tuple[int, ...]]:
    """Where the first slot of a source begins, and the order in which they are taken."""
    rng = random.Random(seed)
    base = rng.randrange(chars)
    order = list(range(slots))
    rng.shuffle(order)
    return base, tuple(order)


_SOURCES: dict[tuple[str, str, str], _Source] = {}


def _source(tokenizer: Tokenizer, kind: str, phrase: str) -> _Source:
    """Return the source of a kind for a tokenizer; kept, as finding token ends is what costs."""
    key = (f"{tokenizer.revision}/{id(tokenizer)}", kind, phrase)
    found = _SOURCES.get(key)
    if found is None:
        if len(_SOURCES) > 16:
            _SOURCES.clear()
        if kind in ("prose", "code"):
            text = corpus.corpus(kind)
            found = _Source(tokenizer, text.chars, text.text)
        else:
            own = phrase if kind == "repeat" else _PAD
            own = own if own[-1].isspace() else f"{own} "
            tiled = own * max(1, _Source.PIECE // len(own))

            def read(start: int, end: int) -> str:
                return "".join(
                    itertools.islice(itertools.cycle(tiled), start % len(tiled), start % len(tiled) + end - start)
                )

            found = _Source(tokenizer, len(tiled), read)
        _SOURCES[key] = found
    return found


def notes(tokenizer: Tokenizer | None, cells: Iterable[Cell], base: Path | None = None) -> tuple[str, ...]:
    """Return what is to be said of the cells' prompts: which part of a file's rows is sent, how tools are written.

    Of files that cannot be used nothing: their cells fail with the reason.
    """
    told = [cell for cell in cells if cell.prompts == "agentic" or cell.prompts.endswith(".jsonl")]
    found: dict[str, None] = {}
    for cell in {(cell.prompts, cell.turns, cell.api, cell.sampling.thinking): cell for cell in told}.values():
        with contextlib.suppress(UsageError):
            found.update(dict.fromkeys(for_cell(tokenizer, cell, base).notes))
    return tuple(found)


def texts(cells: Iterable[Cell], base: Path | None = None) -> dict[str, str]:
    """Return the SHA-256 of every text that prompts are made of, for the manifest: the corpora's and the cells' files'.

    Files that cannot be read are left out: their cells fail with the reason.
    """
    found = corpus.hashes()
    for name in dict.fromkeys(cell.prompts for cell in cells if cell.prompts.endswith(".jsonl")):
        with contextlib.suppress(OSError):
            found[name] = hashlib.sha256(((base or Path()) / name).read_bytes()).hexdigest()
    return found


def for_cell(
    tokenizer: Tokenizer | None, cell: Cell, base: Path | None = None, *, tokens: int | None = None
) -> PromptFactory:
    """Return the factory of a cell's prompts; `base` is the folder that a .jsonl path is relative to.

    `tokens` is another length than the cell's own, for requests that have each their own.
    """
    return PromptFactory(
        tokenizer,
        cell.prompts,
        tokens or cell.prompt_tokens,
        cell.seed,
        cell.sampling.thinking,
        cell.cache,
        salt=prompt_key(cell),
        templated=cell.api != "openai-completions",
        turns=cell.turns,
        phrase=cell.phrase,
        base=base,
    )
