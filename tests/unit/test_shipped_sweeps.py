"""The sweeps that are shipped ask what they promise, of the profiles of both inventories."""

from __future__ import annotations

from pathlib import Path

import pytest

from specrig.model.cell import Cell, expand
from specrig.model.profile import Profile
from specrig.model.schedule import launches
from specrig.model.sweep import Sweep, load_sweep
from specrig.tokens.limits import for_profile
from specrig.tokens.plan import plan
from specrig.tokens.plan_cli import read_profiles
from specrig.tokens.tokenizer import load

METHODS = {"autoregressive", "dflash", "ddtree-b8", "ddtree-b15", "ddtree-b31"}
INVENTORIES = ["lab", "rtxpro6000x8"]


def shipped(repository: Path, name: str) -> Sweep:
    return load_sweep(repository / "sweeps" / f"{name}.yml")


def profiles(repository: Path, inventory: str) -> dict[str, Profile]:
    return read_profiles(repository / "inventory" / inventory / "group_vars" / "all.yml")


def points(cells: list[Cell]) -> set[tuple[int, str, int | None, int, int]]:
    """(tp, method, prompt, generated, at once), lengths that are read off a longer stream included."""
    return {
        (cell.tp, cell.method, cell.prompt_tokens, length, cell.concurrency)
        for cell in cells
        if cell.prompts != "agentic"
        for length in cell.read_at
    }


@pytest.mark.parametrize("inventory", INVENTORIES)
def test_full_spans_the_whole_question(repository: Path, inventory: str) -> None:
    cells = expand(shipped(repository, "full"), profiles(repository, inventory))
    lengths = {1: (4096, 25_000), 4: (4096, 25_000, 30_000, 100_000), 8: (4096, 30_000, 100_000)}
    assert points(cells) == {
        (tp, method, prompt, generated, load)
        for tp, prompts in lengths.items()
        for method in METHODS
        for prompt in prompts
        for generated in (64, 256, 1024)
        for load in (1, 8)
    }
    sessions = [cell for cell in cells if cell.prompts == "agentic"]
    assert {(cell.tp, cell.method) for cell in sessions} == {(tp, method) for tp in lengths for method in METHODS}
    assert {(cell.prompt_tokens, cell.sampling.temperature) for cell in sessions} == {(4096, 0)}
    assert not any(found.serve for found in profiles(repository, inventory).values() if found.name in _used(cells))


def _used(cells: list[Cell]) -> set[str]:
    return {cell.profile for cell in cells if cell.profile is not None}


@pytest.mark.parametrize("inventory", INVENTORIES)
@pytest.mark.parametrize("name", ["quick", "nightly", "full"])
def test_every_method_has_its_baseline_and_starts_often_enough_for_a_verdict(
    repository: Path, inventory: str, name: str
) -> None:
    sweep = shipped(repository, name)
    cells = expand(sweep, profiles(repository, inventory))
    assert sweep.baseline == "autoregressive"
    assert sweep.sampling.temperature == 0
    shapes = {
        (cell.workload, cell.tp, cell.prompt_tokens, cell.output_tokens, cell.concurrency): set[str]() for cell in cells
    }
    for cell in cells:
        shapes[cell.workload, cell.tp, cell.prompt_tokens, cell.output_tokens, cell.concurrency].add(cell.method)
    for shape, methods in shapes.items():
        assert methods > {"autoregressive"}, shape
    assert any(cell.prompts == "agentic" for cell in cells)
    # Three starts of a server: with fewer there is no interval over launches, and no verdict.
    starts = [launch.profile for launch in launches(sweep, cells)]
    assert {profile: starts.count(profile) for profile in set(starts)} == dict.fromkeys(_used(cells), 3)


@pytest.mark.parametrize("name", ["quick", "nightly", "full"])
def test_every_cell_fits_the_windows_of_the_lab(repository: Path, tokenizer_dir: Path, name: str) -> None:
    found = profiles(repository, "lab")
    limits = {profile: limit for profile in found if (limit := for_profile(found[profile])) is not None}
    planned = plan(shipped(repository, name), load(tokenizer_dir), limits, found)
    assert planned.cells
    assert planned.infeasible == ()
