# SPDX-License-Identifier: Apache-2.0
"""Reads and converges a guest's configuration: plain LXC (``key = value``) and Proxmox VE (``key: value``).

Which lines are ours is told by content, since Proxmox VE rewrites the file and moves comments away from what they
mark. A line of the main section is ours when it

* equals a line that we want now, or
* equals a line that we recorded having written (``owned``: the state file beside the guest), or
* is an ``lxc.mount.entry`` or ``mpN`` of a target inside the guest that we want or recorded: two mounts on one target
  cannot both be right.

A ``devN`` line (Proxmox VE 8.2 and later reads the device's numbers at every start of the guest) is ours only when we
recorded it. One of somebody else for a path that we want does its work and stays as it is.

Everything else belongs to somebody else and keeps every byte: other sections (snapshots, ``[pve:pending]``), comments,
and device rules that merely look stale. Those are reported.
"""

from __future__ import annotations

import re
from typing import Any, Iterable, Sequence, Tuple

from .text import clean

Pair = Tuple[str, str]
_PAIR = {
    "lxc": re.compile(r"^\s*(lxc\.[A-Za-z0-9_.\-]+)\s*=\s*(.*?)\s*$"),
    "pve": re.compile(r"^(lxc\.[A-Za-z0-9_.\-]+)\s*[:=]\s*(.*?)\s*$|^([a-z][a-z_]*\d*):\s*(.*?)\s*$"),
}
_SECTION = re.compile(r"^\[\s*([^\]]+?)\s*\]\s*$")
_RULE = re.compile(r"^([abc])(?:\s+(\d+|\*):(\d+|\*)\s+([rwm]+))?$")
_DEV = re.compile(r"^dev(\d+)$")
DEV_LIMIT = 256
ALLOW = "lxc.cgroup2.devices.allow"
MOUNT = "lxc.mount.entry"
# Majors that the kernel hands out dynamically: a number there means nothing after a reboot.
_DYNAMIC = (range(234, 255), range(384, 512))


def style_of(text: str) -> str | None:
    """Return ``pve``, ``lxc`` or None, by what the lines look like."""
    votes = {"lxc": 0, "pve": 0}
    for line in clean(text).split("\n"):
        if _SECTION.match(line):
            votes["pve"] += 1
        elif re.match(r"^\s*lxc\.[A-Za-z0-9_.\-]+\s*=", line):
            votes["lxc"] += 1
        elif re.match(r"^lxc\.[A-Za-z0-9_.\-]+:", line) or re.match(
            r"^(arch|cores|cpulimit|cpuunits|dev\d+|features|hostname|memory|mp\d+|nameserver|net\d+|onboot|ostype"
            r"|parent|protection|rootfs|snaptime|startup|swap|tags|unprivileged|lock|description|hookscript|tty"
            r"|cmode|console|searchdomain|template|timezone|unused\d+|entrypoint|env):\s",
            line,
        ):
            votes["pve"] += 1
    if not any(votes.values()):
        return None
    return "pve" if votes["pve"] >= votes["lxc"] else "lxc"


def _pair(line: str, style: str) -> Pair | None:
    if line.lstrip().startswith("#"):
        return None
    match = _PAIR[style].match(line.rstrip("\r\n"))
    if not match:
        return None
    key, value = match.group(1, 2) if match.group(1) else match.group(3, 4)
    return key, " ".join(value.split())


def _split(text: str) -> list[str]:
    """Return the lines with their own ends; only newline ends a line."""
    return re.findall(r"[^\n]*\n|[^\n]+$", text)


def _main_length(lines: list[str], style: str) -> int:
    """Return how many lines the main section has; plain LXC has no other."""
    if style != "pve":
        return len(lines)
    for number, line in enumerate(lines):
        if _SECTION.match(line.rstrip("\r\n")):
            return number
    return len(lines)


def _mount_target(key: str, value: str) -> str | None:
    """Return the path inside the guest that a mount line covers, without leading slash; None for other lines."""
    if key == MOUNT:
        fields = value.split()
        return fields[1].lstrip("/") if len(fields) > 1 else None
    if re.match(r"^mp\d+$", key):
        match = re.search(r"(?:^|,)mp=([^,]+)", value)
        return match.group(1).strip().lstrip("/") if match else None
    return None


