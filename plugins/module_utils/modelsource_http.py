# SPDX-License-Identifier: Apache-2.0
"""A model's files on an HTTP(S) server, such as a mirror in the LAN.  Does I/O: the network, two files of this machine.

The listing is a manifest, since a web server lists nothing that can be relied upon: MANIFEST.sha256 beside the files,
or one on this machine's disk.  A connection that is cut goes on where it was (Range), as long as the file is the same
one (If-Range and ETag).  Nothing but the standard library is needed.
"""

from __future__ import annotations

import base64
import concurrent.futures
import http.client
import json
import os
import re
import socket
import ssl
import stat
import threading
import time
import urllib.parse

from . import modelfiles
from .modelfiles import ModelError
from .modelsource import Source, SourceGone

CREDENTIALS_PATH = "/etc/specrig/model-credentials.json"
TIMEOUT_S = 30.0
# For a question whose answer can be done without.
HASTY_TIMEOUT_S = 5.0
RETRIES = 5
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 15.0
REDIRECTS = 5
LOOKS_AT_ONCE = 8
# So much has to come between two failures for the second one to count as the first.
PROGRESS_BYTES = 1024 * 1024
# A connection that is slower than this for as long as the timeout is given up, as one that stands still is.
SLOWEST_BYTES_S = 1024
FILL_BYTES = 256 * 1024
MANIFEST_LIMIT_BYTES = 16 * 1024 * 1024
WHOLE_FILE = 1 << 62

_CONTENT_RANGE = re.compile(r"^bytes (\d+)-(\d+)/(\d+|\*)$")
_TRANSIENT = (408, 425, 429)
_PAGE = re.compile(rb"^[\s\xef\xbb\xbf]*<(?:!doctype\s+html|html|head|body|\?xml)", re.IGNORECASE)


class Transient(Exception):
    """What another try may cure: why this one failed, and how long the server asks to be left alone."""

    def __init__(self, reason, pause_s=None):
        super().__init__(reason)
        self.pause_s = pause_s


def reason_of(problem, timeout_s):
    """A few words for what the network did."""
    if isinstance(problem, (socket.timeout, TimeoutError)):
        return "no answer within %g s" % timeout_s
    if isinstance(problem, socket.gaierror):
        return "its name cannot be resolved (%s)" % problem.strerror
    if isinstance(problem, http.client.RemoteDisconnected):
        return "the connection was closed without an answer"
    if isinstance(problem, http.client.IncompleteRead):
        return "the connection ended early"
    if isinstance(problem, http.client.HTTPException):
        return "what came is no HTTP (%s)" % (" ".join(str(problem).split())[:60] or type(problem).__name__)
    if isinstance(problem, OSError) and problem.strerror:
        return problem.strerror.lower()
    return " ".join(str(problem).split())[:100] or type(problem).__name__


def split_url(name, url):
    """The parts of a source's URL.  Raises ModelError, which never shows what may be a password in it."""
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError:
        raise ModelError(
            "model %s: its source is no URL that can be read; expected https://host/folder" % name
        ) from None
    if parts.username is not None or parts.password is not None or "@" in parts.netloc:
        raise ModelError(
            "model %s: the source's URL carries a name or password for %s; put them into model_store_credentials "
            "(vaulted) or %s (mode 0600) and take them out of the URL"
            % (name, parts.hostname or "its server", CREDENTIALS_PATH)
        )
    if parts.query or parts.fragment:
        raise ModelError(
            "model %s: the source's URL has a '?' or '#' part; expected the plain URL of a folder, credentials belong "
            "into model_store_credentials" % name
        )
    if not parts.hostname or re.search(r"[\x00-\x20\x7f]", url) or port == 0:
        raise ModelError("model %s: %r is no URL of a folder; expected https://host/folder" % (name, url))
    return parts


def origin_of(parts):
    return (parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80))


def _authorization(row):
    """The header's value for {"token"} or {"username", "password"}."""
    if set(row) == {"token"}:
        value = "Bearer " + row["token"]
    else:
        pair = "%s:%s" % (row["username"], row["password"])
        value = "Basic " + base64.b64encode(pair.encode("utf-8")).decode("ascii")
    if not re.match(r"^\S+ [!-~]+$", value):
        raise ValueError
    return value


