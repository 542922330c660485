"""Every command line that the roles render for a release of SGLang, parsed by that release's own ``ServerArgs``."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from specrig.facts import dialects, engineflags, engineoptions, serving

RELEASES = ("0.5.9", "0.5.12.post1", "0.5.18", "0.5.23")
NEWEST = RELEASES[-1]
PLACED = {"gpus": [0], "guest_gpus": [0], "numa_nodes": [0], "memory_nodes": [0], "cpus": "0-3"}
TREES = ("pr-29907", "pr-31069", "pr-36196", "fork-enable-ddtree")


def module() -> ModuleType:
    """The parsers' environments: not a package, since the suite's files are imported by path."""
    path = Path(__file__).with_name("parsers") / "environment.py"
    spec = importlib.util.spec_from_file_location("specrig_parser_environment", path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found
    spec.loader.exec_module(found)
    return found


environment = module()


class Parsers:
    """One process a release, for all tests of this file."""

    def __init__(self) -> None:
        self.running: dict[str, Any] = {}

    def of(self, release: str) -> Any:
        if release not in self.running:
            try:
                self.running[release] = environment.RealParser(release)
            except environment.Unavailable as reason:
                if os.environ.get("CI"):
                    pytest.fail(f"sglang {release} has to be there for these tests: {reason}")
                pytest.skip(f"sglang {release} cannot be had here: {reason}")
        return self.running[release]

    def ask(self, release: str, lines: list[list[str]]) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = self.of(release).parse(lines)
        return answers

    def options(self, release: str) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = self.of(release).options
        return found


@pytest.fixture(scope="module")
def parsers() -> Iterator[Parsers]:
    made = Parsers()
    yield made
    for parser in made.running.values():
        parser.close()


def engine(release: str, **more: Any) -> dict[str, Any]:
    """SGLang of a release, installed as the roles install it."""
    row = {"kind": "sglang", "command": ["/opt/sglang/bin/python", "-m", "sglang.launch_server"]}
    return {**row, "install": {"requirements": [f"sglang=={release}"]}, **more}


def argv(profile: dict[str, Any], release: str, **more: Any) -> list[str]:
    """The arguments of a profile's unit, after the engine's command."""
    settings = {"engine": engine(release, **more), "model_root": "/srv/models"}
    return list(serving.plan_unit("p", profile, PLACED, settings)["argv"][3:])


def supported(release: str) -> list[str]:
    """The methods that a release can run, by the table."""
    found = []
    for method, row in dialects.TABLE.items():
        requires = row["dialects"][row["dialect"]].get("requires") or ">=0.0.0"
        if engineflags.satisfies(release, requires):
            found.append(method)
    return found


def profiles(release: str) -> list[dict[str, Any]]:
    """Every method of a release, with every tensor-parallel size and every option of a profile, there and left out."""
    made = []
    options = itertools.product((1, 2, 4, 8), (None, 0.85), (None, "qwen"), (32768, 131072))
    for method, (tp, memory, served, context) in itertools.product(supported(release), options):
        made.append(
            {
                "model": "Qwen3.6-27B",
                "method": method,
                "tp": tp,
                "context_length": context,
                "port": 31001,
                "draft_model": "/srv/models/draft",
                "mem_fraction_static": memory,
                "served_model_name": served,
            }
        )
    return made


@pytest.mark.parametrize("release", RELEASES)
def test_the_stand_in_gives_the_whole_parser(parsers: Parsers, release: str) -> None:
    """As many spellings as a full installation lists, and each release's as this project's table says."""
    options = parsers.options(release)
    assert len(options) == environment.VERSIONS[release]["options"]
    long = {name for name in options if name.startswith("--")}
    assert long == set(engineflags.options(release))


def test_types_and_choices_are_those_of_a_full_installation(parsers: Parsers) -> None:
    """Every option's name, type, count of values and choices, as an installation with torch 2.13.0 listed them."""
    options = parsers.options(NEWEST)
    assert len(options) == 561
    listed = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()
    assert listed == environment.VERSIONS[NEWEST]["full_installation"]
    assert options["--tp-size"] == ["tp_size", "_StoreAction", "int", None, None]
    assert options["--mem-fraction-static"][2] == "float"
    assert options["--mamba-radix-cache-strategy"][4] == ["auto", "extra_buffer", "extra_buffer_lazy", "no_buffer"]
    assert options["--cuda-graph-bs-decode"][3] == "+"
    assert options["--disable-cuda-graph"][1] == "DeprecatedStoreTrueAction"
    assert options["--sampling-defaults"][4] == ["model", "openai"]


