"""What a profile's unit says, and how a running server is compared with it."""

from __future__ import annotations

import argparse
import configparser
import itertools
import shlex

import pytest

from specrig.facts import serving

PROFILE = {
    "model": "Qwen3.6-27B",
    "tp": 4,
    "method": "ddtree",
    "budget": 15,
    "draft_model": "/srv/models/draft",
    "context_length": 131072,
    "port": 31404,
    "serve": False,
}
PLACED = {
    "gpus": [4, 5, 6, 7],
    "guest_gpus": [4, 5, 6, 7],
    "numa_nodes": [1],
    "cpus": "64-67,192-195",
    "memory_nodes": [1],
    "memory_policy": True,
    "numa": "local",
}
SETTINGS = {
    "engine": {"kind": "sglang", "command": ["/opt/sglang/bin/python", "-m", "sglang.launch_server"]},
    "model_root": "/srv/models/",
    "listen": "127.0.0.1",
    "start_timeout_s": 900,
    "engine_id": "e1",
}


def planned(profile=None, placed=None, settings=None, name="tp4-ddtree-b15"):
    return serving.plan_unit(
        name, {**PROFILE, **(profile or {})}, {**PLACED, **(placed or {})}, {**SETTINGS, **(settings or {})}
    )


def running(plan, **changes):
    return {
        "pid": 812,
        "environ": serving.mask_env({**plan["env"], "PATH": "/usr/bin", "INVOCATION_ID": "x"}),
        "cmdline": serving.mask_argv(plan["argv"]),
        "cpus_allowed": [64, 65, 66, 67, 192, 193, 194, 195],
        **changes,
    }


def directives(text):
    """Directives of [Service] in order, as systemd reads them: name to the list of its values."""
    found = {}
    section = ""
    for line in text.replace("\\\n", "").splitlines():
        if line.startswith("["):
            section = line
        elif section == "[Service]" and "=" in line and not line.startswith("#"):
            name, value = line.split("=", 1)
            found.setdefault(name, []).append(value)
    return found


def test_the_command_is_the_engine_then_the_profile_as_sglang_spells_it():
    argv = planned()["argv"]
    assert argv[:3] == ["/opt/sglang/bin/python", "-m", "sglang.launch_server"]
    options = dict(itertools.pairwise(argv))
    assert options["--model-path"] == "/srv/models/Qwen3.6-27B"
    assert options["--tp-size"] == "4"
    assert options["--context-length"] == "131072"
    assert options["--port"] == "31404"
    assert options["--speculative-algorithm"] == "DDTREE"
    assert options["--speculative-ddtree-budget"] == "15"


def test_the_environment_counts_gpus_by_bus_and_as_the_guest_does():
    env = planned(placed={"gpus": [4, 5, 6, 7], "guest_gpus": [0, 1, 2, 3]})["env"]
    assert env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_engine_and_profile_arguments_come_last_and_name_the_profile():
    engine = {
        "kind": "sim",
        "command": ["/opt/specrig/venv/bin/specrig", "sim"],
        "time_scale": 0.2,
        "extra_args": ["--sim-truth", "/var/lib/specrig/truth-{profile}.jsonl"],
    }
    argv = planned({"extra_args": ["--sim-seed", 7]}, settings={"engine": engine}, name="chat")["argv"]
    assert argv[-6:] == [
        "--sim-time-scale",
        "0.2",
        "--sim-truth",
        "/var/lib/specrig/truth-chat.jsonl",
        "--sim-seed",
        "7",
    ]


def test_the_placement_alone_decides_on_gpus():
    with pytest.raises(serving.ServingError, match="sets CUDA_VISIBLE_DEVICES, which the placement decides"):
        planned({"env": {"CUDA_VISIBLE_DEVICES": "1,2,3,4,5"}})


def test_an_address_on_which_nobody_would_ask_is_refused():
    assert "0.0.0.0" in planned(settings={"listen": "0.0.0.0"})["argv"]
    with pytest.raises(serving.ServingError, match=r"listen is '10\.0\.0\.5', expected 127\.0\.0\.1 or 0\.0\.0\.0: "):
        planned(settings={"listen": "10.0.0.5"})


