"""The structs and constants that C and Python share, read from the C sources: each is declared once, there.

    declared = source("lanes", "exchange.c")
    class Part(ctypes.Structure):
        _fields_ = declared.fields("part")                     # names, order and sizes are C's
    pack = source("ops", "linear.h").packer("linear_args").pack    # arguments in the order of C's fields

Only what our structs use is understood: numbers, pointers, arrays, other structs, _Alignas; anything else is an error
when the module that asks for it is imported. tests/unit/native/test_structs.py has the compiler confirm every offset.
"""

import contextlib
import ctypes
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct
from typing import Any

from everserve.native.libraries import LIBRARIES

_POINTER = "P"
_CODES = {  # of C's types, as the module struct has them
    **{"int64_t": "q", "uint64_t": "Q", "int32_t": "i", "uint32_t": "I", "int": "i", "size_t": "Q"},
    **{"double": "d", "float": "f"},
}
_CTYPES: dict[str, Any] = {
    "P": ctypes.c_int64,
    "q": ctypes.c_int64,
    "Q": ctypes.c_int64,
    "d": ctypes.c_double,
    "f": ctypes.c_float,
}
_CTYPES |= {"i": ctypes.c_int32, "I": ctypes.c_uint32}  # addresses and sequence numbers: plain integers, never None

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_STRUCT = re.compile(r"^struct (\w+) \{(.*?)^\};", re.DOTALL | re.MULTILINE)
_DEFINE = re.compile(r"^#define (\w+) +([^\n]+)", re.MULTILINE)
_ENUM = re.compile(r"enum *\w* *\{([^}]*)\}")
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
_FUNCTION_TYPE = re.compile(r"typedef[^;]*\(\*(\w+)\)\(")
_FUNCTION = re.compile(r".*\(\*(\w+)\)\(.*\)", re.DOTALL)
_DECLARED = re.compile(
    r"(?:const |_Atomic )*(?:struct (?P<struct>\w+)|(?:enum )?(?P<type>\w+)) ?(?P<names>.*)", re.DOTALL
)
_ALIGNED = re.compile(r"_Alignas\((\w+)\)\s*")


@dataclass(frozen=True)
class Member:
    """One field of a struct: `count` of them one behind the other."""

    name: str
    kind: "str | CStruct"
    count: int | None  # None: it is no array
    offset: int

    @property
    def size(self) -> int:
        one = self.kind.size if isinstance(self.kind, CStruct) else Struct(self.kind).size
        return one * (1 if self.count is None else self.count)

    @property
    def format(self) -> str:
        one = self.kind.format if isinstance(self.kind, CStruct) else self.kind
        return one * (1 if self.count is None else self.count)


