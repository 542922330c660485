# SPDX-License-Identifier: Apache-2.0
"""Options of a tmpfs: what was asked for, what the kernel makes of it, and how a live mount gets there.  Pure.

The kernel is asked what it makes of options by a mount in a namespace of its own (the module's part), so that nothing
here has to guess how ``50%`` or ``interleave`` comes out. What a remount can change without losing what lies there was
tried out on Linux 6.18: size (not below what is used, not where it had no limit), huge, a NUMA policy (not back to
none), more inodes, and the flags of the mount. noswap is fixed for the life of a tmpfs.
"""

from __future__ import annotations

import re

from . import cpulist, memory

HUGE = ("auto", "never", "always", "within_size", "advise")
# Options that have a variable of their own, by the words of mount(8).
OWN = {
    "size": "model_store_size",
    "nr_blocks": "model_store_size",
    "huge": "model_store_huge",
    "mpol": "model_store_numa",
    "noswap": "model_store_noswap",
    "nr_inodes": "model_store_inodes",
}
_NUMA = re.compile(r"^(default|local|prefer|bind|interleave)(?:=(static|relative))?(?::([0-9,\-]+))?$")
# noswap of a tmpfs came with Linux 6.4.
NOSWAP_SINCE = (6, 4)


class TmpfsError(ValueError):
    """Options that cannot be; one line says what was seen, what was expected, what to do."""


def parse_numa(text):
    """{"mode", "flag", "nodes"} of ``bind:0-1``, ``interleave``, ``prefer=static:1``; nodes None means none given.

    Raises:
        TmpfsError
    """
    match = _NUMA.match(text)
    if not match:
        raise TmpfsError(
            "model_store_numa is %r; expected default, local, prefer:NODE, bind:NODES, interleave or interleave:NODES, "
            "optionally with =static or =relative after the word" % text
        )
    mode, flag, listed = match.groups()
    nodes = None
    if listed is not None:
        try:
            nodes = cpulist.parse(listed)
        except ValueError:
            nodes = []
        if not nodes:
            raise TmpfsError("model_store_numa is %r; its nodes have to be a list such as 0 or 0-1 or 0,2" % text)
    if mode in ("default", "local") and (nodes is not None or flag):
        raise TmpfsError("model_store_numa is %r; %s takes neither nodes nor a flag" % (text, mode))
    if mode == "prefer" and (nodes is None or len(nodes) != 1):
        raise TmpfsError("model_store_numa is %r; prefer takes one node, as in prefer:0" % text)
    if mode == "bind" and nodes is None:
        raise TmpfsError("model_store_numa is %r; bind takes nodes, as in bind:0" % text)
    return {"mode": mode, "flag": flag, "nodes": nodes}


def kernel_version(release):
    """(6, 18) of ``6.18.44-fc``; None where it does not start with two numbers."""
    match = re.match(r"^(\d+)\.(\d+)", release or "")
    return (int(match.group(1)), int(match.group(2))) if match else None


def huge_pages(shmem_enabled):
    """What ``auto`` stands for: huge pages within a file's size where the kernel has them for a tmpfs, else none."""
    state = re.search(r"\[(\w+)\]", shmem_enabled or "")
    return "within_size" if state and state.group(1) != "deny" else "never"


