# SPDX-License-Identifier: Apache-2.0
"""What a profile's systemd unit should be, and how what runs differs from it.  Pure: text and dictionaries only."""

from __future__ import annotations

import hashlib
import json
import re

from . import cpulist, dialects, engineflags, engines, numa, readiness, serverinfo

UNIT_PREFIX = "specrig-sglang@"
TEMPLATE_NAME = UNIT_PREFIX + ".service"
DROPIN_NAME = "specrig.conf"
CLIENT_ENV = "/etc/specrig/client.env"
"""The key that the servers ask for, for the units of load clients; there only where the role was given one."""
HEADER = "# Written by the role specrig.host.sglang_server; changes here are undone by the next run."

# A profile's name is a systemd instance name and a file name, and must need no escaping as either.
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
_ENV_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
_PLAIN_WORD = re.compile(r"^[A-Za-z0-9_@%+=:,./-]+$")
_SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSW|CREDENTIAL)", re.IGNORECASE)
# To take a shorter text out of what is shown, such as TOKENIZERS_PARALLELISM's "true", would garble the rest.
_SECRET_LENGTH = 8
# Variables by which an engine, its libraries or its interpreter change what they do: one that nobody planned matters.
_ENGINE_VARIABLE = re.compile(
    r"^(?:(?:CUDA|NVIDIA|NCCL|SGLANG|SGL|TORCH\w*|PYTORCH|TRITON|FLASHINFER|OMP|MKL|KMP|GOMP|HF|TRANSFORMERS|VLLM|UCX|GLOO"
    r"|LD|MALLOC)_|PYTHON)"
)
_OWNED_DIRECTIVES = frozenset(
    [
        "ExecStart",
        "Environment",
        "EnvironmentFile",
        "UnsetEnvironment",
        "PassEnvironment",
        "CPUAffinity",
        "AllowedCPUs",
        "NUMAPolicy",
        "NUMAMask",
        "User",
        "Group",
        "RootDirectory",
        "DeviceAllow",
        "DevicePolicy",
        "PrivateDevices",
        "ProtectClock",
        "MemoryDenyWriteExecute",
        "AllowedMemoryNodes",
        "CPUQuota",
        "MemoryHigh",
        "MemoryMax",
        "DynamicUser",
        "KillMode",
    ]
)
_LISTEN = ("127.0.0.1", "0.0.0.0")
# Options that hold a secret, with the shortest beginning that the engine's argument parser may take for one.
_SECRET_ARGUMENTS = {"--api-key": "--api", "--admin-api-key": "--adm", "--ssl-keyfile-password": "--ssl-keyfile-"}

DEFAULT_UNIT = {
    "user": "specrig",
    "group": "specrig",
    "config_dir": "/etc/specrig/profiles",
    "start_timeout_s": 900,
    "stop_timeout_s": 60,
    "restart": "on-failure",
    "restart_delay_s": 10,
    "restart_limit": 3,
}


# Folders whose drop-ins systemd applies, the one that wins last.
UNIT_FOLDERS = (
    "/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/usr/local/lib/systemd/system",
    "/run/systemd/generator.late",
    "/run/systemd/generator",
    "/etc/systemd/system.attached",
    "/run/systemd/system",
    "/etc/systemd/system",
    "/run/systemd/generator.early",
    "/run/systemd/transient",
    "/run/systemd/system.control",
    "/etc/systemd/system.control",
)


class ServingError(ValueError):
    """One line: what was seen, what was expected, what to do."""


def unit_name(profile):
    """``tp4`` -> ``specrig-sglang@tp4.service``."""
    return "{0}{1}.service".format(UNIT_PREFIX, profile)


def profile_of(unit):
    """The profile of one of our units, or None for any other unit name."""
    if unit and unit.startswith(UNIT_PREFIX) and unit.endswith(".service"):
        return unit[len(UNIT_PREFIX) : -len(".service")] or None
    return None


def check_name(profile):
    """Raises ServingError for a name that can't be a systemd instance and a file name."""
    if not isinstance(profile, str) or not _NAME.match(profile):
        raise ServingError(
            "profile name {0!r} can't be used: expected letters, digits, '.', '_' and '-', at most 64, "
            "starting with a letter or digit; rename it in sglang_server_profiles".format(profile)
        )


def check_profiles(profiles):
    """Problems of a profile table that no single profile shows: bad names, one port given twice (list of lines)."""
    problems = []
    ports = {}
    for name in profiles:
        try:
            check_name(name)
        except ServingError as error:
            problems.append(str(error))
        port = profiles[name].get("port")
        if not isinstance(port, int) or isinstance(port, bool) or not 1 <= port <= 65535:
            problems.append("profile {0}: port is {1!r}, expected a number from 1 to 65535".format(name, port))
        elif port in ports:
            problems.append(
                "profiles {0} and {1} both have port {2}: give each its own".format(ports[port], name, port)
            )
        else:
            ports[port] = name
    return problems


