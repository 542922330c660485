"""Each fault that the simulated engine injects, as a client sees it on the wire."""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from specrig.engine.client import EngineClient
from specrig.engine.errors import EngineError, classify, message
from specrig.engine.limits import read
from specrig.sim.faults import FAULTS
from specrig.sim.testing import RunningSim, running_sim, tiny_tokenizer

STREAMED = [
    "early-role-chunk",
    "usage-missing",
    "error-in-stream",
    "eof-without-done",
    "reset",
    "done-missing",
    "keepalive-comments",
    "split-utf8=5",
    "sse-variants",
    "stall",
    "pause=0.3",
    "kv-abort",
    "coalesce=3",
    "hang",
    "http-500",
    "http-503",
    "short-completion",
    "silent-cap",
    "reasoning-overcount",
    "count-off",
    "prompt-count-off",
    "accept-over-bound",
    "usage-final-only",
    "first-chunk=5",
    "http-400",
]
"""Faults of single requests: the N-th request of the server has the N-th of them."""
TREE = {"speculative_algorithm": "DDTREE", "speculative_draft_model_path": "/draft", "speculative_ddtree_budget": 15}


class Faulty:
    """One server with all the faults of single requests; sends the request that each strikes."""

    def __init__(self, sim: RunningSim) -> None:
        self.sim = sim
        self._next = 1

    def _skip_to(self, name: str) -> None:
        """Use up the numbers of other faults; a refused request has no number, an aborted one has."""
        place = [fault.partition("=")[0] for fault in STREAMED].index(name) + 1
        assert place == self._next, f"ask for the faults in the order of the list: {name} is {place}"
        self._next += 1

    def raw(self, name: str, path: str, body: dict[str, Any], idle_s: float = 5.0) -> list[tuple[float, bytes]]:
        """What arrives on the socket, packet by packet, until the end, a reset, or `idle_s` of silence."""
        self._skip_to(name)
        data = json.dumps({**body, "stream": True}).encode()
        packets: list[tuple[float, bytes]] = []
        with socket.create_connection(("127.0.0.1", self.sim.port), timeout=idle_s) as raw:
            raw.sendall(
                b"POST %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
                % (path.encode(), len(data), data)
            )
            while True:
                try:
                    got = raw.recv(65536)
                except TimeoutError:
                    packets.append((time.time(), b"<silence>"))
                    break
                except ConnectionResetError:
                    packets.append((time.time(), b"<reset>"))
                    break
                if not got:
                    break
                packets.append((time.time(), got))
        return packets

    def native(self, name: str, new: int = 40, **options: Any) -> list[tuple[float, bytes]]:
        sampling = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True}
        body = {"text": f"Fault {name}?", "rid": name, "sampling_params": sampling}
        return self.raw(name, "/generate", body, **options)

    def chat(self, name: str, new: int = 40) -> list[tuple[float, bytes]]:
        messages = [{"role": "user", "content": f"Fault {name}?" + " and why" * 1000}]
        body = {"messages": messages, "rid": name, "max_tokens": new, "temperature": 0, "ignore_eos": True}
        usage = {"include_usage": True, "continuous_usage_stats": name == "usage-final-only"}
        return self.raw(name, "/v1/chat/completions", {**body, "stream_options": usage})

    def whole(self, name: str, new: int = 40) -> httpx.Response:
        self._skip_to(name)
        sampling = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True}
        body = {"text": f"Fault {name}?", "rid": name, "sampling_params": sampling}
        return httpx.post(self.sim.url + "/generate", json=body, timeout=10)


def body_of(packets: list[tuple[float, bytes]]) -> bytes:
    """The body, with HTTP's chunks taken apart."""
    data = b"".join(part for _, part in packets if not part.startswith(b"<"))
    rest = data.partition(b"\r\n\r\n")[2]
    out = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        count = int(size, 16)
        out += rest[:count]
        rest = rest[count + 2 :]
    return out


