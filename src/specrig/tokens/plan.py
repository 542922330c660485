"""The plan of a sweep: what will run, what does not fit and why, how wide the intervals and how long it takes."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from specrig.model.cell import Cell
from specrig.model.profile import Profile
from specrig.model.schedule import Launch
from specrig.model.sweep import Sweep
from specrig.tokens.budget import Budget, Limits
from specrig.tokens.tokenizer import Tokenizer


class Infeasible(msgspec.Struct, frozen=True, kw_only=True):
    """A cell that will not run, and why."""

    cell: str
    title: str
    reason: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan.

    Attributes:
        budgets: by cell id.
        expected_ci_width: by cell id, the half-width of the speed-up's 95 % interval (0.17 = +-17 %).
    """

    sweep: str
    cells: tuple[Cell, ...]
    infeasible: tuple[Infeasible, ...]
    budgets: dict[str, Budget]
    expected_ci_width: dict[str, float]
    estimate_s: float
    launches: tuple[Launch, ...]
    corpora: dict[str, str]
    tokenizer: str


def plan(
    sweep: Sweep,
    tokenizer: Tokenizer,
    limits_by_profile: Mapping[str | None, Limits],
    profiles: Mapping[str, Profile] | None = None,
) -> Plan:
    """Return the plan of a sweep."""
    raise NotImplementedError
