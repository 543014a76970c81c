"""Chat templates that do not end, or that fill the memory, end their own process and nothing else."""

import asyncio
import gc
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everserve.errors import ConfigError, OverloadedError, RequestError
from everserve.gateway.text import limited as module
from everserve.gateway.text.templates import ChatTemplates, Rendering
from everserve.procs.process import children_of

SAYS = "<{{ messages[0].content }}>"
LOOPS = "{% for a in range(100000) %}{% for b in range(100000) %}{% for c in range(100000) %}{% endfor %}"
LOOPS += "{% endfor %}{% endfor %}"
DOUBLES = "{% set ns = namespace(x='x' * 1000) %}{% for _ in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
BOMBS = {
    "loops": (LOOPS, "takes more than 0.3 s of CPU time with these messages"),
    "a huge number": ("{{ (10 ** (10 ** 9 + messages|length)) % 7 }}", "takes more than 0.3 s of CPU time"),
    "a product": ("{{ ('x' * (10 ** 10 * messages|length))|length }}", "takes too much memory"),
    "doubling": (DOUBLES + "{{ ns.x|length }}", "takes too much memory|takes more than"),  # whichever comes first
    "a wide format": ("{{ ('%' ~ 10 ** 10 * messages|length ~ 'd') % 1 }}", "rejected the messages"),
    "a wide filter": ("{{ 'x'|center(10 ** 10 * messages|length)|length }}", "takes too much memory"),
    "recursion": ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "maximum recursion depth"),
    "a list": ("{{ ([1] * (10 ** 10 * messages|length))|length }}", "takes too much memory"),
}
SAYS_OR_BOMBS = (
    "".join(f"{{% if bomb == {name!r} %}}{source}{{% endif %}}" for name, (source, _) in BOMBS.items()) + SAYS
)


def rendering(text: str = "hi", **variables: Any) -> Rendering:
    messages = [msgspec.Raw(msgspec.json.encode({"role": "user", "content": text}))]
    options: dict[str, Any] = {"add_generation_prompt": True, "continue_final_message": False}
    return Rendering(messages=messages, variables=variables, max_characters=20_000, **options)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 120))  # type: ignore[arg-type]


def processes() -> set[int]:
    return set(children_of(os.getpid()))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = processes()
    yield
    gc.collect()
    assert processes() <= before


def test_a_template_that_goes_beyond_its_limits() -> None:
    """The answer says so, and the next one is right."""

    async def test() -> None:
        templates = ChatTemplates(SAYS_OR_BOMBS, {}, cpu_s=0.3)
        assert await templates.render(rendering()) == "<hi>"
        for name, (_, why) in BOMBS.items():
            with pytest.raises(RequestError, match=why) as caught:
                await templates.render(rendering(bomb=name))
            assert caught.value.param == "messages", name
            assert await templates.render(rendering(name)) == f"<{name}>"

    run(test)


def test_a_text_that_is_too_long_is_not_written_to_its_end() -> None:
    async def test() -> None:
        endless = "{% for a in range(100000) %}{% for b in range(100000) %}xxxxxxxx{% endfor %}{% endfor %}"
        templates = ChatTemplates("{% if n %}" + endless + "{% endif %}" + SAYS, {}, cpu_s=60)
        assert await templates.render(rendering(n=1)) is None
        assert await templates.render(rendering("x" * 19_998)) == f"<{'x' * 19_998}>"
        assert await templates.render(rendering("x" * 19_999)) is None

    run(test)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{% if %}", r"is broken: .* \(line 1\)"),
        ("\n{{ x | nonsense }}", r"is broken: No filter named 'nonsense'. \(line 2\)"),
        ("{{ 'x' * 10 ** 8 }}", "cannot be compiled: takes more than 0.3 s of CPU time"),  # constants are computed then
    ],
)
def test_what_cannot_be_compiled_is_told_at_the_start(source: str, why: str) -> None:
    async def test() -> None:
        templates = ChatTemplates(source, {}, cpu_s=0.3)
        templates.prepare()
        with pytest.raises(ConfigError, match=f"the chat template {why}"):
            await templates.check()

    run(test)


def test_a_checked_template_is_ready() -> None:
    async def test() -> None:
        templates = ChatTemplates(SAYS, {})
        templates.prepare()
        await templates.check()
        before = processes()
        assert await templates.render(rendering()) == "<hi>"
        assert before <= processes()

    run(test)


