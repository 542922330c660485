"""Windows, rates, shorter lengths and arrivals against values worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrig.load.metrics import decode_rate, first_eos, median, read_at
from specrig.load.windows import Stream, arrivals_window, peak, peak_rate, steady


def stream(sent: float, times: list[float], tokens: list[int] | None = None, due: float | None = None) -> Stream:
    return Stream(sent=sent, due=sent if due is None else due, t=times, k=tokens or [1] * len(times))


def test_single_wave_is_last_first_token_to_first_finish() -> None:
    # first tokens at 1 and 2, finishes at 5 and 6: window (2, 5]
    window = steady([stream(0, [1, 3, 4, 5], [1, 2, 2, 2]), stream(0.1, [2, 4, 6], [1, 3, 3])], concurrency=2)
    assert window is not None
    assert (window.start, window.end) == (2, 5)
    assert window.tokens == 2 + 2 + 2 + 3  # 3, 4, 5 of one and 4 of the other
    assert window.tokens_per_s == 3.0
    assert window.running_mean == 2.0
    assert window.waves == 1.0


def test_two_waves_end_with_the_finish_after_which_nothing_is_sent() -> None:
    # c = 2, N = 4: the first two start the window, the third finish ends it
    rows = [
        stream(0.0, [1.0, 2.0]),
        stream(0.1, [1.5, 3.0]),
        stream(2.0, [2.5, 4.0]),
        stream(3.0, [3.5, 5.0]),
    ]
    window = steady(rows, concurrency=2)
    assert window is not None
    assert (window.start, window.end) == (1.5, 4.0)
    assert window.tokens == 5  # 2.0, 3.0, 2.5, 4.0, 3.5
    # running inside: 0.5 + 1.5 + 1.5 + 0.5 stream-seconds over 2.5 s
    assert window.running_mean == pytest.approx(4.0 / 2.5)


def test_one_request_has_a_window_of_its_decode() -> None:
    window = steady([stream(0, [1, 2, 3], [4, 4, 4])], concurrency=1)
    assert window is not None
    assert (window.start, window.end, window.tokens) == (1, 3, 8)


def test_no_window_without_length_or_tokens() -> None:
    assert steady([], 1) is None
    assert steady([stream(0, [])], 1) is None
    assert steady([stream(0, [1.0])], 1) is None
    assert steady([stream(0, [1, 2]), stream(0, [3, 4])], 2) is None  # one after the other: 3 > 2


def test_open_loop_window_is_the_time_of_arrivals() -> None:
    rows = [stream(0.0, [0.5, 1.5]), stream(1.0, [1.2, 2.0]), stream(2.0, [2.5, 3.0])]
    window = arrivals_window(rows)
    assert window is not None
    assert (window.start, window.end, window.tokens) == (0.0, 2.0, 4)


def test_peak_counts_requests_in_work_up_to_their_last_chunk_but_one() -> None:
    assert peak([stream(0, [1, 3, 4]), stream(0, [2, 3, 5]), stream(0, [3.5, 4, 5])]) == 2
    assert peak([stream(0, [1, 3, 4]), stream(3.9, [4, 5])]) == 1
    assert peak([]) == 0


@given(st.lists(st.lists(st.tuples(st.floats(0, 50), st.integers(1, 16)), min_size=1, max_size=20), min_size=1))
def test_peak_rate_is_never_below_the_mean(rows: list[list[tuple[float, int]]]) -> None:
    streams = [stream(0, sorted(t for t, _ in row), [k for _, k in row]) for row in rows]
    times = [t for s in streams for t in s.t]
    span = max(times) - min(times) or 1.0
    rate = peak_rate(streams)
    assert rate is not None
    assert rate * span >= sum(k for s in streams for k in s.k) * (1 - 1e-9)
    window = steady(streams, 1)
    if window is not None:
        seen = peak_rate(streams, window)
        assert seen is not None
        assert seen >= window.tokens_per_s * (1 - 1e-9)


def test_the_peak_of_a_time_that_is_no_whole_number_of_seconds() -> None:
    # 24 tokens in 2.4 s are 10 a second; parts of 0.8 s hold 8 each but the busiest, which holds 12 of them
    even = [stream(0, [0.0, *(0.1 + 0.1 * i for i in range(24))], [0, *[1] * 24])]
    assert peak_rate(even) == pytest.approx(10)
    late = [stream(0, [0.0, 0.4, 1.0, 2.0, 2.4], [1, 3, 4, 6, 6])]
    assert peak_rate(late) == pytest.approx(12 / 0.8)
    assert peak_rate([stream(0, [3.0, 3.0], [4, 4])]) == 8.0
    assert peak_rate([]) is None


def test_decode_rate_leaves_prefill_and_the_first_chunk_out() -> None:
    # 17 tokens, 5 of them in the first chunk: 12 in 0.5 s
    assert decode_rate([10.0, 10.25, 10.5], [5, 6, 6]) == 24.0
    assert decode_rate([10.0], [5]) is None
    assert decode_rate([10.0, 10.0], [5, 5]) is None


def test_shorter_length_is_cut_as_a_server_would() -> None:
    # 8 is reached in the third chunk (1 + 4 + 4 = 9)
    read = read_at([1.0, 2.0, 3.0, 4.0], [1, 4, 4, 4], 0.5, 8, verify_steps=3, correct_drafts=9)
    assert read is not None
    assert read.finished_s == 3.0
    assert read.e2e_s == 2.5
    assert read.decode_tokens_per_s == (8 - 1) / 2.0
    assert (read.verify_steps, read.correct_drafts) == (2, 6)


def test_shorter_length_without_steps_where_chunks_are_not_steps() -> None:
    read = read_at([1.0, 2.0, 3.0], [1, 8, 8], 0.0, 9, verify_steps=4, correct_drafts=12)
    assert read is not None
    assert read.verify_steps is None
    assert read_at([1.0], [1], 0.0, 2) is None


def test_first_end_of_sequence() -> None:
    assert first_eos([5, 7, 2, 2], {2}) == 2
    assert first_eos([5, 7], {2}) is None
    assert first_eos(None, {2}) is None


def test_median() -> None:
    assert median([3, 1, 2]) == 2
    assert median([4, 1, 2, 3]) == 2.5
    assert median([]) is None
