"""A host's facts as a folder: texts that a person can read, and an index from which a look is made again.

Serials, UUIDs, hardware and network addresses are replaced, each by its own stand-in wherever it stands, so that what
belongs together still does.
"""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

from specrig.errors import UsageError
from specrig.facts import look, probe, smi

INDEX = "capture.json"
_EXTRA = {
    "smi-q": ["nvidia-smi", "-q"],
    "smi-list": ["nvidia-smi", "-L"],
    "numactl": ["numactl", "-H"],
    "lscpu": ["lscpu"],
    "dkms": ["dkms", "status"],
    "dev": ["sh", "-c", "ls -l /dev/nvidia*"],
}
_UUID = re.compile(r"\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b")
_SHORT_UUID = re.compile(r"\b(GPU|MIG)-[0-9a-fA-F]{4,32}\b(?!-)")
_SERIAL = re.compile(
    r"(?m)^(\s*(?:(?:Chassis )?Serial Number|Board Part Number|Board ID|GPU PDI|GPU Fabric GUID)\s*:\s*)(\S+)\s*$"
)
_SERIAL_COLUMNS = ("serial", "gpu_serial", "board_serial")
_MAC = re.compile(r"\b(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}\b")
_ADDRESS = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])")
_ADDRESS6 = re.compile(r"(?<=[=\s,])(?:[0-9a-fA-F]{1,4}:){2,7}(?::?[0-9a-fA-F]{1,4})?(?::[0-9a-fA-F]{1,4})*")
_SECRET = re.compile(r"(?m)^(\s*(?:lxc\.environment(?:\.\w+)?|env)\s*[=:]\s*)(.*)$")


class Redactor:
    """Replaces what identifies a machine. The same thing gets the same stand-in everywhere."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], str] = {}
        self._serials: dict[str, str] = {}

    @property
    def count(self) -> int:
        """How many different things were replaced."""
        return len(self._known) + len(self._serials)

    def learn(self, text: str) -> None:
        """Note the serials that a text names as such, to replace them in all texts."""
        named = [match.group(2) for match in _SERIAL.finditer(text)]
        if smi.looks_like_csv(text):
            with contextlib.suppress(ValueError):
                rows = smi.parse_csv(text)["rows"]
                named += [row[column] for row in rows for column in _SERIAL_COLUMNS if column in row]
        for found in named:
            if len(found) >= 4 and found.strip("0").strip() and not found.startswith(("[", "N/A")):
                self._serials.setdefault(found, f"{len(self._serials):0{len(found)}d}"[-len(found) :])

    def _stand_in(self, kind: str, found: str, pattern: str) -> str:
        key = (kind, found.lower())
        number = sum(1 for known, _ in self._known if known == kind)
        return self._known.setdefault(key, pattern.format(number, f"{number:02x}"))

    def _short(self, found: str) -> str:
        """The beginning of a UUID, which CUDA_VISIBLE_DEVICES takes: the whole UUID's stand-in where it is known."""
        start, digits = found[:4], found[4:].lower()
        if digits.startswith("00000000"):
            return found
        whole = [(key, stand_in) for key, stand_in in self._known.items() if key[0] == "uuid"]
        for (_kind, uuid), stand_in in whole:
            if uuid.startswith(digits):
                return start + stand_in
        return start + self._stand_in("short uuid", digits, "00000000{0:04d}")

    def text(self, text: str, *, config: bool = False) -> str:
        """Return the text with stand-ins.

        Args:
            text: one file or output.
            config: it is a guest's configuration or a kernel command line: network addresses and the values of
                environment variables go too. Elsewhere four numbers with dots may be a version.
        """
        for serial, stand_in in self._serials.items():
            text = re.sub(rf"(?<![\w.]){re.escape(serial)}(?![\w.])", stand_in, text)
        text = _UUID.sub(lambda m: self._stand_in("uuid", m.group(), "00000000-0000-4000-8000-{0:012d}"), text)
        text = _SHORT_UUID.sub(lambda m: self._short(m.group()), text)
        text = _MAC.sub(lambda m: self._stand_in("mac", m.group(), "02:00:00:00:00:{1}"), text)
        if config:
            text = _ADDRESS.sub(lambda m: self._stand_in("address", m.group(), "192.0.2.{0}"), text)
            text = _ADDRESS6.sub(lambda m: self._stand_in("address6", m.group(), "2001:db8::{0}"), text)
            text = _SECRET.sub(r"\1REPLACED", text)
        return text


