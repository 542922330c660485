"""The steady window of a cell, and what ran in it. Pure functions of the traces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Stream:
    """What a window needs of one successful request; seconds on one clock.

    Attributes:
        sent: when its bytes were written.
        due: when it was due.
        t: chunk arrivals, ascending.
        k: new tokens of each chunk.
        queue_s: how long the server says it waited before its prefill began; null = not known.
    """

    sent: float
    due: float
    t: Sequence[float]
    k: Sequence[int]
    queue_s: float | None = None

    @property
    def service(self) -> tuple[float, float]:
        """From when to when the server worked on it: prefill included where the queue is known, else decoding only."""
        return (self.t[0] if self.queue_s is None else self.sent + self.queue_s), self.t[-1]


@dataclass(frozen=True, kw_only=True)
class Steady:
    """A steady window.

    Attributes:
        start, end: tokens with start < t <= end are counted.
        tokens: how many there are.
        tokens_per_s: tokens over the window's length.
        running_mean: requests that the server worked on, averaged over the window's time.
        running_peak: the most of them at once, in the whole cell.
        waves: requests over concurrency; under 10 the window is short, 1 is a single wave.
    """

    start: float
    end: float
    tokens: int
    tokens_per_s: float
    running_mean: float
    running_peak: int
    waves: float


def steady(streams: Sequence[Stream], concurrency: int) -> Steady | None:
    """The window of a closed loop of N requests at concurrency c.

    From the latest first token among the first c requests to the finish after which nothing is sent anew, the
    (N - c + 1)-th; with N = c (a single wave) that is the last first token to the first finish.

    Args:
        streams: the requests that brought tokens, in any order.
        concurrency: c; more than N counts as N.

    Returns:
        The window; null where it has no length or there is no request.
    """
    ordered = sorted((s for s in streams if s.t), key=lambda s: s.sent)
    if not ordered:
        return None
    c = max(1, min(concurrency, len(ordered)))
    start = max(s.t[0] for s in ordered[:c])
    end = sorted(s.t[-1] for s in ordered)[len(ordered) - c]
    return _window(ordered, start, end, len(ordered) / c)


def arrivals_window(streams: Sequence[Stream]) -> Steady | None:
    """The window of an open loop: from the first moment a request was due to the last one.

    Args:
        streams: the requests that brought tokens.

    Returns:
        The window; null where it has no length.
    """
    known = [s for s in streams if s.t]
    if not known:
        return None
    return _window(known, min(s.due for s in known), max(s.due for s in known), 1.0)


def _window(streams: Sequence[Stream], start: float, end: float, waves: float) -> Steady | None:
    if not end > start:
        return None
    tokens = sum(k for s in streams for t, k in zip(s.t, s.k, strict=True) if start < t <= end)
    span = end - start
    running = sum(max(0.0, min(s.service[1], end) - max(s.service[0], start)) for s in streams) / span
    return Steady(
        start=start,
        end=end,
        tokens=tokens,
        tokens_per_s=tokens / span,
        running_mean=running,
        running_peak=peak(streams),
        waves=waves,
    )


def peak(streams: Sequence[Stream]) -> int:
    """The most requests that the server worked on at one moment.

    Each counts up to its last token but one chunk: a server that takes the next request when one ends would else be
    seen with both, since the last token is a moment older when it arrives here.
    """
    edges = []
    for stream in streams:
        if stream.t:
            begin, end = stream.service
            edges += [(begin, 0), (max(begin, stream.t[-2] if len(stream.t) > 1 else end), 1)]
    edges.sort()
    running = most = 0
    for _, leaving in edges:
        running += -1 if leaving else 1
        most = max(most, running)
    return most


def peak_rate(streams: Sequence[Stream], window: Steady | None = None, bucket_s: float = 1.0) -> float | None:
    """The busiest bucket's tokens a second, token-weighted.

    Buckets are equal parts, at most ``bucket_s`` long: of the time from the first token to the last, and of the window.
    So the peak is never below the mean over either, also where they are no whole number of seconds.

    Args:
        streams: the requests.
        window: the steady window, where there is one.
        bucket_s: the longest bucket; tokens of one single moment are taken over it.

    Returns:
        Tokens a second; null without tokens.
    """
    tokens = sorted((t, k) for stream in streams for t, k in zip(stream.t, stream.k, strict=True))
    if not tokens:
        return None
    spans = [(tokens[0][0], tokens[-1][0], True)]
    if window is not None and window.end > window.start:
        spans.append((window.start, window.end, False))
    return max(_busiest(tokens, start, end, bucket_s, closed) for start, end, closed in spans)


def _busiest(tokens: Sequence[tuple[float, int]], start: float, end: float, bucket_s: float, closed: bool) -> float:
    """The highest rate among the equal parts of (start, end], or of [start, end] where ``closed``."""
    parts = max(1, math.ceil((end - start) / bucket_s))
    width = (end - start) / parts or bucket_s
    sums: dict[int, int] = {}
    for t, k in tokens:
        if start < t <= end or (closed and t == start):
            part = min(parts - 1, max(0, math.ceil((t - start) / width) - 1))
            sums[part] = sums.get(part, 0) + k
    return max(sums.values(), default=0) / width
