"""What is read from the C sources is what the compiler makes of them, field by field."""

import ctypes
import subprocess
from pathlib import Path

import pytest

from everserve.native.compiling import find_compiler
from everserve.native.libraries import LIBRARIES
from everserve.native.structs import CStruct, Declarations, Member, source

FILES = [
    (name, path.name)
    for name, library in LIBRARIES.items()
    for path in sorted(library.sources.glob("*.c"))
    if source(name, path.name).structs
]


@pytest.mark.parametrize(("library", "name"), FILES)
def test_the_compiler_agrees(library: str, name: str, tmp_path: Path) -> None:
    declared, found = source(library, name), LIBRARIES[library]
    lines = [f'#include "{found.sources / name}"', "#include <stddef.h>"]
    for struct in declared.structs.values():
        lines.append(f'_Static_assert(sizeof(struct {struct.name}) == {struct.size}, "{struct.name}");')
        lines += [
            f"_Static_assert(offsetof(struct {struct.name}, {member.name}) == {member.offset} && "
            f'sizeof(((struct {struct.name} *)0)->{member.name}) == {member.size}, "{struct.name}.{member.name}");'
            for member in struct.members
        ]
    lines += [f'_Static_assert({each} == {value}, "{each}");' for each, value in declared.constants.items()]
    checks = tmp_path / "checks.c"
    checks.write_text("\n".join(lines))
    headers = [f"-I{directory}" for directory in (found.sources, *found.headers)]
    command = [*find_compiler(), "-std=c11", "-pthread", "-fsyntax-only", "-w", *headers, str(checks)]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr


def test_a_wrong_size_is_noticed() -> None:
    """What a stale copy of a struct in Python would have been."""
    declared = source("lanes", "exchange.c")
    with pytest.raises(AssertionError, match="exchange, layout"):
        declared.fields("exchange", {"layout": ctypes.c_int64})


def test_what_is_not_understood_is_an_error_where_it_is_used() -> None:
    with pytest.raises(AssertionError, match=r"struct warden: .*bool"):
        source("liveness", "liveness.c").fields("warden")
    with pytest.raises(AssertionError, match="there is none"):
        source("ops", "linear.h").packer("of_nothing")


def test_gaps() -> None:
    odd = CStruct("odd", (Member("a", "i", None, 0), Member("b", "q", None, 8), Member("c", "i", 3, 16)), 8)
    declared = Declarations({"odd": odd})

    class Odd(ctypes.Structure):
        _fields_ = declared.fields("odd")

    assert (Odd.a.offset, Odd.b.offset, Odd.c.offset, ctypes.sizeof(Odd)) == (0, 8, 16, odd.size)
    assert [name for name, _ in declared.fields("odd", first="b")] == ["b", "c"]
    assert declared.packer("odd", "a", "c").unpack(bytes(Odd(a=1, b=2, c=(3, 4, 5)))[:28]) == (1, 2, 3, 4, 5)
