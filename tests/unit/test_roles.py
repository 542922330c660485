"""Every role's argument specification says what its defaults say, and playbooks use only roles that are there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jinja2
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
ROLES = sorted(path.name for path in (ROOT / "roles").iterdir() if (path / "tasks").is_dir())
TYPES = {
    "str": str,
    "int": int,
    "bool": bool,
    "list": list,
    "dict": dict,
    "float": (int, float),
    "path": str,
    "raw": object,
}


def load(path):
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None


def defaults(role):
    return load(ROOT / "roles" / role / "defaults" / "main.yml") or {}


def specs(role):
    return (load(ROOT / "roles" / role / "meta" / "argument_specs.yml") or {}).get("argument_specs") or {}


def options(role):
    merged = {}
    for entry in specs(role).values():
        merged.update(entry.get("options") or {})
    return merged


@pytest.mark.parametrize("role", ROLES)
def test_every_default_is_specified_and_every_specified_default_is_there(role):
    given, specified = defaults(role), options(role)
    assert set(given) <= set(specified), "in defaults/main.yml, not in meta/argument_specs.yml"
    optional = {name for name, option in specified.items() if "default" in option}
    assert optional <= set(given), "has a default in meta/argument_specs.yml, none in defaults/main.yml"
    for name, value in given.items():
        if isinstance(value, str) and "{{" in value:
            continue
        assert specified[name].get("default") == value, name


@pytest.mark.parametrize("role", ROLES)
def test_public_variables_carry_the_role_s_name(role):
    for name in [*defaults(role), *options(role)]:
        assert name.startswith(role + "_"), name
    for name in load(ROOT / "roles" / role / "vars" / "main.yml") or {}:
        assert name.startswith("__" + role + "_"), name


@pytest.mark.parametrize("role", ROLES)
def test_types_are_stated_and_defaults_have_them(role):
    for name, option in options(role).items():
        assert option.get("type") in TYPES, name
        assert option.get("description"), name
        if option["type"] == "list":
            assert option.get("elements"), name
        if option.get("default") is not None:
            assert isinstance(option["default"], TYPES[option["type"]]), name
        if "choices" in option and "default" in option:
            assert option["default"] in option["choices"], name


@pytest.mark.parametrize("role", ROLES)
def test_every_entry_point_has_its_tasks(role):
    entries = specs(role)
    assert "main" in entries
    for entry in entries:
        assert (ROOT / "roles" / role / "tasks" / (entry + ".yml")).is_file(), entry


@pytest.mark.parametrize("inventory", ["lab", "rtxpro6000x8"])
def test_the_inventories_give_each_profile_a_method_and_its_own_port(inventory):
    from specrig.facts import dialects, serving

    values = load(ROOT / "inventory" / inventory / "group_vars" / "all.yml")
    profiles = values["sglang_server_profiles"]
    assert serving.check_profiles(profiles) == []
    assert sum(bool(profile.get("serve")) for profile in profiles.values()) == 2
    for name, profile in profiles.items():
        serving.check_name(name)
        assert profile["port"] < 32768, "inside the ephemeral range"
        assert profile["model"] in values["model_store_models"]
        label = dialects.resolve(profile["method"], profile.get("budget"), values.get("sglang_server_dialects"))[
            "label"
        ]
        if not profile.get("serve"):
            assert name == f"tp{profile['tp']}-{label}"
        assert profile.get("numa", "local") == ("span" if profile["tp"] == 8 else "local")


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({}, "/srv/models"),
        ({"model_store_place": "guest"}, "/dev/shm/models"),
        ({"model_store_place": "guest", "model_store_guest_path": "/m"}, "/m"),
    ],
)
def test_server_gates_and_benchmarks_agree_on_where_a_guest_sees_its_models(given, path):
    """Also where the role that stages them has no part in the play, as in a benchmark."""
    said = [defaults("sglang_server")["sglang_server_model_root"]]
    for role in ("preflight", "decode_bench"):
        variables = load(ROOT / "roles" / role / "vars" / "main.yml")
        said.append(variables[f"__{role}_server"]["model_root"])
    assert [jinja2.Template(text).render(given) for text in said] == [path] * 3


def test_only_the_lab_declares_the_simulated_driver():
    for path in (ROOT / "inventory").glob("*/group_vars/*.yml"):
        values = load(path)
        assert bool(values.get("gpu_host_simulated_driver")) == (path.parts[-3] == "lab"), path
        if "sglang_server_engine" in values:
            assert (values["sglang_server_engine"]["kind"] == "sim") == (path.parts[-3] == "lab"), path


def test_every_readme_is_what_the_specification_says():
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "role_readme.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
