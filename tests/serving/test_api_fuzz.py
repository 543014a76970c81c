"""Random requests, right and wrong, made from /openapi.json: no 5xx, one shape of errors, nothing left behind.

Seeded, so that a failure repeats.
"""

import time
from collections import Counter
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from everserve.gateway.http.requests import INT64_MAX, MAX_CHOICES

GENERATES = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
# Of others: [DONE].
LASTS = {"/v1/responses": ("response.completed", "response.incomplete"), "/v1/messages": ("message_stop",)}
SELDOM_POSSIBLE = ("stream_options", "best_of", "top_logprobs", "stop_token_ids", "logit_bias", "max_completion_tokens")
SELDOM_POSSIBLE += ("previous_response_id", "input", "background", "store", "text")
SELDOM_POSSIBLE += ("tool_choice", "thinking", "output_config", "system")
SELDOM_POSSIBLE += ("tools", "functions", "truncate_prompt_tokens", "prompt_logprobs", "bad_words")
CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


@pytest.fixture(scope="module")
def api(server) -> Any:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    schema.config.max_stream_events = 100_000  # by default it stops reading a stream early, [DONE] or not
    # Two never end; the third costs a worker each time.
    yield schema.exclude(path="/events").exclude(path="/cluster/live").exclude(path="/cluster/drain")
    with httpx.Client(base_url=server.url, timeout=60) as http:
        assert http.get("/health").status_code == 200
        assert http.get("/load").json() == {"server_load": 0}
        deadline_s = time.monotonic() + 60
        while 'vllm:num_requests_running{engine="0",model_name="demo"} 0.0' not in http.get("/metrics").text:
            assert time.monotonic() < deadline_s, "a stream was left behind"
            time.sleep(0.05)
        answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
        assert answer.status_code == 200


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["valid", "invalid"])
def test_any_request(api: Any, mode: GenerationMode) -> None:
    """Requests that fit the description, and requests that do not."""
    operations = [found.ok() for found in api.get_all_operations()]
    assert {operation.path for operation in operations} > set(GENERATES)
    statuses: Counter[tuple[str, int]] = Counter()

    def num_examples(operation: Any) -> int:
        """Half as many of the wrong ones: most are refused for the same reasons."""
        number = 50 if operation.path in GENERATES else 10 if operation.body else 6
        return number if mode is GenerationMode.POSITIVE else number // 2

    for operation in operations:

        @seed(20)
        @settings(
            max_examples=num_examples(operation),
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(operation.as_strategy(generation_mode=mode))
        def try_one(case: schemathesis.Case) -> None:
            if mode is GenerationMode.POSITIVE and case.path in GENERATES:
                make_it_possible(case)
            statuses[case.path, check(case)] += 1

        try_one()
    if mode is GenerationMode.POSITIVE:  # otherwise nothing but the door was tested
        assert all(statuses[path, 200] >= 10 for path in GENERATES), statuses


def check(case: schemathesis.Case) -> int:
    if case.path in GENERATES:
        keep_it_short(case.body)
    response = case.call(timeout=60)
    assert response.status_code < 500 or response.status_code == 503, response.text
    assert "x-request-id" in response.headers
    if response.status_code >= 400:
        error = response.json()["error"]
        fields = {"message", "type"} if case.path.startswith("/v1/messages") else {"message", "type", "param", "code"}
        assert set(error) == fields and error["message"]
    if response.status_code == 200 and response.headers["content-type"][0].startswith("text/event-stream"):
        last = response.text.rpartition("\n\n")[0].rpartition("\n\n")[2]
        if case.path in LASTS:
            assert any(f"event: {name}\n" in last for name in LASTS[case.path]), last
        else:
            assert last.endswith("data: [DONE]"), last
    checks = CHECKS
    if "last-event-id" in {name.lower() for name in case.headers}:  # the rest of a stream, whatever the body says
        checks = [check for check in CHECKS if check is not negative_data_rejection]
    case.validate_response(response, checks=checks)
    return response.status_code


def keep_it_short(body: Any) -> None:
    """A valid request may ask for hours of work; what it asks for stays valid or invalid, but becomes little."""
    if not isinstance(body, dict):
        return
    tokens, choices = range(4, INT64_MAX + 1), range(3, MAX_CHOICES + 1)  # too much for us, and yet what is allowed
    for field in ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"):
        if isinstance(body.get(field), int) and body[field] in tokens:
            body[field] = 3
    for field in ("n", "best_of"):
        if isinstance(body.get(field), int) and body[field] in choices:
            body[field] = 2
    if "input" in body:
        body["max_output_tokens"] = body.get("max_output_tokens") or 3
    elif body.get("max_tokens") is None and body.get("max_completion_tokens") is None:
        body["max_tokens"] = 3


def make_it_possible(case: schemathesis.Case) -> None:
    """The description cannot say which model is served, which streams there are, how long prompts are, or what goes
    with what."""
    body = case.body
    if len(repr(body)) % 4:  # not always
        for name in [name for name in case.headers if name.lower() == "last-event-id"]:
            del case.headers[name]
    body["model"] = "demo" if case.path == "/v1/messages" else None
    body["stream"] = len(repr(body)) % 2 == 0  # half of them, whatever the generator prefers
    for field in SELDOM_POSSIBLE:
        if len(repr(body)) % 3:  # not always
            body.pop(field, None)
    if case.path == "/v1/messages":
        body["messages"] = [{"role": "user", "content": "Once"}]
    if case.path == "/v1/responses":
        body["input"] = body.get("input", "Once")
    prompt = body.get("prompt")
    if isinstance(prompt, list) and not all(isinstance(item, str) for item in prompt):
        body["prompt"] = [5, 6, 7]
