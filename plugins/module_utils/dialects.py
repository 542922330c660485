# SPDX-License-Identifier: Apache-2.0
"""Speculative methods as data: which engine flags turn a method on, and the numbers that follow from it.

A method is a row; a row may know several dialects, because the same method has been spelled in several ways by
SGLang branches. The inventory chooses, overrides or extends (``sglang_server_dialects``, ``dialects`` of an engine)::

    sglang_server_dialects:
      ddtree: pr-31069                       # choose another known dialect
      dflash: {block_size: 8}                # change fields of the default one
      mine: {flags: [--speculative-algorithm, MINE, --nodes, "{budget}"], draft_tokens: budget+1, needs: [budget]}
      wide: {extends: ddtree/pr-36196, env: {MY_SWITCH: "1"}}     # everything of another row, but for what is said here

Placeholders in flags and env: ``{budget}``, ``{draft_tokens}``, ``{block_size}``, ``{steps}``, ``{topk}``,
``{draft_model}``. Numbers are integers or ``budget``, ``block_size``, ``steps``, ``topk``, ``draft_tokens``, each with
``+N`` or ``-N``; ``topk*steps``; ``min(a, b)`` and ``max(a, b)`` of two of them.

``requires`` says which releases of SGLang have the flags: ``>=0.5.11``, ``>=0.5.11,<0.6.0``, or ``branch`` for flags
that no release has; ``source`` names where they come from. What ``extends`` another row adds to its env.
"""

from __future__ import annotations

import difflib
import re
from typing import Any, Dict

from . import engineflags

_DFLASH = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", "{draft_model}"]
_STEPS = [
    "--speculative-num-steps",
    "{steps}",
    "--speculative-eagle-topk",
    "{topk}",
    "--speculative-num-draft-tokens",
    "{draft_tokens}",
]
# The engine's own choice for most models; a tree (topk over 1) needs draft_tokens, too.
_CHAIN: Dict[str, Any] = {
    "draft_tokens": "steps+1",
    "steps": 3,
    "topk": 1,
    "block_size": "draft_tokens",
    "tree_depth": "steps",
    "reserved_tokens": "max(topk*steps, draft_tokens)",
    "source": "sglang",
}
_TREE: Dict[str, Any] = {
    "needs": ["draft_model", "budget"],
    "draft_tokens": "budget+1",
    "block_size": 16,
    "tree_depth": "min(budget, block_size-1)",
    "reserved_tokens": "budget+1",
    "requires": "branch",
}


def _drafted(algorithm: str, **more: Any) -> Dict[str, Any]:
    """Return a row of the EAGLE family: an algorithm with a draft model, its steps and its branching."""
    draft = ["--speculative-draft-model-path", "{draft_model}"]
    flags = ["--speculative-algorithm", algorithm, *draft, *_STEPS]
    return {**_CHAIN, "flags": flags, "needs": ["draft_model"], **more}


