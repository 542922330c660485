"""Is the output the same as the baseline's? Divergence hazard at temperature 0, against the baseline's own floor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from specrig.analysis.samples import Key, Sample


@dataclass(frozen=True)
class Divergence:
    """Two arms' outputs compared prompt by prompt.

    Attributes:
        pairs: outputs compared.
        identical: pairs without a difference over the compared tokens.
        diverged: pairs with one.
        tokens: tokens compared: up to and with the first difference, else up to the shorter output (censored).
        hazard: diverged / tokens, per token.
        hazard_low, hazard_high: exact 95 % Poisson interval of it.
    """

    pairs: int
    identical: int
    diverged: int
    tokens: int
    hazard: float
    hazard_low: float
    hazard_high: float


@dataclass(frozen=True)
class Losslessness:
    """A method against the baseline, and the floor: the baseline against itself with another batch shape."""

    key: Key
    method: str
    baseline: str
    against_baseline: Divergence
    floor: Divergence | None
    floor_from: str | None
    mcnemar_p: float | None
    """Exact McNemar test of "identical", method against floor, over the same prompts; None without a floor."""


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs within the shorter of the two; None when there is none."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None


def divergence(pairs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Divergence | None:
    """Hazard of divergence over pairs of output ids; None without a pair that has a token to compare."""
    count = diverged = tokens = 0
    for a, b in pairs:
        if not a or not b:
            continue
        count += 1
        at = first_difference(a, b)
        diverged += at is not None
        tokens += min(len(a), len(b)) if at is None else at + 1
    if not count:
        return None
    low, high = _poisson(diverged)
    return Divergence(count, count - diverged, diverged, tokens, diverged / tokens, low / tokens, high / tokens)


def losslessness(rows: Iterable[Sample], baseline: str) -> list[Losslessness]:
    """Per key and method with output ids; the floor is the baseline at another concurrency, else in another launch."""
    table: dict[Key, dict[str, dict[tuple[int, str], Sequence[int]]]] = {}
    for row in rows:
        if row.full and row.output_ids:
            table.setdefault(row.key, {}).setdefault(row.method, {})[(row.block, row.prompt_id)] = row.output_ids
    out: list[Losslessness] = []
    for key in sorted(table):
        base = table[key].get(baseline)
        if base is None:
            continue
        floor_pairs, floor_from = _floor(table, key, baseline)
        floor = divergence(floor_pairs.values())
        for method in sorted(table[key]):
            if method == baseline:
                continue
            common = {u: (ids, base[u]) for u, ids in table[key][method].items() if u in base}
            found = divergence(common.values())
            if found is not None:
                test = _mcnemar(common, floor_pairs) if floor is not None else None
                out.append(Losslessness(key, method, baseline, found, floor, floor_from if floor else None, test))
    return out


def _floor(
    table: dict[Key, dict[str, dict[tuple[int, str], Sequence[int]]]], key: Key, baseline: str
) -> tuple[dict[tuple[int, str], tuple[Sequence[int], Sequence[int]]], str]:
    base = table[key][baseline]
    others = sorted(k for k in table if k != key and replace(k, concurrency=key.concurrency) == key)
    for other in others:
        again = table[other].get(baseline, {})
        pairs = {u: (ids, again[u]) for u, ids in base.items() if u in again}
        if pairs:
            return pairs, f"the baseline at concurrency {other.concurrency}"
    blocks = sorted({b for b, _ in base})
    pairs = {
        (b, p): (ids, base[(blocks[0], p)]) for (b, p), ids in base.items() if b != blocks[0] and (blocks[0], p) in base
    }
    return pairs, "the baseline in another launch"


def _poisson(count: int, level: float = 0.95) -> tuple[float, float]:
    """Exact (Garwood) interval of a Poisson mean, by chi-square quantiles."""
    from scipy.stats import chi2

    tail = (1 - level) / 2
    low = float(chi2.ppf(tail, 2 * count)) / 2 if count else 0.0
    return low, float(chi2.ppf(1 - tail, 2 * count + 2)) / 2


def _mcnemar(
    method: dict[tuple[int, str], tuple[Sequence[int], Sequence[int]]],
    floor: dict[tuple[int, str], tuple[Sequence[int], Sequence[int]]],
) -> float | None:
    """Exact two-sided McNemar p over the prompts that both compare; None without a common one."""
    common = set(method) & set(floor)
    if not common:
        return None
    only_method = only_floor = 0
    for unit in common:
        a = first_difference(*method[unit]) is None
        b = first_difference(*floor[unit]) is None
        only_method += a and not b
        only_floor += b and not a
    n = only_method + only_floor
    tail = sum(math.comb(n, i) for i in range(min(only_method, only_floor) + 1)) / 2**n
    return min(1.0, 2 * tail) if n else 1.0
