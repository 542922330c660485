# SPDX-License-Identifier: Apache-2.0
"""Which folders a guest sees for its models, and under which names they lie there."""

from __future__ import annotations

import os
import re
from typing import Any

from ansible.errors import AnsibleFilterError

# The files of a snapshot are links to blobs beside it: the whole repository has to be shown.
SNAPSHOT = re.compile(r"^(/.+/models--[^/]+)/(snapshots/[^/]+)/*$")


def shown(name: str, about: dict[str, Any], sources: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns (folders to show, the model's row as the guest sees it)."""
    source = str((about or {}).get("source") or "")
    if not source.startswith("/"):
        return [], dict(about or {})
    target = f"{sources.rstrip('/')}/{name}"
    snapshot = SNAPSHOT.match(source)
    folder, below = snapshot.groups() if snapshot else (source.rstrip("/") or "/", "")
    row = dict(about, source=f"{target}/{below}".rstrip("/"))
    folders = [{"source": folder, "target": target, "read_only": True}]
    manifest = str(about.get("manifest") or "")
    if manifest.startswith(source.rstrip("/") + "/"):
        row["manifest"] = row["source"] + manifest[len(source.rstrip("/")) :]
    elif manifest.startswith("/"):
        beside = f"{sources.rstrip('/')}/.manifest-{name}"
        folders.append({"source": os.path.dirname(manifest), "target": beside, "read_only": True})
        row["manifest"] = f"{beside}/{os.path.basename(manifest)}"
    return folders, row


def check(models: dict[str, Any], place: str) -> None:
    """Refuses what is no mapping of models, and a place that there is not."""
    if not isinstance(models, dict):
        raise AnsibleFilterError(f"model_store_models is {models!r}; expected names with their source each")
    if place not in ("host", "guest"):
        raise AnsibleFilterError(f"model_store_place is {place!r}; expected host or guest")


def model_folders(
    models: dict[str, Any], place: str, mount: str, guest_path: str, sources: str
) -> list[dict[str, Any]]:
    """Returns the folders that a guest has to see: the tmpfs of the host, or what it is to stage from."""
    check(models, place)
    if place == "host":
        return [{"source": mount, "target": guest_path, "read_only": True}]
    return [folder for name in sorted(models) for folder in shown(name, models[name], sources)[0]]


def models_in_guest(models: dict[str, Any], sources: str) -> dict[str, Any]:
    """Returns the models with their sources under the names that the guest sees."""
    check(models, "guest")
    return {name: shown(name, about, sources)[1] for name, about in models.items()}


def model_stagings(guests: list[str], hostvars: Any, me: str) -> dict[str, int]:
    """Returns {guest's name: bytes} of what the other guests of this guest's host are about to stage."""
    found = {}
    for name in guests:
        other = hostvars[name]
        if name == me or other.get("lxc_guest_host") != hostvars[me].get("lxc_guest_host"):
            continue
        models = (other.get("__model_store_look") or {}).get("models") or {}
        missing = sum(
            int(row.get("missing_bytes", 0 if row.get("complete") else row.get("bytes", 0))) for row in models.values()
        )
        if missing:
            found[str(other.get("lxc_guest_name") or name)] = missing
    return found


class FilterModule:
    """The filters of this file, as Ansible looks them up."""

    def filters(self) -> dict[str, Any]:
        """Return them by name."""
        return {
            "model_folders": model_folders,
            "models_in_guest": models_in_guest,
            "model_stagings": model_stagings,
        }
