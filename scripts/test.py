"""Run the whole test suite: two labs side by side, the rest after the shorter one, one summary at the end.

Most of the lab's tests wait (for a boot, an engine, a play), so two of them fit on two cores. Each part is a pytest
session of its own, with a lab of its own name, and tears down what it started; Ctrl-C reaches all of them. With
arguments it is one plain pytest session with these arguments.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIRST = ("test_bench.py", "test_boot.py", "test_host_facts.py", "test_model_store.py", "test_serving.py")
"""The lab files of the first lane; every other lab file is in the second."""
SUMMARY = re.compile(r"^=+ (.*\b(?:passed|failed|error|errors|skipped|no tests ran)\b.*) in [0-9.]+s.*=+$")
COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped|deselected|xfailed|xpassed|warnings?)")


def lanes() -> list[list[list[str]]]:
    """Each lane is a list of pytest arguments, run one after the other; the lanes run side by side."""
    lab = sorted((ROOT / "tests" / "lab").glob("test_*.py"))
    first = [str(path.relative_to(ROOT)) for path in lab if path.name in FIRST]
    second = [str(path.relative_to(ROOT)) for path in lab if path.name not in FIRST]
    return [[first, ["tests/unit", "tests/contract"]], [second]]


def run(lane: int, part: int, arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start one session; its output goes to a file, so that the lanes' lines do not mix."""
    sys.path.insert(0, str(ROOT / "src"))
    from specrig.ops.lab.state import default_name

    lab = f"{default_name()}{'ab'[lane]}"
    environment = {**os.environ, "SPECRIG_LAB": lab, "SPECRIG_TEST_BESIDE": "1", "PYTHONUNBUFFERED": "1"}
    cache = ["-o", f"cache_dir=.pytest_cache/{lane}{part}"]
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", *cache, *arguments],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )


def main() -> int:
    """Run everything; exit code 0 if every session passed, else that of the worst."""
    if len(sys.argv) > 1:
        os.execv(sys.executable, [sys.executable, "-m", "pytest", *sys.argv[1:]])
    started = time.monotonic()
    waiting = lanes()
    running: dict[int, tuple[subprocess.Popen[bytes], Path, int]] = {}
    counts: dict[str, int] = {}
    worst = 0
    stopping = False

    def stop(number: int, _frame: object) -> None:
        nonlocal stopping
        if not stopping and number == signal.SIGTERM:  # a terminal's Ctrl-C reaches the sessions by itself
            for process, _, _ in running.values():
                process.terminate()
        stopping = True

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    with tempfile.TemporaryDirectory(prefix="specrig-tests-") as scratch:
        while running or (not stopping and any(waiting)):
            for lane, parts in enumerate(waiting):
                if lane not in running and parts and not stopping:
                    arguments = parts.pop(0)
                    part = 1 - len(parts)
                    log = Path(scratch) / f"{lane}{part}.log"
                    print(f"started: {' '.join(arguments)}", flush=True)
                    running[lane] = (run(lane, part, arguments, log), log, part)
            for lane, (process, log, _) in list(running.items()):
                code = process.poll()
                if code is None:
                    continue
                del running[lane]
                text = log.read_text(errors="replace")
                sys.stdout.write(text)
                sys.stdout.flush()
                worst = max(worst, abs(code))
                for line in text.splitlines():
                    if SUMMARY.match(line):
                        for number, what in COUNT.findall(line):
                            counts[what] = counts.get(what, 0) + int(number)
            time.sleep(0.2)
    said = ", ".join(f"{number} {what}" for what, number in counts.items()) or "no tests ran"
    print(f"{'=' * 10} {said} in {time.monotonic() - started:.2f}s {'=' * 10}")
    return 130 if stopping and not worst else worst


if __name__ == "__main__":
    sys.exit(main())
