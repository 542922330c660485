# SPDX-License-Identifier: Apache-2.0
"""Which GPUs, NUMA nodes and CPUs a profile gets, and whether it really sits there.

``plan`` decides from what the host reports (the ``look`` of the module host_look) and from the profiles alone, so the
same host and inventory always give the same plan. ``verify`` compares a planned profile with the processes that the
host sees on its GPUs. Neither ever makes up a NUMA node: where the host does not know, the node is None.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import Any, Dict, Iterable, Sequence, Tuple

from . import cpulist, numa

Facts = Dict[str, Any]
Links = Dict[Tuple[int, int], str]
_LINK_COST = {"PIX": 10, "PXB": 20, "PHB": 30, "NODE": 40, "SYS": 50, "SOC": 50}
_UNKNOWN_LINK = 50
_MOST_GROUPS = 20000
_MOST_TRIALS = 5000
_IDLE_MIB = 1024
RECORD = "/var/lib/specrig/guests/%s.placement.json"
"""On the host: where a guest's production profiles were put; %s is the guest's name."""
_GPU_NODE = re.compile(r"^/dev/nvidia\d+$")


def ids(numbers: Iterable[int | None]) -> str:
    """Return a short text for GPU indices: ``1-4``; None stands for an unknown one."""
    numbers = list(numbers)
    known = cpulist.format([n for n in numbers if n is not None])
    text = known if None not in numbers else ",".join(part for part in (known, "unknown") if part)
    return text or "none"


def gpus_text(numbers: Iterable[int | None]) -> str:
    """Return ``GPU 0`` or ``GPUs 1-4``."""
    numbers = list(numbers)
    return "GPU%s %s" % ("" if len(numbers) == 1 else "s", ids(numbers))


def nodes_text(nodes: Iterable[int | None]) -> str:
    """Return ``NUMA node 0``, ``NUMA nodes 0,1`` or ``NUMA node unknown``."""
    nodes = list(nodes)
    distinct = sorted({n for n in nodes if n is not None})
    texts = [str(n) for n in distinct] + (["unknown"] if None in nodes or not nodes else [])
    return "NUMA node%s %s" % ("s" if len(texts) > 1 else "", ",".join(texts))


def gpu_node(gpu: Facts, look: Facts) -> int | None:
    """Return the NUMA node whose CPUs a GPU is close to, or None where the host does not say.

    A list affinity (GB200: ``0,3-9,11-17``) names memory-only nodes too: its one member with CPUs counts.
    """
    with_cpus: set[int] = {n["node"] for n in look.get("numa") or [] if n.get("cpu_list") or n.get("cpus")}
    node: int | None = gpu.get("numa_node")
    node = None if node is None or node < 0 else node
    if node in with_cpus:
        return node
    listed: list[int] = [n for n in gpu.get("numa_nodes") or [] if n is not None and n >= 0]
    close = sorted(set(listed) & with_cpus)
    if len(close) == 1:
        return close[0]
    if node is not None:
        return node
    return listed[0] if len(listed) == 1 else None


def _bus_order(gpu: Facts) -> tuple[bool, str, int]:
    return (gpu.get("bus_id") is None, gpu.get("bus_id") or "", gpu["index"])


def _is_ours(process: Facts, guest: str | None) -> bool:
    """Tell whether a profile's process is one of this guest; another guest's profile may have the same name."""
    return guest is None or process.get("guest") in (None, str(guest))


def _unusable(look: Facts, profiles: Facts, guest: str | None = None) -> dict[int, str]:
    """Return {gpu index: why it must not be used}."""
    reasons = {}
    by_gpu: dict[int | None, list[Facts]] = {}
    for process in look.get("processes") or []:
        by_gpu.setdefault(process.get("gpu_index"), []).append(process)
    # A server of ours that nvidia-smi does not list would look like memory of nobody: then memory tells nothing.
    listed = "processes" not in (look.get("unknown") or {})
    listed = listed and all(unit.get("listed") for unit in look.get("units") or [])
    for gpu in look.get("gpus") or []:
        index = gpu["index"]
        here = by_gpu.get(index, [])
        ours = [p for p in here if p.get("profile") in profiles and _is_ours(p, guest)]
        foreign = [p for p in here if p not in ours]
        if gpu.get("healthy") is False:
            reasons[index] = "GPU %d is unhealthy (%s)" % (index, gpu.get("reason") or "no reason given")
        elif gpu.get("mig"):
            reasons[index] = "GPU %d is in MIG mode" % index
        elif foreign and not ours:
            first = foreign[0]
            where = " in guest %s" % first["guest"] if first.get("guest") else ""
            reasons[index] = "GPU %d is used by pid %s (%s)%s" % (
                index,
                first.get("pid"),
                first.get("name") or "name unknown",
                where,
            )
        elif listed and not here and (gpu.get("memory_used_mib") or 0) >= _IDLE_MIB:
            reasons[index] = "GPU %d has %d MiB in use by no process that the host sees" % (
                index,
                gpu["memory_used_mib"],
            )
    return reasons


def _links(look: Facts) -> Links:
    links: Links = {}
    for key, word in (look.get("links") or {}).items():
        first, second = sorted(int(part) for part in str(key).split("-"))
        links[first, second] = word
    return links


def _cost(group: Iterable[int], links: Links) -> int:
    total = 0
    for pair in itertools.combinations(sorted(group), 2):
        word = links.get(pair, "")
        if not word.startswith("NV"):
            total += _LINK_COST.get(word, _UNKNOWN_LINK)
    return total


def _closest(free: Iterable[int], size: int, links: Links) -> list[int]:
    """Return the group of that size with the closest links; the lowest indices where it makes no difference."""
    free = sorted(free)
    if not links or size in (1, len(free)):
        return free[:size]
    groups = itertools.islice(itertools.combinations(free, size), _MOST_GROUPS)
    return list(min(groups, key=lambda group: (_cost(group, links), group)))


def _whole(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _by_node(free: Iterable[int], nodes: dict[int, int | None]) -> tuple[dict[int, list[int]], list[int]]:
    """Return ({node: its free GPUs}, free GPUs of an unknown node)."""
    known: dict[int, list[int]] = {}
    unknown = []
    for index in sorted(free):
        node = nodes[index]
        if node is None:
            unknown.append(index)
        else:
            known.setdefault(node, []).append(index)
    return known, unknown


def _options(
    tp: int,
    numa: str,
    nodes: dict[int, int | None],
    free: set[int],
    links: Links,
    disturbed: dict[int | None, int],
) -> list[list[int]]:
    """Return the groups that a profile with ``gpus: auto`` may get, the best one first; empty where none is right."""
    known, unknown = _by_node(free, nodes)
    fits = [node for node, members in known.items() if len(members) >= tp]
    fits.sort(key=lambda node: (disturbed.get(node, 0), len(known[node]), node))
    options = [_closest(known[node], tp, links) for node in fits]
    if tp == 1:
        options += [unknown[:1]] if unknown else []
    elif numa == "span" and len(free) >= tp:
        crossing = _closest(free, tp, links)
        options += [crossing] if crossing not in options else []
    return options


def _arrange(
    wanted: list[tuple[str, int, str]], nodes: dict[int, int | None], free: set[int], links: Links
) -> dict[str, list[int]] | None:
    """Place all of several profiles (name, tp, numa) at once, or return None where that cannot be done.

    A depth-first search over the nodes, in the order in which each profile alone would choose them.
    """
    seen: set[tuple[int, frozenset[int]]] = set()

    def place(at: int, left: frozenset[int]) -> dict[str, list[int]] | None:
        if at == len(wanted):
            return {}
        if (at, left) in seen or len(seen) >= _MOST_TRIALS:
            return None
        seen.add((at, left))
        name, tp, numa = wanted[at]
        for group in _options(tp, numa, nodes, set(left), links, {}):
            rest = place(at + 1, left - frozenset(group))
            if rest is not None:
                return {name: group, **rest}
        return None

    return place(0, frozenset(free))


def _sharing(name: str, profiles: dict[str, Any]) -> tuple[list[str], str | None]:
    """Return (the profiles whose GPUs this one may get too, None) or ([], one line)."""
    value = profiles[name].get("shared_with")
    others = [value] if isinstance(value, str) else value
    if others is None or others == []:
        return [], None
    if not isinstance(others, (list, tuple)) or not all(isinstance(other, str) for other in others):
        return [], "%s: shared_with is %r; expected the name of a profile, or a list of names" % (name, value)
    for other in others:
        if other == name or other not in profiles:
            return [], "%s: shared_with names %s, expected another profile of sglang_server_profiles (%s)" % (
                name,
                other,
                ", ".join(known for known in profiles if known != name) or "there is none",
            )
        if not (isinstance(profiles[other], dict) and profiles[other].get("serve")):
            return [], (
                "%s: shared_with names %s, which has serve: false and runs alone; name a profile with serve: true, "
                "or leave shared_with out" % (name, other)
            )
    return list(others), None


def _choose(
    name: str,
    profile: Facts,
    gpus: dict[int, Facts],
    nodes: dict[int, int | None],
    free: set[int],
    why_not: dict[int, str],
    links: Links,
    disturbed: dict[int | None, int],
) -> tuple[list[int], None] | tuple[None, str]:
    """Return (group, None) or (None, one line); ``disturbed`` counts the GPUs of a node that others serve on."""
    tp: Any = profile.get("tp")
    if not _whole(tp):
        return None, "%s: tp is %r; expected a whole number of GPUs, 1 or more" % (name, tp)
    numa = profile.get("numa") or "local"
    if numa not in ("local", "span"):
        return None, "%s: numa is %r; expected local or span" % (name, numa)
    wanted = profile.get("gpus", "auto")
    wanted = "auto" if wanted is None else wanted
    if wanted != "auto":
        return _explicit(name, wanted, tp, numa, gpus, nodes, free, why_not)
    options = _options(tp, numa, nodes, free, links, disturbed)
    if options:
        return options[0], None
    known, unknown = _by_node(free, nodes)
    avoided = "; ".join(why_not[index] for index in sorted(why_not))
    avoided = " (avoided: %s)" % avoided if avoided else ""
    have = ", ".join("%d on NUMA node %s" % (len(members), node) for node, members in sorted(known.items()))
    if unknown:
        have = ", ".join(part for part in (have, "%d on an unknown NUMA node" % len(unknown)) if part)
    if len(free) < tp:
        return None, "%s needs %d GPU%s, free are %d of %d%s%s; free some, or lower tp" % (
            name,
            tp,
            "s" if tp > 1 else "",
            len(free),
            len(gpus),
            ": " + have if free else "",
            avoided,
        )
    if unknown:
        return None, (
            "%s needs %d GPUs of one NUMA node, but the host does not know the node of %s: free are %s%s; "
            "set numa: span in the profile to accept that, or give the VM its NUMA topology"
            % (name, tp, gpus_text(unknown), have, avoided)
        )
    return None, (
        "%s needs %d GPUs of one NUMA node, free are %s%s; set numa: span in the profile to accept crossing, "
        "or lower tp" % (name, tp, have, avoided)
    )


def _explicit(
    name: str,
    wanted: Any,
    tp: int,
    numa: str,
    gpus: dict[int, Facts],
    nodes: dict[int, int | None],
    free: set[int],
    why_not: dict[int, str],
) -> tuple[list[int], None] | tuple[None, str]:
    if not isinstance(wanted, (list, tuple)) or not all(_whole(index, 0) for index in wanted):
        return None, "%s: gpus is %r; expected auto or a list of GPU indices as the host counts them" % (name, wanted)
    group = sorted(set(wanted))
    if len(group) != len(wanted):
        return None, "%s: gpus %r names a GPU twice; name each once" % (name, list(wanted))
    if len(group) != tp:
        return None, "%s: gpus names %d (%s) but tp is %d; make them equal" % (name, len(group), ids(group), tp)
    missing = [index for index in group if index not in gpus]
    if missing:
        return None, "%s: %s asked for, the host has %s; correct gpus" % (name, gpus_text(missing), gpus_text(gpus))
    blocked = [index for index in group if index not in free]
    if blocked:
        return None, "%s: %s asked for, not free are %s (%s); free them, or use gpus: auto" % (
            name,
            gpus_text(group),
            ids(blocked),
            "; ".join(why_not.get(index, "GPU %d is taken" % index) for index in blocked),
        )
    there = {nodes[index] for index in group}
    if numa != "span" and tp > 1 and (len(there) > 1 or None in there):
        where = ", ".join("%d on %s" % (index, "node %s" % _or_unknown(nodes[index])) for index in group)
        return None, (
            "%s: GPUs %s are on %s (%s), expected one known node; choose GPUs of one node, or set numa: span"
            % (name, ids(group), nodes_text(there), where)
        )
    return group, None


def _or_unknown(node: int | None) -> str:
    return "unknown" if node is None else str(node)


def _cores(numa_row: Facts) -> list[list[int]]:
    """Return the node's CPUs grouped by core, in order; a CPU without known siblings is its own core."""
    cpus = list(numa_row.get("cpu_list") or [])
    if not cpus and numa_row.get("cpus"):
        cpus = cpulist.parse(numa_row["cpus"])
    left = set(cpus)
    cores = []
    for text in numa_row.get("siblings") or []:
        core = [cpu for cpu in cpulist.parse(text) if cpu in left]
        left -= set(core)
        if core:
            cores.append(core)
    cores += [[cpu] for cpu in sorted(left)]
    return sorted(cores)


