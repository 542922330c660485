"""Servers that trickle, never end or speak something else, and URLs and keys that are none: one line, in time."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from specrig.engine import client as module
from specrig.engine.client import EngineClient, without_secrets
from specrig.engine.errors import EngineError
from specrig.errors import UsageError
from specrig.load.stream import StreamClient

OK = b"HTTP/1.1 200 OK\r\n"
Treat = Callable[[socket.socket], None]


@pytest.fixture
def server() -> Iterator[Callable[[Treat], str]]:
    """Start a server that treats each connection by a function; returns its URL."""
    listeners: list[socket.socket] = []

    def start(treat: Treat) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def one(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                connection.recv(65536)
                treat(connection)

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    threading.Thread(target=one, args=(connection,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for listener in listeners:
        listener.close()


def trickle(start: bytes, drop: bytes) -> Treat:
    def treat(connection: socket.socket) -> None:
        connection.sendall(start)
        for _ in range(300):
            connection.sendall(drop)
            time.sleep(0.05)

    return treat


@pytest.mark.parametrize(
    "treat",
    [trickle(OK, b"X-A: b\r\n"), trickle(OK + b"Content-Length: 9999\r\n\r\n", b" ")],
    ids=["headers", "body"],
)
def test_a_server_that_trickles_is_given_up_in_time(server: Callable[[Treat], str], treat: Treat) -> None:
    begun = time.monotonic()
    with (
        EngineClient(server(treat), timeout_s=0.2) as client,
        pytest.raises(EngineError, match=r"/server_info did not answer in 0\.2 s"),
    ):
        client.server_info()
    assert time.monotonic() - begun < 5


def test_an_answer_without_end_is_given_up(server: Callable[[Treat], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LARGEST", 1 << 20)
    url = server(lambda connection: connection.sendall(OK + b"\r\n" + b"x" * (8 << 20)))
    with EngineClient(url) as client, pytest.raises(EngineError, match="no end after 1 MiB"):
        client.server_info()


@pytest.mark.parametrize("make", [EngineClient, lambda url, key=None: StreamClient(url, api_key=key)])
def test_what_is_no_server_or_no_key_is_refused_before_anything_is_sent(make: Callable[..., object]) -> None:
    for url in (
        "http://",
        "http://127.0.0.1:99999",
        "http://127.0.0.1:0",
        "http://127.0.0.1:9/a b",
        "http://" + "a" * 300 + ":1",
        "ftp://x",
        "127.0.0.1:30000",
    ):
        with pytest.raises(UsageError, match=r"expected (http://HOST:PORT|the port)"):
            make(url)
    with pytest.raises(UsageError) as secret:
        make("http://ann:hunter2@127.0.0.1:9")
    assert "hunter2" not in str(secret.value)
    for key in ("a\nX-Admin: 1", "☃", "a b"):
        with pytest.raises(UsageError) as told:
            make("http://127.0.0.1:9", key)
        assert key not in str(told.value)


def test_keys_in_what_a_server_tells_of_itself_are_replaced() -> None:
    line = "sglang serve --api-key=k1 --admin-api-key 'k2 with spaces' --hf_token k3 --max-total-tokens 20000"
    told = {"launch_command": line, "internal_states": [{"admin_api_key": "k4", "api_key": None}], "served": "k"}
    assert without_secrets(told) == {
        "launch_command": "sglang serve --api-key=<redacted> --admin-api-key <redacted> --hf_token <redacted> "
        "--max-total-tokens 20000",
        "internal_states": [{"admin_api_key": "<redacted>", "api_key": None}],
        "served": "k",
    }
