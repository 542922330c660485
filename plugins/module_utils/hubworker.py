# SPDX-License-Identifier: Apache-2.0
"""What runs in the hub's own virtual environment: huggingface_hub lists and downloads, as lines on a pipe ask for it.

Does I/O: the network, and the cache's folder.  Started with its own source as ``python -c``; it takes one JSON object a
line and answers with one a line; it ends with its standard input, so that it never outlives who started it.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading


def follow(lines):
    """Hands requests over, and ends this process with whoever started it, whatever it does at the time."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(3)


def kind_of(problem, errors):
    """What went wrong, in one word that the module has a sentence for, and the HTTP status where there is one."""
    chain, seen = problem, []
    while chain is not None and chain not in seen and len(seen) < 10:
        seen.append(chain)
        chain = chain.__cause__ or chain.__context__
    status = None
    for one in seen:
        response = getattr(one, "response", None)
        status = status or getattr(response, "status_code", None)
    for name, kind in (
        ("GatedRepoError", "gated"),
        ("DisabledRepoError", "disabled"),
        ("RevisionNotFoundError", "revision"),
        ("RepositoryNotFoundError", "repository"),
        ("RemoteEntryNotFoundError", "entry"),
        ("FileMetadataError", "no-hub"),
    ):
        if any(isinstance(one, getattr(errors, name, ())) for one in seen):
            return kind, status
    if status in (401, 403):
        return "refused", status
    if status is not None:
        return "status", status
    full = [one for one in seen if isinstance(one, OSError) and one.errno in (28, 122)]
    if full:
        return "space", None
    names = {name for one in seen for name in [base.__name__ for base in type(one).__mro__]}
    if names & {"TransportError", "NetworkError", "ConnectError", "TimeoutException", "ConnectionError"}:
        return "network", None
    if isinstance(problem, (json.JSONDecodeError, KeyError, TypeError, AttributeError)):
        return "no-hub", None
    return "other", None


def words(problem):
    """The innermost cause that says something, in one line."""
    text = ""
    while problem is not None:
        text = " ".join(str(problem).split()) or text
        problem = problem.__cause__
    return text.split(". ")[0].split(", so ")[0][:200]


def trust(ca_file):
    """Take further certificates for good."""
    import ssl

    import huggingface_hub
    from huggingface_hub.utils import _http

    library = getattr(_http, "httpx2", None) or _http.httpx
    context = ssl.create_default_context()
    context.load_verify_locations(cafile=ca_file)
    made = _http.default_client_factory

    def factory():
        client = made()
        hooks = client.event_hooks
        client.close()
        return library.Client(event_hooks=hooks, follow_redirects=True, timeout=None, verify=context)

    huggingface_hub.set_client_factory(factory)


def listed(api, given):
    """Every file of a revision with what proves it."""
    rows = []
    for entry in api.list_repo_tree(given["repo"], revision=given["revision"], recursive=True):
        if not hasattr(entry, "size"):
            continue
        lfs = getattr(entry, "lfs", None)
        rows.append(
            {
                "path": entry.path,
                "size": lfs.size if lfs else entry.size,
                "sha256": lfs.sha256 if lfs else None,
                "blob_id": None if lfs else entry.blob_id,
            }
        )
    return rows


def main():
    lines, out = queue.Queue(), os.fdopen(os.dup(1), "w")
    # Whatever a library prints is no answer.
    os.dup2(2, 1)
    threading.Thread(target=follow, args=(lines,), daemon=True).start()
    hub = None
    while True:
        given = json.loads(lines.get())
        try:
            if hub is None:
                import huggingface_hub as hub
                from huggingface_hub import errors

                if given.get("ca_file"):
                    trust(given["ca_file"])
            endpoint, token = given.get("endpoint") or None, given.get("token") or False
            if given["do"] == "list":
                answer = {"files": listed(hub.HfApi(endpoint=endpoint, token=token), given)}
            else:
                import glob

                folder = hub.snapshot_download(
                    given["repo"],
                    revision=given["revision"],
                    cache_dir=given["cache"],
                    endpoint=endpoint,
                    token=token,
                    allow_patterns=[glob.escape(path) for path in given["files"]],
                    max_workers=given["workers"],
                )
                answer = {"folder": folder}
            answer["version"] = hub.__version__
        except Exception as problem:
            if hub is None:
                answer = {"error": "library", "text": words(problem)}
            else:
                kind, status = kind_of(problem, errors)
                answer = {"error": kind, "status": status, "text": words(problem), "type": type(problem).__name__}
        out.write(json.dumps(answer) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
