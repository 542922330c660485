"""What a running server can take, read from the server and never from its command line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from specrig.engine.client import EngineClient
from specrig.engine.errors import EngineError
from specrig.tokens.budget import Limits

RESERVING = frozenset(["EAGLE", "EAGLE3", "NEXTN", "FROZEN_KV_MTP"])
"""Algorithms that take max(topk * steps, draft tokens) off the context window."""
STEPPING = RESERVING | {"STANDALONE"}
"""Algorithms whose draft takes `steps` steps, so that at most `steps` + 1 tokens come of one verify step."""
_RESERVING_NOTHING = frozenset(["NGRAM", "DFLASH", "DSPARK", "UNO", "STANDALONE"])
_DFLASH_BLOCK = 16
_TOTAL_MAY_EQUAL = (0, 5, 11)
"""The first release that takes a request whose prompt, reserve and answer fill the window exactly."""


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """The speculative configuration as the server reports it; None is not reported.

    Attributes:
        known: the server says whether it speculates; False for a report without that key.
        algorithm: such as DFLASH; None for autoregressive.
        budget: nodes of the draft tree where one is on.
        accept_length: the server's own average since its last flush.
        adaptive: it changes the number of draft tokens while it runs.
    """

    known: bool = True
    algorithm: str | None = None
    draft_tokens: int | None = None
    steps: int | None = None
    topk: int | None = None
    block_size: int | None = None
    budget: int | None = None
    draft_model: str | None = None
    accept_length: float | None = None
    adaptive: bool = False


class ServerReport(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and configuration of a running server.

    Attributes:
        limits: for the token budget.
        max_req_input_len: the scheduler's own limit on a prompt, where reported.
        running_configured: --max-running-requests as set; what is effective is in the limits.
        warnings: one line each on what makes numbers from this server doubtful.
        simulated: the server says that it is a simulation.
    """

    limits: Limits
    speculation: Speculation
    model: str | None
    version: str | None
    tp_size: int | None
    max_req_input_len: int | None
    running_configured: int | None
    simulated: bool
    time_scale: float | None
    warnings: tuple[str, ...]


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def speculation(info: dict[str, Any]) -> Speculation:
    """The speculative configuration in a ``/server_info``."""
    algorithm = _text(info.get("speculative_algorithm"))
    if algorithm is None:
        return Speculation(known="speculative_algorithm" in info)
    draft = _integer(info.get("speculative_num_draft_tokens"))
    budget = _integer(info.get("speculative_ddtree_budget"))
    tree = (
        budget is not None
        or algorithm.upper() == "DDTREE"
        or bool(info.get("speculative_dflash_tree_verify"))
        or bool(info.get("speculative_dflash_enable_ddtree"))
        or info.get("speculative_dflash_tree_width") is not None
    )
    if tree and budget is None and draft is not None:
        budget = draft - 1
    states = info.get("internal_states")
    state = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    accept = state.get("avg_spec_accept_length")
    return Speculation(
        algorithm=algorithm.upper(),
        draft_tokens=draft,
        steps=_integer(info.get("speculative_num_steps")),
        topk=_integer(info.get("speculative_eagle_topk")),
        block_size=_integer(info.get("speculative_dflash_block_size")),
        budget=budget if tree else None,
        draft_model=_text(info.get("speculative_draft_model_path")),
        accept_length=float(accept) if isinstance(accept, int | float) else None,
        adaptive=info.get("speculative_adaptive") is True,
    )


def reserved_tokens(spec: Speculation) -> int | None:
    """R: draft tokens that the engine takes off the context window; None where the server does not say enough.

    max(topk * steps, draft tokens) for EAGLE, EAGLE3 and frozen-KV MTP (NEXTN is EAGLE to the engine); budget + 1 for a
    draft tree, whose rule is not published; 0 for autoregressive and every other algorithm of the releases.
    """
    if spec.algorithm is None:
        return 0 if spec.known else None
    if spec.budget is not None:
        return spec.budget + 1
    if spec.algorithm in RESERVING:
        if spec.topk is None or spec.steps is None or spec.draft_tokens is None:
            return None
        return max(spec.topk * spec.steps, spec.draft_tokens)
    return 0 if spec.algorithm in _RESERVING_NOTHING else None


def draft_block(spec: Speculation) -> int | None:
    """Tokens of one draft block; None where the server does not say."""
    if spec.algorithm is None:
        return 0 if spec.known else None
    return spec.block_size or (_DFLASH_BLOCK if spec.algorithm in ("DFLASH", "DDTREE") else spec.draft_tokens)


