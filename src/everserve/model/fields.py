"""Fields: one JSON object of a model directory, read with suspicion."""

import json
from pathlib import Path
from typing import Any

from everserve.errors import ModelError

_MAX_FILE_BYTES = 64 << 20  # of a JSON file of a model directory
MAX_INTEGER = (1 << 31) - 1  # kernels count with 32 bits; no model comes near


def parse_json(text: bytes) -> Any:
    """ValueError if it is no JSON that can be read, however that shows itself."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def shown(value: Any) -> str:
    """A value of a file as a line can show it."""
    try:
        text = json.dumps(value)
    except RecursionError:
        text = "nested too deeply"
    return text if len(text) <= 60 else text[:57] + "..."


class Fields:
    """Null counts as absent, but for who asks for `nulls`; every complaint names the file and the field.

    What was asked for is remembered: a field that nothing has asked for may change the model (`refuse_unread`)."""

    def __init__(self, file: Path, values: dict[str, Any], prefix: str = "") -> None:
        self.file = file
        self.nulls = frozenset(name for name, value in values.items() if value is None)
        self.values = {name: value for name, value in values.items() if value is not None}
        self.prefix = prefix
        self._read = set[str]()

    @classmethod
    def from_file(cls, file: Path) -> "Fields":
        try:
            with file.open("rb") as stream:
                text = stream.read(_MAX_FILE_BYTES + 1)
            if len(text) > _MAX_FILE_BYTES:
                raise ValueError(f"it has more than {_MAX_FILE_BYTES >> 20} MiB")
            values = parse_json(text)
        except FileNotFoundError:
            raise ModelError(f"{file} does not exist; give the path of a Hugging Face model directory") from None
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise ModelError(f"{file} cannot be read as JSON ({reason}); download it again") from None
        if not isinstance(values, dict):
            raise ModelError(f"{file} is not a JSON object; download it again")
        return cls(file, values)

    def error(self, name: str, problem: str) -> ModelError:
        """The exception to raise about a field; `problem` continues the sentence 'field (now x) ...'."""
        value = shown(self.values[name]) if name in self.values else "missing"
        plain = name if name.isprintable() else shown(name)
        return ModelError(f"{self.file}: {self.prefix}{plain} (now {value}) {problem}")

    def has(self, name: str) -> bool:
        """Whether it is there. That alone does not count as read."""
        return name in self.values

    def get(self, name: str, default: Any = None) -> Any:
        """The field as it is."""
        self._read.add(name)
        return self.values.get(name, default)

    def integer(self, name: str, default: int | None = None, maximum: int = MAX_INTEGER, *, minimum: int = 1) -> int:
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error(name, f"must be an integer of at least {minimum}; correct the file")
        if value > maximum:
            raise self.error(name, f"must be at most {maximum}; correct the file")
        return value

    def number(self, name: str, default: float | None = None, above: float = 0.0, maximum: float = 1e30) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value <= maximum:  # nor NaN
            raise self.error(name, f"must be a number above {above:g}, at most {maximum:g}; correct the file")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return self.number(name) if self.has(name) else None

    def flag(self, name: str, default: bool | None = None) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false; correct the file")
        return value

    def numbers(self, name: str, length: int, for_each: str = "") -> tuple[float, ...]:
        """Positive ones."""
        value = self.get(name)
        is_list = isinstance(value, list) and len(value) == length
        if not is_list or not all(type(one) in (int, float) and 0 < one < 1e30 for one in value):
            raise self.error(name, f"must be a list of {length} numbers above 0{for_each}; correct the file")
        return tuple(map(float, value))

    def choices(self, name: str, length: int, known: tuple[str, ...]) -> tuple[str, ...]:
        """A list of names, each one of those that are known."""
        value = self.get(name)
        if not isinstance(value, list) or len(value) != length:
            raise self.error(name, f"must be a list of num_hidden_layers ({length}); correct the file")
        if any(one not in known for one in value):
            raise self.error(name, f"must hold only {' or '.join(known)}; layers of other kinds are not built")
        return tuple(value)

    def object(self, name: str) -> "Fields":
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise self.error(name, "must be an object; correct the file")
        return Fields(self.file, value, prefix=f"{self.prefix}{name}.")

    def assume(self, **values: Any) -> None:
        """What fields mean that the file leaves out."""
        self.values = {**values, **self.values}

    def expect(self, name: str, *values: Any, reason: str = "") -> None:
        """Absent, or one of these: everything else is not built."""
        value = self.get(name, values[0])
        if not any(type(value) is type(one) and value == one for one in values):
            only = " or ".join(map(shown, values))
            raise self.error(name, reason or f"is not supported; only {only} is")

    def ignore(self, *names: str) -> None:
        """Whatever they say, it changes nothing."""
        self._read.update(names)

    def refuse_unread(self, of: str) -> None:
        """A field that is false or null says that something is not there; every other one may say that it is."""
        for name, value in sorted(self.values.items()):
            if name not in self._read and value is not False:
                raise self.error(
                    name,
                    f"is not a field that {of} has here, and may change what it computes; remove it if it does not",
                )
