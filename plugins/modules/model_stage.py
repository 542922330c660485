#!/usr/bin/python
"""Brings models into RAM, verified, and says cheaply whether they are there."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_stage
short_description: Stage model folders on a tmpfs, verified
author: specrig developers
description:
  - Copies each model from its source to the target in parallel streams, hashing on the way. A file appears under its
    name only when it is whole and its sha256 is right; the marker comes last.
  - A model is unchanged when its marker, and size and time of every file on both sides, agree; that is a matter of
    milliseconds. Files without a marker are read again and kept if their sums are right.
  - Before anything is copied the source is checked for what downloads get wrong, namely Git LFS pointers, cut files,
    safetensors headers that do not account for every byte, and an index whose weight map names what is not there.
options:
  models:
    description:
      - Name to C({source, manifest}). The manifest is sha256sum's output, by default MANIFEST.sha256 in the source.
    type: dict
    required: true
  target:
    description: The folder, usually on a tmpfs, that gets one folder per model.
    type: path
    required: true
  streams:
    description: How many files are copied at a time.
    type: int
    default: 4
  copy:
    description: V(false) only says whether the models are there.
    type: bool
    default: true
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
"""

EXAMPLES = r"""
- name: Bring the models into RAM
  specrig.host.model_stage:
    models:
      Qwen3.6-27B: {source: /srv/models/Qwen3.6-27B}
    target: /srv/specrig/ram
"""

RETURN = r"""
complete:
  description: Whether every model is staged and vouched for, before this task changed anything.
  returned: always
  type: bool
models:
  description: Per model its files, bytes, and what was kept, verified, copied and dropped.
  returned: always
  type: dict
"""

import concurrent.futures
import contextlib
import fcntl
import hashlib
import json
import os
import time

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import modelfiles
from ..module_utils.modelfiles import ModelError

PIECE_BYTES = 4 * 1024 * 1024


def read_text(path):
    with open(path, encoding="utf-8") as handle:
        return handle.read()


def look(folder):
    """{relative path: {"size", "mtime_ns"}} of a folder's files; ours, hidden folders and temporary files left out."""
    files = {}
    for base, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            if name.startswith("."):
                continue
            path = os.path.join(base, name)
            about = os.stat(path)
            files[os.path.relpath(path, folder)] = {"size": about.st_size, "mtime_ns": about.st_mtime_ns}
    return files


def load_manifest(source, configured):
    path = os.path.join(source, configured or modelfiles.MANIFEST_NAME)
    try:
        return os.path.basename(path), modelfiles.parse_manifest(read_text(path))
    except FileNotFoundError:
        if configured:
            raise ModelError("the manifest %s is not there; make it with sha256sum in its folder" % path) from None
        return None, {}


def check_source(source, files):
    """Raises ModelError unless every weights file is whole and the index agrees with them."""
    tensors = {}
    for path in sorted(files):
        size = files[path]["size"]
        full = os.path.join(source, path)
        with open(full, "rb") as handle:
            start = handle.read(64)
            if start.startswith(modelfiles.LFS_START):
                modelfiles.header_length(full, start, size)
            if not path.endswith(".safetensors"):
                continue
            length = modelfiles.header_length(full, start, size)
            handle.seek(8)
            tensors[path] = modelfiles.parse_header(full, handle.read(length), size)
    if modelfiles.INDEX_NAME in files:
        modelfiles.check_index(read_text(os.path.join(source, modelfiles.INDEX_NAME)), tensors)


def digest(path):
    sha = hashlib.sha256()
    with open(path, "rb", buffering=0) as handle:
        view = memoryview(bytearray(PIECE_BYTES))
        while True:
            count = handle.readinto(view)
            if not count:
                return sha.hexdigest()
            sha.update(view[:count])


def copy_file(source, target, path, expected):
    """Copies one file under a temporary name, compares its sum, renames; returns the sum."""
    final = os.path.join(target, path)
    folder, name = os.path.split(final)
    os.makedirs(folder, exist_ok=True)
    temporary = os.path.join(folder, modelfiles.TEMPORARY_PREFIX + name)
    sha = hashlib.sha256()
    try:
        with (
            open(os.path.join(source, path), "rb", buffering=0) as reader,
            open(temporary, "wb", buffering=0) as writer,
        ):
            view = memoryview(bytearray(PIECE_BYTES))
            while True:
                count = reader.readinto(view)
                if not count:
                    break
                sha.update(view[:count])
                written = 0
                while written < count:
                    written += writer.write(view[written:count])
            os.fchmod(writer.fileno(), 0o644)
        found = sha.hexdigest()
        if expected and found != expected:
            raise ModelError(  # noqa: TRY301 (the temporary file has to go)
                "%s has sha256 %s, the manifest says %s: its content is wrong; get that file again"
                % (os.path.join(source, path), found, expected)
            )
        os.rename(temporary, final)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return found