def test_a_method_s_environment_has_the_path_of_its_draft_model():
    own = {"mine": {"flags": [], "needs": ["draft_model"], "env": {"SGLANG_DRAFT": "{draft_model}/x"}}}
    profile = {"method": "mine", "budget": None, "draft_model": "D"}
    assert planned(profile, settings={"dialects": own})["env"]["SGLANG_DRAFT"] == "/srv/models/D/x"
    (case,) = serving.smoke_cases(
        {"p": {**PROFILE, **profile}}, ["p"], {"kind": "short", "model_root": "/srv/models", "dialects": own}
    )
    assert case["expect"]["method_env"] == {"SGLANG_DRAFT": "/srv/models/D/x"}


def test_a_relative_engine_command_is_refused():
    with pytest.raises(serving.ServingError, match="absolute path"):
        planned(settings={"engine": {"kind": "sglang", "command": ["sglang", "serve"]}})


def test_the_drop_in_binds_cpus_and_memory_of_the_node():
    found = directives(serving.render_dropin(planned()))
    assert found["ExecStart"][0] == ""
    assert shlex.split(found["ExecStart"][1]) == planned()["argv"]
    assert found["CPUAffinity"] == ["64-67 192-195"]
    assert found["NUMAPolicy"] == ["bind"]
    assert found["NUMAMask"] == ["1"]


@pytest.mark.parametrize(
    ("placed", "reason"),
    [
        ({"memory_policy": False}, "the kernel refuses it for node 1 here"),
        ({"memory_policy": None}, "whether the kernel accepts it could not be told"),
        ({"memory_nodes": [], "numa_nodes": [None]}, "the NUMA node of its GPUs is unknown"),
    ],
)
def test_without_a_memory_policy_the_unit_and_the_summary_say_so(placed, reason):
    plan = planned(placed=placed)
    text = serving.render_dropin(plan)
    assert "NUMAPolicy" not in directives(text)
    assert "# memory policy not applied: " + reason in text
    assert "memory policy not applied" in serving.summary_row(plan, "serving")["note"]


def test_unknown_cpus_bind_nothing():
    assert "CPUAffinity" not in directives(serving.render_dropin(planned(placed={"cpus": None})))


def test_the_template_keeps_the_gpu_and_the_other_servers():
    text = serving.render_template({"stop_timeout_s": 45})
    found = directives(text)
    assert found["User"] == ["specrig"]
    # The main process drains and lets its ranks go; the rest of the group is killed after it.
    assert found["KillMode"] == ["mixed"]
    assert found["TimeoutStartSec"] == ["900"]
    assert found["TimeoutStopSec"] == ["45"]
    assert found["EnvironmentFile"] == ["/etc/specrig/profiles/%i.env"]
    assert found["LimitMEMLOCK"] == ["infinity"]
    # Each of these takes the GPU, run-time compilation or another profile's shared memory away.
    harmful = {"PrivateDevices", "ProtectClock", "MemoryDenyWriteExecute", "RemoveIPC", "DeviceAllow", "DevicePolicy"}
    assert not harmful & set(found)
    # Each of these was seen to hide /proc/driver/nvidia in a nested container.
    assert not {"ProtectProc", "ProcSubset", "ProtectKernelTunables", "ProtectControlGroups"} & set(found)
    # No ExecStart: an instance that no profile describes can't start.
    assert "ExecStart" not in found
    parsed = configparser.ConfigParser(strict=False, interpolation=None)
    parsed.optionxform = str
    parsed.read_string(text)
    # Three starts that each load for 900 s and wait for 10 s are still counted together: a slow crash loop ends too.
    assert int(parsed["Unit"]["StartLimitIntervalSec"]) == 4 * 910
    assert parsed["Unit"]["StartLimitBurst"] == "3"


def test_a_profile_that_loads_for_longer_counts_its_restarts_for_longer():
    parsed = configparser.ConfigParser(strict=False, interpolation=None)
    parsed.optionxform = str
    parsed.read_string(serving.render_dropin(planned({"start_timeout_s": 2000})))
    assert int(parsed["Unit"]["StartLimitIntervalSec"]) == 4 * 2010
    assert "[Unit]" not in serving.render_dropin(planned({"start_timeout_s": 600}))


