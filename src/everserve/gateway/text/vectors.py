"""Vectors as numbers. Sums are exact before they are rounded, so that every machine gives the same bits."""

import base64
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from everserve.errors import RequestError
from everserve.gateway.text.tokenizer_files import read_json

Vector = NDArray[np.float32]


class Dimensions:
    """How many numbers a client may ask for: a model has to be trained for fewer than all (Matryoshka)."""

    def __init__(self, model: str) -> None:
        config = read_json(Path(model) / "config.json")
        sizes = config.get("matryoshka_dimensions")
        self.sizes = sizes if isinstance(sizes, list) else None
        self.may_vary = bool(config.get("is_matryoshka")) or bool(self.sizes)

    def check(self, wanted: int | None) -> None:
        """Refuses what the model was not trained for."""
        if wanted is None:
            return
        if not self.may_vary:
            raise RequestError("This model's embeddings have one size; leave 'dimensions' out.", "dimensions")
        if self.sizes is not None and wanted not in self.sizes:
            raise RequestError(
                f"This model's embeddings may have {', '.join(map(str, self.sizes))} dimensions, not {wanted}.",
                "dimensions",
            )


def read(pooled: bytes, num_wanted: int | None = None) -> Vector:
    """What a worker has sent; its first numbers, if the client wants fewer."""
    vector: Vector = np.frombuffer(pooled, np.float32)
    if num_wanted is not None and num_wanted > len(vector):
        raise RequestError(f"This model's embeddings have {len(vector)} dimensions, not {num_wanted}.", "dimensions")
    return vector[:num_wanted]


def normalized(vector: Vector) -> Vector:
    """The same direction, with length 1. Nothing stays nothing."""
    length = math.sqrt(dot(vector, vector))
    return (vector.astype(np.float64) / length).astype(np.float32) if length > 0 else vector


def cosine(a: Vector, b: Vector) -> float:
    """1: the same direction. Of nothing: 0."""
    squares = dot(a, a) * dot(b, b)
    return dot(a, b) / math.sqrt(squares) if squares > 0 else 0.0


def dot(a: Vector, b: Vector) -> float:
    """Products of two float32 numbers are exact as doubles, and fsum rounds once."""
    return math.fsum((a.astype(np.float64) * b).tolist())


def as_base64(vector: Vector) -> str:
    """Its numbers as bytes, lowest first."""
    return base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode()
