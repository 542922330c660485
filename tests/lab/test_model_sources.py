"""Models of a web server and of a hub come into the host's RAM through the role, killed on the way, and then stay."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.lab, pytest.mark.slow]

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WEB_PORT, HUB_PORT = 8801, 8811
STAND_INS = Path(__file__).resolve().parents[1] / "stand_ins"
# Noise in whole safetensors files, and the web server's manifest.
MAKE = """
import hashlib, json, pathlib, random, struct
def weights(path, size, seed):
    path.parent.mkdir(parents=True, exist_ok=True)
    head = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + random.Random(seed).randbytes(size))
web, hub = pathlib.Path("/srv/mirror/target"), pathlib.Path("/srv/hub/lab/draft")
weights(web / "a.safetensors", 1_000_000, 1)
weights(web / "b.safetensors", 12_000_000, 2)
weights(hub / "model.safetensors", 9_000_000, 3)
for folder in (web, hub):
    (folder / "config.json").write_text("{}")
(hub / "vocab.bin").write_bytes(random.Random(4).randbytes(20_000))
(hub / "README.md").write_text("noise")
(hub / ".gitattributes").write_text("*.safetensors filter=lfs")
rows = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in sorted(web.iterdir())]
(web / "MANIFEST.sha256").write_text("".join(row + chr(10) for row in rows))
"""
PLAY = """
- hosts: gpu_hosts
  gather_facts: false
  tasks:
    - ansible.builtin.import_role: {name: specrig.host.model_store}
    - ansible.builtin.import_role: {name: specrig.host.model_store, tasks_from: wait}
"""
VARIABLES = {
    "model_store_models": {
        "target": {"source": f"http://127.0.0.1:{WEB_PORT}/target"},
        "draft": {"source": "hf:lab/draft", "revision": COMMIT, "exclude": ["*.md"]},
    },
    "model_store_hub_endpoint": f"http://127.0.0.1:{HUB_PORT}",
}
SAME = """
cd /srv/mirror/target && for f in *.safetensors config.json; do cmp $f /srv/specrig/ram/target/$f || exit 1; done
cd /srv/hub/lab/draft && for f in *.safetensors *.bin config.json; do cmp $f /srv/specrig/ram/draft/$f || exit 1; done
test ! -e /srv/specrig/ram/draft/README.md
"""


@pytest.fixture(scope="module")
def play(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    """Arguments of a run of the role with both servers up, on the host itself."""
    for name in ("file_server", "hub_server"):
        text = (STAND_INS / f"{name}.py").read_text()
        lab.host(
            f"mkdir -p /opt/stand-ins && cat > /opt/stand-ins/{name}.py <<'END-OF-FILE'\n{text}END-OF-FILE", check=True
        )
    lab.host(f"python3 - <<'END-OF-FILE'\n{MAKE}END-OF-FILE", check=True)
    # A connection is slow enough to be met in the middle.
    start = "systemd-run --collect --unit {} python3 /opt/stand-ins/{}.py {} --rate 3e6 --log /run/{}.log"
    lab.host(start.format("lab-web", "file_server", f"/srv/mirror {WEB_PORT}", "web"), check=True)
    lab.host(start.format("lab-hub", "hub_server", f"/srv/hub {HUB_PORT} {COMMIT}", "hub"), check=True)
    folder = tmp_path_factory.mktemp("sources")
    (folder / "play.yml").write_text(PLAY)
    (folder / "vars.json").write_text(json.dumps(VARIABLES))
    try:
        yield str(folder / "play.yml"), "-e", f"@{folder / 'vars.json'}"
    finally:
        lab.host("systemctl stop lab-web lab-hub")


def asked(lab: Any, server: str) -> list[str]:
    return str(lab.host(f"cat /run/{server}.log 2>/dev/null; true", check=True).stdout).splitlines()


def killed_on_the_way(lab: Any, play: tuple[str, ...], model: str, come: int) -> str:
    """Run the play, and kill what works at a model when so many bytes of it have come."""
    command = ["ansible-playbook", "-i", "inventory/lab", *play]
    running = subprocess.Popen(
        command, cwd=STAND_INS.parents[1], env=lab.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 240
    while True:
        told = lab.host(f"cat /run/specrig/staging/{model}.json 2>/dev/null; true", check=True).stdout
        row = json.loads(told or "{}")
        if row.get("state") == "running" and row["bytes_done"] >= come:
            break
        assert running.poll() is None, running.communicate()[0]
        assert time.monotonic() < deadline, f"still {row}"
        time.sleep(0.1)
    lab.host(f"kill -9 {row['pid']}", check=True)
    out, _none = running.communicate(timeout=240)
    assert running.returncode != 0, out
    return " ".join(out.split())


def test_both_come_killed_on_the_way_and_then_stay(lab: Any, play: tuple[str, ...]) -> None:
    check = lab.play(*play, "--check")
    assert check.returncode == 0, check.stdout + check.stderr
    assert "would download model draft from lab/draft" in check.stdout, check.stdout
    assert asked(lab, "hub") == []

    # Its small files are whole by then; the library writes a large one in pieces of 10 MB.
    out = killed_on_the_way(lab, play, "draft@hub", 20_000)
    assert "was killed" in out
    assert lab.host("ls /var/lib/specrig/hub/folders/draft").returncode != 0, "a model that is not whole has no folder"
    assert lab.host("pgrep -f 'python -I -c'").returncode != 0, "what downloads ends with who asked for it"
    before = len(asked(lab, "hub"))

    out = killed_on_the_way(lab, play, "target", 3_000_000)
    assert "was killed" in out
    assert lab.host("ls /srv/specrig/ram/target/b.safetensors").returncode != 0
    # What was whole on the disk was not downloaded again, and the part that was left is gone.
    later = asked(lab, "hub")[before:]
    assert [row for row in later if "model.safetensors" in row]
    assert not [row for row in later if row.startswith("GET") and "config.json" in row]
    assert lab.host("ls /var/lib/specrig/hub/models--lab--draft/blobs/*.incomplete").returncode != 0
    before, hub = len(asked(lab, "web")), len(asked(lab, "hub"))

    done = lab.play(*play)
    assert done.returncode == 0, done.stdout + done.stderr
    lab.host(SAME, check=True)
    bodies = [
        row for row in asked(lab, "web")[before:] if row.startswith("GET target/a.") and "bytes=0-65535" not in row
    ]
    assert not bodies, "what was proven in RAM is not copied again"
    for name in ("target", "draft"):
        marker = json.loads(lab.host(f"cat /srv/specrig/ram/{name}/.specrig-staged.json", check=True).stdout)
        assert marker["verified"] == "manifest"
        assert lab.host(f"test -s /var/lib/specrig/models/{name}.json").returncode == 0

    before = len(asked(lab, "web"))
    again = lab.play(*play)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "changed=0" in again.stdout, again.stdout
    assert len(asked(lab, "hub")) == hub, "a whole model asks the hub nothing"
    assert set(asked(lab, "web")[before:]) == {"GET target/MANIFEST.sha256 None"}

    # Without its hub, as after a reboot without a network: what is on the disk is staged again.
    lab.host("systemctl stop lab-web lab-hub", check=True)
    lab.host("rm -r /srv/specrig/ram/draft", check=True)
    only = {**VARIABLES, "model_store_models": {"draft": VARIABLES["model_store_models"]["draft"]}}
    back = lab.play(play[0], "-e", json.dumps(only))
    assert back.returncode == 0, back.stdout + back.stderr
    assert lab.host("cmp /srv/hub/lab/draft/model.safetensors /srv/specrig/ram/draft/model.safetensors").returncode == 0
