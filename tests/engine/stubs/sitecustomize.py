"""What SGLang's wheel imports and a CPU does not have, so that the wheel runs as it was shipped.

Python imports this file by itself from a folder on PYTHONPATH, in every process of the server. Kernels that are only
imported are stood in for; one that is called says its name and fails. Nothing here computes anything: the attention,
sampling, scheduling and HTTP of a CPU server are SGLang's and torch's own.
"""

import errno
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pathlib
import sys
import types

DECORATES = ("triton",)
"""Packages whose attributes decorate kernels when a module is imported."""
REFUSES = ("sgl_kernel",)
"""Packages whose functions are looked up when a module is imported, and called only where they exist."""
LEFT_OUT = ("sgl_kernel.scalar_type",)
"""Modules that hold values instead of functions; SGLang has its own where they cannot be imported."""


class _Place:
    """Any class of a package that is not there: a base to derive from, an annotation, or a type nothing is of."""

    def __init__(self, *arguments, **named):
        pass


class _StandIn(types.ModuleType):
    """A module with every attribute that is asked for: classes by a capital letter, else further modules."""

    def __init__(self, name):
        super().__init__(name)
        self.__path__ = []
        self.__version__ = "3.0.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if name[0].isupper() or name == "constexpr":
            base = Exception if name.endswith(("Error", "OutOfResources")) else _Place
            made = type(name, (base,), {"__module__": self.__name__})
        else:
            made = sys.modules.get(full) or _StandIn(full)
            made.__spec__ = importlib.machinery.ModuleSpec(full, None, is_package=True)
            sys.modules[full] = made
        setattr(self, name, made)
        return made

    def __call__(self, *arguments, **named):
        if len(arguments) == 1 and callable(arguments[0]) and not named:
            return arguments[0]
        return lambda function: function

    def __bool__(self):
        return False


class _Refusing(types.ModuleType):
    """A module of kernels: importing one works, calling it says what is missing."""

    def __init__(self, name):
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*arguments, **named):
            raise NotImplementedError(f"{self.__name__}.{name}: this kernel is not there on a CPU")

        refuse.__name__ = name
        setattr(self, name, refuse)
        return refuse


class _Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages above, and only where they are not installed."""

    def find_spec(self, fullname, path=None, target=None):
        package = fullname.partition(".")[0]
        if package not in DECORATES + REFUSES or fullname in LEFT_OUT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        return (_StandIn if spec.name.partition(".")[0] in DECORATES else _Refusing)(spec.name)

    def exec_module(self, module):
        if module.__name__ == "triton":
            module.cdiv = lambda a, b: -(a // -b)
            module.next_power_of_2 = lambda n: 1 << max(0, n - 1).bit_length()


class _After(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Calls a function once a module has been imported."""

    def __init__(self, name, then):
        self.name = name
        self.then = then
        self.real = None

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None:
            return None
        self.real, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self.real.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self.real
        self.real.exec_module(module)
        self.then(module)


def hold_gpu(index, held={}):  # noqa: B006 - one descriptor for each index, for as long as the process lives
    """Open the node of the GPU with this CUDA index, as CUDA does for a rank, and keep it open.

    That is what nvidia-smi lists. Memory and arithmetic stay on the CPU. Nothing is done where no driver is.
    """
    listed = sorted(pathlib.Path("/proc/driver/nvidia/gpus").glob("*/information"))
    if not listed or index in held:
        return
    nodes = []
    for path in listed:
        fields = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
        node = f"/dev/nvidia{int(fields['Device Minor'])}"
        try:
            os.close(os.open(node, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            if error.errno != errno.ENXIO:  # permitted, and no driver behind it
                continue
        nodes.append(node)
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        visible = nodes if chosen is None else [nodes[int(number)] for number in chosen.split(",")]
        held[index] = os.open(visible[index], os.O_PATH | os.O_CLOEXEC)
    except (IndexError, ValueError):
        raise RuntimeError(
            f"No CUDA GPUs are available [device {index}; CUDA_VISIBLE_DEVICES={chosen}; nodes that open: {nodes}]"
        ) from None


def _prepare(torch):
    """Make up for the CPU build of torch: torchvision's operators, and a rank's GPU as others see it."""
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torch._specrig_operators = library
    real = torch.cpu.set_device

    def set_device(device):
        hold_gpu(device if isinstance(device, int) else torch.device(device).index or 0)
        return real(device)

    torch.cpu.set_device = set_device


_absent = [name for name in DECORATES + REFUSES if importlib.util.find_spec(name) is None]
if len(_absent) == len(DECORATES + REFUSES):
    sys.meta_path.insert(0, _Missing())
    sys.meta_path.insert(0, _After("torch", _prepare))
