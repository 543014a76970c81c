"""What is lost in each case of the repair benchmark, and which server it is measured on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from everserve.errors import ConfigError

FAULTS = {
    "processes": "all processes on it are killed; they are replaced at once",
    "device": "it is lost with its memory; its workers are replaced at once",
    "gone": "it is lost with its memory and does not return before every expert has all its places elsewhere",
}
SHADOWS = {
    "enough": "every expert keeps a place",
    "few": "as few as survivors need to have room for every expert",
}


@dataclass(frozen=True)
class Case:
    """So many devices are lost at once, in this way, with so many shadow experts per worker and layer."""

    num_lost: int
    fault: str
    shadows: str
    num_shadows: int

    def __str__(self) -> str:
        return f"{self.num_lost}-{self.fault}-{self.shadows}"

    def is_meant_by(self, pattern: str) -> bool:
        """A pattern has one or more parts of a case's name: gone, gone-few, 2-gone-few."""
        return set(pattern.split("-")) <= {str(self.num_lost), self.fault, self.shadows}


def choose(
    num_experts: int, num_devices: int, lost: Sequence[int], patterns: Sequence[str] = ()
) -> tuple[list[Case], list[Case]]:
    """The cases to measure, those of one server together; and those that do not exist, because the fewest shadows that
    leave room for every expert are enough already."""
    if num_experts < num_devices:
        raise ConfigError(f"--devices {num_devices}: the model has {num_experts} experts per layer")
    wrong = [num for num in lost if not 0 < num < num_devices]
    if wrong:
        raise ConfigError(f"--lost {wrong[0]}: of {num_devices} devices 1 to {num_devices - 1} can be lost")
    found = list(_all(num_experts, num_devices, lost))
    for pattern in patterns:
        if not any(case.is_meant_by(pattern) for case in found):
            raise ConfigError(f"--case {pattern}: no case has this name; the first is {found[0]}")
    meant = [case for case in found if not patterns or any(case.is_meant_by(pattern) for pattern in patterns)]
    missing = [
        case
        for case in meant
        if case.shadows == "few" and case.num_shadows >= _enough(num_experts, num_devices, case.num_lost)
    ]
    return sorted((case for case in meant if case not in missing), key=lambda case: case.num_shadows), missing


def _all(num_experts: int, num_devices: int, lost: Sequence[int]) -> Iterator[Case]:
    for num in lost:
        for fault in FAULTS:
            yield Case(num, fault, "enough", _enough(num_experts, num_devices, num))
            yield Case(num, fault, "few", _few(num_experts, num_devices, num))


def _enough(num_experts: int, num_devices: int, num_lost: int) -> int:
    """Shadows for as many further places as devices may be lost, at most those of a worker that holds every expert."""
    num_active = -(-num_experts // num_devices)
    return min(num_lost * num_active, num_experts - num_experts // num_devices)


def _few(num_experts: int, num_devices: int, num_lost: int) -> int:
    return -(-num_experts // (num_devices - num_lost)) - -(-num_experts // num_devices)


def devices_to_lose(round_: int, num_lost: int, num_devices: int) -> list[int]:
    """Others in each round."""
    return [(round_ * num_lost + i) % num_devices for i in range(num_lost)]
