"""Specrig's client beside other load generators, against a server whose truth is known, all in one run.

    python bench/peers.py              # compare with the peers that are there
    python bench/peers.py --install    # fetch those of bench/peers.txt first, each into an environment of its own
    python bench/peers.py --clients specrig vllm --scenarios burst10k

The server has a core of its own where there are two, each client the other, in a fresh process. Peers are called as
their manuals say, with the options that make them most exact, and figures are read from the files that they write.
specrig's are read from what `specrig export --format sglang` makes of its run. The whole output is written as JSON
where asked. Exit code 1 where specrig is behind a peer in any figure that is claimed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from load_client import pin

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".cache" / "bench" / "peers"
FREE_GB = 8
INSTALL_S = 900
RUN_S = 120
RESOLUTION = {"ttft_p50": 0.1, "ttft_p99": 0.1, "itl": 0.01, "tpot": 0.01, "rate": 0.1, "tokens": 0, "ok": 0,
              "prompt_sent": 0, "prompt_told": 0}  # fmt: skip
"""What two errors may differ by without one being worse: ms, percent of the rate, counts."""
UNITS = {"ttft_p50": "TTFT p50 ms", "ttft_p99": "TTFT p99 ms", "itl": "ITL mean ms", "tpot": "TPOT mean ms",
         "rate": "tok/s", "tokens": "output tokens", "ok": "succeeded", "prompt_sent": "prompt sent",
         "prompt_told": "prompt reported"}  # fmt: skip
Figures = dict[str, float | None]


@dataclass(frozen=True)
class Scenario:
    """What is asked of a client, and how the server answers; `checks` are the figures that are compared."""

    title: str
    requests: int
    concurrency: int
    chunks: int
    server: dict[str, Any]
    checks: tuple[str, ...] = ()
    prompt_tokens: int = 64
    natural: bool = False
    k: int = 1

    @property
    def asked(self) -> int:
        """Output tokens asked of each request."""
        return self.chunks * self.k


def burst(rate: int) -> Scenario:
    """128 streams at once, chunks at a steady rate for three seconds."""
    chunks = rate * 3 // 128
    title = f"128 streams opened at once, {rate:,} chunks/s"
    return Scenario(
        title, 128, 128, chunks, {"together": 128, "rate": rate}, ("ttft_p50", "ttft_p99", "itl", "tpot", "rate")
    )


SCENARIOS = {
    "shape": Scenario(
        "4 streams, 4 tokens a chunk, the role 395 ms before the first token, 4,096 prompt tokens asked",
        4, 4, 40, {"prefill_s": 0.4, "interval_s": 0.02, "role_s": 0.005},
        ("ttft_p50", "itl", "tpot", "rate", "tokens", "prompt_sent", "prompt_told"), 4096, k=4,
    ),
    "faults": Scenario(
        "one whole answer, one that ends early, an error inside HTTP 200, one cut off without its last event",
        4, 1, 40, {"prefill_s": 0.05, "interval_s": 0.005, "faults": [None, "early", "error", "cut"]},
        ("ok", "tokens"), natural=True,
    ),
    "start": Scenario("one request, the whole process", 1, 1, 40, {"prefill_s": 0.01, "interval_s": 0.001}),
    "flood": Scenario("64 streams, as fast as they go", 64, 64, 3000, {"together": 64, "rate": 0}, ("tokens",)),
    "burst10k": burst(10_000),
    "burst20k": burst(20_000),
}  # fmt: skip


# -- clients: the command line of each, and its own figures -----------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """One client's run of a scenario."""

    scenario: Scenario
    url: str
    tokenizer: Path
    out: Path
    native: bool = False


@dataclass(frozen=True)
class Call:
    """A command line, and how to read the file that it leaves."""

    command: list[str]
    read: Callable[[], Figures]
    env: dict[str, str] = field(default_factory=dict)


def bench_keys(document: dict[str, Any]) -> Figures:
    """The figures under the keys that vllm's and sglang's results have in common."""
    completed = document["completed"]
    return {
        "ttft_p50": document["median_ttft_ms"],
        "ttft_p99": document["p99_ttft_ms"],
        "itl": document["mean_itl_ms"],
        "tpot": document["mean_tpot_ms"],
        "rate": document["output_throughput"],
        "tokens": document["total_output_tokens"],
        "ok": completed,
        "prompt_told": document["total_input_tokens"] / completed if completed else None,
    }


