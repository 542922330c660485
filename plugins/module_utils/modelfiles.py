# SPDX-License-Identifier: Apache-2.0
"""What a model folder has to look like: manifest, safetensors headers, weight map.  Pure: bytes and text in."""

from __future__ import annotations

import json
import re
import struct

MANIFEST_NAME = "MANIFEST.sha256"
MARKER_NAME = ".specrig-staged.json"
TEMPORARY_PREFIX = ".specrig-part."
INDEX_NAME = "model.safetensors.index.json"
LFS_START = b"version https://git-lfs.github.com/spec/"
HEADER_LIMIT_BYTES = 100 * 1000 * 1000
MARKER_SCHEMA = 1

_MANIFEST_LINE = re.compile(r"^([0-9a-fA-F]{64}) [ *](.+)$")


class ModelError(ValueError):
    """One line: what was seen, what was expected, what to do."""


def check_relative(path):
    """Raises ModelError for a name that would leave the model's folder."""
    parts = path.split("/")
    if not path or path.startswith("/") or "" in parts or "." in parts or ".." in parts or "\0" in path:
        raise ModelError("file name %r does not stay inside the model's folder; correct the manifest" % path)
    return path


def parse_manifest(text):
    """sha256sum's output -> {relative path: 64 lower-case hex digits}."""
    files = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _MANIFEST_LINE.match(line.rstrip("\r"))
        if not match:
            raise ModelError(
                "line %d of %s is %r, expected '<64 hex digits>  <file>'; make it with sha256sum in the model's folder"
                % (number, MANIFEST_NAME, line[:80])
            )
        path = match.group(2)
        path = check_relative(path[2:] if path.startswith("./") else path)
        if files.setdefault(path, match.group(1).lower()) != match.group(1).lower():
            raise ModelError("%s names %s twice with different sums; make it again" % (MANIFEST_NAME, path))
    if not files:
        raise ModelError("%s names no file; make it with sha256sum in the model's folder" % MANIFEST_NAME)
    return files


def header_length(name, start, size):
    """The length in bytes of a safetensors header, from the file's first bytes and its size.

    Raises ModelError for a Git LFS pointer, a cut file, and anything else that is no safetensors file.
    """
    if start.startswith(LFS_START):
        raise ModelError(
            "%s is a Git LFS pointer of %d bytes, not the weights; run git lfs pull in the source" % (name, size)
        )
    if len(start) < 8 or size < 8:
        raise ModelError("%s is %d bytes, too short for a safetensors file; copy it again" % (name, size))
    length = struct.unpack("<Q", start[:8])[0]
    if length > min(HEADER_LIMIT_BYTES, size - 8):
        raise ModelError(
            "%s is no whole safetensors file: its header claims %d bytes and the file has %d; copy it again"
            % (name, length, size)
        )
    return length


def parse_header(name, header, size):
    """The tensors' names of one safetensors file, whose header must account for every byte of the file."""
    try:
        tensors = dict(json.loads(header.decode("utf-8")))
        tensors.pop("__metadata__", None)
        ranges = sorted((int(t["data_offsets"][0]), int(t["data_offsets"][1]), key) for key, t in tensors.items())
    except (ValueError, KeyError, TypeError, IndexError) as problem:
        reason = " ".join(str(problem).split())[:100]
        raise ModelError("%s has no readable safetensors header (%s); copy it again" % (name, reason)) from None
    end = 0
    for begin, stop, key in ranges:
        if begin != end or stop < begin:
            raise ModelError(
                "%s: tensor %s lies at %d-%d where %d was due; copy it again" % (name, key, begin, stop, end)
            )
        end = stop
    expected = 8 + len(header) + end
    if size != expected:
        raise ModelError(
            "%s is %d bytes and its header accounts for %d: %s; copy it again"
            % (name, size, expected, "it is cut off" if size < expected else "something is added to it")
        )
    return set(tensors)


def check_index(text, tensors_by_file):
    """Raises ModelError where index.json's weight map and the files' tensors differ."""
    try:
        weight_map = json.loads(text)["weight_map"]
        items = sorted(weight_map.items())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ModelError("%s has no weight_map; copy it again" % INDEX_NAME) from None
    for tensor, name in items:
        if name not in tensors_by_file:
            raise ModelError(
                "%s puts %s into %s, which is not there; copy the model again" % (INDEX_NAME, tensor, name)
            )
        if tensor not in tensors_by_file[name]:
            raise ModelError(
                "%s puts %s into %s, which does not hold it; copy the model again" % (INDEX_NAME, tensor, name)
            )
    shards = set(weight_map.values())
    for name in sorted(shards):
        extra = tensors_by_file[name] - {tensor for tensor, place in items if place == name}
        if extra:
            raise ModelError(
                "%s holds %s, which %s does not name; copy the model again" % (name, min(extra), INDEX_NAME)
            )


def plan(source, target, marker, manifest):
    """What to do about each file.

    Args:
        source: {path: {"size", "mtime_ns"}} of the files to have.
        target: the same of what lies in RAM.
        marker: the marker's {path: {"size", "mtime_ns", "source_mtime_ns", "sha256"}}, or None without a marker.
        manifest: {path: sha256}; may be empty.

    Returns:
        {"keep": [...], "verify": [...], "copy": [...], "drop": [...]}: kept as the marker vouches for them, read again
        because nothing vouches for them, copied, and removed because the source no longer has them.
    """
    result = {"keep": [], "verify": [], "copy": [], "drop": []}
    known = marker or {}
    for path in sorted(source):
        want, have, vouched = source[path], target.get(path), known.get(path)
        if have is None or have["size"] != want["size"]:
            result["copy"].append(path)
            continue
        intact = (
            vouched is not None
            and vouched.get("size") == have["size"]
            and vouched.get("mtime_ns") == have["mtime_ns"]
            and vouched.get("source_mtime_ns") == want["mtime_ns"]
            and manifest.get(path, vouched.get("sha256")) == vouched.get("sha256")
        )
        if intact:
            result["keep"].append(path)
        elif path in manifest:
            result["verify"].append(path)
        else:
            result["copy"].append(path)
    result["drop"] = sorted(path for path in known if path not in source and path in target)
    return result
