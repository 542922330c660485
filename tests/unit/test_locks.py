"""The locks hold what pyproject.toml asks for, pinned and hashed; committed text names nobody's machine."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

LOCKS = ("requirements.lock", "requirements-guest.lock", "requirements-host.lock", "requirements-newest.lock")
# For an environment of its own on a host, without the package: part of the role that makes it.
HUB_LOCK = "roles/model_store/files/hub-requirements.txt"
EXTRAS_OF = {
    "requirements-guest.lock": ("sim",),
    "requirements-host.lock": ("sim", "ops", "report"),
    "requirements-newest.lock": ("sim", "ops"),
}
PYTHON_OF = {"requirements-newest.lock": "3.12"}


def locked(path: Path) -> dict[str, tuple[Version, int]]:
    """Version and number of hashes of each package in a lock; any line that is no entry fails."""
    found: dict[str, tuple[Version, int]] = {}
    for entry in re.sub(r"\s*\\\n\s*", " ", path.read_text()).splitlines():
        line = entry.split("#", 1)[0].strip()
        if not line:
            continue
        match = re.fullmatch(r"([a-z0-9._-]+)==(\S+)((?: --hash=sha256:[0-9a-f]{64})+)", line)
        assert match, f"{path.name}: expected name==version and its hashes, found {line[:80]!r}"
        name = canonicalize_name(match[1])
        assert name not in found, f"{path.name} has {name} twice"
        found[name] = (Version(match[2]), match[3].count("--hash"))
    return found


def direct(repository: Path) -> dict[str, list[Requirement]]:
    """Direct dependencies by extra; the package's own under ''."""
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    tables = {"": project["dependencies"], **project["optional-dependencies"]}
    return {extra: [Requirement(text) for text in texts] for extra, texts in tables.items()}


def wanted(repository: Path, extras: tuple[str, ...], python: str) -> list[Requirement]:
    tables = direct(repository)
    asked = [requirement for extra in ("", *extras) for requirement in tables[extra]]
    return [row for row in asked if row.marker is None or row.marker.evaluate({"python_version": python})]


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_holds_every_direct_dependency_in_a_version_that_fits(repository: Path, name: str) -> None:
    extras = EXTRAS_OF.get(name) or tuple(extra for extra in direct(repository) if extra)
    pins = locked(repository / name)
    requirements = wanted(repository, extras, PYTHON_OF.get(name, "3.11"))
    assert len(requirements) >= 8
    for requirement in requirements:
        pin = pins.get(canonicalize_name(requirement.name))
        assert pin is not None, f"{name} lacks {requirement}; run make lock"
        assert requirement.specifier.contains(pin[0]), f"{name} has {requirement.name} {pin[0]}, not {requirement}"


def test_the_lock_of_the_hub_holds_its_library_and_the_transfer_library_that_it_brings(repository: Path) -> None:
    pins = locked(repository / HUB_LOCK)
    (requirement,) = direct(repository)["hub"]
    assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)][0])
    assert "hf-xet" in pins
    assert not {"specrig", "ansible-core", "transformers"} & set(pins)


@pytest.mark.parametrize("name", ["requirements-guest.lock", "requirements-host.lock", HUB_LOCK])
def test_a_smaller_lock_has_no_other_versions_than_the_whole(repository: Path, name: str) -> None:
    whole = locked(repository / "requirements.lock")
    for package, pin in locked(repository / name).items():
        assert whole.get(package) == pin, f"{package} differs from requirements.lock; run make lock"


def test_the_lock_of_the_newest_ansible_differs_in_nothing_else(repository: Path) -> None:
    whole, newest = locked(repository / "requirements.lock"), locked(repository / "requirements-newest.lock")
    assert newest["ansible-core"][0] > whole["ansible-core"][0]
    others = {name: pin for name, pin in newest.items() if name != "ansible-core" and whole.get(name) != pin}
    assert not others, f"differ from requirements.lock, or are not in it: {others}"


