"""The best method per cell, without the winner's curse: chosen on one half of the blocks, estimated on the other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from specrig.analysis.samples import Key
from specrig.analysis.speedup import Cells

BETWEEN_BLOCKS = "chosen on half of the launch blocks, estimated on the other half"
WITHIN_ONE_LAUNCH = "chosen on half of the prompts, estimated on the other half, within one launch"


@dataclass(frozen=True)
class Choice:
    """The method to use at one key.

    Attributes:
        method: the arm with the highest geometric mean rate on the selection half (the baseline can win).
        speedup: its speed-up over the baseline on the other half; 1 when the baseline won.
        runner_up, over_runner_up: the second of the selection half and the ratio to it on the other half.
        selected_on, estimated_on: block numbers, or prompts when there is one block.
        optimistic: the naive figure, selected and estimated on everything.
        how: one of the two sentences of this module.
    """

    key: Key
    method: str
    speedup: float
    runner_up: str | None
    over_runner_up: float | None
    selected_on: tuple[str, ...]
    estimated_on: tuple[str, ...]
    optimistic: float
    how: str


def best(key: Key, found: Mapping[str, Cells], baseline: str) -> Choice | None:
    """Choose among the arms of a key; None with fewer than two arms, no baseline, or nothing to hold out."""
    if baseline not in found or len(found) < 2:
        return None
    pool = {m: _logs(cells) for m, cells in found.items()}
    units = set.intersection(*(set(logs) for logs in pool.values()))
    blocks = sorted({b for b, _ in units})
    if len(blocks) >= 2:
        chosen = {u for u in units if blocks.index(u[0]) % 2 == 0}
        selected_on = tuple(f"block {b}" for b in blocks[::2])
        estimated_on = tuple(f"block {b}" for b in blocks[1::2])
        how = BETWEEN_BLOCKS
    else:
        names = sorted(units)
        if len(names) < 2:
            return None
        chosen = set(names[::2])
        selected_on = tuple(name for _, name in names[::2])
        estimated_on = tuple(name for _, name in names[1::2])
        how = WITHIN_ONE_LAUNCH
    held = units - chosen
    ranked = sorted(pool, key=lambda m: (-_mean(pool[m], chosen), m))
    method = ranked[0]
    return Choice(
        key=key,
        method=method,
        speedup=math.exp(_mean(pool[method], held) - _mean(pool[baseline], held)),
        runner_up=ranked[1],
        over_runner_up=math.exp(_mean(pool[method], held) - _mean(pool[ranked[1]], held)),
        selected_on=selected_on,
        estimated_on=estimated_on,
        optimistic=math.exp(max(_mean(logs, units) for logs in pool.values()) - _mean(pool[baseline], units)),
        how=how,
    )


@dataclass(frozen=True)
class Regret:
    """What always using one method costs against the best of each cell: 1 - geometric mean of the ratio, held out."""

    tp: int
    method: str
    cells: int
    loss: float


def regrets(tables: Mapping[Key, Mapping[str, Cells]], choices: Mapping[Key, Choice]) -> list[Regret]:
    """Loss of every fixed method per tp, over the keys where it and a choice exist, on the held-out half."""
    logs: dict[tuple[int, str], list[float]] = {}
    for key, choice in choices.items():
        pool = {m: _logs(cells) for m, cells in tables[key].items()}
        units = set.intersection(*(set(p) for p in pool.values()))
        blocks = sorted({b for b, _ in units})
        names = sorted(units)
        held = {u for u in units if blocks.index(u[0]) % 2} if len(blocks) >= 2 else set(names[1::2])
        for method, values in pool.items():
            gap = _mean(values, held) - _mean(pool[choice.method], held)
            logs.setdefault((key.tp, method), []).append(gap)
    return [
        Regret(tp, method, len(gaps), 1 - math.exp(math.fsum(gaps) / len(gaps)))
        for (tp, method), gaps in sorted(logs.items())
    ]


def _logs(cells: Cells) -> dict[tuple[int, str], float]:
    return {
        (block, unit): math.log(tokens / seconds)
        for block, units in cells.items()
        for unit, (tokens, seconds) in units.items()
    }


def _mean(logs: Mapping[tuple[int, str], float], units: set[tuple[int, str]]) -> float:
    """Mean over blocks of the mean over units, so that blocks weigh the same."""
    by_block: dict[int, list[float]] = {}
    for unit in units:
        by_block.setdefault(unit[0], []).append(logs[unit])
    return math.fsum(math.fsum(v) / len(v) for v in by_block.values()) / len(by_block) if by_block else math.nan