def read_credentials(path):
    """{host or host:port: header value} of a file that nobody but its owner reads."""
    with open(path, encoding="utf-8") as handle:
        about = os.fstat(handle.fileno())
        mode = stat.S_IMODE(about.st_mode)
        if mode & 0o077:
            raise ModelError("%s holds credentials and has mode %04o; expected 0600: chmod 600 it" % (path, mode))
        text = handle.read()
    try:
        return {host.lower(): _authorization(row) for host, row in json.loads(text).items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        # The cause would show parts of the file.
        raise ModelError(
            '%s cannot be used; expected {"host": {"token": ...}} or {"host": {"username": ..., "password": ...}}'
            % path
        ) from None


def parts_of_range(text):
    """(first, last, total or None) of a Content-Range header, or None."""
    match = _CONTENT_RANGE.match(text or "")
    if not match:
        return None
    total = None if match.group(3) == "*" else int(match.group(3))
    return int(match.group(1)), int(match.group(2)), total


def pause_of(headers):
    """Seconds that Retry-After asks for, where it gives seconds."""
    text = headers.get("Retry-After", "")
    return float(text) if text.isdigit() else None


def version_of(headers):
    """What tells one version of a file from the next: its ETag, else its time, else nothing is known."""
    return headers.get("ETag") or headers.get("Last-Modified") or ""


def same_version(known, headers):
    """Whether an answer is of the version that is known; an answer that does not say is taken as such."""
    said = headers.get("ETag") if known.startswith(('"', "W/")) else headers.get("Last-Modified")
    weak = lambda tag: tag[2:] if tag.startswith("W/") else tag  # noqa: E731
    return not known or not said or weak(known) == weak(said)


class Answer:
    """The head of an answer, and its body as it comes."""

    def __init__(self, client, key, connection, response, url):
        self._client, self._key = client, key
        self._connection, self._response = connection, response
        self.url, self.status, self.reason = url, response.status, response.reason
        self.headers = response.headers
        self.left = response.length
        self._began, self._came = time.monotonic(), 0

    def readinto(self, view):
        """Bytes that came, 0 at the end of the body.  Raises Transient."""
        try:
            if self._response.chunked:
                data = self._response.read1(len(view))
                count = len(data)
                view[:count] = data
            elif self.left == 0 or self._response.fp is None:
                return 0
            else:
                count = self._response.fp.readinto1(view if self.left is None else view[: self.left])
        except (OSError, ValueError, http.client.HTTPException) as problem:
            raise Transient(reason_of(problem, self._client.timeout_s)) from None
        if self.left is not None:
            if not count and self.left:
                raise Transient("the connection ended early")
            self.left -= count
        self._came += count
        elapsed = time.monotonic() - self._began
        if elapsed > self._client.timeout_s:
            if self._came < SLOWEST_BYTES_S * elapsed:
                raise Transient("less than %d bytes a second came for %g s" % (SLOWEST_BYTES_S, elapsed))
            self._began, self._came = time.monotonic(), 0
        return count

    def close(self):
        """Keep the connection for the next request where the whole body was read, else close it."""
        whole = self.left == 0 and not self._response.chunked and not self._response.will_close
        if whole:
            # http.client wants to see for itself that nothing is left, before it takes the next request.
            self._response.length = 0
            self._response.read()
            self._response.close()
            self._client.keep(self._key, self._connection)
        else:
            self._response.close()
            self._connection.close()


class Client:
    """Asks servers; keeps connections that are done, for threads that want one."""

    def __init__(self, name, ca_file=None, credentials=None, timeout_s=TIMEOUT_S):
        self._name, self._ca_file, self.credentials, self.timeout_s = name, ca_file, credentials or {}, timeout_s
        self._idle, self._lock, self._context = {}, threading.Lock(), None

    def hasty(self):
        """Another one like it, for a question that is not worth a long wait."""
        return Client(self._name, self._ca_file, self.credentials, min(self.timeout_s, HASTY_TIMEOUT_S))

    def keep(self, key, connection):
        with self._lock:
            self._idle.setdefault(key, []).append(connection)

    def close(self):
        """Close what nobody uses; the client may be used again."""
        with self._lock:
            rows = [connection for idle in self._idle.values() for connection in idle]
            self._idle = {}
        for connection in rows:
            connection.close()

    __del__ = close

    def _kept(self, key):
        with self._lock:
            rows = self._idle.get(key)
            return rows.pop() if rows else None

    def _trusted(self):
        with self._lock:
            if self._context is None:
                context = ssl.create_default_context()
                if self._ca_file:
                    try:
                        context.load_verify_locations(cafile=self._ca_file)
                    except (OSError, ssl.SSLError) as problem:
                        raise ModelError(
                            "model %s: ca_file %s cannot be used (%s); expected certificates in PEM form"
                            % (self._name, self._ca_file, getattr(problem, "strerror", None) or problem)
                        ) from None
                self._context = context
            return self._context

    def _connect(self, key):
        scheme, host, port = key
        if scheme == "https":
            connection = http.client.HTTPSConnection(host, port, timeout=self.timeout_s, context=self._trusted())
        else:
            connection = http.client.HTTPConnection(host, port, timeout=self.timeout_s)
        try:
            connection.connect()
        except ssl.SSLCertVerificationError as problem:
            raise ModelError(
                "%s://%s:%d has a certificate that this machine does not trust (%s); name the CA's file as "
                "ca_file of model %s" % (scheme, host, port, problem.verify_message, self._name)
            ) from None
        except ssl.SSLError as problem:
            raise ModelError(
                "%s:%d does not speak TLS as expected (%s); correct the scheme or port of the source of model %s"
                % (host, port, (problem.reason or str(problem)).lower().replace("_", " "), self._name)
            ) from None
        except (OSError, UnicodeError) as problem:
            raise Transient(reason_of(problem, self.timeout_s)) from None
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _header(self, key):
        _scheme, host, port = key
        return self.credentials.get("%s:%d" % (host, port)) or self.credentials.get(host)

    def _once(self, method, url, headers, first):
        parts = urllib.parse.urlsplit(url)
        key = origin_of(parts)
        headers = dict(headers)
        own = self._header(key)
        # Whom somebody else's redirect leads to is not told anybody's secret: it is sent to whom it was given for.
        if own and (key == first or key[0] == "https"):
            headers["Authorization"] = own
        target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        while True:
            connection = self._kept(key)
            fresh = connection is None
            if fresh:
                connection = self._connect(key)
            try:
                connection.request(method, target, headers=headers)
                response = connection.getresponse()
            except (OSError, http.client.HTTPException, UnicodeError) as problem:
                connection.close()
                if not fresh:
                    # The server had enough of a connection that stood idle; that says nothing about the next one.
                    continue
                raise Transient(reason_of(problem, self.timeout_s)) from None
            return Answer(self, key, connection, response, url)

    def ask(self, method, url, headers=None):
        """The answer after redirects.  Raises Transient, or ModelError where another try is of no use."""
        headers = dict({"Accept-Encoding": "identity", "User-Agent": "specrig"}, **(headers or {}))
        first = origin_of(urllib.parse.urlsplit(url))
        asked = url
        for _count in range(REDIRECTS + 1):
            answer = self._once(method, url, headers, first)
            place = answer.headers.get("Location")
            if answer.status not in (301, 302, 303, 307, 308) or not place:
                return answer
            answer.close()
            target = urllib.parse.urljoin(url, place)
            try:
                parts = urllib.parse.urlsplit(target)
                known = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1)
            except ValueError:
                known = False
            if not known:
                raise ModelError("%s is redirected to what is no http(s) URL; correct the server" % asked)
            if url.startswith("https:") and parts.scheme != "https":
                raise ModelError(
                    "%s is redirected from https to plain http at %s, which is refused; correct the server"
                    % (asked, parts.hostname)
                )
            url = urllib.parse.urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, parts.query, ""))
        raise ModelError("%s is redirected more than %d times in a row; correct the server" % (asked, REDIRECTS))


