"""The root file system of both containers, and the model's layer: built once, cached, shared by all labs."""

from __future__ import annotations

import configparser
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

from specrig.errors import SpecrigError, UsageError
from specrig.ops.lab import model
from specrig.ops.lab.state import CACHE_ROOT, locked

PACKAGES = (
    "ca-certificates",
    "dbus",
    "iproute2",
    "iptables",
    "iputils-ping",
    "kmod",
    "less",
    "lxc",
    "openssh-server",
    "procps",
    "python3",
    "python3-venv",
    "systemd",
    "systemd-sysv",
)
"""What is installed in the host and in the guest, besides what Debian calls essential."""

VERSION = 1
"""Version of how the root file system is made; part of the cache's key."""

BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
_EXCLUDE = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*")
_KEPT_APT = re.compile(r"Acquire::(https?::.*(Proxy|Verify|CaInfo|CAInfo).*|Check-Valid-Until|Check-Date|Retries)\b")
_DIE_TOGETHER = (
    *("setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--propagation", "private"),
    *("--pid", "--fork", "--kill-child=KILL", "--mount-proc"),
)
"""Runs a command with mounts of its own that cannot outlive this process, however it ends."""
_PIP_KEYS = ("cert", "index-url", "extra-index-url", "trusted-host", "timeout", "retries")


def _codename() -> str:
    for line in Path("/etc/os-release").read_text().splitlines():
        key, _, value = line.partition("=")
        if key == "VERSION_CODENAME":
            return value.strip('"')
    raise UsageError("/etc/os-release names no VERSION_CODENAME, expected a Debian or Ubuntu release for the lab")


def distribution_sources(texts: Iterable[tuple[str, str]], codename: str) -> list[tuple[str, str]]:
    """The package sources that carry the distribution itself, leaving out third parties' repositories.

    Args:
        texts: (file name, content) of apt's source files, in either of its two formats.
        codename: the release, such as ``bookworm``.

    Returns:
        (file name, content) with only the entries whose suite is the release or one of its pockets and that have the
        component ``main``; files with none are left out.
    """
    ours = re.compile(rf"{re.escape(codename)}(-updates|-security|-backports)?(/updates)?")
    kept = []
    for name, text in texts:
        if name.endswith(".sources"):
            blocks = [block for block in re.split(r"\n\s*\n", text) if block.strip()]
            chosen = []
            for block in blocks:
                fields = dict(re.findall(r"^([A-Za-z-]+):[ \t]*(.*(?:\n[ \t].*)*)", block, re.MULTILINE))
                suites = fields.get("Suites", "").split()
                if (
                    "deb" in fields.get("Types", "").split()
                    and fields.get("Enabled", "yes").strip() != "no"
                    and any(ours.fullmatch(suite) for suite in suites)
                    and "main" in fields.get("Components", "").split()
                ):
                    chosen.append(block.strip("\n") + "\n")
            content = "\n".join(chosen)
        else:
            lines = []
            for line in text.splitlines():
                match = re.match(r"deb\s+(?:\[[^]]*\]\s+)?\S+\s+(\S+)\s+(.*)", line)
                if match and ours.fullmatch(match[1]) and "main" in match[2].split():
                    lines.append(line + "\n")
            content = "".join(lines)
        if content:
            kept.append((name, content))
    return kept


def _sources(codename: str) -> list[tuple[str, str]]:
    apt = Path("/etc/apt")
    files = [apt / "sources.list", *sorted((apt / "sources.list.d").glob("*"))]
    texts = [(path.name, path.read_text()) for path in files if path.suffix in (".list", ".sources") and path.is_file()]
    found = distribution_sources(texts, codename)
    if not found:
        raise UsageError(f"no apt source for {codename} main in /etc/apt, expected one to build the lab's rootfs from")
    return found


def _apt_options() -> list[str]:
    """This machine's own apt settings for reaching its sources (proxy, certificates, clock), for use inside."""
    dump = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=False).stdout
    return [line for line in dump.splitlines() if _KEPT_APT.match(line) and not line.endswith('"";')]


def cached(key: str, build: Callable[[Path], None], say: Callable[[str], None], what: str) -> Path:
    """The cached folder of that key, built under a lock if it isn't there yet; it appears whole or not at all."""
    folder = CACHE_ROOT / key
    if folder.is_dir():
        return folder
    with locked(CACHE_ROOT / ".lock"):
        if folder.is_dir():
            return folder
        for stale in CACHE_ROOT.glob("*.partial"):
            shutil.rmtree(stale, ignore_errors=True)
        say(f"building {what} (cached afterwards)")
        scratch = CACHE_ROOT / f"{key}.partial"
        build(scratch)
        scratch.rename(folder)
    return folder


def rootfs(say: Callable[[str], None]) -> Path:
    """The cached root file system for both containers, built with mmdebstrap from this machine's own sources.

    Raises:
        UsageError: this machine's sources hold no Debian or Ubuntu release.
        SpecrigError: mmdebstrap failed; its last line is in the message.
    """
    codename = _codename()
    sources = _sources(codename)
    options = _apt_options()
    digest = hashlib.sha256(repr((VERSION, PACKAGES, codename, sources, options)).encode()).hexdigest()[:12]

    def build(target: Path) -> None:
        scratch = target.with_suffix(".sources.partial")
        scratch.mkdir(parents=True)
        for name, text in sources:
            (scratch / name).write_text(text)
        command = [*_DIE_TOGETHER, "mmdebstrap", "--mode=root", "--variant=minbase", "--format=directory"]
        command += [f"--include={','.join(PACKAGES)}", *(f"--dpkgopt=path-exclude={glob}" for glob in _EXCLUDE)]
        command += ['--aptopt=APT::Install-Recommends "false"', '--aptopt=Acquire::Languages "none"']
        command += [f"--aptopt={line.rstrip(';')}" for line in options]
        command += [codename, str(target), *(str(scratch / name) for name, _ in sources)]
        log = CACHE_ROOT / "mmdebstrap.log"
        with log.open("w") as out:
            done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False)
        shutil.rmtree(scratch)
        if done.returncode:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("E:")]
            shutil.rmtree(target, ignore_errors=True)
            raise SpecrigError(f"the lab's rootfs was not built: mmdebstrap says {lines[:1] or 'nothing'}; see {log}")

    return cached(f"rootfs-{digest}", build, say, "the rootfs with mmdebstrap, a minute")


