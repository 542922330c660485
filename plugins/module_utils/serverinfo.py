# SPDX-License-Identifier: Apache-2.0
"""What a server says of itself, against what its profile says.  Pure.

A server is asked for ``/server_info`` (``/get_server_info`` on older ones), ``/v1/models`` and ``/model_info``
(``/get_model_info``); some switches stand only in the environment of its process. A value that is not told is unknown:
it is never taken for the one that was asked for.
"""

from __future__ import annotations

from . import dialects

GATE = "server"
ALIKE = "like-for-like"

SIMULATED_ACCEPTANCE = "SGLANG_SIMULATE_ACC_LEN"
TOKEN_CAP = "SGLANG_MAX_NEW_TOKENS_LIMIT"
LONGER_CONTEXT = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
ENVIRONMENT = (SIMULATED_ACCEPTANCE, TOKEN_CAP, LONGER_CONTEXT)
"""Variables of a server's process that change what it answers, and that none of its endpoints tells."""

# What a server calls a value, newest name first.
_NAMES = {
    "tp_size": ("tp_size", "tensor_parallel_size"),
    "mamba_radix_cache_strategy": ("mamba_radix_cache_strategy", "mamba_scheduler_strategy"),
    "cuda_graph_max_bs": ("cuda_graph_max_bs_decode", "cuda_graph_max_bs"),
    "draft_window": ("speculative_draft_window_size", "speculative_dflash_draft_window_size"),
    "budget": ("speculative_ddtree_budget", "speculative_dflash_tree_budget"),
}
# NEXTN is EAGLE to the engine, and either may turn out to be the frozen-KV kind by its draft model.
_SAME_ALGORITHM = {
    "NEXTN": ("NEXTN", "EAGLE", "FROZEN_KV_MTP"),
    "EAGLE": ("EAGLE", "NEXTN", "FROZEN_KV_MTP"),
}
_STATED = ("dtype", "quantization", "kv_cache_dtype", "revision", "load_format", "random_seed")
"""Options whose value a server repeats as it was given."""

_WEIGHTS = (
    "model_path",
    "revision",
    "weight_version",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "speculative_draft_model_quantization",
)
"""Arms that differ in these compute something else: their ratio is no method's."""
_SETTINGS = (
    "version",
    "attention_backend",
    "sampling_backend",
    "linear_attn_backend",
    "mamba_radix_cache_strategy",
    "mamba_ssm_dtype",
    "chunked_prefill_size",
    "disable_radix_cache",
    "disable_cuda_graph",
    "enable_torch_compile",
    "enable_deterministic_inference",
    "speculative_accept_threshold_single",
    "speculative_accept_threshold_acc",
    "simulated",
    "time_scale",
)
"""Arms that differ in these may owe a part of their ratio to it. What a method forces itself (page size, overlap,
memory, the number of running requests) is none of them."""


class _Unknown:
    """The value of what is not told."""

    def __bool__(self):
        return False

    def __repr__(self):
        return "unknown"


UNKNOWN = _Unknown()


def told(info, name):
    """What a report says under a name or an older one; UNKNOWN where it has none of them. None is a value."""
    for key in _NAMES.get(name, (name,)):
        if isinstance(info, dict) and key in info:
            return info[key]
    return UNKNOWN


def _number(value):
    return value if isinstance(value, int) and not isinstance(value, bool) else UNKNOWN


def _state(info):
    states = told(info, "internal_states")
    return states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}


def effective_context(info, models):
    """Tokens of the window, as ``/v1/models`` says; ``/server_info`` holds the configured one, where it was given."""
    for row in models or []:
        length = _number(row.get("max_model_len")) if isinstance(row, dict) else UNKNOWN
        if length is not UNKNOWN:
            return length
    return _number(told(info, "context_length"))


def effective_running(info):
    """Requests that run at once: the scheduler's own figure times its replicas; the configured one is not effective."""
    each = _number(told(_state(info), "effective_max_running_requests_per_dp"))
    replicas = _number(told(info, "dp_size"))
    return each if each is UNKNOWN else each * (replicas or 1)


def kv_tokens(info):
    """Tokens that the KV memory holds."""
    known = _number(told(info, "max_total_num_tokens"))
    return known if known is not UNKNOWN else _number(told(told(_state(info), "memory_usage"), "token_capacity"))


