"""Engines in environments of their own: installed offline, side by side, switched, mended, served by units."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import packages
import pytest
import yaml

pytestmark = pytest.mark.lab

ROOT = Path(__file__).resolve().parents[2]
ENGINES = "/opt/specrig/engines"
STORE = "/opt/specrig/wheels"


class Box:
    """The provisioned lab with packages to install, and what a run of the role is given."""

    def __init__(self, lab: Any, folder: Path) -> None:
        self.lab = lab
        self.folder = folder
        self.wheels = folder / "wheels"
        for version in ("1.0", "2.0"):
            packages.wheel(
                self.wheels, "fakeengine", version, packages.source(version), requires=("fakedep", "notthere")
            )
        packages.wheel(self.wheels, "fakedep", "1.0")
        packages.wheel(self.wheels, "fakedep", "1.1")
        # For another Python: it is neither sent nor counted.
        packages.wheel(self.wheels, "fakedep", "1.2", tag="cp27-cp27m-manylinux1_x86_64")
        self.constraints = folder / "constraints.txt"
        self.constraints.write_text("fakedep<1.1\n")
        trees = {}
        for version in ("3.0", "3.1"):
            trees["v" + version] = packages.tree(
                folder / f"tree-{version}", "fakeengine", version, packages.source(version)
            )
        self.tree = folder / "tree-3.0"
        self.repository = packages.repository(folder / "git", trees)

    def engine(self, version: str = "1.0", **more: Any) -> dict[str, Any]:
        """The default engine: from the wheelhouse in two steps, the second without what it depends on."""
        install = {
            "wheelhouse": str(self.wheels),
            "steps": [
                {"requirements": ["fakedep"], "constraints": [str(self.constraints)]},
                {"requirements": [f"fakeengine=={version}"], "no_deps": True},
            ],
        }
        return served({**install, **more})

    def run(self, *args: str, install: bool = True, **variables: Any) -> Any:
        """Converge the guest by the role alone."""
        play = [
            {
                "name": "Serve",
                "hosts": "gpu_guests",
                "gather_facts": False,
                "tasks": [{"name": "Serve", "ansible.builtin.include_role": {"name": "specrig.host.sglang_server"}}],
            }
        ]
        path = self.folder / "serve.yml"
        path.write_text(yaml.safe_dump(play, sort_keys=False))
        values = {"sglang_server_install": install, "sglang_server_profiles": profiles(), **variables}
        given = self.folder / "values.json"
        given.write_text(json.dumps(values))
        return self.lab.play(str(path), "-e", f"@{given}", *args)

    def right(self, *args: str, **variables: Any) -> str:
        """The same, which has to succeed; returns what was printed."""
        done = self.run(*args, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return str(done.stdout)

    def wrong(self, *args: str, **variables: Any) -> str:
        """The same, which has to fail; returns what was printed."""
        done = self.run(*args, **variables)
        assert done.returncode != 0, done.stdout + done.stderr
        return str(done.stdout + done.stderr)

    def pid(self, profile: str) -> int:
        """The main process of a profile's unit."""
        return int(self.lab.guest(f"systemctl show -p MainPID --value specrig-sglang@{profile}", check=True).stdout)

    def command(self, profile: str) -> str:
        """The program that a profile's main process was started as."""
        words = self.lab.guest(f"tr '\\0' '\\n' < /proc/{self.pid(profile)}/cmdline", check=True).stdout.splitlines()
        return next(word for word in words if "/bin/fakeengine" in word)

    def env(self, profile: str, name: str) -> str | None:
        """A variable of a profile's main process."""
        text = self.lab.guest(f"tr '\\0' '\\n' < /proc/{self.pid(profile)}/environ", check=True).stdout
        return dict(line.split("=", 1) for line in text.splitlines() if "=" in line).get(name)

    def version(self, folder: str) -> str:
        """The version that the environment at a path has, as its interpreter says."""
        code = "import importlib.metadata as m; print(m.version('fakeengine'))"
        return str(self.lab.guest(f'{folder}/bin/python -I -c "{code}"', check=True).stdout.strip())