@pytest.mark.parametrize("release", RELEASES)
def test_every_method_with_every_option(parsers: Parsers, release: str) -> None:
    """Taken, nothing shortened, the algorithm known to the engine, and the values those of the profile."""
    rows = profiles(release)
    assert len(rows) == len(supported(release)) * 32
    lines = [argv(row, release) for row in rows]
    for row, line, answer in zip(rows, lines, parsers.ask(release, lines), strict=True):
        assert "error" not in answer, (line, answer)
        assert answer["shortened"] == [], line
        assert answer["algorithm"] is None, answer
        values, facts = answer["values"], dialects.resolve(row["method"], None)
        parallel = values.get("tp_size", values.get("tensor_parallel_size", 1))
        assert parallel == row["tp"]
        assert values["context_length"] == row["context_length"]
        assert values["served_model_name"] == (row["served_model_name"] or "Qwen3.6-27B")
        assert values.get("mem_fraction_static") == row["mem_fraction_static"]
        assert values.get("speculative_num_draft_tokens") == (facts["draft_tokens"] or None)
        assert values.get("speculative_num_steps") == facts["steps"]
        draft = "draft_model" in facts["needs"]
        assert values.get("speculative_draft_model_path") == ("/srv/models/draft" if draft else None)


def test_older_releases_lack_what_the_table_says() -> None:
    assert "dflash" not in supported("0.5.9")
    assert "dflash" in supported("0.5.12.post1")
    assert {"autoregressive", "eagle", "eagle3", "standalone", "nextn", "ngram"} <= set(supported("0.5.9"))
    assert not any("ddtree" in supported(release) for release in RELEASES)


def test_what_a_release_lacks_is_refused_by_its_parser_and_before_the_start(parsers: Parsers) -> None:
    """DFLASH on 0.5.9: the parser's own refusal, and the line that comes instead of it."""
    row = {"model": "m", "method": "dflash", "tp": 1, "context_length": 4096, "port": 1, "draft_model": "/d"}
    (answer,) = parsers.ask("0.5.9", [dialects.command(row, "/m", "127.0.0.1")])
    assert "invalid choice: 'DFLASH'" in answer["error"]
    with pytest.raises(serving.ServingError, match=r"method dflash .* needs sglang >=0\.5\.11"):
        argv(row, "0.5.9")


@pytest.mark.parametrize("dialect", TREES)
def test_ddtree_is_in_no_release(parsers: Parsers, dialect: str) -> None:
    """Each spelling is refused by the newest release, for its own flag or algorithm and for nothing else."""
    row = {"model": "m", "method": "ddtree", "budget": 15, "tp": 4, "context_length": 4096, "port": 1}
    row["draft_model"] = "/d"
    line = dialects.command(row, "/m", "127.0.0.1", {"ddtree": dialect})
    own = [word for word in line if "ddtree" in word or "-tree-" in word]
    assert len(own) == 1
    at = line.index(own[0])
    has_value = at + 1 < len(line) and not line[at + 1].startswith("--")
    rest = line[:at] + line[at + (2 if has_value else 1) :]
    refused, taken = parsers.ask(NEWEST, [line, rest])
    assert f"unrecognized arguments: {own[0]}" in refused["error"]
    assert "error" not in taken
    assert (taken["algorithm"] is None) == ("DDTREE" not in line)
    settings = {"engine": engine(NEWEST), "model_root": "/srv/models", "dialects": {"ddtree": dialect}}
    with pytest.raises(serving.ServingError, match="is in no release of SGLang"):
        serving.plan_unit("p", row, PLACED, settings)


@pytest.mark.parametrize("release", RELEASES)
def test_a_server_with_a_key(parsers: Parsers, release: str) -> None:
    """The key stands in a file that the command line names: the option is there, and the key is not."""
    row = {"model": "m", "method": "autoregressive", "tp": 1, "context_length": 4096, "port": 1}
    settings = {"engine": engine(release), "model_root": "/srv/models", "api_key": "sk-1"}
    line = list(serving.plan_unit("p", row, PLACED, settings)["argv"][3:])
    assert "sk-1" not in " ".join(line)
    (answer,) = parsers.ask(release, [line])
    assert "error" not in answer
    assert answer["shortened"] == []
    assert answer["values"]["config"].endswith("/p.secrets.yaml")