def temporaries(target):
    """What a staging that was killed, or one that goes on right now, has not finished."""
    for base, _folders, names in os.walk(target):
        for name in names:
            path = os.path.join(base, name)
            if name.startswith(modelfiles.TEMPORARY_PREFIX) and os.path.isfile(path):
                yield path


def remove_temporaries(target):
    for path in list(temporaries(target)):
        os.unlink(path)


def read_marker(target):
    try:
        marker = json.loads(read_text(os.path.join(target, modelfiles.MARKER_NAME)))
        if marker.get("schema") == modelfiles.MARKER_SCHEMA and isinstance(marker.get("files"), dict):
            return marker
    except (OSError, ValueError, AttributeError):
        pass
    return None


def write_marker(target, marker):
    path = os.path.join(target, modelfiles.MARKER_NAME)
    temporary = os.path.join(target, modelfiles.TEMPORARY_PREFIX + "marker")
    with open(temporary, "w", encoding="utf-8") as handle:
        json.dump(marker, handle, indent=1, sort_keys=True)
        handle.write("\n")
    os.chmod(temporary, 0o644)
    os.rename(temporary, path)


def survey(name, about, target_root):
    """What is there of one model and what is to be done; touches nothing."""
    source = about.get("source")
    if not source:
        raise ModelError(
            "model %s has no source; set model_store_models.%s.source to its folder on the host" % (name, name)
        )
    target = os.path.join(target_root, name)
    marker = read_marker(target)
    have = look(target)
    if not os.path.isdir(source):
        whole = marker and all(
            path in have and have[path]["size"] == row["size"] and have[path]["mtime_ns"] == row["mtime_ns"]
            for path, row in marker["files"].items()
        )
        if whole:
            keep = {"keep": sorted(marker["files"]), "verify": [], "copy": [], "drop": []}
            return {
                "source": source,
                "target": target,
                "plan": keep,
                "files": have,
                "manifest": {},
                "marker": marker,
                "lost": True,
            }
        raise ModelError(
            "the source %s of model %s is not there; mount or download it, or correct model_store_models"
            % (source, name)
        )
    manifest_name, manifest = load_manifest(source, about.get("manifest"))
    files = look(source)
    files = {path: row for path, row in files.items() if path != manifest_name}
    missing = sorted(set(manifest) - set(files))
    if missing:
        raise ModelError("%s lacks %s, which its manifest names; get it again" % (source, missing[0]))
    if not files:
        raise ModelError("the source %s of model %s holds no files; download the model there" % (source, name))
    steps = modelfiles.plan(files, have, marker["files"] if marker else None, manifest)
    return {
        "source": source,
        "target": target,
        "plan": steps,
        "files": files,
        "manifest": manifest,
        "marker": marker,
        "lost": False,
    }


def is_complete(state):
    steps = state["plan"]
    return bool(state["marker"]) and not (steps["verify"] or steps["copy"] or steps["drop"])


def is_verified(state):
    """Whether a manifest that may have come later names every file; their sums were compared in the plan."""
    return bool(state["manifest"]) and set(state["manifest"]) >= set(state["files"])


def check_space(state):
    needed = sum(state["files"][path]["size"] for path in state["plan"]["copy"])
    place = state["target"]
    while not os.path.isdir(place):
        place = os.path.dirname(place)
    about = os.statvfs(place)
    free = about.f_bavail * about.f_frsize + sum(os.path.getsize(path) for path in temporaries(state["target"]))
    if needed > free:
        raise ModelError(
            "%s has %.2f GB free and staging %s needs %.2f GB; raise model_store_size or remove another model"
            % (place, free / 1e9, os.path.basename(state["target"]), needed / 1e9)
        )


@contextlib.contextmanager
def alone(target):
    """Keep other stagings of a model out: one of a run that was killed goes on in the background and is waited for."""
    os.makedirs(target, mode=0o755, exist_ok=True)
    with open(os.path.join(target, ".specrig-lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remove_temporaries(target)
        yield


def stage(name, state, streams):
    """Does what the survey says; returns the new marker."""
    source, target, steps, manifest = state["source"], state["target"], state["plan"], state["manifest"]
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(target, modelfiles.MARKER_NAME))
    for path in steps["drop"]:
        os.unlink(os.path.join(target, path))
    sums = {path: state["marker"]["files"][path]["sha256"] for path in steps["keep"]}

    def verify(path):
        found = digest(os.path.join(target, path))
        if found == manifest[path]:
            return path, found, False
        return path, copy_file(source, target, path, manifest[path]), True

    def copy(path):
        return path, copy_file(source, target, path, manifest.get(path)), True

    largest = lambda path: -state["files"][path]["size"]  # noqa: E731
    copied = []
    with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, streams)) as pool:
        jobs = [pool.submit(verify, path) for path in sorted(steps["verify"], key=largest)]
        jobs += [pool.submit(copy, path) for path in sorted(steps["copy"], key=largest)]
        try:
            for job in concurrent.futures.as_completed(jobs):
                path, found, was_copied = job.result()
                sums[path] = found
                if was_copied:
                    copied.append(path)
        except BaseException:
            for job in jobs:
                job.cancel()
            raise
    now = look(target)
    rows = {
        path: {
            "size": now[path]["size"],
            "mtime_ns": now[path]["mtime_ns"],
            "source_mtime_ns": state["files"][path]["mtime_ns"],
            "sha256": sums[path],
        }
        for path in state["files"]
    }
    marker = {
        "schema": modelfiles.MARKER_SCHEMA,
        "model": name,
        "source": source,
        "verified": "manifest" if set(manifest) >= set(rows) else "partly" if manifest else "unknown",
        "staged_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "files": rows,
    }
    write_marker(target, marker)
    return marker, sorted(copied)


