#!/usr/bin/env python3
"""Write each role's README.md from its meta: what it is for, its entry points, its variables.

Run it after changing a role's meta/argument_specs.yml; ``--check`` only says whether a README is behind.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

ROLES = Path(__file__).resolve().parent.parent / "roles"


def cell(text: str) -> str:
    """One table cell: one line, Ansible's markup as Markdown, pipes escaped."""
    line = " ".join(text.split())
    for mark in ("C(", "V(", "O("):
        while mark in line:
            before, _, rest = line.partition(mark)
            inner, _, after = rest.partition(")")
            line = f"{before}`{inner}`{after}"
    return line.replace("|", "\\|")


def described(value: Any) -> str:
    """A description, which argument specifications hold as a text or a list of texts."""
    return " ".join(value) if isinstance(value, list) else str(value or "")


def shown(option: dict[str, Any]) -> str:
    """An option's default, or that it has none."""
    if option.get("required"):
        return "required"
    if "default" not in option:
        return ""
    default = option["default"]
    text = default if isinstance(default, str) and default else json.dumps(default)
    return f"`{text}`".replace("|", "\\|")


def readme(role: Path) -> str:
    """The README of one role."""
    about = yaml.safe_load((role / "meta" / "main.yml").read_text())["galaxy_info"]
    entries = yaml.safe_load((role / "meta" / "argument_specs.yml").read_text())["argument_specs"]
    lines = [f"# specrig.host.{role.name}", "", about["description"] + ".", ""]
    options: dict[str, dict[str, Any]] = {}
    for name, entry in entries.items():
        title = "" if name == "main" else f"**tasks_from: {name}** "
        lines += [
            f"{title}{cell(entry['short_description'])}. {cell(described(entry.get('description')))}".rstrip(),
            "",
        ]
        options.update(entry.get("options") or {})
    lines += ["| Variable | Type | Default | What it is |", "| --- | --- | --- | --- |"]
    for name, option in options.items():
        kind = option["type"] + (f" of {option['elements']}" if option.get("elements") else "")
        text = cell(described(option.get("description")))
        if option.get("choices"):
            text += " One of " + ", ".join(f"`{choice}`" for choice in option["choices"]) + "."
        lines.append(f"| `{name}` | {kind} | {shown(option)} | {text} |")
    lines += ["", "The table is made from `meta/argument_specs.yml` by `scripts/role_readme.py`.", ""]
    return "\n".join(lines)


def main() -> int:
    """Write what is behind; with ``--check`` name it and exit 1."""
    check = "--check" in sys.argv[1:]
    behind = []
    for role in sorted(path.parent.parent for path in ROLES.glob("*/meta/argument_specs.yml")):
        path, text = role / "README.md", readme(role)
        if not path.is_file() or path.read_text() != text:
            behind.append(role.name)
            if not check:
                path.write_text(text)
    if behind and check:
        print(f"README.md is behind in {', '.join(behind)}: run scripts/role_readme.py", file=sys.stderr)
    return 1 if behind and check else 0


if __name__ == "__main__":
    sys.exit(main())
