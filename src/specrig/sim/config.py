"""What the flags come to: the method, the limits and the simulation's settings, checked as SGLang checks them."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrig.errors import UsageError
from specrig.sim.faults import Faults, parse
from specrig.sim.flags import FORK_ARGS, defaults

SGLANG_VERSION = "0.5.23"
VERSION = f"{SGLANG_VERSION}+specrig-sim"
GPU_GIB = 95.6
"""Memory of the simulated card, an RTX PRO 6000 Blackwell."""
KV_BYTES_PER_TOKEN = 98304
"""KV cache of one token of the simulated model, over all its ranks."""


@dataclass(frozen=True)
class Method:
    """How tokens are drafted and verified.

    Attributes:
        name: autoregressive, dflash, ddtree, eagle or ngram.
        algorithm: the value of --speculative-algorithm, None for autoregressive.
        verified: tokens that one verify step of one request checks (1 for autoregressive).
        depth: draft tokens that can be accepted at most in one step.
        budget: nodes of the tree, None for a chain.
        reserved: tokens that the engine takes off the context window.
        block: tokens of a draft block.
    """

    name: str
    algorithm: str | None = None
    verified: int = 1
    depth: int = 0
    budget: int | None = None
    reserved: int = 0
    block: int = 1

    @property
    def label(self) -> str:
        """As in results: ``ddtree-b15``."""
        return f"{self.name}-b{self.budget}" if self.budget is not None else self.name


@dataclass(frozen=True)
class Config:
    """One simulated server."""

    args: dict[str, Any]
    method: Method
    context_length: int
    context_given: bool
    kv_tokens: int
    max_running: int
    effective_running: int
    chunked_prefill: int
    page_size: int
    model_name: str
    model_type: str
    architectures: list[str]
    model_path: Path
    host: str
    port: int
    api_key: str | None
    tp_size: int
    gpu_ids: list[int] | None
    time_scale: float
    min_step_s: float
    seed: int
    launch_seed: int
    jitter: float
    noise: float
    natural_tokens: int
    divergence: float
    startup_s: float
    weights_gib: float
    truth: Path | None
    profile: str | None
    faults: Faults
    new_tokens_limit: int | None
    simulated_accept_length: float | None
    json_log: bool
    command: str

    @property
    def max_req_input_len(self) -> int:
        """The scheduler's limit on a prompt: min(C, K) - 6."""
        return min(self.context_length, self.kv_tokens) - 6

    @property
    def spec_on(self) -> bool:
        """Whether verify steps happen: a method is set and no fault turned it off."""
        return self.method.algorithm is not None and self.faults.get("spec-off") is None


def _json_file(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} can't be read: {error}") from error
    return value if isinstance(value, dict) else {}


