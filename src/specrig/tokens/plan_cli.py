"""``specrig plan``: what a sweep would run, what does not fit, how wide the intervals and how long it takes."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrig.tokens.budget_cli import _count, _count_or_zero

if TYPE_CHECKING:
    from specrig.engine.client import EngineClient
    from specrig.model.cell import Cell
    from specrig.model.profile import Profile
    from specrig.model.sweep import Sweep
    from specrig.tokens.budget import Limits
    from specrig.tokens.plan import Counter, Plan
    from specrig.tokens.tokenizer import Tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``specrig plan``."""
    add = parser.add_argument
    add("sweep", metavar="SWEEP", help="the sweep's YAML file")
    add("--tokenizer", required=True, metavar="DIR", help="the folder of the model's tokenizer")
    add("--profiles", metavar="FILE", help="YAML with the profiles, such as group_vars/all.yml of an inventory")
    add("--context-length", type=_count, metavar="N", help="the context window of every server")
    add("--kv-tokens", type=_count, metavar="K", help="capacity of every server's KV pool in tokens")
    add("--max-running", type=_count, metavar="R", help="requests that a server runs at once")
    add("--url", help="read the limits from this running server, and check the tokenizer against it")
    add("--api-key", metavar="KEY", help="bearer token for --url (SPECRIG_API_KEY)")
    add("--headroom", type=_count_or_zero, metavar="H", help="tokens to keep free in every cell (the sweep's)")
    add("--only", action="append", default=[], metavar="GLOB", help="cells by profile, workload, method or id")
    add("--sd-log", type=_positive, metavar="S", help="standard deviation of the log speed-up between prompts (0.3)")
    add("--prefill-rate", type=_positive, metavar="TOK/S", help="assumed for the estimate of time (4000)")
    add("--decode-rate", type=_positive, metavar="TOK/S", help="assumed for the estimate of time (40)")
    add("--launch-seconds", type=_positive, metavar="S", help="assumed for one start of a server (120)")
    add("--json", action="store_true", help="print JSON")


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e12:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a number above 0")
    return value


def run(args: argparse.Namespace) -> int:
    """Print the plan; return 0 where every cell fits, else 1."""
    from specrig.model.cell import expand, select
    from specrig.model.sweep import load_sweep
    from specrig.ops.benchmark import sweep_path
    from specrig.tokens import tokenizer as tokenizers
    from specrig.tokens.plan import SD_LOG, Pace, plan

    path = sweep_path(args.sweep)
    sweep = load_sweep(path)
    profiles = read_profiles(Path(args.profiles)) if args.profiles else None
    cells = select(expand(sweep, profiles), args.only)
    default = Pace()
    tokenizer = tokenizers.load(args.tokenizer)
    with contextlib.ExitStack() as stack:
        limits, count, notes = _limits(args, profiles, cells, stack, tokenizer)
        planned = plan(
            sweep,
            tokenizer,
            limits,
            profiles,
            source=path,
            cells=cells,
            headroom=args.headroom,
            sd_log=args.sd_log or SD_LOG,
            pace=Pace(
                prefill_tokens_per_s=args.prefill_rate or default.prefill_tokens_per_s,
                decode_tokens_per_s=args.decode_rate or default.decode_tokens_per_s,
                launch_s=args.launch_seconds or default.launch_s,
            ),
            server_count=count,
        )
    if args.json:
        print(json.dumps(as_json(planned) | {"server": notes}, indent=2))
    else:
        for note in notes:
            print(f"note: {note}")
        _show(sweep, planned, profiles, limits)
    return 1 if planned.infeasible else 0


def read_profiles(path: Path) -> dict[str, Profile]:
    """Return the profiles of a YAML file: the mapping itself, or the one under `sglang_server_profiles`."""
    from specrig.errors import UsageError
    from specrig.model import read
    from specrig.model.profile import parse_profiles

    value = read.parse_yaml(read.read_text(path), str(path))
    key = "sglang_server_profiles"
    try:
        if isinstance(value, Mapping) and key in value:
            return parse_profiles(value[key])
        return parse_profiles(value, "$")
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _limits(
    args: argparse.Namespace,
    profiles: Mapping[str, Profile] | None,
    cells: Sequence[Cell],
    stack: contextlib.ExitStack,
    tokenizer: Tokenizer,
) -> tuple[dict[str | None, Limits], Counter | None, list[str]]:
    import msgspec

    from specrig.errors import UsageError
    from specrig.tokens.budget import Limits
    from specrig.tokens.limits import for_profile

    given: dict[str, Any] = {}
    for name in ("context_length", "kv_tokens", "max_running"):
        if getattr(args, name) is not None:
            given[name] = getattr(args, name)
    if args.url:
        if args.context_length is not None or args.kv_tokens is not None:
            given["max_input"] = None  # it is of the server's own window and pool
        from specrig.engine.client import EngineClient
        from specrig.tokens.budget_cli import ask_server

        client = stack.enter_context(EngineClient(args.url, args.api_key or os.environ.get("SPECRIG_API_KEY")))
        thinking = any(c.sampling.thinking for c in cells)
        own, notes = ask_server(client, tokenizer, thinking, cells[0].model)
        return {None: msgspec.structs.replace(own, **given)}, _server_counter(client, cells), notes
    found: dict[str | None, Limits] = {}
    for arm in {c.profile for c in cells}:
        if arm is None or profiles is None:
            if args.context_length is None:
                raise UsageError(
                    "the context length is not known; give --context-length, --profiles FILE, or --url of a server"
                )
            found[None] = Limits(**given)
        else:
            planned = for_profile(profiles[arm], **given)
            if planned is None:
                raise UsageError(f"{args.profiles}: {arm} has no context_length; give it or --context-length")
            found[arm] = planned
    return found, None, []


