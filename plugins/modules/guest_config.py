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
  - Writes only on difference, by rename where the file system allows it and in place where it does not (/etc/pve), and
    keeps mode and owner.
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
revoked_rules:
  description: Values of the device rules that were removed, to take back in the running guest with the same text.
  type: list
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

import json
import os
import tempfile

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import explain, guestconf

SCHEMA = 1


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
            os.fchown(stream.fileno(), status.st_uid, status.st_gid)
            os.fchmod(stream.fileno(), status.st_mode & 0o7777)
            os.fsync(stream.fileno())
        os.rename(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise
    sync_folder(path)


def write_in_place(path, data):
    with open(path, "r+b") as stream:
        stream.write(data)
        stream.truncate()
        stream.flush()
        os.fsync(stream.fileno())


def write_config(path, data, kind):
    """Write the configuration and return how: rename or in-place."""
    if kind != "pve":
        try:
            write_by_rename(path, data)
        except OSError:
            pass
        else:
            return "rename"
    write_in_place(path, data)
    return "in-place"


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


def wanted_lines(module):
    """Return the wanted pairs, or fail in one line."""
    nodes = []
    for node in module.params["nodes"]:
        try:
            path, major, minor = str(node["path"]), int(node["major"]), int(node["minor"])
        except (KeyError, TypeError, ValueError):
            module.fail_json(msg="node %r; expected path, major and minor of a character device" % (node,))
        if node.get("kind", "char") != "char":
            module.fail_json(msg="%s is a %s, not a character device; make the nodes first" % (path, node["kind"]))
        nodes.append({"path": path, "major": major, "minor": minor})
    lines = guestconf.node_lines(nodes)
    for folder in module.params["folders"]:
        try:
            read_only = module.boolean(folder.get("read_only", True))
            lines.append(guestconf.folder_line(str(folder["source"]), str(folder["target"]), read_only))
        except (KeyError, ValueError, TypeError) as error:
            module.fail_json(msg="folder %r: %s; expected source and target, absolute paths" % (folder, error))
    return lines


def main():
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "kind": {"type": "str", "choices": ["lxc", "pve"], "default": "lxc"},
            "path": {"type": "path"},
            "nodes": {"type": "list", "elements": "dict", "default": []},
            "folders": {"type": "list", "elements": "dict", "default": []},
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
    wanted = wanted_lines(module)
    try:
        with open(path, "rb") as stream:
            before = stream.read().decode("utf-8", "surrogateescape")
    except OSError as error:
        module.fail_json(
            msg="%s: %s; there is no guest %s of kind %s here: create it, or correct lxc_guest_name and lxc_guest_kind"
            % (path, error.strerror, name, kind)
        )
    try:
        recorded = read_state(state_path)
    except (ValueError, KeyError, TypeError) as error:
        module.fail_json(
            msg="%s is not readable (%s); move it away: our lines then count as foreign" % (state_path, error)
        )
    after, report = guestconf.converge(before, kind, wanted, recorded)
    names = {int(major): owners for major, owners in (module.params["major_names"] or {}).items()}
    facts = guestconf.parse(after, kind, module.params["majors"], names)
    mine = [tuple(pair) for pair in report["owned"]]
    changed = after != before
    record = sorted(mine) != sorted(set(recorded))
    how = None
    if not module.check_mode:
        # The record comes first and last: killed in between, we still know every line that may be ours.
        if changed:
            write_state(state_path, name, sorted(set(mine) | set(recorded)))
            how = write_config(path, after.encode("utf-8", "surrogateescape"), kind)
        if changed or record:
            write_state(state_path, name, sorted(mine))
    problems = ["guest %s: %s" % (name, text) for text in explain.config_problems(facts)]
    texts = []
    for what, pairs in (("added", report["added"]), ("removed", report["removed"] + report["healed"])):
        rules = [value for key, value in pairs if key == guestconf.ALLOW]
        others = len(pairs) - len(rules)
        if pairs:
            parts = ["device rules %s" % ", ".join(rules)] if rules else []
            parts += ["%d mount lines" % others] if others else []
            would = "would be " if module.check_mode else ""
            texts.append("guest %s: config, %s%s: %s" % (name, would, what, "; ".join(parts)))
    module.exit_json(
        changed=changed,
        path=path,
        written=how,
        added=report["added"],
        removed=report["removed"],
        healed=report["healed"],
        rules=[value for key, value in wanted if key == guestconf.ALLOW],
        revoked_rules=[value for key, value in report["removed"] if key == guestconf.ALLOW],
        problems=problems,
        stale=[rule for rule in facts["device_rules"] if rule["stale"]],
        v1_keys=facts["v1_keys"],
        diff={"before_header": path, "after_header": path, "before": before, "after": after},
        specrig={"found": problems, "changed": texts},
    )


if __name__ == "__main__":
    main()