# ---- rendering -------------------------------------------------------------------------------------------------


def quote_exec(word):
    """One word of an ExecStart line; ``%`` and ``$`` are literal."""
    if re.search(r"[\n\r\0]", word):
        raise ServingError("an engine argument holds a line break or NUL: {0!r}".format(word))
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return text if _PLAIN_WORD.match(text) else '"{0}"'.format(text)


def render_env(env):
    """Text of an EnvironmentFile, sorted by name."""
    lines = [HEADER]
    for name in sorted(env):
        value = str(env[name])
        if not _ENV_NAME.match(name):
            raise ServingError("environment variable name {0!r}: expected letters, digits and '_' only".format(name))
        if re.search(r"[\n\r\0]", value):
            raise ServingError("environment variable {0} holds a line break or NUL".format(name))
        if value and _PLAIN_WORD.match(value):
            lines.append("{0}={1}".format(name, value))
        else:
            escaped = re.sub(r'([\\"`$])', r"\\\1", value)
            lines.append('{0}="{1}"'.format(name, escaped))
    return "\n".join(lines) + "\n"


def parse_env(text):
    """An EnvironmentFile as rendered above, back to a dictionary."""
    env = {}
    for line in text.splitlines():
        line = line.strip()
        if not line or line[0] in "#;" or "=" not in line:
            continue
        name, value = line.split("=", 1)
        if len(value) > 1 and value[0] == value[-1] == '"':
            value = re.sub(r"\\(.)", r"\1", value[1:-1])
        env[name.strip()] = value
    return env


def render_template(unit=None):
    """Text of ``specrig-sglang@.service``.  A profile's drop-in adds ExecStart: an unknown profile can't start."""
    settings = dict(DEFAULT_UNIT)
    settings.update(unit or {})
    return (
        """{header}
[Unit]
Description=SGLang server for profile %i
Documentation=https://docs.sglang.ai/
After=network.target
StartLimitIntervalSec={limit_s}
StartLimitBurst={restart_limit}

[Service]
Type=exec
User={user}
Group={group}
EnvironmentFile={config_dir}/%i.env
WorkingDirectory=/var/lib/specrig
StateDirectory=specrig
CacheDirectory=specrig
# exec only reports that the program was started; that it answers is polled with a real completion.
TimeoutStartSec={start_timeout_s}
TimeoutStopSec={stop_timeout_s}
# SIGTERM goes to the main process alone: it finishes its requests and lets the ranks give their GPU memory back. What
# is left of the group when it has ended, or when the time is up, is killed, so that nothing outlives the unit.
KillMode=mixed
Restart={restart}
RestartSec={restart_delay_s}
LimitMEMLOCK=infinity
LimitNOFILE=1048576
# No core file of a process that maps a whole model.
LimitCORE=0
TasksMax=infinity
OOMPolicy=stop
UMask=0027

# Hardening as far as a GPU engine allows. Left out, each for a reason: PrivateDevices and ProtectClock imply
# DeviceAllow, which keeps the majors that it found at the start and so takes the GPU away when the driver's change,
# and which an unprivileged container can't apply at all (the guest's own device rules are the limit);
# MemoryDenyWriteExecute breaks run-time compilation; ProtectProc, ProcSubset, ProtectKernelTunables and
# ProtectControlGroups mount a new /proc or /sys in a container and hide what is mounted over it there (lxcfs's memory
# and CPU figures); RemoveIPC would delete the other servers' shared memory.
NoNewPrivileges=yes
CapabilityBoundingSet=
AmbientCapabilities=
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectHostname=yes
RestrictSUIDSGID=yes
RestrictRealtime=yes
RestrictNamespaces=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
LockPersonality=yes
SystemCallArchitectures=native
# Left in: @resources (set_mempolicy, sched_setaffinity, by which ranks bind themselves) and @debug (pidfd_getfd, by
# which ranks hand each other GPU memory).
SystemCallFilter=~@clock @cpu-emulation @module @mount @obsolete @raw-io @reboot @swap
SystemCallErrorNumber=EPERM

[Install]
WantedBy=multi-user.target
"""
    ).format(header=HEADER, limit_s=start_limit_s(settings), **settings)


