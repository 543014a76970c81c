"""Ways to go on without hardware that does not come back, and the server on which each is measured."""

from collections.abc import Sequence
from dataclasses import dataclass

from everserve.errors import ConfigError

NUM_ATTENTION, NUM_EXPERT = 3, 4  # one attention worker can become an expert worker, and two stay


@dataclass(frozen=True)
class Variant:
    """A device with one worker of this role is gone; the server has so many shadows and this `--on-lost-expert`."""

    name: str
    title: str
    role: str = "expert"
    shadows: str = (
        "default"  # "few": room for every expert on the others, but not a copy of each; "none": not even room
    )
    on_lost_expert: str = "wait"

    @property
    def is_masked(self) -> bool:
        return self.on_lost_expert.startswith("mask")

    @property
    def switches(self) -> bool:
        return self.on_lost_expert.endswith("switch-role")

    @property
    def needs_new_server(self) -> bool:
        """After a repair experts are elsewhere, and the next loss may find copies of all."""
        return self.shadows == "few"


VARIANTS = (
    Variant("shadows", "redundant experts"),
    Variant("attention", "attention worker, KV from the log", role="attention"),
    Variant("repair", "repair from a source", shadows="few"),
    Variant("mask", "mask, repair in the background", shadows="few", on_lost_expert="mask"),
    Variant("switch", "role switch, streams wait", shadows="none", on_lost_expert="switch-role"),
    Variant(
        "mask-switch", "mask, role switch in the background", shadows="none", on_lost_expert="mask-and-switch-role"
    ),
)
RESTART = "restart"


def choose(names: Sequence[str]) -> tuple[Variant, ...]:
    """Those with these names; none: all."""
    known = {variant.name: variant for variant in VARIANTS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"--variant {unknown[0]}: choose {', '.join(known)}")
    return tuple(known[name] for name in names) or VARIANTS


def flags_of(variant: Variant, num_experts: int) -> tuple[str, ...]:
    """Besides those of every server. Two variants with the same flags share a server."""
    flags = ["--on-lost-expert", variant.on_lost_expert]
    if variant.is_masked:
        flags += ["--max-masked-experts", str(-(-num_experts // NUM_EXPERT))]
    if variant.shadows != "default":
        num_active = -(-num_experts // NUM_EXPERT)
        num_shadows = -(-num_experts // (NUM_EXPERT - 1)) - num_active if variant.shadows == "few" else 0
        flags += ["--shadow-experts", str(num_shadows)]
    return tuple(flags)