def test_system_calls_that_an_engine_needs_are_not_filtered():
    (line,) = directives(serving.render_template())["SystemCallFilter"]
    assert line.startswith("~")
    # set_mempolicy, sched_setaffinity and mbind; pidfd_getfd and process_vm_readv; shm, memfd and io_uring.
    assert not {"@resources", "@debug", "@process", "@ipc", "@privileged", "@system-service"} & set(line[1:].split())


def test_arguments_stand_one_option_a_line():
    lines = serving.render_dropin(planned()).splitlines()
    assert "    --tp-size 4 \\" in lines
    assert "    --port 31404 \\" in lines


@pytest.mark.parametrize(
    ("word", "quoted"),
    [
        ("--tp-size", "--tp-size"),
        ("50%", "50%%"),
        ("$HOME", '"$$HOME"'),
        ("a b", '"a b"'),
        ('say "x"', '"say \\"x\\""'),
        ("", '""'),
        ('{"a": 1}', '"{\\"a\\": 1}"'),
    ],
)
def test_words_reach_the_engine_as_they_are(word, quoted):
    assert serving.quote_exec(word) == quoted


@pytest.mark.parametrize("end", ["\n", "\r", "\0"])
def test_a_line_break_in_an_argument_is_refused(end):
    """systemd ends a line at each of them."""
    with pytest.raises(serving.ServingError, match="line break"):
        serving.quote_exec(f"a{end}ExecStartPre=/bin/rm")


def test_an_environment_file_reads_back():
    env = {"A": "1", "B": 'two "words"', "C": "", "D": "50% of $HOME\\x", "URL": "http://a:1/b,c"}
    text = serving.render_env(env)
    assert text.splitlines()[0].startswith("#")
    assert 'B="two \\"words\\""' in text
    assert serving.parse_env(text) == env


@pytest.mark.parametrize("name", ["", "a b", "a/b", "../x", "-a", "a@b", "x" * 65, "ä"])
def test_names_that_need_escaping_are_refused(name):
    with pytest.raises(serving.ServingError, match="can't be used"):
        serving.check_name(name)


def test_one_port_for_two_profiles_is_refused():
    assert serving.check_profiles({"a": {"port": 31001}, "b": {"port": 31001}}) == [
        "profiles a and b both have port 31001: give each its own"
    ]
    assert serving.check_profiles({"a": {"port": 0}}) == ["profile a: port is 0, expected a number from 1 to 65535"]
    assert serving.check_profiles({"a": {"port": 31001}, "b": {"port": 31002}}) == []


# ---- what runs, against the plan ----


def test_a_server_that_runs_as_planned_is_left_alone():
    plan = planned()
    assert serving.decide(plan, {"active": "active"}, running(plan), True) == ("keep", [], [])


def test_a_script_s_own_interpreter_before_the_command_is_no_difference():
    plan = planned(settings={"engine": {"kind": "sim", "command": ["/opt/specrig/venv/bin/specrig", "sim"]}})
    shebang = ["/opt/specrig/venv/bin/python3", *plan["argv"]]
    assert serving.differences(plan, running(plan, cmdline=shebang)) == ([], [])


def test_the_incident_a_leftover_environment_is_found():
    plan = planned()
    environ = {**running(plan)["environ"], "CUDA_VISIBLE_DEVICES": "1,2,3,4,5"}
    action, reasons, _unknown = serving.decide(plan, {"active": "active"}, running(plan, environ=environ), True)
    assert action == "restart"
    assert reasons == ["CUDA_VISIBLE_DEVICES is '1,2,3,4,5', planned '4,5,6,7'"]


def test_another_argument_is_named():
    plan = planned()
    seen = ["32768" if word == "131072" else word for word in plan["argv"]]
    different, _unknown = serving.differences(plan, running(plan, cmdline=seen))
    assert different == ["command line: --context-length: has '32768', planned '131072'"]


def test_a_missing_last_argument_is_named():
    plan = planned()
    different, _unknown = serving.differences(plan, running(plan, cmdline=plan["argv"][:-2]))
    assert different == ["command line: /srv/models/draft: has nothing, planned '--speculative-ddtree-budget'"]


def test_cpus_outside_the_plan_are_named_and_fewer_are_right():
    plan = planned()
    different, _unknown = serving.differences(plan, running(plan, cpus_allowed=[0, 1, 64]))
    assert different == ["may run on CPUs 0-1 outside the planned 64-67,192-195"]
    assert serving.differences(plan, running(plan, cpus_allowed=[64])) == ([], [])


