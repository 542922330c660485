"""What a cell is: one point of a sweep, with an id that is a hash of what defines it."""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from specrig.errors import UsageError
from specrig.model.profile import Profile
from specrig.model.sweep import Sampling, Sweep, Workload

MatchKey = tuple[str, int | None, int | None, int, int | None, float | None]


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One point of a sweep.

    Attributes:
        id: first 12 hex digits of the SHA-256 of the canonical JSON of everything that defines the cell.
            Placement, launch, timeouts and corpora are not part of it.
        method: the label, `ddtree-b15`; None where the server is not one of our profiles.
        requests: requests, or sessions where there are turns (each of `turns` requests).
    """

    id: str
    workload: str
    prompts: str
    prompt_tokens: int | None
    output_tokens: int
    model: str
    api: str
    seed: int
    sampling: Sampling
    profile: str | None = None
    method: str | None = None
    budget: int | None = None
    tp: int | None = None
    context_length: int | None = None
    read_at: tuple[int, ...] = ()
    concurrency: int | None = 1
    requests: int = 16
    cache: str = "flush"
    arrival: str = "closed"
    rate: float | None = None
    stop: str = "length"
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

    @property
    def title(self) -> str:
        """A short name for people: `tp4-dflash/decode p4096 n1024 c8`."""
        where = f"{self.profile}/" if self.profile else ""
        length = "" if self.prompt_tokens is None else f" p{self.prompt_tokens}"
        load = "" if self.concurrency is None else f" c{self.concurrency}"
        rate = "" if self.rate is None else f" r{self.rate:g}"
        return f"{where}{self.workload}{length} n{self.output_tokens}{load}{rate}"

    @property
    def total_requests(self) -> int:
        """Requests of the cell, every turn of a session counted."""
        return self.requests * (self.turns or 1)

    @property
    def periodic(self) -> bool:
        """True where the prompt is a phrase repeated, which makes acceptance say little about real text."""
        return self.prompts == "repeat"


def match_key(cell: Cell) -> MatchKey:
    """Return what cells of different methods share when they may be compared: workload, tp, prompt, output, load."""
    return (cell.workload, cell.tp, cell.prompt_tokens, cell.output_tokens, cell.concurrency, cell.rate)


def prompt_key(cell: Cell) -> str:
    """Return a text that is equal for cells whose prompts must be equal (all methods, all tp), and for no others.

    It salts the prompts under `cache: unique`, so that two cells of one launch share no prefix.
    """
    return json.dumps([cell.workload, cell.prompt_tokens, cell.output_tokens, cell.concurrency, cell.rate])


def cell_id(definition: Mapping[str, object]) -> str:
    """Return the id of a definition: names and values, absent (None) ones left out, so that new fields keep old ids."""
    kept = {k: v for k, v in definition.items() if v is not None and k != "id"}
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def expand(sweep: Sweep, profiles: Mapping[str, Profile] | None = None) -> list[Cell]:
    """Return the cells of a sweep: every workload's lists multiplied, once per profile that the workload names.

    Args:
        sweep: the sweep.
        profiles: the inventory's profiles; None for a server that is no profile of ours (cells with profile None).

    Raises:
        UsageError: a glob matches no profile, or a profile serves another model.
    """
    cells: list[Cell] = []
    for i, workload in enumerate(sweep.workloads):
        arms: list[Profile | None] = [None]
        if profiles is not None:
            arms = [*_chosen(sweep, workload, profiles, i)]
        for arm in arms:
            for prompt_tokens in workload.prompt_tokens:
                for output_tokens in workload.output_tokens:
                    for load in workload.concurrency:
                        for rate in workload.rate:
                            cells.append(_cell(sweep, workload, arm, prompt_tokens, output_tokens, load, rate))
    return cells


def _chosen(sweep: Sweep, workload: Workload, profiles: Mapping[str, Profile], index: int) -> list[Profile]:
    if sweep.profiles is None:
        chosen = [p for p in profiles.values() if not p.serve]
    else:
        chosen = _matching(sweep.profiles, profiles, "$.profiles")
        if workload.profiles is not None:
            narrowed = {p.name for p in _matching(workload.profiles, profiles, f"$.workloads[{index}].profiles")}
            chosen = [p for p in chosen if p.name in narrowed]
            if not chosen:
                raise UsageError(
                    f"$.workloads[{index}].profiles: saw {', '.join(workload.profiles)}; "
                    f"expected some of the sweep's own profiles {', '.join(sweep.profiles)}"
                )
    if not chosen:
        raise UsageError("$.profiles: no profile is left to benchmark; expected one with serve: false, or names here")
    for profile in chosen:
        if profile.model != sweep.model:
            raise UsageError(f"$.model: saw {sweep.model!r}; expected {profile.model!r}, which {profile.name} serves")
    return chosen


def _matching(globs: Sequence[str], profiles: Mapping[str, Profile], path: str) -> list[Profile]:
    for glob in globs:
        if not fnmatch.filter(profiles, glob):
            raise UsageError(f"{path}: {glob!r} matches no profile; expected one of {', '.join(profiles) or 'none'}")
    return [p for name, p in profiles.items() if any(fnmatch.fnmatchcase(name, g) for g in globs)]


def _cell(
    sweep: Sweep,
    workload: Workload,
    arm: Profile | None,
    prompt_tokens: int | None,
    output_tokens: int,
    concurrency: int | None,
    rate: float | None,
) -> Cell:
    cell = Cell(
        id="",
        workload=workload.name,
        prompts=workload.prompts,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        model=sweep.model,
        api=sweep.api,
        seed=sweep.seed,
        sampling=sweep.sampling,
        profile=arm.name if arm else None,
        method=arm.label if arm else None,
        budget=arm.budget if arm else None,
        tp=arm.tp if arm else None,
        context_length=arm.context_length if arm else None,
        read_at=tuple(n for n in workload.read_at if n <= output_tokens),
        concurrency=concurrency,
        requests=workload.requests,
        cache=workload.cache,
        arrival=workload.arrival,
        rate=rate,
        stop=workload.stop,
        turns=workload.turns,
        tool_s=workload.tool_s,
        phrase=workload.phrase,
        tokens_per_repetition=workload.tokens_per_repetition,
        ramp_s=workload.ramp_s,
        burstiness=workload.burstiness,
        burst=workload.burst,
        rate_to=workload.rate_to,
        trace=workload.trace,
        trace_speed=workload.trace_speed,
    )
    definition = msgspec.to_builtins(cell)
    definition["sampling"] = {k: v for k, v in definition["sampling"].items() if v is not None}
    return msgspec.structs.replace(cell, id=cell_id(definition))


def select(cells: Iterable[Cell], globs: Sequence[str]) -> list[Cell]:
    """Return the cells that any glob names by profile, workload, `profile/workload`, method or id; all without globs.

    Raises:
        UsageError: a glob names no cell.
    """
    cells = list(cells)
    if not globs:
        return cells
    names = {c.id: _names(c) for c in cells}
    for glob in globs:
        if not any(fnmatch.filter(n, glob) for n in names.values()):
            known = sorted({c.profile or c.workload for c in cells})
            raise UsageError(
                f"--only {glob!r} names no cell; expected a glob over {', '.join(known)}, a workload or an id"
            )
    return [c for c in cells if any(fnmatch.filter(names[c.id], g) for g in globs)]


def _names(cell: Cell) -> list[str]:
    names = [cell.id, cell.workload, cell.title, f"{cell.profile}/{cell.workload}"]
    return names + [n for n in (cell.profile, cell.method) if n]
