# SPDX-License-Identifier: Apache-2.0
"""The engines of an inventory: which there are, what installs them, where their kernels are kept.  Pure."""

from __future__ import annotations

import hashlib
import json
import re

DEFAULT = "default"
ROOT = "/opt/specrig/engines"
# Where compiled kernels outlive a restart; the unit's CacheDirectory= makes a folder below it.
CACHE_ROOT = "/var/cache/specrig-kernels"
# SGLang 0.5.23 asks for 3.11 (its metadata's Requires-Python); earlier releases of 0.5 ran with 3.10.
PYTHON_MIN = {"sglang": "3.11", "sim": "3.8"}
# A CUDA build of torch with its libraries, FlashInfer and SGLang's kernels takes about this, where no wheels tell it.
SPACE_GB = {"sglang": 12.0, "sim": 0.2}

# By which variable each library is told where to keep what it compiled, below the engine's folder. Names as read in
# SGLang 0.5.23 (srt/environ.py), torch, Triton, FlashInfer (which appends .cache/flashinfer), tvm-ffi, CuTe DSL and
# transformers; SGLANG_DG_CACHE_DIR is what SGLang copies into DG_JIT_CACHE_DIR.
CACHES = {
    "XDG_CACHE_HOME": "",
    "SGLANG_CACHE_DIR": "sglang",
    "SGLANG_DG_CACHE_DIR": "deep_gemm",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "CUDA_CACHE_PATH": "nv",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TILELANG_CACHE_DIR": "tilelang",
    "TVM_FFI_CACHE_DIR": "tvm_ffi",
    "CUTE_DSL_CACHE_DIR": "cute_dsl",
    "HF_MODULES_CACHE": "hf_modules",
}

_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,31}$")
_ENGINE_KEYS = ("kind", "command", "env", "extra_args", "time_scale", "dialects", "install")
_STEP_KEYS = ("requirements", "no_deps", "constraints", "index_url", "extra_index_urls", "pip_args")
_INSTALL_KEYS = (
    *(
        "venv",
        "python",
        "python_min",
        "steps",
        "wheelhouse",
        "fill",
        "offline",
        "remove_wheelhouse",
        "space_gb",
        "keep",
    ),
    *_STEP_KEYS,
)
_ARCHIVE = re.compile(r"\.(whl|tar\.gz|tgz|zip|tar\.bz2)$", re.IGNORECASE)
_EXTRAS = re.compile(r"^(?P<path>.*?)(?P<extras>\[[A-Za-z0-9_.,\s-]*\])?$", re.DOTALL)
_CREDENTIALS = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)[^/@\s]+@")
_WHEEL = re.compile(r"^(?P<name>[^-]+)-(?P<version>[^-]+)(-\d[^-]*)?-(?P<tags>[^-]+-[^-]+-[^-]+)\.whl$")


class EngineError(ValueError):
    """One line: what was seen, what was expected, what to do."""


def left_out(name):
    """Whether a file or folder of a source tree says nothing about what would be installed from it."""
    return name in ("__pycache__", "build", "dist") or name.startswith(".") or name.endswith((".egg-info", ".pyc"))


def masked(text):
    """The text with the credentials of every URL in it replaced."""
    return _CREDENTIALS.sub(r"\g<scheme>****@", text)


def has_credentials(url):
    """Whether a URL carries a user or a password."""
    return bool(_CREDENTIALS.search(url or ""))


def table(engine, engines):
    """All engines by name, the one of profiles that name none as ``default``; each with its installation normalized.

    Raises:
        EngineError: for a name that can't be used, an unknown key, a wrong type.
    """
    rows = {DEFAULT: engine}
    for name, row in (engines or {}).items():
        if name == DEFAULT:
            raise EngineError(
                "sglang_server_engines has an engine called default, which is sglang_server_engine: rename it"
            )
        if not _NAME.match(str(name)):
            raise EngineError(
                "engine name {0!r} can't be used: expected letters, digits, '.', '_' and '-', at most 32, starting "
                "with a letter or digit; rename it in sglang_server_engines".format(name)
            )
        rows[name] = row
    found = {}
    for name, row in rows.items():
        found[name] = _engine(name, row)
    paths = {}
    for name, row in found.items():
        if row["install"]:
            other = paths.setdefault(row["install"]["venv"], name)
            if other != name and dict(found[other]["install"]) != dict(row["install"]):
                raise EngineError(
                    "engines {0} and {1} are both installed into {2}: give each its own install.venv".format(
                        where(other), where(name), row["install"]["venv"]
                    )
                )
    return found


