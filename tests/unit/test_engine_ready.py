"""Readiness: a completion of the expected length from the profile's own server, or a line that says why not."""

from __future__ import annotations

import importlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from specrig.facts import readiness

UNIT = "specrig-sglang@chat.service"
RUNNING = {"ActiveState": "active", "SubState": "running", "NRestarts": "0", "Result": "success"}
DEAD = {
    "ActiveState": "failed",
    "SubState": "failed",
    "Result": "exit-code",
    "ExecMainCode": "1",
    "ExecMainStatus": "1",
}


class Engine(ThreadingHTTPServer):
    """A stand-in for SGLang whose answers a test sets."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.ready = 200
        self.model = "Qwen3.6-27B"
        self.tokens: int | None = None
        self.finish = "length"
        self.on_generate: Callable[[], bool] = lambda: True
        self.asked: list[dict[str, Any]] = []


class Handler(BaseHTTPRequestHandler):
    server: Engine

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def answer(self, status: int, body: Any = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.path == "/ready":
            self.answer(self.server.ready)
        elif self.path == "/v1/models":
            self.answer(200, {"data": [{"id": self.server.model}]})
        else:
            self.answer(404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        if not self.server.on_generate():
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        wanted = body["sampling_params"]["max_new_tokens"]
        count = wanted if self.server.tokens is None else self.server.tokens
        meta = {"completion_tokens": count, "finish_reason": {"type": self.server.finish}}
        self.answer(200, {"text": "x", "meta_info": meta})


@pytest.fixture
def engine() -> Iterator[Engine]:
    server = Engine()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


class Stage:
    """The module with a unit and a log that a test sets, and a clock that it winds."""

    def __init__(self, module: ModuleType, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.unit = dict(RUNNING)
        self.log: list[tuple[float, str]] = []
        self.logs_of: list[str | None] = []
        self.members: set[int] = {os.getpid()}
        self.run = run
        monkeypatch.setattr(module, "unit_show", lambda _unit: dict(self.unit))
        monkeypatch.setattr(module, "unit_log", self.read_log)
        monkeypatch.setattr(module, "pids_of_cgroup", lambda _group: self.members)
        monkeypatch.setattr(module, "POLL_S", 0.02)
        monkeypatch.setattr(module, "CALL_S", 5.0)
        monkeypatch.setattr(module, "REQUEST_S", 5.0)

    def read_log(self, _unit: str, invocation: str | None, lines: int) -> list[tuple[float, str]]:
        self.logs_of.append(invocation)
        return self.log[-lines:]

    def __call__(self, port: int, **params: Any) -> dict[str, Any]:
        target = {
            "name": "chat",
            "unit": UNIT,
            "port": port,
            "served_model_name": "Qwen3.6-27B",
            "gpus": [0],
            "numa_nodes": [0],
            "cpus": "0",
            "method": "dflash",
            "memory_policy": True,
            "memory_nodes": [0],
            "start_timeout_s": params.pop("start_timeout_s", 600),
        }
        return self.run("engine_ready", targets=[target], **params)


@pytest.fixture
def module(run) -> ModuleType:
    pytest.importorskip("ansible.module_utils.basic")
    return importlib.import_module("ansible_collections.specrig.host.plugins.modules.engine_ready")


@pytest.fixture
def ready(module: ModuleType, run, monkeypatch) -> Stage:
    return Stage(module, run, monkeypatch)


def wind(monkeypatch: pytest.MonkeyPatch, module: ModuleType, factor: float) -> None:
    """Let the module's clock run faster."""
    begun, real = time.monotonic(), time.monotonic

    class Clock:
        def __getattr__(self, name: str) -> Any:
            return getattr(time, name)

        @staticmethod
        def monotonic() -> float:
            return begun + (real() - begun) * factor

    monkeypatch.setattr(module, "time", Clock())
    # An answer has as long as before, by the clock of the machine.
    monkeypatch.setattr(module, "CALL_S", module.CALL_S * factor)


