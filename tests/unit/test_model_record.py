"""Records read strictly and survive the trip through JSON."""

from __future__ import annotations

import msgspec
import pytest

from specrig.model.cell import expand
from specrig.model.manifest import Manifest
from specrig.model.record import CellRow, Read, Request
from specrig.model.sweep import parse_sweep


def test_a_request_survives_json() -> None:
    record = Request(
        run="r", cell="c", prompt_id="p", index=3, ok=True, reads={"64": Read(finished_s=1.5, verify_steps=9)}
    )
    again = msgspec.json.decode(msgspec.json.encode(record), type=Request)
    assert again == record
    assert again.ttft_s is None
    assert again.schema == 1


def test_unknown_is_null_and_fields_may_be_added() -> None:
    line = b'{"run":"r","cell":"c","prompt_id":"p","index":0,"ok":false,"error":"HTTP 400","ttft_s":null,"newer":1}'
    record = msgspec.json.decode(line, type=Request)
    assert (record.ok, record.error, record.ttft_s) == (False, "HTTP 400", None)


@pytest.mark.parametrize("line", [b'{"run":"r"}', b'{"run":1,"cell":"c","prompt_id":"p","index":0,"ok":true}'])
def test_a_wrong_line_is_refused(line: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(line, type=Request)


def test_a_cell_row_and_a_manifest() -> None:
    row = CellRow(cell="c", launch=0, workload="w", output_tokens=8, prompts="prose", cache="flush", state="done")
    assert msgspec.json.decode(msgspec.json.encode(row), type=CellRow) == row
    sweep = parse_sweep(
        "name: n\nmodel: M\nworkloads: [{name: w, prompts: prose, prompt_tokens: 64, output_tokens: 8}]\n"
    )
    manifest = Manifest(
        run="r", name="n", created_at="2031-01-01T00:00:00Z", sweep=sweep.as_dict(), cells=expand(sweep)
    )
    assert msgspec.json.decode(msgspec.json.encode(manifest), type=Manifest) == manifest
