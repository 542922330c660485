"""Environments of the guest: engines as the inventory names them, damage, builds beside what serves, wheels sent."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import packages
import pytest

from specrig.facts import engines, serving, venvs

ROOT = Path(__file__).resolve().parents[2]
PYTHON = sys.executable


# ---- what the inventory says ---------------------------------------------------------------------------------------

SIM = {"kind": "sim", "command": ["/opt/specrig/venv/bin/specrig", "sim"]}


def installed(**install: Any) -> dict[str, Any]:
    return {"kind": "sglang", "install": install}


@pytest.mark.parametrize(
    ("text", "kind", "path", "side", "extras"),
    [
        ("sglang==0.5.23", "spec", None, None, ""),
        ("sglang[all]>=0.5,<0.6", "spec", None, None, ""),
        ("/srv/w/sglang-0.5.23-py3-none-any.whl", "file", "/srv/w/sglang-0.5.23-py3-none-any.whl", "controller", ""),
        ("sglang-0.5.23-py3-none-any.whl[all]", "file", "sglang-0.5.23-py3-none-any.whl", "controller", "[all]"),
        ("~/src/sglang/python[all]", "folder", "~/src/sglang/python", "controller", "[all]"),
        ("file:///srv/src", "folder", "/srv/src", "controller", ""),
        ("guest:/opt/src/sglang", "folder", "/opt/src/sglang", "guest", ""),
        ("guest:/opt/w/x-1-py3-none-any.whl", "file", "/opt/w/x-1-py3-none-any.whl", "guest", ""),
        ("git+https://example.net/sglang.git@abc#subdirectory=python", "git", None, None, ""),
        ("sglang @ git+file:///srv/git/sglang.git@v1#subdirectory=python", "git", "/srv/git/sglang.git", None, ""),
        ("https://example.net/sglang-1-py3-none-any.whl", "url", None, None, ""),
    ],
)
def test_a_requirement_says_what_it_is_and_where_it_lies(text, kind, path, side, extras):
    row = engines.requirement(text)
    assert (row["kind"], row["path"], row["side"], row["extras"]) == (kind, path, side, extras)


@pytest.mark.parametrize(
    ("engine", "others", "line"),
    [
        ({"kind": "vllm"}, {}, "sglang_server_engine.kind is 'vllm', expected sim or sglang"),
        ({**SIM, "comand": []}, {}, "sglang_server_engine has comand, expected command, "),
        (SIM, {"default": SIM}, "sglang_server_engines has an engine called default"),
        (SIM, {"a b": SIM}, "engine name 'a b' can't be used: expected letters"),
        (installed(venv="/opt/x"), {}, "install has neither requirements nor steps, expected requirements, or steps"),
        (
            installed(requirements=["a"], steps=[{"requirements": ["b"]}]),
            {},
            "install has both requirements and steps",
        ),
        (installed(requirements=["--pre"]), {}, "'--pre' is no requirement; options of pip belong into pip_args"),
        (installed(steps=[{"requirements": []}]), {}, "steps[1] has no requirements"),
        (installed(steps=[{"requirements": ["a"], "nodeps": True}]), {}, "steps[1] has nodeps, expected "),
        (installed(requirements=["a"], venv="opt/x"), {}, "venv is 'opt/x', expected an absolute path of its own"),
        (installed(requirements=["a"], venv="/opt/"), {}, "venv is '/opt/', expected an absolute path of its own"),
        (installed(requirements=["a"], fill=True), {}, "fill has no folder to fill: name one in wheelhouse"),
        (
            installed(requirements=["a"], python_min=3),
            {},
            "python_min is '3', expected something like '3.11' in quotes",
        ),
        (installed(requirements=["a"], keep=-1), {}, "keep is -1, expected a number from 0"),
        (installed(requirements=["a"], offline="maybe"), {}, "offline is 'maybe', expected true or false"),
        (
            installed(requirements=["a"], pip_args=["--proxy=http://someone:hunter2@proxy:1"]),
            {},
            "pip_args has a URL with credentials, which would be shown; put it into index_url or extra_index_urls",
        ),
        (installed(requirements=["guest:x"]), {}, "'guest:x' is no path in the guest, expected guest:/..."),
        (
            installed(requirements=["a"], venv="/opt/x"),
            {"b": installed(requirements=["b"], venv="/opt/x/")},
            "sglang_server_engine and sglang_server_engines.b are both installed into /opt/x",
        ),
    ],
)
def test_what_an_inventory_gets_wrong_is_one_line(engine, others, line):
    with pytest.raises(engines.EngineError) as caught:
        engines.table(engine, others)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_installation_has_defaults_that_a_wheelhouse_changes():
    table = engines.table(SIM, {"fork": installed(requirements=["sglang==0.5.23"], wheelhouse="/srv/w")})
    install = table["fork"]["install"]
    assert install["venv"] == "/opt/specrig/engines/fork"
    assert (install["offline"], install["keep"], install["python_min"]) == (True, 1, "3.11")
    assert table["fork"]["command"] == ["{venv}/bin/python", "-m", "sglang.launch_server"]
    assert engines.table(installed(requirements=["a"]), {})["default"]["install"]["offline"] is False


def identity(contents: dict[str, str] | None = None, **install: Any) -> str:
    return engines.identity(engines.table(installed(**install), {})["default"]["install"], contents or {})


def test_the_identity_is_what_would_be_installed_and_not_how_it_gets_there():
    plain = identity(requirements=["sglang==0.5.23"])
    assert identity(requirements=["sglang==0.5.23"], wheelhouse="/srv/w", remove_wheelhouse=True, keep=3) == plain
    assert identity(steps=[{"requirements": ["sglang==0.5.23"]}]) == plain
    different = [
        identity(requirements=["sglang==0.5.22"]),
        identity(requirements=["sglang==0.5.23"], no_deps=True),
        identity(requirements=["sglang==0.5.23"], python="python3.12"),
        identity(requirements=["sglang==0.5.23"], index_url="https://example.net/cpu"),
        identity({"controller:/c.txt": "1"}, requirements=["sglang==0.5.23"], constraints=["/c.txt"]),
        identity({"controller:/c.txt": "2"}, requirements=["sglang==0.5.23"], constraints=["/c.txt"]),
        identity({"controller:/s": "1"}, requirements=["/s"]),
        identity({"controller:/s": "2"}, requirements=["/s"]),
        identity({"guest:/s": "1"}, requirements=["guest:/s"]),
    ]
    assert len({plain, *different}) == 1 + len(different) - 1, "a folder is its content, wherever it lies"
    secret = "https://someone:{0}@example.net/simple"
    assert identity(requirements=["a"], index_url=secret.format("one")) == identity(
        requirements=["a"], index_url=secret.format("two")
    )


def test_a_record_holds_no_credentials():
    given = installed(
        requirements=["git+https://someone:hunter2@example.net/x.git@v1"],
        index_url="https://someone:hunter2@example.net/simple",
    )
    install = engines.table(given, {})["default"]["install"]
    text = json.dumps(engines.record("default", "sglang", install, "1"))
    assert "hunter2" not in text
    assert "git+https://****@example.net/x.git@v1" in text


def test_why_an_installation_is_needed():
    there = {"record": {"id": "1"}, "damaged": None, "wheels": {"a.whl": "x", "gone.whl": "y"}}
    assert engines.why_not("1", there, None) == []
    assert engines.why_not("1", there, {"a.whl": "x", "more.whl": "z"}) == []
    assert engines.why_not("1", there, {"a.whl": "other"}) == ["a.whl was replaced in the wheelhouse"]
    assert engines.why_not("2", there, None) == ["the inventory asks for other requirements than those installed"]
    was, wanted = [
        {"id": number, "steps": [{"requirements": ["torch==2.13.0", f"sglang==0.5.{number}"]}]} for number in "12"
    ]
    assert engines.why_not("2", {"record": was}, None, wanted)[0].endswith(" (+sglang==0.5.2 -sglang==0.5.1)")
    assert engines.why_not("3", {"record": was}, None, was)[0].endswith(
        " (the same names; what lies there, or an option, changed)"
    )
    assert engines.why_not("1", {"record": None, "damaged": "torch is missing"}, None) == [
        "it is damaged: torch is missing"
    ]
    assert engines.why_not("1", None, None) == ["it is not installed"]


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("a-1-py3-none-any.whl", True),
        ("a-1-py2.py3-none-any.whl", True),
        ("a-1-py37-none-any.whl", True),
        ("a-1-py312-none-any.whl", False),
        ("a-1-cp311-cp311-manylinux_2_28_x86_64.whl", True),
        ("a-1-cp311-cp311-manylinux_2_17_aarch64.whl", False),
        ("a-1-cp310-cp310-manylinux1_x86_64.whl", False),
        ("a-1-cp38-abi3-manylinux1_x86_64.manylinux2014_x86_64.whl", True),
        ("a-1-cp312-abi3-manylinux1_x86_64.whl", False),
        ("a-1-2-cp311-cp311-linux_x86_64.whl", True),
        ("a-1.tar.gz", None),
    ],
)
def test_which_wheels_a_guest_can_use(name, fits):
    assert engines.wheel_fits(name, [3, 11, 2], "x86_64") is fits


# ---- what the units get --------------------------------------------------------------------------------------------

PLACED = {"gpus": [0], "guest_gpus": [0], "numa_nodes": [0], "cpus": "0", "memory_nodes": [], "memory_policy": None}
PROFILE = {"model": "m", "tp": 1, "method": "autoregressive", "context_length": 1024, "port": 31001}
BUILT = {
    "id": "abc",
    "record": {"id": "abc"},
    "real": "/opt/specrig/engines/fork.d/abc",
    "packages": {"sglang": "0.5.23"},
}


def planned(profile: dict[str, Any], fork: dict[str, Any], **look: Any) -> dict[str, Any]:
    known = engines.resolve(SIM, {"fork": fork}, {"builds": look}, {"package": "5c0ffee"})
    settings = {"engines": known, "model_root": "/srv/models", "dialects": {}}
    return serving.plan_unit("p", {**PROFILE, **profile}, PLACED, settings)


def test_a_profile_s_engine_gives_its_command_environment_and_caches():
    fork = installed(requirements=["sglang"])
    fork.update(env={"A": "{venv}/x", "TRITON_CACHE_DIR": "/mine"}, extra_args=["--chat-template", "{venv}/t"])
    plan = planned({"engine": "fork"}, fork, **{"/opt/specrig/engines/fork": BUILT})
    real = "/opt/specrig/engines/fork.d/abc"
    assert plan["argv"][:3] == [f"{real}/bin/python", "-m", "sglang.launch_server"]
    assert plan["argv"][-2:] == ["--chat-template", f"{real}/t"]
    assert plan["env"]["A"] == f"{real}/x"
    assert plan["env"]["SPECRIG_ENGINE"] == "abc"
    assert plan["env"]["FLASHINFER_WORKSPACE_BASE"] == "/var/cache/specrig-kernels/fork-abc/flashinfer"
    assert plan["env"]["TRITON_CACHE_DIR"] == "/mine", "the inventory's own wins"
    assert plan["engine"]["version"] == "0.5.23"
    assert "CacheDirectory=specrig-kernels/fork-abc specrig-kernels/fork-abc/nv\n" in serving.render_dropin(plan)
    default = planned({}, fork, **{"/opt/specrig/engines/fork": BUILT})
    assert default["argv"][:2] == ["/opt/specrig/venv/bin/specrig", "sim"]
    assert "TRITON_CACHE_DIR" not in default["env"]
    assert "CacheDirectory" not in serving.render_dropin(default)


def test_a_command_below_the_environment_s_path_is_pinned_to_the_build():
    fork = {**installed(requirements=["a"], venv="/opt/f"), "command": ["/opt/f/bin/sglang", "serve"]}
    plan = planned({"engine": "fork"}, fork, **{"/opt/f": {**BUILT, "real": "/opt/f.d/abc"}})
    assert plan["argv"][:2] == ["/opt/f.d/abc/bin/sglang", "serve"]


def test_an_engine_s_dialects_win_over_the_inventory_s():
    fork = {**installed(requirements=["a"]), "dialects": {"ddtree": "pr-31069"}}
    look = {"/opt/specrig/engines/fork": BUILT}
    tree = {"method": "ddtree", "budget": 15, "draft_model": "/srv/models/d"}
    flags = planned({**tree, "engine": "fork"}, fork, **look)["argv"]
    assert "--speculative-dflash-tree-verify" in flags
    assert "--speculative-dflash-tree-verify" not in planned(tree, fork, **look)["argv"]


def test_a_missing_engine_is_named_and_a_damaged_one_still_planned():
    fork = installed(requirements=["a"])
    with pytest.raises(serving.ServingError, match=r"profile p: engine fork is not installed in /opt/specrig/engines"):
        planned({"engine": "fork"}, fork)
    with pytest.raises(serving.ServingError, match=r"profile p: engine 'frok' is not in .*; there are: fork"):
        planned({"engine": "frok"}, fork)
    damaged = {**BUILT, "record": None, "damaged": "torch is missing"}
    assert planned({"engine": "fork"}, fork, **{"/opt/specrig/engines/fork": damaged})["engine"]["id"] == "abc"


def test_another_engine_is_one_reason_to_restart_and_not_a_list_of_its_caches():
    fork = installed(requirements=["a"])
    old, new = [
        planned({"engine": "fork"}, fork, **{"/opt/specrig/engines/fork": {**BUILT, "id": name}}) for name in "ab"
    ]
    process = {"pid": 1, "environ": old["env"], "cmdline": old["argv"], "cpus_allowed": [0]}
    assert serving.differences(new, process)[0] == ["SPECRIG_ENGINE is 'a', planned 'b'"]


def test_a_run_with_one_simulated_engine_is_simulated():
    table = {"a": {}, "b": {"engine": "fork"}}
    real = {"kind": "sglang"}
    sim = {"kind": "sim", "time_scale": 0.5}
    assert engines.bench(table, ["a", "b"], real, {"fork": sim}) == {"kind": "simulated", "time_scale": 0.5}
    assert engines.bench(table, ["a"], real, {"fork": sim}) == {"kind": "sglang", "time_scale": None}
    assert engines.bench(table, ["b"], sim, {"fork": real}) == {"kind": "sglang", "time_scale": None}


# ---- damage --------------------------------------------------------------------------------------------------------


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An environment as an installation leaves it, with one package, made without running anything."""
    folder = tmp_path / "venv"
    site = folder / "lib" / "python3.11" / "site-packages"
    (site / "torch" / "__pycache__").mkdir(parents=True)
    (site / "torch" / "a.so").write_bytes(b"x" * 100)
    (site / "torch" / "b.py").write_text("b = 1\n")
    (site / "torch" / "__pycache__" / "b.pyc").write_bytes(b"y")
    (site / "torch-2.13.0+cpu.dist-info").mkdir()
    (site / "torch-2.13.0+cpu.dist-info" / "RECORD").write_text("")
    (site / "six.py").write_text("")
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(PYTHON)
    venvs.write_contents(str(folder))
    venvs.write_json(str(folder), venvs.RECORD, {"id": "1"})
    return folder