def where(name):
    """How an engine is called in a line for the user."""
    return "sglang_server_engine" if name == DEFAULT else "sglang_server_engines.{0}".format(name)


def _engine(name, row):
    if not isinstance(row, dict):
        raise EngineError("{0} is {1!r}, expected kind, command, install, ...".format(where(name), row))
    _known(where(name), row, _ENGINE_KEYS)
    kind = row.get("kind")
    if kind not in PYTHON_MIN:
        raise EngineError("{0}.kind is {1!r}, expected sim or sglang".format(where(name), kind))
    install = _install(name, kind, row.get("install")) if row.get("install") else None
    command = row.get("command")
    if not command and install and kind == "sglang":
        command = ["{venv}/bin/python", "-m", "sglang.launch_server"]
    return {
        "kind": kind,
        "command": [str(word) for word in command or []],
        "env": dict(row.get("env") or {}),
        "extra_args": list(row.get("extra_args") or []),
        "time_scale": row.get("time_scale"),
        "dialects": dict(row.get("dialects") or {}),
        "install": install,
    }


def _known(place, row, known):
    unknown = sorted(key for key in row if key not in known and row[key] is not None)
    if unknown:
        raise EngineError("{0} has {1}, expected {2}".format(place, ", ".join(unknown), ", ".join(sorted(known))))


def _install(name, kind, given):
    place = where(name) + ".install"
    if not isinstance(given, dict):
        raise EngineError("{0} is {1!r}, expected requirements or steps, ...".format(place, given))
    _known(place, given, _INSTALL_KEYS)
    steps = given.get("steps") or []
    if bool(steps) == bool(given.get("requirements")):
        raise EngineError(
            "{0} has {1}, expected requirements, or steps that have them".format(
                place, "both requirements and steps" if steps else "neither requirements nor steps"
            )
        )
    shared = {key: given.get(key) for key in ("constraints", "index_url", "extra_index_urls", "pip_args")}
    if not steps:
        steps = [{"requirements": given["requirements"], "no_deps": given.get("no_deps")}]
    normal = []
    for number, step in enumerate(steps, 1):
        at = "{0}.steps[{1}]".format(place, number) if given.get("steps") else place
        if not isinstance(step, dict):
            raise EngineError("{0} is {1!r}, expected requirements, no_deps, ...".format(at, step))
        _known(at, step, _STEP_KEYS)
        for word in list(step.get("pip_args") or []) + list(shared["pip_args"] or []):
            if has_credentials(str(word)):
                raise EngineError(
                    "{0}.pip_args has a URL with credentials, which would be shown; put it into index_url or "
                    "extra_index_urls".format(at)
                )
        merged = dict(shared, **{key: value for key, value in step.items() if value is not None})
        texts = _texts(at, "requirements", merged.get("requirements"))
        if not texts:
            raise EngineError("{0} has no requirements, expected what pip is to install".format(at))
        normal.append(
            {
                "requirements": [requirement(text, at) for text in texts],
                "no_deps": _flag(at, "no_deps", merged.get("no_deps"), False),
                "constraints": _texts(at, "constraints", merged.get("constraints")),
                "index_url": merged.get("index_url") or None,
                "extra_index_urls": _texts(at, "extra_index_urls", merged.get("extra_index_urls")),
                "pip_args": _texts(at, "pip_args", merged.get("pip_args")),
            }
        )
    venv = given.get("venv") or "{0}/{1}".format(ROOT, name)
    if not str(venv).startswith("/") or str(venv).rstrip("/") in ("", "/opt", "/usr", "/var", "/srv"):
        raise EngineError("{0}.venv is {1!r}, expected an absolute path of its own".format(place, venv))
    wheelhouse = given.get("wheelhouse") or None
    offline = _flag(place, "offline", given.get("offline"), bool(wheelhouse))
    fill = _flag(place, "fill", given.get("fill"), False)
    if fill and not wheelhouse:
        raise EngineError("{0}.fill has no folder to fill: name one in wheelhouse".format(place))
    minimum = str(given.get("python_min") or PYTHON_MIN[kind])
    if not re.match(r"^3\.\d+$", minimum):
        raise EngineError("{0}.python_min is {1!r}, expected something like '3.11' in quotes".format(place, minimum))
    keep = given.get("keep")
    keep = 1 if keep is None else keep
    if not isinstance(keep, int) or isinstance(keep, bool) or keep < 0:
        raise EngineError("{0}.keep is {1!r}, expected a number from 0".format(place, keep))
    space = given.get("space_gb")
    if space is not None and (not isinstance(space, (int, float)) or isinstance(space, bool) or space < 0):
        raise EngineError("{0}.space_gb is {1!r}, expected gigabytes from 0".format(place, space))
    return {
        "venv": str(venv).rstrip("/"),
        "python": str(given.get("python") or "/usr/bin/python3"),
        "python_min": minimum,
        "steps": normal,
        "wheelhouse": wheelhouse,
        "fill": fill,
        "offline": offline,
        "remove_wheelhouse": _flag(place, "remove_wheelhouse", given.get("remove_wheelhouse"), False),
        "space_gb": space,
        "keep": keep,
    }


