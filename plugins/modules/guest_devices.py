#!/usr/bin/python
"""Opens a running guest to the GPUs without a restart, and proves it by opening them from inside."""

from __future__ import annotations

DOCUMENTATION = r"""
module: guest_devices
short_description: Converge the live device rules, nodes and folders of a guest
author: specrig developers
description:
  - Starts the guest if it is stopped, then looks from inside it. Every node is opened as root and as the user that
    serves, and the device rules are asked by access(2) on temporary nodes, which opens no driver.
  - Grants what is denied with C(lxc-cgroup), revokes what has no business there with the text that granted it, and
    binds host nodes and folders into the running guest where they are missing or wrong. Success is what a second look
    sees, never an exit code.
  - Restarts a guest only where nothing else can help, only if allowed, and gracefully.
options:
  name:
    description: Name of the container, or its number on Proxmox VE.
    type: str
    required: true
  kind:
    description: V(lxc) for plain LXC, V(pve) for Proxmox VE.
    type: str
    choices: [lxc, pve]
    default: lxc
  path:
    description: Path of the guest's configuration, where it is not the usual one.
    type: path
  nodes:
    description: Nodes that belong in the guest, each with path, major and minor as the host has them.
    type: list
    elements: dict
    required: true
  host_nodes:
    description: All nodes of the host's driver; those that do not belong in the guest must not open there.
    type: list
    elements: dict
    default: []
  folders:
    description: Host folders that belong in the guest, each with source, target and read_only.
    type: list
    elements: dict
    default: []
  user:
    description: The user of the guest that has to open the nodes; a user who does not exist yet is not asked.
    type: str
    default: ""
  was:
    description: Device rule values that stood in the guest's config before it was converged.
    type: list
    elements: str
    default: []
  driver_version:
    description: Version of the host's kernel module, which the guest's NVIDIA libraries have to have.
    type: str
  simulated:
    description: Whether the driver behind the nodes is simulated, so that ENXIO is what an open gives.
    type: bool
    default: false
  allow_restart:
    description: Whether the guest may be restarted where nothing else can help.
    type: bool
    default: false
  stop_timeout_s:
    description: How long a guest may take to shut down.
    type: int
    default: 120
  python:
    description: Python in the guest.
    type: str
    default: /usr/bin/python3
attributes:
  check_mode:
    support: full
    description: The look makes temporary nodes in the guest's /dev and removes them, in check mode too.
  diff_mode:
    support: full
"""

EXAMPLES = r"""
- name: Open the guest to the GPUs
  specrig.host.guest_devices:
    name: gpu
    nodes: "{{ gpu_host_look.nodes }}"
    folders:
      - {source: /srv/specrig/ram, target: /srv/models, read_only: true}
    user: specrig
"""

RETURN = r"""
init_pid:
  description: Process id of the guest's init on the host, or null if the guest is not running.
  returned: always
  type: int
restarted:
  description: Whether the guest was restarted.
  returned: always
  type: bool
seen:
  description: What the last look from inside saw.
  returned: when the guest runs
  type: dict
"""

import glob
import json
import os
import re
import stat
import time

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import guestconf, guestlive, guestprobe
from ..module_utils.guestmount import bind_into, permitted_in, rules_impossible

CONFIG = {"lxc": "/var/lib/lxc/%s/config", "pve": "/etc/pve/lxc/%s.conf"}
START_TIMEOUT_S = 60
COMMAND_TIMEOUT_S = 60