def test_a_whole_environment_has_its_record_and_packages(environment):
    (environment / "lib/python3.11/site-packages/torch/__pycache__/c.pyc").write_bytes(b"later")
    about = venvs.look(str(environment))
    assert about["record"] == {"id": "1"}
    assert about["damaged"] is None
    assert about["packages"] == {"torch": "2.13.0+cpu"}


@pytest.mark.parametrize(
    ("break_it", "line"),
    [
        (lambda site: (site / "torch" / "b.py").unlink(), "torch has 1 files, 100 bytes instead of 2, 106"),
        (lambda site: (site / "torch" / "a.so").write_bytes(b"x"), "torch has 2 files, 7 bytes instead of 2, 106"),
        (lambda site: shutil.rmtree(site / "torch"), "torch is missing"),
        (lambda site: (site / "evil.pth").write_text("import os"), "evil.pth was added"),
        (lambda site: (site.parents[2] / "bin" / "python").unlink(), "bin/python does not run"),
        (lambda site: (site.parents[2] / "bin" / "sglang").touch(), "the environment's own files has "),
    ],
)
def test_damage_is_told_and_takes_the_record_away(environment, break_it, line):
    break_it(environment / "lib/python3.11/site-packages")
    about = venvs.look(str(environment))
    assert line in about["damaged"]
    assert about["record"] is None
    assert about["id"] == "1"