def last_line(path: Path) -> dict[str, Any]:
    """The last document of a file of lines."""
    document: dict[str, Any] = json.loads(path.read_text().splitlines()[-1])
    return document


def specrig(task: Task) -> Call:
    """This program."""
    scenario = task.scenario
    workload = {
        "name": "peers", "prompts": "prose", "prompt_tokens": scenario.prompt_tokens,
        "output_tokens": scenario.asked, "concurrency": scenario.concurrency, "requests": scenario.requests,
        "cache": "unique", "stop": "natural" if scenario.natural else "length",
    }  # fmt: skip
    api = "sglang" if task.native else "openai-chat"
    sweep = task.out / "sweep.yml"
    sweep.write_text(
        json.dumps({"name": "peers", "model": "truth", "api": api, "launches": 1, "workloads": [workload]})
    )
    line = [sys.executable, "-m", "specrig.cli"]
    run = task.out / "run"

    def read() -> Figures:
        export = [*line, "export", str(run), "--format", "sglang", "--all"]
        subprocess.run(export, check=True, capture_output=True, cwd=ROOT)
        return bench_keys(last_line(run / "export-sglang" / "sglang.jsonl"))

    command = [*line, "load", str(sweep), "--url", task.url, "--tokenizer", str(task.tokenizer), "--out", str(run)]
    return Call([*command, "--json"], read, {"PYTHONPATH": os.environ.get("PYTHONPATH", "")})


def sglang(task: Task, module: str = "sglang.bench_serving") -> Call:
    """SGLang's client in Python."""
    scenario, file = task.scenario, task.out / "result.jsonl"
    command = [
        str(PEERS / "sglang/bin/python"), "-W", "ignore", "-m", module,
        "--backend", "sglang" if task.native else "sglang-oai-chat", "--base-url", task.url, "--model", "truth",
        "--tokenizer", str(task.tokenizer), "--dataset-name", "random-ids", "--random-range-ratio", "1",
        "--random-input-len", str(scenario.prompt_tokens), "--random-output-len", str(scenario.asked),
        "--num-prompts", str(scenario.requests), "--max-concurrency", str(scenario.concurrency),
        "--warmup-requests", "0", "--output-file", str(file), "--output-details", "--disable-tqdm",
        *(["--disable-ignore-eos"] if scenario.natural else []), *(["--tokenize-prompt"] if task.native else []),
    ]  # fmt: skip
    if not task.native:
        usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        command += ["--extra-request-body", json.dumps(usage)]
    return Call(command, lambda: bench_keys(last_line(file)), {"PYTHONPATH": str(ROOT / "tests/engine/stubs")})


def sglang_rust(task: Task) -> Call:
    """SGLang's client in Rust, which lies in the same wheel."""
    return sglang(task, "sglang.benchmark.rust_client")


def vllm(task: Task) -> Call:
    """The client of vLLM by the module behind its command, which the CPU build breaks by its other name."""
    scenario, file = task.scenario, task.out / "result.json"
    code = (
        "from vllm.utils.argparse_utils import FlexibleArgumentParser as P; from vllm.benchmarks import serve as s; "
        "p = P(); s.add_cli_args(p); s.main(p.parse_args())"
    )
    command = [
        str(PEERS / "vllm/bin/python"), "-W", "ignore", "-c", code, "--backend", "openai-chat",
        "--endpoint", "/v1/chat/completions", "--base-url", task.url, "--model", "truth",
        "--tokenizer", str(task.tokenizer), "--dataset-name", "random", "--random-input-len",
        str(scenario.prompt_tokens), "--random-output-len", str(scenario.asked), "--num-prompts",
        str(scenario.requests), "--max-concurrency", str(scenario.concurrency), "--num-warmups", "0",
        "--ready-check-timeout-sec", "0", "--temperature", "0", "--disable-tqdm", "--percentile-metrics",
        "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,95,99", "--save-result", "--save-detailed",
        "--result-dir", str(task.out), "--result-filename", file.name,
        *([] if scenario.natural else ["--ignore-eos"]),
    ]  # fmt: skip
    return Call(command, lambda: bench_keys(json.loads(file.read_text())), {"VLLM_NO_USAGE_STATS": "1"})