def budget(info):
    """Nodes of the draft tree; None for a chain, UNKNOWN where it can't be told."""
    given = _number(told(info, "budget"))
    if given is not UNKNOWN:
        return given
    algorithm = told(info, "speculative_algorithm")
    if algorithm is UNKNOWN:
        return UNKNOWN
    tree = str(algorithm or "").upper() == "DDTREE" or any(
        told(info, name) for name in ("speculative_dflash_tree_verify", "speculative_dflash_enable_ddtree")
    )
    if not tree:
        return UNKNOWN if told(info, "speculative_dflash_tree_width") else None
    drafted = _number(told(info, "speculative_num_draft_tokens"))
    return drafted if drafted is UNKNOWN else drafted - 1


def simulated_acceptance(env):
    """The acceptance length that is faked; None where it is not, UNKNOWN where the environment is not known."""
    return _positive(env, SIMULATED_ACCEPTANCE)


def _positive(env, name):
    """A number over 0 in an environment; None where it is not set, or set to what the engine takes for off."""
    if env is None:
        return UNKNOWN
    try:
        value = float(env.get(name) or 0)
    except ValueError:
        return UNKNOWN
    return value if value > 0 else None


def _switched_on(env, name):
    return UNKNOWN if env is None else str(env.get(name) or "").strip().lower() in ("1", "true", "yes", "y", "on")


# ---- what a profile expects ------------------------------------------------------------------------------------


def expected(name, profile, method, engine=None, model_root=None, needs=None, version=None):
    """What a server has to say of itself to be a profile's.

    Args:
        name: the profile's name.
        profile: its row of ``sglang_server_profiles``.
        method: its method, as ``dialects.resolve`` gives it.
        engine: the engine that runs it (``kind``, ``extra_args``, ``env``).
        model_root: folder of the models as the server sees it.
        needs: of what will be asked: ``concurrency``, the most requests at once, ``least``, the fewest, and
            ``max_tokens``; None = not known.
        version: the release that the engine is, where that is sure.

    Returns:
        A dictionary of plain values, for `compare`.
    """
    engine = engine or {}
    flags = [str(word) for word in method.get("flags") or []]
    own = list(engine.get("extra_args") or []) + list(profile.get("extra_args") or [])
    words = flags + [str(word).replace("{profile}", name) for word in own]
    stated = {key: value for key, value in ((key, _value(words, key)) for key in _STATED) if value is not None}
    intended = dict(engine.get("env") or {}, **(profile.get("env") or {}))
    root = (model_root or "").rstrip("/")
    return {
        "profile": name,
        "model": str(profile.get("served_model_name") or profile["model"]),
        "model_path": "{0}/{1}".format(root, profile["model"]) if root else None,
        "tp": profile.get("tp"),
        "context_length": profile.get("context_length"),
        "method": method.get("label"),
        "algorithm": _value(flags, "speculative_algorithm"),
        "speculative": method.get("draft_tokens") is None or method["draft_tokens"] > 0,
        "draft_tokens": method.get("draft_tokens"),
        "block_size": method.get("block_size") if "--speculative-dflash-block-size" in flags else None,
        "budget": method.get("budget"),
        "draft_model": profile.get("draft_model") if "draft_model" in (method.get("needs") or []) else None,
        "method_env": dialects.environment(method, profile.get("draft_model")),
        "stated": stated,
        "intended_env": {key: str(intended[key]) for key in ENVIRONMENT if key in intended},
        "simulated": engine.get("kind") == "sim" if engine.get("kind") else None,
        "version": version if engine.get("kind") == "sglang" else None,
        "concurrency": (needs or {}).get("concurrency"),
        "least": (needs or {}).get("least"),
        "max_tokens": (needs or {}).get("max_tokens"),
        "environment": True,
    }


def _value(words, option):
    """The last value of an option among words; None where it is not given."""
    spelled = "--" + option.replace("_", "-")
    found = None
    for index, word in enumerate(words):
        if word.startswith(spelled + "="):
            found = word[len(spelled) + 1 :]
        elif word == spelled and index + 1 < len(words):
            found = words[index + 1]
    return found


# ---- the comparison --------------------------------------------------------------------------------------------


class _Rows:
    """Collects rows of one profile."""

    def __init__(self, profile):
        self.profile = profile
        self.rows = []

    def add(self, check, status, seen, wanted, message):
        seen = None if seen is UNKNOWN else seen
        self.rows.append(
            {
                "gate": GATE,
                "subject": self.profile,
                "check": check,
                "status": status,
                "seen": seen,
                "expected": wanted,
                "message": message,
            }
        )

    def same(self, check, seen, wanted, text, what):
        """Seen and wanted have to be equal; ``text`` has places for both, ``what`` names what is not told."""
        if seen is UNKNOWN:
            self.add(check, "unknown", None, wanted, what)
        elif seen == wanted:
            self.add(check, "pass", seen, wanted, "{0} {1}".format(check, wanted))
        else:
            self.add(check, "fail", seen, wanted, text.format(seen="none" if seen is None else seen, wanted=wanted))


