#!/usr/bin/python
"""Brings models into RAM, verified, and says cheaply whether they are there."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_stage
short_description: Stage models on a tmpfs, proven
author: specrig developers
description:
  - Copies the files of each model from its source to the target with several threads, hashing on the way. A file
    appears under its name only when it is whole and its sha256 is right; the marker comes last.
  - A model is unchanged when its marker is of this boot, and size, times and inode of every file agree; that is a
    matter of milliseconds. A staging that was killed goes on from the record of what was proven; what nothing vouches
    for is read again where its sum is known, and copied where it is not.
  - Sums come from the source's manifest. Those of the first copy are kept in O(state_dir), and later stagings are
    compared with them where the source has none of its own.
  - Before anything is copied the source is checked for what downloads get wrong, namely Git LFS pointers, cut files,
    safetensors headers that do not account for every byte, an index whose weight map names what is not there, and
    weights that nothing names.
  - One staging of a model works at a time. Another one waits, stages what is left to do, and says for whom it waited.
options:
  models:
    description:
      - Name to C({source, manifest, revision}). The manifest is sha256sum's output, by default MANIFEST.sha256 in the
        source.
    type: dict
    required: true
  target:
    description: The folder, usually on a tmpfs, that gets one folder per model.
    type: path
    required: true
  streams:
    description:
      - How many threads copy and hash, for all models together; V(0) is one per CPU, at least 4 and at most 16. Where
        several stagings go on at once they share it.
    type: int
    default: 0
  copy:
    description: V(false) only says whether the models are there.
    type: bool
    default: true
  state_dir:
    description: Where the manifest of each model is kept, on a disk.
    type: path
    default: /var/lib/specrig/models
  progress_dir:
    description: Where C(NAME.json) tells how far the staging of a model is.
    type: path
    default: /run/specrig/staging
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
  description:
    - Per model its C(target), C(files) and C(bytes), what was to C(keep), C(verify), C(copy) and C(drop), and
      C(foreign) files in its folder; after a staging also C(copied), C(seconds), C(rate_bytes_s), the C(manifest) that
      is kept and C(verified), namely against what.
  returned: always
  type: dict
"""

import contextlib
import json
import os
import stat
import time

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import modelfiles, modelsource, stagecopy
from ..module_utils.modelfiles import ModelError


