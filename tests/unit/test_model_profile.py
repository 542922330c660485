"""Profiles of the inventory."""

from __future__ import annotations

from pathlib import Path

import pytest

from specrig.errors import UsageError
from specrig.model.profile import parse_method, parse_profiles
from specrig.tokens.plan_cli import read_profiles


def test_aliases_and_labels() -> None:
    assert parse_method("auto") == ("autoregressive", None)
    assert parse_method("linear") == ("dflash", None)
    assert parse_method("ddtree-b15") == ("ddtree", 15)
    found = parse_profiles(
        {
            "a": {"model": "M", "method": "linear"},
            "b": {"model": "M", "method": "ddtree", "budget": 31, "gpus": [4, 5]},
            "c": {"model": "M", "method": "ddtree-b8", "gpus": "auto", "serve": True, "numa": "span"},
        }
    )
    assert [p.label for p in found.values()] == ["dflash", "ddtree-b31", "ddtree-b8"]
    assert (found["b"].gpus, found["c"].gpus, found["c"].serve, found["c"].numa) == ((4, 5), None, True, "span")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "$.p: the key 'model' is missing; expected the served model's name"),
        ({"model": "M", "tp": 0}, "$.p.tp: saw 0; expected a whole number from 1 to 1024"),
        ({"model": "M", "numa": "any"}, "$.p.numa: saw the text 'any'; expected one of local, span"),
        ({"model": "M", "gpus": "0-3"}, "$.p.gpus: saw the text '0-3'; expected auto or a list of GPU indices"),
        ({"model": "M", "method": "ddtree-b8", "budget": 15}, "$.p.budget: saw 15; expected the 8 that the method"),
        ({"model": "M", "method": "DDTree"}, "$.p.method: saw the text 'DDTree'; expected a method such as"),
        ({"model": "M", "prot": 1}, "$.p: unknown key 'prot'; did you mean port?"),
        ([1], "$.p: saw the list [1]; expected a mapping with keys such as"),
    ],
)
def test_wrong_settings(settings: object, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_profiles({"p": settings}, "$")
    assert str(caught.value).startswith(expected)


def test_the_inventories_of_the_repository(repository: Path) -> None:
    found = read_profiles(repository / "inventory" / "lab" / "group_vars" / "all.yml")
    assert {p.tp for p in found.values() if not p.serve} == {1, 4, 8}
    assert all(p.numa == "span" for p in found.values() if p.tp == 8)
    assert {p.label for p in found.values() if p.tp == 4} == {
        "autoregressive",
        "dflash",
        "ddtree-b8",
        "ddtree-b15",
        "ddtree-b31",
    }


def test_the_aliases_are_those_of_the_table_of_methods() -> None:
    from specrig.facts import dialects
    from specrig.model.profile import ALIASES

    assert {alias: name for name, row in dialects.TABLE.items() for alias in row["aliases"]} == ALIASES