def test_ready_is_one_completion_of_the_length_asked_for(ready: Stage, engine: Engine) -> None:
    done = ready(engine.server_port, tokens=8)
    assert not done.get("failed"), done
    assert engine.asked[0]["sampling_params"] == {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    (row,) = done["rows"]
    assert row["ready"]
    assert row["tokens_per_s"] > 0
    assert done["specrig"]["serving"][0]["status"] == "serving"
    assert done["pending"] == []


def test_healthy_and_dead_at_its_first_request(ready: Stage, engine: Engine) -> None:
    ready.log = [(3.0, "The server is fired up and ready to roll!"), (0.1, "Scheduler hit an exception: CUDA error")]

    def die() -> bool:
        ready.unit = {**DEAD, "NRestarts": "0"}
        return False

    engine.on_generate = die
    done = ready(engine.server_port)
    assert done["failed"]
    lines = done["msg"].splitlines()
    assert lines[0] == (f"chat: {UNIT} ended at its first request, having said that it was ready: exited with status 1")
    # The unit's own last words stand below.
    assert lines[1:] == ["    The server is fired up and ready to roll!", "    Scheduler hit an exception: CUDA error"]


def test_healthy_and_silent_at_its_first_request(ready: Stage, engine: Engine, module, monkeypatch) -> None:
    monkeypatch.setattr(module, "REQUEST_S", 0.2)
    monkeypatch.setattr(module, "GRACE_S", 1.0)
    release = threading.Event()
    engine.on_generate = lambda: release.wait(30) and False
    try:
        done = ready(engine.server_port, start_timeout_s=1)
    finally:
        release.set()
    assert "no completion within its start timeout of 1 s" in done["msg"]
    assert "it takes requests and does not answer them: it hangs, a longer timeout will not help" in done["msg"]


def test_another_model_on_the_port(ready: Stage, engine: Engine) -> None:
    engine.model = "Llama-3"
    ready.log = [(9.0, "serving Llama-3")]
    done = ready(engine.server_port)
    assert f"chat: port {engine.server_port} answers for model Llama-3, expected Qwen3.6-27B" in done["msg"]
    assert done["msg"].endswith("    serving Llama-3")
    assert engine.asked == []


def test_a_stale_server_on_the_port_is_named_with_its_pid_command_and_user(ready: Stage, engine: Engine) -> None:
    ready.members = {1}
    done = ready(engine.server_port)
    assert f"chat: port {engine.server_port} belongs to pid {os.getpid()} (" in done["msg"]
    assert "pytest" in done["msg"]
    assert f"which is not of {UNIT}: another server listens there" in done["msg"]
    assert engine.asked == []


def test_a_process_that_speaks_no_http_on_the_port(ready: Stage, module, monkeypatch) -> None:
    """Ours by its control group, so that it can't be called a stranger: what it says is shown."""
    monkeypatch.setattr(module, "GRACE_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"220 mail.example.org ESMTP\r\n")

        threading.Thread(target=greet, daemon=True).start()
        done = ready(listener.getsockname()[1], start_timeout_s=0.5)
        listener.shutdown(socket.SHUT_RDWR)
    assert "what listens there speaks no HTTP" in done["msg"]
    assert "220 mail.example.org ESMTP" in done["msg"]


@pytest.mark.parametrize(
    ("age", "advice"),
    [(2.0, "raise start_timeout_s of the profile"), (400.0, "so long without a word, it hangs rather than loads")],
)
def test_ten_minutes_of_loading_end_with_the_time_the_log_and_what_to_do(
    ready: Stage, engine: Engine, module, monkeypatch, age: float, advice: str
) -> None:
    engine.ready = 503
    ready.log = [(age, "Loading safetensors checkpoint shards: 45% Completed | 9/20")]
    wind(monkeypatch, module, 600)
    begun = time.monotonic()
    done = ready(engine.server_port, start_timeout_s=600)
    assert time.monotonic() - begun < 60
    first = done["msg"].splitlines()[0]
    told = re.match(r"chat: no completion within its start timeout of 600 s \((\d+) s since its start\): ", first)
    assert told, first
    assert int(told[1]) >= 600
    assert (
        f"/ready answers 503, it is loading; the last line of its log is {age:.0f} s old: Loading safetensors" in first
    )
    assert advice in first
    assert done["rows"][0]["seconds"] >= 600
    assert engine.asked == []


def test_a_server_that_loads_is_reported_in_between_and_kept_on_waiting_for(ready: Stage, engine: Engine) -> None:
    engine.ready = 503
    ready.log = [(1.0, "Load weight begin.")]
    told = ready(engine.server_port, patience_s=0.1)
    assert not told.get("failed")
    assert told["pending"] == ["chat"]
    assert re.fullmatch(
        r"\d+ of 600 s: /ready answers 503, it is loading; the last line of its log is 1 s old: Load weight begin\.",
        told["rows"][0]["seen"],
    )
    assert told["specrig"]["serving"][0]["status"] == "starting"
    engine.ready = 200
    done = ready(engine.server_port, patience_s=30, waited_s=7, rows=told["rows"])
    assert done["pending"] == []
    assert done["rows"][0]["ready"]
    assert done["rows"][0]["seconds"] >= 7
    # A row that is decided is not asked again.
    again = ready(engine.server_port, patience_s=1, waited_s=8, rows=done["rows"])
    assert again["rows"] == done["rows"]
    assert len(engine.asked) == 1


def test_the_time_counts_from_the_start_of_the_unit_not_from_when_somebody_began_to_look(
    ready: Stage, engine: Engine, module, monkeypatch
) -> None:
    """systemd started it at boot, longer ago than its start timeout: GRACE_S is all that it still gets."""
    engine.ready = 503
    monkeypatch.setattr(module, "GRACE_S", 0.3)
    # A machine that has just booted has no 700 s behind it.
    ago = min(700, int(time.monotonic()))
    limit = ago * 6 // 7
    ready.unit["ExecMainStartTimestampMonotonic"] = str(max(1, int((time.monotonic() - ago) * 1e6)))
    done = ready(engine.server_port, start_timeout_s=limit)
    told = re.search(rf"start timeout of {limit} s \((\d+) s since its start\)", done["msg"])
    assert told, done["msg"]
    assert int(told[1]) >= ago
    assert done["rows"][0]["seconds"] < 30


@pytest.mark.parametrize(
    ("tokens", "finish", "words"),
    [
        (3, "stop", "has 3 tokens, expected 8; it ended with a stop although ignore_eos was sent"),
        (3, "length", "has 3 tokens, expected 8; something caps its answers: SGLANG_MAX_NEW_TOKENS_LIMIT"),
        (3, "abort", "has 3 tokens, expected 8; it was aborted: the KV pool may be too small"),
        (9, "length", "has 9 tokens, expected 8; its counts can't be trusted"),
    ],
)
def test_a_wrong_number_of_tokens(ready: Stage, engine: Engine, tokens: int, finish: str, words: str) -> None:
    engine.tokens, engine.finish = tokens, finish
    ready.log = [(0.0, "Decode batch")]
    done = ready(engine.server_port)
    assert "chat: its first completion " + words in done["msg"]
    assert done["msg"].endswith("    Decode batch")


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (DEAD, "is failed: exited with status 1"),
        (
            {**DEAD, "NRestarts": "3"},
            "is failed: exited with status 1; it was started 4 times and its restart limit is reached",
        ),
        ({**DEAD, "Result": "signal", "ExecMainCode": "2", "ExecMainStatus": "11"}, "killed by SIGSEGV (11)"),
        (
            {**DEAD, "Result": "core-dump", "ExecMainCode": "3", "ExecMainStatus": "6"},
            "killed by SIGABRT (6), with a core",
        ),
        (
            {**DEAD, "Result": "oom-kill", "ExecMainCode": "2", "ExecMainStatus": "9"},
            "the kernel killed it for want of memory (OOM): give the guest more",
        ),
        ({**DEAD, "ExecMainStatus": "203"}, "exited with status 203 (its program could not be run"),
        ({**DEAD, "Result": "resources", "ExecMainStatus": "0"}, "systemd could not set it up"),
        (
            {"ActiveState": "activating", "SubState": "auto-restart", "NRestarts": "2", "ExecMainStatus": "1"},
            "ended while it started: exited with status 1; systemd has started it 3 times",
        ),
        ({"ActiveState": "inactive", "Result": "success", "ExecMainStatus": "0"}, "is inactive: exited with status 0"),
    ],
)
def test_a_unit_that_ends_is_not_waited_for_and_says_how(ready: Stage, state: dict[str, str], words: str) -> None:
    ready.unit = dict(state)
    ready.log = [(0.0, "torch.OutOfMemoryError: CUDA out of memory")]
    done = ready(closed_port())
    assert f"chat: {UNIT} " in done["msg"]
    assert words in done["msg"]
    assert done["msg"].endswith("    torch.OutOfMemoryError: CUDA out of memory")
    assert done["rows"][0]["seconds"] < 30


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({**RUNNING, "ActiveState": "deactivating", "NRestarts": "2"}, "what ran before is still being stopped"),
        ({**RUNNING, "Job": "4711", "NRestarts": "2"}, "systemd has its start still to do"),
        ({"ActiveState": "inactive", "Job": "4711", "NRestarts": "2"}, "systemd has its start still to do"),
    ],
)
def test_what_ran_before_a_restart_is_not_asked_and_its_end_is_not_the_new_one_s(
    ready: Stage, engine: Engine, state: dict[str, str], words: str
) -> None:
    """It would still answer, and its restarts were counted before the new start."""
    ready.unit = dict(state)
    told = ready(engine.server_port, patience_s=0.1)
    assert told["pending"] == ["chat"]
    assert words in told["rows"][0]["seen"]
    assert engine.asked == []
    ready.unit = dict(RUNNING)
    done = ready(engine.server_port, patience_s=30, rows=told["rows"])
    assert not done.get("failed"), done
    assert done["rows"][0]["ready"]


