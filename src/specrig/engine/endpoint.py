"""What a server's URL and key may be; apart from the control client, whose HTTP library a worker has no use for."""

from __future__ import annotations

import urllib.parse

from specrig.errors import UsageError


def check_endpoint(base_url: str, api_key: str | None) -> None:
    """Refuse a URL that names no server, or a key that no header can carry, before anything is sent.

    Raises:
        UsageError: in one line, which never repeats a secret.
    """
    parts = urllib.parse.urlsplit(base_url)
    if "@" in parts.netloc:
        raise UsageError("the engine's URL has a user or password in it; expected http://HOST:PORT, give a key instead")
    if any(ord(letter) <= 32 for letter in base_url):
        raise UsageError(f"the engine's URL {base_url!r} holds a space or control character; expected http://HOST:PORT")
    try:
        port = parts.port
        (parts.hostname or "").encode("idna")
    except ValueError as error:
        raise UsageError(
            f"the engine's URL {base_url[:200]!r} can't be read: {error}; expected http://HOST:PORT"
        ) from None
    if parts.query or parts.fragment:
        raise UsageError(f"the engine's URL {base_url[:200]!r} has a part after its path; expected http://HOST:PORT")
    if port == 0:
        raise UsageError(f"the engine's URL {base_url!r} has port 0; expected the port that the server listens on")
    if api_key is not None and not all(32 < ord(letter) < 127 for letter in api_key):
        raise UsageError("the API key holds a character that no HTTP header takes; expected printable ASCII, no spaces")