def test_long_renderings_leave_a_process_for_others() -> None:
    """Three long chats never end, a fourth waits for one of them, and a short one is answered; also when a short one
    does not end."""

    async def test() -> None:
        before = processes()
        templates = ChatTemplates("{% if endless %}" + LOOPS + "{% endif %}" + SAYS, {}, cpu_s=600)
        long = "x" * 10_000
        endless = [asyncio.create_task(templates.render(rendering(long, endless=1))) for _ in range(3)]
        fourth = asyncio.create_task(templates.render(rendering(long)))
        await until(lambda: len(processes() - before) == 4)
        assert await templates.render(rendering()) == "<hi>"
        assert await templates.render(rendering()) == "<hi>"
        assert not fourth.done()
        endless.append(asyncio.create_task(templates.render(rendering(endless=1))))
        waiting = asyncio.create_task(templates.render(rendering()))
        await asyncio.sleep(0)
        endless[0].cancel()  # its client has left
        endless[3].cancel()
        assert await fourth == f"<{long}>" and await waiting == "<hi>"
        for task in endless[1:]:
            task.cancel()
        await asyncio.gather(*endless, return_exceptions=True)
        await until(lambda: len(processes() - before) <= 2)
        assert await templates.render(rendering()) == "<hi>"

    run(test)


def test_a_burst_of_short_ones_takes_turns() -> None:
    async def test() -> None:
        before = processes()
        templates = ChatTemplates(SAYS, {})
        await templates.render(rendering())
        texts = await asyncio.gather(*(templates.render(rendering(str(i))) for i in range(50)))
        assert texts == [f"<{i}>" for i in range(50)]
        assert len(processes() - before) <= 2  # two, if one of them had to wait for a core

    run(test)


def test_a_process_that_somebody_kills_is_replaced_unseen() -> None:
    async def test() -> None:
        before = processes()
        templates = ChatTemplates("{% if endless %}" + LOOPS + "{% endif %}" + SAYS, {}, cpu_s=600)
        await templates.render(rendering())

        def kill_all(sig: int) -> None:
            for pid in processes() - before:
                os.kill(pid, sig)

        async def begin_endless() -> "asyncio.Task[str | None]":
            """One that has been rendered for so long that another process is there for the next."""
            task = asyncio.create_task(templates.render(rendering(endless=1)))
            await until(lambda: len(processes() - before) >= 2)
            return task

        kill_all(signal.SIGKILL)
        assert await templates.render(rendering()) == "<hi>"
        endless = await begin_endless()
        first = processes()
        kill_all(signal.SIGKILL)
        await until(lambda: len(processes() - before - first) >= 2)
        assert not endless.done(), "it is rendered again"
        kill_all(signal.SIGKILL)
        with pytest.raises(OverloadedError, match="was killed"):
            await endless
        assert await templates.render(rendering()) == "<hi>"

    run(test)


def test_a_process_that_crashes_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What crashed it may have been its messages."""
    monkeypatch.setattr(module, "_MOST", 1)  # process: the signal meets the one that renders, and no other

    async def test() -> None:
        before = processes()
        templates = ChatTemplates("{% if endless %}" + LOOPS + "{% endif %}" + SAYS, {}, cpu_s=600)
        await templates.render(rendering())
        endless = asyncio.create_task(templates.render(rendering(endless=1)))
        await asyncio.sleep(0)  # it has the process now
        (pid,) = processes() - before
        os.kill(pid, signal.SIGSEGV)
        with pytest.raises(RequestError, match=r"ends its process \(SIGSEGV\) with these messages"):
            await endless
        assert await templates.render(rendering()) == "<hi>"

    run(test)


def test_a_process_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chats are refused for the moment; nothing waits for ever."""

    async def test() -> None:
        templates = ChatTemplates("{% if endless %}" + LOOPS + "{% endif %}" + SAYS, {}, cpu_s=600)
        await templates.render(rendering())
        works = module.LimitedProcess
        monkeypatch.setattr(module, "LimitedProcess", _cannot)
        endless = asyncio.create_task(templates.render(rendering(endless=1)))
        waiting = [asyncio.create_task(templates.render(rendering())) for _ in range(2)]
        await until(lambda: len(templates.processes._waiting) == 2)
        endless.cancel()
        for task in (*waiting, asyncio.create_task(templates.render(rendering()))):
            with pytest.raises(OverloadedError, match="could not be started"):
                await task
        monkeypatch.setattr(module, "LimitedProcess", works)
        assert await templates.render(rendering()) == "<hi>"

    run(test)


def _cannot(task: str) -> Any:
    raise BlockingIOError("Resource temporarily unavailable")


def test_what_a_template_process_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of the server are not in its environment."""
    monkeypatch.setenv("EVERSERVE_API_KEY", "sesame")

    async def test() -> None:
        before = processes()
        templates = ChatTemplates(SAYS, {})
        await templates.render(rendering())
        (pid,) = processes() - before
        assert b"sesame" not in Path(f"/proc/{pid}/environ").read_bytes()
        assert Path(f"/proc/{pid}/comm").read_text() == "es-template\n"

    run(test)
