"""Models of a hub: the real huggingface_hub against a local server of its API, and what the hub's metadata proves."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hub_server
import pytest

from specrig.facts import hubworker, modelhub, stageprogress
from specrig.facts.modelfiles import ModelError

COMMIT, NEXT = "0123456789abcdef0123456789abcdef01234567", "f" * 40
REPO = "lab/draft"
NOISE = random.Random(5).randbytes(300_000)
FILES = {
    ".gitattributes": b"*.safetensors filter=lfs",
    "README.md": b"# noise",
    "config.json": b"{}",
    "model.safetensors": NOISE,
    "sub/weights [1].bin": NOISE[:5000],
}
MODEL = {name: FILES[name] for name in ("README.md", "config.json", "model.safetensors", "sub/weights [1].bin")}


@pytest.fixture
def hub() -> Iterator[Any]:
    newer = {**FILES, "config.json": b'{"new": 1}'}
    with hub_server.Hub({REPO: {COMMIT: dict(FILES), NEXT: newer}}) as running:
        yield running


@pytest.fixture
def parameters(hub: Any, tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "cache").mkdir()
    return {
        "models": {"M": {"source": f"hf:{REPO}", "revision": COMMIT}, "other": {"source": "/srv/models/other"}},
        "cache": str(tmp_path / "cache"),
        "python": sys.executable,
        "endpoint": hub.url,
        "progress_dir": str(tmp_path / "progress"),
    }


@pytest.fixture
def fetch(run: Callable[..., Any], parameters: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    module = "ansible_collections.specrig.host.plugins.modules.model_fetch"

    def call(about: dict[str, Any] | None = None, check: bool = False, **more: Any) -> dict[str, Any]:
        given = {**parameters, **more}
        if about is not None:
            given["models"] = {"M": {**parameters["models"]["M"], **about}}
        __import__(module)
        monkeypatch.setattr(sys.modules[module], "FIRST_PAUSE_S", 0.0)
        return run("model_fetch", check=check, **given)

    return call


def whole(tmp_path: Path, name: str = "M") -> dict[str, bytes]:
    folder = tmp_path / "cache" / "folders" / name
    rows = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in rows}


def sums(files: dict[str, bytes]) -> bytes:
    return "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in sorted(files.items())).encode()


def refused(result: dict[str, Any]) -> str:
    assert result.get("failed"), result
    line = str(result["msg"])
    assert "\n" not in line
    assert "Traceback" not in line
    return line


def test_a_model_comes_once_proven_and_then_asks_nothing(fetch, hub, tmp_path):
    look = fetch(download=False)
    assert (look["changed"], look["complete"], look["missing"]) == (False, False, ["M"])
    check = fetch(check=True)
    assert (check["changed"], check["missing"]) == (True, ["M"])
    assert "would download model M from lab/draft" in check["specrig"]["changed"]
    assert hub.asked() == []

    done = fetch()
    assert (done["changed"], done["missing"]) == (True, []), done
    assert whole(tmp_path) == {**MODEL, "MANIFEST.sha256": sums(MODEL)}
    row = done["models"]["M@hub"]
    assert (row["files"], row["bytes"]) == (4, 305_009)
    assert sorted(row["fetched"]) == sorted(MODEL)
    progress = json.loads((tmp_path / "progress" / "M@hub.json").read_text())
    assert (progress["state"], progress["bytes_done"], progress["bytes_total"]) == ("done", 305_009, 305_009)
    assert stageprogress.text(stageprogress.parse(progress)).startswith("model M@hub: downloaded, 305 kB in ")

    before = len(hub.asked())
    again = fetch()
    assert (again["changed"], again["complete"]) == (False, True)
    assert len(hub.asked()) == before
    assert again["models"]["M@hub"]["folder"] == str(tmp_path / "cache/folders/M")
    # The bytes are on the disk once.
    (blob,) = (tmp_path / "cache/models--lab--draft/blobs").glob(hashlib.sha256(NOISE).hexdigest())
    assert blob.stat().st_ino == (tmp_path / "cache/folders/M/model.safetensors").stat().st_ino


def test_the_stage_takes_the_folder_with_its_manifest(fetch, run, tmp_path):
    fetch(about={"exclude": ["*.safetensors"]})
    (tmp_path / "ram").mkdir()
    about = modelhub.local("M", {"source": f"hf:{REPO}", "revision": COMMIT, "exclude": ["x"]}, str(tmp_path / "cache"))
    assert about == {"source": str(tmp_path / "cache/folders/M"), "revision": COMMIT}
    places = {"state_dir": str(tmp_path / "state"), "progress_dir": str(tmp_path / "progress")}
    done = run("model_stage", models={"M": about}, target=str(tmp_path / "ram"), **places)
    assert done["changed"] is True, done
    assert done["specrig"]["gates"][0]["message"] == "staged, sha256 as in the manifest"
    assert (tmp_path / "ram/M/sub/weights [1].bin").read_bytes() == NOISE[:5000]


def test_a_new_commit_brings_only_what_changed(fetch, hub, tmp_path):
    fetch()
    before = len(hub.cdn.asked())
    done = fetch(about={"revision": NEXT})
    assert done["changed"] is True, done
    assert whole(tmp_path)["config.json"] == b'{"new": 1}'
    assert len(hub.cdn.asked()) == before, "large files are the same at both commits"
    # And back again, without a request: the cache has both.
    asked = len(hub.asked())
    assert fetch()["changed"] is True
    assert whole(tmp_path)["config.json"] == b"{}"
    assert len(hub.asked()) == asked


def test_patterns_choose_and_another_choice_is_another_model(fetch, tmp_path):
    fetch(about={"include": ["*.json", "sub/*"], "exclude": ["*.md"]})
    assert set(whole(tmp_path)) == {"config.json", "sub/weights [1].bin", "MANIFEST.sha256"}
    done = fetch(about={"exclude": ["*.md"]})
    assert done["models"]["M@hub"]["fetched"] == ["model.safetensors"]
    assert "README.md" not in whole(tmp_path)
    assert "has no file at" in refused(fetch(about={"include": ["*.gguf"]}))


def test_content_that_is_not_what_the_hub_says_is_refused_by_name(fetch, hub, tmp_path):
    bad = bytes(300_000)
    hub.cdn.put(hashlib.sha256(NOISE).hexdigest(), bad)
    hub.sent["config.json"] = b"[]"
    assert "config.json of lab/draft has git blob" in refused(fetch())
    hub.sent.clear()
    line = refused(fetch())
    assert f"model.safetensors of lab/draft has sha256 {hashlib.sha256(bad).hexdigest()} on this disk" in line
    assert f"and {hashlib.sha256(NOISE).hexdigest()} on the hub at 0123456789ab" in line
    assert whole(tmp_path) == {}
    hub.cdn.put(hashlib.sha256(NOISE).hexdigest(), NOISE)
    done = fetch()
    assert done["models"]["M@hub"]["fetched"] == ["model.safetensors"], "what was proven stays"
    assert whole(tmp_path) == {**MODEL, "MANIFEST.sha256": sums(MODEL)}


def test_a_file_that_changes_on_the_disk_is_found_and_comes_again(fetch, hub, tmp_path):
    fetch()
    place = tmp_path / "cache/folders/M/model.safetensors"
    about = place.stat()
    with place.open("r+b") as handle:
        handle.write(b"damage")
    # With another time it is not whole any more; with the old one only reading it tells.
    os.utime(place, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert fetch()["complete"] is True
    checked = fetch(verify=True)
    assert checked["changed"] is True
    assert checked["specrig"]["found"] == ["model M: model.safetensors is not what it was on the disk"]
    assert whole(tmp_path)["model.safetensors"] == NOISE
    sound = fetch(verify=True)
    assert sound["changed"] is False
    assert "4 files read again" in sound["specrig"]["notes"][0]
    place.write_bytes(b"cut")
    assert fetch(download=False)["missing"] == ["M"]
    assert fetch()["models"]["M@hub"]["fetched"] == ["model.safetensors"]
    assert whole(tmp_path)["model.safetensors"] == NOISE


def answering(tmp_path: Path, **answer: Any) -> str:
    """An interpreter that gives one answer, whatever it is asked."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\nwhile read line; do echo '{json.dumps(answer)}'; done\n")
    path.chmod(0o755)
    return str(path)


