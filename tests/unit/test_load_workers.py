"""Worker processes make the same requests as one process does, and say so when one of them is gone."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import ssl
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specrig.cli import main
from specrig.load import workers as parent
from specrig.load.api import make_decoder
from specrig.load.slots import Done, Item, Plan
from specrig.load.stream import Lag, Timeouts
from specrig.load.workers import WorkerError, Workers, worker_count
from specrig.sim.testing import RunningSim, running_sim

MODEL = "Qwen3.6-27B"
TIMES = {
    "run", "rid", "scheduled_s", "sent_s", "first_s", "finished_s", "ttft_s", "ttfa_s", "e2e_s", "decode_tokens_per_s",
    "tpot_s", "itl_mean_s", "queue_s", "reads", "cached_tokens",
}  # fmt: skip
"""What may differ between two runs of the same requests; what is in the cache depends on who came first."""
MEASURED = {"done", "invalid"}
"""A busy machine may cost a cell its validity, but no request."""


@pytest.fixture(scope="module")
def sim(tokenizer_dir: Path) -> Iterator[RunningSim]:
    with running_sim(model_path=tokenizer_dir, served_model_name=MODEL, sim_time_scale=0.2, sim_seed=1) as server:
        yield server


def sweep(path: Path, *workloads: str, api: str = "sglang", timeouts: str = "") -> Path:
    lines = "\n".join(f"  - {{{workload}, prompts: questions, prompt_tokens: 128}}" for workload in workloads)
    path.write_text(f"name: t\nmodel: {MODEL}\napi: {api}\n{timeouts}\nworkloads:\n{lines}\n")
    return path


def command(file: Path, url: str, tokenizer: Path, out: Path, *more: str) -> list[str]:
    return ["load", str(file), "--url", url, "--tokenizer", str(tokenizer), "--out", str(out), *more]


def rows(out: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]


def by_name(out: Path) -> dict[str, dict[str, Any]]:
    return {row["workload"]: row for row in rows(out, "cells")}


def kept(out: Path) -> list[dict[str, Any]]:
    """What a run kept of every request, without its times."""
    traces = {(row["cell"], row["index"]): row["k"] for row in rows(out, "chunks")}
    return [
        {name: value for name, value in row.items() if name not in TIMES}
        | {"k": traces.get((row["cell"], row["index"])), "reads": list(row["reads"])}
        for row in sorted(rows(out, "requests"), key=lambda row: (row["cell"], row["index"]))
    ]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def workers_of(pid: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [child for child in children if b"specrig.load.worker" in Path(f"/proc/{child}/cmdline").read_bytes()]


def wait_until(true: Callable[[], object], what: str, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, what
        time.sleep(0.02)


# -- how many, and which comes next ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "streams", "processors", "expected"),
    [
        (None, 1024, 2, 1),
        (None, 1024, 3, 1),
        (None, 127, 16, 1),
        (None, 128, 16, 2),
        (None, 1024, 16, 8),
        (None, 1024, 4, 2),
        (2, 8, 2, 2),
        (8, 3, 16, 3),
        (1, 1024, 64, 1),
    ],
)
def test_how_many(
    asked: int | None, streams: int, processors: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))
    assert worker_count(asked, streams) == expected


@pytest.mark.parametrize("text", ["0", "-1", "two", "257", "1.5"])
def test_a_number_of_workers_that_is_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(command(Path("s.yml"), "http://127.0.0.1:9", Path("t"), Path("r"), "--workers", text))
    assert caught.value.code == 2
    assert f"{text!r}: expected a number from 1 to 256, or auto" in capsys.readouterr().err


READ_ALL = """
import os, sys
while piece := os.read(int(sys.argv[1]), 4):
    sys.stdout.buffer.write(piece)