def aiperf(task: Task) -> Call:
    """AIPerf, with the server's own running token counts."""
    scenario = task.scenario
    command = [
        str(PEERS / "aiperf/bin/aiperf"), "profile", "--model", "truth", "--tokenizer", str(task.tokenizer),
        "--url", task.url, "--endpoint-type", "chat", "--streaming", "--concurrency", str(scenario.concurrency),
        "--request-count", str(scenario.requests), "--isl", str(scenario.prompt_tokens), "--osl", str(scenario.asked),
        "--use-server-token-count", "--per-chunk-usage", "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics",
        "--output-artifact-dir", str(task.out), "--extra-inputs", "temperature:0",
        *([] if scenario.natural else ["--extra-inputs", "ignore_eos:true"]),
    ]  # fmt: skip

    def read() -> Figures:
        document = json.loads((task.out / "profile_export_aiperf.json").read_text())

        def stat(metric: str, name: str = "avg") -> float | None:
            return (document.get(metric) or {}).get(name)

        return {
            "ttft_p50": stat("time_to_first_token", "p50"),
            "ttft_p99": stat("time_to_first_token", "p99"),
            "itl": stat("inter_token_latency"),
            "tpot": stat("inter_token_latency"),
            "rate": stat("output_token_throughput"),
            "tokens": stat("total_output_tokens"),
            "ok": stat("request_count") or 0,
            "prompt_told": stat("input_sequence_length"),
        }

    return Call(command, read, {"HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": ""})  # offline it takes no folder


def guidellm(task: Task) -> Call:
    """GuideLLM."""
    scenario, file = task.scenario, task.out / "benchmarks.json"
    data = f"kind=synthetic_text,prompt_tokens={scenario.prompt_tokens},output_tokens={scenario.asked}"
    command = [
        str(PEERS / "guidellm/bin/guidellm"), "run", "--backend", f"kind=openai_http,target={task.url},model=truth",
        "--profile", f"kind=concurrent,streams={scenario.concurrency}", "--data", data,
        "--constraint", f"kind=max_requests,count={scenario.requests}",
        "--tokenizer", f"kind=huggingface_auto,model={task.tokenizer}", "--output", f"kind=json,path={file}",
        "--disable-console",
    ]  # fmt: skip

    def read() -> Figures:
        metrics = json.loads(file.read_text())["benchmarks"][0]["metrics"]

        def good(metric: str, *path: str) -> float | None:
            found = (metrics.get(metric) or {}).get("successful")
            for name in path:
                found = (found or {}).get(name)
            return found

        count = metrics["request_totals"]["successful"]
        rate = (metrics.get("output_tokens_per_second") or {}).get("successful") or {}
        return {
            "ttft_p50": good("time_to_first_token_ms", "median"),
            "ttft_p99": good("time_to_first_token_ms", "percentiles", "p99"),
            "itl": good("inter_token_latency_ms", "mean"),
            "tpot": good("time_per_output_token_ms", "mean"),
            "rate": rate.get("mean"),
            "tokens": good("output_token_count", "total_sum"),
            "ok": count,
            "prompt_told": good("prompt_token_count", "mean"),
        }

    return Call(command, read)


CLIENTS: dict[str, tuple[Callable[[Task], Call], str | None, bool]] = {
    "specrig": (specrig, None, False),
    "specrig native": (specrig, None, True),
    "sglang-rust": (sglang_rust, "sglang", False),
    "sglang-rust native": (sglang_rust, "sglang", True),
    "sglang-py": (sglang, "sglang", False),
    "sglang-py native": (sglang, "sglang", True),
    "vllm": (vllm, "vllm", False),
    "aiperf": (aiperf, "aiperf", False),
    "guidellm": (guidellm, "guidellm", False),
}
"""Adapter, the environment that it needs, and whether it speaks SGLang's own API; the others speak OpenAI's chat."""


# -- installing --------------------------------------------------------------------------------------------------------


def recipes() -> dict[str, list[list[str]]]:
    """Of each peer, the arguments of its pip, in order."""
    out: dict[str, list[list[str]]] = {}
    for line in (ROOT / "bench" / "peers.txt").read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            name, *arguments = line.split()
            out.setdefault(name, []).append(arguments)
    return out


def stamp(steps: list[list[str]]) -> str:
    """What an environment was made of."""
    return hashlib.sha256(json.dumps(steps).encode()).hexdigest()