TABLE: Dict[str, Dict[str, Any]] = {
    "autoregressive": {
        "aliases": ["auto"],
        "dialect": "sglang",
        "dialects": {
            "sglang": {"flags": [], "draft_tokens": 0, "block_size": 1, "tree_depth": 0, "reserved_tokens": 0},
        },
    },
    "dflash": {
        "aliases": ["linear"],
        "dialect": "sglang",
        "dialects": {
            "sglang": {
                "flags": [
                    *_DFLASH,
                    "--speculative-num-draft-tokens",
                    "{draft_tokens}",
                    "--speculative-dflash-block-size",
                    "{block_size}",
                ],
                "needs": ["draft_model"],
                "draft_tokens": "block_size",
                "block_size": 16,
                "tree_depth": "block_size-1",
                "reserved_tokens": 0,
                "requires": ">=0.5.11",
                "source": "sglang",
            },
        },
    },
    "ddtree": {
        "aliases": [],
        "dialect": "pr-29907",
        "dialects": {
            "pr-29907": {
                **_TREE,
                "flags": [
                    "--speculative-algorithm",
                    "DDTREE",
                    "--speculative-draft-model-path",
                    "{draft_model}",
                    "--speculative-ddtree-budget",
                    "{budget}",
                ],
                "source": "sgl-project/sglang pull request 29907",
            },
            "pr-31069": {
                **_TREE,
                "flags": [
                    *_DFLASH,
                    "--speculative-dflash-tree-verify",
                    "--speculative-num-draft-tokens",
                    "{draft_tokens}",
                ],
                "source": "sgl-project/sglang pull request 31069",
                "note": "only the switch is known from the branch; check how it takes its node budget",
            },
            "pr-36196": {
                **_TREE,
                "flags": [*_DFLASH, "--speculative-dflash-tree-width", "4"],
                "env": {"SGLANG_DFLASH_MAX_NUM_NODES": "{budget}"},
                "source": "sgl-project/sglang pull request 36196",
                "note": "width 4 per depth, the budget is a cap on nodes by environment; greedy only",
            },
            "fork-enable-ddtree": {
                **_TREE,
                "flags": [
                    *_DFLASH,
                    "--speculative-dflash-enable-ddtree",
                    "--speculative-num-draft-tokens",
                    "{draft_tokens}",
                ],
                "source": "a fork with --speculative-dflash-enable-ddtree",
                "note": "only the switch is known from the fork; check how it takes its node budget",
            },
        },
    },
    "eagle": {"aliases": ["eagle2"], "dialect": "sglang", "dialects": {"sglang": _drafted("EAGLE")}},
    "eagle3": {"aliases": [], "dialect": "sglang", "dialects": {"sglang": _drafted("EAGLE3")}},
    "standalone": {
        "aliases": [],
        "dialect": "sglang",
        "dialects": {
            # The engine holds nothing back for it, unlike for the rest of the family.
            "sglang": _drafted(
                "STANDALONE", note="the draft is a smaller model of the same vocabulary", reserved_tokens=0
            ),
        },
    },
    "nextn": {
        "aliases": ["mtp"],
        "dialect": "sglang",
        "dialects": {
            # The draft is a part of the model; sglang resolves the name to EAGLE.
            "sglang": dict(_CHAIN, flags=["--speculative-algorithm", "NEXTN", *_STEPS], needs=[]),
        },
    },
    "ngram": {
        "aliases": ["lookahead"],
        "dialect": "sglang",
        "dialects": {
            # No draft model: the draft is looked up in what was read and written so far.
            "sglang": {
                "flags": ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "{draft_tokens}"],
                "needs": [],
                "draft_tokens": 12,
                "block_size": "draft_tokens",
                "tree_depth": "draft_tokens-1",
                "reserved_tokens": 0,
                "source": "sglang",
            },
        },
    },
}

_FIELDS = (
    "flags",
    "needs",
    "draft_tokens",
    "block_size",
    "steps",
    "topk",
    "tree_depth",
    "reserved_tokens",
    "env",
    "note",
    "aliases",
    "requires",
    "source",
)
_NAMES = "budget|block_size|draft_tokens|steps|topk"
_NUMBER = re.compile(r"^(%s)\s*(?:([+-])\s*(\d+))?$" % _NAMES)
_PRODUCT = re.compile(r"^(%s)\s*\*\s*(%s)$" % (_NAMES, _NAMES))
_CHOICE = re.compile(r"^(min|max)\(([^,()]+),([^,()]+)\)$")
_PLACE = re.compile(r"\{(\w+)\}")


class DialectError(ValueError):
    """A method, budget or dialect that cannot be turned into flags; the text is one line for the user."""