def compare(profile, info, models, model_info, env):
    """Hold what a server says against what its profile expects.

    Args:
        profile: what `expected` returned; a key that is None or missing is not compared.
        info: ``/server_info``, None where the server has none.
        models: the rows of ``/v1/models``.
        model_info: ``/model_info``, None where the server has none.
        env: the environment of the server's process, None where it can't be read.

    Returns:
        Gate rows, one for each thing compared, with the key ``check``; `condense` makes few of them.
    """
    out = _Rows(profile.get("profile"))
    _identity(out, profile, info, models, model_info)
    _numbers(out, profile, info, models)
    _method(out, profile, info, env)
    _capacity(out, profile, info, models)
    _silent(out, profile, info, env)
    return out.rows


def _identity(out, profile, info, models, model_info):
    names = [str(row.get("id")) for row in models or [] if isinstance(row, dict)]
    claimed = [told(info, "served_model_name"), told(model_info, "served_model_name")]
    wanted = profile.get("model")
    if wanted is not None:
        others = sorted({str(name) for name in claimed if name and name is not UNKNOWN and name != wanted})
        if not names and not any(claimed):
            out.add("model", "unknown", None, wanted, "which model it serves")
        elif names and wanted not in names:
            text = "it answers for {0}, the profile says {1}: is it another server?".format(", ".join(names), wanted)
            out.add("model", "fail", names, wanted, text)
        elif others:
            text = "it lists {0} and says of itself {1}".format(wanted, ", ".join(others))
            out.add("model", "fail", others, wanted, text)
        else:
            out.add("model", "pass", names or wanted, wanted, "model {0}".format(wanted))
    path = profile.get("model_path")
    if path:
        seen = told(info, "model_path")
        seen = told(model_info, "model_path") if seen is UNKNOWN else seen
        out.same(
            "model path",
            str(seen).rstrip("/") if isinstance(seen, str) else UNKNOWN,
            path.rstrip("/"),
            "it loaded {seen}, the profile's model is {wanted}",
            "from where it loaded the model",
        )
    for key, value in sorted((profile.get("stated") or {}).items()):
        seen = told(info, key)
        out.same(
            key.replace("_", " "),
            seen if seen is UNKNOWN else str(seen),
            str(value),
            "its " + key.replace("_", " ") + " is {seen}, extra_args say {wanted}",
            "its " + key.replace("_", " "),
        )
    if profile.get("version"):
        out.same(
            "version",
            told(info, "version"),
            profile["version"],
            "it is sglang {seen}, and the engine of the profile is {wanted}",
            "its version",
        )
    if profile.get("simulated") is not None and info is not None:
        seen = bool(told(info, "simulated"))
        text = (
            "a simulated engine answers, the profile's is none"
            if seen
            else "a real engine answers, the profile's is simulated"
        )
        if seen == profile["simulated"]:
            out.add("simulated", "pass", seen, seen, "a simulated engine" if seen else "a real engine")
        else:
            out.add("simulated", "fail", seen, profile["simulated"], text)


def _numbers(out, profile, info, models):
    context = profile.get("context_length")
    if context is not None:
        seen = effective_context(info, models)
        text = "its window is {seen} tokens, the profile says {wanted}"
        out.same("context", seen, context, text, "how long its window is")
        given = _number(told(info, "context_length"))
        if given is not UNKNOWN and seen is not UNKNOWN and given != seen:
            out.add(
                "context", "fail", seen, given, "its window is {0} tokens, it was started with {1}".format(seen, given)
            )
    if profile.get("tp") is not None:
        seen = _number(told(info, "tp_size"))
        out.same("tp", seen, profile["tp"], "it runs with tp {seen}, the profile says {wanted}", "its tp")


