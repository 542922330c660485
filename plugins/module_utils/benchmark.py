# SPDX-License-Identifier: Apache-2.0
"""What a benchmark may do on a host: which placement each profile gets, what has to stop for it, and what forbids it.

Pure: the plan of the sweep, the look of host_look and serving_look, and the profile table in, a decision out.
"""

from __future__ import annotations

import re

from . import placement, serverinfo

UNIT_PREFIX = "specrig-bench-"


def unit_stem(run):
    """Return the stem of a run's unit names: the id with every character replaced that would need escaping.

    ``nightly-1`` and ``nightly_1`` must not share units, so what replaces a character tells which it was.
    """
    safe = re.sub(r"[^A-Za-z0-9.]", lambda match: "_%x_" % ord(match.group()), run)
    return UNIT_PREFIX + safe


def unit_name(run, launch):
    """Return the transient unit of one launch."""
    return "%s-%d.service" % (unit_stem(run), int(launch))


def decide(plan, look, serving, profiles, take_over=False, guest_gpus=None, guest=None):
    """Decide whether and where the launches of a plan can run.

    Args:
        plan: ``run`` and ``profiles`` (the names that the launches start).
        look: the look of host_look.
        serving: the look of serving_look (its ``benchmarks`` are the benchmark units that run).
        profiles: the profile table.
        take_over: production profiles may be stopped.
        guest_gpus: host indices of the GPUs that the guest has; None means all.
        guest: the guest's name; processes of another guest are foreign whatever their profile's name.

    Returns:
        dict: ``refused`` (one line each; empty when it can run), ``placements`` (profile to its row of
        ``placement.plan``), ``stop`` (production profiles to stop first), ``leftovers`` (benchmark profiles whose
        server runs for nobody), ``client_cpus``, ``attached`` (this run's unit that still runs, or None), ``unlike``
        (lines about profiles that differ in more than their method).
    """
    refused = []
    own = unit_stem(plan["run"]) + "-" if plan.get("run") else None
    attached = None
    for unit in serving.get("benchmarks") or []:
        if own and unit.startswith(own):
            attached = unit
        else:
            refused.append(
                "another benchmark is running in the guest (%s); wait for it, or stop it with specrig runs abort" % unit
            )
    beside = placement.plan(look, profiles, (), False, guest_gpus, guest)
    instead = placement.plan(look, profiles, (), True, guest_gpus, guest)
    placements = {}
    stop = set()
    for name in plan["profiles"]:
        if (profiles.get(name) or {}).get("serve"):
            refused.append(
                "%s is a production profile (serve: true); a benchmark starts and stops servers, so name profiles with "
                "serve: false, or measure it as it stands with specrig load" % name
            )
            continue
        row = beside["profiles"].get(name)
        if row is None and name in instead["profiles"]:
            row = instead["profiles"][name]
            owners = _owners(row, beside, profiles)
            if not take_over:
                refused.append(
                    "%s needs GPUs %s, where %s serve%s; --take-over stops %s for the benchmark and puts %s back"
                    % (
                        name,
                        placement.ids(row["gpus"]),
                        " and ".join(owners),
                        "" if len(owners) > 1 else "s",
                        "them" if len(owners) > 1 else "it",
                        "them" if len(owners) > 1 else "it",
                    )
                )
                continue
            stop.update(owners)
        if row is None:
            refused.append(instead["refused"].get(name) or "%s: not in sglang_server_profiles" % name)
            continue
        placements[name] = row
    units = serving.get("units") or {}
    leftovers = sorted(
        name
        for name, row in profiles.items()
        if not row.get("serve")
        and (units.get(name) or {}).get("active") in ("active", "activating", "reloading", "deactivating", "failed")
    )
    return {
        "refused": refused,
        "placements": placements,
        "stop": [name for name in profiles if name in stop],
        "leftovers": leftovers,
        "client_cpus": beside["client_cpus"] or "",
        "attached": attached,
        "unlike": serverinfo.unlike_profiles(plan["profiles"], profiles),
    }


def _owners(row, beside, profiles):
    """Return the production profiles that stand on a placement's GPUs, in declared order."""
    taken = set(row["gpus"])
    return [
        name
        for name in profiles
        if profiles[name].get("serve") and taken & set((beside["profiles"].get(name) or {}).get("gpus") or [])
    ]


def describe(plan, decision):
    """Return the plan as lines for people."""
    lines = [
        "%s: %d cells in %d launches to do%s, about %s"
        % (
            plan["name"],
            plan["cells"],
            len(plan["launches"]),
            ", %d done before" % plan["done"] if plan.get("done") else "",
            duration(plan["estimate_s"]),
        )
    ]
    pace = plan.get("pace")
    if pace:
        lines.append(
            "assumed: prefill %.0f tok/s, decode %.0f tok/s a stream, %.0f s a launch"
            % (pace["prefill_tokens_per_s"], pace["decode_tokens_per_s"], pace["launch_s"])
        )
    width = plan.get("expected_ci_width")
    if width and width["most"] >= 1:
        lines.append(
            "expected interval of a speed-up over prompts: wider than +-100 % with so few; more requests narrow it"
        )
    elif width:
        lines.append(
            "expected interval of a speed-up over prompts: +-%.0f %% to +-%.0f %%"
            % (100 * width["least"], 100 * width["most"])
        )
    for name in plan["profiles"]:
        row = decision["placements"].get(name)
        if row:
            lines.append(
                "%s on %s %s, %s%s, CPUs %s"
                % (
                    name,
                    "GPU" if len(row["gpus"]) == 1 else "GPUs",
                    placement.ids(row["gpus"]),
                    placement.nodes_text(row["numa_nodes"]),
                    " (span)" if row.get("numa") == "span" else "",
                    row.get("cpus") or "unknown",
                )
            )
    lines += decision.get("unlike") or []
    lines += ["skipped: %s: %s" % (item.get("title") or item["cell"], item["reason"]) for item in plan["infeasible"]]
    return lines


def duration(seconds):
    """Return seconds as people say them: ``40 s``, ``12 min``, ``3 h 20 min``."""
    seconds = round(seconds or 0)
    if seconds < 120:
        return "%d s" % seconds
    minutes = (seconds + 30) // 60
    if minutes < 120:
        return "%d min" % minutes
    return "%d h %02d min" % (minutes // 60, minutes % 60)
