"""What a sweep is: the YAML that spans profiles x workloads x load, read strictly."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from specrig.errors import UsageError
from specrig.model import read
from specrig.model.profile import parse_method

KINDS = ("questions", "prose", "code", "repeat", "agentic")
ARRIVALS = ("closed", "constant", "poisson", "gamma", "burst", "ramp", "trace")
MAX_TOKENS = 2_000_000
_Whole = Callable[[object, str], int]
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen; sent with every request, since an engine's own defaults need not be greedy."""

    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    thinking: bool = False


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """When a request counts as lost, in seconds."""

    first_token_s: float = 120.0
    idle_s: float = 30.0
    request_s: float = 3600.0


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """One workload; its tuples multiply into cells.

    Attributes:
        prompts: a built-in kind or the path of a .jsonl file, relative to the sweep.
        prompt_tokens: exact prompt lengths after the chat template; None = the prompt's own length.
            For agentic prompts the length that the last turn's context reaches.
        output_tokens: exact generated lengths, or the upper bound with `stop: natural`.
        read_at: shorter lengths read off the same stream.
        concurrency: requests in flight in closed loop; with an arrival process the most in flight, or None.
        requests: requests of a cell; with turns its sessions.
        turns: requests of a session, agentic or of a .jsonl file; tool_s: seconds that pass between two turns.
        tokens_per_repetition: what the author believes one repetition of `phrase` costs; the plan measures it.
        ramp_s: of a closed loop, seconds over which its concurrency is reached; 0 = at once.
        burstiness: of arrival gamma, the shape of its gaps. burst: of arrival burst, requests at once.
        rate_to: of arrival ramp, the rate it ends with.
        trace: of arrival trace, a file of times and lengths, relative to the sweep; `prompt_tokens` and `output_tokens`
            are then the largest that a row may name, and what a row without lengths has. trace_speed: times as fast.
    """

    name: str
    prompts: str
    prompt_tokens: tuple[int | None, ...]
    output_tokens: tuple[int, ...]
    read_at: tuple[int, ...] = ()
    concurrency: tuple[int | None, ...] = (1,)
    requests: int = 16
    cache: str = "flush"
    arrival: str = "closed"
    rate: tuple[float | None, ...] = (None,)
    stop: str = "length"
    profiles: tuple[str, ...] | None = None
    turns: int | None = None
    tool_s: float | None = None
    phrase: str | None = None
    tokens_per_repetition: int | None = None
    ramp_s: float | None = None
    burstiness: float | None = None
    burst: int | None = None
    rate_to: float | None = None
    trace: str | None = None
    trace_speed: float | None = None


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """A sweep as read and checked. `profiles` None: left out, for a server that is already running.

    `headroom`: tokens to keep free in every cell, over and above; a cell that does not have them is left out.
    """

    name: str
    model: str
    workloads: tuple[Workload, ...]
    api: str = "sglang"
    profiles: tuple[str, ...] | None = None
    baseline: str = "autoregressive"
    launches: int = 3
    sampling: Sampling = Sampling()
    timeouts: Timeouts = Timeouts()
    seed: int = 1
    margin: float = 0.02
    headroom: int = 0

    def as_dict(self) -> dict[str, object]:
        """Return the sweep as plain values, for the manifest."""
        return msgspec.json.decode(msgspec.json.encode(self), type=dict[str, object])


def load_sweep(source: str | Path) -> Sweep:
    """Read a sweep from a path, or from its text (a string that holds a line break).

    Raises:
        UsageError: one line with the place (`$.workloads[1].concurrency`), what was seen and what is expected.
    """
    if isinstance(source, str) and "\n" in source:
        return parse_sweep(source)
    path = Path(source)
    return parse_sweep(read.read_text(path), str(path))


def parse_sweep(text: str, source: str = "sweep") -> Sweep:
    """Read a sweep from its text; `source` begins the error line."""
    value = read.parse_yaml(text, source)
    if value is None:
        raise UsageError(f"{source}: is empty; expected a sweep with name, model and workloads")
    try:
        return _sweep(value)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None


_SWEEP = (
    "name", "model", "api", "profiles", "baseline", "launches", "sampling", "workloads", "timeouts", "seed", "margin",
    "headroom",
)  # fmt: skip
_WORKLOAD = tuple(Workload.__struct_fields__)