def test_a_restart_between_two_looks_is_an_end_too(ready: Stage, engine: Engine) -> None:
    engine.ready = 503
    told = ready(engine.server_port, patience_s=0.1)
    # As systemd tells of the start that it made since.
    ready.unit.update(NRestarts="1", ExecMainCode="0", ExecMainStatus="0", InvocationID="new")
    done = ready(engine.server_port, patience_s=30, rows=told["rows"])
    assert f"{UNIT} ended while it started: systemd has started it again since" in done["msg"]
    assert ready.logs_of[-1] is None


def test_a_unit_that_ends_because_its_port_is_taken_says_by_whom(ready: Stage, engine: Engine) -> None:
    ready.unit, ready.members = dict(DEAD), set()
    done = ready(engine.server_port)
    assert f"exited with status 1; its port is held by pid {os.getpid()} (" in done["msg"]


def test_one_that_can_t_be_started_does_not_keep_the_others_from_being_waited_for(ready: Stage, engine: Engine) -> None:
    done = ready(engine.server_port, problems=["agent: no place"])
    assert done["failed"]
    assert done["msg"] == "agent: no place"
    assert done["rows"][0]["ready"]


def test_a_log_entry_is_its_last_line_without_colours(module: ModuleType) -> None:
    stamp = str(int((time.time() - 5) * 1e6))
    entry = module.log_entry(json.dumps({"MESSAGE": "\x1b[32mok\x1b[0m", "__REALTIME_TIMESTAMP": stamp}).encode())
    assert entry[1] == "ok"
    assert 4 < entry[0] < 60
    # journald gives bytes that are no text as numbers; a bar of progress overwrites itself.
    numbers = list(b"10%\r45%|####     |\xff")
    entry = module.log_entry(json.dumps({"MESSAGE": numbers, "__REALTIME_TIMESTAMP": stamp}).encode())
    assert entry[1].startswith("45%|####")
    assert module.log_entry(b"not json") is None
    assert module.log_entry(json.dumps({"MESSAGE": " ", "__REALTIME_TIMESTAMP": stamp}).encode()) is None


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            "server_args=ServerArgs(api_key='sk-1', admin_api_key=\"a'b\", ssl_keyfile_password=None)",
            "server_args=ServerArgs(api_key='****', admin_api_key=\"****\", ssl_keyfile_password=None)",
        ),
        (
            r"server_args={'api_key': 'it\'s', 'ssl_keyfile_password': 'x', 'max_total_tokens': 5, 'tp_size': 1}",
            "server_args={'api_key': '****', 'ssl_keyfile_password': '****', 'max_total_tokens': 5, 'tp_size': 1}",
        ),
    ],
)
def test_keys_that_an_engine_logs_are_not_shown(module: ModuleType, said: str, shown: str) -> None:
    """As SGLang up to 0.5.18 and since writes its arguments down."""
    entry = module.log_entry(json.dumps({"MESSAGE": said, "__REALTIME_TIMESTAMP": "1"}).encode())
    assert entry[1] == shown


