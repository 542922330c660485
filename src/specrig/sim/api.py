"""The routes: what each takes, and its answer."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
import uuid
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from specrig.sim import metrics, physics
from specrig.sim.config import SGLANG_VERSION, VERSION, Config
from specrig.sim.http import Call, Connection
from specrig.sim.limits import Refused, judge
from specrig.sim.ranks import Rank
from specrig.sim.scheduler import Request, Sampling, Scheduler
from specrig.sim.sinks import DONE, Native, OpenAI, Stream, openai_error
from specrig.sim.text import Answer, Detokenizer, Vocabulary

if TYPE_CHECKING:
    from specrig.tokens.tokenizer import Tokenizer

_encode = msgspec.json.encode
_OPEN_ROUTES = frozenset(["/health", "/health_generate", "/ready", "/metrics", "/metrics/"])
_TEXT = "text/plain; charset=utf-8"
_Route = Callable[[Call, Connection], Coroutine[Any, Any, None]]
_NO_RUNNING_USAGE = ("usage-missing", "usage-final-only")
_TOO_LONG = "The input (99999 tokens) is longer than the model's context length (4096 tokens)."
_HELD_TEXT = 2000
"""Texts longer than this are tokenized off the event loop."""

_EMBEDDING: dict[str, Any] = {
    "family": "none",
    "task": "none",
    "execution": "none",
    "attention": "none",
    "pooling": "model_defined",
    "normalize": False,
    "postprocessor": "none",
    "tokenizer_special_tokens": "model_default",
    "supports_dimensions": False,
    "supports_token_embeddings": False,
    "supports_multimodal": False,
    "requires_embedding_flag": False,
    "auto_enable_embedding": False,
    "bcg_eligibility": "disabled",
    "safe_disable_kv_cache": False,
    "safe_disable_radix_cache": False,
    "safe_disable_chunked_prefill": False,
    "enabled": False,
    "matryoshka_dimensions": [],
    "bcg": {"prefill_backend": "disabled", "enabled": False, "capture_token_budget": 0, "capture_batch_sizes": []},
    "cache": {"kv_cache_disabled": False, "radix_cache_disabled": False, "chunked_prefill_disabled": False},
}
"""What a server of a generating model says of embeddings."""


class Server:
    """The engine behind the routes.

    Args:
        config: the server.
        ranks: its children.
        launched: monotonic moment of the start.
    """

    def __init__(self, config: Config, ranks: list[Rank], launched: float) -> None:
        self.config = config
        self.ranks = ranks
        self.port = config.port
        self.launched = launched
        self.status = "starting"
        self.startup_s = 0.0
        self.scheduler: Scheduler | None = None
        self.tokenizer: Tokenizer | None = None
        self.words: Vocabulary | None = None
        self.calls: dict[tuple[str, str], int] = {}
        self._number = 0
        self._flushing = False
        get: dict[str, _Route] = {
            "/health": self._health,
            "/health_generate": self._health,
            "/ready": self._ready,
            "/server_info": self._server_info,
            "/get_server_info": self._server_info,
            "/model_info": self._model_info,
            "/get_model_info": self._model_info,
            "/v1/models": self._models,
            "/v1/loads": self._loads,
            "/get_load": self._get_load,
            "/flush_cache": self._flush,
            "/metrics": self._metrics,
            "/metrics/": self._metrics,
        }
        post: dict[str, _Route] = {
            "/generate": self._generate,
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._completions,
            "/tokenize": self._tokenize,
            "/v1/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            "/v1/detokenize": self._detokenize,
            "/flush_cache": self._flush,
            "/abort_request": self._abort,
        }
        self._routes: dict[str, dict[str, _Route]] = {"GET": get, "POST": post, "PUT": {"/generate": self._generate}}

    async def __call__(self, call: Call, connection: Connection) -> None:
        """Answer one call."""
        self.calls[call.method, call.path] = self.calls.get((call.method, call.path), 0) + 1
        handler = self._routes.get(call.method, {}).get(call.path)
        if handler is None:
            known = any(call.path in routes for routes in self._routes.values())
            _json(connection, {"detail": "Method Not Allowed" if known else "Not Found"}, 405 if known else 404)
            return
        key = self.config.api_key
        if key and call.path not in _OPEN_ROUTES and call.headers.get("authorization") != f"Bearer {key}":
            _json(connection, {"error": "Unauthorized"}, 401)
            return
        try:
            await handler(call, connection)
        except Refused as refused:
            _json(connection, openai_error(str(refused), refused.kind, 400), 400)

    # -- health --------------------------------------------------------------------------------------------------

    async def _ready(self, _call: Call, connection: Connection) -> None:
        connection.respond(200 if self.status == "ready" else 503, b"", None)

    async def _health(self, _call: Call, connection: Connection) -> None:
        healthy = self.status == "ready" and self.scheduler is not None and await self.scheduler.output(20.0)
        connection.respond(200 if healthy else 503, b"", None)

    # -- what it is ----------------------------------------------------------------------------------------------

    def _model_name(self) -> str:
        return self.config.model_name

    async def _server_info(self, _call: Call, connection: Connection) -> None:
        config, scheduler = self.config, self.scheduler
        flat = config.args | {"port": self.port}
        startup = {
            "load_weight": round(self.startup_s, 6),
            "kv_cache_allocation": 0.0,
            "scheduler_e2e": round(self.startup_s, 6),
            "cuda_graph": dict.fromkeys(metrics.GRAPH_PHASES, 0.0),
        }
        state = flat | {
            "world_size": config.tp_size,
            "startup_time": startup,
            "effective_max_running_requests_per_dp": config.effective_running,
            "last_gen_throughput": scheduler.last_throughput if scheduler else 0.0,
            "memory_usage": {
                "weight": round(config.weights_gib / config.tp_size, 3),
                "kvcache": round(config.kv_tokens * 98304 / 2**30 / config.tp_size, 2),
                "startup_available": 94.2,
                "token_capacity": config.kv_tokens,
                "token_capacity_swa": None,
                "graph": dict.fromkeys(metrics.GRAPH_PHASES, 0.0),
            },
            "decode_cuda_graph_bs": [1, 2, 4, 8, 16, 32],
            "decode_cuda_graph_memory_gb": 0.0,
        }
        if config.spec_on and scheduler is not None and scheduler.accept_steps:
            state["avg_spec_accept_length"] = 1 + scheduler.accept_correct / scheduler.accept_steps
        _json(
            connection,
            flat
            | {
                "custom_sigquit_handler": None,
                "launch_command": config.command,
                "status": self.status,
                "max_total_num_tokens": config.kv_tokens,
                "max_req_input_len": config.max_req_input_len,
                "hicache_object_layout": {
                    "enabled": False,
                    "backend": None,
                    "page_size": 1,
                    "hicache_object_layout": {"pools": []},
                    "reason": "Hierarchical cache is disabled",
                },
                "kv_events": None,
                "startup_time": startup | {"tokenizer_e2e": round(self.startup_s, 6)},
                "internal_states": [state],
                "version": VERSION,
                "frontend": "python",
                **self._labels(),
                "sim_launch_factor": scheduler.times.launch_factor if scheduler else None,
                "sim_seed": config.seed,
                "sim_min_step_ms": config.min_step_s * 1000,
                "sim_faults": [fault.name for fault in config.faults],
                "sim_ranks": [{"title": rank.title, "pid": rank.pid, "node": rank.node} for rank in self.ranks],
            },
        )

    def _labels(self) -> dict[str, Any]:
        return {"simulated": True, "sim_time_scale": self.config.time_scale, "simulated_version": SGLANG_VERSION}

    async def _model_info(self, _call: Call, connection: Connection) -> None:
        config = self.config
        _json(
            connection,
            {
                "model_path": str(config.args["model_path"]),
                "served_model_name": self._model_name(),
                "tokenizer_path": str(config.args["tokenizer_path"]),
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": "default",
                "load_format": config.args["load_format"],
                "reasoning_parser": config.args["reasoning_parser"],
                "tool_call_parser": config.args["tool_call_parser"],
                "disaggregation_mode": "null",
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": config.model_type,
                "architectures": config.architectures,
                "embedding": _EMBEDDING,
                "cache": {
                    "kv_cache_disabled": False,
                    "radix_cache_disabled": bool(config.args["disable_radix_cache"]),
                    "chunked_prefill_disabled": config.args["chunked_prefill_size"] <= 0,
                },
                **self._labels(),
            },
        )

    async def _models(self, _call: Call, connection: Connection) -> None:
        name = self._model_name()
        row = {
            "id": name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "sglang",
            "root": name,
            "parent": None,
            "max_model_len": self.config.context_length,
        }
        _json(connection, {"object": "list", "data": [row]})

    def load_row(self) -> dict[str, Any]:
        """The one row of /v1/loads."""
        config, scheduler = self.config, self.scheduler
        running = len(scheduler.running) + len(scheduler.prefilling) if scheduler else 0
        waiting = len(scheduler.waiting) if scheduler else 0
        used = scheduler.used_tokens if scheduler else 0
        steps = scheduler.accept_steps if scheduler else 0
        correct = scheduler.accept_correct if scheduler else 0
        verified = config.method.verified - 1
        row: dict[str, Any] = {
            "dp_rank": 0,
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "num_used_tokens": used,
            "num_total_tokens": used,
            "max_total_num_tokens": config.kv_tokens,
            "max_running_requests": config.effective_running,
            "token_usage": round(used / config.kv_tokens, 4),
            "gen_throughput": round(scheduler.last_throughput, 2) if scheduler else 0.0,
            "cache_hit_rate": 0.0,
            "utilization": round(running / config.effective_running, 4),
            "memory": {
                "weight_gb": round(config.weights_gib / config.tp_size, 2),
                "kv_cache_gb": round(config.kv_tokens * 98304 / 2**30 / config.tp_size, 2),
                "graph_gb": 0.0,
                "token_capacity": config.kv_tokens,
            },
            "queues": {"waiting": waiting, "grammar": 0, "paused": 0, "retracted": 0, "prealloc_ready": 0},
        }
        if config.spec_on:
            row["speculative"] = {
                "accept_length": round(1 + correct / steps, 4) if steps else 0.0,
                "accept_rate": round(correct / steps / verified, 4) if steps and verified else 0.0,
            }
        return row

    async def _loads(self, _call: Call, connection: Connection) -> None:
        _json(
            connection,
            {
                "timestamp": datetime.now(UTC).isoformat(),
                "version": VERSION,
                "accelerator": "simulated",
                "num_accelerators": self.config.tp_size,
                "loads": [self.load_row()],
            },
        )

    async def _get_load(self, _call: Call, connection: Connection) -> None:
        row = self.load_row()
        _json(
            connection,
            [
                {
                    "dp_rank": 0,
                    "num_reqs": row["num_running_reqs"] + row["num_waiting_reqs"],
                    "num_waiting_reqs": row["num_waiting_reqs"],
                    "num_tokens": row["num_used_tokens"],
                }
            ],
        )

    async def _metrics(self, _call: Call, connection: Connection) -> None:
        if not self.config.args["enable_metrics"]:
            _json(connection, {"detail": "Not Found"}, 404)
            return
        connection.respond(200, metrics.render(self).encode(), "text/plain; version=1.0.0; charset=utf-8")

    # -- what it does --------------------------------------------------------------------------------------------

    async def _flush(self, call: Call, connection: Connection) -> None:
        scheduler = self.scheduler
        if scheduler is None or self.config.faults.get("flush-refused") is not None:
            connection.respond(400, b"Flush cache failed.\n", _TEXT)
            return
        if self._flushing:
            connection.respond(400, b"Another flush_cache is already in progress.", _TEXT)
            return
        self._flushing = True
        try:
            try:
                timeout = float(call.query.get("timeout", "0"))
            except ValueError:
                timeout = 0.0
            if timeout > 0 and not await scheduler.idle(timeout):
                connection.respond(400, b"Timed out waiting for idle state.", _TEXT)
            elif scheduler.flush():
                connection.respond(
                    200,
                    b"Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting "
                    b"requests, the operation will not be performed.)\n",
                    _TEXT,
                )
            else:
                connection.respond(400, b"Flush cache failed.\n", _TEXT)
        finally:
            self._flushing = False

    async def _abort(self, call: Call, connection: Connection) -> None:
        body = _body(call)
        if self.scheduler is not None:
            self.scheduler.abort(None if body.get("abort_all") else str(body.get("rid") or ""))
        connection.respond(200, b"", None)

    async def _ids(self, text: str, *, special: bool = False) -> list[int]:
        tokenizer = self._ready_tokenizer()
        if len(text) <= _HELD_TEXT:
            return tokenizer.encode(text, special=special)
        return await asyncio.to_thread(tokenizer.encode, text, special=special)

    def _ready_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise Refused("the server is still starting", "ServiceUnavailable")
        return self.tokenizer

    async def _chat_ids(self, body: dict[str, Any]) -> list[int]:
        messages = body.get("messages")
        if not isinstance(messages, list) or not all(isinstance(row, dict) for row in messages):
            raise Refused("messages is not a list of objects with role and content")
        tokenizer = self._ready_tokenizer()
        thinking = _thinking(body)
        prompt = body.get("add_generation_prompt", True) is not False
        tools = body.get("tools") if body.get("tool_choice") != "none" else None
        if tools is not None:
            if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
                raise Refused("tools is not a list of objects")
            tools = [_tool(tool) for tool in tools] or None
        try:
            return await asyncio.to_thread(tokenizer.chat_ids, messages, thinking, prompt, tools)
        except Exception as error:
            raise Refused(f"the chat template failed: {error}") from error

    async def _tokenize(self, call: Call, connection: Connection) -> None:
        body = _body(call)
        if "messages" in body:
            ids: Any = await self._chat_ids(body)
            count: Any = len(ids)
        else:
            prompt = body.get("prompt")
            if isinstance(prompt, list) and all(isinstance(text, str) for text in prompt):
                ids = [await self._ids(text, special=body.get("add_special_tokens", True)) for text in prompt]
                count = [len(row) for row in ids]
            elif isinstance(prompt, str):
                ids = await self._ids(prompt, special=body.get("add_special_tokens", True))
                count = len(ids)
            else:
                raise Refused("prompt is missing; expected a text, a list of texts, or messages")
        _json(connection, {"tokens": ids, "count": count, "max_model_len": 262144})

    async def _detokenize(self, call: Call, connection: Connection) -> None:
        ids: Any = _body(call).get("tokens")
        if not _token_list(ids):
            raise Refused("tokens is not a list of token ids")
        _json(connection, {"text": self._ready_tokenizer().decode(ids)})

    async def _native_ids(self, body: dict[str, Any]) -> list[int]:
        ids: Any = body.get("input_ids")
        if ids is not None:
            if not _token_list(ids):
                raise Refused("the simulated engine takes one prompt a request: input_ids is a list of token ids")
            return list(ids)
        text = body.get("text")
        if text is None:
            raise Refused("Either text, input_ids or input_embeds should be provided.")
        if not isinstance(text, str):
            raise Refused("the simulated engine takes one prompt a request: text is a string")
        return await self._ids(text, special=True)

    async def _completion_ids(self, body: dict[str, Any]) -> list[int]:
        prompt: Any = body.get("prompt")
        if isinstance(prompt, str):
            return await self._ids(prompt, special=True)
        if not _token_list(prompt):
            raise Refused("the simulated engine takes one prompt a request: a string or a list of token ids")
        return list(prompt)

    async def _generate(self, call: Call, connection: Connection) -> None:
        streaming = False
        try:
            body = _body(call)
            streaming = bool(body.get("stream"))
            ids = await self._native_ids(body)
            sampling = _sampling(body.get("sampling_params") or {}, "max_new_tokens", 128)
            request, abort = self._make(call, body, ids, sampling, streaming=streaming)
        except Refused as refused:
            error = {"message": str(refused)}
            if streaming:
                _refuse_stream(
                    connection,
                    {"error": error | {"type": "invalid_request_error", "code": 400, "retryable": False}},
                )
            else:
                _json(connection, {"error": error}, 400)
            return
        if self._fails(connection, request, native=True):
            return
        stream = Stream(connection, self.config, request.number) if streaming else None
        request.sink = Native(connection, self.config, stream)
        self._start(request, connection, abort)

    async def _chat(self, call: Call, connection: Connection) -> None:
        await self._openai(call, connection, chat=True)

    async def _completions(self, call: Call, connection: Connection) -> None:
        await self._openai(call, connection, chat=False)

    async def _openai(self, call: Call, connection: Connection, *, chat: bool) -> None:
        streaming = False
        body: dict[str, Any] = {}
        try:
            body = _body(call)
            streaming = bool(body.get("stream"))
            ids: Any
            if chat:
                if "messages" not in body:
                    connection.respond(400, _missing_messages(body))
                    return
                ids = await self._chat_ids(body)
                limit = body.get("max_completion_tokens", body.get("max_tokens"))
                context = self.config.context_length
                if self.config.context_given and isinstance(limit, int) and limit > context:
                    message = (
                        f"max_completion_tokens is too large: {limit}.This model supports at most {context} "
                        "completion tokens."
                    )
                    _json(connection, openai_error(message, "BadRequest", 400), 400)
                    return
                sampling = _sampling(body, "max_completion_tokens", None, also="max_tokens")
            else:
                ids = await self._completion_ids(body)
                sampling = _sampling(body, "max_tokens", 16)
            request, abort = self._make(call, body, ids, sampling, streaming=streaming, chat=chat)
        except Refused as refused:
            if streaming:
                _refuse_stream(connection, {"error": openai_error(str(refused), "BAD_REQUEST", 400)})
            else:
                _json(connection, openai_error(str(refused), refused.kind, 400), 400)
            return
        if self._fails(connection, request, native=False):
            return
        options = body.get("stream_options") or {}
        stream = Stream(connection, self.config, request.number) if streaming else None
        sink = OpenAI(
            connection,
            self.config,
            stream,
            chat=chat,
            model=str(body.get("model") or self._model_name()),
            include_usage=bool(options.get("include_usage") or options.get("continuous_usage_stats")),
            continuous=bool(options.get("continuous_usage_stats"))
            and all(self.config.faults.get(name, request.number) is None for name in _NO_RUNNING_USAGE),
            details=bool(body.get("return_spec_tokens_details")),
        )
        request.sink = sink
        if chat and stream is not None and self.config.faults.get("early-role-chunk", request.number) is not None:
            sink.role_early(request.rid)
        self._start(request, connection, abort)

    def _make(
        self,
        call: Call,
        body: dict[str, Any],
        ids: list[int],
        sampling: Sampling,
        *,
        streaming: bool,
        chat: bool = False,
    ) -> tuple[Request, str | None]:
        """The request, and the scheduler's words where it will be given up."""
        config, words, tokenizer = self.config, self.words, self._ready_tokenizer()
        if words is None or self.scheduler is None:
            raise Refused("the server is still starting", "ServiceUnavailable")
        if not ids:
            raise Refused("the prompt has no tokens")
        if body.get("n") not in (None, 1):
            raise Refused(f"n is {body.get('n')}; the simulated engine gives one choice")
        if config.new_tokens_limit is not None:
            asked = sampling.max_new_tokens
            limit = config.new_tokens_limit if asked < 0 else min(asked, config.new_tokens_limit)
            sampling = dataclasses.replace(sampling, max_new_tokens=limit)
        verdict = judge(
            len(ids),
            None if sampling.max_new_tokens < 0 else sampling.max_new_tokens,
            config.context_length,
            config.kv_tokens,
            config.method.reserved,
            truncate=bool(config.args["allow_auto_truncate"]),
            page=config.page_size,
        )
        self._number += 1
        number = self._number
        ids = ids[: verdict.keep]
        name = physics.prompt_digest(ids)
        key = f"{config.seed}/{name}"
        if sampling.temperature > 0:
            key += f"/{sampling.seed if sampling.seed is not None else f'{config.launch_seed}.{number}'}"
        answer = Answer(
            words,
            key,
            config.natural_tokens,
            opening=_opening(ids, words, chat and _thinking(body)),
            wide=config.faults.get("split-utf8", number) is not None,
        )
        new_tokens = verdict.new_tokens
        cap = config.faults.get("silent-cap", number)
        if cap is not None:
            new_tokens = min(new_tokens, int(cap.number))
        forced: tuple[int, dict[str, Any]] | None = None
        short = config.faults.get("short-completion", number)
        if short is not None:
            forced = (int(short.number), {"type": "stop", "matched": words.eos})
        full = config.faults.get("kv-abort", number)
        if full is not None:
            forced = (
                int(full.number),
                {
                    "type": "abort",
                    "message": "Request prompt exceeds the KV memory budget: the KV cache pool is full. Try a larger "
                    "--mem-fraction-static or fewer running requests.",
                    "status_code": 400 if not streaming or chat else None,
                    "err_type": "BadRequestError",
                },
            )
        tail = ids[-4096:]
        chain = physics.base_acceptance(config.seed, name, periodic=len(tail) >= 256 and len(set(tail)) * 8 < len(tail))
        request = Request(
            rid=str(body.get("rid") or uuid.uuid4().hex),
            number=number,
            ids=ids,
            sampling=sampling,
            new_tokens=new_tokens,
            answer=answer,
            sink=_Nowhere(),
            detokenizer=Detokenizer(tokenizer.decode),
            parse_reasoning=config.args["reasoning_parser"] is not None
            and chat
            and body.get("separate_reasoning", True) is not False,
            prompt=name,
            chain=chain,
            generator=random.Random(physics.digest("accept", config.seed, config.method.label, key)),
            arrived=call.at,
            stream=streaming,
            forced_end=forced,
        )
        return request, verdict.abort

    def _fails(self, connection: Connection, request: Request, *, native: bool) -> bool:
        if self.config.faults.get("http-400", request.number) is not None:
            refusal = openai_error(_TOO_LONG, "BadRequestError", 400)
            _json(connection, {"error": {"message": _TOO_LONG}} if native else refusal, 400)
            return True
        if self.config.faults.get("http-500", request.number) is not None:
            connection.respond(500, b"Internal Server Error", _TEXT)
            return True
        if self.config.faults.get("http-503", request.number) is not None:
            connection.respond(503, b"", None)
            return True
        return False

    def _start(self, request: Request, connection: Connection, abort: str | None) -> None:
        scheduler = self.scheduler
        assert scheduler is not None
        if abort is not None or request.new_tokens <= 0:
            finish: dict[str, Any] = {"type": "length", "length": 0}
            if abort is not None:
                finish = {"type": "abort", "message": abort, "status_code": 400, "err_type": "BadRequestError"}
            scheduler.refuse(request, finish)
            return
        connection.on_lost = lambda: scheduler.drop(request)
        if not request.stream:
            connection.hold()
        scheduler.submit(request)


