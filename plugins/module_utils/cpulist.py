# SPDX-License-Identifier: Apache-2.0
"""Linux CPU and node lists: ``0-3,8,10-11``."""

from __future__ import annotations

import re
from typing import Iterable

_PART = re.compile(r"^(\d+)(?:-(\d+)(?::(\d+)/(\d+))?)?$")
_MOST = 1 << 20


def parse(text: str) -> list[int]:
    """Return the sorted, distinct numbers that a list names.

    Takes what the kernel prints (``0-63,128-191``), what tools print (``0 1 2``, ``0-0,8-8``) and the kernel's
    stride form (``0-15:2/4``). An empty or blank text is an empty list.

    Raises:
        ValueError: for anything else, with the part that was not understood.
    """
    numbers: set[int] = set()
    for part in re.split(r"[\s,]+", text.strip()):
        if not part:
            continue
        match = _PART.match(part)
        if not match:
            raise ValueError("not a CPU list: %r (expected something like 0-3,8)" % part[:40])
        first = int(match.group(1))
        last = int(match.group(2) or first)
        if last < first or last >= _MOST:
            raise ValueError("not a CPU list: %r (a range runs upwards and stays below %d)" % (part[:40], _MOST))
        if match.group(3):
            used, group = int(match.group(3)), int(match.group(4))
            if not 0 < used <= group:
                raise ValueError("not a CPU list: %r (stride %d of %d)" % (part[:40], used, group))
            numbers.update(n for n in range(first, last + 1) if (n - first) % group < used)
        else:
            numbers.update(range(first, last + 1))
    return sorted(numbers)


def format(numbers: Iterable[int]) -> str:
    """Return the shortest list text for the numbers: ``[0, 1, 2, 8]`` is ``0-2,8``."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else "%d-%d" % (a, b) for a, b in parts)
