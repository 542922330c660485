"""The plan of a sweep: what will run, what does not fit and why, how wide the intervals and how long it takes."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from specrig.errors import UsageError
from specrig.model.cell import Cell, expand
from specrig.model.profile import Profile
from specrig.model.schedule import Launch, launches
from specrig.model.sweep import Sweep
from specrig.tokens.budget import Budget, Limits, check, check_repetition
from specrig.tokens.prompts import PHRASE, PromptFactory, for_cell, notes, texts
from specrig.tokens.student import quantile
from specrig.tokens.tokenizer import Tokenizer
from specrig.tokens.trace import longest, rows_of

SD_LOG = 0.3
"""Standard deviation of the log speed-up between prompts that is taken before anything was measured."""


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How fast a server is taken to be for the estimate of time. Assumed figures, not measured ones."""

    prefill_tokens_per_s: float = 4000.0
    decode_tokens_per_s: float = 40.0
    launch_s: float = 120.0


class Infeasible(msgspec.Struct, frozen=True, kw_only=True):
    """A cell that will not run, and why."""

    cell: str
    title: str
    reason: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan.

    Attributes:
        cells: all cells, the infeasible ones too.
        budgets: by cell id; cells whose prompt cannot be built have none.
        prompt_tokens: by cell id, the longest prompt as built and counted.
        expected_ci_width: by cell id, the half-width of the speed-up's 95 % interval (0.17 = +-17 %); see `ci_width`.
            Cells with one prompt have none.
        estimate_s: seconds of all launches at `pace`.
        launches: of the cells that fit.
        corpora: SHA-256 of the texts that prompts are made of, a sweep's .jsonl files among them.
        notes: what of a file's rows is sent, and how the tools of agentic prompts are written.
        tokenizer: its revision.
    """

    sweep: str
    cells: tuple[Cell, ...]
    infeasible: tuple[Infeasible, ...]
    budgets: dict[str, Budget]
    prompt_tokens: dict[str, int]
    expected_ci_width: dict[str, float]
    sd_log: float
    estimate_s: float
    pace: Pace
    launches: tuple[Launch, ...]
    corpora: dict[str, str]
    notes: tuple[str, ...]
    tokenizer: str

    @property
    def feasible(self) -> tuple[Cell, ...]:
        """The cells that will run."""
        out = {i.cell for i in self.infeasible}
        return tuple(c for c in self.cells if c.id not in out)


Counter = Callable[[Sequence[Mapping[str, object]], Sequence[Mapping[str, object]] | None], int | None]
"""What a server counts for chat messages and tools; None where it cannot say."""


def plan(
    sweep: Sweep,
    tokenizer: Tokenizer,
    limits_by_profile: Mapping[str | None, Limits] | Mapping[str, Limits],
    profiles: Mapping[str, Profile] | None = None,
    *,
    source: Path | None = None,
    cells: Sequence[Cell] | None = None,
    headroom: int | None = None,
    sd_log: float = SD_LOG,
    pace: Pace | None = None,
    server_count: Counter | None = None,
) -> Plan:
    """Return the plan of a sweep; one prompt of every shape is built and counted.

    Args:
        sweep: the sweep.
        tokenizer: the model's.
        limits_by_profile: what each profile's server can take; the key None stands for every other profile.
        profiles: the inventory's; None for a server that is no profile of ours.
        source: the sweep's file; a .jsonl path is relative to its folder.
        cells: the cells to plan, all of the sweep's by default.
        headroom: tokens to keep free in every cell; None takes the sweep's.
        sd_log: standard deviation of the log speed-up between prompts.
        pace: speeds for the estimate of time.
        server_count: what the running server counts for messages, to check the tokenizer against it.

    Raises:
        UsageError: a profile has no limits, or the sweep names what is not there, such as a .jsonl file.
    """
    pace = pace or Pace()
    headroom = sweep.headroom if headroom is None else headroom
    chosen = tuple(expand(sweep, profiles) if cells is None else cells)
    limits: dict[str | None, Limits] = dict(limits_by_profile.items())
    base = source.parent if source is not None else None
    built: dict[object, tuple[int, int, int] | str] = {}
    infeasible: list[Infeasible] = []
    budgets: dict[str, Budget] = {}
    tokens: dict[str, int] = {}
    for listed in chosen:
        own = limits.get(listed.profile, limits.get(None))
        if own is None:
            raise UsageError(
                f"{listed.profile or 'the server'}: its context length is not known; give --context-length"
            )
        cell = _longest(listed, base)
        shape = (cell.prompts, cell.prompt_tokens, cell.cache, cell.turns, cell.phrase, cell.tokens_per_repetition)
        if shape not in built:
            built[shape] = _measure(cell, tokenizer, base, server_count)
        found = built[shape]
        reasons = [found] if isinstance(found, str) else []
        if not isinstance(found, str):
            tokens[cell.id] = found[0]
            budgets[cell.id] = check(
                found[0], cell.output_tokens, own, cell.concurrency, headroom, shared_tokens=found[2]
            )
            reasons += budgets[cell.id].problems
        reasons += claim_problems(cell, tokenizer, own, 0 if isinstance(found, str) else found[1], headroom)
        if reasons:
            infeasible.append(Infeasible(cell=listed.id, title=listed.title, reason="; ".join(reasons)))
    unfit = {i.cell for i in infeasible}
    fit = [c for c in chosen if c.id not in unfit]
    order = tuple(launches(sweep, fit))
    seconds = {c.id: cell_seconds(c, tokens[c.id], pace) for c in fit}
    return Plan(
        sweep=sweep.name,
        cells=chosen,
        infeasible=tuple(infeasible),
        budgets=budgets,
        prompt_tokens=tokens,
        expected_ci_width={c.id: ci_width(c.requests, sd_log) for c in chosen if c.requests > 1},
        sd_log=sd_log,
        estimate_s=sum(pace.launch_s + sum(seconds[i] for i in launch.cells) for launch in order),
        pace=pace,
        launches=order,
        corpora=texts(chosen, base),
        notes=notes(tokenizer, chosen, base),
        tokenizer=tokenizer.revision,
    )


def _longest(cell: Cell, base: Path | None) -> Cell:
    """The cell with the lengths of its longest request, where a trace gives each its own."""
    rows = rows_of(cell, base)
    if not rows:
        return cell
    most = longest(rows)
    return msgspec.structs.replace(
        cell, prompt_tokens=most.prompt_tokens, output_tokens=most.output_tokens or cell.output_tokens
    )


def _measure(
    cell: Cell, tokenizer: Tokenizer, base: Path | None, server_count: Counter | None
) -> tuple[int, int, int] | str:
    """Return (longest prompt, tokens around a text, shared tokens) as built, or why it cannot be built as asked."""
    factory = for_cell(tokenizer, cell, base)
    try:
        if cell.prompt_tokens is None:
            prompts = [prompt for i in range(min(cell.requests, 200)) for prompt in factory.session(i)]
        else:  # the last one's number is the longest
            wanted = {0, min(cell.requests, 2) - 1 if cell.cache == "shared" else 0, cell.requests - 1}
            prompts = [factory.session(i)[-1] for i in sorted(wanted)]
    except UsageError as error:
        return str(error)
    longest = max(prompts, key=lambda p: p.tokens)
    asked = cell.prompt_tokens
    if asked is not None and longest.tokens != asked:
        return f"the prompt is not the length asked for: {longest.tokens:,} tokens, {asked:,} were asked"
    if server_count is not None and longest.messages is not None:
        served = server_count(longest.messages, longest.tools)
        if served is not None and served != longest.tokens:
            return (
                f"the server counts {served:,} tokens for a prompt of {longest.tokens:,}: its tokenizer or chat "
                f"template is not the one of {tokenizer.path}"
            )
    shared = shared_tokens(cell, [prompt.ids for prompt in prompts[:2]])
    return longest.tokens, longest.question_tokens + template_tokens(factory), min(shared, longest.tokens)


def shared_tokens(cell: Cell, two: Sequence[Sequence[int] | None]) -> int:
    """Return the tokens that prompts of `cache: shared` begin with, by the ids of two of them; else 0."""
    if cell.cache != "shared" or len(two) < 2:
        return 0
    pairs = zip(two[0] or (), two[1] or (), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def template_tokens(factory: PromptFactory) -> int:
    """Return the tokens that the chat template puts around one message."""
    if not factory.templated or not factory.tokenizer.has_template:
        return 0
    message = {"role": "user", "content": "x"}
    return len(factory.tokenizer.chat_ids([message], factory.thinking)) - factory.tokenizer.count("x")


def claim_problems(
    cell: Cell, tokenizer: Tokenizer, limits: Limits | None, around: int, headroom: int = 0
) -> list[str]:
    """Return what is wrong with the sweep's own belief of what a repetition of its phrase costs.

    Args:
        cell: the cell; without ``tokens_per_repetition`` it believes nothing.
        tokenizer: the model's.
        limits: what the server can take, where that is known.
        around: tokens of the question and the template.
        headroom: tokens to keep free.
    """
    claimed, asked = cell.tokens_per_repetition, cell.prompt_tokens
    if claimed is None or asked is None:
        return []
    if asked < claimed:
        return [f"prompt_tokens {asked:,} is less than one repetition of the {claimed:,} tokens claimed"]
    real = tokenizer.count((cell.phrase or PHRASE) * (asked // claimed))
    found = check_repetition(
        asked,
        claimed,
        real,
        limits or Limits(context_length=sys.maxsize),
        question_tokens=around,
        max_new_tokens=cell.output_tokens,
        concurrency=cell.concurrency,
        headroom=headroom,
    )
    if found.right_length:
        return []
    total = f"{real:,} + {around:,} for question and template + {cell.output_tokens:,} = {found.total_tokens:,}"
    against = f" against {limits.context_length:,}" if limits else ""
    return [
        f"{found.problems[0]}; with {total}{against}; correct tokens_per_repetition, or "
        "leave it out and the prompt is built exactly"
    ]


def ci_width(prompts: int, sd_log: float = SD_LOG) -> float:
    """Return the expected half-width of a speed-up's 95 % interval, as a share of the speed-up.

    The interval is exp(mean +- t * s / sqrt(n)) over the log ratios of n prompts, t the 97.5 % quantile of Student's t
    with n - 1 degrees of freedom; its upper half is exp(t * s / sqrt(n)) - 1. At s = 0.3, 16 prompts give 17 %, 140
    give 5 %. Repeated launches take the same prompts again, so they do not narrow it.
    """
    return math.expm1(quantile(0.975, prompts - 1) * sd_log / math.sqrt(prompts))


def cell_seconds(cell: Cell, prompt_tokens: int, pace: Pace) -> float:
    """Return the seconds a cell is taken to need: one warm-up request, then waves of `concurrency` requests.

    Prefill is taken to be shared by a wave, decode to run at full speed for each. With an arrival process the last
    arrival bounds it from below.
    """
    load = min(cell.concurrency or cell.requests, cell.requests)
    one = prompt_tokens / pace.prefill_tokens_per_s + cell.output_tokens / pace.decode_tokens_per_s
    wave = load * prompt_tokens / pace.prefill_tokens_per_s + cell.output_tokens / pace.decode_tokens_per_s
    turns = cell.turns or 1
    busy = math.ceil(cell.requests / load) * turns * (wave + (cell.tool_s or 0))
    rate = (cell.rate + (cell.rate_to or cell.rate)) / 2 if cell.rate else None
    arrivals = cell.requests / rate if rate else 0.0
    return one + max(busy, arrivals)
