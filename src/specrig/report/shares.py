"""Shares on the command line: ``5%`` and ``0.05`` are the same."""

from __future__ import annotations

from specrig.errors import UsageError


def share(value: str, flag: str, low: float, high: float) -> float:
    """A share between ``low`` and ``high``, both included.

    Raises:
        UsageError: not a number, or out of range.
    """
    raw = value.strip()
    try:
        found = float(raw.removesuffix("%")) / (100 if raw.endswith("%") else 1)
    except ValueError:
        raise UsageError(f"{flag} {value!r}: not a share; write 5% or 0.05") from None
    if not low <= found <= high:
        raise UsageError(f"{flag} {value!r}: out of range; expected {low:g} to {high:g} (or {low:.0%} to {high:.0%})")
    return found
