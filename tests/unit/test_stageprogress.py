"""The words for a staging that goes on, which profiles wait for which models, and whose GPUs are free."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from specrig.facts import stagecopy, stageprogress, startorder


def record(**changes: Any) -> dict[str, Any]:
    """A progress file's content: 12.3 of 55.6 GB after 3 s."""
    return {
        "schema": 1,
        "model": "Qwen3.6-27B",
        "pid": 77,
        "started_unix": 1000.0,
        "updated_unix": 1003.0,
        "bytes_total": 55_600_000_000,
        "bytes_done": 12_300_000_000,
        "files_total": 12,
        "files_done": 3,
        "rate_bytes_s": 4.1e9,
        "eta_s": 10.6,
        "state": "running",
        "message": None,
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "model Qwen3.6-27B: 12.3 of 55.6 GB, 4.1 GB/s, 11 s left"),
        ({"eta_s": None, "rate_bytes_s": None}, "model Qwen3.6-27B: 12.3 of 55.6 GB, rate unknown"),
        ({"eta_s": 400}, "model Qwen3.6-27B: 12.3 of 55.6 GB, 4.1 GB/s, 7 min left"),
        ({"bytes_total": 271e6, "bytes_done": 41e6, "rate_bytes_s": 45e6, "eta_s": 5.1},
         "model Qwen3.6-27B: 41.0 of 271.0 MB, 45 MB/s, 5 s left"),
        ({"state": "waiting", "message": "waiting for the staging of run 5f"},
         "model Qwen3.6-27B: waiting for the staging of run 5f"),
        ({"state": "waiting"}, "model Qwen3.6-27B: waits for another staging of it"),
        ({"state": "failed", "message": "a.bin has sha256 1, the manifest says 2"},
         "model Qwen3.6-27B: a.bin has sha256 1, the manifest says 2"),
        # Over the whole time, not the last seconds.
        ({"state": "done", "bytes_done": 55_600_000_000, "updated_unix": 1013.9},
         "model Qwen3.6-27B: staged, 55.6 GB in 13.9 s, 4.0 GB/s"),
    ],
)  # fmt: skip
def test_a_line_says_how_far_it_is(changes: dict[str, Any], text: str) -> None:
    progress = stageprogress.parse(record(**changes))
    assert progress is not None
    assert stageprogress.text(progress) == text


@pytest.mark.parametrize(
    "broken",
    [
        None,
        [],
        "text",
        record(schema=2),
        record(state="asleep"),
        record(bytes_done="12"),
        record(bytes_done=-1),
        record(bytes_total=True),
        {key: value for key, value in record().items() if key != "updated_unix"},
    ],
)
def test_what_is_no_progress_is_none(broken: Any) -> None:
    assert stageprogress.parse(broken) is None


def test_what_a_terminal_would_obey_is_not_shown() -> None:
    progress = stageprogress.parse(record(state="failed", model="M\x1b]0;x\x07", message="a\nb\x1b[2J"))
    assert progress is not None
    assert stageprogress.text(progress) == "model M ]0;x : a b [2J"


def test_progress_of_an_earlier_staging_is_none() -> None:
    assert stageprogress.parse(record(), not_before=1003.5) is None
    assert stageprogress.parse(record(), not_before=1002.5) is not None


def test_lines_that_may_be_written_over_are_known_and_no_others() -> None:
    for changes in ({}, {"rate_bytes_s": None, "eta_s": None}, {"state": "waiting"}):
        progress = stageprogress.parse(record(**changes))
        assert progress is not None
        assert stageprogress.LINE.match("  " + stageprogress.text(progress))
    for line in (
        "  model Qwen3.6-27B: staged, 55.6 GB in 13.9 s, 4.0 GB/s",
        "           model Qwen3.6-27B is not in RAM",
        "TASK [Wait for the models] ****",
        "changed: [lab-guest -> lab-host(10.0.0.2)]",
    ):
        assert not stageprogress.LINE.match(line)


