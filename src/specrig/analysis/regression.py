"""A new run against a base run, cell by cell: what got slower, by how much, and whether the data can tell.

The two runs' launches are not paired, so with two launches a side the interval is Welch's over launch means of log
rates on the common prompts. With one launch on a side the interval comes from the prompts, and the launch-to-launch
spread that one launch cannot show is put in as an assumption that is stated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from specrig.analysis.frames import Part, RunData
from specrig.analysis.intervals import DEFAULT_LEVEL, t_interval, welch_interval
from specrig.analysis.samples import Key, Sample, arms, by_arm, collect, key_of
from specrig.analysis.speedup import Cells, decode_cells, end_to_end_cells, session_cells, throughput_cells
from specrig.analysis.validity import PartValidity, judge

METRICS = ("decode", "end_to_end", "throughput", "session", "ttft")
DEFAULT_MAX_REGRESSION = 0.05
DEFAULT_LAUNCH_SPREAD = 0.01
"""Standard deviation of a launch's log rate assumed where a side has one launch."""
REGRESSION, FINE, UNDECIDED = "regression", "no regression", "undecided"


@dataclass(frozen=True)
class Change:
    """One metric of one cell in both runs.

    ``ratio`` is new over base of the figure itself: a rate (more is better) or, for ``ttft``, a time (less is better).
    """

    metric: str
    key: Key
    method: str
    base: float
    new: float
    ratio: float
    low: float | None
    high: float | None
    base_launches: int
    new_launches: int
    prompts: int
    assumed_spread: float | None
    status: str
    note: str | None


@dataclass(frozen=True)
class Lost:
    """A cell that the base run has as valid and the new run does not; ``broken``: it ran there, invalid."""

    key: Key
    method: str
    broken: bool
    reason: str


@dataclass(frozen=True)
class Comparison:
    """All changes, the cells lost, and how many cells only the new run has."""

    changes: list[Change]
    lost: list[Lost]
    only_new: int

    @property
    def failed(self) -> bool:
        """A regression that the interval supports, or a cell that broke."""
        return any(c.status == REGRESSION for c in self.changes) or any(item.broken for item in self.lost)


def compare_runs(
    base: RunData,
    new: RunData,
    *,
    max_regression: float = DEFAULT_MAX_REGRESSION,
    level: float = DEFAULT_LEVEL,
    launch_spread: float = DEFAULT_LAUNCH_SPREAD,
    metrics: Iterable[str] = METRICS,
) -> Comparison:
    """Compare every (key, method) that both runs hold, at every answer length."""
    wanted = tuple(metrics)
    base_valid, new_valid = judge(base), judge(new)
    left, right = _tables(base, base_valid), _tables(new, new_valid)
    changes: list[Change] = []
    for metric in METRICS:
        if metric not in wanted:
            continue
        for where in sorted(set(left[metric]) & set(right[metric])):
            item = _change(
                metric, *where, left[metric][where], right[metric][where], max_regression, level, launch_spread
            )
            if item is not None:
                changes.append(item)
    return Comparison(changes, _lost(base, base_valid, new, new_valid), _only_new(base, new))


def _tables(run: RunData, valid: Mapping[Part, PartValidity]) -> dict[str, dict[tuple[Key, str], Cells]]:
    grouped = by_arm(collect(run, valid).rows)
    flat = {(key, method): rows for key, found in grouped.items() for method, rows in found.items()}
    full = {where: [row for row in rows if row.full] for where, rows in flat.items()}
    return {
        "decode": {where: decode_cells(rows) for where, rows in flat.items()},
        "end_to_end": {where: end_to_end_cells(rows) for where, rows in flat.items()},
        "throughput": _flatten(throughput_cells(run, valid)),
        "session": _flatten(session_cells(run, valid)),
        "ttft": {where: _ttft_cells(rows) for where, rows in full.items() if rows},
    }


def _flatten(tables: Mapping[Key, Mapping[str, Cells]]) -> dict[tuple[Key, str], Cells]:
    return {(key, method): cells for key, found in tables.items() for method, cells in found.items()}


