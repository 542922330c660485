"""Strict reading of YAML that people write: a mistake is one line with its place, what was seen, what is expected."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from specrig.errors import UsageError

T = TypeVar("T")

MAX_BYTES = 1_000_000
"""A sweep or profile file is a page of text; anything larger is another file by mistake."""

MAX_DEPTH = 40


class _Loader(yaml.SafeLoader):
    """YAML with the scalars of YAML 1.2's core schema.

    `no`, `off`, `1:30` and `010` stay the text that was written instead of turning into false, 90 and 8.
    Duplicate keys are refused.
    """

    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML declares it as an instance variable

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"nested more than {MAX_DEPTH} levels deep", problem_mark=self._mark())
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def _mark(self) -> Any:
        return self.peek_event().start_mark  # type: ignore[no-untyped-call]

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        if isinstance(node, yaml.MappingNode):
            seen: set[tuple[str, str]] = set()
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    raise yaml.MarkedYAMLError(
                        problem="a list or mapping is used as a key", problem_mark=key.start_mark
                    )
                if (key.tag, key.value) in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {key.value!r} is there twice; keep one", problem_mark=key.start_mark
                    )
                seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep=deep)


for _tag, _pattern, _first in (
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:int", r"[-+]?(?:0|[1-9][0-9]{0,29})", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", "~nN\0"),
    ("tag:yaml.org,2002:merge", r"<<", "<"),
):
    for _character in _first:
        _Loader.yaml_implicit_resolvers.setdefault("" if _character == "\0" else _character, []).append(
            (_tag, re.compile(f"^(?:{_pattern})$"))
        )


def _construct_float(loader: _Loader, node: yaml.ScalarNode) -> float:
    text = loader.construct_scalar(node).lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node))


_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def read_text(path: Path) -> str:
    """Return the text of a file, or raise a `UsageError` that says why it cannot be one of ours."""
    try:
        if path.is_dir():
            raise UsageError(f"{path}: is a folder; expected a YAML file")
        if path.is_file() and path.stat().st_size > MAX_BYTES:
            raise UsageError(f"{path}: {path.stat().st_size} bytes; expected a YAML file of at most {MAX_BYTES} bytes")
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)  # of a device or a pipe too, whose size nothing tells
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(data) > MAX_BYTES:
        raise UsageError(f"{path}: no end after {MAX_BYTES} bytes; expected a YAML file of at most that")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        hint = "; it looks like UTF-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        raise UsageError(f"{path}: byte {error.start} is not UTF-8{hint}; save the file as UTF-8") from None


def parse_yaml(text: str, source: str) -> Any:
    """Return the one YAML document of `text`; `source` names it in the error line."""
    if len(text) > MAX_BYTES:
        raise UsageError(f"{source}: {len(text)} characters; expected at most {MAX_BYTES}")
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" line {mark.line + 1}, column {mark.column + 1}:" if mark else ""
        raise UsageError(f"{source}:{place} {_yaml_problem(error)}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{source}: not readable as YAML: {one_line(str(error))}") from None
    except (ValueError, RecursionError, OverflowError) as error:
        raise UsageError(f"{source}: not readable as YAML: {one_line(str(error))}") from None
    finally:
        if loader is not None:
            loader.dispose()


def _yaml_problem(error: yaml.MarkedYAMLError) -> str:
    problem = one_line(error.problem or error.context or "not readable as YAML")
    if "'\\t'" in problem:
        return "a tab is used for indentation; YAML wants spaces"
    if "expected a single document" in one_line(f"{error.context} {error.problem}"):
        return "a second document (---) begins here; expected one document"
    return problem


def one_line(text: str) -> str:
    """Return `text` with all white space runs made single spaces."""
    return " ".join(text.split())


def show(value: object, depth: int = 2) -> str:
    """Return a short, one-line picture of a value as read from YAML."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        text = repr(value)
        return text if len(text) <= 40 else f"{text[:37]}..."
    if isinstance(value, str):
        text = repr(one_line(value))
        return f"the text {text if len(text) <= 60 else text[:57] + '...' + text[0]}"
    if isinstance(value, list):
        if depth == 0 or len(value) > 6:
            return f"a list of {len(value)}"
        return "the list [" + ", ".join(show(v, depth - 1).removeprefix("the text ") for v in value) + "]"
    if isinstance(value, Mapping):
        keys = ", ".join(show(k, 0).removeprefix("the text ") for k in list(value)[:6])
        return f"a mapping with the keys {keys}" if value else "an empty mapping"
    return f"a {type(value).__name__}"


