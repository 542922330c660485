#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Bring models from a hub onto this machine's disk, each at one commit, and prove them by the hub's own metadata."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_fetch
short_description: Download models from a hub at pinned commits, proven
author: specrig developers (@specrig)
description:
  - Has huggingface_hub, in a virtual environment of its own, bring each model whose source is C(hf:ORG/REPO) into its
    cache on this machine's disk; compares every file with the hub's metadata of that commit (sha256 of LFS files, git's
    name of the others); then makes a folder of hard links with a MANIFEST.sha256, to stage the model from.
  - Models from elsewhere are left alone. A model that is whole costs a look at its files' sizes and times, and no
    request. A download that was ended goes on with the next file.
options:
  models:
    description:
      - Name to C({source, revision, include, exclude}). O(models) of a hub have the source C(hf:ORG/REPO) and a commit
        (40 hex digits) as revision; C(include) and C(exclude) are lists of patterns of file names.
    type: dict
    required: true
  cache:
    description: The hub's cache on this machine's disk, and the folders of whole models in it.
    type: path
    default: /var/lib/specrig/hub
  python:
    description: The interpreter of the virtual environment that has huggingface_hub.
    type: path
    default: /opt/specrig/hub/bin/python
  endpoint:
    description: URL of the hub, for a mirror; left out, huggingface_hub's own.
    type: str
  token:
    description: For repositories that are private or gated.
    type: str
  token_file:
    description: A file of mode 0600 that holds the token, instead of O(token).
    type: path
  ca_file:
    description: Certificates in PEM form to trust beside the system's.
    type: path
  streams:
    description: How many files are downloaded, and read again, at a time.
    type: int
    default: 8
  download:
    description: V(false) only says whether the models are there.
    type: bool
    default: true
  verify:
    description: Read whole models again, and download files again that are not what they were.
    type: bool
    default: false
  progress_dir:
    description: Where the progress of each model is told.
    type: path
    default: /run/specrig/staging
attributes:
  check_mode:
    description: Says what it would download, without asking the hub.
    support: full
  diff_mode:
    description: Shows the models before and after.
    support: full
"""

EXAMPLES = r"""
- name: Have the models on disk
  specrig.host.model_fetch:
    models:
      Qwen3-32B:
        source: hf:Qwen/Qwen3-32B
        revision: 9216db5781bf21249d130ec9da846c4624c16137
        exclude: ["*.md"]
"""

RETURN = r"""
complete:
  description: Whether every model was whole before this task changed anything.
  returned: always
  type: bool
missing:
  description: Names of the models that are not whole; after a download, none.
  returned: always
  type: list
  elements: str
models:
  description:
    - Per model, with C(@hub) behind its name, its C(folder), C(repo) and C(revision); after a download also C(files),
      C(bytes), C(fetched) files, C(fetched_bytes), C(seconds) and C(rate_bytes_s).
  returned: always
  type: dict
