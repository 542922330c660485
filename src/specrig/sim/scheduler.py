"""The schedule: continuous batching of prefill chunks and decode steps over simulated time, and each request's truth.

A step's outcome is worked out when the step begins and its bytes are made then; at the step's deadline they are only
written. Deadlines are absolute, so lateness of one step does not shift the next.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from specrig.sim import physics
from specrig.sim.cache import PrefixCache
from specrig.sim.clock import Deadline, unix
from specrig.sim.config import Config
from specrig.sim.text import Answer, Detokenizer, Vocabulary

FinishReason = dict[str, Any]


@dataclass(frozen=True)
class Delta:
    """What one step adds to one request.

    Attributes:
        ids: the new tokens.
        segments: the new text in order, each with whether it is reasoning.
        finish: the finish reason, None while it goes on.
        at: the monotonic moment at which this leaves.
    """

    ids: list[int]
    segments: list[tuple[bool, str]]
    finish: FinishReason | None
    at: float


class Sink(Protocol):
    """Where a request's output goes."""

    def prepare(self, request: Request, delta: Delta) -> Callable[[], bool]:
        """Make the bytes of a delta; calling the result writes them, and says whether the stream was broken off."""


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters that matter here."""

    max_new_tokens: int
    ignore_eos: bool = False
    temperature: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    seed: int | None = None


@dataclass(eq=False)
class Request:
    """One request from arrival to end."""

    rid: str
    number: int
    ids: list[int]
    sampling: Sampling
    new_tokens: int
    answer: Answer
    sink: Sink
    detokenizer: Detokenizer
    parse_reasoning: bool
    prompt: str
    chain: float
    generator: random.Random
    arrived: float
    stream: bool
    forced_end: tuple[int, FinishReason] | None = None
    cached: int = 0
    prefilled: int = 0
    admitted: float | None = None
    prefill_done: float | None = None
    sent: int = 0
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    verify_steps: int = 0
    correct: int = 0
    histogram: list[int] = field(default_factory=list)
    text: str = ""
    finish: FinishReason | None = None
    gone: bool = False
    variants: dict[str, int] = field(default_factory=dict)
    diverged_at: int | None = None
    held: list[int] = field(default_factory=list)
    held_steps: int = 0
    running_seen: list[int] = field(default_factory=list)
    reasoning_tokens: int = 0
    stalled: bool = False
    paused: bool = False

    @property
    def context(self) -> int:
        """Tokens in the KV pool."""
        return len(self.ids) + self.sent + len(self.held)


class Scheduler:
    """Runs requests over simulated time.

    Args:
        config: the server.
        words: what answers are made of.
        loop: the running event loop.
        on_fatal: called where a fault kills a rank.
    """

    def __init__(
        self, config: Config, words: Vocabulary, loop: asyncio.AbstractEventLoop, on_fatal: Callable[[], None]
    ) -> None:
        self.config = config
        self._words = words
        self._on_fatal = on_fatal
        self.times = physics.StepTimes(config)
        self.cache = PrefixCache(0 if config.args.get("disable_radix_cache") else config.kv_tokens)
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []
        self.running: list[Request] = []
        self._deadline = Deadline(loop, self._finish_step)
        self._moment = 0.0
        self._pending: list[tuple[Request, Delta, Callable[[], bool]]] = []
        self._busy = False
        self._prefilled_last = False
        self._started = time.monotonic()
        self._cold = True
        self._truth = _TruthFile(config.truth) if config.truth is not None else None
        self._idle_waiters: list[asyncio.Future[None]] = []
        self._output_waiters: list[asyncio.Future[None]] = []
        self.requests_seen = 0
        self.generated_total = 0
        self.prompt_total = 0
        self.cached_total = 0
        self.finished_total = 0
        self.verify_total = 0
        self.accept_steps = 0
        self.accept_correct = 0
        self.last_throughput = 0.0
        self._window_tokens = 0
        self._window_start = time.monotonic()
        self.held_steps = 0
        self.steps = 0

    # -- in ------------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request."""
        if self.config.faults.get("dies-at-first-request") is not None:
            self._on_fatal()
            return
        if self.config.faults.get("hang", request.number) is not None:
            return
        self.waiting.append(request)
        if not self._busy:
            self._moment = time.monotonic()
            self._begin_step()

    def refuse(self, request: Request, finish: FinishReason) -> None:
        """Answer a request that never runs."""
        now = time.monotonic()
        request.finish = finish
        request.sink.prepare(request, Delta([], [], finish, now))()
        self._retire(request)

    def abort(self, rid: str | None) -> int:
        """Give up the request `rid`, or all for None; returns how many."""
        reason = {"type": "abort", "message": "Aborted by an abort_request", "status_code": None, "err_type": None}
        count = 0
        for request in [*self.waiting, *self.prefilling, *self.running]:
            if (rid is None or request.rid == rid or request.rid.startswith(rid + "_")) and request.finish is None:
                count += 1
                now = time.monotonic()
                request.finish = reason
                request.gone = True
                request.sink.prepare(request, Delta([], [], reason, now))()
                self._retire(request)
        return count

    def drop(self, request: Request) -> None:
        """The client went away."""
        if request.finish is None:
            request.gone = True
            request.finish = {"type": "abort", "message": "client disconnected"}
            self._retire(request)

    @property
    def busy(self) -> bool:
        """Whether anything runs or waits."""
        return bool(self.waiting or self.prefilling or self.running)

    @property
    def used_tokens(self) -> int:
        """KV tokens of running requests."""
        return sum(request.context for request in [*self.prefilling, *self.running])

    async def idle(self, timeout_s: float) -> bool:
        """Wait until nothing runs or waits; False where that took longer than `timeout_s`."""
        if not self.busy:
            return True
        future = asyncio.get_running_loop().create_future()
        self._idle_waiters.append(future)
        try:
            await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            return False
        return True

    async def output(self, timeout_s: float) -> bool:
        """Wait for any output, as a health check does; at once where nothing runs."""
        if not (self.running or self.prefilling):
            return True
        future = asyncio.get_running_loop().create_future()
        self._output_waiters.append(future)
        try:
            await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            return False
        return True

    def flush(self) -> bool:
        """Empty the prefix cache; False where something runs."""
        if self.busy:
            return False
        if self.config.faults.get("flush-kept") is None:
            self.cache.clear()
        self._cold = True
        self.accept_steps = self.accept_correct = 0
        return True

    # -- steps ---------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        config = self.config
        hidden = config.faults.get("hidden-cap")
        room = config.effective_running if hidden is None else min(config.effective_running, max(1, int(hidden.number)))
        while self.waiting and len(self.prefilling) + len(self.running) < room:
            request = self.waiting[0]
            reserved = sum(len(one.ids) + one.new_tokens for one in [*self.prefilling, *self.running])
            if reserved + len(request.ids) + request.new_tokens > config.kv_tokens:
                return
            self.waiting.popleft()
            request.cached = 0 if config.args.get("disable_radix_cache") else self.cache.match(request.ids)
            request.prefilled = request.cached
            request.admitted = time.monotonic()
            self.prefilling.append(request)

    def _begin_step(self) -> None:
        self._admit()
        batch = [one for one in self.running if not one.stalled]
        if self.prefilling and not (batch and self._prefilled_last):
            duration = self._begin_prefill()
            self._prefilled_last = True
        elif batch:
            duration = self._begin_decode(batch)
            self._prefilled_last = False
        else:
            self._busy = False
            self._wake_idle()
            return
        self._busy = True
        self._deadline.at(self._moment + duration)
        self._moment += duration

    def _wake_idle(self) -> None:
        if not self.busy:
            for future in self._idle_waiters:
                if not future.done():
                    future.set_result(None)
            self._idle_waiters.clear()

    def _wall(self, simulated: float) -> float:
        wall = simulated * self.config.time_scale
        self.steps += 1
        if wall < self.config.min_step_s:
            self.held_steps += 1
            return self.config.min_step_s
        return wall

    def _begin_prefill(self) -> float:
        room = self.config.chunked_prefill
        duration = 0.0
        done: list[Request] = []
        for request in self.prefilling:
            take = min(room, len(request.ids) - request.prefilled)
            if take <= 0:
                break
            spent = self.times.prefill(take, request.prefilled)
            duration += spent if duration == 0.0 else spent * 0.95
            request.prefilled += take
            room -= take
            if request.prefilled >= len(request.ids):
                done.append(request)
            if self._cold:
                slow = self.config.faults.get("slow-first-request")
                duration += slow.number if slow is not None else 0.0
                self._cold = False
        wall = self._wall(duration)
        moment = self._moment + wall
        for request in done:
            self.prefilling.remove(request)
            self.running.append(request)
            request.prefill_done = moment
            self._plan(request, 1, moment)
        return wall

    def _begin_decode(self, batch: list[Request]) -> float:
        elapsed = (self._moment - self._started) / self.config.time_scale
        wall = self._wall(self.times.decode([one.context for one in batch], elapsed))
        for request in batch:
            pause = self.config.faults.get("pause", request.number)
            if pause is not None and not request.paused and request.sent >= request.new_tokens // 2:
                request.paused = True
                wall += pause.number
        moment = self._moment + wall
        bucket = 1 << (len(batch) - 1).bit_length()
        for request in batch:
            request.running_seen.append(len(batch))
            if not self.config.spec_on:
                self._plan(request, 1, moment, bucket=bucket)
                continue
            depth = self.config.method.depth
            if self.config.simulated_accept_length is not None:
                whole = self.config.simulated_accept_length - 1
                correct = min(depth, int(whole) + (request.generator.random() < whole - int(whole)))
            else:
                position = request.sent + len(request.held)
                probability = (
                    physics.AFTER_EOS
                    if position > request.answer.eos_index
                    else physics.acceptance(self.config.method, request.chain, request.context)
                )
                correct = physics.accepted(request.generator, probability, depth)
            self._plan(request, correct + 1, moment, verify=True, bucket=bucket)
        return wall

    def _diverge(self, request: Request, index: int, bucket: int) -> None:
        config = self.config
        method = config.method.label if config.spec_on else ""
        fault = config.faults.get("diverge")
        if request.diverged_at is not None or (bucket == 1 and not method and fault is None):
            return
        variant = f"{method}/{bucket}"
        if variant not in request.variants:
            probability = fault.number if fault is not None else config.divergence
            request.variants[variant] = request.answer.divergence_index(variant, probability)
        if index == request.variants[variant]:
            request.diverged_at = index
            request.answer.diverge(index, variant)

    def _plan(self, request: Request, count: int, moment: float, *, verify: bool = False, bucket: int = 1) -> None:
        """Work out what the step gives this request, and make its bytes."""
        start = request.sent + len(request.held)
        count = min(count, request.new_tokens - start)
        ids: list[int] = []
        finish: FinishReason | None = None
        sampling = request.sampling
        cut: str | None = None
        for index in range(start, start + count):
            self._diverge(request, index, bucket)
            token = request.answer.token(index)
            ids.append(token)
            if request.forced_end is not None and index + 1 >= request.forced_end[0]:
                finish = request.forced_end[1]
                break
            if not sampling.ignore_eos and token == self._words.eos:
                finish = {"type": "stop", "matched": token}
                break
            if token in sampling.stop_token_ids:
                finish = {"type": "stop", "matched": token}
                break
            if sampling.stop:
                cut = self._stopped(request, ids)
                if cut is not None:
                    finish = {"type": "stop", "matched": cut}
                    break
        if finish is None and start + len(ids) >= request.new_tokens:
            finish = {"type": "length", "length": request.new_tokens}
        if verify:
            correct = max(0, len(ids) - 1)
            request.verify_steps += 1
            request.correct += correct
            request.histogram += [0] * (correct + 1 - len(request.histogram))
            request.histogram[correct] += 1
            self.verify_total += 1
            self.accept_steps += 1
            self.accept_correct += correct
        request.held += ids
        request.held_steps += 1
        coalesce = self.config.faults.get("coalesce", request.number)
        opening = self.config.faults.get("first-chunk", request.number)
        if finish is None and opening is not None and not request.sent and len(request.held) < opening.number:
            return
        if finish is None and start > 0:
            interval = int(self.config.args.get("stream_interval") or 1)
            if len(request.held) < interval or (coalesce is not None and request.held_steps < coalesce.number):
                return
        request.held_steps = 0
        segments = self._segments(request, request.held, finish, cut)
        delta = Delta(request.held, segments, finish, moment)
        request.held = []
        request.sent += len(delta.ids)
        request.finish = finish
        stall = self.config.faults.get("stall", request.number)
        request.stalled = stall is not None and finish is None and request.sent >= stall.number
        self._pending.append((request, delta, request.sink.prepare(request, delta)))

    def _stopped(self, request: Request, ids: list[int]) -> str | None:
        """The stop string that the text holds now, or None."""
        tail = request.detokenizer.peek([*request.held, *ids])
        known = request.text[-64:] + tail
        for stop in request.sampling.stop:
            if stop and stop in known:
                return stop
        return None

    def _segments(
        self, request: Request, ids: list[int], finish: FinishReason | None, cut: str | None
    ) -> list[tuple[bool, str]]:
        words = self._words
        end = request.answer.reasoning_end
        first = request.sent
        shown = [token for token in ids if token != words.eos]
        if not request.parse_reasoning or end is None or first >= end:
            text = request.detokenizer.push(shown, final=finish is not None)
            if cut is not None:
                whole = request.text + text
                text = whole[: whole.index(cut)][len(request.text) :] if cut in whole else text
            if request.parse_reasoning and end is not None and not request.text.strip():
                text = text.lstrip("\n")
            request.text += text
            return [(False, text)] if text else []
        inside = [token for token in ids[: end - first] if token not in (words.think_open, words.think_close)]
        request.reasoning_tokens = min(end, first + len(ids))
        thought = request.detokenizer.push(inside, final=first + len(ids) >= end or finish is not None)
        if first == 0:
            thought = thought.lstrip("\n")
        segments = [(True, thought)] if thought else []
        rest = [token for token in ids[end - first :] if token != words.eos]
        text = request.detokenizer.push(rest, final=finish is not None).lstrip("\n") if rest else ""
        request.text += text
        if text:
            segments.append((False, text))
        return segments

    def _finish_step(self) -> None:
        """The step's deadline: write, book, go on."""
        pending, self._pending = self._pending, []
        for request, delta, write in pending:
            if request.gone:
                continue
            now = time.monotonic()
            broken = write()
            request.times.append(now)
            request.counts.append(len(delta.ids))
            self._window_tokens += len(delta.ids)
            if delta.finish is not None:
                self._retire(request)
            elif broken:
                self.drop(request)
        if pending and self._output_waiters:
            for future in self._output_waiters:
                if not future.done():
                    future.set_result(None)
            self._output_waiters.clear()
        now = time.monotonic()
        if now - self._window_start >= 1.0:
            self.last_throughput = self._window_tokens / (now - self._window_start)
            self._window_tokens, self._window_start = 0, now
        if now - self._moment > 0.25:
            self._moment = now
        self._begin_step()

    def _retire(self, request: Request) -> None:
        for place in (self.prefilling, self.running):
            if request in place:
                place.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)
        self.finished_total += 1
        self.prompt_total += len(request.ids)
        self.cached_total += request.cached
        self.generated_total += request.sent
        if request.prefill_done is not None:
            self.cache.insert([*request.ids, *request.answer.ids[: request.sent]])
            self.cache.shrink(self.config.kv_tokens - self.used_tokens)
        if self._truth is not None:
            self._truth.write(self._truth_row(request))
        if not self._busy:
            self._wake_idle()

    def _truth_row(self, request: Request) -> dict[str, Any]:
        config = self.config
        times, counts = request.times, request.counts
        tokens = sum(counts)
        decode = None
        if len(times) > 1 and times[-1] > times[0]:
            decode = (tokens - counts[0]) / (times[-1] - times[0])
        eos = request.answer.eos_index
        return {
            "schema": 1,
            "rid": request.rid,
            "number": request.number,
            "profile": config.profile,
            "method": config.method.label,
            "tp": config.tp_size,
            "launch_seed": config.launch_seed,
            "prompt": request.prompt,
            "prompt_tokens": len(request.ids),
            "output_tokens": tokens,
            "finish_reason": (request.finish or {}).get("type"),
            "arrived_unix": unix(request.arrived),
            "first_token_unix": unix(times[0]) if times else None,
            "last_token_unix": unix(times[-1]) if times else None,
            "chunk_times": [round(moment - request.arrived, 7) for moment in times],
            "chunk_tokens": counts,
            "verify_steps": request.verify_steps if config.spec_on else None,
            "correct_drafts": request.correct if config.spec_on else None,
            "cached_tokens": request.cached,
            "decode_tokens_per_s": decode,
            "ttft_s": times[0] - request.arrived if times else None,
            "e2e_s": times[-1] - request.arrived if times else None,
            "first_eos": eos if eos < tokens and self._words.eos is not None else None,
            "diverged_at": request.diverged_at,
            "running_mean": (sum(request.running_seen) / len(request.running_seen) if request.running_seen else None),
            "stream": request.stream,
            "time_scale": config.time_scale,
            "held_steps": self.held_steps,
            "steps": self.steps,
        }

    def close(self) -> None:
        """Stop stepping."""
        self._deadline.close()
        if self._truth is not None:
            self._truth.close()
            # Connections end after this, and what they had asked for goes with them.
            self._truth = None


class _TruthFile:
    """Appends one line a request, each in one write."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, row: dict[str, Any]) -> None:
        os.write(self._descriptor, msgspec.json.encode(row) + b"\n")

    def close(self) -> None:
        os.close(self._descriptor)
