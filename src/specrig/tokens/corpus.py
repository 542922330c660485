"""The texts that prompts are cut from. They ship in the package; corpora/NOTICE says where they come from."""

from __future__ import annotations

import functools
import hashlib
import lzma
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path

import msgspec

FOLDER = Path(__file__).parent / "corpora"


class Part(msgspec.Struct, frozen=True):
    """One compressed file: its length in characters and the SHA-256 of its UTF-8 text."""

    file: str
    chars: int
    sha256: str


class Question(msgspec.Struct, frozen=True):
    """One built-in question."""

    category: str
    text: str


class Corpus:
    """A long text that is read in pieces and is cyclic: past its end it begins again."""

    def __init__(self, parts: tuple[Part, ...]) -> None:
        self._parts = parts
        self._starts = [0, *accumulate(p.chars for p in parts)]
        self.chars = self._starts[-1]

    @property
    def sha256(self) -> str:
        """The hash of the parts' hashes, in their order."""
        return hashlib.sha256("".join(p.sha256 for p in self._parts).encode()).hexdigest()

    def text(self, start: int, end: int) -> str:
        """Return the characters from `start` up to `end`; both may lie past the text's end."""
        pieces = []
        while start < end:
            round_start = start - start % self.chars
            at = start - round_start
            part = bisect_right(self._starts, at) - 1
            stop = min(end - round_start, self._starts[part + 1])
            pieces.append(_part(self._parts[part].file)[at - self._starts[part] : stop - self._starts[part]])
            start = round_start + stop
        return "".join(pieces)


@functools.lru_cache(maxsize=16)
def _part(file: str) -> str:
    return lzma.decompress((FOLDER / file).read_bytes()).decode("utf-8")


@functools.lru_cache(maxsize=1)
def _index() -> dict[str, tuple[Part, ...]]:
    return msgspec.json.decode((FOLDER / "index.json").read_bytes(), type=dict[str, tuple[Part, ...]])


@functools.lru_cache(maxsize=4)
def corpus(kind: str) -> Corpus:
    """Return the corpus `prose` or `code`."""
    return Corpus(_index()[kind])


@functools.lru_cache(maxsize=1)
def questions() -> tuple[Question, ...]:
    """Return the built-in questions."""
    return msgspec.json.decode((FOLDER / "questions.json").read_bytes(), type=tuple[Question, ...])


def verify() -> None:
    """Raise ValueError where a part is not the text that index.json names."""
    for parts in _index().values():
        for part in parts:
            text = _part(part.file)
            if len(text) != part.chars or hashlib.sha256(text.encode()).hexdigest() != part.sha256:
                raise ValueError(f"{FOLDER / part.file}: is not the text that index.json names")


def hashes() -> dict[str, str]:
    """Return the SHA-256 of every corpus, for the manifest."""
    found = {kind: corpus(kind).sha256 for kind in _index()}
    found["questions"] = hashlib.sha256((FOLDER / "questions.json").read_bytes()).hexdigest()
    return found
