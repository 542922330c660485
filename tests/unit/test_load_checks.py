"""Each rule of a valid cell, held and broken."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrig.load import checks
from specrig.load.stream import Lag
from specrig.load.windows import Stream, steady
from specrig.model.cell import Cell
from specrig.model.record import Request
from specrig.model.sweep import Sampling

LAG = {"mean_ms": 0.1, "p50_ms": 0.1, "p99_ms": 1.0, "max_ms": 3.0, "seconds": 1.0, "cpu": 0.2}


def cell(**more: Any) -> Cell:
    values: dict[str, Any] = {
        "id": "c", "workload": "w", "prompts": "questions", "prompt_tokens": 100, "output_tokens": 10, "model": "m",
        "api": "sglang", "seed": 1, "sampling": Sampling(),
    }  # fmt: skip
    return Cell(**{**values, **more})


def request(**more: Any) -> Request:
    values: dict[str, Any] = {
        "run": "r", "cell": "c", "prompt_id": "p", "index": 0, "ok": True, "finish_reason": "length",
        "prompt_tokens": 100, "prompt_tokens_asked": 100, "output_tokens": 10, "output_tokens_asked": 10,
        "token_source": "server", "first_s": 1.0, "finished_s": 2.0, "cached_tokens": 0, "output_ids": list(range(10)),
        "verify_steps": 4, "correct_drafts": 6,
    }  # fmt: skip
    return Request(**{**values, **more})


def broken(rows: list[Any]) -> list[str]:
    return [row.rule for row in rows if row.ok is False]


def test_a_good_cell_breaks_nothing() -> None:
    rows = checks.record_checks(cell(), [request()] * 3, "dflash", 16)
    assert broken(rows) == []
    assert checks.verdict(rows) is None
    assert all(row.ok for row in rows)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"finish_reason": "stop"}, "finish reason is length"),
        ({"output_tokens": 9, "output_ids": list(range(9))}, "output tokens as asked"),
        ({"token_source": "tokenizer"}, "token count is the server's"),
        ({"prompt_tokens": 109}, "prompt tokens as asked"),
        ({"output_ids": list(range(7))}, "output ids match the token count"),
        ({"verify_steps": 0, "correct_drafts": None}, "speculation was on"),
        ({"correct_drafts": 61}, "acceptance length within its bound"),  # 1 + 61/4 = 16.25 > 16
        ({"first_eos": 2}, "share of tokens after the first end of sequence"),  # 7 of 10
        ({"cached_tokens": 65}, "prompt not served from the cache"),
    ],
)
def test_a_broken_rule_is_named(change: dict[str, Any], rule: str) -> None:
    assert broken(checks.record_checks(cell(), [request(**change)] * 3, "dflash", 16)) == [rule]


def test_the_end_of_sequence_itself_is_no_token_after_it() -> None:
    # 2 of 10 after index 7, 3 of 10 after index 6
    assert broken(checks.record_checks(cell(), [request(first_eos=7)], "dflash", 16)) == []
    (row,) = [
        row for row in checks.record_checks(cell(), [request(first_eos=6)], "dflash", 16) if "end of seq" in row.rule
    ]
    assert (row.ok, row.seen) == (False, "30%")


def test_the_bound_itself_is_allowed() -> None:
    assert broken(checks.record_checks(cell(), [request(correct_drafts=60)], "dflash", 16)) == []


def test_the_baseline_must_not_speculate() -> None:
    assert broken(checks.record_checks(cell(), [request()], "autoregressive", None)) == [
        "no speculation in the baseline"
    ]
    plain = request(verify_steps=None, correct_drafts=None)
    assert broken(checks.record_checks(cell(), [plain], "autoregressive", None)) == []


def test_a_later_turn_may_be_cached_and_a_shared_prompt_too() -> None:
    assert broken(checks.record_checks(cell(), [request(), request(turn=1, cached_tokens=90)], "dflash", 16)) == []
    assert broken(checks.record_checks(cell(cache="shared"), [request(cached_tokens=90)], "dflash", 16)) == []


def test_unknown_stays_unknown() -> None:
    silent = request(output_ids=None, verify_steps=None, correct_drafts=None, cached_tokens=None, prompt_tokens=None)
    rows = {row.rule: row.ok for row in checks.record_checks(cell(), [silent], "dflash", 16)}
    assert rows["speculation was on"] is None
    assert rows["prompt not served from the cache"] is None
    assert rows["prompt tokens as asked"] is None
    assert rows["share of tokens after the first end of sequence"] is None


def test_failures_carry_the_first_ones_words() -> None:
    bad = request(ok=False, error="http", server_message="The input is too long")
    row = checks.failures([request(), bad], 2)
    assert row.ok is False
    assert row.seen == "1 of 2 failed (http: The input is too long)"
    assert checks.failures([request()], 2).ok is False
    assert checks.failures([request(), request()], 2).ok is True


@pytest.mark.parametrize(
    ("info", "label"),
    [
        ({"speculative_algorithm": None}, "autoregressive"),
        ({"speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": 16}, "dflash"),
        ({"speculative_algorithm": "DDTREE", "speculative_ddtree_budget": 15}, "ddtree-b15"),
        (
            {
                "speculative_algorithm": "DFLASH",
                "speculative_dflash_tree_verify": True,
                "speculative_num_draft_tokens": 32,
            },
            "ddtree-b31",
        ),
        ({}, None),
        (None, None),
    ],
)
def test_the_method_is_read_from_the_servers_report(info: dict[str, Any] | None, label: str | None) -> None:
    assert checks.method_of(info) == label


def test_the_server_must_be_what_the_cell_is_defined_on() -> None:
    info = {"served_model_name": "m", "tp_size": 4, "context_length": 32768, "speculative_algorithm": "DFLASH"}
    good = cell(tp=4, context_length=32768, method="dflash")
    assert checks.asked_for(good, info).ok is True
    assert checks.asked_for(cell(tp=1), info).seen == {"tp_size": 4}
    assert checks.asked_for(cell(method="autoregressive"), info).seen == {"method": "dflash"}
    assert checks.asked_for(cell(context_length=131072), info).ok is False
    assert checks.asked_for(cell(model="other"), info).expected == {"served_model_name": "other"}
    tree = {"speculative_algorithm": "DDTREE", "speculative_ddtree_budget": 15}
    assert checks.asked_for(cell(method="ddtree-b15"), tree).ok is True
    assert checks.asked_for(cell(method="ddtree-b31"), tree).ok is False
    assert checks.asked_for(good, None).ok is None


def test_a_server_that_changed_is_told() -> None:
    before = {"served_model_name": "m", "tp_size": 4, "internal_states": [1]}
    assert checks.same_server(before, {**before, "internal_states": [2]}).ok is True
    row = checks.same_server(before, {**before, "tp_size": 2})
    assert (row.ok, row.seen, row.expected) == (False, {"tp_size": 2}, {"tp_size": 4})
    assert checks.same_server(before, None).ok is None


def test_the_acceptance_bound_of_a_tree_is_its_depth_never_its_nodes() -> None:
    chain = {"speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": 16}
    assert checks.acceptance_bound("dflash", chain) == 16
    tree = {
        "speculative_algorithm": "DDTREE",
        "speculative_ddtree_budget": 31,
        "speculative_num_draft_tokens": 32,
        "speculative_dflash_block_size": 16,
    }
    assert checks.acceptance_bound("ddtree-b31", tree) == 16
    assert checks.acceptance_bound("autoregressive", chain) is None
    # EAGLE with 4 branches a step: five steps are five levels, however many of the 16 nodes are verified
    eagle = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 5, "speculative_num_draft_tokens": 16}
    assert checks.acceptance_bound("eagle3", eagle) == 6


def reached(streams: list[Stream], polls: list[tuple[float, int, int]] | None = None, concurrency: int = 4) -> Any:
    wanted = cell(concurrency=concurrency)
    return checks.concurrency_reached(wanted, streams, steady(streams, concurrency), polls or [])


def test_concurrency_is_what_the_server_worked_on() -> None:
    together = [Stream(sent=0, due=0, t=[1, 10], k=[1, 9], queue_s=0.5) for _ in range(4)]
    assert reached(together).ok is True
    assert reached(together).seen == "4.00 on average, 4 at most"
    # two at a time: the others queue until those are done
    capped = [
        Stream(sent=0, due=0, t=[1 + late, 9 + late, 10.01 + late], k=[1, 8, 1], queue_s=late)
        for late in (0, 0, 10, 10)
    ]
    row = reached(capped)
    assert (row.ok, row.expected) == (False, 4)
    assert "2 at most" in row.seen
    assert reached(together, concurrency=1) is None


def test_a_peak_alone_is_no_concurrency() -> None:
    # four are together for one second of ten: 1 + 3 * 1/9 in the window (1, 10]
    rows = [
        Stream(sent=0, due=0, t=[1, 9.9, 10], k=[1, 8, 1], queue_s=0.0),
        *(Stream(sent=0, due=0, t=[1, 1.5, 2], k=[1, 8, 1], queue_s=0.0) for _ in range(3)),
    ]
    window = steady(rows, 1)
    assert window is not None
    assert (window.start, window.end) == (1, 10)
    row = checks.concurrency_reached(cell(concurrency=4), rows, window, [])
    assert row is not None
    assert (row.ok, row.seen) == (False, "1.33 on average, 4 at most")


def test_prefill_counts_as_work_where_the_queue_is_known() -> None:
    # each is prefilled for 9 s and decodes for 1 s, one second apart: never two decode, up to four are in work
    rows = [Stream(sent=float(i), due=0.0, t=[i + 9.0, i + 9.9], k=[1, 9], queue_s=0.0) for i in range(8)]
    assert reached(rows).ok is True
    # without the queue's time that is not known, unless requests were seen waiting while too few ran
    blind = [Stream(sent=s.sent, due=0.0, t=s.t, k=s.k) for s in rows]
    assert reached(blind).ok is None
    assert reached(blind, [(10.0, 1, 0)]).ok is None
    assert reached(blind, [(10.0, 1, 3)]).ok is False


def test_the_servers_own_count_is_taken_where_the_queue_is_not_known() -> None:
    # long prompts and short answers: four are together, and decoding alone is 4 * 0.5 s of each 10 s
    rows = [Stream(sent=10.0 * wave, due=0, t=[10 * wave + 9.5, 10 * wave + 10.0], k=[1, 9]) for wave in range(3)] * 4
    window = steady(rows, 4)
    assert window is not None
    assert (window.start, window.end) == (9.5, 30.0)
    assert window.running_mean < 1
    waited = [(11.0, 1, 3), (14.0, 4, 0), (17.0, 4, 0)]
    assert (reached(rows, waited).ok, reached(rows, waited).seen) == (True, "3.00 on average, 4 at most")
    # most of the time one ran and three waited
    starved = reached(rows, [(11.0, 1, 3), (14.0, 1, 3), (17.0, 4, 0), (20.0, 1, 3)])
    assert (starved.ok, starved.seen) == (False, "1.75 on average, 4 at most")
    # all of them were seen at once, and nobody looked in the window
    assert reached(rows, [(5.0, 1, 3)]).ok is None


def test_the_clients_lateness_is_held_against_what_it_measured() -> None:
    def kept_up(ttft_s: float | None = 0.4, **more: float) -> bool | None:
        return checks.client_kept_up(Lag(**{**LAG, **more}), [request(ttft_s=ttft_s)]).ok

    # one second from first to last token: 10 ms on average and 100 ms at p99 are allowed
    assert kept_up(mean_ms=10.0, p99_ms=99.0) is True
    assert kept_up(mean_ms=10.1) is False
    assert kept_up(p99_ms=101.0) is False
    # of a TTFT of 120 ms 10 ms would be a twelfth: 6 ms and 60 ms
    assert kept_up(0.12, mean_ms=5.9, p99_ms=59.0) is True
    assert kept_up(0.12, mean_ms=6.1) is False
    assert kept_up(0.12, p99_ms=61.0) is False
    # 5 ms are allowed always
    assert kept_up(0.01, mean_ms=5.0, p99_ms=50.0) is True
    assert kept_up(None, mean_ms=5.1) is False
    assert kept_up(cpu=0.96) is False
    assert kept_up(seconds=0.19) is None


def test_open_loop_requests_must_leave_when_due() -> None:
    on_time = [request(scheduled_s=1.0, sent_s=1.005)]
    assert checks.arrivals_kept(on_time, 100.0).ok is True
    late = [request(scheduled_s=1.0, sent_s=1.02)]
    assert checks.arrivals_kept(late, 100.0).ok is False
    assert checks.arrivals_kept(late, 1.0).ok is True  # a tenth of a second's gap
    assert checks.arrivals_kept(late, 4.0).ok is True  # 25 ms
    assert checks.arrivals_kept(late, 6.0).ok is False  # 17 ms


def test_a_wait_for_the_cap_is_not_the_clients_lateness() -> None:
    first = request(scheduled_s=0.0, sent_s=0.0, finished_s=1.0)
    waited = request(scheduled_s=0.5, sent_s=1.005, finished_s=2.0)
    assert checks.arrivals_kept([first, waited], 2.0).ok is False
    assert checks.arrivals_kept([first, waited], 100.0, cap=1).ok is True
    # the second place was free: nothing to wait for
    assert checks.arrivals_kept([first, waited], 100.0, cap=2).ok is False
    slow = request(scheduled_s=0.5, sent_s=1.2, finished_s=2.0)  # 0.2 s after the place was free
    row = checks.arrivals_kept([first, slow], 100.0, cap=1)
    assert (row.ok, row.seen) == (False, "p99 200.0 ms late")


PLACES = st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(1, 9))


@given(st.lists(PLACES, min_size=1, max_size=12), st.integers(1, 4))
def test_when_a_place_was_free_is_what_the_definition_says(rows: list[tuple[int, int, int]], cap: int) -> None:
    """Those ahead had left before, and ended after it was due; it may go when the last of them that did end has."""
    own = [request(scheduled_s=due, sent_s=due + wait, finished_s=due + wait + took) for due, wait, took in rows]
    released = checks._released(own, cap)
    for due, wait, _ in rows:
        ahead = [a + b + c for a, b, c in rows if a + b < due + wait and a + b + c > due]
        free = max((end for end in ahead if end <= due + wait), default=due) if len(ahead) >= cap else due
        assert released(due, due + wait) == free


def test_the_verdict_is_one_line_with_seen_and_expected() -> None:
    rows = [
        *checks.record_checks(cell(), [request(prompt_tokens=109)], "dflash", 16),
        checks.same_server({}, {"tp_size": 2}),
    ]
    prompt = "prompt tokens as asked: saw 109, expected 100"
    server = "same server before and after: saw tp_size 2, expected tp_size nothing"
    assert checks.verdict(rows) == f"{prompt}; {server}"
