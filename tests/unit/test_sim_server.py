"""The simulated engine as a process: its API, its schedule, its truth and its end."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from specrig.engine.client import EngineClient
from specrig.engine.errors import EngineError
from specrig.engine.limits import read
from specrig.sim.testing import RunningSim, running_sim, tiny_tokenizer

TREE = {
    "speculative_algorithm": "DDTREE",
    "speculative_draft_model_path": "/draft",
    "speculative_ddtree_budget": 15,
}
SCALE = 0.15
"""An autoregressive step at TP 1 is then about 5.6 ms of wall time."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that loads at once, for tests that are not about text."""
    return tiny_tokenizer(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def plain(tokenizer_dir: Path) -> Iterator[RunningSim]:
    """Autoregressive, cumulative streams, small context."""
    with running_sim(
        model_path=tokenizer_dir,
        served_model_name="Qwen3.6-27B",
        context_length=4096,
        max_running_requests=4,
        enable_metrics=True,
        enable_cache_report=True,
        sim_time_scale=SCALE,
        sim_seed=3,
        sim_divergence=0,
        sim_profile="tp1-autoregressive",
    ) as sim:
        yield sim


@pytest.fixture(scope="module")
def tree(tokenizer_dir: Path) -> Iterator[RunningSim]:
    """DDTree at TP 2, incremental streams, a reasoning parser."""
    with running_sim(
        model_path=tokenizer_dir,
        served_model_name="Qwen3.6-27B",
        context_length=4096,
        tp_size=2,
        incremental_streaming_output=True,
        reasoning_parser="qwen3",
        sim_time_scale=0.4,
        sim_seed=3,
        sim_divergence=0,
        **TREE,
    ) as sim:
        yield sim


_CLIENTS: list[EngineClient] = []


def connect(url: str, api_key: str | None = None) -> EngineClient:
    """A client that is closed at the end of the test."""
    _CLIENTS.append(EngineClient(url, api_key))
    return _CLIENTS[-1]


@pytest.fixture(autouse=True)
def _close_clients() -> Iterator[None]:
    yield
    while _CLIENTS:
        _CLIENTS.pop().close()


def events(url: str, path: str, body: dict[str, Any]) -> list[tuple[float, Any]]:
    """The events of a stream with the moment of each; the terminal one is the text [DONE]."""
    found: list[tuple[float, Any]] = []
    with httpx.stream("POST", url + path, json={**body, "stream": True}, timeout=30) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line.startswith("data:"):
                payload = line[5:].strip()
                found.append((time.time(), payload if payload == "[DONE]" else json.loads(payload)))
    return found


def generate(url: str, *, rid: str, new: int, text: str = "Why is the sky blue?", **sampling: Any) -> list[Any]:
    body = {"text": text, "rid": rid, "sampling_params": {"max_new_tokens": new, "temperature": 0, **sampling}}
    return [value for _, value in events(url, "/generate", body)]


class TestNativeStream:
    def test_cumulative(self, plain: RunningSim) -> None:
        *chunks, done = generate(plain.url, rid="cumulative", new=24, ignore_eos=True)
        assert done == "[DONE]"
        counts = [chunk["meta_info"]["completion_tokens"] for chunk in chunks]
        assert counts == list(range(1, 25))
        for before, after in itertools.pairwise(chunks):
            assert after["text"].startswith(before["text"])
            assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert [chunk["meta_info"]["finish_reason"] for chunk in chunks[:-1]] == [None] * 23
        last = chunks[-1]["meta_info"]
        assert last["finish_reason"] == {"type": "length", "length": 24}
        assert last["prompt_tokens"] == 6
        assert not [key for key in last if key.startswith("spec_")]

    def test_incremental_with_several_tokens_a_chunk(self, tree: RunningSim, tokenizer_dir: Path) -> None:
        from specrig.tokens.tokenizer import load

        *chunks, _ = generate(tree.url, rid="incremental", new=120, ignore_eos=True)
        ids = [token for chunk in chunks for token in chunk["output_ids"]]
        assert len(ids) == 120
        assert "".join(chunk["text"] for chunk in chunks) == load(tokenizer_dir).decode(ids)
        sizes = [len(chunk["output_ids"]) for chunk in chunks]
        assert sizes[0] == 1
        assert max(sizes) <= 16
        assert len(sizes) < 60
        last = chunks[-1]["meta_info"]
        assert 1 + last["spec_verify_ct"] + last["spec_num_correct_drafts"] == 120
        histogram = last["spec_correct_drafts_histogram"]
        assert sum(histogram) == last["spec_verify_ct"] == len(chunks) - 1
        assert sum(index * count for index, count in enumerate(histogram)) == last["spec_num_correct_drafts"]

    def test_greedy_output_does_not_depend_on_the_method(self, plain: RunningSim, tree: RunningSim) -> None:
        left = generate(plain.url, rid="same-1", new=60, ignore_eos=True)[-2]["output_ids"]
        right = [token for chunk in generate(tree.url, rid="same-2", new=60)[:-1] for token in chunk["output_ids"]]
        assert left == right

    def test_sampling_is_not_greedy(self, plain: RunningSim) -> None:
        first, second = (
            generate(plain.url, rid=f"warm-{number}", new=12, temperature=1)[-2]["output_ids"] for number in range(2)
        )
        assert first != second

    def test_stop_string(self, plain: RunningSim) -> None:
        whole = generate(plain.url, rid="stop-0", new=30)[-2]["text"]
        word = whole.split()[6]
        last = generate(plain.url, rid="stop-1", new=30, stop=[word])[-2]
        assert last["meta_info"]["finish_reason"] == {"type": "stop", "matched": word}
        assert last["text"] == whole[: whole.index(word)]


class TestTruth:
    def test_agrees_with_what_a_client_sees(self, tree: RunningSim) -> None:
        body = {
            "text": "Count to ten.",
            "rid": "truth",
            "sampling_params": {"max_new_tokens": 200, "temperature": 0, "ignore_eos": True},
        }
        seen = events(tree.url, "/generate", body)[:-1]
        counts = [event["meta_info"]["completion_tokens"] for _, event in seen]
        row = tree.truth_of("truth")
        assert row["output_tokens"] == counts[-1] == 200
        assert row["chunk_tokens"] == [b - a for a, b in zip([0, *counts], counts, strict=False)]
        assert row["verify_steps"] == seen[-1][1]["meta_info"]["spec_verify_ct"]
        assert row["correct_drafts"] == seen[-1][1]["meta_info"]["spec_num_correct_drafts"]
        assert row["method"] == "ddtree-b15"
        assert row["decode_tokens_per_s"] == pytest.approx(
            199 / (row["last_token_unix"] - row["first_token_unix"]), rel=1e-4
        )
        late = [at - row["arrived_unix"] - true for (at, _), true in zip(seen, row["chunk_times"], strict=True)]
        assert min(late) > -0.001
        assert sorted(late)[len(late) // 2] < 0.02

    def test_profile_and_scale(self, plain: RunningSim) -> None:
        generate(plain.url, rid="named", new=3)
        row = plain.truth_of("named")
        assert (row["profile"], row["time_scale"], row["tp"]) == ("tp1-autoregressive", SCALE, 1)

    def test_step_times_are_kept(self, plain: RunningSim) -> None:
        """Forty steps take forty step times, since deadlines do not drift; the median, as one chunk may be late."""
        generate(plain.url, rid="steps", new=80, ignore_eos=True)
        row = plain.truth_of("steps")
        times = row["chunk_times"]
        mean = statistics.median(times[at + 40] - times[at] for at in range(40)) / 40
        factor = connect(plain.url).server_info()["sim_launch_factor"]
        simulated = 51.8 * 0.68e-3 + 1.6e-3 + 0.27e-3 + 45 * 5.1e-8
        assert mean == pytest.approx(simulated * SCALE * factor, rel=0.03)


class TestOpenAI:
    def test_chat_with_reasoning_and_details(self, tree: RunningSim) -> None:
        body = {
            "model": "Qwen3.6-27B",
            "messages": [{"role": "user", "content": "Why?"}],
            "max_tokens": 220,
            "temperature": 0,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
            "return_spec_tokens_details": True,
        }
        *chunks, done = [value for _, value in events(tree.url, "/v1/chat/completions", body)]
        assert done == "[DONE]"
        first = chunks[0]["choices"][0]["delta"]
        assert first == {"reasoning_content": None, "role": "assistant", "content": ""}
        middle = [chunk["choices"][0] for chunk in chunks[1:-3]]
        thought = "".join(choice["delta"].get("reasoning_content") or "" for choice in middle)
        answer = "".join(choice["delta"].get("content") or "" for choice in middle)
        assert thought
        assert answer
        assert "think>" not in thought + answer
        assert chunks[-3]["choices"][0]["finish_reason"] == "length"
        details = chunks[-2]["sglext"]["spec_tokens_details"]
        assert 1 + details["spec_verify_ct"] + details["spec_num_correct_drafts"] == 220
        usage = chunks[-1]["usage"]
        assert chunks[-1]["choices"] == []
        assert usage["completion_tokens"] == 220
        assert 0 < usage["reasoning_tokens"] < 220
        assert usage["total_tokens"] == usage["prompt_tokens"] + 220

    def test_thinking_off(self, tree: RunningSim) -> None:
        answer = connect(tree.url).generate(
            messages=[{"role": "user", "content": "Why?"}],
            max_new_tokens=40,
            chat_template_kwargs={"enable_thinking": False},
        )
        message = answer["choices"][0]["message"]
        assert message["reasoning_content"] is None
        assert message["content"]
        assert answer["usage"]["reasoning_tokens"] == 0

    def test_continuous_usage(self, plain: RunningSim) -> None:
        body = {"model": "m", "prompt": "One two", "max_tokens": 5, "ignore_eos": True, "temperature": 0}
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        chunks = [value for _, value in events(plain.url, "/v1/completions", body)][:-1]
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 5, 5]

    def test_default_lengths(self, plain: RunningSim) -> None:
        completion = httpx.post(plain.url + "/v1/completions", json={"prompt": "a", "ignore_eos": True}).json()
        assert completion["usage"]["completion_tokens"] == 16
        native = httpx.post(plain.url + "/generate", json={"text": "a", "sampling_params": {"ignore_eos": True}})
        assert native.json()["meta_info"]["completion_tokens"] == 128

    def test_tokenize_counts_the_template(self, plain: RunningSim) -> None:
        client = connect(plain.url)
        messages = [{"role": "user", "content": "Why is the sky blue?"}]
        ids = client.tokenize(messages=messages)
        answer = client.generate(messages=messages, max_new_tokens=2)
        assert answer["usage"]["prompt_tokens"] == len(ids) > len(client.tokenize("Why is the sky blue?"))
        tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
        asked = {"messages": messages, "tools": [tool], "max_tokens": 1}
        counted = httpx.post(plain.url + "/v1/chat/completions", json=asked).json()["usage"]["prompt_tokens"]
        assert counted > len(ids)


class TestLimitsOfAServer:
    def test_read(self, plain: RunningSim, tree: RunningSim) -> None:
        report = read(plain.url)
        assert report.limits.context_length == 4096
        assert report.limits.max_running == 4
        assert report.limits.reserved_tokens == 0
        assert report.max_req_input_len == 4090
        assert report.simulated
        assert report.time_scale == SCALE
        found = read(tree.url)
        assert found.limits.reserved_tokens == 16
        assert found.limits.block == 16
        assert found.speculation.budget == 15

    def test_refused_and_clipped(self, plain: RunningSim) -> None:
        client = connect(plain.url)
        with pytest.raises(EngineError, match=r"The input \(4096 tokens\) is longer") as error:
            client.generate(input_ids=[100] * 4096)
        assert error.value.kind == "context"
        with pytest.raises(EngineError, match="You requested a total of 4097 tokens") as error:
            client.generate(input_ids=[100] * 4000, max_new_tokens=97)
        assert error.value.kind == "context"
        with pytest.raises(EngineError, match=r"Input length \(4090 tokens\) exceeds .* \(4090 tokens\)") as error:
            client.generate(input_ids=[100] * 4090, max_new_tokens=2)
        assert error.value.kind == "kv"
        clipped = client.generate(input_ids=[100] * 4080, max_new_tokens=16)
        assert clipped["meta_info"]["completion_tokens"] == 14
        assert clipped["meta_info"]["finish_reason"] == {"type": "length", "length": 14}

    def test_streamed_refusals(self, plain: RunningSim) -> None:
        native = events(plain.url, "/generate", {"input_ids": [100] * 4096})
        assert [value for _, value in native] == [
            {
                "error": {
                    "message": "The input (4096 tokens) is longer than the model's context length (4096 tokens).",
                    "type": "invalid_request_error",
                    "code": 400,
                    "retryable": False,
                }
            },
            "[DONE]",
        ]
        aborted = events(plain.url, "/generate", {"input_ids": [100] * 4090, "sampling_params": {"max_new_tokens": 1}})
        assert aborted[0][1]["meta_info"]["finish_reason"]["type"] == "abort"
        assert aborted[0][1]["output_ids"] == []
        assert aborted[1][1] == "[DONE]"

    def test_max_tokens_above_context(self, plain: RunningSim) -> None:
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 40000}
        answer = httpx.post(plain.url + "/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert answer.json()["message"] == (
            "max_completion_tokens is too large: 40000.This model supports at most 4096 completion tokens."
        )


