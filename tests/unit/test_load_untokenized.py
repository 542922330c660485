"""``specrig load`` without ``--tokenizer``: what is sent, what is then unknown, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from specrig.cli import main
from specrig.load.api import OpenAiDecoder
from specrig.load.cell import Context, run_cell
from specrig.model.cell import expand
from specrig.model.manifest import Manifest
from specrig.model.sweep import load_sweep
from specrig.sim.testing import RunningSim, running_sim, tiny_tokenizer
from specrig.tokens.corpus import questions

MODEL = "M"


def sweep(path: Path, workload: str, api: str) -> Path:
    path.write_text(f"name: t\nmodel: {MODEL}\napi: {api}\nworkloads:\n  - {{{workload}}}\n")
    return path


def load(file: Path, url: str, out: Path, *more: str) -> int:
    return main(["load", str(file), "--url", url, "--out", str(out), *more])


def rows(out: Path, name: str) -> list[dict[str, Any]]:
    file = out / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def check(cell: dict[str, Any], rule: str) -> bool | None:
    return next(row["ok"] for row in cell["checks"] if row["rule"] == rule)


@pytest.fixture(scope="module")
def sim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSim]:
    model = tiny_tokenizer(tmp_path_factory.mktemp("model") / "m")
    with running_sim(model_path=model, served_model_name=MODEL, sim_time_scale=0.2) as server:
        yield server


class Foreign(BaseHTTPRequestHandler):
    """An OpenAI-compatible server that is no SGLang, sends no usage, and keeps what it was asked."""

    protocol_version = "HTTP/1.1"
    asked: list[dict[str, Any]]

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("content-length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not self.path.startswith("/v1/c"):
            self.do_GET()
            return
        type(self).asked.append(body)
        chat = self.path.endswith("chat/completions")
        pieces = [{"delta": {"content": text}} if chat else {"text": text} for text in ("One ", "two, ", "three.")]
        events: list[dict[str, Any]] = [{"choices": [piece]} for piece in pieces]
        events[-1]["choices"][0]["finish_reason"] = "length"
        data = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextlib.contextmanager
def served(certificate: Path | None = None) -> Iterator[str]:
    Foreign.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Foreign)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that does not trust it
    if certificate is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"http{'s' if certificate else ''}://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def foreign() -> Iterator[str]:
    with served() as url:
        yield url


@pytest.mark.parametrize("api", ["sglang", "openai-chat", "openai-completions"])
def test_a_sglang_server_counts_for_itself(api: str, sim: RunningSim, tmp_path: Path) -> None:
    file = sweep(tmp_path / "s.yml", "name: q, prompts: questions, output_tokens: 16, requests: 4, concurrency: 2", api)
    out = tmp_path / "run"
    assert load(file, sim.url, out) == 0
    records = rows(out, "requests")
    truth = {row["rid"]: row for row in sim.truth(at_least=4)}
    assert len({record["prompt_id"] for record in records}) == 4
    for record in records:
        assert (record["ok"], record["output_tokens"], record["token_source"]) == (True, 16, "server")
        true = truth[record["rid"]]["prompt_tokens"]
        assert record["prompt_tokens"] == true
        assert record["prompt_tokens_asked"] == (true if api == "sglang" else None)
        assert (record["first_eos"], record["eos_known"]) == (None, False)
    (cell,) = rows(out, "cells")
    assert cell["state"] == "done"
    assert check(cell, "prompt tokens as asked") is (True if api == "sglang" else None)
    assert check(cell, "share of tokens after the first end of sequence") is None
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["model"] == {"name": MODEL, "tokenizer": None}
    assert msgspec.convert(manifest, Manifest).label == "complete"


def test_native_prompts_are_those_of_a_run_with_the_tokenizer(sim: RunningSim, tmp_path: Path) -> None:
    file = sweep(tmp_path / "s.yml", "name: q, prompts: questions, output_tokens: 8, requests: 3", "sglang")
    model = tiny_tokenizer(tmp_path / "m")
    assert load(file, sim.url, tmp_path / "without") == 0
    assert load(file, sim.url, tmp_path / "with", "--tokenizer", str(model)) == 0
    without, known = ([r["prompt_tokens"] for r in rows(tmp_path / name, "requests")] for name in ("without", "with"))
    assert without == known
    assert len(set(known)) > 1


def test_the_server_counts_a_rows_tools_too(tokenizer_dir: Path, tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}
    asked = {"messages": [{"role": "user", "content": "What is there?"}]}
    lines = (json.dumps(row) for row in ({**asked, "tools": [tool]}, asked))
    (tmp_path / "p.jsonl").write_text("\n".join(lines) + "\n")
    counts = {}
    with running_sim(model_path=tokenizer_dir, served_model_name=MODEL, sim_time_scale=0.2) as server:
        for api in ("openai-chat", "sglang"):
            file = sweep(tmp_path / "s.yml", "name: q, prompts: p.jsonl, output_tokens: 4, requests: 2", api)
            assert load(file, server.url, tmp_path / api) == 0
            counts[api] = {record["index"]: record["prompt_tokens"] for record in rows(tmp_path / api, "requests")}
    assert counts["sglang"] == counts["openai-chat"]
    assert counts["sglang"][0] > counts["sglang"][1] + 20


def test_an_interrupt_while_the_server_counts_is_no_failure(tmp_path: Path) -> None:
    stop = asyncio.Event()
    file = sweep(tmp_path / "s.yml", "name: q, prompts: questions, output_tokens: 4, requests: 2", "sglang")
    (cell,) = expand(load_sweep(file), None)

    class Slow:
        def tokenize(self, **_: Any) -> list[int]:
            loop.call_soon_threadsafe(stop.set)
            time.sleep(0.2)
            return [1]

    context = SimpleNamespace(
        tokenizer=None, base=None, control=Slow(), stop=stop, launch=0, block=0, simulated=None, time_scale=None
    )
    loop = asyncio.new_event_loop()
    try:
        row = loop.run_until_complete(run_cell(cell, cast(Context, context)))
    finally:
        loop.close()
    assert (row.state, row.reason) == ("aborted", "interrupted before its first request")


def test_a_prompt_that_does_not_fit_is_skipped_by_the_servers_own_count(sim: RunningSim, tmp_path: Path) -> None:
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "x" * 5000}) + "\n")
    file = sweep(tmp_path / "s.yml", "name: q, prompts: long.jsonl, output_tokens: 8, requests: 1", "sglang")
    model = tiny_tokenizer(tmp_path / "m")
    with running_sim(model_path=model, served_model_name=MODEL, context_length=4096, sim_time_scale=0.2) as small:
        assert load(file, small.url, tmp_path / "run") == 1
    (cell,) = rows(tmp_path / "run", "cells")
    assert cell["state"] == "skipped"
    assert "over the context length 4,096" in cell["reason"] or "is not below the context length" in cell["reason"]
    assert rows(tmp_path / "run", "requests") == []


@pytest.mark.parametrize("api", ["openai-chat", "openai-completions"])
def test_without_usage_nothing_is_credited(
    api: str, foreign: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "Count to three."}\n{"prompt": "Once more."}\n')
    file = sweep(tmp_path / "s.yml", "name: q, prompts: p.jsonl, output_tokens: 3, requests: 2, cache: unique", api)
    out = tmp_path / "run"
    assert load(file, foreign, out) == 1
    sent = [body["messages"][-1]["content"] if api == "openai-chat" else body["prompt"] for body in Foreign.asked]
    assert sorted(text.split("\n\n")[-1] for text in sent[1:]) == ["Count to three.", "Once more."]
    for record in rows(out, "requests"):
        assert (record["ok"], record["token_source"], record["trace_source"]) == (True, "unknown", "unknown")
        for name in ("output_tokens", "prompt_tokens", "prompt_tokens_asked", "first_chunk_tokens"):
            assert record[name] is None
        assert record["decode_tokens_per_s"] is None
        assert record["ttft_s"] > 0
        assert record["chunks"] == 3
    assert rows(out, "chunks") == []
    (cell,) = rows(out, "cells")
    assert cell["state"] == "invalid"
    assert cell["reason"] == (
        "token count is the server's: saw 2 counted by nobody: the server sent no usage, expected the server's count"
    )
    assert (cell["output_tokens_total"], cell["window"], cell["peak_tokens_per_s"]) == (0, None, None)
    assert main(["report", str(out)]) == 0
    assert main(["export", str(out), "--format", "vllm", "--out", str(tmp_path / "x")]) == 1
    assert "invalid" in capsys.readouterr().err


def test_report_and_export_cope_with_a_run_without_a_tokenizer(
    sim: RunningSim, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = sweep(tmp_path / "s.yml", "name: q, prompts: questions, output_tokens: 16, requests: 4", "openai-chat")
    out = tmp_path / "run"
    assert load(file, sim.url, out) == 0
    assert main(["report", str(out)]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["cells"][0]["valid"] is True
    assert summary["cells"][0]["post_eos_share"] is None
    for form in ("vllm", "sglang", "aiperf"):
        assert main(["export", str(out), "--format", form, "--out", str(tmp_path / form)]) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    ("workload", "api", "words"),
    [
        ("prompts: questions, prompt_tokens: 64", "openai-chat", "workload q: prompt_tokens 64 "),
        ("prompts: prose, prompt_tokens: 64", "openai-chat", "workload q: prompts prose "),
        ("prompts: agentic, prompt_tokens: 4096", "openai-chat", "workload q: prompts agentic "),
        ("prompts: questions, prompt_tokens: [null, 64]", "openai-completions", "workload q: prompt_tokens 64 "),
        ("prompts: questions, arrival: trace, trace: t.csv", "openai-chat", "workload q: the lengths of a trace "),
        ("prompts: talks.jsonl, turns: 2", "openai-chat", "workload q: the turns of sessions "),
        ("prompts: questions", "sglang", "workload q: api sglang is asked with token ids, and the server makes none"),
    ],
)
def test_what_needs_a_tokenizer_is_refused_before_anything_is_sent(
    workload: str, api: str, words: str, foreign: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = sweep(tmp_path / "s.yml", f"name: q, {workload}, output_tokens: 3, requests: 2", api)
    assert load(file, foreign, tmp_path / "run") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert "--tokenizer DIR" in line
    assert Foreign.asked == []
    assert not (tmp_path / "run").exists()


def sse(*events: object) -> list[bytes]:
    return [json.dumps(event).encode() for event in events]


def test_a_final_count_is_shared_by_characters_and_says_so() -> None:
    decoder = OpenAiDecoder()
    stream = sse(
        {"choices": [{"text": "abcd"}]},
        {"choices": [{"text": "ef", "finish_reason": "length"}]},
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 9}},
    )
    for number, event in enumerate(stream):
        decoder.feed(event, float(number))
    decoder.finish()
    assert (decoder.t, decoder.k) == ([0.0, 1.0], [6, 3])
    assert (decoder.output_tokens, decoder.token_source, decoder.trace_source) == (9, "server", "characters")


def test_own_prompts_are_the_questions_themselves(foreign: str, tmp_path: Path) -> None:
    file = sweep(
        tmp_path / "s.yml", "name: q, prompts: questions, output_tokens: 3, requests: 4, cache: shared", "openai-chat"
    )
    assert load(file, foreign, tmp_path / "run") == 1
    texts = {question.text for question in questions()}
    warmup, *sent = [body["messages"][-1]["content"] for body in Foreign.asked]
    assert warmup not in texts
    assert len(set(sent)) == 4
    assert set(sent) < texts


def test_own_certificates_are_trusted_by_control_calls_too(
    certificate: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = sweep(
        tmp_path / "s.yml", "name: q, prompts: questions, output_tokens: 3, requests: 2, cache: shared", "openai-chat"
    )
    with served(certificate) as url:
        assert load(file, url, tmp_path / "run", "--ca-file", str(certificate)) == 1  # no usage: invalid
        assert [record["ok"] for record in rows(tmp_path / "run", "requests")] == [True, True]
        capsys.readouterr()
        assert load(file, url, tmp_path / "doubting") == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "certificate verify failed" in line
        assert load(file, url, tmp_path / "nothing", "--ca-file", str(tmp_path / "none.pem")) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "none.pem: cannot read certificates" in line


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_servers_key_is_sent_and_kept_nowhere(
    workers: str, tmp_path: Path, tokenizer_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = "sk-a-key-of-a-test"
    file = sweep(
        tmp_path / "s.yml", "name: q, prompts: questions, output_tokens: 4, requests: 4, concurrency: 2", "sglang"
    )
    with running_sim(model_path=tokenizer_dir, served_model_name=MODEL, api_key=key, sim_time_scale=0.1) as server:
        assert load(file, server.url, tmp_path / "refused", "--workers", workers) == 2
        assert "answered 401" in capsys.readouterr().err
        load(file, server.url, tmp_path / "run", "--workers", workers, "--api-key", key)
    assert [record["ok"] for record in rows(tmp_path / "run", "requests")] == [True] * 4
    kept = {path.name: path.read_text() for path in (tmp_path / "run").iterdir() if path.is_file()}
    told = json.loads(kept["manifest.json"])["launches"][0]["server_info"]["launch_command"]
    assert " --api-key <redacted> " in told  # the engine tells the line that it was started with
    assert [name for name, text in kept.items() if key in text] == []


HEAVY = ("transformers", "tokenizers", "jinja2", "pandas", "numpy", "scipy", "matplotlib", "ansible")
"""What no load needs that has no tokenizer."""


def test_a_load_imports_nothing_heavy(sim: RunningSim, tmp_path: Path) -> None:
    file = sweep(tmp_path / "s.yml", "name: q, prompts: questions, output_tokens: 4, requests: 1", "openai-chat")
    script = (
        "import sys\nfrom specrig.cli import main\ncode = main(sys.argv[1:])\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])\nsys.exit(code)"
    )
    command = [sys.executable, "-c", script, "load", str(file), "--url", sim.url, "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
    tokenizer = tiny_tokenizer(tmp_path / "m")
    with_one = [*command[:-1], str(tmp_path / "second"), "--tokenizer", str(tokenizer)]
    done = subprocess.run(with_one, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "['tokenizers', 'jinja2']"), done.stderr
