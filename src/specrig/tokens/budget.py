"""The token budget: whether a prompt and its answer fit a server, by SGLang's own rules.

P prompt tokens after the chat template, N tokens to generate, C context length, K capacity of the KV pool in tokens,
R draft tokens the engine reserves. docs/budget.md states the rules with their source; `check` is a pure function of them.
"""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a server can take. None means unknown, and no rule that needs it is applied.

    Attributes:
        context_length: C, the effective window in tokens.
        kv_tokens: K, tokens the KV pool holds (`max_total_num_tokens`).
        reserved_tokens: R, see `reserved_tokens`.
        block: tokens of one draft block, kept free twice per running request.
        max_running: requests the server runs at once, as effective.
        page_size: tokens of one KV page.
        auto_truncate: the server runs with --allow-auto-truncate.
        source: where the numbers come from, for people.
    """

    context_length: int
    kv_tokens: int | None = None
    reserved_tokens: int = 0
    block: int = 0
    max_running: int | None = None
    page_size: int = 1
    auto_truncate: bool = False
    source: str = "given"


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one shape.

    Attributes:
        fits: no problem was found.
        problems: one line each, with the numbers.
        outcome: what a server would do with one such request: ok, rejected (an error) or clipped (short, no error).
        effective_new_tokens: tokens that would be generated: N, fewer when clipped, 0 when rejected.
        longest_prompt: the largest P that fits with this N, headroom and concurrency; -1 = none.
    """

    prompt_tokens: int
    max_new_tokens: int
    concurrency: int
    headroom: int
    limits: Limits
    fits: bool
    problems: tuple[str, ...]
    outcome: str
    effective_new_tokens: int
    longest_prompt: int


def check(
    prompt_tokens: int, max_new_tokens: int, limits: Limits, concurrency: int | None = 1, headroom: int = 0
) -> Budget:
    """Return whether `concurrency` requests of this shape fit, every rule that fails named with its numbers."""
    raise NotImplementedError
