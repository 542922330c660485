"""The run folder: what survives a kill, a full disk, a second writer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from specrig.errors import SpecrigError, UsageError
from specrig.ops import benchmark
from specrig.runs.folder import RunFolder
from specrig.runs.lines import LineFile, WriteError, read_lines, write_atomic


def record(cell: str, index: int, launch: int = 0) -> dict[str, object]:
    return {"cell": cell, "launch": launch, "index": index, "ok": True}


def row(cell: str, state: str, launch: int = 0) -> dict[str, object]:
    return {"cell": cell, "launch": launch, "state": state, "reason": None}


def test_a_run_is_created_opened_and_read(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "r", {"name": "n", "cells": [{"id": "a"}]}) as run, run.lock():
        run.append_request(record("a", 0))
        run.append_chunks({"cell": "a", "launch": 0, "index": 0, "t": [1.0], "k": [2]})
        run.finish_cell(row("a", "done"))
        run.update_manifest(lambda manifest: manifest.update(label="complete"))
    again = RunFolder.open(tmp_path / "r")
    assert again.name == "r"
    assert again.manifest["schema"] == 1
    assert again.manifest["label"] == "complete"
    assert list(again.read_requests()) == [record("a", 0)]
    assert next(iter(again.read_chunks()))["k"] == [2]
    assert again.done_cells() == {("a", 0)}
    assert [line["event"] for line in again.read_journal()] == ["cell"]


def test_which_states_are_left_alone(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "r", {}) as run:
        for state in ("done", "invalid", "skipped", "failed", "aborted"):
            run.finish_cell(row(state, state))
        run.finish_cell(row("twice", "aborted"))
        run.finish_cell(row("twice", "done"))
        run.finish_cell(row("twice", "aborted", launch=1))
        assert run.done_cells() == {("done", 0), ("invalid", 0), ("skipped", 0), ("twice", 0)}


@pytest.mark.parametrize("prepare", ["run", "stranger"])
def test_create_refuses_a_folder_in_use(tmp_path: Path, prepare: str) -> None:
    if prepare == "run":
        RunFolder.create(tmp_path, {})
    else:
        (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match=r"a run is there already|not empty \(holds thesis.tex\)"):
        RunFolder.create(tmp_path, {})


def test_open_refuses_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run there"):
        RunFolder.open(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(UsageError, match="not a manifest"):
        RunFolder.open(tmp_path)
    (tmp_path / "manifest.json").write_text('{"schema": 9}')
    with pytest.raises(UsageError, match="schema 9, this version reads 1"):
        RunFolder.open(tmp_path)


def test_a_cut_off_last_line_is_passed_over_and_then_mended(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a":1}\n{"a":2}\n{"a":3,"b"')
    assert list(read_lines(path)) == [{"a": 1}, {"a": 2}]
    file = LineFile(path)
    file.append({"a": 4})
    file.close()
    assert file.mended
    assert path.read_bytes() == b'{"a":1}\n{"a":2}\n{"a":4}\n'


def test_a_last_line_that_only_lacks_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a":1}\n{"a":2}')
    assert list(read_lines(path)) == [{"a": 1}, {"a": 2}]
    file = LineFile(path)
    file.append({"a": 3})
    file.close()
    assert path.read_bytes() == b'{"a":1}\n{"a":2}\n{"a":3}\n'


def test_a_long_cut_off_line_is_mended(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a":1}\n{"b":"' + b"x" * 3_000_000)
    file = LineFile(path)
    file.append({"a": 2})
    file.close()
    assert path.read_bytes() == b'{"a":1}\n{"a":2}\n'


def test_a_bad_line_in_the_middle_is_told(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a":1}\n[]\n{"a":3}\n')
    with pytest.raises(SpecrigError, match=r"x.jsonl:2: not a line of a run folder"):
        list(read_lines(path))


def test_a_file_that_is_not_there_has_no_lines(tmp_path: Path) -> None:
    assert list(read_lines(tmp_path / "none")) == []


def test_a_second_writer_is_refused_at_once(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "r", {})
    other = RunFolder.open(tmp_path / "r")
    with run.lock():
        assert other.locked()
        with pytest.raises(SpecrigError, match=rf"pid {os.getpid()}.* is writing this run"), other.lock():
            pass
    assert not other.locked()
    with other.lock():
        pass


def test_set_aside_leaves_each_request_once(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "r", {}) as run:
        for one in [record("a", 0), record("b", 0), record("b", 0, launch=1), record("b", 1)]:
            run.append_request(one)
        run.finish_cell(row("b", "aborted"))
        assert run.set_aside({("b", 0)}) == 2
        run.append_request(record("b", 0))
    assert list(run.read_requests()) == [record("a", 0), record("b", 0, launch=1), record("b", 0)]
    assert run.read_cells() == []
    aside = list(read_lines(tmp_path / "r" / "superseded.jsonl"))
    assert [line["file"] for line in aside] == ["requests.jsonl", "requests.jsonl", "cells.jsonl"]
    assert aside[0]["row"] == record("b", 0)


def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path: Path) -> None:
    # a real short write by the kernel: the file may grow to 1000 bytes and no further
    code = textwrap.dedent(
        """
        import resource, signal, sys
        from pathlib import Path
        from specrig.runs.lines import LineFile, WriteError
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        file = LineFile(Path(sys.argv[1]))
        try:
            for number in range(100):
                file.append({"number": number, "pad": "x" * 60})
        except WriteError as error:
            print(number, error)
        """
    )
    path = tmp_path / "x.jsonl"
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    number, _, words = done.stdout.partition(" ")
    assert "no room left to write" in words
    assert "--resume" in words
    assert words.count("\n") == 1
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["number"] for line in kept] == list(range(int(number)))
    assert int(number) > 5


def test_a_replaced_file_is_old_or_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.json"
    write_atomic(path, b"old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WriteError, match="no room left"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.json"]


def test_a_killed_writer_leaves_whole_lines(tmp_path: Path) -> None:
    code = textwrap.dedent(
        """
        import sys
        from specrig.runs.folder import RunFolder
        run = RunFolder.create(sys.argv[1], {})
        number = 0
        while True:
            run.append_request({"cell": "a", "launch": 0, "index": number, "ok": True, "pad": "x" * 5000})
            number += 1
            if number == 50:
                print("ready", flush=True)
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "r")], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)
    records = list(RunFolder.open(tmp_path / "r").read_requests())
    assert [entry["index"] for entry in records] == list(range(len(records)))
    assert len(records) >= 50
    assert not RunFolder.open(tmp_path / "r").locked()


