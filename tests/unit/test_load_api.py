"""What each API's streams mean, on recorded and constructed bodies; expected counts were added up by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrig.load.api import Ask, Decoder, NativeDecoder, make_decoder, request_body
from specrig.load.sse import SseParser


def play(decoder: Decoder, stream: bytes, step: float = 0.25) -> Decoder:
    """Feed a stream, one event every ``step`` seconds from 1.0 on."""
    for number, event in enumerate(SseParser().feed(stream)):
        decoder.feed(event, 1.0 + step * number)
    decoder.finish()
    return decoder


def sample(samples: Path, name: str) -> bytes:
    lines = (samples / "sglang" / name).read_bytes().splitlines(keepends=True)
    return b"".join(line for line in lines if not line.startswith(b"#"))


def sse(*events: object) -> bytes:
    out = b""
    for event in events:
        out += b"data: " + (event.encode() if isinstance(event, str) else json.dumps(event).encode()) + b"\n\n"
    return out


def test_native_live_stream_one_token_a_chunk(samples: Path) -> None:
    decoder = play(make_decoder("sglang"), sample(samples, "live-0.5.23-cpu/generate_stream.sse"))
    assert decoder.error is None
    assert decoder.terminal
    assert decoder.finish_reason == "length"
    assert decoder.k == [1, 1, 1, 1, 1, 1]
    assert decoder.output_ids == [92] * 6
    assert decoder.text == "xxxxxx"
    assert (decoder.prompt_tokens, decoder.cached_tokens) == (11, 10)
    assert decoder.verify_steps is None
    assert decoder.token_source == "server"


@pytest.mark.parametrize("name", ["cumulative", "incremental"])
def test_native_several_tokens_a_chunk(samples: Path, name: str) -> None:
    decoder = play(make_decoder("sglang"), sample(samples, f"constructed_generate_stream_{name}.sse"))
    assert decoder.error is None
    assert decoder.k == [1, 3, 5, 6]
    assert decoder.t == [1.0, 1.25, 1.5, 1.75]
    assert decoder.output_ids == [760, 3841, 13477, 37550, 33075, 888, 279, 15217, 1, 5388, 13, 560, 3841, 2, 3]
    assert decoder.text == "The quick brown fox jumps over the lazy dog. The quick"
    assert (decoder.verify_steps, decoder.correct_drafts) == (3, 11)
    assert decoder.prompt_tokens == 24978


def test_native_without_a_finish_reason_has_none() -> None:
    event = {"text": "a", "output_ids": [9], "meta_info": {"completion_tokens": 1, "finish_reason": None}}
    decoder = play(make_decoder("sglang"), sse(event, "[DONE]"))
    assert (decoder.terminal, decoder.error, decoder.finish_reason) == (True, None, None)


class WholeDecoder(NativeDecoder):
    """Every event is decoded whole, as the first and the last are."""

    def _event(self, event: bytes, t: float) -> None:
        self._whole(self._full.decode(event), t)


TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(['"completion_tokens":9', '\\"finish_reason":null,"error":1', '{"meta_info":{']),
)
PIECES = st.tuples(
    TEXTS,
    st.lists(st.integers(0, 9), max_size=3),
    st.sampled_from([None, None, None, None, {"type": "abort", "message": "x"}, "length"]),
    st.sampled_from([None, None, None, None, None, {"message": "no"}]),
    st.dictionaries(TEXTS, TEXTS, max_size=2),
    st.booleans(),
)


@given(st.lists(PIECES, max_size=8), st.booleans(), st.booleans())
def test_native_events_in_mid_stream_mean_what_they_mean_whole(
    pieces: list[tuple[str, list[int], object, object, dict[str, str], bool]], cumulative: bool, ascii_only: bool
) -> None:
    fast, whole = NativeDecoder(), WholeDecoder()
    ids: list[int] = []
    text = ""
    for number, (piece, new, reason, error, more, counted) in enumerate([*pieces, ("", [], "length", None, {}, True)]):
        ids += new
        text += piece
        meta = {"finish_reason": reason, "completion_tokens": len(ids) if counted else None, "prompt_tokens": 5, **more}
        shown = (text, ids) if cumulative else (piece, new)
        body = {**more, "text": shown[0], "output_ids": shown[1], "meta_info": meta}
        event = json.dumps(body if error is None else {**body, "error": error}, ensure_ascii=ascii_only).encode()
        for decoder in (fast, whole):
            decoder.feed(event, float(number))
    for name in ("t", "k", "error", "message", "finish_reason", "prompt_tokens", "text", "output_ids", "output_tokens"):
        assert getattr(fast, name) == getattr(whole, name), name


def test_native_repeated_ids_are_not_taken_for_a_cumulative_stream() -> None:
    def event(ids: list[int], count: int, reason: object = None) -> dict[str, object]:
        return {"text": "a", "output_ids": ids, "meta_info": {"completion_tokens": count, "finish_reason": reason}}

    done = {"type": "length"}
    decoder = play(make_decoder("sglang"), sse(event([9], 1), event([9], 2), event([9, 9], 4, done), "[DONE]"))
    assert decoder.output_ids == [9, 9, 9, 9]
    assert decoder.k == [1, 1, 2]


@pytest.mark.parametrize(
    ("meta", "steps", "drafts"),
    [
        ({"spec_verify_ct": 188, "spec_accept_token_num": 11}, 188, 11),
        ({"spec_verify_ct": 21, "spec_accepted_drafts": 43}, 21, 43),
        ({"spec_verify_ct": 43, "spec_num_correct_drafts": 63}, 43, 63),
    ],
)
def test_native_speculation_names_of_every_era(meta: dict[str, int], steps: int, drafts: int) -> None:
    whole = {"completion_tokens": 2, "finish_reason": {"type": "length"}, **meta}
    decoder = play(make_decoder("sglang"), sse({"text": "ab", "output_ids": [1, 2], "meta_info": whole}, "[DONE]"))
    assert (decoder.verify_steps, decoder.correct_drafts) == (steps, drafts)


def test_native_abort_is_an_error_with_the_servers_words(samples: Path) -> None:
    decoder = play(make_decoder("sglang"), sample(samples, "constructed_generate_stream_scheduler_abort.sse"))
    assert decoder.error == "abort"
    assert decoder.message is not None
    assert decoder.message.startswith("Input length (32763 tokens) exceeds the maximum allowed length (32762 tokens).")
    assert decoder.t == []


@pytest.mark.parametrize(
    ("api", "route"),
    [("sglang", "POST /generate stream=true"), ("openai-chat", "POST /v1/chat/completions stream=true")],
)
def test_error_event_inside_http_200(samples: Path, api: str, route: str) -> None:
    bodies = json.loads((samples / "sglang" / "constructed_errors_0.5.23.json").read_text())
    decoder = play(make_decoder(api), bodies[route]["sse"].encode())
    assert decoder.error == "server_error"
    wanted = "..." if api == "openai-chat" else "The input (33012 tokens) is longer than the model's context length"
    assert decoder.message is not None
    assert decoder.message.startswith(wanted)
    assert decoder.output_tokens == 0


def test_chat_reasoning_counts_and_the_role_chunk_does_not(samples: Path) -> None:
    # usage at the end only: 16 tokens over three pieces whose own counts are 3, 2 and 4 (of 9)
    counts = {"The user wants": 3, " a count.": 2, "There are 324 repetitions.": 4}
    decoder = play(make_decoder("openai-chat", counts.__getitem__), sample(samples, "constructed_chat_stream.sse"))
    assert decoder.error is None
    assert decoder.output_tokens == 16
    assert decoder.t == [1.25, 1.5, 1.75]  # the role chunk came at 1.0
    assert decoder.k == [5, 4, 7]  # round(16*3/9) = 5, round(16*5/9) - 5 = 4, the rest
    assert decoder.first_answer_t == 1.75
    assert decoder.reasoning_text == "The user wants a count."
    assert decoder.text == "There are 324 repetitions."
    assert (decoder.verify_steps, decoder.correct_drafts) == (3, 12)
    assert (decoder.prompt_tokens, decoder.cached_tokens) == (24990, 0)
    assert (decoder.token_source, decoder.trace_source) == ("server", "tokenizer")


def test_chat_running_count_is_the_trace() -> None:
    def chunk(count: int | None, reason: str | None = None, **delta: object) -> dict[str, object]:
        usage = None if count is None else {"prompt_tokens": 5, "completion_tokens": count}
        return {"id": "x", "choices": [{"delta": delta, "finish_reason": reason}], "usage": usage}

    stream = sse(
        chunk(1, role="assistant", content=""),
        chunk(4, content="one two"),
        chunk(9, content=" three"),
        chunk(9, "length"),
        {"id": "x", "choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 9}},
        "[DONE]",
    )
    decoder = play(make_decoder("openai-chat"), stream)
    assert decoder.error is None
    assert decoder.k == [4, 5]
    assert decoder.t == [1.25, 1.5]
    assert decoder.trace_source == "server"


@pytest.mark.parametrize(
    ("final", "k", "error"),
    [
        (9, [4, 5], None),
        (11, [4, 7], None),  # two more after the last text
        (8, [4, 5], "usage says 8 tokens, the running count 9"),
    ],
)
def test_the_final_usage_is_held_against_the_running_count(final: int, k: list[int], error: str | None) -> None:
    def chunk(count: int, text: str, reason: str | None = None) -> dict[str, object]:
        return {"choices": [{"text": text, "finish_reason": reason}], "usage": {"completion_tokens": count}}

    last = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": final}}
    stream = sse(chunk(4, "one two"), chunk(9, " three", "length"), last, "[DONE]")
    decoder = play(make_decoder("openai-completions"), stream)
    assert (decoder.k, decoder.message) == (k, error)
    assert decoder.error == (None if error is None else "protocol")


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_aborted_stream_of_an_openai_route_is_a_failure(reason: str) -> None:
    chunk = {"choices": [{"delta": {"content": "one"}, "finish_reason": reason}], "usage": {"completion_tokens": 1}}
    decoder = play(make_decoder("openai-chat"), sse(chunk, "[DONE]"))
    assert decoder.error == "abort"
    assert decoder.message == f"the server ended the stream with finish_reason {reason}"


def test_usage_missing_is_counted_and_marked_never_credited() -> None:
    stream = sse(
        {"choices": [{"text": "four tokens in all", "finish_reason": None}]},
        {"choices": [{"text": "", "finish_reason": "stop"}]},
        "[DONE]",
    )
    decoder = play(make_decoder("openai-completions", lambda text: len(text.split())), stream)
    assert decoder.output_tokens == 4
    assert decoder.token_source == "tokenizer"


def test_live_completions_stream(samples: Path) -> None:
    stream = sample(samples, "live-0.5.23-cpu/completions_stream.sse")
    decoder = play(make_decoder("openai-completions", lambda text: 1), stream)
    assert decoder.error is None
    assert decoder.output_tokens == 4
    assert decoder.k == [1, 1, 1, 1]
    assert decoder.finish_reason == "length"
    assert decoder.text == " there" * 4


def test_live_chat_stream(samples: Path) -> None:
    decoder = play(make_decoder("openai-chat", lambda text: 1), sample(samples, "live-0.5.23-cpu/chat_stream.sse"))
    assert decoder.error is None
    assert decoder.output_tokens == 5
    assert sum(decoder.k) == 5
    assert decoder.t[0] == 1.25


def test_a_count_that_falls_is_told() -> None:
    def event(count: int) -> dict[str, object]:
        return {"text": "", "output_ids": [], "meta_info": {"completion_tokens": count}}

    decoder = play(make_decoder("sglang"), sse(event(5), event(3)))
    assert decoder.error == "protocol"
    assert decoder.message == "the server's running count fell from 5 to 3 tokens"


def test_an_event_that_is_no_json_is_told() -> None:
    decoder = play(make_decoder("sglang"), b"data: <html>\n\n")
    assert decoder.error == "protocol"
    assert decoder.message is not None
    assert decoder.message.endswith("<html>")


def test_bodies_ask_for_exact_greedy_generation() -> None:
    ask = Ask(max_tokens=7, ids=[1, 2], messages=[{"role": "user", "content": "x"}], rid="r")
    native = json.loads(request_body("sglang", "m", ask))
    assert native == {
        "rid": "r",
        "input_ids": [1, 2],
        "sampling_params": {"max_new_tokens": 7, "temperature": 0.0, "ignore_eos": True},
        "stream": True,
    }
    chat = json.loads(request_body("openai-chat", "m", ask))
    assert chat["messages"] == [{"role": "user", "content": "x"}]
    assert chat["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert chat["chat_template_kwargs"] == {"enable_thinking": False}
    assert (chat["max_tokens"], chat["ignore_eos"], chat["temperature"]) == (7, True, 0.0)
    assert json.loads(request_body("openai-completions", "m", ask))["prompt"] == [1, 2]


def test_bodies_refuse_the_wrong_form_of_prompt() -> None:
    with pytest.raises(ValueError, match="messages"):
        request_body("openai-chat", "m", Ask(max_tokens=1, ids=[1]))
    with pytest.raises(ValueError, match="token ids"):
        request_body("sglang", "m", Ask(max_tokens=1, text="x"))
    with pytest.raises(ValueError, match="unknown api"):
        request_body("grpc", "m", Ask(max_tokens=1, ids=[1]))