class Guest:
    """The commands that reach one guest."""

    def __init__(self, module):
        self.module = module
        self.name, self.kind = module.params["name"], module.params["kind"]
        self.init_pid = None

    def run(self, *argv):
        """(exit code, output, errors) of a command, which is ended when it takes too long."""
        limit_s = COMMAND_TIMEOUT_S + (0 if argv[0] == "lxc-attach" else self.module.params["stop_timeout_s"])
        code, out, err = self.module.run_command(["timeout", "-k", "5", str(limit_s), *argv])
        if code in (124, 137):
            self.fail(
                "guest %r: %s did not end within %d s; see on the host what holds it" % (self.name, argv[0], limit_s)
            )
        return code, out, err

    def fail(self, text, **more):
        self.module.fail_json(msg=text, **more)

    def state(self):
        """(RUNNING|STOPPED|..., init pid or None)."""
        code, out, err = self.run("lxc-info", "-n", self.name, "-s", "-p")
        state = re.search(r"^State:\s*(\S+)", out, re.M)
        pid = re.search(r"^PID:\s*(\d+)", out, re.M)
        if (code != 0 or not state) and self.kind == "pve":
            # LXC knows a guest of Proxmox VE only after its first start.
            code, out, err = self.run("pct", "status", self.name)
            state = re.search(r"^status:\s*(\S+)", out, re.M)
            if code == 0 and state:
                return state.group(1).upper(), None
        if code != 0 or not state:
            said = (err or out).strip().splitlines()
            self.fail(
                "the host has no guest %r (%s); create it, or correct lxc_guest_name"
                % (self.name, said[-1] if said else "lxc-info exits %d" % code)
            )
        self.init_pid = int(pid.group(1)) if pid else None
        if state.group(1) in ("FROZEN", "FREEZING"):
            # A backup freezes a guest for its snapshot: not ours to thaw, and whoever enters meanwhile waits with it.
            self.fail(
                "guest %r is frozen, so nothing in it can answer: wait for the backup that holds it, or thaw it by "
                "'lxc-unfreeze -n %s' on the host, and run again" % (self.name, self.name)
            )
        return state.group(1), self.init_pid

    def start(self):
        argv = ["pct", "start", self.name] if self.kind == "pve" else ["lxc-start", "-n", self.name]
        code, out, err = self.run(*argv)
        if code != 0:
            said = " / ".join((err or out).strip().splitlines()[-2:])
            self.fail(
                "guest %r does not start: %s; '%s' shows why"
                % (
                    self.name,
                    said,
                    ("pct start %s --debug" if self.kind == "pve" else "lxc-start -n %s -F -l INFO -o -") % self.name,
                )
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            _code, out, _err = self.run(
                "lxc-attach", "--clear-env", "-n", self.name, "--", "systemctl", "is-system-running"
            )
            if out.strip() in ("running", "degraded", "starting", "maintenance"):
                return
            time.sleep(0.2)
        self.fail("guest %r started and its systemd did not answer within %d s" % (self.name, START_TIMEOUT_S))

    def stop(self):
        timeout = str(self.module.params["stop_timeout_s"])
        if self.kind == "pve":
            argv = ["pct", "shutdown", self.name, "--timeout", timeout, "--forceStop", "1"]
        else:
            argv = ["lxc-stop", "-n", self.name, "-t", timeout]
        code, out, err = self.run(*argv)
        if code != 0:
            self.fail("guest %r does not stop: %s" % (self.name, (err or out).strip()))

    def look(self, rules):
        """What a look from inside sees."""
        params = self.module.params
        ask = {
            "nodes": [row["path"] for row in params["nodes"]],
            "folders": [row["target"] for row in params["folders"]],
            "user": params["user"],
            "rules": rules,
        }
        code, out, err = self.run(
            "lxc-attach",
            "--clear-env",
            "-n",
            self.name,
            "--",
            params["python"],
            "-c",
            guestprobe.SOURCE,
            json.dumps(ask),
        )
        if code != 0:
            said = (err or out).strip().splitlines()
            self.fail(
                "cannot look from inside guest %r: %s; it needs %s"
                % (self.name, said[-1] if said else code, params["python"])
            )
        try:
            seen = json.loads(out)
        except ValueError:
            self.fail(
                "a look from inside guest %r gave %r, expected JSON; see what its %s prints by itself"
                % (self.name, " ".join(out.split())[:120], params["python"])
            )
        if rules and seen["permitted"] is None:
            # No node can be made in there, as in every unprivileged guest: its cgroup is asked from out here.
            seen["permitted"] = permitted_in(self.init_pid, rules) if self.init_pid else None
        return seen

    def rule(self, verb, text):
        return self.run("lxc-cgroup", "-n", self.name, "devices.%s" % verb, text)


def config_texts(path, depth=8):
    """Yields a plain LXC config and what it includes."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as handle:
            text = handle.read()
    except OSError:
        return
    yield text
    for value in re.findall(r"^\s*lxc\.include\s*[=:]\s*(.*?)\s*$", text, re.M) if depth else []:
        for found in sorted(glob.glob(value + "/*.conf")) if os.path.isdir(value) else [value]:
            for more in config_texts(found, depth - 1):
                yield more


def foreign_rules(params):
    """Values of the device rules in effect, includes and devN lines too, that name none of the wanted nodes exactly."""
    mine = {guestconf.device_rule(row["major"], row["minor"]) for row in params["nodes"]}
    rules = []
    for number, text in enumerate(config_texts(params["path"] or CONFIG[params["kind"]] % params["name"])):
        try:
            parsed = guestconf.parse(text, params["kind"] if number == 0 else "lxc")
        except ValueError:
            continue
        rules += [row["text"] for row in parsed["device_rules"]]
        for dev in parsed["devs"]:
            try:
                about = os.stat(dev["path"] or "")
            except OSError:
                continue
            if stat.S_ISCHR(about.st_mode):
                rules.append(guestconf.device_rule(os.major(about.st_rdev), os.minor(about.st_rdev)))
    return [text for text in rules if text not in mine]


def host_mode(path):
    """Permission bits of the host's node; None where it is not there."""
    try:
        return stat.S_IMODE(os.stat(path).st_mode)
    except OSError:
        return None


class Live:
    """What is wrong inside the running guest, and the live remedies."""

    def __init__(self, guest, seen):
        params = guest.module.params
        self.guest, self.seen = guest, seen
        self.want = params["nodes"]
        by_path = {row["path"]: row for row in seen["nodes"]}
        self.judged = [(row, by_path[row["path"]]) for row in self.want]
        permitted = seen["permitted"]
        self.permitted = None if permitted is None else {tuple(pair) for pair in permitted}
        self.denied = (
            []
            if permitted is None
            else [row for row in self.want if (row["major"], row["minor"]) not in self.permitted]
        )
        if permitted is None:
            self.denied = [row for row, at in self.judged if at.get("errno") == 1]
        left = [] if permitted is None else guestlive.excess(self.permitted, self.want, foreign_rules(params))
        self.open_to_all = left is None
        self.excess = left or []
        self.bad_nodes = []
        for row, at in self.judged:
            status, wrong = guestlive.judge_node(row, dict(at, errno=0, user_errno=0), params["user"], True)
            if status != "fail":
                mode = host_mode(row["path"])
                wrong = None if mode is None else guestlive.narrow(at, mode)
            if wrong:
                self.bad_nodes.append((row, at, wrong))
        self.bad_folders = []
        for row, at in zip(params["folders"], seen["folders"]):  # noqa: B905 (Python 3.8)
            try:
                about = os.stat(row["source"])
            except OSError:
                if guest.module.check_mode:
                    self.bad_folders.append((row, "is not the host's %s, which is not there yet" % row["source"]))
                    continue
                guest.fail(
                    "the host has no folder %s to show in guest %r; the role model_store makes it"
                    % (row["source"], guest.name)
                )
            same = at["device"] == about.st_dev and at.get("inode") == about.st_ino
            if not same:
                self.bad_folders.append((row, "is not the host's %s" % row["source"]))
            elif bool(row.get("read_only", True)) != at["read_only"]:
                self.bad_folders.append((row, "is writable" if row.get("read_only", True) else "is read-only"))

    def failures(self):
        """One line for each thing that is still wrong."""
        params = self.guest.module.params
        wrongs = []
        for row, at in self.judged:
            status, wrong = guestlive.judge_node(row, at, params["user"], params["simulated"])
            if status == "fail":
                wrongs.append((row["path"], wrong))
        lines = guestlive.grouped(wrongs)
        hint = guestlive.mode_hint(self.seen["nodes"], self.seen["privileged"], self.guest.kind == "pve")
        lines += [hint] if hint else []
        if self.denied:
            hint = rules_impossible()
            lines += [hint] if hint else []
        hint = guestlive.versions(params["driver_version"], self.seen.get("library"))
        lines += [hint] if hint else []
        lines += ["%s still opens and has no business there" % text for text in guestlive.named(self.excess, self.want)]
        lines += ["%s %s" % (row["target"], wrong) for row, wrong in self.bad_folders]
        return lines

    def curable(self):
        """Whether starting the guest anew can help: not where the host itself can't have device rules."""
        return self.work() and not (self.denied and rules_impossible())

    def work(self):
        return bool(self.denied or self.excess or self.bad_nodes or self.bad_folders)

    def describe(self):
        """(found, what changing it means, lines of the state before and after)."""
        found, todo, before, after = [], [], [], []
        if self.denied:
            names = guestlive.short(row["path"] for row in self.denied)
            found.append("guest %s: open denied (EPERM) by the device rules: %s" % (self.guest.name, names))
            todo.append(
                "opened live: %s" % ", ".join(guestconf.device_rule(row["major"], row["minor"]) for row in self.denied)
            )
        for row in self.denied:
            text = "c %d:%d" % (row["major"], row["minor"])
            before.append("%s denied" % text)
            after.append("%s allowed" % text)
        left = guestlive.named(self.excess, self.want)
        if left:
            found.append("guest %s: stale device rules still open %s" % (self.guest.name, ", ".join(left)))
            todo.append("revoked live: %s" % ", ".join(left))
            before += ["%s allowed" % text for text in left]
            after += ["%s denied" % text for text in left]
        for text in guestlive.grouped([(row["path"], wrong) for row, _at, wrong in self.bad_nodes]):
            found.append("guest %s: %s" % (self.guest.name, text))
        for row, at, _wrong in self.bad_nodes:
            before.append(
                "%s %s" % (row["path"], at["kind"] if at["kind"] != "char" else "c %s:%s" % (at["major"], at["minor"]))
            )
            after.append("%s c %d:%d" % (row["path"], row["major"], row["minor"]))
        if self.bad_nodes:
            todo.append("put in place live: %s" % guestlive.short(row["path"] for row, _at, _wrong in self.bad_nodes))
        for row, wrong in self.bad_folders:
            found.append("guest %s: %s %s" % (self.guest.name, row["target"], wrong))
            todo.append("shown live: %s at %s" % (row["source"], row["target"]))
            before.append("%s %s" % (row["target"], wrong))
            after.append("%s shows %s" % (row["target"], row["source"]))
        return found, todo, before, after

    def remedy(self, init_pid):
        """Applies the live remedies; what they did is for the next look to say."""
        for row in self.denied:
            self.guest.rule("allow", guestlive.grant_texts(row)[0])
        known = self.guest.module.params["was"]
        for major in sorted({pair[0] for pair in self.excess}):
            pairs = [pair for pair in self.excess if pair[0] == major]
            for text in guestlive.revoke_texts(major, pairs, known):
                self.guest.rule("deny", text)
                left = {tuple(pair) for pair in self.guest.look([list(pair) for pair in pairs])["permitted"] or []}
                if not left & set(pairs):
                    break
        problems = []
        for row, _at, _wrong in self.bad_nodes:
            problems.append(bind_into(init_pid, row["path"], row["path"], folder=False))
        for row, _wrong in self.bad_folders:
            problems.append(bind_into(init_pid, row["source"], row["target"], True, row.get("read_only", True)))
        return [text for text in problems if text]

    def insist(self):
        """Tries the other texts for what is denied although it was granted."""
        for row in self.denied:
            for text in guestlive.grant_texts(row)[1:]:
                self.guest.rule("allow", text)
                pair = [row["major"], row["minor"]]
                if pair in (self.guest.look([pair])["permitted"] or []):
                    break


def main():
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "kind": {"type": "str", "choices": ["lxc", "pve"], "default": "lxc"},
            "path": {"type": "path"},
            "nodes": {"type": "list", "elements": "dict", "required": True},
            "host_nodes": {"type": "list", "elements": "dict", "default": []},
            "folders": {"type": "list", "elements": "dict", "default": []},
            "user": {"type": "str", "default": ""},
            "was": {"type": "list", "elements": "str", "default": []},
            "driver_version": {"type": "str"},
            "simulated": {"type": "bool", "default": False},
            "allow_restart": {"type": "bool", "default": False},
            "stop_timeout_s": {"type": "int", "default": 120},
            "python": {"type": "str", "default": "/usr/bin/python3"},
        },
        supports_check_mode=True,
    )
    params = module.params
    for name in ("nodes", "host_nodes"):
        params[name] = [
            {"path": row["path"], "major": int(row["major"]), "minor": int(row["minor"])}
            for row in params[name]
            if row.get("kind", "char") == "char"
        ]
    withheld = [row for row in params["host_nodes"] if row not in params["nodes"]]
    if not re.match(r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", params["name"]):
        module.fail_json(msg="guest name %r is not one; set lxc_guest_name" % params["name"])
    guest = Guest(module)
    said = {"found": [], "changed": [], "gates": [], "notes": []}
    result = {"changed": False, "restarted": False, "specrig": said}
    would = "would be " if module.check_mode else ""

    state, init_pid = guest.state()
    if state != "RUNNING":
        said["found"].append("guest %s is %s" % (guest.name, state.lower()))
        said["changed"].append("guest %s: %sstarted" % (guest.name, would))
        result["changed"] = True
        result["diff"] = {"before": "%s stopped\n" % guest.name, "after": "%s running\n" % guest.name}
        if module.check_mode:
            said["notes"].append("what the guest lacks is unknown until it runs")
            module.exit_json(init_pid=None, **result)
        guest.start()
        state, init_pid = guest.state()

    rules = [list(pair) for pair in guestlive.probe_list(params["nodes"], params["was"], withheld)]
    seen = guest.look(rules)
    live = Live(guest, seen)
    if live.open_to_all:
        said["notes"].append("guest %s may open every device; its config has a rule for all" % guest.name)
    if live.work():
        found, todo, before, after = live.describe()
        said["found"] += found
        result["changed"] = True
        before = result.get("diff", {}).get("before", "") + "\n".join(before) + "\n"
        result["diff"] = {"before": before, "after": result.get("diff", {}).get("after", "") + "\n".join(after) + "\n"}
        said["changed"] += ["guest %s: %s%s" % (guest.name, would, text) for text in todo]
        if module.check_mode:
            module.exit_json(init_pid=init_pid, seen=summary(seen), **result)
        problems = live.remedy(init_pid)
        seen = guest.look(rules)
        live = Live(guest, seen)
        if live.denied:
            live.insist()
            seen = guest.look(rules)
            live = Live(guest, seen)
        if live.curable() and params["allow_restart"]:
            said["notes"].append("guest %s was restarted: %s" % (guest.name, "; ".join(problems + live.failures())))
            said["changed"].append("guest %s: restarted" % guest.name)
            result["restarted"] = True
            problems = []
            guest.stop()
            guest.start()
            state, init_pid = guest.state()
            seen = guest.look(rules)
            live = Live(guest, seen)
        left = problems + live.failures()
        if left:
            hint = "; restart the guest, or set lxc_guest_allow_restart and run again"
            hint = "" if params["allow_restart"] or not live.curable() else hint
            said["gates"].append(gate(guest.name, "fail", "; ".join(left)))
            module.fail_json(
                msg="guest %s: %s%s" % (guest.name, "; ".join(left), hint),
                init_pid=init_pid,
                seen=summary(seen),
                **result,
            )
    left = live.failures()
    label = " (simulated driver: permitted, none behind the nodes)" if params["simulated"] else ""
    if left:
        said["gates"].append(gate(guest.name, "fail", "; ".join(left)))
        module.fail_json(
            msg="guest %s: %s" % (guest.name, "; ".join(left)),
            init_pid=init_pid,
            seen=summary(seen),
            **result,
        )
    if not params["nodes"]:
        said["gates"].append(gate(guest.name, "unknown", "no node to open: the driver is not loaded"))
    else:
        said["gates"].append(gate(guest.name, "pass", "%d nodes open in the guest%s" % (len(params["nodes"]), label)))
    module.exit_json(init_pid=init_pid, seen=summary(seen), **result)


def summary(seen):
    return {name: seen.get(name) for name in ("nodes", "folders", "privileged", "library")}


def gate(name, status, message):
    return {
        "gate": "device",
        "subject": name,
        "status": status,
        "seen": message,
        "expected": "every GPU node opens in the guest, nothing else does",
        "message": message,
    }


if __name__ == "__main__":
    main()
