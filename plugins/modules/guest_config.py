#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
---
module: guest_config
short_description: Converge the lines of a guest's configuration that are ours
description:
  - Keeps one device rule and one bind mount for each device node, and one bind mount for each folder, in the main
    section of C(/var/lib/lxc/NAME/config) or C(/etc/pve/lxc/ID.conf). Order does not matter, markers are not used.
  - A line is ours when it equals a wanted one, when the state file says that we wrote it, or when it mounts something
    on a target that we want or wrote. All other lines, sections and comments keep every byte. A rule that looks stale
    but is not ours is reported, never removed.
  - Proxmox VE 8.2 and later gets C(devN) lines instead of rules and mounts, since it reads a device's numbers at every
    start of the guest. Numbers of others are left alone, ours keep theirs, new ones get the lowest free one.
  - Writes only on difference, by rename where the file system allows it and in place where it does not (/etc/pve), and
    keeps mode and owner. On Proxmox VE its own lock of the guest is held meanwhile.
options:
  name:
    description: Name (plain LXC) or ID (Proxmox VE) of the guest.
    type: str
    required: true
  kind:
    description: Which kind of guest it is.
    type: str
    choices: [lxc, pve]
    default: lxc
  path:
    description: Path of the configuration, where it is not the usual one.
    type: path
  nodes:
    description: Device nodes to hand over, each with path, major and minor, as the look has them.
    type: list
    elements: dict
    default: []
  folders:
    description: Host folders to bind, each with source, target and optionally read_only (default true).
    type: list
    elements: dict
    default: []
  tmpfs:
    description:
      - File systems in memory that the guest gets at its next start, each with target and size; C(/dev/shm) for one,
        which otherwise has half of the host's memory.
    type: list
    elements: dict
    default: []
  dev:
    description:
      - Whether Proxmox VE gets devN lines. V(auto) asks C(pveversion); where that says nothing, what the guest has from
        us already stays the way it is, and a new guest gets rules and mounts. Without effect on plain LXC.
    type: raw
    default: auto
  dev_mode:
    description: Mode of the nodes that devN lines make in the guest, four octal digits.
    type: str
    default: "0666"
  majors:
    description: The live character majors of the look, to tell stale rules.
    type: dict
  major_names:
    description: Names of the drivers behind each character major, of the look.
    type: dict
  state_dir:
    description: Where the record of our lines is kept, one file a guest.
    type: path
    default: /var/lib/specrig/guests
author: specrig
"""

EXAMPLES = r"""
- name: Hand the GPUs and the model store to the guest
  specrig.host.guest_config:
    name: gpu
    nodes: "{{ host.look.nodes | selectattr('kind', 'equalto', 'char') }}"
    folders:
      - {source: /srv/specrig/ram, target: /srv/models}
    majors: "{{ host.look.majors }}"
    major_names: "{{ host.look.major_names }}"
"""

RETURN = r"""
path:
  description: The configuration file.
  type: str
  returned: always
added:
  description: Pairs of key and value that were added.
  type: list
  returned: always
removed:
  description: Pairs that were ours and are not wanted any more.
  type: list
  returned: always
revoked_dev:
  description: Whether devN lines are used.
  type: bool
  returned: always
rules:
  description: Values of the device rules that were removed, to take back in the running guest with the same text.
  type: list
  returned: always
dev:
  description: Whether devN lines are used.
  type: bool
  returned: always
rules:
  description: Values of the device rules that are wanted, to grant in the running guest with the same text.
  type: list
  returned: always
problems:
  description: What is odd about the file and not ours to change, such as stale rules and v1 keys.
  type: list
  returned: always