class _Nowhere:
    """The sink of a request that has none yet."""

    def prepare(self, _request: Request, _delta: Any) -> Callable[[], bool]:
        """Never asked."""
        raise AssertionError("a request without a sink")


def _json(connection: Connection, value: object, status: int = 200) -> None:
    connection.respond(status, _encode(value))


def _refuse_stream(connection: Connection, value: object) -> None:
    """A streamed request's refusal: an error event inside HTTP 200."""
    connection.start_stream()
    connection.write(connection.chunk(b"data: %b\n\n" % _encode(value) + b"data: %b\n\n" % DONE))
    connection.end_stream()


def _body(call: Call) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(call.body or b"{}")
    except msgspec.DecodeError as error:
        raise Refused(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise Refused("the body is not a JSON object")
    return value


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as SGLang gives it to the template: the fields that it knows, in the order they came in."""
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused("a tool is not an object with a function that has a name")
    known = dict.fromkeys(("description", "name", "parameters"), None) | {
        name: function[name] for name in ("strict", "defer_loading") if function.get(name) is not None
    }
    order = [name for name in function if name in known] + [name for name in known if name not in function]
    return {
        "type": tool.get("type", "function"),
        "function": {name: function.get(name) for name in order},
        "defer_loading": tool.get("defer_loading"),
    }


def _token_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int and token >= 0 for token in value)


def _thinking(body: dict[str, Any]) -> bool:
    options = body.get("chat_template_kwargs") or {}
    return isinstance(options, dict) and options.get("enable_thinking") is not False


def _opening(ids: list[int], words: Vocabulary, asked: bool) -> str:
    """Whether the answer thinks: inside a thought that the prompt opened, or opening one itself."""
    if words.think_close is None or words.think_open is None:
        return ""
    for token in reversed(ids[-16:]):
        if token == words.think_open:
            return "inside"
        if token == words.think_close:
            return ""
    return "open" if asked else ""


def _number(source: dict[str, Any], name: str, low: float) -> float | None:
    value = source.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < low:
        raise Refused(f"{name} must be at least {low:g}, got {value}.")
    return float(value)


def _sampling(source: dict[str, Any], name: str, default: int | None, also: str | None = None) -> Sampling:
    if not isinstance(source, dict):
        raise Refused("sampling_params is not an object")
    asked = _number(source, name, 0)
    if asked is None and also is not None:
        asked = _number(source, also, 0)
    temperature = _number(source, "temperature", 0)
    stop = source.get("stop") or ()
    stops = source.get("stop_token_ids") or ()
    seed = source.get("seed", source.get("sampling_seed"))
    return Sampling(
        max_new_tokens=int(asked) if asked is not None else -1 if default is None else default,
        ignore_eos=bool(source.get("ignore_eos")),
        temperature=1.0 if temperature is None else temperature,
        stop=(stop,) if isinstance(stop, str) else tuple(str(one) for one in stop),
        stop_token_ids=frozenset(int(one) for one in stops),
        seed=seed if isinstance(seed, int) else None,
    )


def _missing_messages(body: dict[str, Any]) -> bytes:
    """SGLang's own answer to a chat request without messages."""
    given = {key: value for key, value in body.items() if key in ("model", "stream")} | {"tool_choice": "none"}
    detail = {"type": "missing", "loc": ("body", "messages"), "msg": "Field required", "input": given}
    message = (
        f"1 validation error:\n  {detail}\n\n"
        '  File "sglang/srt/entrypoints/http_server.py", line 1870, in openai_v1_chat_completions\n'
        f"    POST /v1/chat/completions [{detail}]"
    )
    return _encode(openai_error(message, "Bad Request", 400))
