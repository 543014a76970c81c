"""Metric families as Prometheus' text, a few lines at a time: the client's own function writes all of them at once."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import Metric
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from everserve.gateway.http.slices import batches

_LINES_PER_PIECE = 64
_TYPES = ("gauge", "counter", "histogram")
_number: Callable[[float], str] = floatToGoString
_SPECIAL = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def pieces(families: Iterable[Metric]) -> Iterator[bytes]:
    """One or more for each family: collecting one is work, too."""
    for family in families:
        for lines in batches(_lines(family), _LINES_PER_PIECE):
            yield "".join(lines).encode()


def _lines(family: Metric) -> Iterator[str]:
    assert family.type in _TYPES, "the format has names of its own for the others"
    name = f"{family.name}_total" if family.type == "counter" else family.name
    text = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
    yield f"# HELP {name} {text}\n# TYPE {name} {family.type}\n"
    for sample in family.samples:
        yield f"{sample.name}{_labels(sample)} {_number(sample.value)}\n"


def _labels(sample: Sample) -> str:
    if not sample.labels:
        return ""
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in sorted(sample.labels.items())) + "}"


def _escape(value: str) -> str:
    return value.translate(_SPECIAL) if not value.isalnum() else value