def test_another_python_is_damage_and_an_unnoted_environment_is_none(environment):
    contents = json.loads((environment / venvs.CONTENTS).read_text())
    contents["python"] = [3, 9, 1]
    (environment / venvs.CONTENTS).write_text(json.dumps(contents))
    now = ".".join(str(part) for part in sys.version_info[:2])
    assert venvs.look(str(environment))["damaged"] == (f"it was made with Python 3.9, its interpreter is {now} now")
    (environment / venvs.CONTENTS).unlink()
    assert venvs.look(str(environment))["damaged"] is None


def test_the_look_is_cheap_at_the_size_of_a_real_engine(environment):
    # An eighth of the files that torch, SGLang and what they need have together; CPU seconds, not the clock.
    site = environment / "lib/python3.11/site-packages"
    for number in range(50):
        folder = site / f"p{number}"
        folder.mkdir()
        for name in range(100):
            (folder / f"{name}.py").touch()
    before = os.times()
    found = venvs.groups(str(environment))
    after = os.times()
    assert sum(row[0] for row in found.values()) > 5000
    assert after.user + after.system - before.user - before.system < 1


# ---- the package's environment -------------------------------------------------------------------------------------


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A wheelhouse."""
    folder = tmp_path / "wheels"
    for version in ("1.0", "2.0"):
        packages.wheel(folder, "tinyengine", version, requires=("tinydep",))
    packages.wheel(folder, "tinydep", "1.0")
    return folder


@pytest.mark.slow
def test_a_damaged_environment_whose_record_matches_is_made_anew(run, tmp_path, wheels):
    given = {
        "path": str(tmp_path / "venv"),
        "python": PYTHON,
        "record": {"version": "1.0"},
        "wheel": str(wheels / "tinydep-1.0-py3-none-any.whl"),
    }
    assert run("guest_venv", **given)["changed"] is True
    assert run("guest_venv", **given)["changed"] is False
    (module,) = tmp_path.glob("venv/lib/python3*/site-packages/tinydep/__init__.py")
    module.unlink()
    assert run("guest_venv", check=True, **given)["changed"] is True
    done = run("guest_venv", **given)
    assert done["changed"] is True
    assert "tinydep is missing" in done["damaged"] or "tinydep has 0" in done["damaged"]
    assert module.is_file()
    assert run("guest_venv", **given)["changed"] is False


# ---- builds beside what serves -------------------------------------------------------------------------------------


def listed(folder: Path) -> list[dict[str, Any]]:
    wheelhouse = importlib.import_module("ansible_collections.specrig.host.plugins.plugin_utils.wheelhouse")
    hashes = wheelhouse.Hashes(folder.parent / "cache.json")
    return [
        {key: row[key] for key in ("name", "size", "sha256")}
        for row in wheelhouse.files(folder, hashes, [3, 11], "x86_64")
    ]


def stocked(store: Path, folder: Path) -> list[dict[str, Any]]:
    """The files of a wheelhouse as they lie in the guest's store after they were copied."""
    rows = listed(folder)
    for row in rows:
        target = store / row["sha256"] / row["name"]
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / row["name"], target)
    return rows


