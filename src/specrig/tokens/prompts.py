"""Prompts of an exact length after the chat template, of real text, the same for every method.

A prompt is cut from a text at a place given by seed and index; the cut is moved until the whole prompt, templated and
encoded again, has exactly the tokens asked for. Ids (native API) and messages (chat API) are thus the same prompt.
"""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import itertools
import json
import os
import random
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from specrig.errors import UsageError
from specrig.model.cell import Cell, prompt_key
from specrig.model.sweep import KINDS
from specrig.tokens import corpus
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

_SYSTEM = (
    "You are a careful engineer who works in steps. In each step you either call one tool or give the final answer. "
    "Tools: read_file(path), search(text), run(command). A call is one line of JSON in <tool_call> tags."
)
_TASKS = (
    "The nightly job fails now and then. Find out why from the sources and propose the smallest safe change.",
    "Find where this project reads its settings, and describe how a setting reaches the code that uses it.",
    "A user reports that a command hangs at its end. Read what is relevant and explain the cause.",
    "Review this module for mistakes in how it handles errors, and propose a patch for the worst one.",
    "Find out which parts of this module are safe to call from several threads, and prove it from the code.",
)
_STEPS = (
    ("I will look at the file that the task is about first.", "read_file", "src/main.py"),
    (
        "The entry point hands the work on, so I read the function it calls.",
        "read_file",
        "src/core.py",
    ),
    ("I want to see who else calls this before I judge it.", "search", "def "),
    ("That leaves the error path. I will run the tests that cover it.", "run", "python -m unittest -v"),
    ("One of the assumptions is still unproven; this should settle it.", "read_file", "src/errors.py"),
)