def start_limit_s(settings):
    """Seconds in which starts are counted.

    A server that dies after minutes of loading must reach the limit too: as many loads as may be tried fit in.
    """
    each = int(settings["restart_delay_s"]) + int(settings["start_timeout_s"])
    return each * (int(settings["restart_limit"]) + 1)


def render_dropin(plan, unit=None):
    """Text of a profile's ``specrig.conf``: what it runs and where, one option a line.

    An EnvironmentFile could not hold the arguments: systemd splits a variable at blanks, and knows no quotes there.
    """
    settings = dict(DEFAULT_UNIT)
    settings.update(unit or {})
    lines = [HEADER]
    own = dict(settings, start_timeout_s=plan["start_timeout_s"])
    if start_limit_s(own) > start_limit_s(settings):
        lines += ["[Unit]", "StartLimitIntervalSec={0}".format(start_limit_s(own))]
    lines += ["[Service]", "ExecStart="]
    text = "ExecStart="
    for index, word in enumerate(plan["argv"]):
        gap = "" if index == 0 else " \\\n    " if word.startswith("--") else " "
        text += gap + quote_exec(word)
    lines.append(text)
    if plan.get("cache_folders"):
        # Kernels that were compiled outlive a restart, and each version of the engine has its own.
        lines.append("CacheDirectory=" + " ".join(plan["cache_folders"]))
    if plan.get("cpus"):
        lines.append("CPUAffinity=" + plan["cpus"].replace(",", " "))
    if plan.get("memory_policy") is True and plan.get("memory_nodes"):
        lines.append("NUMAPolicy=bind")
        lines.append("NUMAMask=" + ",".join(str(node) for node in plan["memory_nodes"]))
    else:
        lines.append("# memory policy not applied: " + memory_policy_reason(plan))
    return "\n".join(lines) + "\n"


def memory_policy_reason(plan):
    """Why a unit has no NUMAPolicy, in words for the file and the summary; empty where it has one."""
    if plan.get("memory_policy") is True and plan.get("memory_nodes"):
        return ""
    if not plan.get("memory_nodes"):
        return "the NUMA node of its GPUs is unknown"
    if plan.get("memory_policy") is False:
        return "the kernel refuses it for node {0} here".format(",".join(str(node) for node in plan["memory_nodes"]))
    return "whether the kernel accepts it could not be told"


def secret_option(word):
    """The option with a secret that a word means, also where it is abbreviated; None for any other."""
    for option, shortest in _SECRET_ARGUMENTS.items():
        if word.startswith(shortest) and option.startswith(word):
            return option
    return None


def split_secrets(argv):
    """An engine's arguments without the secret ones, and those by option (without dashes).

    A command line can be read by every user of a machine; SGLang reads the same options from a file.

    Raises:
        ServingError: a secret option without a value.
    """
    kept = []
    secrets = {}
    words = iter(argv)
    for word in words:
        given, equals, value = word.partition("=")
        option = secret_option(given)
        if option is None:
            kept.append(word)
            continue
        if not equals:
            value = next(words, None)
        if not value:
            raise ServingError("{0} has no value; expected {0} VALUE in extra_args".format(given))
        secrets[option[2:]] = value
    return kept, secrets


def render_secrets(secrets):
    """Text of the file that ``--config`` names: YAML, which JSON's strings are."""
    return HEADER + "\n" + "".join("{0}: {1}\n".format(key, json.dumps(secrets[key])) for key in sorted(secrets))


# ---- the plan --------------------------------------------------------------------------------------------------


def _engine_of(name, profile, settings):
    """The engine that runs a profile; raises ServingError where there is none."""
    known = settings.get("engines") or {engines.DEFAULT: dict(settings["engine"], id=settings.get("engine_id"))}
    try:
        return engines.of(name, profile, known)
    except engines.EngineError as error:
        raise ServingError(str(error)) from None


def dialects_of(profile, settings):
    """The overrides of the table of methods that hold for a profile: the inventory's, and over them its engine's."""
    engine = (settings.get("engines") or {}).get(profile.get("engine") or engines.DEFAULT) or {}
    return dict(settings.get("dialects") or {}, **(engine.get("dialects") or {}))


