"""Whole HTTP answers of all three routes, cut anywhere, through the client's connection: always the same trace."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrig.load import stream as streams
from specrig.load.api import API_PATHS, Ask, make_decoder, request_body
from specrig.load.stream import Exchange, StreamClient, Timeouts, _Connection
from specrig.sim.testing import running_sim

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
SAMPLES = {
    "constructed_generate_stream_cumulative": "sglang",
    "constructed_generate_stream_incremental": "sglang",
    "constructed_generate_stream_scheduler_abort": "sglang",
    "constructed_chat_stream": "openai-chat",
    "live-0.5.23-cpu/generate_stream": "sglang",
    "live-0.5.23-cpu/chat_stream": "openai-chat",
    "live-0.5.23-cpu/completions_stream": "openai-completions",
}


class Wire(asyncio.Transport):
    """A transport that takes everything and sends nothing."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Take it."""

    def abort(self) -> None:
        """Nothing is open."""

    def is_closing(self) -> bool:
        """Never."""
        return False


class Reader:
    """Feeds answers to a connection of the client; packet number i arrives at time i."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.client = StreamClient("http://engine:30000")

    async def _read(self, api: str, packets: Iterable[bytes]) -> Exchange:
        connection = _Connection(self.client)
        connection.connection_made(Wire())
        exchange = Exchange(b"", make_decoder(api, lambda text: len(text.split()) or 1), Timeouts())
        connection.start(exchange)
        with pytest.MonkeyPatch.context() as patch:
            now = [0.0]
            patch.setattr(streams, "clock", lambda: now[0])
            for number, packet in enumerate(packets):
                now[0] = float(number)
                if number % 3 == 2:
                    self.client._drain()  # what came is sometimes looked at before the next packet, sometimes after
                connection.data_received(packet)
            await asyncio.wait_for(exchange.future, 5)
        self.client._idle.clear()
        self.client._connections.clear()
        return exchange

    def read(self, api: str, *packets: bytes) -> Exchange:
        return self.loop.run_until_complete(self._read(api, packets))


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    made = Reader()
    yield made
    made.loop.close()


def trace(exchange: Exchange) -> tuple[Any, ...]:
    """Everything of an answer but its times."""
    decoder = exchange.decoder
    assert decoder is not None
    assert len(decoder.t) == len(decoder.k)
    assert all(a <= b for a, b in itertools.pairwise(decoder.t))
    return (
        *(exchange.error, exchange.message, exchange.status, decoder.terminal, decoder.finish_reason),
        *(tuple(decoder.k), decoder.text, decoder.reasoning_text, decoder.output_ids),
        *(decoder.prompt_tokens, decoder.cached_tokens, decoder.verify_steps, decoder.correct_drafts),
    )


def chunked(*parts: bytes) -> bytes:
    """An HTTP answer whose body is these chunks."""
    return HEAD + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts if part) + b"0\r\n\r\n"


def body_of(samples: Path, name: str) -> bytes:
    lines = (samples / "sglang" / f"{name}.sse").read_bytes().splitlines(keepends=True)
    return b"".join(line for line in lines if not line.startswith(b"#"))


def framed(events: Sequence[bytes], end: bytes, *, space: bytes = b" ", noise: bytes = b"", bom: bytes = b"") -> bytes:
    """Events as another server writes them: its line ends, comments, and JSON over several data lines."""
    out = bom
    for number, event in enumerate(events):
        lines = [event]
        if event.startswith(b"{") and number % 2:
            lines = [b"{", event[1:-1], b"}"]
        out += noise.replace(b"\n", end) + b"".join(b"data:%b%b%b" % (space, line, end) for line in lines) + end
    return out


FRAMES: dict[str, dict[str, bytes]] = {
    "LF": {"end": b"\n"},
    "CRLF": {"end": b"\r\n"},
    "CR": {"end": b"\r"},
    "no space": {"end": b"\n", "space": b""},
    "BOM": {"end": b"\n", "bom": b"\xef\xbb\xbf"},
    "comments": {"end": b"\r\n", "noise": b": keep-alive\n\n: \xf0\x9d\x84\x9e\nid: 7\nevent: x\nretry: 9\n"},
}


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("name", SAMPLES)
def test_every_recorded_stream_in_every_framing(name: str, frame: str, samples: Path, reader: Reader) -> None:
    """Cut at every byte, and in HTTP's chunks with their boundary at every byte."""
    api, body = SAMPLES[name], body_of(samples, name)
    expected = trace(reader.read(api, chunked(body)))
    assert expected[3] is True
    events = [part.removeprefix(b"data: ") for part in body.split(b"\n\n") if part]
    other = framed(events, **FRAMES[frame])
    whole = chunked(other[: len(other) // 3], other[len(other) // 3 :])
    for cut in range(1, len(whole)):
        assert trace(reader.read(api, whole[:cut], whole[cut:])) == expected, whole[cut - 40 : cut + 40]
    assert trace(reader.read(api, *(whole[i : i + 1] for i in range(len(whole))))) == expected
    # a chunk of HTTP for every byte, and each boundary of two chunks at every byte
    assert trace(reader.read(api, chunked(*(other[i : i + 1] for i in range(len(other)))))) == expected
    for cut in range(1, len(other)):
        assert trace(reader.read(api, chunked(other[:cut], other[cut:]))) == expected


def test_a_short_stream_cut_at_every_pair_of_bytes(reader: Reader) -> None:
    meta = {"completion_tokens": 2, "finish_reason": {"type": "length"}}
    event = json.dumps({"text": " é𝄞", "output_ids": [7, 8], "meta_info": meta}, ensure_ascii=False).encode()
    for end in (b"\n", b"\r\n", b"\r"):
        body = framed([event, b"[DONE]"], end, noise=b":\n\n")
        whole = HEAD + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        expected = trace(reader.read("sglang", whole))
        assert expected[5:9] == ((2,), " é𝄞", None, [7, 8])
        assert expected[0] is None
        begin = len(HEAD) - 4  # cuts inside the head are tested above
        for one, two in itertools.combinations(range(begin, len(whole)), 2):
            assert trace(reader.read("sglang", whole[:one], whole[one:two], whole[two:])) == expected


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_stamps_are_those_of_the_packet_that_ended_the_event(data: st.DataObject) -> None:
    """k tokens arrive with the byte that ends their event, wherever packets and HTTP's chunks are cut."""
    counts = data.draw(st.lists(st.integers(1, 16), min_size=1, max_size=8))
    end = data.draw(st.sampled_from([b"\n", b"\r\n"]))
    totals = list(itertools.accumulate(counts))
    body, ends = b"", []
    for number, total in enumerate(totals):
        finish = {"type": "length"} if number == len(totals) - 1 else None
        meta = {"completion_tokens": total, "finish_reason": finish}
        event = {"text": "€" * total, "output_ids": list(range(total)), "meta_info": meta}
        noise = data.draw(st.sampled_from([b"", b": ping\n\n"]))
        body += framed([json.dumps(event, ensure_ascii=False).encode()], end, noise=noise)
        # the LF of a CR LF comes after the line has ended
        ends.append(len(body) - (2 if end == b"\r\n" else 1))
    body += framed([b"[DONE]"], end)
    borders = sorted({0, len(body), *data.draw(st.lists(st.integers(1, len(body) - 1), max_size=6))})
    whole, places = HEAD, {}
    for a, b in itertools.pairwise(borders):
        whole += b"%x\r\n" % (b - a)
        places.update({i: len(whole) + i - a for i in range(a, b)})
        whole += body[a:b] + b"\r\n"
    whole += b"0\r\n\r\n"
    cuts = sorted({len(whole), *data.draw(st.lists(st.integers(1, len(whole) - 1), max_size=12))})
    packets = [whole[a:b] for a, b in itertools.pairwise([0, *cuts])]
    made = Reader()
    try:
        exchange = made.read("sglang", *packets)
    finally:
        made.loop.close()
    assert exchange.error is None
    decoder = exchange.decoder
    assert decoder is not None
    assert decoder.k == counts
    assert decoder.text == "€" * totals[-1]
    assert decoder.t == [bisect_left(cuts, places[place] + 1) for place in ends]


def raw_answer(port: int, path: str, body: bytes) -> bytes:
    """Everything that a server sends to one request on a connection of its own."""
    head = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % (
        path.encode(),
        len(body),
    )
    with socket.create_connection(("127.0.0.1", port), timeout=20) as raw:
        raw.sendall(head + body)
        return b"".join(iter(lambda: raw.recv(65536), b""))


@pytest.mark.parametrize("incremental", [False, True], ids=["cumulative", "incremental"])
def test_the_simulated_engines_answers_cut_at_every_byte(
    incremental: bool, tokenizer_dir: Path, reader: Reader
) -> None:
    """Multi-byte text with comments, events in every legal spelling, on all routes."""
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    with running_sim(
        model_path=tokenizer_dir,
        sim_time_scale=0.1,
        sim_fault=["split-utf8=0", "keepalive-comments", "sse-variants"],
        incremental_streaming_output=incremental,
        reasoning_parser="qwen3",
    ) as sim:
        for api in API_PATHS:
            ask = Ask(max_tokens=5, ids=list(range(900, 930)), messages=messages, rid=api)
            whole = raw_answer(sim.port, API_PATHS[api], request_body(api, "m", ask))
            expected = trace(reader.read(api, whole))
            assert expected[0] is None
            assert (sum(expected[5]), expected[4]) == (5, "length")
            assert expected[6]
            assert not expected[6].isascii()
            assert "�" not in expected[6][:-1]  # the length may end inside a character
            for cut in range(1, len(whole)):
                assert trace(reader.read(api, whole[:cut], whole[cut:])) == expected


def test_an_event_of_megabytes_is_read_in_pieces(reader: Reader) -> None:
    """A long cumulative event must not cost more per byte than a short one: no buffer is read anew for each piece."""
    ids = list(range(200_000))
    meta = {"completion_tokens": len(ids), "finish_reason": {"type": "length"}}
    event = json.dumps({"text": " word" * 200_000, "output_ids": ids, "meta_info": meta}).encode()
    whole = chunked(b"data: " + event + b"\n\n", b"data: [DONE]\n\n")
    pieces = [whole[i : i + 65536] for i in range(0, len(whole), 65536)]
    assert len(pieces) > 30
    exchange = reader.read("sglang", *pieces)
    assert exchange.error is None
    assert exchange.decoder is not None
    assert (exchange.decoder.k, exchange.decoder.text) == ([200_000], " word" * 200_000)
