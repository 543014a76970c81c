"""What two versions must have in common, so that processes of both can be one instance while it is upgraded.

    messages        every struct on the wire, with names, types and defaults of its fields
    process table   the rows that one supervisor leaves to the next
    memory          every struct and constant that our C sources declare: cells, lanes, logs, slot tables

Each is a hash of what is declared, not of how: comments and code may differ.

    PYTHON -m everserve.cli.compatibility MODEL --> {"version": ..., "messages": ..., ...}, if it can serve that model

says it for an installed version. A version that cannot be imported, or refuses the model, says so on its stderr.
"""

import hashlib
import json
import sys
from typing import Any

import msgspec

from everserve import __version__
from everserve.cli.model_files import check_model
from everserve.config.model import ModelSource
from everserve.errors import UserError
from everserve.native.libraries import LIBRARIES
from everserve.native.structs import CStruct, source
from everserve.procs import root, supervisor  # noqa: F401 (that they can be imported is part of the answer)
from everserve.procs.process_table import Instance, ProcessTable
from everserve.wire.messages import AnyMessage


def compatibility() -> dict[str, str]:
    """What must be equal for processes of two versions to work together, for this one."""
    return {
        "version": __version__,
        "messages": _hash(_schema(AnyMessage)),
        "process table": _hash([_schema(ProcessTable), _schema(Instance)]),
        "memory": _hash(_memory()),
    }


def differences(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """What they do not have in common."""
    return sorted(name for name in one.keys() | other.keys() if name != "version" and one.get(name) != other.get(name))


def _schema(kind: Any) -> Any:
    schemas, parts = msgspec.json.schema_components([kind], schema_hook=lambda custom: {"type": repr(custom)})
    return _bare([schemas, parts])


def _bare(schema: Any) -> Any:
    """The schema without what is only for people."""
    if isinstance(schema, dict):
        return {key: _bare(value) for key, value in schema.items() if key not in ("description", "title")}
    return [_bare(value) for value in schema] if isinstance(schema, (list, tuple)) else schema


def _memory() -> Any:
    found = {}
    for name, library in LIBRARIES.items():
        for path in sorted(library.sources.iterdir()):
            if path.suffix in (".c", ".h"):
                declared = source(name, path.name)
                structs = {struct.name: _members(struct) for struct in declared.structs.values()}
                found[f"{name}/{path.name}"] = [structs, declared.constants]
    return found


def _members(struct: CStruct) -> Any:
    return [
        (each.name, _members(each.kind) if isinstance(each.kind, CStruct) else each.kind, each.count, each.offset)
        for each in struct.members
    ]


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=repr).encode()).hexdigest()[:16]


def main() -> int:
    try:
        check_model(msgspec.json.decode(sys.argv[1], type=ModelSource))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(compatibility()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