def rule(value: str) -> dict[str, Any] | None:
    """Return {type, major, minor, access} of a device rule's value; a wildcard is None, ``a`` has only nulls."""
    match = _RULE.match(" ".join(value.split()))
    if not match:
        return None
    kind, major, minor, access = match.groups()
    return {
        "type": kind,
        "major": None if major in (None, "*") else int(major),
        "minor": None if minor in (None, "*") else int(minor),
        "access": access,
    }


def device_rule(major: int, minor: int) -> str:
    """Return the rule that opens one node: no other minor, and no mknod.

    The text matters: a running guest's rule can only be taken back with the text that granted it.
    """
    return "c %d:%d rw" % (major, minor)


def node_lines(nodes: Iterable[dict[str, Any]]) -> list[Pair]:
    """Return the (key, value) pairs that hand device nodes to a guest: one rule and one bind mount for each.

    Args:
        nodes: [{path, major, minor}], for instance of the look; only character devices belong here.
    """
    lines = []
    for node in sorted(nodes, key=lambda item: (item["major"], item["minor"], item["path"])):
        pair = (ALLOW, device_rule(node["major"], node["minor"]))
        if pair not in lines:
            lines.append(pair)
    for node in sorted(nodes, key=lambda item: item["path"]):
        lines.append((MOUNT, "%s %s none bind,optional,create=file 0 0" % (node["path"], node["path"].lstrip("/"))))
    return lines


def dev_options(value: str) -> dict[str, str]:
    """Return the options of a devN value, ``path`` among them: ``/dev/x,mode=0666`` or ``mode=0666,path=/dev/x``."""
    options = {}
    for number, part in enumerate(piece.strip() for piece in value.split(",")):
        key, equals, text = part.partition("=")
        if not equals and number == 0:
            key, text = "path", part
        options[key.strip()] = text.strip()
    return options


def dev_value(path: str, mode: str) -> str:
    """Return the value of a devN line, as Proxmox VE writes it.

    Raises:
        ValueError: where Proxmox VE would not take it.
    """
    if not re.match(r"^/dev/[^\s,=]+$", path):
        raise ValueError("%r; expected a path below /dev without blanks, commas and equal signs" % path)
    if not re.match(r"^0[0-7]{3}$", mode):
        raise ValueError("mode %r; expected four octal digits such as 0666" % mode)
    return "%s,mode=%s" % (path, mode)


def _normal(pair: Pair) -> Pair:
    """Return the pair in one form, whatever order the options of a devN line have."""
    if not _DEV.match(pair[0]):
        return pair
    options = dev_options(pair[1])
    path = options.pop("path", "")
    return pair[0], ",".join([path, *("%s=%s" % item for item in sorted(options.items()))])


def folder_line(source: str, target: str, read_only: bool = True) -> Pair:
    """Return the (key, value) pair that binds a host folder into a guest."""
    for path in (source, target):
        if not path.startswith("/") or re.search(r"\s", path):
            raise ValueError("mount path %r; expected an absolute path without blanks" % path)
    options = "bind,%screate=dir" % ("ro," if read_only else "")
    return MOUNT, "%s %s none %s 0 0" % (source.rstrip("/"), target.strip("/"), options)


def tmpfs_line(target: str, size: str) -> Pair:
    """Return the (key, value) pair that gives a guest a tmpfs of its own, such as a larger /dev/shm.

    Raises:
        ValueError: for a path or a size that is none.
    """
    if not re.match(r"^/[^\s,]+$", target):
        raise ValueError("tmpfs at %r; expected an absolute path without blanks and commas" % target)
    if not re.match(r"^[1-9]\d*(?:%|[kKmMgGtT])?$", size):
        raise ValueError("tmpfs of size %r; expected one such as 64G" % size)
    return MOUNT, "tmpfs %s tmpfs rw,nosuid,nodev,size=%s,create=dir 0 0" % (target.strip("/"), size)