def _method(args: argparse.Namespace) -> Method:
    algorithm: str | None = args.speculative_algorithm
    draft: int | None = args.speculative_num_draft_tokens
    if algorithm is None:
        given = [name for name in ("speculative_num_draft_tokens", "speculative_ddtree_budget") if getattr(args, name)]
        if given:
            raise UsageError(f"--{given[0].replace('_', '-')} needs --speculative-algorithm; it is not set")
        return Method("autoregressive")
    tree = (
        algorithm == "DDTREE"
        or args.speculative_dflash_tree_verify
        or args.speculative_dflash_tree_width is not None
        or args.speculative_dflash_enable_ddtree
    )
    if algorithm in ("DFLASH", "DDTREE", "DSPARK"):
        if not args.speculative_draft_model_path:
            raise UsageError(f"{algorithm} requires --speculative-draft-model-path, the folder of its draft model")
        if args.pp_size != 1:
            raise UsageError(f"{algorithm} supports pp_size 1; got --pp-size {args.pp_size}")
        known = _json_file(Path(args.speculative_draft_model_path) / "config.json").get("block_size")
        block = args.speculative_dflash_block_size
        if block is None and not tree and draft is not None:
            block = draft
        if block is None:
            block = known if isinstance(known, int) else 16
        if not tree:
            if draft is not None and draft != block:
                raise UsageError(
                    f"--speculative-num-draft-tokens is {draft} and --speculative-dflash-block-size {block}; "
                    "DFLASH needs them equal"
                )
            return Method("dflash", algorithm, block, block - 1, None, 0, block)
        nodes = os.environ.get("SGLANG_DFLASH_MAX_NUM_NODES")
        budget = args.speculative_ddtree_budget or args.speculative_dflash_tree_budget
        if budget is None and draft is not None:
            budget = draft - 1
        if budget is None and nodes is not None and nodes.isdecimal():
            budget = int(nodes)
        if budget is None:
            raise UsageError("a draft tree needs its node budget: --speculative-ddtree-budget N")
        if budget < 1:
            raise UsageError(f"the node budget of a draft tree is {budget}; expected at least 1")
        return Method("ddtree", algorithm, budget + 1, min(budget, block - 1), budget, budget + 1, block)
    if algorithm == "NGRAM":
        tokens = draft or 12
        return Method("ngram", algorithm, tokens, tokens - 1, None, 0, tokens)
    steps = args.speculative_num_steps or 3
    topk = args.speculative_eagle_topk or 1
    tokens = draft or (steps * topk + 1)
    name = "nextn" if algorithm == "NEXTN" else algorithm.lower()
    reserved = max(topk * steps, tokens) if name in ("eagle", "eagle3", "nextn", "frozen_kv_mtp") else 0
    return Method(name, algorithm, tokens, steps, None, reserved, tokens)


