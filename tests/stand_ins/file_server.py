"""A file server with ranges, ETags and every fault on demand: for tests, and as a script in the lab.

As a script: ``file_server.py FOLDER PORT [--rate BYTES_PER_S] [--log FILE]`` serves the folder until it is ended.
Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import http.server
import pathlib
import re
import socket
import ssl
import threading
import time
import urllib.parse

PAGE = b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head><body>Please sign in</body></html>\n"


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    # Lets a test see every piece as it is sent.
    wbufsize = 0

    def log_message(self, *_args):
        """Say nothing on the screen; requests are in the mirror's log."""

    def do_HEAD(self):
        """Answer with the head alone."""
        self.answer(False)

    def do_GET(self):
        """Answer with a file, a part of it, or what a fault says."""
        self.answer(True)

    def answer(self, body):
        """Answer as the mirror's settings and the next fault of this file say."""
        mirror = self.server.mirror
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).lstrip("/")
        with mirror.lock:
            mirror.log.append((self.command, path, self.headers.get("Range"), self.headers.get("Authorization")))
            rows = mirror.faults.get((self.command, path)) or mirror.faults.get(path if body else None) or []
            fault = rows.pop(0) if rows else {}
        if "change" in fault:
            mirror.put(path, fault["change"])
        if "raw" in fault:
            self.connection.sendall(fault["raw"])
            self.close_connection = True
            return
        if "drop" in fault:
            self.close_connection = True
            return
        if "status" in fault:
            self.send_response(fault["status"])
            for name, value in fault.get("headers", {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        wanted = mirror.credentials
        if wanted is not None and self.headers.get("Authorization") != wanted:
            self.send_response(401)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if not body and not mirror.head:
            self.send_response(405)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if fault.get("page"):
            self.whole(PAGE, "text/html; charset=utf-8", None, fault, body)
            return
        content = mirror.read(path)
        if content is None:
            self.whole(PAGE, "text/html", None, {}, body, status=404)
            return
        self.file(path, content, fault, body)

    def file(self, path, content, fault, body):
        """A whole file or a part of one."""
        mirror, size = self.server.mirror, len(content)
        tag = mirror.tag(path, content)
        asked = re.match(r"^bytes=(\d+)-(\d*)$", self.headers.get("Range", ""))
        same = self.headers.get("If-Range") in (None, tag)
        if not (mirror.ranges and asked and same):
            self.whole(content, mirror.kinds.get(path, "application/octet-stream"), tag, fault, body)
            return
        first = int(asked.group(1))
        last = min(int(asked.group(2) or size), size - 1)
        if first >= size:
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{size}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if "part" in fault:
            last = min(last, first + fault["part"] - 1)
        shift = fault.get("shift", 0)
        self.send_response(206)
        total = fault.get("total", size)
        self.send_header("Content-Range", f"bytes {first + shift}-{last + shift}/{total}")
        self.send(content[first : last + 1], mirror.kinds.get(path, "application/octet-stream"), tag, fault, body)

    def whole(self, content, kind, tag, fault, body, status=200):
        """All of it."""
        self.send_response(status)
        if self.server.mirror.ranges and self.server.mirror.says_ranges:
            self.send_header("Accept-Ranges", "bytes")
        self.send(content, kind, tag, fault, body)

    def send(self, content, kind, tag, fault, body):
        """The rest of the head, and the body as far as the fault lets it come."""
        mirror = self.server.mirror
        self.send_header("Content-Type", kind)
        if tag:
            self.send_header("ETag", tag)
        if "coding" in fault:
            self.send_header("Content-Encoding", fault["coding"])
        chunked = fault.get("chunked", mirror.chunked)
        if chunked:
            self.send_header("Transfer-Encoding", "chunked")
        elif mirror.says_length or body:
            self.send_header("Content-Length", str(len(content) + fault.get("length", 0)))
        self.end_headers()
        if not body:
            return
        sent = content[: fault["cut"]] if "cut" in fault else content
        if chunked:
            for start in range(0, len(sent), 1000):
                piece = sent[start : start + 1000]
                self.connection.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
            if "cut" not in fault:
                self.connection.sendall(b"0\r\n\r\n")
        else:
            self.pieces(sent, fault)
        if "cut" in fault or fault.get("length", 0):
            self.close_connection = True
        if "stall" in fault:
            self.close_connection = True
            mirror.over.wait(30)
        if "reset" in fault:
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    def pieces(self, content, fault):
        """The body, no faster than the mirror's rate."""
        mirror = self.server.mirror
        sent = content[: fault["stall"]] if "stall" in fault else content
        step = 1 << 20 if not mirror.rate_bytes_s else 1 << 16
        for start in range(0, len(sent), step):
            self.connection.sendall(sent[start : start + step])
            if mirror.rate_bytes_s:
                time.sleep(len(sent[start : start + step]) / mirror.rate_bytes_s)


class Server(http.server.ThreadingHTTPServer):
    """The listener; a client that goes away is no news."""

    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request, client_address):
        """Say nothing."""


class Mirror:
    """What is served, how, and what was asked."""

    def __init__(self, files=None, folder=None, port=0, address="127.0.0.1", certificate=None, handler=Handler):
        self.files = dict(files or {})
        self.folder = folder
        self.faults = {}
        """Path (for GET) or (method, path) to a list of faults, one a request."""
        self.kinds = {}
        self.log = []
        self.ranges = self.says_ranges = self.head = self.says_length = self.tags = True
        self.chunked = False
        self.credentials = None
        self.rate_bytes_s = 0
        self.lock = threading.Lock()
        self.over = threading.Event()
        self.server = Server((address, port), handler)
        self.server.mirror = self
        scheme = "http"
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self.server.socket = context.wrap_socket(
                self.server.socket, server_side=True, do_handshake_on_connect=False
            )
            scheme = "https"
        self.port = self.server.server_address[1]
        self.url = f"{scheme}://{address}:{self.port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_args):
        self.over.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def put(self, path, content):
        """Replace a file."""
        self.files[path] = content

    def read(self, path):
        """A file's bytes, or None."""
        if path in self.files:
            return self.files[path]
        if self.folder is not None and ".." not in path:
            place = pathlib.Path(self.folder) / path
            if place.is_file():
                return place.read_bytes()
        return None

    def tag(self, path, content):
        """A file's ETag, or None where the server has none."""
        if callable(self.tags):
            return self.tags(path, content)
        return f'"{hashlib.sha256(content).hexdigest()[:20]}"' if self.tags else None

    def asked(self, method=None, path=None):
        """The requests so far: (method, path, Range, Authorization)."""
        with self.lock:
            return [row for row in self.log if method in (None, row[0]) and path in (None, row[1])]


def follow(mirror, log):
    """Write what is asked to a file, until this process is ended."""
    written = 0
    while True:
        time.sleep(0.05)
        rows = mirror.asked()
        if log and len(rows) > written:
            with pathlib.Path(log).open("a", encoding="utf-8") as handle:
                handle.writelines(f"{method} {path} {part}\n" for method, path, part, _own in rows[written:])
            written = len(rows)


def main():
    """Serve a folder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("port", type=int)
    parser.add_argument("--rate", type=float, default=0, help="bytes a second of a connection")
    parser.add_argument("--log")
    given = parser.parse_args()
    mirror = Mirror(folder=given.folder, port=given.port, address="0.0.0.0")
    mirror.rate_bytes_s = given.rate
    with mirror:
        follow(mirror, given.log)


if __name__ == "__main__":
    main()
