"""/v1/files and /v1/batches without processes: scripted workers, a real store."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everserve.errors import RequestError
from everserve.gateway.api.batches.lines import split
from everserve.gateway.api.batches.runner import lines_at_once
from everserve.gateway.http.multipart import boundary_of, read_form
from everserve.tables.requests import RequestSpec
from tests.support.gateway_toy import EOS, ToyServer, until
from tests.support.keeping import ids, keeping, run, says

COMPLETIONS = "/v1/completions"


def line(n: int, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    asked = {"prompt": f"p{n}", "max_tokens": 8, **body}
    return {"custom_id": f"c{n}", "method": "POST", "url": url, "body": asked}


def repeats(spec: RequestSpec) -> list[int]:
    """The prompt, and then the seed's last digit: what an answer says shows what was asked."""
    return [*spec.prompt, *ids(f"{spec.params.seed % 10}{EOS}")]


async def upload(server: ToyServer, content: bytes, purpose: str = "batch", **headers: str) -> Any:
    mark = "xyz"
    form = (
        f'--{mark}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n'
        f'--{mark}\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n'
        "Content-Type: application/octet-stream\r\n\r\n"
    ).encode()
    body = form + content + f"\r\n--{mark}--\r\n".encode()
    sent = {"content-type": f"multipart/form-data; boundary={mark}", **headers}
    return await server.request("POST", "/v1/files", body, sent)


async def begin(server: ToyServer, lines: list[Any], url: str = COMPLETIONS) -> Any:
    content = b"".join(json.dumps(one).encode() + b"\n" for one in lines)
    file = (await upload(server, content)).json
    body = {"input_file_id": file["id"], "endpoint": url, "completion_window": "24h", "metadata": {"a": "b"}}
    return (await server.post("/v1/batches", body)).json


async def ended(server: ToyServer, id: str) -> Any:
    while True:
        view = (await server.request("GET", f"/v1/batches/{id}")).json
        if view["status"] not in ("validating", "in_progress", "finalizing", "cancelling"):
            return view
        await asyncio.sleep(0.01)


async def content(server: ToyServer, id: str | None) -> list[Any]:
    if id is None:
        return []
    answer = await server.request("GET", f"/v1/files/{id}/content")
    assert answer.headers["content-length"] == str(len(answer.body))
    return list(map(json.loads, answer.body.splitlines()))


def test_a_batch(tmp_path: Path) -> None:
    async def test() -> None:
        async with keeping(tmp_path, repeats) as server:
            lines = [line(0), line(1, seed=5), line(2, temperature=9), line(3, model="other")]
            batch = await begin(server, lines)
            assert batch["status"] == "validating" and batch["metadata"] == {"a": "b"}
            view = await ended(server, batch["id"])
            assert view["status"] == "completed"
            assert view["request_counts"] == {"total": 4, "completed": 2, "failed": 2}
            good, bad = [await content(server, view[name]) for name in ("output_file_id", "error_file_id")]
            assert [one["custom_id"] for one in good] == ["c0", "c1"]
            assert good[1]["response"]["body"]["choices"][0]["text"] == "p15"
            assert good[1]["response"]["status_code"] == 200 and good[1]["error"] is None
            assert [(one["custom_id"], one["response"]["status_code"]) for one in bad] == [("c2", 400), ("c3", 404)]
            assert view["usage"]["output_tokens"] == 8 and view["usage"]["input_tokens"] == 4
            assert {spec.flow.key for spec in server.worker.specs} == {"/batch"}
            assert all(spec.flow.weight < 1 for spec in server.worker.specs)
            listed = (await server.request("GET", "/v1/batches?limit=1")).json
            assert [one["id"] for one in listed["data"]] == [batch["id"]] and not listed["has_more"]
            names = {one["filename"] for one in (await server.request("GET", "/v1/files")).json["data"]}
            assert names == {"in.jsonl", f"{batch['id']}_output.jsonl", f"{batch['id']}_errors.jsonl"}

    run(test)


