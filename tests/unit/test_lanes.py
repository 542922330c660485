"""The lanes of `make test` hold every test file once, and their summaries add up."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def script(repository: Path) -> ModuleType:
    """scripts/test.py as a module."""
    spec = importlib.util.spec_from_file_location("specrig_test_lanes", repository / "scripts" / "test.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_test_file_is_in_one_lane(script: ModuleType, repository: Path) -> None:
    given = [repository / path for lane in script.lanes() for part in lane for path in part]
    files = [file for path in given for file in (path.rglob("test_*.py") if path.is_dir() else [path])]
    engine = list((repository / "tests" / "engine").rglob("test_*.py"))  # make test-engine
    assert engine
    assert sorted([*files, *engine]) == sorted((repository / "tests").rglob("test_*.py"))


def test_each_lane_that_is_named_first_is_there(script: ModuleType, repository: Path) -> None:
    assert all((repository / "tests" / "lab" / name).is_file() for name in script.FIRST)


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("======= 37 passed in 474.98s (0:07:54) =======", {"passed": 37}),
        ("=== 2 failed, 1655 passed, 1 skipped in 9.10s ===", {"failed": 2, "passed": 1655, "skipped": 1}),
        ("======= no tests ran in 0.01s =======", {}),
    ],
)
def test_a_summary_line_is_read(script: ModuleType, line: str, counts: dict[str, int]) -> None:
    assert script.SUMMARY.match(line)
    assert {what: int(number) for number, what in script.COUNT.findall(line)} == counts


def test_another_line_is_no_summary(script: ModuleType) -> None:
    assert not script.SUMMARY.match("tests/unit/test_x.py::test_3_passed_in_2s PASSED")
    assert not script.SUMMARY.match("=== short test summary info ===")