def _texts(place, key, value):
    if value is None:
        return []
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, (list, tuple)) or not all(isinstance(text, (str, int, float)) for text in value):
        raise EngineError("{0}.{1} is {2!r}, expected a list of texts".format(place, key, value))
    return [str(text) for text in value]


def _flag(place, key, value, default):
    if value is None:
        return default
    if isinstance(value, bool):
        return value
    if str(value).lower() in ("true", "yes", "1", "false", "no", "0"):
        return str(value).lower() in ("true", "yes", "1")
    raise EngineError("{0}.{1} is {2!r}, expected true or false".format(place, key, value))


def requirement(text, place="requirements"):
    """What one requirement is: ``{kind, text, path, extras, side}``.

    Kinds: ``spec`` (a name with versions), ``file`` (a wheel or source archive), ``folder``, ``git``, ``url``. ``side``
    says where a path lies, ``controller`` or ``guest``; None where there is no path.
    """
    text = text.strip()
    if not text or text.startswith("-"):
        raise EngineError(
            "{0}: {1!r} is no requirement; options of pip belong into pip_args, constraints or index_url".format(
                place, text
            )
        )
    row = {"kind": "spec", "text": text, "path": None, "extras": "", "side": None}
    target = text.split(" @ ", 1)[1].strip() if " @ " in text else text
    if target.startswith("git+"):
        match = re.match(r"^git\+file://(?P<path>/[^@#]*)", target)
        return dict(row, kind="git", path=match.group("path") if match else None)
    side = "controller"
    if target.startswith("guest:"):
        side, target = "guest", target[len("guest:") :]
    if target.startswith("file://"):
        target = target[len("file://") :]
    elif "://" in target:
        return dict(row, kind="url")
    match = _EXTRAS.match(target)
    path, extras = match.group("path"), match.group("extras") or ""
    if path.startswith(("/", "./", "../", "~")) or _ARCHIVE.search(path):
        if side == "guest" and not path.startswith("/"):
            raise EngineError("{0}: {1!r} is no absolute path in the guest".format(place, text))
        kind = "file" if _ARCHIVE.search(path) else "folder"
        return dict(row, kind=kind, path=path, extras=extras, side=side)
    if side == "guest":
        raise EngineError("{0}: {1!r} is no path in the guest, expected guest:/...".format(place, text))
    return row


def identity(install, contents):
    """A short hash of what an installation puts into the environment.

    Args:
        install: a normalized installation.
        contents: path to the hash of what lies there, for every constraints file and every path of a requirement.

    Which wheelhouse the files come from, and credentials, are no part of it; an index is, since indexes hold different
    builds of one version.
    """
    steps = []
    for step in install["steps"]:
        names = []
        for row in step["requirements"]:
            path = row["path"]
            content = contents.get(key_of(row)) if path else None
            name = row["text"] if row["kind"] in ("spec", "git", "url") else path.rsplit("/", 1)[-1] + row["extras"]
            names.append([row["kind"], masked(name), content if row["kind"] != "git" else None])
        steps.append(
            {
                "requirements": names,
                "no_deps": step["no_deps"],
                "constraints": [contents.get("controller:" + path) for path in step["constraints"]],
                "index": [masked(url) for url in [step["index_url"] or "", *step["extra_index_urls"]]],
                "pip_args": [masked(word) for word in step["pip_args"]],
            }
        )
    text = json.dumps({"python": install["python"], "steps": steps}, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:12]