class TestSchedule:
    def test_concurrency_is_capped_and_batched(self, plain: RunningSim) -> None:
        client = connect(plain.url)
        peak = 0
        with ThreadPoolExecutor(6) as pool:
            jobs = [
                pool.submit(generate, plain.url, rid=f"many-{n}", new=60, text=f"{n} times", ignore_eos=True)
                for n in range(6)
            ]
            while not all(job.done() for job in jobs):
                row = client.loads()[0]
                peak = max(peak, row["num_running_reqs"])
                time.sleep(0.02)
        assert peak == 4
        rows = [plain.truth_of(f"many-{n}") for n in range(6)]
        assert all(row["output_tokens"] == 60 for row in rows)
        assert max(row["running_mean"] for row in rows) > 3

    def test_prefix_cache_and_flush(self, plain: RunningSim) -> None:
        client = connect(plain.url)
        ids = list(range(1000, 1800))

        def cached() -> int:
            answer = client.generate(input_ids=ids, max_new_tokens=2)
            return int(answer["meta_info"]["cached_tokens"])

        client.flush_cache(5)
        assert cached() == 0
        assert cached() == 799
        client.flush_cache(5)
        assert cached() == 0

    def test_flush_while_running(self, plain: RunningSim) -> None:
        client = connect(plain.url)
        runner = threading.Thread(target=generate, args=(plain.url,), kwargs={"rid": "busy", "new": 60})
        runner.start()
        while not client.loads()[0]["num_running_reqs"]:
            time.sleep(0.005)
        with pytest.raises(EngineError, match="Flush cache failed"):
            client.flush_cache()
        client.flush_cache(10)
        runner.join()

    def test_abort(self, plain: RunningSim) -> None:
        client = connect(plain.url)
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(generate, plain.url, rid="given-up", new=2000, ignore_eos=True)
            while not client.loads()[0]["num_running_reqs"]:
                time.sleep(0.005)
            time.sleep(0.05)
            client.abort("given-up")
            *_, last, done = job.result(5)
        assert done == "[DONE]"
        assert last["meta_info"]["finish_reason"]["type"] == "abort"
        assert plain.truth_of("given-up")["finish_reason"] == "abort"

    def test_a_client_that_leaves_frees_its_place(self, plain: RunningSim) -> None:
        client = connect(plain.url)
        body = {"text": "a", "rid": "left", "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True}}
        with httpx.stream("POST", plain.url + "/generate", json={**body, "stream": True}) as response:
            next(response.iter_lines())
        client.flush_cache(2)
        assert plain.truth_of("left")["output_tokens"] < 100

    def test_metrics(self, plain: RunningSim) -> None:
        text = connect(plain.url).metrics()
        assert 'sglang:max_total_num_tokens{engine_type="unified",model_name="Qwen3.6-27B"' in text
        assert "simulated" in text.splitlines()[0]

    def test_requests_sent_ahead_are_answered_in_order(self, plain: RunningSim) -> None:
        body = b'{"text":"a","sampling_params":{"max_new_tokens":3}}'
        post = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        with socket.create_connection(("127.0.0.1", plain.port), timeout=5) as raw:
            raw.sendall(post + b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            data = b"".join(iter(lambda: raw.recv(65536), b""))
        assert 0 < data.index(b"output_ids") < data.index(b"max_model_len")

    def test_unknown_routes(self, plain: RunningSim) -> None:
        assert httpx.get(plain.url + "/nothing").status_code == 404
        assert httpx.get(plain.url + "/generate").status_code == 405
        assert httpx.post(plain.url + "/generate", content=b"{").status_code == 400
        with socket.create_connection(("127.0.0.1", plain.port)) as raw:
            raw.sendall(b"garbage\r\n\r\n")
            assert raw.recv(100).startswith(b"HTTP/1.1 400")

    def test_health(self, plain: RunningSim) -> None:
        client = connect(plain.url)
        assert client.ready()
        assert client.health()
        assert client.wait_ready(5, model="Qwen3.6-27B") < 5
        with pytest.raises(EngineError, match=r"answers for Qwen3\.6-27B; expected other"):
            client.wait_ready(5, model="other")


class TestConfigFile:
    """``--config FILE``, as SGLang takes it: the command line wins, wherever it stands."""

    @staticmethod
    def parse(*flags: str) -> argparse.Namespace:
        from specrig.sim.flags import add_server_arguments, add_simulation_arguments

        parser = argparse.ArgumentParser(exit_on_error=False)
        add_server_arguments(parser)
        add_simulation_arguments(parser)
        return parser.parse_args(["--model-path", "/m", *flags])

    def test_options_come_from_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "secrets.yaml"
        path.write_text('# ours\napi-key: "a: #b"\ntp_size: 2\nenable-metrics: true\ncontext-length: 4096\n')
        args = self.parse("--config", str(path))
        assert (args.api_key, args.tp_size, args.enable_metrics, args.context_length) == ("a: #b", 2, True, 4096)

    def test_the_command_line_wins(self, tmp_path: Path) -> None:
        path = tmp_path / "c.yaml"
        path.write_text("tp_size: 2\ncontext-length: 4096\n")
        args = self.parse("--tp-size", "4", "--config", str(path), "--context-length", "8192")
        assert (args.tp_size, args.context_length) == (4, 8192)

    @pytest.mark.parametrize(
        ("text", "words"),
        [("nonsense: 1\n", "has nonsense, which is no option"), ("- 1\n", "holds no options"), (None, "can't be read")],
    )
    def test_a_file_that_is_none_is_one_line(self, tmp_path: Path, text: str | None, words: str) -> None:
        path = tmp_path / "c.yaml"
        if text is not None:
            path.write_text(text)
        with pytest.raises(argparse.ArgumentError, match=words):
            self.parse("--config", str(path))


def test_natural_end(tiny: Path) -> None:
    with running_sim(model_path=tiny, sim_natural_tokens=20, sim_time_scale=SCALE, api_key="k") as sim:
        assert httpx.get(sim.url + "/v1/models").status_code == 401
        client = connect(sim.url, "k")
        ended = client.generate(text="Hello", max_new_tokens=300, ignore_eos=False)
        reason = ended["meta_info"]["finish_reason"]
        assert reason["type"] == "stop"
        eos = reason["matched"]
        assert ended["output_ids"].index(eos) == len(ended["output_ids"]) - 1
        beyond = client.generate(text="Hello", max_new_tokens=80, rid="beyond")
        assert len(beyond["output_ids"]) == 80
        assert beyond["output_ids"].index(eos) == sim.truth_of("beyond")["first_eos"] == len(ended["output_ids"]) - 1


class TestProcesses:
    def test_titles_and_stop(self, tiny: Path) -> None:
        with running_sim(model_path=tiny, tp_size=2) as sim:
            titles = [Path(f"/proc/{rank['pid']}/cmdline").read_bytes().rstrip(b"\0") for rank in sim.ranks]
            assert titles == [b"sglang::scheduler_TP0", b"sglang::scheduler_TP1", b"sglang::detokenizer"]
            sim.process.send_signal(signal.SIGTERM)
            assert sim.process.wait(15) == 0
            assert not any(Path(f"/proc/{rank['pid']}").exists() for rank in sim.ranks)

    def test_a_dead_rank_takes_the_server_down(self, tiny: Path) -> None:
        with running_sim(model_path=tiny, tp_size=2) as sim:
            os.kill(sim.ranks[1]["pid"], signal.SIGKILL)
            assert sim.process.wait(15) == 1
            assert not Path(f"/proc/{sim.ranks[0]['pid']}").exists()

    def test_ranks_die_with_the_server(self, tiny: Path) -> None:
        with running_sim(model_path=tiny) as sim:
            sim.process.kill()
            sim.process.wait()
            until = time.monotonic() + 5
            while any(_alive(rank["pid"]) for rank in sim.ranks) and time.monotonic() < until:
                time.sleep(0.01)
            assert not any(_alive(rank["pid"]) for rank in sim.ranks)

    def test_no_gpu_here(self, tiny: Path) -> None:
        if Path("/dev/nvidiactl").exists():
            pytest.skip("this machine has an NVIDIA driver")
        done = _run("--model-path", str(tiny), "--port", "0")
        assert done.returncode == 1
        assert done.stderr.splitlines() == [
            "specrig sim: Scheduler hit an exception: sglang::scheduler: RuntimeError: No CUDA GPUs are available "
            "[open /dev/nvidiactl: ENOENT (No such file or directory)]"
        ]

    @pytest.mark.parametrize(
        ("flags", "says"),
        [
            (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
            (["--mamba-scheduler-strategy", "auto"], "unrecognized arguments: --mamba-scheduler-strategy auto"),
            (["--cuda-graph-max-bs", "8"], "ambiguous option"),
            (["--speculative-algorithm", "MAGIC"], "invalid choice: 'MAGIC'"),
            (["--sim-fault", "stal"], "did you mean stall?"),
            (["--model-path", "/nowhere"], "--model-path /nowhere is not a folder"),
        ],
    )
    def test_bad_input_is_one_line(self, tiny: Path, flags: list[str], says: str) -> None:
        given = [] if "--model-path" in flags else ["--model-path", str(tiny)]
        done = _run(*given, "--sim-no-devices", *flags)
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
        assert says in done.stderr

    def test_port_taken(self, tiny: Path, plain: RunningSim) -> None:
        done = _run("--model-path", str(tiny), "--sim-no-devices", "--port", str(plain.port))
        assert done.returncode == 2
        assert done.stderr == (
            f"specrig sim: can't listen on 127.0.0.1:{plain.port}: Address already in use; is another server on this "
            "port?\n"
        )

    def test_truth_that_cannot_be_written(self, tiny: Path, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        truth = tmp_path / "file" / "truth.jsonl"
        done = _run("--model-path", str(tiny), "--sim-no-devices", "--port", "0", "--sim-truth", str(truth))
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
        assert f"--sim-truth {truth} can't be written" in done.stderr

    def test_no_tokenizer(self, tmp_path: Path) -> None:
        done = _run("--model-path", str(tmp_path), "--sim-no-devices", "--port", "0")
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == 1
        assert "the server can't start" in done.stderr

    def test_list_faults(self) -> None:
        done = _run("--list-faults")
        assert done.returncode == 0
        assert "eof-without-done=4" in done.stdout


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def _run(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "specrig.sim", *flags], capture_output=True, text=True, timeout=20, check=False
    )