def plan_unit(name, profile, placed, settings):
    """The unit of one profile.

    Args:
        name: the profile's name.
        profile: its row of ``sglang_server_profiles``.
        placed: its row of the placement plan.
        settings: ``engines`` (what ``engines.resolve`` gives; the id of one names what is installed: another one means
            that the server has to be restarted), or ``engine`` and ``engine_id`` where there is one only, ``dialects``
            (overrides), ``model_root`` (folder of the models in the guest), ``listen`` (address), ``start_timeout_s``,
            ``api_key`` (that the server is to ask for), ``unit``.
    """
    check_name(name)
    engine = _engine_of(name, profile, settings)
    overrides = dialects_of(profile, settings)
    command = [str(word) for word in engine.get("command") or []]
    if not command or not command[0].startswith("/"):
        raise ServingError(
            "{0}.command is {1!r}: expected a list that starts with an absolute path".format(
                engines.where(profile.get("engine") or engines.DEFAULT), engine.get("command")
            )
        )
    listen = settings.get("listen") or _LISTEN[0]
    if listen not in _LISTEN:
        raise ServingError(
            "sglang_server_listen is {0!r}, expected {1}: readiness and gates ask on 127.0.0.1".format(
                listen, " or ".join(_LISTEN)
            )
        )
    try:
        method = dialects.resolve(profile["method"], profile.get("budget"), overrides)
        argv = command + dialects.command(
            dict(profile, name=name, extra_args=[], draft_model=draft_path(profile, settings["model_root"])),
            "{0}/{1}".format(settings["model_root"].rstrip("/"), profile.get("model")),
            listen,
            overrides,
        )
    except dialects.DialectError as error:
        raise ServingError("profile {0}: {1}".format(name, error)) from None
    except KeyError as error:
        raise ServingError(
            "profile {0} has no {1}; set it in sglang_server_profiles".format(name, error.args[0])
        ) from None
    if engine.get("kind") == "sim" and engine.get("time_scale") is not None:
        argv += ["--sim-time-scale", str(engine["time_scale"])]
    # The profile's own arguments stand last, so they win.
    for words in (engine.get("extra_args"), profile.get("extra_args")):
        argv += [str(word).replace("{profile}", name) for word in words or []]
    problems, notes = engineflags.judge(engine, method, argv[len(command) :])
    if problems:
        raise ServingError("profile {0}: {1}".format(name, "; ".join(problems)))
    try:
        argv, secrets = split_secrets(argv)
    except ServingError as error:
        raise ServingError("profile {0}: {1}".format(name, error)) from None
    if settings.get("api_key"):
        secrets.setdefault("api-key", str(settings["api_key"]))
    if secrets:
        if "--config" in argv:
            raise ServingError(
                "profile {0}: --config is given, and so is --{1}, which the role puts into a file of its own; SGLang "
                "takes one such file: put the other options into extra_args".format(name, sorted(secrets)[0])
            )
        folder = (settings.get("unit") or {}).get("config_dir") or DEFAULT_UNIT["config_dir"]
        argv[len(command) : len(command)] = ["--config", "{0}/{1}.secrets.yaml".format(folder, name)]
    env = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(str(index) for index in placed["guest_gpus"]),
        "HOME": "/var/lib/specrig",
        "PYTHONUNBUFFERED": "1",
        # setproctitle otherwise overwrites the environment area, and /proc/PID/environ could not be compared.
        "SPT_NOENV": "1",
        "SPECRIG_PROFILE": name,
    }
    cache = engine.get("cache") or {}
    env.update(cache.get("env") or {})
    if engine.get("id"):
        env["SPECRIG_ENGINE"] = engine["id"]
    if secrets:
        # The command line shows only the file's name; another value has to restart the server all the same.
        env["SPECRIG_SECRETS"] = mask(render_secrets(secrets))
    own = dialects.environment(method, draft_path(profile, settings["model_root"]))
    for source in (engine.get("env") or {}, own, profile.get("env") or {}):
        for key in source:
            if key in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
                raise ServingError(
                    "profile {0}: env sets {1}, which the placement decides; use gpus: [...] of the profile".format(
                        name, key
                    )
                )
            env[key] = str(source[key])
    return {
        "name": name,
        "unit": unit_name(name),
        "method": method["label"],
        "notes": notes,
        "speculative": bool(method["draft_tokens"] is None or method["draft_tokens"] > 0),
        "argv": argv,
        "env": env,
        "secrets": secrets,
        "serve": bool(profile.get("serve")),
        "port": int(profile["port"]),
        "model": profile["model"],
        "served_model_name": str(profile.get("served_model_name") or profile["model"]),
        "tp": int(profile["tp"]),
        "context_length": profile.get("context_length"),
        "gpus": list(placed["gpus"]),
        "guest_gpus": list(placed["guest_gpus"]),
        "numa_nodes": list(placed["numa_nodes"]),
        "numa": placed.get("numa", profile.get("numa", "local")),
        "cpus": placed.get("cpus") or None,
        "memory_nodes": list(placed.get("memory_nodes") or []),
        "memory_policy": placed.get("memory_policy"),
        "start_timeout_s": int(profile.get("start_timeout_s") or settings.get("start_timeout_s") or 900),
        "cache_folders": list(cache.get("folders") or []),
        "engine": {
            "name": profile.get("engine") or engines.DEFAULT,
            "kind": engine.get("kind"),
            "id": engine.get("id"),
            "version": engine.get("version"),
            "packages": engine.get("packages") or {},
        },
        "simulated": engine.get("kind") == "sim",
        "cpu": engine.get("kind") != "sim" and _on_cpu(argv),
        "time_scale": engine.get("time_scale") if engine.get("kind") == "sim" else None,
    }


