"""`python -m everserve.model.families`: the table of docs/models.md, as Markdown."""

from everserve.model.families import FAMILIES
from everserve.model.families.family import Family


def table() -> str:
    rows = ["| architecture | models | what it has |", "|---|---|---|"]
    rows += [f"| {_names(family)} | {family.models} | {family.kinds} |" for family in FAMILIES]
    return "\n".join(rows) + "\n"


def _names(family: Family) -> str:
    names = dict.fromkeys(name for name in (family.architecture, family.wrapper) if name)
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    print(table(), end="")
