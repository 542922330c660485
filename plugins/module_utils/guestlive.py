# SPDX-License-Identifier: Apache-2.0
"""What a running guest's live state calls for: rules to grant and revoke, nodes and folders to put right.  Pure.

The state is observed by probing, since live rules cannot be read back, and what a rule does depends on its exact text.
"""

from __future__ import annotations

import errno

from . import guestconf, nodes

# No driver hands out this minor: a probe of it asks the rule alone.
WILD_MINOR = 0xFFFFF
# Majors that the kernel hands out dynamically, where a stale grant can point at anything.
DYNAMIC_MAJORS = tuple(range(234, 255)) + tuple(range(384, 512))
PROBED_MINORS = (*range(8), WILD_MINOR)
# More stale majors than this are no leftovers: the guest is allowed everything.
LEFTOVER_LIMIT = 32
# What ids that a guest does not have look like in it.
NOBODY = 65534
PERMITTED = (0, errno.ENXIO, errno.ENODEV, errno.EBUSY, errno.EIO)


def probe_list(want, was=(), withheld=()):
    """The (major, minor) pairs to ask the guest's rules about: what belongs there, and what may be left over.

    Args:
        want: nodes that belong in the guest.
        was: rule values that stood in the config before.
        withheld: nodes of the host that belong to others.
    """
    pairs = {(row["major"], row["minor"]) for row in [*want, *withheld]}
    pairs |= {(row["major"], WILD_MINOR) for row in withheld}
    for found in (guestconf.rule(text) for text in was):
        if found and found["type"] == "c" and found["major"] is not None:
            pairs.add((found["major"], WILD_MINOR if found["minor"] is None else found["minor"]))
    pairs |= {(major, minor) for major in DYNAMIC_MAJORS for minor in PROBED_MINORS}
    return sorted(pairs)


def covered(pair, rules):
    """Whether one of the parsed device rules allows reading and writing the pair."""
    for rule in rules:
        if rule is None or rule["type"] not in ("a", "c"):
            continue
        if rule["type"] == "a" and rule["access"] is None:
            return True
        if not {"r", "w"} <= set(rule["access"] or ""):
            continue
        if rule["major"] in (None, pair[0]) and rule["minor"] in (None, pair[1]):
            return True
    return False


def excess(permitted, want, foreign):
    """The permitted pairs that nothing calls for; None where the guest is allowed everything.

    Args:
        permitted: pairs that the probe found open.
        want: the nodes that belong in the guest.
        foreign: values of the config's device rules that are not ours.
    """
    mine = {(row["major"], row["minor"]) for row in want}
    rules = [guestconf.rule(text) for text in foreign]
    left = sorted(pair for pair in permitted if pair not in mine and not covered(pair, rules))
    return None if len({major for major, _minor in left}) > LEFTOVER_LIMIT else left


def named(pairs, want):
    """What pairs are called: ``major 510`` as a whole, single ones of a major that the guest has nodes of."""
    ours = {row["major"] for row in want}
    texts = []
    for major in sorted({major for major, _minor in pairs}):
        minors = sorted(minor for one, minor in pairs if one == major)
        if major in ours and WILD_MINOR not in minors:
            texts += ["device %d:%d" % (major, minor) for minor in minors]
        else:
            texts.append("major %d" % major)
    return texts


def grant_texts(row):
    """Rule texts to try, in order, for a node that is denied."""
    major, minor = row["major"], row["minor"]
    return [
        guestconf.device_rule(major, minor),
        "c %d:%d rwm" % (major, minor),
        "c %d:* rwm" % major,
        "c %d:* rw" % major,
    ]


