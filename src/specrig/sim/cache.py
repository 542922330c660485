"""The prefix cache: which leading tokens of a prompt are already in the KV pool."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

BLOCK = 16
"""Tokens of one block; a match is a whole number of blocks."""


def _chain(ids: Sequence[int]) -> Iterator[int]:
    key = 0
    for start in range(0, len(ids) - BLOCK + 1, BLOCK):
        key = hash((key, tuple(ids[start : start + BLOCK])))
        yield key


class PrefixCache:
    """Blocks by the hash of everything up to their end, least recently used first out.

    Args:
        capacity: tokens that it may hold; 0 keeps nothing.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity // BLOCK
        self._blocks: OrderedDict[int, None] = OrderedDict()

    @property
    def tokens(self) -> int:
        """Tokens that are held."""
        return len(self._blocks) * BLOCK

    def match(self, ids: Sequence[int]) -> int:
        """Leading tokens of `ids` that are held; always less than all of them, since one must be computed."""
        held = []
        for key in _chain(ids):
            if key not in self._blocks:
                break
            held.append(key)
        for key in reversed(held):
            self._blocks.move_to_end(key)
        return min(len(held) * BLOCK, max(0, len(ids) - 1))

    def insert(self, ids: Sequence[int]) -> None:
        """Hold the blocks of `ids`; the end of a prompt goes before its beginning when room is needed."""
        for key in reversed(list(_chain(ids))):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        self.shrink(self._capacity * BLOCK)

    def shrink(self, tokens: int) -> None:
        """Let go until no more than `tokens` are held."""
        while len(self._blocks) * BLOCK > max(0, tokens):
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Hold nothing."""
        self._blocks.clear()