def _number(value: Any, known: dict[str, Any], where: str) -> int | None:
    """Work a number out; ``known`` holds what is known by now, and what still has to be worked out as it was given."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    text = str(value).strip()
    if text.isdigit():
        return int(text)
    both = _CHOICE.match(text)
    if both:
        parts = [_number(part, known, where) for part in both.groups()[1:]]
        choose = min if both.group(1) == "min" else max
        return None if None in parts else choose(parts)
    product = _PRODUCT.match(text)
    if product:
        factors = [_named(name, known, where) for name in product.groups()]
        return None if None in factors else factors[0] * factors[1]
    match = _NUMBER.match(text)
    if not match:
        raise DialectError(
            "%s is %r; expected a number, budget, budget+N, block_size-N, topk*steps, or min(a, b) or max(a, b) of two"
            % (where, value)
        )
    base = _named(match.group(1), known, where)
    if base is None:
        return None
    step = int(match.group(3) or 0)
    return base + step if match.group(2) != "-" else base - step


def _named(name: str, known: dict[str, Any], where: str) -> int | None:
    value = known.get(name)
    if value is None or isinstance(value, int):
        return value
    return _number(value, {key: other for key, other in known.items() if key != name}, where)


def _names(overrides: dict[str, Any]) -> dict[str, str]:
    """Every method and alias, to its method."""
    known: dict[str, str] = {}
    for method in [*TABLE, *[key for key in overrides if key not in TABLE]]:
        change = overrides.get(method)
        own = list(change.get("aliases") or []) if isinstance(change, dict) else []
        for name in [method, *TABLE.get(method, {}).get("aliases", []), *own]:
            known.setdefault(str(name), method)
    return known


def unknown_method(method: Any, overrides: dict[str, Any] | None = None) -> str:
    """Return the line about a method that no row has, with the names that look like it."""
    known = _names(overrides or {})
    near = difflib.get_close_matches(str(method).lower(), sorted(known), 2, 0.6)
    hint = " (did you mean %s?)" % " or ".join(near) if near else ""
    return "method %r is not known%s; expected one of %s, or a row for it in sglang_server_dialects" % (
        str(method),
        hint,
        ", ".join(sorted(set(known.values()))),
    )


def _base(name: str, change: dict[str, Any], overrides: dict[str, Any], seen: tuple[str, ...]) -> tuple[Any, Any]:
    """Return (dialect name, the row that a change is made to)."""
    if "extends" in change:
        if "dialect" in change:
            raise DialectError("dialect of %s has both extends and dialect; give one of them" % name)
        wanted = str(change["extends"])
        method, _, dialect = wanted.partition("/")
        if method == name or name in seen:
            raise DialectError("dialect of %s extends %s, which leads back to it" % (name, wanted))
        if method not in _names(overrides):
            raise DialectError("dialect of %s extends %s: %s" % (name, wanted, unknown_method(method, overrides)))
        changed = {**overrides, method: dialect} if dialect else overrides
        _name, _dialect, row = _row(method, changed, (*seen, name))
        return wanted, row
    base: dict[str, Any] = TABLE.get(name, {"dialect": None, "dialects": {}})
    chosen = change.get("dialect", base["dialect"])
    if not base["dialects"] or chosen in base["dialects"]:
        return chosen, dict(base["dialects"].get(chosen, {}))
    if "flags" not in change:
        near = difflib.get_close_matches(str(chosen), sorted(base["dialects"]), 1)
        raise DialectError(
            "method %s has no dialect %r%s; expected one of %s, or give its flags"
            % (
                name,
                chosen,
                " (did you mean %s?)" % near[0] if near else "",
                ", ".join(sorted(base["dialects"])),
            )
        )
    row = dict(base["dialects"][base["dialect"]])
    # Flags of the user's own: where the table's come from says nothing about them.
    return chosen, {key: value for key, value in row.items() if key not in ("requires", "source", "note")}


def _row(method: str, overrides: Any, seen: tuple[str, ...] = ()) -> tuple[str, str | None, dict[str, Any]]:
    """Return (canonical method, dialect name, merged row)."""
    overrides = overrides or {}
    if not isinstance(overrides, dict):
        raise DialectError("sglang_server_dialects is %r; expected a mapping of method to dialect" % (overrides,))
    name = _names(overrides).get(str(method))
    if name is None:
        raise DialectError(unknown_method(method, overrides))
    change = overrides.get(name)
    if isinstance(change, str):
        change = {"dialect": change}
    if change is None:
        change = {}
    if not isinstance(change, dict):
        raise DialectError("dialect of %s is %r; expected a dialect name or a mapping" % (name, change))
    strange = sorted(set(change) - set(_FIELDS) - {"dialect", "extends"})
    if strange:
        raise DialectError(
            "dialect of %s has unknown keys %s; known are %s"
            % (name, strange, ", ".join([*_FIELDS, "dialect", "extends"]))
        )
    chosen, row = _base(name, change, overrides, seen)
    if "extends" in change and change.get("env"):
        change = {**change, "env": {**(row.get("env") or {}), **change["env"]}}
    row.update({key: value for key, value in change.items() if key not in ("dialect", "extends", "aliases")})
    if "flags" not in row:
        raise DialectError("method %s has no flags; give them in sglang_server_dialects" % name)
    if not isinstance(row["flags"], list):
        raise DialectError("flags of method %s are %r; expected a list of arguments" % (name, row["flags"]))
    return name, chosen, row


def _fill(flag: Any, known: dict[str, int | None], name: str) -> str:
    text = str(flag)
    for place in _PLACE.findall(text):
        if place == "draft_model":
            continue
        if known.get(place) is None:
            raise DialectError("flag %r of method %s uses {%s}, which is not set" % (text, name, place))
        text = text.replace("{%s}" % place, str(known[place]))
    return text


def resolve(method: str, budget: int | None, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what a method means for the engine and for the arithmetic.

    Args:
        method: canonical name or alias (``auto``, ``linear``).
        budget: nodes of the draft tree, or None where the method has none.
        overrides: the inventory's ``sglang_server_dialects``.

    Returns:
        dict with ``method`` (canonical), ``dialect``, ``label`` (``ddtree-b15``, ``dflash``), ``budget``, ``flags``
        and ``env`` (with ``{draft_model}`` still in place: see `command` and `environment`), ``needs``,
        ``draft_tokens`` (tokens verified per step, 0 for autoregressive), ``block_size``, ``tree_depth`` (a step
        commits at most tree_depth + 1 tokens), ``steps`` and ``topk`` (of the EAGLE family), ``reserved_tokens`` (held
        back from the context window), ``requires``, ``source``, ``note``. A number that a user's row leaves out is
        None.

    Raises:
        DialectError: one line.
    """
    name, dialect, row = _row(method, overrides)
    needs = list(row.get("needs") or [])
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 1):
        raise DialectError("budget of %s is %r; expected a whole number of nodes, 1 or more" % (name, budget))
    if "budget" in needs and budget is None:
        raise DialectError("method %s needs a budget (nodes of the draft tree); set budget in the profile" % name)
    if "budget" not in needs and budget is not None:
        raise DialectError("method %s takes no budget, but the profile says %d; leave budget out" % (name, budget))
    fields = ("steps", "topk", "block_size", "draft_tokens", "tree_depth", "reserved_tokens")
    given = {"budget": budget, **{field: row.get(field) for field in fields}}
    known = {"budget": budget}
    for field in fields:
        others = {key: value for key, value in given.items() if key != field}
        known[field] = _number(row.get(field), others, "%s of method %s" % (field, name))
    requires = row.get("requires")
    try:
        engineflags.satisfies("0.0.0", requires or "branch")
    except ValueError:
        raise DialectError(
            "requires of method %s is %r; expected releases such as >=0.5.11 or >=0.5.11,<0.6.0, or branch"
            % (name, requires)
        ) from None
    return {
        "method": name,
        "dialect": dialect,
        "label": name if budget is None else "%s-b%d" % (name, budget),
        "budget": budget,
        "flags": [_fill(flag, known, name) for flag in row["flags"]],
        "needs": needs,
        "env": {key: _fill(value, known, name) for key, value in sorted((row.get("env") or {}).items())},
        "draft_tokens": known["draft_tokens"],
        "block_size": known["block_size"],
        "tree_depth": known["tree_depth"],
        "steps": known["steps"],
        "topk": known["topk"],
        "reserved_tokens": known["reserved_tokens"],
        "requires": requires,
        "source": row.get("source"),
        "note": row.get("note"),
    }


