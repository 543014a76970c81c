"""The real `anthropic` package against the real server."""

import json
from typing import Any

import anthropic
import pytest

PROMPT = "It was a bright morning, and"


@pytest.fixture(scope="module")
def client(server) -> Any:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def asked(server: Any, **changes: Any) -> Any:
    messages = [{"role": "user", "content": PROMPT}]
    return {"model": server.model, "messages": messages, "max_tokens": 12, "extra_body": {"temperature": 0}, **changes}


def test_a_message(client: anthropic.Anthropic, server) -> None:
    message = client.messages.create(**asked(server))
    (block,) = message.content
    assert block.type == "text" and block.text and message.stop_reason == "max_tokens"
    counted = client.messages.count_tokens(model=server.model, messages=asked(server)["messages"])
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == counted.input_tokens
    assert message.usage.output_tokens == 12


def test_a_stream_says_what_the_message_says(client: anthropic.Anthropic, server) -> None:
    whole: Any = client.messages.create(**asked(server, max_tokens=200, stop_sequences=["."]))
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", ".")
    with client.messages.stream(**asked(server, max_tokens=200, stop_sequences=["."])) as stream:
        text = "".join(stream.text_stream)
        final: Any = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.stop_sequence, final.usage) == ("stop_sequence", ".", whole.usage)


def test_blocks_a_system_and_a_beginning(client: anthropic.Anthropic, server) -> None:
    text = {"type": "text", "text": PROMPT, "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": [text]}, {"role": "assistant", "content": "Then"}]
    message: Any = client.messages.create(**asked(server, messages=messages, system="Be brief."))
    assert message.content[0].text


def test_errors(client: anthropic.Anthropic, server) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**asked(server, model="other"))
    with pytest.raises(anthropic.BadRequestError) as refused:
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
        client.messages.create(**asked(server, messages=[{"role": "user", "content": [image]}]))
    assert "messages" in str(refused.value)


def test_a_structured_answer(client: anthropic.Anthropic, server) -> None:
    schema = {
        "type": "object",
        "properties": {"cold": {"type": "boolean"}},
        "required": ["cold"],
        "additionalProperties": False,
    }
    config = {"format": {"type": "json_schema", "schema": schema}}
    message: Any = client.messages.create(**asked(server, max_tokens=100, output_config=config))
    assert set(json.loads(message.content[0].text)) == {"cold"} and message.stop_reason == "end_turn"