def revoke_texts(major, pairs, known):
    """Rule texts that may have granted these pairs of a major, the likeliest first.

    Args:
        major: the major to revoke.
        pairs: its (major, minor) pairs that are open.
        known: rule values that stood in the config before.
    """
    texts = [text for text in known if (guestconf.rule(text) or {}).get("major") == major]
    minors = [minor for _major, minor in pairs if minor != WILD_MINOR]
    wild = any(minor == WILD_MINOR for _major, minor in pairs)
    whole = ["c %d:* %s" % (major, access) for access in ("rwm", "rw")]
    single = ["c %d:%d %s" % (major, minor, access) for access in ("rw", "rwm") for minor in minors]
    for text in (whole + single) if wild else single:
        if text not in texts:
            texts.append(text)
    return texts


def judge_node(want, seen, user, simulated):
    """(status, what is wrong or None) of one node in the guest.

    Args:
        want: {"path", "major", "minor"}.
        seen: {"kind", "major", "minor", "mode", "errno": as root, "user_errno": as the user or None}.
        user: the user that serves, or None.
        simulated: whether no driver behind the node is expected.
    """
    wrong = nodes.fault(want, seen)
    if wrong:
        return "fail", wrong
    code = seen.get("errno")
    if code == errno.EPERM:
        return "fail", "cannot be opened (EPERM: no device rule allows it)"
    if code == errno.EACCES:
        return "fail", "opens for nobody in the guest but its owner (EACCES, mode %s, owner %s)" % (
            seen.get("mode"),
            "nobody, an id that the guest does not have" if seen.get("uid") == NOBODY else seen.get("uid"),
        )
    if code in (errno.ENXIO, errno.ENODEV) and not simulated:
        return "fail", "is allowed and has no driver behind it (%s, see the host's dmesg)" % errno.errorcode[code]
    if code is None or (code not in PERMITTED):
        return "fail", "cannot be opened (%s)" % errno.errorcode.get(code, code)
    mine = seen.get("user_errno")
    if mine in (errno.EPERM, errno.EACCES):
        return "fail", "opens for root and not for user %s (%s, mode %s)" % (
            user,
            errno.errorcode[mine],
            seen.get("mode"),
        )
    return "pass", None


def narrow(seen, host_mode):
    """What is wrong with a node of the guest's own that is narrower than the host's, or None.

    Args:
        seen: the node in the guest, with ``mode``, ``errno`` and ``user_errno``.
        host_mode: permission bits of the host's node.
    """
    if errno.EACCES not in (seen.get("errno"), seen.get("user_errno")):
        return None
    mode = int(seen.get("mode") or "0", 8)
    return "has mode %04o, the host's has %04o" % (mode, host_mode) if host_mode & ~mode else None


def versions(driver, library):
    """What is wrong with the guest's libraries against the host's kernel module, or None; unknown is not wrong."""
    if not driver or not library or driver == library:
        return None
    return (
        "NVIDIA libraries are %s, the host's kernel module is %s: install %s in the guest (user space only, without the"
        " kernel module)" % (library, driver, driver)
    )


def mode_hint(rows, privileged, pve):
    """What to do about nodes that cannot be opened for their mode or owner, or None.

    Args:
        rows: the nodes as the guest sees them.
        privileged: whether the guest's ids are the host's.
        pve: whether it is a guest of Proxmox VE.
    """
    if not any(errno.EACCES in (row.get("errno"), row.get("user_errno")) for row in rows):
        return None
    host = 'gpu_host_node_mode "0666" on the host'
    if privileged:
        return "set " + host
    devs = "devN lines with mode=0666 (lxc_guest_pve_dev) or " if pve else ""
    return "its ids are mapped, so the host's root is nobody in it: use %s%s" % (devs, host)


def short(paths):
    """/dev/nvidia0, /dev/nvidia1, /dev/nvidiactl -> ``nvidia0 nvidia1 nvidiactl``."""
    return " ".join(path.replace("/dev/", "", 1) for path in paths)


def grouped(wrongs):
    """[(path, what is wrong)] -> one line for each thing that is wrong, with all its paths."""
    by_wrong = {}
    for path, wrong in wrongs:
        by_wrong.setdefault(wrong, []).append(path)
    return ["%s %s" % (" ".join(paths), wrong) for wrong, paths in by_wrong.items()]
