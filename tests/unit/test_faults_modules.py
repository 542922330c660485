"""Guests and servers that misbehave towards the modules: one line each, never a hang or a traceback."""

from __future__ import annotations

import importlib
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

basic = pytest.importorskip("ansible.module_utils.basic")
MODULES = "ansible_collections.specrig.host.plugins.modules."


@pytest.fixture
def module(repository: Path, monkeypatch) -> Callable[[str], Any]:
    """A module of the collection, imported as Ansible does."""
    monkeypatch.setattr(sys, "path", [str(repository / ".collections"), *sys.path])
    return lambda name: importlib.import_module(MODULES + name)


@pytest.fixture
def run(module, monkeypatch, capsys):
    """Run a module with parameters; returns what it prints."""

    def call(name_: str, /, check: bool = False, **params: Any) -> dict[str, Any]:
        arguments = {"ANSIBLE_MODULE_ARGS": {**params, "_ansible_check_mode": check, "_ansible_diff": True}}
        monkeypatch.setattr(basic, "_ANSIBLE_ARGS", json.dumps(arguments).encode())
        monkeypatch.setattr(basic, "_ANSIBLE_PROFILE", "legacy", raising=False)
        with pytest.raises(SystemExit):
            module(name_).main()
        return json.loads(capsys.readouterr().out)

    return call


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def host(tmp_path: Path, monkeypatch) -> Path:
    """A folder of stand-in programs, first on the path."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    program(tmp_path / "bin", "lxc-info", "printf 'State:  RUNNING\\nPID: 1\\n'")
    return tmp_path / "bin"


def test_a_frozen_guest_is_told_and_not_entered(run, host: Path) -> None:
    program(host, "lxc-info", "printf 'State:  FROZEN\\nPID: 1\\n'")
    program(host, "lxc-attach", "sleep 60")
    done = run("guest_devices", name="gpu", nodes=[])
    assert done["failed"]
    assert done["msg"].startswith("guest 'gpu' is frozen")
    assert "lxc-unfreeze -n gpu" in done["msg"]


def test_a_guest_that_does_not_answer_is_given_up(run, module, host: Path, monkeypatch) -> None:
    program(host, "lxc-attach", "exec sleep 60")
    monkeypatch.setattr(module("guest_devices"), "COMMAND_TIMEOUT_S", 1)
    begun = time.monotonic()
    done = run("guest_devices", name="gpu", nodes=[])
    assert done["msg"] == "guest 'gpu': lxc-attach did not end within 1 s; see on the host what holds it"
    assert time.monotonic() - begun < 20


def test_a_guest_whose_python_prints_something_else_is_told(run, host: Path) -> None:
    program(host, "lxc-attach", "echo welcome")
    done = run("guest_devices", name="gpu", nodes=[])
    assert "gave 'welcome', expected JSON" in done["msg"]


@pytest.fixture
def guest(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "config").write_bytes(b"lxc.uts.name = gpu\r\n# \xff\xfe\r\nlxc.cgroup2.devices.allow = c 195:0 rwm")
    return {
        "name": "gpu",
        "path": str(tmp_path / "config"),
        "state_dir": str(tmp_path / "state"),
        "nodes": [{"path": "/dev/nvidia0", "major": 195, "minor": 0, "kind": "char"}],
    }


@pytest.mark.parametrize("check", [True, False])
def test_a_config_with_bytes_that_are_no_utf_8_keeps_them(run, guest, check: bool) -> None:
    done = run("guest_config", check, **guest)
    assert done["changed"]
    assert "\ufffd\ufffd" in done["diff"]["before"]
    after = Path(guest["path"]).read_bytes()
    assert b"# \xff\xfe\r\n" in after
    assert (b"c 195:0 rw\r\n" in after) is not check


# -- servers that a profile's port may turn out to have -----------------------------------------------------------


@pytest.fixture
def server() -> Iterator[Callable[[Callable[[socket.socket], None]], int]]:
    """Start a server that treats each connection by a function; returns its port."""
    listeners: list[socket.socket] = []

    def start(treat: Callable[[socket.socket], None]) -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=treat, args=(connection,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        return int(listener.getsockname()[1])

    yield start
    for listener in listeners:
        listener.close()


def answering(body: bytes, head: bytes = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"):
    def treat(connection: socket.socket) -> None:
        with connection:
            connection.recv(65536)
            connection.sendall((head % len(body) if b"%d" in head else head) + body)

    return treat


def dribbling(connection: socket.socket) -> None:
    with connection:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        try:
            for _ in range(600):
                connection.sendall(b" ")
                time.sleep(0.1)
        except OSError:
            return


def silent(connection: socket.socket) -> None:
    with connection:
        time.sleep(30)


def endless(connection: socket.socket) -> None:
    with connection:
        connection.recv(65536)
        try:
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                connection.sendall(b"x" * (1 << 16))
        except OSError:
            return


@pytest.mark.parametrize(
    "treat",
    [
        answering(b"", b"220 mail.example.org ESMTP\r\n"),
        answering(b"\x00\xff\x16\x03", b""),
        answering(b"short", b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n"),
        answering(b"", b"HTTP/1.1 500 No\r\nContent-Length: 999\r\n\r\n"),
        answering(b"", b"HTTP/1.1 302 Found\r\nLocation: /v1/models\r\nContent-Length: 0\r\n\r\n"),
        answering(b"[]"),
        answering(b"null"),
        answering(b'{"data": null}'),
        answering(b'{"data": [1, null]}'),
        answering(b"\xff" * 100),
        dribbling,
        silent,
        endless,
    ],
    ids=[
        "smtp",
        "binary",
        "cut",
        "cut-error",
        "redirect",
        "list",
        "null",
        "no-data",
        "odd-rows",
        "not-utf-8",
        "dribbling",
        "silent",
        "endless",
    ],
)
def test_a_port_with_something_else_behind_is_a_problem_and_no_success(run, module, server, monkeypatch, treat) -> None:
    ready = module("engine_ready")
    monkeypatch.setattr(ready, "unit_show", lambda _unit: {"ActiveState": "active", "NRestarts": "0"})
    monkeypatch.setattr(ready, "unit_log", lambda *_: [])
    monkeypatch.setattr(ready, "REQUEST_S", 1.0)
    monkeypatch.setattr(ready, "CALL_S", 0.3)
    target = {
        "name": "chat",
        "unit": "specrig-sglang@chat.service",
        "port": server(treat),
        "served_model_name": "Qwen3.6-27B",
        "start_timeout_s": 0.7,
    }
    monkeypatch.setattr(ready.serving, "summary_row", lambda *_: {})
    begun = time.monotonic()
    done = run("engine_ready", targets=[target])
    assert done.get("failed"), done
    assert done["rows"][0]["problem"]
    assert not done["rows"][0]["ready"]
    assert time.monotonic() - begun < 10