def gather(timeout_s: float) -> dict[str, Any]:
    """Return what a look is made of, and the outputs that a reader of a bug report wants besides."""
    raw: dict[str, Any] = probe.gather(timeout_s)
    raw["commands"].update(probe.run_all(_EXTRA, timeout_s))
    return raw


def _is_config(path: str) -> bool:
    return path.startswith(("/etc/pve/", "/var/lib/lxc/", "/proc/cmdline"))


def redacted(raw: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the capture with stand-ins, and how many different things were replaced."""
    redactor = Redactor()
    for result in raw["commands"].values():
        redactor.learn(result["out"])
        redactor.learn(result["err"])
    for text in raw["files"].values():
        redactor.learn(text)
    for result in raw["commands"].values():
        redactor.text(result["out"])  # whole UUIDs first, so that their beginnings get the same stand-ins

    def walk(value: Any) -> Any:
        if isinstance(value, str):
            return redactor.text(value)
        if isinstance(value, dict):
            return {redactor.text(key): walk(item) for key, item in value.items()}
        if isinstance(value, list):
            return [walk(item) for item in value]
        return value

    clean: dict[str, Any] = {key: walk(value) for key, value in raw.items() if key != "files"}
    clean["files"] = {
        redactor.text(path): redactor.text(text, config=_is_config(path)) for path, text in raw["files"].items()
    }
    return clean, redactor.count


def write(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Write a capture, redacted.

    Returns:
        dict with folder, files, commands, replaced (counts) and unknown (texts).

    Raises:
        UsageError: the folder holds something already, or cannot be written.
    """
    clean, replaced = redacted(raw)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(f"{folder} is not empty; name a folder that does not exist yet")
        index = dict(clean)
        index["files"], index["inline"] = {}, {}
        for path, text in sorted(clean["files"].items()):
            if path.startswith("/sys/devices/system/cpu/cpu"):
                index["inline"][path] = text
                continue
            place = Path("files") / path.lstrip("/")
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            (folder / place).write_text(text, encoding="utf-8")
            index["files"][path] = str(place)
        (folder / "commands").mkdir()
        index["commands"] = {}
        for name, result in sorted(clean["commands"].items()):
            place = Path("commands") / (name.replace(":", "-").replace("/", "_") + ".txt")
            (folder / place).write_text(result["out"], encoding="utf-8")
            index["commands"][name] = {**result, "out": str(place)}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}; name a folder that can be written") from None
    facts: dict[str, Any] = look.assemble(clean)
    return {
        "schema": 1,
        "folder": str(folder),
        "files": len(clean["files"]),
        "commands": len(clean["commands"]),
        "replaced": replaced,
        "unknown": [f"{name}: {reason}" for name, reason in facts["unknown"].items()],
        "problems": facts["problems"],
    }


def read(folder: Path) -> dict[str, Any]:
    """Return what ``write`` wrote, ready for ``look.assemble``.

    Raises:
        UsageError: it is no capture, or a part of it is missing.
    """
    try:
        index: dict[str, Any] = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        if index["schema"] != 1:
            raise UsageError(f"{folder}: a capture of schema {index['schema']}; this specrig reads schema 1")
        files = {path: (folder / place).read_text(encoding="utf-8") for path, place in index["files"].items()}
        commands = {
            name: {**result, "out": (folder / result["out"]).read_text(encoding="utf-8")}
            for name, result in index["commands"].items()
        }
        return {**index, "files": {**files, **index["inline"]}, "commands": commands}
    except FileNotFoundError as error:
        raise UsageError(
            f"{folder} is not a whole capture: {error.filename} is not there; run specrig capture"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{folder}/{INDEX} is not readable as a capture ({error}); run specrig capture") from None
