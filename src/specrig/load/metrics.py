"""Per-request figures, by the definitions in docs/load.md. Pure functions of one trace.

Chunk i arrives at t_i with k_i new tokens; n is their sum; the first chunk is the first with k_i > 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from specrig.model.record import Read


def decode_rate(t: Sequence[float], k: Sequence[int]) -> float | None:
    """The decode rate, tokens a second: (n - k_1) / (t_last - t_first).

    Args:
        t: arrivals in seconds.
        k: new tokens of each.

    Returns:
        The rate; null where there is one chunk only or no time passed. Prefill never enters it.
    """
    if len(t) < 2 or t[-1] <= t[0]:
        return None
    return (sum(k) - k[0]) / (t[-1] - t[0])


def read_at(
    t: Sequence[float],
    k: Sequence[int],
    sent: float,
    length: int,
    verify_steps: int | None = None,
    correct_drafts: int | None = None,
) -> Read | None:
    """What a request for a shorter length would have shown, read off a longer one's stream.

    The chunk in which ``length`` is reached is its last; a server would cut that chunk at ``length``, so n is
    ``length`` there, not the count with the overshoot.

    Args:
        t: arrivals.
        k: new tokens of each.
        sent: when the request was sent, on the same clock.
        length: the shorter length.
        verify_steps: of the whole request, where known.
        correct_drafts: of the whole request, where known.

    Returns:
        The figures, ``finished_s`` on the clock of ``t``; null where the stream has fewer tokens. Steps and drafts
        are given where every chunk is one verify step, which the totals of the whole request must confirm.
    """
    last = next((i for i, total in enumerate(itertools.accumulate(k)) if total >= length), None)
    if last is None:
        return None
    rate = (length - k[0]) / (t[last] - t[0]) if length > k[0] and t[last] > t[0] else None
    steps = drafts = None
    if verify_steps is not None and correct_drafts is not None:
        # the first chunk is the prefill's own token, or a verify step like the others
        for first in (1, 0):
            chain = k[first:]
            if len(chain) == verify_steps and sum(chain) - len(chain) == correct_drafts:
                part = k[first : last + 1]
                steps, drafts = len(part), sum(part) - len(part)
                break
    return Read(
        finished_s=t[last],
        decode_tokens_per_s=rate,
        e2e_s=t[last] - sent,
        verify_steps=steps,
        correct_drafts=drafts,
    )


def first_eos(ids: Sequence[int] | None, eos: Collection[int]) -> int | None:
    """The index of the first end-of-sequence token among the generated ones; null where there is none."""
    if not ids or not eos:
        return None
    wanted = frozenset(eos)
    return next((index for index, token in enumerate(ids) if token in wanted), None)


def median(values: Sequence[float]) -> float | None:
    """The median; null of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
