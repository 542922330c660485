"""What a load shows while it runs: rate and time left, worked out by hand; on a terminal, piped, and as JSON."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from specrig.model.cell import Cell, expand
from specrig.model.sweep import parse_sweep
from specrig.runs import command
from specrig.runs.command import Pacer, clock_text, fitted
from specrig.sim.testing import running_sim

SWEEP = """\
name: t
model: Qwen3.6-27B
workloads:
  - {name: w, prompts: questions, prompt_tokens: 256, output_tokens: 64, requests: 4, concurrency: [1, 2]}
"""


DONE = {0, 1}
"""1: a busy machine may cost a cell its validity, which is not what is tested here."""


@pytest.fixture
def cells() -> list[Cell]:
    """Two cells; with concurrency 2 half as many waves, so about half the work."""
    return expand(parse_sweep(SWEEP))


def test_the_rate_is_that_of_the_last_seconds(cells: list[Cell]) -> None:
    pace = Pacer(cells)
    pace.begin(cells[0], 100.0)
    assert pace.rate(100.0, 0) is None
    assert pace.rate(101.0, 30) == 30
    assert pace.rate(104.0, 120) == 30
    assert pace.rate(106.0, 320) == 58  # 290 since the look at 101
    assert pace.rate(107.0, 5) is None  # fewer than before: what was counted until now was the warm-up
    assert pace.rate(108.0, 25) == 20


def test_the_time_left_follows_the_work_done(cells: list[Cell]) -> None:
    first, second = (Pacer([cell])._whole for cell in cells)
    pace = Pacer(cells)
    assert pace.left_s(100.0, 0.0) is None
    pace.begin(cells[0], 100.0)
    assert pace.left_s(110.0, 0.0) is None
    # half of the first cell took 10 s
    assert pace.left_s(110.0, 0.5) == pytest.approx(10 * (first / 2 + second) / (first / 2))
    pace.begin(cells[1], 120.0)
    assert pace.left_s(120.0, 0.0) == pytest.approx(20 * second / first)
    assert pace.left_s(130.0, 1.0) == 0


def test_the_time_left_counts_what_is_on_its_way(
    cells: list[Cell], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (Pacer([cell])._whole for cell in cells)
    now = [100.0]
    monkeypatch.setattr(command.time, "monotonic", lambda: now[0])
    show = command._Show(False, cells, 0)
    show._live = True
    show._started(1, 2, cells[0])
    now[0] = 110.0
    show._tick(2, 128)  # of 4 requests of 64 tokens: half of the cell, in 10 s
    left = 10 * (first / 2 + second) / (first / 2)
    assert capsys.readouterr().err.endswith(f"0/4 requests, {clock_text(left)} left")


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(-1, "0 s"), (0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (185, "3 min 05 s"), (7620, "2 h 07 min")],
)
def test_durations(seconds: float, said: str) -> None:
    assert clock_text(seconds) == said


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (80, "[1/3] decode p1024 c1: 3/8 requests, 66 tok/s now"),
        (49, "[1/3] decode p1024 c1: 3/8 requests, 66 tok/s now"),
        (48, "[1/3] decode p1024 …: 3/8 requests, 66 tok/s now"),
        (30, "[…: 3/8 requests, 66 tok/s now"),
        (28, "3/8 requests, 66 tok/s now"),
        (12, "3/8 request…"),
    ],
)
def test_a_narrow_terminal_costs_the_title_not_the_figures(width: int, line: str) -> None:
    assert fitted("[1/3] decode p1024 c1", "3/8 requests, 66 tok/s now", width) == line
    assert len(line) <= width


def test_on_a_terminal_and_without(tmp_path: Path, tokenizer_dir: Path) -> None:
    (tmp_path / "s.yml").write_text(SWEEP)
    with running_sim(model_path=tokenizer_dir, served_model_name="Qwen3.6-27B", sim_time_scale=0.2) as sim:

        def line(run: str, *more: str) -> list[str]:
            base = [sys.executable, "-m", "specrig.cli", "load", str(tmp_path / "s.yml"), "--url", sim.url]
            return [*base, "--tokenizer", str(tokenizer_dir), "--out", str(tmp_path / run), *more]

        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
        with subprocess.Popen(line("live"), stderr=theirs, stdout=subprocess.DEVNULL) as process:
            os.close(theirs)
            screen = b""
            while True:
                try:
                    piece = os.read(ours, 65536)
                except OSError:  # the terminal's other end is closed
                    break
                if not piece:
                    break
                screen += piece
        os.close(ours)
        assert process.returncode in DONE, screen[-2000:]
        piped = subprocess.run(line("piped"), capture_output=True, text=True, check=False)
        as_json = subprocess.run(line("json", "--json"), capture_output=True, text=True, check=False)
    assert {piped.returncode, as_json.returncode} <= DONE, piped.stderr + as_json.stderr
    text = screen.decode()
    assert "[1/2] w p256 n64 c1: 0/4 requests" in text
    assert " tok/s now, " in text
    assert " s left" in text
    redrawn = [part.removeprefix("\x1b[K") for part in text.split("\r") if part.startswith("\x1b[K")]
    assert max(len(part) for part in redrawn if "\n" not in part and "tok/s now" in part) <= 60
    assert "\r" not in piped.stderr
    assert [line.split(":")[0] for line in piped.stderr.splitlines()[:2]] == [
        "[1/2] w p256 n64 c1",
        "[2/2] w p256 n64 c2",
    ]
    assert piped.stdout == ""
    assert [json.loads(line)["event"] for line in as_json.stdout.splitlines()] == ["cell", "cell", "end"]
    assert as_json.stderr == ""
