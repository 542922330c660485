# SPDX-License-Identifier: Apache-2.0
"""What a model folder has to look like: manifest, safetensors headers, weight map.  Pure: bytes and text in."""

from __future__ import annotations

import json
import math
import re
import struct

MANIFEST_NAME = "MANIFEST.sha256"
MARKER_NAME = ".specrig-staged.json"
TEMPORARY_PREFIX = ".specrig-part."
INDEX_NAME = "model.safetensors.index.json"
LFS_START = b"version https://git-lfs.github.com/spec/"
HEADER_LIMIT_BYTES = 100 * 1000 * 1000
MARKER_SCHEMA = 2
KEPT_SCHEMA = 1
# A Git LFS pointer is three short lines.
POINTER_LIMIT_BYTES = 1024

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


def seen(manifest, own=MANIFEST_NAME):
    """A manifest without what is left out of every model: hidden names, and the manifest itself."""
    hidden = {path for path in manifest if any(part.startswith(".") for part in path.split("/"))}
    return {path: manifest[path] for path in manifest if path not in hidden and path != own}


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


_DTYPES = {
    4: "F4",
    6: "F6_E2M3 F6_E3M2",
    8: "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0",
    16: "U16 I16 F16 BF16",
    32: "U32 I32 F32",
    64: "U64 I64 F64 C64",
}
_BITS = {name: bits for bits, names in _DTYPES.items() for name in names.split()}