class HttpReader:
    """A part of a file on the server, for one thread; goes on by itself where the connection is cut."""

    def __init__(self, source, path, row, offset, end):
        self._source, self._path, self._row = source, path, row
        self._position = offset
        self._stop = row["size"] if end is None else min(end, row["size"])
        self._answer, self._asked = None, offset
        self._failures, self._since = 0, 0

    def readinto(self, view):
        """Bytes that came, 0 at the part's end."""
        want = min(len(view), self._stop - self._position)
        enough, count = min(want, FILL_BYTES), 0
        while count < enough:
            try:
                if self._answer is None:
                    self._ask()
                got = self._answer.readinto(view[count:want])
                if not got:
                    if self._answer.status == 206 and self._position > self._asked:
                        # A server may give less than it was asked for.
                        self.close()
                        continue
                    raise Transient("the connection ended early")  # noqa: TRY301 (told as any other end)
            except Transient as problem:
                self.close()
                self._failed(problem)
                if count:
                    break
                continue
            count += got
            self._position += got
            self._since += got
            if self._since >= PROGRESS_BYTES:
                self._failures = 0
        if want and self._position >= self._stop:
            self.close()
        return count

    def _failed(self, problem):
        if self._since >= PROGRESS_BYTES:
            self._failures = 0
        self._since = 0
        self._failures += 1
        source = self._source
        if self._failures > source.retries:
            raise ModelError(
                "%s: %s at byte %d of %d, %d times in a row; look after the server or the network and run again, what "
                "is proven is kept"
                % (source.where(self._path), problem, self._position, self._row["size"], self._failures)
            )
        source.rest(self._failures, problem)

    def _changed(self, how):
        raise ModelError(
            "%s was changed on the server while it was read (%s); run again, and make a new manifest if the new one is "
            "wanted" % (self._source.where(self._path), how)
        )

    def _ask(self):
        source, row, size = self._source, self._row, self._row["size"]
        headers = {}
        if self._position or self._stop < size:
            headers["Range"] = "bytes=%d-%d" % (self._position, self._stop - 1)
            version = row["version"]
            if version and not version.startswith("W/"):
                headers["If-Range"] = version
        answer = source.client.ask("GET", source.url_of(self._path), headers)
        try:
            if answer.status == 416:
                self._changed("it no longer has byte %d" % self._position)
            source.judge(answer, self._path)
            if not same_version(row["version"], answer.headers):
                self._changed("%s, was %s" % (version_of(answer.headers), row["version"]))
            source.check_kind(answer, self._path, row)
            if answer.status == 206:
                self._check_part(answer, headers)
            else:
                self._check_whole(answer)
        except BaseException:
            answer.close()
            raise
        self._answer, self._asked = answer, self._position

    def _check_part(self, answer, headers):
        found = parts_of_range(answer.headers.get("Content-Range"))
        size, where = self._row["size"], self._source.where(self._path)
        if found is not None and found[2] not in (None, size):
            self._changed("%d bytes, was %d" % (found[2], size))
        if found is None or found[0] != self._position or not found[0] <= found[1] < self._stop:
            raise ModelError(
                "%s: the server was asked for %s and answered %r; its ranges cannot be relied upon, correct it or its "
                "proxy" % (where, headers.get("Range", "the whole file"), answer.headers.get("Content-Range"))
            )
        length = found[1] - found[0] + 1
        if answer.left is not None and answer.left != length:
            raise ModelError(
                "%s: the server announces %d bytes for a part of %d; correct it or its proxy"
                % (where, answer.left, length)
            )
        answer.left = length if not self._chunked(answer) else answer.left

    @staticmethod
    def _chunked(answer):
        return "chunked" in answer.headers.get("Transfer-Encoding", "").lower()

    def _check_whole(self, answer):
        size = self._row["size"]
        if answer.left is not None and answer.left != size:
            # Of a connection that was cut within the head of an answer the last number may be the half of one.
            raise Transient("it announces %d bytes and had %d when it was listed" % (answer.left, size))
        if not self._position:
            return
        # No ranges: the file comes from its start, and what is there already is passed over.
        self._source.lacks_ranges()
        scratch, passed = memoryview(bytearray(FILL_BYTES)), 0
        while passed < self._position:
            got = answer.readinto(scratch[: self._position - passed])
            if not got:
                raise Transient("the connection ended early")
            passed += got

    def close(self):
        if self._answer is not None:
            self._answer.close()
            self._answer = None