def missing(name: str) -> str | None:
    """Why a peer cannot be run; None where it is there."""
    file = PEERS / name / "made-of"
    if not file.is_file():
        return "not installed, see make bench-peers"
    return None if file.read_text() == stamp(recipes()[name]) else "another version is installed, see make bench-peers"


def install(name: str) -> str | None:
    """Make a peer's environment where it is not there; why it cannot be had, else None."""
    if missing(name) is None:
        return None
    target = PEERS / name
    PEERS.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(PEERS).free / 1e9) < FREE_GB:
        return f"{free:.1f} GB of disk are free, {FREE_GB} are wanted"
    shutil.rmtree(target, ignore_errors=True)
    until = time.monotonic() + INSTALL_S
    command = [sys.executable, "-m", "venv", str(target)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
        for step in recipes()[name]:
            command = [str(target / "bin/python"), "-m", "pip", *step, "--quiet", "--disable-pip-version-check"]
            subprocess.run(
                command, check=True, capture_output=True, text=True, cwd=ROOT, timeout=max(1, until - time.monotonic())
            )
    except subprocess.TimeoutExpired:
        shutil.rmtree(target, ignore_errors=True)
        return f"{' '.join(command[3:])} did not end within {INSTALL_S} s"
    except (subprocess.SubprocessError, OSError) as error:
        shutil.rmtree(target, ignore_errors=True)
        said = [line for line in str(getattr(error, "stderr", "") or error).splitlines() if line.strip()]
        return next((line for line in reversed(said) if "ERROR" in line), said[-1]).strip()
    (target / "made-of").write_text(stamp(recipes()[name]))
    return None


# -- running -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def server(tokenizer: Path) -> Iterator[str]:
    """The server with the known truth; its URL."""
    command = [*pin(0), sys.executable, str(ROOT / "bench" / "truth_server.py"), str(tokenizer)]
    env = os.environ | {"TRANSFORMERS_VERBOSITY": "error"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def ask(url: str, body: Any = None) -> Any:
    """A control call to the server."""
    data = None if body is None else json.dumps(body).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, data), timeout=30) as answer:
        return json.load(answer)