def _method(out, profile, info, env):
    speculative = profile.get("speculative")
    if speculative is None:
        return
    seen = told(info, "speculative_algorithm")
    label = profile.get("method") or ("speculative" if speculative else "autoregressive")
    wanted = profile.get("algorithm")
    if seen is UNKNOWN:
        out.add("method", "unknown", None, label, "by which method it decodes")
        return
    name = str(seen).upper() if seen else None
    if not speculative:
        if name is None:
            out.add("method", "pass", None, label, "autoregressive")
        else:
            text = "it speculates by {0}, the profile is autoregressive".format(name)
            out.add("method", "fail", name, label, text)
        return
    if name is None:
        text = "it runs without a speculative algorithm, the profile says {0}".format(label)
        out.add("method", "fail", None, label, text)
        return
    if wanted and name not in _SAME_ALGORITHM.get(wanted.upper(), (wanted.upper(),)):
        text = "it speculates by {0}, the profile's method {1} by {2}".format(name, label, wanted.upper())
        out.add("method", "fail", name, wanted.upper(), text)
        return
    out.add("method", "pass", name, label, label)
    drafted = told(info, "speculative_num_draft_tokens")
    if profile.get("draft_tokens"):
        out.same(
            "draft tokens",
            _number(drafted),
            profile["draft_tokens"],
            "it drafts {seen} tokens a step, the profile's method {wanted}",
            "how many tokens it drafts",
        )
    if profile.get("block_size"):
        out.same(
            "block size",
            _number(told(info, "speculative_dflash_block_size")),
            profile["block_size"],
            "its draft block is {seen} tokens, the profile's method has {wanted}",
            "its draft block",
        )
    if profile.get("budget") is not None and not profile.get("method_env"):
        out.same(
            "budget",
            budget(info),
            profile["budget"],
            "its draft tree has {seen} nodes, the profile says {wanted}",
            "how many nodes its draft tree has",
        )
    if profile.get("draft_model"):
        seen = told(info, "speculative_draft_model_path")
        out.same(
            "draft model",
            str(seen).rstrip("/") if isinstance(seen, str) else UNKNOWN if seen is UNKNOWN else None,
            str(profile["draft_model"]).rstrip("/"),
            "it drafts with {seen}, the profile with {wanted}",
            "which draft model it has",
        )
    for key, value in sorted((profile.get("method_env") or {}).items()):
        seen = UNKNOWN if env is None else env.get(key)
        text = key + " of its process is {seen}, the method sets {wanted}"
        out.same("environment " + key, seen, value, text, key + " of its process")


def _capacity(out, profile, info, models):
    holds, context = kv_tokens(info), effective_context(info, models)
    if profile.get("context_length") is not None:
        if holds is UNKNOWN or context is UNKNOWN:
            out.add("KV tokens", "unknown", None, context if context else None, "how many tokens its KV memory holds")
        elif holds < context:
            text = (
                "its KV memory holds {0} tokens, less than the window of {1}: longer requests are refused; lower "
                "context_length, or give it more memory (mem_fraction_static, tp)".format(holds, context)
            )
            out.add("KV tokens", "fail", holds, context, text)
        else:
            out.add("KV tokens", "pass", holds, context, "{0} KV tokens".format(holds))
    running, configured = effective_running(info), _number(told(info, "max_running_requests"))
    needed = profile.get("concurrency")
    if needed is not None and running is UNKNOWN:
        out.add("concurrency", "unknown", None, needed, "how many requests it runs at once")
    elif needed is not None and running < needed:
        of = "" if configured in (UNKNOWN, running) else " (of {0} configured)".format(configured)
        least = profile.get("least")
        if least is not None and least <= running:
            # cells that ask for more are left out one by one, by the budget that is asked before each
            text = "{0} requests at once{1}, so cells that send more, up to {2}, will be left out".format(
                running, of, needed
            )
            out.add("concurrency", "pass", running, needed, text)
        else:
            text = "it runs {0} requests at once{1}, and {2} will be sent: the others would queue".format(
                running, of, needed
            )
            out.add("concurrency", "fail", running, needed, text)
    elif running is not UNKNOWN:
        less = configured is not UNKNOWN and running < configured
        text = "{0} requests at once{1}".format(running, " of {0} configured".format(configured) if less else "")
        out.add("concurrency", "pass", running, needed, text)


