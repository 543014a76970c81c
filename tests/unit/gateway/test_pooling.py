"""/v1/embeddings, /v1/score and /v1/rerank, with a scripted worker at the other end."""

import asyncio
import base64
import json
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from everserve.errors import RequestError
from everserve.gateway.api.pooling.pool import MOST_AT_ONCE
from everserve.gateway.text import vectors
from tests.support.gateway_toy import byte_level_tokenizer, pooled_of, settle, toy_server, until

TOKENIZER = byte_level_tokenizer()
TEXTS = ["the and", "a", "in the"]


def vector_of(text: str) -> np.ndarray:
    return np.frombuffer(pooled_of(TOKENIZER.encode(text, add_special_tokens=False).ids), np.float32)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))  # type: ignore[arg-type]


async def ask(path: str, **body: Any) -> Any:
    async with toy_server(lambda spec: []) as server:
        answer = await server.post(path, body)
        assert server.gateway.num_requests == 0 and server.gateway.fleet.num_streams == 0
        assert server.gateway.connections.memory.num_bytes == 0
        return answer


@pytest.mark.parametrize("is_ids", [False, True])
@pytest.mark.parametrize("normalize", [None, False])
def test_embeddings(is_ids: bool, normalize: bool | None) -> None:
    async def test() -> None:
        texts = [TOKENIZER.encode(text, add_special_tokens=False).ids for text in TEXTS] if is_ids else TEXTS
        answer = await ask("/v1/embeddings", input=texts, normalize=normalize, user="me")
        assert answer.status == 200 and answer.json["object"] == "list"
        num_tokens = sum(len(TOKENIZER.encode(text, add_special_tokens=False).ids) for text in TEXTS)
        assert answer.json["usage"] == {
            "prompt_tokens": num_tokens,
            "completion_tokens": 0,
            "total_tokens": num_tokens,
            "prompt_tokens_details": {"cached_tokens": 6},
        }
        for index, (text, found) in enumerate(zip(TEXTS, answer.json["data"], strict=True)):
            assert (found["object"], found["index"]) == ("embedding", index)
            expected = vector_of(text)
            length = 1.0 if normalize is False else float(np.linalg.norm(expected.astype(np.float64)))
            np.testing.assert_allclose(found["embedding"], expected / length, rtol=1e-6)

    run(test)


def test_base64_has_the_same_numbers() -> None:
    async def test() -> None:
        numbers = (await ask("/v1/embeddings", input=TEXTS[0])).json["data"][0]["embedding"]
        text = (await ask("/v1/embeddings", input=TEXTS[0], encoding_format="base64")).json["data"][0]["embedding"]
        assert np.frombuffer(base64.b64decode(text), "<f4").tolist() == numbers

    run(test)


def test_a_chat_has_one_vector() -> None:
    async def test() -> None:
        answer = await ask("/v1/embeddings", messages=[{"role": "user", "content": "hi"}], normalize=False)
        (found,) = answer.json["data"]
        assert found["embedding"] == vector_of("<user>hi").tolist()

    run(test)


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_scores(path: str) -> None:
    async def test() -> None:
        one = await ask(path, text_1=TEXTS[0], text_2=TEXTS)
        found = [each["score"] for each in one.json["data"]]
        assert found == [vectors.cosine(vector_of(TEXTS[0]), vector_of(text)) for text in TEXTS]
        assert found[0] == 1.0 and [each["index"] for each in one.json["data"]] == [0, 1, 2]
        pairs = await ask(path, queries=TEXTS, documents=TEXTS)
        assert [each["score"] for each in pairs.json["data"]] == [1.0, 1.0, 1.0]
        assert pairs.json["object"] == "list" and pairs.json["usage"]["completion_tokens"] == 0

    run(test)


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_rankings(path: str) -> None:
    async def test() -> None:
        answer = await ask(path, query=TEXTS[2], documents=[*TEXTS, TEXTS[2]])
        results = answer.json["results"]
        assert [each["index"] for each in results[:2]] == [2, 3], "equal ones in their order"
        scores = [each["relevance_score"] for each in results]
        assert scores == sorted(scores, reverse=True) and len(results) == 4
        assert all(each["document"] == {"text": [*TEXTS, TEXTS[2]][each["index"]]} for each in results)
        few = await ask(path, query=TEXTS[2], documents=TEXTS, top_n=1, return_documents=False)
        assert few.json["results"] == [{"index": 2, "relevance_score": 1.0}]

    run(test)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input"),
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": ["a", [1]]}, "input"),
        ("/v1/embeddings", {"input": [9999]}, "input"),
        ("/v1/embeddings", {"input": "a" * 500}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 4}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "bytes"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
        ("/v1/embeddings", {"input": "a", "softmax": True}, "softmax"),
        ("/v1/embeddings", {"input": "a", "temperature": 1}, "temperature"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": "a", "queries": "a", "text_2": "b"}, "text_1"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/v1/rerank", {"query": "a"}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
    ],
)
def test_what_makes_no_sense(path: str, body: dict[str, Any], param: str) -> None:
    async def test() -> None:
        answer = await ask(path, **body)
        assert answer.status == 400 and answer.error["param"] == param, answer.body

    run(test)