def _ttft_cells(rows: Iterable[Sample]) -> Cells:
    """Block -> prompt -> (1, TTFT): as a rate, first tokens per second of waiting."""
    out: dict[int, dict[str, tuple[float, float]]] = {}
    for row in rows:
        if row.ttft_s is not None and row.ttft_s > 0:
            old = out.setdefault(row.block, {}).get(row.prompt_id, (0.0, 0.0))
            out[row.block][row.prompt_id] = (old[0] + 1, old[1] + row.ttft_s)
    return out


def _change(
    metric: str,
    key: Key,
    method: str,
    base: Cells,
    new: Cells,
    max_regression: float,
    level: float,
    launch_spread: float,
) -> Change | None:
    sides = [[units for units in cells.values() if units] for cells in (base, new)]
    if not sides[0] or not sides[1]:
        return None
    common = sorted(set.intersection(*(set(units) for side in sides for units in side)))
    if not common:
        return None
    sign = -1.0 if metric == "ttft" else 1.0
    logs = [[[sign * math.log(units[u][0] / units[u][1]) for u in common] for units in side] for side in sides]
    means = [[math.fsum(row) / len(row) for row in side] for side in logs]
    centres = [math.fsum(side) / len(side) for side in means]
    launches = [len(side) for side in means]
    assumed = None
    note = None
    if min(launches) >= 2:
        ends = welch_interval(means[1], means[0], level)
    else:
        ends, assumed = None, launch_spread
        over_prompts = [
            math.fsum(row[i] for row in logs[1]) / launches[1] - math.fsum(row[i] for row in logs[0]) / launches[0]
            for i in range(len(common))
        ]
        inner = t_interval(over_prompts, level)
        if inner is None:
            note = "one value a side: no interval"
            assumed = None
        else:
            from scipy.stats import norm

            outer = float(norm.ppf(0.5 + level / 2)) * launch_spread * math.sqrt(1 / launches[0] + 1 / launches[1])
            half = math.hypot((inner[1] - inner[0]) / 2, outer)
            middle = centres[1] - centres[0]
            ends = middle - half, middle + half
            note = f"one launch on a side: interval over prompts, a launch spread of {launch_spread:.3g} assumed"
    low, high = (math.exp(max(-700.0, ends[0])), math.exp(min(700.0, ends[1]))) if ends else (None, None)
    return Change(
        metric=metric,
        key=key,
        method=method,
        base=math.exp(centres[0]),
        new=math.exp(centres[1]),
        ratio=math.exp(centres[1] - centres[0]),
        low=low,
        high=high,
        base_launches=launches[0],
        new_launches=launches[1],
        prompts=len(common),
        assumed_spread=assumed,
        status=status(metric, low, high, max_regression),
        note=note,
    )


def status(metric: str, low: float | None, high: float | None, max_regression: float) -> str:
    """Regression when the whole interval is beyond the limit, no regression when none of it is, else undecided.

    The limit is a rate of (1 - max_regression) times the base's, or a TTFT of (1 + max_regression) times.
    """
    if low is None or high is None:
        return UNDECIDED
    if metric == "ttft":
        limit = 1 + max_regression
        return REGRESSION if low > limit else FINE if high <= limit else UNDECIDED
    limit = 1 - max_regression
    return REGRESSION if high < limit else FINE if low >= limit else UNDECIDED


def _where(run: RunData, cell: str) -> tuple[Key, str]:
    return key_of(run, cell), arms(run)[cell]


def _lost(
    base: RunData, base_valid: Mapping[Part, PartValidity], new: RunData, new_valid: Mapping[Part, PartValidity]
) -> list[Lost]:
    good = sorted({_where(base, part[0]) for part, item in base_valid.items() if item.valid})
    there: dict[tuple[Key, str], list[PartValidity]] = {}
    for part, item in new_valid.items():
        there.setdefault(_where(new, part[0]), []).append(item)
    out = []
    for key, method in good:
        parts = there.get((key, method), [])
        if any(part.valid for part in parts):
            continue
        ran = [part for part in parts if part.state in ("done", "invalid", "failed")]
        reason = next((part.reason for part in ran or parts if part.reason), None) or "not in the new run"
        out.append(Lost(key, method, bool(ran), reason))
    return out


def _only_new(base: RunData, new: RunData) -> int:
    return len({_where(new, cell) for cell in new.cells} - {_where(base, cell) for cell in base.cells})
