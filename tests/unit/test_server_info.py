"""What servers say of themselves, old and new, real and simulated, held against a profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from specrig.engine import smoke
from specrig.engine.client import EngineClient
from specrig.facts import dialects, serverinfo, serving
from specrig.runs.measure import note_unlike
from specrig.sim.testing import running_sim, tiny_tokenizer

DFLASH = {
    "model": "Qwen3.6-27B",
    "tp": 4,
    "method": "dflash",
    "draft_model": "/dev/shm/Qwen3.6-27B-DFlash",
    "context_length": 131072,
    "port": 30000,
}
REAL = {"kind": "sglang", "install": {"requirements": ["sglang==0.5.23"]}}


def load(path: Path) -> Any:
    text = path.read_text()
    return json.loads(text[text.index("{") :])


@pytest.fixture
def told(samples: Path) -> dict[str, Any]:
    """A server of the profile above, as 0.5.23 tells of itself."""
    info = load(samples / "sglang" / "constructed_server_info_0.5.23_tp4_dflash_WRONG_GPUS.json")
    models = load(samples / "sglang" / "constructed_v1_models_0.5.23.json")["data"]
    return {
        "info": info,
        "models": models,
        "model_info": load(samples / "sglang" / "constructed_model_info_0.5.23.json"),
    }


def expect(profile: dict[str, Any] | None = None, engine: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    profile = {**DFLASH, **(profile or {})}
    method = dialects.resolve(profile["method"], profile.get("budget"), more.pop("overrides", None))
    return serverinfo.expected("p", profile, method, engine or REAL, "/dev/shm", more.get("needs"), more.get("version"))


def bad(rows: list[dict[str, Any]], status: str = "fail") -> dict[str, str]:
    return {row["check"]: row["message"] for row in rows if row["status"] == status}


def compare(told: dict[str, Any], wanted: dict[str, Any], env: dict[str, str] | None = None) -> list[dict[str, Any]]:
    return serverinfo.compare(wanted, told["info"], told["models"], told["model_info"], {} if env is None else env)


def test_a_server_that_is_its_profile_s(told: dict[str, Any]) -> None:
    rows = compare(told, expect(version="0.5.23"))
    assert [row for row in rows if row["status"] != "pass"] == []
    assert [row["check"] for row in rows] == [
        "model",
        "model path",
        "version",
        "simulated",
        "context",
        "tp",
        "method",
        "draft tokens",
        "block size",
        "draft model",
        "KV tokens",
        "concurrency",
        "auto-truncate",
        "simulated acceptance",
        "token cap",
        "longer context",
    ]
    assert {(row["gate"], row["subject"]) for row in rows} == {("server", "p")}
    (only,) = serverinfo.condense(rows)
    assert only["status"] == "pass"
    assert only["seen"]["KV tokens"] == 1042176
    assert "9 requests at once of 48 configured" in only["message"]


@pytest.mark.parametrize(
    ("profile", "changes", "check", "words"),
    [
        ({"tp": 2}, {}, "tp", "it runs with tp 4, the profile says 2"),
        ({"context_length": 32768}, {}, "context", "its window is 131072 tokens, the profile says 32768"),
        ({"model": "Other"}, {}, "model", "it answers for Qwen3.6-27B, the profile says Other: is it another server?"),
        ({}, {"served_model_name": "Elsewhere"}, "model", "it lists Qwen3.6-27B and says of itself Elsewhere"),
        (
            {},
            {"model_path": "/srv/old"},
            "model path",
            "it loaded /srv/old, the profile's model is /dev/shm/Qwen3.6-27B",
        ),
        ({"method": "autoregressive"}, {}, "method", "it speculates by DFLASH, the profile is autoregressive"),
        ({}, {"speculative_algorithm": None}, "method", "without a speculative algorithm, the profile says dflash"),
        ({"method": "eagle3"}, {}, "method", "it speculates by DFLASH, the profile's method eagle3 by EAGLE3"),
        ({}, {"speculative_num_draft_tokens": 8}, "draft tokens", "it drafts 8 tokens a step, the profile's method 16"),
        (
            {},
            {"speculative_dflash_block_size": 8},
            "block size",
            "its draft block is 8 tokens, the profile's method has 16",
        ),
        ({}, {"speculative_draft_model_path": "/d"}, "draft model", "it drafts with /d, the profile with /dev/shm/"),
        ({}, {"max_total_num_tokens": 100_000}, "KV tokens", "holds 100000 tokens, less than the window of 131072"),
        ({}, {"allow_auto_truncate": True}, "auto-truncate", "cuts long prompts without an error"),
        ({}, {"version": "0.5.22"}, "version", "it is sglang 0.5.22, and the engine of the profile is 0.5.23"),
        ({}, {"simulated": True}, "simulated", "a simulated engine answers"),
        ({"extra_args": ["--dtype", "float16"]}, {}, "dtype", "its dtype is bfloat16, extra_args say float16"),
        ({"extra_args": ["--quantization=fp8"]}, {}, "quantization", "its quantization is None, extra_args say fp8"),
    ],
)
def test_what_differs_is_named(told: dict[str, Any], profile: Any, changes: Any, check: str, words: str) -> None:
    told["info"].update(changes)
    found = bad(compare(told, expect(profile, version="0.5.23")))
    assert list(found) == ([check, "model path"] if "model" in profile else [check])
    assert words in found[check]
    (row, *_rest) = serverinfo.condense(compare(told, expect(profile, version="0.5.23")))
    assert row["status"] == "fail"
    assert row["message"].startswith("the server is not the profile's: ")
    assert row["message"].endswith("; start it by recover.yml")
    assert "\n" not in row["message"]


@pytest.mark.parametrize(
    ("key", "check", "words"),
    [
        ("tp_size", "tp", "its tp"),
        ("speculative_algorithm", "method", "by which method it decodes"),
        ("speculative_num_draft_tokens", "draft tokens", "how many tokens it drafts"),
        ("speculative_draft_model_path", "draft model", "which draft model it has"),
        ("allow_auto_truncate", "auto-truncate", "whether it cuts long prompts silently"),
        ("max_total_num_tokens", None, None),
    ],
)
def test_what_is_not_told_is_unknown(told: dict[str, Any], key: str, check: str | None, words: str | None) -> None:
    """Never the value that was asked for; the KV memory stands in the scheduler's own state as well."""
    del told["info"][key]
    found = bad(compare(told, expect()), "unknown")
    assert found == ({check: words} if check else {})


