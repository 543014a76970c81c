"""Windows that only some layers have."""

from collections.abc import Sequence
from dataclasses import replace

from everserve.model.families.reading import FULL, SLIDING, layer_types
from everserve.model.fields import Fields
from everserve.model.spec import Gqa


def with_windows(mixer: Gqa, windows: Sequence[int | None]) -> list[Gqa]:
    """One for each layer."""
    return [replace(mixer, window=window) for window in windows]


def qwen_windows(f: Fields, num_layers: int) -> list[int | None]:
    """Qwen's files carry a window size even when it is switched off; switched on, the first `max_window_layers` layers
    see everything."""
    is_on = f.flag("use_sliding_window", False)
    size = f.integer("sliding_window", 4096)
    num_full = f.integer("max_window_layers", num_layers, minimum=0) if is_on else num_layers
    f.ignore("max_window_layers")
    kinds = layer_types(f, [FULL if i < num_full else SLIDING for i in range(num_layers)])
    if not is_on and SLIDING in kinds:
        raise f.error("layer_types", "names sliding_attention, and use_sliding_window is false; correct the file")
    return [size if kind == SLIDING else None for kind in kinds]
