"""The simulated engine against bodies captured from a live SGLang 0.5.23, and against those read from its source."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from specrig.sim.testing import RunningSim, running_sim

_ANY = (dict, list, str, int, float, bool, type(None))


@pytest.fixture(scope="module")
def live(samples: Path) -> Path:
    return samples / "sglang" / "live-0.5.23-cpu"


@pytest.fixture(scope="module")
def sim(tokenizer_dir: Path) -> Iterator[RunningSim]:
    """As the captured server was set up."""
    with running_sim(
        model_path=tokenizer_dir,
        served_model_name="tiny",
        max_total_tokens=20000,
        max_running_requests=32,
        context_length=8192,
        enable_metrics=True,
        sim_time_scale=0.1,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def tree(tokenizer_dir: Path) -> Iterator[RunningSim]:
    with running_sim(
        model_path=tokenizer_dir,
        served_model_name="Qwen3.6-27B",
        tp_size=2,
        context_length=32768,
        max_total_tokens=32768,
        speculative_algorithm="DFLASH",
        speculative_draft_model_path="/draft",
        enable_metrics=True,
        enable_cache_report=True,
        reasoning_parser="qwen3",
        sim_time_scale=0.3,
    ) as running:
        yield running


def body(path: Path) -> Any:
    """A captured answer's JSON, without its head."""
    text = path.read_text()
    return json.loads(text[text.index("{") :]) if path.suffix == ".txt" else json.loads(text)


def stream(text: str) -> list[Any]:
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def missing(sample: Any, mine: Any, where: str = "") -> list[str]:
    """What the sample has and mine lacks: keys, and kinds of values where both are set."""
    if isinstance(sample, dict):
        if not isinstance(mine, dict):
            return [f"{where}: not an object"]
        found = []
        for key, value in sample.items():
            if key not in mine:
                found.append(f"{where}.{key}: missing")
            elif key not in ("graph", "bcg"):
                found += missing(value, mine[key], f"{where}.{key}")
        return found
    if isinstance(sample, list):
        if not isinstance(mine, list):
            return [f"{where}: not a list"]
        return missing(sample[0], mine[0], f"{where}[0]") if sample and mine else []
    kinds = ({type(sample), type(mine)} - {type(None)}) or {type(None)}
    return [] if len(kinds) == 1 or kinds == {int, float} else [f"{where}: {kinds}"]


def post(url: str, path: str, value: Any, *, streamed: bool = False) -> Any:
    answer = httpx.post(url + path, json={**value, "stream": True} if streamed else value, timeout=20)
    return stream(answer.text) if streamed else answer.json()


def test_missing_sees_a_difference() -> None:
    assert missing({"a": {"b": 1}, "c": [{"d": "x"}]}, {"a": {}, "c": [{"d": 3}]}) == [
        ".a.b: missing",
        f".c[0].d: { {str, int} }",
    ]