@pytest.fixture
def venv_module(run, tmp_path, wheels):
    """Runs the module that builds and switches, with a store that has the wheelhouse's files."""
    store = tmp_path / "store"
    rows = stocked(store, wheels)

    def call(version: str, **more: Any) -> dict[str, Any]:
        given = {
            "path": str(tmp_path / "engine"),
            "python": PYTHON,
            "record": {"id": f"id{version}"},
            "steps": [{"requirements": [f"tinyengine=={version}"]}],
            "wheels": rows,
            "store": str(store),
            "offline": True,
        }
        return run("engine_venv", **{**given, **more})

    return call


@pytest.mark.slow
def test_versions_are_built_beside_each_other_and_switched(venv_module, tmp_path):
    path, builds = tmp_path / "engine", tmp_path / "engine.d"
    kernels = tmp_path / "kernels"
    for name in ("engine-id1.0", "engine-id2.0"):
        (kernels / name).mkdir(parents=True)
    # A wheel by its name, and what it needs from the others.
    first = venv_module("1.0", steps=[{"requirements": ["wheel:tinyengine-1.0-py3-none-any.whl"]}])
    assert first["changed"] is True
    assert (first["packages"]["tinyengine"], first["packages"]["tinydep"]) == ("1.0", "1.0")
    assert first["requested"] == ["tinyengine"]
    assert path.readlink() == builds / "id1.0"
    # What an interrupted installation left is cleared.
    (builds / "id2.0").mkdir()
    (builds / "id2.0" / "half").touch()
    assert venv_module("2.0")["real"] == str(builds / "id2.0")
    assert not (builds / "id2.0" / "half").exists()
    assert (builds / "id1.0" / "bin" / "python").exists()

    # Nothing is left of an installation that fails, and what its requirements and indexes hold is in no output.
    failed = venv_module(
        "9.9",
        offline=False,
        steps=[{"requirements": ["secret:0"], "args": ["--retries=0", "--timeout=1"]}],
        environments=[{"PIP_INDEX_URL": "https://someone:hunter2@127.0.0.1:9/simple"}],
        secrets=["tinyengine @ https://someone:hunter2@127.0.0.1:9/tinyengine-9.9-py3-none-any.whl"],
    )
    assert failed["failed"] is True
    assert failed["msg"].startswith("pip: ERROR: ")
    assert "\n" not in failed["msg"]
    assert "hunter2" not in json.dumps(failed)
    assert path.readlink() == builds / "id2.0"
    assert sorted(entry.name for entry in builds.iterdir()) == ["id1.0", "id2.0"]

    back = venv_module("1.0")
    assert back["reused"] is True
    assert venvs.look(str(path))["packages"]["tinyengine"] == "1.0"
    # A damaged build is not switched to, and one that a process uses is not removed.
    (module,) = (builds / "id2.0").glob("lib/python3*/site-packages/tinyengine/__init__.py")
    module.unlink()
    run_it = [str(builds / "id2.0" / "bin" / "python"), "-c", "print('up', flush=True); input()"]
    with subprocess.Popen(run_it, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        assert server.stdout.readline() == "up\n"
        done = venv_module("2.0", keep=0, cache_root=str(kernels))
        assert done["reused"] is False
        assert done["real"] == str(builds / "id2.0-2")
        assert done["removed"] == []
        assert venvs.look(str(path))["damaged"] is None
        server.communicate("\n")
    gone = venv_module("2.0", keep=0, cache_root=str(kernels))["removed"]
    assert sorted(gone) == [str(builds / "id1.0"), str(builds / "id2.0")]
    assert sorted(entry.name for entry in kernels.iterdir()) == ["engine-id2.0"], "the kernels of what went go with it"


def test_a_folder_that_is_not_ours_is_not_replaced(venv_module, tmp_path):
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "precious").touch()
    done = venv_module("1.0")
    assert "engine is a folder that specrig did not make; remove it, or name another by install.venv" in done["msg"]
    assert (tmp_path / "engine" / "precious").exists()


