"""The shapes of answers: SGLang's /generate and both OpenAI routes, streamed and whole, and what faults do to them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec

from specrig.sim.clock import unix
from specrig.sim.config import Config
from specrig.sim.http import Connection
from specrig.sim.scheduler import Delta, Request

_encode = msgspec.json.encode
DONE = b"[DONE]"
_BREAKS = ("error-in-stream", "eof-without-done", "reset")


def completion_count(config: Config, request: Request, sent: int) -> int:
    """The count of generated tokens as the server reports it."""
    off = config.faults.get("count-off", request.number)
    return sent + (int(off.number) if off is not None else 0)


def prompt_count(config: Config, request: Request) -> int:
    """The count of prompt tokens as the server reports it."""
    off = config.faults.get("prompt-count-off", request.number)
    return len(request.ids) + (int(off.number) if off is not None else 0)


def reasoning_count(config: Config, request: Request, sent: int) -> int:
    """The count of reasoning tokens as the server reports it."""
    if config.faults.get("reasoning-overcount", request.number) is not None:
        return completion_count(config, request, sent) + 1
    return min(request.reasoning_tokens, sent)


def speculation(config: Config, request: Request, sent: int) -> dict[str, Any]:
    """The ``spec_*`` figures of one request; empty where no verify step happened."""
    steps, correct, histogram = request.verify_steps, request.correct, list(request.histogram)
    if not steps and config.method.algorithm is None and config.faults.get("spec-on", request.number) is not None:
        steps, correct, histogram = sent, 0, [sent]
    if not steps:
        return {}
    if config.faults.get("accept-over-bound", request.number) is not None:
        correct = steps * (config.method.depth + 2)
    proposed = steps * (config.method.verified - 1)
    return {
        "spec_accept_rate": correct / proposed if proposed else 0.0,
        "spec_accept_length": completion_count(config, request, sent) / steps,
        "spec_num_correct_drafts": correct,
        "spec_num_proposed_drafts": proposed,
        "spec_verify_ct": steps,
        "spec_correct_drafts_histogram": histogram,
    }


class Stream:
    """An event stream on a connection, with the faults that strike streams.

    Args:
        connection: an open one; the head is sent at once.
        config: the server.
        number: of the request, from 1.
    """

    def __init__(self, connection: Connection, config: Config, number: int) -> None:
        self.connection = connection
        self._config = config
        faults = config.faults
        comments = faults.get("keepalive-comments", number)
        self._comments = b": keep-alive\n\n" * int(comments.number) if comments is not None else b""
        self._variants = faults.get("sse-variants", number) is not None
        split = faults.get("split-utf8", number)
        self._split_s = split.number / 1000 if split is not None else None
        self._rest = b""
        self._count = 0
        self._without_done = faults.get("done-missing", number) is not None
        found = [(name, faults.get(name, number)) for name in _BREAKS]
        self._breaks = [(name, fault.number) for name, fault in found if fault is not None]
        connection.start_stream()
        if self._comments:
            connection.write(connection.chunk(self._comments))

    def event(self, payload: bytes) -> bytes:
        """The bytes on the wire of one event."""
        self._count += 1
        if self._variants:
            first, rest = (payload[:1], payload[1:]) if payload.startswith(b"{") else (b"", payload)
            lines = b"data:%b\r\ndata:%b" % (first, rest) if first else b"data:%b" % rest
            data = b"id: %d\r\nevent: message\r\n%b\r\n\r\n" % (self._count, lines)
        else:
            data = b"data: %b\n\n" % payload
        return self.connection.chunk(self._comments + data)

    def breaks(self, sent: int) -> str | None:
        """The name of the fault that breaks the stream off now that `sent` tokens are out, or None."""
        for name, after in self._breaks:
            if sent >= after:
                return name
        return None

    def write(self, data: bytes) -> None:
        """Send bytes, what was held back first."""
        if self._rest:
            self._flush_rest()
        if self._split_s is None:
            self.connection.write(data)
            return
        at = next((place for place, byte in enumerate(data) if byte >= 0xC2), len(data) // 2) + 1
        self.connection.write(data[:at])
        self._rest = data[at:]
        asyncio.get_running_loop().call_later(self._split_s, self._flush_rest)

    def _flush_rest(self) -> None:
        rest, self._rest = self._rest, b""
        if rest:
            self.connection.write(rest)

    def finish(self, data: bytes) -> None:
        """Send the last events, the terminal event and the end."""
        self.write(data if self._without_done else data + self.event(DONE))
        self._flush_rest()
        self.connection.end_stream(complete=True)

    def break_off(self, how: str, data: bytes) -> None:
        """Send bytes and then do what the fault says."""
        self.write(data)
        self._flush_rest()
        if how == "reset":
            asyncio.get_running_loop().call_later(0.002, self.connection.reset)
        elif how == "eof-without-done":
            self.connection.end_stream(complete=True)
        else:
            error = {
                "error": {
                    "message": "Internal error in the scheduler",
                    "type": "internal_server_error",
                    "code": 500,
                    "retryable": False,
                }
            }
            self.connection.write(self.event(_encode(error)) + self.event(DONE))
            self.connection.end_stream(complete=True)


class Native:
    """SGLang's /generate.

    Args:
        stream: None for a whole answer.
    """

    def __init__(self, connection: Connection, config: Config, stream: Stream | None) -> None:
        self._connection = connection
        self._config = config
        self._stream = stream
        self._incremental = bool(config.args.get("incremental_streaming_output"))
        self._text = b""
        self._ids = b""
        self._head: bytes | None = None
        self._sent = 0

    def _meta(self, request: Request, finish: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "id": request.rid,
            "finish_reason": finish,
            "prompt_tokens": prompt_count(self._config, request),
            "weight_version": "default",
            "num_retractions": 0,
            "storage_prefetch_wait": 0.0,
            "storage_staging_wait": 0.0,
            "forward_entry_time": unix(request.admitted) if request.admitted else None,
            "prefill_finished_time": unix(request.prefill_done) if request.prefill_done else None,
            "queue_time": (request.admitted - request.arrived) if request.admitted else 0.0,
        }

    def _last(self, request: Request, delta: Delta) -> dict[str, Any]:
        config = self._config
        completion = completion_count(config, request, self._sent)
        first = request.times[0] if request.times else delta.at
        meta = self._meta(request, delta.finish) | {
            "reasoning_tokens": reasoning_count(config, request, self._sent),
            "completion_tokens": completion,
            "cached_tokens": request.cached,
            "weight_versions": [{"version": "default", "start": 0, "end": completion}],
            "cached_tokens_details": {"device": request.cached, "host": 0},
            "dp_rank": None,
            "e2e_latency": delta.at - request.arrived,
            "request_received_ts": unix(request.arrived),
            "response_sent_to_client_ts": unix(first if self._stream is not None else delta.at),
        }
        if config.args.get("enable_metrics"):
            span = delta.at - first
            meta |= {
                "first_token_latency": first - request.arrived,
                "api_server_dispatch_finish_ts": unix(request.arrived),
                "request_finished_ts": unix(delta.at),
                "decode_throughput": completion / span if span > 0 else 0.0,
            }
        return meta | speculation(config, request, self._sent)

    def prepare(self, request: Request, delta: Delta) -> Callable[[], bool]:
        """See `specrig.sim.scheduler.Sink`."""
        text = b"".join(_encode(piece)[1:-1] for _, piece in delta.segments)
        ids = b",".join(b"%d" % token for token in delta.ids)
        self._sent += len(delta.ids)
        if self._incremental and self._stream is not None:
            self._text, self._ids = text, ids
        else:
            self._text += text
            self._ids = b"%b,%b" % (self._ids, ids) if self._ids and ids else self._ids + ids
        if delta.finish is None and self._stream is None:
            return lambda: False
        body = b'{"text":"%b","output_ids":[%b],"meta_info":' % (self._text, self._ids)
        if delta.finish is not None:
            body += _encode(self._last(request, delta)) + b"}"
        else:
            if self._head is None:
                self._head = _encode(self._meta(request, None))[:-1]
            body += self._head + (
                b',"reasoning_tokens":%d,"completion_tokens":%d,"cached_tokens":%d,"cached_tokens_details":'
                b'{"device":%d,"host":0},"dp_rank":null%b}}'
                % (
                    reasoning_count(self._config, request, self._sent),
                    completion_count(self._config, request, self._sent),
                    request.cached,
                    request.cached,
                    b"" if request.times else b',"response_sent_to_client_ts":%.7f' % unix(delta.at),
                )
            )
        stream = self._stream
        if stream is None:
            return self._whole(delta, body)
        frame = stream.event(body)
        return _writer(stream, frame, self._sent, done=delta.finish is not None)

    def _whole(self, delta: Delta, body: bytes) -> Callable[[], bool]:
        reason = delta.finish or {}
        status = 200
        if reason.get("type") == "abort" and reason.get("status_code"):
            status, body = int(reason["status_code"]), _encode({"error": {"message": reason["message"]}})

        def write() -> bool:
            self._connection.on_lost = None
            self._connection.respond(status, body)
            return False

        return write


def _writer(stream: Stream, frame: bytes, sent: int, *, done: bool) -> Callable[[], bool]:
    how = None if done else stream.breaks(sent)

    def write() -> bool:
        if done:
            stream.finish(frame)
            return False
        if how is not None:
            stream.break_off(how, frame)
            return True
        stream.write(frame)
        return False

    return write


def openai_error(message: str, kind: str, code: int) -> dict[str, Any]:
    """The body of an error on the OpenAI routes."""
    return {"object": "error", "message": message, "type": kind, "param": None, "code": code}


class OpenAI:
    """Both OpenAI routes.

    Args:
        chat: /v1/chat/completions; else /v1/completions.
        stream: None for a whole answer.
        include_usage: the stream ends with a usage chunk.
        continuous: every chunk carries usage.
        details: the ``sglext`` chunk with the speculative figures was asked for.
    """

    def __init__(
        self,
        connection: Connection,
        config: Config,
        stream: Stream | None,
        *,
        chat: bool,
        model: str,
        include_usage: bool = False,
        continuous: bool = False,
        details: bool = False,
    ) -> None:
        self._connection = connection
        self._config = config
        self._stream = stream
        self._chat = chat
        self._model = model
        self._include_usage = include_usage
        self._continuous = continuous
        self._details = details
        self._created = int(time.time())
        self._sent = 0
        self._role_sent = False
        self._content: list[str] = []
        self._reasoning: list[str] = []

    def role_early(self, rid: str) -> None:
        """Send the role-only chunk now."""
        assert self._stream is not None
        self._stream.write(self._stream.event(self._chunk(rid, self._role(), None, None)))
        self._role_sent = True

    @staticmethod
    def _role() -> dict[str, Any]:
        return {"reasoning_content": None, "role": "assistant", "content": ""}

    def _usage(self, request: Request) -> dict[str, Any]:
        config = self._config
        prompt = prompt_count(config, request)
        completion = completion_count(config, request, self._sent)
        reasoning = reasoning_count(config, request, self._sent)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
        }
        report = config.args.get("enable_cache_report")
        if self._chat or report or self._stream is None:
            usage["prompt_tokens_details"] = {"cached_tokens": request.cached} if report else None
        usage["reasoning_tokens"] = reasoning
        if self._chat or self._stream is None:
            usage["completion_tokens_details"] = {"reasoning_tokens": reasoning} if reasoning else None
        return usage

    def _chunk(
        self, rid: str, delta: dict[str, Any] | str | None, finish: dict[str, Any] | None, usage: dict[str, Any] | None
    ) -> bytes:
        reason, matched = _openai_reason(finish)
        choice: dict[str, Any] = {"index": 0, "delta" if self._chat else "text": delta}
        choice |= {"logprobs": None, "finish_reason": reason, "matched_stop": matched}
        body: dict[str, Any] = {
            "id": rid,
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": [choice],
        }
        if usage is not None or not self._chat:
            body["usage"] = usage
        return _encode(body)

    def _tail(self, request: Request) -> list[bytes]:
        base: dict[str, Any] = {
            "id": request.rid,
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": [],
        }
        events = []
        spec = self._spec(request)
        if self._details and spec is not None:
            events.append(_encode(base | {"usage": None, "sglext": spec}))
        if self._include_usage and self._config.faults.get("usage-missing", request.number) is None:
            events.append(_encode(base | {"usage": self._usage(request)}))
        return events

    def _spec(self, request: Request) -> dict[str, Any] | None:
        spec = speculation(self._config, request, self._sent)
        if not spec:
            return None
        return {
            "routed_experts": None,
            "cached_tokens_details": None,
            "spec_tokens_details": spec
            | {"spec_cap_length": 0.0, "spec_block_accept_length": 0.0, "spec_cap_lens_histogram": []},
        }

    def prepare(self, request: Request, delta: Delta) -> Callable[[], bool]:
        """See `specrig.sim.scheduler.Sink`."""
        self._sent += len(delta.ids)
        stream = self._stream
        if stream is None:
            for reasoning, text in delta.segments:
                (self._reasoning if reasoning else self._content).append(text)
            return self._whole(request, delta) if delta.finish is not None else lambda: False
        reason = delta.finish or {}
        if reason.get("type") == "abort" and reason.get("status_code"):
            error = openai_error(str(reason["message"]), "BAD_REQUEST", int(reason["status_code"]))
            return _writer(stream, stream.event(_encode({"error": error})), self._sent, done=True)
        usage = self._usage(request) if self._continuous else None
        events: list[bytes] = []
        if self._chat:
            if not self._role_sent:
                self._role_sent = True
                events.append(self._chunk(request.rid, self._role(), None, usage))
            for reasoning, text in delta.segments:
                part: dict[str, Any] = (
                    {"reasoning_content": text, "content": None}
                    if reasoning
                    else {"reasoning_content": None, "content": text}
                )
                events.append(self._chunk(request.rid, part, None, usage))
            if delta.finish is not None:
                events.append(self._chunk(request.rid, {"reasoning_content": None}, delta.finish, usage))
        else:
            text = "".join(piece for _, piece in delta.segments)
            if text or delta.finish is not None:
                events.append(self._chunk(request.rid, text, delta.finish, usage))
        if delta.finish is not None:
            events += self._tail(request)
        frame = b"".join(stream.event(event) for event in events)
        return _writer(stream, frame, self._sent, done=delta.finish is not None)

    def _whole(self, request: Request, delta: Delta) -> Callable[[], bool]:
        reason, matched = _openai_reason(delta.finish)
        finish = delta.finish or {}
        status = 200
        if finish.get("type") == "abort" and finish.get("status_code"):
            status = int(finish["status_code"])
            body: dict[str, Any] = openai_error(str(finish["message"]), "BadRequestError", status)
        else:
            text = "".join(self._content)
            completion = completion_count(self._config, request, self._sent)
            choice: dict[str, Any] = {"index": 0}
            if self._chat:
                thought = "".join(self._reasoning) or None
                choice["message"] = {"role": "assistant", "content": text, "reasoning_content": thought}
            else:
                choice["text"] = text
            choice |= {"logprobs": None, "finish_reason": reason, "matched_stop": matched}
            body = {
                "id": request.rid,
                "object": "chat.completion" if self._chat else "text_completion",
                "created": self._created,
                "model": self._model,
                "choices": [choice],
                "usage": self._usage(request),
                "metadata": {
                    "weight_version": "default",
                    "weight_versions": [{"version": "default", "start": 0, "end": completion}],
                },
            }
            spec = self._spec(request)
            if self._details and spec is not None:
                body["sglext"] = spec
        data = _encode(body)

        def write() -> bool:
            self._connection.on_lost = None
            self._connection.respond(status, data)
            return False

        return write


def _openai_reason(finish: dict[str, Any] | None) -> tuple[str | None, int | str | None]:
    if finish is None:
        return None, None
    return str(finish["type"]), finish.get("matched")
