"""What a load is given that is broken: half characters, files that are not there, servers that are none."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specrig.cli import main
from specrig.engine.client import EngineClient
from specrig.engine.endpoint import check_endpoint
from specrig.engine.errors import EngineError, message
from specrig.errors import UsageError
from specrig.load import cell as cells
from specrig.load import stream
from specrig.load.api import make_decoder
from specrig.load.sse import SseParser
from specrig.model.cell import expand
from specrig.model.sweep import load_sweep
from specrig.runs import command
from specrig.runs.folder import RunFolder
from specrig.runs.lines import encoded
from specrig.sim.testing import RunningSim, running_sim, tiny_tokenizer
from specrig.tokens import tokenizer as tokenizers
from specrig.tokens.prompts import PromptFactory
from specrig.tokens.rows import read_jsonl

MODEL = "M"
DEEP = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def sweep(folder: Path, workload: str, api: str = "openai-chat") -> Path:
    file = folder / "s.yml"
    file.write_text(f"name: t\nmodel: {MODEL}\napi: {api}\nworkloads:\n  - {{name: w, {workload}}}\n")
    return file


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def sim(model: Path) -> Iterator[RunningSim]:
    with running_sim(model_path=model, served_model_name=MODEL, sim_time_scale=0.2) as server:
        yield server


@contextlib.contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """A server with one answer to everything."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_texts_that_are_no_unicode_are_written_all_the_same() -> None:
    assert json.loads(encoded({"a\ud800": ["b\udfff", 1]})) == {"a?": ["b?", 1]}
    assert json.loads(encoded({"a": os.fsdecode("ü\n".encode())}))["a"] == "ü\n"
    assert json.loads(encoded({"a": "\udcc3\udcbc"}))["a"] == "ü"  # as a locale without it gives an argument
    assert json.loads(encoded({"a": "\udcff"}))["a"] == "\ufffd"


