"""Tiny Python packages made on the spot: wheels, source folders that need nothing to be built, and a git repository.

`fakeengine` is a server like any other: its command line, its environment and its caches are its own, and what answers
is the simulated engine of the package that the guest has.
"""

from __future__ import annotations

import base64
import hashlib
import subprocess
import zipfile
from pathlib import Path

ENGINE = '''
import glob
import os
import pathlib
import site
import sys

__version__ = "{version}"


def main():
    """Note that this version ran, as a compiled kernel would be kept, then serve."""
    cache = pathlib.Path(os.environ.get("TRITON_CACHE_DIR", "/nonexistent"))
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "kernels.txt").open("a") as kept:
        kept.write(__version__ + chr(10))
    for folder in glob.glob("/opt/specrig/venv/lib/python3*/site-packages"):
        site.addsitedir(folder)
    from specrig.cli import main as specrig

    return specrig(["sim", *sys.argv[1:]])
'''

BACKEND = """
import base64
import hashlib
import pathlib
import zipfile

NAME, VERSION, SCRIPTS = {name!r}, {version!r}, {scripts!r}


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    wheel = f"{{NAME}}-{{VERSION}}-py3-none-any.whl"
    info = f"{{NAME}}-{{VERSION}}.dist-info"
    files = {{f"{{NAME}}/__init__.py": pathlib.Path(NAME, "__init__.py").read_bytes()}}
    files[info + "/METADATA"] = f"Metadata-Version: 2.1\\nName: {{NAME}}\\nVersion: {{VERSION}}\\n".encode()
    files[info + "/WHEEL"] = b"Wheel-Version: 1.0\\nGenerator: tests\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
    files[info + "/entry_points.txt"] = SCRIPTS.encode()
    rows = []
    with zipfile.ZipFile(pathlib.Path(wheel_directory, wheel), "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            rows.append(f"{{path}},sha256={{digest}},{{len(content)}}")
        archive.writestr(info + "/RECORD", "\\n".join([*rows, info + "/RECORD,,", ""]))
    return wheel
"""


def scripts(name: str) -> str:
    """The entry point of a package's command."""
    return f"[console_scripts]\n{name} = {name}:main\n"


def source(version: str) -> str:
    """The code of the engine."""
    return ENGINE.replace("{version}", version)


def wheel(
    folder: Path,
    name: str,
    version: str,
    code: str | None = None,
    requires: tuple[str, ...] = (),
    tag: str = "py3-none-any",
    data: bytes = b"",
) -> Path:
    """A wheel of one module; with ``code`` left out the module only has its version."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = {
        f"{name}/__init__.py": (code or f"__version__ = {version!r}\n").encode(),
        f"{info}/METADATA": (metadata + "".join(f"Requires-Dist: {row}\n" for row in requires)).encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: {tag}\n".encode(),
    }
    if code:
        files[f"{info}/entry_points.txt"] = scripts(name).encode()
    if data:
        files[f"{name}/data.bin"] = data
    path = folder / f"{name}-{version}-{tag}.whl"
    rows = []
    with zipfile.ZipFile(path, "w") as archive:
        for place, content in files.items():
            archive.writestr(place, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            rows.append(f"{place},sha256={digest},{len(content)}")
        archive.writestr(f"{info}/RECORD", "\n".join([*rows, f"{info}/RECORD,,", ""]))
    return path


def tree(folder: Path, name: str, version: str, code: str | None = None) -> Path:
    """A source folder whose build backend lies in it, so that building it asks no index for anything."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / "__init__.py").write_text(code or f"__version__ = {version!r}\n")
    (folder / "pyproject.toml").write_text(
        f'[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        f'[project]\nname = "{name}"\nversion = "{version}"\n'
    )
    entry = scripts(name) if code else ""
    (folder / "backend.py").write_text(BACKEND.format(name=name, version=version, scripts=entry))
    return folder


def repository(folder: Path, versions: dict[str, Path]) -> Path:
    """A bare git repository with one commit and tag for each version's source folder."""
    work = folder / "work"
    work.mkdir(parents=True)

    def git(*words: str) -> None:
        who = ("-c", "user.name=test", "-c", "user.email=test@example.net", "-c", "init.defaultBranch=main")
        subprocess.run(["git", *who, *words], cwd=work, check=True, capture_output=True)

    git("init")
    for tag, content in versions.items():
        for path in content.rglob("*"):
            if path.is_file():
                target = work / path.relative_to(content)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())
        git("add", "-A")
        git("commit", "-m", tag)
        git("tag", tag)
    bare = folder / "engine.git"
    subprocess.run(["git", "clone", "--bare", str(work), str(bare)], check=True, capture_output=True)
    return bare
