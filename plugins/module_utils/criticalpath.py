# SPDX-License-Identifier: Apache-2.0
"""What bounded the time of a run: its longest chain of steps that had to follow each other.  Pure.

A run is one line of tasks, one after the other, and what goes on beside it: models that are staged, servers that start.
A task that waits for such a thing takes no time of its own while it waits; what it waited for does.
"""

from __future__ import annotations


def steps_of(line, rows):
    """Turns a run's record into steps for `longest`.

    Args:
        line: the tasks in order, ``{"name", "start", "end"}``, in seconds, none of them overlapping.
        rows: what went on beside them, ``{"name", "start", "end", "task", "after"}``: ``task`` is the index in ``line``
            of the task that waited for it and reported it, ``after`` names other rows that it followed. One with
            ``at_most`` was over when that task asked for the first time: it counts up to there.

    Returns:
        A list of ``{"name", "start", "end", "after", "own", "task"}`` in an order in which every step comes after
        those that it follows. ``after`` holds indices of this list; ``own`` is the seconds that the step adds to its
        chain: what it takes beyond the end of all that it follows. ``task`` is the index in ``line``, None for a row.
    """
    if not line:
        return []
    first = line[0]["start"]
    rows = [dict(row) for row in rows if 0 <= row["task"] < len(line)]
    for row in rows:
        # Clocks of other machines: nothing ends after the task that saw its end, nothing starts before the run.
        row["end"] = min(max(row["end"], first), line[row["task"]]["end"])
        if row.get("at_most"):
            row["end"] = min(row["end"], line[row["task"]]["start"])
        row["start"] = min(max(row["start"], first), row["end"])
    pieces = []
    for index, task in enumerate(line):
        mine = [row["end"] for row in rows if row["task"] == index]
        waited = max([task["start"], *mine])
        # The line is cut where something begins beside it, and where a wait ends.
        cuts = {row["start"] for row in rows if task["start"] < row["start"] < task["end"]}
        cuts |= {waited} if mine else set()
        edges = sorted({task["start"], task["end"], *cuts})
        for place, end in enumerate(edges[1:]):
            start = edges[place]
            pieces.append({"name": task["name"], "start": start, "end": end, "task": index, "waits": end <= waited})
    marked = [dict(piece, row=None) for piece in pieces]
    marked += [dict(row, row=number) for number, row in enumerate(rows)]
    # At one instant: what ends there, then what begins there; what takes no time in between.
    marked.sort(key=lambda step: (step["end"], step["row"] is None, step["start"]))
    steps, seen_rows, joined, last = [], [], set(), None
    for step in marked:
        if step["row"] is not None:
            after = [place for place, _task in _begun_by(steps, step["start"])]
            names = step.get("after") or []
            after += [place for place, row in seen_rows if row["name"] in names and place not in after]
            # When one that was over before anybody asked really ended is not known: it bounds nothing.
            steps.append(_step(steps, step, after, None, bool(step.get("at_most"))))
            seen_rows.append((len(steps) - 1, step))
            continue
        after = [] if last is None else [last]
        # A wait is over with the last of what it was for, be it that the task ended in the same instant.
        joins = [
            place
            for place, row in seen_rows
            if place not in joined
            and (row["task"] < step["task"] or (row["task"] == step["task"] and row["end"] <= step["start"]))
        ]
        joined.update(joins)
        steps.append(_step(steps, step, after + joins, step["task"], step["waits"]))
        last = len(steps) - 1
    return steps


def _begun_by(steps, moment):
    """The piece of the line that ended when something began."""
    ended = [
        (place, step["task"]) for place, step in enumerate(steps) if step["task"] is not None and step["end"] <= moment
    ]
    return ended[-1:]


def _step(steps, about, after, task, waits):
    begin = max([about["start"]] + [steps[place]["end"] for place in after])
    own = 0.0 if waits else max(0.0, about["end"] - begin)
    return {
        "name": about["name"],
        "start": about["start"],
        "end": about["end"],
        "after": after,
        "own": own,
        "task": task,
    }


def longest(steps):
    """The critical path of steps, and how much later each could have ended without making the run longer.

    Args:
        steps: as `steps_of` returns them; needed are ``own`` and ``after``, which names earlier steps only.

    Returns:
        ``{"path": [indices], "seconds": s, "slack": [s per step]}``. ``seconds`` is the sum of ``own`` along the path,
        and no chain has more. A step's slack is ``seconds`` less the longest chain through it.
    """
    upto, via = [], []
    for step in steps:
        best = max(step["after"], key=lambda place: upto[place]) if step["after"] else None
        via.append(best)
        upto.append(step["own"] + (0.0 if best is None else upto[best]))
    beyond = [0.0] * len(steps)
    for place in range(len(steps) - 1, -1, -1):
        for before in steps[place]["after"]:
            beyond[before] = max(beyond[before], beyond[place] + steps[place]["own"])
    total = max(upto) if upto else 0.0
    slack = [max(0.0, total - upto[place] - beyond[place]) for place in range(len(steps))]
    path = []
    place = upto.index(total) if upto else None
    while place is not None:
        path.append(place)
        place = via[place]
    return {"path": path[::-1], "seconds": total, "slack": slack}