def key_of(row):
    """How the content of a requirement's path is called among the contents."""
    return "{0}:{1}".format(row["side"] or "controller", row["path"])


def record(name, kind, install, engine_id):
    """What the environment says of itself, as a person would want to read it; without credentials."""
    return {
        "schema": 1,
        "engine": name,
        "kind": kind,
        "id": engine_id,
        "python": install["python"],
        "steps": [
            {
                "requirements": [masked(row["text"]) for row in step["requirements"]],
                "no_deps": step["no_deps"],
                "constraints": list(step["constraints"]),
                "pip_args": [masked(word) for word in step["pip_args"]],
            }
            for step in install["steps"]
        ],
    }


def why_not(record_id, about, wheels, wanted=None):
    """Why an installation is needed: a list of lines, empty where what is there is right.

    Args:
        record_id: the wanted id.
        about: what ``venvs.look`` saw at the path, or None.
        wheels: file name to sha256 of the wheelhouse's files, or None where there is none.
        wanted: the record that is wanted, to say what differs.
    """
    about = about or {}
    if about.get("damaged"):
        return ["it is damaged: {0}".format(about["damaged"])]
    if not about.get("record"):
        return ["it is not installed"]
    if about["record"].get("id") != record_id:
        line = "the inventory asks for other requirements than those installed"
        return [line + (" ({0})".format(_difference(about["record"], wanted)) if wanted else "")]
    used, there = about.get("wheels") or {}, wheels or {}
    replaced = sorted(name for name in used if there.get(name, used[name]) != used[name])
    return ["{0} was replaced in the wheelhouse".format(", ".join(replaced))] if replaced else []


def _difference(before, after):
    old, new = ([text for step in row.get("steps") or [] for text in step["requirements"]] for row in (before, after))
    words = ["+" + text for text in new if text not in old] + ["-" + text for text in old if text not in new]
    if not words:
        return "the same names; what lies there, or an option, changed"
    return " ".join(words[:6]) + (" and {0} more".format(len(words) - 6) if len(words) > 6 else "")


def wheels_used(files, packages):
    """Those of a wheelhouse's files (name to sha256) that installed packages (name to version) come from."""
    used = {}
    for name, value in files.items():
        match = _WHEEL.match(name)
        if match and packages.get(_normal(match.group("name"))) == match.group("version"):
            used[name] = value
    return used


def _normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def wheel_fits(name, python, machine):
    """Whether a wheel's tags fit a Python (``[3, 11]``) and a machine (``x86_64``); None where it is no wheel's name.

    Which C library a wheel asks for is left to pip.
    """
    match = _WHEEL.match(name)
    if not match:
        return None
    tags, abi, platform = match.group("tags").split("-")
    version = "{0}{1}".format(*python[:2])
    ours = False
    for tag in tags.split("."):
        stable = "abi3" in abi.split(".") and tag[:3] == "cp3" and tag[3:].isdigit() and int(tag[3:]) <= python[1]
        # A pure wheel of an older Python 3 fits: interegular's is py37-none-any.
        pure = tag[:3] == "py3" and tag[3:].isdigit() and int(tag[3:]) <= python[1]
        ours = ours or tag in ("py3", "cp" + version) or pure or stable
    return ours and any(part == "any" or part.endswith("_" + machine) for part in platform.split("."))


def main_package(packages, requested):
    """The installed distribution that an installation is about: sglang, else what pip was asked for last; or None."""
    if "sglang" in packages:
        return "sglang"
    return requested[-1] if requested else None


