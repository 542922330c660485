"""Run one cell against a running server: flush, warm-up, requests, checks.

Nothing is thrown for what a server does: a request that fails is a record with the server's own words, a cell that
cannot be measured is a row with state ``failed``.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from specrig.engine.errors import EngineError
from specrig.errors import SpecrigError
from specrig.load import checks as rules
from specrig.load.api import API_PATHS, Ask, make_decoder, request_body
from specrig.load.arrivals import densest_rate, due_times
from specrig.load.metrics import decode_rate, first_eos, read_at
from specrig.load.slots import Done, Item, Plan, drive, pause
from specrig.load.stream import Lag, StreamClient, Timeouts, clock
from specrig.load.windows import Steady, Stream, arrivals_window, peak_rate, steady
from specrig.load.workers import WorkerError, Workers, worker_count
from specrig.model.cell import Cell
from specrig.model.record import CellRow, Check, ChunkTrace, Request, Window
from specrig.tokens.budget import Limits
from specrig.tokens.budget import check as budget_check
from specrig.tokens.plan import claim_problems, shared_tokens, template_tokens
from specrig.tokens.prompts import AnyPrompt, Prompt, for_cell
from specrig.tokens.tokenizer import Tokenizer
from specrig.tokens.trace import Row, rows_of

if TYPE_CHECKING:
    from specrig.engine.client import EngineClient

T = TypeVar("T")

WARMUP_TOKENS = 32
WARMUP_SHORT_PROMPT = 256
POLL_S = 0.25
FLUSH_S = 30.0
QUIET_S = 30.0
AGAIN_S = 2.0
RETRY_S = 0.1
_TOKENS_AT_ONCE = 1_000_000


class Sink(Protocol):
    """Where results go as they come."""

    def append_request(self, record: object) -> None:
        """Keep a request's record."""

    def append_chunks(self, row: object) -> None:
        """Keep a request's trace."""

    def append_telemetry(self, row: object) -> None:
        """Keep one look at the server."""


@dataclass(kw_only=True)
class Context:
    """What the cells of one launch share.

    Attributes:
        tokenizer: the model's; null = prompts have their own length, and what it would count is unknown.
        origin: the reading of the client's clock that is time 0 of the records.
        sglang: the server answers ``/server_info``; only then its control calls are used.
        limits: what the server can take; null = not known, and no cell is skipped for it.
        headroom: tokens to keep free in every cell.
        workers: processes that make the requests; null = this process does.
        workers_asked: how many of them, by the user; null = as many as help.
        warmed: shapes that were warmed up already.
        stop: set to end the cell early.
        on_request: called after each request, for a live display.
    """

    client: StreamClient
    control: EngineClient
    tokenizer: Tokenizer | None
    sink: Sink
    run: str
    launch: int
    block: int
    origin: float
    timeouts: Timeouts
    stop: asyncio.Event
    base: Path | None = None
    sglang: bool = True
    limits: Limits | None = None
    headroom: int = 0
    keep_text: bool = False
    simulated: bool | None = None
    time_scale: float | None = None
    workers: Workers | None = None
    workers_asked: int | None = None
    warmed: set[tuple[Any, ...]] = field(default_factory=set)
    on_request: Callable[[Request], None] | None = None


@dataclass(kw_only=True)
class _Job(Item):
    prompt_id: str
    prompt_tokens: int | None
    output_tokens: int
    session: int | None
    turn: int | None


@dataclass(kw_only=True)
class _Outcome:
    records: list[Request] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)
    polls: list[tuple[float, int, int]] = field(default_factory=list)
    gave_up: bool = False
    in_row: int = 0
    lost: str | None = None