@dataclass(frozen=True, kw_only=True)
class AnyPrompt:
    """One prompt, which a tokenizer may not have seen.

    Attributes:
        id: equal for equal prompts, over all methods, launches and runs that have a tokenizer, or that have none.
        ids: token ids after the chat template, what the native API is sent; None = not known.
        messages: the same as chat messages; None where the prompt is plain text.
        text: the templated text, what a completions API is sent; None = not known.
        tokens: len(ids).
        category: of the question, where there is one.
        session, turn: of an agentic prompt; else None.
    """

    id: str
    ids: list[int] | None
    messages: tuple[Message, ...] | None
    text: str | None
    tokens: int | None
    category: str | None = None
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
            start = own * self.PIECE
            _, ends = self._tokenizer.spans(self.read(start, min(start + self.PIECE, self.chars)))
            self._ends[own] = [start + e for e in ends]
        ends = self._ends[own]
        return ends if turn == 0 else [turn * self.chars + e for e in ends]

    def walk(self, start: int, tokens: int) -> int:
        """Return the character at which the `tokens`-th token after character `start` ends."""
        count = -(-self.chars // self.PIECE)
        turn, at = divmod(start, self.chars)
        piece = turn * count + at // self.PIECE
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


Wrap = Callable[[str], tuple[Message, ...]]


class PromptFactory:
    """Builds prompts by index: a pure function of its arguments and the corpora.

    Args:
        tokenizer: the model's; None makes no prompt but those of :meth:`own`.
        kind: questions, prose, code, repeat, agentic, or the path of a .jsonl file.
        tokens: exact length after the chat template; None = the prompt's own (questions and .jsonl only).
            For agentic prompts the length of the last turn; turn t of T has round(tokens * (t + 1) / T).
        seed: other seeds choose other texts.
        thinking: passed to the chat template.
        cache: `unique` begins every prompt with a tag no other prompt (of this seed and salt) has; `shared` gives all
            prompts the same first three quarters, so that the prefix cache is warm on purpose.
        salt: told into the tag of `unique`, so that two cells of one launch share no prefix.
        templated: False for a completions API: no chat template, plain text (with BOS where the tokenizer adds one).
        turns: of an agentic session; index = session * turns + turn.
        phrase: what `repeat` tiles.
        base: the folder that a .jsonl path is relative to.
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
        self.turns = (turns or 4) if kind == "agentic" else 1
        self.phrase = phrase or PHRASE
        rows = kind.endswith(".jsonl")
        if kind not in (*_ASKS, "questions", "agentic") and not rows:
            raise UsageError(f"prompts: saw {kind!r}; expected one of {', '.join(KINDS)}, or a .jsonl file")
        if tokens is None and kind != "questions" and not rows:
            raise UsageError(f"prompt_tokens: nothing given for prompts {kind}; expected a length")
        if kind == "agentic" and not templated:
            raise UsageError("prompts: saw agentic for an API without chat; expected a kind without turns")
        self._rows = read_jsonl((base or Path()) / kind) if rows else ()
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
            UsageError: the length asked for has no room for what the prompt has to hold.
        """
        if index < 0:
            raise ValueError(f"index {index}; expected 0 or more")
        if self.kind == "agentic":
            session, turn = divmod(index, self.turns)
            return self._scripted(session)[turn]
        if self.kind == "questions":
            return self._question(index)
        if self._rows:
            return self._row(index)
        return self._passage(index)

    def own(self, index: int) -> AnyPrompt:
        """Return prompt `index` at its own length, as :meth:`build` makes it there, but not tokenized.

        Raises:
            UsageError: a length is asked for, or the kind has none of its own.
        """
        if self.tokens is not None:
            raise UsageError(f"prompts {self.kind} of {self.tokens} tokens have no length of their own")
        category = None
        if self._rows:
            tag, ask, wrap = self._asked_row(index)
        else:
            tag, ask, category = self._asked_question(index)
            wrap = self._messages
        messages = wrap(f"{tag}{ask}")
        text = str(messages[-1]["content"])
        digest = hashlib.sha256(json.dumps([messages, self.thinking, self.templated]).encode()).hexdigest()[:12]
        return AnyPrompt(
            id=f"{'jsonl' if self._rows else self.kind}-{digest}",
            ids=None,
            messages=messages if self.templated else None,
            text=None if self.templated else text,
            tokens=None,
            category=category,
        )

    def session(self, index: int) -> list[Prompt]:
        """Return the prompts of agentic session `index`, one a turn; of other kinds the one prompt."""
        return [self.build(index * self.turns + turn) for turn in range(self.turns)]

    def sessions(self, count: int) -> list[list[Prompt]]:
        """Return the first `count` sessions, by as many threads as there are processors; the same as one by one.

        Nearly all the time goes into encoding, during which the interpreter is free.
        """
        threads = min(len(os.sched_getaffinity(0)), count // 8)
        if threads < 2:
            return [self.session(index) for index in range(count)]
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            return list(pool.map(self.session, range(count)))

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
        return self._cut(index, target, source, start, head, tail, ask)

    def _question(self, index: int) -> Prompt:
        tried = []
        for step in range(len(corpus.questions())):
            tag, ask, category = self._asked_question(index, step)
            bare = self._finish(self._messages(f"{tag}{ask}"), ask, category)
            if self.tokens is None or bare.tokens == self.tokens:
                return bare
            tried.append(bare.tokens)
            found = self._around(index, self.tokens, tag, ask, category, bare.tokens)
            if found is not None:
                return found
        raise UsageError(
            f"prompt_tokens: {self.tokens} asked for prompts questions; the shortest has {min(tried)} after the chat "
            f"template, and any text before it takes two more; expected {min(tried) + 8} or more"
        )

    def _asked_question(self, index: int, step: int = 0) -> tuple[str, str, str | None]:
        """Return the tag, the text and the category of the question that is `step` after prompt `index`'s own."""
        everything = corpus.questions()
        order = list(range(len(everything)))
        random.Random(f"specrig/questions/{self.seed}").shuffle(order)
        question = everything[order[(index + step) % len(order)]]
        label = f"Question {index + 1}: " if self.tokens is not None or index >= len(order) else ""
        return self._tag(index), f"{label}{question.text}", question.category

    def _around(
        self, index: int, target: int, tag: str, ask: str, category: str | None, bare: int, before: Wrap | None = None
    ) -> Prompt | None:
        """Return the question with as much text before it as makes `target` tokens, or None where it has no room."""
        room = target - bare
        if room < 1:
            return None
        if room >= _SLACK:
            source = self._source("prose")
            start = self._place(source, target, index)
            head, tail = f"{tag}Background text{self._number(index)}:\n\n", f" [...]\n\n{ask}"
        else:
            source = self._source("pad")
            start, head, tail = 0, tag, f"\n\n{ask}"
        try:
            return self._cut(index, target, source, start, head, tail, ask, category, before)
        except UsageError:
            return None

    def _asked_row(self, index: int) -> tuple[str, str, Wrap]:
        """Return the tag and the text of the last message of prompt `index`'s row, and what puts the others before."""
        messages = self._rows[index % len(self._rows)]
        again = f"(Request {index + 1}) " if index >= len(self._rows) else ""
        earlier, last = messages[:-1], messages[-1]

        def before(text: str) -> tuple[Message, ...]:
            if not self.templated:
                return ({"role": "user", "content": "\n\n".join([*(str(m["content"]) for m in earlier), text])},)
            return (*earlier, {"role": "user", "content": text})

        return self._tag(index), f"{again}{last['content']}", before

    def _row(self, index: int) -> Prompt:
        tag, ask, before = self._asked_row(index)
        bare = self._finish(before(f"{tag}{ask}"), ask)
        if self.tokens is None or bare.tokens == self.tokens:
            return bare
        found = self._around(index, self.tokens, tag, ask, None, bare.tokens, before)
        if found is None:
            raise UsageError(
                f"prompt_tokens: {self.tokens} asked for prompts {self.kind}; row {index % len(self._rows) + 1} alone "
                f"has {bare.tokens} tokens after the chat template"
            )
        return found

    def _scripted(self, session: int) -> list[Prompt]:
        """Return a session's prompts: before each turn but the first a scripted answer and a tool result are added.

        The answers are scripted, not the model's own, so that every method gets the same prompts.
        """
        if session not in self._sessions:
            if len(self._sessions) > 64:
                self._sessions.clear()
            prompts: list[Prompt] = []
            final = self._target()
            source = self._source("code")
            start = self._place(source, final, session)
            for turn in range(self.turns):
                earlier = prompts[-1].messages or () if prompts else ()
                prompts.append(self._grown(session, turn, earlier, source, start))
                start = source.opening(start + final * 5 // self.turns)
            self._sessions[session] = prompts
        return self._sessions[session]

    def _grown(self, session: int, turn: int, earlier: tuple[Message, ...], source: _Source, start: int) -> Prompt:
        final = self._target()
        target = round(final * (turn + 1) / self.turns)
        task = _TASKS[(session + self.seed) % len(_TASKS)]
        before: tuple[Message, ...] = ({"role": "system", "content": _SYSTEM},)
        role = "user"
        head = f"{self._tag(session)}Session {session + 1}. {task}\n\nThe file to begin with:\n\n"
        if turn:
            said, tool, argument = _STEPS[(turn - 1 + session) % len(_STEPS)]
            call = json.dumps({"name": tool, "argument": argument})
            before = (*earlier, {"role": "assistant", "content": f"{said}\n<tool_call>\n{call}\n</tool_call>"})
            role = self._tool_role
            head = f"Output of {tool} {argument}:\n\n"
        tail = "\n[end]"

        def wrap(text: str) -> tuple[Message, ...]:
            return (*before, {"role": role, "content": text})

        try:
            prompt = self._cut(turn, target, source, start, head, tail, task, None, wrap)
        except UsageError:
            least = len(self.tokenizer.chat_ids(wrap(head + tail), self.thinking))
            raise UsageError(
                f"prompt_tokens: {final} asked for {self.turns} agentic turns, so turn {turn + 1} has {target}, and "
                f"its messages take {least} before any tool result; expected fewer turns or more tokens"
            ) from None
        return replace(prompt, session=session, turn=turn)

    @functools.cached_property
    def _tool_role(self) -> str:
        """`tool` where the template knows that role, else `user`."""
        probe: list[Message] = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "tool", "content": "specrig probe"},
        ]
        try:
            return "tool" if "specrig probe" in self.tokenizer.render(probe, self.thinking) else "user"
        except UsageError:
            return "user"

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

    def _messages(self, text: str) -> tuple[Message, ...]:
        return ({"role": "user", "content": text},)

    def _ids(self, messages: tuple[Message, ...]) -> tuple[list[int], str]:
        if self.templated:
            text = self.tokenizer.render(messages, self.thinking)
            return self.tokenizer.encode(text), text
        text = str(messages[-1]["content"])
        return self.tokenizer.encode(text, special=True), text

    def _empty(self, text: str) -> int:
        return len(self._ids(self._messages(text))[0])

    def _cut(
        self,
        index: int,
        target: int,
        source: _Source,
        start: int,
        head: str,
        tail: str,
        ask: str,
        category: str | None = None,
        wrap: Wrap | None = None,
    ) -> Prompt:
        """Return head + a slice of the source + tail that has exactly `target` tokens once wrapped and encoded."""
        wrap = wrap or self._messages
        bare = len(self._ids(wrap(head + tail))[0])
        if self.cache == "shared" and target - bare > 4 * _SLACK and self.kind != "agentic":
            stop = source.walk(start, (target - bare) * 3 // 4)
            head = f"{head}{source.read(start, source.word_end(stop))} [...]\n\n"
            bare = len(self._ids(wrap(head + tail))[0])
            start = source.opening(stop + (index + 1) * 1237)
        want = target - bare
        encoded = 0
        for attempt in range(_ATTEMPTS):
            whole_words = attempt < _ATTEMPTS // 2  # a text without spaces is cut between characters in the end
            if want < 1 or encoded == _ENCODINGS:
                break
            stop = source.walk(start, want)
            if source.ends_word(stop) or not whole_words:
                messages = wrap(f"{head}{source.read(start, stop)}{tail}")
                ids, text = self._ids(messages)
                encoded += 1
                if len(ids) == target:
                    return self._prompt(ids, text, messages, ask, category)
                want += target - len(ids)  # what the parts make of each other where they meet
                again = source.walk(start, max(want, 1))
                if again != stop and source.ends_word(again):
                    continue
            start = source.word_start(start) if whole_words else start + 1
        raise UsageError(
            f"prompt_tokens: {target} asked for prompts {self.kind}; the chat template and the fixed text already have "
            f"{bare} tokens, and no text makes up the rest; expected at least {bare + 8}"
        )

    def _finish(self, messages: tuple[Message, ...], ask: str, category: str | None = None) -> Prompt:
        ids, text = self._ids(messages)
        return self._prompt(ids, text, messages, ask, category)

    def _prompt(
        self,
        ids: list[int],
        text: str,
        messages: tuple[Message, ...],
        ask: str,
        category: str | None,
    ) -> Prompt:
        digest = hashlib.sha256(json.dumps([text, self.templated]).encode()).hexdigest()[:12]
        return Prompt(
            id=f"{'jsonl' if self._rows else self.kind}-{len(ids)}-{digest}",
            ids=ids,
            messages=messages if self.templated else None,
            text=text,
            tokens=len(ids),
            periodic=self.periodic,
            question_tokens=self.tokenizer.count(ask) if ask else 0,
            category=category,
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


_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_MAX_ROWS = 10_000


def read_jsonl(path: Path) -> tuple[tuple[Message, ...], ...]:
    """Return the prompts of a .jsonl file as messages whose last one is the user's.

    A line is an object with one of: `messages` (OpenAI), `conversations` (ShareGPT), `turns` (a list of texts, the
    first is taken), `prompt`, `question`, `instruction` or `text`. At most the first 10,000 lines are read.

    Raises:
        UsageError: the file or a line cannot be used, with its line number.
    """
    rows: list[tuple[Message, ...]] = []
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(itertools.islice(lines, _MAX_ROWS), 1):
                if line.strip():
                    rows.append(_row_messages(line, f"{path}:{number}"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not UTF-8 ({error.reason}); save it as UTF-8") from None
    if not rows:
        raise UsageError(f"{path}: holds no line; expected one JSON object a line")
    return tuple(rows)


def _row_messages(line: str, place: str) -> tuple[Message, ...]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise UsageError(f"{place}: is not JSON; expected one object a line") from None
    if not isinstance(row, dict):
        raise UsageError(f"{place}: is not an object; expected one with messages, conversations, turns or prompt")
    for key in ("prompt", "question", "instruction", "text"):
        if isinstance(row.get(key), str) and row[key].strip():
            return ({"role": "user", "content": row[key]},)
    turns = row.get("turns")
    if isinstance(turns, list) and turns and isinstance(turns[0], str) and turns[0].strip():
        return ({"role": "user", "content": turns[0]},)
    listed = row.get("messages", row.get("conversations"))
    if not isinstance(listed, list):
        raise UsageError(f"{place}: has none of messages, conversations, turns, prompt, question, instruction, text")
    messages: list[Message] = []
    for item in listed:
        role = _ROLES.get(str(item.get("role", item.get("from")))) if isinstance(item, dict) else None
        content = item.get("content", item.get("value")) if isinstance(item, dict) else None
        if isinstance(content, list):
            content = "\n".join(str(p.get("text", "")) for p in content if isinstance(p, dict))
        if role is None or not isinstance(content, str):
            raise UsageError(f"{place}: a message without a known role and text; expected system, user and assistant")
        if role == "assistant" and "conversations" in row and messages:
            break
        messages.append({"role": role, "content": content})
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    if not messages:
        raise UsageError(f"{place}: holds no message of the user")
    return tuple(messages)