def environment(facts: dict[str, Any], draft_model: Any) -> dict[str, str]:
    """Return the environment of a resolved method, with the path of its draft model filled in."""
    return {key: str(value).replace("{draft_model}", str(draft_model)) for key, value in (facts["env"] or {}).items()}


def for_profile(
    profile: dict[str, Any],
    general: dict[str, Any] | None,
    engine: dict[str, Any] | None = None,
    engines: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the overrides that hold for a profile: those of its engine over those of the inventory.

    Args:
        profile: its row of ``sglang_server_profiles``.
        general: ``sglang_server_dialects``.
        engine: ``sglang_server_engine``.
        engines: ``sglang_server_engines``, of which the profile may name one.

    Raises:
        DialectError: the profile names an engine that is not there.
    """
    chosen = profile.get("engine")
    if chosen not in (None, "", "default"):
        if chosen not in (engines or {}):
            near = difflib.get_close_matches(str(chosen), sorted(engines or {}), 1)
            raise DialectError(
                "engine %r is not in sglang_server_engines%s; there are: %s"
                % (chosen, " (did you mean %s?)" % near[0] if near else "", ", ".join(sorted(engines or {})) or "none")
            )
        engine = engines[chosen]
    own = (engine or {}).get("dialects") or {}
    for source, value in (("sglang_server_dialects", general or {}), ("dialects of the engine", own)):
        if not isinstance(value, dict):
            raise DialectError("%s is %r; expected a mapping of method to dialect" % (source, value))
    return {**(general or {}), **own}


def command(profile: dict[str, Any], model_path: str, host: str, overrides: dict[str, Any] | None = None) -> list[str]:
    """Return the SGLang arguments of a profile, to follow the engine's own command.

    Option names are written out in full: SGLang's parser accepts prefixes, and a prefix that is unique today is an
    error tomorrow.

    Args:
        profile: mapping with model, tp, method, budget, context_length, port; optional draft_model (a path in the
            guest), served_model_name, mem_fraction_static, extra_args (appended last, so they win).
        model_path: the model's folder as the server sees it.
        host: address to listen on.
        overrides: the inventory's ``sglang_server_dialects``.

    Raises:
        DialectError: one line.
    """
    name = profile.get("name") or profile.get("model") or "profile"
    for field in ("model", "tp", "method", "context_length", "port"):
        if profile.get(field) in (None, ""):
            raise DialectError("profile %s has no %s; set it in sglang_server_profiles" % (name, field))
    facts = resolve(profile["method"], profile.get("budget"), overrides)
    draft = profile.get("draft_model")
    if "draft_model" in facts["needs"] and not draft:
        raise DialectError(
            "profile %s: method %s needs draft_model, the path of the draft model in the guest; none is set"
            % (name, facts["method"])
        )
    argv = [
        "--model-path",
        str(model_path),
        "--served-model-name",
        str(profile.get("served_model_name") or profile["model"]),
        "--tp-size",
        str(profile["tp"]),
        "--context-length",
        str(profile["context_length"]),
        "--host",
        str(host),
        "--port",
        str(profile["port"]),
        "--enable-metrics",
        "--enable-cache-report",
    ]
    if profile.get("mem_fraction_static") is not None:
        argv += ["--mem-fraction-static", str(profile["mem_fraction_static"])]
    argv += [flag.replace("{draft_model}", str(draft)) for flag in facts["flags"]]
    argv += [str(argument) for argument in profile.get("extra_args") or []]
    return argv
