"""Options by release: what was renamed, what is short for something, what an engine is."""

from __future__ import annotations

import pytest

from specrig.facts import dialects, engineflags


def lines(words, version, status, complete=True):
    return [row["message"] for row in engineflags.check(words, version, complete) if row["status"] == status]


@pytest.mark.parametrize(
    ("version", "status", "words"),
    [
        ("0.5.13", None, None),
        ("0.5.14", "note", "--cuda-graph-max-bs still works in sglang 0.5.14"),
        ("0.5.19", "note", "since 0.5.14 it is --cuda-graph-max-bs-decode"),
        (
            "0.5.20",
            "fail",
            "--cuda-graph-max-bs is gone in sglang 0.5.20 (it could be --cuda-graph-max-bs-decode or "
            "--cuda-graph-max-bs-prefill); since 0.5.14 it is --cuda-graph-max-bs-decode",
        ),
        ("0.5.23", "fail", "write that"),
        ("0.6.1", "fail", "is gone in sglang 0.6.1"),
        (None, "note", "the release of this engine is not known"),
    ],
)
def test_a_renamed_option_over_the_releases(version, status, words):
    rows = engineflags.check(["--cuda-graph-max-bs", "64"], version)
    assert [row["status"] for row in rows] == ([] if status is None else [status])
    assert words is None or words in rows[0]["message"]


def test_every_rename_is_told_and_its_new_name_is_taken():
    """Each old name is there before its time, and one line names the new one after it."""
    for old, new, since, _more in engineflags.RENAMED:
        name = new.split()[0]
        assert engineflags.span(old), f"no surveyed release has {old}"
        assert name in engineflags.options(since), f"{since} has no {name}"
        assert name in engineflags.options("0.5.23")
        for version in ("0.5.23", since):
            rows = engineflags.check([old], version)
            assert [name in row["message"] for row in rows] == [True], (old, version)


def test_the_mamba_strategy_is_named():
    assert lines(["--mamba-scheduler-strategy=extra_buffer"], "0.5.23", "fail") == [
        "--mamba-scheduler-strategy is gone in sglang 0.5.23; since 0.5.14 it is --mamba-radix-cache-strategy: write "
        "that"
    ]
    assert lines(["--mamba-radix-cache-strategy", "auto"], "0.5.13.post1", "fail") == [
        "--mamba-radix-cache-strategy is not there in sglang 0.5.13.post1, which calls it --mamba-scheduler-strategy; "
        "it was renamed in 0.5.14"
    ]


def test_beginnings_of_options():
    """One option that begins so is a note, several are an error: the parser's own rule."""
    assert lines(["--tp", "4"], "0.5.23", "note") == [
        "--tp is short for --tp-size in sglang 0.5.23 and breaks with the next option that begins so; write it out"
    ]
    (line,) = lines(["--cuda-graph-bs", "1"], "0.5.23", "fail")
    assert "--cuda-graph-bs-decode or --cuda-graph-bs-prefill" in line
    (line,) = lines(["--speculative-dflash"], "0.5.11", "fail")
    assert "--speculative-dflash-block-size or --speculative-dflash-draft-window-size" in line


def test_options_that_a_release_lacks():
    assert lines(["--reasonning-parser", "qwen3"], "0.5.23", "fail") == [
        "sglang 0.5.23 has no --reasonning-parser; did you mean --reasoning-parser?"
    ]
    assert lines(["--speculative-dflash-block-size", "16"], "0.5.9", "fail") == [
        "sglang 0.5.9 has no --speculative-dflash-block-size; it is there from 0.5.11 on"
    ]
    assert lines(["--torchao-config", "int8wo"], "0.5.23", "fail") == [
        "sglang 0.5.23 has no --torchao-config; it is there up to 0.5.17"
    ]
    assert lines(["--of-our-own"], "0.5.23", "fail", complete=False) == []
    assert engineflags.check(["--anything"], None) == []