def _sweep(value: object) -> Sweep:
    fields = read.Fields(value, "$", _SWEEP)
    sweep = Sweep(
        name=fields.need("name", _name, "a short name for the sweep"),
        model=fields.need("model", read.text, "the served model's name"),
        api=fields.get("api", read.choice("sglang", "openai-chat", "openai-completions"), "sglang"),
        profiles=fields.get("profiles", read.optional(read.listed(read.text)), None),
        baseline=fields.get("baseline", _method, "autoregressive"),
        launches=fields.get("launches", read.whole(1, 100), 3),
        sampling=fields.get("sampling", _sampling, Sampling()),
        timeouts=fields.get("timeouts", _timeouts, Timeouts()),
        seed=fields.get("seed", read.whole(0, 2**63 - 1), 1),
        margin=fields.get("margin", _margin, 0.02),
        headroom=fields.get("headroom", read.whole(0, MAX_TOKENS), 0),
        workloads=fields.need("workloads", _workloads, "a list of workloads"),
    )
    for i, workload in enumerate(sweep.workloads):
        if workload.profiles is not None and sweep.profiles is None:
            raise read.fail(
                f"$.workloads[{i}].profiles", list(workload.profiles), "no profiles here, as the sweep names none"
            )
        if (workload.prompts == "agentic" or (workload.turns or 1) > 1) and sweep.api == "openai-completions":
            raise read.fail(
                f"$.workloads[{i}].prompts", workload.prompts, "a kind without turns, as api is openai-completions"
            )
    return sweep


def _name(value: object, path: str) -> str:
    name = read.text(value, path)
    if not _NAME.match(name):
        raise read.fail(path, value, "letters, digits, '_', '.' and '-', at most 63")
    return name


def _method(value: object, path: str) -> str:
    label = read.text(value, path)
    try:
        method, budget = parse_method(label)
    except UsageError:
        raise read.fail(path, value, "a method such as autoregressive, dflash or ddtree-b15") from None
    return method if budget is None else f"{method}-b{budget}"


