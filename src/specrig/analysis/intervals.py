"""Intervals and verdicts on ratios, with server launches as a level of the design.

All of it works on log ratios grouped by launch: ``groups[i][j]`` is the log ratio of prompt ``j`` in launch pair ``i``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MIN_LAUNCHES = 3
"""Launches per arm that a verdict needs."""
DEFAULT_MARGIN = 0.02
DEFAULT_LEVEL = 0.95
EQUIVALENCE_LEVEL = 0.90
WITHIN_ONE_LAUNCH = "within one launch"


@dataclass(frozen=True)
class Estimate:
    """A ratio with its interval and verdict.

    Attributes:
        geometric_mean: exp of the mean over launch means of the log ratios.
        low, high: ends of the interval at ``level``; None where one value alone gives none.
        low_90, high_90: ends of the 90 % interval that decides "equivalent".
        bootstrap_low, bootstrap_high: launch-then-prompt bootstrap-t; None under three values at its top level.
        new_prompts_low, new_prompts_high: wider interval that also counts the spread over prompts as sampling error.
        unit: what the interval counts as independent: ``launches`` or ``prompts``.
        verdict: faster, slower, equivalent, undecided; None when there are too few launches for one.
        note: why there is no verdict, or what the interval does not cover.
    """

    geometric_mean: float
    low: float | None
    high: float | None
    low_90: float | None
    high_90: float | None
    bootstrap_low: float | None
    bootstrap_high: float | None
    new_prompts_low: float | None
    new_prompts_high: float | None
    level: float
    margin: float
    launches: int
    prompts: int
    pairs: int
    unit: str
    verdict: str | None
    verdict_new_prompts: str | None
    note: str | None


def t_interval(values: Sequence[float], level: float = DEFAULT_LEVEL) -> tuple[float, float] | None:
    """The mean -+ t(n-1) * s / sqrt(n) of independent values (log ratios stay log ratios); None for fewer than two."""
    n = len(values)
    if n < 2:
        return None
    mean = math.fsum(values) / n
    s = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    half = t_quantile(level, n - 1) * s / math.sqrt(n)
    return mean - half, mean + half


def t_quantile(level: float, df: float) -> float:
    """The two-sided Student quantile: P(|T| <= result) = level."""
    from scipy.stats import t

    return float(t.ppf(0.5 + level / 2, df))


def bootstrap_t(
    groups: Sequence[Sequence[float]], level: float = DEFAULT_LEVEL, draws: int = 1999, seed: int = 20_240_229
) -> tuple[float, float] | None:
    """Bootstrap-t interval of the mean over launches, resampling launches and then the prompts inside each.

    Every resample is studentised with its own standard error over launches, s*/sqrt(n) (Efron and Tibshirani 1993,
    chapter 12). With one launch the prompts are the only level. None under three values at the top level.
    """
    import numpy as np

    filled = [np.asarray(g, dtype=float) for g in groups if len(g)]
    if len(filled) == 1:
        filled = [np.asarray([value]) for value in filled[0]]
    n = len(filled)
    if n < 3:
        return None
    rng = np.random.default_rng(seed)
    means = np.array([g.mean() for g in filled])
    centre = float(means.mean())
    se = float(means.std(ddof=1)) / math.sqrt(n)
    if se == 0.0:
        return centre, centre
    picked = rng.integers(0, n, size=(draws, n))
    drawn = np.empty((draws, n))
    for i, group in enumerate(filled):
        at = picked == i
        count = int(at.sum())
        if not count:
            continue
        drawn[at] = group[0] if len(group) == 1 else _resampled_means(group, count, rng)
    resampled_se = drawn.std(axis=1, ddof=1) / math.sqrt(n)
    usable = resampled_se > 1e-12 * max(1.0, abs(centre))
    if int(usable.sum()) < draws // 4:
        return None
    pivots = (drawn.mean(axis=1)[usable] - centre) / resampled_se[usable]
    tail = (1 - level) / 2
    upper, lower = np.quantile(pivots, [1 - tail, tail])
    return centre - float(upper) * se, centre - float(lower) * se


def _resampled_means(group: NDArray[np.float64], count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Means of ``count`` resamples with replacement of a group, in blocks so that memory stays small."""
    import numpy as np

    size = len(group)
    step = max(1, 2_000_000 // size)
    out = [
        group[rng.integers(0, size, size=(min(step, count - at), size))].mean(axis=1) for at in range(0, count, step)
    ]
    return np.asarray(np.concatenate(out), dtype=float)


def crossed_interval(
    table: Sequence[Sequence[float]], names: Sequence[Sequence[str]], level: float = DEFAULT_LEVEL
) -> tuple[float, float] | None:
    """Interval for new launches AND new prompts: variance s_launch^2/L + s_prompt^2/P, Satterthwaite's df.

    ``s_prompt`` is over the prompts' means across launches, ``s_launch`` over the launches' means; the sum counts the
    residual twice, so it errs to the wide side. None without at least two of each.
    """
    by_prompt: dict[str, list[float]] = {}
    for row, row_names in zip(table, names, strict=True):
        for value, name in zip(row, row_names, strict=True):
            by_prompt.setdefault(name, []).append(value)
    launches = [math.fsum(row) / len(row) for row in table if row]
    prompts = [math.fsum(values) / len(values) for values in by_prompt.values()]
    if len(launches) < 2 or len(prompts) < 2:
        return None
    parts = [
        (_variance(launches) / len(launches), len(launches) - 1),
        (_variance(prompts) / len(prompts), len(prompts) - 1),
    ]
    total = sum(v for v, _ in parts)
    centre = math.fsum(launches) / len(launches)
    if total == 0:
        return centre, centre
    df = 1 / sum((v / total) ** 2 / d for v, d in parts)
    half = t_quantile(level, df) * math.sqrt(total)
    return centre - half, centre + half


def welch_interval(a: Sequence[float], b: Sequence[float], level: float = DEFAULT_LEVEL) -> tuple[float, float] | None:
    """Interval of mean(a) - mean(b) for unpaired values with unequal variances (Welch 1947); None under two a side."""
    if len(a) < 2 or len(b) < 2:
        return None
    va, vb = _variance(a) / len(a), _variance(b) / len(b)
    centre = math.fsum(a) / len(a) - math.fsum(b) / len(b)
    if va + vb == 0:
        return centre, centre
    df = 1 / ((va / (va + vb)) ** 2 / (len(a) - 1) + (vb / (va + vb)) ** 2 / (len(b) - 1))
    half = t_quantile(level, df) * math.sqrt(va + vb)
    return centre - half, centre + half


def _variance(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)


def verdict(low: float, high: float, low_90: float, high_90: float, margin: float = DEFAULT_MARGIN) -> str:
    """Faster, slower, equivalent or undecided, from the ends of a ratio's interval and of its 90 % interval."""
    if low > 1 + margin:
        return "faster"
    if high < 1 / (1 + margin):
        return "slower"
    if low_90 > 1 / (1 + margin) and high_90 < 1 + margin:
        return "equivalent"
    return "undecided"


def estimate(
    groups: Sequence[Sequence[float]],
    names: Sequence[Sequence[str]] | None = None,
    *,
    margin: float = DEFAULT_MARGIN,
    level: float = DEFAULT_LEVEL,
    bootstrap: bool = True,
) -> Estimate | None:
    """The estimate for log ratios grouped by launch pair; None when there is no value at all.

    Two launches or more: interval over launch means. One launch: interval over its prompts, labelled so, no verdict.
    """
    kept = [list(g) for g in groups if len(g)]
    if not kept:
        return None
    kept_names = (
        [list(n) for n in names if len(n)] if names is not None else [[str(j) for j in range(len(g))] for g in kept]
    )
    means = [math.fsum(g) / len(g) for g in kept]
    launches = len(kept)
    over_launches = launches >= 2
    values = means if over_launches else kept[0]
    main, at_90 = t_interval(values, level), t_interval(values, EQUIVALENCE_LEVEL)
    boot = bootstrap_t(kept, level) if bootstrap else None
    wide = crossed_interval(kept, kept_names, level) if over_launches else None
    wide_90 = crossed_interval(kept, kept_names, EQUIVALENCE_LEVEL) if over_launches else None
    said: str | None = None
    said_wide: str | None = None
    note: str | None = None
    if launches < MIN_LAUNCHES:
        note = f"{launches} launch{'es' if launches > 1 else ''} an arm: a verdict needs {MIN_LAUNCHES}"
    elif main is not None and at_90 is not None:
        said = verdict(*_exp(main), *_exp(at_90), margin)
        if wide is not None and wide_90 is not None:
            said_wide = verdict(*_exp(wide), *_exp(wide_90), margin)
    low, high = _exp(main) if main else (None, None)
    low_90, high_90 = _exp(at_90) if at_90 else (None, None)
    boot_low, boot_high = _exp(boot) if boot else (None, None)
    wide_low, wide_high = _exp(wide) if wide else (None, None)
    return Estimate(
        geometric_mean=_safe_exp(math.fsum(means) / launches),
        low=low,
        high=high,
        low_90=low_90,
        high_90=high_90,
        bootstrap_low=boot_low,
        bootstrap_high=boot_high,
        new_prompts_low=wide_low,
        new_prompts_high=wide_high,
        level=level,
        margin=margin,
        launches=launches,
        prompts=len({name for row in kept_names for name in row}),
        pairs=sum(len(g) for g in kept),
        unit="launches" if over_launches else "prompts",
        verdict=said,
        verdict_new_prompts=said_wide,
        note=note,
    )


def _exp(ends: tuple[float, float]) -> tuple[float, float]:
    return _safe_exp(ends[0]), _safe_exp(ends[1])


def _safe_exp(value: float) -> float:
    """Like ``math.exp``, but saturating instead of overflowing: two launches can give ends far beyond any ratio."""
    return math.exp(max(-700.0, min(700.0, value)))
