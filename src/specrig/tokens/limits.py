"""What a profile's server will take, as far as that is known before it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specrig.errors import UsageError
from specrig.model.profile import Profile
from specrig.tokens.budget import Limits


def method_numbers(method: str, budget: int | None, overrides: Mapping[str, Any] | None = None) -> tuple[int, int]:
    """Return (reserved tokens, draft block) of a method by the dialect table; block 0 for autoregressive.

    Raises:
        UsageError: no such method, or a budget where none belongs.
    """
    from specrig.facts import dialects

    try:
        row = dialects.resolve(method, budget, dict(overrides or {}))
    except dialects.DialectError as error:
        raise UsageError(str(error)) from None
    reserved = row["reserved_tokens"]
    if reserved is None:
        reserved = 0 if budget is None else budget + 1
    block = row["block_size"] or 0
    return int(reserved), int(block) if row["draft_tokens"] != 0 else 0


def for_profile(
    profile: Profile,
    *,
    context_length: int | None = None,
    kv_tokens: int | None = None,
    max_running: int | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Limits | None:
    """Return the limits of a profile, or None where nothing says how long its context is."""
    context = context_length or profile.context_length
    if context is None:
        return None
    reserved, block = method_numbers(profile.method, profile.budget, overrides)
    return Limits(
        context_length=context,
        kv_tokens=kv_tokens,
        reserved_tokens=reserved,
        block=block,
        max_running=max_running,
        source="profile",
    )