"""

import concurrent.futures
import contextlib
import errno
import fcntl
import hashlib
import inspect
import json
import os
import select
import shutil
import stat
import subprocess
import time

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import hubworker, modelfiles, modelhub, stagecopy
from ..module_utils.modelfiles import ModelError

# The library itself tries for half a minute each time.
ROUNDS = 2
FIRST_PAUSE_S = 2.0
TICK_S = 0.5
CHUNK_BYTES = 4 * 1024 * 1024
KEPT_VARIABLES = ("PATH", "HOME", "LANG", "SSL_CERT_FILE", "SSL_CERT_DIR", "TMPDIR")


def utc_now():
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def read_token(params):
    """The token, or None."""
    if params["token"]:
        return params["token"].strip()
    path = params["token_file"]
    if not path:
        return None
    try:
        with open(path, encoding="utf-8") as handle:
            mode = stat.S_IMODE(os.fstat(handle.fileno()).st_mode)
            if mode & 0o077:
                raise ModelError("%s holds a token and has mode %04o; expected 0600: chmod 600 it" % (path, mode))
            token = handle.read().strip()
    except (OSError, UnicodeDecodeError) as problem:
        raise ModelError(
            "token_file %s cannot be read (%s)" % (path, getattr(problem, "strerror", None) or "it is no text")
        ) from None
    if not token or len(token.split()) != 1:
        raise ModelError("token_file %s holds no token; expected it alone, in one line" % path)
    return token


class Worker:
    """huggingface_hub in its own environment; it ends with this process."""

    def __init__(self, params):
        self._params, self._process, self.version = params, None, None

    def _environment(self):
        env = {
            name: value
            for name, value in os.environ.items()
            if name in KEPT_VARIABLES or name.lower().endswith("_proxy") or name.startswith("HF_XET_")
        }
        cache = self._params["cache"]
        home = os.path.join(cache, ".home")
        env.update(
            HF_HOME=home,
            HF_HUB_CACHE=cache,
            HF_XET_CACHE=os.path.join(home, "xet"),
            HF_HUB_DISABLE_TELEMETRY="1",
            HF_HUB_DISABLE_IMPLICIT_TOKEN="1",
            HF_HUB_DISABLE_PROGRESS_BARS="1",
            HF_HUB_DISABLE_UPDATE_CHECK="1",
            # Files of a cache are hard linked, so they have to be files.
            HF_HUB_DISABLE_SHARED_BLOBS="1",
            HF_HUB_ETAG_TIMEOUT="30",
            HF_HUB_DOWNLOAD_TIMEOUT="30",
        )
        if self._params["endpoint"]:
            env["HF_ENDPOINT"] = self._params["endpoint"]
        return env

    def _start(self):
        python = self._params["python"]
        try:
            self._process = subprocess.Popen(
                [python, "-I", "-c", inspect.getsource(hubworker)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=self._environment(),
                cwd=self._params["cache"],
            )
        except OSError as problem:
            raise ModelError(
                "%s cannot be run (%s); provision the host, which installs huggingface_hub there"
                % (python, problem.strerror)
            ) from None

    def ask(self, request, tick=None):
        """The answer to a request; ``tick`` is called meanwhile."""
        if self._process is None:
            self._start()
        given = dict(request, cache=self._params["cache"], endpoint=self._params["endpoint"])
        given.update(token=self._params["secret"], ca_file=self._params["ca_file"], workers=self._params["streams"])
        line = b""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(given).encode("utf-8") + b"\n")
            self._process.stdin.flush()
            while True:
                ready, _none, _no = select.select([self._process.stdout], [], [], TICK_S)
                if ready:
                    line = self._process.stdout.readline()
                    break
                if tick:
                    tick()
        try:
            answer = json.loads(line.decode("utf-8"))
        except ValueError:
            code = self.close()
            raise ModelError(
                "huggingface_hub in %s ended with %s before it answered; run it again, and if that stays so, install "
                "it again" % (os.path.dirname(os.path.dirname(self._params["python"])), code)
            ) from None
        self.version = answer.get("version") or self.version
        return answer

    def close(self):
        """Ends it; returns its exit status."""
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            code = process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        process.stdout.close()
        return code


def sentence(answer, name, asked, params):
    """One line for an answer that is an error."""
    kind, text, status = answer["error"], answer.get("text") or answer.get("type"), answer.get("status")
    if params["secret"]:
        text = text.replace(params["secret"], "***")
    hub = params["endpoint"] or "the hub"
    what = "model %s: %s at %s" % (name, asked["repo"], asked["revision"][:12])
    token = "correct model_store_hub_token" if params["secret"] else "set model_store_hub_token"
    known = {
        "library": "huggingface_hub cannot be used by %s (%s); provision the host, which installs it"
        % (params["python"], text),
        "gated": "%s: its owner wants terms to be accepted first; do that on its page with the token's account, and %s"
        % (what, token),
        "disabled": "%s: the hub has taken access to it away" % what,
        "revision": "%s: there is no such commit; see the newest with: git ls-remote %s/%s HEAD"
        % (what, (params["endpoint"] or modelhub.HUB_URL).rstrip("/"), asked["repo"]),
        "repository": "%s: %s has no such repository, or shows it only to some; correct its name, or %s"
        % (what, hub, token),
        "entry": "%s: %s lists a file and does not give it (404); try again, or use the default endpoint" % (what, hub),
        "no-hub": "%s: what %s answers is not a hub's answer (%s); correct model_store_hub_endpoint, or look whether a "
        "proxy is in the way" % (what, hub, text),
        "refused": "%s: %s refuses (%s); %s" % (what, hub, status, token),
        "status": "%s: %s answered %s, %d times in a row; try again later" % (what, hub, status, ROUNDS),
        "network": "%s: %s cannot be reached (%s); look after the way to it, what is whole is kept" % (what, hub, text),
        "space": "%s: the disk of %s is full; free some of it and run again" % (what, params["cache"]),
    }
    return known.get(kind) or "%s: huggingface_hub says: %s (%s)" % (what, text, answer.get("type"))


class Model:
    """One model of a hub: what is asked for, and what of it is on this disk."""

    def __init__(self, name, asked, params):
        self.name, self.asked, self.params = name, asked, params
        self.cache = params["cache"]
        self.folder = modelhub.folder_of(self.cache, name)
        self.repo = os.path.join(self.cache, "models--" + asked["repo"].replace("/", "--"))
        self.snapshot = os.path.join(self.repo, "snapshots", asked["revision"])
        self.tree_path = os.path.join(
            self.cache,
            modelhub.FOLDERS,
            ".trees",
            "%s--%s.json" % (asked["repo"].replace("/", "--"), asked["revision"]),
        )
        self.files, self.fetched, self.sums = {}, [], {}
        self.look()

    def look(self):
        """Find out whether the folder is whole, by sizes and times."""
        self.record = None
        with contextlib.suppress(OSError, UnicodeDecodeError):
            self.record = modelhub.read_record(stagecopy.read_text(os.path.join(self.folder, modelhub.RECORD_NAME)))
        self.whole = modelhub.answers(self.record, self.asked) and all(
            self._as(os.path.join(self.folder, path), row) for path, row in self.record["files"].items()
        )

    @staticmethod
    def _as(path, row):
        try:
            about = os.stat(path)
        except OSError:
            return False
        return stat.S_ISREG(about.st_mode) and (about.st_size, about.st_mtime_ns) == (row["size"], row["mtime_ns"])

    def pointer(self, path):
        return os.path.join(self.snapshot, path)

    def list(self, worker):
        """What the hub says of the commit; said once, since a commit does not change."""
        rows = None
        with contextlib.suppress(OSError, ValueError):
            rows = json.loads(stagecopy.read_text(self.tree_path))
        if not isinstance(rows, list):
            answer = asking(worker, {"do": "list", "repo": self.asked["repo"], "revision": self.asked["revision"]})
            if "error" in answer:
                raise ModelError(sentence(answer, self.name, self.asked, self.params))
            rows = answer["files"]
            self.files = modelhub.tree(self.name, rows, self.asked)
            os.makedirs(os.path.dirname(self.tree_path), mode=0o755, exist_ok=True)
            stagecopy.replace_text(self.tree_path, json.dumps(rows) + "\n", sync=True)
        self.files = modelhub.tree(self.name, rows, self.asked)

    def missing(self):
        """Paths that the cache does not have in their size."""
        rows = []
        for path, known in self.files.items():
            try:
                if os.stat(self.pointer(path)).st_size == known["size"]:
                    continue
            except OSError:
                pass
            self.drop(path)
            rows.append(path)
        return rows

    def drop(self, path):
        """Take a file out of the cache."""
        pointer = self.pointer(path)
        for place in (os.path.realpath(pointer), pointer):
            if os.path.lexists(place) and place.startswith(os.path.realpath(self.repo) + os.sep):
                os.unlink(place)

    def come(self, paths):
        """Bytes of these that are on the disk by now."""
        blobs, total = os.path.join(self.repo, "blobs"), 0
        parts = {}
        with contextlib.suppress(OSError):
            for entry in os.scandir(blobs):
                with contextlib.suppress(OSError):
                    name = entry.name.split(".")[0]
                    parts[name] = max(parts.get(name, 0), entry.stat().st_size)
        for path in paths:
            known = self.files[path]
            total += min(known["size"], parts.get(known.get("sha256") or known.get("blob_id"), 0))
        return total

    def sweep(self):
        """Remove parts of files that a download that was killed has left, and nobody works on."""
        blobs = os.path.join(self.repo, "blobs")
        locks = os.path.join(self.cache, ".locks", os.path.basename(self.repo))
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(blobs):
                if not name.endswith(".incomplete"):
                    continue
                with contextlib.ExitStack() as held:
                    try:
                        lock = held.enter_context(open(os.path.join(locks, name.split(".")[0] + ".lock"), "a"))
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        continue
                    except FileNotFoundError:
                        pass
                    os.unlink(os.path.join(blobs, name))

    def digests(self, path):
        """(sha256, git's name) of a file's content; the latter only where the hub gives nothing else."""
        known = self.files[path]
        sha, git = hashlib.sha256(), modelhub.blob_hash(known["size"]) if "blob_id" in known else None
        view = memoryview(bytearray(CHUNK_BYTES))
        with open(self.pointer(path), "rb", buffering=0) as handle:
            while True:
                count = handle.readinto(view)
                if not count:
                    break
                sha.update(view[:count])
                if git:
                    git.update(view[:count])
        return sha.hexdigest(), git.hexdigest() if git else None

    def prove(self):
        """{path: (known, found)} of what is not as the hub says; the others' sums are noted."""
        before = self.record["files"] if self.record else {}

        def one(path):
            known = self.files[path]
            if path in self.sums:
                return None
            vouched = before.get(path)
            if vouched and vouched["sha256"] == known.get("sha256") and self._as(self.pointer(path), vouched):
                self.sums[path] = vouched["sha256"]
                return None
            sha, git = self.digests(path)
            good = sha == known["sha256"] if "sha256" in known else git == known["blob_id"]
            if good:
                self.sums[path] = sha
                return None
            return known, git or sha

        largest = sorted(self.files, key=lambda path: -self.files[path]["size"])
        with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, self.params["streams"])) as pool:
            found = dict(zip(largest, pool.map(one, largest)))  # noqa: B905 (Python 3.8)
        return {path: row for path, row in found.items() if row}

    def recheck(self):
        """Paths of a whole model whose content is no longer what it was; they are dropped."""
        rows = []
        self.files = {
            path: {"size": row["size"], "sha256": row["sha256"]} for path, row in self.record["files"].items()
        }
        view = memoryview(bytearray(CHUNK_BYTES))
        for path, row in self.record["files"].items():
            sha = hashlib.sha256()
            with open(os.path.join(self.folder, path), "rb", buffering=0) as handle:
                while True:
                    count = handle.readinto(view)
                    if not count:
                        break
                    sha.update(view[:count])
            if sha.hexdigest() != row["sha256"]:
                self.drop(path)
                rows.append(path)
        return rows

    def build(self):
        """Make the folder of hard links, whole or not at all."""
        root = os.path.join(self.cache, modelhub.FOLDERS)
        flat = self.name.replace("/", "--")
        new, old = os.path.join(root, ".new-" + flat), os.path.join(root, ".old-" + flat)
        for place in (new, old):
            shutil.rmtree(place, ignore_errors=True)
        os.makedirs(new, mode=0o755)
        rows = {}
        for path in self.files:
            real, place = os.path.realpath(self.pointer(path)), os.path.join(new, path)
            os.makedirs(os.path.dirname(place), mode=0o755, exist_ok=True)
            about = os.stat(real)
            if stat.S_IMODE(about.st_mode) != 0o644:
                os.chmod(real, 0o644)
            try:
                os.link(real, place)
            except OSError as problem:
                if problem.errno not in (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
                    raise
                raise ModelError(
                    "%s is on a file system without hard links (%s); set model_store_hub_cache to a folder of a "
                    "local disk" % (self.cache, problem.strerror)
                ) from None
            rows[path] = {"size": about.st_size, "mtime_ns": about.st_mtime_ns, "sha256": self.sums[path]}
        stagecopy.replace_text(os.path.join(new, modelfiles.MANIFEST_NAME), modelhub.manifest_text(rows), sync=True)
        text = modelhub.record_text(self.asked, self.params["endpoint"], utc_now(), rows)
        stagecopy.replace_text(os.path.join(new, modelhub.RECORD_NAME), text, sync=True)
        os.makedirs(os.path.dirname(self.folder), mode=0o755, exist_ok=True)
        if os.path.lexists(self.folder):
            os.rename(self.folder, old)
        os.rename(new, self.folder)
        shutil.rmtree(old, ignore_errors=True)


def asking(worker, request, tick=None):
    """An answer, asked for again a few times where the network or the hub may get better."""
    for count in range(ROUNDS):
        answer = worker.ask(request, tick)
        passing = answer.get("error") == "network" or (
            answer.get("error") == "status" and (answer["status"] >= 500 or answer["status"] in (408, 425, 429))
        )
        if not passing or count == ROUNDS - 1:
            break
        time.sleep(FIRST_PAUSE_S * 2**count)
    return answer


def check_space(models, params):
    """Raises ModelError unless what is to be downloaded fits on the cache's disk."""
    needed = 0
    for model in models:
        paths = [path for path in model.files if not os.path.exists(model.pointer(path))]
        needed += sum(model.files[path]["size"] for path in paths) - model.come(paths)
    about = os.statvfs(params["cache"])
    free = about.f_bavail * about.f_frsize
    if needed > free:
        raise ModelError(
            "%s has %.2f GB free and %s still needs %.2f GB; free some, leave files out by exclude, or set "
            "model_store_hub_cache to another disk"
            % (params["cache"], free / 1e9, ", ".join(model.name for model in models), needed / 1e9)
        )


def bring(model, worker, params, tell):
    """Downloads what is missing of one model, and proves all of it."""
    again = False
    while True:
        paths = model.missing()
        there = sum(row["size"] for path, row in model.files.items() if path not in paths)
        tick = lambda paths=paths, there=there: tell(there + model.come(paths), len(model.files) - len(paths))  # noqa: E731
        tick()
        if paths:
            request = {"do": "fetch", "repo": model.asked["repo"], "revision": model.asked["revision"], "files": paths}
            answer = asking(worker, request, tick)
            if "error" in answer:
                raise ModelError(sentence(answer, model.name, model.asked, params))
            model.fetched += [path for path in paths if path not in model.fetched]
            left = model.missing()
            if left:
                raise ModelError(
                    "model %s: %s of %s came with another size than the hub says; run it again"
                    % (model.name, left[0], model.asked["repo"])
                )
        bad = model.prove()
        if not bad:
            return
        for path in bad:
            model.drop(path)
        if again:
            # Who knows whether the listing or the file is wrong.
            os.unlink(model.tree_path)
            path = min(bad)
            raise ModelError(modelhub.wrong(model.name, path, bad[path][0], bad[path][1], model.asked))
        again = True


def fetch(model, worker, params):
    """Has one model whole in its folder; returns a row of the result."""
    started = time.monotonic()
    with contextlib.suppress(OSError):
        os.makedirs(params["progress_dir"], mode=0o755, exist_ok=True)
    progress = stagecopy.Progress(params["progress_dir"], model.name + "@hub")
    total = sum(row["size"] for row in model.files.values())
    told = {"bytes_total": total, "files_total": len(model.files)}
    try:
        bring(model, worker, params, lambda done, files: progress.tell("running", done, files_done=files, **told))
        model.build()
    except (ModelError, OSError) as problem:
        progress.tell("failed", 0, " ".join(str(problem).split()), **told)
        raise
    seconds = time.monotonic() - started
    amount = sum(model.files[path]["size"] for path in model.fetched)
    progress.tell("done", total, "downloaded", files_done=len(model.files), **told)
    return {
        "files": len(model.files),
        "bytes": total,
        "fetched": sorted(model.fetched),
        "fetched_bytes": amount,
        "seconds": round(seconds, 2),
        "rate_bytes_s": round(amount / seconds) if amount and seconds else None,
    }


@contextlib.contextmanager
def alone(cache, notes):
    """Keep other downloads into this cache out: one that goes on is waited for."""
    os.makedirs(os.path.join(cache, modelhub.FOLDERS), mode=0o755, exist_ok=True)
    with open(os.path.join(cache, ".specrig-lock"), "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            started = time.monotonic()
            fcntl.flock(lock, fcntl.LOCK_EX)
            notes.append("waited %.1f s for another download from the hub" % (time.monotonic() - started))
        yield


def work(models, params, said, report):
    """Downloads what is missing; the models are looked at again, since who was waited for may have done it."""
    with alone(params["cache"], said["notes"]):
        worker = Worker(params)
        try:
            todo = []
            for model in models:
                model.look()
                if params["verify"] and model.whole:
                    bad = model.recheck()
                    if not bad:
                        said["notes"].append(
                            "model %s: %d files read again, all as the hub says" % (model.name, len(model.files))
                        )
                        continue
                    said["found"].append("model %s: %s is not what it was on the disk" % (model.name, ", ".join(bad)))
                    model.record = None
                elif model.whole:
                    continue
                todo.append(model)
            for model in todo:
                model.sweep()
                model.list(worker)
            check_space(todo, params)
            for model in todo:
                row = fetch(model, worker, params)
                report[model.name + "@hub"].update(row)
                said["changed"].append(
                    "downloaded model %s: %d files, %.2f GB in %.1f s, proven by the hub's metadata at %s"
                    % (
                        model.name,
                        len(row["fetched"]),
                        row["fetched_bytes"] / 1e9,
                        row["seconds"],
                        model.asked["revision"],
                    )
                )
            return bool(todo)
        finally:
            worker.close()


def main():
    module = AnsibleModule(
        argument_spec={
            "models": {"type": "dict", "required": True},
            "cache": {"type": "path", "default": modelhub.CACHE},
            "python": {"type": "path", "default": "/opt/specrig/hub/bin/python"},
            "endpoint": {"type": "str"},
            "token": {"type": "str", "no_log": True},
            "token_file": {"type": "path", "no_log": False},
            "ca_file": {"type": "path"},
            "streams": {"type": "int", "default": 8},
            "download": {"type": "bool", "default": True},
            "verify": {"type": "bool", "default": False},
            "progress_dir": {"type": "path", "default": "/run/specrig/staging"},
        },
        supports_check_mode=True,
    )
    params = dict(module.params, secret=None)
    said = {"found": [], "changed": [], "gates": [], "notes": []}
    report, missing, changed, complete = {}, [], False, False
    try:
        models = [
            Model(name, modelhub.wanted(name, about, params["endpoint"]), params)
            for name, about in sorted(params["models"].items())
            if modelhub.is_hub(about)
        ]
        report = {
            model.name + "@hub": {
                "folder": model.folder,
                "repo": model.asked["repo"],
                "revision": model.asked["revision"],
            }
            for model in models
        }
        missing = [model.name for model in models if not model.whole]
        complete = not missing
        todo = bool(missing) or (params["verify"] and bool(models))
        if todo and params["download"]:
            said["found"] += ["model %s is not whole on this disk" % name for name in missing]
            if module.check_mode:
                changed = bool(missing)
                said["changed"] += [
                    "would download model %s from %s" % (model.name, model.asked["repo"])
                    for model in models
                    if not model.whole
                ]
            else:
                params["secret"] = read_token(params)
                changed = work(models, params, said, report)
    except ModelError as problem:
        module.fail_json(msg=str(problem), specrig=said, complete=False, missing=missing, models=report)
    except OSError as problem:
        module.fail_json(
            msg="downloading stopped: %s: %s; see to that and run again, whole files are kept"
            % (problem.filename or params["cache"], problem.strerror or problem),
            specrig=said,
            complete=False,
            missing=missing,
            models=report,
        )
    diff = {}
    if changed:
        before = ["%s: %s" % (model.name, "not whole" if model.name in missing else "damaged") for model in models]
        after = ["%s: %s at %s" % (model.name, model.asked["repo"], model.asked["revision"]) for model in models]
        diff = {"before": "\n".join(before) + "\n", "after": "\n".join(after) + "\n"}
    left = missing if module.check_mode or not params["download"] else []
    module.exit_json(changed=changed, complete=complete, missing=left, models=report, specrig=said, diff=diff)


if __name__ == "__main__":
    main()