@dataclass(frozen=True)
class CStruct:
    """A struct as the compiler lays it out on the 64-bit machines that we run on."""

    name: str
    members: tuple[Member, ...]
    align: int

    @property
    def size(self) -> int:
        end = self.members[-1].offset + self.members[-1].size
        return -(-end // self.align) * self.align

    @property
    def format(self) -> str:
        """The format for the module struct, nested structs flattened."""
        text = "".join(member.format for member in self.members)
        assert Struct(text).size == self.size, f"struct {self.name} has gaps"
        return text


@dataclass
class Declarations:
    """What a C file and its headers declare, as far as it is understood."""

    structs: dict[str, CStruct] = field(default_factory=dict)
    constants: dict[str, int] = field(default_factory=dict)
    function_types: set[str] = field(default_factory=set)
    unread: dict[str, str] = field(default_factory=dict)  # struct -> why it is not understood

    def fields(self, struct: str, nested: Mapping[str, Any] | None = None, first: str = "") -> list[tuple[str, Any]]:
        """`_fields_` of a ctypes.Structure, from `first` on. `nested`: the classes, or other types, of fields that
        should have them."""
        members = self.struct(struct).members
        names = [member.name for member in members]
        members = members[names.index(first) if first else 0 :]
        fields: list[tuple[str, Any]] = []
        end = members[0].offset
        for member in members:
            kind = (nested or {}).get(member.name) or self._type_of(member)
            assert ctypes.sizeof(kind) == member.size, f"struct {struct}, {member.name}"
            if member.offset > end:
                fields.append((f"_gap_{end}", ctypes.c_char * (member.offset - end)))
            fields.append((member.name, kind))
            end = member.offset + member.size
        return fields

    def packer(self, struct: str, first: str = "", last: str = "", as_bytes: str = "") -> Struct:
        """For all fields of a struct, or those from `first` to `last`, if there are no gaps; nested structs are
        flattened. The field `as_bytes` is given as bytes."""
        members = self.struct(struct).members
        names = [member.name for member in members]
        start = names.index(first) if first else 0
        end = names.index(last) + 1 if last else len(names)
        formats = [f"{each.size}s" if each.name == as_bytes else each.format for each in members[start:end]]
        packer = Struct("".join(formats))
        assert packer.size == members[end - 1].offset + members[end - 1].size - members[start].offset, struct
        return packer

    def offset(self, struct: str, member: str) -> int:
        return next(each.offset for each in self.struct(struct).members if each.name == member)

    def struct(self, name: str) -> CStruct:
        assert name in self.structs, f"struct {name}: {self.unread.get(name, 'there is none')}"
        return self.structs[name]

    def _type_of(self, member: Member) -> Any:
        assert isinstance(member.kind, str), f"{member.name}: which class is it in Python?"
        one = _CTYPES[member.kind]
        return one if member.count is None else one * member.count


def source(library: str, name: str) -> Declarations:
    """What `name`, a C file or header of one of our libraries, declares."""
    found = LIBRARIES[library]
    directories = (found.sources, *found.headers)
    path = next(directory / name for directory in directories if (directory / name).exists())
    return _read(path, directories)


@functools.cache
def _read(path: Path, directories: tuple[Path, ...]) -> Declarations:
    text = _COMMENT.sub("", path.read_text())
    found = Declarations()
    for include in _INCLUDE.findall(text):
        header = next(each / include for each in (path.parent, *directories) if (each / include).exists())
        if header != path:  # a file of kernels may include itself, once for each dtype
            _take(found, _read(header, directories))
    found.function_types |= set(_FUNCTION_TYPE.findall(text))
    _define(found, _DEFINE.findall(text))
    for enum in _ENUM.findall(text):
        _enumerate(found, enum)
    for name, body in _STRUCT.findall(text):
        try:
            found.structs[name] = _struct(found, name, body)
            found.unread.pop(name, None)
        except (KeyError, ValueError) as error:
            found.structs.pop(name, None)
            found.unread[name] = f"{path.name}: {error} is not understood"
    return found


def _take(found: Declarations, other: Declarations) -> None:
    found.structs |= other.structs
    found.constants |= other.constants
    found.function_types |= other.function_types
    found.unread |= other.unread


def _define(found: Declarations, definitions: list[tuple[str, str]]) -> None:
    """Numbers only, and none that several conditions define."""
    names = [name for name, _ in definitions]
    for name, value in definitions:
        if names.count(name) == 1:
            with contextlib.suppress(ValueError):
                found.constants[name] = _number(found, value)


def _enumerate(found: Declarations, text: str) -> None:
    following = 0
    for each in text.split(","):
        name, _, value = each.partition("=")
        following = _number(found, value) if value.strip() else following
        found.constants[name.strip()] = following
        following += 1


def _number(found: Declarations, text: str) -> int:
    """An expression of integers and constants. ValueError for any other."""
    text = re.sub(r"U?INT(?:32|64)_C\((\w+)\)", r"\1", text.strip())
    text = re.sub(r"[A-Za-z_]\w*", lambda name: str(found.constants.get(name[0], name[0])), text)
    text = re.sub(r"\b(0[xX][0-9a-fA-F]+|\d+)[uUlL]+", r"\1", text)
    if not re.fullmatch(r"[\s0-9a-fA-FxX()+*/-]+", text) or "//" in text or "**" in text:
        raise ValueError(text)
    try:
        return int(eval(text.replace("/", "//"), {"__builtins__": {}}))
    except (SyntaxError, TypeError, NameError) as error:
        raise ValueError(text) from error


def _struct(found: Declarations, name: str, body: str) -> CStruct:
    members: list[Member] = []
    offset, align = 0, 1
    for each in filter(None, (" ".join(part.split()) for part in body.split(";"))):
        declared, least = _aligned(found, each)
        for member, kind, count in _members(found, declared):
            own = max(least, kind.align if isinstance(kind, CStruct) else Struct(kind).size)
            offset, align, least = -(-offset // own) * own, max(align, own), 1
            members.append(Member(member, kind, count, offset))
            offset += members[-1].size
    return CStruct(name, tuple(members), align)


def _aligned(found: Declarations, declared: str) -> tuple[str, int]:
    at = _ALIGNED.match(declared)
    return (declared[at.end() :], _number(found, at[1])) if at else (declared, 1)


def _members(found: Declarations, declared: str) -> list[tuple[str, str | CStruct, int | None]]:
    """Those of one declaration, like `const int32_t *tokens, *slots` or `int64_t sent[2], num`."""
    if function := _FUNCTION.fullmatch(declared):
        return [(function[1], _POINTER, None)]
    parts = _DECLARED.fullmatch(declared)
    if parts is None:
        raise ValueError(declared)
    members: list[tuple[str, str | CStruct, int | None]] = []
    for each in parts["names"].split(","):
        bare = re.sub(r"\bconst\b|\s", "", each)
        name, _, counts = bare.partition("[")
        pointer, name = "*" in name, name.lstrip("*")
        count = _number(found, counts.rstrip("]")) if counts else None
        members.append((name, _POINTER if pointer else _kind(found, parts), count))
    return members


def _kind(found: Declarations, parts: re.Match[str]) -> str | CStruct:
    if parts["struct"]:
        return found.structs[parts["struct"]]
    if parts["type"] in found.function_types:
        return _POINTER
    return "i" if "enum " in parts[0] else _CODES[parts["type"]]