@pytest.mark.parametrize(
    ("profile", "needed"),
    [
        ({"model": "Big", "draft_model": "/srv/models/Draft"}, ["Big", "Draft"]),
        ({"model": "Big", "draft_model": "/srv/models/Big"}, ["Big"]),
        ({"model": "Big"}, ["Big"]),
        ({"model": "/srv/models/Big/"}, ["Big"]),
        ({"model": "Other", "draft_model": "/data/Draft"}, []),
        ({"model": "Big", "draft_model": "org/draft-on-the-hub"}, ["Big"]),
        ({}, []),
    ],
)
def test_a_profile_needs_its_target_and_its_draft(profile: dict[str, Any], needed: list[str]) -> None:
    assert stageprogress.models_of(profile, "/srv/models/", ["Big", "Draft"]) == needed


def test_each_profile_starts_with_the_last_of_its_models() -> None:
    waiting = {"chat": ["Draft"], "agent": ["Big", "Draft"], "other": ["Lost", "Big"]}
    assert stageprogress.release(waiting, [], {}) == ([], waiting, {})
    start, rest, lost = stageprogress.release(waiting, ["Draft"], {"Lost": "its source is gone"})
    assert start == ["chat"]
    assert rest == {"agent": ["Big"]}
    assert lost == {"other": "other: its model Lost is not there: its source is gone"}
    assert stageprogress.release(rest, ["Draft", "Big"], {}) == (["agent"], {}, {})


def process(visible: str | None) -> dict[str, Any]:
    return {"environ": None if visible is None else {"CUDA_VISIBLE_DEVICES": visible}}


@pytest.mark.parametrize(
    ("seen", "gpus"),
    [("0,1", {0, 1}), ("3", {3}), ("", set()), ("GPU-8a", None), (None, None)],
)
def test_the_gpus_of_a_server_are_those_of_its_environment(seen: str | None, gpus: set[int] | None) -> None:
    assert startorder.gpus_of(process(seen)) == gpus
    assert startorder.gpus_of(None) is None


@pytest.mark.parametrize(
    ("wanted", "held", "leaving", "expected"),
    [
        # Nothing runs: all at once.
        ({"chat": [0], "agent": [2, 3]}, {}, [], (["chat", "agent"], [], [])),
        # Restarts where they are, all at once.
        ({"chat": [0], "agent": [2, 3]}, {"chat": {0}, "agent": {2, 3}}, [], (["chat", "agent"], [], [])),
        # A leftover holds one of agent's: agent waits until it has stopped, chat does not.
        ({"chat": [0], "agent": [2, 3]}, {"bench": {3}}, ["bench"], (["chat"], [], ["agent"])),
        # A leftover elsewhere is in nobody's way.
        ({"chat": [0]}, {"bench": {3}}, ["bench"], (["chat"], [], [])),
        # Two that change places: both stop before one starts.
        ({"chat": [1], "agent": [0]}, {"chat": {0}, "agent": {1}}, [], ([], ["chat", "agent"], ["chat", "agent"])),
        # chat moves to a free GPU, agent takes over the one it leaves; other is in nobody's way.
        (
            {"chat": [5], "agent": [0], "other": [7]},
            {"chat": {0}, "other": {7}},
            [],
            (["other"], ["chat"], ["chat", "agent"]),
        ),
        # Where nobody knows what a leftover holds, it may be any.
        ({"chat": [0]}, {"bench": None}, ["bench"], ([], [], ["chat"])),
    ],
)
def test_a_server_waits_only_for_those_that_hold_its_gpus(wanted, held, leaving, expected) -> None:
    assert startorder.order(wanted, held, leaving) == expected


def test_the_smallest_model_is_taken_first_and_of_each_the_largest_file() -> None:
    sizes = [("Big", 5), ("Draft", 2), ("Big", 9), ("Draft", 3), ("Big", 1)]
    items = [SimpleNamespace(group=group, size=size, path=f"{group}/{size}") for group, size in sizes]
    copier = stagecopy.Copier(items, 1)
    taken = [copier._next()[0].path for _item in items]
    assert taken == ["Draft/3", "Draft/2", "Big/9", "Big/5", "Big/1"]