def _on_cpu(argv):
    """Whether the engine is told to compute on the CPU; the last word counts."""
    devices = [word.partition("=")[2] for word in argv if word.startswith("--device=")]
    devices += [argv[at + 1] for at, word in enumerate(argv[:-1]) if word == "--device"]
    return devices[-1:] == ["cpu"]


def summary_row(plan, status, tokens_per_s=None, note=""):
    """The row of the end-of-run screen."""
    notes = [note] if note else []
    if plan.get("simulated"):
        scale = plan.get("time_scale")
        notes.append("simulated" if scale in (None, 1, 1.0) else "simulated, time scale {0:g}".format(float(scale)))
    if plan.get("cpu"):
        notes.append("CPU engine, not GPU performance")
    if plan.get("numa") == "span":
        notes.append("spans nodes as its profile says")
    if memory_policy_reason(plan):
        notes.append("memory policy not applied")
    return {
        "profile": plan["name"],
        "gpus": plan["gpus"],
        "numa_nodes": plan["numa_nodes"],
        "cpus": plan["cpus"],
        "port": plan["port"],
        "method": plan["method"],
        "tokens_per_s": tokens_per_s,
        "status": status,
        "note": "; ".join(notes),
    }


# ---- comparing -------------------------------------------------------------------------------------------------


def mask_env(env):
    """The same environment with secret values replaced by a short hash, so that they can be shown and compared."""
    return {name: mask(value) if _SECRET.search(name) else value for name, value in env.items()}


def secret_values(env):
    """The values of an environment that are secret by their names; no paths, and none that is too short to be one."""
    named = [str(env[name]) for name in env if _SECRET.search(name)]
    return {value for value in named if len(value) >= _SECRET_LENGTH and not value.startswith("/")}


def mask_argv(argv):
    """The same words with the value after a secret option replaced by a short hash."""
    shown = []
    for index, word in enumerate(argv):
        option, equals, value = word.partition("=")
        if index and secret_option(argv[index - 1]):
            shown.append(mask(word))
        elif equals and secret_option(option):
            shown.append(option + "=" + mask(value))
        else:
            shown.append(word)
    return shown


def mask(value):
    """A short hash that stands for a secret."""
    return "sha256:" + hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()[:12]


def differences(plan, process):
    """How a running main process differs from the plan.

    Args:
        plan: a unit plan.
        process: ``{pid, environ: {..}|None, cmdline: [..]|None, cpus_allowed: [ints]|None}``, secrets masked; None =
            it could not be read. ``inherited`` names the variables that systemd gives to every unit,
            ``memory_policy`` is as in ``engineprocs``.

    Returns:
        ``(different, unknown)``: lines that ask for a restart, and lines on what could not be compared.
    """
    different = []
    unknown = []
    environ = process.get("environ")
    wanted = mask_env(plan["env"])
    if environ is None:
        unknown.append("the environment of pid {0} can't be read".format(process.get("pid")))
    else:
        # Where another engine runs, where it keeps its kernels follows from that and needs no line of its own.
        other = environ.get("SPECRIG_ENGINE") != wanted.get("SPECRIG_ENGINE")
        told = frozenset(engines.CACHES) if other else frozenset()
        for name in sorted(set(wanted) - told):
            seen = environ.get(name)
            if seen != wanted[name]:
                different.append("{0} is {1}, planned {2}".format(name, _shown(seen), _shown(wanted[name])))
        inherited = process.get("inherited") or []
        for name in stray_variables(environ, wanted):
            if name in told:
                continue
            if name in inherited:
                unknown.append(
                    "{0}={1} is not planned and comes from systemd's own environment; 'systemctl unset-environment "
                    "{0}' (or DefaultEnvironment in /etc/systemd), or env of the profile".format(name, environ[name])
                )
            else:
                different.append("{0} is {1}, not planned: left from before".format(name, _shown(environ[name])))
    cmdline = process.get("cmdline")
    argv = mask_argv(plan["argv"])
    if not cmdline:
        unknown.append("the command line of pid {0} can't be read".format(process.get("pid")))
    elif not _same_command(cmdline, argv):
        different.append("command line: " + _argv_difference(cmdline, argv))
    allowed = process.get("cpus_allowed")
    wanted_cpus = set(cpulist.parse(plan.get("cpus") or ""))
    if wanted_cpus:
        if allowed is None:
            unknown.append("the CPUs of pid {0} can't be read".format(process.get("pid")))
        elif not set(allowed) <= wanted_cpus:
            extra = sorted(set(allowed) - wanted_cpus)
            different.append("may run on CPUs {0} outside the planned {1}".format(cpulist.format(extra), plan["cpus"]))
    if not memory_policy_reason(plan):
        # systemd sets it before the program starts, so a process of this plan has it whatever the engine does later.
        away = numa.outside(process.get("memory_policy") or [], plan["memory_nodes"])
        if away:
            nodes = cpulist.format(plan["memory_nodes"])
            different.append("its memory policy is {0}, planned bind:{1}".format(", ".join(away), nodes))
    return different, unknown


