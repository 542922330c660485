"""The wheel: the same sources give the same bytes, everything in it counts, and an installed one can be had again."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from specrig import __version__
from specrig.errors import UsageError
from specrig.ops import bundle

COLLECTION = "ansible_collections/specrig/host/"
PARTS = (
    *("src", "plugins", "callback_plugins", "playbooks", "roles", "inventory", "sweeps", "meta"),
    *("pyproject.toml", "hatch_build.py", "galaxy.yml", "ansible.cfg", "README.md", "LICENSE"),
    *("requirements-guest.lock", "requirements-host.lock"),
)


@pytest.fixture(scope="module")
def copied(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of all that the wheel is made of."""
    root = tmp_path_factory.mktemp("checkout")
    for name in PARTS:
        source = repository / name
        if source.is_dir():
            shutil.copytree(source, root / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        else:
            shutil.copy2(source, root / name)
    return root


@pytest.fixture
def checkout(copied: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(bundle, "checkout", lambda: copied)
    return copied


@pytest.fixture(scope="module")
def wheel(copied: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundle, "checkout", lambda: copied)
        return bundle.build_wheel(tmp_path_factory.mktemp("dist"))


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def modes(wheel: Path) -> dict[str, bool]:
    """Whether each file of a wheel may be executed."""
    with zipfile.ZipFile(wheel) as archive:
        return {info.filename: bool(info.external_attr >> 16 & 0o100) for info in archive.infolist()}


def assert_recorded(files: dict[str, bytes]) -> None:
    """RECORD names every file once, with its hash and its size, and itself without."""
    name = f"specrig-{__version__}.dist-info/RECORD"
    rows = list(csv.reader(io.StringIO(files[name].decode())))
    assert sorted(row[0] for row in rows) == sorted(files)
    for path, digest, size in rows:
        if path == name:
            assert (digest, size) == ("", "")
            continue
        expected = base64.urlsafe_b64encode(hashlib.sha256(files[path]).digest()).rstrip(b"=").decode()
        assert (digest, size) == (f"sha256={expected}", str(len(files[path]))), path


def test_the_fingerprint_stays_and_follows_every_content_and_name(checkout: Path) -> None:
    first = bundle.fingerprint()
    assert bundle.fingerprint() == first
    changed = [
        "src/specrig/errors.py",
        "plugins/module_utils/cpulist.py",
        "callback_plugins/journal.py",
        "playbooks/recover.yml",
        "inventory/lab/hosts",
        "requirements-guest.lock",
        "galaxy.yml",
    ]
    for name in changed:
        path = checkout / name
        before = path.read_bytes()
        path.write_bytes(before + b"\n")
        assert bundle.fingerprint() != first, name
        path.write_bytes(before)
        assert bundle.fingerprint() == first
    path = checkout / "playbooks/recover.yml"
    path.rename(checkout / "playbooks/renamed.yml")
    assert bundle.fingerprint() != first
    (checkout / "playbooks/renamed.yml").rename(path)
    assert bundle.fingerprint() == first


def test_the_fingerprint_is_not_moved_by_what_stays_out_of_the_wheel(checkout: Path) -> None:
    first = bundle.fingerprint()
    cache = checkout / "src" / "specrig" / "__pycache__"
    cache.mkdir()
    (cache / "errors.cpython-311.pyc").write_bytes(b"x")
    (checkout / "notes.txt").write_text("mine")
    try:
        assert bundle.fingerprint() == first
    finally:
        shutil.rmtree(cache)
        (checkout / "notes.txt").unlink()


def test_everything_in_the_wheel_is_fingerprinted(checkout: Path, wheel: Path) -> None:
    counted = {hashlib.sha256(path.read_bytes()).digest() for _, path in bundle._sources()}
    files = {name: data for name, data in contents(wheel).items() if ".dist-info/" not in name}
    assert len(files) > 100
    assert [name for name, data in files.items() if hashlib.sha256(data).digest() not in counted] == []


def test_building_twice_gives_the_same_bytes(checkout: Path, wheel: Path, tmp_path: Path) -> None:
    # Other times of the same files, and another folder, are no other wheel.
    for path in (checkout / "src" / "specrig").glob("*.py"):
        os.utime(path, (1, 1))
    again = bundle.build_wheel(tmp_path / "deep" / "dist")
    assert again.name == f"specrig-{__version__}-py3-none-any.whl"
    assert again.read_bytes() == wheel.read_bytes()
    assert [path.name for path in again.parent.iterdir()] == [again.name]


def test_the_wheel_holds_the_package_and_the_collection_and_nothing_else(wheel: Path, copied: Path) -> None:
    files = contents(wheel)
    for name in (
        "specrig/cli.py",
        "specrig/facts/cpulist.py",
        "specrig/requirements-guest.lock",
        "specrig/requirements-host.lock",
        COLLECTION + "galaxy.yml",
        COLLECTION + "ansible.cfg",
        COLLECTION + "meta/runtime.yml",
        COLLECTION + "playbooks/recover.yml",
        COLLECTION + "plugins/callback/journal.py",
        COLLECTION + "plugins/modules/host_look.py",
        COLLECTION + "plugins/connection/lxc_ssh.py",
        COLLECTION + "inventory/lab/hosts",
        COLLECTION + "sweeps/quick.yml",
        f"specrig-{__version__}.dist-info/licenses/LICENSE",
    ):
        assert name in files, name
    tops = {name.split("/")[0] for name in files}
    assert tops == {"specrig", "ansible_collections", f"specrig-{__version__}.dist-info"}
    assert not [name for name in files if name.endswith(".pyc") or "__pycache__" in name or "/tests/" in name]
    # Every file of the trees that travel is there.
    for tree in ("plugins", "playbooks", "roles", "inventory", "sweeps", "meta"):
        for path in (copied / tree).rglob("*"):
            if path.is_file():
                assert COLLECTION + path.relative_to(copied).as_posix() in files, path
    for path in (copied / "src" / "specrig").rglob("*"):
        if path.is_file():
            assert path.relative_to(copied / "src").as_posix() in files, path
    assert modes(wheel)[COLLECTION + "inventory/lab/hosts"]
    assert_recorded(files)


def test_an_installed_package_makes_its_own_wheel_again(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    info = f"specrig-{__version__}.dist-info"
    executable = modes(wheel)
    for name, data in contents(wheel).items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o755 if executable[name] else 0o644)
    # What an installer adds to a wheel's files and to its RECORD.
    for name, text in (("INSTALLER", "pip\n"), ("REQUESTED", ""), ("direct_url.json", "{}")):
        (site / info / name).write_text(text)
    with (site / info / "RECORD").open("a") as record:
        for name in (f"{info}/INSTALLER", f"{info}/REQUESTED", f"{info}/direct_url.json", "../../../bin/specrig"):
            record.write(f"{name},,\n")
        record.write("specrig/__pycache__/cli.cpython-311.pyc,,\n")
    script = (
        "import json, sys\nfrom specrig.ops import bundle\n"
        "made = [bundle.build_wheel(folder) for folder in sys.argv[1:3]]\n"
        "print(json.dumps([bundle.__file__, str(bundle.checkout()), bundle.fingerprint(), *map(str, made)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "one"), str(tmp_path / "two")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    where, root, fingerprint, one, two = json.loads(done.stdout)
    assert Path(where).is_relative_to(site)
    assert root == "None"
    assert len(fingerprint) == 64
    assert Path(one).name == wheel.name
    assert contents(Path(one)) | {f"{info}/RECORD": b""} == contents(wheel) | {f"{info}/RECORD": b""}
    assert modes(Path(one))[COLLECTION + "inventory/lab/hosts"]
    assert_recorded(contents(Path(one)))
    assert Path(one).read_bytes() == Path(two).read_bytes()


def test_locks_are_found_and_a_missing_one_is_a_clear_line(checkout: Path) -> None:
    assert bundle.lock_file("requirements-guest.lock") == checkout / "requirements-guest.lock"
    with pytest.raises(UsageError, match=r"absent\.lock is not beside the package") as problem:
        bundle.lock_file("absent.lock")
    assert "\n" not in str(problem.value)


def test_without_its_build_backend_a_checkout_says_what_to_do(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "hatchling.builders.wheel", None)
    with pytest.raises(UsageError, match="hatchling is not installed; run `make setup`"):
        bundle.build_wheel(tmp_path)


def test_an_editable_install_gets_no_copy_that_would_go_stale(copied: Path, tmp_path: Path) -> None:
    from hatchling.builders.wheel import WheelBuilder

    made = Path(next(iter(WheelBuilder(str(copied)).build(directory=str(tmp_path), versions=["editable"]))))
    assert {name.split("/")[0] for name in contents(made)} == {"_specrig.pth", f"specrig-{__version__}.dist-info"}
