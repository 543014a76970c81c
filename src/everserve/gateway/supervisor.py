"""The processes that operators may signal through the supervisor, itself included; the death of root would end the
instance."""

from everserve.tables.members import gateway_name, keeper_name

_OTHERS = ("supervisor", "orchestrator", "anchor", "zygote", "carrier")


def processes_of(num_gateways: int) -> tuple[str, ...]:
    """Their names, where there are so many gateways."""
    edge = [name(number) for number in range(num_gateways) for name in (gateway_name, keeper_name)]
    return (*edge, *_OTHERS)
