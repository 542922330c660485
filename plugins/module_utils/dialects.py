# SPDX-License-Identifier: Apache-2.0
"""Speculative methods as data: which engine flags turn a method on, and the numbers that follow from it.

A method is a row; a row may know several dialects, because the same method has been spelled in several ways by
SGLang branches. The inventory chooses, overrides or extends (``sglang_server_dialects``)::

    sglang_server_dialects:
      ddtree: pr-31069                       # choose another known dialect
      dflash: {block_size: 8}                # change fields of the default one
      mine: {flags: [--speculative-algorithm, MINE, --nodes, "{budget}"], draft_tokens: budget+1, needs: [budget]}

Placeholders in flags and env: ``{budget}``, ``{draft_tokens}``, ``{block_size}``, ``{draft_model}``.
Numbers are integers or ``budget``, ``budget+N``, ``block_size``, ``block_size-N``; ``min(a, b)`` of two of them.
"""

from __future__ import annotations

import re
from typing import Any, Dict

_DFLASH = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", "{draft_model}"]

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
            },
        },
    },
    "ddtree": {
        "aliases": [],
        "dialect": "pr-29907",
        "dialects": {
            "pr-29907": {
                "flags": [
                    "--speculative-algorithm",
                    "DDTREE",
                    "--speculative-draft-model-path",
                    "{draft_model}",
                    "--speculative-ddtree-budget",
                    "{budget}",
                ],
                "needs": ["draft_model", "budget"],
                "draft_tokens": "budget+1",
                "block_size": 16,
                "tree_depth": "min(budget, block_size-1)",
                "reserved_tokens": "budget+1",
            },
            "pr-31069": {
                "flags": [
                    *_DFLASH,
                    "--speculative-dflash-tree-verify",
                    "--speculative-num-draft-tokens",
                    "{draft_tokens}",
                ],
                "needs": ["draft_model", "budget"],
                "draft_tokens": "budget+1",
                "block_size": 16,
                "tree_depth": "min(budget, block_size-1)",
                "reserved_tokens": "budget+1",
                "note": "only the switch is known from the branch; check how it takes its node budget",
            },
            "pr-36196": {
                "flags": [*_DFLASH, "--speculative-dflash-tree-width", "4"],
                "env": {"SGLANG_DFLASH_MAX_NUM_NODES": "{budget}"},
                "needs": ["draft_model", "budget"],
                "draft_tokens": "budget+1",
                "block_size": 16,
                "tree_depth": "min(budget, block_size-1)",
                "reserved_tokens": "budget+1",
                "note": "width 4 per depth, the budget is a cap on nodes by environment; greedy only",
            },
            "fork-enable-ddtree": {
                "flags": [
                    *_DFLASH,
                    "--speculative-dflash-enable-ddtree",
                    "--speculative-num-draft-tokens",
                    "{draft_tokens}",
                ],
                "needs": ["draft_model", "budget"],
                "draft_tokens": "budget+1",
                "block_size": 16,
                "tree_depth": "min(budget, block_size-1)",
                "reserved_tokens": "budget+1",
                "note": "only the switch is known from the fork; check how it takes its node budget",
            },
        },
    },
    "nextn": {
        "aliases": ["mtp"],
        "dialect": "sglang",
        "dialects": {
            "sglang": {
                "flags": [
                    "--speculative-algorithm",
                    "NEXTN",
                    "--speculative-num-steps",
                    "3",
                    "--speculative-eagle-topk",
                    "1",
                    "--speculative-num-draft-tokens",
                    "{draft_tokens}",
                ],
                "needs": [],
                "draft_tokens": 4,
                "block_size": 4,
                "tree_depth": 3,
                "reserved_tokens": 4,
            },
        },
    },
}

