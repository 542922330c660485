"""What the simulated model says: real sentences through the real tokenizer, the same for the same prompt.

An answer is a function of the prompt's ids and the seed, not of the method, so greedy outputs of two methods agree
but for a small divergence that is drawn per method and batch shape, as numerics do it on a GPU.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from specrig.sim.physics import digest

_SUBJECTS = (
    "The scheduler",
    "A draft model",
    "The verifier",
    "Each request",
    "The second card",
    "A short prompt",
    "The memory bus",
    "This approach",
    "The operator",
    "A careful reader",
    "The first token",
    "Every experiment",
    "The cache",
    "A longer context",
    "The baseline",
    "The cluster",
)
_VERBS = (
    "waits for",
    "depends on",
    "makes room for",
    "explains",
    "hides",
    "reveals",
    "moves along with",
    "keeps a record of",
    "stays ahead of",
    "shares its time with",
    "is measured against",
    "slows down",
    "changes the shape of",
    "does nothing about",
)
_OBJECTS = (
    "the next batch",
    "a smaller model",
    "the number of accepted tokens",
    "what was asked in the question",
    "the slowest link",
    "all of the earlier steps",
    "the temperature of the room",
    "a queue that nobody looks at",
    "the rest of the answer",
    "the interval between two measurements",
    "one more copy of the weights",
    "the order in which things are done",
)
_TAILS = (
    ".",
    ", and that is why the numbers differ.",
    " most of the time.",
    ", unless the context grows past 32,768 tokens.",
    "; the effect is small but it is there.",
    " - see the table below.",
    ", which surprises people at first.",
    "? That depends on the load.",
    " when eight of them run at once.",
    ", even if the average says otherwise.",
)
_CODE = (
    "\n\n```python\ndef mean(values: list[float]) -> float:\n    return sum(values) / len(values)\n```\n\n",
    "\n\n```c\nfor (int i = 0; i < n; i++) {\n    total += weight[i] * input[i];\n}\n```\n\n",
    "\n\n1. Read the configuration.\n2. Start the server.\n3. Wait for a completion, not for a port.\n\n",
    "\n\n| method | tokens a step |\n|---|---|\n| chain | 5.6 |\n| tree | 6.5 |\n\n",
    ' For example: {"name": "first", "values": [1, 2, 3], "done": true}.',
)
_WIDE = (
    " Straße, café, naïve: ein kurzer Satz für die Prüfung.",
    " 速度は接受された単語の数に依存します。",
    " Скорость зависит от длины контекста.",
    " It works 👍🏽, mostly 🚀✨.",
    " αβγ ≤ ∑ xᵢ² ≠ ∞.",
)
_REPEATED = " and so on"
_SEGMENTS = 160


class Codec(Protocol):
    """What is needed of a tokenizer."""

    eos_ids: frozenset[int]

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """The text of ids."""


@dataclass(frozen=True)
class Vocabulary:
    """The pieces that answers are made of, as ids.

    Attributes:
        plain: sentences and code.
        wide: sentences of multi-byte characters.
        eos: the end-of-sequence token, None where the tokenizer has none.
    """

    plain: list[list[int]]
    wide: list[list[int]]
    repeated: list[int]
    eos: int | None
    think_open: int | None
    think_close: int | None
    think_open_tail: list[int]
    think_close_tail: list[int]


def _single(codec: Codec, text: str) -> int | None:
    ids = codec.encode(text)
    return ids[0] if len(ids) == 1 else None


def vocabulary(codec: Codec) -> Vocabulary:
    """Encode the pieces once, at the start."""
    generator = random.Random(7)
    texts = [
        " "
        + " ".join((generator.choice(_SUBJECTS), generator.choice(_VERBS), generator.choice(_OBJECTS)))
        + generator.choice(_TAILS)
        for _ in range(_SEGMENTS)
    ]
    texts += _CODE
    end = _single(codec, "<|im_end|>")
    eos = end if end in codec.eos_ids else min(codec.eos_ids, default=None)
    return Vocabulary(
        plain=[codec.encode(text) for text in texts] + [codec.encode(_WIDE[0]), codec.encode(_WIDE[3])],
        wide=[codec.encode(text) for text in _WIDE],
        repeated=codec.encode(_REPEATED),
        eos=eos,
        think_open=_single(codec, "<think>"),
        think_close=_single(codec, "</think>"),
        think_open_tail=codec.encode("\n"),
        think_close_tail=codec.encode("\n\n"),
    )


class Answer:
    """The ids of one answer, made as they are asked for.

    Args:
        words: the pieces.
        key: what the answer depends on: seed and prompt, and the request where sampling is not greedy.
        natural_tokens: median of the index of the end-of-sequence token.
        opening: "" for none, "open" where the model opens its thinking itself, "inside" where the prompt did.
        wide: use multi-byte sentences only.
    """

    def __init__(
        self, words: Vocabulary, key: str, natural_tokens: int, *, opening: str = "", wide: bool = False
    ) -> None:
        self._words = words
        self._key = key
        self._pieces = words.wide if wide else words.plain
        self._random = random.Random(digest("answer", key))
        self.ids: list[int] = []
        self.reasoning_end: int | None = None
        """Index after the token that closes the thinking; None where there is none."""
        natural = random.Random(digest("natural", key)).gauss(math.log(max(2, natural_tokens)), 0.35)
        self.eos_index = max(4, round(math.exp(natural)))
        """Index of the end-of-sequence token."""
        if opening and words.think_close is not None:
            if opening == "open" and words.think_open is not None:
                self.ids += [words.think_open, *words.think_open_tail]
            thinking = self._random.randint(24, 160)
            while len(self.ids) < thinking:
                self.ids += self._random.choice(self._pieces)
            self.ids += [words.think_close, *words.think_close_tail]
            self.reasoning_end = self.ids.index(words.think_close) + 1
            self.eos_index = max(self.eos_index, len(self.ids) + 8)
        if words.eos is None:
            self.eos_index = 2**62
        self.ended = False

    def token(self, index: int) -> int:
        """The id at `index`."""
        while len(self.ids) <= index:
            self._extend()
        return self.ids[index]

    def _extend(self) -> None:
        words = self._words
        if self.ended:
            self.ids += words.repeated
            return
        self.ids += self._random.choice(self._pieces)
        if len(self.ids) > self.eos_index:
            assert words.eos is not None
            del self.ids[self.eos_index :]
            self.ids.append(words.eos)
            self.ended = True

    def diverge(self, index: int, variant: str) -> None:
        """Go on with other words from `index` on."""
        if index >= self.eos_index or (self.reasoning_end is not None and index < self.reasoning_end):
            return
        del self.ids[index:]
        self.ended = False
        self._random = random.Random(digest("other", self._key, variant, index))

    def divergence_index(self, variant: str, probability: float) -> int:
        """Where this variant's numerics first change a greedy choice: geometric, the same every time."""
        if probability <= 0:
            return 2**62
        draw = random.Random(digest("divergence", self._key, variant)).random()
        return int(math.log(1.0 - draw) / math.log(1.0 - probability)) if probability < 1 else 0


class Detokenizer:
    """Text of a growing list of ids; holds back what ends inside a character, as SGLang does."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._last: list[int] = []
        self._pending: list[int] = []

    def push(self, ids: Sequence[int], *, final: bool = False) -> str:
        """The text that `ids` complete."""
        self._pending += ids
        if not self._pending:
            return ""
        before = self._decode(self._last) if self._last else ""
        text = self._decode(self._last + self._pending)[len(before) :]
        if text.endswith("�") and not final:
            return ""
        self._last = self._pending[-1:]
        self._pending = []
        return text

    def peek(self, ids: Sequence[int]) -> str:
        """The text that `ids` would complete, with nothing kept."""
        before = self._decode(self._last) if self._last else ""
        return self._decode([*self._last, *self._pending, *ids])[len(before) :]
