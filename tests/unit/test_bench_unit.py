"""What a launch's unit leaves for the journal, and how the screen shows it."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ansible.module_utils.basic")
PLUGINS = "ansible_collections.specrig.host.plugins."


@pytest.fixture
def unit(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(repository / ".collections"), *sys.path])
    return importlib.import_module(PLUGINS + "modules.bench_unit")


@pytest.fixture
def journal(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(repository / ".collections"), *sys.path])
    return importlib.import_module(PLUGINS + "callback.journal")


def test_only_launches_whose_end_nobody_noted_are_told(unit: Any, tmp_path: Path) -> None:
    launches = [{"launch": 0, "noted": True}, {"launch": 1}, {"launch": 2, "error": "it did not start"}]
    (tmp_path / "manifest.json").write_text(json.dumps({"launches": launches}))
    assert unit.untold_launches(str(tmp_path)) == [1, 2]
    assert unit.untold_launches(str(tmp_path / "none")) == []


def test_the_last_row_of_each_cell_counts_and_a_cut_off_line_does_not(unit: Any, tmp_path: Path) -> None:
    rows = [
        {"cell": "a", "launch": 1, "state": "failed"},
        {"cell": "a", "launch": 1, "state": "done"},
        {"cell": "a", "launch": 2, "state": "done"},
        {"cell": "b", "launch": 1, "state": "invalid", "reason": "why"},
    ]
    (tmp_path / "cells.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"cell": "c", "lau')
    found = unit.told(unit.finished_cells(str(tmp_path), 1))
    assert [(row["cell"], row["state"], row["outcome"]) for row in found] == [
        ("a", "done", "ok"),
        ("b", "invalid", "invalid"),
    ]


def test_a_unit_that_left_its_status_is_not_waited_for_any_longer(
    unit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def running(_module: Any, name: str) -> bool:
        asked.append(name)
        return len(asked) < 3

    monkeypatch.setattr(unit, "running", running)
    status = tmp_path / "exit"
    status.write_text("0\n")
    assert unit.wait_for_end(None, "u.service", 5, str(status)) is True
    assert asked == ["u.service"] * 3
    monkeypatch.setattr(unit, "running", lambda _module, _name: True)
    assert unit.wait_for_end(None, "u.service", 0.1, str(status)) is False


@pytest.mark.parametrize(
    ("status", "rows", "log", "told"),
    [
        (1, 1, ["cell a: invalid"], None),
        (0, 1, ["done"], None),
        (
            1,
            0,
            ["Traceback", "TypeError: of the program"],
            "the load client ended with exit code 1: TypeError: of the program",
        ),
        (
            1,
            0,
            ["specrig load: another server", "x"],
            "the load client ended with exit code 1: specrig load: another server",
        ),
        (2, 1, ["specrig load: bad sweep"], "the load client ended with exit code 2: specrig load: bad sweep"),
    ],
)
def test_a_load_that_ended_without_a_cell_fails_its_launch(
    unit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, rows: int, log: list[str], told: str | None
) -> None:
    row = {"cell": "a", "launch": 0, "state": "invalid", "reason": "why"}
    (tmp_path / "cells.jsonl").write_text((json.dumps(row) + "\n") * rows)
    monkeypatch.setattr(unit.os, "makedirs", lambda *_names, **_more: None)
    monkeypatch.setattr(unit, "running", lambda _module, _name: True)
    monkeypatch.setattr(unit, "wait_for_end", lambda *_what: True)
    monkeypatch.setattr(unit, "read_status", lambda _path: status)
    monkeypatch.setattr(unit, "log_lines", lambda *_what: log)

    class Ended(Exception):
        pass

    class Module:
        check_mode = False
        params = {"run": "r", "launch": 0, "argv": ["x"], "folder": str(tmp_path), "cells": ["a"], "timeout_s": 1}  # noqa: RUF012

        def fail_json(self, msg: str, **_result: Any) -> None:
            raise Ended(msg)

        def exit_json(self, **_result: Any) -> None:
            raise Ended("fine")

    with pytest.raises(Ended) as ended:
        unit.run_to_end(Module())
    assert str(ended.value) == (told or "fine")


def test_the_screen_counts_cells_and_names_those_that_are_not_done(journal: Any) -> None:
    rows = [
        {"cell": "a", "profile": "tp1", "state": "done"},
        {"cell": "b", "profile": "tp1", "state": "invalid", "reason": "the client did not keep up"},
        {"cell": "c", "profile": "tp1", "state": "done"},
    ]
    assert journal._cell_lines(rows) == ["2 done, 1 invalid", "b tp1: invalid the client did not keep up"]
    assert journal._cell_lines([]) == []


def test_steps_are_journaled_and_what_was_stopped_serves_nowhere(journal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = journal.CallbackModule()
    monkeypatch.setattr(screen, "_write", lambda *_words, **_more: None)
    row = {"profile": "tp1", "status": "serving"}
    told = screen._collect([{"specrig": {"steps": ["started tp1"], "serving": [row]}}], "guest")
    assert told == ["started tp1"]
    assert screen._collected["changed"] == []
    assert screen._collected["serving"] == [(("guest", "tp1"), row)]
    screen._collect([{"specrig": {"serving": [{"profile": "tp1", "status": "stopped"}]}}], "guest")
    assert screen._collected["serving"] == []


def test_the_load_client_has_the_servers_key_from_a_file_and_on_no_command_line(unit: Any) -> None:
    seen: list[list[str]] = []

    def run_command(argv: list[str]) -> tuple[int, str, str]:
        seen.append(argv)
        return 0, "", ""

    params = {"launch": 0, "run": "r", "user": "specrig", "folder": "/f", "cpus": "1-2,5", "argv": ["/bin/load"]}
    unit.start(SimpleNamespace(params=params, run_command=run_command), "u", "/run/specrig/u.exit")
    (argv,) = seen
    # The dash: there is no such file where the servers ask for no key.
    assert "--property=EnvironmentFile=-/etc/specrig/client.env" in argv
    assert "--property=CPUAffinity=1-2 5" in argv
    assert argv[-2:] == ["--", "/bin/load"]
