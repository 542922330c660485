"""Which GPU device node a rank opens: what CUDA_VISIBLE_DEVICES and the driver's own list make of a CUDA index.

Pure but for `read_gpus`, which reads the driver's list in /proc.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

DEV = "/dev"
"""Where device nodes are."""
PROC_GPUS = "/proc/driver/nvidia/gpus"
"""Where the driver lists its GPUs."""
_FIELD = re.compile(r"^(?P<key>[A-Za-z ]+?):\s+(?P<value>.*\S)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver lists it.

    Attributes:
        bus_id: as in the driver's folder name, such as ``0000:06:00.0``.
        minor: N of /dev/nvidiaN; None where the driver does not say.
        uuid: ``GPU-...``; None where the driver does not say.
    """

    bus_id: str
    minor: int | None
    uuid: str | None


def parse_information(text: str, bus_id: str) -> Gpu:
    """Read one /proc/driver/nvidia/gpus/BUS_ID/information."""
    fields = {match["key"].strip(): match["value"] for match in _FIELD.finditer(text)}
    minor = fields.get("Device Minor", "")
    uuid = fields.get("GPU UUID", "")
    return Gpu(
        bus_id=fields.get("Bus Location", bus_id).lower(),
        minor=int(minor) if minor.isdecimal() else None,
        uuid=uuid if uuid.startswith("GPU-") and "?" not in uuid else None,
    )


def read_gpus(root: Path | None = None) -> list[Gpu]:
    """The GPUs in PCI_BUS_ID order; empty where there is no driver."""
    found = []
    for path in sorted((root or Path(PROC_GPUS)).glob("*/information")):
        try:
            found.append(parse_information(path.read_text(), path.parent.name))
        except OSError:
            continue
    return sorted(found, key=lambda gpu: gpu.bus_id)


def opens(path: str) -> bool:
    """Whether a node is there and may be opened; ENXIO means permitted with no driver behind it."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return error.errno == errno.ENXIO
    return True


def present(gpus: Sequence[Gpu], usable: Callable[[str], bool] = opens) -> list[Gpu]:
    """Those that may be opened: CUDA inside a container numbers only the GPUs that it was given."""
    return [gpu for gpu in gpus if gpu.minor is not None and usable(f"{DEV}/nvidia{gpu.minor}")]


def visible(gpus: Sequence[Gpu], setting: str | None) -> list[Gpu]:
    """What CUDA makes of CUDA_VISIBLE_DEVICES: the list ends before its first entry that names no GPU.

    Args:
        gpus: in PCI_BUS_ID order.
        setting: the variable; None where it is not set, and then every GPU is visible.

    Returns:
        The GPUs by CUDA index. Empty for an empty setting, and for one that names a GPU twice.
    """
    if setting is None:
        return list(gpus)
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in setting.split(",")):
        gpu = None
        if entry.isdecimal():
            gpu = gpus[int(entry)] if int(entry) < len(gpus) else None
        elif entry.upper().startswith("GPU-"):
            near = [one for one in gpus if one.uuid is not None and one.uuid.lower().startswith(entry.lower())]
            gpu = near[0] if len(near) == 1 else None
        if gpu is None:
            break
        if gpu in chosen:
            return []
        chosen.append(gpu)
    return chosen


class DeviceError(Exception):
    """CUDA would not start; the text is what SGLang's log would show."""


_UNKNOWN = (
    "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing env "
    "variable CUDA_VISIBLE_DEVICES after program start. Setting the available devices to be zero."
)
_NONE = "RuntimeError: No CUDA GPUs are available"


def _probe(path: str, otherwise: str) -> None:
    """Open a device node as CUDA does. ENXIO means permitted with no driver behind it, which a simulation takes."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return
        name = errno.errorcode.get(error.errno or 0, str(error.errno))
        raise DeviceError(f"{otherwise} [open {path}: {name} ({os.strerror(error.errno or 0)})]") from error
    try:
        if not stat.S_ISCHR(os.fstat(descriptor).st_mode):
            raise DeviceError(f"{otherwise} [{path} is a regular file, not a device node]")
    finally:
        os.close(descriptor)


def open_gpu(gpu_id: int, shift: int = 0) -> tuple[str, int]:
    """Open what CUDA opens for one device index, and keep the GPU's node open.

    Args:
        gpu_id: the CUDA index, counted after CUDA_VISIBLE_DEVICES.
        shift: added to the place of the GPU on the host's list (a fault).

    Returns:
        The node's path and an O_PATH descriptor of it, by which an observer sees in /proc/PID/fd what was opened.

    Raises:
        DeviceError: CUDA would not start.
    """
    _probe(f"{DEV}/nvidiactl", _NONE)
    _probe(f"{DEV}/nvidia-uvm", _UNKNOWN)
    everything = read_gpus()
    gpus = present(everything)
    if not gpus:
        raise DeviceError(f"{_NONE} [the driver lists {len(everything)}, none with a node in /dev that opens]")
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = visible(gpus, setting)
    if not seen:
        raise DeviceError(f"{_NONE} [CUDA_VISIBLE_DEVICES={setting}]")
    if gpu_id >= len(seen):
        raise DeviceError(
            f"torch.AcceleratorError: CUDA error: invalid device ordinal [device {gpu_id}, but {len(seen)} visible: "
            f"CUDA_VISIBLE_DEVICES={setting if setting is not None else 'unset'}]"
        )
    gpu = seen[gpu_id]
    if shift:
        gpu = gpus[(gpus.index(gpu) + shift) % len(gpus)]
    path = f"{DEV}/nvidia{gpu.minor}"
    _probe(path, _UNKNOWN)
    return path, os.open(path, os.O_PATH | os.O_CLOEXEC)
