"""A benchmark on the nested lab: to its end, refused, misplaced, interrupted, killed, and by a timer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from specrig.analysis.frames import read_run
from specrig.analysis.truth import compare_truth, read_truth

pytestmark = pytest.mark.lab

PRODUCTION = ("chat", "agent")
RUNS = "/var/lib/specrig/runs"
SPECRIG = "/opt/specrig/venv/bin/specrig"
TRUTH = "/var/lib/specrig/truth-*.jsonl"


@pytest.fixture(scope="module")
def serving(lab: Any) -> Any:
    """The lab, provisioned."""
    done = lab.play("provision")
    assert done.returncode == 0, done.stdout + done.stderr
    return lab


def write_sweep(folder: Path, name: str, profiles: list[str], launches: int, *workloads: dict[str, Any]) -> Path:
    """A sweep of 256 prompt and 64 generated tokens, unless a workload says otherwise."""
    common = {"prompts": "questions", "prompt_tokens": 256, "output_tokens": 64, "concurrency": 1, "requests": 4}
    path = folder / f"{name}.yml"
    sweep = {
        "name": name,
        "model": "Qwen3.6-27B",
        "profiles": profiles,
        "launches": launches,
        "workloads": [{"name": f"w{number}", **common, **given} for number, given in enumerate(workloads)],
        "timeouts": {"first_token_s": 60, "idle_s": 30, "request_s": 600},
    }
    path.write_text(yaml.safe_dump(sweep, sort_keys=False))
    return path


def bench(lab: Any, sweep: Path | str, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    done: subprocess.CompletedProcess[str] = lab.run(
        "specrig", "bench", str(sweep), "--yes", "--out", str(out), *more, timeout_s=400
    )
    return done


def only_run(out: Path) -> Path:
    (run,) = [path for path in out.iterdir() if (path / "manifest.json").is_file()]
    return run


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main_pids(lab: Any) -> list[str]:
    """Process ids of the production servers: a restart changes them."""
    units = " ".join(f"specrig-sglang@{name}" for name in PRODUCTION)
    pids: list[str] = lab.guest(f"systemctl show -p MainPID --value {units}", check=True).stdout.split()
    assert len(pids) == len(PRODUCTION)
    assert "0" not in pids
    return pids


def active_units(lab: Any) -> set[str]:
    """Every unit of ours that runs in the guest."""
    text = lab.guest("systemctl list-units --plain --no-legend --state=active,activating 'specrig-*.service'").stdout
    return {line.split()[0] for line in text.splitlines()}


def assert_only_production_serves(lab: Any) -> None:
    assert active_units(lab) == {f"specrig-sglang@{name}.service" for name in PRODUCTION}
    for port in (31001, 31002):
        assert lab.tokens(port) == 8
    assert lab.host("test -e /run/specrig/lock").returncode != 0


def assert_no_request_twice(run: Path) -> None:
    seen = Counter((row["cell"], row["launch"], row["index"]) for row in lines(run / "requests.jsonl"))
    assert set(seen.values()) == {1}


def _alive(pid: int) -> bool:
    """Whether a process runs; one that ended and that nobody waits for does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