def test_without_the_hub_what_is_whole_stays_and_what_is_not_is_one_line(fetch, hub, tmp_path):
    fetch()
    away = fetch(endpoint="http://127.0.0.1:9", python="/nonexistent")
    assert (away["changed"], away["complete"]) == (False, True)
    # The library's own patience is half a minute, so its word is given here.
    python = answering(tmp_path, error="network", text="connection refused")
    line = refused(fetch(about={"revision": NEXT}, python=python))
    assert f"{hub.url} cannot be reached (connection refused); look after the way to it, what is whole is kept" in line


def test_the_librarys_errors_are_told_apart(hub):
    import httpx2
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url

    def raised(make: Callable[[], Any]) -> Exception:
        try:
            make()
        except Exception as problem:
            return problem
        raise AssertionError("nothing was raised")

    def wrapped() -> None:
        raise errors.LocalEntryNotFoundError("not found") from httpx2.ConnectError("connection refused")

    network = raised(wrapped)
    assert hubworker.kind_of(network, errors) == ("network", None)
    assert hubworker.words(network) == "connection refused"
    assert hubworker.kind_of(httpx2.ReadTimeout("slow"), errors) == ("network", None)
    assert hubworker.kind_of(OSError(28, "No space left on device"), errors) == ("space", None)
    assert hubworker.kind_of(RuntimeError("?"), errors) == ("other", None)
    for fault, kind in (
        ({"status": 403}, ("refused", 403)),
        ({"status": 400}, ("status", 400)),
        ({"status": 404, "code": "EntryNotFound"}, ("entry", 404)),
    ):
        hub.faults["HEAD", f"{REPO}/resolve/{COMMIT}/config.json"] = [fault]
        url = hf_hub_url(REPO, "config.json", revision=COMMIT, endpoint=hub.url)
        problem = raised(lambda url=url: get_hf_file_metadata(url, token=False))
        assert hubworker.kind_of(problem, errors) == kind


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"error": "library", "text": "No module named 'huggingface_hub'"}, "provision the host, which installs it"),
        ({"error": "status", "status": 503, "text": "x"}, "answered 503, 2 times in a row; try again later"),
        ({"error": "space", "text": "x"}, "the disk of "),
        ({"error": "disabled", "text": "x"}, "the hub has taken access to it away"),
        ({"error": "entry", "text": "x"}, "lists a file and does not give it (404)"),
        (
            {"error": "other", "text": "told hf_s3cret", "type": "ValueError"},
            "huggingface_hub says: told *** (ValueError)",
        ),
        ({"files": []}, "has no file at"),
    ],
)
def test_every_error_is_one_line(fetch, tmp_path, answer, said):
    assert said in refused(fetch(python=answering(tmp_path, **answer), token="hf_s3cret"))