class TestShapes:
    def test_generate(self, sim: RunningSim, live: Path) -> None:
        mine = post(sim.url, "/generate", {"text": "Hello", "sampling_params": {"max_new_tokens": 8}})
        assert missing(body(live / "generate.json"), mine) == []

    def test_generate_stream(self, sim: RunningSim, live: Path) -> None:
        theirs = stream((live / "generate_stream.sse").read_text())
        mine = post(
            sim.url,
            "/generate",
            {"text": "Hello", "sampling_params": {"max_new_tokens": 6, "ignore_eos": True}},
            streamed=True,
        )
        assert len(mine) == len(theirs) == 7
        for theirs_chunk, mine_chunk in zip(theirs[:-1], mine[:-1], strict=True):
            assert missing(theirs_chunk, mine_chunk) == []
            assert list(theirs_chunk) == list(mine_chunk)
        assert mine[-1] == theirs[-1] == "[DONE]"
        assert mine[0]["meta_info"].keys() - mine[1]["meta_info"].keys() == {"response_sent_to_client_ts"}

    @pytest.mark.parametrize("incremental", [False, True])
    def test_generate_speculative(self, tree: RunningSim, samples: Path, incremental: bool) -> None:
        name = "incremental" if incremental else "cumulative"
        theirs = stream((samples / "sglang" / f"constructed_generate_stream_{name}.sse").read_text())
        mine = post(
            tree.url,
            "/generate",
            {"text": "Hello", "sampling_params": {"max_new_tokens": 60, "ignore_eos": True}},
            streamed=True,
        )
        assert missing(theirs[0], mine[0]) == []
        assert missing(theirs[1], mine[1]) == []
        assert missing(theirs[-2], mine[-2]) == []

    @pytest.mark.parametrize("route", ["chat", "completions"])
    def test_openai(self, sim: RunningSim, live: Path, route: str) -> None:
        asked: dict[str, Any] = {"model": "tiny", "max_tokens": 5, "ignore_eos": True}
        path = "/v1/completions"
        if route == "chat":
            path = "/v1/chat/completions"
            asked["messages"] = [{"role": "user", "content": "Hello"}]
        else:
            asked["prompt"] = "Hello there"
        assert missing(body(live / f"{route}.json"), post(sim.url, path, asked)) == []
        theirs = stream((live / f"{route}_stream.sse").read_text())
        mine = post(sim.url, path, {**asked, "stream_options": {"include_usage": True}}, streamed=True)
        assert missing(theirs[0], mine[0]) == []
        assert missing(theirs[1], mine[1]) == []
        assert missing(theirs[-3], mine[-3]) == []
        assert missing(theirs[-2], mine[-2]) == []
        assert mine[-2].keys() == theirs[-2].keys()
        assert mine[-2]["usage"].keys() == theirs[-2]["usage"].keys()
        assert mine[1].keys() == theirs[1].keys()
        assert mine[-1] == "[DONE]"

    def test_chat_with_details(self, tree: RunningSim, samples: Path) -> None:
        theirs = stream((samples / "sglang" / "constructed_chat_stream.sse").read_text())
        asked = {
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 60,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
            "return_spec_tokens_details": True,
        }
        mine = post(tree.url, "/v1/chat/completions", asked, streamed=True)
        assert missing(theirs[-3], mine[-3]) == []
        assert missing(theirs[-2], mine[-2]) == []
        assert [chunk["choices"] for chunk in mine[-3:-1]] == [[], []]

    @pytest.mark.parametrize("name", ["server_info", "model_info", "v1_models"])
    def test_information(self, sim: RunningSim, live: Path, name: str) -> None:
        path = "/v1/models" if name == "v1_models" else f"/{name}"
        theirs, mine = body(live / f"{name}.txt"), httpx.get(sim.url + path).json()
        assert missing(theirs, mine) == []
        if name == "server_info":
            assert mine["max_total_num_tokens"] == theirs["max_total_num_tokens"] == 20000
            assert mine["max_req_input_len"] == theirs["max_req_input_len"] == 8186
            assert mine["simulated"] is True
            assert mine["version"] == "0.5.23+specrig-sim"
            old = httpx.get(sim.url + "/get_server_info").json()
            assert old.keys() == mine.keys()
        if name == "v1_models":
            assert mine["data"][0]["max_model_len"] == theirs["data"][0]["max_model_len"] == 8192

    def test_tree_server_info(self, tree: RunningSim, samples: Path) -> None:
        post(tree.url, "/generate", {"text": "Hello", "sampling_params": {"max_new_tokens": 40}})
        theirs = body(samples / "sglang" / "constructed_server_info_0.5.23_tp4_dflash_WRONG_GPUS.json")
        del theirs["_source"]
        mine = httpx.get(tree.url + "/server_info").json()
        differences = [one for one in missing(theirs, mine) if "startup_time" not in one]
        assert differences == []
        for key in ("speculative_algorithm", "speculative_num_draft_tokens", "speculative_dflash_block_size"):
            assert mine[key] == theirs[key]

    def test_loads(self, tree: RunningSim, samples: Path) -> None:
        theirs = body(samples / "sglang" / "constructed_v1_loads_0.5.23.json")
        del theirs["_source"]
        assert missing(theirs, httpx.get(tree.url + "/v1/loads").json()) == []

    def test_tokenize(self, sim: RunningSim, samples: Path) -> None:
        theirs = body(samples / "sglang" / "constructed_tokenize_0.5.23.json")
        del theirs["_source"]
        mine = post(sim.url, "/tokenize", {"model": "tiny", "prompt": "The quick brown fox"})
        assert missing(theirs, mine) == []
        assert mine["count"] == len(mine["tokens"])

    def test_metrics(self, sim: RunningSim, tree: RunningSim, live: Path, samples: Path) -> None:
        theirs = set(re.findall(r"^# TYPE (\S+ \S+)", (live / "metrics.txt").read_text(), re.MULTILINE))
        mine = httpx.get(sim.url + "/metrics").text
        assert theirs <= set(re.findall(r"^# TYPE (\S+ \S+)", mine, re.MULTILINE))
        assert len(theirs) > 50
        row = re.compile(r"^sglang:num_running_reqs\{(.*)\} ", re.MULTILINE)
        names = [
            re.findall(r'(\w+)="', row.search(text)[1])  # type: ignore[index]
            for text in (mine, (live / "metrics.txt").read_text())
        ]
        assert names[0] == names[1]
        speculative = set(
            re.findall(
                r"^(sglang:\S+?)\{", (samples / "sglang" / "constructed_metrics_0.5.23.txt").read_text(), re.MULTILINE
            )
        )
        assert speculative <= set(re.findall(r"^(sglang:\S+?)\{", httpx.get(tree.url + "/metrics").text, re.MULTILINE))


