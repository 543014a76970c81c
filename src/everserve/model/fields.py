"""Fields: one JSON object of a model directory, read with suspicion."""

import json
from pathlib import Path
from typing import Any

from everserve.errors import ModelError


class Fields:
    """Null counts as absent; every complaint names the file and the field."""

    def __init__(self, file: Path, values: dict[str, Any], prefix: str = "") -> None:
        self.file = file
        self.values = {name: value for name, value in values.items() if value is not None}
        self.prefix = prefix

    @classmethod
    def from_file(cls, file: Path) -> "Fields":
        try:
            values = json.loads(file.read_bytes())
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
        value = json.dumps(self.values[name]) if name in self.values else "missing"
        shown = value if len(value) <= 60 else value[:57] + "..."
        return ModelError(f"{self.file}: {self.prefix}{name} (now {shown}) {problem}")

    def integer(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        value = self.values.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error(name, f"must be an integer of at least {minimum}; correct the file")
        return value

    def number(self, name: str, default: float | None = None, above: float = 0.0) -> float:
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < 1e300:  # nor NaN
            raise self.error(name, f"must be a number above {above:g}; correct the file")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return self.number(name) if name in self.values else None

    def flag(self, name: str, default: bool | None = None) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false; correct the file")
        return value

    def object(self, name: str) -> "Fields":
        value = self.values.get(name, {})
        if not isinstance(value, dict):
            raise self.error(name, "must be an object; correct the file")
        return Fields(self.file, value, prefix=f"{self.prefix}{name}.")