def _is_stale(
    found: dict[str, Any] | None, majors: dict[str, int | None] | None, names: dict[int, list[str]] | None
) -> bool | None:
    """Tell whether a rule names a major that no NVIDIA driver has now; None where that cannot be known."""
    if found is None or found["type"] != "c" or found["major"] is None or majors is None:
        return None
    if found["major"] in [major for major in majors.values() if major is not None]:
        return False
    if not any(found["major"] in span for span in _DYNAMIC):
        return False
    if majors.get("nvidia-uvm") is None:
        return None
    owner = (names or {}).get(found["major"], [])
    return not any(name.startswith("nvidia") for name in owner)


def parse(
    text: str,
    style: str | None = None,
    majors: dict[str, int | None] | None = None,
    names: dict[int, list[str]] | None = None,
) -> dict[str, Any]:
    """Return what a guest's configuration says about devices.

    Args:
        text: the whole file.
        style: lxc or pve; None means by the look of it.
        majors: the live majors {"nvidia": 195, ...}; without them ``stale`` is None.
        names: {major: [driver names]} of the character section of /proc/devices.

    Returns:
        dict: ``style``, ``sections`` (names of the sections after the main one), ``device_rules``
        [{text, major, minor, access, stale, owner}] of the main section, ``mounts`` [{source, target, text}],
        ``devs`` [{key, path, mode, uid, gid, deny_write, text}] (those in effect: of a repeated key the last),
        ``v1_keys`` (texts), ``duplicates`` (texts), ``unprivileged`` (bool or None), ``elsewhere`` [{section, text}]
        (device lines of other sections: without effect), ``entries``, ``lock`` (what Proxmox VE locked the guest for,
        or None), ``pending`` (keys devN that a pending change sets or deletes).

    Raises:
        ValueError: where the text is in neither style.
    """
    style = style or style_of(text)
    if style not in _PAIR:
        raise ValueError("not a guest config: no line like lxc.key = value, and none like cores: 8")
    lines = _split(text.lstrip("\ufeff"))
    length = _main_length(lines, style)
    result: dict[str, Any] = {
        "style": style,
        "sections": [],
        "device_rules": [],
        "mounts": [],
        "devs": [],
        "v1_keys": [],
        "duplicates": [],
        "unprivileged": None,
        "elsewhere": [],
        "entries": [],
        "lock": None,
        "pending": [],
    }
    section = None
    for number, line in enumerate(lines):
        bare = clean(line).rstrip("\n")
        header = _SECTION.match(bare) if number >= length else None
        if header:
            section = header.group(1)
            result["sections"].append(section)
            continue
        pair = _pair(bare, style)
        if pair is None:
            continue
        key, value = pair
        device = key.startswith("lxc.cgroup") and ".devices." in key
        if section is not None:
            if section == "pve:pending" and (_DEV.match(key) or key == "delete"):
                result["pending"] += [key] if key != "delete" else re.findall(r"\bdev\d+", value)
            if device or key == MOUNT:
                result["elsewhere"].append({"section": section, "text": bare.strip()})
            continue
        result["entries"].append(pair)
        if key.startswith("lxc.cgroup."):
            result["v1_keys"].append(bare.strip())
        elif key == ALLOW:
            found = rule(value) or {"type": None, "major": None, "minor": None, "access": None}
            result["device_rules"].append(
                {
                    "text": value,
                    "major": found["major"],
                    "minor": found["minor"],
                    "access": found["access"],
                    "stale": _is_stale(found, majors, names),
                    "owner": (names or {}).get(found["major"]),
                }
            )
        elif key == MOUNT:
            fields = value.split()
            result["mounts"].append(
                {"source": fields[0] if fields else None, "target": _mount_target(key, value), "text": value}
            )
        elif _DEV.match(key):
            options = dev_options(value)
            result["devs"] = [dev for dev in result["devs"] if dev["key"] != key]
            row = {"key": key, "path": options.get("path"), "mode": options.get("mode", "0660"), "text": value}
            row.update(gid=options.get("gid"), uid=options.get("uid"), deny_write=options.get("deny-write") == "1")
            result["devs"].append(row)
        elif key == "lock":
            result["lock"] = value
        elif key == "unprivileged":
            result["unprivileged"] = value == "1"
        elif key == "lxc.idmap":
            result["unprivileged"] = True
    counted: dict[Pair, int] = {}
    for key, value in result["entries"]:
        if key in (ALLOW, MOUNT):
            counted[key, value] = counted.get((key, value), 0) + 1
        elif _DEV.match(key):
            counted[key, "(Proxmox VE takes the last)"] = counted.get((key, "(Proxmox VE takes the last)"), 0) + 1
    result["duplicates"] = ["%s %s" % entry for entry, times in counted.items() if times > 1]
    return result