def test_who_holds_a_port_in_words() -> None:
    holders = [
        {"pid": 4, "command": "python3 -m http.server", "user": "root", "unit": "squatter.service"},
        {"pid": 5, "command": None, "user": None, "unit": None},
    ]
    assert readiness.holder_text(holders) == (
        "pid 4 (python3 -m http.server, user root, squatter.service) and pid 5 (command unknown, user unknown)"
    )


def test_the_wait_goes_on_in_parts_and_shows_in_between_how_far_each_is(module: ModuleType, monkeypatch) -> None:
    action = importlib.import_module("ansible_collections.specrig.host.plugins.action.engine_ready")
    waiting = {"profile": "chat", "ready": False, "seen": "6 of 600 s: it is loading"}
    serving = {"profile": "agent", "ready": True, "seen": None}
    answers = [
        {"pending": ["chat"], "rows": [waiting, serving]},
        {"pending": ["chat"], "rows": [{**waiting, "seen": "21 of 600 s: it is loading"}, serving]},
        {"pending": [], "rows": [{**waiting, "ready": True, "seen": None}, serving], "changed": False},
    ]
    asked: list[dict[str, Any]] = []
    shown: list[str] = []

    def execute(module_name: str, module_args: dict[str, Any], task_vars: Any) -> dict[str, Any]:
        assert module_name == "specrig.host.engine_ready"
        asked.append(dict(module_args))
        return answers[len(asked) - 1]

    monkeypatch.setattr(action.ActionBase, "run", lambda *_: {})
    monkeypatch.setattr(action.Display, "display", lambda _self, text, *_, **__: shown.append(text))
    plugin = action.ActionModule.__new__(action.ActionModule)
    plugin._task = SimpleNamespace(args={"targets": [{"name": "chat"}]})
    plugin._execute_module = execute
    done = plugin.run(task_vars={})
    assert done["rows"][0]["ready"]
    assert shown == ["  chat: 6 of 600 s: it is loading", "  chat: 21 of 600 s: it is loading"]
    assert [row["rows"] for row in asked] == [[], answers[0]["rows"], answers[1]["rows"]]
    assert 0 < asked[0]["patience_s"] < asked[1]["patience_s"]
    assert asked[0]["waited_s"] <= asked[1]["waited_s"] <= asked[2]["waited_s"]


def test_a_wait_that_fails_is_not_gone_on_with(module: ModuleType, monkeypatch) -> None:
    action = importlib.import_module("ansible_collections.specrig.host.plugins.action.engine_ready")
    answers = [{"failed": True, "msg": "chat: x", "pending": ["agent"]}]
    monkeypatch.setattr(action.ActionBase, "run", lambda *_: {})
    plugin = action.ActionModule.__new__(action.ActionModule)
    plugin._task = SimpleNamespace(args={"targets": []})
    plugin._execute_module = lambda **_: answers.pop(0)
    assert plugin.run(task_vars={})["msg"] == "chat: x"
    assert answers == []