def test_long_inputs_can_be_cut() -> None:
    async def test() -> None:
        answer = await ask("/v1/embeddings", input="the and " * 50, truncate_prompt_tokens=2, normalize=False)
        kept = TOKENIZER.encode("the and " * 50, add_special_tokens=False).ids[-2:]
        assert answer.json["data"][0]["embedding"] == np.frombuffer(pooled_of(kept), np.float32).tolist()

    run(test)


def test_many_inputs_take_few_places_at_a_time() -> None:
    async def test() -> None:
        async with toy_server(lambda spec: [], is_paced=True, max_queue=MOST_AT_ONCE + 4) as server:
            texts = ["a" * (1 + n % 40) for n in range(3 * MOST_AT_ONCE)]
            task, answer, _ = server.begin("POST", "/v1/embeddings", {"input": texts})
            await until(lambda: server.worker.specs)
            while not task.done():
                assert server.gateway.fleet.num_streams <= MOST_AT_ONCE
                server.worker.advance()
                await settle()
            assert [len(spec.prompt) for spec in server.worker.specs] == [1 + n % 40 for n in range(len(texts))]
            assert len(answer.json["data"]) == len(texts)

    run(test)


def test_a_worker_that_dies_and_a_client_that_leaves() -> None:
    async def test() -> None:
        async with toy_server(lambda spec: [], is_paced=True) as server:
            task, answer, _ = server.begin("POST", "/v1/embeddings", {"input": TEXTS})
            await until(lambda: len(server.worker.specs) == 3)
            server.worker.die()
            second = await server.add_worker(1)
            await until(lambda: len(second.specs) == 3)
            second.advance()
            await task
            assert answer.status == 200 and len(answer.json["data"]) == 3

            task, _, gone = server.begin("POST", "/v1/embeddings", {"input": TEXTS})
            await until(lambda: len(second.specs) == 6)
            gone.set()
            await task
            await until(lambda: len(second.cancelled) == 3)
            assert server.gateway.fleet.num_streams == 0 and server.gateway.num_requests == 0

    run(test)


@pytest.mark.parametrize(("is_server_fault", "status"), [(False, 400), (True, 500)])
def test_a_stream_that_fails_ends_the_others(is_server_fault: bool, status: int) -> None:
    async def test() -> None:
        async with toy_server(is_ready=True) as server:
            task, answer, _ = server.begin("POST", "/v1/embeddings", {"input": TEXTS})
            await until(lambda: len(server.worker.specs) == 3)
            server.worker.reject(server.worker.specs[1].id, "no", is_server_fault)
            await task
            assert answer.status == status
            await until(lambda: len(server.worker.cancelled) == 2)

    run(test)


@pytest.mark.parametrize(
    ("config", "wanted", "why"),
    [
        ({}, 2, "one size"),
        ({"is_matryoshka": True}, 2, None),
        ({"matryoshka_dimensions": [2, 4]}, 4, None),
        ({"matryoshka_dimensions": [2, 4]}, 3, "2, 4 dimensions, not 3"),
        ({"is_matryoshka": True}, 99, "have 8 dimensions, not 99"),
    ],
)
def test_fewer_dimensions(tmp_path: Path, config: dict[str, Any], wanted: int, why: str | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))

    def cut() -> vectors.Vector:
        vectors.Dimensions(str(tmp_path)).check(wanted)
        return vectors.read(pooled_of([1]), wanted)

    if why is None:
        assert cut().tolist() == vectors.read(pooled_of([1])).tolist()[:wanted]
    else:
        with pytest.raises(RequestError, match=why):
            cut()


def test_numbers_are_rounded_once() -> None:
    """Also where sums cancel out, and where there is no direction."""
    a, b = np.array([1e8, 1.0, -1e8], np.float32), np.array([1e8, 1.0, 1e8], np.float32)
    assert vectors.dot(a, b) == 1.0
    none = np.zeros(3, np.float32)
    assert vectors.cosine(a, none) == 0.0 and vectors.normalized(none).tolist() == [0.0] * 3
    assert math.isclose(vectors.dot(*[vectors.normalized(a)] * 2), 1.0, rel_tol=1e-6)
