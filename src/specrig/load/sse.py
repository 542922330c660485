"""Server-sent events as the HTML standard parses them, fed in pieces of any size.

https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation: lines end in CR LF, LF or
CR; a line that starts with a colon is a comment; ``data`` lines of one event are joined by LF; one space after the
colon is dropped; an empty line ends the event; an event without data is no event; what is left at the end of the
stream is discarded. Lines are cut as bytes: CR and LF never occur inside a multi-byte UTF-8 character, so an event's
bytes are whole characters however the packets were cut.
"""

from __future__ import annotations

_BOM = b"\xef\xbb\xbf"


class SseParser:
    """Turns pieces of an event stream into the data of its events.

    Only ``data`` is kept: ``event``, ``id`` and ``retry`` matter to a browser's EventSource, not to a completion.
    """

    __slots__ = ("_at_event", "_buffer", "_data", "_held", "_skip_lf", "_started", "comments")

    def __init__(self) -> None:
        """Start before the first byte of a stream."""
        self._buffer = b""
        self._data: list[bytes] | None = None
        self._held = 0  # bytes of `_data`
        self._skip_lf = False
        self._started = False
        self._at_event = False  # whole events were read, and nothing after them
        self.comments = 0

    @property
    def held(self) -> int:
        """The bytes of the event that has not ended yet."""
        return len(self._buffer) + self._held

    def feed(self, piece: bytes) -> list[bytes]:
        """Take the next bytes of the stream.

        Args:
            piece: any number of bytes, cut anywhere.

        Returns:
            The data of each event that these bytes ended, in order, as UTF-8 bytes.
        """
        # nearly every piece of nearly every server: whole events of one data line each
        if self._at_event and piece[:6] == b"data: " and piece[-2:] == b"\n\n" and b"\r" not in piece:
            data = piece[6:-2]
            if b"\n" not in data:
                return [data]
            parts = data.split(b"\n\ndata: ")
            if piece.count(b"\n") == 2 * len(parts):
                return parts
        events = self._feed(piece)
        self._at_event = self._started and not self._buffer and self._data is None and not self._skip_lf
        return events

    def _feed(self, piece: bytes) -> list[bytes]:
        buffer = self._buffer + piece
        if not self._started:
            if len(buffer) < 3 and _BOM.startswith(buffer):
                self._buffer = buffer
                return []
            self._started = True
            if buffer.startswith(_BOM):
                buffer = buffer[3:]
        events: list[bytes] = []
        position = 0
        size = len(buffer)
        has_cr = b"\r" in buffer
        while position < size:
            if self._skip_lf:
                self._skip_lf = False
                if buffer[position] == 0x0A:
                    position += 1
                    continue
            end = buffer.find(b"\n", position)
            if has_cr:
                cr = buffer.find(b"\r", position, end if end >= 0 else size)
                if cr >= 0:
                    end = cr
                    self._skip_lf = True
            if end < 0:
                break
            self._line(buffer[position:end], events)
            position = end + 1
        self._buffer = buffer[position:]
        return events

    def _line(self, line: bytes, events: list[bytes]) -> None:
        if not line:
            if self._data is not None:
                events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                self._data = None
                self._held = 0
            return
        if line[:1] == b":":
            self.comments += 1
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            value = value.removeprefix(b" ")
            self._held += len(line)
            if self._data is None:
                self._data = [value]
            else:
                self._data.append(value)
