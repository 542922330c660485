# SPDX-License-Identifier: Apache-2.0
"""Settings of a GPU that a reboot loses: persistence, power limit, clock lock.  Pure.

nvidia-smi reports persistence and power limits; a clock lock it does not report, so whoever sets one (the module
gpu_settings, the script at boot) appends a line to ``RECORD``, which a reboot loses as it loses the lock.
"""

from __future__ import annotations

import re
from typing import Any, Dict, List, Tuple

from .text import bus_id

Row = Dict[str, Any]
RECORD = "/run/specrig/gpu-clocks"
TOLERANCE_W = 1.0
"""A power limit that reads back this close is the one that was set: drivers round."""
TOLERANCE_MHZ = 60
_UUID = re.compile(r"^GPU-[0-9A-Za-z-]+$")


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or value is None:
        return None
    try:
        number = float(str(value).strip())
    except ValueError:
        return None
    return number if 0 < number < 1e6 else None


def _clocks(value: Any) -> Tuple[int, int] | None:
    parts = value if isinstance(value, (list, tuple)) else re.split(r"[,\-]", str(value))
    numbers = [_number(part) for part in parts]
    whole = [int(number) for number in numbers if number is not None and number == int(number)]
    if not numbers or len(whole) != len(numbers) or len(whole) > 2 or whole[0] > whole[-1]:
        return None
    return whole[0], whole[-1]


def _each(name: str, value: Any, read: Any, form: str) -> Dict[str, Any]:
    if value is None or value == "" or value == {}:
        return {}
    rows = value if isinstance(value, dict) else {"all": value}
    found: Dict[str, Any] = {}
    for key, cell in rows.items():
        which = str(key).strip()
        if which != "all" and not which.isdigit() and not _UUID.match(which):
            which = bus_id(which) or ""
        if not which:
            raise ValueError("%s names %r; expected a GPU's index, bus id or UUID, or all" % (name, str(key)[:40]))
        setting = read(cell)
        if setting is None:
            raise ValueError("%s is %r; expected %s, for all GPUs or as a mapping of GPUs" % (name, cell, form))
        found[which] = setting
    return found


def wanted(persistence: Any = None, power_limit_w: Any = None, lock_clocks_mhz: Any = None) -> Row:
    """Return {"persistence": bool, "power": {gpu: watts}, "clocks": {gpu: (lowest, highest)}} of what was asked for.

    A plain value is for all GPUs; in a mapping a GPU's own entry comes before that of ``all``.

    Raises:
        ValueError: one line, naming the variable.
    """
    power = _each("gpu_host_power_limit_w", power_limit_w, _number, "watts such as 450")
    clocks = _each("gpu_host_lock_clocks_mhz", lock_clocks_mhz, _clocks, "MHz such as 1800 or [1200, 1800]")
    if (power or clocks) and not persistence:
        raise ValueError(
            "gpu_host_power_limit_w and gpu_host_lock_clocks_mhz hold with persistence mode only: without it they are "
            "lost when the last process leaves a GPU; set gpu_host_persistence: true"
        )
    return {"persistence": bool(persistence), "power": power, "clocks": clocks}


def _of(gpu: Row, table: Dict[str, Any]) -> Any:
    for key in (str(gpu.get("index")), gpu.get("bus_id"), gpu.get("uuid"), "all"):
        if key in table:
            return table[key]
    return None


def parse_record(text: str | None) -> Dict[str, Tuple[int, int]]:
    """Return {gpu or "all": (lowest, highest)} of the record of clock locks; the last line about a GPU counts."""
    found: Dict[str, Tuple[int, int]] = {}
    for line in (text or "").split("\n"):
        words = line.split()
        pair = _clocks(words[1]) if len(words) == 2 else None
        if pair:
            if words[0] == "all":
                found = {}
            found[words[0]] = pair
    return found


def lock_of(gpu: Row, record: Dict[str, Tuple[int, int]]) -> Tuple[List[int] | None, str | None]:
    """Return (clock lock that holds, None), (None, None) or (None, why the recorded one does not hold)."""
    pair = _of(gpu, record)
    if pair is None:
        return None, None
    if gpu.get("persistence") is False:
        return None, "GPU %s: persistence is off, the clock lock set since boot may be lost" % gpu.get("index")
    now = gpu.get("clock_sm_mhz")
    if now is not None and now > pair[1] + TOLERANCE_MHZ:
        return None, "GPU %s runs at %d MHz, above its clock lock of %d MHz" % (gpu.get("index"), now, pair[1])
    return list(pair), None


