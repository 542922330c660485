"""What users report of benchmark tools, injected by the simulated engine: what specrig says instead, on all routes.

One cell a route meets every fault of single requests; the engine's own record of the same requests is the truth. A few
complaints are of other parts and are tested there:

* 100 connections at most: test_load_stream, many streams at once; 64 KB buffers: test_load_cuts, an event of megabytes.
* Text that re-encodes to another length, random tokens, tiled text: test_tokens_prompts.
* Nothing on disk until the end, truncated JSON breaks resume: test_load_interrupt, test_load_truth (resume).
* Overrides that were not applied: test_load_checks (the server's own report), test_server_info.
* "Best of" with no interval, order and drift, both acceptance lengths, percentiles: analysis/test_analysis_*.
"""

from __future__ import annotations

import itertools
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from simulated_load import check, engine, load, rows

from specrig.tokens import tokenizer as tokenizers

DFLASH = {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": "draft"}
ROUTES = ["native", "native incremental", "openai-chat", "openai-completions"]
OPENAI = ROUTES[2:]
APIS = ["native", *OPENAI]
LENGTH = 48
NO_TERMINAL = ("no_terminal", "the stream ended without its terminal event")
# fault -> the error that a record must have and words of its message; None: nothing may be wrong
FAULTS: dict[str, tuple[str, str] | None] = {
    "error-in-stream=4": ("server_error", "Internal error in the scheduler"),
    "keepalive-comments=3": None,
    "eof-without-done=4": NO_TERMINAL,
    "split-utf8": None,
    "reset=4": ("disconnected", "in the middle of the answer"),
    "sse-variants": None,
    "done-missing": NO_TERMINAL,
    "coalesce=4": None,
    "stall=4": ("idle_timeout", "stalled: nothing for 0.5 s after"),
    "first-chunk=5": None,
    "hang": ("first_token_timeout", "no token in 1 s"),
    "reasoning-overcount": None,
    "http-400": ("http", "The input (99999 tokens) is longer than the model's context length (4096 tokens)."),
    "usage-final-only": None,
    "http-500": ("http", "Internal Server Error"),
    "early-role-chunk": None,
    "http-503": ("http", "HTTP 503 without a message"),
    "silent-cap=16": ("short", "16 of 48 tokens, finish_reason length"),
    "short-completion=8": ("short", "8 of 48 tokens, finish_reason stop"),
    "pause=0.2": None,
    "kv-abort=4": ("abort", "Request prompt exceeds the KV memory budget"),
}
WARM_UPS = 1


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One cell of one route."""

    route: str
    code: int
    cell: dict[str, Any]
    summary: dict[str, Any]
    records: dict[str, dict[str, Any]]
    traces: dict[int, dict[str, Any]]
    truth: dict[str, dict[str, Any]]

    def of(self, fault: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """The record of the request that the fault struck, and the engine's own."""
        record = self.records[fault]
        return record, self.truth[record["rid"]]

    @property
    def good(self) -> list[dict[str, Any]]:
        """The records of requests that succeeded."""
        return [record for record in self.records.values() if record["ok"]]


@pytest.fixture(scope="module", params=ROUTES)
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> Measured:
    """A cell whose requests meet the faults one by one; every fifth one meets none."""
    route: str = request.param
    names = ["none"]
    for number, fault in enumerate(FAULTS):
        names += [fault, *([f"none {number}"] if number % 4 == 3 else [])]
    struck = [f"{fault}@{WARM_UPS + place}" for place, fault in enumerate(names, 1) if fault in FAULTS]
    place = names.index("short-completion=8") + 1
    struck.append(f"usage-missing@{WARM_UPS + place}")
    folder = tmp_path_factory.mktemp("complaints")
    shape = f"name: d, prompt_tokens: 1024, output_tokens: {LENGTH}, requests: {len(names)}"
    with engine(route, tokenizer_dir, sim_fault=struck, sim_time_scale=0.2, **DFLASH) as sim:
        code, cells, records = load(folder, sim, tokenizer_dir, route, shape)
        truth = {row["rid"]: row for row in sim.truth()}
    return Measured(
        route=route,
        code=code,
        cell=cells[0],
        summary=json.loads((folder / "run" / "summary.json").read_text())["cells"][0],
        records=dict(zip(names, records, strict=True)),
        traces={row["index"]: row for row in rows(folder, "chunks")},
        truth=truth,
    )


def expected(route: str, fault: str) -> tuple[str, str] | None:
    """What the record of that fault must say."""
    if fault == "kv-abort=4" and route == "openai-chat":
        return "server_error", "Request prompt exceeds the KV memory budget"
    if fault == "kv-abort=4" and route == "openai-completions":
        return "abort", "finish_reason abort"
    if fault == "short-completion=8" and route in OPENAI:
        return None  # no usage there: see the test of it
    return FAULTS[fault]


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_what_it_is(fault: str, measured: Measured) -> None:
    """Error events, cut streams, missing terminal events, aborts, refusals and short answers are failures."""
    record = measured.records[fault]
    wanted = expected(measured.route, fault)
    if wanted is None:
        assert (record["ok"], record["error"]) == (True, None)
        return
    assert (record["ok"], record["error"]) == (False, wanted[0])
    assert wanted[1] in record["server_message"]


def test_an_error_event_inside_http_200_credits_nothing(measured: Measured) -> None:
    record, _ = measured.of("error-in-stream=4")
    assert record["status"] == 200
    assert record["output_tokens"] < LENGTH
    assert measured.summary["ok"] == len(measured.good)


def test_tokens_are_the_engines_whatever_the_chunks(measured: Measured) -> None:
    """Several tokens a chunk: counted as tokens, in the chunk that brought them."""
    for fault, record in measured.records.items():
        if not record["ok"] or fault == "short-completion=8":
            continue
        true = measured.truth[record["rid"]]
        own = measured.traces[record["index"]]
        assert record["output_tokens"] == sum(own["k"]) == true["output_tokens"] == LENGTH
        assert record["token_source"] == "server"
        assert record["chunks"] == len(own["t"]) < LENGTH / 2
        if measured.route in OPENAI:
            # a step without text (it ended inside a character) has no chunk of its own; its tokens come with the next
            ends = set(itertools.accumulate(own["k"]))
            assert ends <= set(itertools.accumulate(true["chunk_tokens"])) or record["trace_source"] == "tokenizer"
        else:
            assert own["k"] == true["chunk_tokens"]


def test_the_rate_is_over_tokens_not_over_chunks(measured: Measured) -> None:
    """A chunk holds about four tokens: taken for one, a rate would be a quarter."""
    pairs = [(record, measured.truth[record["rid"]]) for record in measured.good if record["output_tokens"] == LENGTH]
    off = [record["decode_tokens_per_s"] / true["decode_tokens_per_s"] for record, true in pairs]
    assert 0.7 < statistics.median(off) < 1.4
    for record, _ in pairs:
        own = measured.traces[record["index"]]
        by_hand = (sum(own["k"]) - own["k"][0]) / (own["t"][-1] - own["t"][0])
        assert record["decode_tokens_per_s"] == pytest.approx(by_hand, rel=1e-3)
        assert record["itl_mean_s"] == record["tpot_s"] == pytest.approx(1 / by_hand, rel=1e-3)


def test_the_first_chunks_tokens_are_not_in_the_rate(measured: Measured) -> None:
    record, true = measured.of("first-chunk=5")
    assert record["first_chunk_tokens"] == true["chunk_tokens"][0] >= 5
    own = measured.traces[record["index"]]
    by_hand = (LENGTH - record["first_chunk_tokens"]) / (own["t"][-1] - own["t"][0])
    assert record["decode_tokens_per_s"] == pytest.approx(by_hand, rel=1e-3)


def test_the_peak_is_never_below_the_mean(measured: Measured) -> None:
    assert measured.cell["peak_tokens_per_s"] >= measured.cell["window"]["tokens_per_s"] > 0


def test_no_clock_starts_before_a_token(measured: Measured) -> None:
    """An early role chunk, or comments before the first event, are no first token."""
    for fault in ("early-role-chunk", "keepalive-comments=3", "none"):
        record, true = measured.of(fault)
        assert record["ttft_s"] >= true["ttft_s"] - 0.002  # the engine writes before it arrives here
    assert measured.records["early-role-chunk"]["first_chunk_tokens"] == 1


def test_what_was_asked_for_is_never_credited(measured: Measured) -> None:
    """Usage is missing and the answer ended after 8 of 48 tokens: counted, marked, and not valid."""
    record, true = measured.of("short-completion=8")
    assert true["output_tokens"] == 8
    if measured.route in OPENAI:
        assert (record["token_source"], record["trace_source"]) == ("tokenizer", "tokenizer")
        assert abs(record["output_tokens"] - 8) <= 1
        assert check(measured.cell, "token count is the server's")["ok"] is False
        assert check(measured.cell, "finish reason is length")["seen"] == "stop"
        assert check(measured.cell, "output tokens as asked")["ok"] is False
    else:
        assert (record["token_source"], record["output_tokens"]) == ("server", 8)


def test_usage_at_the_end_alone_is_shared_over_the_chunks(measured: Measured) -> None:
    record, true = measured.of("usage-final-only")
    if measured.route in OPENAI:
        assert (record["token_source"], record["trace_source"]) == ("server", "tokenizer")
    assert record["output_tokens"] == true["output_tokens"] == LENGTH
    assert sum(measured.traces[record["index"]]["k"]) == LENGTH


def test_texts_are_whole(measured: Measured, tokenizer_dir: Path) -> None:
    """Leading spaces, multi-byte characters cut over packets, comments and other spellings of events."""
    tokenizer = tokenizers.load(tokenizer_dir)
    for fault in ("none", "keepalive-comments=3", "sse-variants", "coalesce=4", "split-utf8"):
        record = measured.records[fault]
        text = record["text"]
        assert text
        assert "�" not in text[:-1]
        if measured.route.startswith("native"):
            assert text == tokenizer.decode(record["output_ids"])
        else:
            assert abs(len(tokenizer.encode(text)) - LENGTH) <= LENGTH / 4
    assert measured.records["split-utf8"]["text"].isascii() is False
    assert any(record["text"].startswith(" ") for record in measured.good)


def test_the_same_prompt_has_the_same_text_on_every_route(measured: Measured, texts: dict[str, str]) -> None:
    text = measured.records["sse-variants"]["text"]
    assert texts.setdefault(measured.records["sse-variants"]["prompt_id"], text) == text


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """The answer to each prompt, of the route that was measured first."""
    return {}


def test_more_reasoning_than_tokens_changes_no_count(measured: Measured) -> None:
    record, true = measured.of("reasoning-overcount")
    assert record["output_tokens"] == true["output_tokens"] == LENGTH


def test_prompts_are_exact_on_every_route(measured: Measured) -> None:
    for record in measured.good:
        true = measured.truth[record["rid"]]
        known = {record["prompt_tokens"], true["prompt_tokens"], record["prompt_tokens_asked"]} - {None}
        assert known == {1024}
    assert check(measured.cell, "prompt tokens as asked")["ok"] is True


def test_acceptance_is_the_engines(measured: Measured) -> None:
    for record in measured.good:
        true = measured.truth[record["rid"]]
        assert (record["verify_steps"], record["correct_drafts"]) == (true["verify_steps"], true["correct_drafts"])


def test_failures_are_counted_and_in_no_figure(measured: Measured) -> None:
    assert measured.code == 1
    assert measured.cell["state"] == "invalid"
    failed = [record for record in measured.records.values() if not record["ok"]]
    assert (measured.summary["requests"], measured.summary["ok"]) == (len(measured.records), len(measured.good))
    assert len(failed) == sum(expected(measured.route, fault) is not None for fault in FAULTS)
    assert measured.summary["valid"] is False
    assert measured.summary["ttft_s"] == statistics.median(record["ttft_s"] for record in measured.good)
    assert all(record["ttft_s"] is None or record["ttft_s"] > 0 for record in failed)
    assert measured.records["http-500"]["ttft_s"] is None
    assert measured.cell["output_tokens_total"] == sum(record["output_tokens"] for record in measured.good)


def test_a_stalled_stream_costs_itself_alone_and_ends_on_the_server_too(measured: Measured) -> None:
    record, true = measured.of("stall=4")
    assert 4 <= record["output_tokens"] == true["output_tokens"] < LENGTH  # what arrived is kept
    assert true["finish_reason"] == "abort"
    assert measured.records["first-chunk=5"]["ok"]  # the next but one


def test_the_warm_up_is_in_no_record_and_no_window(measured: Measured) -> None:
    warm = [row for rid, row in measured.truth.items() if rid.startswith("warmup-")]
    assert len(warm) == measured.cell["warmup"]["requests"] == WARM_UPS
    assert not {row["rid"] for row in warm} & {record["rid"] for record in measured.records.values()}
    begun = min(record["sent_s"] for record in measured.records.values())
    assert measured.cell["window"]["start_s"] > begun


@pytest.mark.parametrize("route", APIS)
def test_all_requests_fail_and_a_summary_is_written(route: str, tmp_path: Path, tokenizer_dir: Path) -> None:
    with engine(route, tokenizer_dir, sim_fault=["http-400"]) as sim:
        shape = "name: d, prompt_tokens: 64, output_tokens: 8, requests: 20"
        code, cells, records = load(tmp_path, sim, tokenizer_dir, route, shape)
    assert code == 1
    assert 0 < len(records) < 20  # given up
    assert {record["error"] for record in records} == {"http"}
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    (row,) = summary["cells"]
    assert (row["state"], row["ok"], row["requests"]) == ("failed", 0, len(records))
    assert (row["ttft_s"], row["decode_tokens_per_s"], row["acceptance_length"]) == (None, None, None)
    assert "is longer than the model's context length" in row["reason"]
    assert cells[0]["window"] is None


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """A cell on a server of which much is wrong that no single request shows."""

    route: str
    cell: dict[str, Any]
    records: list[dict[str, Any]]
    truth: dict[str, dict[str, Any]]


@pytest.fixture(scope="module", params=APIS)
def wrong(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> Wrong:
    """The flush is confirmed and does nothing, a baseline drafts, two run at once, answers go on after their end."""
    route: str = request.param
    faults = ["flush-kept", "spec-on", "hidden-cap=2"]
    with engine(route, tokenizer_dir, sim_fault=faults, sim_natural_tokens=8, sim_time_scale=0.2) as sim:
        shape = "name: d, prompt_tokens: 1024, output_tokens: 48, requests: 8, concurrency: 4"
        folder = tmp_path_factory.mktemp("wrong")
        code, (cell,), records = load(folder, sim, tokenizer_dir, route, shape, top="timeouts: {idle_s: 30}")
        truth = {row["rid"]: row for row in sim.truth()}
    assert (code, cell["state"], cell["ok"]) == (1, "invalid", 8)
    return Wrong(route=route, cell=cell, records=records, truth=truth)


def test_a_warm_cache_is_noticed(wrong: Wrong) -> None:
    """The first prompt is the warm-up's, which is why the cache is flushed after that."""
    cached = [record["cached_tokens"] for record in wrong.records]
    assert cached == [wrong.truth[record["rid"]]["cached_tokens"] for record in wrong.records]
    seen = check(wrong.cell, "prompt not served from the cache")
    assert (seen["ok"], seen["seen"]) == (False, f"{max(cached)} cached tokens")
    assert cached[0] == max(cached) > 900


def test_a_queue_on_the_server_is_no_concurrency(wrong: Wrong) -> None:
    """Four are asked for, two run at once, and no report of the server's says so."""
    seen = check(wrong.cell, "concurrency reached on the server")
    assert (seen["ok"], seen["expected"]) == (False, 4)
    assert seen["seen"].endswith("2 at most")


def test_tokens_after_the_end_of_sequence_are_seen(wrong: Wrong) -> None:
    seen = check(wrong.cell, "share of tokens after the first end of sequence")
    if wrong.route in OPENAI:
        assert seen["ok"] is None  # no ids there
        return
    true = [wrong.truth[record["rid"]]["first_eos"] for record in wrong.records]
    assert [record["first_eos"] for record in wrong.records] == true
    after = sum(48 - place - 1 for place in true if place is not None)
    assert after > 0.25 * 8 * 48
    assert (seen["ok"], seen["seen"]) == (False, f"{after / (8 * 48):.0%}")


def test_a_baseline_that_speculates_is_no_baseline(wrong: Wrong) -> None:
    assert wrong.cell["method"] == "autoregressive"
    assert "no speculation in the baseline: saw verify steps, expected none" in wrong.cell["reason"]


@pytest.mark.parametrize("route", ["native", "openai-chat"])
def test_a_method_without_a_verify_step_is_not_that_method(route: str, tmp_path: Path, tokenizer_dir: Path) -> None:
    with engine(route, tokenizer_dir, sim_fault=["spec-off"], **DFLASH) as sim:
        shape = "name: d, prompt_tokens: 64, output_tokens: 16, requests: 1"
        _, (cell,), _ = load(tmp_path, sim, tokenizer_dir, route, shape)
    # the OpenAI routes' extension is left out where nothing was drafted, and by servers that do not have it
    seen = check(cell, "speculation was on")
    assert seen["ok"] is (None if route in OPENAI else False)
    if seen["ok"] is False:
        assert (seen["seen"], cell["state"]) == ("1 of 1 requests without a verify step", "invalid")


# the fault that strikes the one request of cell number 0, 1, 2 -> the reason that the cell has
CLAIMS = {
    "prompt-count-off=1": "prompt tokens as asked: saw 65, expected 64",
    "count-off=3": "every request succeeded: saw 1 of 1 failed (count: 19 of 16 tokens, finish_reason length)",
    "accept-over-bound": "acceptance length within its bound: saw 18.0, expected 16",
}


@pytest.mark.parametrize("route", APIS)
def test_a_server_that_claims_what_is_not_so(route: str, tmp_path: Path, tokenizer_dir: Path) -> None:
    faults = [f"{fault}@{WARM_UPS + place}" for place, fault in enumerate(CLAIMS, 1)]
    shapes = [f"name: w{place}, prompt_tokens: 64, output_tokens: 16, requests: 1" for place in range(len(CLAIMS) + 1)]
    with engine(route, tokenizer_dir, sim_fault=faults, **DFLASH) as sim:
        code, cells, _ = load(tmp_path, sim, tokenizer_dir, route, *shapes)
    assert code == 1
    reasons = {cell["workload"]: (cell["state"], cell["reason"]) for cell in cells}
    for place, (fault, words) in enumerate(CLAIMS.items()):
        state = "failed" if fault == "count-off=3" else "invalid"  # the one request did not succeed
        assert reasons[f"w{place}"][0] == state
        assert reasons[f"w{place}"][1].startswith(words)
    assert reasons[f"w{len(CLAIMS)}"] == ("done", None)


def test_reasoning_counts_and_the_answer_has_its_own_time(tmp_path: Path, tokenizer_dir: Path) -> None:
    """TTFT is the first token of any kind, TTFA that of the answer."""
    with engine("openai-chat", tokenizer_dir, reasoning_parser="qwen3", sim_time_scale=0.1) as sim:
        shape = "name: d, prompt_tokens: 64, output_tokens: 200, requests: 2"
        _, _, records = load(tmp_path, sim, tokenizer_dir, "openai-chat", shape, top="sampling: {thinking: true}")
        truth = {row["rid"]: row for row in sim.truth()}
    for record in records:
        assert record["ok"]
        assert record["output_tokens"] == 200
        assert record["reasoning_text"]
        assert record["ttft_s"] >= truth[record["rid"]]["ttft_s"] - 0.002
    answered = [record for record in records if record["text"]]
    assert answered
    assert all(record["ttfa_s"] > record["ttft_s"] for record in answered)
    assert all(record["ttfa_s"] is None for record in records if not record["text"])


def test_the_wait_for_a_place_is_in_the_scheduled_ttft(tmp_path: Path, tokenizer_dir: Path) -> None:
    """Four are due at once and one may run: the last waits for three, and its scheduled TTFT says so."""
    with engine("native", tokenizer_dir) as sim:
        shape = (
            f"name: d, prompt_tokens: 64, output_tokens: {LENGTH}, requests: 4, arrival: burst, burst: 4, rate: 4, "
            "concurrency: 1"
        )
        _, (cell,), records = load(tmp_path, sim, tokenizer_dir, "native", shape)
    assert len({record["scheduled_s"] for record in records}) == 1
    ordered = sorted(records, key=lambda record: record["sent_s"])
    for before, after in itertools.pairwise(ordered):
        assert after["sent_s"] >= before["finished_s"]
    waits = [record["first_s"] - record["scheduled_s"] for record in ordered]
    assert waits[3] > sum(record["e2e_s"] for record in ordered[:3])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())["cells"][0]
    assert summary["scheduled_ttft_s"] == pytest.approx(statistics.median(waits))
    assert summary["scheduled_ttft_s"] > summary["ttft_s"]
    names = list(summary)
    assert names.index("scheduled_ttft_s") < names.index("ttft_s")
    late = check(cell, "requests left when due")
    assert float(late["seen"].split()[1]) < 1e3 * min(record["e2e_s"] for record in ordered)
