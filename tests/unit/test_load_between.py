"""What lies between cells: a quiet server, a flushed cache, requests given up; and a client that could not follow."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_load import check, engine, load

from specrig.engine.client import EngineClient
from specrig.engine.errors import EngineError
from specrig.load import cell as cells
from specrig.load.windows import Stream, steady
from specrig.runs import command
from specrig.sim.testing import RunningSim

APIS = ["native", "openai-chat", "openai-completions"]


@contextmanager
def busy(sim: RunningSim) -> Iterator[EngineClient]:
    """Somebody else's request, "other", runs on the server until it is aborted."""
    with EngineClient(sim.url) as client:

        def ask() -> None:
            try:
                client.generate(text="Other", max_new_tokens=3000, rid="other")
            except EngineError:  # aborted
                return

        other = threading.Thread(target=ask)
        other.start()
        until = time.monotonic() + 20
        while not any(row["num_running_reqs"] for row in client.loads()) and time.monotonic() < until:
            time.sleep(0.01)
        try:
            yield client
        finally:
            client.abort("other")
            other.join()


UNIQUE = "name: d, prompt_tokens: 64, output_tokens: 8, requests: 2, cache: unique"


def test_a_cell_waits_until_the_server_is_quiet(tmp_path: Path, tokenizer_dir: Path) -> None:
    with engine("native", tokenizer_dir) as sim:

        def leave(client: EngineClient) -> None:
            sim.truth(at_least=1, timeout_s=30)  # the warm-up's
            time.sleep(0.3)
            client.abort("other")

        with busy(sim) as client:
            leaving = threading.Thread(target=leave, args=(client,))
            leaving.start()
            _, (cell,), records = load(tmp_path, sim, tokenizer_dir, "native", UNIQUE)
            leaving.join()
        truth = {row["rid"]: row for row in sim.truth()}
    assert cell["ok"] == 2
    (warm,) = [row for rid, row in truth.items() if rid.startswith("warmup-")]
    left = truth["other"]["last_token_unix"]
    assert warm["last_token_unix"] < left
    assert all(left < truth[record["rid"]]["arrived_unix"] for record in records)


def test_a_server_that_others_use_fails_the_cell(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells, "QUIET_S", 0.3)
    with engine("native", tokenizer_dir) as sim, busy(sim):
        code, (cell,), records = load(tmp_path, sim, tokenizer_dir, "native", UNIQUE)
    assert (code, cell["state"], records) == (1, "failed", [])
    assert cell["reason"].startswith("the server still runs 1 requests with 0 waiting after 0.3 s, and none of them is")


class Refusing:
    """A server that calls itself busy some times before it flushes."""

    def __init__(self, times: int, kind: str) -> None:
        self.asked = 0
        self._times, self._kind = times, kind

    def flush_cache(self, timeout_s: float | None = None) -> None:
        """Flush, or say why not."""
        assert timeout_s
        self.asked += 1
        if self.asked <= self._times:
            raise EngineError("Flush cache failed.", status=400, kind=cast(Any, self._kind))


def flush(control: Refusing) -> None:
    async def main() -> None:
        await cells._flush(cast(cells.Context, SimpleNamespace(control=control, stop=asyncio.Event())))

    asyncio.run(main())


def test_a_busy_server_is_asked_to_flush_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "RETRY_S", 0.01)
    twice = Refusing(2, "busy")
    flush(twice)
    assert twice.asked == 3
    monkeypatch.setattr(cells, "AGAIN_S", 0.05)
    with pytest.raises(EngineError, match=r"^Flush cache failed\.$"):
        flush(Refusing(10**6, "busy"))
    broken = Refusing(1, "server")
    with pytest.raises(EngineError, match="Flush cache failed"):
        flush(broken)
    assert broken.asked == 1
    with pytest.raises(EngineError, match="cannot flush its cache: use cache unique or shared"):
        flush(Refusing(1, "not-found"))


