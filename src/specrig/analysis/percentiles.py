"""Percentiles that name their pool and print only where the pool can carry them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

QUANTILES = (0.5, 0.9, 0.95, 0.99)
MIN_BEYOND = 10
"""A quantile q of N values prints only where N * (1 - q) is at least this."""


@dataclass(frozen=True)
class Distribution:
    """A pool of values: its size, mean, ends and the percentiles it carries (``{"p50": ...}``)."""

    pool: str
    n: float
    mean: float
    min: float
    max: float
    percentiles: dict[str, float] = field(default_factory=dict)


def distribution(values: Iterable[float], pool: str = "requests") -> Distribution | None:
    """Distribution of one value per member of the pool; None for an empty pool."""
    return weighted([(v, 1.0) for v in values], pool)


def weighted(pairs: Sequence[tuple[float, float]], pool: str = "tokens") -> Distribution | None:
    """Distribution of (value, weight) pairs: inter-token latency is each gap over its tokens, weighted by tokens."""
    kept = sorted((v, w) for v, w in pairs if math.isfinite(v) and w > 0)
    total = math.fsum(w for _, w in kept)
    if not kept:
        return None
    return Distribution(
        pool=pool,
        n=total,
        mean=math.fsum(v * w for v, w in kept) / total,
        min=kept[0][0],
        max=kept[-1][0],
        percentiles={f"p{q * 100:g}": _quantile(kept, total, q) for q in QUANTILES if carries(total, q)},
    )


def carries(n: float, q: float) -> bool:
    """Whether ``n`` values carry the quantile ``q``: n * (1 - q) >= 10."""
    return n * (1 - q) >= MIN_BEYOND - 1e-9


def _quantile(pairs: Sequence[tuple[float, float]], total: float, q: float) -> float:
    """Inverse of the empirical distribution: the smallest value with at least a share q at or under it."""
    seen = 0.0
    for value, weight in pairs:
        seen += weight
        if seen >= q * total - 1e-9:
            return value
    return pairs[-1][0]