def due(want: Row, gpus: List[Row]) -> Tuple[List[Row], List[str]]:
    """Return (settings to put back, notes). A fact that is unknown is noted, not set.

    Each row is {gpu, id, setting, seen, wanted}; persistence comes first, for the others hold only with it.
    """
    rows: List[Row] = []
    notes: List[str] = []

    def add(gpu: Row, setting: str, seen: Any, wish: Any) -> None:
        name = gpu.get("uuid") or gpu.get("bus_id") or str(gpu["index"])
        rows.append({"gpu": gpu["index"], "id": name, "setting": setting, "seen": seen, "wanted": wish})

    alive = [gpu for gpu in gpus if gpu.get("healthy") is not False]
    for gpu in alive:
        if want["persistence"] and gpu.get("persistence") is False:
            add(gpu, "persistence", False, True)
    for gpu in alive:
        wish, seen = _of(gpu, want["power"]), gpu.get("power_limit_w")
        if wish is None:
            continue
        if seen is None:
            notes.append("GPU %d: its power limit is not known, %g W were asked for" % (gpu["index"], wish))
        elif abs(seen - wish) >= TOLERANCE_W:
            low, high = gpu.get("power_min_w"), gpu.get("power_max_w")
            if (low is not None and wish < low - TOLERANCE_W) or (high is not None and wish > high + TOLERANCE_W):
                raise ValueError(
                    "gpu_host_power_limit_w is %g for GPU %d; expected %s to %s W, which is what the card takes"
                    % (wish, gpu["index"], "?" if low is None else "%g" % low, "?" if high is None else "%g" % high)
                )
            add(gpu, "power_limit_w", seen, wish)
    for gpu in alive:
        pair, seen = _of(gpu, want["clocks"]), gpu.get("clock_lock_mhz")
        if pair is None:
            continue
        if gpu.get("persistence") is None:
            notes.append("GPU %d: whether a clock lock holds is not known" % gpu["index"])
        elif seen is None or tuple(seen) != tuple(pair):
            add(gpu, "lock_clocks_mhz", seen, list(pair))
    known = {str(gpu.get(key)) for gpu in gpus for key in ("index", "bus_id", "uuid")} | {"all"}
    for name, table in (("gpu_host_power_limit_w", want["power"]), ("gpu_host_lock_clocks_mhz", want["clocks"])):
        notes += ["%s names GPU %s, which this host does not have" % (name, key) for key in table if key not in known]
    return rows, notes


def text(setting: str, value: Any) -> str:
    """Return one setting as a person writes it."""
    if setting == "persistence":
        return "persistence %s" % {True: "on", False: "off"}.get(value, "unknown")
    if setting == "power_limit_w":
        return "power limit unknown" if value is None else "power limit %g W" % value
    return "clocks not locked" if value is None else "clocks locked to %d-%d MHz" % (value[0], value[-1])


def _arguments(setting: str, value: Any) -> List[str]:
    if setting == "persistence":
        return ["-pm", "1"]
    if setting == "power_limit_w":
        return ["-pl", "%g" % value]
    return ["-lgc", "%d,%d" % (value[0], value[-1])]


def commands(rows: List[Row]) -> List[Row]:
    """Return [{argv, rows}]: one call of nvidia-smi for each setting and value, in an order that holds."""
    calls: List[Row] = []
    for row in rows:
        same = [
            c for c in calls if (c["rows"][0]["setting"], c["rows"][0]["wanted"]) == (row["setting"], row["wanted"])
        ]
        if same:
            same[0]["rows"].append(row)
        else:
            calls.append({"rows": [row]})
    for call in calls:
        first = call["rows"][0]
        names = ",".join(row["id"] for row in call["rows"])
        call["argv"] = ["nvidia-smi", "-i", names, *_arguments(first["setting"], first["wanted"])]
    return calls


def boot_lines(want: Row) -> List[str]:
    """Return the lines of the script at boot, in which ``smi`` is nvidia-smi with a time limit."""
    lines = ["smi -pm 1"] if want["persistence"] else []
    for name, setting in (("power", "power_limit_w"), ("clocks", "lock_clocks_mhz")):
        table = want[name]
        for key in sorted(table, key=lambda word: (word != "all", len(word), word)):
            which = "" if key == "all" else "-i %s " % key
            line = "smi %s%s" % (which, " ".join(_arguments(setting, table[key])))
            if setting == "lock_clocks_mhz":
                line += " && echo '%s %d,%d' >>%s" % (key, table[key][0], table[key][1], RECORD)
            lines.append(line)
    return lines