@pytest.mark.parametrize("name", [*LOCKS, HUB_LOCK])
def test_a_lock_names_no_place_to_fetch_from(repository: Path, name: str) -> None:
    text = (repository / name).read_text()
    assert not re.findall(r"://|--index|--extra-index|--find-links|--trusted-host|\bfile:| @ ", text)


def test_the_build_backend_is_the_one_in_the_lock(repository: Path) -> None:
    build = tomllib.loads((repository / "pyproject.toml").read_text())["build-system"]["requires"]
    pins = locked(repository / "requirements.lock")
    assert [f"{row.name}=={pins[row.name][0]}" for row in map(Requirement, build)] == build


def test_every_direct_dependency_has_its_reason(repository: Path) -> None:
    text = (repository / "docs" / "dependencies.md").read_text().lower()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    cells = {word for line in rows for cell in line.split("|")[1:3] for word in re.split(r"[\s,]+", cell)}
    stubs = re.compile(r"(types-.*|.*-stubs)")
    names = {requirement.name.lower() for table in direct(repository).values() for requirement in table}
    missing = sorted(name for name in names if not stubs.fullmatch(name) and name not in cells)
    assert not missing, f"docs/dependencies.md gives no reason for {missing}"
    if any(stubs.fullmatch(name) for name in names):
        assert "type stubs" in text


def test_every_system_package_of_setup_is_explained(repository: Path) -> None:
    setup = (repository / "scripts" / "setup.sh").read_text()
    text = (repository / "docs" / "dependencies.md").read_text()
    packages = {word for line in re.findall(r"need_packages ([a-z][^\n;|]*)", setup) for word in line.split()}
    assert {"lxc", "mmdebstrap", "python3-venv"} <= packages
    assert not [name for name in sorted(packages) if name not in re.split(r"[\s,();]+", text)]


def committed(repository: Path) -> list[tuple[str, str]]:
    """(path, text) of every committed text file."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=repository, capture_output=True, check=False)
    if listing.returncode:
        pytest.skip(f"no git checkout here: {listing.stderr.decode().strip()}")
    found = []
    for name in listing.stdout.decode().split("\0"):
        path = repository / name
        if not name or path.is_symlink() or not path.is_file():
            continue
        content = path.read_bytes()
        if b"\0" not in content:
            found.append((name, content.decode()))
    assert len(found) > 100
    return found


REGISTRIES = re.compile(
    r"pypi\.org|pythonhosted\.org|(?:deb|security|snapshot|ftp\.\w+)\.debian\.org|archive\.ubuntu\.com|ports\.ubuntu\.com"
    r"|registry\.npmjs|npmjs\.(?:com|org)|crates\.io|proxy\.golang|files\.py|galaxy\.ansible\.com/api",
    re.IGNORECASE,
)
# Homes of people, and the kinds of folder a checkout lies in. /root is every machine's; /home/me is nobody's.
HOMES = re.compile(r"(?<![\w.])/(?:home/(?!me\b)[a-z][\w-]*|Users/\w+|work/[\w.]+|workspaces?/[\w.]+)")


def test_committed_text_names_no_package_registry(repository: Path) -> None:
    hits = [f"{name}: {hit}" for name, text in committed(repository) for hit in REGISTRIES.findall(text)]
    assert not hits


def test_committed_text_names_no_path_of_anyones_machine(repository: Path) -> None:
    own = repository.as_posix()
    mine = re.compile(rf"(?<![\w.-]){re.escape(own)}(?![\w-])") if own.count("/") > 1 else None
    hits = []
    for name, text in committed(repository):
        hits += [f"{name}: {hit}" for hit in HOMES.findall(text)]
        hits += [f"{name}: {own}" for _ in (mine.findall(text) if mine else ())]
    assert not hits


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("see https://pypi" + ".org/simple", REGISTRIES),
        ("deb http://deb.debian" + ".org/debian bookworm main", REGISTRIES),
        ("cd /home" + "/ann/specrig", HOMES),
        ("/work" + "/main/src", HOMES),
    ],
)
def test_the_patterns_find_what_they_are_for(text: str, pattern: re.Pattern[str]) -> None:
    assert pattern.search(text)