def test_a_cut_connection_is_mended_by_the_library(fetch, hub, tmp_path):
    hub.cdn.faults[hashlib.sha256(NOISE).hexdigest()] = [{"cut": 100_000}]
    done = fetch()
    assert done["changed"] is True, done
    assert whole(tmp_path)["model.safetensors"] == NOISE
    # From where it was, or from the start where the library had put nothing of it down yet.
    assert len(hub.cdn.asked("GET", hashlib.sha256(NOISE).hexdigest())) == 2


def test_an_overload_of_the_hub_is_tried_again(fetch, hub, tmp_path):
    hub.faults[f"api/models/{REPO}/tree/{COMMIT}"] = [{"status": 503}]
    assert fetch()["changed"] is True


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"revision": "main"}, "the revision main is no commit (40 hex digits)"),
        ({"revision": None}, "has no revision; expected a commit (40 hex digits)"),
        ({"revision": "a" * 40}, "there is no such commit; see the newest with: git ls-remote"),
        ({"source": "hf:lab/other"}, "has no such repository, or shows it only to some"),
        ({"source": "hf:draft"}, "hf:draft is no repository of a hub; expected hf:ORG/REPO"),
        ({"source": "hf:lab/../x"}, "is no repository of a hub"),
        ({"manifest": "/x"}, "the hub's own metadata is the manifest"),
        ({"include": "*.json"}, "include is '*.json'; expected a list of patterns"),
    ],
)
def test_an_entry_that_cannot_be_is_one_line(fetch, about, said):
    line = refused(fetch(about=about))
    assert said in line
    assert "model M" in line


