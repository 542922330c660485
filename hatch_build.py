"""What the wheel holds besides the package: the collection and the locks.

They are put into a wheel only. An editable install would get copies of them, which go stale with the first edit.
"""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CarryCollection(BuildHookInterface):
    """Adds the files named in pyproject.toml to a standard wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add ``files`` (path in the checkout to path in the wheel)."""
        if version == "standard":
            build_data["force_include"].update(self.config["files"])