"""

import errno
import fcntl
import json
import os
import tempfile
import time

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import explain, guestconf

SCHEMA = 1
# A file system that cannot replace a file by another: /etc/pve, a bind-mounted single file, a read-only folder.
NO_RENAME = {
    errno.EPERM,
    errno.EACCES,
    errno.EXDEV,
    errno.EBUSY,
    errno.EROFS,
    errno.EINVAL,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
}
# Where Proxmox VE's own tools lock a guest's configuration while they change it.
PVE_LOCK = "/run/lock/lxc/pve-config-%s.lock"
LOCK_TIMEOUT_S = 10


def read_state(path):
    """Return the pairs that we wrote, none where there is no record."""
    try:
        with open(path, encoding="utf-8") as stream:
            state = json.load(stream)
        return [(str(key), str(value)) for key, value in state["lines"]]
    except FileNotFoundError:
        return []


def sync_folder(path):
    descriptor = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def write_by_rename(path, data):
    """Replace a file whole, with its mode and owner. Raises OSError where the file system refuses."""
    status = os.stat(path)
    descriptor, temporary = tempfile.mkstemp(prefix="." + os.path.basename(path) + ".", dir=os.path.dirname(path))
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.chown(temporary, status.st_uid, status.st_gid)
            os.chmod(temporary, status.st_mode & 0o7777)
            os.fsync(stream.fileno())
        os.rename(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise
    sync_folder(path)


def write_in_place(path, data, before):
    """Overwrite a file. What a failure leaves is what was there before, as far as the disk lets us."""
    with open(path, "r+b", buffering=0) as stream:
        try:
            # The new text first and its length after it: at no time is the file empty.
            rest = memoryview(data)
            while rest:
                rest = rest[stream.write(rest) :]
            stream.truncate()
        except OSError:
            stream.seek(0)
            stream.write(before)
            stream.truncate()
            raise
        os.fsync(stream.fileno())


def write_config(path, data, before, kind):
    """Write the configuration and return how: rename or in-place."""
    if kind != "pve":
        try:
            write_by_rename(path, data)
        except OSError as error:
            if error.errno not in NO_RENAME:
                raise
        else:
            return "rename"
    write_in_place(path, data, before)
    return "in-place"


class PveLock:
    """Proxmox VE's lock on a guest's configuration, for as long as it is read, decided on and written."""

    def __init__(self, module, path):
        self.module, self.path, self.descriptor = module, path, None

    def __enter__(self):
        if not os.path.isdir(os.path.dirname(self.path)):
            return self
        self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if time.monotonic() > deadline:
                    self.module.fail_json(
                        msg="%s is held by another program for more than %d s; see 'fuser -v %s' and run again"
                        % (self.path, LOCK_TIMEOUT_S, self.path)
                    )
                time.sleep(0.1)
            else:
                return self

    def __exit__(self, *_error):
        if self.descriptor is not None:
            os.close(self.descriptor)


def write_state(path, name, lines):
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    text = json.dumps({"schema": SCHEMA, "guest": name, "lines": [list(line) for line in lines]}, indent=1) + "\n"
    temporary = path + ".new"
    with open(temporary, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.rename(temporary, path)
    sync_folder(path)


def wanted_nodes(module):
    """Return the nodes that are wanted, or fail in one line."""
    nodes = []
    for node in module.params["nodes"]:
        try:
            path, major, minor = str(node["path"]), int(node["major"]), int(node["minor"])
        except (KeyError, TypeError, ValueError):
            module.fail_json(msg="node %r; expected path, major and minor of a character device" % (node,))
        if node.get("kind", "char") != "char":
            module.fail_json(msg="%s is a %s, not a character device; make the nodes first" % (path, node["kind"]))
        nodes.append({"path": path, "major": major, "minor": minor})
    return nodes


def wanted_folders(module):
    """Return the lines of the folders that are wanted, or fail in one line."""
    lines = []
    for folder in module.params["folders"]:
        try:
            read_only = module.boolean(folder.get("read_only", True))
            lines.append(guestconf.folder_line(str(folder["source"]), str(folder["target"]), read_only))
        except (KeyError, ValueError, TypeError) as error:
            module.fail_json(msg="folder %r: %s; expected source and target, absolute paths" % (folder, error))
    for row in module.params["tmpfs"]:
        try:
            lines.append(guestconf.tmpfs_line(str(row["target"]), str(row["size"])))
        except (KeyError, ValueError, TypeError) as error:
            module.fail_json(msg="%s; a tmpfs of a guest has target and size" % error)
    return lines


def decide_dev(module, kind, recorded):
    """Return (whether devN lines are used, a note or None)."""
    asked = {"auto": None, "true": True, "false": False, "yes": True, "no": False}.get(
        str(module.params["dev"]).lower(), "none of them"
    )
    if asked == "none of them":
        module.fail_json(msg="dev is %r; set lxc_guest_pve_dev to auto, true or false" % (module.params["dev"],))
    if kind != "pve":
        return False, None
    if asked is not None:
        return asked, None
    said = "pveversion is not installed"
    program = module.get_bin_path("pveversion", opt_dirs=["/usr/bin"])
    if program:
        code, out, err = module.run_command([program])
        known = guestconf.pve_has_dev(out) if code == 0 else None
        if known is not None:
            return known, None
        said = "pveversion says %r" % ((out or err).strip()[:80],)
    ours = any(key.startswith("dev") for key, _value in recorded)
    return ours, "%s, so it is not known whether this host has devN: %s; set lxc_guest_pve_dev" % (
        said,
        "the devN lines stay" if ours else "rules and mounts are used",
    )


def converge(module, name, kind, path, state_path):
    """Read, decide, write; returns what the module says."""
    nodes, folders = wanted_nodes(module), wanted_folders(module)
    try:
        with open(path, "rb") as stream:
            raw = stream.read()
    except OSError as error:
        module.fail_json(
            msg="%s: %s; there is no guest %s of kind %s here: create it, or correct lxc_guest_name and lxc_guest_kind"
            % (path, error.strerror, name, kind)
        )
    before = raw.decode("utf-8", "surrogateescape")
    try:
        recorded = read_state(state_path)
    except (ValueError, KeyError, TypeError) as error:
        module.fail_json(
            msg="%s is not readable (%s); move it away: our lines then count as foreign" % (state_path, error)
        )
    dev, note = decide_dev(module, kind, recorded)
    wanted, devices = folders, []
    if dev:
        try:
            devices = [guestconf.dev_value(node["path"], module.params["dev_mode"]) for node in nodes]
        except ValueError as error:
            module.fail_json(msg="device for a devN line: %s" % error)
    else:
        wanted = guestconf.node_lines(nodes) + folders
    try:
        after, report = guestconf.converge(before, kind, wanted, recorded, devices)
    except ValueError as error:
        module.fail_json(msg="guest %s, %s: %s" % (name, path, error))
    names = {int(major): owners for major, owners in (module.params["major_names"] or {}).items()}
    facts = guestconf.parse(after, kind, module.params["majors"], names)
    mine = [tuple(pair) for pair in report["owned"]]
    changed = after != before
    if changed and facts["lock"]:
        module.fail_json(
            msg="guest %s is locked by Proxmox VE (%s) and its config has to change: wait until that has ended, or, if"
            " nothing runs any more, 'pct unlock %s', and run again" % (name, facts["lock"], name)
        )
    how = None
    if not module.check_mode:
        # The record comes first and last: killed in between, we still know every line that may be ours.
        if changed:
            write_state(state_path, name, sorted(set(mine) | set(recorded)))
            try:
                how = write_config(path, after.encode("utf-8", "surrogateescape"), raw, kind)
            except OSError as error:
                hint = "; without quorum /etc/pve is read-only, see 'pvecm status'" if kind == "pve" else ""
                module.fail_json(msg="%s cannot be written: %s; nothing was changed%s" % (path, error.strerror, hint))
        if changed or sorted(mine) != sorted(set(recorded)):
            write_state(state_path, name, sorted(mine))
    problems = ["guest %s: %s" % (name, text) for text in explain.config_problems(facts)]
    notes = ["guest %s: %s" % (name, text) for text in (note, guestconf.nesting_note(facts)) if text]
    texts = []
    for what, pairs in (("added", report["added"]), ("removed", report["removed"] + report["healed"])):
        if pairs:
            would = "would be " if module.check_mode else ""
            texts.append("guest %s: config, %s%s: %s" % (name, would, what, "; ".join(describe(pairs))))
    return {
        "changed": changed,
        "path": path,
        "dev": dev,
        "written": how,
        "added": report["added"],
        "removed": report["removed"],
        "healed": report["healed"],
        "rules": [guestconf.device_rule(node["major"], node["minor"]) for node in nodes],
        "revoked_rules": [value for key, value in report["removed"] if key == guestconf.ALLOW],
        "problems": problems,
        "stale": [rule for rule in facts["device_rules"] if rule["stale"]],
        "v1_keys": facts["v1_keys"],
        "diff": {"before_header": path, "after_header": path, "before": before, "after": after},
        "specrig": {"found": problems, "changed": texts, "notes": notes},
    }


def describe(pairs):
    """A few words on lines that come or go."""
    rules = [value for key, value in pairs if key == guestconf.ALLOW]
    devs = ["%s %s" % (key, value) for key, value in pairs if key.startswith("dev")]
    others = len(pairs) - len(rules) - len(devs)
    parts = ["device rules %s" % ", ".join(rules)] if rules else []
    parts += ["devices %s" % ", ".join(devs)] if devs else []
    return parts + (["%d mount lines" % others] if others else [])


def main():
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "kind": {"type": "str", "choices": ["lxc", "pve"], "default": "lxc"},
            "path": {"type": "path"},
            "nodes": {"type": "list", "elements": "dict", "default": []},
            "folders": {"type": "list", "elements": "dict", "default": []},
            "tmpfs": {"type": "list", "elements": "dict", "default": []},
            "dev": {"type": "raw", "default": "auto"},
            "dev_mode": {"type": "str", "default": "0666"},
            "majors": {"type": "dict"},
            "major_names": {"type": "dict"},
            "state_dir": {"type": "path", "default": "/var/lib/specrig/guests"},
        },
        supports_check_mode=True,
    )
    name, kind = module.params["name"], module.params["kind"]
    if not name or "/" in name or name.startswith("."):
        module.fail_json(msg="name is %r; expected the name or ID of a guest" % name)
    usual = "/etc/pve/lxc/%s.conf" if kind == "pve" else "/var/lib/lxc/%s/config"
    path = os.path.realpath(module.params["path"] or usual % name)
    state_path = os.path.join(module.params["state_dir"], name + ".json")
    if kind == "pve" and not module.check_mode:
        with PveLock(module, PVE_LOCK % name):
            result = converge(module, name, kind, path, state_path)
    else:
        result = converge(module, name, kind, path, state_path)
    module.exit_json(**shown(result))


def shown(value):
    """Return a result with its bytes that are no UTF-8 replaced: JSON takes none."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if isinstance(value, (list, tuple)):
        return [shown(item) for item in value]
    if isinstance(value, dict):
        return {key: shown(item) for key, item in value.items()}
    return value


if __name__ == "__main__":
    main()