def test_a_branch_is_refused_with_the_command_that_shows_its_commit(fetch, hub):
    assert f"git ls-remote {hub.url}/{REPO} main" in refused(fetch(about={"revision": "main"}))


def test_a_token_opens_a_repository_and_shows_nowhere(fetch, hub, tmp_path):
    hub.tokens[REPO] = "hf_s3cret"
    line = refused(fetch())
    assert "shows it only to some; correct its name, or set model_store_hub_token" in line
    assert "correct model_store_hub_token" in refused(fetch(token="hf_wr0ng"))
    hub.gated.add(REPO)
    assert "its owner wants terms to be accepted first" in refused(fetch(token="hf_wr0ng"))
    secret = tmp_path / "token"
    secret.write_text("hf_s3cret\n")
    secret.chmod(0o644)
    assert "has mode 0644; expected 0600" in refused(fetch(token_file=str(secret)))
    secret.chmod(0o600)
    done = fetch(token_file=str(secret))
    assert done["changed"] is True, done
    assert "s3cret" not in json.dumps(done)
    found = subprocess.run(["grep", "-rl", "s3cret", str(tmp_path / "cache")], capture_output=True, text=True)
    assert found.stdout == "", "a token is not kept"
    # The server that large files come from is not the hub, and is not told the token.
    assert {row[3] for row in hub.cdn.asked()} == {None}


@pytest.mark.parametrize(
    ("python", "said"),
    [
        ("/nonexistent/python", "cannot be run (No such file or directory); provision the host"),
        ("/bin/false", "ended with 1"),
    ],
)
def test_an_environment_that_is_not_there_is_one_line(fetch, python, said):
    assert said in refused(fetch(python=python))


def test_what_answers_is_no_hub(fetch, hub):
    hub.faults[f"api/models/{REPO}/tree/{COMMIT}"] = [{"page": True}] * 4
    assert "is not a hub's answer" in refused(fetch())


def test_a_full_disk_is_said_before_the_first_byte(fetch, hub, monkeypatch):
    module = sys.modules["ansible_collections.specrig.host.plugins.modules.model_fetch"]
    real = os.statvfs

    def small(path: Any) -> Any:
        row = list(real(path))
        row[4] = 10
        return os.statvfs_result(row)

    monkeypatch.setattr(module.os, "statvfs", small)
    assert "GB free and M still needs" in refused(fetch())
    assert not hub.cdn.asked()