def stray_variables(environ, planned):
    """Names of variables of a running engine that change what it does and that nobody planned."""
    return sorted(name for name in environ if name not in planned and _ENGINE_VARIABLE.match(name))


def _shown(value):
    return "not set" if value is None else repr(value)


def _same_command(cmdline, argv):
    # A script's own interpreter stands before it: [python, /path/script, args...].
    return cmdline == argv or cmdline[1:] == argv or cmdline[2:] == argv


def _argv_difference(cmdline, argv):
    tail = argv[1:]
    start = 0
    for offset in range(3):
        if cmdline[offset : offset + 1] == argv[:1]:
            start = offset + 1
            break
        if tail and cmdline[offset + 1 :] == tail:
            return "started by {0}, planned {1}".format(cmdline[offset], argv[0])
    seen = cmdline[start:]
    for index in range(max(len(seen), len(tail))):
        have = seen[index] if index < len(seen) else None
        want = tail[index] if index < len(tail) else None
        if have != want:
            before = tail[index - 1] + ": " if 0 < index <= len(tail) else ""
            shown = ["nothing" if word is None else repr(word) for word in (have, want)]
            return "{0}has {1}, planned {2}".format(before, *shown)
    return "started by {0}, planned {1}".format(" ".join(cmdline[:1]), argv[0])


def dropin_folders(name):
    """Every folder whose drop-ins systemd applies to a profile's unit, the one that wins last."""
    prefix, instance = UNIT_PREFIX[:-1], "@{0}".format(name)
    units = ["service"]
    # systemd also reads folders of the name cut off after each dash.
    cut = ""
    for part in prefix.split("-")[:-1]:
        cut += part + "-"
        units += [cut + ".service", cut + "@.service", cut + instance + ".service"]
    units += [prefix + "@.service", unit_name(name)]
    return ["{0}/{1}.d".format(root, unit) for root in UNIT_FOLDERS for unit in units]


def replaced_line(name, fragment, template):
    """The line for a unit file that stands in place of the template, or None."""
    if not fragment or fragment == template:
        return None
    return (
        "{0}: {1} stands in place of {2} ('systemctl edit --full' leaves such a file); remove it and run "
        "'systemctl daemon-reload' in the guest".format(name, fragment, template)
    )


def foreign_directives(text):
    """Directives in somebody else's drop-in that would override what the plan decides: ``[(name, value)]``."""
    found = []
    section = ""
    for line in text.splitlines():
        line = line.strip()
        if line.startswith("["):
            section = line
        elif section == "[Service]" and "=" in line and line[0] not in "#;":
            name, value = line.split("=", 1)
            if name.strip() in _OWNED_DIRECTIVES:
                found.append((name.strip(), value.strip()))
    return found


def foreign_message(profile, path, directives):
    """The line for a drop-in that overrides the plan."""
    shown = (
        ", ".join("{0}={1}".format(name, value) for name, value in directives if value)
        or directives[0][0] + "= (reset)"
    )
    return "{0}: {1} sets {2} over the planned unit; remove that file, or put the setting into the profile".format(
        profile, path, shown
    )