def gate(name, status, state, message):
    return {
        "gate": "model",
        "subject": name,
        "status": status,
        "seen": {"files": len(state["files"]), "target": state["target"]},
        "expected": {"sha256": "manifest" if state["manifest"] else "no manifest"},
        "message": message,
    }


def main():
    module = AnsibleModule(
        argument_spec={
            "models": {"type": "dict", "required": True},
            "target": {"type": "path", "required": True},
            "streams": {"type": "int", "default": 4},
            "copy": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    said = {"found": [], "changed": [], "gates": [], "notes": []}
    report, before, after = {}, [], []
    complete, changed = True, False
    only_look = module.check_mode or not module.params["copy"]
    try:
        for name in sorted(module.params["models"]):
            state = survey(name, module.params["models"][name] or {}, module.params["target"])
            steps, done = state["plan"], is_complete(state)
            total = sum(row["size"] for row in state["files"].values())
            report[name] = {"target": state["target"], "files": len(state["files"]), "bytes": total, "complete": done}
            report[name].update(steps)
            if state["lost"]:
                said["notes"].append("model %s is in RAM; its source %s is not there now" % (name, state["source"]))
            if done:
                verified = "manifest" if is_verified(state) else state["marker"].get("verified")
                before.append("%s: %d files, %d bytes" % (name, len(state["files"]), total))
                after.append(before[-1])
                status = "pass" if verified == "manifest" else "unknown"
                message = "staged, sha256 %s" % (
                    "as in the manifest" if status == "pass" else "compared with nothing: no manifest names every file"
                )
                said["gates"].append(gate(name, status, state, message))
                continue
            complete = False
            gone = len(steps["copy"]) == len(state["files"])
            if not only_look or module.check_mode:
                said["found"].append(
                    "model %s %s"
                    % (
                        name,
                        "is not in RAM"
                        if gone
                        else "is incomplete in RAM: %d of %d files to copy" % (len(steps["copy"]), len(state["files"])),
                    )
                )
            before.append("%s: %s" % (name, "absent" if gone else "incomplete"))
            after.append("%s: %d files, %d bytes" % (name, len(state["files"]), total))
            changed = True
            check_space(state)
            if only_look:
                check_source(state["source"], state["files"])
                if module.check_mode:
                    said["changed"].append("would stage model %s, %.2f GB" % (name, total / 1e9))
                continue
            started = time.monotonic()
            check_source(state["source"], state["files"])
            with alone(state["target"]):
                # Who was waited for may have done it all.
                state = survey(name, module.params["models"][name] or {}, module.params["target"])
                if is_complete(state):
                    marker, copied = state["marker"], []
                else:
                    check_space(state)
                    marker, copied = stage(name, state, module.params["streams"])
            seconds = time.monotonic() - started
            report[name].update(complete=True, copied=copied, seconds=round(seconds, 2))
            amount = sum(state["files"][path]["size"] for path in copied)
            said["changed"].append(
                "staged model %s: %d files, %.2f GB copied in %.1f s" % (name, len(copied), amount / 1e9, seconds)
            )
            status = "pass" if marker["verified"] == "manifest" else "unknown"
            message = "staged, sha256 %s" % (
                "as in the manifest" if status == "pass" else "compared with nothing: no manifest names every file"
            )
            said["gates"].append(gate(name, status, state, message))
    except ModelError as problem:
        module.fail_json(msg=str(problem), specrig=said, complete=False, models=report)
    except OSError as problem:
        module.fail_json(
            msg="staging stopped: %s: %s; free what it lacks and run again, whole files are kept"
            % (problem.filename or module.params["target"], problem.strerror or problem),
            specrig=said,
            complete=False,
            models=report,
        )
    changed = changed and (module.check_mode or not only_look)
    diff = {"before": "\n".join(before) + "\n", "after": "\n".join(after) + "\n"} if changed else {}
    module.exit_json(changed=changed, complete=complete, models=report, specrig=said, diff=diff)


if __name__ == "__main__":
    main()
