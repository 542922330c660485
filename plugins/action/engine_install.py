# SPDX-License-Identifier: Apache-2.0
"""Bring an engine's wheels into a guest, once, and have its environment built there."""

from __future__ import annotations

import re
import shlex
import shutil
import tempfile
from pathlib import Path

from ansible.plugins.action import ActionBase

from ..module_utils import engines
from ..plugin_utils import wheelhouse

STORE = "/opt/specrig/wheels"
PIECE = 16 * 1024 * 1024


class ActionModule(ActionBase):
    """Installs what engine_plan found missing; one engine that fails does not keep the others from being installed."""

    _VALID_ARGS = frozenset(("engine", "engines", "plan", "shown"))

    def run(self, tmp=None, task_vars=None):
        """Returns ``installed``: name to id, folder and packages of what was installed."""
        result = super().run(tmp, task_vars)
        _validation, args = self.validate_argument_spec(
            argument_spec={
                "engine": {"type": "dict", "required": True},
                "engines": {"type": "dict", "default": {}},
                "plan": {"type": "dict", "required": True},
                "shown": {"type": "dict", "default": {}},
            }
        )
        table = engines.table(args["engine"], args["engines"])
        installed, changed, found, problems = {}, [], [], []
        self._hashes = wheelhouse.Hashes()
        for name, row in args["plan"].items():
            if not row["needed"]:
                continue
            if row["problem"]:
                problems.append(row["problem"])
                continue
            found.append("engine {0}: {1}".format(name, "; ".join(row["why"])))
            if self._task.check_mode:
                changed.append("would install engine {0} into {1}".format(name, row["venv"]))
                continue
            try:
                installed[name] = self._install(name, table[name], row, args["shown"], task_vars)
                changed.append(told(name, row, installed[name]))
            except engines.EngineError as error:
                problems.append("engine {0}: {1}".format(name, engines.masked(str(error))))
        self._hashes.keep()
        result.update(changed=bool(changed), installed=installed, specrig={"found": found, "changed": changed})
        if problems:
            result.update(failed=True, msg="; ".join(problems) + "; what was installed before is untouched")
        return result

    def _install(self, name, engine, row, shown, task_vars):
        install = engine["install"]
        scratch = Path(tempfile.mkdtemp(prefix="specrig-engine-"))
        try:
            files = [dict(about) for about in row.get("files") or []]
            target = shown.get(row.get("folder"))
            for about in files:
                about.update(bound=bool(target), source=str(Path(row["folder"]) / about["name"]))
            steps, secrets = [], []
            facts = None
            if not row.get("reuse"):
                facts = wheelhouse.ask_guest(self, task_vars, install, step="look")["facts"]
                if facts["problem"]:
                    raise engines.EngineError(facts["problem"])
                for step in install["steps"]:
                    steps.append(self._step(step, install, facts, files, secrets, scratch))
                self._bring(name, install, engine["kind"], files, task_vars)
            sent = [{key: about[key] for key in ("name", "size", "sha256", "bound")} for about in files]
            return self._build(name, engine, row, steps, secrets, sent, target, task_vars)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _build(self, name, engine, row, steps, secrets, sent, target, task_vars):
        install = engine["install"]
        done = wheelhouse.ask_guest(
            self,
            task_vars,
            install,
            step="install",
            name=name,
            record=engines.record(name, engine["kind"], install, row["id"]),
            steps=steps,
            environments=[wheelhouse.environment(step) for step in install["steps"]],
            secrets=secrets,
            wheels=sent,
            bound=target,
            store=STORE,
            offline=install["offline"],
            remove_wheels=install["remove_wheelhouse"],
            keep=install["keep"],
            cache_root=engines.CACHE_ROOT,
        )
        return {"id": row["id"], **{key: done[key] for key in ("real", "packages", "requested", "reused", "removed")}}

    def _step(self, step, install, facts, files, secrets, scratch):
        """One run of pip in the guest; what has to be made or brought for it is added to the files."""
        words = []
        for row in step["requirements"]:
            if wheelhouse.builds_here(row, install["offline"]):
                path = wheelhouse.build(row, step, facts, scratch)
                extras = row["extras"] or _extras(row["text"])
                words.append(self._own(path, files) + extras)
            elif row["kind"] == "file" and row["side"] == "controller":
                words.append(self._own(wheelhouse.place(row["path"]), files) + row["extras"])
            elif row["path"] and row["side"] == "guest":
                words.append(row["path"] + row["extras"])
            elif engines.has_credentials(row["text"]):
                words.append("secret:{0}".format(len(secrets)))
                secrets.append(row["text"])
            else:
                words.append(row["text"])
        return {
            "requirements": words,
            "args": (["--no-deps"] if step["no_deps"] else []) + step["pip_args"],
            "constraints": [wheelhouse.place(path).read_text(encoding="utf-8") for path in step["constraints"]],
        }

    def _own(self, path, files):
        """A file that a requirement names: it goes along with the wheelhouse's, before one of the same name."""
        about = dict(self._hashes.of(path), bound=False, source=str(path))
        same = [row for row in files if row["name"] == about["name"]]
        if same and same[0]["sha256"] == about["sha256"]:
            return "wheel:" + about["name"]
        for row in same:
            files.remove(row)
        files.append(about)
        return "wheel:" + about["name"]

    def _bring(self, name, install, kind, files, task_vars):
        """Copies what the guest lacks, going on where an earlier copy was cut off."""
        mine = [row for row in files if not row["bound"]]
        asked = [{key: row[key] for key in ("name", "size", "sha256")} for row in mine]
        facts = wheelhouse.ask_guest(self, task_vars, install, step="look", wheels=asked, store=STORE)["facts"]
        missing = [row for row in mine if row["name"] not in facts["have"]]
        self._space(install, kind, files, missing, facts)
        if not missing:
            return
        total = sum(row["size"] for row in missing)
        self._display.display(
            "engine {0}: {1} files, {2:.2f} GB go to the guest".format(name, len(missing), total / 1e9)
        )
        folders = " ".join(shlex.quote("{0}/{1}".format(STORE, row["sha256"])) for row in missing)
        self._shell("umask 022 && mkdir -p -- " + folders, "make room for the wheels")
        offsets = dict(facts["parts"])
        for _again in range(2):
            for row in missing:
                self._copy(row, offsets.get(row["name"]) or 0)
            wrong = wheelhouse.ask_guest(self, task_vars, install, step="accept", wheels=asked, store=STORE)["wrong"]
            missing, offsets = [row for row in missing if row["name"] in wrong], {}
            if not missing:
                return
        raise engines.EngineError(
            "{0} did not arrive whole in the guest (its sha256 differs), twice; is it being written on the "
            "controller?".format(missing[0]["name"])
        )

    def _space(self, install, kind, files, missing, facts):
        """Says before gigabytes are copied that they will not fit."""
        if install["space_gb"] is not None:
            need = int(install["space_gb"] * 1e9)
        else:
            need = int(sum(row["unpacked"] for row in files) * wheelhouse.FACTOR)
            if not install["offline"]:
                need = max(need, int(engines.SPACE_GB[kind] * 1e9))
        need += sum(row["size"] for row in missing)
        if facts["free_bytes"] < need:
            raise engines.EngineError(
                "the guest has {0:.1f} GB free where {1} lies, the installation needs about {2:.1f} GB; free some "
                "space, or say what it needs by install.space_gb".format(
                    facts["free_bytes"] / 1e9, install["venv"], need / 1e9
                )
            )

    def _copy(self, row, offset):
        target = "{0}/{1}/{2}.part".format(STORE, row["sha256"], row["name"])
        # Whole pieces only: what lies beyond the last one may have been cut in the middle of a write.
        offset = min(offset, row["size"]) // PIECE * PIECE
        with Path(row["source"]).open("rb") as handle:
            handle.seek(offset)
            while True:
                piece = handle.read(PIECE)
                if not piece and offset:
                    return
                feed = "iflag=fullblock" if piece else "count=0"
                # dd cuts the file at the offset first, so a piece that is sent again is written once.
                self._shell(
                    "dd of={0} bs=65536 oflag=seek_bytes seek={1} {2} status=none".format(
                        shlex.quote(target), offset, feed
                    ),
                    "write " + row["name"],
                    piece or None,
                )
                offset += len(piece)
                if len(piece) < PIECE:
                    return

    def _shell(self, command, what, data=None):
        done = self._low_level_execute_command(command, in_data=data)
        if done["rc"]:
            said = (done["stderr"] or done["stdout"] or "exit {0}".format(done["rc"])).strip().splitlines()
            raise engines.EngineError("could not {0} in the guest: {1}".format(what, said[-1]))


def _extras(text):
    match = re.match(r"^[A-Za-z0-9._-]+\s*(\[[^\]]*\])\s+@ ", text)
    return match.group(1) if match else ""


def told(name, row, done):
    """The line of the end-of-run screen."""
    packages = done["packages"]
    main = engines.main_package(packages, done["requested"])
    what = "{0} {1}".format(main, packages[main]) if main else "{0} packages".format(len(packages))
    if done["reused"]:
        return "switched engine {0} back to {1}, which {2}.d still had".format(name, what, row["venv"])
    return "installed engine {0} with {1} into {2}".format(name, what, row["venv"])