def payloads(packets: list[tuple[float, bytes]]) -> list[Any]:
    lines = [line[6:] for line in body_of(packets).split(b"\n") if line.startswith(b"data: ")]
    return ["[DONE]" if line == b"[DONE]" else json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that loads at once, for tests that are not about text."""
    return tiny_tokenizer(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def faulty(tokenizer_dir: Path) -> Iterator[Faulty]:
    numbered = [f"{fault}@{number}" for number, fault in enumerate(STREAMED, 1)]
    with running_sim(
        model_path=tokenizer_dir,
        context_length=4096,
        reasoning_parser="qwen3",
        sim_time_scale=0.15,
        sim_fault=numbered,
        **TREE,
    ) as sim:
        yield Faulty(sim)


def test_faults_of_single_requests(faulty: Faulty) -> None:
    """In the order of the list, since a fault is bound to the number of its request."""
    got = faulty.chat("early-role-chunk")
    early = next(at for at, part in got if b'"role":"assistant"' in part)
    token = next(at for at, part in got if b'"role":"assistant"' not in part and b"data: {" in part)
    row = faulty.sim.truth_of("early-role-chunk")
    assert early < row["first_token_unix"] - 0.02
    assert token > row["first_token_unix"] - 0.001

    chunks = payloads(faulty.chat("usage-missing"))
    assert chunks[-1] == "[DONE]"
    assert not any(chunk.get("usage") for chunk in chunks[:-1])

    chunks = payloads(faulty.native("error-in-stream"))
    assert message(None, chunks[-2]) == "Internal error in the scheduler"
    assert classify(None, chunks[-2]) == "server"
    assert chunks[-3]["meta_info"]["finish_reason"] is None

    got = faulty.native("eof-without-done")
    assert b"".join(part for _, part in got).endswith(b"0\r\n\r\n")
    assert payloads(got)[-1]["meta_info"]["finish_reason"] is None

    got = faulty.native("reset")
    assert got[-1][1] == b"<reset>"

    chunks = payloads(faulty.native("done-missing"))
    assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "length"

    got = faulty.native("keepalive-comments")
    assert body_of(got).count(b": keep-alive\n\n") == len(payloads(got)) + 1

    got = faulty.native("split-utf8")
    parts = [part for _, part in got]
    assert sum(_cut_inside(part) for part in parts) >= 3
    text = payloads(got)[-2]["text"]
    assert not text.isascii()
    assert "�" not in text

    body = body_of(faulty.native("sse-variants"))
    assert b"id: 1\r\nevent: message\r\ndata:{\r\ndata:" in body
    assert b"\r\n\r\n" in body
    first = body.split(b"\r\n\r\n")[0].split(b"\r\n")
    assert json.loads(b"\n".join(line[5:] for line in first if line.startswith(b"data:")))["output_ids"]

    got = faulty.native("stall", idle_s=0.5)
    assert got[-1][1] == b"<silence>"
    assert 4 <= payloads(got)[-1]["meta_info"]["completion_tokens"] < 40

    row_gaps = [at for at, _ in faulty.native("pause")]
    assert max(b - a for a, b in itertools.pairwise(row_gaps)) > 0.3
    times = faulty.sim.truth_of("pause")["chunk_times"]
    assert max(b - a for a, b in itertools.pairwise(times)) > 0.3

    chunks = payloads(faulty.native("kv-abort"))
    assert classify(200, chunks[-2]) == "kv"
    assert "Request prompt exceeds the KV memory budget" in message(200, chunks[-2])

    chunks = payloads(faulty.native("coalesce", 80))
    row = faulty.sim.truth_of("coalesce")
    assert row["verify_steps"] > 2 * (len(chunks) - 3)

    got = faulty.native("hang", idle_s=0.5)
    assert payloads(got) == []

    answer = faulty.whole("http-500")
    assert (answer.status_code, answer.text) == (500, "Internal Server Error")
    answer = faulty.whole("http-503")
    assert (answer.status_code, message(503, answer.content)) == (503, "HTTP 503 without a message")
    assert classify(503, answer.content) == "not-ready"

    meta = faulty.whole("short-completion").json()["meta_info"]
    assert (meta["completion_tokens"], meta["finish_reason"]["type"]) == (8, "stop")

    meta = faulty.whole("silent-cap").json()["meta_info"]
    assert (meta["completion_tokens"], meta["finish_reason"]) == (16, {"type": "length", "length": 16})

    usage = payloads(faulty.chat("reasoning-overcount"))[-2]["usage"]
    assert (usage["completion_tokens"], usage["reasoning_tokens"]) == (40, 41)

    answer = faulty.whole("count-off")
    assert answer.json()["meta_info"]["completion_tokens"] == len(answer.json()["output_ids"]) + 3

    answer = faulty.whole("prompt-count-off")
    row = faulty.sim.truth_of("prompt-count-off")
    assert answer.json()["meta_info"]["prompt_tokens"] == row["prompt_tokens"] + 1

    meta = faulty.whole("accept-over-bound").json()["meta_info"]
    assert 1 + meta["spec_num_correct_drafts"] / meta["spec_verify_ct"] > 16

    chunks = payloads(faulty.chat("usage-final-only"))
    assert [bool(chunk.get("usage")) for chunk in chunks[:-1]] == [False] * (len(chunks) - 2) + [True]

    chunks = payloads(faulty.native("first-chunk"))
    assert chunks[0]["meta_info"]["completion_tokens"] >= 5

    answer = faulty.whole("http-400")
    assert answer.status_code == 400
    assert classify(400, answer.content) == "context"


def _cut_inside(part: bytes) -> bool:
    """Whether a packet ends inside a character."""
    try:
        part.decode()
    except UnicodeDecodeError as error:
        return error.end == len(part) and "unexpected end" in error.reason
    return False


def test_faults_of_the_server(tiny: Path) -> None:
    asked = ["spec-off", "concurrency-cap=2", "flush-refused", "stale-server=Other", "slow-first-request=2", "slow=50"]
    with (
        running_sim(model_path=tiny, sim_time_scale=0.15, sim_fault=asked, **TREE) as sim,
        EngineClient(sim.url) as client,
    ):
        meta = [client.generate(text="Hi", max_new_tokens=6)["meta_info"] for _ in range(2)]
        assert "spec_verify_ct" not in meta[0]
        assert meta[0]["e2e_latency"] > meta[1]["e2e_latency"] + 0.25
        report = read(client)
        assert report.speculation.algorithm == "DDTREE"
        assert report.limits.max_running == 2
        assert report.running_configured == 48
        assert report.warnings == ("max_running_requests is 48 but only 2 run at once",)
        assert client.models()[0]["id"] == "Other"
        with pytest.raises(EngineError, match="Flush cache failed"):
            client.flush_cache()
        assert 1.45 < client.server_info()["sim_launch_factor"] < 1.55


def test_flush_that_keeps_the_cache_and_diverging_output(tiny: Path) -> None:
    asked = ["flush-kept", "diverge=0.5", "spec-on"]
    with running_sim(model_path=tiny, sim_time_scale=0.15, sim_fault=asked) as sim:
        with EngineClient(sim.url) as client:
            ids = list(range(500, 700))
            meta = client.generate(input_ids=ids)["meta_info"]
            assert (meta["spec_verify_ct"], meta["spec_num_correct_drafts"]) == (16, 0)
            client.flush_cache(2)
            assert client.generate(input_ids=ids, rid="kept")["meta_info"]["cached_tokens"] > 150
        assert sim.truth_of("kept")["diverged_at"] is not None


def test_a_hidden_cap_is_told_nowhere(tiny: Path) -> None:
    with (
        running_sim(model_path=tiny, sim_time_scale=0.15, sim_fault=["hidden-cap=2"]) as sim,
        EngineClient(sim.url) as client,
        ThreadPoolExecutor(3) as pool,
    ):
        assert read(client).limits.max_running == 128
        asked = [pool.submit(client.generate, text=f"{i}", max_new_tokens=64, rid=f"{i}") for i in range(3)]
        metas = sorted((call.result()["meta_info"] for call in asked), key=lambda meta: meta["queue_time"])
    assert metas[2]["queue_time"] > 0.5 * min(meta["e2e_latency"] for meta in metas[:2])


def test_never_ready(tiny: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (
        running_sim(model_path=tiny, port=port, sim_fault=["never-ready"], wait=False) as sim,
        EngineClient(sim.url) as client,
    ):
        until = time.monotonic() + 10
        while time.monotonic() < until:
            try:
                client.models()
                break
            except EngineError:
                time.sleep(0.05)
        assert not client.ready()
        assert not client.health()
        with pytest.raises(EngineError, match="answered no completion in 0 s: it is not ready yet"):
            client.wait_ready(0.2)


@pytest.mark.parametrize("fault", ["dies-at-first-request", "rank-dies=0.4"])
def test_death(tiny: Path, fault: str) -> None:
    with running_sim(model_path=tiny, sim_fault=[fault]) as sim:
        with EngineClient(sim.url) as client:
            assert client.ready()
            if fault.startswith("dies"):
                with pytest.raises(EngineError, match="can't be reached"):
                    client.generate(text="Hi")
        assert sim.process.wait(5) == 1
        # A server's last words are its reason, not what fell over on its way down.
        words = sim.truth_path.with_name("output").read_text()
        assert "died; the server goes down with it" in words.splitlines()[-1]
        assert "Traceback" not in words


def test_every_fault_is_tested_here() -> None:
    elsewhere = {"wrong-gpus", "drift"}
    """wrong-gpus needs device nodes and drift minutes: below."""
    text = Path(__file__).read_text()
    named = {name for name in FAULTS if f'"{name}' in text}
    assert named | elsewhere == set(FAULTS)


def test_drift_slows_steps(tiny: Path) -> None:
    import argparse

    from specrig.sim.config import build
    from specrig.sim.flags import add_server_arguments, add_simulation_arguments
    from specrig.sim.physics import StepTimes

    parser = argparse.ArgumentParser()
    add_server_arguments(parser)
    add_simulation_arguments(parser)
    flags = ["--model-path", str(tiny), "--sim-no-devices", "--sim-noise", "0", "--sim-fault", "drift=10"]
    times = StepTimes(build(parser.parse_args(flags)))
    assert times.decode([1024], 120.0) == pytest.approx(times.decode([1024], 0.0) * 1.2)


def test_wrong_gpus_opens_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    from specrig.sim import devices

    for minor in range(3):
        folder = tmp_path / "gpus" / f"0000:0{minor}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Bus Location: \t 0000:0{minor}:00.0\nDevice Minor: \t {minor}\n")
        (tmp_path / f"nvidia{minor}").touch()
    monkeypatch.setattr(devices, "DEV", str(tmp_path))
    monkeypatch.setattr(devices, "PROC_GPUS", str(tmp_path / "gpus"))
    monkeypatch.setattr(devices, "_probe", lambda path, otherwise: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    opened = []
    for gpu_id in (0, 1):
        path, descriptor = devices.open_gpu(gpu_id, shift=1)
        os.close(descriptor)
        opened.append(Path(path).name)
    assert opened == ["nvidia2", "nvidia0"]