@pytest.mark.parametrize(
    ("words", "reasons"),
    [
        (["bind:1"], []),
        (["bind:1", "default"], []),
        (None, []),
        (["default"], ["its memory policy is default, planned bind:1"]),
        (["bind:0"], ["its memory policy is bind:0, planned bind:1"]),
    ],
)
def test_a_memory_policy_of_before_asks_for_a_restart(words, reasons):
    """The gate fails for it and names recover.yml, which has to put it right."""
    plan = planned()
    assert serving.differences(plan, running(plan, memory_policy=words))[0] == reasons
    free = planned(placed={"memory_policy": False})
    assert serving.differences(free, running(free, memory_policy=words)) == ([], [])


def test_what_cannot_be_read_is_unknown_and_restarts_nothing():
    plan = planned()
    seen = {"pid": 812, "environ": None, "cmdline": None, "cpus_allowed": None}
    action, reasons, unknown = serving.decide(plan, {"active": "active"}, seen, True)
    assert (action, reasons) == ("keep", [])
    assert len(unknown) == 3


def test_another_engine_asks_for_a_restart():
    old, new = planned(settings={"engine_id": "old"}), planned(settings={"engine_id": "new"})
    assert serving.differences(new, running(old))[0] == ["SPECRIG_ENGINE is 'old', planned 'new'"]


def test_a_secret_argument_goes_into_a_file_and_not_onto_the_command_line():
    plan = planned({"extra_args": ["--api-key", 'hun"ter2: #', "--admin-api-key=admin3"]})
    text = serving.render_dropin(plan) + serving.render_env(plan["env"])
    assert "hun" not in text
    assert "admin3" not in text
    at = plan["argv"].index("--config")
    assert plan["argv"][:at] == SETTINGS["engine"]["command"]
    assert plan["argv"][at + 1] == "/etc/specrig/profiles/tp4-ddtree-b15.secrets.yaml"
    assert "--api-key" not in plan["argv"]

    import yaml

    assert yaml.safe_load(serving.render_secrets(plan["secrets"])) == {
        "api-key": 'hun"ter2: #',
        "admin-api-key": "admin3",
    }


def test_the_role_s_key_is_the_server_s_unless_the_profile_has_its_own():
    short = planned(
        {"extra_args": ["--api-k", "hunter2", "--ssl-keyfile-pass=hunter3", "--ssl-keyfile", "/etc/key.pem"]}
    )
    assert short["secrets"] == {"api-key": "hunter2", "ssl-keyfile-password": "hunter3"}
    assert short["argv"][-2:] == ["--ssl-keyfile", "/etc/key.pem"]
    shown = serving.mask_argv(["sglang", "--api", "hunter2", "--adm=hunter3", "--ssl-keyfile", "/etc/key.pem"])
    assert "hunter" not in " ".join(shown)
    assert shown[-1] == "/etc/key.pem"
    assert planned(settings={"api_key": "role"})["secrets"] == {"api-key": "role"}
    assert planned({"extra_args": ["--api-key", "own"]}, settings={"api_key": "role"})["secrets"] == {"api-key": "own"}
    assert planned()["secrets"] == {}
    assert "--config" not in planned()["argv"]


def test_a_config_file_of_one_s_own_beside_a_secret_is_refused():
    with pytest.raises(serving.ServingError, match="SGLang takes one such file"):
        planned({"extra_args": ["--config", "/etc/mine.yaml", "--api-key", "x"]})
    assert "/etc/mine.yaml" in planned({"extra_args": ["--config", "/etc/mine.yaml"]})["argv"]
    with pytest.raises(serving.ServingError, match="--api-key has no value"):
        planned({"extra_args": ["--api-key"]})


def test_another_key_asks_for_a_restart_and_shows_neither():
    old, new = planned(settings={"api_key": "old-key"}), planned(settings={"api_key": "new-key"})
    different, _unknown = serving.differences(new, running(old))
    assert len(different) == 1
    assert different[0].startswith("SPECRIG_SECRETS is 'sha256:")
    assert "-key" not in different[0]