async def run_cell(cell: Cell, context: Context) -> CellRow:
    """Measure one cell.

    Args:
        cell: what to measure.
        context: the server and where results go.

    Returns:
        The cell's row; its requests are in the sink already. ``state`` is done, invalid (a rule was broken), failed
        (nothing could be measured), skipped (does not fit the server) or aborted.

    Raises:
        SpecrigError: the sink could not write.
    """
    started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    begun = clock()

    def row(state: str, reason: str | None = None, **more: Any) -> CellRow:
        return CellRow(
            cell=cell.id,
            launch=context.launch,
            block=context.block,
            profile=cell.profile,
            workload=cell.workload,
            prompt_tokens=cell.prompt_tokens,
            output_tokens=cell.output_tokens,
            concurrency=cell.concurrency,
            prompts=cell.prompts,
            cache=cell.cache,
            state=state,
            reason=reason,
            title=cell.title,
            started_at=started_at,
            simulated=context.simulated,
            time_scale=context.time_scale,
            **{"method": cell.method, "tp": cell.tp, "wall_s": round(clock() - begun, 6), **more},
        )

    try:
        trace = rows_of(cell, context.base)
        prompts = await _prompts(cell, context, trace)
        jobs = [
            [
                _job(
                    cell, context, prompt, index, (trace[index].output_tokens if trace else None) or cell.output_tokens
                )
                for index, prompt in session
            ]
            for session in _numbered(cell, prompts)
        ]
    except SpecrigError as error:
        if context.stop.is_set():
            return row("aborted", "interrupted before its first request")
        return row("failed", f"its prompts cannot be made: {error}")
    if cell.tokens_per_repetition is not None and context.tokenizer is not None:
        factory = for_cell(context.tokenizer, cell, context.base)
        around = factory.build(0).question_tokens + template_tokens(factory)
        if wrong := claim_problems(cell, context.tokenizer, context.limits, around, context.headroom):
            return row("skipped", "; ".join(wrong))
    if context.limits is not None:
        sizes = [(job.prompt_tokens, job.output_tokens) for session in jobs for job in session]
        known = [(prompt, output) for prompt, output in sizes if prompt is not None]
        if known:
            most = max(known, key=sum)
            shared = min(shared_tokens(cell, [session[-1].ids for session in prompts[:2]]), most[0])
            fit = budget_check(*most, context.limits, cell.concurrency, context.headroom, shared_tokens=shared)
            if not fit.fits:
                return row("skipped", "does not fit: " + "; ".join(fit.problems))
    if context.stop.is_set():
        return row("aborted", "interrupted before its first request")
    info = await _info(context)
    if context.sglang and info is None and not context.stop.is_set():
        return row("failed", f"{context.client.url} does not answer /server_info; is the server running there?")
    method = cell.method or rules.method_of(info)
    tp = cell.tp if cell.tp is not None else (info or {}).get("tp_size")
    asked = rules.asked_for(cell, info)
    if asked.ok is False:
        return row("failed", rules.verdict([asked]), method=method, tp=tp, checks=[asked])
    said = {"method": method, "tp": tp}
    workers = 1 if context.workers is None else worker_count(context.workers_asked, connections(cell))

    try:
        longest = max((prompt for session in prompts for prompt in session), key=lambda prompt: prompt.tokens or 0)
        warmup = await _warm_up(cell, context, longest)
        await _quiet(context)
        if cell.cache == "flush" and not context.stop.is_set():
            await _flush(context)
        plan = _plan(cell, context, jobs, trace)
        if context.workers is not None and workers > 1:
            await context.client.open(1)
            await context.workers.prepare(plan, jobs, workers, connections(cell))
        else:
            await context.client.open(connections(cell) + 1)
    except (EngineError, WorkerError) as error:
        if context.stop.is_set():
            return row("aborted", "interrupted before its first request", **said)
        return row("failed", str(error), **said)
    except (OSError, TimeoutError) as error:
        return row("failed", f"cannot connect to {context.client.url}: {error}", **said)
    if context.stop.is_set():
        return row("aborted", "interrupted before its first request", warmup=warmup, **said)

    outcome = _Outcome()
    started = clock()
    watch = asyncio.create_task(_poll(cell, context, outcome)) if context.sglang else None
    try:
        lag = await _load(cell, context, plan, jobs, workers, outcome, method, tp)
    finally:
        if watch is not None:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
    wall = clock() - started
    return _judge(cell, context, outcome, lag, workers, info, await _info(context), said, row, warmup, wall)


# -- before ---------------------------------------------------------------------------------------------------------