def served(install: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    """An engine of the simulated kind with an installation."""
    return {
        "kind": "sim",
        "time_scale": 0.45,
        "command": ["{venv}/bin/fakeengine"],
        **({"install": install} if install else {}),
        **more,
    }


def profiles(**engines: str) -> dict[str, Any]:
    """The lab's two production profiles, with an engine by name where one is given."""
    table = yaml.safe_load((ROOT / "inventory/lab/group_vars/all.yml").read_text())["sglang_server_profiles"]
    found = {name: dict(table[name]) for name in ("chat", "agent")}
    for name, engine in engines.items():
        found[name]["engine"] = engine
    return found


@pytest.fixture(scope="module")
def box(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Box:
    """The lab, provisioned with the simulated engine, so that what follows is the engine's installation alone."""
    done = lab.play("provision")
    assert done.returncode == 0, done.stdout + done.stderr
    return Box(lab, tmp_path_factory.mktemp("engines"))


def test_an_engine_is_installed_offline_from_a_wheelhouse_that_is_handed_over_once(box: Box) -> None:
    shown = box.right("--check", sglang_server_engine=box.engine())
    assert f"would install engine default into {ENGINES}/default" in shown
    assert box.lab.guest(f"test -e {ENGINES}").returncode != 0

    shown = box.right(sglang_server_engine=box.engine())
    assert "engine default: 4 files, 0.00 GB go to the guest" in shown
    assert f"installed engine default with fakeengine 1.0 into {ENGINES}/default" in shown
    real = box.lab.guest(f"readlink {ENGINES}/default", check=True).stdout.strip()
    assert real.startswith(f"{ENGINES}/default.d/")
    record = json.loads(box.lab.guest(f"cat {real}/specrig-installed.json", check=True).stdout)
    assert [step["no_deps"] for step in record["steps"]] == [False, True]
    contents = json.loads(box.lab.guest(f"cat {real}/specrig-contents.json", check=True).stdout)
    # The constraint held, the wheels are those of the wheelhouse, and nothing came in beside what was asked for.
    assert contents["packages"]["fakedep"] == "1.0"
    assert contents["packages"]["fakeengine"] == "1.0"
    assert set(contents["packages"]) <= {"fakedep", "fakeengine", "pip", "setuptools", "wheel"}
    assert sorted(contents["wheels"]) == ["fakedep-1.0-py3-none-any.whl", "fakeengine-1.0-py3-none-any.whl"]
    # The unit names the folder itself, so that a later switch of the link does not reach the running server.
    assert box.command("chat") == f"{real}/bin/fakeengine"
    assert box.command("agent") == f"{real}/bin/fakeengine"
    assert box.env("chat", "SPECRIG_ENGINE") == record["id"]


def test_a_second_run_changes_nothing_and_kernels_outlive_a_restart(box: Box) -> None:
    cache = box.env("chat", "TRITON_CACHE_DIR")
    assert cache
    assert cache.startswith("/var/cache/specrig-kernels/default-")
    for name, below in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("CUDA_CACHE_PATH", "nv"), ("HF_MODULES_CACHE", "")):
        assert str(box.env("chat", name)).startswith(f"{Path(cache).parent}/{below}"), name
    before = box.lab.guest(f"cat {cache}/kernels.txt", check=True).stdout.split()
    assert set(before) == {"1.0"}
    box.lab.guest("systemctl restart specrig-sglang@chat", check=True)
    pids = [box.pid(name) for name in ("chat", "agent")]
    shown = box.right(sglang_server_engine=box.engine())
    assert "changed=0" in shown
    assert "go to the guest" not in shown
    assert [box.pid(name) for name in ("chat", "agent")] == pids
    after = box.lab.guest(f"cat {cache}/kernels.txt", check=True).stdout.split()
    assert after == [*before, "1.0"]
    assert box.lab.guest(f"stat -c %U {cache}/../nv", check=True).stdout.strip() == "specrig"
    done = box.lab.guest("systemd-analyze security --no-pager --threshold=40 specrig-sglang@chat.service")
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_upgrade_and_the_way_back_switch_whole_environments(box: Box) -> None:
    old = box.lab.guest(f"readlink {ENGINES}/default", check=True).stdout.strip()
    shown = box.right(sglang_server_engine=box.engine("2.0"))
    assert "installed engine default with fakeengine 2.0" in shown
    assert "restarted chat" in shown
    assert "restarted agent" in shown
    assert box.version(f"{ENGINES}/default") == "2.0"
    assert box.version(old) == "1.0"
    assert not box.command("chat").startswith(old)
    back = box.right(sglang_server_engine=box.engine("1.0"))
    assert "switched engine default back to fakeengine 1.0" in back
    assert "go to the guest" not in back
    assert box.command("chat") == f"{old}/bin/fakeengine"
    assert box.version(f"{ENGINES}/default") == "1.0"


def test_a_failed_installation_leaves_what_serves_as_it_is(box: Box) -> None:
    before = [box.pid(name) for name in ("chat", "agent")]
    link = box.lab.guest(f"readlink {ENGINES}/default", check=True).stdout
    # Three that can't work, each for a reason of its own, and all of them told.
    others = {"old": box.engine(python="python3.99"), "big": box.engine("2.0", space_gb=1e6)}
    shown = box.wrong(sglang_server_engine=box.engine("9.9"), sglang_server_engines=others)
    assert "engine default: pip, step 2 of 2: ERROR: " in shown
    assert "fakeengine==9.9" in shown
    assert "engine old: the guest has no python3.99 that runs, expected Python 3.8 or newer; install one" in shown
    assert "the installation needs about 1000000.0 GB; free some space" in shown
    assert "what was installed before is untouched" in shown
    assert [box.pid(name) for name in ("chat", "agent")] == before
    assert box.lab.guest(f"readlink {ENGINES}/default", check=True).stdout == link
    assert len(box.lab.guest(f"ls {ENGINES}/default.d", check=True).stdout.split()) == 2
    # A run that installs nothing serves what is there, whatever the inventory asks for by now.
    shown = box.right(install=False, sglang_server_engine=box.engine("9.9"))
    assert "changed=0" in shown
    assert [box.pid(name) for name in ("chat", "agent")] == before


def test_credentials_of_an_index_are_shown_nowhere(box: Box) -> None:
    url = "https://someone:hunter2@127.0.0.1:9/simple"
    engine = box.engine("9.9", offline=False, index_url=url, space_gb=0, pip_args=["--retries=0", "--timeout=1"])
    shown = box.wrong("-vvv", sglang_server_engine=engine)
    assert "fakedep" in shown or "fakeengine" in shown
    assert "hunter2" not in shown
    assert "hunter2" not in box.lab.journal.read_text()


def test_two_engines_serve_side_by_side_and_one_changes_alone(box: Box) -> None:
    chat = box.pid("chat")
    fork = served({"requirements": [f"git+file://{box.repository}@v3.0"]})
    values = {"sglang_server_engine": box.engine(), "sglang_server_profiles": profiles(agent="fork")}
    shown = box.right(**values, sglang_server_engines={"fork": fork})
    assert "installed engine fork with fakeengine 3.0" in shown
    assert box.pid("chat") == chat
    assert box.command("agent").startswith(f"{ENGINES}/fork.d/")
    assert box.version(f"{ENGINES}/fork") == "3.0"
    agent = box.pid("agent")

    # A source folder of the controller; then it changes, and is noticed by its content.
    moved = served({"requirements": [str(box.tree)]})
    box.right(**values, sglang_server_engines={"fork": moved})
    assert box.pid("agent") != agent
    (box.tree / "fakeengine" / "more.py").write_text("")
    (box.tree / "fakeengine" / "__init__.py").write_text(packages.source("3.0") + "\n# changed\n")
    shown = box.right(**values, sglang_server_engines={"fork": moved})
    assert "engine fork: the inventory asks for other requirements than those installed" in shown
    assert "# changed" in box.lab.guest(f"cat {ENGINES}/fork/lib/python3*/site-packages/fakeengine/__init__.py").stdout

    box.right(**values, sglang_server_engines={"fork": served({"requirements": [f"git+file://{box.repository}@v3.1"]})})
    assert box.version(f"{ENGINES}/fork") == "3.1"
    # Builds that nobody needs any more went, and their kernels with them; the one before is kept for the way back.
    assert len(box.lab.guest(f"ls {ENGINES}/fork.d", check=True).stdout.split()) == 2
    assert len(box.lab.guest("ls -d /var/cache/specrig-kernels/fork-*", check=True).stdout.split()) == 2
    assert box.pid("chat") == chat


def test_a_damaged_environment_is_built_again_and_only_its_servers_restart(box: Box) -> None:
    fork = {"fork": served({"requirements": [f"git+file://{box.repository}@v3.1"]})}
    values = {"sglang_server_profiles": profiles(agent="fork"), "sglang_server_engines": fork}
    values["sglang_server_engine"] = box.engine()
    agent, chat = box.pid("agent"), box.pid("chat")
    # The engine's, and the package's own.
    box.lab.guest(f"truncate -s 10 {ENGINES}/default/lib/python3*/site-packages/fakedep/__init__.py", check=True)
    box.lab.guest("rm /opt/specrig/venv/lib/python3*/site-packages/specrig/errors.py", check=True)
    shown = box.right(**values)
    assert f"{ENGINES}/default is damaged: fakedep has 1 files, 10 bytes instead of 1, " in shown
    assert "/opt/specrig/venv is damaged: specrig has " in shown
    assert "installed engine default with fakeengine 1.0" in shown
    assert "installed specrig" in shown
    assert box.lab.guest("ls /opt/specrig/venv/lib/python3*/site-packages/specrig/errors.py").returncode == 0
    assert box.pid("chat") != chat
    assert box.pid("agent") == agent
    assert "changed=0" in box.right(**values)


def test_wheels_that_the_host_sees_are_shown_to_the_guest_instead_of_copied(box: Box) -> None:
    folder = box.folder / "shared"
    wheel = packages.wheel(folder, "fakeengine", "4.0", packages.source("4.0"))
    text = base64.b64encode(wheel.read_bytes()).decode()
    stamp = wheel.stat().st_mtime_ns
    box.lab.host(
        f"mkdir -p {folder} && echo {text} | base64 -d > {wheel}"
        f" && touch -d @{stamp // 10**9}.{stamp % 10**9:09d} {wheel}",
        check=True,
    )
    stored = box.lab.guest(f"ls {STORE}", check=True).stdout
    engine = served({"wheelhouse": str(folder), "requirements": ["fakeengine"]})
    shown = box.right(sglang_server_engine=engine)
    assert "installed engine default with fakeengine 4.0" in shown
    assert "go to the guest" not in shown
    assert box.lab.guest(f"ls {STORE}", check=True).stdout == stored
    assert box.lab.guest("grep -c /run/specrig/wheels /proc/mounts").stdout.strip() == "0"
    # A wheel that was replaced under its name is another one: here it is no longer the host's, so it is copied.
    packages.wheel(folder, "fakeengine", "4.0", packages.source("4.0") + "\n# again\n")
    shown = box.right(sglang_server_engine={**engine, "install": {**engine["install"], "remove_wheelhouse": True}})
    assert "fakeengine-4.0-py3-none-any.whl was replaced in the wheelhouse" in shown
    assert "1 files, 0.00 GB go to the guest" in shown
    assert "# again" in box.lab.guest(f"cat {ENGINES}/default/lib/python3*/site-packages/fakeengine/__init__.py").stdout
    assert box.lab.guest(f"ls {STORE}", check=True).stdout == stored
