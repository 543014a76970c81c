"""Lines of a health source, as operators and node agents write them.

    1 3 fan 2 has stopped                                    DEVICE LEVEL REASON...; the level may be written L3
    {"device": 1, "level": 3, "reason": "fan 2 has stopped"}
    # a comment

One text is all that the source knows: a device that it does not name is healthy. If it names a device several times,
the highest level counts. Lines that cannot be read are left out, and told to the caller.
"""

import msgspec

from everserve.plan.health import Fed
from everserve.tables.health import Level

_MAX_REASON = 300  # characters


class _Line(msgspec.Struct):
    device: int
    level: int | str
    reason: str = ""


_decoder = msgspec.json.Decoder(_Line)


def parse(text: str) -> tuple[Fed, list[str]]:
    """What the text says, and the lines that cannot be read."""
    said: dict[int, tuple[Level, str]] = {}
    bad = []
    for line in map(str.strip, text.splitlines()):
        if not line or line.startswith("#"):
            continue
        try:
            device, level, reason = _parse(line)
        except (ValueError, msgspec.DecodeError):
            bad.append(line)
            continue
        if device not in said or level > said[device][0]:
            said[device] = level, reason
    healthy = [device for device, (level, _) in said.items() if level is Level.HEALTHY]
    for device in healthy:
        del said[device]
    return Fed(said), bad


def _parse(line: str) -> tuple[int, Level, str]:
    if line.startswith("{"):
        found = _decoder.decode(line)
        device, level, reason = found.device, str(found.level), found.reason
    else:
        first, level, *rest = line.split(maxsplit=2)
        device, reason = int(first), "".join(rest)
    if device < 0:
        raise ValueError(line)
    return device, Level(int(level.upper().removeprefix("L"))), " ".join(reason.split())[:_MAX_REASON]