def test_a_reason_and_a_folder_of_any_bytes(sim: RunningSim, tmp_path: Path) -> None:
    file = sweep(tmp_path, "prompts: questions, output_tokens: 2, requests: 2")
    out = Path(os.fsdecode(bytes(tmp_path) + b"/r\xff"))
    words = ["load", str(file), "--url", sim.url, "--out", str(out), "--reason", os.fsdecode(b"why\xff")]
    assert main(words) == 0
    assert json.loads((out / "manifest.json").read_text())["reason"] == "why\ufffd"
    assert main([*words, "--resume", "--json"]) == 0


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        ("prompts: p.jsonl, output_tokens: 2, requests: 1", "p.jsonl:2: holds half a character"),
        ("prompts: no.jsonl, output_tokens: 2, requests: 1", "no.jsonl: cannot be read"),
    ],
)
def test_prompts_that_cannot_be_read_are_refused_before_a_folder_is_made(
    workload: str, words: str, sim: RunningSim, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "x"}\n{"prompt": "a\\ud800b"}\n')
    out = tmp_path / "run"
    assert main(["load", str(sweep(tmp_path, workload)), "--url", sim.url, "--out", str(out)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert not out.exists()


def test_a_trace_that_cannot_be_read_is_refused_too(
    sim: RunningSim, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = sweep(tmp_path, "prompts: prose, prompt_tokens: 64, output_tokens: 2, arrival: trace, trace: no.csv")
    line = ["load", str(file), "--url", sim.url, "--tokenizer", str(model), "--out", str(tmp_path / "run")]
    assert main(line) == 2
    assert "no.csv: cannot read the trace" in capsys.readouterr().err


def test_whole_characters_outside_the_first_plane_are_no_halves(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "\\ud83d\\ude00"}\n')
    assert read_jsonl(tmp_path / "p.jsonl")[0].messages[0]["content"] == "\N{GRINNING FACE}"


def test_half_a_character_is_no_text_for_a_tokenizer(model: Path) -> None:
    loaded = tokenizers.load(str(model))
    with pytest.raises(UsageError, match="no Unicode"):
        loaded.encode("a\udfff")
    with pytest.raises(UsageError, match="no Unicode"):
        loaded.spans("a\udfff")


def test_answers_nested_too_deeply_are_errors_in_words() -> None:
    with answering(200, DEEP) as url, EngineClient(url) as client:
        for call in (client.server_info, client.loads):
            with pytest.raises(EngineError, match="expected a JSON object"):
                call()
    assert message(500, DEEP).startswith('{"a":[[[')
    decoder = make_decoder("sglang")
    decoder.feed(DEEP, 1.0)
    assert decoder.error == "protocol"


def test_ids_that_are_none_are_refused() -> None:
    with (
        answering(200, b'{"tokens": [1, "a", null]}') as url,
        EngineClient(url) as client,
        pytest.raises(EngineError, match="no list of tokens"),
    ):
        client.tokenize("x")


def test_a_servers_words_cannot_steer_a_terminal() -> None:
    assert message(500, b"\x1b[31mno\x07\x00 room\r\n") == "[31mno room"


@pytest.mark.parametrize("end", ["?a=1", "/v1?x", "#a"])
def test_a_url_with_a_query_is_refused(end: str) -> None:
    with pytest.raises(UsageError, match="a part after its path"):
        check_endpoint(f"http://127.0.0.1:30000{end}", None)


@pytest.mark.parametrize(
    ("status", "words"), [(503, "answered 503: loading; is it ready?"), (302, "neither /server_info nor /v1/models")]
)
def test_what_is_no_engine_yet_is_said_before_a_folder_is_made(
    status: int, words: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = sweep(tmp_path, "prompts: questions, prompt_tokens: 64, output_tokens: 2, requests: 1", "sglang")
    with answering(status, b"loading") as url:
        line = ["load", str(file), "--url", url, "--tokenizer", str(model), "--out", str(tmp_path / "run")]
        assert main(line) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert words in said
    assert not (tmp_path / "run").exists()


def test_an_event_counts_as_held_until_it_ends() -> None:
    parser = SseParser()
    parser.feed(b"data: ab\ndata: cd")
    assert parser.held == len(b"data: ab") + len(b"data: cd")
    assert parser.feed(b"\n\n") == [b"ab\ncd"]
    assert parser.held == 0


@pytest.mark.parametrize(
    ("head", "more", "words"),
    [
        (b"HTTP/1.1 200 OK\r\n", b"x-a: " + b"a" * 1000 + b"\r\n", "a head without end"),
        (b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: ", b"a" * 1000, "an event without end"),
    ],
)
def test_what_has_no_end_is_given_up(head: bytes, more: bytes, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_LARGEST_HEAD", 20_000)
    monkeypatch.setattr(stream, "_LARGEST_EVENT", 20_000)

    ended = asyncio.Event()

    async def endless(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(head)
            while True:
                writer.write(more)
                await writer.drain()
                await asyncio.sleep(0.001)
        writer.transport.abort()
        ended.set()

    async def ask() -> stream.Exchange:
        server = await asyncio.start_server(endless, "127.0.0.1", 0)
        client = stream.StreamClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        exchange = await client.exchange(client.frame("POST", "/generate", b"{}"), make_decoder("sglang"), TIMEOUTS)
        await client.close()
        await asyncio.wait_for(ended.wait(), 30)
        server.close()
        await server.wait_closed()
        return exchange

    exchange = asyncio.run(ask())
    assert exchange.error == "protocol"
    assert words in (exchange.message or "")


TIMEOUTS = stream.Timeouts(first_token_s=60, idle_s=60, request_s=60)


def test_scratch_files_of_killed_processes_go_with_the_next_writer(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with RunFolder.create(tmp_path / "run", {}) as run:
        stale = run.path / f".manifest.json.{ended.pid}.new"
        mine = run.path / f".report.html.{os.getpid()}.new"
        stale.write_text("{")
        mine.write_text("<")
        with run.lock():
            assert not stale.exists()
            assert mine.exists()


@pytest.mark.parametrize(("what", "code"), [(KeyboardInterrupt(), 130), (BrokenPipeError(), 141)])
def test_whatever_ends_a_run_labels_it(
    what: BaseException, code: int, sim: RunningSim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*_: Any) -> None:
        raise what

    monkeypatch.setattr("specrig.cli._silence_stdout", lambda: None)
    file = sweep(tmp_path, "prompts: questions, output_tokens: 2, requests: 1")
    line = ["load", str(file), "--url", sim.url, "--out", str(tmp_path / "run")]
    with monkeypatch.context() as patch:
        patch.setattr(command, "run_job", end)
        assert main(line) == code
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["label"] == "aborted"
    assert main([*line, "--resume"]) == 0


def test_prompts_are_made_in_slices_that_an_interrupt_ends(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = tokenizers.load(str(model))
    file = sweep(tmp_path, "prompts: questions, prompt_tokens: 256, output_tokens: 2, requests: 40")
    (cell,) = expand(load_sweep(file), None)
    factory = PromptFactory(loaded, "questions", 256, 1, False, "flush")
    assert factory.sessions(20) == factory.sessions(16) + factory.sessions(4, 16)
    monkeypatch.setattr(cells, "_TOKENS_AT_ONCE", 1)

    async def make(stopped: bool) -> int:
        stop = asyncio.Event()
        if stopped:
            asyncio.get_running_loop().call_soon(stop.set)
        context: Any = SimpleNamespace(tokenizer=loaded, base=tmp_path, stop=stop)
        return len(await cells._prompts(cell, context, ()))

    assert asyncio.run(make(False)) == 40
    with pytest.raises(EngineError, match="interrupted"):
        asyncio.run(make(True))
