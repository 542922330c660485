"""Launches: every block holds every arm once, and no arm is favoured by its place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrig.model.cell import expand
from specrig.model.profile import parse_profiles
from specrig.model.schedule import balanced, launches
from specrig.model.sweep import parse_sweep

SWEEP = """\
name: n
model: M
launches: %d
seed: %d
profiles: ['tp*']
workloads:
  - {name: a, prompts: prose, prompt_tokens: [64, 128, 256], output_tokens: 8, concurrency: [1, 2]}
  - {name: b, prompts: code, prompt_tokens: 512, output_tokens: 8}
"""
METHODS = ("autoregressive", "dflash", "ddtree-b8", "ddtree-b15", "ddtree-b31")
PROFILES = parse_profiles(
    {f"tp{tp}-{m}": {"model": "M", "tp": tp, "method": m} for tp in (1, 4) for m in METHODS},
)


@given(st.integers(1, 12), st.integers(2, 11), st.integers(0, 99))
def test_positions_differ_by_at_most_one(items: int, blocks: int, seed: int) -> None:
    orders = balanced(list(range(items)), blocks, str(seed))
    assert len(orders) == blocks
    assert all(sorted(order) == list(range(items)) for order in orders)
    sums = [sum(order.index(item) for order in orders) for item in range(items)]
    assert max(sums) - min(sums) <= 1


def test_three_launches_of_five_arms_balance_exactly() -> None:
    orders = balanced("abcde", 3, "1")
    assert {sum(order.index(item) for order in orders) for item in "abcde"} == {6}


@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
def test_every_block_holds_every_arm_once(blocks: int) -> None:
    sweep = parse_sweep(SWEEP % (blocks, 1))
    cells = expand(sweep, PROFILES)
    plan = launches(sweep, cells)
    assert [launch.index for launch in plan] == list(range(blocks * 10))
    assert [launch.block for launch in plan] == sorted(launch.block for launch in plan)
    for block in range(blocks):
        assert sorted(launch.profile or "" for launch in plan if launch.block == block) == sorted(PROFILES)
    ids = {p: {c.id for c in cells if c.profile == p} for p in PROFILES}
    assert all(set(launch.cells) == ids[launch.profile or ""] for launch in plan)


def test_arms_that_are_compared_stand_together() -> None:
    sweep = parse_sweep(SWEEP % (2, 1))
    plan = launches(sweep, expand(sweep, PROFILES))
    tps = [PROFILES[launch.profile or ""].tp for launch in plan]
    assert tps[:5] in ([1] * 5, [4] * 5)
    assert sorted(tps[:10]) == [1] * 5 + [4] * 5
    # the second block turns the order of the groups and of the arms around
    first, second = [launch.profile for launch in plan[:10]], [launch.profile for launch in plan[10:]]
    assert first == second[::-1]


def test_cells_run_in_one_order_for_all_arms_of_a_block() -> None:
    sweep = parse_sweep(SWEEP % (2, 1))
    cells = {c.id: c for c in expand(sweep, PROFILES)}
    plan = launches(sweep, list(cells.values()))
    shapes = [
        [(cells[i].workload, cells[i].prompt_tokens, cells[i].concurrency) for i in launch.cells] for launch in plan
    ]
    assert all(shape == shapes[0] for shape in shapes[:10])
    assert all(shape == shapes[10] for shape in shapes[10:])
    assert shapes[0] != shapes[10]


def test_a_seed_is_a_schedule() -> None:
    def order(seed: int) -> list[object]:
        sweep = parse_sweep(SWEEP % (3, seed))
        return [launch.profile for launch in launches(sweep, expand(sweep, PROFILES))]

    assert order(1) == order(1)
    assert order(1) != order(2)
