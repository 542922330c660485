"""The command line: SGLang 0.5.23's flags, those of the DDTree forks, and the simulation's own.

Every flat argument that a real 0.5.23 server reports is a flag here with the same default (``server_args.json``), so
what SGLang takes is taken and what it does not know is refused.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

_ALIASES = {
    "model_path": ["--model"],
    "tp_size": ["--tensor-parallel-size", "--tp"],
    "pp_size": ["--pipeline-parallel-size", "--pp"],
    "dp_size": ["--data-parallel-size", "--dp"],
    "ep_size": ["--expert-parallel-size", "--ep"],
}
_INTEGERS = frozenset(
    (
        "context_length",
        "max_running_requests",
        "max_queued_requests",
        "max_total_tokens",
        "prefill_max_requests",
        "random_seed",
        "nccl_port",
        "dist_timeout",
        "grpc_port",
        "pp_max_micro_batch_size",
        "cuda_graph_max_bs_decode",
        "cuda_graph_max_bs_prefill",
        "cuda_graph_prefill_max_context",
        "speculative_num_steps",
        "speculative_eagle_topk",
        "speculative_num_draft_tokens",
        "speculative_dflash_block_size",
        "speculative_dspark_block_size",
        "speculative_draft_window_size",
        "speculative_draft_sink_size",
        "max_mamba_cache_size",
        "max_lora_rank",
        "max_loaded_loras",
        "default_priority_value",
        "moe_dense_tp_size",
        "max_ep_size",
        "triton_attention_split_tile_size",
    )
)
_INTEGER_LISTS = frozenset(["numa_node", "cuda_graph_bs_decode", "cuda_graph_bs_prefill"])
_LISTS = frozenset(["lora_paths", "lora_target_modules", "warmups", "log_requests_target"])
_CHOICES: dict[str, list[str]] = {
    "speculative_algorithm": [
        *("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "DFLASH", "DSPARK", "UNO"),
        *("DDTREE", "FROZEN_KV_MTP"),
    ],
    "device": ["cuda", "cpu"],
    "mamba_radix_cache_strategy": ["auto", "no_buffer", "extra_buffer", "extra_buffer_lazy"],
    "sampling_defaults": ["model", "openai"],
}
FORK_ARGS: dict[str, Any] = {
    "speculative_ddtree_budget": None,
    "speculative_dflash_tree_verify": False,
    "speculative_dflash_tree_width": None,
    "speculative_dflash_tree_budget": None,
    "speculative_dflash_enable_ddtree": False,
}
"""Arguments of the forks that bring DDTree; a server reports them only where they were given."""
_SHOWN = {
    "model_path": "the model's folder, with its tokenizer",
    "served_model_name": "the name in the API",
    "tp_size": "ranks, one process each",
    "context_length": "tokens of the window",
    "host": "address to listen on",
    "port": "port to listen on; 0 takes a free one",
    "max_running_requests": "requests that run at once",
    "max_total_tokens": "tokens of the KV pool",
    "speculative_algorithm": "the method; none is autoregressive",
    "reasoning_parser": "such as qwen3: splits reasoning from the answer",
    "enable_metrics": "serve /metrics",
    "incremental_streaming_output": "/generate streams deltas, not everything so far",
    "base_gpu_id": "the first GPU, counted after CUDA_VISIBLE_DEVICES",
    "random_seed": "here also: what one launch's speed is drawn from",
}


class _Config(argparse.Action):
    """``--config FILE``: options from a YAML file. What the command line says wins, as with SGLang."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,  # noqa: ARG002 (argparse's signature)
    ) -> None:
        import yaml

        try:
            found = yaml.safe_load(Path(values).read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise argparse.ArgumentError(self, f"{values} can't be read: {' '.join(str(error).split())}") from None
        if not isinstance(found, dict):
            raise argparse.ArgumentError(self, f"{values} holds no options; expected lines of OPTION: VALUE")
        for key, value in found.items():
            option = "--" + str(key).replace("_", "-")
            action = parser._option_string_actions.get(option)
            if action is None:
                raise argparse.ArgumentError(self, f"{values} has {key}, which is no option")
            if getattr(namespace, action.dest, action.default) == action.default:
                setattr(namespace, action.dest, action.type(str(value)) if callable(action.type) else value)


def defaults() -> dict[str, Any]:
    """The flat arguments of a 0.5.23 server, by name, with their defaults."""
    loaded: dict[str, Any] = json.loads(Path(__file__).with_name("server_args.json").read_text(encoding="utf-8"))
    return loaded


def _add(parser: argparse._ArgumentGroup, name: str, default: Any) -> None:
    spelled = ["--" + name.replace("_", "-"), *_ALIASES.get(name, [])]
    text = _SHOWN.get(name, argparse.SUPPRESS)
    if isinstance(default, bool):
        parser.add_argument(*spelled, dest=name, action="store_true", default=default, help=text)
        return
    options: dict[str, Any] = {"dest": name, "default": default, "help": text}
    if text is not argparse.SUPPRESS:
        options["metavar"] = name.rpartition("_")[2].upper()
    if name in _INTEGERS or isinstance(default, int):
        options["type"] = int
    elif isinstance(default, float):
        options["type"] = float
    elif name in _INTEGER_LISTS:
        options |= {"type": int, "nargs": "+"}
    elif name in _LISTS or isinstance(default, list):
        options["nargs"] = "*"
    elif isinstance(default, dict):
        options["type"] = json.loads
    if name in _CHOICES:
        options["choices"] = _CHOICES[name]
    parser.add_argument(*spelled, **options)


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """SGLang's flags. Prefixes of a flag are taken where they are unambiguous, as SGLang does."""
    parser.allow_abbrev = True
    group = parser.add_argument_group("SGLang's flags (0.5.23 and the DDTree forks; the main ones shown)")
    for name, default in defaults().items():
        if not name.startswith("_") and name != "custom_sigquit_handler":
            _add(group, name, default)
    group.add_argument("--config", action=_Config, metavar="FILE", help="options from a YAML file")
    for name, default in FORK_ARGS.items():
        if isinstance(default, bool):
            _add(group, name, default)
        else:
            group.add_argument("--" + name.replace("_", "-"), dest=name, type=int, default=None, help=argparse.SUPPRESS)


def add_simulation_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that only the simulated engine has."""
    group = parser.add_argument_group("the simulation's flags")
    add = group.add_argument
    add("--sim-time-scale", type=float, default=1.0, metavar="S", help="multiply every simulated time by S (1)")
    add("--sim-seed", type=int, default=0, metavar="N", help="seed of texts, difficulty and acceptance (0)")
    add("--sim-truth", metavar="FILE", help="append what was really done to FILE, one JSON line a request")
    add("--sim-profile", metavar="NAME", help="the profile's name in the truth (SPECRIG_PROFILE)")
    add("--sim-fault", action="append", default=[], metavar="NAME[=ARG][@N]", help="inject a fault; repeatable")
    add("--list-faults", action="store_true", help="name all faults and end")
    add("--sim-no-devices", action="store_true", help="open no GPU device nodes")
    add("--sim-allow-fast", action="store_true", help="allow steps under 5 ms of wall time")
    add("--sim-startup", type=float, default=0.0, metavar="S", help="wall seconds of loading before ready (0)")
    add("--sim-jitter", type=float, default=0.005, metavar="F", help="spread of speed between launches (0.005)")
    add("--sim-noise", type=float, default=0.01, metavar="F", help="spread of single step times (0.01)")
    add(
        "--sim-natural-tokens",
        type=int,
        default=2400,
        metavar="N",
        help="median length of an answer before its end-of-sequence token (2400)",
    )
    add(
        "--sim-divergence",
        type=float,
        default=1e-4,
        metavar="P",
        help="probability a token that another batch shape or kernel changes greedy output (0.0001)",
    )
    add("--sim-weights-gib", type=float, default=51.8, metavar="G", help="weights of the simulated model (51.8)")
    add("--json", action="store_true", help="log as JSON lines on standard output")