class HttpSource(Source):
    """A folder of an HTTP(S) server, listed by a manifest.

    An entry's further keys: ``manifest``, a manifest on this machine's disk instead of the server's; ``ca_file``, CAs
    to trust beside the system's; ``credentials_file``, instead of CREDENTIALS_PATH.
    """

    remote = True

    def __init__(self, name, about, retries=RETRIES, timeout_s=TIMEOUT_S, first_pause_s=FIRST_PAUSE_S):
        super().__init__(name, about)
        parts = split_url(name, self.place)
        self.place = self.place.rstrip("/")
        self.host = parts.hostname
        self.retries, self._first_pause_s = retries, first_pause_s
        self._manifest_path = about.get("manifest")
        if self._manifest_path and not os.path.isabs(self._manifest_path):
            raise ModelError(
                "model %s: manifest %s is no absolute path; expected a file of this machine, or none where the server "
                "has %s" % (name, self._manifest_path, modelfiles.MANIFEST_NAME)
            )
        credentials = about.get("credentials_file")
        if not credentials and os.path.exists(CREDENTIALS_PATH):
            credentials = CREDENTIALS_PATH
        try:
            known = read_credentials(credentials) if credentials else {}
        except (OSError, UnicodeDecodeError) as problem:
            raise ModelError(
                "model %s: credentials_file %s cannot be read (%s)"
                % (name, credentials, getattr(problem, "strerror", None) or "it is no text")
            ) from None
        self.client = Client(name, about.get("ca_file"), known, timeout_s)
        self._rows, self._manifest, self._lock = {}, None, threading.Lock()

    def url_of(self, path):
        return "%s/%s" % (self.place, urllib.parse.quote(path))

    def rest(self, failures, problem):
        """Waits before the next try: longer each time, or as long as the server asked."""
        pause = min(LONGEST_PAUSE_S, self._first_pause_s * 2 ** (failures - 1))
        asked = getattr(problem, "pause_s", None)
        time.sleep(pause if asked is None else min(LONGEST_PAUSE_S, max(pause, asked)))

    def lacks_ranges(self):
        """Notes that a file cannot be read from its middle, once."""
        with self._lock:
            if self.segment_bytes != WHOLE_FILE:
                self.segment_bytes = WHOLE_FILE
                self.notes.append(
                    "the server of model %s gives no ranges: one connection a file, which starts again where it is cut"
                    % self.name
                )

    def judge(self, answer, path):
        """Raises Transient or ModelError where a status is not what a file's answer has."""
        status, where = answer.status, self.where(path)
        if status in (200, 206):
            coding = answer.headers.get("Content-Encoding", "identity").lower()
            if coding not in ("", "identity"):
                raise ModelError("%s comes compressed (%s) though nobody asked; switch that off" % (where, coding))
            return
        if status in (401, 403):
            host = urllib.parse.urlsplit(answer.url).hostname
            given = host in self.client.credentials or any(
                key.startswith(host + ":") for key in self.client.credentials
            )
            raise ModelError(
                "%s: the server %s (%d); %s %s in model_store_credentials, or in %s (mode 0600)"
                % (
                    where,
                    "refuses the credentials it was given" if given else "wants credentials",
                    status,
                    "correct those of" if given else "name them for",
                    host,
                    CREDENTIALS_PATH,
                )
            )
        if status in (404, 410):
            if path == modelfiles.MANIFEST_NAME:
                raise ModelError(
                    "%s is not there (%d); make it with sha256sum in that folder, or name one on this machine's disk "
                    "as manifest of model %s" % (where, status, self.name)
                )
            raise ModelError(
                "%s is not on the server (%d), and its manifest names it; put it there, or correct the manifest"
                % (where, status)
            )
        said = "the server answered %d %s" % (status, (answer.reason or "").strip())
        if status >= 500 or status in _TRANSIENT:
            raise Transient(said.strip(), pause_of(answer.headers))
        raise ModelError("%s: %s; expected the file, look at the server's log" % (where, said.strip()))

    def check_kind(self, answer, path, row=None):
        """Raises ModelError where a web page (of a login, a portal, an error) stands in for a file."""
        kind = answer.headers.get("Content-Type", "").split(";")[0].strip().lower()
        if kind != "text/html" or path.endswith((".html", ".htm")) or (row or {}).get("page") is False:
            return False
        if row is not None and "page" not in row:
            self._refuse_page(path)
        return True

    def _refuse_page(self, path):
        raise ModelError(
            "%s is a web page instead of the file: that of a login, a portal or an error; open it in a browser to see, "
            "and correct the source or the server" % self.where(path)
        )

    def _refuse_length(self, path, limit):
        raise ModelError("%s has more than %d bytes; that is no manifest" % (self.where(path), limit))

    def _tried(self, path, once, retries=None):
        """What ``once`` returns, tried again while that may help.  Raises SourceGone where nothing answers."""
        failures = 0
        while True:
            try:
                return once()
            except Transient as problem:
                failures += 1
                if failures > (self.retries if retries is None else retries):
                    raise SourceGone(
                        "%s: %s%s; look after the server %s or the way to it"
                        % (
                            self.where(path),
                            problem,
                            ", %d times in a row" % failures if failures > 1 else "",
                            self.host,
                        )
                    ) from None
                self.rest(failures, problem)

    def _whole(self, path, limit, patient=True):
        """A small file's bytes."""
        client = self.client if patient else self.client.hasty()

        def once():
            answer = client.ask("GET", self.url_of(path))
            try:
                self.judge(answer, path)
                data, view = bytearray(), memoryview(bytearray(FILL_BYTES))
                while len(data) <= limit:
                    got = answer.readinto(view)
                    if not got:
                        break
                    data += view[:got]
                return bytes(data)
            finally:
                answer.close()

        try:
            data = self._tried(path, once, None if patient else 0)
            if _PAGE.match(data):
                self._refuse_page(path)
            if len(data) > limit:
                self._refuse_length(path, limit)
        except ModelError as problem:
            # Who can do without the answer is not stopped by a wrong one.
            raise problem if patient else SourceGone(str(problem)) from None
        finally:
            if client is not self.client:
                client.close()
        return data

    def _near(self):
        """The text of the manifest on this machine's disk."""
        try:
            with open(self._manifest_path, encoding="utf-8") as handle:
                return handle.read()
        except UnicodeDecodeError:
            raise ModelError("%s is no text; make it with sha256sum" % self._manifest_path) from None
        except OSError as problem:
            raise ModelError(
                "the manifest %s of model %s cannot be read (%s)" % (self._manifest_path, self.name, problem.strerror)
            ) from None

    def manifest(self, patient=True):
        if self._manifest is None:
            if self._manifest_path:
                text = self._near()
            else:
                try:
                    text = self._whole(modelfiles.MANIFEST_NAME, MANIFEST_LIMIT_BYTES, patient).decode("utf-8")
                except UnicodeDecodeError:
                    raise ModelError(
                        "%s is no text; make it with sha256sum" % self.where(modelfiles.MANIFEST_NAME)
                    ) from None
            self._manifest = modelfiles.seen(modelfiles.parse_manifest(text))
        return dict(self._manifest)

    def _look(self, path):
        """One file's row."""
        url = self.url_of(path)
        answer = self.client.ask("HEAD", url)
        try:
            head = answer.status not in (405, 501)
            if head:
                self.judge(answer, path)
                page = self.check_kind(answer, path)
                size = answer.headers.get("Content-Length", "")
                ranges = answer.headers.get("Accept-Ranges", "").lower()
                row = {"size": int(size) if size.isdigit() else None, "version": version_of(answer.headers)}
        finally:
            answer.close()
        if head and row["size"] is not None and ranges and not page:
            if ranges == "none":
                self.lacks_ranges()
            return row
        # Not every server answers HEAD, says the size, or says that it has ranges: a look at the start tells.
        answer = self.client.ask("GET", url, {"Range": "bytes=0-511"})
        try:
            if answer.status == 416:
                return {"size": 0, "version": version_of(answer.headers)}
            self.judge(answer, path)
            found = parts_of_range(answer.headers.get("Content-Range")) if answer.status == 206 else None
            if answer.status == 200:
                size = answer.left
                if size:
                    self.lacks_ranges()
            else:
                size = found[2] if found else None
            if size is None:
                size = row["size"] if head else None
            if size is None:
                raise ModelError(
                    "%s: the server does not say how long it is (no Content-Length); serve it as a plain file"
                    % self.where(path)
                )
            made = {"size": size, "version": version_of(answer.headers)}
            if head and row["size"] not in (None, size):
                raise ModelError(
                    "%s: the server says %d bytes to HEAD and %d to GET; correct it or its proxy"
                    % (self.where(path), row["size"], size)
                )
            if self.check_kind(answer, path):
                start, view = bytearray(), memoryview(bytearray(512))
                while len(start) < 64:
                    got = answer.readinto(view)
                    if not got:
                        break
                    start += view[:got]
                if _PAGE.match(bytes(start)):
                    self._refuse_page(path)
                made["page"] = False
            return made
        finally:
            answer.close()

    def list(self):
        paths = sorted(self.manifest())
        if not paths:
            raise ModelError("the manifest of model %s names no file that is not hidden; make it again" % self.name)
        rows, problems = {}, {}
        with concurrent.futures.ThreadPoolExecutor(max_workers=min(LOOKS_AT_ONCE, len(paths))) as pool:
            jobs = {path: pool.submit(self._tried, path, lambda path=path: self._look(path)) for path in paths}
            for path, job in jobs.items():
                try:
                    rows[path] = job.result()
                except ModelError as problem:
                    problems[path] = problem
                    for other in jobs.values():
                        other.cancel()
                except concurrent.futures.CancelledError:
                    continue
        if problems:
            raise problems[min(problems)]
        self._rows = rows
        return {path: {"size": row["size"], "version": row["version"]} for path, row in rows.items()}

    def open(self, path, offset, end=None):
        row = self._rows.get(path)
        if row is None:
            row = self._rows[path] = self._tried(path, lambda: self._look(path))
        return HttpReader(self, path, row, offset, end)

    def close(self):
        self.client.close()