async def _prompts(cell: Cell, context: Context, trace: Sequence[Row]) -> Sequence[Sequence[AnyPrompt]]:
    if context.tokenizer is None:
        factory = for_cell(None, cell, context.base)
        own = [factory.own(index) for index in range(cell.requests)]
        if cell.api == "sglang":
            own = await _apart(context, lambda: [_with_ids(prompt, cell, context.control) for prompt in own])
        return [[prompt] for prompt in own]
    if trace:
        sized = {
            tokens: for_cell(context.tokenizer, cell, context.base, tokens=tokens)
            for tokens in {row.prompt_tokens for row in trace}
        }
        built = []
        for index, row in enumerate(trace):
            built.append([sized[row.prompt_tokens].build(index)])
            await _breathe(context)
        return built
    factory = for_cell(context.tokenizer, cell, context.base)
    sessions: list[list[Prompt]] = []
    while len(sessions) < cell.requests:
        some = max(16, _TOKENS_AT_ONCE // (cell.prompt_tokens or 512))
        sessions += factory.sessions(min(some, cell.requests - len(sessions)), len(sessions))
        await _breathe(context)
    return sessions


async def _breathe(context: Context) -> None:
    """Let a signal be seen between two prompts.

    Raises:
        EngineError: one came.
    """
    await asyncio.sleep(0)
    if context.stop.is_set():
        raise EngineError("interrupted")


def _with_ids(prompt: AnyPrompt, cell: Cell, control: EngineClient) -> AnyPrompt:
    """The prompt with the ids that the server's own tokenizer and chat template make of it."""
    assert prompt.messages is not None
    ids = control.tokenize(
        messages=prompt.messages,
        tools=prompt.tools,
        chat_template_kwargs={"enable_thinking": cell.sampling.thinking},
        model=cell.model,
    )
    return dataclasses.replace(prompt, ids=ids, tokens=len(ids))


def _numbered(cell: Cell, prompts: Sequence[Sequence[AnyPrompt]]) -> list[list[tuple[int, AnyPrompt]]]:
    turns = cell.turns or 1
    return [
        [(session * turns + turn, prompt) for turn, prompt in enumerate(row)] for session, row in enumerate(prompts)
    ]


def _ask(cell: Cell, prompt: AnyPrompt, max_tokens: int, rid: str, ids: list[int] | None = None) -> Ask:
    sampling = {
        name: value for name, value in (("top_p", cell.sampling.top_p), ("top_k", cell.sampling.top_k)) if value
    }
    return Ask(
        max_tokens=max_tokens,
        ids=ids or prompt.ids,
        messages=prompt.messages,
        tools=prompt.tools,
        text=prompt.text,
        ignore_eos=cell.stop == "length",
        temperature=cell.sampling.temperature,
        sampling=sampling,
        thinking=cell.sampling.thinking,
        rid=rid,
    )


def _job(cell: Cell, context: Context, prompt: AnyPrompt, index: int, output_tokens: int) -> _Job:
    rid = f"{cell.id}-{context.launch}-{index}-{secrets.token_hex(4)}"
    try:
        body = request_body(cell.api, cell.model, _ask(cell, prompt, output_tokens, rid))
    except ValueError as error:
        raise SpecrigError(
            f"{cell.title}: {error}; these prompts are plain text, use api openai-completions"
        ) from error
    return _Job(
        index=index,
        prompt_id=prompt.id,
        prompt_tokens=prompt.tokens,
        output_tokens=output_tokens,
        payload=context.client.frame("POST", API_PATHS[cell.api], body),
        rid=rid,
        session=prompt.session,
        turn=prompt.turn,
    )


def connections(cell: Cell) -> int:
    """How many connections a cell has open at once."""
    if cell.arrival == "closed":
        return min(cell.concurrency or 1, cell.requests)
    return min(cell.concurrency or cell.requests, cell.requests, 512)


async def _apart(context: Context, call: Callable[[], T]) -> T:
    """Make a blocking control call in a thread of its own, and leave it behind when the cell is interrupted."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if not answer.done():
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(value)  # type: ignore[arg-type]

    def work() -> None:
        value: T | None = None
        problem: BaseException | None = None
        try:
            value = call()
        except Exception as error:
            problem = error
        with contextlib.suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(settle, value, problem)

    threading.Thread(target=work, daemon=True).start()
    stopped = asyncio.ensure_future(context.stop.wait())
    try:
        waits: set[asyncio.Future[Any]] = {answer, stopped}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
    if not answer.done():
        raise EngineError("interrupted")
    return answer.result()


async def _info(context: Context) -> dict[str, Any] | None:
    if not context.sglang:
        return None
    try:
        return await _apart(context, context.control.server_info)
    except EngineError:
        return None


async def _flush(context: Context) -> None:
    """Have the prefix cache emptied; a server that calls itself busy is asked again for :data:`AGAIN_S`.

    Raises:
        EngineError: it would not say that it was emptied; the server's own words.
    """
    until = clock() + AGAIN_S
    while True:
        try:
            return await _apart(context, lambda: context.control.flush_cache(FLUSH_S))
        except EngineError as error:
            if error.kind == "not-found":
                raise EngineError(f"{error}; this server cannot flush its cache: use cache unique or shared") from error
            if error.kind != "busy" or clock() > until:
                raise
        await pause(context.stop, RETRY_S)


async def _quiet(context: Context) -> None:
    """Wait until nothing runs on the server any more, before a cell's clock starts.

    Raises:
        EngineError: something still ran after :data:`QUIET_S`.
    """
    until = clock() + QUIET_S
    while not context.stop.is_set() and (busy := await _busy(context)) is not None and any(busy):
        if clock() > until:
            raise EngineError(
                f"the server still runs {busy[0]} requests with {busy[1]} waiting after {QUIET_S:g} s, and none of "
                "them is this cell's; stop what else sends to it, or start it anew"
            )
        await pause(context.stop, RETRY_S)


async def _busy(context: Context) -> tuple[int, int] | None:
    """How many requests run and wait on the server; None where it does not tell."""
    if not context.sglang:
        return None
    status, body = await context.client.request("GET", "/v1/loads", timeout_s=5.0)
    ranks = _ranks(body) if status == 200 else None
    return None if ranks is None else (ranks.running, ranks.waiting)


async def _warm_up(cell: Cell, context: Context, prompt: AnyPrompt) -> dict[str, Any] | None:
    """Have the server meet the cell's shapes before they count: its prompt length, and its number at once.

    One request has the length of the longest prompt, the others are short; all answers are. They are made of a measured
    prompt, so under ``cache: flush`` the flush comes after, and otherwise the prompt's ids are reversed.
    """
    count = min(cell.concurrency or cell.burst or 1, cell.requests)
    shape = (cell.api, prompt.tokens or cell.prompt_tokens, count, cell.sampling)
    if shape in context.warmed:
        return None
    tokens = min(WARMUP_TOKENS, cell.output_tokens)
    path = API_PATHS[cell.api]
    begun = clock()
    exchanges = []
    for number in range(count):
        ids = prompt.ids if number == 0 or prompt.ids is None else prompt.ids[: WARMUP_SHORT_PROMPT + number]
        changed = prompt
        if ids is not None and cell.cache != "flush":
            ids = ids[::-1]
        if (cell.api == "openai-chat" or ids is None) and (number or cell.cache != "flush"):
            size = len(ids) if ids is not None else _guess(prompt, WARMUP_SHORT_PROMPT if number else None)
            words = " ".join(["warm up"] * (max(1, size // 2)))
            changed = AnyPrompt(
                id="", ids=None, messages=({"role": "user", "content": words},), text=words, tokens=None
            )
        rid = f"warmup-{cell.id}-{secrets.token_hex(4)}"
        body = request_body(cell.api, cell.model, _ask(cell, changed, tokens, rid, ids))
        payload = context.client.frame("POST", path, body)
        exchanges.append(context.client.exchange(payload, make_decoder(cell.api), context.timeouts))
    done = await asyncio.gather(*exchanges)
    bad = [exchange for exchange in done if exchange.error is not None]
    if bad and bad[0].error == "connect":
        raise EngineError(bad[0].message or "cannot connect")
    if not bad:
        context.warmed.add(shape)
    return {
        "requests": count,
        "tokens": tokens,
        "seconds": round(clock() - begun, 6),
        "error": bad[0].message if bad else None,
    }


def _guess(prompt: AnyPrompt, most: int | None) -> int:
    """About how many tokens a prompt has that nobody has counted, `most` at most: enough for a warm-up."""
    return len((prompt.text or "".join(str(row["content"]) for row in prompt.messages or ()))[: most and 4 * most]) // 4


# -- the measured part ----------------------------------------------------------------------------------------------


def _plan(cell: Cell, context: Context, jobs: Sequence[Sequence[_Job]], trace: Sequence[Row]) -> Plan:
    return Plan(
        api=cell.api,
        abort_path="/abort_request" if context.sglang else None,
        timeouts=context.timeouts,
        slots=min(cell.concurrency or 1, len(jobs)) if cell.arrival == "closed" else cell.concurrency,
        due=due_times(cell, trace),
        ramp_s=cell.ramp_s,
        tool_s=cell.tool_s if cell.turns else None,
    )


async def _load(
    cell: Cell,
    context: Context,
    plan: Plan,
    jobs: list[list[_Job]],
    workers: int,
    outcome: _Outcome,
    method: str | None,
    tp: int | None,
) -> Lag:
    """Make every request of the cell, in closed or open loop, here or in the worker processes."""
    by_index = {job.index: job for session in jobs for job in session}
    count = context.tokenizer.count if context.tokenizer is not None else None
    ended: asyncio.Queue[tuple[Done, _End] | None] = asyncio.Queue()

    def give(done: Done) -> None:
        end = _end(cell, by_index[done.index], done)
        outcome.in_row = outcome.in_row + 1 if end.error else 0
        if outcome.in_row >= max(8, 2 * (cell.concurrency or 1)):
            outcome.gave_up = True
        ended.put_nowait((done, end))

    def over() -> bool:
        return context.stop.is_set() or outcome.gave_up

    def count_and_give(done: Done) -> None:
        if count is not None:
            done.decoder.recount(count)
        give(done)

    async def keep() -> None:
        # One record, then the sockets again: those of many streams that end together would be in the others' times.
        while (row := await ended.get()) is not None:
            _keep(cell, context, outcome, by_index[row[0].index], *row, method, tp)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        group.create_task(keep())
        try:
            if context.workers is not None and workers > 1:
                lag, outcome.lost = await context.workers.run(plan.origin(), count_and_give, over)
                return lag
            numbers = iter(range(len(jobs)))
            context.client.start_lag()
            try:
                await drive(
                    plan,
                    jobs,
                    context.client,
                    plan.origin(),
                    range(plan.slots or 0),
                    lambda: next(numbers, None),
                    give,
                    context.stop,
                    over,
                    count,
                )
            finally:
                lag = context.client.stop_lag()
            return lag
        finally:
            ended.put_nowait(None)


@dataclass(frozen=True, kw_only=True)
class _End:
    """How a request ended: both null where it is as it should be, with the length asked for."""

    error: str | None
    words: str | None


def _end(cell: Cell, job: _Job, done: Done) -> _End:
    decoder = done.decoder
    tokens, asked, reason = decoder.output_tokens, job.output_tokens, decoder.finish_reason
    error, words = done.error, done.message
    if error is None and cell.stop == "length" and decoder.token_source in ("server", "ids") and tokens != asked:
        error = "short" if tokens < asked else "count"
        words = f"{tokens} of {asked} tokens, finish_reason {reason}"
    elif error is None and reason is None:
        error, words = "no_terminal", "the stream ended without a finish reason"
    elif error is None and not decoder.t:
        error, words = "empty", f"no token came, finish_reason {reason}"
    return _End(error=error, words=words)


def _keep(
    cell: Cell,
    context: Context,
    outcome: _Outcome,
    job: _Job,
    done: Done,
    end: _End,
    method: str | None,
    tp: int | None,
) -> None:
    decoder = done.decoder
    record = _record(cell, context, job, done, end, method, tp)
    outcome.records.append(record)
    if decoder.t and any(decoder.k):
        t = [round(moment - context.origin, 6) for moment in decoder.t]
        context.sink.append_chunks(ChunkTrace(cell=cell.id, launch=context.launch, index=job.index, t=t, k=decoder.k))
        if record.ok:
            assert done.sent is not None
            assert done.due is not None
            outcome.streams.append(
                Stream(sent=done.sent, due=done.due, t=decoder.t, k=decoder.k, queue_s=decoder.queue_s)
            )
    context.sink.append_request(record)
    if context.on_request is not None:
        context.on_request(record)


def _record(
    cell: Cell,
    context: Context,
    job: _Job,
    done: Done,
    end: _End,
    method: str | None,
    tp: int | None,
) -> Request:
    """Turn one exchange into its record."""
    decoder, sent = done.decoder, done.sent
    t, k = decoder.t, decoder.k
    asked = job.output_tokens

    def at(moment: float | None) -> float | None:
        return None if moment is None else round(moment - context.origin, 6)

    def since(moment: float | None) -> float | None:
        return None if moment is None or sent is None else round(moment - sent, 6)

    counted = decoder.token_source != "unknown"
    eos = context.tokenizer.eos_ids if context.tokenizer is not None else frozenset()
    rate = decode_rate(t, k) if counted else None
    reads = {}
    for length in (length for length in cell.read_at if length <= asked):
        read = None if sent is None else read_at(t, k, sent, length, decoder.verify_steps, decoder.correct_drafts)
        if read is not None:
            reads[str(length)] = msgspec.structs.replace(read, finished_s=at(read.finished_s))
    answer_t = decoder.first_answer_t
    if answer_t is None and cell.api == "sglang" and not cell.sampling.thinking and t:
        answer_t = t[0]
    return Request(
        run=context.run,
        cell=cell.id,
        profile=cell.profile,
        method=method,
        tp=tp,
        launch=context.launch,
        block=context.block,
        prompt_id=job.prompt_id,
        index=job.index,
        ok=end.error is None,
        error=end.error,
        status=done.status,
        finish_reason=decoder.finish_reason,
        prompt_tokens=decoder.prompt_tokens,
        prompt_tokens_asked=job.prompt_tokens,
        output_tokens=decoder.output_tokens if done.status == 200 and counted else None,
        output_tokens_asked=asked,
        token_source=decoder.token_source if t else None,
        trace_source=decoder.trace_source if t else None,
        scheduled_s=at(done.due),
        sent_s=at(sent),
        first_s=at(t[0]) if t else None,
        finished_s=at(t[-1]) if t else None,
        first_chunk_tokens=k[0] if k and counted else None,
        ttft_s=since(t[0]) if t else None,
        ttfa_s=since(answer_t),
        e2e_s=since(t[-1]) if t else None,
        decode_tokens_per_s=rate,
        tpot_s=1 / rate if rate else None,
        itl_mean_s=1 / rate if rate else None,
        chunks=len(t),
        first_eos=first_eos(decoder.output_ids, eos),
        eos_known=bool(eos),
        cached_tokens=decoder.cached_tokens,
        verify_steps=decoder.verify_steps,
        correct_drafts=decoder.correct_drafts,
        server_message=end.words,
        rid=job.rid,
        session=job.session,
        turn=job.turn,
        tool_s=done.tool_s,
        reads=reads,
        output_ids=decoder.output_ids or None,
        text=decoder.text if context.keep_text else None,
        reasoning_text=decoder.reasoning_text if context.keep_text else None,
        queue_s=decoder.queue_s,
        server_accept_length=decoder.server_accept_length,
    )


@dataclass(frozen=True, kw_only=True)
class _Ranks:
    """What ``/v1/loads`` tells, summed over its ranks."""

    running: int
    waiting: int
    used_tokens: int
    gen_throughput: float


def _ranks(body: bytes) -> _Ranks | None:
    """Read an answer of ``/v1/loads``; None where it is none."""
    try:
        rows = [row for row in msgspec.json.decode(body).get("loads", []) if isinstance(row, dict)]
        return _Ranks(
            running=sum(row["num_running_reqs"] for row in rows),
            waiting=sum(row.get("num_waiting_reqs") or 0 for row in rows),
            used_tokens=sum(row.get("num_used_tokens") or 0 for row in rows),
            gen_throughput=sum(row.get("gen_throughput") or 0.0 for row in rows),
        ) if rows else None  # fmt: skip
    except (msgspec.DecodeError, AttributeError, KeyError, TypeError):
        return None


async def _poll(cell: Cell, context: Context, outcome: _Outcome) -> None:
    """Look at the server's own count of running requests while the cell runs."""
    while True:
        await asyncio.sleep(POLL_S)
        at = clock()
        status, body = await context.client.request("GET", "/v1/loads", timeout_s=5.0)
        if status is None:
            continue
        if status != 200:
            return
        ranks = _ranks(body)
        if ranks is None:
            return
        outcome.polls.append((at, ranks.running, ranks.waiting))
        context.sink.append_telemetry(
            {
                "at_s": round(at - context.origin, 6),
                "cell": cell.id,
                "launch": context.launch,
                **dataclasses.asdict(ranks),
            }
        )


# -- after ----------------------------------------------------------------------------------------------------------


def _judge(
    cell: Cell,
    context: Context,
    outcome: _Outcome,
    lag: Lag,
    workers: int,
    before: dict[str, Any] | None,
    after: dict[str, Any] | None,
    known: dict[str, Any],
    row: Callable[..., CellRow],
    warmup: dict[str, Any] | None,
    wall: float,
) -> CellRow:
    records = outcome.records
    good = [record for record in records if record.ok]
    planned = cell.total_requests
    window = (
        steady(outcome.streams, cell.concurrency or 1) if cell.arrival == "closed" else arrivals_window(outcome.streams)
    )
    checks: list[Check] = [
        rules.failures(records, planned),
        rules.asked_for(cell, before),
        rules.same_server(before, after),
    ]
    if good:
        checks += rules.record_checks(cell, good, known["method"], rules.acceptance_bound(known["method"], before))
        reached = rules.concurrency_reached(cell, outcome.streams, window, outcome.polls)
        if reached is not None:
            checks.append(reached)
        checks.append(rules.client_kept_up(lag, good))
        if cell.arrival != "closed":
            densest = densest_rate(cell, [stream.due for stream in outcome.streams])
            checks.append(rules.arrivals_kept(good, densest, cell.concurrency))
    why = rules.verdict(checks)
    if context.stop.is_set() and len(records) - sum(r.error == "aborted" for r in records) < planned:
        state, why = "aborted", f"interrupted after {len(good)} of {planned} requests"
    elif not good or outcome.gave_up or outcome.lost or (context.sglang and after is None):
        # Not a measurement that broke a rule: one that a failing server cut off, and that a resume makes again.
        state = "failed"
    else:
        state = "done" if why is None else "invalid"
    if outcome.gave_up and state != "aborted":
        why = f"given up after {outcome.in_row} failures in a row; {why}"
    if outcome.lost and state == "failed":
        why = f"{outcome.lost}; {why}"
    if context.sglang and after is None and state == "failed":
        why = f"the server does not answer any more; {why}"
    sessions, session_rate = _sessions(cell, good)
    return row(
        state,
        why,
        requests=len(records),
        ok=len(good),
        wall_s=round(wall, 6),
        window=_window(context, outcome, window),
        checks=checks,
        output_tokens_total=sum(record.output_tokens or 0 for record in good),
        peak_tokens_per_s=peak_rate(outcome.streams, window),
        sessions=sessions,
        session_tokens_per_s=session_rate,
        warmup=warmup,
        client={f"lag_{name}_ms": getattr(lag, f"{name}_ms") for name in ("mean", "p50", "p99", "max")}
        | {"cpu": lag.cpu, "workers": workers},
        **known,
    )


def _window(context: Context, outcome: _Outcome, window: Steady | None) -> Window | None:
    if window is None:
        return None
    service = all(stream.queue_s is not None for stream in outcome.streams)
    return Window(
        start_s=round(window.start - context.origin, 6),
        end_s=round(window.end - context.origin, 6),
        tokens=window.tokens,
        tokens_per_s=window.tokens_per_s,
        running_mean=window.running_mean if service else None,
        running_peak=window.running_peak if service else None,
        running_source="server" if service else None,
        waves=round(window.waves, 3),
    )


def _sessions(cell: Cell, records: Sequence[Request]) -> tuple[int | None, float | None]:
    """How many sessions are whole, and their end-to-end rate: output tokens over wall time without tool time."""
    if not cell.turns:
        return None, None
    rows: dict[int, list[Request]] = {}
    for record in records:
        if record.session is not None:
            rows.setdefault(record.session, []).append(record)
    whole = [turns for turns in rows.values() if len(turns) == cell.turns]
    tokens = seconds = 0.0
    for turns in whole:
        tokens += sum(turn.output_tokens or 0 for turn in turns)
        first = min(turn.sent_s for turn in turns if turn.sent_s is not None)
        last = max(turn.finished_s for turn in turns if turn.finished_s is not None)
        seconds += last - first - sum(turn.tool_s or 0.0 for turn in turns)
    return len(whole), tokens / seconds if seconds > 0 else None
