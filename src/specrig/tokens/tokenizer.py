"""The model's tokenizer and chat template, loaded without transformers where a tokenizer.json is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

Message = Mapping[str, object]


class Tokenizer:
    """A tokenizer with its chat template."""

    path: Path
    revision: str
    eos_ids: frozenset[int]
    has_template: bool

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of a text; `special` adds what the tokenizer puts around a text (BOS)."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of ids."""
        raise NotImplementedError

    def count(self, text: str) -> int:
        """Return how many tokens a text has."""
        return len(self.encode(text))

    def render(self, messages: Sequence[Message], thinking: bool = False, add_generation_prompt: bool = True) -> str:
        """Return the text the chat template makes of the messages."""
        raise NotImplementedError

    def chat_ids(
        self, messages: Sequence[Message], thinking: bool = False, add_generation_prompt: bool = True
    ) -> list[int]:
        """Return the ids of the messages after the chat template."""
        return self.encode(self.render(messages, thinking, add_generation_prompt))


def load(path: str | Path) -> Tokenizer:
    """Load the tokenizer of a model folder."""
    raise NotImplementedError