class TestErrors:
    def test_generate_without_a_prompt(self, sim: RunningSim, live: Path) -> None:
        answer = httpx.post(sim.url + "/generate", json={"sampling_params": {}})
        assert answer.status_code == 400
        assert answer.text == (live / "generate_error.txt").read_text().rpartition("\n\n")[2].strip()

    def test_chat_without_messages(self, sim: RunningSim, live: Path) -> None:
        answer = httpx.post(sim.url + "/v1/chat/completions", json={"model": "tiny"})
        assert answer.status_code == 400
        assert answer.json() == body(live / "chat_error.txt")

    def test_flush(self, sim: RunningSim, live: Path) -> None:
        answer = httpx.post(sim.url + "/flush_cache")
        assert answer.status_code == 200
        assert answer.text == (live / "flush_cache.txt").read_text().split("\n\n", 1)[1].rstrip("\n") + "\n"

    def test_too_long(self, tree: RunningSim, samples: Path) -> None:
        """The texts of the samples, with the same numbers: 33,012 and 32,744 + 256 tokens against 32,768."""
        theirs = body(samples / "sglang" / "constructed_errors_0.5.23.json")
        long = {"input_ids": [100] * 33012}
        answer = httpx.post(tree.url + "/generate", json=long)
        assert (answer.status_code, answer.json()) == (400, theirs["POST /generate non-stream"]["body"])
        answer = httpx.post(tree.url + "/generate", json={**long, "stream": True})
        assert (answer.status_code, answer.text) == (200, theirs["POST /generate stream=true"]["sse"])
        total = {"prompt": [100] * 32744, "max_tokens": 256}
        answer = httpx.post(tree.url + "/v1/completions", json=total)
        assert (answer.status_code, answer.json()) == (400, theirs["POST /v1/chat/completions non-stream"]["body"])
        answer = httpx.post(tree.url + "/v1/completions", json={**total, "stream": True})
        expected = stream(theirs["POST /v1/chat/completions stream=true"]["sse"])
        mine = stream(answer.text)
        assert mine[1] == "[DONE]"
        mine[0]["error"]["message"] = "..."
        assert mine == expected
        asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 40000}
        answer = httpx.post(tree.url + "/v1/chat/completions", json=asked)
        assert (answer.status_code, answer.json()) == (400, theirs["chat max_tokens > --context-length"]["body"])

    def test_scheduler_abort(self, tree: RunningSim, samples: Path) -> None:
        text = (samples / "sglang" / "constructed_generate_stream_scheduler_abort.sse").read_text()
        theirs = stream(text)
        asked = {"input_ids": [100] * 32763, "sampling_params": {"max_new_tokens": 4}}
        mine = post(tree.url, "/generate", asked, streamed=True)
        assert mine[0]["meta_info"]["finish_reason"] == theirs[0]["meta_info"]["finish_reason"]
        assert missing(theirs[0], mine[0]) == []
        assert mine[1] == theirs[1] == "[DONE]"
        answer = httpx.post(tree.url + "/generate", json=asked)
        assert answer.status_code == 400
        assert answer.json() == {"error": {"message": theirs[0]["meta_info"]["finish_reason"]["message"]}}
