"""The performance claims, measured: whole processes in wall seconds, the stream client as ratios within one run.

Absolute seconds move from machine to machine; each claim stands beside its limit, and each comparison is made between
two things measured one after the other here and now. Exit code 1 where a limit is not met.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SPECRIG = [sys.executable, "-m", "specrig.cli"]


def timed(command: list[str], repeat: int) -> list[float]:
    """Wall seconds of a whole process, several times, after one warm-up run."""
    seconds = []
    for round_number in range(repeat + 1):
        started = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"bench: {' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-400:]}")
        if round_number:
            seconds.append(time.perf_counter() - started)
    return seconds


def show(
    rows: list[dict[str, object]],
    name: str,
    values: list[float] | None,
    limit: float,
    note: str = "",
    unit: str = "s",
) -> None:
    """Print one claim and keep it: its median, in seconds or in MB, against its limit."""
    key = unit.lower()
    row: dict[str, object] = {"claim": name, f"limit_{key}": limit, "note": note, f"median_{key}": None, "met": None}
    if values:
        middle = statistics.median(values)
        row |= {f"median_{key}": middle, f"min_{key}": min(values), f"max_{key}": max(values), "met": middle <= limit}
        verdict = "met" if row["met"] else "NOT MET"
        print(f"{name:<50} {middle:7.3f} {unit}  (limit {limit:g} {unit}, {len(values)} runs)  {verdict}")
    else:
        print(f"{name:<50} not measured: {note}")
    rows.append(row)


def one_request(rows: list[dict[str, object]], repeat: int) -> None:
    """A load run of one request against the simulated engine, as a whole process: seconds and peak memory.

    The engine answers at a small part of its time, so that the seconds are the client's own.
    """
    from specrig.sim.testing import running_sim

    with tempfile.TemporaryDirectory() as scratch, tokenizer_folder() as tokenizer:
        shapes = {
            # with a tokenizer the memory is the library's: its tables of a vocabulary of 248,000 and their making
            "with a tokenizer": ("sglang", "prompt_tokens: 256, ", ["--tokenizer", str(tokenizer)], 1.0, 260),
            "without a tokenizer": ("openai-chat", "", [], 0.5, 100),
        }
        with running_sim(model_path=tokenizer, served_model_name="Qwen3.6-27B", sim_time_scale=0.02) as sim:
            for name, (api, length, more, limit_s, limit_mb) in shapes.items():
                sweep = Path(scratch) / "one.yml"
                sweep.write_text(
                    f"name: one\nmodel: Qwen3.6-27B\napi: {api}\nlaunches: 1\nworkloads:\n"
                    f"  - {{name: one, prompts: questions, {length}output_tokens: 4, requests: 1}}\n"
                )
                command = [*SPECRIG, "load", str(sweep), "--url", sim.url, *more, "--workers", "1", "--json", "--out"]
                seconds, peaks = [], []
                for number in range(repeat + 1):
                    took, peak_mb = measured([*command, f"{scratch}/run {name} {number}"])
                    if number:
                        seconds.append(took)
                        peaks.append(peak_mb)
                show(rows, f"specrig load, one request, {name}", seconds, limit_s)
                show(rows, f"specrig load, peak memory, {name}", peaks, limit_mb, unit="MB")


def measured(command: list[str]) -> tuple[float, float]:
    """Wall seconds of a whole process, and the most memory that it had, in MB."""
    with tempfile.TemporaryFile("w+") as output:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=output)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            raise SystemExit(f"bench: {' '.join(command)} ended with {process.returncode}: {output.read()[-400:]}")
    return seconds, usage.ru_maxrss * 1024 / 1e6


PROMPTS = """
import sys, time
from specrig.tokens.prompts import PromptFactory
from specrig.tokens.tokenizer import load
tokenizer = load(sys.argv[1])
kind, count, tokens = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
begun = time.perf_counter()
made = PromptFactory(tokenizer, kind, tokens, cache="unique").sessions(count)
print(time.perf_counter() - begun)
assert {prompt.tokens for session in made for prompt in session} == {tokens}
"""


def prompts(rows: list[dict[str, object]], repeat: int) -> None:
    """Exact prompts, each time in a fresh process, after the tokenizer was loaded."""
    with tokenizer_folder() as tokenizer:
        for kind, count, tokens, limit in (("questions", 1000, 4096, 5.0), ("prose", 1, 250_000, 2.0)):
            command = [sys.executable, "-c", PROMPTS, str(tokenizer), kind, str(count), str(tokens)]
            seconds = []
            for _ in range(repeat):
                done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
                if done.returncode:
                    raise SystemExit(f"bench: prompts cannot be made: {done.stderr.strip()[-400:]}")
                seconds.append(float(done.stdout))
            show(rows, f"{count:,} prompts of {tokens:,} tokens, exact", seconds, limit)


@contextlib.contextmanager
def tokenizer_folder() -> Iterator[Path]:
    """The real Qwen tokenizer: the one that the tests keep, else a fresh one."""
    from specrig.ops.lab.model import build_tokenizer

    kept = ROOT / ".cache" / "tests" / "tokenizer"
    if (kept / "tokenizer_config.json").is_file():
        yield kept
        return
    with tempfile.TemporaryDirectory() as scratch:
        build_tokenizer(Path(scratch))
        yield Path(scratch)


def recovery(rows: list[dict[str, object]], repeat: int) -> None:
    """An unchanged recovery of the lab, where one is up and provisioned."""
    state = subprocess.run([*SPECRIG, "lab", "status", "--json"], capture_output=True, text=True, check=False)
    up = state.returncode == 0 and json.loads(state.stdout or "{}").get("state") == "up"
    command = ["ansible-playbook", "-i", "inventory/lab", "playbooks/recover.yml"]
    note = "" if up else "no lab is up; run make demo first"
    show(rows, "an unchanged recovery of the lab", timed(command, repeat) if up else None, 8.0, note)


def apart(rows: list[dict[str, object]], script: str) -> int:
    """A benchmark in a process of its own; its claims are kept with the others."""
    with tempfile.TemporaryDirectory() as scratch:
        figures = Path(scratch) / "figures.json"
        done = subprocess.run([sys.executable, f"bench/{script}", "--json", str(figures)], cwd=ROOT, check=False)
        if figures.is_file():
            rows += json.loads(figures.read_text())["claims"]
    return done.returncode


def main() -> int:
    """Measure everything; write the figures as JSON too where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    for command in (["--help"], ["load", "--help"]):
        show(rows, f"specrig {' '.join(command)}", timed([*SPECRIG, *command], arguments.repeat), 0.3)
    one_request(rows, arguments.repeat)
    prompts(rows, min(arguments.repeat, 3))
    recovery(rows, min(arguments.repeat, 3))
    print("\nthe stream client against a bare loop and httpx, in one run:", flush=True)
    client = apart(rows, "load_client.py")
    print("\nstaging a model into RAM, with its proof, in one run:")
    staged = apart(rows, "staging.py")
    print("\nworker processes of a load against one process, in one run:")
    shared = apart(rows, "workers.py")
    print("\nother load generators, those that are installed, in one run:")
    peers = apart(rows, "peers.py")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"schema": 1, "claims": rows}, indent=2) + "\n")
    return 1 if client or staged or shared or peers or any(row["met"] is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
