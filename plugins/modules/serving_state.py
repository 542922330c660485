#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Converge the units of all profiles in one step."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_state
short_description: Converge the systemd units of SGLang profiles in a guest
description:
  - Writes the unit template, each profile's environment and drop-in, enables what serves, and starts, restarts or stops
    units, all at once and without waiting for them. M(specrig.host.engine_ready) waits.
  - Restarts a server only when the process that runs differs from the plan.
options:
  state:
    description:
      - V(present) converges and starts every profile with C(serve=true), and stops what a killed benchmark left.
      - V(started) converges and starts the profiles of O(names) alone; V(stopped) stops them.
    type: str
    choices: [present, started, stopped]
    default: present
  names:
    description: The profiles that V(started) and V(stopped) are about.
    type: list
    elements: str
    default: []
  profiles:
    description: The profile table, C(sglang_server_profiles).
    type: dict
    required: true
  placement:
    description: What the filter P(specrig.host.plan_placement#filter) planned.
    type: dict
    default: {}
  misplaced:
    description: Profiles whose ranks the host sees on other GPUs than planned, each with a line; they are restarted.
    type: dict
    default: {}
  missing_models:
    description:
      - Models that are being staged. A profile that needs one of them is converged and not started; it is in
        RV(waiting), for M(specrig.host.serving_release).
    type: list
    elements: str
    default: []
  look:
    description: What M(specrig.host.serving_look) saw; may be empty with V(stopped).
    type: dict
    required: true
  settings:
    description:
      - C(engines) (as the filter C(engines) resolves them), or C(engine) and C(engine_id) where there is one
        only, C(dialects), C(model_root), C(listen), C(start_timeout_s) and C(unit) (user, group, stop_timeout_s,
        restart, restart_delay_s, restart_limit, config_dir).
    type: dict
    required: true
  api_key:
    description: A key that every server is to ask for. It is written to a file of the profile, not to the command line.
    type: str
author: specrig developers (@specrig)
attributes:
  check_mode:
    description: Says what would be done.
    support: full
  diff_mode:
    description: Shows the files' differences, secret values as a hash.
    support: full
"""

EXAMPLES = r"""
- name: Serve what the inventory says
  specrig.host.serving_state:
    profiles: "{{ sglang_server_profiles }}"
    placement: "{{ plan }}"
    look: "{{ serving.look }}"
    settings: {engine: "{{ sglang_server_engine }}", model_root: /srv/models}
"""

RETURN = r"""
plans:
  description: The unit plans of the profiles that were converged, by name.
  returned: success
  type: dict
targets:
  description: The plans that should answer now, for M(specrig.host.engine_ready).
  returned: success
  type: list
  elements: dict
problems:
  description: One line for each profile that could not be converged; with O(state=present) only, else the module fails.
  returned: success
  type: list
  elements: str
started:
  description: Profiles that were started or restarted (in check mode, that would be).
  returned: success
  type: list
  elements: str
waiting:
  description: Profile to C(models), the models it waits for, and C(verb), what starting it will be called.
  returned: success
  type: dict
specrig:
  description: Lines for the end-of-run summary.
  returned: success
  type: dict
"""

import contextlib
import grp
import os
import subprocess
import tempfile

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import serving, stageprogress, startorder

SYSTEM = "/etc/systemd/system"
# What check mode says in place of what was done.
WOULD = {
    "wrote": "write",
    "rewrote": "rewrite",
    "started": "start",
    "restarted": "restart",
    "stopped": "stop",
    "enabled": "enable",
    "disabled": "disable",
}


class Module(AnsibleModule):
    """A module that leaves its arguments out of the machine's log: a profile's env and extra_args may hold keys."""

    def _log_invocation(self):
        """Say nothing; what was done stands in the run's journal."""


class Files:
    """The files to write, with their differences."""

    def __init__(self, check):
        self.check = check
        self.changed = []
        self.diff = []

    def want(self, path, text, mode, mask=None, group=0):
        before = read_text(path)
        about = os.stat(path) if before is not None else None
        right = about is not None and (about.st_mode & 0o777, about.st_uid, about.st_gid) == (mode, os.geteuid(), group)
        if before == text and right:
            return False
        self.changed.append(path)
        shown = [mask(value) if mask else value for value in (before or "", text)]
        self.diff.append({"before_header": path, "after_header": path, "before": shown[0], "after": shown[1]})
        if not self.check:
            try:
                write(path, text, mode, group)
            except OSError as error:
                raise OSError(error.errno, error.strerror, path) from None
        return True

    def unwanted(self, path):
        if not os.path.lexists(path):
            return False
        self.changed.append(path)
        self.diff.append({"before_header": path, "after_header": path, "before": "secrets\n", "after": ""})
        if not self.check:
            os.unlink(path)
        return True


def masked_env(text):
    env = serving.mask_env(serving.parse_env(text))
    return "".join("{0}={1}\n".format(name, env[name]) for name in sorted(env))


def masked_secrets(text):
    pairs = [line.partition(": ") for line in text.splitlines() if not line.startswith("#")]
    return "".join("{0}: {1}\n".format(key, serving.mask(value)) for key, _, value in pairs)


def read_text(path):
    try:
        with open(path, encoding="utf-8") as handle:
            return handle.read()
    except OSError:
        return None


def write(path, text, mode, group):
    folder = os.path.dirname(path)
    os.makedirs(folder, mode=0o755, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=folder, prefix=".specrig-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            os.fchown(stream.fileno(), -1, group)
            os.fchmod(stream.fileno(), mode)
            stream.flush()
            os.fsync(stream.fileno())
        os.rename(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise


def systemctl(module, *words, needed=True):
    unit = module.params["settings"].get("unit") or {}
    stop_s = int(unit.get("stop_timeout_s", serving.DEFAULT_UNIT["stop_timeout_s"]))
    try:
        done = subprocess.run(
            ["systemctl", *list(words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=240 + stop_s,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        module.fail_json(msg="systemctl {0}: {1}".format(" ".join(words), error))
    if done.returncode and needed:
        output = done.stdout.decode("utf-8", "replace").strip().replace("\n", "; ")
        module.fail_json(msg="systemctl {0} failed: {1}".format(" ".join(words), output))


def foreign_lines(name, unit):
    """Lines about files that are not ours and override what the plan decides, on disk and in systemd's memory."""
    ours = os.path.realpath("{0}/{1}.d/{2}".format(SYSTEM, serving.unit_name(name), serving.DROPIN_NAME))
    replaced = serving.replaced_line(name, (unit or {}).get("fragment"), os.path.join(SYSTEM, serving.TEMPLATE_NAME))
    lines = [replaced] if replaced else []
    paths = list((unit or {}).get("dropins") or [])
    for folder in serving.dropin_folders(name):
        try:
            paths += [os.path.join(folder, entry) for entry in sorted(os.listdir(folder)) if entry.endswith(".conf")]
        except OSError:
            continue
    seen = {ours}
    for path in paths:
        real = os.path.realpath(path)
        if real in seen:
            continue
        seen.add(real)
        directives = serving.foreign_directives(read_text(path) or "")
        if directives:
            lines.append(serving.foreign_message(name, path, directives))
    return lines


def plan_all(module, names):
    """``(plans, problem lines)`` of the named profiles."""
    params = module.params
    placed = params["placement"].get("profiles") or {}
    refused = params["placement"].get("refused") or {}
    plans = {}
    problems = []
    for name in names:
        if name not in params["profiles"]:
            problems.append(
                "profile {0} is not in sglang_server_profiles; there are: {1}".format(
                    name, ", ".join(sorted(params["profiles"])) or "none"
                )
            )
        elif name in refused:
            problems.append("{0}: {1}".format(name, refused[name]))
        elif name not in placed:
            problems.append("{0}: its placement is unknown until the host's GPUs can be seen".format(name))
        else:
            try:
                plans[name] = serving.plan_unit(name, params["profiles"][name], placed[name], params["settings"])
            except serving.ServingError as error:
                problems.append(str(error))
    return plans, problems


def seen_units(names):
    """What systemd says of these units, as far as stopping needs it."""
    units = {}
    for name in names:
        argv = ["systemctl", "show", "-p", "ActiveState", "--value", serving.unit_name(name)]
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False, timeout=30)
        units[name] = {"active": done.stdout.decode("utf-8", "replace").strip() or None}
    return units


def group_of(name):
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return 0


def write_files(files, template_settings, plans, api_key):
    """Names of the profiles whose files changed; ``*`` for the template."""
    changed = []
    config = template_settings.get("config_dir") or serving.DEFAULT_UNIT["config_dir"]
    group = group_of(template_settings.get("group") or serving.DEFAULT_UNIT["group"])
    if files.want(os.path.join(SYSTEM, serving.TEMPLATE_NAME), serving.render_template(template_settings), 0o644):
        changed.append("*")
    if api_key:
        files.want(serving.CLIENT_ENV, serving.render_env({"SPECRIG_API_KEY": api_key}), 0o600, masked_env)
    else:
        files.unwanted(serving.CLIENT_ENV)
    for name, plan in plans.items():
        env_path = "{0}/{1}.env".format(config, name)
        dropin = "{0}/{1}.d/{2}".format(SYSTEM, plan["unit"], serving.DROPIN_NAME)
        secrets = "{0}/{1}.secrets.yaml".format(config, name)
        touched = files.want(env_path, serving.render_env(plan["env"]), 0o600, masked_env)
        if plan["secrets"]:
            # The engine itself reads this one, as the service user.
            touched |= files.want(secrets, serving.render_secrets(plan["secrets"]), 0o640, masked_secrets, group)
        else:
            touched |= files.unwanted(secrets)
        if files.want(dropin, serving.render_dropin(plan, template_settings), 0o644) or touched:
            changed.append(name)
    return changed


def begin(module, plans, start, restart, stop, waiting, units, processes):
    """Starts all that can start, all at once; what takes over a GPU of another only when that has let go of it."""
    running = ("active", "activating", "reloading", "deactivating")
    held = {
        name: startorder.gpus_of(processes.get(name))
        for name in restart + stop
        if (units.get(name) or {}).get("active") in running
        and ((units.get(name) or {}).get("main_pid") or name in stop)
    }
    wanted = {name: plans[name]["guest_gpus"] for name in restart + start}
    at_once, first, later = startorder.order(wanted, held, stop)
    ending = [serving.unit_name(name) for name in stop + first]
    if ending:
        systemctl(module, "--no-block", "stop", *ending)
    # A restart of what does not run is a start.
    for verb, which in (("restart", restart), ("start", start)):
        names = [serving.unit_name(name) for name in which if name in at_once and name not in waiting]
        if names:
            systemctl(module, "--no-block", verb, *names)
    if ending:
        systemctl(module, "stop", *ending)
        # A unit that is stopped for good is not left as a failure.
        systemctl(module, "reset-failed", *ending, needed=False)
    # Of these, one whose own GPUs nobody wants still runs: a start would leave it as it is.
    names = [serving.unit_name(name) for name in later if name not in waiting]
    if names:
        systemctl(module, "--no-block", "restart", *names)


def main():
    module = Module(
        argument_spec={
            "state": {"type": "str", "default": "present", "choices": ["present", "started", "stopped"]},
            "names": {"type": "list", "elements": "str", "default": []},
            "profiles": {"type": "dict", "required": True},
            "placement": {"type": "dict", "default": {}},
            "misplaced": {"type": "dict", "default": {}},
            "missing_models": {"type": "list", "elements": "str", "default": []},
            "look": {"type": "dict", "required": True},
            "settings": {"type": "dict", "required": True},
            "api_key": {"type": "str", "no_log": True},
        },
        supports_check_mode=True,
    )
    params = module.params
    state = params["state"]
    params["settings"]["api_key"] = params["api_key"]
    known = params["settings"].get("engines") or {"default": params["settings"].get("engine") or {}}
    for row in [*known.values(), *params["profiles"].values()]:
        # A key in extra_args or env is as secret as one that was given as such.
        with contextlib.suppress(serving.ServingError, TypeError, AttributeError):
            words = [str(word) for word in row.get("extra_args") or []]
            module.no_log_values.update(serving.split_secrets(words)[1].values())
        with contextlib.suppress(TypeError, AttributeError):
            module.no_log_values.update(serving.secret_values(row.get("env") or {}))
    # To stop a server by name needs no look at anything else.
    units = seen_units(params["names"]) if state == "stopped" else params["look"].get("units") or {}
    processes = params["look"].get("processes") or {}
    found, changed, notes = [], [], []

    table_problems = serving.check_profiles(params["profiles"])
    if table_problems:
        module.fail_json(msg="; ".join(table_problems))

    served = [name for name, row in params["profiles"].items() if row.get("serve")]
    names = served if state == "present" else params["names"]
    plans, problems = ({}, []) if state == "stopped" else plan_all(module, names)
    for name in list(plans):
        overridden = foreign_lines(name, units.get(name))
        if (units.get(name) or {}).get("load") == "masked":
            overridden.append(
                "{0}: its unit is masked, so nobody can start it; 'systemctl unmask {1}' in the guest, or serve: false "
                "in the profile".format(name, serving.unit_name(name))
            )
        if overridden:
            problems += overridden
            del plans[name]
    # Several profiles: what is right must serve although one is not, and whoever waits for them reports it.
    if problems and state != "present" and not module.check_mode:
        module.fail_json(msg="; ".join(problems), specrig={"found": problems})
    found += problems
    notes += ["left alone: {0}".format(line) for line in params["placement"].get("avoided") or []]

    files = Files(module.check_mode)
    if state != "stopped":
        try:
            touched = write_files(files, params["settings"].get("unit") or {}, plans, params["api_key"])
        except OSError as error:
            module.fail_json(
                msg="{0} cannot be written in the guest: {1}; make it writable, or free some space, and run "
                "again".format(error.filename, error.strerror)
            )
        for name in touched:
            known = name == "*" or (units.get(name) or {}).get("load") == "loaded"
            what = "the unit template" if name == "*" else "the unit of " + name
            changed.append("{0} {1}".format("rewrote" if known and units else "wrote", what))
    reload_needed = bool(files.changed) or any((units.get(name) or {}).get("need_reload") for name in plans)

    start, restart, waiting = [], [], {}
    for name, plan in plans.items():
        action, reasons, unknown = serving.decide(plan, units.get(name), processes.get(name), True)
        notes += ["{0}: {1}".format(name, line) for line in plan["notes"] + unknown]
        if action == "keep" and name in params["misplaced"] and (units.get(name) or {}).get("active") == "active":
            action, reasons = "restart", [params["misplaced"][name]]
        if action in ("start", "restart"):
            (start if action == "start" else restart).append(name)
            found.append("{0}: {1}".format(name, "; ".join(reasons)))
            missing = stageprogress.models_of(
                params["profiles"][name], params["settings"].get("model_root") or "/", params["missing_models"]
            )
            verb = "restarted" if action == "restart" else "started"
            if missing:
                waiting[name] = {"models": missing, "verb": verb}
            else:
                changed.append("{0} {1}".format(verb, name))
    stop, benchmarks = sorted(params["names"]), []
    if state == "present":
        needed = {index for name in start + restart for index in plans[name]["guest_gpus"]}
        stop, benchmarks, lines = serving.leftovers(params["profiles"], params["look"], needed)
        found += lines
    elif state == "started":
        stop = []
    stop = [
        name
        for name in stop
        if serving.decide({}, units.get(name), None, False)[0] == "stop"
        or (units.get(name) or {}).get("active") == "failed"
    ]
    for name in stop:
        changed.append("stopped {0}".format(name))
    changed += ["stopped {0}".format(unit) for unit in benchmarks]

    enable = [name for name in plans if plans[name]["serve"] and (units.get(name) or {}).get("enabled") != "enabled"]
    disable = []
    if state == "present":
        disable = sorted(
            name
            for name, unit in units.items()
            if unit.get("enabled") == "enabled" and name in params["profiles"] and name not in served
        )
        strays = sorted(
            name for name in units if name not in params["profiles"] and units[name].get("active") == "active"
        )
        found += ["{0}: it runs and is not in sglang_server_profiles; left alone".format(name) for name in strays]
    changed += ["enabled {0} at boot".format(name) for name in enable]
    changed += ["disabled {0} at boot".format(name) for name in disable]

    if not module.check_mode:
        if reload_needed:
            systemctl(module, "daemon-reload")
        if benchmarks:
            systemctl(module, "stop", *benchmarks)
        for verb, which in (("enable", enable), ("disable", disable)):
            if which:
                systemctl(module, "--quiet", verb, *[serving.unit_name(name) for name in which])
        fresh = [name for name in start + restart if (units.get(name) or {}).get("load") == "loaded"]
        if fresh:
            # A start limit that was hit earlier would refuse this start; a unit that systemd forgot meanwhile has none.
            systemctl(module, "reset-failed", *[serving.unit_name(name) for name in fresh], needed=False)
        begin(module, plans, start, restart, stop, waiting, units, processes)

    targets = [dict(plan, fresh=name in start or name in restart) for name, plan in plans.items()]
    for target in targets:
        target["env"] = serving.mask_env(target["env"])
        target["argv"] = serving.mask_argv(target["argv"])
        target["secrets"] = sorted(target["secrets"])
    if module.check_mode:
        words = [line.partition(" ") for line in changed]
        changed = ["would {0} {1}".format(WOULD[verb], rest) for verb, _, rest in words]
    # What is started or stopped by name is a step of something larger: the journal has each, the screen its outcome.
    report = {"found": found, "changed": changed, "notes": notes}
    if state != "present":
        report = {"steps": changed, "notes": notes}
    report["serving"] = [{"profile": name, "status": "stopped"} for name in stop]
    module.exit_json(
        changed=bool(changed) or bool(files.changed),
        diff=files.diff,
        plans={target["name"]: target for target in targets},
        targets=targets,
        problems=problems,
        started=[name for name in start + restart if name not in waiting],
        waiting=waiting,
        stopped=stop,
        specrig=report,
    )


if __name__ == "__main__":
    main()