def cache(name, engine_id):
    """``(folders below /var/cache, environment)`` by which an engine's compiled kernels outlive a restart.

    Each version has folders of its own: what one version compiled is not offered to another.
    """
    folder = "{0}/{1}-{2}".format(CACHE_ROOT, name, engine_id)
    relative = folder[len("/var/cache/") :]
    # The driver makes no parents of its folder.
    folders = [relative, relative + "/nv"]
    return folders, {key: folder + ("/" + below if below else "") for key, below in CACHES.items()}


def resolve(engine, engines, look, package=None, installed=None):
    """The engines as the units need them.

    Args:
        engine: ``sglang_server_engine``.
        engines: ``sglang_server_engines``.
        look: what serving_look saw (``builds``: path to what ``venvs.look`` saw).
        package: the record of the package's own environment, of which the simulated engine is a part.
        installed: name to ``{id, real}`` of what was installed since the look.

    Returns:
        Name to ``{kind, command, env, extra_args, time_scale, dialects, id, missing, cache, packages, version}``;
        ``missing`` is a line where the engine is not installed, ``cache`` its folders and environment or None,
        ``version`` that of what the installation is about, as it was found installed.
    """
    found = {}
    for name, row in table(engine, engines).items():
        ready = dict(row, name=name, id=None, missing=None, cache=None, packages={}, version=None)
        install = row["install"]
        if install:
            about = (installed or {}).get(name) or _seen(look, install["venv"])
            if about:
                ready["id"] = about["id"]
                ready["packages"] = about.get("packages") or {}
                main = main_package(ready["packages"], about.get("requested") or [])
                ready["version"] = ready["packages"].get(main)
                _place(ready, install["venv"], about["real"])
            else:
                ready["missing"] = "engine {0} is not installed in {1}: run provision.yml".format(name, install["venv"])
                _place(ready, install["venv"], install["venv"])
        elif row["kind"] == "sim":
            # Another version of the package is another engine.
            ready["id"] = str((package or {}).get("package") or "none")[:12]
        else:
            text = json.dumps([row["kind"], row["command"]], sort_keys=True)
            ready["id"] = hashlib.sha256(text.encode("utf-8")).hexdigest()[:12]
        if ready["id"] and (install or row["kind"] == "sglang"):
            folders, env = cache(name, ready["id"])
            ready["cache"] = {"folders": folders, "env": env}
        found[name] = ready
    return found


def _seen(look, path):
    about = ((look or {}).get("builds") or {}).get(path) or {}
    # A damaged one may serve all the same: its next start and its readiness tell.
    if not about.get("id") or not about.get("real"):
        return None
    return {key: about.get(key) for key in ("id", "real", "packages", "requested")}


def _place(ready, venv, real):
    """Names the folder itself in place of the link to it, so that a later switch does not reach a running server."""

    def put(word):
        word = str(word).replace("{venv}", real)
        return real + word[len(venv) :] if word.startswith(venv + "/") else word

    ready["command"] = [put(word) for word in ready["command"]]
    ready["extra_args"] = [put(word) for word in ready["extra_args"]]
    ready["env"] = {key: put(value) for key, value in ready["env"].items()}


def bench(profiles, names, engine, engines):
    """``{kind, time_scale}`` of the engines that run these profiles.

    One that is simulated makes the whole run simulated, so that no figure of it is taken for a measured one.
    """
    used = [(engines or {}).get(profiles[name].get("engine")) or engine for name in names if name in profiles]
    used = used or [engine]
    simulated = [row for row in used if row.get("kind") == "sim"]
    if simulated:
        scales = sorted({row.get("time_scale") for row in simulated if row.get("time_scale") is not None})
        return {"kind": "simulated", "time_scale": scales[-1] if scales else None}
    return {"kind": used[0].get("kind"), "time_scale": None}


def of(name, profile, engines):
    """The engine of one profile.

    Raises:
        EngineError: for an unknown engine or one that is not installed.
    """
    wanted = profile.get("engine") or DEFAULT
    if wanted not in engines:
        named = ", ".join(sorted(key for key in engines if key != DEFAULT)) or "none"
        raise EngineError(
            "profile {0}: engine {1!r} is not in sglang_server_engines; there are: {2}".format(name, wanted, named)
        )
    if engines[wanted].get("missing"):
        raise EngineError("profile {0}: {1}".format(name, engines[wanted]["missing"]))
    return engines[wanted]
