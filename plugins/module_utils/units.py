# SPDX-License-Identifier: Apache-2.0
"""Names of systemd units.  Pure."""

from __future__ import annotations

import re

_PLAIN = re.compile(r"[A-Za-z0-9:_.]")


def escape_path(path):
    """``/srv/specrig/ram`` -> ``srv-specrig-ram``, as ``systemd-escape --path`` does.

    Raises ValueError for a path that is not absolute or has ``..`` in it.
    """
    if not path.startswith("/") or ".." in path.split("/"):
        raise ValueError("%r is no absolute path without '..'" % path)
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts:
        return "-"
    escaped = []
    for number, part in enumerate(parts):
        text = ""
        for place, letter in enumerate(part):
            first = number == 0 and place == 0
            if _PLAIN.match(letter) and not (first and letter == "."):
                text += letter
            else:
                text += "".join("\\x%02x" % byte for byte in letter.encode("utf-8"))
        escaped.append(text)
    return "-".join(escaped)