def fail(path: str, seen: object, expected: str) -> UsageError:
    """Return the one-line error for the value at `path`."""
    return UsageError(f"{path}: saw {show(seen)}; expected {expected}")


class Fields:
    """The keys of one mapping, taken one by one; what is left over at the end is an unknown key."""

    def __init__(self, value: object, path: str, known: Collection[str]) -> None:
        if not isinstance(value, Mapping):
            raise fail(path, value, f"a mapping with keys such as {', '.join(list(known)[:4])}")
        self.path = path
        for key in value:
            if not isinstance(key, str) or key not in known:
                close = difflib.get_close_matches(str(key), list(known), n=1)
                hint = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(known)}"
                raise UsageError(f"{path}: unknown key {show(key).removeprefix('the text ')}; {hint}")
        self._value = value

    def at(self, key: str) -> str:
        """Return the path of a key."""
        return f"{self.path}.{key}"

    def __contains__(self, key: str) -> bool:
        return key in self._value

    def get(self, key: str, read: Callable[[object, str], T], default: T) -> T:
        """Return the value of `key` read by `read`, or the default where the key is absent."""
        if key not in self._value:
            return default
        return read(self._value[key], self.at(key))

    def need(self, key: str, read: Callable[[object, str], T], expected: str) -> T:
        """Return the value of a key that has to be there."""
        if key not in self._value:
            raise UsageError(f"{self.path}: the key {key!r} is missing; expected {expected}")
        return read(self._value[key], self.at(key))


def whole(low: int, high: int) -> Callable[[object, str], int]:
    """Return a reader of whole numbers from `low` to `high`."""

    def read(value: object, path: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise fail(path, value, f"a whole number from {low} to {high}")
        return value

    return read


def number(low: float, high: float, *, above: bool = False) -> Callable[[object, str], float]:
    """Return a reader of finite numbers from `low` (or above it) to `high`."""

    def read(value: object, path: str) -> float:
        expected = f"a number {'above' if above else 'from'} {low:g} {'up ' if above else ''}to {high:g}"
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise fail(path, value, expected)
        if value > high or value < low or (above and value == low):
            raise fail(path, value, expected)
        return float(value)

    return read


def text(value: object, path: str) -> str:
    """Read text that is not blank and stays on one line."""
    if not isinstance(value, str) or not value.strip() or len(value) > 4096:
        raise fail(path, value, "text" if isinstance(value, str) else "text (in quotes where it looks like a number)")
    if not all(c.isprintable() for c in value):
        raise fail(path, value, "text on one line without control characters")
    return value


def flag(value: object, path: str) -> bool:
    """Read true or false."""
    if not isinstance(value, bool):
        raise fail(path, value, "true or false")
    return value


def choice(*words: str) -> Callable[[object, str], str]:
    """Return a reader of one of the words."""

    def read(value: object, path: str) -> str:
        if not isinstance(value, str) or value not in words:
            raise fail(path, value, f"one of {', '.join(words)}")
        return value

    return read


def optional(read_one: Callable[[object, str], T]) -> Callable[[object, str], T | None]:
    """Return a reader that also takes null."""
    return lambda value, path: None if value is None else read_one(value, path)


def listed(read_one: Callable[[object, str], T]) -> Callable[[object, str], tuple[T, ...]]:
    """Return a reader of a list without repeats, or of one value standing for a list of one."""

    def read(value: object, path: str) -> tuple[T, ...]:
        if not isinstance(value, list):
            return (read_one(value, path),)
        if not value:
            raise fail(path, value, "at least one value")
        if len(value) > 1000:
            raise fail(path, value, "at most 1000 values")
        out: list[T] = []
        for i, item in enumerate(value):
            one = read_one(item, f"{path}[{i}]")
            if one in out:
                raise fail(f"{path}[{i}]", item, "every value once")
            out.append(one)
        return tuple(out)

    return read
