"""Stands in for packages that SGLang imports and its argument parser does not use: torch, Triton, kernels, tokenizers.

Every name of such a package is one object that can be called, decorated with, subclassed, indexed and compared, and
that is false, zero and empty. So the modules around the parser load without gigabytes of libraries, and no GPU is
found. What the parser does use (its own sources, pydantic, msgspec, packaging) is the real thing.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from typing import Any

_NEWEST = "99.0"
"""The version of every absent package: sources ask whether theirs is new enough."""
_NOT_THERE = frozenset(["npu", "musa", "hpu", "mlu"])
"""Backends that a source looks for by ``hasattr(torch, ...)``; the plain build of torch has none of them."""


class Base:
    """What a class of an absent package leaves to the classes that are made of it."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        return {"type": "any"}


class Anything:
    """A name of an absent package."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        # Triton's name of its backend, with which older versions look up an attribute of torch
        return "cpu" if name == "backend" else Anything(f"{self._name}.{name}")

    @property
    def __func__(self) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        decorates = len(args) == 1 and not kwargs and isinstance(args[0], (types.FunctionType, type))
        return args[0] if decorates else Anything(f"{self._name}()")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (Base,)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return {"type": "any"}

    def __instancecheck__(self, instance: Any) -> bool:
        return False

    def __subclasscheck__(self, other: Any) -> bool:
        return False

    def __getitem__(self, key: Any) -> Any:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        return None

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __int__(self) -> int:
        return 0

    __index__ = __int__

    def __float__(self) -> float:
        return 0.0

    def __hash__(self) -> int:
        return hash(self._name)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Anything) and other._name == self._name

    def __lt__(self, other: Any) -> bool:
        return False

    __le__ = __gt__ = __ge__ = __lt__

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__

    def _zero(self, *other: Any) -> int:
        return 0

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __floordiv__ = __neg__ = _zero

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        return None


class AbsentModule(types.ModuleType):
    """A module of an absent package."""

    __path__ = ()
    __version__ = _NEWEST

    def __getattr__(self, name: str) -> Any:
        if (name.startswith("__") and name.endswith("__")) or name in _NOT_THERE:
            raise AttributeError(name)
        if self.__name__ == "torch.version":  # cuda, hip, musa: this build has none
            return None
        return Anything(f"{self.__name__}.{name}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds absent packages, after everything that is there was tried."""

    def __init__(self, absent: frozenset[str]) -> None:
        self.absent = absent

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] in self.absent:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        return None


def install(absent: list[str]) -> None:
    """Let these packages be imported as if they were there; a package that is there is never replaced."""
    sys.meta_path.append(Finder(frozenset(absent)))