def test_a_variable_that_nobody_planned_asks_for_a_restart_where_it_reaches_the_engine():
    plan = planned()
    environ = {**running(plan)["environ"], "SGLANG_SIMULATE_ACC_LEN": "4", "TZ": "UTC", "LD_PRELOAD": "/x.so"}
    different, unknown = serving.differences(plan, running(plan, environ=environ))
    assert different == [
        "LD_PRELOAD is '/x.so', not planned: left from before",
        "SGLANG_SIMULATE_ACC_LEN is '4', not planned: left from before",
    ]
    assert unknown == []
    # What systemd gives to every unit would be there again after a restart.
    different, unknown = serving.differences(
        plan, running(plan, environ=environ, inherited=["SGLANG_SIMULATE_ACC_LEN", "LD_PRELOAD", "PATH"])
    )
    assert different == []
    assert "'systemctl unset-environment SGLANG_SIMULATE_ACC_LEN'" in unknown[1]


def test_every_folder_of_drop_ins_is_looked_into():
    folders = serving.dropin_folders("chat")
    for folder in (
        "/etc/systemd/system/specrig-sglang@chat.service.d",
        "/etc/systemd/system/specrig-sglang@.service.d",
        "/run/systemd/system.control/specrig-sglang@chat.service.d",
        "/etc/systemd/system/service.d",
        # Cut off after the dash.
        "/etc/systemd/system/specrig-.service.d",
        "/usr/local/lib/systemd/system/specrig-sglang@chat.service.d",
    ):
        assert folder in folders


def test_a_unit_file_in_place_of_the_template_is_named():
    template = "/etc/systemd/system/specrig-sglang@.service"
    full = "/etc/systemd/system/specrig-sglang@chat.service"
    assert serving.replaced_line("chat", template, template) is None
    assert serving.replaced_line("chat", None, template) is None
    assert serving.replaced_line("chat", full, template).startswith(f"chat: {full} stands in place of")


def test_secrets_are_compared_and_never_shown():
    plan = planned({"extra_args": ["--api-key", "hunter2"], "env": {"HF_TOKEN": "hunter3"}})
    assert serving.differences(plan, running(plan)) == ([], [])
    other = planned({"extra_args": ["--api-key", "other"], "env": {"HF_TOKEN": "other"}})
    different, _unknown = serving.differences(other, running(plan))
    assert len(different) == 2
    assert "hunter" not in str(different)
    assert "other" not in str(different)


@pytest.mark.parametrize(
    ("unit", "wanted", "action"),
    [
        (None, True, "start"),
        ({"active": "inactive"}, True, "start"),
        ({"active": "failed", "result": "exit-code"}, True, "start"),
        ({"active": "activating", "sub": "auto-restart"}, True, "restart"),
        ({"active": "activating", "sub": "start"}, True, "keep"),
        ({"active": "active"}, False, "stop"),
        ({"active": "activating", "sub": "auto-restart"}, False, "stop"),
        ({"active": "inactive"}, False, "none"),
        (None, False, "none"),
    ],
)
def test_what_is_done_with_a_unit(unit, wanted, action):
    assert serving.decide(planned(), unit, None, wanted)[0] == action


def test_how_a_server_failed_is_told():
    unit = {"active": "failed", "result": "exit-code", "exit_code": 1, "exit_status": 1, "restarts": 3}
    _action, reasons, _unknown = serving.decide(planned(), unit, None, True)
    assert reasons == ["it has failed: exited with status 1; it was started 4 times and its restart limit is reached"]
    oom = {"active": "failed", "result": "oom-kill", "exit_code": 2, "exit_status": 9, "restarts": 0}
    assert "the kernel killed it for want of memory (OOM)" in serving.decide(planned(), oom, None, True)[1][0]


def test_somebody_else_s_drop_in_is_told_from_a_harmless_one():
    text = "[Unit]\nDescription=x\n[Service]\n# Environment=A=1\nNice=5\nEnvironment=CUDA_VISIBLE_DEVICES=1,2,3,4,5\n"
    found = serving.foreign_directives(text)
    assert found == [("Environment", "CUDA_VISIBLE_DEVICES=1,2,3,4,5")]
    line = serving.foreign_message("tp4", "/etc/systemd/system/x.d/override.conf", found)
    assert "/etc/systemd/system/x.d/override.conf sets Environment=CUDA_VISIBLE_DEVICES=1,2,3,4,5" in line
    assert "remove that file" in line
    assert serving.foreign_directives("[Service]\nNice=5\n[Install]\nUser=x\n") == []
    reset = serving.foreign_directives("[Service]\nEnvironmentFile=\n")
    assert "EnvironmentFile= (reset)" in serving.foreign_message("tp4", "/x", reset)