def test_a_file_of_the_store_that_is_not_the_controller_s_is_refused(venv_module, tmp_path):
    (stored,) = (tmp_path / "store").glob("*/tinydep-1.0-py3-none-any.whl")
    stored.write_bytes(stored.read_bytes()[:-1] + b"!")
    done = venv_module("1.0")
    assert "tinydep-1.0-py3-none-any.whl in the guest is not the controller's file (its sha256 differs)" in done["msg"]
    assert not stored.exists()


@pytest.mark.parametrize(
    ("python", "minimum", "line"),
    [
        ("python3.99", "3.8", "the guest has no python3.99 that runs, expected Python 3.8 or newer"),
        (PYTHON, "3.99", "expected Python 3.99 or newer; install one in the guest, or name another by install.python"),
    ],
)
def test_a_python_that_will_not_do_is_told_before_anything_is_made(venv_module, tmp_path, python, minimum, line):
    done = venv_module("1.0", python=python, python_min=minimum)
    assert line in done["msg"]
    assert not (tmp_path / "engine.d").exists()


# ---- the controller's part -----------------------------------------------------------------------------------------


@pytest.fixture
def wheelhouse(repository, monkeypatch):
    """The controller's part, with a pip that sees no index."""
    pytest.importorskip("ansible")
    monkeypatch.setattr(sys, "path", [str(repository / ".collections"), *sys.path])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return importlib.import_module("ansible_collections.specrig.host.plugins.plugin_utils.wheelhouse")