@pytest.mark.parametrize("route", APIS)
def test_a_request_over_its_time_ends_on_the_server_too(route: str, tmp_path: Path, tokenizer_dir: Path) -> None:
    with engine(route, tokenizer_dir) as sim:
        shape = "name: d, prompt_tokens: 64, output_tokens: 900, requests: 2, concurrency: 2, cache: unique"
        times = "timeouts: {first_token_s: 30, idle_s: 30, request_s: 1}"
        code, (cell,), records = load(tmp_path, sim, tokenizer_dir, route, shape, top=times)
        truth = {row["rid"]: row for row in sim.truth(at_least=4)}
    assert (code, cell["state"]) == (1, "failed")
    for record in records:
        assert (record["ok"], record["error"]) == (False, "request_timeout")
        assert record["server_message"] == "not done 1 s after it was sent"
        true = truth[record["rid"]]
        assert true["finish_reason"] == "abort"
        assert 0 < record["output_tokens"] <= true["output_tokens"] < 900


def test_a_request_without_a_first_token_ends_on_the_server_too(tmp_path: Path, tokenizer_dir: Path) -> None:
    with engine("native", tokenizer_dir, sim_fault=["slow-first-request=10"]) as sim:
        shape = "name: d, prompt_tokens: 64, output_tokens: 8, requests: 1"
        times = "timeouts: {first_token_s: 0.4, idle_s: 30, request_s: 30}"
        _, (cell,), (record,) = load(tmp_path, sim, tokenizer_dir, "native", shape, top=times)
        truth = {row["rid"]: row for row in sim.truth(at_least=2)}
    assert cell["warmup"]["error"] == "no token in 0.4 s"
    assert (record["error"], record["output_tokens"], record["ttft_s"]) == ("first_token_timeout", 0, None)
    assert truth[record["rid"]]["finish_reason"] == "abort"


def test_a_client_that_could_not_follow_makes_its_cell_invalid(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A display that takes 80 ms a request holds the loop; the figure is in the reason."""
    shown = command._Show._request

    def slow(self: command._Show, record: Any) -> None:
        time.sleep(0.08)
        shown(self, record)

    monkeypatch.setattr(command._Show, "_request", slow)
    with engine("native", tokenizer_dir) as sim:
        shape = "name: d, prompt_tokens: 64, output_tokens: 8, requests: 12, concurrency: 2"
        code, (cell,), _ = load(tmp_path, sim, tokenizer_dir, "native", shape)
    seen = check(cell, "client kept up")
    assert (code, cell["state"], cell["ok"], seen["ok"]) == (1, "invalid", 12, False)
    assert "client kept up: saw loop lag " in cell["reason"]
    assert cell["client"]["lag_p99_ms"] > 50
    assert f"{cell['client']['lag_p99_ms']:.1f} ms at p99" in seen["seen"]


TIMES = st.lists(st.integers(1, 400), min_size=2, max_size=12, unique=True)


@given(st.lists(TIMES, min_size=1, max_size=8), st.integers(1, 8), st.integers(1, 50))
def test_what_comes_after_the_window_is_not_in_it(times: list[list[int]], concurrency: int, late: int) -> None:
    """The tail of the last c - 1 requests may be as slow as it likes: no figure of the window changes."""
    streams = [Stream(sent=0.0, due=0.0, t=sorted(map(float, row)), k=[2] * len(row), queue_s=0.0) for row in times]
    window = steady(streams, concurrency)
    if window is None:
        return
    counted = sum(2 for s in streams for t in s.t if window.start < t <= window.end)
    assert (window.tokens, window.tokens_per_s) == (counted, counted / (window.end - window.start))
    longer = [
        Stream(sent=s.sent, due=s.due, t=[*s.t, s.t[-1] + late], k=[*s.k, 99], queue_s=0.0)
        if s.t[-1] > window.end
        else s
        for s in streams
    ]
    after = steady(longer, concurrency)
    assert after is not None
    assert (after.start, after.end, after.tokens, after.tokens_per_s, after.running_mean) == (
        window.start, window.end, window.tokens, window.tokens_per_s, window.running_mean,
    )  # fmt: skip