def test_a_server_without_a_report_is_unknown_and_not_refused(told: dict[str, Any]) -> None:
    rows = serverinfo.compare(expect(needs={"concurrency": 4}), None, told["models"], None, None)
    assert bad(rows) == {}
    assert set(bad(rows, "unknown")) == {
        *("model path", "tp", "method", "KV tokens", "concurrency", "auto-truncate"),
        *("simulated acceptance", "token cap", "longer context"),
    }
    unknown, passed = serverinfo.condense(rows)
    assert (unknown["status"], passed["status"]) == ("unknown", "pass")
    assert unknown["message"].startswith("the server does not tell: from where it loaded the model; its tp; ")
    assert passed["message"] == "the server is what its profile says (model Qwen3.6-27B, context 131072)"


class TestConcurrency:
    """9 run at once of 48 configured (sgl-project/sglang#38846): what counts is what will be sent."""

    @pytest.mark.parametrize(("sent", "status"), [(9, "pass"), (10, "fail"), (None, "pass")])
    def test_against_what_will_be_sent(self, told: dict[str, Any], sent: int | None, status: str) -> None:
        rows = compare(told, expect(needs={"concurrency": sent, "max_tokens": 64}))
        (row,) = [row for row in rows if row["check"] == "concurrency"]
        assert (row["status"], row["seen"]) == (status, 9)
        assert "of 48 configured" in row["message"]

    def test_a_sweep_goes_on_with_the_cells_that_fit(self, told: dict[str, Any]) -> None:
        rows = compare(told, expect(needs={"concurrency": 64, "least": 1}))
        (row,) = [row for row in rows if row["check"] == "concurrency"]
        assert row["status"] == "pass"
        assert row["message"] == (
            "9 requests at once (of 48 configured), so cells that send more, up to 64, will be left out"
        )

    def test_each_replica_has_its_own(self, told: dict[str, Any]) -> None:
        told["info"]["dp_size"] = 2
        assert serverinfo.effective_running(told["info"]) == 18


