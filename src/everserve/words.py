"""Numbers in sentences: one worker is, two workers are."""

_SPELLED = {1: "one", 2: "two"}
_SINGULAR = {"are": "is", "were": "was", "have": "has", "go": "goes"}


def plural(noun: str, number: int) -> str:
    """The noun as it stands behind this number."""
    if number == 1:
        return noun
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"


def agree(verb: str, number: int) -> str:
    """The verb as it stands behind this number of things: `are`, `have`, `need`."""
    if number != 1:
        return verb
    return _SINGULAR.get(verb, f"{verb}s")


def count(number: int, noun: str, verb: str = "") -> str:
    """`1 worker`, `2,048 workers`; with a verb: `1 worker is`, `2 workers are`."""
    counted = f"{number:,} {plural(noun, number)}"
    return f"{counted} {agree(verb, number)}" if verb else counted


def any_of(number: int, noun: str) -> str:
    """`any one worker`, `any two workers`; `no worker` of none."""
    if not number:
        return f"no {noun}"
    return f"any {_SPELLED.get(number, number)} {plural(noun, number)}"


def size(attention: int, expert: int, devices: int) -> str:
    """How many workers an instance has. Workers with both roles count as attention workers."""
    of_role = [(attention, "attention worker"), (expert, "expert worker")]
    workers = " and ".join(count(number, noun) for number, noun in of_role if number)
    return f"{workers or 'no workers'} on {count(devices, 'device')}"