def _silent(out, profile, info, env):
    """What makes a server's answers other than they look."""
    truncates = told(info, "allow_auto_truncate")
    if truncates is UNKNOWN:
        out.add("auto-truncate", "unknown", None, False, "whether it cuts long prompts silently")
    elif truncates:
        text = "it runs with --allow-auto-truncate and cuts long prompts without an error; start it without"
        out.add("auto-truncate", "fail", True, False, text)
    else:
        out.add("auto-truncate", "pass", False, False, "no silent truncation")
    if not profile.get("environment"):
        return
    intended = profile.get("intended_env") or {}
    faked = simulated_acceptance(env)
    if profile.get("speculative"):
        if faked is UNKNOWN:
            out.add("simulated acceptance", "unknown", None, None, "whether its acceptance is simulated")
        elif faked is None:
            out.add("simulated acceptance", "pass", None, None, "real acceptance")
        else:
            text = "its acceptance is faked ({0}={1:g} in its environment); unset it".format(
                SIMULATED_ACCEPTANCE, faked
            )
            out.add("simulated acceptance", "fail", faked, None, text)
    cap, needed = _positive(env, TOKEN_CAP), profile.get("max_tokens")
    if cap is UNKNOWN:
        out.add("token cap", "unknown", None, needed, "whether it caps the tokens of an answer")
    elif cap is None:
        out.add("token cap", "pass", None, needed, "no token cap")
    elif (needed is not None and cap < needed) or (needed is None and TOKEN_CAP not in intended):
        text = "it ends every answer after {0:g} tokens ({1} in its environment){2}".format(
            cap, TOKEN_CAP, ", and {0} will be asked for".format(needed) if needed is not None else "; unset it"
        )
        out.add("token cap", "fail", cap, needed, text)
    else:
        out.add("token cap", "pass", cap, needed, "answers of at most {0:g} tokens".format(cap))
    longer = _switched_on(env, LONGER_CONTEXT)
    if longer is UNKNOWN:
        out.add("longer context", "unknown", None, False, "whether its window may be longer than the model's own")
    elif longer and LONGER_CONTEXT not in intended:
        text = (
            "{0} is set in its environment: its window may be longer than the model's own; unset it, or put it into "
            "env of the profile"
        )
        out.add("longer context", "fail", True, False, text.format(LONGER_CONTEXT))
    else:
        out.add(
            "longer context", "pass", longer, longer, "as the profile's env says" if longer else "the model's window"
        )


def condense(rows):
    """One row for all that failed, one for all that is not known, and one that passed where nothing failed."""
    if not rows:
        return []
    made = []
    base = {"gate": GATE, "subject": rows[0]["subject"]}
    picked = {status: [row for row in rows if row["status"] == status] for status in ("fail", "unknown", "pass")}
    for status in ("fail", "unknown"):
        found = picked[status]
        if not found:
            continue
        joined = "; ".join(row["message"] for row in found)
        if status == "fail":
            text = "the server is not the profile's: {0}; start it by recover.yml".format(joined)
        else:
            text = "the server does not tell: {0}".format(joined)
        made.append(
            dict(
                base,
                status=status,
                seen={row["check"]: row["seen"] for row in found},
                expected={row["check"]: row["expected"] for row in found},
                message=text,
            )
        )
    if not picked["fail"] and picked["pass"]:
        found = picked["pass"]
        text = "the server is what its profile says ({0})".format(", ".join(row["message"] for row in found))
        made.append(
            dict(
                base,
                status="pass",
                seen={row["check"]: row["seen"] for row in found},
                expected={row["check"]: row["expected"] for row in found},
                message=text,
            )
        )
    return made


# ---- what a manifest keeps, and arms side by side --------------------------------------------------------------


def summary(info, models, model_info, env=None):
    """What a manifest keeps of a server's report beside the report itself: the values that a reader looks for first.

    A value that was not told is null and stands in ``unknown``.
    """
    values = {
        "model": told(info, "served_model_name"),
        "model_path": told(info, "model_path"),
        "architectures": told(model_info, "architectures"),
        "context_length": effective_context(info, models),
        "kv_tokens": kv_tokens(info),
        "running": effective_running(info),
        "running_configured": told(info, "max_running_requests"),
        "tp_size": told(info, "tp_size"),
        "algorithm": told(info, "speculative_algorithm"),
        "draft_tokens": told(info, "speculative_num_draft_tokens"),
        "draft_model": told(info, "speculative_draft_model_path"),
        "budget": budget(info),
        "block_size": told(info, "speculative_dflash_block_size"),
        "auto_truncate": told(info, "allow_auto_truncate"),
        "simulated": bool(info["simulated"]) if isinstance(info, dict) and "simulated" in info else False,
        "time_scale": told(info, "sim_time_scale") if told(info, "sim_time_scale") is not UNKNOWN else None,
        "device": told(info, "device"),
    }
    if info is None:
        values["simulated"] = UNKNOWN
    if values["model"] is UNKNOWN:
        values["model"] = told(model_info, "served_model_name")
    if values["model_path"] is UNKNOWN:
        values["model_path"] = told(model_info, "model_path")
    for name in (*_WEIGHTS, *_SETTINGS):
        if name not in values:
            values[name] = told(info, name)
    if values["weight_version"] is UNKNOWN:
        values["weight_version"] = told(model_info, "weight_version")
    if env is not None:
        values["environment"] = {name: env[name] for name in ENVIRONMENT if env.get(name) is not None}
    unknown = sorted(name for name, value in values.items() if value is UNKNOWN)
    kept = {name: None if value is UNKNOWN else value for name, value in values.items()}
    return dict(kept, schema=1, unknown=unknown)


