"""How figures are written, the same way on every page: aligned decimals, units, unknown as a dash."""

from __future__ import annotations

import datetime
from typing import Any

UNKNOWN = "–"


def ratio(value: float | None) -> str:
    """``3.57×``: three significant digits or two decimals."""
    return UNKNOWN if value is None else f"{bare_ratio(value)}×"


def bare_ratio(value: float) -> str:
    """``3.57``; ends of a hopelessly wide interval are cut at 999."""
    if value >= 999:
        return ">999"
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def interval(low: float | None, high: float | None) -> str:
    """``3.51–3.63``; empty without ends."""
    return "" if low is None or high is None else f"{bare_ratio(low)}–{bare_ratio(high)}"


def rate(value: float | None) -> str:
    """Tokens per second, one decimal under 1,000."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def milliseconds(seconds: float | None) -> str:
    """Milliseconds, three significant digits."""
    if seconds is None:
        return UNKNOWN
    value = seconds * 1000
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def count(value: Any) -> str:
    """A whole number with thousands separators."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return UNKNOWN
    return f"{value:,.0f}"


def length(value: float | None) -> str:
    """An acceptance length, two decimals."""
    return UNKNOWN if value is None else f"{value:.2f}"


def percent(value: float | None, digits: int = 1) -> str:
    """A share in percent."""
    return UNKNOWN if value is None else f"{100 * value:.{digits}f}\u00a0%"


def numbers(values: Any) -> str:
    """``0, 1, 2``; unknown members as ``?``, no list as a dash."""
    if not isinstance(values, list) or not values:
        return UNKNOWN
    return ", ".join("?" if v is None else str(v) for v in values)


def load(concurrency: Any, arrivals: float | None = None, kind: str | None = None) -> str:
    """``1 in flight``, ``8 in flight``, ``2.5 req/s``; of the arrival's kind a ``trace``, and where a ramp begins."""
    if kind == "trace":
        return kind
    if arrivals and kind == "ramp":
        return f"ramp from {arrivals:g} req/s"
    if arrivals:
        return f"{arrivals:g} req/s"
    return f"{concurrency} in flight" if concurrency else "load unknown"


def stamp(value: Any) -> str:
    """An ISO time as ``2026-05-04 03:02 UTC``; other texts as they are."""
    if not isinstance(value, str):
        return "unknown"
    try:
        moment = datetime.datetime.fromisoformat(value)
    except ValueError:
        return value
    if moment.tzinfo is None:
        return moment.strftime("%Y-%m-%d %H:%M")
    return moment.astimezone(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def scalar(value: Any) -> str:
    """A short text for a provenance value; nested mappings as ``a: b, c: d``."""
    if value is None or value == "" or value == {} or value == []:
        return "unknown"
    if isinstance(value, dict):
        return ", ".join(f"{k}: {scalar(v)}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(scalar(v) for v in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