def _place_devs(
    found: list[Pair], devices: list[str], owned: set[Pair], avoid: set[str]
) -> tuple[dict[str, str], list[str]]:
    """Decide on the devN lines of a main section.

    Args:
        found: the devN pairs in the order of the file, normal form.
        devices: values that are wanted, one for each path.
        owned: the pairs that are ours.
        avoid: keys that a pending change is going to use.

    Returns:
        {key: value} of our lines as they have to be, and the values that somebody else's line stands for.
    """
    foreign = {key: value for key, value in found if (key, value) not in owned}
    theirs = {dev_options(value).get("path") for value in foreign.values()}
    mine: dict[str, list[str]] = {}
    for key, value in found:
        path = dev_options(value).get("path")
        if (key, value) in owned and key not in foreign and path is not None and key not in mine.get(path, []):
            mine.setdefault(path, []).append(key)
    ours: dict[str, str] = {}
    covered: list[str] = []
    unplaced: list[str] = []
    present = set(found)
    for value in devices:
        path = dev_options(value)["path"]
        if path in theirs:
            covered.append(value)
            continue
        keys = mine.get(path, [])
        if not keys:
            unplaced.append(value)
            continue
        exact = [key for key in keys if _normal((key, value)) in present]
        ours[(exact or keys)[0]] = value
    used = {key for key, _value in found} | avoid
    free = ("dev%d" % number for number in range(DEV_LIMIT) if "dev%d" % number not in used)
    for value in unplaced:
        key = next(free, None)
        if key is None:
            raise ValueError("no devN is free for %s: the guest has %d device entries" % (value, DEV_LIMIT))
        ours[key] = value
    return ours, covered


def dev_problems(facts: dict[str, Any]) -> list[str]:
    """Return what is wrong with the devN lines of a parsed configuration, one text each."""
    problems = []
    by_path: dict[str, list[str]] = {}
    for dev in facts["devs"]:
        path = dev["path"] or ""
        by_path.setdefault(path, []).append(dev["key"])
        if not path.startswith("/dev/nvidia"):
            continue
        if dev["deny_write"]:
            problems.append("%s: %s denies writing, CUDA opens it for writing; drop deny-write=1" % (dev["key"], path))
        elif dev["mode"][-1:] < "6":
            group = "" if dev["gid"] is None else ", for group %s alone" % dev["gid"]
            problems.append(
                "%s: %s gets mode %s in the guest%s: a service user cannot open it; add mode=0666"
                % (dev["key"], path, dev["mode"], group)
            )
        if dev["key"] in facts["pending"]:
            problems.append("%s: %s will be changed by a pending change at the next start" % (dev["key"], path))
    for path, keys in by_path.items():
        if len(keys) > 1:
            problems.append("%s all hand over %s: one is enough" % (" and ".join(keys), path))
    return problems


def nesting_note(facts: dict[str, Any]) -> str | None:
    """Return what an unprivileged guest of Proxmox VE without nesting may run into, or None."""
    if facts["style"] != "pve" or not facts["unprivileged"]:
        return None
    features = [value for key, value in facts["entries"] if key == "features"][-1:]
    if any(re.search(r"(?:^|,)nesting=1(?:,|$)", value) for value in features):
        return None
    return (
        "unprivileged and without nesting: systemd units with sandboxing, the servers' among them, may end with"
        " 226/NAMESPACE in it; then set its feature nesting=1 and restart it"
    )


def pve_has_dev(text: str) -> bool | None:
    """Tell whether the Proxmox VE of an output of ``pveversion`` knows devN (8.2 and later); None if it names none."""
    match = re.search(r"pve-manager/(\d+)\.(\d+)", text)
    return None if match is None else (int(match.group(1)), int(match.group(2))) >= (8, 2)