def _margin(value: object, path: str) -> float:
    if isinstance(value, str) and (match := re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*%", value)):
        value = float(match[1]) / 100
    return read.number(0, 0.5)(value, path)


def _sampling(value: object, path: str) -> Sampling:
    fields = read.Fields(value, path, Sampling.__struct_fields__)
    return Sampling(
        temperature=fields.get("temperature", read.number(0, 10), 0.0),
        top_p=fields.get("top_p", read.optional(read.number(0, 1, above=True)), None),
        top_k=fields.get("top_k", read.optional(read.whole(1, 1_000_000)), None),
        thinking=fields.get("thinking", read.flag, False),
    )


def _timeouts(value: object, path: str) -> Timeouts:
    fields = read.Fields(value, path, Timeouts.__struct_fields__)
    seconds = read.number(0, 7 * 86400, above=True)
    return Timeouts(
        first_token_s=fields.get("first_token_s", seconds, 120.0),
        idle_s=fields.get("idle_s", seconds, 30.0),
        request_s=fields.get("request_s", seconds, 3600.0),
    )


def _workloads(value: object, path: str) -> tuple[Workload, ...]:
    if not isinstance(value, list) or not value:
        raise read.fail(path, value, "a list with at least one workload")
    if len(value) > 1000:
        raise read.fail(path, value, "at most 1000 workloads")
    out: list[Workload] = []
    for i, item in enumerate(value):
        workload = _workload(item, f"{path}[{i}]")
        if any(w.name == workload.name for w in out):
            raise read.fail(f"{path}[{i}].name", workload.name, "a name that no other workload has")
        out.append(workload)
    return tuple(out)


def _prompts(value: object, path: str) -> str:
    kind = read.text(value, path)
    if kind not in KINDS and not kind.endswith(".jsonl"):
        raise read.fail(path, value, f"one of {', '.join(KINDS)}, or a .jsonl file")
    return kind


def _workload(value: object, path: str) -> Workload:
    fields = read.Fields(value, path, _WORKLOAD)
    tokens = read.whole(1, MAX_TOKENS)
    kind = fields.need("prompts", _prompts, f"one of {', '.join(KINDS)}, or a .jsonl file")
    free = kind == "questions" or kind.endswith(".jsonl")
    arrival = fields.get("arrival", read.choice(*ARRIVALS), "closed")
    closed = arrival == "closed"
    lengths: tuple[int | None, ...] = (None,)
    if not free or "prompt_tokens" in fields:
        lengths = fields.need("prompt_tokens", read.listed(read.optional(tokens) if free else tokens), "prompt lengths")
    rate: tuple[float | None, ...] = (None,)
    if not closed and arrival != "trace":
        rate = fields.need("rate", read.listed(read.number(0, 1e6, above=True)), f"requests a second, for {arrival}")
    elif "rate" in fields:
        raise read.fail(fields.at("rate"), value["rate"], f"no rate, as arrival is {arrival}")  # type: ignore[index]
    load = read.whole(1, 100_000)
    workload = Workload(
        name=fields.need("name", _name, "a short name for the workload"),
        prompts=kind,
        prompt_tokens=lengths,
        output_tokens=fields.need("output_tokens", read.listed(tokens), "generated lengths"),
        read_at=tuple(sorted(fields.get("read_at", read.listed(tokens), tuple[int, ...]()))),
        concurrency=fields.get("concurrency", _concurrency(load, closed), (1,) if closed else (None,)),
        requests=fields.get("requests", read.whole(1, 1_000_000), 16),
        cache=fields.get("cache", read.choice("flush", "unique", "shared"), "flush"),
        arrival=arrival,
        rate=rate,
        stop=fields.get("stop", read.choice("length", "natural"), "length"),
        profiles=fields.get("profiles", read.optional(read.listed(read.text)), None),
        turns=fields.get("turns", read.whole(1, 1000), 4 if kind == "agentic" else None),
        tool_s=fields.get("tool_s", read.number(0, 3600), 0.0 if kind == "agentic" else None),
        phrase=fields.get("phrase", _phrase, None),
        tokens_per_repetition=fields.get("tokens_per_repetition", read.whole(1, 1_000_000), None),
        **_shape(fields, arrival),
    )
    _consistent(workload, path)
    return workload


_OF = {
    "ramp_s": "closed",
    "burstiness": "gamma",
    "burst": "burst",
    "rate_to": "ramp",
    "trace": "trace",
    "trace_speed": "trace",
}
"""The arrival that each key of a load shape belongs to."""


def _shape(fields: read.Fields, arrival: str) -> dict[str, Any]:
    """The keys of a load shape; each only with the arrival that it belongs to, and needed where that has no default."""
    positive = read.number(0, 1e6, above=True)
    kinds: dict[str, Callable[[object, str], object]] = {
        "ramp_s": read.number(0, 86400),
        "burstiness": positive,
        "burst": read.whole(1, 100_000),
        "rate_to": positive,
        "trace": _trace,
        "trace_speed": positive,
    }
    found: dict[str, Any] = {}
    for name, kind in kinds.items():
        if name in fields and _OF[name] != arrival:
            raise UsageError(f"{fields.at(name)}: saw it with arrival {arrival}; expected it with {_OF[name]} only")
        if _OF[name] == arrival and name not in ("ramp_s", "trace_speed"):
            found[name] = fields.need(name, kind, f"what arrival {arrival} takes")
        else:
            found[name] = fields.get(name, kind, None)
    return found


def _trace(value: object, path: str) -> str:
    name = read.text(value, path)
    if not name.endswith((".jsonl", ".csv")):
        raise read.fail(path, value, "a .jsonl or .csv file")
    return name


def _concurrency(load: _Whole, closed: bool) -> Callable[[object, str], tuple[int | None, ...]]:
    return read.listed(load if closed else read.optional(load))


def _phrase(value: object, path: str) -> str:
    if not isinstance(value, str) or not value.strip() or len(value) > 100_000:
        raise read.fail(path, value, "the text that is repeated")
    return value


def _consistent(workload: Workload, path: str) -> None:
    """Refuse values that are each possible but not together."""
    longest = max(workload.output_tokens)
    for i, length in enumerate(workload.read_at):
        if length > longest:
            raise read.fail(f"{path}.read_at[{i}]", length, f"at most the {longest} tokens that are generated")
    for load in workload.concurrency:
        if load is not None and load > workload.requests:
            what = "sessions" if workload.turns else "requests"
            raise read.fail(f"{path}.concurrency", load, f"at most the cell's {workload.requests} {what}")
    file = workload.prompts.endswith(".jsonl")
    if workload.prompts != "agentic" and not file and (workload.turns is not None or workload.tool_s is not None):
        raise UsageError(
            f"{path}: saw turns or tool_s with prompts {workload.prompts}; expected them with agentic or a .jsonl file"
        )
    if workload.tool_s is not None and workload.turns is None:
        raise UsageError(f"{path}: saw tool_s without turns; expected both")
    if workload.turns is not None and workload.arrival != "closed":
        raise read.fail(f"{path}.arrival", workload.arrival, "closed, as a turn waits for the one before")
    if workload.trace is not None and (len(workload.prompt_tokens) > 1 or len(workload.output_tokens) > 1):
        raise UsageError(f"{path}: saw lists of lengths with a trace; expected one, the largest that a row may name")
    if workload.prompts != "repeat" and (workload.phrase or workload.tokens_per_repetition):
        raise UsageError(
            f"{path}: saw phrase or tokens_per_repetition with prompts {workload.prompts}; expected repeat"
        )