@pytest.mark.parametrize(
    "damage",
    [{"run": 5}, {"label": None}, {"launches": {"a": 1}}, {"cells": "x"}, {"skipped": [7]}, {"created_at": None}],
    ids=lambda change: next(iter(change)),
)
def test_a_damaged_manifest_is_one_line(tmp_path: Path, damage: dict[str, object]) -> None:
    RunFolder.create(tmp_path / "r", {})
    file = tmp_path / "r" / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **damage}))
    with pytest.raises(UsageError, match=f"manifest.json: {next(iter(damage))} .*damaged"):
        RunFolder.open(tmp_path / "r")
    file.write_text('{"schema": 1}')
    with pytest.raises(UsageError, match="run is NoneType, expected str"):
        RunFolder.open(tmp_path / "r")


@pytest.mark.parametrize("loss", ["file", "line", "cut"])
def test_a_cell_whose_requests_are_lost_runs_again(tmp_path: Path, loss: str) -> None:
    with RunFolder.create(tmp_path / "r", {}) as run, run.lock():
        for cell in ("a", "b"):
            for one in [record(cell, 0), record(cell, 1)]:
                run.append_request(one)
            run.finish_cell({**row(cell, "done"), "requests": 2})
        run.finish_cell({**row("c", "skipped"), "requests": 0})
    file = tmp_path / "r" / "requests.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    assert RunFolder.open(tmp_path / "r").done_cells() == {("a", 0), ("b", 0), ("c", 0)}
    if loss == "file":
        file.unlink()
    else:
        file.write_text("".join(lines)[:-9] if loss == "cut" else "".join(lines[:-1]))
    with RunFolder.open(tmp_path / "r") as run, run.lock():
        assert run.done_cells() == {("c", 0)} | ({("a", 0)} if loss != "file" else set())
        run.set_aside({("b", 0)})
        for one in [record("b", 0), record("b", 1)]:
            run.append_request(one)
        run.finish_cell({**row("b", "done"), "requests": 2})
        assert ("b", 0) in run.done_cells()
        assert sum(line["cell"] == "b" for line in run.read_requests()) == 2


def test_what_a_run_without_a_plan_lacks_is_told_by_its_own_cells(tmp_path: Path) -> None:
    cells = [{"id": "a"}, {"id": "b"}, {"id": "c"}]
    with RunFolder.create(tmp_path / "r", {"name": "n", "cells": cells}) as run, run.lock():
        # Before it measured anything, what it lacks is not known.
        assert benchmark.describe(tmp_path / "r")["missing"] is None
        run.update_manifest(lambda manifest: manifest.update(launches=[{"launch": 0}]))
        run.append_request(record("a", 0))
        run.finish_cell(row("a", "done"))
        run.finish_cell(row("b", "aborted"))
    told = benchmark.describe(tmp_path / "r")
    assert (told["done"], told["missing"]) == (1, 2)
