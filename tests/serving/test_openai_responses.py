"""The real `openai` package and /v1/responses, with workers that die and an instance that is killed."""

import os
import signal
import time
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.support import cluster as c

PROMPT = "It was a bright morning, and"


@pytest.fixture(scope="module")
def client(server) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ended(client: openai.OpenAI, id: str) -> Any:
    """The response, when it has ended."""
    while (response := client.responses.retrieve(id)).status in ("queued", "in_progress"):
        time.sleep(0.05)
    return response


def test_a_response_says_what_a_chat_says(client: openai.OpenAI, server) -> None:
    asked: Any = {"model": server.model, "temperature": 0, "extra_body": {"ignore_eos": True}}
    chat = client.chat.completions.create(messages=[{"role": "user", "content": PROMPT}], max_tokens=16, **asked)
    response = client.responses.create(input=PROMPT, max_output_tokens=16, **asked)
    assert response.output_text == chat.choices[0].message.content
    assert response.status == "incomplete" and response.incomplete_details is not None
    assert response.usage is not None and chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens and response.usage.output_tokens == 16


def test_the_packages_own_stream(client: openai.OpenAI, server) -> None:
    asked: Any = {"model": server.model, "input": PROMPT, "max_output_tokens": 200, "temperature": 0}
    whole = client.responses.create(**asked, extra_body={"stop": ["."]})
    assert whole.status == "completed"
    with client.responses.stream(**asked, extra_body={"stop": ["."]}) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == whole.output_text
    assert client.responses.retrieve(final.id).output_text == final.output_text


def test_a_conversation(client: openai.OpenAI, server) -> None:
    asked: Any = {"model": server.model, "max_output_tokens": 8, "temperature": 0}
    first = client.responses.create(input=PROMPT, **asked)
    second = client.responses.create(input="And then?", previous_response_id=first.id, **asked)
    said: Any = [
        {"role": "user", "content": PROMPT},
        *(item.model_dump() for item in first.output),
        {"role": "user", "content": "And then?"},
    ]
    assert client.responses.create(input=said, store=False, **asked).output_text == second.output_text
    assert [item.type for item in client.responses.input_items.list(second.id)] == ["message"]
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)


def test_logprobs(client: openai.OpenAI, server) -> None:
    response = client.responses.create(
        model=server.model,
        input=PROMPT,
        max_output_tokens=3,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        extra_body={"ignore_eos": True},
    )
    content: Any = response.output[0]
    assert [len(one.top_logprobs) for one in content.content[0].logprobs] == [2, 2, 2]


def test_what_does_not_work_names_the_field(client: openai.OpenAI, server) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=server.model, input=PROMPT, truncation="auto")
    assert refused.value.param == "truncation"


def test_a_response_in_the_background_goes_on_after_everything_is_killed(start_server, tmp_path: Path) -> None:
    """Its events are those of a response that was not disturbed, whatever had been read of them before."""
    flags = ("--attention-workers", "2", "--expert-workers", "1", "--enable-chaos", "--state-dir", str(tmp_path))
    asked: Any = {"model": "demo", "input": PROMPT, "max_output_tokens": 600, "background": True}
    extra: Any = {"ignore_eos": True, "seed": 7}
    seen: list[Any] = []
    with start_server(*flags, *c.PATIENT) as server, connect(server) as client:
        undisturbed = ended(client, client.responses.create(**asked, extra_body=extra).id)
        for event in client.responses.create(**asked, extra_body=extra, stream=True):
            seen.append(event)
            if len(seen) == 20:
                (home,) = (worker for worker in c.cluster(server)["workers"] if worker["requests"])
                os.kill(home["pid"], signal.SIGKILL)
            if len(seen) == 60:
                break
        begun = seen[0].response.id
        assert client.responses.retrieve(begun).status == "in_progress"
        server.process.kill()
        server.process.wait()
    with start_server(*flags, *c.PATIENT) as server, connect(server) as client:
        rest = list(client.responses.retrieve(begun, stream=True, starting_after=seen[-1].sequence_number))
        events = [*seen, *rest]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == undisturbed.output_text
        assert ended(client, begun).output_text == text
        assert client.responses.retrieve(undisturbed.id).output_text == text


def connect(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def test_a_structured_response_is_parsed(client: openai.OpenAI, server) -> None:
    class Weather(pydantic.BaseModel):
        is_cold: bool
        wind: Literal["north", "south"]

    asked: Any = {"model": server.model, "input": PROMPT, "temperature": 0, "max_output_tokens": 200}
    response = client.responses.parse(**asked, text_format=Weather)
    assert isinstance(response.output_parsed, Weather) and response.status == "completed"
    with client.responses.stream(**asked, text_format=Weather) as stream:
        final = stream.get_final_response()
    assert final.output_parsed == response.output_parsed