@pytest.mark.parametrize("inventory", ["lab", "rtxpro6000x8"])
@pytest.mark.parametrize("release", RELEASES[1:])
def test_the_profiles_of_the_inventories(parsers: Parsers, repository: Path, inventory: str, release: str) -> None:
    """With the inventory's own extra arguments; those of the simulated engine are left out, it has its own contract."""
    text = (repository / "inventory" / inventory / "group_vars" / "all.yml").read_text()
    variables = yaml.safe_load(text)
    extra = variables["sglang_server_engine"].get("extra_args") or []
    extra = [] if variables["sglang_server_engine"]["kind"] == "sim" else extra
    lines = []
    for row in variables["sglang_server_profiles"].values():
        if row["method"] == "ddtree":
            continue
        lines.append(argv(row, release, extra_args=extra))
    assert len(lines) >= 6
    for line, answer in zip(lines, parsers.ask(release, lines), strict=True):
        assert "error" not in answer, (line, answer)
        assert (answer["shortened"], answer["algorithm"]) == ([], None)


class TestRenamed:
    """The table of renames and the parsers agree, release by release."""

    @pytest.mark.parametrize("release", RELEASES)
    def test_old_and_new_names(self, parsers: Parsers, release: str) -> None:
        rows = [(old, new) for old, new, _since, _more in engineflags.RENAMED]
        names = sorted({name.split()[0] for pair in rows for name in pair})
        options = parsers.options(release)
        values = ("_StoreAction", "DeprecatedAliasStoreAction")
        lines = []
        for name in names:
            takes = options.get(name, ["", "_StoreAction", "", None, None])
            value = (takes[4] or ["1"])[:1] if takes[1] in values else []
            lines.append(["--model-path", "m", name, *value])
        for name, answer in zip(names, parsers.ask(release, lines), strict=True):
            told = engineflags.check([name], release)
            assert ("error" in answer) == any(row["status"] == "fail" for row in told), (release, name, answer, told)
            if "error" not in answer:
                deprecated = options[name][1].startswith("Deprecated")
                assert not deprecated or [row["status"] for row in told] == ["note"], (release, name, told)

    @pytest.mark.parametrize(
        ("flag", "words"),
        [
            ("--cuda-graph-max-bs", "ambiguous option: --cuda-graph-max-bs could match --cuda-graph-max-bs-decode"),
            ("--cuda-graph-bs", "ambiguous option: --cuda-graph-bs could match --cuda-graph-bs-decode"),
            ("--mamba-scheduler-strategy", "unrecognized arguments: --mamba-scheduler-strategy"),
        ],
    )
    def test_a_users_old_flag_ends_the_newest_parser(self, parsers: Parsers, flag: str, words: str) -> None:
        """The contract sees it, and so does the role before the engine is started."""
        row = {"model": "m", "method": "autoregressive", "tp": 1, "context_length": 4096, "port": 1}
        line = [*dialects.command(row, "/m", "127.0.0.1"), flag, "4"]
        (answer,) = parsers.ask(NEWEST, [line])
        assert words in answer["error"]
        with pytest.raises(serving.ServingError, match=rf"{flag} is gone in sglang 0\.5\.23.* since 0\.5\.14 it is"):
            argv({**row, "extra_args": [flag, "4"]}, NEWEST)
        assert engineflags.check([flag], "0.5.12.post1") == []

    def test_a_shortened_option_is_seen(self, parsers: Parsers) -> None:
        """--tp is the beginning of --tp-size alone today: taken by the parser, named by the role."""
        row = {"model": "m", "method": "autoregressive", "tp": 1, "context_length": 4096, "port": 1}
        (answer,) = parsers.ask(NEWEST, [[*dialects.command(row, "/m", "127.0.0.1"), "--tp", "4"]])
        assert answer["shortened"] == ["--tp"]
        settings = {"engine": engine(NEWEST), "model_root": "/srv/models"}
        plan = serving.plan_unit("p", {**row, "extra_args": ["--tp", "4"]}, PLACED, settings)
        assert ["--tp is short for --tp-size" in note for note in plan["notes"]] == [True]


@pytest.mark.parametrize("release", RELEASES)
def test_the_algorithms_by_release(parsers: Parsers, release: str) -> None:
    """Which algorithm a release knows is what the table says of it."""
    names = [*engineflags.ALGORITHMS, "DDTREE"]
    lines = [["--model-path", "m", "--speculative-algorithm", name] for name in names]
    for name, answer in zip(names, parsers.ask(release, lines), strict=True):
        refused = "error" in answer or answer["algorithm"] is not None
        since = engineflags.ALGORITHMS.get(name)
        late = since is None or engineflags.release(release) < engineflags.release(since)
        assert refused == late, (release, name, answer)


def test_the_table_ends_with_the_newest_release_that_is_tested() -> None:
    assert (RELEASES[0], NEWEST) == (engineoptions.FIRST, engineoptions.LAST)
    assert set(environment.VERSIONS) == set(RELEASES)
