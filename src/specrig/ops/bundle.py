"""The package as one wheel, to carry to a host or a guest: from a checkout, or from what is installed.

A guest has no checkout and specrig need not be on any package index, so the controller brings the wheel. From a
checkout it is built; where specrig itself came from a wheel, that wheel is put together again from its own RECORD.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import os
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from specrig import __version__
from specrig.errors import UsageError

_EPOCH = (2020, 1, 1, 0, 0, 0)
_TREES = ("src/specrig", "plugins", "playbooks", "roles", "inventory", "sweeps", "meta", "callback_plugins")
_FILES = (
    *("pyproject.toml", "hatch_build.py", "galaxy.yml", "ansible.cfg", "README.md", "LICENSE"),
    *("requirements-guest.lock", "requirements-host.lock"),
)


def checkout() -> Path | None:
    """The root of the checkout that this package runs from, or None where it is installed from a wheel."""
    root = Path(__file__).resolve().parents[3]
    return root if (root / "pyproject.toml").is_file() and (root / "playbooks").is_dir() else None


def lock_file(name: str) -> Path:
    """A hashed lock that travels with the package.

    Args:
        name: ``requirements-guest.lock`` or ``requirements-host.lock``.
    """
    root = checkout()
    path = (root if root else Path(__file__).resolve().parents[1]) / name
    if not path.is_file():
        raise UsageError(f"{name} is not beside the package ({path}); reinstall specrig")
    return path


def fingerprint() -> str:
    """A hash over names and contents of everything that goes into the wheel (hex sha256); it needs no build."""
    digest = hashlib.sha256()
    for name, path in sorted(_sources()):
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def build_wheel(destination: Path | str) -> Path:
    """Write the wheel of this very package into a folder; the same sources give the same bytes.

    Args:
        destination: the folder, made if it is not there.

    Returns:
        The wheel's path.

    Raises:
        UsageError: in a checkout whose environment lacks the build backend.
    """
    folder = Path(destination)
    folder.mkdir(parents=True, exist_ok=True)
    root = checkout()
    return _build(root, folder) if root else _rezip(folder)


def _sources() -> Iterator[tuple[str, Path]]:
    root = checkout()
    if root is None:
        for name, path in _installed():
            if not name.startswith("specrig-"):
                yield name, path
        return
    for tree in _TREES:
        for folder, folders, files in os.walk(root / tree):
            folders[:] = [name for name in folders if name != "__pycache__"]
            for name in files:
                if not name.endswith(".pyc"):
                    path = Path(folder) / name
                    yield str(path.relative_to(root)), path
    for name in _FILES:
        if (root / name).is_file():
            yield name, root / name


def _installed() -> Iterator[tuple[str, Path]]:
    """Files of the installed distribution that a wheel holds: no scripts, no byte code, no installer's notes."""
    for entry in importlib.metadata.files("specrig") or []:
        name = str(entry)
        if name.startswith("..") or name.endswith(".pyc") or "__pycache__" in name:
            continue
        if name.split("/")[0].endswith(".dist-info") and entry.name in (
            "RECORD",
            "INSTALLER",
            "REQUESTED",
            "direct_url.json",
        ):
            continue
        yield name, Path(str(entry.locate()))


def _build(root: Path, folder: Path) -> Path:
    try:
        from hatchling.builders.wheel import WheelBuilder
    except ImportError:
        raise UsageError("the build backend hatchling is not installed; run `make setup` in the checkout") from None
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        built = Path(next(iter(WheelBuilder(str(root)).build(directory=scratch, versions=["standard"]))))
        return built.rename(folder / built.name)


def _rezip(folder: Path) -> Path:
    info = f"specrig-{__version__}.dist-info"
    target = folder / f"specrig-{__version__}-py3-none-any.whl"
    record = []
    with (
        tempfile.NamedTemporaryFile(dir=folder, delete=False) as scratch,
        zipfile.ZipFile(scratch, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for name, path in sorted(_installed()):
            content = path.read_bytes()
            _add(archive, name, content, executable=os.access(path, os.X_OK))
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(content)}")
        record.append(f"{info}/RECORD,,")
        _add(archive, f"{info}/RECORD", ("\n".join(record) + "\n").encode(), executable=False)
    return Path(scratch.name).rename(target)


def _add(archive: zipfile.ZipFile, name: str, content: bytes, *, executable: bool) -> None:
    entry = zipfile.ZipInfo(name, _EPOCH)
    entry.external_attr = (0o100755 if executable else 0o100644) << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(entry, content)