FACTS = {"version": list(sys.version_info[:3]), "machine": os.uname().machine, "libc": [2, 99]}


def test_a_wheelhouse_is_filled_once_for_its_steps(wheelhouse, tmp_path, wheels):
    given = installed(
        wheelhouse=str(tmp_path / "house"),
        fill=True,
        steps=[
            {"requirements": ["tinydep"], "pip_args": [f"--find-links={wheels}"]},
            {"requirements": ["tinyengine==1.0"], "no_deps": True, "pip_args": [f"--find-links={wheels}"]},
        ],
    )
    install = engines.table(given, {})["default"]["install"]
    texts = [["tinydep"], ["tinyengine==1.0"]]
    assert wheelhouse.fill(install, FACTS, texts) is True
    names = sorted(path.name for path in (tmp_path / "house").glob("*.whl"))
    assert names == ["tinydep-1.0-py3-none-any.whl", "tinyengine-1.0-py3-none-any.whl"]
    assert wheelhouse.fill(install, FACTS, texts) is False
    (tmp_path / "house" / names[0]).unlink()
    assert wheelhouse.fill(install, FACTS, texts) is True
    # For another machine only wheels can be had, and these fit any.
    assert wheelhouse.fill(install, {**FACTS, "machine": "aarch64"}, texts) is True
    with pytest.raises(wheelhouse.engines.EngineError, match=r"the controller's pip wheel: ERROR: .*nothere"):
        wheelhouse.fill(install, FACTS, [["nothere"], []])
    (tmp_path / "file").touch()
    with pytest.raises(
        wheelhouse.engines.EngineError, match=r"the wheelhouse .*/file/house cannot be filled: Not a dir"
    ):
        wheelhouse.fill({**install, "wheelhouse": str(tmp_path / "file" / "house")}, FACTS, texts)


def test_sources_become_wheels_on_the_controller(wheelhouse, tmp_path):
    tree = packages.tree(tmp_path / "tree", "tinyengine", "3.0")
    bare = packages.repository(tmp_path / "git", {"v3.0": tree})
    step = {"index_url": None, "extra_index_urls": [], "pip_args": []}
    for text in (str(tree), f"git+file://{bare}@v3.0", f"tinyengine[x] @ git+file://{bare}@v3.0"):
        scratch = tmp_path / "scratch"
        scratch.mkdir(exist_ok=True)
        row = engines.requirement(text)
        assert wheelhouse.builds_here(row, offline=False)
        assert wheelhouse.build(row, step, FACTS, scratch).name == "tinyengine-3.0-py3-none-any.whl"
    with pytest.raises(wheelhouse.engines.EngineError, match="the controller's pip wheel: "):
        wheelhouse.build(engines.requirement(f"git+file://{bare}@v9"), step, FACTS, scratch)
    online = engines.requirement("git+https://example.net/x.git@v1")
    assert not wheelhouse.builds_here(online, offline=False)
    assert wheelhouse.builds_here(online, offline=True)