def _tensor_bytes(tensor):
    """What a tensor's type and shape need, in bytes; None for a type that is not known here."""
    bits = _BITS.get(tensor["dtype"])
    return None if bits is None else -(-bits * math.prod(int(extent) for extent in tensor["shape"]) // 8)


def parse_header(name, header, size):
    """The tensors' names of one safetensors file, whose header must account for every byte of the file."""
    try:
        tensors = dict(json.loads(header.decode("utf-8")))
        tensors.pop("__metadata__", None)
        ranges = sorted((int(t["data_offsets"][0]), int(t["data_offsets"][1]), key) for key, t in tensors.items())
        needs = {key: _tensor_bytes(tensor) for key, tensor in tensors.items()}
    except (ValueError, KeyError, TypeError, IndexError) as problem:
        reason = " ".join(str(problem).split())[:100]
        raise ModelError("%s has no readable safetensors header (%s); copy it again" % (name, reason)) from None
    end = 0
    for begin, stop, key in ranges:
        if begin != end or stop < begin:
            raise ModelError(
                "%s: tensor %s lies at %d-%d where %d was due; copy it again" % (name, key, begin, stop, end)
            )
        if needs[key] not in (None, stop - begin):
            shape = "x".join(str(extent) for extent in tensors[key]["shape"])
            raise ModelError(
                "%s: tensor %s has %d bytes and %s of shape %s needs %d; copy it again"
                % (name, key, stop - begin, tensors[key]["dtype"], shape or "()", needs[key])
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


def check_extra(source, files, manifest, kept, index_text):
    """Raises ModelError for weights that nothing names: an engine that loads every *.safetensors would load them too.

    Args:
        source: where the files are, for the message.
        files: their relative paths.
        manifest: paths that the source's own manifest names; empty without one.
        kept: paths of the manifest kept from an earlier staging; empty without one.
        index_text: the text of index.json, or None.
    """
    if manifest:
        names, who = set(manifest), "its manifest"
    elif kept:
        names, who = set(kept), "the manifest kept of it"
    elif index_text is not None:
        names, who = set(json.loads(index_text)["weight_map"].values()), INDEX_NAME
    else:
        return
    for path in sorted(files):
        if path.endswith(".safetensors") and path not in names:
            raise ModelError(
                "%s/%s is not named by %s; remove it, or name it in %s if it belongs to the model"
                % (source, path, who, MANIFEST_NAME)
            )


def stamp(row):
    """What tells one version of a source's file from the next: a version the source gives, or its time."""
    return row.get("version", row.get("mtime_ns"))


def unmoved(row, known):
    """Whether size and time of a source's file are those that were kept; a source that tells no time tells nothing."""
    told = stamp(row) not in ("", None)
    return known is not None and told and row["size"] == known.get("size") and stamp(row) == stamp(known)


def expected(source, kept_path, files, manifest, kept):
    """Which sum each file must have.

    Args:
        source: where the files are, for messages.
        kept_path: where the kept manifest is, for messages.
        files: the source's {path: {"size", "mtime_ns" or "version"}}.
        manifest: the source's own {path: sha256}; may be empty.
        kept: what ``kept_manifest`` gave earlier, for the same source and revision, or None.

    Returns:
        {path: (sha256, "manifest" or "kept", settled)}; a path that nothing names is left out. Settled: the file must
        have this sum, whereas one that was replaced since the manifest was kept need not.

    Raises ModelError where a file is missing that one of both names, and where both contradict each other.
    """
    known = kept["files"] if kept else {}
    named = manifest or known
    for path in sorted(named):
        if path in files:
            continue
        if manifest:
            raise ModelError("%s lacks %s, which its manifest names; get it again" % (source, path))
        raise ModelError(
            "%s lacks %s, which the manifest kept since %s names; get it again, or, if that is on purpose, "
            "remove %s and run again" % (source, path, kept["made_at"], kept_path)
        )
    sums = {}
    for path in files:
        before = known.get(path)
        if path in manifest:
            sums[path] = (manifest[path], "manifest", True)
            if unmoved(files[path], before) and before["sha256"] != manifest[path]:
                raise ModelError(
                    "%s/%s has the size and time it had on %s and another sum in the manifest (%s, was %s): its "
                    "content is wrong, get it again; if it was changed on purpose, remove %s and run again"
                    % (source, path, kept["made_at"], manifest[path][:12], before["sha256"][:12], kept_path)
                )
        elif before is not None:
            sums[path] = (before["sha256"], "kept", unmoved(files[path], before))
    return sums


def refusal(where, found, wanted, against, unchanged, kept_path, made_at):
    """The line for a file whose content is not what was expected."""
    if against == "manifest":
        return "%s has sha256 %s, the manifest says %s: its content is wrong; get that file again" % (
            where,
            found,
            wanted,
        )
    if unchanged:
        return (
            "%s has sha256 %s and had %s on %s, with the same size and time: its content is wrong; "
            "get that file again" % (where, found, wanted, made_at)
        )
    return (
        "%s has sha256 %s and had %s on %s: it was replaced since; if that was on purpose, remove %s and run again, "
        "else get that file again" % (where, found, wanted, made_at, kept_path)
    )


def kept_manifest(model, source, revision, made_at, rows, sums):
    """The manifest to keep: the source's rows and the sums of what was read, for later stagings to be compared with."""
    files = {}
    for path in sorted(rows):
        files[path] = {key: rows[path][key] for key in ("size", "mtime_ns", "version") if key in rows[path]}
        files[path]["sha256"] = sums[path]
    return {
        "schema": KEPT_SCHEMA,
        "model": model,
        "source": source,
        "revision": revision,
        "made_at": made_at,
        "files": files,
    }


def read_kept(name, text):
    """A kept manifest from its text.  Raises ModelError where it is none."""
    try:
        kept = json.loads(text)
        good = (
            kept["schema"] == KEPT_SCHEMA
            and bool(kept["made_at"])
            and all(
                re.match("^[0-9a-f]{64}$", row["sha256"]) and row["size"] >= 0 and check_relative(path)
                for path, row in kept["files"].items()
            )
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        good = False
    if not good:
        raise ModelError("%s is no manifest of schema %d; remove it and run again" % (name, KEPT_SCHEMA))
    return kept


def as_vouched(row, have):
    """Whether a file in RAM is the one that a row of the marker or of the record of proofs is about.

    The inode's change time is compared where the row has it: a write that puts the modification time back moves it.
    """
    if row is None or have is None or any(row.get(key) != have[key] for key in ("size", "mtime_ns", "ino")):
        return False
    return row.get("ctime_ns") in (None, have["ctime_ns"])


def plan(files, target, vouched, sums):
    """What to do about each file.

    Args:
        files: the source's {path: {"size", "mtime_ns" or "version"}} of the files to have.
        target: {path: {"size", "mtime_ns", "ino", "ctime_ns"}} of what lies in RAM.
        vouched: {path: {"size", "mtime_ns", "ino", "stamp", "sha256"}} of what was proven within this boot.
        sums: what ``expected`` gives.

    Returns:
        {"keep": [...], "verify": [...], "copy": [...]}: kept as it is proven, read again because nothing vouches for
        it, and copied.
    """
    result = {"keep": [], "verify": [], "copy": []}
    for path in sorted(files):
        want, have, row = files[path], target.get(path), vouched.get(path)
        wanted, _against, settled = sums.get(path, (None, None, False))
        if have is None or have["size"] != want["size"]:
            result["copy"].append(path)
            continue
        same = settled or (row is not None and row.get("stamp") == stamp(want))
        if same and as_vouched(row, have) and wanted in (None, row["sha256"]):
            result["keep"].append(path)
        elif settled:
            result["verify"].append(path)
        else:
            result["copy"].append(path)
    return result


def verified(files, sums):
    """Against what all files were compared: "manifest", "kept", "partly", or "unknown" where it was nothing."""
    ways = {sums[path][1] if path in sums else None for path in files}
    if ways <= {"manifest"}:
        return "manifest"
    if None not in ways:
        return "kept"
    return "unknown" if ways == {None} else "partly"
