"""When requests are due."""

from __future__ import annotations

import random
from typing import Literal

Arrival = Literal["closed", "constant", "poisson"]


def due_times(arrival: str, requests: int, rate: float | None, seed: int) -> list[float] | None:
    """The moments at which the requests of an open loop are due.

    Args:
        arrival: ``closed`` (the next one when one ends), ``constant`` (evenly spaced) or ``poisson`` (independent,
            exponential gaps).
        requests: how many.
        rate: requests a second, for an open loop.
        seed: for ``poisson``; the same seed gives the same moments.

    Returns:
        Seconds after the start, ascending, the first at 0; null for a closed loop.

    Raises:
        ValueError: an open loop without a positive rate, or an arrival of another name.
    """
    if arrival == "closed":
        return None
    if arrival not in ("constant", "poisson"):
        raise ValueError(f"arrival {arrival!r} is not one of closed, constant, poisson")
    if rate is None or not rate > 0:
        raise ValueError(f"arrival {arrival} needs a rate above 0 in requests a second, got {rate!r}")
    if arrival == "constant":
        return [index / rate for index in range(requests)]
    source = random.Random(f"arrivals-{seed}")
    due = [0.0]
    for _ in range(requests - 1):
        due.append(due[-1] + source.expovariate(rate))
    return due[:requests]