def test_algorithms_by_release():
    assert lines(["--speculative-algorithm", "DFLASH"], "0.5.10", "fail") == [
        "sglang 0.5.10 has no speculative algorithm DFLASH; it is there from 0.5.11 on"
    ]
    assert engineflags.check(["--speculative-algorithm", "DFLASH"], "0.5.11") == []
    assert lines(["--speculative-algorithm=DFLSH"], "0.5.23", "note") == [
        "sglang 0.5.23 has no speculative algorithm DFLSH of its own; did you mean DFLASH?"
    ]


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ({"kind": "sim"}, ("0.5.23", False)),
        ({"kind": "sglang", "install": {"requirements": ["sglang[all]==0.5.12.post1"]}}, ("0.5.12.post1", True)),
        (
            {"install": {"steps": [{"requirements": ["torch==2.13.0"]}, {"requirements": ["sglang==0.5.23"]}]}},
            ("0.5.23", True),
        ),
        ({"install": {"steps": [{"requirements": [{"kind": "spec", "text": "sglang==0.5.23"}]}]}}, ("0.5.23", True)),
        ({"install": {"requirements": ["/srv/wheels/sglang-0.5.18-cp311-cp311-linux_x86_64.whl"]}}, ("0.5.18", False)),
        ({"install": {"requirements": ["sglang-0.5.23+tree-py3-none-any.whl"]}}, (None, False)),
        (
            {"install": {"requirements": ["sglang @ git+https://example.org/sglang@tree"]}, "version": "0.5.23"},
            (None, False),
        ),
        ({"install": {"requirements": ["sglang>=0.5.20"]}, "version": "0.5.22"}, ("0.5.22", True)),
        ({"install": {"requirements": ["sglang==0.5.24.dev3"]}}, (None, False)),
        ({"install": {"requirements": ["sglang-router==0.3.0"]}}, (None, False)),
        ({"kind": "sglang", "command": ["/opt/x/bin/python"]}, (None, False)),
        (None, (None, False)),
    ],
)
def test_which_release_an_engine_is(engine, expected):
    assert engineflags.engine_release(engine) == expected


PINNED = {"kind": "sglang", "install": {"requirements": ["sglang==0.5.23"]}}


def test_a_method_that_a_release_has_not():
    tree = dialects.resolve("ddtree", 15)
    problems, notes = engineflags.judge(PINNED, tree, ["--speculative-ddtree-budget", "15"])
    assert notes == []
    assert problems == [
        "method ddtree (dialect pr-29907) is in no release of SGLang, and the engine is sglang 0.5.23, which has no "
        "--speculative-ddtree-budget; install sgl-project/sglang pull request 29907 (an engine of its own in "
        "sglang_server_engines, with a git reference or a wheel), or choose another dialect"
    ]
    old = {"install": {"requirements": ["sglang==0.5.10.post1"]}}
    problems, _notes = engineflags.judge(old, dialects.resolve("dflash", None), [])
    assert problems == [
        "method dflash (dialect sglang) needs sglang >=0.5.11, and the engine is 0.5.10.post1; install that, or choose "
        "another method"
    ]
    newer = {"install": {"requirements": ["sglang==0.6.1"]}}
    assert engineflags.judge(newer, tree, ["--speculative-ddtree-budget", "15"]) == (
        [],
        ["method ddtree (dialect pr-29907) is in no release of SGLang up to 0.5.23; whether 0.6.1 has it is not known"],
    )
    branch = {"install": {"requirements": ["git+https://example.org/sglang@tree"]}}
    assert engineflags.judge(branch, tree, ["--speculative-ddtree-budget", "15"]) == ([], [])
    assert engineflags.judge({"kind": "sim"}, tree, ["--speculative-ddtree-budget", "15"]) == ([], [])


@pytest.mark.parametrize(
    ("version", "wanted", "met"),
    [
        ("0.5.11", ">=0.5.11", True),
        ("0.5.10.post1", ">=0.5.11", False),
        ("0.5.20", ">=0.5.11,<0.5.20", False),
        ("0.5.19", ">=0.5.11, <0.5.20", True),
        ("0.5.23", "branch", False),
        ("0.5.24.dev1", ">=0.5.11", None),
        (None, "branch", None),
    ],
)
def test_requirements_on_releases(version, wanted, met):
    assert engineflags.satisfies(version, wanted) is met