_FIELDS = ("flags", "needs", "draft_tokens", "block_size", "tree_depth", "reserved_tokens", "env", "note", "aliases")
_NUMBER = re.compile(r"^(budget|block_size|draft_tokens)\s*(?:([+-])\s*(\d+))?$")
_MIN = re.compile(r"^min\(([^,()]+),([^,()]+)\)$")
_PLACE = re.compile(r"\{(\w+)\}")


class DialectError(ValueError):
    """A method, budget or dialect that cannot be turned into flags; the text is one line for the user."""


def _number(value: Any, known: dict[str, int | None], where: str) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    text = str(value).strip()
    if text.isdigit():
        return int(text)
    both = _MIN.match(text)
    if both:
        parts = [_number(part, known, where) for part in both.groups()]
        known_parts = [part for part in parts if part is not None]
        return min(known_parts) if len(known_parts) == len(parts) else None
    match = _NUMBER.match(text)
    if not match:
        raise DialectError(
            "%s is %r; expected a number, budget, budget+N, block_size-N or min(a, b) of these" % (where, value)
        )
    base = known.get(match.group(1))
    if base is None:
        return None
    step = int(match.group(3) or 0)
    return base + step if match.group(2) != "-" else base - step


def _row(method: str, overrides: Any) -> tuple[str, str | None, dict[str, Any]]:
    """Return (canonical method, dialect name, merged row)."""
    overrides = overrides or {}
    if not isinstance(overrides, dict):
        raise DialectError("sglang_server_dialects is %r; expected a mapping of method to dialect" % (overrides,))
    wanted = str(method)
    name = None
    for candidate in list(TABLE) + [key for key in overrides if key not in TABLE]:
        aliases = list(TABLE.get(candidate, {}).get("aliases", []))
        change = overrides.get(candidate)
        if isinstance(change, dict):
            aliases += list(change.get("aliases") or [])
        if wanted == candidate or wanted in aliases:
            name = candidate
            break
    if name is None:
        raise DialectError(
            "method %r is not known; expected one of %s, or a row for it in sglang_server_dialects"
            % (wanted, ", ".join(sorted(set(TABLE) | set(overrides))))
        )
    base: dict[str, Any] = TABLE.get(name, {"dialect": None, "dialects": {}})
    change = overrides.get(name)
    if isinstance(change, str):
        change = {"dialect": change}
    if change is None:
        change = {}
    if not isinstance(change, dict):
        raise DialectError("dialect of %s is %r; expected a dialect name or a mapping" % (name, change))
    strange = sorted(set(change) - set(_FIELDS) - {"dialect"})
    if strange:
        raise DialectError("dialect of %s has unknown keys %s; known are %s" % (name, strange, ", ".join(_FIELDS)))
    chosen = change.get("dialect", base["dialect"])
    if base["dialects"] and chosen not in base["dialects"]:
        if "flags" not in change:
            raise DialectError(
                "method %s has no dialect %r; expected one of %s, or give its flags"
                % (name, chosen, ", ".join(sorted(base["dialects"])))
            )
        row = dict(base["dialects"][base["dialect"]])
    else:
        row = dict(base["dialects"].get(chosen, {}))
    row.update({key: value for key, value in change.items() if key not in ("dialect", "aliases")})
    if "flags" not in row:
        raise DialectError("method %s has no flags; give them in sglang_server_dialects" % name)
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
        (with ``{draft_model}`` still in place), ``needs``, ``env``, ``draft_tokens`` (tokens verified per step, 0 for
        autoregressive), ``block_size``, ``tree_depth`` (a step commits at most tree_depth + 1 tokens),
        ``reserved_tokens`` (held back from the context window), ``note``. A number that a
        user's row leaves out is None.

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
    known = {"budget": budget}
    for field in ("block_size", "draft_tokens", "tree_depth", "reserved_tokens"):
        known[field] = _number(row.get(field), known, "%s of method %s" % (field, name))
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
        "reserved_tokens": known["reserved_tokens"],
        "note": row.get("note"),
    }


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