class TestEnvironment:
    """Switches that no endpoint tells."""

    @pytest.mark.parametrize(
        ("env", "check", "words"),
        [
            ({"SGLANG_SIMULATE_ACC_LEN": "4.5"}, "simulated acceptance", "faked (SGLANG_SIMULATE_ACC_LEN=4.5"),
            ({"SGLANG_MAX_NEW_TOKENS_LIMIT": "512"}, "token cap", "ends every answer after 512 tokens"),
            ({"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}, "longer context", "longer than the model's own"),
        ],
    )
    def test_named_where_set(self, told: dict[str, Any], env: dict[str, str], check: str, words: str) -> None:
        found = bad(compare(told, expect(), env))
        assert list(found) == [check]
        assert words in found[check]

    @pytest.mark.parametrize("value", ["", "0", "-1"])
    def test_off_is_off(self, told: dict[str, Any], value: str) -> None:
        env = {"SGLANG_SIMULATE_ACC_LEN": value, "SGLANG_MAX_NEW_TOKENS_LIMIT": value}
        assert bad(compare(told, expect(), env)) == {}

    def test_a_cap_counts_by_what_is_asked_for(self, told: dict[str, Any]) -> None:
        env = {"SGLANG_MAX_NEW_TOKENS_LIMIT": "512"}
        assert bad(compare(told, expect(needs={"max_tokens": 512}), env)) == {}
        assert "and 513 will be asked for" in bad(compare(told, expect(needs={"max_tokens": 513}), env))["token cap"]

    def test_what_the_inventory_sets_is_meant(self, told: dict[str, Any]) -> None:
        env = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
        assert bad(compare(told, expect({"env": env}), env)) == {}
        faked = {"SGLANG_SIMULATE_ACC_LEN": "4"}
        assert list(bad(compare(told, expect({"env": faked}), faked))) == ["simulated acceptance"]

    def test_an_autoregressive_server_has_no_acceptance(self, told: dict[str, Any]) -> None:
        told["info"]["speculative_algorithm"] = None
        rows = compare(told, expect({"method": "auto"}), {"SGLANG_SIMULATE_ACC_LEN": "4"})
        assert bad(rows) == {}


class TestMethods:
    """Each dialect's numbers, by the names that the engine gives them."""

    def test_nextn_is_eagle_to_the_engine(self, told: dict[str, Any]) -> None:
        told["info"].update(speculative_algorithm="EAGLE", speculative_num_draft_tokens=4)
        assert bad(compare(told, expect({"method": "nextn"}))) == {}

    @pytest.mark.parametrize(
        ("dialect", "report"),
        [
            ("pr-29907", {"speculative_algorithm": "DDTREE", "speculative_ddtree_budget": 15}),
            ("pr-31069", {"speculative_dflash_tree_verify": True}),
            ("fork-enable-ddtree", {"speculative_dflash_enable_ddtree": True}),
        ],
    )
    def test_the_budget_of_a_tree(self, told: dict[str, Any], dialect: str, report: dict[str, Any]) -> None:
        told["info"].update(report, speculative_num_draft_tokens=16)
        tree = {"method": "ddtree", "budget": 15}
        rows = compare(told, expect(tree, overrides={"ddtree": dialect}))
        assert bad(rows) == {}
        assert {row["check"]: row["seen"] for row in rows}["budget"] == 15
        rows = compare(told, expect({**tree, "budget": 31}, overrides={"ddtree": dialect}))
        assert "its draft tree has 15 nodes, the profile says 31" in bad(rows)["budget"]

    def test_a_budget_that_is_set_by_environment(self, told: dict[str, Any]) -> None:
        wanted = expect({"method": "ddtree", "budget": 15}, overrides={"ddtree": "pr-36196"})
        env = {"SGLANG_DFLASH_MAX_NUM_NODES": "15"}
        assert bad(compare(told, wanted, env)) == {}
        found = bad(compare(told, wanted, {**env, "SGLANG_DFLASH_MAX_NUM_NODES": "31"}))
        assert "of its process is 31, the method sets 15" in found["environment SGLANG_DFLASH_MAX_NUM_NODES"]
        assert "is none, the method sets 15" in bad(compare(told, wanted))["environment SGLANG_DFLASH_MAX_NUM_NODES"]

    def test_a_chain_in_place_of_a_tree(self, told: dict[str, Any]) -> None:
        wanted = expect({"method": "ddtree", "budget": 15}, overrides={"ddtree": "pr-31069"})
        assert "has none nodes" in bad(compare(told, wanted))["budget"]


class TestSamples:
    """Real bodies of several releases."""

    def test_live_0_5_23(self, samples: Path) -> None:
        live = samples / "sglang" / "live-0.5.23-cpu"
        info, model_info = load(live / "server_info.txt"), load(live / "model_info.txt")
        models = load(live / "v1_models.txt")["data"]
        profile = {"model": "tiny", "tp": 1, "method": "auto", "context_length": 8192, "port": 31000}
        wanted = serverinfo.expected("cpu", profile, dialects.resolve("auto", None), REAL, "/models", None, "0.5.23")
        rows = serverinfo.compare(wanted, info, models, model_info, {})
        assert [row for row in rows if row["status"] != "pass"] == []
        kept = serverinfo.summary(info, models, model_info, {})
        # context_length of /server_info is null there: the effective one is that of /v1/models
        assert (info["context_length"], kept["context_length"], kept["kv_tokens"]) == (None, 8192, 20000)
        assert (kept["running"], kept["tp_size"], kept["algorithm"], kept["architectures"]) == (
            32,
            1,
            None,
            ["Qwen3ForCausalLM"],
        )
        assert (kept["simulated"], kept["time_scale"], kept["unknown"]) == (False, None, [])

    def test_a_server_of_2026_05_with_old_names(self, samples: Path) -> None:
        info = load(samples / "sglang" / "real_server_info_2026-05_excerpt.json")
        model_info = load(samples / "sglang" / "real_model_info_2026-05.json")
        kept = serverinfo.summary(info, [], model_info)
        assert kept["mamba_radix_cache_strategy"] == "no_buffer"
        assert (kept["kv_tokens"], kept["running"], kept["algorithm"]) == (20480, 128, None)
        # that /model_info had no served_model_name, and no /v1/models was recorded
        assert kept["model"] == "qwen/qwen2.5-0.5b-instruct"
        assert "context_length" in kept["unknown"]
        name = "qwen/qwen2.5-0.5b-instruct"
        profile = {"model": name, "tp": 1, "method": "auto", "context_length": 32768, "port": 1}
        wanted = serverinfo.expected("old", profile, dialects.resolve("auto", None), {"kind": "sglang"})
        models = [{"id": name, "max_model_len": 32768}]
        found = bad(serverinfo.compare(wanted, info, models, model_info, {}))
        assert list(found) == ["KV tokens"]
        assert "holds 20480 tokens, less than the window of 32768" in found["KV tokens"]

    def test_real_models_row(self, samples: Path) -> None:
        rows = load(samples / "sglang" / "real_v1_models.json")["data"]
        assert serverinfo.effective_context(None, rows) == 262144

    def test_the_size_of_a_tp_group_before_0_5_14(self) -> None:
        assert serverinfo.told({"tensor_parallel_size": 4}, "tp_size") == 4
        assert serverinfo.told({"tp_size": 2, "tensor_parallel_size": 4}, "tp_size") == 2


def test_old_endpoints_are_asked_where_the_new_ones_are_not_there() -> None:
    """/get_server_info and /get_model_info of older servers give the same three answers."""
    known = {
        "/get_server_info": {"version": "0.5.2", "tp_size": 1},
        "/get_model_info": {"model_path": "/m"},
        "/v1/models": {"data": [{"id": "m", "max_model_len": 4096}]},
    }

    def old(request: httpx.Request) -> httpx.Response:
        body = known.get(request.url.path)
        return httpx.Response(404) if body is None else httpx.Response(200, json=body)

    with EngineClient("http://engine:1") as client:
        client._http.close()
        client._http = httpx.Client(base_url=client.base_url, transport=httpx.MockTransport(old))
        info, models, model_info = smoke.told_by(client)
        del known["/get_server_info"], known["/get_model_info"]
        assert smoke.told_by(client) == (None, models, None)
    assert info == {"version": "0.5.2", "tp_size": 1}
    assert models == [{"id": "m", "max_model_len": 4096}]
    assert model_info == {"model_path": "/m"}


@pytest.mark.parametrize("dialect", ["pr-29907", "pr-31069", "fork-enable-ddtree"])
def test_the_simulated_engine_tells_what_a_profile_of_it_expects(tmp_path: Path, dialect: str) -> None:
    """Started by the unit's own arguments, asked over HTTP, nothing differs and nothing is unknown."""
    model = tiny_tokenizer(tmp_path / "Tiny")
    profile = {"model": "Tiny", "tp": 2, "method": "ddtree", "budget": 15, "context_length": 4096, "port": 31001}
    profile["draft_model"] = str(model)
    method = dialects.resolve("ddtree", 15, {"ddtree": dialect})
    words = iter([*method["flags"], "--end"])
    flags: dict[str, Any] = {}
    word = next(words)
    while word != "--end":
        value = next(words)
        name = word[2:].replace("-", "_")
        flags[name] = True if value.startswith("--") else value.replace("{draft_model}", str(model))
        word = value if value.startswith("--") else next(words)
    engine = {"kind": "sim"}
    wanted = serverinfo.expected("p", profile, method, engine, str(tmp_path), {"concurrency": 4, "max_tokens": 64})
    with running_sim(model_path=model, served_model_name="Tiny", tp_size=2, context_length=4096, **flags) as sim:
        case = smoke.Case(profile="p", url=sim.url, max_tokens=8, expect=wanted, env={}, model="Tiny")
        rows = smoke.run([case])
    assert [(row["gate"], row["status"]) for row in rows] == [("server", "pass"), ("budget", "pass"), ("smoke", "pass")]
    assert "budget 15" in rows[0]["message"]


def test_the_cases_of_a_profile_say_what_its_server_has_to_tell() -> None:
    profiles = {"tp4": {**DFLASH, "engine": "old", "env": {"SGLANG_MAX_NEW_TOKENS_LIMIT": "9000"}}}
    engines = {"old": {"kind": "sglang", "install": {"requirements": ["sglang==0.5.22"]}}}
    shapes = {
        "tp4": [
            {"prompt_tokens": 100, "max_tokens": 64, "at_once": 8, "at_least": 2},
            {"prompt_tokens": 9, "max_tokens": 128},
        ]
    }
    settings = {"kind": "full", "shapes": shapes, "model_root": "/srv/models/", "engine": REAL, "engines": engines}
    cases = serving.smoke_cases(profiles, ["tp4"], settings)
    assert [case["max_tokens"] for case in cases] == [8, 64, 128]
    assert not any("at_once" in case or "at_least" in case for case in cases)
    wanted = cases[0]["expect"]
    assert (wanted["model_path"], wanted["version"], wanted["algorithm"]) == (
        "/srv/models/Qwen3.6-27B",
        "0.5.22",
        "DFLASH",
    )
    assert (wanted["concurrency"], wanted["least"], wanted["max_tokens"]) == (8, 1, 128)
    assert wanted["intended_env"] == {"SGLANG_MAX_NEW_TOKENS_LIMIT": "9000"}
    profiles["tp4"]["engine"] = "olt"
    with pytest.raises(
        serving.ServingError, match=r"engine 'olt' is not in sglang_server_engines \(did you mean old\?\)"
    ):
        serving.smoke_cases(profiles, ["tp4"], settings)


class TestLikeForLike:
    """Arms of one run: what they differ in beside their method."""

    @staticmethod
    def launch(number: int, profile: str, algorithm: str | None, **changes: Any) -> dict[str, Any]:
        info = {
            "served_model_name": "m",
            "model_path": "/m",
            "tp_size": 1,
            "speculative_algorithm": algorithm,
            "speculative_num_draft_tokens": 16 if algorithm else None,
            "dtype": "bfloat16",
            "quantization": None,
            "kv_cache_dtype": "auto",
            "attention_backend": "flashinfer",
            "version": "0.5.23",
            "max_running_requests": 48 if algorithm else 256,
            "page_size": 1,
            **changes,
        }
        return {"launch": number, "profile": profile, "server_info_summary": serverinfo.summary(info, [], None)}

    def test_alike_but_for_the_method(self) -> None:
        arms = [self.launch(0, "tree", "DDTREE"), self.launch(1, "plain", None), self.launch(2, "chain", "DFLASH")]
        assert serverinfo.unlike(arms) == []

    def test_precision_makes_it_no_method_comparison(self) -> None:
        arms = [self.launch(0, "chain", "DFLASH", quantization="fp8"), self.launch(1, "plain", None)]
        (row,) = serverinfo.unlike(arms)
        assert (row["gate"], row["launch"], row["subject"], row["status"]) == ("like-for-like", 0, "chain", "fail")
        assert row["message"] == (
            "chain is not like for like with plain: quantization fp8 against none; their ratio is not the method's"
        )

    def test_a_setting_may_own_a_part_of_the_ratio(self) -> None:
        arms = [self.launch(0, "plain", None), self.launch(1, "chain", "DFLASH", attention_backend="triton")]
        (row,) = serverinfo.unlike(arms)
        assert (row["status"], row["seen"], row["expected"]) == (
            "unknown",
            {"attention_backend": "triton"},
            {"attention_backend": "flashinfer"},
        )

    def test_what_one_of_them_does_not_tell_is_no_difference(self) -> None:
        silent = self.launch(1, "chain", "DFLASH")
        del silent["server_info_summary"]["kv_cache_dtype"]
        silent["server_info_summary"]["unknown"].append("kv_cache_dtype")
        assert serverinfo.unlike([self.launch(0, "plain", None), silent]) == []
        assert serverinfo.unlike([self.launch(0, "plain", None), {"launch": 1, "profile": "x"}]) == []

    def test_arms_of_another_tp_are_no_arms_of_it(self) -> None:
        arms = [self.launch(0, "plain", None), self.launch(1, "tp4", "DFLASH", tp_size=4, dtype="float16")]
        assert serverinfo.unlike(arms) == []

    def test_profiles_that_will_differ_are_named_before_they_start(self) -> None:
        profiles = {
            "tree": {"model": "m", "tp": 1, "method": "ddtree", "engine": "branch"},
            "plain": {"model": "m", "tp": 1, "method": "auto"},
            "fp8": {"model": "m", "tp": 1, "method": "dflash", "extra_args": ["--quantization", "fp8"]},
            "chain": {"model": "m", "tp": 1, "method": "dflash", "extra_args": ["--log-level", "info"]},
            "tp4": {"model": "m", "tp": 4, "method": "dflash", "extra_args": ["--dtype=float16"]},
        }
        assert serverinfo.unlike_profiles(list(profiles), profiles) == [
            "tree is not like for like with plain: engine branch against default",
            "fp8 is not like for like with plain: quantization fp8 against none",
        ]

    def test_a_run_s_launches_are_compared_as_they_start(self) -> None:
        """A later launch may turn out to be the baseline: the rows are made again, other gates are kept."""
        chain = {**self.launch(0, "chain", "DFLASH", dtype="float16"), "gates": [{"gate": "smoke", "status": "pass"}]}
        manifest = {"launches": [chain]}
        note_unlike(manifest)
        assert [gate["gate"] for gate in chain["gates"]] == ["smoke"]
        manifest["launches"].append(self.launch(1, "plain", None))
        note_unlike(manifest)
        note_unlike(manifest)
        assert [gate["gate"] for gate in chain["gates"]] == ["smoke", "like-for-like"]
        assert chain["gates"][1]["status"] == "fail"
        assert manifest["launches"][1]["gates"] == []
