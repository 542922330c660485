"""What bounded a run: the longest chain of steps that had to follow each other."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrig.facts import criticalpath


def task(name: str, start: float, end: float) -> dict[str, Any]:
    return {"name": name, "task": name, "start": start, "end": end}


def beside(name: str, start: float, end: float, told_by: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "start": start, "end": end, "task": told_by, "after": [], **more}


# A recovery of 66 s: the model is staged from 3.5 to 14.7, the server starts at 15.8 and answers at 63.9.
RECOVERY = [
    task("lock", 0, 1),
    task("host", 1, 3),
    task("model store", 3, 4),
    task("guest", 4, 6),
    task("servers", 6, 7),
    task("servers", 7, 15),
    task("servers", 15, 16),
    task("servers", 16, 64),
    task("gates", 64, 66),
]
MODEL = beside("model M", 3.5, 14.7, 5, detail="4.9 GB/s", kind="model")
AGENT = beside("agent: start to completion", 15.8, 63.9, 7, kind="server")


def test_a_recovery_is_bounded_by_its_model_and_then_by_its_server() -> None:
    lines, record = criticalpath.told(RECOVERY, [MODEL, AGENT], 66.0)
    assert lines == [
        "host 2.0 s > model M 11.2 s (4.9 GB/s) > agent: start to completion 48.1 s > gates 2.0 s = 63 s of 66 s"
    ]
    assert record["seconds"] == pytest.approx(66.0)
    assert [(row["name"], row["seconds"]) for row in record["path"]] == [
        ("lock", 1),
        ("host", 2),
        ("model store", 0.5),
        ("model M", pytest.approx(11.2)),
        ("servers", pytest.approx(1.1)),
        ("agent: start to completion", pytest.approx(48.1)),
        ("servers", pytest.approx(0.1)),
        ("gates", 2),
    ]
    assert {row["name"]: row["critical"] for row in record["beside"]} == {"model M": True, AGENT["name"]: True}


def test_what_is_not_on_the_path_shows_how_much_it_had_to_spare() -> None:
    # The draft is there 9.7 s before the model; chat, started at 6.5, answers at 36.9, 27 s before agent.
    draft = beside("model D", 3.5, 5.0, 5)
    chat = beside("chat: start to completion", 6.5, 36.9, 7)
    lines, record = criticalpath.told(RECOVERY, [MODEL, draft, chat, AGENT], 66.0)
    slack = {row["name"]: row["slack_s"] for row in record["beside"]}
    assert slack["model D"] == pytest.approx(9.7)
    assert slack["chat: start to completion"] == pytest.approx(27.0)
    assert slack["model M"] == slack["agent: start to completion"] == 0
    assert lines[1] == "beside it: model D 1.5 s (9.7 s to spare), chat: start to completion 30.4 s (27.0 s to spare)"


def test_a_model_that_is_there_before_anybody_waits_bounds_nothing() -> None:
    quick = beside("model M", 3.5, 3.8, 5)
    line = [*RECOVERY[:5], task("servers", 7, 7.5), task("servers", 7.5, 8), task("gates", 8, 10)]
    lines, record = criticalpath.told(line, [quick], 10.0)
    assert "model M" not in [row["name"] for row in record["path"]]
    assert record["seconds"] == pytest.approx(10.0)
    # It could have ended at 7.0, when the wait began, or the wait itself 0.5 s later.
    assert record["beside"][0]["slack_s"] == pytest.approx(3.2)
    assert lines[0].startswith("lock 1.0 s > host 2.0 s > model store 1.0 s > guest 2.0 s")


def test_models_that_are_staged_one_after_the_other_are_a_chain() -> None:
    line = [task("stage", 0, 1), task("wait", 1, 4), task("wait", 4, 9)]
    first = beside("model A", 0.5, 3.5, 1)
    second = beside("model B", 3.5, 8.5, 2)
    second["after"] = ["model A"]
    steps = criticalpath.steps_of(line, [first, second])
    found = criticalpath.longest(steps)
    names = [steps[place]["name"] for place in found["path"]]
    assert names == ["stage", "model A", "model B", "wait"]
    assert found["seconds"] == pytest.approx(9.0)


def test_a_wait_that_ends_with_its_task_is_followed_by_the_next_task() -> None:
    line = [task("stage", 0, 1), task("wait", 1, 8), task("gates", 8, 9)]
    steps = criticalpath.steps_of(line, [beside("model A", 1, 8, 1)])
    assert [steps[place]["name"] for place in criticalpath.longest(steps)["path"]] == ["stage", "model A", "gates"]


def test_a_server_that_was_ready_before_anybody_asked_bounds_nothing() -> None:
    # chat serves since some time; that is seen when agent, for which the model was waited for, is asked too.
    chat = beside("chat: start to completion", 6.5, 16.2, 7, at_most=True, kind="server")
    agent = beside("agent: start to completion", 15.8, 16.2, 7, at_most=True, kind="server")
    line = [*RECOVERY[:7], task("servers", 16, 17), task("gates", 17, 19)]
    lines, record = criticalpath.told(line, [MODEL, chat, agent], 19.0)
    assert "model M 11.2 s" in lines[0]
    assert "chat" not in lines[0]
    assert record["seconds"] == pytest.approx(19.0)
    assert lines[1] == "beside it: chat: start to completion at most 9.5 s, agent: start to completion at most 0.2 s"
    assert {row["name"]: row["slack_s"] for row in record["beside"] if row["kind"] == "server"} == {
        "chat: start to completion": None,
        "agent: start to completion": None,
    }


def test_a_part_names_the_task_that_took_most_of_it() -> None:
    line = [
        task("host", 0, 10),
        task("host : Look", 10, 12),
        {**task("servers", 12, 14), "task": "role : Look at what serves"},
        {**task("servers", 14, 40), "task": "role : Install the package"},
        {**task("gates", 40, 45), "task": "role : Ask"},
        {**task("gates", 45, 50), "task": "role : Show"},
    ]
    lines, record = criticalpath.told(line, [], 50.0)
    assert "servers 28.0 s (mostly 'Install the package') > gates 10.0 s = " in lines[0]
    assert [row["detail"] for row in record["path"]][-2:] == ["mostly 'Install the package'", None]


def test_a_clock_that_is_off_makes_nothing_longer_than_the_run() -> None:
    late = beside("model M", 5.0, 50.0, 1)
    early = beside("model E", -30.0, 1.5, 1)
    line = [task("stage", 0, 2), task("wait", 2, 4)]
    lines, record = criticalpath.told(line, [late, early], 4.0)
    assert record["seconds"] <= 4.0
    assert lines[0].endswith("of 4.0 s")


def test_nothing_is_a_path_of_nothing() -> None:
    assert criticalpath.steps_of([], [MODEL]) == []
    assert criticalpath.longest([]) == {"path": [], "seconds": 0.0, "slack": []}


def test_the_line_keeps_to_the_longest_steps() -> None:
    shown = [{"name": f"s{number}", "seconds": float(number), "start": 0.0, "end": 0.0} for number in range(1, 13)]
    line = criticalpath.line_of(shown, 100.0)
    assert (
        line
        == "s5 5.0 s > s6 6.0 s > s7 7.0 s > s8 8.0 s > s9 9.0 s > s10 10.0 s > s11 11.0 s > s12 12.0 s = 68 s of 100 s"
    )


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (59.94, "59.9 s"), (59.96, "60 s"), (119.4, "119 s"), (725, "12 min 05 s")]
)
def test_seconds_are_words(seconds: float, text: str) -> None:
    assert criticalpath.seconds_text(seconds) == text


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    moments = sorted(draw(st.lists(st.integers(0, 400), min_size=2, max_size=8, unique=True)))
    line = [task(f"t{place}", start / 4, end / 4) for place, (start, end) in enumerate(itertools.pairwise(moments))]
    rows = []
    for number in range(draw(st.integers(0, 5))):
        start, end = sorted((draw(st.integers(-40, 440)) / 4, draw(st.integers(-40, 440)) / 4))
        row = beside(f"r{number}", start, end, draw(st.integers(0, len(line) - 1)))
        row["after"] = draw(st.lists(st.sampled_from([f"r{other}" for other in range(5)]), max_size=2))
        rows.append(row)
    return line, rows


def all_chains(steps: list[dict[str, Any]]) -> list[float]:
    """The seconds of every chain that ends anywhere, one by one."""

    def upto(place: int) -> list[float]:
        own = steps[place]["own"]
        return [own + before for other in steps[place]["after"] for before in upto(other)] or [own]

    return [seconds for place in range(len(steps)) for seconds in upto(place)]


@given(runs())
def test_the_path_is_the_longest_chain_and_never_longer_than_the_run(run: Any) -> None:
    line, rows = run
    wall = line[-1]["end"] - line[0]["start"]
    steps = criticalpath.steps_of(line, rows)
    found = criticalpath.longest(steps)
    path = found["path"]
    assert found["seconds"] <= wall + 1e-9
    assert found["seconds"] == pytest.approx(sum(steps[place]["own"] for place in path))
    assert found["seconds"] == pytest.approx(max(all_chains(steps)))
    assert all(before in steps[place]["after"] for before, place in itertools.pairwise(path))
    assert all(before < place for place, step in enumerate(steps) for before in step["after"])
    assert all(0 <= slack <= found["seconds"] + 1e-9 for slack in found["slack"])
    assert all(found["slack"][place] == pytest.approx(0, abs=1e-9) for place in path)
    # Every task and every row is there; only what waited takes no time.
    assert {step["name"] for step in steps} == {row["name"] for row in line} | {row["name"] for row in rows}
    if not rows:
        assert found["seconds"] == pytest.approx(wall)


@given(runs(), st.integers(0, 4), st.integers(1, 40))
def test_a_step_delayed_within_its_slack_makes_no_chain_longer(run: Any, which: int, part: int) -> None:
    line, rows = run
    steps = criticalpath.steps_of(line, rows)
    found = criticalpath.longest(steps)
    if not steps:
        return
    place = which % len(steps)
    longer = [dict(step) for step in steps]
    longer[place]["own"] += found["slack"][place] * part / 40
    assert criticalpath.longest(longer)["seconds"] == pytest.approx(found["seconds"])