_SPARE_MB = 500
"""Kept free beside a model, for what the labs themselves write."""


def model_layer(size_mb: int, say: Callable[[str], None]) -> Path:
    """The cached layer with the model at ``srv/models/NAME``, of about ``size_mb`` MB."""
    key = f"model-{model.FORMAT}-{size_mb}"

    def build(target: Path) -> None:
        free_mb = shutil.disk_usage(CACHE_ROOT).free // 1_000_000
        if size_mb + _SPARE_MB > free_mb:
            raise UsageError(
                f"a model of {size_mb} MB needs {size_mb + _SPARE_MB} MB below {CACHE_ROOT} and {free_mb} MB are free; "
                "give a smaller --model-mb"
            )
        model.build_model(target / "srv" / "models" / model.MODEL_NAME, size_mb)

    return cached(key, build, say, f"a model folder of {size_mb} MB")


def pip_cache() -> Path:
    """The folder of pip downloads that the guests of all labs share."""
    folder = CACHE_ROOT / "pip"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def wheels_cache() -> Path:
    """The folder of wheels that the hosts of all labs see, read-only and at the same path, as on a shared disk."""
    folder = CACHE_ROOT / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def pip_settings() -> str:
    """A pip.conf for inside: the index and certificate settings of this machine that make sense there."""
    parser = configparser.RawConfigParser()
    home = Path.home()
    paths = [
        Path("/etc/xdg/pip/pip.conf"),
        Path("/etc/pip.conf"),
        home / ".pip/pip.conf",
        home / ".config/pip/pip.conf",
    ]
    try:
        parser.read([*paths, os.environ.get("PIP_CONFIG_FILE", "")])
    except configparser.Error:
        parser.clear()
    chosen: dict[str, str] = {}
    for key in _PIP_KEYS:
        value = os.environ.get("PIP_" + key.upper().replace("-", "_")) or parser.get("global", key, fallback="") or ""
        if "index" in key:
            value = " ".join(url for url in value.split() if url.startswith(("http://", "https://")))
        if value:
            chosen[key] = value
    if proxy := os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy"):
        chosen["proxy"] = proxy
    if not chosen.get("cert", "").startswith("/etc/ssl/certs/"):
        chosen["cert"] = BUNDLE
    return "[global]\n" + "".join(f"{key} = {value}\n" for key, value in chosen.items())


def nameservers() -> str:
    """A resolv.conf for inside: this machine's, or systemd-resolved's upstream where this machine's is a local stub."""
    texts = [Path(name) for name in ("/etc/resolv.conf", "/run/systemd/resolve/resolv.conf")]
    for path in texts:
        try:
            text = path.read_text()
        except OSError:
            continue
        servers = re.findall(r"^nameserver\s+(\S+)", text, re.MULTILINE)
        if servers and not all(server.startswith("127.") or server == "::1" for server in servers):
            return text
    return texts[0].read_text() if texts[0].exists() else ""


class Tree:
    """A container's root as it is being furnished: files written over the cached root file system."""

    def __init__(self, lower: Path, upper: Path) -> None:
        self.lower = lower
        self.upper = upper

    def _parents(self, path: str) -> Path:
        target = self.upper / path.lstrip("/")
        for folder in reversed(target.relative_to(self.upper).parents):
            here = self.upper / folder
            if not here.exists():
                here.mkdir()
                below = self.lower / folder
                if below.is_dir() and not below.is_symlink():
                    shutil.copystat(below, here)
        return target

    def write(self, path: str, text: str | bytes, mode: int = 0o644) -> None:
        """Write a file."""
        target = self._parents(path)
        target.unlink(missing_ok=True)
        target.write_bytes(text.encode() if isinstance(text, str) else text)
        target.chmod(mode)

    def link(self, path: str, to: str) -> None:
        """Make a symbolic link at ``path`` to ``to``."""
        target = self._parents(path)
        target.unlink(missing_ok=True)
        target.symlink_to(to)

    def folder(self, path: str, mode: int = 0o755) -> None:
        """Make a folder."""
        target = self._parents(path)
        target.mkdir(exist_ok=True)
        target.chmod(mode)

    def copy(self, source: str) -> None:
        """Copy this machine's folder at ``source`` over the one inside."""
        if Path(source).is_dir():
            target = self._parents(source)
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(source, target, symlinks=True)

    def enable(self, unit: str, wanted_by: str = "multi-user.target") -> None:
        """Start a unit at boot."""
        self.link(f"/etc/systemd/system/{wanted_by}.wants/{unit}", f"/etc/systemd/system/{unit}")

    def mask(self, *units: str) -> None:
        """Keep units from ever starting."""
        for unit in units:
            self.link(f"/etc/systemd/system/{unit}", "/dev/null")