def test_chats_and_responses(tmp_path: Path) -> None:
    async def test() -> None:
        async with keeping(tmp_path, says(f"hm{EOS}")) as server:
            for url, body in (
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
                ("/v1/responses", {"input": "x"}),
            ):
                one = {"custom_id": "c", "method": "POST", "url": url, "body": body}
                view = await ended(server, (await begin(server, [one], url))["id"])
                (answered,) = await content(server, view["output_file_id"])
                assert b"hm" in json.dumps(answered["response"]["body"]).encode()
            kept = answered["response"]["body"]["id"]  # of the last, which is stored as any other
            assert (await server.request("GET", f"/v1/responses/{kept}")).status == 200

    run(test)


@pytest.mark.parametrize(
    ("content_", "code"),
    [
        (b"", "empty_file"),
        (b"{}\n", "invalid_request"),
        (b"{", "invalid_json_line"),
        (json.dumps(line(0, "/v1/chat/completions")).encode(), "mismatched_endpoint"),
        (2 * (json.dumps(line(0)).encode() + b"\n"), "duplicate_custom_id"),
        (json.dumps(line(0, stream=True)).encode(), "invalid_request"),
    ],
)
def test_a_batch_that_cannot_run_says_why(tmp_path: Path, content_: bytes, code: str) -> None:
    async def test() -> None:
        async with keeping(tmp_path, says("a")) as server:
            file = (await upload(server, content_)).json
            body = {"input_file_id": file["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
            view = await ended(server, (await server.post("/v1/batches", body)).json["id"])
            assert view["status"] == "failed" and view["errors"]["data"][0]["code"] == code
            assert view["output_file_id"] is view["error_file_id"] is None
            assert server.worker.specs == []

    run(test)


def test_a_batch_goes_on_after_the_death_of_its_process(tmp_path: Path) -> None:
    """Each line is answered once, and says what it says in a batch that is not disturbed."""

    async def test() -> None:
        lines = [line(n) for n in range(30)]
        async with keeping(tmp_path, repeats, is_paced=True) as server:
            batch = await begin(server, lines)
            await until(lambda: len(server.worker.specs) >= 2)
            for _ in range(12):
                server.worker.advance()
                await asyncio.sleep(0.01)
        asked = []
        async with keeping(tmp_path, repeats) as server:
            view = await ended(server, batch["id"])
            asked = [bytes(spec.prompt) for spec in server.worker.specs]
            good = await content(server, view["output_file_id"])
        assert view["status"] == "completed"
        assert view["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
        assert [one["custom_id"] for one in good] == [f"c{n}" for n in range(30)]
        assert 0 < len(asked) < 30 and len(set(asked)) == len(asked), "some had been answered before"
        for n, one in enumerate(good):
            text = one["response"]["body"]["choices"][0]["text"]
            assert text.startswith(f"p{n}") and len(text) == len(f"p{n}") + 1

    run(test)


def test_a_batch_is_cancelled(tmp_path: Path) -> None:
    async def test() -> None:
        async with keeping(tmp_path, repeats, is_paced=True) as server:
            batch = await begin(server, [line(n) for n in range(30)])
            await until(lambda: len(server.worker.specs) >= 2)
            file = await server.request("DELETE", f"/v1/files/{batch['input_file_id']}")
            assert file.status == 409
            for _ in range(5):
                server.worker.advance()
                await asyncio.sleep(0.01)
            assert (await server.post(f"/v1/batches/{batch['id']}/cancel", None)).json["status"] == "cancelling"
            view = await ended(server, batch["id"])
            assert view["status"] == "cancelled" and view["cancelled_at"] and view["error_file_id"] is None
            counts = view["request_counts"]
            assert counts["total"] == 30 and len(await content(server, view["output_file_id"])) == counts["completed"]
            await until(lambda: server.gateway.fleet.num_streams == 0)
            assert (await server.post(f"/v1/batches/{batch['id']}/cancel", None)).status == 409

    run(test)


def test_a_clients_request_does_not_wait_for_a_batch(tmp_path: Path) -> None:
    async def test() -> None:
        async with keeping(tmp_path, repeats, is_paced=True) as server:
            await begin(server, [line(n) for n in range(30)])
            await until(lambda: len(server.worker.specs) == 4)  # as many as there are places
            task, answer, _ = server.begin("POST", COMPLETIONS, {"prompt": "mine", "max_tokens": 1})
            await until(lambda: len(server.worker.specs) == 5)  # at once
            server.worker.advance()
            await task
            assert answer.status == 200

    run(test)


def test_files_belong_to_a_key(tmp_path: Path) -> None:
    async def test() -> None:
        async with keeping(tmp_path, says("a"), api_keys=["k1", "k2"]) as server:
            one, other = {"authorization": "Bearer k1"}, {"authorization": "Bearer k2"}
            file = (await upload(server, b"{}\n", **one)).json
            assert (file["bytes"], file["filename"], file["purpose"]) == (3, "in.jsonl", "batch")
            path = f"/v1/files/{file['id']}"
            for method, rest in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
                assert (await server.request(method, path + rest, headers=other)).status == 404
            body = {"input_file_id": file["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
            assert (await server.post("/v1/batches", body, **other)).error["param"] == "input_file_id"
            assert (await server.request("GET", path + "/content", headers=one)).body == b"{}\n"
            assert (await server.request("DELETE", path, headers=one)).json["deleted"]
            assert (await server.request("GET", path, headers=one)).status == 404
            cross = {**one, "origin": "http://evil.example", "host": "toy"}
            assert (await upload(server, b"", **cross)).status == 403

    run(test)


def test_other_purposes_are_refused(tmp_path: Path) -> None:
    async def test() -> None:
        async with keeping(tmp_path, says("a")) as server:
            assert (await upload(server, b"", "assistants")).error["param"] == "purpose"
            assert (await server.post("/v1/files", {"a": 1})).status == 400

    run(test)


def test_a_full_store_refuses_files(tmp_path: Path) -> None:
    async def test() -> None:
        async with keeping(tmp_path, says("a"), max_bytes=1 << 20) as server:
            answer = await upload(server, b"x" * (2 << 20))
            assert answer.status == 503 and "--state-bytes" in answer.error["message"]
            assert (await upload(server, b"x\n")).status == 200

    run(test)


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.binary(max_size=40)), max_size=3, unique_by=lambda p: p[0])
)
@settings(max_examples=200, deadline=None)
def test_a_form_gives_back_what_was_put_in(parts: list[tuple[str, bytes]]) -> None:
    parts = [(name, data) for name, data in parts if b"\r\n--mark" not in b"\r\n" + data]
    body = b""
    for name, data in parts:
        body += b'--mark\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (name.encode(), data)
    found = read_form(body + b"--mark--\r\n", boundary_of("multipart/form-data; boundary=mark"))
    assert [(name, bytes(part.data)) for name, part in found.items()] == parts


@given(st.binary(max_size=80))
def test_a_form_that_is_none_is_refused(body: bytes) -> None:
    try:
        read_form(body, b"mark")
    except RequestError:
        return
    assert b"--mark--" in body


@given(st.binary(max_size=200))
def test_lines_are_the_file(data: bytes) -> None:
    pieces = list(split(memoryview(data)))
    assert b"".join(pieces) == data and all(piece.endswith(b"\n") for piece in pieces[:-1])


def test_lines_leave_places_to_clients() -> None:
    assert lines_at_once(64, 0) == 64 and lines_at_once(64, 32) == 8
    assert lines_at_once(64, 64) == lines_at_once(0, 0) == lines_at_once(4, 100) == 1
