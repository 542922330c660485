"""What the lines of a run folder are. Times are seconds from the launch's clock origin; None means unknown."""

from __future__ import annotations

from typing import Any

import msgspec

SCHEMA = 1


class Read(msgspec.Struct, frozen=True, kw_only=True):
    """A shorter length read off the same stream, at the chunk in which that many tokens were reached."""

    finished_s: float | None = None
    decode_tokens_per_s: float | None = None
    e2e_s: float | None = None
    verify_steps: int | None = None
    correct_drafts: int | None = None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One line of requests.jsonl: one request, good or bad. Names and formulas as in docs/load.md.

    `token_source` is where the output count comes from: server, ids or tokenizer (unknown: nothing could count);
    `trace_source` is the same for the chunks' counts, or characters; `eos_known` is false where no tokenizer said which
    ids end a sequence, and `first_eos` then tells nothing; `method` is the label (`ddtree-b15`); `queue_s` and
    `server_accept_length` are the server's own.
    """

    schema: int = SCHEMA
    run: str
    cell: str
    profile: str | None = None
    method: str | None = None
    tp: int | None = None
    launch: int = 0
    block: int = 0
    prompt_id: str
    index: int
    ok: bool
    error: str | None = None
    status: int | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    prompt_tokens_asked: int | None = None
    output_tokens: int | None = None
    output_tokens_asked: int | None = None
    token_source: str | None = None
    scheduled_s: float | None = None
    sent_s: float | None = None
    first_s: float | None = None
    finished_s: float | None = None
    first_chunk_tokens: int | None = None
    ttft_s: float | None = None
    ttfa_s: float | None = None
    e2e_s: float | None = None
    decode_tokens_per_s: float | None = None
    tpot_s: float | None = None
    itl_mean_s: float | None = None
    chunks: int | None = None
    first_eos: int | None = None
    eos_known: bool = True
    cached_tokens: int | None = None
    verify_steps: int | None = None
    correct_drafts: int | None = None
    server_message: str | None = None
    rid: str | None = None
    session: int | None = None
    turn: int | None = None
    tool_s: float | None = None
    reads: dict[str, Read] = {}
    output_ids: list[int] | None = None
    text: str | None = None
    reasoning_text: str | None = None
    trace_source: str | None = None
    queue_s: float | None = None
    server_accept_length: float | None = None


class ChunkTrace(msgspec.Struct, frozen=True, kw_only=True):
    """One line of chunks.jsonl: chunk i of a request came at t[i] with k[i] new tokens."""

    cell: str
    launch: int
    index: int
    t: list[float]
    k: list[int]


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """The steady window of a cell: tokens with start_s < t <= end_s.

    `running_mean` and `running_peak` are requests that the server worked on (prefill and decoding, its queue left out),
    known where it tells how long each one queued; `waves` is requests over concurrency: under 10 the window is short.
    """

    start_s: float
    end_s: float
    tokens: int
    tokens_per_s: float
    running_mean: float | None = None
    running_source: str | None = None
    running_peak: int | None = None
    waves: float | None = None


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One validity rule of a cell and how it came out."""

    rule: str
    ok: bool | None
    seen: Any = None
    expected: Any = None


class CellRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of cells.jsonl: a cell that ended. `state` is done, invalid, failed, skipped or aborted."""

    cell: str
    launch: int
    profile: str | None = None
    workload: str
    method: str | None = None
    tp: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int
    concurrency: int | None = None
    prompts: str
    cache: str
    state: str
    reason: str | None = None
    requests: int = 0
    ok: int = 0
    wall_s: float | None = None
    window: Window | None = None
    checks: list[Check] = []
    started_at: str | None = None
    simulated: bool | None = None
    time_scale: float | None = None
    block: int = 0
    title: str | None = None
    output_tokens_total: int | None = None
    peak_tokens_per_s: float | None = None
    sessions: int | None = None
    session_tokens_per_s: float | None = None
    warmup: dict[str, Any] | None = None
    client: dict[str, Any] | None = None
