"""What is read from real servers: limits, configuration, and their ways to say no."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from specrig.engine.client import EngineClient
from specrig.engine.errors import EngineError, classify, message
from specrig.engine.limits import Speculation, from_info, reserved_tokens
from specrig.errors import UsageError


@pytest.fixture(scope="module")
def sglang(samples: Path) -> Path:
    return samples / "sglang"


def load(path: Path) -> Any:
    text = path.read_text()
    return json.loads(text[text.index("{") :])


class TestErrors:
    @pytest.mark.parametrize(
        ("key", "kind", "begins"),
        [
            ("POST /generate non-stream", "context", "The input (33012 tokens) is longer"),
            ("POST /v1/chat/completions non-stream", "context", "Requested token count exceeds"),
            ("chat max_tokens > --context-length", "context", "max_completion_tokens is too large: 40000."),
            ("/flush_cache busy", "busy", "Flush cache failed."),
            ("/flush_cache concurrent", "busy", "Another flush_cache is already in progress."),
            ("/flush_cache?timeout=30 expired", "busy", "Timed out waiting for idle state."),
            ("/health while Starting, exiting or hung", "not-ready", "HTTP 503 without a message"),
        ],
    )
    def test_bodies(self, sglang: Path, key: str, kind: str, begins: str) -> None:
        case = load(sglang / "constructed_errors_0.5.23.json")[key]
        text = json.dumps(case["body"]) if "body" in case else case["body_text"]
        assert classify(case["http"], text) == kind
        assert message(case["http"], text.encode()).startswith(begins)

    def test_error_inside_a_stream(self, sglang: Path) -> None:
        case = load(sglang / "constructed_errors_0.5.23.json")["POST /generate stream=true"]
        assert classify(200, case["sse"]) == "context"
        assert message(200, case["sse"]).startswith("The input (33012 tokens)")

    def test_scheduler_abort(self, sglang: Path) -> None:
        text = (sglang / "constructed_generate_stream_scheduler_abort.sse").read_text()
        event = json.loads(next(line for line in text.splitlines() if line.startswith("data: "))[6:])
        assert classify(200, event) == "kv"
        assert message(200, event).startswith("Input length (32763 tokens)")

    def test_real_texts(self, sglang: Path) -> None:
        real = load(sglang / "real_errors_overlength.json")
        chat = real["chat_400_QwenLM/Qwen3#1321"]
        assert classify(400, json.dumps(chat["body"])) == "context"
        assert classify(400, real["total_opencode_PR25230"]) == "context"
        assert classify(200, real["kv_pool_sglang#4048"]) == "kv"

    def test_live(self, sglang: Path) -> None:
        live = sglang / "live-0.5.23-cpu"
        text = json.dumps(load(live / "generate_error.txt"))
        assert message(400, text) == "Either text, input_ids or input_embeds should be provided."
        assert classify(400, text) == "bad-request"
        assert message(400, json.dumps(load(live / "chat_error.txt"))).startswith("1 validation error: {'type'")

    @pytest.mark.parametrize(
        ("status", "body", "text", "kind"),
        [
            (401, '{"error":"Unauthorized"}', "Unauthorized", "unauthorized"),
            (404, '{"detail":"Not Found"}', "Not Found", "not-found"),
            (422, '{"detail":[{"loc":["body"],"msg":"Field required"}]}', "Field required", "bad-request"),
            (502, "<html><body><h1>Bad Gateway</h1></body></html>", "Bad Gateway", "server"),
            (500, "Internal Server Error", "Internal Server Error", "server"),
            (429, '{"error":{"message":"slow down"}}', "slow down", "busy"),
            (500, "", "HTTP 500 without a message", "server"),
        ],
    )
    def test_other_servers(self, status: int, body: str, text: str, kind: str) -> None:
        assert message(status, body) == text
        assert classify(status, body) == kind

    def test_a_long_text_stays_one_line(self) -> None:
        text = message(500, "line\n" * 1000)
        assert "\n" not in text
        assert len(text) == 600


class TestLimits:
    def test_live(self, sglang: Path) -> None:
        info = load(sglang / "live-0.5.23-cpu" / "server_info.txt")
        report = from_info(info, 8192)
        assert report.limits.context_length == 8192
        assert report.limits.kv_tokens == 20000
        assert report.limits.max_running == 32
        assert (report.limits.reserved_tokens, report.limits.block) == (0, 0)
        assert report.max_req_input_len == 8186
        assert report.model == "tiny"
        assert report.version == "0.5.23"
        assert not report.simulated
        assert report.warnings == ()

    def test_effective_concurrency_is_not_the_configured_one(self, sglang: Path) -> None:
        info = load(sglang / "constructed_server_info_0.5.23_tp4_dflash_WRONG_GPUS.json")
        report = from_info(info, None)
        assert report.limits.context_length == 131072
        assert report.limits.kv_tokens == 1042176
        assert report.limits.max_running == 9
        assert report.limits.block == 16
        assert report.limits.reserved_tokens == 0
        assert report.speculation.algorithm == "DFLASH"
        assert report.speculation.accept_length == 5.31
        assert report.warnings == ("max_running_requests is 48 but only 9 run at once",)

    def test_older_server(self, sglang: Path) -> None:
        report = from_info(load(sglang / "real_server_info_2026-05_excerpt.json"), 32768)
        assert report.limits.kv_tokens == 20480
        assert report.limits.max_running == 128
        assert report.speculation == Speculation()

    def test_auto_truncate_is_told(self) -> None:
        report = from_info({"context_length": 100, "allow_auto_truncate": True}, None)
        assert report.limits.auto_truncate
        assert "--allow-auto-truncate" in report.warnings[0]

    def test_nothing_known(self) -> None:
        with pytest.raises(EngineError, match="does not say how long its context is"):
            from_info({}, None)

    @pytest.mark.parametrize(
        ("spec", "reserved"),
        [
            (Speculation(), 0),
            (Speculation(algorithm="NGRAM", draft_tokens=12), 0),
            (Speculation(algorithm="DFLASH", draft_tokens=16), 0),
            (Speculation(algorithm="DDTREE", draft_tokens=16, budget=15), 16),
            (Speculation(algorithm="EAGLE3", steps=5, topk=4, draft_tokens=8), 20),
            (Speculation(algorithm="EAGLE", steps=3, topk=1, draft_tokens=4), 4),
        ],
    )
    def test_reserved(self, spec: Speculation, reserved: int) -> None:
        assert reserved_tokens(spec) == reserved


class TestClient:
    @staticmethod
    def client(handler: Any) -> EngineClient:
        made = EngineClient("http://engine:30000/v1")
        made._http.close()
        made._http = httpx.Client(base_url=made.base_url, transport=httpx.MockTransport(handler))
        return made

    def test_old_names(self) -> None:
        def old(request: httpx.Request) -> httpx.Response:
            known = {"/get_server_info": {"version": "0.4"}, "/get_load": [{"num_reqs": 2}]}
            value = known.get(request.url.path)
            return httpx.Response(200, json=value) if value is not None else httpx.Response(404)

        with self.client(old) as client:
            assert client.server_info() == {"version": "0.4"}
            assert client.loads() == [{"num_reqs": 2}]

    def test_keys_of_the_server_are_not_kept(self) -> None:
        flags = {"api_key": "sk-1", "admin_api_key": None, "ssl_keyfile_password": "pw", "max_total_tokens": 20}
        told = {**flags, "internal_states": [{**flags, "speculative_token_map": None}]}
        with self.client(lambda request: httpx.Response(200, json=told)) as client:
            info = client.server_info()
        assert "sk-1" not in json.dumps(info)
        assert "pw" not in json.dumps(info)
        for part in (info, info["internal_states"][0]):
            assert (part["api_key"], part["admin_api_key"], part["max_total_tokens"]) == ("<redacted>", None, 20)

    def test_openai_only_server(self) -> None:
        def openai(request: httpx.Request) -> httpx.Response:
            if request.url.path == "/v1/completions":
                return httpx.Response(200, json={"asked": json.loads(request.content)})
            return httpx.Response(404, json={"detail": "Not Found"})

        with self.client(openai) as client:
            answer = client.generate(text="Hi", max_new_tokens=3)
        assert answer["asked"] == {
            "model": "default",
            "prompt": "Hi",
            "max_tokens": 3,
            "temperature": 0.0,
            "ignore_eos": True,
        }

    def test_flush_needs_code_and_body(self) -> None:
        with (
            self.client(lambda request: httpx.Response(200, text="ok")) as client,
            pytest.raises(EngineError, match="answered 'ok'"),
        ):
            client.flush_cache()

    def test_not_json(self) -> None:
        with (
            self.client(lambda request: httpx.Response(200, text="<html>")) as client,
            pytest.raises(EngineError, match="expected a JSON object"),
        ):
            client.server_info()

    def test_nobody_there(self) -> None:
        with EngineClient("http://127.0.0.1:9") as client:
            assert not client.ready()
            with pytest.raises(EngineError, match="can't be reached"):
                client.models()

    @pytest.mark.parametrize("url", ["engine:30000", "ftp://engine", "http://"])
    def test_bad_url(self, url: str) -> None:
        with pytest.raises(UsageError, match="expected http://HOST:PORT"):
            EngineClient(url)
