# SPDX-License-Identifier: Apache-2.0
"""Whether models fit into memory before their first byte is copied, as one sum that a person can check.  Pure.

What can be used is counted apart and named: MemAvailable of /proc/meminfo; what ZFS's ARC can give back, which
MemAvailable does not contain (``size - c_min`` of arcstats); the free space of the tmpfs; what the limit of the control
group that is charged leaves. Swap is not counted: a model that is swapped out is no model in RAM. The pool of reserved
huge pages is not counted either, since a tmpfs cannot use it. What cannot be read is None, shown as unknown, and makes
the answer unknown.
"""

from __future__ import annotations

import re

GIB = float(1 << 30)
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "p": 1 << 50}
# The kernel's "no limit" of cgroup v1, which some texts still carry: the largest multiple of a page.
NO_LIMIT_FROM = 1 << 62


def parse_size(text, total=None):
    """Bytes of ``64G``, ``65536k``, ``1073741824`` or, of ``total`` bytes, ``50%``; as mount(8) reads them.

    Raises:
        ValueError: for anything else, among it ``1.5G``, ``2GiB`` and 0.
    """
    match = re.match(r"^([1-9][0-9]*)(%|[kKmMgGtTpP]?)$", str(text).strip())
    if not match:
        raise ValueError("%r is no size; expected a whole number with k, M, G or T, such as 64G, or with %%" % (text,))
    if match.group(2) == "%":
        if int(match.group(1)) > 100:
            raise ValueError("%r is more than the memory of the machine" % (text,))
        return None if total is None else total * int(match.group(1)) // 100
    return int(match.group(1)) * UNITS[match.group(2).lower()]


def parse_meminfo(text):
    """{name: bytes} of /proc/meminfo; counts without a unit, such as HugePages_Total, stay counts.

    A node's own meminfo (``Node 0 MemFree: 1 kB``) is read alike.
    """
    found = {}
    for line in (text or "").splitlines():
        match = re.match(r"^(?:Node \d+ )?([A-Za-z0-9_()]+):\s+(\d+)(?: (kB))?\s*$", line)
        if match:
            found[match.group(1)] = int(match.group(2)) * (1024 if match.group(3) else 1)
    return found


def parse_arcstats(text):
    """{"size", "c_min", "give_back"} in bytes of ZFS's arcstats.

    Raises:
        ValueError: where size or c_min is not there.
    """
    found = dict(re.findall(r"^(\w+)\s+\d+\s+(\d+)\s*$", text or "", re.M))
    try:
        size, least = int(found["size"]), int(found["c_min"])
    except KeyError as name:
        raise ValueError("arcstats has no line %s" % name) from None
    return {"size": size, "c_min": least, "give_back": max(0, size - least)}


def parse_limit(text):
    """Bytes of memory.max, or None for ``max``: no limit.

    Raises:
        ValueError: where it is neither.
    """
    word = text.strip() if isinstance(text, str) else ""
    if word == "max":
        return None
    if not word.isdigit():
        raise ValueError("%r is no limit; expected bytes or max" % (text,))
    return None if int(word) >= NO_LIMIT_FROM else int(word)


def parse_stat(text):
    """{name: bytes} of memory.stat."""
    return {name: int(value) for name, value in re.findall(r"^(\w+) (\d+)$", text or "", re.M)}


def room_below(chain):
    """The least that the limits of nested control groups leave.

    Args:
        chain: [{"name", "max", "current", "stat"}] texts of memory.max, memory.current and memory.stat, each None where
            it could not be read, from the group that is charged upwards. The root of the tree has no memory.max and is
            not in it.

    Returns:
        dict: ``known``; ``limit`` and ``left`` in bytes, both None where no group has a limit or it is not known;
        ``name`` of the group that is tightest; ``why`` where not known. Page cache of files counts as left: the kernel
        takes it back before it refuses.
    """
    best = {"known": True, "limit": None, "left": None, "name": None, "why": None}
    for row in chain:
        try:
            limit = parse_limit(row["max"])
            if limit is None:
                continue
            used = int(row["current"])
        except (TypeError, ValueError):
            why = "its memory.max is %r and its memory.current %r" % (row["max"], row["current"])
            return {"known": False, "limit": None, "left": None, "name": row["name"], "why": why}
        stat = parse_stat(row.get("stat"))
        cache = stat.get("active_file", 0) + stat.get("inactive_file", 0) + stat.get("slab_reclaimable", 0)
        left = max(0, limit - max(0, used - cache))
        if best["left"] is None or left < best["left"]:
            best = {"known": True, "limit": limit, "left": left, "name": row["name"], "why": None}
    return best


def configured_limit(text):
    """Bytes of ``memory:`` (MiB) in the main section of a guest's config on Proxmox VE; None where it is not there."""
    main = re.split(r"^\[", text or "", maxsplit=1, flags=re.M)[0]
    found = re.findall(r"^memory:\s*(\d+)\s*$", main, re.M)
    return int(found[-1]) << 20 if found else None


def node_room(text):
    """Bytes that a NUMA node has free or can free, of its own meminfo; None where that is not there.

    The kernel has no MemAvailable of a node: free pages, half of the page cache of files, and half of the slabs that
    can be given back. So it works MemAvailable out where the cache is small against the watermarks.
    """
    found = parse_meminfo(text)
    if "MemFree" not in found:
        return None
    cache = found.get("Active(file)", 0) + found.get("Inactive(file)", 0) + found.get("SReclaimable", 0)
    return found["MemFree"] + cache // 2


