"""Prompts of an exact length after the chat template, of real text, the same for every method."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specrig.model.cell import Cell
from specrig.tokens.tokenizer import Message, Tokenizer


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt.

    Attributes:
        id: equal for equal prompts, over all methods, launches and runs.
        ids: token ids after the chat template, what the native API is sent.
        messages: the same as chat messages; None where the prompt is plain text.
        text: the templated text, what a completions API is sent.
        tokens: len(ids).
        periodic: a phrase tiled; acceptance on it says little about real text.
        question_tokens: tokens of the question inside the prompt.
        session, turn: of an agentic prompt; else None.
    """

    id: str
    ids: list[int]
    messages: tuple[Message, ...] | None
    text: str
    tokens: int
    periodic: bool
    question_tokens: int
    session: int | None = None
    turn: int | None = None


class PromptFactory:
    """Builds prompts by index, a pure function of its arguments; index = session * turns + turn for agentic ones."""

    def __init__(
        self,
        tokenizer: Tokenizer,
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
        raise NotImplementedError

    def build(self, index: int) -> Prompt:
        """Return prompt `index`."""
        raise NotImplementedError

    def session(self, index: int) -> list[Prompt]:
        """Return the prompts of agentic session `index`, one a turn; of other kinds the one prompt."""
        raise NotImplementedError


def for_cell(tokenizer: Tokenizer, cell: Cell, base: Path | None = None) -> PromptFactory:
    """Return the factory of a cell's prompts; `base` is the folder that a .jsonl path is relative to."""
    raise NotImplementedError
