"""The two commands: files, screens, exit codes, and every odd run folder."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from specrig.cli import main
from specrig.report import text
from specrig.report.view import view

VOID = {"meta", "br", "line", "circle", "rect", "polygon"}


class Balance(HTMLParser):
    """Finds tags that do not close, and anything that would be fetched or run."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.scripts += tag in ("script", "iframe", "object", "img", "link")
        for name, value in attrs:
            if name in ("src", "href") and value and not value.startswith("#"):
                self.outside.append(value)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def page(folder: Path) -> str:
    html = (folder / "report.html").read_text()
    parser = Balance()
    parser.feed(html)
    assert parser.open == []
    assert parser.outside == []
    assert parser.scripts == 0
    assert "url(" not in html
    return html


def summary_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "summary.json").read_text()))


def test_report_writes_three_files_and_prints_the_verdicts(make_run: Any, capsys: Any) -> None:
    folder = make_run(tps=(1, 4), reads=(64,), concurrency=(1, 8))
    assert main(["report", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "SIMULATED ENGINE, time scale 0.2: not GPU performance" in out
    assert "tp 1: speed-up over autoregressive" in out
    assert "tp 4: speed-up over autoregressive" in out
    assert "3.20× 3.20–3.20 ▲" in out
    assert max(map(len, out.splitlines())) <= 140
    html = page(folder)
    assert html.index("SIMULATED ENGINE") < html.index("<h1>")
    for words in ("check the arithmetic", "op@box", "faster", "Definitions", "3.20×", "Best method per cell"):
        assert words in html
    assert "| dflash |" in (folder / "summary.md").read_text()
    assert summary_of(folder)["schema"] == 1
    assert all({"cell", "valid", "reason"} <= set(row) for row in summary_of(folder)["cells"])


def test_json_on_stdout_is_the_file(make_run: Any, capsys: Any) -> None:
    folder = make_run()
    assert main(["report", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == summary_of(folder)


def test_a_folder_whose_name_is_no_unicode_has_a_report_too(make_run: Any, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"run-\xff")
    shutil.copytree(make_run(), folder)
    command = [sys.executable, "-m", "specrig.cli", "report", os.fsencode(folder), "--json"]
    done = subprocess.run(command, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout) == summary_of(folder)


def test_one_launch_is_labelled_and_gives_no_verdict(make_run: Any, capsys: Any) -> None:
    folder = make_run(launches=1, prompt_sd=0.2)
    assert main(["report", str(folder)]) == 0
    assert "intervals within one launch, no verdict" in capsys.readouterr().out
    assert "within one launch" in page(folder)
    assert {row["verdict"] for row in summary_of(folder)["speedups"]} == {None}


def test_a_missing_baseline_is_said(make_run: Any, capsys: Any) -> None:
    folder = make_run(methods=("dflash",))
    assert main(["report", str(folder)]) == 0
    assert "the baseline autoregressive has no valid cell, so dflash has no speed-up" in capsys.readouterr().out
    assert "no speed-up" in page(folder)


def test_everything_failed(make_run: Any, capsys: Any) -> None:
    folder = make_run()
    rows = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    for row in rows:
        row.update(ok=False, error="HTTP 503", ttft_s=0, decode_tokens_per_s=None, first_s=None, finished_s=None)
    (folder / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["report", str(folder)]) == 0
    assert "no valid cell" in capsys.readouterr().out
    cells = summary_of(folder)["cells"]
    assert not any(cell["valid"] for cell in cells)
    assert "4 of 4 failed (HTTP 503)" in cells[0]["reason"]
    page(folder)


def test_an_empty_run(builder: Any, capsys: Any) -> None:
    folder = builder.write()
    assert main(["report", str(folder)]) == 0
    assert "no cell was run" in capsys.readouterr().out
    assert "No cell was run" in page(folder)
    assert summary_of(folder)["cells"] == []


@pytest.mark.parametrize("name", ["manifest.json", "requests.jsonl", "cells.jsonl"])
@pytest.mark.parametrize(
    "garbage",
    [b"", b"\x00\xff\xfe\x80garbage\n", b"[1, 2]\n", b'{"cells": 3, "cell": [], "launches": "x"}\n', b"null\n"],
)
def test_garbage_never_ends_in_a_traceback(make_run: Any, name: str, garbage: bytes, capsys: Any) -> None:
    folder = make_run()
    (folder / name).write_bytes(garbage)
    assert main(["report", str(folder)]) == 0
    assert summary_of(folder)["schema"] == 1
    page(folder)


@pytest.mark.parametrize("name", ["manifest.json", "requests.jsonl", "cells.jsonl"])
def test_any_one_file_may_be_missing(make_run: Any, name: str, capsys: Any) -> None:
    folder = make_run()
    (folder / name).unlink()
    assert main(["report", str(folder)]) == 0
    assert f"{name}: not there" in capsys.readouterr().out


def test_values_of_any_type_are_survived(make_run: Any) -> None:
    """Every field of every record in turn replaced by something it must not be."""
    folder = make_run(launches=1, prompts=2, reads=(64,))
    rng = random.Random(5)
    originals = {name: (folder / name).read_text() for name in ("manifest.json", "requests.jsonl", "cells.jsonl")}
    odd: list[Any] = [None, "x", -1, 1e308, [], {}, [None], {"a": []}, True, 2**70, ""]
    for name, content in originals.items():
        for key in json.loads(content.splitlines()[0]):
            lines = [json.loads(line) for line in content.splitlines()]
            for line in lines:
                line[key] = rng.choice(odd)
            (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
            assert main(["report", str(folder), "--json"]) == 0, (name, key)
        (folder / name).write_text(content)


def test_a_cut_off_last_line_is_normal(make_run: Any, capsys: Any) -> None:
    folder = make_run(tail='{"schema": 1, "cell": "tp1-dfl')
    assert main(["report", str(folder)]) == 0
    assert "requests.jsonl: the last line is cut off" in capsys.readouterr().out
    assert {row["verdict"] for row in summary_of(folder)["speedups"]} == {"faster"}


def test_unfinished_and_repeated_cells_of_an_aborted_run(builder: Any, fill_run: Any) -> None:
    """Requests of a cell that was never closed do not count; a cell run again after a resume counts once."""
    fill_run(builder, methods=("autoregressive", "dflash"), launches=1)
    builder.manifest["label"] = "aborted"
    done = builder.cells.pop()
    folder = builder.write()
    main(["report", str(folder)])
    got = next(row for row in summary_of(folder)["cells"] if row["cell"] == done["cell"])
    assert (got["valid"], "not finished" in got["reason"]) == (False, True)
    assert "aborted" in page(folder)
    again = [dict(row, decode_tokens_per_s=row["decode_tokens_per_s"] * 2) for row in builder.requests]
    builder.requests += [row for row in again if row["cell"] == done["cell"]]
    builder.cells.append(done)
    main(["report", str(builder.write())])
    got = next(row for row in summary_of(folder)["cells"] if row["cell"] == done["cell"])
    assert (got["requests"], got["decode_tokens_per_s"]["mean"]) == (4, pytest.approx(320.0))


def test_nothing_from_a_run_can_become_markup(builder: Any, fill_run: Any) -> None:
    fill_run(builder, methods=("autoregressive", "dflash"), launches=1)
    evil = "<script>alert(1)</script>|x"
    builder.manifest.update(name=evil, reason=evil, by=evil)
    builder.manifest["skipped"] = [{"cell": evil, "reason": evil}]
    folder = builder.write()
    assert main(["report", str(folder)]) == 0
    assert "<script" not in page(folder)
    assert "<script" not in (folder / "summary.md").read_text()


def test_skipped_placement_and_gates_are_shown(builder: Any, fill_run: Any) -> None:
    fill_run(builder, methods=("autoregressive", "dflash"), launches=3)
    cell = builder.cell("dflash", prompt_tokens=100_000)
    reason = "100,257 tokens > context length 32,768"
    builder.manifest["skipped"] = [{"cell": cell["id"], "reason": reason}]
    builder.manifest["placements"] = {"tp1-dflash": {"gpus": [5], "numa_nodes": [1], "cpus": "64-127"}}
    message = "ranks on GPU 1, planned 5"
    gate = {
        "gate": "placement",
        "profile": "tp1-dflash",
        "status": "fail",
        "seen": {"gpus": [1], "numa_nodes": [0]},
        "message": message,
    }
    builder.manifest["launches"][1]["gates"] = [gate]
    folder = builder.write()
    main(["report", str(folder)])
    html = page(folder)
    assert reason.replace(">", "&gt;") in html
    assert html.count(message) == 3  # why the launch does not count, with the placement, among the gates not passed
    got = summary_of(folder)
    assert got["placements"][0]["actual"] == {"gpus": [1], "numa_nodes": [0]}
    assert got["skipped"][0]["reason"] == reason


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["report", "nowhere"], "no such folder"),
        (["report", "."], "not a run folder"),
        (["report", "RUN", "--margin", "wide"], "not a share"),
        (["report", "RUN", "--level", "100%"], "out of range"),
        (["report", "RUN", "--truth", "none.jsonl"], "no such truth file"),
        (["report", "RUN", "--truth", "garbage.jsonl"], "garbage.jsonl: holds no record of the simulated engine"),
        (["report", "RUN", "--truth", "empty.jsonl"], "empty.jsonl: holds no record of the simulated engine"),
        (["compare", "RUN", "nowhere"], "no such folder"),
        (["compare", "RUN", "RUN", "--metrics", "speed"], "expected some of"),
        (["compare", "RUN", "RUN", "--max-regression", "-5%"], "out of range"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    argv: list[str], words: str, make_run: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    folder = make_run(launches=1)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    Path("garbage.jsonl").write_bytes(b'\x00\xff\xfe\x80\n[1]\n{"rid": 3}\n{"rid"')
    Path("empty.jsonl").touch()
    argv = [argv[0], *(str(folder) if a == "RUN" else a for a in argv[1:])]
    if "--max-regression" in argv:
        argv = [*argv[:3], "--max-regression=-5%"]
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_compare_with_itself_is_fine(make_run: Any, capsys: Any) -> None:
    folder = make_run(noise_sd=0.01, launch_sd=0.003)
    assert main(["compare", str(folder), str(folder)]) == 0
    out = capsys.readouterr().out
    assert "ok: " in out
    assert "regression  " not in out.replace("no regression", "")


@pytest.mark.parametrize("launches", [1, 3])
def test_a_slower_run_fails_and_names_the_cell(make_run: Any, launches: int, capsys: Any) -> None:
    base = make_run("base", noise_sd=0.01, launches=launches, seed=1)
    new = make_run("new", noise_sd=0.01, launches=launches, seed=2, scale={"dflash": 0.85})
    assert main(["compare", str(base), str(new), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    bad = {(row["method"], row["metric"]) for row in found["changes"] if row["status"] == "regression"}
    assert ("dflash", "decode") in bad
    assert {method for method, _ in bad} == {"dflash"}
    row = next(r for r in found["changes"] if r["method"] == "dflash" and r["metric"] == "decode")
    assert row["ratio"] == pytest.approx(0.85, abs=0.02)
    assert (row["assumed_spread"] is None) == (launches == 3)
    assert main(["compare", str(base), str(new), "--max-regression", "30%"]) == 0


def test_what_the_data_cannot_tell_is_undecided_and_passes(make_run: Any, capsys: Any) -> None:
    """6 % slower with 8 % launch spread: three launches cannot tell."""
    base = make_run("base", launch_sd=0.08, seed=3)
    new = make_run("new", launch_sd=0.08, seed=4, scale={"dflash": 0.94})
    code = main(["compare", str(base), str(new), "--metrics", "decode"])
    out = capsys.readouterr().out
    assert code == 0
    assert "undecided" in out


def test_a_cell_that_broke_fails(make_run: Any, capsys: Any) -> None:
    base, new = make_run("base"), make_run("new")
    rows = [json.loads(line) for line in (new / "requests.jsonl").read_text().splitlines()]
    for row in rows:
        if row["method"] == "dflash":
            row.update(finish_reason="stop")
    (new / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["compare", str(base), str(new)]) == 1
    out = capsys.readouterr().out
    assert "broken: tp1 dflash" in out
    assert "1 broken cell" in out


def test_a_cell_that_was_not_run_is_said_and_passes(make_run: Any, capsys: Any) -> None:
    base, new = make_run("base"), make_run("new", methods=("autoregressive", "dflash"))
    assert main(["compare", str(base), str(new)]) == 0
    assert "not run: tp1 ddtree-b15" in capsys.readouterr().out


def test_runs_without_a_common_cell_are_no_pass(make_run: Any, capsys: Any) -> None:
    base, new = make_run("base", methods=("autoregressive",)), make_run("new", methods=("dflash",))
    assert main(["compare", str(base), str(new)]) == 2
    assert "no cell that both have as valid" in capsys.readouterr().err


def test_runs_of_different_kinds_are_refused(make_run: Any, capsys: Any) -> None:
    base, new = make_run("base"), make_run("new")
    manifest = json.loads((new / "manifest.json").read_text())
    manifest["engine"]["time_scale"] = 1.0
    (new / "manifest.json").write_text(json.dumps(manifest))
    cells = re.sub('"time_scale": 0.2', '"time_scale": 1.0', (new / "cells.jsonl").read_text())
    (new / "cells.jsonl").write_text(cells)
    assert main(["compare", str(base), str(new)]) == 2
    assert "BASE has time scale 0.2, NEW has 1.0" in capsys.readouterr().err


def truth_of(folder: Path, factor: float = 1.0) -> Path:
    """The truth file an engine would have written for a run of the exact filler."""
    rows = []
    for line in (folder / "requests.jsonl").read_text().splitlines():
        row = json.loads(line)
        n, rate = row["output_tokens"], row["decode_tokens_per_s"] * (factor if row["method"] == "dflash" else 1)
        times = [1e9 + 0.5 + i / rate for i in range(n)]
        rows.append(
            {
                "rid": row["rid"],
                "output_tokens": n,
                "arrived_unix": 1e9,
                "first_token_unix": times[0],
                "last_token_unix": times[-1],
                "chunk_times": times,
                "chunk_tokens": [1] * n,
                "ttft_s": 0.5,
                "verify_steps": row["verify_steps"],
                "correct_drafts": row["correct_drafts"],
                "decode_tokens_per_s": rate,
            }
        )
    path = folder / "truth.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_truth_agrees_and_disagrees(make_run: Any, capsys: Any) -> None:
    folder = make_run(reads=(64,), noise_sd=0.05)
    assert main(["report", str(folder), "--truth", str(truth_of(folder))]) == 0
    assert "figures agree" in capsys.readouterr().out
    assert main(["report", str(folder), "--truth", str(truth_of(folder, 1.03)), "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)["truth"]["rows"]
    wrong = {(row["figure"], row["where"].split()[0]) for row in rows if not row["ok"]}
    # dflash's own rate and its speed-up are wrong, and so is the tree's speed-up over it; nothing else
    assert wrong - {("end-to-end speed-up", "dflash"), ("end-to-end speed-up", "ddtree-b15")} == {
        ("decode rate, tokens/s", "tp1-dflash"),
        ("decode speed-up", "dflash"),
        ("decode speed-up", "ddtree-b15"),
    }
    assert not any(row["where"].startswith("ddtree-b15 over autoregressive") for row in rows if not row["ok"])
    chain = next(r for r in rows if r["figure"] == "decode speed-up" and r["where"].startswith("dflash"))
    assert chain["error"] == pytest.approx(1 / 1.03 - 1, abs=1e-3)


def test_truth_of_another_run_is_no_agreement(make_run: Any, tmp_path: Path, capsys: Any) -> None:
    folder = make_run()
    other = tmp_path / "other.jsonl"
    other.write_text('{"rid": "somebody-else"}\n')
    assert main(["report", str(folder), "--truth", str(other)]) == 1
    assert "no request of this run is in the truth file" in capsys.readouterr().out


def test_several_runs_go_where_they_are_told(make_run: Any, tmp_path: Path, capsys: Any) -> None:
    runs = [str(make_run(f"{m}{i}", methods=(m,), launches=1)) for i in range(3) for m in ("autoregressive", "dflash")]
    assert main(["report", *runs, "--out", str(tmp_path / "all")]) == 0
    assert "3.20× 3.20–3.20 ▲" in capsys.readouterr().out
    page(tmp_path / "all")


def test_figures_are_written_the_same_everywhere() -> None:
    assert [text.ratio(v) for v in (None, 0.954, 3.5714, 12.34, 123.4, 5000.0)] == [
        "–",
        "0.95×",
        "3.57×",
        "12.3×",
        "123×",
        ">999×",
    ]
    assert [text.milliseconds(v) for v in (None, 0.0012, 0.0123, 0.5, 2.5)] == ["–", "1.20", "12.3", "500", "2,500"]
    assert text.stamp("2031-05-04T05:02:01+02:00") == "2031-05-04 03:02 UTC"
    assert text.numbers([0, None, 2]) == "0, ?, 2"


def test_the_view_names_the_verdicts_of_each_tp(make_run: Any) -> None:
    from specrig.analysis.frames import read_run
    from specrig.analysis.summary import summarise

    shown = view(summarise(read_run(make_run(scale={"ddtree-b15": 0.2}))))
    assert [row["method"] for row in shown["tables"][0]["groups"][0]["rows"]] == [
        "autoregressive",
        "dflash",
        "ddtree-b15",
    ]
    assert "1 faster, 1 slower" in shown["headline"][0]