def _context(args: argparse.Namespace, model: dict[str, Any]) -> int:
    inner = model.get("text_config") if isinstance(model.get("text_config"), dict) else {}
    assert isinstance(inner, dict)
    native = model.get("max_position_embeddings") or inner.get("max_position_embeddings") or 262144
    if args.context_length is None:
        return int(native)
    if args.context_length < 1:
        raise UsageError(f"--context-length is {args.context_length}; expected at least 1")
    if args.context_length > native and os.environ.get("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "0") in ("0", ""):
        raise UsageError(
            f"User-specified context_length ({args.context_length}) is greater than the derived context_length "
            f"({native}); lower it, or set SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1"
        )
    return int(args.context_length)


def _kv_tokens(args: argparse.Namespace) -> int:
    free = GPU_GIB * args.mem_fraction_static - args.sim_weights_gib / args.tp_size - 3.0
    pool: int = int(free * args.tp_size * 2**30 / KV_BYTES_PER_TOKEN)
    if pool < 1:
        raise UsageError(
            f"RuntimeError: Not enough memory: {args.sim_weights_gib:g} GiB of weights over {args.tp_size} GPUs leave "
            f"{free:.1f} GiB of {GPU_GIB} GiB each; raise --tp-size or --mem-fraction-static"
        )
    if args.max_total_tokens is not None:
        pool = min(pool, int(args.max_total_tokens))
    return pool // int(args.page_size) * int(args.page_size)


def _environment(name: str) -> float | None:
    text = os.environ.get(name, "")
    try:
        return float(text) if text else None
    except ValueError:
        raise UsageError(f"{name} is {text!r}; expected a number") from None


def build(args: argparse.Namespace) -> Config:
    """Check the flags and resolve them.

    Raises:
        UsageError: a value or a combination that SGLang would refuse too, or a simulation flag out of range.
    """
    if not args.model_path:
        raise UsageError("--model-path is required: the folder of the model, with its tokenizer")
    path = Path(args.model_path)
    if not path.is_dir():
        raise UsageError(f"--model-path {path} is not a folder; expected the model with its tokenizer.json")
    if args.tp_size < 1:
        raise UsageError(f"--tp-size is {args.tp_size}; expected at least 1")
    if not args.sim_time_scale > 0:
        raise UsageError(f"--sim-time-scale is {args.sim_time_scale:g}; expected more than 0")
    if args.page_size < 1:
        raise UsageError(f"--page-size is {args.page_size}; expected at least 1")
    faults = parse(args.sim_fault)
    method = _method(args)
    model = _json_file(path / "config.json")
    context = _context(args, model)
    kv_tokens = _kv_tokens(args)
    running = args.max_running_requests
    if running is None:
        running = 48 if method.name in ("dflash", "ddtree") else 128
    if running < 1:
        raise UsageError(f"--max-running-requests is {running}; expected at least 1")
    effective = running
    if args.max_mamba_cache_size is not None:
        effective = min(effective, max(1, args.max_mamba_cache_size // 5))
    cap = faults.get("concurrency-cap")
    if cap is not None:
        effective = max(1, min(effective, int(cap.number)))
    launch_seed = args.random_seed if args.random_seed is not None else secrets.randbelow(2**30)
    stale = faults.get("stale-server")
    name = str(stale.arg) if stale is not None else args.served_model_name or args.model_path

    flat = {key: getattr(args, key, default) for key, default in defaults().items()}
    for key, default in FORK_ARGS.items():
        if getattr(args, key) != default:
            flat[key] = getattr(args, key)
    flat |= {
        "tokenizer_path": args.tokenizer_path or args.model_path,
        "served_model_name": name,
        "random_seed": launch_seed,
        "max_running_requests": running,
        "api_key": "<redacted>" if args.api_key else None,
    }
    if method.algorithm is not None:
        flat |= {
            "speculative_num_draft_tokens": method.verified,
            "speculative_num_steps": args.speculative_num_steps or 1,
            "speculative_eagle_topk": args.speculative_eagle_topk or 1,
        }
        if method.name in ("dflash", "ddtree"):
            flat |= {"speculative_dflash_block_size": method.block}
        if method.name == "ddtree":
            flat |= {"disable_overlap_schedule": True, "page_size": 1}
    if not 0 <= args.port <= 65535:
        raise UsageError(f"--port is {args.port}; expected a number up to 65535, 0 for a free one")
    gpu_ids = None
    if not args.sim_no_devices and args.device == "cuda":
        gpu_ids = [args.base_gpu_id + rank * args.gpu_id_step for rank in range(args.tp_size)]
    limit = _environment("SGLANG_MAX_NEW_TOKENS_LIMIT")
    accept = _environment("SGLANG_SIMULATE_ACC_LEN")
    return Config(
        args=flat,
        method=method,
        context_length=context,
        context_given=args.context_length is not None,
        kv_tokens=kv_tokens,
        max_running=running,
        effective_running=effective,
        chunked_prefill=args.chunked_prefill_size if args.chunked_prefill_size > 0 else 2**31,
        page_size=args.page_size,
        model_name=name,
        model_type=str(model.get("model_type", "qwen3_5")),
        architectures=list(model.get("architectures") or ["Qwen3_5ForConditionalGeneration"]),
        model_path=path,
        host=args.host,
        port=args.port,
        api_key=args.api_key,
        tp_size=args.tp_size,
        gpu_ids=gpu_ids,
        time_scale=args.sim_time_scale,
        min_step_s=0.0 if args.sim_allow_fast else 0.005,
        seed=args.sim_seed,
        launch_seed=launch_seed,
        jitter=args.sim_jitter,
        noise=args.sim_noise,
        natural_tokens=args.sim_natural_tokens,
        divergence=args.sim_divergence,
        startup_s=args.sim_startup,
        weights_gib=args.sim_weights_gib,
        truth=Path(args.sim_truth) if args.sim_truth else None,
        profile=args.sim_profile or os.environ.get("SPECRIG_PROFILE") or None,
        faults=faults,
        new_tokens_limit=int(limit) if limit is not None and limit > 0 else None,
        simulated_accept_length=accept if accept is not None and accept > 0 else None,
        json_log=args.json,
        command=shlex.join(["specrig", "sim", *_given()]),
    )


def _given() -> list[str]:
    """The arguments of this process after ``sim``, or nothing where it was not started from the command line."""
    import sys

    return sys.argv[sys.argv.index("sim") + 1 :] if "sim" in sys.argv else sys.argv[1:]