def tree(root: int) -> tuple[float, float, int]:
    """Of a process and all below it: resident MB, processor seconds so far, how many they are."""
    stats: dict[int, list[str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stats[int(entry.name)] = (entry / "stat").read_text().rpartition(")")[2].split()
    found, more = set(), {root} & stats.keys()
    while more:
        found |= more
        more = {pid for pid, stat in stats.items() if int(stat[1]) in more} - found
    memory = sum(int(stats[pid][21]) for pid in found) * os.sysconf("SC_PAGE_SIZE") / 1e6
    ticks = sum(int(value) for pid in found for value in stats[pid][11:15])
    return memory, ticks / os.sysconf("SC_CLK_TCK"), len(found)


def run_client(call: Call, log: Path) -> dict[str, Any]:
    """A client as a fresh process on its core: wall and processor seconds, peak memory, exit code, samples."""
    keep = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env = (
        keep | {"HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "DO_NOT_TRACK": "1"} | call.env
    )
    peak, most = 0.0, 0
    samples: list[tuple[float, float]] = []
    over = threading.Event()
    with log.open("wb") as output:
        begun = time.monotonic()
        process = subprocess.Popen(
            [*pin(1), *call.command], stdout=output, stderr=subprocess.STDOUT, env=env, cwd=log.parent,
            start_new_session=True,
        )  # fmt: skip

        def watch() -> None:
            nonlocal peak, most
            while not over.wait(0.1):
                memory, seconds, number = tree(process.pid)
                samples.append((time.monotonic(), seconds))
                peak, most = max(peak, memory), max(most, number)
                if time.monotonic() - begun > RUN_S:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)

        watcher = threading.Thread(target=watch)
        watcher.start()
        _, status, used = os.wait4(process.pid, 0)
        wall = time.monotonic() - begun
        process.returncode = os.waitstatus_to_exitcode(status)
        over.set()
        watcher.join()
    cpu = used.ru_utime + used.ru_stime
    return {
        "wall_s": wall, "cpu_s": cpu, "peak_mb": peak, "processes": most, "rc": process.returncode, "samples": samples,
    }  # fmt: skip


def quantile(values: list[float], q: float) -> float:
    """By linear interpolation, as all of the clients have it."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * q
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def truth_of(rows: list[dict[str, Any]], scenario: Scenario) -> Figures:
    """The figures that a client should have found, from the server's own stamps."""
    good = [row for row in rows if row["ok"] and row["sent"]]
    if not good:
        return {}
    ttft = [1e3 * (row["sent"][0] - row["received"]) for row in good]
    gaps = [1e3 * (row["sent"][-1] - row["sent"][0]) / max(1, sum(row["k"][1:])) for row in good]
    tokens = sum(sum(row["k"]) for row in good)
    seconds = max(row["sent"][-1] for row in good) - min(row["received"] for row in good)
    return {
        "ttft_p50": quantile(ttft, 0.5),
        "ttft_p99": quantile(ttft, 0.99),
        "itl": statistics.fmean(gaps),
        "tpot": statistics.fmean(gaps),
        "rate": tokens / seconds,
        "tokens": tokens,
        "ok": len(good),
        "prompt_sent": scenario.prompt_tokens,
        "prompt_told": statistics.fmean(row["prompt_tokens"] for row in good),
    }


def error_of(name: str, seen: float | None, true: float | None) -> float | None:
    """How wrong a figure is: in its own unit, a rate in percent."""
    if seen is None or true is None:
        return None
    return 100 * abs(seen / true - 1) if name == "rate" else abs(seen - true)


def measure(name: str, scenario: Scenario, url: str, tokenizer: Path, out: Path) -> dict[str, Any]:
    """One client through one scenario."""
    adapter, _, native = CLIENTS[name]
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    plan = {**scenario.server, "chunks": scenario.chunks, "k": scenario.k, "asked": scenario.asked}
    ask(f"{url}/scenario", plan)
    call = adapter(Task(scenario, url, tokenizer, out, native))
    got = run_client(call, out / "log")
    rows = ask(f"{url}/truth")
    true = truth_of(rows, scenario)
    figures: Figures = {}
    try:
        figures = call.read()
    except (OSError, LookupError, ValueError, TypeError, subprocess.SubprocessError) as error:
        got["problem"] = f"no figures (exit code {got['rc']}): {type(error).__name__} {error}, see {out / 'log'}"
    if len(rows) != scenario.requests:
        got["problem"] = f"sent {len(rows)} requests of {scenario.requests}, see {out / 'log'}"
    if rows:
        figures["prompt_sent"] = statistics.fmean(row["prompt_tokens"] for row in rows)
    got["chunks"] = sum(len(row["sent"]) for row in rows)
    begun = min((row["received"] for row in rows), default=0.0)
    before = [seconds for moment, seconds in got.pop("samples") if moment < begun]
    got["load_cpu_s"] = got["cpu_s"] - before[-1] if before else None
    errors = {check: error_of(check, figures.get(check), true.get(check)) for check in scenario.checks}
    return {"client": name, **got, "figures": figures, "truth": true, "errors": errors}


# -- the comparison ----------------------------------------------------------------------------------------------------


def cell(value: float | None, width: int, digits: int = 1) -> str:
    """A number in a column; a dash where there is none."""
    return f"{'-' if value is None else f'{value:,.{digits}f}':>{width}}"


def table(found: dict[str, list[dict[str, Any]]], name: str) -> None:
    """What each client said, and what was true in its own run."""
    scenario, rows = SCENARIOS[name], found[name]
    print(f"\n{name}: {scenario.title}")
    head = f"  {'':<20}{'wall s':>8}{'CPU s':>8}{'MB (processes)':>16}{'CPU s/1M chunks':>17}"
    print(head + "".join(f"{UNITS[check] + ' (truth)':>28}" for check in scenario.checks))
    for row in rows:
        memory = f"{row['peak_mb']:,.0f} ({row['processes']})"
        line = f"  {row['client']:<20}{row['wall_s']:>8.2f}{row['cpu_s']:>8.2f}{memory:>16}"
        line += cell(cpu_per_million(found, row) if name == "flood" else None, 17)
        for check in scenario.checks:
            digits = 0 if check in ("tokens", "ok", "prompt_sent", "prompt_told") else 2
            true = cell(row["truth"].get(check), 0, digits).strip()
            line += f"{cell(row['figures'].get(check), 0, digits).strip() + ' (' + true + ')':>28}"
        print(line)
        if "problem" in row:
            print(f"    {row['problem']}")


def claims(found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Each figure of specrig's against the best peer's: met, not met, or None where nothing is to compare."""
    out: list[dict[str, Any]] = []

    def claim(what: str, ours: float | None, theirs: dict[str, float], slack: float, strict: bool = False) -> None:
        best = min(theirs, key=lambda name: theirs[name], default=None)
        met = None
        if best is not None:
            met = ours is not None and (ours < theirs[best] if strict else ours <= theirs[best] + slack)
        out.append({"claim": what, "specrig": ours, "best_peer": best, "theirs": theirs, "slack": slack, "met": met})

    def known(values: dict[str, float | None]) -> dict[str, float]:
        return {client: value for client, value in values.items() if value is not None}

    for name, rows in found.items():
        for native in (False, True):
            of_route = [row for row in rows if CLIENTS[row["client"]][2] == native]
            peers = [row for row in of_route if not row["client"].startswith("specrig")]
            label = f"{name}{' native' if native else ''}"
            for row in of_route:
                if row in peers:
                    continue
                for check, error in row["errors"].items():
                    theirs = known({peer["client"]: peer["errors"][check] for peer in peers})
                    claim(f"{label}: error of {UNITS[check]}", error, theirs, RESOLUTION[check])
                if name == "start":
                    walls = {peer["client"]: peer["wall_s"] for peer in peers if "problem" not in peer}
                    claim(f"{label}: wall s", None if "problem" in row else row["wall_s"], walls, 0)
                if name == "flood":
                    costs = known({peer["client"]: cpu_per_million(found, peer) for peer in peers})
                    claim(f"{label}: CPU s per million chunks", cpu_per_million(found, row), costs, 0, strict=True)
    return out


def cpu_per_million(found: dict[str, list[dict[str, Any]]], row: dict[str, Any]) -> float | None:
    """Processor seconds per million chunks from the first request to the end, less what one request takes."""
    alone = next((other for other in found.get("start", []) if other["client"] == row["client"]), None)
    if alone is None or "problem" in row or row["load_cpu_s"] is None or alone["load_cpu_s"] is None:
        return None
    return float(1e6 * (row["load_cpu_s"] - alone["load_cpu_s"]) / (row["chunks"] - alone["chunks"]))


def main() -> int:
    """Install where asked, compare, say what holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true", help="install the peers that are not there, first")
    parser.add_argument("--clients", nargs="+", choices=CLIENTS, default=list(CLIENTS), metavar="NAME")
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS), metavar="NAME")
    parser.add_argument(
        "--out", type=Path, default=ROOT / ".cache/bench/runs", help="where the clients' files are kept"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    parser.add_argument("--more", metavar="FILE", help="figures of an earlier part of this comparison, from --json")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT / "bench"))
    from run import tokenizer_folder

    reasons = {name: (install if arguments.install else missing)(name) for name in recipes()}
    for name, reason in reasons.items():
        print(f"{name}: {reason or 'installed'}")
    clients = [name for name in arguments.clients if reasons.get(CLIENTS[name][1] or "") is None]
    found: dict[str, list[dict[str, Any]]] = {}
    if arguments.more:
        found = json.loads(Path(arguments.more).read_text())["scenarios"]
    with tokenizer_folder() as tokenizer, server(tokenizer.resolve()) as url:
        for name in arguments.scenarios:
            rows = found.setdefault(name, [])
            for client in clients:
                # the native route is compared where it differs: what a chunk costs
                if CLIENTS[client][2] and name not in ("start", "flood"):
                    continue
                rows[:] = [row for row in rows if row["client"] != client]
                folder = arguments.out.resolve() / name / client.replace(" ", "-")
                rows.append(measure(client, SCENARIOS[name], url, tokenizer.resolve(), folder))
            table(found, name)
    told = claims(found)
    print()
    for row in told:
        verdict = {True: "met", False: "NOT MET", None: "not compared"}[row["met"]]
        best = row["best_peer"] and f"; {row['best_peer']} {row['theirs'][row['best_peer']]:.3f}"
        print(f"{verdict:<13}{row['claim']}: {cell(row['specrig'], 0, 3).strip()}{best or ''}")
    if arguments.json:
        Path(arguments.json).write_text(
            json.dumps({"schema": 1, "not_compared": reasons, "scenarios": found, "claims": told}, indent=1) + "\n"
        )
    return 1 if any(row["met"] is False for row in told) else 0


if __name__ == "__main__":
    sys.exit(main())