def total_below(version: str | None) -> bool:
    """Whether P + R + N has to stay below C, as before 0.5.11; the stricter rule where the version is unknown."""
    match = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", version or "")
    return match is None or tuple(int(part or 0) for part in match.groups()) < _TOTAL_MAY_EQUAL


def from_info(
    info: dict[str, Any], max_model_len: int | None, environment: Mapping[str, str] | None = None
) -> ServerReport:
    """Read a ``/server_info`` and the context of ``/v1/models``; pure.

    What is missing from the report is unknown in the limits, never taken for a default.

    Args:
        info: the server's answer; empty for a server that has no such endpoint.
        max_model_len: the effective context length. It is what counts: the model's own may be shorter
            (SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN) or longer (--context-length).
        environment: of the server's process, where that can be seen; no report tells it.

    Raises:
        EngineError: neither of the two says how long the context is.
    """
    states = info.get("internal_states")
    state: dict[str, Any] = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    context = max_model_len or _integer(info.get("context_length"))
    if context is None:
        raise EngineError(
            "the server does not say how long its context is: no max_model_len in /v1/models, no context_length in "
            "/server_info; give it with --context-length"
        )
    spec = speculation(info)
    configured = _integer(info.get("max_running_requests"))
    effective = _integer(state.get("effective_max_running_requests_per_dp"))
    running = effective if effective is not None else configured
    replicas = _integer(info.get("dp_size")) or 1
    truncate = info.get("allow_auto_truncate")
    radix_off = info.get("disable_radix_cache")
    memory = state.get("memory_usage")
    kv_tokens = _integer(info.get("max_total_num_tokens"))
    if kv_tokens is None and isinstance(memory, dict):
        kv_tokens = _integer(memory.get("token_capacity"))
    cap = (environment or {}).get("SGLANG_MAX_NEW_TOKENS_LIMIT", "")
    warnings = []
    if truncate:
        warnings.append("the server runs with --allow-auto-truncate: prompts and answers are cut without an error")
    if effective is not None and configured is not None and effective < configured:
        warnings.append(f"max_running_requests is {configured} but only {effective} run at once")
    if effective is None and configured is not None:
        warnings.append(f"max_running_requests is {configured}; how many run at once in effect is not reported")
    if spec.adaptive:
        warnings.append("the drafts' length is adaptive: more tokens may be reserved for them than reported now")
    return ServerReport(
        limits=Limits(
            context_length=context,
            kv_tokens=kv_tokens,
            reserved_tokens=reserved_tokens(spec),
            block=draft_block(spec),
            max_running=None if running is None else running * replicas,
            page_size=_integer(info.get("page_size")),
            max_input=_integer(info.get("max_req_input_len")),
            new_tokens_limit=int(cap) if cap.isdecimal() and int(cap) > 0 else None,
            total_below=bool(info) and total_below(_text(info.get("version"))),
            prefix_cache=not radix_off if isinstance(radix_off, bool) else None,
            replicas=replicas,
            auto_truncate=truncate if isinstance(truncate, bool) else None,
            source="server",
        ),
        speculation=spec,
        model=_text(info.get("served_model_name")),
        version=_text(info.get("version")),
        tp_size=_integer(info.get("tp_size")),
        max_req_input_len=_integer(info.get("max_req_input_len")),
        running_configured=configured,
        simulated=bool(info.get("simulated")),
        time_scale=float(info["sim_time_scale"]) if isinstance(info.get("sim_time_scale"), int | float) else None,
        warnings=tuple(warnings),
    )


def read(server: EngineClient | str, api_key: str | None = None) -> ServerReport:
    """Ask a running server.

    Args:
        server: a client, or the server's URL.
        api_key: with a URL.

    Raises:
        EngineError: not reachable, or it does not say how long its context is.
    """
    if isinstance(server, str):
        with EngineClient(server, api_key) as client:
            return read(client)
    lengths = [_integer(row.get("max_model_len")) for row in server.models()]
    try:
        info = server.server_info()
    except EngineError as error:
        if error.kind != "not-found":
            raise
        info = {}
    return from_info(info, next((length for length in lengths if length is not None), None))


def from_server(server: EngineClient | str, api_key: str | None = None) -> Limits:
    """The limits of a running server; see `read`."""
    return read(server, api_key).limits