class Model:
    """One model: what its source holds, what of it is in RAM, what is to be done.  Looking at it touches nothing."""

    def __init__(self, name, about, parameters):
        self.name, self.about = name, about
        modelfiles.check_relative(name)
        self.source = modelsource.source_of(name, about)
        self.target = os.path.join(parameters["target"], name)
        self.kept_path = os.path.join(parameters["state_dir"], name.replace("/", "--") + ".json")
        self.root = os.path.normpath(parameters["target"])
        self.boot = stagecopy.boot_id()
        self.look()

    def check_owner(self):
        """Raises ModelError where anybody may make a folder, as in /dev/shm, and somebody made ours."""
        for place in (self.root, self.target):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                owner, others = os.lstat(place).st_uid, os.stat(os.path.dirname(place)).st_mode & stat.S_IWOTH
                if others and owner not in (0, os.geteuid()):
                    raise ModelError(
                        "%s belongs to user %d, who could change the models in it; expected root: remove it and run "
                        "again" % (place, owner)
                    )

    def look(self):
        """Find out, again, what is there."""
        self.check_owner()
        self.marker, current = stagecopy.read_marker(self.target, self.boot)
        self.proofs = stagecopy.Proofs(self.target, self.boot)
        self.have = stagecopy.look(self.target)
        self.kept, self.manifest, self.sums, self.lost = self._read_kept(), {}, {}, False
        rows = self.marker["files"] if self.marker else {}
        whole = current and all(modelfiles.as_vouched(row, self.have.get(path)) for path, row in rows.items())
        proven = {path: {"size": row["size"], "version": row["stamp"]} for path, row in rows.items()} if whole else {}
        try:
            if whole and self.source.remote:
                # One look at what it should be, instead of one at each file.
                self.manifest = self.source.manifest(patient=False)
                same = self.manifest == {path: row["sha256"] for path, row in rows.items()}
                self.files = proven if same else self.source.list()
            else:
                self.files = self.source.list()
                self.manifest = self.source.manifest()
        except modelsource.SourceGone:
            if not whole:
                raise
            self.files, self.manifest, self.lost = proven, {}, True
        else:
            self.sums = modelfiles.expected(self.source.place, self.kept_path, self.files, self.manifest, self.kept)
        vouched = dict(self.proofs.files, **(rows if current else {}))
        self.steps = modelfiles.plan(self.files, self.have, vouched, self.sums)
        known = set(rows) | set(self.proofs.files) | set(self.kept["files"] if self.kept else ())
        others = sorted(set(self.have) - set(self.files))
        self.steps["drop"] = [path for path in others if path in known]
        self.steps["foreign"] = [path for path in others if path not in known]
        self.known = {path: vouched[path]["sha256"] for path in self.steps["keep"]}
        self.total = sum(row["size"] for row in self.files.values())
        work = self.steps["verify"] or self.steps["copy"] or self.steps["drop"]
        self.done = bool(current and set(rows) == set(self.files) and not work)
        for path in self.steps["foreign"]:
            if path.endswith(".safetensors"):
                raise ModelError(
                    "%s is no file of model %s and an engine would load it; remove it"
                    % (os.path.join(self.target, path), self.name)
                )

    def _read_kept(self):
        """The manifest kept of this source at this revision, or None."""
        try:
            kept = modelfiles.read_kept(self.kept_path, stagecopy.read_text(self.kept_path))
        except FileNotFoundError:
            return None
        except UnicodeDecodeError:
            raise ModelError("%s is no text; remove it and run again" % self.kept_path) from None
        same = (kept.get("source"), kept.get("revision")) == (self.source.place, self.about.get("revision"))
        return kept if same else None

    def check_source(self):
        """Raises ModelError unless every weights file is whole, is named, and the index agrees with them."""
        tensors = {}
        for path in sorted(self.files):
            size = self.files[path]["size"]
            weights = path.endswith(".safetensors")
            if not weights and size > modelfiles.POINTER_LIMIT_BYTES:
                continue
            start = self.source.read(path, 0, min(size, 64 * 1024 if weights else modelfiles.POINTER_LIMIT_BYTES))
            where = self.source.where(path)
            if weights or start.startswith(modelfiles.LFS_START):
                length = modelfiles.header_length(where, start, size)
                header = start[8 : 8 + length]
                if len(header) < length:
                    header += self.source.read(path, 8 + len(header), length - len(header))
                tensors[path] = modelfiles.parse_header(where, header, size)
        index = None
        if modelfiles.INDEX_NAME in self.files:
            size = self.files[modelfiles.INDEX_NAME]["size"]
            index = self.source.read(modelfiles.INDEX_NAME, 0, size).decode("utf-8", "replace")
            modelfiles.check_index(index, tensors)
        kept = self.kept["files"] if self.kept else {}
        modelfiles.check_extra(self.source.place, self.files, self.manifest, kept, index)

    def check_space(self):
        needed = sum(self.files[path]["size"] for path in self.steps["copy"])
        place = self.target
        while not os.path.isdir(place):
            place = os.path.dirname(place)
        about = os.statvfs(place)
        free = about.f_bavail * about.f_frsize
        free += sum(os.lstat(path).st_blocks * 512 for path in stagecopy.temporaries(self.target))
        # A tmpfs without limit has no blocks.
        if about.f_blocks and needed > free:
            raise ModelError(
                "%s has %.2f GB free and staging %s needs %.2f GB; raise model_store_size (of a guest's own memory "
                "model_store_guest_size), or remove another model" % (place, free / 1e9, self.name, needed / 1e9)
            )

    def verified(self):
        """Against what the files in RAM were compared; a manifest that came later was looked up in the marker."""
        now = modelfiles.verified(self.files, self.sums)
        return now if now == "manifest" or not self.marker else self.marker["verified"]

    def items(self, sync):
        """What the copier has to do; the record of proofs is open from here on."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.target, modelfiles.MARKER_NAME))
        for path in self.steps["drop"]:
            os.unlink(os.path.join(self.target, path))
        going_on = {
            stagecopy.temporary_of(os.path.join(self.target, path)): row.get("ino")
            for path, row in self.proofs.parts.items()
            if path in self.steps["copy"]
        }
        for path in list(stagecopy.temporaries(self.target)):
            if going_on.get(path) != os.lstat(path).st_ino:
                os.unlink(path)
        self.proofs.open()
        made_at = self.kept["made_at"] if self.kept else None
        result = []
        for path in self.steps["verify"] + self.steps["copy"]:
            wanted, against, settled = self.sums.get(path, (None, None, False))
            result.append(
                stagecopy.Item(
                    self.name,
                    self.source,
                    path,
                    self.files[path],
                    os.path.join(self.target, path),
                    sha256=wanted,
                    refuse=lambda found, path=path, wanted=wanted, against=against, settled=settled: modelfiles.refusal(
                        self.source.where(path), found, wanted, against, settled, self.kept_path, made_at
                    ),
                    proofs=self.proofs,
                    verify=path in self.steps["verify"],
                    sync=sync,
                )
            )
        return result

    def adopt(self):
        """Give files their names that were proven when a staging was killed, just before they got them."""
        # That of another one, too, which was waited for.
        self.proofs = stagecopy.Proofs(self.target, self.boot)
        for path, row in self.proofs.files.items():
            final = os.path.join(self.target, path)
            with contextlib.suppress(OSError):
                if modelfiles.as_vouched(row, stagecopy.row_of(os.lstat(stagecopy.temporary_of(final)))):
                    os.rename(stagecopy.temporary_of(final), final)

    def finish(self, items, sync):
        """Keep the manifest, then put the marker down."""
        sums = dict(self.known, **{item.path: item.found for item in items})
        now = stagecopy.look(self.target)
        moved = sorted(path for path in self.files if path not in now or now[path]["size"] != self.files[path]["size"])
        if moved:
            raise ModelError("%s went while it was staged; run again" % os.path.join(self.target, moved[0]))
        self.keep_manifest(sums)
        rows = {
            path: dict(now[path], stamp=modelfiles.stamp(self.files[path]), sha256=sums[path]) for path in self.files
        }
        self.marker = {
            "schema": modelfiles.MARKER_SCHEMA,
            "model": self.name,
            "source": self.source.place,
            "verified": modelfiles.verified(self.files, self.sums),
            "boot_id": self.boot,
            "staged_at": utc_now(),
            "files": rows,
        }
        text = json.dumps(self.marker, indent=1, sort_keys=True) + "\n"
        stagecopy.replace_text(os.path.join(self.target, modelfiles.MARKER_NAME), text, sync)
        # The marker says all that the record said.
        self.proofs.close(remove=True)

    def keep_manifest(self, sums):
        """Write the manifest that later stagings are compared with, where it says more than the one there is."""
        kept = modelfiles.kept_manifest(
            self.name, self.source.place, self.about.get("revision"), utc_now(), self.files, sums
        )
        if self.kept and self.kept["files"] == kept["files"]:
            return
        same = self.kept and {path: row["sha256"] for path, row in self.kept["files"].items()} == sums
        if same:
            kept["made_at"] = self.kept["made_at"]
        os.makedirs(os.path.dirname(self.kept_path), mode=0o755, exist_ok=True)
        stagecopy.replace_text(self.kept_path, json.dumps(kept, indent=1, sort_keys=True) + "\n", sync=True)
        self.kept = kept

    def gate(self):
        against = self.verified()
        return {
            "gate": "model",
            "subject": self.name,
            "status": "pass" if against in ("manifest", "kept") else "unknown",
            "seen": {"files": len(self.files), "target": self.target},
            "expected": {"sha256": {"manifest": "manifest", "kept": "first copy"}.get(against, "no manifest")},
            "message": {
                "manifest": "staged, sha256 as in the manifest",
                "kept": "staged, sha256 as at the first copy, %s (the source has no manifest)"
                % (self.kept["made_at"] if self.kept else "unknown"),
            }.get(against, "staged, sha256 compared with nothing: no manifest names every file"),
        }


def utc_now():
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def reason(problem, target):
    """One line for what ended a staging."""
    if isinstance(problem, OSError):
        return "staging stopped: %s: %s; see to that and run again, what is proven is kept" % (
            problem.filename or target,
            problem.strerror or problem,
        )
    return str(problem)


class Staging:
    """Stages several models with one set of threads; what it says is gathered in ``said`` and ``report``."""

    def __init__(self, parameters, said, report):
        self.parameters, self.said, self.report = parameters, said, report
        self.problems = {}

    def run(self, models):
        """Those that nobody else stages at once, then the others one by one, as others are through with them."""
        busy = self._stage(models, wait=False)
        for model in busy:
            started = time.monotonic()
            holder = busy[model]
            self._stage([model], wait=True)
            self.said["notes"].append(
                "model %s: waited %.1f s for another staging of it (process %s)"
                % (model.name, self.waited - started, holder)
            )

    def _stage(self, models, wait):
        busy, mine = {}, []
        with contextlib.ExitStack() as locks, stagecopy.Share(self.parameters["progress_dir"]) as share:
            for model in models:
                holder = locks.enter_context(stagecopy.locked(model.target, wait))
                if holder is None:
                    mine.append(model)
                else:
                    busy[model] = holder
            self.waited = time.monotonic()
            self._prove(mine, share)
        return busy

    def _prove(self, models, share):
        started, items, progress = time.monotonic(), {}, {}
        for model in models:
            try:
                # Who was waited for may have done it all, and one that was killed left proofs.
                model.adopt()
                model.look()
                if not model.done:
                    model.check_space()
                    model.sync = not stagecopy.in_ram(model.target)
                    items[model] = model.items(model.sync)
                    progress[model] = stagecopy.Progress(self.parameters["progress_dir"], model.name)
                else:
                    self._report(model, [], started)
            except (ModelError, OSError) as problem:
                self.problems[model.name] = problem
        copier = None

        def tick():
            for model in list(items):
                todo = items[model]
                if copier.failures.get(model.name):
                    continue
                if all(item.proven for item in todo):
                    del items[model]
                    self._finish(model, todo, progress[model], started)
                else:
                    kept = model.total - sum(item.size for item in todo)
                    over = sum(1 for item in todo if item.proven)
                    progress[model].tell(
                        "running",
                        kept + sum(item.hashed for item in todo),
                        bytes_total=model.total,
                        files_total=len(model.files),
                        files_done=len(model.files) - len(todo) + over,
                    )

        threads = stagecopy.threads_of(self.parameters["streams"])
        everything = [item for model in items for item in items[model]]
        copier = stagecopy.Copier(everything, threads, share=lambda: threads // share.runs(), tick=tick)
        try:
            tick()
            copier.run()
        finally:
            for model, todo in items.items():
                problem = copier.failures.get(model.name) or ModelError("the staging was ended")
                model.proofs.close()
                self.problems[model.name] = problem
                done = model.total - sum(item.size for item in todo if not item.proven)
                progress[model].tell("failed", done, reason(problem, model.target))

    def _finish(self, model, items, progress, started):
        try:
            model.finish(items, model.sync)
        except (ModelError, OSError) as problem:
            model.proofs.close()
            self.problems[model.name] = problem
            progress.tell("failed", model.total, reason(problem, model.target))
            return
        count = len(model.files)
        progress.tell("done", model.total, bytes_total=model.total, files_total=count, files_done=count)
        self._report(model, sorted(item.path for item in items if item.copied), started)

    def _report(self, model, copied, started):
        seconds = time.monotonic() - started
        amount = sum(model.files[path]["size"] for path in copied)
        self.report[model.name].update(
            complete=True,
            copied=copied,
            seconds=round(seconds, 2),
            rate_bytes_s=round(amount / seconds) if amount and seconds else None,
            manifest=model.kept_path,
            verified=model.verified(),
        )
        self.said["changed"].append(
            "staged model %s: %d files, %.2f GB copied in %.1f s" % (model.name, len(copied), amount / 1e9, seconds)
        )
        self.said["gates"].append(model.gate())


def main():
    module = AnsibleModule(
        argument_spec={
            "models": {"type": "dict", "required": True},
            "target": {"type": "path", "required": True},
            "streams": {"type": "int", "default": 0},
            "copy": {"type": "bool", "default": True},
            "state_dir": {"type": "path", "default": "/var/lib/specrig/models"},
            "progress_dir": {"type": "path", "default": "/run/specrig/staging"},
        },
        supports_check_mode=True,
    )
    said = {"found": [], "changed": [], "gates": [], "notes": []}
    report, before, after, todo = {}, [], [], []
    sources = contextlib.ExitStack()
    complete, changed = True, False
    only_look = module.check_mode or not module.params["copy"]
    try:
        for name in sorted(module.params["models"]):
            model = Model(name, module.params["models"][name] or {}, module.params)
            sources.callback(model.source.close)
            steps, files = model.steps, len(model.files)
            report[name] = {"target": model.target, "files": files, "bytes": model.total, "complete": model.done}
            report[name].update(steps, missing_bytes=sum(model.files[path]["size"] for path in steps["copy"]))
            if model.lost:
                said["notes"].append("model %s is in RAM; its source %s is not there now" % (name, model.source.place))
            said["notes"] += [
                "%s is no file of model %s; left alone" % (os.path.join(model.target, path), name)
                for path in steps["foreign"]
            ]
            after.append("%s: %d files, %d bytes" % (name, files, model.total))
            if model.done:
                before.append(after[-1])
                said["gates"].append(model.gate())
                if not (model.kept or model.lost or only_look):
                    model.keep_manifest(model.known)
                    said["changed"].append("kept the manifest of model %s again, of what is proven in RAM" % name)
                    changed = True
                continue
            complete = False
            gone = len(steps["copy"]) == files
            if not only_look or module.check_mode:
                part = "is incomplete in RAM: %d of %d files to copy" % (len(steps["copy"]), files)
                said["found"].append("model %s %s" % (name, "is not in RAM" if gone else part))
            before.append("%s: %s" % (name, "absent" if gone else "incomplete"))
            changed = True
            if module.params["copy"]:
                # A look leaves that to model_memory, which sums all models up.
                model.check_space()
            model.check_source()
            if module.check_mode:
                said["changed"].append("would stage model %s, %.2f GB" % (name, model.total / 1e9))
            todo.append(model)
        if todo and not only_look:
            staging = Staging(module.params, said, report)
            staging.run(todo)
            # Not in the order in which they happened to end.
            said["gates"].sort(key=lambda row: row["subject"])
            said["changed"].sort()
            said["notes"] += [note for model in todo for note in model.source.notes]
            if staging.problems:
                lines = [
                    reason(problem, module.params["target"]) for _name, problem in sorted(staging.problems.items())
                ]
                module.fail_json(msg="; ".join(lines), specrig=said, complete=False, models=report)
    except ModelError as problem:
        module.fail_json(msg=str(problem), specrig=said, complete=False, models=report)
    except OSError as problem:
        msg = reason(problem, module.params["target"])
        module.fail_json(msg=msg, specrig=said, complete=False, models=report)
    finally:
        sources.close()
    changed = changed and (module.check_mode or not only_look)
    diff = {"before": "\n".join(before) + "\n", "after": "\n".join(after) + "\n"} if changed else {}
    module.exit_json(changed=changed, complete=complete, models=report, specrig=said, diff=diff)


if __name__ == "__main__":
    main()
