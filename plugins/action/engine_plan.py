# SPDX-License-Identifier: Apache-2.0
"""Say which engines have to be installed, and have ready on the controller what that needs."""

from __future__ import annotations

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

from ..module_utils import engines
from ..plugin_utils import wheelhouse


class ActionModule(ActionBase):
    """Compares the inventory with what the guest has; asks the guest further, and fills wheelhouses, only if needed."""

    _VALID_ARGS = frozenset(("engine", "engines", "look"))

    def run(self, tmp=None, task_vars=None):
        """Returns ``engines``, a row for each that has an installation, ``needs`` and ``folders``."""
        result = super().run(tmp, task_vars)
        _validation, args = self.validate_argument_spec(
            argument_spec={
                "engine": {"type": "dict", "required": True},
                "engines": {"type": "dict", "default": {}},
                "look": {"type": "dict", "required": True},
            }
        )
        try:
            table = engines.table(args["engine"], args["engines"])
        except engines.EngineError as error:
            raise AnsibleActionFail(str(error)) from error
        hashes = wheelhouse.Hashes()
        rows, seen = {}, set()
        for name, engine in table.items():
            install = engine["install"]
            if not install or install["venv"] in seen:
                continue
            seen.add(install["venv"])
            try:
                about = (args["look"].get("builds") or {}).get(install["venv"])
                rows[name] = self._row(name, engine, about, hashes, task_vars)
            except engines.EngineError as error:
                rows[name] = {"needed": True, "problem": "engine {0}: {1}".format(name, error), "why": []}
        hashes.keep()
        needed = [row for row in rows.values() if row["needed"] and not row["problem"]]
        folders = {row["folder"]: row["files"] for row in needed if row.get("folder")}
        result.update(
            changed=False,
            engines=rows,
            needed=any(row["needed"] for row in rows.values()),
            needs=sorted({word for row in needed for word in row.get("needs") or []}),
            folders=[{"source": path, "files": files} for path, files in sorted(folders.items())],
        )
        return result

    def _row(self, name, engine, about, hashes, task_vars):
        install = engine["install"]
        there = wheelhouse.contents(install, hashes)
        in_guest = [
            row["path"]
            for step in install["steps"]
            for row in step["requirements"]
            if row["side"] == "guest" and row["path"]
        ]
        if in_guest:
            found = wheelhouse.ask_guest(self, task_vars, install, step="look", paths=in_guest)["facts"]["hashes"]
            for path in in_guest:
                if found[path] is None:
                    raise engines.EngineError("{0} is not in the guest; correct its path".format(path))
                there["guest:" + path] = found[path]
        engine_id = engines.identity(install, there)
        folder = wheelhouse.place(install["wheelhouse"]) if install["wheelhouse"] else None
        files = wheelhouse.files(folder, hashes) if folder and folder.is_dir() else []
        record = engines.record(name, engine["kind"], install, engine_id)
        why = engines.why_not(engine_id, about, {row["name"]: row["sha256"] for row in files}, record)
        row = {"needed": bool(why), "why": why, "id": engine_id, "problem": None, "needs": [], "venv": install["venv"]}
        if not why or self._task.check_mode:
            return row
        facts = wheelhouse.ask_guest(self, task_vars, install, step="look", record=record, wheels=files)["facts"]
        row["reuse"] = facts["reuse"]
        if facts["reuse"]:
            return row
        if facts["problem"] and not facts["needs"]:
            raise engines.EngineError(facts["problem"])
        row["needs"] = list(facts["needs"])
        for step in install["steps"]:
            for wanted in step["requirements"]:
                if wanted["kind"] == "git" and not facts["git"]:
                    row["needs"] += [] if wheelhouse.builds_here(wanted, install["offline"]) else ["git"]
        if folder:
            row.update(self._wheelhouse(name, install, folder, facts, hashes))
        return row

    def _wheelhouse(self, name, install, folder, facts, hashes):
        if install["fill"]:
            texts = []
            for step in install["steps"]:
                rows = [row for row in step["requirements"] if row["side"] != "guest"]
                texts.append([self._findable(row) for row in rows])
            self._display.display(
                "engine {0}: the controller's pip looks for what {1} lacks".format(name, folder), log_only=False
            )
            wheelhouse.fill(install, facts, texts)
        if not folder.is_dir():
            raise engines.EngineError(
                "the wheelhouse {0} is not on the controller; correct its path, or let it be filled by "
                "install.fill".format(install["wheelhouse"])
            )
        files = wheelhouse.files(folder, hashes, facts["version"], facts["machine"])
        if not files and install["offline"]:
            version = ".".join(str(part) for part in facts["version"][:2])
            raise engines.EngineError(
                "the wheelhouse {0} has nothing for Python {1} on {2}; fill it for the guest, or set offline: "
                "false".format(install["wheelhouse"], version, facts["machine"])
            )
        return {"folder": str(folder), "files": files}

    @staticmethod
    def _findable(row):
        """A requirement as the controller's pip takes it."""
        if row["kind"] in ("file", "folder"):
            return str(wheelhouse.place(row["path"])) + row["extras"]
        return row["text"]