def merged(steps, path, label):
    """The path's steps with a name and its seconds, neighbours of one name put together, waits left out.

    Args:
        steps: as `steps_of` returns them.
        path: indices of steps, as `longest` returns them.
        label: called with a step, returns the name under which it is shown.
    """
    shown = []
    for place in path:
        step = steps[place]
        if step["own"] <= 0:
            continue
        name = label(step)
        if not shown or shown[-1]["name"] != name:
            start = step["end"] - step["own"]
            shown.append({"name": name, "seconds": 0.0, "start": start, "end": step["end"], "tasks": {}})
        last = shown[-1]
        last["seconds"] += step["own"]
        last["end"] = step["end"]
        if step["task"] is not None:
            last["tasks"][step["task"]] = last["tasks"].get(step["task"], 0.0) + step["own"]
    return shown


def mostly(step, line):
    """The name of the one task that took most of a part of several tasks; None where none did."""
    if len(step["tasks"]) < 2:
        return None
    longest_task = max(step["tasks"], key=lambda index: step["tasks"][index])
    name = line[longest_task].get("task")
    if not name or step["tasks"][longest_task] < 0.6 * step["seconds"]:
        return None
    return name.rpartition(" : ")[2]


def line_of(shown, wall, least=0.03, most=8):
    """One line on the path: ``host 1.2 s > model X 11.2 s (4.9 GB/s) > ... = 63 s of 66 s``.

    Steps shorter than ``least`` of the whole are left out, and so is whatever is beyond the ``most`` longest; the sum
    is that of the steps shown.
    """
    keep = [step for step in shown if step["seconds"] >= max(0.05, least * wall)]
    for step in sorted(keep, key=lambda row: row["seconds"])[: max(0, len(keep) - most)]:
        keep.remove(step)
    parts = []
    for step in keep:
        detail = " ({0})".format(step["detail"]) if step.get("detail") else ""
        parts.append("{0} {1}{2}".format(step["name"], seconds_text(step["seconds"]), detail))
    total = sum(step["seconds"] for step in keep)
    return "{0} = {1} of {2}".format(" > ".join(parts), seconds_text(total), seconds_text(wall))


def told(line, rows, wall):
    """Lines for people and a record for programs on what bounded a run of ``wall`` seconds.

    Args:
        line: as for `steps_of`.
        wall: seconds that the run took.
        rows: as for `steps_of`; ``detail`` is shown behind the seconds, ``at_most`` says that the end was seen late.
    """
    steps = steps_of(line, rows)
    found = longest(steps)
    label = lambda step: step["name"]  # noqa: E731
    details = {row["name"]: row["detail"] for row in rows if row.get("detail")}
    shown = merged(steps, found["path"], label)
    for step in shown:
        step["detail"] = details.get(step["name"])
        if step["detail"] is None and step["seconds"] >= 0.1 * wall:
            task = mostly(step, line)
            step["detail"] = "mostly '{0}'".format(task) if task else None
    lines = [line_of(shown, wall)]
    on_path = {steps[place]["name"] for place in found["path"]}
    begin = line[0]["start"] if line else 0.0
    beside, spare = [], []
    for place, step in enumerate(steps):
        if step["task"] is not None:
            continue
        row = next(row for row in rows if row["name"] == step["name"])
        beside.append(
            {
                "name": step["name"],
                "host": row.get("host"),
                "kind": row.get("kind"),
                "start_s": round(step["start"] - begin, 3),
                "seconds": round(step["end"] - step["start"], 3),
                "at_most": bool(row.get("at_most")),
                "detail": row.get("detail"),
                "slack_s": None if row.get("at_most") else round(found["slack"][place], 3),
                "critical": place in found["path"],
            }
        )
        if step["name"] not in on_path:
            took = seconds_text(step["end"] - step["start"])
            if row.get("at_most"):
                spare.append("{0} at most {1}".format(step["name"], took))
                continue
            spare.append("{0} {1} ({2} to spare)".format(step["name"], took, seconds_text(found["slack"][place])))
    if spare:
        more = ", and {0} more".format(len(spare) - 4) if len(spare) > 4 else ""
        lines.append("beside it: " + ", ".join(spare[:4]) + more)
    record = {
        "path": [
            {
                "name": step["name"],
                "start_s": round(step["start"] - begin, 3),
                "seconds": round(step["seconds"], 3),
                "detail": step["detail"],
            }
            for step in shown
        ],
        "seconds": round(found["seconds"], 3),
        "wall_s": round(wall, 3),
        "beside": beside,
        "tasks": [
            {
                "name": task["name"],
                "task": task.get("task"),
                "start_s": round(task["start"] - begin, 3),
                "seconds": round(task["end"] - task["start"], 3),
            }
            for task in line
        ],
    }
    return lines, record


def seconds_text(seconds):
    """``0.8 s``, ``63 s``, ``12 min 05 s``."""
    if seconds < 59.95:
        return "{0:.1f} s".format(seconds)
    if seconds < 119.5:
        return "{0:.0f} s".format(seconds)
    minutes, rest = divmod(round(seconds), 60)
    return "{0} min {1:02d} s".format(minutes, rest)
