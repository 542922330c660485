"""Parsers on machines that were never recorded: made up by chance, written the ways tools write, read back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specrig.facts import cpulist, look, numa, procfs, smi, topo
from specrig.facts.explain import explain

ENDS = st.sampled_from(["\n", "\r\n"])
LINKS = ("SYS", "NODE", "PHB", "PXB", "PIX", "NV4", "NV18")
LOCALES = {
    "en": ("NUMA node(s):", "NUMA node%d CPU(s):", "Off-line CPU(s) list:"),
    "de": ("NUMA-Knoten:", "NUMA-Knoten%d CPU(s):", "Liste der Offline-CPU(s):"),
    "fr": ("Nœud(s) NUMA :", "Nœud NUMA %d de processeur(s) :", None),
    "es": ("Modo(s) NUMA:", "CPU(s) del nodo NUMA %d:", None),
    "pt": ("Nó(s) de NUMA:", "CPU(s) de nó%d NUMA:", None),
    "pl": ("Węzły NUMA:", "Procesory węzła NUMA %d:", None),
    "ja": ("NUMA ノード数:", "NUMA ノード %d CPU:", None),
    "zh": ("NUMA 节点：", "NUMA 节点%d CPU：", None),
}


@st.composite
def boxes(draw) -> dict:
    """NUMA nodes with CPUs and memory (either may be missing), offline CPUs, GPUs on nodes or on none that is known."""
    count = draw(st.integers(1, 5))
    owner = draw(st.lists(st.integers(-1, count - 1), min_size=1, max_size=24))  # -1 is offline
    nodes = {node: [cpu for cpu, at in enumerate(owner) if at == node] for node in range(count)}
    return {
        "nodes": nodes,
        "memory": {node: draw(st.sampled_from([0, 64_000, 773_676])) for node in nodes},
        "offline": [cpu for cpu, at in enumerate(owner) if at == -1],
        "gpus": draw(st.lists(st.one_of(st.none(), st.integers(0, count - 1)), min_size=1, max_size=9)),
    }


@given(boxes(), ENDS, st.sampled_from(sorted(LOCALES)))
def test_lscpu_in_any_language(box, end, locale):
    total, node, offline = LOCALES[locale]
    lines = ["Architecture:  x86_64", f"{total}   {len(box['nodes'])}"]
    if offline and box["offline"]:
        lines.append(f"{offline}  {cpulist.format(box['offline'])}")
    lines += [f"{node % number}   {cpulist.format(cpus)}" for number, cpus in box["nodes"].items()]
    told = numa.parse(end.join(lines) + end)
    assert {row["node"]: row["cpu_list"] for row in told["numa"]} == box["nodes"]
    assert told["offline_cpus"] == (cpulist.format(box["offline"]) if offline and box["offline"] else None)


@given(boxes(), ENDS)
def test_numactl_with_nodes_that_lack_cpus_or_memory(box, end):
    lines = [f"available: {len(box['nodes'])} nodes (0-{len(box['nodes']) - 1})"]
    for node, cpus in box["nodes"].items():
        lines += [
            " ".join([f"node {node} cpus:", *map(str, cpus)]),
            f"node {node} size: {box['memory'][node]} MB",
            f"node {node} free: 1 MB",
        ]
    told = numa.parse(end.join([*lines, "node distances:", "node   0", "  0:  10"]) + end)
    assert {row["node"]: row["cpu_list"] for row in told["numa"]} == box["nodes"]
    assert {row["node"]: row["memory_mib"] for row in told["numa"]} == box["memory"]
    empty = [node for node, cpus in box["nodes"].items() if not cpus and not box["memory"][node]]
    assert told["problems"] == [f"node {node} has neither CPUs nor memory" for node in empty]


@given(boxes(), st.integers(0, 2), st.sets(st.sampled_from(["CPU", "NUMA", "GPU"])), ENDS, st.data())
def test_topo_with_any_gpus_nics_and_columns(box, nics, columns, end, data):
    """Every column may be missing; a node that is not told is unknown, never 0."""
    names = [f"GPU{index}" for index in range(len(box["gpus"]))] + [f"NIC{index}" for index in range(nics)]
    heads = {"CPU": "CPU Affinity", "NUMA": "NUMA Affinity", "GPU": "GPU NUMA ID"}
    shown = [key for key in heads if key in columns]
    link = data.draw(st.sampled_from(LINKS))
    lines = ["\t".join(["", *names, *(heads[key] for key in shown)])]
    for index, name in enumerate(names):
        row = [name, *(" X " if other == name else link for other in names)]
        if index < len(box["gpus"]):
            node = box["gpus"][index]
            told = "N/A" if node is None else str(node)
            row += [{"CPU": "0-3", "NUMA": told, "GPU": "N/A"}[key] for key in shown]
        lines.append("\t".join(row))
    facts = topo.parse(end.join(lines) + end)
    right = [None if node is None or "NUMA" not in columns else [node] for node in box["gpus"]]
    assert [gpu["numa_nodes"] for gpu in facts["gpus"]] == right
    assert [gpu["cpus"] for gpu in facts["gpus"]] == ["0-3" if "CPU" in columns else None] * len(right)
    assert facts["nics"] == nics
    assert set(facts["links"].values()) <= {link}
    assert len(facts["links"]) == len(right) * (len(right) - 1) // 2


COLUMNS = {
    "index": ("index", lambda n: str(n), "index", lambda n: n),
    "uuid": ("uuid", lambda n: f"GPU-{n:08x}", "uuid", lambda n: f"GPU-{n:08x}"),
    "bus": ("pci.bus_id", lambda n: f"00000000:{n:02X}:00.0", "bus_id", lambda n: f"0000:{n:02x}:00.0"),
    "used": ("memory.used [MiB]", lambda n: f"{n} MiB", "memory_used_mib", lambda n: n),
    "mig": ("mig.mode.current", lambda n: "[N/A]" if n % 3 else "Enabled", "mig", lambda n: None if n % 3 else True),
    "power": ("power.limit [W]", lambda n: f"{n}.50 W", "power_limit_w", lambda n: n + 0.5),
    "on": ("persistence_mode", lambda n: "Disabled" if n % 2 else "Enabled", "persistence", lambda n: not n % 2),
    "clock": ("clocks.current.sm [MHz]", lambda n: f"{n} MHz", "clock_sm_mhz", lambda n: n),
}


@given(st.permutations(sorted(COLUMNS)), st.integers(2, 8), st.integers(1, 9), ENDS, st.booleans())
def test_csv_with_any_columns_in_any_order(order, kept, count, end, units):
    """A column that is not there is None in every GPU; one that is there is right wherever it stands."""
    present = order[:kept]
    cells = [[COLUMNS[key][0] for key in present]]
    cells += [[COLUMNS[key][1](n) for key in present] for n in range(count)]
    if not units:
        cells = [[cell.split(" ")[0] for cell in row] for row in cells]
    gpus, problems = smi.gpus_of_csv(smi.parse_csv(end.join(", ".join(row) for row in cells) + end))
    assert problems == []
    for key, (_, _, fact, right) in COLUMNS.items():
        assert [gpu[fact] for gpu in gpus] == [right(n) if key in present else None for n in range(count)], key


@given(
    st.dictionaries(st.integers(1, 511), st.sampled_from(["nvidia", "nvidia-uvm", "nvidia-caps", "mem", "gdrdrv"])),
    st.dictionaries(st.integers(1, 511), st.sampled_from(["nvidia-uvm", "nvme", "sd"])),
    ENDS,
)
def test_majors_are_those_of_the_character_section(chars, blocks, end):
    lines = [
        "Character devices:",
        *(f"{major:3d} {name}" for major, name in sorted(chars.items())),
        "",
        "Block devices:",
    ]
    lines += [f"{major:3d} {name}" for major, name in sorted(blocks.items())]
    majors = procfs.parse_devices(end.join(lines) + end)
    for name, major in majors.items():
        assert major == min((number for number, owner in chars.items() if owner == name), default=None)


@given(boxes())
def test_the_look_of_any_box_invents_no_node_and_loses_no_cpu(box):
    files = {"/proc/devices": "Character devices:\n195 nvidia\n500 nvidia-uvm\n"}
    for node, cpus in box["nodes"].items():
        files[f"/sys/devices/system/node/node{node}/cpulist"] = cpulist.format(cpus) + "\n"
        files[f"/sys/devices/system/node/node{node}/meminfo"] = (
            f"Node {node} MemTotal: {box['memory'][node] * 1024} kB\n"
        )
    for index, node in enumerate(box["gpus"]):
        bus = f"0000:{index + 1:02x}:00.0"
        files[f"/sys/bus/pci/devices/{bus}/numa_node"] = f"{-1 if node is None else node}\n"
        files[f"/proc/driver/nvidia/gpus/{bus}/information"] = f"Bus Location: {bus}\nDevice Minor: {index}\n"
    facts = look.assemble({"files": files})
    assert {row["node"]: row["cpu_list"] for row in facts["numa"]} == box["nodes"]
    assert {row["node"]: row["memory_mib"] for row in facts["numa"]} == box["memory"]
    assert [gpu["numa_node"] for gpu in facts["gpus"]] == box["gpus"]
    assert [gpu["numa_nodes"] for gpu in facts["gpus"]] == [None if node is None else [node] for node in box["gpus"]]


@given(
    st.text(max_size=200), st.sampled_from(["", "GPU0", "root=", "NVSMI LOG\n", "Bus Location:", "Block devices:\n"])
)
def test_explain_answers_or_refuses_in_one_line(said, start):
    told: list[str] = []
    try:
        told.append(explain(start + said)["kind"])
    except ValueError as refusal:
        told.append(str(refusal))
    assert told[0]
    assert "\n" not in told[0]
    assert " " not in told[0] or "expected" in told[0]