def test_hashes_are_remembered_by_size_and_time(wheelhouse, tmp_path, wheels):
    cache = tmp_path / "cache.json"
    first = wheelhouse.Hashes(cache)
    (row, *_rest) = wheelhouse.files(wheels, first)
    first.keep()
    known = json.loads(cache.read_text())
    known[str(wheels / row["name"])]["sha256"] = "remembered"
    cache.write_text(json.dumps(known))
    assert wheelhouse.files(wheels, wheelhouse.Hashes(cache))[0]["sha256"] == "remembered"
    os.utime(wheels / row["name"], ns=(1, 1))
    assert wheelhouse.files(wheels, wheelhouse.Hashes(cache))[0]["sha256"] == row["sha256"]
    cache.write_text("not json")
    assert wheelhouse.files(wheels, wheelhouse.Hashes(cache))[0]["sha256"] == row["sha256"]


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            {"requirements": ["/nowhere/a-1-py3-none-any.whl"]},
            "the wheel or archive /nowhere/a-1-py3-none-any.whl is not on",
        ),
        ({"requirements": ["/nowhere"]}, "or write guest:/nowhere for one in the guest"),
        ({"requirements": ["/"]}, "/ has neither pyproject.toml nor setup.py: name the folder that has them"),
        (
            {"requirements": ["a"], "constraints": ["/nowhere"]},
            "the constraints file /nowhere is not on the controller",
        ),
    ],
)
def test_paths_that_are_not_on_the_controller_are_named(wheelhouse, tmp_path, given, line):
    install = engines.table(installed(**given), {})["default"]["install"]
    with pytest.raises(wheelhouse.engines.EngineError) as caught:
        wheelhouse.contents(install, wheelhouse.Hashes(tmp_path / "cache.json"))
    assert line in str(caught.value)


class Planned:
    """The plan's action with a guest that answers what a test says."""

    def __init__(self, module: ModuleType, remembered: Any, **facts: Any) -> None:
        self.module = module
        self.remembered = remembered
        self.facts = {"problem": None, "needs": [], "git": True, "reuse": False, "hashes": {}, **FACTS, **facts}
        self.asked: list[dict[str, Any]] = []

    def row(self, about: dict[str, Any] | None = None, check: bool = False, **install: Any) -> dict[str, Any]:
        action = object.__new__(self.module.ActionModule)
        action._task = SimpleNamespace(check_mode=check)
        action._display = SimpleNamespace(display=lambda *words, **more: None)

        def guest(module_name: str, module_args: dict[str, Any], **_more: Any) -> dict[str, Any]:
            assert module_name == "specrig.host.engine_venv"
            self.asked.append(module_args)
            return {"facts": self.facts}

        action._execute_module = guest
        table = self.module.engines.table(installed(**install), {})
        return action._row("default", table["default"], about, self.remembered, None)


@pytest.fixture
def plan(repository, monkeypatch, tmp_path):
    pytest.importorskip("ansible")
    monkeypatch.setattr(sys, "path", [str(repository / ".collections"), *sys.path])
    module = importlib.import_module("ansible_collections.specrig.host.plugins.action.engine_plan")
    hashes = module.wheelhouse.Hashes(tmp_path / "cache.json")
    return lambda **facts: Planned(module, hashes, **facts)


def test_a_right_engine_is_not_asked_about_and_check_mode_asks_nothing(plan):
    planner = plan()
    row = planner.row(check=True, requirements=["sglang==0.5.23"])
    assert (row["needed"], row["why"]) == (True, ["it is not installed"])
    about = {"record": {"id": row["id"]}, "damaged": None, "wheels": {}}
    assert planner.row(about, requirements=["sglang==0.5.23"])["needed"] is False
    assert planner.asked == []


def test_what_the_guest_lacks_is_installed_and_what_it_cannot_have_is_told(plan, tmp_path):
    reference = {"requirements": ["git+https://example.net/sglang.git@v1"]}
    assert plan(git=False).row(**reference)["needs"] == ["git"]
    assert plan(git=True).row(**reference)["needs"] == []
    # Offline the controller fetches it.
    assert plan(git=False).row(**reference, offline=True)["needs"] == []
    assert plan(problem="no ensurepip", needs=["python3.11-venv"]).row(**reference)["needs"] == ["python3.11-venv"]
    # A build that is still there needs nothing.
    assert plan(git=False, reuse=True).row(**reference)["needs"] == []
    planner = plan(problem="the guest has no python3.99 that runs")
    with pytest.raises(planner.module.engines.EngineError, match=r"no python3\.99 that runs"):
        planner.row(**reference)
    planner = plan(hashes={"/opt/src": None})
    with pytest.raises(planner.module.engines.EngineError, match="/opt/src is not in the guest; correct its path"):
        planner.row(requirements=["guest:/opt/src"])
    planner = plan()
    with pytest.raises(planner.module.engines.EngineError, match=r"the wheelhouse .*/gone is not on the controller"):
        planner.row(requirements=["a"], wheelhouse=str(tmp_path / "gone"))
    (tmp_path / "bare").mkdir()
    with pytest.raises(
        planner.module.engines.EngineError, match=r"/bare has nothing for Python 3\.\d+ on \w+; fill it"
    ):
        planner.row(requirements=["a"], wheelhouse=str(tmp_path / "bare"))