def converge(
    text: str,
    style: str,
    wanted: Iterable[Sequence[str]],
    owned: Iterable[Sequence[str]] = (),
    devices: Iterable[str] = (),
) -> tuple[str, dict[str, Any]]:
    """Return (new text, report): our lines as wanted, every other byte as it was.

    Args:
        text: the whole file as it is.
        style: lxc or pve.
        wanted: (key, value) pairs that the main section must hold, each once.
        owned: (key, value) pairs that we wrote before; those not wanted any more are removed.
        devices: values of ``dev_value`` that some devN line must stand for (pve only). A line of ours keeps its number,
            a new one gets the lowest that is free and that no pending change is about to take.

    Returns:
        The new text, equal to the old one where nothing is to do, and a dict: ``added``, ``removed``, ``healed``
        (duplicates of ours taken out), each a list of [key, value]; ``owned``: the pairs to record as ours from now
        on, which are those that we add or had recorded, never one that stood there before us; ``covered``: the values
        of ``devices`` whose path a line of somebody else hands over.

    Raises:
        ValueError: for a style or line that is not understood.
    """
    if style not in _PAIR:
        raise ValueError("style is %r; expected lxc or pve" % (style,))
    device_values = list(dict.fromkeys(devices))
    if device_values and style != "pve":
        raise ValueError("devN lines are for pve, not for %s" % style)
    wanted_pairs: list[Pair] = []
    for key, value in wanted:
        pair = (key, " ".join(str(value).split()))
        if "\n" in "%s%s" % (key, value) or not pair[1] or _pair(_render(pair, style, "\n"), style) != pair:
            raise ValueError("%r %r is no line of a %s config" % (key, value, style))
        if pair not in wanted_pairs:
            wanted_pairs.append(pair)
    owned_pairs = {_normal((key, " ".join(str(value).split()))) for key, value in owned}

    lines = _split(text)
    length = _main_length(lines, style)
    pairs = [_pair(line, style) for line in lines[:length]]
    devs = [_normal(pair) for pair in pairs if pair and _DEV.match(pair[0])]
    covered: list[str] = []
    if style == "pve":
        avoid = set(parse(text, style)["pending"])
        ours, covered = _place_devs(devs, device_values, owned_pairs, avoid)
        wanted_pairs += [(key, value) for key, value in sorted(ours.items(), key=lambda item: int(item[0][3:]))]
    targets = {_mount_target(*pair) for pair in [*wanted_pairs, *owned_pairs]} - {None}
    targets |= {dev_options(pair[1])["path"].lstrip("/") for pair in wanted_pairs if _DEV.match(pair[0])}
    normal_wanted = {_normal(pair): pair for pair in wanted_pairs}
    seen: set[Pair] = set()
    keep: list[str] = []
    removed: list[list[str]] = []
    healed: list[list[str]] = []
    for line, found in zip(lines, pairs):  # noqa: B905 (Python 3.8); there are as many pairs as lines of the section
        normal = None if found is None else _normal(found)
        if found is None or normal is None:
            keep.append(line)
        elif normal in normal_wanted:
            if normal in seen:
                healed.append(list(found))
            else:
                seen.add(normal)
                keep.append(line)
        elif normal in owned_pairs or _mount_target(*found) in targets:
            removed.append(list(found))
        else:
            keep.append(line)
    missing = [pair for normal, pair in normal_wanted.items() if normal not in seen]
    added = [list(pair) for pair in missing]
    if missing:
        keep = _insert(keep, [_render(pair, style, _newline(lines)) for pair in missing], _newline(lines))
    mine = [list(pair) for normal, pair in normal_wanted.items() if normal in owned_pairs or pair in missing]
    report = {"added": added, "removed": removed, "healed": healed, "owned": mine, "covered": covered}
    return "".join(keep + lines[length:]), report


def _newline(lines: list[str]) -> str:
    ends = [line.endswith("\r\n") for line in lines if line.endswith("\n")]
    return "\r\n" if ends and all(ends) else "\n"


def _render(pair: Pair, style: str, newline: str) -> str:
    return "%s%s%s%s" % (pair[0], " = " if style == "lxc" else ": ", pair[1], newline)


def _insert(lines: list[str], new: list[str], newline: str) -> list[str]:
    """Put the new lines after the last line of the main section that is not blank."""
    place = len(lines)
    while place and not lines[place - 1].strip():
        place -= 1
    before = list(lines[:place])
    if before and not before[-1].endswith("\n"):
        before[-1] += newline
    return before + new + list(lines[place:])
