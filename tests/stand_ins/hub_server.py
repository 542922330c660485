"""A hub that speaks as much of Hugging Face's API as huggingface_hub's downloads need: for tests, and in the lab.

What it serves has the real one's shape: the listing of a commit in pages, with sha256 and size of LFS files and git's
names of the others; a file's head with commit, ETag, and for LFS files a redirect to another server, as if to a CDN. It
never offers Xet, so that huggingface_hub takes plain HTTP and the bytes come from here.

As a script: ``hub_server.py FOLDER PORT COMMIT [--rate BYTES_PER_S] [--log FILE]`` serves FOLDER/ORG/REPO/* at that
commit, large files from the next port.
Standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pathlib
import re
import urllib.parse

import file_server

PAGE_ROWS = 3
LFS_BYTES = 1000
"""From this size on files are in LFS, whatever their names."""


def blob_id(content):
    """Git's name of a file's content."""
    return hashlib.sha1(b"blob %d\0%s" % (len(content), content)).hexdigest()


class Handler(file_server.Handler):
    """One connection."""

    def answer(self, body):
        """Answer what the hub's API answers; the CDN's part is the file server's."""
        mirror = self.server.mirror
        parts = urllib.parse.urlsplit(self.path)
        path = urllib.parse.unquote(parts.path).lstrip("/")
        with mirror.lock:
            mirror.log.append((self.command, path, self.headers.get("Range"), self.headers.get("Authorization")))
            rows = mirror.faults.get((self.command, path)) or mirror.faults.get(path if body else None) or []
            fault = rows.pop(0) if rows else {}
        if "status" in fault:
            self.error(fault["status"], fault.get("code"), fault.get("text", "as the test wants it"))
            return
        if fault.get("page"):
            self.whole(file_server.PAGE, "text/html", None, {}, body)
            return
        api = re.match(r"^api/models/([^/]+/[^/]+)/(tree|revision)/([^/]+)$", path)
        file = re.match(r"^([^/]+/[^/]+)/resolve/([^/]+)/(.+)$", path)
        repo, revision = (
            (api.group(1), api.group(3)) if api else (file.group(1), file.group(2)) if file else (None, None)
        )
        if repo not in mirror.repos:
            self.error(404, "RepoNotFound", "Repository not found")
        elif mirror.tokens.get(repo) and self.headers.get("Authorization") not in (f"Bearer {mirror.tokens[repo]}",):
            if repo in mirror.gated:
                self.error(403 if self.headers.get("Authorization") else 401, "GatedRepo", "Access to it is restricted")
            else:
                self.error(401, "RepoNotFound", "Repository not found")
        elif revision not in mirror.repos[repo]:
            self.error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif api and api.group(2) == "tree":
            self.tree(repo, revision, urllib.parse.parse_qs(parts.query))
        elif api:
            self.json(
                {"id": repo, "sha": revision, "siblings": [{"rfilename": name} for name in mirror.files_of(repo)]}
            )
        else:
            self.resolve(repo, revision, file.group(3), fault, body)

    def error(self, status, code, text):
        """An error as the hub gives it."""
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", text)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def json(self, content, headers=()):
        """An answer of the API."""
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.connection.sendall(data)

    def tree(self, repo, revision, query):
        """One page of a commit's listing."""
        mirror = self.server.mirror
        rows = mirror.tree(repo, revision)
        start = int(query.get("cursor", ["0"])[0])
        headers = []
        if start + PAGE_ROWS < len(rows):
            url = f"{mirror.url}/api/models/{repo}/tree/{revision}?recursive=True&cursor={start + PAGE_ROWS}"
            headers = [("Link", f'<{url}>; rel="next"')]
        self.json(rows[start : start + PAGE_ROWS], headers)

    def resolve(self, repo, revision, path, fault, body):
        """A file's head, and a small file's content; large ones are behind a redirect."""
        mirror = self.server.mirror
        content = mirror.repos[repo][revision].get(path)
        if content is None:
            self.error(404, "EntryNotFound", "Entry not found")
            return
        row = next(row for row in mirror.tree(repo, revision) if row["path"] == path)
        if "lfs" not in row:
            self.send_response(200)
            self.send_header("X-Repo-Commit", revision)
            self.send_header("Accept-Ranges", "bytes")
            self.send(mirror.sent.get(path, content), "text/plain", f'"{row["oid"]}"', fault, body)
            return
        self.send_response(302)
        self.send_header("X-Repo-Commit", revision)
        self.send_header("X-Linked-Size", str(row["lfs"]["size"]))
        self.send_header("X-Linked-ETag", f'"{row["lfs"]["oid"]}"')
        self.send_header("Location", f"{mirror.cdn.url}/{row['lfs']['oid']}")
        self.send_header("Content-Length", "0")
        self.end_headers()


class Hub(file_server.Mirror):
    """Repositories, each commit with its files."""

    def __init__(self, repos, port=0, **more):
        super().__init__(handler=Handler, port=port, **more)
        self.cdn = file_server.Mirror(port=port + 1 if port else 0, **more)
        self.repos = repos
        self.sent = {}
        """Path to other content than the listing says."""
        self.tokens = {}
        """Repository to the token that opens it."""
        self.gated = set()
        self.trees = {}
        for commits in repos.values():
            for files in commits.values():
                for content in files.values():
                    if len(content) >= LFS_BYTES:
                        self.cdn.put(hashlib.sha256(content).hexdigest(), content)

    def __enter__(self):
        self.cdn.__enter__()
        return super().__enter__()

    def __exit__(self, *arguments):
        super().__exit__(*arguments)
        self.cdn.__exit__(*arguments)

    def files_of(self, repo):
        """Names of a repository's files, of all commits."""
        return sorted({name for files in self.repos[repo].values() for name in files})

    def tree(self, repo, revision):
        """The listing of a commit."""
        if (repo, revision) not in self.trees:
            rows = []
            for path, content in sorted(self.repos[repo][revision].items()):
                row = {"type": "file", "path": path, "size": len(content), "oid": blob_id(content)}
                if len(content) >= LFS_BYTES:
                    sha = hashlib.sha256(content).hexdigest()
                    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize %d\n" % (
                        sha.encode(),
                        len(content),
                    )
                    row["oid"] = blob_id(pointer)
                    row["lfs"] = {"oid": sha, "size": len(content), "pointerSize": len(pointer)}
                rows.append(row)
            folders = sorted({path.rpartition("/")[0] for path in self.repos[repo][revision]} - {""})
            rows += [{"type": "directory", "path": path, "size": 0, "oid": "0" * 40} for path in folders]
            self.trees[repo, revision] = rows
        return self.trees[repo, revision]


def main():
    """Serve a folder's repositories at one commit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("port", type=int)
    parser.add_argument("commit")
    parser.add_argument("--rate", type=float, default=0)
    parser.add_argument("--host", default="127.0.0.1", help="how clients reach it")
    parser.add_argument("--log")
    given = parser.parse_args()
    repos = {}
    for folder in given.folder.glob("*/*"):
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        repos[folder.relative_to(given.folder).as_posix()] = {given.commit: files}
    hub = Hub(repos, port=given.port, address="0.0.0.0")
    hub.cdn.rate_bytes_s = given.rate
    hub.url, hub.cdn.url = f"http://{given.host}:{hub.port}", f"http://{given.host}:{hub.cdn.port}"
    with hub:
        file_server.follow(hub, given.log)


if __name__ == "__main__":
    main()