"""


def test_each_number_is_taken_once_and_in_order() -> None:
    """A descriptor whose offset has no lock would give numbers to two processes, which this many readers see."""
    count = 200_000
    started = Workers("http://127.0.0.1:9", count=0)
    try:
        started._fill_cursor(count)
        readers = [
            subprocess.Popen(
                [sys.executable, "-c", READ_ALL, str(started._cursor)],
                pass_fds=(started._cursor,),
                stdout=subprocess.PIPE,
            )
            for _ in range(4)
        ]
        taken = [[number for (number,) in struct.iter_unpack("<I", reader.communicate()[0])] for reader in readers]
    finally:
        started.close()
    assert sorted(number for numbers in taken for number in numbers) == list(range(count))
    assert all(numbers == sorted(numbers) for numbers in taken)


def test_a_worker_loads_nothing_that_it_has_no_use_for() -> None:
    """They start together, before a clock does: each one's start is everybody's."""
    code = "import sys, specrig.load.worker; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"uvloop", "httptools", "msgspec"} <= set(loaded)
    assert not {"tokenizers", "transformers", "httpx", "jinja2", "yaml"} & set(loaded)


def test_the_lag_of_two_loops_is_that_of_their_samples_together() -> None:
    one, two = [0.001, 0.003, 0.0], [0.010, 0.002]
    pooled = Lag.of(one + two, 3.0, 0.5)
    assert (pooled.p50_ms, pooled.max_ms, pooled.seconds, pooled.cpu) == (2.0, 10.0, 3.0, 0.5)
    # each counts for the 10 ms of a tick and what it was late
    assert pooled.mean_ms == pytest.approx((1 * 11 + 3 * 13 + 0 * 10 + 10 * 20 + 2 * 12) / 66, abs=1e-3)


@pytest.mark.parametrize("usage", ["final", "none", "running"])
def test_a_count_after_the_transfer_is_the_count_before_it(usage: str) -> None:
    def count(text: str) -> int:
        return len(text.split())

    def event(text: str, number: int, last: bool) -> bytes:
        body: dict[str, Any] = {"choices": [{"text": text, "finish_reason": "length" if last else None}]}
        if usage == "running" or (usage == "final" and last):
            body["usage"] = {"prompt_tokens": 3, "completion_tokens": 9 if last else 2 * number + 2}
        return json.dumps(body).encode()

    here, there = make_decoder("openai-completions", count), make_decoder("openai-completions")
    for decoder in (here, there):
        for number, text in enumerate(["a b ", "c ", "d e f g"]):
            decoder.feed(event(text, number, number == 2), float(number))
        decoder.feed(b"[DONE]", 3.0)
        decoder.finish()
    there.recount(count)
    assert (there.t, there.k, there.output_tokens) == (here.t, here.k, here.output_tokens)
    assert sum(here.k) == {"final": 9, "none": 7, "running": 9}[usage]
    assert (there.token_source, there.trace_source, there.error) == (here.token_source, here.trace_source, here.error)


# -- the same requests -----------------------------------------------------------------------------------------------


def test_every_shape_is_the_same_as_in_one_process(sim: RunningSim, tmp_path: Path, tokenizer_dir: Path) -> None:
    (tmp_path / "m.jsonl").write_text(
        "".join(
            json.dumps({"timestamp": at, "input_length": 64 + at // 20, "output_length": 4 + at // 100}) + "\n"
            for at in range(0, 1000, 100)
        )
    )
    file = sweep(
        tmp_path / "s.yml",
        "name: closed, output_tokens: 16, concurrency: 5, requests: 17, read_at: [8]",
        "name: ramp, output_tokens: 16, concurrency: 4, ramp_s: 0.8, requests: 12",
        "name: poisson, output_tokens: 8, arrival: poisson, rate: 20, requests: 12",
        "name: burst, output_tokens: 8, arrival: burst, burst: 6, rate: 20, requests: 12, concurrency: 3",
        "name: replay, output_tokens: 16, arrival: trace, trace: m.jsonl, trace_speed: 2, requests: 10",
    )
    with file.open("a") as more:
        more.write(
            "  - {name: agents, prompts: agentic, prompt_tokens: 512, output_tokens: 8, requests: 4, turns: 3,"
            " tool_s: 0.1, concurrency: 2}\n"
        )
    for workers in ("1", "2"):
        main(command(file, sim.url, tokenizer_dir, tmp_path / f"run{workers}", "--workers", workers))
    one, two = kept(tmp_path / "run1"), kept(tmp_path / "run2")
    assert len(one) == 17 + 12 * 3 + 10 + 12
    assert one == two
    assert all(record["ok"] for record in two)
    cells = by_name(tmp_path / "run2")
    assert {cell["client"]["workers"] for cell in cells.values()} == {2}
    assert {cell["client"]["workers"] for cell in rows(tmp_path / "run1", "cells")} == {1}
    requests = {
        name: [r for r in rows(tmp_path / "run2", "requests") if r["cell"] == c["cell"]] for name, c in cells.items()
    }
    for own in requests.values():
        own.sort(key=lambda record: record["index"])
    # open loops: due as in one process, never sent before
    for name in ("poisson", "burst", "replay"):
        first = [r for r in rows(tmp_path / "run1", "requests") if r["cell"] == cells[name]["cell"]]
        first.sort(key=lambda record: record["index"])
        due = [[r["scheduled_s"] - own[0]["scheduled_s"] for r in own] for own in (first, requests[name])]
        assert due[0] == pytest.approx(due[1], abs=1e-5)
        assert all(r["sent_s"] >= r["scheduled_s"] for r in requests[name])
    # never more at once than asked for
    for name, most in (("closed", 5), ("ramp", 4), ("burst", 3), ("agents", 2)):
        for record in requests[name]:
            begun = [r for r in requests[name] if r["sent_s"] <= record["sent_s"] < r["finished_s"]]
            assert len(begun) <= most
    # the second, third and fourth slot begin at 0.2, 0.4 and 0.6 s
    begun = min(r["sent_s"] for r in requests["ramp"])
    assert sum(r["sent_s"] - begun < 0.19 and r["finished_s"] - begun > 0.19 for r in requests["ramp"]) <= 1
    for before, after in zip(requests["agents"], requests["agents"][1:], strict=False):
        if after["session"] == before["session"]:
            assert after["sent_s"] - before["finished_s"] >= 0.095  # timers tick in whole milliseconds
    assert {r["tool_s"] for r in requests["agents"] if r["turn"]} == {0.1}


FAULTS = {
    2: "error-in-stream=4", 3: "eof-without-done=4", 4: "reset=4", 5: "stall=4", 6: "hang", 7: "http-500",
    8: "short-completion=8", 9: "usage-missing",
}  # fmt: skip


@pytest.mark.parametrize("api", ["sglang", "openai-chat"])
def test_every_failure_is_the_same_as_in_one_process(api: str, tmp_path: Path, tokenizer_dir: Path) -> None:
    """Requests are so far apart that the server counts them in the same order."""
    file = sweep(
        tmp_path / "s.yml",
        "name: a, output_tokens: 16, requests: 10, arrival: constant, rate: 3, concurrency: 6",
        api=api,
        timeouts="timeouts: {first_token_s: 1, idle_s: 0.5, request_s: 20}",
    )
    for workers in ("1", "2"):
        # the first six requests are the warm-up's
        faults = [f"{fault}@{number + 6}" for number, fault in FAULTS.items()]
        with running_sim(
            model_path=tokenizer_dir, served_model_name=MODEL, sim_time_scale=0.2, sim_seed=1, sim_fault=faults
        ) as server:
            out = tmp_path / f"run{workers}"
            assert main(command(file, server.url, tokenizer_dir, out, "--workers", workers, "--keep-text")) == 1
    two = kept(tmp_path / "run2")
    assert kept(tmp_path / "run1") == two
    expected = ["server_error", "no_terminal", "disconnected", "idle_timeout", "first_token_timeout", "http", "short"]
    assert [record["error"] for record in two[:8]] == [None, *expected]
    if api == "openai-chat":
        assert two[8]["token_source"] == "tokenizer"


def test_the_window_is_the_engines_own(
    undisturbed: Callable[[Callable[[Path], None]], None], tokenizer_dir: Path
) -> None:
    undisturbed(lambda folder: window_is_the_engines_own(folder, tokenizer_dir))


def window_is_the_engines_own(tmp_path: Path, tokenizer_dir: Path) -> None:
    file = sweep(tmp_path / "s.yml", "name: many, output_tokens: 64, concurrency: 8, requests: 8")
    with running_sim(model_path=tokenizer_dir, served_model_name=MODEL, sim_time_scale=0.4, sim_seed=3) as server:
        main(command(file, server.url, tokenizer_dir, tmp_path / "run", "--workers", "2"))
        truth = {row["rid"]: row for row in server.truth()}
    (cell,) = rows(tmp_path / "run", "cells")
    own = [truth[record["rid"]] for record in rows(tmp_path / "run", "requests")]
    assert len(own) == 8
    start = max(row["first_token_unix"] for row in own)
    end = min(row["last_token_unix"] for row in own)
    tokens = sum(
        k
        for row in own
        for at, k in zip(row["chunk_times"], row["chunk_tokens"], strict=True)
        if start < row["arrived_unix"] + at <= end + 1e-6
    )
    assert cell["window"]["tokens_per_s"] == pytest.approx(tokens / (end - start), rel=0.05)
    assert cell["window"]["running_peak"] == 8


def test_a_failing_server_is_given_up_across_workers(tmp_path: Path, tokenizer_dir: Path) -> None:
    file = sweep(tmp_path / "s.yml", "name: a, output_tokens: 8, requests: 200, concurrency: 2")
    with running_sim(
        model_path=tokenizer_dir, served_model_name=MODEL, sim_time_scale=0.2, sim_fault=["http-500"]
    ) as server:
        assert main(command(file, server.url, tokenizer_dir, tmp_path / "run", "--workers", "2")) == 1
    (cell,) = rows(tmp_path / "run", "cells")
    assert cell["state"] == "failed"
    assert cell["reason"].startswith("given up after ")
    assert 8 <= cell["requests"] < 100


# -- workers that go, and loads that go ------------------------------------------------------------------------------

LONG = (
    "name: first, output_tokens: 100, requests: 12, concurrency: 4, ramp_s: 0.4",
    "name: second, output_tokens: 8, requests: 4, concurrency: 4",
)


def started(
    sim: RunningSim, tmp_path: Path, tokenizer_dir: Path, *workloads: str
) -> tuple[subprocess.Popen[str], list[int], list[str], Path]:
    """A load of two workers in its first cell, with a request done."""
    file = sweep(tmp_path / "s.yml", *(workloads or LONG))
    out = tmp_path / "run"
    line = command(file, sim.url, tokenizer_dir, out, "--workers", "2")
    process = subprocess.Popen([sys.executable, "-m", "specrig.cli", *line], stderr=subprocess.PIPE, text=True)
    wait_until(lambda: (out / "requests.jsonl").is_file() and rows(out, "requests"), "no request was made")
    pids = workers_of(process.pid)
    assert len(pids) == 2
    return process, pids, line, out


def resume(line: list[str], out: Path) -> None:
    main([*line, "--resume"])
    cells = by_name(out)
    assert {cell["state"] for cell in cells.values()} <= MEASURED
    assert [cells["first"]["ok"], cells["second"]["ok"]] == [12, 4]
    assert len(rows(out, "requests")) == 16


def test_a_worker_that_is_killed_fails_its_cell_only(sim: RunningSim, tmp_path: Path, tokenizer_dir: Path) -> None:
    process, pids, line, out = started(sim, tmp_path, tokenizer_dir)
    os.kill(pids[1], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Traceback" not in err
    cells = by_name(out)
    assert cells["first"]["state"] == "failed"
    assert cells["first"]["reason"].startswith("worker process 2 of 2 was killed by SIGKILL; every request succeeded: ")
    assert cells["second"]["state"] in MEASURED, cells["second"]["reason"]  # a new worker had started
    assert cells["second"]["ok"] == 4
    assert cells["second"]["client"]["workers"] == 2
    own = [record for record in rows(out, "requests") if record["cell"] == cells["first"]["cell"]]
    lost = [record for record in own if record["error"] == "worker"]
    assert 1 <= len(lost) <= 2  # it had two slots
    assert all(record["server_message"] == "worker process 2 of 2 was killed by SIGKILL" for record in lost)
    assert all(record["sent_s"] is None and record["output_tokens"] is None for record in lost)
    assert sum(record["ok"] for record in own) == len(own) - len(lost) > 0
    assert len({record["index"] for record in own}) == len(own) < 12
    assert not any(alive(pid) for pid in pids)
    resume(line, out)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_ends_the_streams_of_all_workers(
    number: int, code: int, sim: RunningSim, tmp_path: Path, tokenizer_dir: Path
) -> None:
    import httpx

    process, pids, line, out = started(sim, tmp_path, tokenizer_dir)
    for pid in pids:
        os.kill(pid, number)  # as a terminal or a service manager would: they leave it to the load
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert "Traceback" not in err
    assert {name: cell["state"] for name, cell in by_name(out).items()} == {"first": "aborted"}
    kept = [record for record in rows(out, "requests") if record["error"] == "aborted"]
    assert 1 <= len(kept) <= 4
    assert all(record["server_message"] == "interrupted" for record in kept if record["output_tokens"])
    assert any(0 < record["output_tokens"] < 100 for record in kept)
    assert not any(alive(pid) for pid in pids)

    def running() -> int:
        return sum(load["num_running_reqs"] for load in httpx.get(sim.url + "/v1/loads").json()["loads"])

    wait_until(lambda: not running(), "requests were left on the server", 10)
    resume(line, out)


def test_the_second_interrupt_and_a_kill_leave_no_worker(sim: RunningSim, tmp_path: Path, tokenizer_dir: Path) -> None:
    for name, kill in (("twice", False), ("kill", True)):
        (tmp_path / name).mkdir()
        process, pids, _, _ = started(sim, tmp_path / name, tokenizer_dir)
        os.kill(pids[0], signal.SIGSTOP)  # one that cannot read that its parent has gone
        if kill:
            process.kill()
        else:
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        assert process.returncode == (-signal.SIGKILL if kill else 130)
        wait_until(lambda pids=pids: not any(alive(pid) for pid in pids), f"{name}: workers outlived the load", 10)


# -- the pool itself -------------------------------------------------------------------------------------------------

PLAN = Plan(
    api="sglang", abort_path=None, timeouts=Timeouts(), slots=2, due=None, ramp_s=None, tool_s=None
)  # fmt: skip


def items(count: int) -> list[list[Item]]:
    return [[Item(index=number, rid=f"r{number}", payload=b"GET / HTTP/1.1\r\n\r\n")] for number in range(count)]


@pytest.mark.parametrize("secure", [False, True])
def test_long_prompts_arrive_whole_and_lags_are_pooled(secure: bool, certificate: Path) -> None:
    """Three megabytes each, far more than a socket takes at once."""
    pem = certificate if secure else None
    bodies = [bytes([65 + number]) * (3_000_000 + number) for number in range(6)]
    got: list[bytes] = []
    meta = {"completion_tokens": 3, "prompt_tokens": 3, "finish_reason": {"type": "length"}}
    event = b"data: " + json.dumps({"text": "x", "output_ids": [1, 2, 3], "meta_info": meta}).encode() + b"\n\n"
    event += b"data: [DONE]\n\n"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(event)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
                got.append(await reader.readexactly(int(lines[1].split(b":")[1])))
                await asyncio.sleep(0.3)
                writer.write(head + event)
        except asyncio.IncompleteReadError:
            writer.close()

    async def use() -> tuple[list[Done], Lag, str | None]:
        context = None
        if pem is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(pem)
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        url = f"{'https' if secure else 'http'}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        workers = Workers(url, count=2, ca_file=None if pem is None else str(pem))
        work = [
            [Item(index=number, rid="", payload=b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)]
            for number, body in enumerate(bodies)
        ]
        done: list[Done] = []
        try:
            await workers.prepare(PLAN, work, 2, 2)
            assert {item.payload for session in work for item in session} == {b""}  # not kept twice
            lag, lost = await workers.run(PLAN.origin(), done.append, lambda: False)
        finally:
            workers.close()
            server.close()
            await asyncio.sleep(0.05)
        return done, lag, lost

    done, lag, lost = asyncio.run(use())
    assert lost is None
    assert sorted(got) == bodies
    assert [one.error for one in done] == [None] * 6, done[0].message
    assert sorted(one.index for one in done) == list(range(6))
    assert all(one.decoder.k == [3] for one in done)
    assert all(one.sent is not None and one.decoder.t[0] - one.sent >= 0.3 for one in done)
    assert lag.seconds >= 0.9  # three after one another in each of two
    assert lag.max_ms >= lag.p50_ms >= 0
    assert lag.cpu > 0


def test_the_display_shows_what_workers_stream(
    sim: RunningSim, tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    file = sweep(tmp_path / "s.yml", "name: w, output_tokens: 300, requests: 4, concurrency: 4")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    main(command(file, sim.url, tokenizer_dir, tmp_path / "run", "--workers", "2"))
    seen = re.findall(r"0/4 requests, ([0-9,]+) tok/s now", capsys.readouterr().err)
    assert any(int(rate.replace(",", "")) > 0 for rate in seen), seen  # before any request ended


def test_a_server_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    async def use() -> None:
        workers = Workers(f"http://127.0.0.1:{port}", count=2)
        try:
            for _ in range(2):  # the second time hears the second answer, not what was left of the first
                with pytest.raises(OSError, match="refused"):
                    await workers.prepare(PLAN, items(4), 2, 2)
            server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", port)
            await workers.prepare(PLAN, items(4), 2, 2)
            server.close()
        finally:
            workers.close()
            await asyncio.sleep(0)

    asyncio.run(use())


def test_a_worker_that_cannot_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'no module here' >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(parent.sys, "executable", str(broken))

    async def use() -> None:
        workers = Workers("http://127.0.0.1:9", count=2)
        try:
            with pytest.raises(WorkerError, match="worker process 1 of 2 ended with 3: no module here"):
                await workers.prepare(PLAN, items(4), 2, 2)
        finally:
            workers.close()
            await asyncio.sleep(0)

    asyncio.run(use())
    monkeypatch.setattr(parent.sys, "executable", str(tmp_path / "nothing"))
    with pytest.raises(WorkerError, match=r"cannot start a worker process: .*No such file"):
        Workers("http://127.0.0.1:9", count=2)
