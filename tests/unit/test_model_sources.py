"""Models from an HTTP server with every fault on demand: right bytes come, or one line that names the file."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import file_server
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specrig.facts import modelsource, modelsource_http
from specrig.facts.modelfiles import ModelError
from specrig.facts.modelsource_http import HttpSource

WEIGHTS = random.Random(4).randbytes(700_000)
FILES = {"config.json": b"{}", "model.safetensors": WEIGHTS, "sub/a b#c.bin": b"x" * 5000, "empty.txt": b""}


def manifest(files: dict[str, bytes]) -> bytes:
    return "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in files.items()).encode()


@pytest.fixture
def mirror() -> Iterator[Any]:
    with file_server.Mirror({f"m/{name}": data for name, data in FILES.items()}) as server:
        server.put("m/MANIFEST.sha256", manifest(FILES))
        yield server


@pytest.fixture
def source(mirror: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> HttpSource:
    monkeypatch.setattr(modelsource_http, "CREDENTIALS_PATH", str(tmp_path / "none.json"))
    return of(mirror)


MADE: list[HttpSource] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while MADE:
        MADE.pop().close()


def of(mirror: Any, retries: int = 3, timeout_s: float = 10.0, **about: Any) -> HttpSource:
    """A source that does not wait between its tries."""
    entry = {"source": f"{mirror.url}/m/", **about}
    made = HttpSource("M", entry, retries=retries, timeout_s=timeout_s, first_pause_s=0.0)
    MADE.append(made)
    return made


def hurried(mirror: Any, retries: int, timeout_s: float) -> HttpSource:
    """A source that has its listing already, and little patience from then on."""
    made = of(mirror, retries=retries)
    made.list()
    made.client.close()
    made.client.timeout_s = timeout_s
    return made


def take(source: HttpSource, path: str, offset: int = 0, end: int | None = None, piece: int = 1 << 16) -> bytes:
    reader, view, found = source.open(path, offset, end), memoryview(bytearray(piece)), bytearray()
    try:
        while count := reader.readinto(view):
            found += view[:count]
    finally:
        reader.close()
    return bytes(found)


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(ModelError) as caught:
        call()
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_a_scheme_chooses_the_source(mirror):
    made = modelsource.source_of("M", {"source": mirror.url + "/m"})
    assert isinstance(made, HttpSource)
    assert made.remote
    assert made.where("a/b") == mirror.url + "/m/a/b"


def test_the_manifest_lists_and_heads_give_the_sizes(mirror, source):
    rows = source.list()
    assert {path: row["size"] for path, row in rows.items()} == {path: len(data) for path, data in FILES.items()}
    assert source.manifest()["config.json"] == hashlib.sha256(b"{}").hexdigest()
    assert len({row["version"] for row in rows.values()}) == 4
    # One request for the listing and one a file: nothing of a file is read.
    assert sorted(row[0] for row in mirror.asked()) == ["GET", *["HEAD"] * 4]
    for path, data in FILES.items():
        assert take(source, path) == data
    assert take(source, "model.safetensors", 1000, 1500) == WEIGHTS[1000:1500]
    assert source.read("model.safetensors", 699_990, 100) == WEIGHTS[-10:]
    assert mirror.asked("GET", "m/model.safetensors")[-2][2] == "bytes=1000-1499"


def test_connections_are_used_again(mirror, source):
    connections = set()
    mirror.server.verify_request = lambda request, address: connections.add(address) or True
    source.list()
    for offset in range(0, 600_000, 50_000):
        take(source, "model.safetensors", offset, offset + 50_000)
    assert len(connections) <= 8


@pytest.mark.parametrize("cut", [0, 1, 65_536, 699_999])
def test_a_cut_connection_goes_on_where_it_was(mirror, source, cut):
    source.list()
    mirror.faults["m/model.safetensors"] = [{"cut": cut}]
    assert take(source, "model.safetensors") == WEIGHTS
    parts = [row[2] for row in mirror.asked("GET", "m/model.safetensors")]
    assert parts == [None, f"bytes={cut}-699999" if cut else None]


def test_a_reset_a_refusal_and_an_overload_are_tried_again(mirror, source):
    source.list()
    mirror.faults["m/model.safetensors"] = [
        {"cut": 300_000, "reset": True},
        {"status": 503, "headers": {"Retry-After": "0"}},
        {"drop": True},
    ]
    assert take(source, "model.safetensors") == WEIGHTS


def test_tries_have_a_bound_and_the_line_says_where(mirror, source):
    source.list()
    mirror.faults["m/model.safetensors"] = [{"cut": 1000}] + [{"cut": 0}] * 50
    line = refused(lambda: take(source, "model.safetensors"))
    assert "/m/model.safetensors: the connection ended early at byte 1000 of 700000, 4 times in a row" in line
    assert len(mirror.asked("GET", "m/model.safetensors")) == 4


def test_a_server_that_stands_still_is_given_up(mirror):
    slow = hurried(mirror, retries=1, timeout_s=0.5)
    mirror.faults["m/model.safetensors"] = [{"stall": 5000}] * 2
    line = refused(lambda: take(slow, "model.safetensors"))
    # What came is kept from one try to the next; on a busy machine nothing may come in time.
    assert re.search(r"no answer within 0.5 s at byte (0|5000|10000) of 700000, 2 times in a row", line)


def test_a_server_that_trickles_is_given_up(mirror):
    slow = hurried(mirror, retries=0, timeout_s=1.0)

    def trickle(handler: Any, content: bytes, fault: dict[str, Any]) -> None:
        for byte in range(len(content)):
            handler.connection.sendall(content[byte : byte + 1])
            if handler.server.mirror.over.wait(0.05):
                return

    handler = mirror.server.RequestHandlerClass
    original = handler.pieces
    try:
        handler.pieces = trickle
        line = refused(lambda: take(slow, "model.safetensors"))
    finally:
        handler.pieces = original
        mirror.over.set()
    assert "less than 1024 bytes a second came" in line


def test_a_file_that_changes_while_it_is_read_is_refused_by_name(mirror, source):
    source.list()
    mirror.faults["m/model.safetensors"] = [{"cut": 5000}, {"change": bytes(700_000)}]
    line = refused(lambda: take(source, "model.safetensors"))
    assert line.startswith(mirror.url + "/m/model.safetensors was changed on the server while it was read")


@pytest.mark.parametrize("tags", [True, False])
def test_a_file_of_another_size_is_refused_by_name(mirror, source, tags):
    mirror.tags = tags
    source.list()
    for size in (600_000, 800_000):
        mirror.put("m/model.safetensors", bytes(size))
        line = refused(lambda: take(source, "model.safetensors", 1000))
        assert "/m/model.safetensors was changed on the server while it was read" in line
    mirror.put("m/model.safetensors", bytes(100))
    line = refused(lambda: take(source, "model.safetensors", 1000))
    assert "was changed on the server" in line
    assert tags or "it no longer has byte 1000" in line


@pytest.mark.parametrize("says", [True, False])
def test_a_server_without_ranges_works_from_the_start_and_it_is_said(mirror, source, says):
    mirror.ranges = False
    source.list()
    assert source.segment_bytes > 1 << 50, "a file is one segment, or its start would come once for each"
    mirror.faults["m/model.safetensors"] = [{"cut": 300_000}]
    assert take(source, "model.safetensors") == WEIGHTS
    assert take(source, "model.safetensors", 650_000) == WEIGHTS[650_000:]
    (note,) = source.notes
    assert "gives no ranges" in note


def test_ranges_that_nobody_announces_are_found(mirror, source):
    mirror.says_ranges = False
    source.list()
    assert source.segment_bytes == modelsource.Source.segment_bytes
    assert source.notes == []


@pytest.mark.parametrize("how", ["head", "says_length"])
def test_a_server_that_does_not_answer_head_or_gives_no_length(mirror, source, how):
    setattr(mirror, how, False)
    assert {path: row["size"] for path, row in source.list().items()} == {p: len(data) for p, data in FILES.items()}
    assert take(source, "model.safetensors") == WEIGHTS


def test_a_body_in_chunks(mirror, source):
    source.list()
    mirror.faults["m/model.safetensors"] = [{"chunked": True, "cut": 9500}, {"chunked": True}]
    assert take(source, "model.safetensors") == WEIGHTS


def test_no_length_anywhere_is_refused(mirror, source):
    mirror.ranges, mirror.chunked, mirror.says_length = False, True, False
    assert "does not say how long it is" in refused(source.list)


def test_less_than_was_asked_for_is_no_fault(mirror, source):
    source.list()
    mirror.faults["m/model.safetensors"] = [{"part": 100}, {"part": 100_000}, {"part": 1}]
    assert take(source, "model.safetensors", 7) == WEIGHTS[7:]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"shift": 1}, "its ranges cannot be relied upon"),
        ({"total": 699_999}, "was changed on the server"),
        ({"length": 5}, "announces 695005 bytes for a part of 695000"),
        ({"length": -5}, "announces 694995 bytes for a part of 695000"),
        ({"coding": "gzip"}, "comes compressed (gzip) though nobody asked"),
        ({"status": 404}, "is not on the server (404), and its manifest names it"),
        ({"status": 401}, "the server wants credentials (401); name them for 127.0.0.1"),
        ({"status": 418}, "the server answered 418"),
        ({"page": True}, "is a web page instead of the file"),
        ({"status": 302, "headers": {"Location": "ftp://elsewhere/x"}}, "is redirected to what is no http(s) URL"),
        ({"status": 302, "headers": {"Location": "http://a:b:c/"}}, "is redirected to what is no http(s) URL"),
    ],
)
def test_what_another_try_does_not_cure_is_one_line_that_names_the_file(mirror, source, fault, said):
    source.list()
    mirror.faults["m/model.safetensors"] = [fault] * 20
    line = refused(lambda: take(source, "model.safetensors", 5000))
    assert said in line
    assert line.startswith(mirror.url + "/m/model.safetensors")
    assert len(mirror.asked("GET", "m/model.safetensors")) == 1


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"status": 500}, "the server answered 500 Internal Server Error"),
        ({"drop": True}, "the connection was closed without an answer"),
        ({"raw": b"SSH-2.0-OpenSSH_9.2\r\n\r\n"}, "what came is no HTTP"),
        # Cut within the head: the number is the half of one.
        ({"raw": b"HTTP/1.1 200 OK\r\nContent-Length: 70"}, "it announces 70 bytes and had 700000 when it was listed"),
        ({"length": 500_000, "cut": 10}, "it announces 1200000 bytes and had 700000 when it was listed"),
    ],
)
def test_what_stays_after_all_tries_is_one_line(mirror, source, fault, said):
    source.list()
    mirror.faults["m/model.safetensors"] = [fault] * 20
    line = refused(lambda: take(source, "model.safetensors"))
    assert said in line
    assert line.startswith(mirror.url + "/m/model.safetensors")


def test_a_listing_that_is_a_web_page_or_not_there(mirror, source):
    mirror.faults["m/MANIFEST.sha256"] = [{"page": True}]
    assert "MANIFEST.sha256 is a web page instead of the file" in refused(source.list)
    del mirror.files["m/MANIFEST.sha256"]
    line = refused(source.list)
    assert "m/MANIFEST.sha256 is not there (404); make it with sha256sum in that folder" in line
    assert "manifest of model M" in line


def test_a_page_at_a_files_name_is_refused_when_it_is_listed(mirror, source):
    mirror.kinds["m/config.json"] = "text/html"
    assert source.list()["config.json"]["size"] == 2, "what a server calls a page and is none is taken"
    assert take(source, "config.json") == b"{}"
    mirror.put("m/config.json", file_server.PAGE)
    assert "m/config.json is a web page instead of the file" in refused(of(mirror).list)


def test_a_file_that_the_manifest_names_and_nobody_has(mirror, source):
    del mirror.files["m/sub/a b#c.bin"]
    assert "/m/sub/a b#c.bin is not on the server (404), and its manifest names it" in refused(source.list)


def test_nobody_at_the_port_is_a_source_that_is_gone():
    with file_server.Mirror({}) as short:
        pass
    made = of(short, retries=1)
    with pytest.raises(modelsource.SourceGone) as caught:
        made.list()
    assert "connection refused, 2 times in a row; look after the server 127.0.0.1" in str(caught.value)


def test_without_patience_there_is_one_try_and_any_failure_is_a_source_that_is_gone(mirror, source):
    for fault in ({"status": 503}, {"status": 403}, {"page": True}):
        mirror.faults["m/MANIFEST.sha256"] = [fault]
        with pytest.raises(modelsource.SourceGone):
            source.manifest(patient=False)
    assert len(mirror.asked()) == 3
    assert source.manifest(patient=False) == {p: hashlib.sha256(data).hexdigest() for p, data in FILES.items()}


def test_a_manifest_of_this_machine_is_used_instead(mirror, tmp_path):
    own = tmp_path / "mine.sha256"
    own.write_bytes(manifest({"config.json": b"{}", ".hidden": b""}))
    made = of(mirror, manifest=str(own))
    assert set(made.list()) == {"config.json"}
    assert not mirror.asked("GET")
    own.unlink()
    assert "mine.sha256 of model M cannot be read" in refused(of(mirror, manifest=str(own)).list)
    assert "is no absolute path" in refused(lambda: of(mirror, manifest="mine.sha256"))


def test_redirects_are_followed_and_have_a_bound(mirror, source):
    with file_server.Mirror({"far": WEIGHTS}) as other:
        other.tags = lambda path, content: mirror.tag("m/model.safetensors", content)
        mirror.faults["m/model.safetensors"] = [
            {"status": code, "headers": {"Location": where}}
            for code, where in ((301, "/m/moved"), (302, other.url + "/far"), (307, other.url + "/far"))
        ]
        mirror.put("m/moved", WEIGHTS)
        source.list()
        for _count in range(3):
            assert take(source, "model.safetensors", 10) == WEIGHTS[10:]
        assert len(other.asked("GET", "far")) == 2
        mirror.faults["m/config.json"] = [{"status": 302, "headers": {"Location": "config.json"}}] * 50
        assert "config.json is redirected more than 5 times" in refused(lambda: take(source, "config.json"))


def secret_file(path: Path, content: Any, mode: int = 0o600) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    path.chmod(mode)
    return str(path)


def test_credentials_go_to_their_server_alone(mirror, tmp_path):
    mirror.credentials = "Bearer s3cret"
    with file_server.Mirror({"far": b"{}"}) as other:
        other.tags = lambda path, content: mirror.tag("m/config.json", content)
        host = mirror.url.removeprefix("http://")
        made = of(mirror, credentials_file=secret_file(tmp_path / "c", {host: {"token": "s3cret"}}))
        assert len(made.list()) == 4
        mirror.faults["m/config.json"] = [{"status": 302, "headers": {"Location": other.url + "/far"}}]
        assert take(made, "config.json") == b"{}"
        assert [row[3] for row in other.asked()] == [None]
    wrong = of(mirror, credentials_file=secret_file(tmp_path / "w", {host: {"username": "u", "password": "s3cret"}}))
    line = refused(wrong.list)
    assert "the server refuses the credentials it was given (401); correct those of 127.0.0.1" in line
    assert "s3cret" not in line
    assert mirror.asked()[-1][3] == "Basic dTpzM2NyZXQ="
    assert "wants credentials (401)" in refused(of(mirror).list)


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        ({"h": {"token": "s3cret"}}, 0o640, "has mode 0640; expected 0600"),
        ('{"h": {"token": "s3cret"}', 0o600, "cannot be used; expected"),
        ({"h": "s3cret"}, 0o600, "cannot be used; expected"),
        ({"h": {"token": "s3cret\r\nX: y"}}, 0o600, "cannot be used; expected"),
        ({"h": {"username": "s3cret"}}, 0o600, "cannot be used; expected"),
    ],
)
def test_a_file_of_credentials_that_cannot_be_used(mirror, tmp_path, content, mode, said):
    line = refused(lambda: of(mirror, credentials_file=secret_file(tmp_path / "c", content, mode)))
    assert said in line
    assert "s3cret" not in line


@pytest.mark.parametrize(
    "url",
    [
        "http://me:s3cret@server/m",
        "https://s3cret@server/m",
        "http://server/m?token=s3cret",
        "http://server:s3cret/m",
        "http://[s3cret/m",
        "http://server/a b",
        "http:///m",
        "http://server:0/m",
    ],
)
def test_a_url_that_carries_a_secret_or_is_none_is_refused_without_showing_it(url):
    line = refused(lambda: modelsource.source_of("M", {"source": url}))
    assert "model M" in line
    assert "s3cret" not in line


def test_tls_trusts_the_systems_cas_and_a_file(certificate, mirror, tmp_path):
    files = {f"m/{name}": data for name, data in FILES.items()} | {"m/MANIFEST.sha256": manifest(FILES)}
    with file_server.Mirror(files, certificate=certificate) as safe:
        trusting = of(safe, ca_file=str(certificate))
        assert len(trusting.list()) == 4
        safe.faults["m/model.safetensors"] = [{"cut": 100_000}, {"cut": 1, "reset": True}]
        assert take(trusting, "model.safetensors") == WEIGHTS
        downgrade = {"status": 302, "headers": {"Location": mirror.url + "/m/model.safetensors"}}
        safe.faults["m/model.safetensors"] = [downgrade]
        line = refused(lambda: take(trusting, "model.safetensors"))
        assert "is redirected from https to plain http at 127.0.0.1, which is refused" in line
        doubting = of(safe)
        line = refused(doubting.list)
        assert "has a certificate that this machine does not trust" in line
        assert "name the CA's file as ca_file of model M" in line
    nothing = tmp_path / "empty.pem"
    nothing.write_text("")
    assert "cannot be used" in refused(of(safe, ca_file=str(nothing)).list)


def test_plain_http_behind_https_is_one_line(mirror):
    made = HttpSource("M", {"source": mirror.url.replace("http:", "https:") + "/m"}, retries=1, first_pause_s=0.0)
    assert "does not speak TLS as expected" in refused(made.list)


FAULTS = st.one_of(
    st.builds(lambda byte: {"cut": byte}, st.integers(0, 40_000)),
    st.builds(lambda byte: {"cut": byte, "reset": True}, st.integers(0, 40_000)),
    st.builds(lambda byte: {"cut": byte, "chunked": True}, st.integers(0, 40_000)),
    st.builds(lambda size: {"part": size}, st.integers(1, 40_000)),
    st.builds(lambda byte: {"part": 10_000, "cut": byte}, st.integers(0, 9_999)),
    st.sampled_from([{"drop": True}, {"status": 503}, {"status": 429, "headers": {"Retry-After": "0"}}, {}]),
)
DAMAGE = st.sampled_from(
    [{"page": True}, {"status": 404}, {"shift": 3}, {"length": 7}, {"length": -7}, {"change": b"other"}]
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    schedule=st.lists(FAULTS, max_size=8),
    damage=st.one_of(st.none(), st.tuples(st.integers(0, 7), DAMAGE)),
    ranges=st.booleans(),
    tags=st.booleans(),
    offset=st.integers(0, 39_999),
    length=st.one_of(st.none(), st.integers(1, 40_000)),
    piece=st.sampled_from([512, 10_000, 65_536]),
)
def test_any_schedule_of_cuts_gives_the_right_bytes_or_a_line_that_names_the_file(
    mirror, schedule, damage, ranges, tags, offset, length, piece
):
    data = WEIGHTS[:40_000]
    mirror.put("m/part.bin", data)
    mirror.put("m/MANIFEST.sha256", manifest({"part.bin": data}))
    mirror.faults.clear()
    mirror.ranges, mirror.tags = ranges, tags
    made = of(mirror, retries=8)
    try:
        made.list()
        faults = list(schedule)
        if damage:
            faults.insert(min(damage[0], len(faults)), damage[1])
        mirror.faults["m/part.bin"] = [dict(fault) for fault in faults]
        end = None if length is None else min(offset + length, len(data))
        found, line = None, ""
        try:
            found = take(made, "part.bin", offset, end, piece)
        except ModelError as problem:
            line = str(problem)
        # Fewer faults than tries that another try cures never end in an error.
        assert found == data[offset:end] or (damage and "/m/part.bin" in line and "\n" not in line), line
    finally:
        made.close()


# What follows goes through the module that stages.


def safetensors(data: bytes) -> bytes:
    header = json.dumps({"w": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    return struct.pack("<Q", len(header)) + header + data


@pytest.fixture
def served() -> Iterator[Any]:
    files = {"config.json": b"{}", "a.safetensors": safetensors(WEIGHTS), "b.safetensors": safetensors(WEIGHTS[::-1])}
    with file_server.Mirror({f"m/{name}": data for name, data in files.items()}) as server:
        server.put("m/MANIFEST.sha256", manifest(files))
        server.model = files
        yield server


@pytest.fixture
def stage(run: Callable[..., Any], served: Any, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def call(**more: Any) -> dict[str, Any]:
        return run("model_stage", **parameters(served, tmp_path, **more))

    return call


def parameters(served: Any, tmp_path: Path, **about: Any) -> dict[str, Any]:
    (tmp_path / "ram").mkdir(exist_ok=True)
    return {
        "models": {"M": {"source": served.url + "/m", **about}},
        "target": str(tmp_path / "ram"),
        "state_dir": str(tmp_path / "state"),
        "progress_dir": str(tmp_path / "progress"),
        "streams": 2,
    }


def in_ram(tmp_path: Path) -> dict[str, bytes]:
    rows = (tmp_path / "ram" / "M").rglob("*")
    return {path.name: path.read_bytes() for path in rows if not path.name.startswith(".") and path.is_file()}


def test_a_model_is_staged_from_a_server_and_then_asks_one_question(stage, served, tmp_path):
    served.faults["m/a.safetensors"] = [{}, {"cut": 100_000}]
    done = stage()
    assert done["changed"] is True, done
    assert in_ram(tmp_path) == served.model
    assert done["specrig"]["gates"][0]["message"] == "staged, sha256 as in the manifest"
    before = len(served.asked())
    again = stage()
    assert (again["changed"], again["complete"]) == (False, True)
    assert [row[:2] for row in served.asked()[before:]] == [("GET", "m/MANIFEST.sha256")]
    assert again["specrig"]["gates"][0]["status"] == "pass"


def test_a_proven_model_needs_no_server(stage, served, run, tmp_path):
    stage()
    served.faults["m/MANIFEST.sha256"] = [{"status": 503}]
    gone = stage()
    assert (gone["changed"], gone["complete"]) == (False, True)
    assert any("is not there now" in note for note in gone["specrig"]["notes"])


def test_a_new_version_on_the_server_is_staged(stage, served, tmp_path):
    stage()
    served.model["config.json"] = b'{"new": 1}'
    served.put("m/config.json", b'{"new": 1}')
    served.put("m/MANIFEST.sha256", manifest(served.model))
    done = stage()
    assert done["changed"] is True
    assert done["models"]["M"]["copied"] == ["config.json"]
    assert in_ram(tmp_path) == served.model


def test_wrong_content_is_refused_by_name_and_gets_no_name(stage, served, tmp_path):
    data = bytearray(served.model["b.safetensors"])
    data[-1] ^= 1
    served.put("m/b.safetensors", bytes(data))
    failed = stage()
    assert failed["failed"]
    assert f"{served.url}/m/b.safetensors has sha256" in failed["msg"]
    assert "its content is wrong" in failed["msg"]
    assert "b.safetensors" not in in_ram(tmp_path)


def test_a_pointer_instead_of_weights_is_refused_before_anything_is_copied(stage, served, tmp_path):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 700000\n"
    served.model["b.safetensors"] = pointer
    served.put("m/b.safetensors", pointer)
    served.put("m/MANIFEST.sha256", manifest(served.model))
    failed = stage()
    assert "b.safetensors is a Git LFS pointer" in failed["msg"]
    assert in_ram(tmp_path) == {}


def test_killed_in_the_middle_what_is_proven_is_not_asked_for_again(stage, served, repository, tmp_path):
    served.model["z.safetensors"] = safetensors(WEIGHTS * 2)
    served.put("m/z.safetensors", served.model["z.safetensors"])
    served.put("m/MANIFEST.sha256", manifest(served.model))
    # Its header comes, and then only half of its content, and then nothing for long.
    served.faults["m/z.safetensors"] = [{}, {"stall": 700_000}]
    arguments = json.dumps(
        {"ANSIBLE_MODULE_ARGS": {**parameters(served, tmp_path), "_ansible_remote_tmp": str(tmp_path)}}
    )
    staging = subprocess.Popen(
        [sys.executable, "-m", "ansible_collections.specrig.host.plugins.modules.model_stage"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(repository / ".collections")},
        text=True,
    )
    assert staging.stdin is not None
    staging.stdin.write(arguments)
    staging.stdin.close()
    deadline = time.monotonic() + 60
    while not {"config.json", "a.safetensors", "b.safetensors"} <= set(in_ram(tmp_path)):
        assert time.monotonic() < deadline, in_ram(tmp_path).keys()
        assert staging.poll() is None
        time.sleep(0.05)
    staging.send_signal(signal.SIGKILL)
    staging.wait()
    assert "z.safetensors" not in in_ram(tmp_path)
    before = len(served.asked())
    done = stage()
    assert done["changed"] is True, done
    assert in_ram(tmp_path) == served.model
    assert done["models"]["M"]["copied"] == ["z.safetensors"]
    bodies = {
        row[1] for row in served.asked()[before:] if row[0] == "GET" and not (row[2] or "").startswith("bytes=0-")
    }
    assert not {"m/a.safetensors", "m/b.safetensors"} & bodies


def test_a_server_without_ranges_is_said_in_the_result(stage, served, tmp_path):
    served.ranges = False
    served.faults["m/a.safetensors"] = [{}, {}, {"cut": 200_000}]
    done = stage()
    assert done["changed"] is True, done
    assert in_ram(tmp_path) == served.model
    assert [note for note in done["specrig"]["notes"] if "gives no ranges" in note]