def amount(count):
    """``51.8 GiB``, ``112 MiB``, ``12 KiB``, or ``unknown``."""
    if count is None:
        return "unknown"
    if count >= GIB / 10:
        return "%.1f GiB" % (count / GIB)
    if count >= 1 << 20:
        return "%d MiB" % round(count / float(1 << 20))
    return "%d KiB" % -(-count // 1024) if count else "0"


def _needs(models):
    words = ["%s (%s)" % (amount(models[name]["bytes"]), name) for name in sorted(models)]
    staged = sum(row["bytes"] - row["missing_bytes"] for row in models.values())
    return " + ".join(words) or "0", max(0, staged)


def judge(
    models,
    place,
    place_free,
    meminfo,
    arc=None,
    arc_problem=None,
    limits=(),
    nodes=None,
    reserve=0,
    others=None,
    leftover=0,
):
    """Say whether what is missing of the models fits, and show the sum.

    Args:
        models: {name: {"bytes", "missing_bytes"}}: all of it, and what still has to be copied.
        place: the folder that gets them, for the text.
        place_free: free bytes of its tmpfs, None if unknown.
        meminfo: what ``parse_meminfo`` made of the host's.
        arc: what ``parse_arcstats`` made of ZFS's, None where there is no ZFS.
        arc_problem: why ZFS's figures could not be read, though it is there.
        limits: [{"subject", "known", "limit", "left", "why", "aside"}] of each control group or config that is charged;
            one that stands aside is shown, and counts where it is known.
        nodes: {node: bytes or None} for a tmpfs bound to NUMA nodes: what each has room for.
        reserve: bytes of the memory that stay free for everything else.
        others: {name: bytes} that other guests of this host are about to stage.
        leftover: bytes of temporary files of an interrupted staging, which go or are used.

    Returns:
        dict: ``status`` (pass, fail, unknown), ``need_bytes``, ``rooms`` [{name, bytes}], ``short`` [{name, bytes}] of
        what is too small, ``sum`` (the one line), ``notes``.
    """
    words, staged = _needs(models)
    need = sum(row["missing_bytes"] for row in models.values())
    rest = max(0, need - leftover)
    elsewhere = sum((others or {}).values())
    parts = ["needs %s - %s staged = %s" % (words, amount(staged), amount(need))]
    if leftover:
        parts[0] += ", %s of it in temporary files of a staging that did not end" % amount(min(need, leftover))
    rooms, notes, unknown = [], [], []

    rooms.append({"name": "tmpfs", "bytes": place_free, "need": rest})
    parts.append("the tmpfs of %s has %s free" % (place, amount(place_free)))
    if place_free is None:
        unknown.append("free space of %s" % place)

    available = meminfo.get("MemAvailable")
    text = "memory available %s" % amount(available)
    room = available
    if arc_problem:
        text += " + ARC unknown (%s)" % arc_problem
    elif arc:
        text += " + ARC %s (%s - c_min %s)" % (amount(arc["give_back"]), amount(arc["size"]), amount(arc["c_min"]))
        room = None if room is None else room + arc["give_back"]
    if reserve:
        text += " - %s kept free" % amount(reserve)
    if elsewhere:
        text += " - %s for %s" % (amount(elsewhere), ", ".join(sorted(others)))
    room = None if room is None else max(0, room - reserve - elsewhere)
    if arc or reserve or elsewhere:
        text += " = %s" % amount(room)
    text += ", swap not counted"
    pool = meminfo.get("HugePages_Total", 0) * meminfo.get("Hugepagesize", 0)
    pool = max(pool, meminfo.get("Hugetlb", 0))
    if pool:
        text += ", %s in the huge page pool not usable" % amount(pool)
    parts.append(text)
    rooms.append({"name": "memory", "bytes": room, "need": rest})
    if available is None:
        unknown.append("MemAvailable")
    elif arc and rest > max(0, available - reserve - elsewhere) and rest <= room:
        notes.append(
            "the models fit only with what ZFS's ARC gives back, which it does slowly: a lower zfs_arc_max (now %s in"
            " use) keeps staging from stalling" % amount(arc["size"])
        )
    if arc_problem and room is not None and rest > room:
        # It may fit with what cannot be read.
        rooms[-1]["bytes"] = None
        unknown.append("ZFS's ARC")

    if nodes is not None:
        each = ", ".join("%d has %s" % (node, amount(nodes[node])) for node in sorted(nodes))
        total = None if not nodes or None in nodes.values() else sum(nodes.values())
        parts.append("of NUMA nodes it is bound to, %s" % (each or "none is known"))
        rooms.append({"name": "NUMA nodes", "bytes": total, "need": rest})
        if total is None:
            unknown.append("memory of the NUMA nodes")

    for limit in limits:
        if not limit["known"]:
            parts.append("%s unknown (%s)" % (limit["subject"], limit["why"]))
            if not limit.get("aside"):
                unknown.append(limit["subject"])
            rooms.append({"name": limit["subject"], "bytes": None, "need": rest})
        elif limit["limit"] is None:
            parts.append("%s: none" % limit["subject"])
        else:
            parts.append("%s %s, %s of it left" % (limit["subject"], amount(limit["limit"]), amount(limit["left"])))
            rooms.append({"name": limit["subject"], "bytes": limit["left"], "need": rest})

    short = [
        {"name": row["name"], "bytes": row["need"] - row["bytes"]}
        for row in rooms
        if row["bytes"] is not None and row["need"] > row["bytes"]
    ]
    status = "fail" if short else "unknown" if unknown and rest else "pass"
    return {
        "status": status,
        "need_bytes": need,
        "rooms": [{"name": row["name"], "bytes": row["bytes"]} for row in rooms],
        "short": short,
        "unknown": unknown,
        "sum": "; ".join(parts),
        "notes": notes,
    }
