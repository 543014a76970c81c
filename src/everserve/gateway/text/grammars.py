"""Grammars of requests, compiled before a worker sees them: in a process of its own, within limits.

A grammar that cannot be compiled, or takes too long, is a 400 that says why. So workers only get grammars whose cost is
known to be bounded. What was found out about the last few hundred is remembered: most clients send few.
"""

import hashlib
from collections import OrderedDict

from everserve.errors import RequestError
from everserve.gateway.text.limited import LimitedProcesses, ProcessDied
from everserve.gateway.text.limited_process import OK
from everserve.guides.compiling import MAX_GRAMMAR_BYTES

_CPU_S = 2.0  # of one grammar
_PREPARE_S = 60.0  # of the vocabulary
_NUM_KEPT = 512


class Grammars:
    """The grammars of one model."""

    def __init__(self, directory: str, cpu_s: float = _CPU_S) -> None:
        self._directory, self._cpu_s = directory, cpu_s
        self._processes: LimitedProcesses | None = None
        self._known: OrderedDict[bytes, str] = OrderedDict()  # what is wrong with a grammar, by its hash

    async def check(self, grammar: str, vocab_size: int, field: str) -> None:
        """Raise a RequestError about this field unless the grammar can be used."""
        encoded = grammar.encode()
        if len(encoded) > MAX_GRAMMAR_BYTES:
            raise RequestError(
                f"'{field}' makes a grammar of {len(encoded)} bytes; at most {MAX_GRAMMAR_BYTES} are supported.", field
            )
        key = hashlib.blake2b(encoded, digest_size=16).digest()
        if key not in self._known:
            self._known[key] = await self._compile(encoded, vocab_size)
            if len(self._known) > _NUM_KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        if why := self._known[key]:
            raise RequestError(f"'{field}' cannot be used: {why}", field)

    async def _compile(self, grammar: bytes, vocab_size: int) -> str:
        if self._processes is None:
            start = {"directory": self._directory, "vocab_size": vocab_size}
            self._processes = LimitedProcesses("grammar", "compiles grammars", start, self._cpu_s, _PREPARE_S)
        try:
            answer = await self._processes.ask(grammar)
        except ProcessDied as died:
            return f"compiling it {self._processes.why(died)}"
        return "" if answer == OK else answer[1:].decode()
