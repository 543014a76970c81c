"""How the demo looks: panels that fill with text, a line of tokens per second, and a mark at each death."""

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from everserve.cli.demo_run import PROMPTS, DemoRun, KillOutcome, PlannedKill
from everserve.client import Stream, percentile
from everserve.words import count

_BIN_S = 0.05
_BLOCKS = " ▁▂▃▄▅▆▇█"
_NUM_LINES_BESIDE = 8  # below and above the panels
_MIN_PANEL, _MAX_PANEL = 5, 12


def screen(run: DemoRun, now_s: float, console: Console) -> RenderableType:
    """The whole of it, for any terminal from 80 x 24 on."""
    width, height = console.size
    panel_height = min(_MAX_PANEL, max(_MIN_PANEL, (height - _NUM_LINES_BESIDE) // 2))
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    panels = [_panel(run, i, width // 2, panel_height, console) for i in range(len(PROMPTS))]
    for left, right in zip(panels[::2], panels[1::2], strict=True):
        grid.add_row(left, right)
    return Group(grid, *_timeline(run, now_s, width), *[_line(kill, run) for kill in run.kills])


def _panel(run: DemoRun, index: int, width: int, height: int, console: Console) -> Panel:
    """The end of one text, with a mark at each death that fell into it."""
    stream = run.streams[index]
    text = Text(PROMPTS[index], "bold")
    begin = 0
    for number, kill in enumerate(run.kills, 1):
        if kill.has_happened and kill.streams is run.streams:
            end = kill.num_chars[index]
            text.append(stream.text[begin:end]).append(f" ✗{number} ", "bold white on red")
            begin = end
    text.append(stream.text[begin:])
    lines = text.wrap(console, width - 4)[-(height - 2) :]
    tail = Text("\n").join(lines)
    largest = f" · largest gap {1e3 * max(stream.gaps_s):.0f} ms" if len(stream.arrivals_s) > 1 else ""
    return Panel(tail, height=height, title=f"{count(len(stream.token_ids), 'token')}{largest}", title_align="left")


def _timeline(run: DemoRun, now_s: float, width: int) -> tuple[Text, Text]:
    """Tokens of all texts, a twentieth of a second a column, and below it when each process died."""
    num_bins = max(1, int((now_s - run.began_s) / _BIN_S))
    counts = [0] * (num_bins + 1)
    for stream in run.streams:
        for arrival_s in stream.arrivals_s:
            counts[min(num_bins, max(0, int((arrival_s - run.began_s) / _BIN_S)))] += 1
    label = f"{sum(counts[-21:-1]) / min(20, num_bins) / _BIN_S:4.0f} tokens/s "
    room = width - len(label)
    first = max(0, num_bins - room)
    top = max(counts[:-1] or [0]) or 1
    bars = "".join(_BLOCKS[min(8, -(-8 * count // top))] for count in counts[first:num_bins])
    marks = [" "] * room
    for number, kill in enumerate(run.kills, 1):
        if kill.at_s is not None and 0 <= (column := int((kill.at_s - run.began_s) / _BIN_S) - first) < room - 1:
            marks[column : column + 2] = ["✗", str(number)]
    return Text.assemble((label, "dim"), (bars, "green")), Text(" " * len(label) + "".join(marks), "bold red")


def _line(kill: PlannedKill, run: DemoRun) -> Text:
    number = run.kills.index(kill) + 1
    if not kill.has_happened:
        return Text(f" {number} {kill.who}: still lives", "dim")
    text = Text.assemble((f"✗{number} SIGKILL to {kill.who}", "bold red"), f" (pid {kill.pid})")
    gap_s = kill.gap_s()
    return text.append(" ..." if gap_s is None else f": all went on, largest gap {1e3 * gap_s:.0f} ms")


class PlainLines:
    """The same without a terminal: a line for each death, and one when all texts have gone on."""

    def __init__(self, run: DemoRun, console: Console) -> None:
        self._run = run
        self._console = console
        self._told: set[tuple[int, bool]] = set()

    def look(self) -> None:
        for kill in self._run.kills:
            if kill.at_s is not None and kill.pid:
                text = f"SIGKILL to {kill.who} (pid {kill.pid}) after {min(kill.num_tokens)} tokens of each text"
                self._tell(kill, False, text, kill.at_s)
                gap_s = kill.gap_s()
                if gap_s is not None and kill.is_settled():
                    self._tell(kill, True, f"  all texts went on; largest gap {1e3 * gap_s:.0f} ms", kill.at_s + 1.0)

    def _tell(self, kill: PlannedKill, is_over: bool, text: str, at_s: float) -> None:
        if (id(kill), is_over) not in self._told:
            self._told.add((id(kill), is_over))
            self._console.print(f"{at_s - self._run.began_s:5.1f} s  {text}")


# -- at the end ----------------------------------------------------------------------------------


def summary(outcomes: list[KillOutcome], again: DemoRun) -> Table:
    """What died, and what clients saw of it."""
    names = ("died", "noticed", "largest gap", "lost", "different", "replaced")
    table = Table(*names, box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns:
        column.justify = "left" if column.header == "died" else "right"
        column.no_wrap = True
    for number, outcome in enumerate(outcomes, 1):
        table.add_row(
            f"✗{number} {outcome.kill.who}",
            f"{outcome.noticed_ms:.0f} ms" if outcome.noticed_ms >= 10 else f"{outcome.noticed_ms:.1f} ms",
            f"{outcome.gap_ms:.0f} ms",
            str(outcome.num_lost),
            str(outcome.num_different),
            f"{outcome.replaced_s:.2f} s",
        )
    gaps_s = [gap for stream in again.streams for gap in stream.gaps_s]
    table.add_row("none (second run)", "", f"{1e3 * max(gaps_s):.0f} ms", style="dim")
    return table


def prices(outcomes: list[KillOutcome], again: DemoRun) -> list[str]:
    """What each death cost, and what is usual, a line each."""
    lines = [f"✗{number} {outcome.cost}" for number, outcome in enumerate(outcomes, 1)]
    gaps_s = [gap for stream in again.streams for gap in stream.gaps_s]
    return [*lines, f"Usually there are {1e3 * percentile(gaps_s, 0.5):.0f} ms between two tokens of a text."]


def about_the_model(num_parameters: int) -> str:
    """What to expect of the texts."""
    return f"The texts make little sense: the model is a toy of {num_parameters / 1e6:.1f} million parameters."


def beginnings(streams: list[Stream], console: Console) -> None:
    """The first words of each text, where there was no screen to show them grow."""
    for prompt, stream in zip(PROMPTS, streams, strict=True):
        text = " ".join(f"{prompt}{stream.text}".split())
        console.print(f"  {text[: (console.width - 6)]} ...", markup=False)