def _cut(items: list[list[int]], parts: int) -> list[list[list[int]]]:
    """Cut a list into consecutive parts as even as can be."""
    return [items[i * len(items) // parts : (i + 1) * len(items) // parts] for i in range(parts)]


def _flat(cores: Iterable[list[int]]) -> list[int]:
    return sorted(cpu for core in cores for cpu in core)


class _NodeCpus:
    """How the CPUs of one node are shared out: per profile, and to the load client."""

    def __init__(
        self, row: Facts, node_gpus: list[int], serving: list[str], benchmarks: list[str], take_over: bool
    ) -> None:
        """Share out one node.

        Args:
            row: the node, of the look.
            node_gpus: indices of all GPUs of the node.
            serving: names of the serve profiles with a GPU here, in order.
            benchmarks: names of the other profiles with a GPU here; one of them runs at a time.
            take_over: the serve profiles stand still while a benchmark runs.
        """
        self.node = row["node"]
        self.cores = _cores(row)
        self.gpus = sorted(node_gpus)
        self.by_gpu = None
        self.shared = False
        slices = len(self.gpus) + 1
        claims = len(serving) + bool(benchmarks) + 1
        if len(self.cores) >= slices:
            parts = _cut(self.cores, slices)
            self.by_gpu = {gpu: parts[place] for place, gpu in enumerate(self.gpus)}
            self.client = _flat(parts[-1])
            return
        if len(self.cores) >= claims:
            parts = _cut(self.cores, claims)
            shares = {name: parts[place] for place, name in enumerate(serving)}
            for name in benchmarks:
                shares[name] = self.cores[: -len(parts[-1])] if take_over else parts[-2]
        else:
            self.shared = True
            parts = [self.cores[:-1], self.cores[-1:]] if len(self.cores) > 1 else [self.cores, self.cores]
            shares = dict.fromkeys([*serving, *benchmarks], parts[0])
        self.shares = {name: _flat(part) for name, part in shares.items()}
        self.client = _flat(parts[-1])

    def of(self, name: str, group: list[int]) -> list[int]:
        if self.by_gpu is not None:
            return _flat(core for gpu in group if gpu in self.by_gpu for core in self.by_gpu[gpu])
        return self.shares[name]


def plan(
    look: Facts,
    profiles: dict[str, Any],
    reserved: Iterable[int] = (),
    take_over: bool = False,
    guest_gpus: Sequence[int] | None = None,
    guest: str | None = None,
) -> Facts:
    """Place every profile, or say in one line why not.

    Profiles with ``serve: true`` come first, in the order in which they are declared, GPUs named explicitly before
    ``gpus: auto``; no GPU is given to two of them, but for ``shared_with``, which places a profile on GPUs of the
    profiles that it names. Where one after the other leaves one out, all of them are arranged together if that can be
    done. The others (benchmarks) are placed one at a time against what is left, since only one of them runs at a time,
    on the node where the fewest GPUs serve. ``gpus: auto`` takes the node with the fewest free suitable GPUs that still
    holds the group, and there the closest links. A group crosses nodes only with ``numa: span``.

    A production profile stays where it was put (the guest's ``placement`` in the look) while that is still right, so
    that a tool that is silent for once, or a stranger that came and went, moves no server.

    CPUs: each GPU of a node owns an equal slice of the node's cores and the load client one more, so that the CPUs of
    a profile do not change when another profile is added. With fewer cores than that, the profiles at hand and the
    client share them out; with fewer still, they share them all and ``notes`` says so.

    Args:
        look: facts of the host (host_look).
        profiles: mapping of name to profile (tp, gpus, numa, serve, shared_with), in declared order.
        reserved: GPU indices to leave alone.
        take_over: place the benchmark profiles as if no ``serve`` profile were running.
        guest_gpus: host indices of the GPUs that the guest has (see ``guest_gpus``); None means all.
        guest: the guest that the profiles are of; processes of another guest are foreign whatever their profile's name.

    Returns:
        dict: ``profiles`` (name to gpus, bus_ids, minors, guest_gpus as the guest counts, numa_nodes, cpus,
        memory_nodes, numa, memory_policy, cpus_shared, shared_with; cpus is None where the node is unknown),
        ``refused`` (name to one line), ``client_cpus`` (list text, None where no CPU is known), ``avoided``
        (texts: GPUs that are sick or used by somebody else), ``notes``.
    """
    gpus = {gpu["index"]: gpu for gpu in look.get("gpus") or []}
    nodes = {index: gpu_node(gpu, look) for index, gpu in gpus.items()}
    links = _links(look)
    why_not = _unusable(look, profiles, guest)
    avoided = [why_not[index] for index in sorted(why_not)]
    for index in reserved:
        why_not.setdefault(index, "GPU %d is reserved" % index)
    if guest_gpus is not None:
        for index in gpus:
            if index not in guest_gpus:
                why_not.setdefault(index, "GPU %d is not given to the guest" % index)
    usable = set(gpus) - set(why_not)
    refused: dict[str, str] = {}
    groups: dict[str, list[int]] = {}
    taken: dict[int, list[str]] = {}
    nothing = (look.get("unknown") or {}).get("gpus")
    kept = recorded(look, guest)

    def attempt(name: str, free: set[int], reasons: dict[int, str], disturbed: dict[int | None, int]) -> None:
        profile = profiles[name]
        if not isinstance(profile, dict):
            refused[name] = "%s: the profile is %r; expected a mapping" % (name, profile)
            return
        if not gpus:
            refused[name] = "%s: the host reports no GPU%s; run recover.yml, then specrig topology" % (
                name,
                " (%s)" % nothing if nothing else "",
            )
            return
        others, line = _sharing(name, profiles)
        if line is None and others:
            free, line = _shareable(name, profile, others, groups, taken, free)
        if line is None and _still_right(profile, kept.get(name), gpus, nodes, free):
            groups[name] = _group_of(kept[name], gpus)
        elif line is None:
            group, line = _choose(name, profile, gpus, nodes, free, reasons, links, disturbed)
            if group is not None:
                groups[name] = group
        if line is not None:
            refused[name] = line

    serving = [name for name, profile in profiles.items() if isinstance(profile, dict) and profile.get("serve")]
    serving.sort(key=lambda name: (bool(profiles[name].get("shared_with")), _is_auto(profiles[name]), name not in kept))
    for name in serving:
        reasons = dict(why_not)
        reasons.update({i: "GPU %d is planned for %s" % (i, " and ".join(names)) for i, names in taken.items()})
        attempt(name, usable - set(taken), reasons, {})
        for index in groups.get(name, ()):
            taken.setdefault(index, []).append(name)
        if name == _last_alone(serving, profiles):
            _together(serving, profiles, nodes, usable, links, groups, refused, taken)
    blocked = {} if take_over else {i: "GPU %d serves %s" % (i, " and ".join(names)) for i, names in taken.items()}
    disturbed: dict[int | None, int] = {}
    for index in blocked:
        disturbed[nodes[index]] = disturbed.get(nodes[index], 0) + 1
    for name in profiles:
        if name not in serving:
            attempt(name, usable - set(blocked), {**why_not, **blocked}, disturbed)

    planned, client, notes = _with_cpus(look, nodes, groups, serving, take_over)
    unbound = [name for name in groups if planned[name]["cpus"] is None]
    if unbound and client:
        notes.append(
            "%s: the NUMA node of its GPUs is not known, so no CPUs are its own; the load client may run on the same"
            % ", ".join(unbound)
        )
    visible = sorted(gpus.values(), key=_bus_order)
    if guest_gpus is not None:
        visible = [gpu for gpu in visible if gpu["index"] in guest_gpus]
    position = {gpu["index"]: place for place, gpu in enumerate(visible)}
    policy = {row["node"]: row.get("memory_policy") for row in look.get("numa") or []}
    for name, group in groups.items():
        there = [nodes[index] for index in group]
        distinct = sorted({node for node in there if node is not None})
        answers = {policy.get(node) for node in distinct} or {None}
        row = planned[name]
        together = [other for other in profiles if other in serving and other != name]
        together = [other for other in together if set(groups.get(other, ())) & set(group)]
        together = together if name in serving or profiles[name].get("shared_with") else []
        row["cpus_shared"] = row["cpus_shared"] or bool(together)
        row.update(
            shared_with=together,
            gpus=group,
            bus_ids=[gpus[index].get("bus_id") for index in group],
            minors=[gpus[index].get("minor") for index in group],
            guest_gpus=[position[index] for index in group],
            numa_nodes=distinct if None not in there else [*distinct, None],
            memory_nodes=distinct if None not in there else [],
            numa="local" if len(distinct) + (None in there) == 1 else "span",
            memory_policy=False if False in answers else (None if None in answers else True),
        )
    return {
        "profiles": {name: planned[name] for name in profiles if name in planned},
        "refused": {name: refused[name] for name in profiles if name in refused},
        "client_cpus": client,
        "avoided": avoided,
        "notes": notes,
    }


def _is_auto(profile: Facts) -> bool:
    return profile.get("gpus", "auto") in ("auto", None)


def parse_record(text: str | None) -> dict[str, list[str]]:
    """Return {profile: bus ids of its GPUs} of a guest's record; empty where there is none or it is none."""
    try:
        record = json.loads(text or "{}")
    except ValueError:
        return {}
    if not isinstance(record, dict):
        return {}
    return {
        name: list(buses)
        for name, buses in record.items()
        if isinstance(buses, list) and all(isinstance(bus, str) for bus in buses)
    }


def record(plan: Facts, profiles: dict[str, Any], before: dict[str, list[str]] | None = None) -> dict[str, list[str]]:
    """Return what is to be remembered of a plan: where the production profiles with ``gpus: auto`` are.

    A profile that could not be placed this time keeps the place that it had before.
    """
    result = {name: buses for name, buses in (before or {}).items() if name in profiles}
    for name, row in (plan.get("profiles") or {}).items():
        profile = profiles.get(name)
        if not (isinstance(profile, dict) and profile.get("serve")):
            continue
        if _is_auto(profile) and not profile.get("shared_with") and None not in row["bus_ids"]:
            result[name] = row["bus_ids"]
        else:
            result.pop(name, None)
    return result


def recorded(look: Facts, guest: str | None) -> dict[str, list[str]]:
    """Return where a guest's production profiles were put, as the look saw it: profile to bus ids."""
    rows = [row for row in look.get("guests") or [] if guest is not None and str(row.get("name")) == str(guest)]
    return (rows[0].get("placement") or {}) if rows else {}


def _group_of(buses: Iterable[str], gpus: dict[int, Facts]) -> list[int]:
    by_bus = {gpu.get("bus_id"): index for index, gpu in gpus.items()}
    return sorted(by_bus[bus] for bus in buses if bus in by_bus)


def _still_right(
    profile: Facts, buses: list[str] | None, gpus: dict[int, Facts], nodes: dict[int, int | None], free: set[int]
) -> bool:
    """Tell whether a production profile may stay on the GPUs that it was put on."""
    if not buses or not profile.get("serve") or not _is_auto(profile) or profile.get("shared_with"):
        return False
    group = _group_of(buses, gpus)
    there = {nodes[index] for index in group}
    if len(group) != len(buses) or profile.get("tp") != len(group) or not set(group) <= free:
        return False
    return len(group) == 1 or profile.get("numa") == "span" or (len(there) == 1 and None not in there)


def _last_alone(serving: list[str], profiles: dict[str, Any]) -> str | None:
    """Return the last of the profiles that want GPUs of their own."""
    alone = [name for name in serving if not profiles[name].get("shared_with")]
    return alone[-1] if alone else None


def _together(
    serving: list[str],
    profiles: dict[str, Any],
    nodes: dict[int, int | None],
    usable: set[int],
    links: Links,
    groups: dict[str, list[int]],
    refused: dict[str, str],
    taken: dict[int, list[str]],
) -> None:
    """Where one profile after the other left one out, arrange all that have ``gpus: auto`` anew if all of them fit."""
    movable = [name for name in serving if _is_auto(profiles[name]) and not profiles[name].get("shared_with")]
    if not [name for name in movable if name in refused]:
        return
    wanted = []
    for name in movable:
        tp, numa = profiles[name].get("tp"), profiles[name].get("numa") or "local"
        if not _whole(tp) or numa not in ("local", "span"):
            return
        wanted.append((name, tp, numa))
    fixed = {index for index, names in taken.items() if not set(names) & set(movable)}
    found = _arrange(wanted, nodes, usable - fixed, links)
    if found is None:
        return
    for index in [index for index in taken if index not in fixed]:
        del taken[index]
    for name, group in found.items():
        groups[name] = group
        refused.pop(name, None)
        for index in group:
            taken.setdefault(index, []).append(name)


def _shareable(
    name: str,
    profile: Facts,
    others: list[str],
    groups: dict[str, list[int]],
    taken: dict[int, list[str]],
    free: set[int],
) -> tuple[set[int], str | None]:
    """Return (GPUs that a profile with ``shared_with`` may get, None) or (set(), one line)."""
    missing = [other for other in others if other not in groups]
    if missing:
        return set(), "%s: shared_with names %s, which got no GPU itself; see why, or leave shared_with out" % (
            name,
            " and ".join(missing),
        )
    pool = {index for other in others for index in groups[other] if set(taken.get(index, ())) <= set(others)}
    if not _is_auto(profile):
        return free | pool, None
    tp = profile.get("tp")
    if _whole(tp) and len(pool) < tp:
        return set(), (
            "%s: shared_with %s offers %s that nobody else shares, tp is %d; lower tp, or name more profiles"
            % (name, " and ".join(others), gpus_text(sorted(pool)), tp)
        )
    return pool, None


def guest_gpus(
    look: Facts, guest: str, nodes: Iterable[Facts] | None = None, given: Sequence[int] | None = None
) -> list[int] | None:
    """Return the host's indices of the GPUs that a guest has, in order, or None where that is not known.

    Args:
        look: facts of the host (host_look).
        guest: the guest's name.
        nodes: the nodes that a role has just put into the guest; without them the ones that the look saw inside count.
        given: indices that the inventory gives to the guest: it counts no others, whatever nodes were left in it, and
            these where nothing is known of its nodes.
    """
    if nodes is None:
        row = next((row for row in look.get("guests") or [] if str(row.get("name")) == str(guest)), {})
        nodes = row.get("nodes") or []
    major = (look.get("majors") or {}).get("nvidia")
    minors = {
        node.get("minor")
        for node in nodes
        if _GPU_NODE.match(str(node.get("path")))
        and node.get("kind", "char") == "char"
        and (major is None or node.get("major") is None or int(node["major"]) == major)
    }
    numbers = {int(minor) for minor in minors if minor is not None}
    found = sorted(gpu["index"] for gpu in look.get("gpus") or [] if gpu.get("minor") in numbers)
    if given:
        return [index for index in found if index in given] or sorted(given)
    return found or None


def nodes_for_guest(nodes: Iterable[Facts], look: Facts, given: Sequence[int] | None) -> list[Facts]:
    """Return the nodes that belong in a guest: all of them, or without those of GPUs that it is not given.

    Args:
        nodes: all NVIDIA nodes of the host (driver_nodes).
        look: facts of the host, for which node is which GPU.
        given: host indices of the guest's GPUs; empty means all.

    Raises:
        ValueError: one line, where an index is none of the host's or its node is not known.
    """
    if not given:
        return list(nodes)
    minors = {gpu["index"]: gpu.get("minor") for gpu in look.get("gpus") or []}
    if not all(_whole(index, 0) for index in given):
        raise ValueError("lxc_guest_gpus is %r; expected a list of GPU indices as the host counts them" % (given,))
    missing = [index for index in given if minors.get(index) is None]
    if missing and minors:
        raise ValueError(
            "lxc_guest_gpus names %s, the host has %s; correct it" % (gpus_text(missing), gpus_text(minors))
        )
    wanted = {minors.get(index) for index in given}
    return [node for node in nodes if not _GPU_NODE.match(str(node.get("path"))) or int(node["minor"]) in wanted]


def _with_cpus(
    look: Facts, nodes: dict[int, int | None], groups: dict[str, list[int]], serving: list[str], take_over: bool
) -> tuple[dict[str, Facts], str | None, list[str]]:
    """Return ({name: {cpus, cpus_shared}}, client CPU list text or None, notes)."""
    shares = {}
    for row in look.get("numa") or []:
        if _cores(row):
            here = [name for name in groups if any(nodes[index] == row["node"] for index in groups[name])]
            shares[row["node"]] = _NodeCpus(
                row,
                [index for index, node in nodes.items() if node == row["node"]],
                [name for name in here if name in serving],
                [name for name in here if name not in serving],
                take_over,
            )
    result = {}
    for name, group in groups.items():
        there = sorted({node for node in (nodes[index] for index in group) if node in shares and node is not None})
        whole = all(nodes[index] in shares for index in group)
        cpus = sorted(cpu for node in there for cpu in shares[node].of(name, group))
        result[name] = {
            "cpus": cpulist.format(cpus) if whole and cpus else None,
            "cpus_shared": any(shares[node].shared for node in there),
        }
    notes = [
        "NUMA node %d has too few CPU cores (%d) for its profiles and the load client: they share them"
        % (share.node, len(share.cores))
        for share in shares.values()
        if share.shared
    ]
    client = {cpu for share in shares.values() for cpu in share.client}
    return result, cpulist.format(client) or None, notes


def verify(planned_profile: Facts | None, look: Facts, profile_name: str, guest: str | None = None) -> Facts:
    """Return the placement gate's row: where the host sees the profile's processes, against the plan.

    ``fail`` where a GPU, node or CPU differs from the plan or nothing runs, ``unknown`` where the host cannot tell.
    Where the guest is named, processes of another guest are somebody else's whatever their profile's name.
    """
    partners = {profile_name, *((planned_profile or {}).get("shared_with") or [])}
    gpus = {gpu["index"]: gpu for gpu in look.get("gpus") or []}
    expected_gpus = list((planned_profile or {}).get("gpus") or [])
    expected_nodes = list((planned_profile or {}).get("numa_nodes") or [])
    everyone = look.get("processes") or []
    processes = [p for p in everyone if p.get("profile") == profile_name and _is_ours(p, guest)]
    seen_gpus = sorted({p["gpu_index"] for p in processes if p.get("gpu_index") is not None})
    seen_all = [gpu_node(gpus[i], look) if i in gpus else None for i in seen_gpus]
    seen_nodes = sorted({n for n in seen_all if n is not None}) + ([None] if None in seen_all else [])
    strangers = {
        p["pid"]: p
        for p in everyone
        if p.get("gpu_index") in expected_gpus and p.get("pid") is not None
        if p.get("profile") not in partners or not _is_ours(p, guest)
    }
    others = sorted(strangers)
    members = [e for e in look.get("engines") or [] if e.get("profile") == profile_name and _is_ours(e, guest)]
    visible = sorted({p["visible"] for p in [*processes, *members] if p.get("visible")})
    policies = sorted({word for e in members for word in e.get("memory_policy") or []})
    row = {
        "gate": "placement",
        "subject": profile_name,
        "profile": profile_name,
        "status": "unknown",
        "seen": {
            "gpus": seen_gpus,
            "numa_nodes": seen_nodes,
            "pids": sorted(p["pid"] for p in processes if p.get("pid") is not None),
            "cpus": sorted({p["cpus_allowed"] for p in [*processes, *members] if p.get("cpus_allowed")}),
            "visible": visible,
            "memory_policy": policies or None,
            "opened": _opened(members),
            "others": others,
        },
        "expected": {
            "gpus": expected_gpus,
            "numa_nodes": expected_nodes,
            "cpus": (planned_profile or {}).get("cpus"),
            "numa": (planned_profile or {}).get("numa") or "local",
            "visible": _visible_text(planned_profile),
            "memory_policy": _policy_text(planned_profile),
        },
        "message": "",
    }
    unit = "specrig-sglang@%s.service" % profile_name
    status, message = _judge(row, planned_profile, processes, members, gpus, look, unit)
    if others and status != "fail":
        message += "; also on these GPUs: %s of somebody else" % ", ".join(_stranger(strangers[pid]) for pid in others)
    row["status"], row["message"] = status, "%s: %s" % (profile_name, message)
    return row


def misplaced(plan: Facts, look: Facts, guest: str | None = None) -> dict[str, str]:
    """Return {profile: one line} of the planned profiles whose ranks the host sees on other GPUs than planned."""
    found = {}
    for name, planned in (plan.get("profiles") or {}).items():
        row = verify(planned, look, name, guest)
        seen = row["seen"]["gpus"]
        if row["status"] == "fail" and seen and seen != sorted(row["expected"]["gpus"]):
            found[name] = "its ranks run on %s, planned %s" % (gpus_text(seen), gpus_text(row["expected"]["gpus"]))
    return found


def _stranger(process: Facts) -> str:
    about = [process.get("name") or "name unknown"]
    if process.get("guest"):
        about.append("guest %s" % process["guest"])
    if process.get("memory_mib") is not None:
        about.append("%d MiB" % process["memory_mib"])
    return "pid %d (%s)" % (process["pid"], ", ".join(about))


def _opened(members: list[Facts]) -> list[int] | None:
    """Return the GPUs whose nodes a unit's processes hold open, or None where no process's descriptors can be read."""
    told = [set(e["held"]) for e in members if e.get("held") is not None]
    return sorted(set().union(*told)) if told else None


def _visible_text(planned: Facts | None) -> str | None:
    """Return CUDA_VISIBLE_DEVICES as planned, or None where nothing is."""
    listed = (planned or {}).get("guest_gpus")
    return ",".join(str(index) for index in listed) if listed else None


def _policy_text(planned: Facts | None) -> str | None:
    """Return the memory policy as planned, in the words of numa_maps, or None where none is set."""
    if not planned or planned.get("memory_policy") is not True or not planned.get("memory_nodes"):
        return None
    return "bind:" + cpulist.format(planned["memory_nodes"])


def _inferred(
    row: Facts, members: list[Facts], gpus: dict[int, Facts], plan_text: str, unit: str
) -> tuple[tuple[str, str] | None, list[int], str]:
    """Return (verdict, GPUs, words) of a unit of which nvidia-smi lists no process, from what its processes hold.

    A process can be on no GPU whose node it has not opened, and on none that CUDA_VISIBLE_DEVICES hides from it. So
    open nodes that are exactly the planned ones prove the place; where more are open, the variable does, together with
    the memory that is in use on each planned GPU.
    """
    expected = sorted(row["expected"]["gpus"])
    opened = row["seen"]["opened"]
    holders = [e for e in members if e.get("held")]
    idle = [i for i in expected if (gpus.get(i, {}).get("memory_used_mib") or 0) < _IDLE_MIB]
    unread = [e for e in holders if e.get("visible") is None]
    unlisted = "nvidia-smi lists none of its processes"
    status, words = "unknown", ""
    if opened is None:
        words = "what its processes hold open can't be read; %s; %s" % (unlisted, plan_text)
    elif not opened:
        status, words = "fail", "none of its processes has opened a GPU, %s; is %s running?" % (plan_text, unit)
    elif _wrong_visible(row):
        status, words = "fail", "%s; stop %s and start it by recover.yml" % (_wrong_visible(row), unit)
    elif not set(expected) <= set(opened):
        status = "fail"
        words = "its processes hold %s open, %s; stop %s and start it by recover.yml" % (
            gpus_text(opened),
            plan_text,
            unit,
        )
    elif opened == expected:
        return None, expected, " by the nodes that they hold open"
    elif not unread and not idle:
        return None, expected, " by CUDA_VISIBLE_DEVICES and the memory in use"
    else:
        doubt = "no memory is in use on %s" % gpus_text(idle) if idle else "their environment can't be read"
        words = "its processes hold %s open and %s; %s; %s" % (gpus_text(opened), doubt, unlisted, plan_text)
    return (status, words), [], ""


def _within(visible: str, row: Facts) -> bool:
    """Tell whether a CUDA_VISIBLE_DEVICES names planned GPUs only."""
    wanted = row["expected"]["visible"]
    return wanted is None or set(visible.replace(" ", "").split(",")) <= set(wanted.split(","))


def _judge(
    row: Facts,
    planned: Facts | None,
    processes: list[Facts],
    members: list[Facts],
    gpus: dict[int, Facts],
    look: Facts,
    unit: str,
) -> tuple[str, str]:
    expected = row["expected"]
    if not planned or not expected["gpus"]:
        return "fail", "no placement is planned for it; correct the profile (specrig topology shows what is there)"
    plan_text = "planned %s (%s)" % (gpus_text(expected["gpus"]), nodes_text(expected["numa_nodes"]))
    sliced = [i for i in expected["gpus"] if gpus.get(i, {}).get("mig")]
    if sliced:
        return "unknown", "%s in MIG mode, where processes belong to instances and not to GPUs; %s" % (
            gpus_text(sliced) + (" is" if len(sliced) == 1 else " are"),
            plan_text,
        )
    reason = (look.get("unknown") or {}).get("processes")
    seen_gpus, seen_nodes, by = row["seen"]["gpus"], row["seen"]["numa_nodes"], ""
    if reason or not processes:
        verdict: tuple[str, str] | None = None
        if members:
            verdict, seen_gpus, by = _inferred(row, members, gpus, plan_text, unit)
        elif not reason:
            verdict = _nothing(row, gpus, look, plan_text, unit)
        if reason and (verdict is None or verdict[0] != "fail"):
            # A tool that fails is a fault of its own, whatever else shows the place.
            told = "ranks seem to run on %s%s" % (gpus_text(seen_gpus), by) if by else "nothing else tells it either"
            verdict = (
                "unknown",
                "the host cannot list GPU processes (%s); %s, %s; repair nvidia-smi and look again"
                % (reason, told, plan_text),
            )
        if verdict:
            return verdict
        there = [gpu_node(gpus[i], look) if i in gpus else None for i in seen_gpus]
        seen_nodes = sorted({n for n in there if n is not None}) + ([None] if None in there else [])
        row["seen"].update(gpus=seen_gpus, numa_nodes=seen_nodes)
        by += " (nvidia-smi lists none of its processes)"
    if any(p.get("gpu_index") is None for p in processes):
        return "unknown", "the GPU of some of its processes is not known; %s; run specrig topology" % plan_text
    seen_text = "ranks run on %s (%s)" % (gpus_text(seen_gpus), nodes_text(seen_nodes))
    if row["seen"]["visible"]:
        seen_text += " with CUDA_VISIBLE_DEVICES=%s" % " and ".join(row["seen"]["visible"])
    seen_text += by
    if seen_gpus != sorted(expected["gpus"]):
        crossing = ""
        if len(seen_nodes) > 1 and expected["numa"] != "span":
            crossing = ", so the group crosses NUMA nodes"
        return "fail", "%s, %s%s; stop %s and start it by recover.yml" % (seen_text, plan_text, crossing, unit)
    if expected["numa"] != "span" and len(seen_nodes) > 1:
        return "fail", "%s, which crosses NUMA nodes, %s; plan it again by recover.yml" % (seen_text, plan_text)
    known = [n for n in seen_nodes if n is not None]
    if [n for n in expected["numa_nodes"] if n is not None] != known and expected["numa_nodes"]:
        return "fail", "%s, %s; the topology has changed: plan it again by recover.yml" % (seen_text, plan_text)
    wrong = _wrong_cpus(row, planned, known, look) or _wrong_memory(row, planned, members) or _wrong_visible(row)
    if wrong:
        return "fail", "%s as planned, but %s; start %s by recover.yml" % (seen_text, wrong, unit)
    return "pass", "%s as planned" % seen_text


def _nothing(row: Facts, gpus: dict[int, Facts], look: Facts, plan_text: str, unit: str) -> tuple[str, str]:
    """Return the verdict on a profile of which neither nvidia-smi nor /proc shows a process."""
    expected = row["expected"]["gpus"]
    used = [i for i in expected if (gpus.get(i, {}).get("memory_used_mib") or 0) >= _IDLE_MIB]
    unlisted = [i for i in used if not any(p.get("gpu_index") == i for p in look.get("processes") or [])]
    if unlisted:
        return "unknown", (
            "memory is in use on %s but the host lists no process there; %s; "
            "look for orphans with fuser -v /dev/nvidia*" % (gpus_text(unlisted), plan_text)
        )
    return "fail", "none of its processes is on any GPU, %s; is %s running?" % (plan_text, unit)


def _wrong_memory(row: Facts, planned: Facts, members: list[Facts]) -> str | None:
    """Return what is wrong with the memory policy of the running processes, or None; unread is not wrong."""
    wanted = row["expected"]["memory_policy"]
    if wanted is None:
        return None
    nodes = set(planned["memory_nodes"])
    for one in members:
        allowed = one.get("mems_allowed")
        if allowed and not nodes <= set(cpulist.parse(allowed)):
            return "pid %s may take memory of node %s only, planned %s (a cpuset of the guest?)" % (
                one["pid"],
                allowed,
                wanted,
            )
        away = numa.outside(one.get("memory_policy") or [], nodes)
        if away:
            return "pid %s has the memory policy %s, planned %s" % (one["pid"], ", ".join(away), wanted)
    return None


def _wrong_visible(row: Facts) -> str | None:
    """Return what is wrong with the environment of the running processes, or None."""
    for text in row["seen"]["visible"]:
        if not _within(text, row):
            return "CUDA_VISIBLE_DEVICES is %s, planned %s: an environment of before" % (
                text,
                row["expected"]["visible"],
            )
    return None


def _wrong_cpus(row: Facts, planned: Facts, known_nodes: list[int], look: Facts) -> str | None:
    """Return what is wrong with the CPUs that the ranks may run on, or None."""
    if not planned.get("cpus"):
        return None
    of_nodes = {cpu for n in look.get("numa") or [] if n["node"] in known_nodes for cpu in _flat(_cores(n))} | set(
        cpulist.parse(planned["cpus"])
    )
    for text in row["seen"]["cpus"]:
        away = [cpu for cpu in cpulist.parse(text) if cpu not in of_nodes]
        if away:
            return "may run on CPUs %s, planned CPUs %s (%s)" % (text, planned["cpus"], nodes_text(known_nodes))
    return None
