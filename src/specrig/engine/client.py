"""Control calls to a running engine: what it is, what it can hold, one completion, flush, abort.

Measurements never go through here: the stream client of `specrig.load` does those. Endpoint names of older SGLang
versions are tried where the present ones are not found.
"""

from __future__ import annotations

import re
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import httpx

from specrig.engine.endpoint import check_endpoint
from specrig.engine.errors import EngineError, classify, message
from specrig.errors import UsageError

_GRACE_S = 1.0
_LARGEST = 256 << 20
_SECRETS = {"api_key", "admin_api_key", "ssl_keyfile_password", "watermark_key", "watermark_key_b", "hf_token"}
_SECRET_OPTIONS = re.compile(
    rf"(--(?:{'|'.join(sorted(_SECRETS))})(?:=|\s+))(?:'[^']*'|\"[^\"]*\"|\S+)".replace("_", "[-_]"), re.ASCII
)


def without_secrets(value: Any) -> Any:
    """What a server says of itself, without the keys that it gives away with it, on its command line too."""
    if isinstance(value, str):
        return _SECRET_OPTIONS.sub(r"\1<redacted>", value)
    if isinstance(value, dict):
        return {
            name: "<redacted>" if name in _SECRETS and item is not None else without_secrets(item)
            for name, item in value.items()
        }
    return [without_secrets(item) for item in value] if isinstance(value, list) else value


def _read(response: httpx.Response, until: float) -> bytes:
    """The body of an answer; an error where it is without end or takes too long."""
    body = bytearray()
    for piece in response.iter_bytes():
        body += piece
        if len(body) > _LARGEST:
            raise httpx.ReadError(f"its answer has no end after {_LARGEST >> 20} MiB")
        if time.monotonic() > until:
            raise TimeoutError
    return bytes(body)


