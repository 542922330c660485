"""What a running server can take, read from the server and never from its command line."""

from __future__ import annotations

from typing import Any

import msgspec

from specrig.engine.client import EngineClient
from specrig.engine.errors import EngineError
from specrig.tokens.budget import Limits

RESERVING = frozenset(["EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "FROZEN_KV_MTP"])
"""Algorithms that take max(topk * steps, draft tokens) off the context window."""
_DFLASH_BLOCK = 16


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """The speculative configuration as the server reports it; None is not reported.

    Attributes:
        algorithm: such as DFLASH; None for autoregressive.
        budget: nodes of the draft tree where one is on.
        accept_length: the server's own average since its last flush.
    """

    algorithm: str | None = None
    draft_tokens: int | None = None
    steps: int | None = None
    topk: int | None = None
    block_size: int | None = None
    budget: int | None = None
    draft_model: str | None = None
    accept_length: float | None = None


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
        return Speculation()
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
    )


def reserved_tokens(spec: Speculation) -> int:
    """R: draft tokens that the engine takes off the context window.

    max(topk * steps, draft tokens) for EAGLE and its family; budget + 1 for a draft tree, whose rule is not published;
    0 for autoregressive, NGRAM and a DFLASH chain.
    """
    if spec.algorithm is None:
        return 0
    if spec.budget is not None:
        return spec.budget + 1
    if spec.algorithm == "DDTREE":
        return spec.draft_tokens or 0
    if spec.algorithm in RESERVING:
        return max((spec.topk or 1) * (spec.steps or 1), spec.draft_tokens or 0)
    return 0


def from_info(info: dict[str, Any], max_model_len: int | None) -> ServerReport:
    """Read a ``/server_info`` and the context of ``/v1/models``; pure.

    Args:
        info: the server's answer; empty for a server that has no such endpoint.
        max_model_len: the effective context length.

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
    truncate = bool(info.get("allow_auto_truncate"))
    draft_block = spec.block_size or (_DFLASH_BLOCK if spec.algorithm in ("DFLASH", "DDTREE") else spec.draft_tokens)
    warnings = []
    if truncate:
        warnings.append("the server runs with --allow-auto-truncate: prompts and answers are cut without an error")
    if effective is not None and configured is not None and effective < configured:
        warnings.append(f"max_running_requests is {configured} but only {effective} run at once")
    return ServerReport(
        limits=Limits(
            context_length=context,
            kv_tokens=_integer(info.get("max_total_num_tokens")),
            reserved_tokens=reserved_tokens(spec),
            block=(draft_block or 0) if spec.algorithm is not None else 0,
            max_running=effective if effective is not None else configured,
            page_size=_integer(info.get("page_size")) or 1,
            auto_truncate=truncate,
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
