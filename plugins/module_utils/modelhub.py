# SPDX-License-Identifier: Apache-2.0
"""Models from a hub that speaks Hugging Face's API: what an entry asks for, what the metadata proves.  Pure."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import re

from . import modelfiles
from .modelfiles import ModelError

SCHEME = "hf:"
CACHE = "/var/lib/specrig/hub"
# Whole models, one folder each, made of hard links to the cache's files.
FOLDERS = "folders"
RECORD_NAME = ".specrig-hub.json"
RECORD_SCHEMA = 1
# Only for a hint: which hub is asked is huggingface_hub's own matter, unless an endpoint is configured.
HUB_URL = "https://huggingface.co"

_REPO = re.compile(r"^[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9_])?/[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?$")
_COMMIT = re.compile(r"^[0-9a-f]{40}$")
_SHA1 = re.compile(r"^[0-9a-f]{40}$")
_SHA256 = re.compile(r"^[0-9a-f]{64}$")


def is_hub(about):
    """Whether an entry of model_store_models is one of a hub."""
    return isinstance(about, dict) and str(about.get("source") or "").startswith(SCHEME)


def wanted(name, about, endpoint=None):
    """{"repo", "revision", "include", "exclude"} of an entry of a hub.  Raises ModelError, one line."""
    modelfiles.check_relative(name)
    repo = about["source"][len(SCHEME) :]
    if not _REPO.match(repo) or ".." in repo or "--" in repo:
        raise ModelError("model %s: %s is no repository of a hub; expected hf:ORG/REPO" % (name, about["source"]))
    revision = about.get("revision")
    url = "%s/%s" % ((endpoint or HUB_URL).rstrip("/"), repo)
    if revision is None or str(revision) == "":
        raise ModelError(
            "model %s: %s has no revision; expected a commit (40 hex digits), which never moves; see it with: "
            "git ls-remote %s HEAD" % (name, about["source"], url)
        )
    if not _COMMIT.match(str(revision)):
        raise ModelError(
            "model %s: the revision %s is no commit (40 hex digits), and a branch or tag may move; see its commit "
            "with: git ls-remote %s %s" % (name, revision, url, revision)
        )
    if about.get("manifest"):
        raise ModelError(
            "model %s has a manifest, and the hub's own metadata is the manifest of %s; take it out"
            % (name, about["source"])
        )
    patterns = {}
    for key in ("include", "exclude"):
        rows = about.get(key) or []
        if not isinstance(rows, list) or not all(isinstance(row, str) and row for row in rows):
            raise ModelError(
                "model %s: %s is %r; expected a list of patterns such as '*.safetensors'" % (name, key, rows)
            )
        patterns[key] = rows
    return dict(patterns, repo=repo, revision=str(revision))


def folder_of(cache, name):
    """Where a model's whole folder lies."""
    return "%s/%s/%s" % (cache.rstrip("/"), FOLDERS, name)


def local(name, about, cache):
    """An entry of a hub as one of a folder on the host, and every other entry as it is."""
    if not is_hub(about):
        return about
    row = {key: value for key, value in about.items() if key not in ("include", "exclude")}
    return dict(row, source=folder_of(cache, name))


def chosen(paths, include, exclude):
    """Those of a repository's paths that make up the model: hidden ones never, and what the patterns say."""
    rows = []
    for path in sorted(paths):
        if any(part.startswith(".") for part in path.split("/")) or path == modelfiles.MANIFEST_NAME:
            continue
        if include and not any(fnmatch.fnmatchcase(path, pattern) for pattern in include):
            continue
        if not any(fnmatch.fnmatchcase(path, pattern) for pattern in exclude):
            rows.append(path)
    return rows


def tree(name, rows, asked):
    """{path: {"size", "sha256"} or {"size", "blob_id"}} from what the hub says of a revision's files.

    Raises ModelError where it does not say what proves a file, or where nothing is left to have.
    """
    files = {}
    for row in rows:
        path, size = row.get("path"), row.get("size")
        modelfiles.check_relative(path if isinstance(path, str) else "")
        known = {"size": size, "sha256": row["sha256"]} if row.get("sha256") else {"size": size}
        if "sha256" not in known:
            known["blob_id"] = row.get("blob_id")
        proof = known.get("sha256") or known.get("blob_id")
        good = _SHA256.match(str(proof)) if "sha256" in known else _SHA1.match(str(proof))
        if not good or isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ModelError(
                "model %s: the hub gives no size and sum for %s of %s that could be used; ask it again, or use its "
                "default endpoint" % (name, path, asked["repo"])
            )
        files[path] = known
    keep = chosen(files, asked["include"], asked["exclude"])
    if not keep:
        raise ModelError(
            "model %s: %s has no file at %s%s; correct the revision or the patterns"
            % (name, asked["repo"], asked["revision"], " that include and exclude leave" if files else "")
        )
    return {path: files[path] for path in keep}


def blob_hash(size):
    """The hash object of git's name for a file's content, which only wants that content yet."""
    return hashlib.sha1(b"blob %d\0" % size)


def wrong(name, path, known, found, asked):
    """The line for a file that is not what the hub says it is."""
    kind = "sha256" if "sha256" in known else "git blob"
    return (
        "model %s: %s of %s has %s %s on this disk and %s on the hub at %s; what the hub or the way to it gives "
        "is wrong"
        % (
            name,
            path,
            asked["repo"],
            kind,
            found,
            known.get("sha256") or known.get("blob_id"),
            asked["revision"][:12],
        )
    )


def manifest_text(files):
    """MANIFEST.sha256 of {path: {"sha256", ...}}."""
    return "".join("%s  %s\n" % (files[path]["sha256"], path) for path in sorted(files))


def record_text(asked, endpoint, made_at, files):
    """What is kept beside a whole model: what was asked for, and size, time and sum of each file."""
    record = dict(asked, schema=RECORD_SCHEMA, endpoint=endpoint, made_at=made_at, files=files)
    return json.dumps(record, indent=1, sort_keys=True) + "\n"


def read_record(text):
    """A record's content, or None for what is none."""
    try:
        record = json.loads(text)
        good = record["schema"] == RECORD_SCHEMA and all(
            _SHA256.match(row["sha256"]) and row["size"] >= 0 and row["mtime_ns"] and check(path)
            for path, row in record["files"].items()
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return record if good and record["files"] else None


def check(path):
    """True for a path that stays inside its folder.  Raises ModelError."""
    return bool(modelfiles.check_relative(path))


def answers(record, asked):
    """Whether a record is of what is asked for."""
    return record is not None and all(record.get(key) == asked[key] for key in asked)