class Bench:
    """A ``specrig bench`` in a process group of its own, to be interrupted."""

    def __init__(self, lab: Any, sweep: Path, out: Path, *more: str) -> None:
        self._lab = lab
        self.process = subprocess.Popen(
            ["specrig", "bench", str(sweep), "--yes", "--out", str(out), "--reason", "to be ended", *more],
            cwd=Path(__file__).resolve().parents[2],
            env=lab.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait_for(self, name: str, cells: int) -> str:
        """Wait until so many cells of the run ended and a launch of it is measuring; returns the run's id."""
        script = (
            f"run=$(ls -d {RUNS}/{name}-* | tail -n 1); wc -l < $run/cells.jsonl; basename $run;"
            " systemctl list-units --plain --no-legend --state=active 'specrig-bench-*' | cut -d' ' -f1"
        )
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            words = self._lab.guest(script).stdout.split()
            if len(words) == 3 and int(words[0]) >= cells:
                return str(words[1])
            assert self.process.poll() is None, self.process.communicate()[0]
            time.sleep(0.3)
        pytest.fail(f"the benchmark never came to cell {cells}")

    def kill(self) -> None:
        """Kill it, and wait until its play, which ends for that, is gone: as long as it lives the lock is its own."""
        holder = json.loads(self._lab.host("cat /run/specrig/lock", check=True).stdout)
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        deadline = time.monotonic() + 30
        while _alive(holder["pid"]):
            assert time.monotonic() < deadline, f"the play goes on without its controller: {holder}"
            time.sleep(0.1)


@pytest.fixture(scope="module")
def finished(serving: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Three methods, three launches each, run to the end; with prompts of a file, and a cell that cannot fit."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "mine.jsonl").write_text("".join(json.dumps({"prompt": f"Tell me of {n}."}) + "\n" for n in range(4)))
    sweep = write_sweep(
        folder,
        "tiny",
        ["tp1-autoregressive", "tp1-dflash", "tp1-ddtree-b15"],
        3,
        # A prompt so long that 2 % of the time to its first token are more than a busy machine's wake-up.
        {"prompt_tokens": 2048},
        {"profiles": ["tp1-dflash"], "prompts": "mine.jsonl", "requests": 2},
        {"profiles": ["tp1-dflash"], "prompt_tokens": 40000},
    )
    before = main_pids(serving)
    done = bench(serving, sweep, folder / "runs", "--reason", "which method is best")
    run = only_run(folder / "runs")
    return {"done": done, "run": run, "pids": (before, main_pids(serving)), "journal": lines(serving.journal)}


def test_a_sweep_runs_to_its_end_beside_production(finished: dict[str, Any], serving: Any) -> None:
    done, run = finished["done"], finished["run"]
    assert done.returncode == 0, done.stdout + done.stderr
    assert finished["pids"][0] == finished["pids"][1]
    assert_only_production_serves(serving)
    manifest = read(run / "manifest.json")
    assert manifest["label"] == "complete"
    assert manifest["reason"] == "which method is best"
    assert manifest["engine"]["kind"] == manifest["engine"]["hardware"] == "simulated"
    assert manifest["placements"]["tp1-dflash"]["numa_nodes"] == [1]
    assert [launch["launch"] for launch in manifest["launches"]] == list(range(9))
    for launch in manifest["launches"]:
        rows = launch["gates"]
        assert {row["status"] for row in rows} == {"pass"}
        # The placement is looked at before the first cell and after the last one.
        assert [row["gate"] for row in rows].count("placement") == 2
        assert {"device", "model", "server", "budget", "smoke"} <= {row["gate"] for row in rows}
    cells = lines(run / "cells.jsonl")
    assert len(cells) == 12
    assert {cell["state"] for cell in cells} <= {"done", "invalid"}
    assert_no_request_twice(run)
    assert len(lines(run / "requests.jsonl")) == 9 * 4 + 3 * 2
    assert (run / "mine.jsonl").is_file()


def test_its_summary_has_speedups_with_intervals_and_its_report_says_that_it_is_simulated(
    finished: dict[str, Any],
) -> None:
    run = finished["run"]
    summary = read(run / "summary.json")
    scale = read(run / "manifest.json")["engine"]["time_scale"]
    decode = {row["method"]: row for row in summary["speedups"] if row["metric"] == "decode"}
    assert set(decode) == {"dflash", "ddtree-b15"}
    for row in decode.values():
        assert row["baseline"] == "autoregressive"
        assert row["low"] < row["speedup"] < row["high"]
        # Three valid launches get a verdict; where the client was disturbed, the reason stands there instead.
        assert row["verdict"] in ("faster", "undecided") if row["launches"] == 3 else row["note"]
    assert (summary["simulated"], summary["time_scale"]) == (True, scale)
    page = (run / "report.html").read_text()
    assert f"SIMULATED ENGINE, time scale {scale:g}: not GPU performance" in page
    assert "SIMULATED" in finished["done"].stdout


def short(row: Any) -> bool:
    """The time to first token of the short prompts of a file: milliseconds, of which the client's wake-up is a part."""
    return bool(row.figure == "TTFT, s" and row.truth < 0.1)


def test_its_figures_are_the_engines_own(finished: dict[str, Any], serving: Any, tmp_path: Path) -> None:
    (tmp_path / "truth.jsonl").write_text(serving.guest(f"cat {TRUTH}", check=True).stdout)
    report = compare_truth(read_run(finished["run"]), read_truth([tmp_path / "truth.jsonl"]))
    assert (report.matched, report.unmatched) == (42, 0)
    figures = {row.figure for row in report.rows}
    assert {"decode rate, tokens/s", "TTFT, s", "acceptance length", "decode speed-up"} <= figures
    assert [row for row in report.rows if abs(row.error) > 0.02 and not (short(row) and row.ok)] == []


def test_a_cell_that_cannot_fit_is_skipped_with_its_reason(finished: dict[str, Any]) -> None:
    run = finished["run"]
    (skipped,) = read(run / "manifest.json")["skipped"]
    # 40,000 + 64 does not fit 32,768, whatever is reserved.
    assert "32,768" in skipped["reason"]
    assert skipped["cell"] not in {cell["cell"] for cell in lines(run / "cells.jsonl") if cell["state"] != "skipped"}
    assert "40,000" in (run / "report.html").read_text()
    assert "skipped: " in finished["done"].stderr


def test_both_journals_tell_it(finished: dict[str, Any]) -> None:
    rows = [row for row in finished["journal"] if row["playbook"] == "benchmark.yml"]
    assert {row["reason"] for row in rows} == {"which method is best"}
    assert {row["event"] for row in rows} >= {"start", "play", "task", "gate", "cell", "end"}
    assert rows[-1]["event"] == "end"
    cells = [row for row in rows if row["event"] == "cell"]
    assert len({(row["cell"]["cell"], row["cell"]["launch"]) for row in cells}) == len(cells) == 12
    assert {row["outcome"] for row in cells} <= {"ok", "invalid"}
    told = [text for row in rows for text in row.get("changes", [])]
    for name in ("tp1-autoregressive", "tp1-dflash", "tp1-ddtree-b15"):
        assert told.count(f"started {name}") == told.count(f"stopped {name}") == 3
    own = lines(finished["run"] / "journal.jsonl")
    assert own[0]["event"] == "start"
    assert own[0]["message"] == "which method is best"
    assert [row["event"] for row in own].count("cell") == 12
    assert {row["outcome"] for row in own if row["event"] == "gate"} == {"pass"}
    assert own[-1]["event"] == "end"
    assert own[-1]["outcome"] == "complete"


def test_runs_list_and_show(finished: dict[str, Any], serving: Any) -> None:
    run = finished["run"]
    listed = serving.run("specrig", "runs", "list", str(run.parent), "--json")
    assert [(row["run"], row["label"], row["missing"]) for row in json.loads(listed.stdout)] == [
        (run.name, "complete", 0)
    ]
    shown = serving.run("specrig", "runs", "show", str(run))
    assert shown.returncode == 0
    assert "label: complete" in shown.stdout
    assert "which method is best" in shown.stdout
    gone = serving.run("specrig", "runs", "show", str(run.parent / "none"))
    assert gone.returncode == 2
    assert len(gone.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no such file, and no shipped sweep (full, nightly, quick) has that name"),
        ("name: x\nmodel: m\nworkloads: [{name: a, prompts: questions, prompt_tokens: many}]\n", "prompt_tokens"),
    ],
)
def test_a_wrong_sweep_is_told_before_a_machine_is_asked(text: str | None, said: str, lab: Any, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yml"
    if text:
        path.write_text(text)
    journal = lab.journal.read_text() if lab.journal.exists() else ""
    done = lab.run("specrig", "bench", str(path) if text else "nonsense", "--out", str(tmp_path))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert said in done.stderr
    assert (lab.journal.read_text() if lab.journal.exists() else "") == journal


def test_the_plan_alone_starts_nothing(serving: Any, tmp_path: Path) -> None:
    before = active_units(serving)
    done = serving.run("specrig", "bench", "quick", "--only", "tp4-*", "--plan", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tp4-dflash on GPUs 4-7, NUMA node 1" in done.stdout
    assert "launches to do, about" in done.stdout
    assert list(tmp_path.iterdir()) == []
    assert active_units(serving) == before


def test_gpus_that_serve_are_not_taken_unasked(serving: Any, tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, "eight", ["tp8-autoregressive"], 1, {"requests": 1})
    before = main_pids(serving)
    done = bench(serving, sweep, tmp_path / "runs")
    assert done.returncode == 1
    assert "tp8-autoregressive needs GPUs 0-7, where chat and agent serve" in done.stderr
    assert "--take-over" in done.stderr
    assert main_pids(serving) == before
    assert not (tmp_path / "runs").exists()
    assert_only_production_serves(serving)


def test_taking_over_puts_production_back_also_when_a_launch_fails(serving: Any, tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, "eight", ["tp8-autoregressive", "tp8-dflash"], 1, {"requests": 1})
    override = "/etc/systemd/system/specrig-sglang@tp8-dflash.service.d/zz-by-hand.conf"
    serving.guest(f"mkdir -p $(dirname {override}); printf '[Service]\\nCPUAffinity=0\\n' > {override}", check=True)
    before = main_pids(serving)
    try:
        done = bench(serving, sweep, tmp_path / "runs", "--take-over")
    finally:
        serving.guest(f"rm -f {override}; systemctl daemon-reload", check=True)
    assert done.returncode == 1
    assert override in done.stderr
    run = only_run(tmp_path / "runs")
    manifest = read(run / "manifest.json")
    assert manifest["label"] == "partial"
    assert manifest["stopped_for_it"] == ["chat", "agent"]
    assert manifest["placements"]["tp8-autoregressive"]["numa"] == "span"
    states = {launch["profile"]: launch.get("error") for launch in manifest["launches"]}
    assert states["tp8-autoregressive"] is None
    assert override in states["tp8-dflash"]
    assert {cell["profile"] for cell in lines(run / "cells.jsonl")} == {"tp8-autoregressive"}
    # Production is there again, in new processes: it was stopped for the benchmark.
    assert not set(main_pids(serving)) & set(before)
    assert_only_production_serves(serving)


@pytest.fixture
def misplaced(serving: Any) -> Iterator[Any]:
    """An engine that starts TP4 with GPUs 1-5 visible whatever its unit says: its ranks really are on 1-4."""
    wrapper = (
        "#!/bin/sh\\n"
        'case "$SPECRIG_PROFILE" in tp4-*) CUDA_VISIBLE_DEVICES=1,2,3,4,5; export CUDA_VISIBLE_DEVICES;; esac\\n'
        f'exec {SPECRIG}.real "$@"\\n'
    )
    serving.guest(f"mv {SPECRIG} {SPECRIG}.real; printf '{wrapper}' > {SPECRIG}; chmod 755 {SPECRIG}", check=True)
    try:
        yield serving
    finally:
        serving.guest(f"mv {SPECRIG}.real {SPECRIG}", check=True)


def test_the_incident_ranks_on_other_gpus_end_the_run_at_the_gate(misplaced: Any, tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, "four", ["tp4-autoregressive", "tp4-dflash"], 1, {"requests": 1})
    before = main_pids(misplaced)
    done = bench(misplaced, sweep, tmp_path / "runs")
    assert done.returncode == 1
    said = " ".join(done.stderr.split())
    assert "ranks run on GPUs 1-4 (NUMA nodes 0,1)" in said
    assert "planned GPUs 4-7 (NUMA node 1)" in said
    run = only_run(tmp_path / "runs")
    assert not (run / "cells.jsonl").exists()
    assert not (run / "requests.jsonl").exists()
    manifest = read(run / "manifest.json")
    # The second profile was not tried: what is planned is not what this guest does.
    (launch,) = manifest["launches"]
    (gate,) = [row for row in launch["gates"] if row["status"] == "fail"]
    assert gate["gate"] == "placement"
    assert gate["seen"]["gpus"] == [1, 2, 3, 4]
    assert manifest["label"] == "partial"
    assert main_pids(misplaced) == before
    assert_only_production_serves(misplaced)


def test_ctrl_c_keeps_finished_cells_and_resume_does_the_missing_ones(serving: Any, tmp_path: Path) -> None:
    # On all GPUs, so that production had to give way and comes back after Ctrl-C too.
    sweep = write_sweep(tmp_path, "stopped", ["tp8-autoregressive"], 1, {"requests": 2}, {"requests": 24})
    running = Bench(serving, sweep, tmp_path / "runs", "--take-over")
    name = running.wait_for("stopped", 1)
    assert not active_units(serving) & {f"specrig-sglang@{profile}.service" for profile in PRODUCTION}
    os.kill(running.process.pid, signal.SIGINT)
    output, _ = running.process.communicate(timeout=120)
    assert running.process.returncode == 130, output
    assert f"specrig runs resume {name}" in output
    assert_only_production_serves(serving)
    run = tmp_path / "runs" / name
    manifest = read(run / "manifest.json")
    assert manifest["label"] == "aborted"
    states = Counter(cell["state"] for cell in lines(run / "cells.jsonl"))
    assert states["done"] + states["invalid"] == 1
    journal = lines(serving.journal)
    assert [row for row in journal if row["event"] == "end"][-2]["outcome"] == "aborted"
    assert any(row["event"] == "cell" and row["reason"] == "to be ended" for row in journal)

    refused = serving.run("specrig", "runs", "resume", str(run), timeout_s=300)
    assert refused.returncode == 1
    assert "--take-over" in refused.stderr
    resume = ("specrig", "runs", "resume", str(run), "--take-over", "--reason", "the rest")
    done = serving.run(*resume, timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert read(run / "manifest.json")["label"] == "complete"
    cells = lines(run / "cells.jsonl")
    assert len(cells) == 2
    assert {cell["state"] for cell in cells} <= {"done", "invalid"}
    assert len(lines(run / "requests.jsonl")) == 26
    assert_no_request_twice(run)
    assert_only_production_serves(serving)


def test_a_killed_controller_loses_nothing(serving: Any, tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, "killed", ["tp1-dflash", "tp1-ddtree-b15"], 1, {"requests": 2}, {"requests": 16})
    running = Bench(serving, sweep, tmp_path / "runs")
    name = running.wait_for("killed", 1)
    running.kill()
    deadline = time.monotonic() + 60
    while any(unit.startswith("specrig-bench-") for unit in active_units(serving)):
        assert time.monotonic() < deadline, "the unit in the guest goes on, and ends with its launch"
        time.sleep(0.3)
    (server,) = [unit for unit in active_units(serving) if "@tp1-" in unit]
    assert serving.guest(f"wc -l < {RUNS}/{name}/cells.jsonl").stdout.strip() == "2"

    recovered = serving.play("recover")
    assert recovered.returncode == 0, recovered.stdout + recovered.stderr
    assert "a benchmark left its server running" in recovered.stdout
    assert server not in active_units(serving)
    assert_only_production_serves(serving)

    elsewhere = tmp_path / "later"
    elsewhere.mkdir()
    # It was never collected: its id is enough.
    command = [sys.executable, "-m", "specrig.cli", "runs", "resume", name, "--reason", "after the crash"]
    done = subprocess.run(
        command, cwd=elsewhere, env=serving.env, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = elsewhere / "runs" / name
    assert read(run / "manifest.json")["label"] == "complete"
    assert len(lines(run / "cells.jsonl")) == 4
    assert len(lines(run / "requests.jsonl")) == 36
    assert_no_request_twice(run)
    told = {
        (row["cell"]["cell"], row["cell"]["launch"])
        for row in lines(serving.journal)
        if row["event"] == "cell" and row["reason"] == "after the crash"
    }
    assert len(told) == 4
    assert_only_production_serves(serving)


def test_abort_ends_what_a_killed_controller_left(serving: Any, tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, "left", ["tp1-autoregressive"], 1, {"requests": 2}, {"requests": 200})
    running = Bench(serving, sweep, tmp_path / "runs")
    name = running.wait_for("left", 1)
    running.kill()
    done = serving.run("specrig", "runs", "abort", str(tmp_path / "runs" / name), timeout_s=120)
    # A folder that is not there is no run: the id alone is.
    assert done.returncode == 2
    done = subprocess.run(
        [sys.executable, "-m", "specrig.cli", "runs", "abort", name],
        cwd=tmp_path,
        env=serving.env,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{name}: aborted" in done.stdout
    assert read(tmp_path / "runs" / name / "manifest.json")["label"] == "aborted"
    assert_only_production_serves(serving)


def test_a_timer_runs_sweeps_one_at_a_time_with_the_host_as_its_own_controller(serving: Any, tmp_path: Path) -> None:
    names = ("timed", "second")
    calendar = ("--on-calendar", "2035-01-01 02:00:00", "--reason", "every so often", "--json")
    sweep = write_sweep(tmp_path, "never", ["tp1-dflash"], 1, {"requests": 2})
    never = serving.run("specrig", "schedule", str(sweep), "--on-calendar", "tomorrowish", "--json")
    assert never.returncode == 1
    assert "Failed to parse calendar specification 'tomorrowish'" in never.stdout + never.stderr
    assert serving.host("ls /etc/systemd/system").stdout.count("specrig-sweep@never") == 0
    # What a sweep reads besides itself goes with it.
    (tmp_path / "mine.jsonl").write_text('{"prompt": "Tell me of one."}\n{"prompt": "Tell me of two."}\n')
    (tmp_path / "when").mkdir()
    (tmp_path / "when" / "t.jsonl").write_text('{"at_s": 9}\n{"at_s": 9.5, "output_tokens": 7}\n')
    beside = {"prompts": "mine.jsonl", "arrival": "trace", "trace": "when/t.jsonl"}
    for name, more in zip(names, (beside, {}), strict=True):
        sweep = write_sweep(tmp_path, name, ["tp1-dflash"], 1, {"requests": 2, **more})
        done = serving.run("specrig", "schedule", str(sweep), *calendar)
        assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads(done.stdout)["changed"] > 0
    again = serving.run("specrig", "schedule", str(tmp_path / "timed.yml"), *calendar)
    assert json.loads(again.stdout)["changed"] == 0
    for name in names:
        timer = f"specrig-sweep@{name}.timer"
        assert serving.host(f"systemctl is-enabled {timer}").stdout.strip() == "enabled"
        assert "2035-01-01 02:00:00" in serving.host(f"systemctl list-timers --all {timer}").stdout
    before = main_pids(serving)

    units = [f"specrig-sweep@{name}.service" for name in names]
    serving.host(f"systemctl start --no-block {' '.join(units)}", check=True)
    # Not the state: --no-block returns before they are activating.
    ended = f"systemctl show -p ExecMainExitTimestampMonotonic --value {' '.join(units)}"
    deadline = time.monotonic() + 300
    while "0" in serving.host(ended, check=True).stdout.split():
        assert time.monotonic() < deadline, serving.host(f"journalctl -n 40 --no-pager {units[0]}").stdout
        time.sleep(1)
    results = serving.host(f"systemctl show -p Result --value {' '.join(units)}").stdout.split()
    log = serving.host("journalctl -n 80 --no-pager -o cat -u 'specrig-sweep@*'").stdout
    assert results == ["success", "success"], log
    manifests = [
        json.loads(serving.host(f"cat /var/lib/specrig/runs/{name}-*/manifest.json", check=True).stdout)
        for name in names
    ]
    for manifest in manifests:
        assert manifest["label"] == "complete"
        assert manifest["reason"] == "every so often"
    for name in names:
        serving.host(f"test -s /var/lib/specrig/runs/{name}-*/report.html", check=True)
    asked = serving.host("cat /var/lib/specrig/runs/timed-*/requests.jsonl", check=True).stdout.splitlines()
    assert sorted(json.loads(line)["output_tokens"] for line in asked) == [7, 64]
    first, second = sorted(manifests, key=lambda manifest: manifest["created_at"])
    assert first["labelled_at"] < second["created_at"]
    assert main_pids(serving) == before
    assert_only_production_serves(serving)

    for changed in (True, False):
        done = serving.run("specrig", "schedule", str(tmp_path / "timed.yml"), "--remove", "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        assert (json.loads(done.stdout)["changed"] > 0) is changed
    left = serving.host(
        "ls /etc/systemd/system /etc/specrig/sweeps; systemctl list-timers --all specrig-sweep@*"
    ).stdout
    assert "timed" not in left
    assert "specrig-sweep@second.timer" in left
