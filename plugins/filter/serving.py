# SPDX-License-Identifier: Apache-2.0
"""Filters over the pure functions of serving and preflight: no decision is made in Jinja."""

from __future__ import annotations

from ansible.errors import AnsibleFilterError

from ..module_utils import dialects, modelfiles, placement, serving
from ..module_utils import engines as engine_table


def gate_subjects(profiles, look, only=None):
    """Names of the profiles that preflight is about; see ``serving.gate_subjects``."""
    try:
        return serving.gate_subjects(dict(profiles), look or {}, only)
    except serving.ServingError as error:
        raise AnsibleFilterError(str(error)) from error


def smoke_cases(profiles, names, settings):
    """The smoke requests of these profiles; see ``serving.smoke_cases``."""
    try:
        return serving.smoke_cases(dict(profiles), list(names), dict(settings))
    except serving.ServingError as error:
        raise AnsibleFilterError(str(error)) from error


def placement_rows(names, plan, look, guest=None):
    """The placement gate's rows of these profiles, from the host's view."""
    planned = plan.get("profiles") or {}
    rows = []
    for name in names:
        if name in (plan.get("refused") or {}):
            rows.append(serving.refused_row(name, plan["refused"][name].removeprefix(name + ": ")))
        else:
            row = placement.verify(planned.get(name), look, name, guest)
            # The row's subject says the name already.
            rows.append(dict(row, message=row["message"].removeprefix(name + ": ")))
    return rows


def device_paths(names, plan):
    """The device nodes that these profiles' servers open."""
    return serving.device_paths(list(names), plan or {})


def model_paths(names, profiles, root):
    """The model folders that these profiles need, with the marker that staging leaves."""
    return serving.model_paths(list(names), dict(profiles), root, modelfiles.MARKER_NAME)


def engines(engine, engines, look, package=None, installed=None):
    """The engines as the units need them; see ``engines.resolve``."""
    try:
        return engine_table.resolve(dict(engine), dict(engines or {}), look or {}, package, installed)
    except engine_table.EngineError as error:
        raise AnsibleFilterError(str(error)) from error


def engine_venvs(engine, engines):
    """The virtual environments of all engines that the role installs."""
    try:
        table = engine_table.table(dict(engine), dict(engines or {}))
    except engine_table.EngineError as error:
        raise AnsibleFilterError(str(error)) from error
    return sorted({row["install"]["venv"] for row in table.values() if row["install"]})


def bench_engine(profiles, names, engine, engines):
    """What a run's manifest says of the engines of these profiles; see ``engines.bench``."""
    return engine_table.bench(dict(profiles), list(names), dict(engine), dict(engines or {}))


def profile_dialects(profiles, general=None, engine=None, engines=None):
    """The overrides of the method table that hold for each profile; see ``dialects.for_profile``."""
    try:
        return {
            name: dialects.for_profile(dict(row), general or {}, engine or {}, engines or {})
            for name, row in profiles.items()
        }
    except dialects.DialectError as error:
        raise AnsibleFilterError(str(error)) from error


class FilterModule:
    def filters(self):
        return {
            "gate_subjects": gate_subjects,
            "smoke_cases": smoke_cases,
            "profile_dialects": profile_dialects,
            "placement_rows": placement_rows,
            "device_paths": device_paths,
            "engines": engines,
            "engine_venvs": engine_venvs,
            "bench_engine": bench_engine,
            "model_paths": model_paths,
        }
