"""A server whose streams are known to the chunk: what it sends, when it is due, and stamps of when it came to pass.

`POST /scenario` says how requests that ask for `asked` tokens are answered; all others (warm-ups, readiness checks) get
what they ask for at once. `GET /truth` has the stamps, seconds of the monotonic clock. One thread, blocking sends, no
sleep while a stream runs: on a core of its own a chunk leaves within microseconds of when it is due.
"""

from __future__ import annotations

import heapq
import json
import select
import socket
import struct
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

clock = time.monotonic
MODEL = "truth"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"
ROUTES = {"/v1/chat/completions": "chat", "/v1/completions": "text", "/generate": "native"}
LATE_S = 2.0
"""How long streams that start together wait for the last of them."""


def framed(data: bytes) -> bytes:
    """Data as one piece of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(body: dict[str, Any]) -> bytes:
    """A body as a server-sent event, a piece of its own."""
    return framed(b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n")


class Writer:
    """The pieces of one answer, in the words of its route."""

    def __init__(self, route: str, body: dict[str, Any], words: list[tuple[str, int]], prompt_tokens: int) -> None:
        self.route, self.words, self.prompt_tokens = route, words, prompt_tokens
        options = body.get("stream_options") or {}
        self.usage = bool(options.get("include_usage"))
        self.running = self.usage and bool(options.get("continuous_usage_stats"))

    def _usage(self, tokens: int) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self.prompt_tokens + tokens,
            "prompt_tokens_details": None,
        }

    def _open(self, choices: list[dict[str, Any]], tokens: int, usage: bool) -> bytes:
        name = "chat.completion.chunk" if self.route == "chat" else "text_completion"
        head = {"id": "8dbe0a083c0c49fcaba647167798bf53", "object": name, "created": 1796107498, "model": MODEL}
        return event({**head, "choices": choices, "usage": self._usage(tokens) if usage else None})

    def _choice(self, text: str | None, reason: str | None, **more: str) -> dict[str, Any]:
        said: dict[str, Any] = {"text": text or ""}
        if self.route == "chat":
            delta = {"reasoning_content": None, **more} | ({} if text is None else {"content": text})
            said = {"delta": delta}
        return {"index": 0, **said, "logprobs": None, "finish_reason": reason, "matched_stop": None}

    def role(self) -> bytes:
        """The chunk that only names the role; nothing where the route has none."""
        return self._open([self._choice("", None, role="assistant")], 0, False) if self.route == "chat" else b""

    def chunk(self, number: int, k: int, tokens: int, last: str | None) -> bytes:
        """Chunk `number`, with k tokens, `tokens` so far; `last` is the finish reason of the last one."""
        taken = [self.words[(number * k + at) % len(self.words)] for at in range(k)]
        text = "".join(word for word, _ in taken)
        if self.route != "native":
            return self._open([self._choice(text, None)], tokens, self.running)
        meta = {
            "id": "b8c1", "finish_reason": {"type": last, "length": tokens} if last else None,
            "prompt_tokens": self.prompt_tokens, "weight_version": "default", "num_retractions": 0,
            "reasoning_tokens": 0, "completion_tokens": tokens, "cached_tokens": 0, "cached_tokens_details": None,
            "dp_rank": None,
        }  # fmt: skip
        return event({"text": text, "output_ids": [token for _, token in taken], "meta_info": meta})

    def end(self, tokens: int, reason: str) -> bytes:
        """What follows the last chunk."""
        pieces = b""
        if self.route != "native":
            pieces = self._open([self._choice(None, reason)], tokens, self.running)
            pieces += self._open([], tokens, True) if self.usage else b""
        return pieces + framed(DONE) + END

    def error(self) -> bytes:
        """An error inside HTTP 200, as this engine sends it."""
        return event({"error": {"object": "error", "message": "out of memory", "code": 500}}) + framed(DONE) + END


class Server:
    """Connections, requests, and what is due when."""

    def __init__(self, tokenizer: str) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        found = [self.tokenizer.encode(f" {word}") for word in ("the", "of", "and", "is", "for", "with", "time", "new")]
        self.words = [(self.tokenizer.decode(ids), ids[0]) for ids in found if len(ids) == 1]
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.epoll = select.epoll()
        self.epoll.register(self.listener.fileno(), select.EPOLLIN)
        self.connections: dict[int, tuple[socket.socket, bytearray]] = {}
        self.due: list[tuple[float, int, Any]] = []
        self.number = count()
        self.scenario: dict[str, Any] = {}
        self.waiting: list[tuple[socket.socket, dict[str, Any], Writer]] = []
        self.truth: list[dict[str, Any]] = []
        self.cache: dict[tuple[Any, ...], list[bytes]] = {}

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until the process is ended. What came is stamped first, all of it, and read afterwards."""
        print(self.listener.getsockname()[1], flush=True)
        sends = 0
        inbox: list[tuple[int, float]] = []
        while True:
            now = clock()
            if self.due and self.due[0][0] <= now:
                _, _, step = heapq.heappop(self.due)
                step(now)
                sends += 1
                if sends % 64:
                    continue
            wait = 0.0 if inbox else None
            if self.due and not inbox:
                wait = max(0.0, self.due[0][0] - now - 0.002)
            ready = self.epoll.poll(wait)
            for fd, _ in ready:
                if fd == self.listener.fileno():
                    self._accept()
                else:
                    self._receive(fd)
                    inbox.append((fd, clock()))
            if not ready:
                for fd, moment in inbox:
                    self._requests(fd, moment)
                inbox.clear()

    def _accept(self) -> None:
        connection, _ = self.listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 20, 0))
        self.connections[connection.fileno()] = (connection, bytearray())
        self.epoll.register(connection.fileno(), select.EPOLLIN)

    def _receive(self, fd: int) -> None:
        connection, buffer = self.connections[fd]
        try:
            data = connection.recv(1 << 18)
        except OSError:
            data = b""
        buffer += data
        if not data:
            self.epoll.unregister(fd)
            del self.connections[fd]
            connection.close()

    def _requests(self, fd: int, moment: float) -> None:
        """Answer the requests that a connection's buffer holds whole; its last bytes came at that moment."""
        connection, buffer = self.connections.get(fd, (None, bytearray()))
        while connection is not None and (end := buffer.find(b"\r\n\r\n")) >= 0:
            lines = bytes(buffer[:end]).decode("latin-1").split("\r\n")
            size = next((int(line[15:]) for line in lines if line.lower().startswith("content-length:")), 0)
            if len(buffer) < end + 4 + size:
                return
            body = bytes(buffer[end + 4 : end + 4 + size])
            del buffer[: end + 4 + size]
            method, path = lines[0].split(" ")[:2]
            self._answer(connection, method, path.partition("?")[0], body, moment)

    def _answer(self, connection: socket.socket, method: str, path: str, body: bytes, now: float) -> None:
        route = ROUTES.get(path)
        if method == "POST" and route:
            self._ask(connection, route, json.loads(body), now)
            return
        value: Any = {}
        status = 200
        if path == "/scenario":
            self.scenario, self.truth, self.cache = json.loads(body), [], {}
        elif path == "/truth":
            value = [{key: kept for key, kept in row.items() if key != "prompt"} for row in self.truth]
        elif path == "/v1/models":
            value = {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 131072}]}
        elif path == "/tokenize":
            wanted = json.loads(body)
            value = {
                "tokens": self._templated(wanted) if "messages" in wanted else self.tokenizer.encode(wanted["prompt"])
            }
        elif path in ("/server_info", "/get_server_info"):
            value = {"served_model_name": MODEL, "model_path": MODEL, "tp_size": 1, "max_total_num_tokens": 1 << 24,
                     "max_running_requests": 4096, "context_length": 131072, "version": "truth",
                     "internal_states": [{}]}  # fmt: skip
        elif path in ("/model_info", "/get_model_info"):
            value = {"model_path": MODEL, "is_generation": True}
        elif path not in ("/health", "/health_generate", "/ready", "/flush_cache", "/abort_request"):
            status = 404
        data = b"Cache flushed.\n" if path == "/flush_cache" else json.dumps(value).encode()
        head = b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(data))
        self._send(connection, head + data)

    def _send(self, connection: socket.socket, data: bytes) -> bool:
        try:
            connection.sendall(data)
        except OSError:  # the client is gone, or has read nothing for 20 s
            return False
        return True

    # -- streams -------------------------------------------------------------------------------------------------------

    def _templated(self, body: dict[str, Any]) -> list[int]:
        """The ids of messages, the chat template included."""
        options = body.get("chat_template_kwargs") or {}
        text = self.tokenizer.apply_chat_template(
            body["messages"], tokenize=False, add_generation_prompt=True, tools=body.get("tools"), **options
        )
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _prompt_tokens(self, route: str, body: dict[str, Any]) -> int:
        """What a model would read."""
        if route == "chat":
            return len(self._templated(body))
        prompt: Any = (body.get("input_ids") or body["text"]) if route == "native" else body["prompt"]
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            prompt = prompt[0]
        return len(self.tokenizer.encode(prompt)) if isinstance(prompt, str) else len(prompt)

    def _ask(self, connection: socket.socket, route: str, body: dict[str, Any], now: float) -> None:
        sampling = body.get("sampling_params") or {}
        wanted = sampling.get("max_new_tokens") or body.get("max_completion_tokens") or body.get("max_tokens") or 16
        if wanted != self.scenario.get("asked"):
            writer = Writer(route, body, self.words, self._prompt_tokens(route, body))
            if body.get("stream"):
                whole = writer.role() + writer.chunk(0, wanted, wanted, "length") + writer.end(wanted, "length")
                self._send(connection, HEAD + whole)
                return
            data = json.dumps({"choices": [{"index": 0, "text": "", "message": {"role": "assistant", "content": "x"},
                                            "finish_reason": "length"}], "usage": writer._usage(wanted),
                               "text": "x", "meta_info": {"completion_tokens": wanted}}).encode()  # fmt: skip
            self._send(connection, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data))
            return
        row: dict[str, Any] = {"received": now, "sent": [], "k": [], "route": route, "prompt_tokens": 0, "prompt": body}
        self.truth.append(row)
        group = self.waiting
        writer = Writer(route, body, self.words, 0)
        group.append((connection, row, writer))
        if (early := self.scenario.get("role_s")) is not None:
            begin = HEAD + writer.role()
            heapq.heappush(self.due, (now + early, next(self.number), lambda _now: self._send(connection, begin)))
        if len(group) >= self.scenario.get("together", 1):
            # counting a long prompt takes milliseconds: not while others may arrive
            wait = self.scenario.get("prefill_s", 0.0) / 2
            self.waiting = []
            heapq.heappush(self.due, (now + wait, next(self.number), lambda _now: self._start(group)))
        elif len(group) == 1:
            heapq.heappush(self.due, (now + LATE_S, next(self.number), lambda _now: self._start(group)))

    def _start(self, group: list[tuple[socket.socket, dict[str, Any], Writer]]) -> None:
        """Start the streams that wait together: all are there, or the time is up; a second call finds none."""
        if group is self.waiting:
            self.waiting = []
        streams = group[:]
        group.clear()
        for _, row, writer in streams:
            row["prompt_tokens"] = writer.prompt_tokens = self._prompt_tokens(row["route"], row["prompt"])
            self._pieces(writer, self.scenario["chunks"], self.scenario["k"])
        plan = self.scenario
        gap = 1 / plan["rate"] if plan.get("rate") else 0.0
        faults = plan.get("faults") or [None]
        begin = clock() + 0.05
        for at, (connection, row, writer) in enumerate(streams):
            fault = faults[self.truth.index(row) % len(faults)]
            if "rate" in plan:
                first, step = begin + at * gap, gap * len(streams)
            else:
                first, step = row["received"] + plan["prefill_s"], plan["interval_s"]
            self._plan(connection, row, writer, fault, first, step)

    def _pieces(self, writer: Writer, chunks: int, k: int) -> list[bytes]:
        """The chunks of an answer; equal answers share them, and in a run they are made beforehand."""
        key = (writer.route, writer.running, writer.prompt_tokens, chunks, k)
        if key not in self.cache:
            made = [writer.chunk(at, k, (at + 1) * k, "length" if at == chunks - 1 else None) for at in range(chunks)]
            self.cache[key] = made
        return self.cache[key]

    def _plan(
        self,
        connection: socket.socket,
        row: dict[str, Any],
        writer: Writer,
        fault: str | None,
        first: float,
        step: float,
    ) -> None:
        chunks, k = self.scenario["chunks"], self.scenario.get("k", 1)
        early = self.scenario.get("role_s") is not None
        if fault:
            chunks = chunks // 4
        pieces = self._pieces(writer, chunks, k)
        reason = "length" if fault is None else "stop"
        tail = {"error": writer.error(), "cut": END}.get(fault or "", writer.end(chunks * k, reason))
        if fault == "early" and writer.route == "native":
            pieces = [*pieces[:-1], writer.chunk(chunks - 1, k, chunks * k, "stop")]
        row["ok"] = fault in (None, "early")
        sent, ks, push, due, number, send = row["sent"], row["k"], heapq.heappush, self.due, self.number, self._send
        state = 0

        def chunk(_now: float) -> None:
            nonlocal state
            at, state = state, state + 1
            data = pieces[at]
            if at == 0 and not early:
                data = HEAD + writer.role() + data
            if state == chunks:
                data += tail
            sent.append(clock())
            ks.append(k)
            if send(connection, data) and state < chunks:
                push(due, (first + state * step, next(number), chunk))

        push(due, (first, next(number), chunk))


if __name__ == "__main__":
    Server(str(Path(sys.argv[1]))).run()