@pytest.mark.parametrize("inventory", ["lab", "rtxpro6000x8"])
def test_every_profile_of_the_inventories_renders_what_sglang_s_flags_take(inventory, repository):
    import yaml

    from specrig.sim import flags

    values = yaml.safe_load((repository / "inventory" / inventory / "group_vars" / "all.yml").read_text())
    parser = argparse.ArgumentParser(exit_on_error=False)
    flags.add_server_arguments(parser)
    flags.add_simulation_arguments(parser)
    settings = {
        "engine": values["sglang_server_engine"],
        "dialects": values.get("sglang_server_dialects"),
        "model_root": values["model_store_guest_path"],
        "listen": values.get("sglang_server_listen", "127.0.0.1"),
    }
    command = values["sglang_server_engine"]["command"]
    for name, profile in values["sglang_server_profiles"].items():
        gpus = list(range(profile["tp"]))
        plan = serving.plan_unit(name, profile, {**PLACED, "gpus": gpus, "guest_gpus": gpus}, settings)
        assert plan["argv"][: len(command)] == command
        parsed = parser.parse_args(plan["argv"][len(command) :])
        assert (parsed.tp_size, parsed.port, parsed.context_length) == (
            profile["tp"],
            profile["port"],
            profile["context_length"],
        )
        assert (parsed.speculative_algorithm is None) == (profile["method"] == "autoregressive")
        assert plan["env"]["CUDA_VISIBLE_DEVICES"] == ",".join(str(gpu) for gpu in gpus)


TABLE = {"chat": {"serve": True}, "tp4": {"serve": False}, "tp8": {"serve": False}}


def test_a_benchmark_s_server_is_stopped_once_no_benchmark_runs():
    look = {"units": {"chat": {"active": "active"}, "tp4": {"active": "active"}, "tp8": {"active": "inactive"}}}
    stop, units, lines = serving.leftovers(TABLE, look, {0})
    assert (stop, units) == (["tp4"], [])
    assert lines == ["tp4: a benchmark left its server running"]


def test_a_running_benchmark_keeps_its_server_unless_production_needs_the_gpus():
    look = {
        "units": {"tp8": {"active": "active"}},
        "processes": {"tp8": {"environ": {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}}},
        "benchmarks": ["specrig-bench-x-0.service"],
    }
    stop, units, lines = serving.leftovers(TABLE, look, set())
    assert (stop, units) == ([], [])
    assert "left alone" in lines[0]
    assert serving.leftovers(TABLE, look, {0}) == (
        ["tp8"],
        ["specrig-bench-x-0.service"],
        ["a killed benchmark (specrig-bench-x-0.service) holds GPUs of production"],
    )
    assert serving.leftovers(TABLE, {}, {0}) == ([], [], [])


@pytest.mark.parametrize(
    ("engine", "note"),
    [
        ({"kind": "sim", "time_scale": 0.45}, "simulated, time scale 0.45"),
        ({"kind": "sim"}, "simulated"),
        ({"kind": "sglang", "time_scale": 0.45}, ""),
        ({"kind": "sglang", "extra_args": ["--device", "cuda"]}, ""),
        ({"kind": "sglang", "extra_args": ["--device", "cpu"]}, "CPU engine, not GPU performance"),
        ({"kind": "sglang", "extra_args": ["--device=cpu"]}, "CPU engine, not GPU performance"),
        ({"kind": "sglang", "extra_args": ["--device", "cpu", "--device", "cuda"]}, ""),
    ],
)
def test_a_rate_is_never_shown_without_what_it_was_measured_on(engine, note):
    settings = {"engine": dict(engine, command=["/opt/engine"]), "model_root": "/srv/models", "listen": "127.0.0.1"}
    placed = {"gpus": [0], "guest_gpus": [0], "numa_nodes": [0], "memory_nodes": [0], "memory_policy": True}
    plan = serving.plan_unit(
        "chat",
        {"model": "m", "tp": 1, "method": "autoregressive", "port": 31001, "context_length": 4096},
        placed,
        settings,
    )
    assert serving.summary_row(plan, "serving", 100.0)["note"] == note
