# SPDX-License-Identifier: Apache-2.0
"""What every parser of captured output needs first: text without terminal codes, and the one form of a bus id."""

from __future__ import annotations

import re

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-Z\\-_]")
_BUS = re.compile(r"^(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])$")


def clean(text: str) -> str:
    """Return the text without ANSI codes, byte order mark and carriage returns."""
    return _ESCAPE.sub("", text.lstrip("\ufeff")).replace("\r\n", "\n").replace("\r", "\n")


def bus_id(text: str | None) -> str | None:
    """Return a PCI address as sysfs writes it (``00000000:F4:00.0`` is ``0000:f4:00.0``), None if it is none."""
    match = _BUS.match((text or "").strip())
    if not match:
        return None
    return "%04x:%s:%s.%s" % (
        int(match.group(1) or "0", 16),
        match.group(2).lower(),
        match.group(3).lower(),
        match.group(4),
    )
