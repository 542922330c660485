"""Acceptance length: tokens per verify step, the bonus token included, in the three ways in which it is published."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from specrig.analysis.samples import Sample


@dataclass(frozen=True)
class Acceptance:
    """Acceptance length of a cell.

    Attributes:
        sum_over_sum: 1 + sum(correct drafts) / sum(verify steps) over the requests.
        mean_over_requests: mean over requests of 1 + correct / verify; differs from the first when lengths do.
        tokens_per_verify: sum(output tokens) / sum(verify steps), the formula of SGLang's ``spec_accept_length``.
        server: the server's own figure where a record or its report holds one.
        verify_steps, correct_drafts: the sums.
        requests: requests that count.
    """

    sum_over_sum: float
    mean_over_requests: float
    tokens_per_verify: float
    server: float | None
    verify_steps: float
    correct_drafts: float
    requests: int


def acceptance(rows: Iterable[Sample], server: float | None = None) -> Acceptance | None:
    """Acceptance length over samples whose server counted verify steps and correct drafts; None without one."""
    known = [
        (row.correct_drafts, row.verify_steps, row.tokens)
        for row in rows
        if row.correct_drafts is not None and row.verify_steps is not None and row.verify_steps > 0
    ]
    if not known:
        return None
    correct = math.fsum(c for c, _, _ in known)
    verify = math.fsum(v for _, v, _ in known)
    return Acceptance(
        sum_over_sum=1 + correct / verify,
        mean_over_requests=math.fsum(1 + c / v for c, v, _ in known) / len(known),
        tokens_per_verify=math.fsum(t for _, _, t in known) / verify,
        server=server,
        verify_steps=verify,
        correct_drafts=correct,
        requests=len(known),
    )
