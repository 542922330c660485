"""What the manifest of a run folder is: everything that a reader needs to know where the numbers come from."""

from __future__ import annotations

from typing import Any

import msgspec

from specrig.model.cell import Cell

SCHEMA = 1


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """What answered. `hardware` is simulated, cpu, gpu or unknown; only gpu numbers are GPU performance."""

    kind: str = "unknown"
    time_scale: float | None = None
    hardware: str = "unknown"


class LaunchRow(msgspec.Struct, frozen=True, kw_only=True):
    """A launch as it happened; `t0_unix` is the clock origin of its records.

    `server_info`, `models` and `model_info` are what the server said of itself, as it said it (without its keys);
    `server_info_summary` the values that matter by one name each, whatever the server's version calls them, with the
    names of what it did not tell under `unknown`. `engine` is what was installed for it: name, kind, id, version and
    that of every package. `tokenizer_check` is whether the server makes the same ids of texts as the prompts' tokenizer
    (`ok`, null = it could not be asked), and a line on it.
    """

    launch: int
    profile: str | None = None
    block: int = 0
    t0_unix: float | None = None
    server_info: dict[str, Any] | None = None
    models: list[dict[str, Any]] = []
    model_info: dict[str, Any] | None = None
    server_info_summary: dict[str, Any] | None = None
    engine: dict[str, Any] | None = None
    gates: list[dict[str, Any]] = []
    tokenizer_check: dict[str, Any] | None = None


class Skipped(msgspec.Struct, frozen=True, kw_only=True):
    """A cell that was not run, and why."""

    cell: str
    reason: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """manifest.json. `label` is running, complete, aborted, failed or partial.

    `corpora` is the SHA-256 of every text that prompts are made of, `prompts` what is to be said of them: which part of
    a file's rows is sent, how the tools of agentic sessions are written.
    """

    schema: int = SCHEMA
    run: str
    name: str
    created_at: str
    label: str = "running"
    sweep: dict[str, Any]
    cells: list[Cell]
    reason: str | None = None
    by: str | None = None
    versions: dict[str, Any] = {}
    engine: Engine = Engine()
    placements: dict[str, Any] = {}
    host_facts: dict[str, Any] | None = None
    launches: list[LaunchRow] = []
    model: dict[str, Any] = {}
    corpora: dict[str, str] = {}
    prompts: list[str] = []
    skipped: list[Skipped] = []
    git: dict[str, Any] | None = None
