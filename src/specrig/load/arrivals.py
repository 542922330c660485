"""When requests are due."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from specrig.model.cell import Cell
from specrig.tokens.trace import Row


def due_times(cell: Cell, trace: Sequence[Row] = ()) -> list[float] | None:
    """The moments at which the requests of an open loop are due.

    Args:
        cell: its ``arrival`` is one of
            ``closed`` (the next one when one ends),
            ``constant`` (evenly spaced, ``rate`` a second),
            ``poisson`` (independent, exponential gaps),
            ``gamma`` (independent gaps of the same mean, gamma-distributed with shape ``burstiness``: 1 is Poisson,
            less is burstier, more is more even; the coefficient of variation is 1 / sqrt(shape)),
            ``burst`` (``burst`` at once, so often that the mean is ``rate``),
            ``ramp`` (evenly along a rate that goes from ``rate`` to ``rate_to`` in a straight line) or
            ``trace`` (as recorded, ``trace_speed`` times as fast).
            Random ones depend on the cell's seed alone: the same for every method and launch.
        trace: the rows of ``trace``.

    Returns:
        Seconds after the start, ascending, the first at 0; null for a closed loop.

    Raises:
        ValueError: an open loop without a positive rate, or an arrival of another name.
    """
    arrival, count = cell.arrival, cell.requests
    if arrival == "closed":
        return None
    if arrival == "trace":
        return [row.at_s / (cell.trace_speed or 1.0) for row in trace]
    rate = cell.rate
    if rate is None or not rate > 0:
        raise ValueError(f"arrival {arrival} needs a rate above 0 in requests a second, got {rate!r}")
    if arrival == "constant":
        return [index / rate for index in range(count)]
    if arrival == "burst":
        size = cell.burst or 1
        return [index // size * size / rate for index in range(count)]
    if arrival == "ramp":
        return _ramp(count, rate, cell.rate_to or rate)
    source = random.Random(f"arrivals-{cell.seed}")
    shape = cell.burstiness or 1.0
    if arrival == "poisson":
        gaps = [source.expovariate(rate) for _ in range(count - 1)]
    elif arrival == "gamma":
        gaps = [source.gammavariate(shape, 1 / (shape * rate)) for _ in range(count - 1)]
    else:
        raise ValueError(f"arrival {arrival!r} is not one that is known")
    due = [0.0]
    for gap in gaps:
        due.append(due[-1] + gap)
    return due


def _ramp(count: int, first: float, last: float) -> list[float]:
    """Request i is due when the integral of the rate reaches i.

    Over a time T the rate r(t) = first + (last - first) t / T brings (first + last) T / 2 requests, so
    T = 2 (count - 1) / (first + last); request i solves first t + (last - first) t^2 / (2 T) = i.
    """
    if count < 2:
        return [0.0] * count
    bend = (last - first) * (first + last) / (2 * (count - 1))
    return [2 * i / (first + math.sqrt(max(first * first + 2 * bend * i, 0.0))) for i in range(count)]


def densest_rate(cell: Cell, due: Sequence[float]) -> float | None:
    """Requests a second where they come closest, on average; None where all are due at once.

    Args:
        cell: the cell.
        due: the moments, in any order; a trace's rate is their number over their time.
    """
    if cell.rate is not None:
        return max(cell.rate, cell.rate_to or 0.0)
    span = max(due) - min(due) if due else 0.0
    return (len(due) - 1) / span if span > 0 else None
