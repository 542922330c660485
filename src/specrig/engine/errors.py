"""Every shape in which SGLang, or an OpenAI-compatible server, says no: one message and one class of error."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from specrig.errors import SpecrigError, printable

Kind = Literal[
    "context", "kv", "unauthorized", "busy", "not-ready", "not-found", "bad-request", "aborted", "server", "unknown"
]
"""context: the request does not fit the context window. kv: it does not fit the KV pool. busy: the server refuses for
now. aborted: accepted, then given up. The others follow the HTTP status."""

_CONTEXT = re.compile(
    r"longer than the model's context length|maximum context length|max_completion_tokens is too large"
    r"|max_tokens is too large",
    re.IGNORECASE,
)
_KV = re.compile(r"exceeds the maximum allowed length|KV memory budget|KV cache pool", re.IGNORECASE)
_BUSY = re.compile(r"flush cache failed|already in progress|waiting for idle|queue is full|too many", re.IGNORECASE)
_TAG = re.compile(r"<[^>]+>")
_LIMIT = 600


class EngineError(SpecrigError):
    """A control call to an engine that did not succeed.

    Attributes:
        status: the HTTP status, or None where no answer came.
        kind: what sort of refusal it was, see `Kind`.
    """

    def __init__(self, text: str, *, status: int | None = None, kind: Kind = "unknown") -> None:
        super().__init__(text)
        self.status = status
        self.kind = kind


def _one_line(text: str) -> str:
    line = " ".join(printable(text).split())
    return line if len(line) <= _LIMIT else line[: _LIMIT - 1] + "…"


def _from_value(value: Any) -> str | None:
    """The message in a decoded body: SGLang native, OpenAI, FastAPI and stream shapes, and abort finish reasons."""
    if isinstance(value, str):
        return value or None
    if isinstance(value, list):
        parts = [part for part in map(_from_value, value) if part]
        return "; ".join(parts) or None
    if not isinstance(value, dict):
        return None
    for key in ("error", "message", "detail", "msg"):
        if value.get(key):
            found = _from_value(value[key])
            if found:
                return found
    meta = value.get("meta_info")
    reason = meta.get("finish_reason") if isinstance(meta, dict) else value.get("finish_reason")
    if isinstance(reason, dict) and reason.get("type") == "abort":
        return str(reason.get("message") or "aborted by the server")
    return None


def _decode(body: str | bytes) -> Any:
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else body
    text = text.strip()
    if text.startswith("data:"):
        for line in text.splitlines():
            payload = line.removeprefix("data:").strip()
            if line.startswith("data:") and payload != "[DONE]":
                text = payload
                break
    try:
        return msgspec.json.decode(text.encode()) if text else ""
    except (msgspec.DecodeError, RecursionError):
        return _TAG.sub(" ", text) if text.lower().startswith(("<!doctype", "<html")) else text


def message(status: int | None, body: str | bytes | dict[str, Any]) -> str:
    """The server's own words in one line, whatever shape they came in.

    Args:
        status: the HTTP status, or None for an event inside a stream.
        body: the body, or an already decoded object (an error event, an output with an abort reason).

    Returns:
        One line; where the body holds nothing, the status in words. Never empty.
    """
    found = _from_value(body if isinstance(body, dict) else _decode(body))
    if found and found.strip():
        return _one_line(found)
    if status is None:
        return "the server gave no message"
    return f"HTTP {status} without a message"


def classify(status: int | None, body: str | bytes | dict[str, Any]) -> Kind:
    """What sort of refusal an answer is; texts first, since SGLang answers 400, 200 or an abort for the same cause."""
    text = message(status, body)
    if _CONTEXT.search(text):
        return "context"
    if _KV.search(text):
        return "kv"
    if status in (401, 403):
        return "unauthorized"
    if status == 429 or _BUSY.search(text):
        return "busy"
    if status == 503:
        return "not-ready"
    if status in (404, 405):
        return "not-found"
    if status is not None and status >= 500:
        return "server"
    if status is not None and status >= 400:
        return "bad-request"
    value = body if isinstance(body, dict) else _decode(body)
    if isinstance(value, dict):
        error = value.get("error")
        code = error.get("code") if isinstance(error, dict) else value.get("code")
        if isinstance(code, int) and code != status and code >= 400:
            return classify(code, body)
        if error is None and _from_value(value) is not None and ("meta_info" in value or "finish_reason" in value):
            return "aborted"
    return "unknown"