class EngineClient:
    """A synchronous client for the control endpoints of SGLang, or of an OpenAI-compatible server.

    Args:
        base_url: such as ``http://127.0.0.1:30000``; a trailing ``/v1`` is dropped.
        api_key: sent as a bearer token.
        timeout_s: for every call that has no timeout of its own.
        ca_file: certificates to trust instead of the usual ones, for https.

    Raises:
        UsageError: the URL, the key or the file cannot be used.
    """

    def __init__(
        self, base_url: str, api_key: str | None = None, *, timeout_s: float = 10.0, ca_file: str | None = None
    ) -> None:
        url = base_url.rstrip("/").removesuffix("/v1")
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise UsageError(f"the engine's URL {base_url!r} can't be read: {error}") from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise UsageError(f"the engine's URL is {base_url!r}; expected http://HOST:PORT")
        self.base_url = url
        check_endpoint(base_url, api_key)
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s
        # reading all the certificates there are takes longer than every call of a short load: only where there is TLS,
        # and no redirect is followed, so that plain HTTP stays that
        verify: bool | ssl.SSLContext = parsed.scheme == "https"
        if verify and ca_file is not None:
            try:
                verify = ssl.create_default_context(cafile=ca_file)
            except OSError as error:
                raise UsageError(f"{ca_file}: cannot read certificates: {error.strerror or error}") from error
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout_s, trust_env=False, verify=verify)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _send(self, method: str, path: str, *, timeout_s: float | None = None, **kwargs: Any) -> httpx.Response:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            return self._whole(method, path, limit_s, **kwargs)
        except (httpx.TimeoutException, TimeoutError) as error:
            raise EngineError(f"{self.base_url}{path} did not answer in {limit_s:g} s") from error
        except httpx.HTTPError as error:
            raise EngineError(
                f"{self.base_url}{path} can't be reached: {error}; is the server running there?"
            ) from error

    def _whole(self, method: str, path: str, limit_s: float, **kwargs: Any) -> httpx.Response:
        """One answer, read whole and within its time.

        A socket's timeout starts anew with every byte, so a server that trickles would be waited for without end: the
        call runs in a thread that is left behind when its time is up, and ends at the next piece it gets.

        Raises:
            TimeoutError: the time is up.
        """
        until = time.monotonic() + limit_s + _GRACE_S
        outcome: list[httpx.Response | BaseException] = []

        def call() -> None:
            try:
                with self._http.stream(method, path, timeout=limit_s, **kwargs) as response:
                    body = _read(response, until)
                    kept = [(name, value) for name, value in response.headers.items() if name != "content-encoding"]
                    outcome.append(
                        httpx.Response(response.status_code, headers=kept, content=body, request=response.request)
                    )
            except BaseException as error:
                outcome.append(error)

        thread = threading.Thread(target=call, name=f"specrig {method} {path}", daemon=True)
        thread.start()
        thread.join(limit_s + 2 * _GRACE_S)
        if not outcome:
            raise TimeoutError
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return outcome[0]

    def _object(self, method: str, *paths: str, timeout_s: float | None = None, **kwargs: Any) -> dict[str, Any]:
        response = None
        for path in paths:
            response = self._send(method, path, timeout_s=timeout_s, **kwargs)
            if response.status_code not in (404, 405):
                break
        assert response is not None
        if response.status_code != 200:
            raise self._error(response)
        value = self._json(response)
        if not isinstance(value, dict):
            raise EngineError(f"{response.url} answered a {type(value).__name__}; expected a JSON object", status=200)
        return value

    def _json(self, response: httpx.Response) -> Any:
        try:
            return response.json()
        except (ValueError, RecursionError) as error:
            raise EngineError(
                f"{response.url} answered {response.text[:60]!r}; expected a JSON object", status=response.status_code
            ) from error

    def _error(self, response: httpx.Response) -> EngineError:
        status = response.status_code
        return EngineError(
            f"{response.url} answered {status}: {message(status, response.content)}",
            status=status,
            kind=classify(status, response.content),
        )

    # -- what it is ----------------------------------------------------------------------------------------------

    def server_info(self) -> dict[str, Any]:
        """The engine's resolved arguments and state: ``/server_info``, or ``/get_server_info`` of older versions.

        It is kept in manifests, so keys and passwords in it are replaced.
        """
        info: dict[str, Any] = without_secrets(self._object("GET", "/server_info", "/get_server_info"))
        return info

    def model_info(self) -> dict[str, Any]:
        """``/model_info``, or ``/get_model_info`` of older versions."""
        return self._object("GET", "/model_info", "/get_model_info")

    def models(self) -> list[dict[str, Any]]:
        """The rows of ``/v1/models``; ``max_model_len`` there is the effective context length."""
        data = self._object("GET", "/v1/models").get("data")
        return [row for row in data if isinstance(row, dict)] if isinstance(data, list) else []

    def loads(self) -> list[dict[str, Any]]:
        """The rows of ``/v1/loads`` (running and waiting requests, tokens used), or of ``/get_load``."""
        response = self._send("GET", "/v1/loads")
        if response.status_code in (404, 405):
            response = self._send("GET", "/get_load")
        if response.status_code != 200:
            raise self._error(response)
        value = self._json(response)
        rows = value.get("loads") if isinstance(value, dict) else value
        return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []

    def metrics(self) -> str:
        """The text of ``/metrics``; an `EngineError` of kind ``not-found`` where metrics are off."""
        response = self._send("GET", "/metrics")
        if response.is_redirect:
            response = self._send("GET", "/metrics/")
        if response.status_code != 200:
            raise self._error(response)
        return response.text

    def health(self) -> bool:
        """Whether ``/health`` answers 200. A healthy server can still hang: readiness is `ready`, then a completion."""
        try:
            return self._send("GET", "/health", timeout_s=25.0).status_code == 200
        except EngineError:
            return False

    def ready(self) -> bool:
        """Whether ``/ready`` (``/health`` where that is not known) answers 200. False where nothing listens."""
        try:
            response = self._send("GET", "/ready")
            if response.status_code in (404, 405):
                response = self._send("GET", "/health", timeout_s=25.0)
        except EngineError:
            return False
        return response.status_code == 200

    def wait_ready(self, timeout_s: float, *, model: str | None = None, interval_s: float = 0.1) -> float:
        """Wait until the server answers one real completion.

        Args:
            timeout_s: how long to wait.
            model: the served model name it must answer for.
            interval_s: between two looks.

        Returns:
            The seconds waited.

        Raises:
            EngineError: not ready in time, or ready for another model.
        """
        begun = time.monotonic()
        last = "nothing listens"
        while True:
            try:
                if self.ready():
                    if model is not None:
                        self.check_model(model)
                    self.generate(text="Hello", max_new_tokens=2, timeout_s=max(1.0, timeout_s))
                    return time.monotonic() - begun
                last = "it is not ready yet"
            except EngineError as error:
                if error.kind == "bad-request" and error.status == 200:
                    raise
                last = str(error)
            if time.monotonic() - begun > timeout_s:
                raise EngineError(f"{self.base_url} answered no completion in {timeout_s:.0f} s: {last}")
            time.sleep(interval_s)

    def check_model(self, model: str) -> None:
        """Check that the server answers for `model`.

        Raises:
            EngineError: it answers for another one.
        """
        served = [str(row.get("id")) for row in self.models()]
        if model not in served:
            raise EngineError(
                f"{self.base_url} answers for {', '.join(served) or 'no model'}; expected {model}: "
                "another server listens on this port; stop it, or give the profile another port",
                status=200,
                kind="bad-request",
            )

    # -- what it does --------------------------------------------------------------------------------------------

    def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        model: str = "default",
    ) -> list[int]:
        """The token ids that the server makes of a text, or of messages after its chat template."""
        body: dict[str, Any] = {"model": model}
        if messages is not None:
            body["messages"] = [dict(row) for row in messages]
            if tools:
                body["tools"] = [dict(row) for row in tools]
            if chat_template_kwargs is not None:
                body["chat_template_kwargs"] = dict(chat_template_kwargs)
        else:
            body["prompt"] = prompt or ""
        tokens = self._object("POST", "/tokenize", "/v1/tokenize", json=body).get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise EngineError(f"{self.base_url}/tokenize gave no list of tokens", status=200)
        return tokens

    def flush_cache(self, timeout_s: float | None = None) -> None:
        """Empty the prefix cache.

        Args:
            timeout_s: how long the server may wait for running requests to end; None asks for it at once.

        Raises:
            EngineError: refused (the server's words), or an answer that doesn't say it was flushed.
        """
        params = {} if timeout_s is None else {"timeout": timeout_s}
        response = self._send("POST", "/flush_cache", params=params, timeout_s=(timeout_s or 0) + 10.0)
        if response.status_code != 200:
            raise self._error(response)
        if "flushed" not in response.text.lower():
            raise EngineError(f"{self.base_url}/flush_cache answered {response.text[:80]!r}", status=200, kind="busy")

    def generate(
        self,
        *,
        text: str | None = None,
        input_ids: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        max_new_tokens: int = 16,
        ignore_eos: bool = True,
        temperature: float = 0.0,
        rid: str | None = None,
        timeout_s: float = 120.0,
        model: str = "default",
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """One completion that is not streamed, with the fixed number of tokens where ``ignore_eos``.

        Messages go to ``/v1/chat/completions``, everything else to ``/generate``, and to ``/v1/completions`` on a
        server that does not know that.

        Returns:
            The server's answer, as it came.
        """
        if messages is not None:
            body: dict[str, Any] = {
                "model": model,
                "messages": [dict(row) for row in messages],
                "max_tokens": max_new_tokens,
                "temperature": temperature,
                "ignore_eos": ignore_eos,
            }
            if rid is not None:
                body["rid"] = rid
            if chat_template_kwargs is not None:
                body["chat_template_kwargs"] = dict(chat_template_kwargs)
            return self._object("POST", "/v1/chat/completions", json=body, timeout_s=timeout_s)
        prompt: dict[str, Any] = {"input_ids": list(input_ids)} if input_ids is not None else {"text": text or ""}
        sampling = {"max_new_tokens": max_new_tokens, "ignore_eos": ignore_eos, "temperature": temperature}
        native = {**prompt, "sampling_params": sampling, **({"rid": rid} if rid else {})}
        try:
            answer = self._object("POST", "/generate", json=native, timeout_s=timeout_s)
        except EngineError as error:
            if error.kind != "not-found":
                raise
            body = {
                "model": model,
                "prompt": list(input_ids) if input_ids is not None else text or "",
                "max_tokens": max_new_tokens,
                "temperature": temperature,
                "ignore_eos": ignore_eos,
            }
            return self._object("POST", "/v1/completions", json=body, timeout_s=timeout_s)
        meta = answer.get("meta_info")
        reason = meta.get("finish_reason") if isinstance(meta, dict) else None
        if isinstance(reason, dict) and reason.get("type") == "abort":
            raise EngineError(
                f"{self.base_url}/generate aborted the request: {message(200, answer)}",
                status=200,
                kind=classify(200, answer),
            )
        return answer

    def abort(self, rid: str) -> None:
        """Give up one request on the server."""
        self._abort({"rid": rid})

    def abort_all(self) -> None:
        """Give up every request on the server."""
        self._abort({"rid": "", "abort_all": True})

    def _abort(self, body: dict[str, Any]) -> None:
        response = self._send("POST", "/abort_request", json=body)
        if response.status_code != 200:
            raise self._error(response)