def test_killed_in_the_middle_the_worker_ends_and_the_next_run_goes_on(fetch, hub, parameters, repository, tmp_path):
    hub.cdn.faults[hashlib.sha256(NOISE).hexdigest()] = [{"stall": 100_000}]
    arguments = json.dumps({"ANSIBLE_MODULE_ARGS": {**parameters, "_ansible_remote_tmp": str(tmp_path)}})
    module = subprocess.Popen(
        [sys.executable, "-m", "ansible_collections.specrig.host.plugins.modules.model_fetch"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(repository / ".collections")},
        text=True,
    )
    assert module.stdin is not None
    module.stdin.write(arguments)
    module.stdin.close()
    blobs = tmp_path / "cache/models--lab--draft/blobs"
    deadline = time.monotonic() + 60
    snapshot = tmp_path / "cache/models--lab--draft/snapshots" / COMMIT
    others = [snapshot / name for name in MODEL if name != "model.safetensors"]
    while not all(path.exists() for path in others) or not list(blobs.glob("*.incomplete")):
        assert time.monotonic() < deadline
        assert module.poll() is None
        time.sleep(0.05)
    (worker,) = Path(f"/proc/{module.pid}/task/{module.pid}/children").read_text().split()
    module.send_signal(signal.SIGKILL)
    module.wait()
    while Path(f"/proc/{worker}").exists():
        assert time.monotonic() < deadline, "the worker outlives who asked it"
        time.sleep(0.05)
    assert not (tmp_path / "cache/folders/M").exists()
    done = fetch()
    assert done["changed"] is True, done
    assert done["models"]["M@hub"]["fetched"] == ["model.safetensors"]
    assert not list(blobs.glob("*.incomplete"))
    assert whole(tmp_path) == {**MODEL, "MANIFEST.sha256": sums(MODEL)}


def test_a_download_that_is_under_way_is_waited_for(fetch, tmp_path):
    # Holds the lock until somebody waits for it, which the kernel lists with an arrow.
    script = (
        "import fcntl, os, sys, time\n"
        "lock = open(sys.argv[1], 'a')\n"
        "fcntl.flock(lock, fcntl.LOCK_EX)\nprint('held', flush=True)\n"
        "mine = ':%d ' % os.fstat(lock.fileno()).st_ino\n"
        "until = time.monotonic() + 60\n"
        "while time.monotonic() < until:\n"
        "    if any('->' in row and mine in row for row in open('/proc/locks')): break\n"
        "    time.sleep(0.05)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "cache/.specrig-lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        done = fetch()
    assert done["changed"] is True, done
    assert any(note.startswith("waited ") for note in done["specrig"]["notes"])


def test_what_the_hub_says_has_to_prove_each_file():
    asked = modelhub.wanted("M", {"source": "hf:a/b", "revision": COMMIT})
    good = {"path": "x", "size": 3, "sha256": None, "blob_id": "0" * 40}
    assert modelhub.tree("M", [good], asked) == {"x": {"size": 3, "blob_id": "0" * 40}}
    for wrong in ({"size": None}, {"blob_id": None}, {"sha256": "12"}, {"size": -1}, {"path": "../x"}, {"path": None}):
        with pytest.raises(ModelError):
            modelhub.tree("M", [{**good, **wrong}], asked)


def test_gits_name_of_a_file():
    # git hash-object of a file that holds "hello" and a newline.
    name = modelhub.blob_hash(6)
    name.update(b"hello\n")
    assert name.hexdigest() == "ce013625030ba8dba906f756967f9e9ca394464a"


def test_models_of_a_hub_are_told_from_others(repository, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(repository / ".collections"), *sys.path])
    from ansible_collections.specrig.host.plugins.filter import model_hub

    models = {"a": {"source": "/srv/a"}, "h": {"source": "hf:o/r", "revision": COMMIT}, "w": {"source": "http://x/y"}}
    assert model_hub.hub_models(models) == ["h"]
    local = model_hub.local_models(models, "/var/lib/specrig/hub/")
    assert local["h"] == {"source": "/var/lib/specrig/hub/folders/h", "revision": COMMIT}
    assert (local["a"], local["w"]) == (models["a"], models["w"])
    assert set(model_hub.local_models(models, "/c", ["h"])) == {"a", "w"}
    # A guest that stages itself is shown the folder of whole files, and nothing of the cache.
    from ansible_collections.specrig.host.plugins.filter.models import model_folders, models_in_guest

    shown = model_folders({"h": local["h"]}, "guest", "/ram", "/dev/shm/models", "/sources")
    assert shown == [{"source": "/var/lib/specrig/hub/folders/h", "target": "/sources/h", "read_only": True}]
    assert models_in_guest(local, "/sources")["h"] == {"source": "/sources/h", "revision": COMMIT}
