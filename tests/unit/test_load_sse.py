"""Server-sent events: the standard's own examples, and every way to cut a stream."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrig.load.sse import SseParser


def events(*pieces: bytes) -> list[bytes]:
    parser = SseParser()
    return [event for piece in pieces for event in parser.feed(piece)]


# expected values: read off the standard's text by hand
CASES = [
    (b"data: a\n\n", [b"a"]),
    (b"data: a\r\n\r\n", [b"a"]),
    (b"data: a\r\r", [b"a"]),
    (b"data:a\n\n", [b"a"]),
    (b"data:  two spaces\n\n", [b" two spaces"]),
    (b"data: tail space \n\n", [b"tail space "]),
    (b"data: one\ndata: two\n\n", [b"one\ntwo"]),
    (b"data\n\n", [b""]),
    (b"data:\n\n", [b""]),
    (b"data\n\ndata\ndata\n\ndata:", [b"", b"\n"]),
    (b": keep-alive\n\n", []),
    (b": keep-alive\n\ndata: a\n\n: again\ndata: b\n\n", [b"a", b"b"]),
    (b"event: x\nid: 7\nretry: 10\ndata: a\n\n", [b"a"]),
    (b"datax: no\ndata : no\n\n", []),
    (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
    (b"data: \xef\xbb\xbfa\n\n", [b"\xef\xbb\xbfa"]),
    (b"\n\n\ndata: a\n\n\n\ndata: b\n\n", [b"a", b"b"]),
    (b"data: a\n\ndata: never ended\n", [b"a"]),
    (b"data: a: b\n\n", [b"a: b"]),
    (b"data: a\n\n\ndata: b\n\n", [b"a", b"b"]),
    (b"data: a\n\ndata:b\n\n", [b"a", b"b"]),
]


@pytest.mark.parametrize(("stream", "expected"), CASES)
def test_reads_as_the_standard_says(stream: bytes, expected: list[bytes]) -> None:
    assert events(stream) == expected


@pytest.mark.parametrize(("stream", "expected"), CASES)
def test_is_the_same_cut_at_every_byte(stream: bytes, expected: list[bytes]) -> None:
    for cut in range(len(stream) + 1):
        assert events(stream[:cut], stream[cut:]) == expected
    assert events(*(stream[i : i + 1] for i in range(len(stream)))) == expected


def reference(stream: bytes) -> list[bytes]:
    """The standard's algorithm, one character at a time, written for clearness."""
    text = stream.decode().removeprefix("\ufeff")
    lines, line, i = [], "", 0
    while i < len(text):
        if text[i] in "\r\n":
            lines.append(line)
            line = ""
            if text[i : i + 2] == "\r\n":
                i += 1
        else:
            line += text[i]
        i += 1
    out, data = [], None
    for item in lines:
        if item == "":
            if data is not None:
                out.append(data.removesuffix("\n").encode())
            data = None
        elif not item.startswith(":"):
            name, _, value = item.partition(":")
            if name == "data":
                data = (data or "") + value.removeprefix(" ") + "\n"
    return out


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["data: ", "data:", "data", ": ", "event: ", "id:", "", "x"]),
            st.text("aé€𝄞: \t", max_size=6),
            st.sampled_from(["\n", "\r\n", "\r", "\n\n", "\r\n\r\n"]),
        ),
        max_size=12,
    ),
    st.lists(st.integers(0, 200), max_size=8),
)
def test_any_stream_cut_anywhere_reads_as_the_reference(parts: list[tuple[str, str, str]], cuts: list[int]) -> None:
    stream = "".join(map("".join, parts)).encode()
    edges = sorted({min(cut, len(stream)) for cut in cuts} | {0, len(stream)})
    pieces = [stream[a:b] for a, b in itertools.pairwise(edges)]
    assert events(*pieces) == reference(stream)


def test_counts_comments() -> None:
    parser = SseParser()
    parser.feed(b": a\n\n: b\n\ndata: c\n\n")
    assert parser.comments == 2
