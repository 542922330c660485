# SPDX-License-Identifier: Apache-2.0
"""Progress of staging: what the file of a model says, and the line that people read.  Pure."""

from __future__ import annotations

import re

FOLDER = "/run/specrig/staging"
SCHEMA = 1
# A line that a terminal may write over with the next one.
LINE = re.compile(r"^ *model \S+: .*(\d of \d|waits|is being checked)")


def parse(record, not_before=None):
    """A progress file's content with every key in its type, or None where it says nothing about this staging.

    Args:
        record: what the file holds, as JSON gave it.
        not_before: seconds since the epoch; a file last written before is of an earlier staging.
    """
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        return None
    if record.get("state") not in ("running", "waiting", "done", "failed"):
        return None
    numbers = {}
    for key in ("started_unix", "updated_unix", "bytes_total", "bytes_done", "files_total", "files_done"):
        value = record.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
            return None
        numbers[key] = value
    if not_before is not None and numbers["updated_unix"] < not_before:
        return None
    for key in ("rate_bytes_s", "eta_s", "pid"):
        value = record.get(key)
        numbers[key] = value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    message = record.get("message")
    return dict(
        numbers,
        model=_plain(record.get("model")),
        state=record["state"],
        message=_plain(message) if message else None,
    )


def _plain(text):
    """Without a terminal's codes: a guest that stages writes its file itself, and a terminal shows it."""
    return "".join(letter if letter.isprintable() else " " for letter in str(text))


def amount_text(done, total):
    """``12.3 of 55.6 GB``: both in the unit of the larger one."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if total >= size:
            return "{0:.1f} of {1:.1f} {2}".format(done / size, total / size, unit)
    return "{0:.0f} of {1:.0f} kB".format(done / 1e3, total / 1e3)


def rate_text(rate):
    """``4.1 GB/s``; ``rate unknown`` for None."""
    if rate is None:
        return "rate unknown"
    return "{0:.1f} GB/s".format(rate / 1e9) if rate >= 1e9 else "{0:.0f} MB/s".format(rate / 1e6)


def left_text(seconds):
    """``11 s left``, ``3 min left``; empty for None."""
    if seconds is None:
        return ""
    return "{0:.0f} s left".format(seconds) if seconds < 120 else "{0:.0f} min left".format(seconds / 60)


def text(progress):
    """One line on a model that is being staged: ``model X: 12.3 of 55.6 GB, 4.1 GB/s, 11 s left``."""
    head = "model {0}: ".format(progress["model"])
    if progress["state"] == "waiting":
        return head + (progress["message"] or "waits for another staging of it")
    if progress["state"] == "failed":
        return head + (progress["message"] or "its staging failed")
    amount = amount_text(progress["bytes_done"], progress["bytes_total"])
    if progress["state"] == "done":
        seconds = progress["updated_unix"] - progress["started_unix"]
        told = done_text(progress["bytes_total"], seconds, progress["rate_bytes_s"])
        return head + (told.replace("staged", progress["message"], 1) if progress["message"] else told)
    parts = [amount, rate_text(progress["rate_bytes_s"]), left_text(progress["eta_s"])]
    return head + ", ".join(part for part in parts if part)


def waiting_for(progress, other):
    """The progress of a model that another run stages: this one waits, and says how far the other is."""
    rest = text(progress).partition(": ")[2]
    return dict(progress, state="waiting", message="waiting for the staging of {0}: {1}".format(other, rest))


def done_text(total, seconds, rate=None):
    """``staged, 55.6 GB in 13.4 s, 4.2 GB/s``; the rate over the whole of it where it took long enough to tell."""
    size = amount_text(total, total).partition(" of ")[2]
    if seconds >= 0.1:
        rate = total / seconds
    return "staged, {0} in {1:.1f} s{2}".format(size, seconds, ", " + rate_text(rate) if rate is not None else "")


def row(progress):
    """What the journal keeps of it."""
    keys = ("model", "state", "bytes_done", "bytes_total", "files_done", "files_total", "rate_bytes_s", "eta_s")
    kept = {key: progress[key] for key in keys}
    kept["seconds"] = round(progress["updated_unix"] - progress["started_unix"], 2)
    kept["message"] = progress["message"]
    return kept


def models_of(profile, model_root, known):
    """Names of the staged models that a profile needs: its target, and its draft where that is staged too.

    Args:
        profile: a row of ``sglang_server_profiles``; its models are names, or paths below ``model_root``.
        model_root: the folder of the models, as the servers see it.
        known: names of the models that are staged.
    """
    root = model_root.rstrip("/") + "/"
    needed = []
    for key in ("model", "draft_model"):
        path = str(profile.get(key) or "")
        name = path[len(root) :].strip("/") if path.startswith(root) else path
        if name in known and name not in needed:
            needed.append(name)
    return needed


def release(waiting, staged, failed):
    """Which profiles can start now.

    Args:
        waiting: profile to the names of the models that it waits for.
        staged: names of the models that are there.
        failed: model to the line that says why it will not be.

    Returns:
        ``(names to start, profiles that still wait, {profile that cannot start: one line that says why})``.
    """
    start, rest, problems = [], {}, {}
    for name in waiting:
        missing = [model for model in waiting[name] if model not in staged]
        lost = [model for model in missing if model in failed]
        if lost:
            problems[name] = "{0}: its model {1} is not there: {2}".format(name, lost[0], failed[lost[0]])
        elif missing:
            rest[name] = missing
        else:
            start.append(name)
    return start, rest, problems