def _server_counter(client: EngineClient, cells: Sequence[Cell]) -> Counter:
    """Return a function that has the server count messages; None where it has no such endpoint."""
    from specrig.errors import SpecrigError

    template = {"enable_thinking": any(c.sampling.thinking for c in cells)}
    model = cells[0].model

    def count(messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]] | None) -> int | None:
        try:
            ids = client.tokenize(messages=messages, tools=tools, chat_template_kwargs=template, model=model)
            return len(ids)
        except SpecrigError:
            return None

    return count


def as_json(planned: Plan) -> dict[str, Any]:
    """Return a plan as plain values."""
    import msgspec

    reasons = {i.cell: i.reason for i in planned.infeasible}
    rows = []
    for cell in planned.cells:
        row = msgspec.to_builtins(cell)
        budget = planned.budgets.get(cell.id)
        row.update(
            title=cell.title,
            fits=cell.id not in reasons,
            reason=reasons.get(cell.id),
            counted_prompt_tokens=planned.prompt_tokens.get(cell.id),
            expected_ci_width=planned.expected_ci_width.get(cell.id),
            budget=None if budget is None else msgspec.to_builtins(budget),
        )
        rows.append(row)
    return {
        "sweep": planned.sweep,
        "fits": not planned.infeasible,
        "cells": rows,
        "infeasible": msgspec.to_builtins(planned.infeasible),
        "launches": msgspec.to_builtins(planned.launches),
        "estimate_s": round(planned.estimate_s, 1),
        "pace_assumed": msgspec.to_builtins(planned.pace),
        "sd_log_assumed": planned.sd_log,
        "corpora": planned.corpora,
        "notes": list(planned.notes),
        "tokenizer": planned.tokenizer,
    }


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def _show(
    sweep: Sweep, planned: Plan, profiles: Mapping[str, Profile] | None, limits: Mapping[str | None, Limits]
) -> None:
    from specrig.tokens.budget_cli import describe

    arms = len({c.profile for c in planned.cells})
    print(f"sweep {sweep.name}: {len(planned.cells)} cells, {arms} arms, {sweep.launches} launches of each")
    if profiles is None and sweep.profiles is not None:
        print("note: the sweep names profiles, and none were given (--profiles): planned as one server")
    for note in planned.notes:
        print(f"note: {note}")
    for text in sorted({describe(own) for own in limits.values()}):
        print(f"limits: {text}")
    print(f"{'workload':<16} {'tp':>3} {'prompt':>8} {'new':>6} {'load':>5} {'n':>5} {'width':>6}  methods")
    unfit = {i.cell for i in planned.infeasible}
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in planned.cells:
        load = f"{cell.concurrency or '-'}" if cell.rate is None else f"{cell.rate:g}/s"
        prompt = planned.prompt_tokens.get(cell.id, cell.prompt_tokens or 0)
        key = (cell.workload, cell.tp or "-", prompt, cell.output_tokens, load, cell.requests, cell.id in unfit)
        groups.setdefault(key, []).append(cell)
    for (workload, tp, prompt, new, load, n, bad), cells in groups.items():
        width = planned.expected_ci_width.get(cells[0].id)
        methods = ", ".join(dict.fromkeys(c.method or "-" for c in cells))
        print(
            f"{workload:<16} {tp:>3} {prompt:>8,} {new:>6,} {load:>5} {n:>5} {_percent(width):>6}  "
            f"{'DOES NOT FIT: ' if bad else ''}{methods}"
        )
    for item in planned.infeasible:
        print(f"skipped {item.cell} {item.title}: {item.reason}")
    print(
        f"width: expected half of the speed-up's 95 % interval, exp(t(0.975, n-1) * {planned.sd_log:g} / sqrt(n)) - 1 "
        f"over n prompts, {planned.sd_log:g} the assumed SD of the log speed-up"
    )
    pace = planned.pace
    print(
        f"{len(planned.launches)} launches, about {_duration(planned.estimate_s)}, assuming prefill "
        f"{pace.prefill_tokens_per_s:,.0f} tok/s, decode {pace.decode_tokens_per_s:,.0f} tok/s a stream, "
        f"{pace.launch_s:.0f} s a launch"
    )
    print(f"{len(planned.cells) - len(unfit)} cells fit, {len(unfit)} do not")


def _percent(width: float | None) -> str:
    return "-" if width is None else f"{width * 100:.0f} %" if width < 9.99 else ">999 %"
