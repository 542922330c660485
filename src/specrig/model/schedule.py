"""Which server is started when: balanced, interleaved launches, so that heat and drift favour no arm."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from specrig.model.cell import Cell, match_key
from specrig.model.sweep import Sweep

T = TypeVar("T")


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """One start of a server for an arm. Block b holds every profile once; `cells` are ids in the order they run."""

    index: int
    block: int
    profile: str | None
    cells: tuple[str, ...]


def launches(sweep: Sweep, cells: Sequence[Cell]) -> list[Launch]:
    """Return the launches of a sweep in the order they run.

    `sweep.launches` blocks hold every profile once. Arms of one tp, which are the ones compared, stand next to each
    other; the order of the groups and of the arms inside each is balanced over the blocks (see `balanced`). Inside a
    launch the cells are shuffled, the same way for every arm of a block. All of it is a function of the sweep's seed.
    """
    arms: dict[str | None, list[Cell]] = {}
    for cell in cells:
        arms.setdefault(cell.profile, []).append(cell)
    groups: dict[int | None, list[str | None]] = {}
    for name, own in arms.items():
        groups.setdefault(own[0].tp, []).append(name)
    group_order = balanced(list(groups), sweep.launches, f"{sweep.seed}/groups")
    arm_order = {tp: balanced(names, sweep.launches, f"{sweep.seed}/arms/{tp}") for tp, names in groups.items()}
    out: list[Launch] = []
    for block in range(sweep.launches):
        for tp in group_order[block]:
            for name in arm_order[tp][block]:
                ids = tuple(c.id for c in sorted(arms[name], key=lambda c: _shuffled(sweep.seed, block, c)))
                out.append(Launch(index=len(out), block=block, profile=name, cells=ids))
    return out


def balanced(items: Sequence[T], blocks: int, seed: str) -> list[list[T]]:
    """Return `blocks` orders of the items whose positions, summed over the blocks, differ by at most one (blocks >= 2).

    Blocks come in pairs, an order and its reverse (ABBA, which cancels linear drift). An odd number ends with three:
    an order, the same rotated by half, and the order that makes up for both.
    """
    orders: list[list[T]] = []
    rng = random.Random(f"specrig/{seed}")
    while len(orders) < blocks:
        first = list(items)
        rng.shuffle(first)
        left = blocks - len(orders)
        if left == 3 and len(first) > 2:
            count = len(first)
            half = (count - 1) // 2  # item i of the first order stands at (i + half) % count in the second
            second = [first[(p - half) % count] for p in range(count)]
            late = sorted(range(count), key=lambda i: -(i + (i + half) % count))
            orders += [first, second, [first[i] for i in late]]
        else:
            orders += [first, first[::-1]][:left]
    return orders


def _shuffled(seed: int, block: int, cell: Cell) -> str:
    key = f"{seed}/{block}/{match_key(cell)[0]}/{match_key(cell)[2:]}"
    return hashlib.sha256(key.encode()).hexdigest()
