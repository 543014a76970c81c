"""Marks around reasoning, by the names that vLLM has for the parsers."""

from typing import NamedTuple

from everserve.gateway.text.reading.parts import Thought
from everserve.gateway.text.reading.scan import Reads, Scan


class Marks(NamedTuple):
    """Reasoning stands between these, at the beginning of an answer."""

    begin: str
    end: str


_THINK = Marks("<think>", "</think>")
REASONING: dict[str, Marks] = {
    **dict.fromkeys(
        ("deepseek_r1", "deepseek_v3", "ernie45", "glm45", "hunyuan_a13b", "minimax_m2", "olmo3", "qwen3", "step3"),
        _THINK,
    ),
    "mistral": Marks("[THINK]", "[/THINK]"),
    "seed_oss": Marks("<seed:think>", "</seed:think>"),
}


def read_reasoning(scan: Scan, marks: Marks, is_inside: bool) -> Reads:
    """Up to its end; nothing if there is none. `is_inside`: the prompt ends with the mark that begins it."""
    if not is_inside:
        while not scan.has_ended and marks.begin.startswith(scan.rest.lstrip()):
            if len(scan.rest.lstrip()) == len(marks.begin):
                break
            yield None
        if not scan.rest.lstrip().startswith(marks.begin):
            return
        scan.rest = scan.rest.lstrip()[len(marks.begin) :]
    yield from scan.skip_blanks()
    if (yield from scan.pass_on([marks.end], Thought, is_trimmed=True)) is not None:
        yield from scan.skip_blanks()


def starts_inside(prompt: str, marks: Marks) -> bool:
    """Whether a prompt leaves reasoning open."""
    return prompt.rstrip().endswith(marks.begin)