def wanted(params, facts):
    """Check what was asked for; returns (options as mount takes them, notes).

    Args:
        params: ``size``, ``huge``, ``numa``, ``noswap``, ``inodes`` (None: as the kernel has it), ``options`` (text).
        facts: ``nodes`` (NUMA nodes with memory, None if unknown), ``shmem_enabled`` (text of the kernel's file, None
            where it is not there), ``release`` (of the kernel), ``memory`` (bytes of the machine).

    Raises:
        TmpfsError
    """
    notes = []
    extra = [word for word in str(params["options"] or "").split(",") if word]
    for word in extra:
        key = word.split("=", 1)[0].strip()
        if key in OWN:
            raise TmpfsError("model_store_options has %s; set %s instead" % (word, OWN[key]))
        if not re.match(r"^[a-z_]+(=[A-Za-z0-9_.:/+-]*)?$", word):
            raise TmpfsError("model_store_options has %r; expected mount options such as nosuid or mode=0755" % word)
    try:
        memory.parse_size(params["size"], facts.get("memory"))
    except ValueError as problem:
        raise TmpfsError("model_store_size: %s" % problem) from None
    options = ["size=%s" % params["size"]]

    if params["huge"] == "auto":
        params = dict(params, huge=huge_pages(facts.get("shmem_enabled")))
    if params["huge"] not in HUGE:
        raise TmpfsError("model_store_huge is %r; expected one of %s" % (params["huge"], ", ".join(HUGE)))
    enabled = re.search(r"\[(\w+)\]", facts.get("shmem_enabled") or "")
    if params["huge"] != "never":
        if facts.get("shmem_enabled") is None:
            raise TmpfsError(
                "model_store_huge is %s and this kernel has no huge pages for a tmpfs (there is no "
                "/sys/kernel/mm/transparent_hugepage/shmem_enabled); set it to never" % params["huge"]
            )
        if enabled and enabled.group(1) == "deny":
            notes.append(
                "model_store_huge=%s has no effect: /sys/kernel/mm/transparent_hugepage/shmem_enabled says deny; write "
                "never there to let each mount decide" % params["huge"]
            )
        options.append("huge=%s" % params["huge"])
    elif enabled and enabled.group(1) == "force":
        notes.append(
            "the store gets huge pages although model_store_huge is never: "
            "/sys/kernel/mm/transparent_hugepage/shmem_enabled says force"
        )

    numa = parse_numa(str(params["numa"]))
    if numa["mode"] != "default":
        known = facts.get("nodes")
        missing = sorted(set(numa["nodes"] or []) - set(known)) if known is not None else []
        if missing and numa["flag"] != "relative":
            raise TmpfsError(
                "model_store_numa is %s and this machine has no memory on NUMA node %s, only on %s; name others"
                % (params["numa"], cpulist.format(missing), cpulist.format(known) or "none")
            )
        options.append("mpol=%s" % params["numa"])

    if params["noswap"]:
        version = kernel_version(facts.get("release"))
        if version and version < NOSWAP_SINCE:
            raise TmpfsError(
                "model_store_noswap is set and Linux %s has no noswap for a tmpfs, which came with 6.4; leave it out"
                % facts["release"]
            )
        options.append("noswap")
    if params["inodes"] is not None:
        if params["inodes"] < 1:
            raise TmpfsError("model_store_inodes is %d; expected a number of files above 0" % params["inodes"])
        options.append("nr_inodes=%d" % params["inodes"])
    return options + extra, notes


def spellings(options):
    """The texts for ``mount -o`` to try: a list of nodes has commas, which newer mount(8) want quoted, older do not."""
    plain = ",".join(options)
    quoted = ",".join('mpol="%s"' % word[5:] if word.startswith("mpol=") and "," in word else word for word in options)
    return [plain] if quoted == plain else [plain, quoted]


def unescape(text):
    r"""A path of mountinfo: ``\040`` is a blank."""
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code.group(1), 8)), text)


def of_mountinfo(text, path):
    """What is mounted at a path, the topmost; None where nothing is.

    Returns:
        dict: ``fstype``, ``source``, ``flags`` (set of nosuid, nodev, noexec, ro ...), ``options`` {size_k, huge, mpol,
        nr_inodes, noswap, mode}; of a tmpfs, with what the kernel leaves out put in: huge never, mpol default.
    """
    found = None
    for line in text.splitlines():
        left, dash, right = line.partition(" - ")
        fields, more = left.split(" "), right.split(" ")
        if not dash or len(fields) < 6 or len(more) < 3 or unescape(fields[4]) != path:
            continue
        found = {
            "fstype": more[0],
            "source": unescape(more[1]),
            "flags": set(fields[5].split(",")) & {"ro", "nosuid", "nodev", "noexec"},
            "options": super_options(more[2]),
        }
    return found


def mount_of(text, path):
    """(of_mountinfo's dict, mount point) of the mount that a path lies on."""
    best = "/"
    for line in text.splitlines():
        fields = line.split(" ")
        point = unescape(fields[4]) if len(fields) > 4 else "/"
        if (path + "/").startswith(point.rstrip("/") + "/") and len(point) >= len(best):
            best = point
    return of_mountinfo(text, best), best


def super_options(text):
    """The options of a tmpfs as the kernel shows them; an mpol's list of nodes may have commas."""
    options = {"size_k": None, "huge": "never", "mpol": "default", "nr_inodes": None, "noswap": False, "mode": 0o1777}
    words = re.split(r",(?![0-9])", text)
    for word in words:
        key, _equals, value = word.partition("=")
        if key == "size":
            options["size_k"] = int(re.match(r"^\d+", value).group()) if re.match(r"^\d+k$", value) else None
        elif key in ("huge", "mpol"):
            options[key] = value
        elif key == "nr_inodes":
            options[key] = int(value) if value.isdigit() else None
        elif key == "noswap":
            options[key] = True
        elif key == "mode" and re.match(r"^[0-7]+$", value):
            options[key] = int(value, 8)
    return options