def unlike(launches):
    """Launches of one run that differ from their baseline in more than the method.

    Args:
        launches: ``launch``, ``profile`` and ``server_info_summary`` of each; one without a summary is passed over.

    Returns:
        Gate rows ``like-for-like`` with ``launch``. ``fail`` where weights or precision differ, for then the ratio is
        no method's; ``unknown`` where a setting does, for then it is unknown how much of the ratio is the method's.
        The baseline is the first autoregressive launch of the same tp, else the first launch of it.
    """
    groups = {}
    for launch in launches:
        told_of = launch.get("server_info_summary")
        if isinstance(told_of, dict):
            groups.setdefault(told_of.get("tp_size"), []).append((launch, told_of))
    rows = []
    for _tp, members in sorted(groups.items(), key=lambda item: str(item[0])):
        plain = [pair for pair in members if pair[1].get("algorithm") is None and "algorithm" not in _not_told(pair[1])]
        base, base_told = (plain or members)[0]
        for launch, told_of in members:
            if launch is base:
                continue
            for status, names in (("fail", _WEIGHTS), ("unknown", _SETTINGS)):
                row = _unlike(status, names, launch, told_of, base, base_told)
                if row:
                    rows.append(row)
    return rows


def unlike_profiles(names, profiles):
    """Lines about profiles of one tp that are to differ in more than their method, before any of them is started.

    Compared is what the inventory states: the engine, and the options of extra_args that decide weights and precision.

    Args:
        names: the profiles of a sweep, in its order.
        profiles: ``sglang_server_profiles``.
    """
    groups = {}
    for name in names:
        if name in profiles:
            groups.setdefault((profiles[name].get("model"), profiles[name].get("tp")), []).append(name)
    lines = []
    for members in groups.values():
        plain = [name for name in members if profiles[name].get("method") in ("autoregressive", "auto")]
        base = (plain or members)[0]
        wanted = _planned(profiles[base])
        for name in members:
            seen = _planned(profiles[name])
            bad = [key for key in sorted(seen) if seen[key] != wanted[key]]
            if bad:
                shown = ["{0} {1} against {2}".format(key, _shown(seen[key]), _shown(wanted[key])) for key in bad]
                lines.append("{0} is not like for like with {1}: {2}".format(name, base, ", ".join(shown)))
    return lines


def _planned(profile):
    words = [str(word) for word in profile.get("extra_args") or []]
    found = {
        key.replace("_", " "): _value(words, key) for key in ("dtype", "quantization", "kv_cache_dtype", "revision")
    }
    return dict(found, engine=profile.get("engine") or "default")


def _not_told(told_of):
    return told_of.get("unknown") or []


def _unlike(status, names, launch, told_of, base, base_told):
    silent = set(_not_told(told_of)) | set(_not_told(base_told))
    bad = [name for name in names if name not in silent and told_of.get(name) != base_told.get(name)]
    # the baseline has no draft: what it says of one is no difference
    bad = [name for name in bad if "draft" not in name or base_told.get("algorithm") is not None]
    if not bad:
        return None
    shown = ", ".join(
        "{0} {1} against {2}".format(name.replace("_", " "), _shown(told_of.get(name)), _shown(base_told.get(name)))
        for name in bad
    )
    text = "{0} is not like for like with {1}: {2}; {3}".format(
        launch.get("profile") or "launch {0}".format(launch.get("launch")),
        base.get("profile") or "launch {0}".format(base.get("launch")),
        shown,
        "their ratio is not the method's"
        if status == "fail"
        else "a part of their ratio may be owed to it; give both the same settings",
    )
    return {
        "gate": ALIKE,
        "subject": launch.get("profile"),
        "launch": launch.get("launch"),
        "status": status,
        "seen": {name: told_of.get(name) for name in bad},
        "expected": {name: base_told.get(name) for name in bad},
        "message": text,
    }


def _shown(value):
    return "none" if value is None else str(value)
