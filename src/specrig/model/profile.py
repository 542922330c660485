"""What a profile is: one serving configuration of the inventory."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from specrig.errors import UsageError
from specrig.model import read

NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")
ALIASES = {"auto": "autoregressive", "linear": "dflash", "eagle2": "eagle", "mtp": "nextn", "lookahead": "ngram"}
_LABEL = re.compile(r"^(?P<method>[a-z][a-z0-9_-]*?)(?:-b(?P<budget>[1-9][0-9]{0,4}))?$")


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """One serving configuration.

    Attributes:
        method: a row of the dialect table, alias resolved (`auto` is `autoregressive`, `linear` is `dflash`).
        budget: nodes of the draft tree, for the tree methods; else None.
        context_length: the window in tokens; None = the engine's own default.
        gpus: indices as the host counts them, or None for the planner's choice.
        numa: `local` keeps the group on one NUMA node, `span` lets it cross.
        serve: True for production: recovery brings it up, benchmarks leave it alone.
    """

    name: str
    model: str
    tp: int = 1
    method: str = "autoregressive"
    budget: int | None = None
    context_length: int | None = None
    gpus: tuple[int, ...] | None = None
    port: int | None = None
    serve: bool = False
    numa: str = "local"
    extra_args: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The method with its budget, as in records and reports: `ddtree-b15`, `dflash`."""
        return method_label(self.method, self.budget)


def method_label(method: str, budget: int | None) -> str:
    """Return `ddtree-b15` for ("ddtree", 15), `dflash` for ("dflash", None)."""
    return method if budget is None else f"{method}-b{budget}"


def parse_method(label: str) -> tuple[str, int | None]:
    """Return (method, budget) of a label such as `ddtree-b15` or `auto`, aliases resolved.

    Raises:
        UsageError: the label is not of that form.
    """
    match = _LABEL.match(label)
    if match is None:
        raise UsageError(f"method: saw {label!r}; expected a name such as autoregressive, dflash or ddtree-b15")
    budget = match["budget"]
    return ALIASES.get(match["method"], match["method"]), int(budget) if budget else None


_ROLE_KEYS = (
    "draft_model",
    "engine",
    "env",
    "mem_fraction_static",
    "served_model_name",
    "start_timeout_s",
    "shared_with",
)
"""Settings of a profile that concern only the role that serves it."""

_KEYS = (*Profile.__struct_fields__[1:], *_ROLE_KEYS)


def parse_profiles(mapping: object, path: str = "$.sglang_server_profiles") -> dict[str, Profile]:
    """Return the profiles of the inventory's mapping name -> settings, in its order.

    Raises:
        UsageError: one line that names the place, what was seen and what is expected.
    """
    if not isinstance(mapping, Mapping):
        raise read.fail(path, mapping, "a mapping of profile names to settings")
    out: dict[str, Profile] = {}
    for name, value in mapping.items():
        if not isinstance(name, str) or not NAME.match(name):
            raise read.fail(path, name, "a profile name of letters, digits, '_', '.' and '-' (at most 63)")
        out[name] = _profile(name, value, f"{path}.{name}")
    return out


def _profile(name: str, value: object, path: str) -> Profile:
    fields = read.Fields(value, path, _KEYS)
    label = fields.get("method", read.text, "autoregressive")
    try:
        method, budget = parse_method(label)
    except UsageError:
        raise read.fail(f"{path}.method", label, "a method such as autoregressive, dflash or ddtree") from None
    stated = fields.get("budget", read.optional(read.whole(1, 4096)), None)
    if budget is not None and stated is not None and budget != stated:
        raise read.fail(f"{path}.budget", stated, f"the {budget} that the method {label} names, or no budget")
    return Profile(
        name=name,
        model=fields.need("model", read.text, "the served model's name"),
        tp=fields.get("tp", read.whole(1, 1024), 1),
        method=method,
        budget=stated if budget is None else budget,
        context_length=fields.get("context_length", read.optional(read.whole(16, 100_000_000)), None),
        gpus=fields.get("gpus", _gpus, None),
        port=fields.get("port", read.optional(read.whole(1, 65535)), None),
        serve=fields.get("serve", read.flag, False),
        numa=fields.get("numa", read.choice("local", "span"), "local"),
        extra_args=fields.get("extra_args", _arguments, ()),
    )


def _gpus(value: object, path: str) -> tuple[int, ...] | None:
    if value is None or value == "auto":
        return None
    if not isinstance(value, list):
        raise read.fail(path, value, "auto or a list of GPU indices")
    return read.listed(read.whole(0, 1023))(value, path)


def _arguments(value: object, path: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise read.fail(path, value, "a list of arguments")
    return tuple(read.text(str(v) if isinstance(v, (int, float)) else v, f"{path}[{i}]") for i, v in enumerate(value))