def differences(want, live, used_bytes, used_inodes):
    """How a live mount differs from the wanted one.

    Args:
        want: of_mountinfo's dict of the kernel's answer to the wanted options.
        live: the same of what is mounted.
        used_bytes: what lies on the live mount.
        used_inodes: how many inodes are taken there.

    Returns:
        [{"what", "seen", "wanted", "how": remount|new|refuse, "why"}], empty where they agree. ``mode`` is left to the
        caller: a live mount's is changed by chmod. An option that was not asked for (inodes) is no difference.
    """
    rows = []

    def differ(what, seen, wish, how, why=None):
        rows.append({"what": what, "seen": seen, "wanted": wish, "how": how, "why": why})

    now, goal = live["options"], want["options"]
    if now["size_k"] != goal["size_k"]:
        seen, wish = (
            "no limit" if number in (0, None) else memory.amount(number * 1024)
            for number in (now["size_k"], goal["size_k"])
        )
        if now["size_k"] == 0:
            differ("size", seen, wish, "new", "a tmpfs without limit gets none later")
        elif goal["size_k"] is not None and goal["size_k"] * 1024 < used_bytes:
            differ("size", seen, wish, "refuse", "%s lie there" % memory.amount(used_bytes))
        else:
            differ("size", seen, wish, "remount")
    if now["huge"] != goal["huge"]:
        differ("huge", now["huge"], goal["huge"], "remount", "for what is copied from now on")
    if now["mpol"] != goal["mpol"]:
        if goal["mpol"] == "default":
            differ(
                "mpol",
                now["mpol"],
                goal["mpol"],
                "new",
                "a policy cannot be taken back, only changed, to local for one",
            )
        else:
            differ("mpol", now["mpol"], goal["mpol"], "remount", "for what is copied from now on")
    if goal["nr_inodes"] is not None and now["nr_inodes"] != goal["nr_inodes"]:
        if now["nr_inodes"] == 0:
            differ("nr_inodes", "no limit", goal["nr_inodes"], "new", "a tmpfs without limit gets none later")
        elif goal["nr_inodes"] < used_inodes:
            differ("nr_inodes", now["nr_inodes"], goal["nr_inodes"], "refuse", "%d are in use" % used_inodes)
        else:
            differ("nr_inodes", now["nr_inodes"] or "the kernel's", goal["nr_inodes"], "remount")
    if now["noswap"] != goal["noswap"]:
        words = {True: "off", False: "on"}
        differ("swap", words[now["noswap"]], words[goal["noswap"]], "new", "noswap is fixed for the life of a tmpfs")
    if live["flags"] != want["flags"]:
        differ("flags", ",".join(sorted(live["flags"])) or "none", ",".join(sorted(want["flags"])) or "none", "remount")
    return rows


def remount_options(want, rows):
    """Options of ``mount -o remount,...`` that make the differences of kind remount go, and no other.

    Flags are always given whole: mount(8) keeps some of them and drops others otherwise.
    """
    words = ["remount"]
    flags = want["flags"]
    words += [flag if flag in flags else {"ro": "rw", "nosuid": "suid", "nodev": "dev", "noexec": "exec"}[flag]
              for flag in ("ro", "nosuid", "nodev", "noexec")]  # fmt: skip
    for row in rows:
        if row["how"] != "remount" or row["what"] == "flags":
            continue
        goal = want["options"]
        if row["what"] == "size":
            words.append("size=%dk" % goal["size_k"])
        elif row["what"] in ("huge", "mpol"):
            words.append("%s=%s" % (row["what"], goal[row["what"]]))
        else:
            words.append("nr_inodes=%d" % goal["nr_inodes"])
    return words


def unit_text(path, options):
    """The mount unit of a store: before any guest starts, at every boot."""
    return (
        "# Written by the role specrig.host.model_store; changes here are undone by the next run.\n"
        "[Unit]\n"
        "Description=Models in RAM for GPU guests\n"
        "Before=lxc.service pve-guests.service\n"
        "\n"
        "[Mount]\n"
        "What=tmpfs\n"
        "Where=%s\n"
        "Type=tmpfs\n"
        "Options=%s\n"
        "\n"
        "[Install]\n"
        "WantedBy=local-fs.target\n"
    ) % (path, options.replace("%", "%%"))
