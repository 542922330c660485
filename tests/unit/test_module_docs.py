"""Every module's documentation can be read, and names the options that the module takes."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(path.stem for path in (ROOT / "plugins" / "modules").glob("*.py"))


def tree_of(name: str) -> ast.Module:
    return ast.parse((ROOT / "plugins" / "modules" / f"{name}.py").read_text(encoding="utf-8"))


def texts_of(tree: ast.Module) -> dict[str, Any]:
    """DOCUMENTATION, EXAMPLES and RETURN of a module, as YAML reads them."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            (target,) = node.targets
            if isinstance(target, ast.Name) and target.id in ("DOCUMENTATION", "EXAMPLES", "RETURN"):
                found[target.id] = yaml.safe_load(node.value.value)
    return found


def taken_by(tree: ast.Module) -> set[str] | None:
    """Options of an argument_spec that is written out; None where it is put together elsewhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "argument_spec" and isinstance(node.value, ast.Dict):
            keys = [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
            return set(keys) if len(keys) == len(node.value.keys) else None
    return None


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_documented(name: str) -> None:
    tree = tree_of(name)
    texts = texts_of(tree)
    assert texts["DOCUMENTATION"]["module"] == name
    assert texts["DOCUMENTATION"]["short_description"]
    assert "RETURN" in texts
    for option, about in (texts["DOCUMENTATION"].get("options") or {}).items():
        assert about.get("description"), option
    taken = taken_by(tree)
    if taken is not None:
        assert taken == set(texts["DOCUMENTATION"].get("options") or {})