def decide(plan, unit, process, want_running):
    """What to do with a unit: ``("keep"|"start"|"restart"|"stop"|"none", reasons, unknown)``.

    ``unit`` is ``{active, sub, main_pid, ...}`` or None where systemd doesn't know it. A changed file alone restarts
    nothing: only what the running process shows does.
    """
    active = (unit or {}).get("active", "inactive")
    if not want_running:
        if active in ("active", "activating", "reloading", "deactivating"):
            return "stop", ["it is running and is not wanted"], []
        return "none", [], []
    if active in ("active", "reloading") and process is not None:
        different, unknown = differences(plan, process)
        if different:
            return "restart", different, unknown
        return "keep", [], unknown
    if active == "activating" and (unit or {}).get("sub") != "auto-restart":
        return "keep", [], ["it was being started when it was looked at"]
    if active == "activating":
        return "restart", ["it ended and waits for its automatic restart"], []
    if active == "failed":
        return "start", ["it has failed: " + readiness.failed_text(unit or {})], []
    return "start", ["it is not running"], []


def leftovers(profiles, look, needed):
    """Servers of benchmark profiles that still run, and what to do with them.

    A launch outlives its controller, so a server beside a running benchmark unit is left to it, unless production has
    to be started on its GPUs: then the benchmark was killed, and gives way.

    Args:
        profiles: ``sglang_server_profiles``.
        look: what serving_look saw.
        needed: GPUs, as the guest counts, of the production profiles that have to be started.

    Returns:
        ``(profiles to stop, benchmark units to stop, lines)``.
    """
    units, processes = look.get("units") or {}, look.get("processes") or {}
    running = sorted(
        name
        for name, row in profiles.items()
        if not row.get("serve")
        and (units.get(name) or {}).get("active") in ("active", "activating", "reloading", "deactivating")
    )
    benchmarks = list(look.get("benchmarks") or [])
    if not benchmarks:
        return running, [], ["{0}: a benchmark left its server running".format(name) for name in running]
    in_the_way = [name for name in running if _visible(processes.get(name)) & set(needed)]
    if in_the_way:
        line = "a killed benchmark ({0}) holds GPUs of production".format(", ".join(benchmarks))
        return running, benchmarks, [line]
    return [], [], ["a benchmark runs ({0}); its servers are left alone".format(", ".join(benchmarks))]


def _visible(process):
    text = ((process or {}).get("environ") or {}).get("CUDA_VISIBLE_DEVICES") or ""
    return {int(part) for part in text.split(",") if part.strip().isdigit()}


# ---- device and completion gates -------------------------------------------------------------------------------

ENODEV_NAMES = ("ENXIO", "ENODEV")


def judge_open(path, seen, simulated):
    """Whether an open of a device node by the service user is right.

    Args:
        path: the node.
        seen: ``{"kind": "char|file|missing|...", "error": None or the errno's name}``.
        simulated: the inventory declares the simulated driver: none answers, permission is all there is to test.

    Returns:
        ``(status, text)``.
    """
    kind = seen.get("kind")
    error = seen.get("error")
    if kind == "missing":
        return "fail", "{0} is not there; add it to the guest's configuration (run recover)".format(path)
    if kind == "file":
        return (
            "fail",
            "{0} is an empty regular file, not a device: its source was missing when the guest started".format(path),
        )
    if kind != "char":
        return "fail", "{0} is a {1}, expected a character device".format(path, kind)
    if error is None:
        return "pass", "{0} opens".format(path)
    if error == "EPERM":
        return "fail", "{0}: EPERM, the guest's device rules do not allow it (run recover)".format(path)
    if error == "EACCES":
        return "fail", "{0}: EACCES, its owner and mode keep the service user out".format(path)
    if error in ENODEV_NAMES:
        if simulated:
            return "pass", "{0}: permitted, no driver behind it (simulated)".format(path)
        return "fail", "{0}: {1}, permitted but no driver answers; load the driver on the host".format(path, error)
    return "fail", "{0}: {1}".format(path, error)


def verdict(rows, allow_unknown=()):
    """Lines for gates that are not passed, worst first; an empty list means go."""
    lines = []
    for status in ("fail", "unknown"):
        for row in rows:
            if row.get("status") == status and not (status == "unknown" and row.get("gate") in allow_unknown):
                lines.append("{0} {1} {2}: {3}".format(status, row.get("gate"), row.get("subject"), row.get("message")))
    return lines


def gate_subjects(profiles, look, only=None):
    """Which profiles the gates are about: those named, else what serves and whatever else of ours is on a GPU."""
    if only:
        missing = sorted(set(only) - set(profiles))
        if missing:
            raise ServingError(
                "preflight_profiles names {0}, sglang_server_profiles has {1}".format(
                    ", ".join(missing), ", ".join(sorted(profiles)) or "none"
                )
            )
        return list(only)
    # nvidia-smi may list none of them.
    rows = [*(look.get("processes") or []), *(look.get("engines") or [])]
    running = {process.get("profile") for process in rows}
    return [name for name in profiles if profiles[name].get("serve") or name in running]