def test_a_copy_goes_on_where_an_earlier_one_was_cut_off(repository, monkeypatch, tmp_path):
    pytest.importorskip("ansible")
    monkeypatch.setattr(sys, "path", [str(repository / ".collections"), *sys.path])
    module = importlib.import_module("ansible_collections.specrig.host.plugins.action.engine_install")
    monkeypatch.setattr(module, "PIECE", 65536)
    monkeypatch.setattr(module, "STORE", str(tmp_path))
    content = os.urandom(160000)
    source = tmp_path / "big.whl"
    source.write_bytes(content)
    part = tmp_path / "hash" / "big.whl.part"
    part.parent.mkdir()
    # One whole piece arrived, and the next was cut in the middle of a write.
    part.write_bytes(content[:65536] + b"garbage")
    sent = []

    def shell(command, in_data=None):
        sent.append(len(in_data or b""))
        done = subprocess.run(["sh", "-c", command], input=in_data or b"", capture_output=True, check=False)
        return {"rc": done.returncode, "stdout": "", "stderr": done.stderr.decode()}

    action = SimpleNamespace(_low_level_execute_command=shell)
    action._shell = lambda *words: module.ActionModule._shell(action, *words)
    row = {"name": "big.whl", "sha256": "hash", "size": 160000, "source": str(source)}
    module.ActionModule._copy(action, row, part.stat().st_size)
    assert part.read_bytes() == content
    assert sent == [65536, 160000 - 2 * 65536]


def test_what_pip_is_told_of_each_kind_of_requirement(repository, monkeypatch, tmp_path, wheels):
    pytest.importorskip("ansible")
    monkeypatch.setattr(sys, "path", [str(repository / ".collections"), *sys.path])
    module = importlib.import_module("ansible_collections.specrig.host.plugins.action.engine_install")
    action = object.__new__(module.ActionModule)
    action._hashes = module.wheelhouse.Hashes(tmp_path / "cache.json")
    wheel = wheels / "tinydep-1.0-py3-none-any.whl"
    secret = "git+https://someone:hunter2@example.net/x.git@v1"
    texts = ["sglang==0.5.23", f"{wheel}[all]", "guest:/opt/src[all]", "guest:/opt/w/x-1-py3-none-any.whl", secret]
    (tmp_path / "constraints.txt").write_text("fakedep<2\n")
    given = installed(
        requirements=texts, constraints=[str(tmp_path / "constraints.txt")], no_deps=True, pip_args=["-v"]
    )
    install = engines.table(given, {})["default"]["install"]
    # One of the wheelhouse has the same name and another content: the one that is asked for goes along.
    files = [{"name": wheel.name, "size": 1, "sha256": "another", "bound": True, "source": "/w/" + wheel.name}]
    secrets = []
    (step,) = install["steps"]
    told = action._step(step, install, FACTS, files, secrets, tmp_path)
    assert told == {
        "requirements": [
            "sglang==0.5.23",
            f"wheel:{wheel.name}[all]",
            "/opt/src[all]",
            "/opt/w/x-1-py3-none-any.whl",
            "secret:0",
        ],
        "args": ["--no-deps", "-v"],
        "constraints": ["fakedep<2\n"],
    }
    assert secrets == [secret]
    (only,) = files
    assert (only["name"], only["source"], only["bound"]) == (wheel.name, str(wheel), False)
    assert only["sha256"] != "another"


def test_a_folder_is_shown_only_if_the_host_has_the_very_files(repository, monkeypatch, wheels):
    pytest.importorskip("ansible")
    monkeypatch.setattr(sys, "path", [str(repository / ".collections"), *sys.path])
    share = importlib.import_module("ansible_collections.specrig.host.plugins.modules.wheelhouse_share")
    path = wheels / "tinydep-1.0-py3-none-any.whl"
    row = {"name": path.name, "size": path.stat().st_size, "mtime_ns": path.stat().st_mtime_ns}
    assert share.difference(str(wheels), [row]) is None
    assert "is another file" in share.difference(str(wheels), [{**row, "mtime_ns": 1}])
    assert "the host has no " in share.difference(str(wheels / "nowhere"), [row])
    link = wheels / "link-1.0-py3-none-any.whl"
    link.symlink_to(path)
    assert "is no plain file" in share.difference(str(wheels), [{**row, "name": link.name}])