def device_paths(names, plan):
    """The nodes that CUDA opens for these profiles: the control nodes, and each planned GPU's node by its minor."""
    minors = set()
    for name in names:
        minors.update((plan.get("profiles") or {}).get(name, {}).get("minors") or [])
    return ["/dev/nvidiactl", "/dev/nvidia-uvm"] + ["/dev/nvidia{0}".format(n) for n in sorted(minors - {None})]


def draft_path(profile, root):
    """A profile's draft model in the guest, which it gives as a path or as the name of a model beside its target."""
    draft = profile.get("draft_model")
    return "{0}/{1}".format(root.rstrip("/"), draft) if draft and "/" not in draft else draft


def model_paths(names, profiles, root, marker=None):
    """The model folders that these profiles need in the guest: name to ``{path, marker}``."""
    wanted = {}
    for name in names:
        model = profiles[name]["model"]
        wanted[model] = {"path": "{0}/{1}".format(root.rstrip("/"), model), "marker": marker}
        draft = draft_path(profiles[name], root)
        if draft and draft.startswith(root.rstrip("/") + "/"):
            wanted[draft[len(root.rstrip("/")) + 1 :]] = {"path": draft, "marker": marker}
    return wanted


def refused_row(name, reason):
    """The placement gate's row of a profile that has no place."""
    return {
        "gate": "placement",
        "subject": name,
        "profile": name,
        "status": "fail",
        "seen": None,
        "expected": None,
        "message": reason,
    }


def smoke_cases(profiles, names, settings):
    """The smoke requests.

    Args:
        profiles: ``sglang_server_profiles``.
        names: the profiles to ask.
        settings: ``kind`` (``none``, ``short`` or ``full``), ``shapes`` (profile to a list of ``{prompt_tokens,
            max_tokens}`` that its workload will send, ``at_least`` to ``at_once`` of them together),
            ``default_shape``, ``model_root``, ``dialects``, ``engine`` and ``engines`` (as in the inventory),
            ``timeout_s``, ``api_key``.

    Returns:
        A list of ``{profile, url, model, tokenizer, label, prompt_tokens, max_tokens, expect, ...}``: a short one each,
        and with ``full`` one a shape. ``expect`` is what the server has to say of itself.
    """
    kind = settings.get("kind") or "full"
    if kind not in ("none", "short", "full"):
        raise ServingError("preflight_smoke is {0!r}, expected none, short or full".format(kind))
    if kind == "none":
        return []
    known = dict(settings.get("engines") or {})
    known.setdefault(engines.DEFAULT, settings.get("engine") or {})
    cases = []
    for name in names:
        profile = profiles[name]
        try:
            overrides = dialects.for_profile(profile, settings.get("dialects"), known[engines.DEFAULT], known)
            method = dialects.resolve(profile["method"], profile.get("budget"), overrides)
        except dialects.DialectError as error:
            raise ServingError("profile {0}: {1}".format(name, error)) from None
        engine = known[profile.get("engine") or engines.DEFAULT]
        version, upstream = engineflags.engine_release(engine)
        shapes = (settings.get("shapes") or {}).get(name) or []
        needs = {
            "concurrency": max([shape.get("at_once") or 0 for shape in shapes], default=0) or None,
            "least": min([shape.get("at_least") or shape.get("at_once") or 1 for shape in shapes], default=None),
            "max_tokens": max([shape["max_tokens"] for shape in shapes], default=None),
        }
        base = {
            "profile": name,
            "url": "http://127.0.0.1:{0}".format(profile["port"]),
            "model": str(profile.get("served_model_name") or profile["model"]),
            "tokenizer": "{0}/{1}".format(settings["model_root"].rstrip("/"), profile["model"]),
            "context_length": profile.get("context_length"),
            "tp": profile.get("tp"),
            "speculative": method["draft_tokens"] is None or method["draft_tokens"] > 0,
            "draft_tokens": method["draft_tokens"],
            "block_size": method["block_size"],
            "reserved_tokens": method["reserved_tokens"],
            "timeout_s": settings.get("timeout_s") or 600,
            "api_key": settings.get("api_key"),
            "expect": serverinfo.expected(
                name,
                dict(profile, draft_model=draft_path(profile, settings["model_root"])),
                method,
                engine,
                settings["model_root"],
                needs,
                version if upstream else None,
            ),
        }
        cases.append(dict(base, label="short", prompt_tokens=None, max_tokens=8))
        if kind == "full":
            for shape in shapes or [settings["default_shape"]]:
                sent = {key: value for key, value in shape.items() if key not in ("at_least", "at_once")}
                cases.append(dict(base, label="full shape", **sent))
    return cases
