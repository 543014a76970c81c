"""What gateways leave to each other, beside connections: numbers, what was known of workers, who has which stream."""

from everserve.gateway.gateway import Gateway
from everserve.gateway.http.transport import Custody
from everserve.gateway.observe.counted import decode
from everserve.gateway.streams.fleet import ModelLimits
from everserve.gateway.streams.kept_names import KeptNames
from everserve.ledger.ledger import Ledger
from everserve.ledger.shared import SharedTable
from everserve.tables.ids import Incarnation, Rank


def inherit(gateway: Gateway, ledger: Ledger, table: SharedTable) -> None:
    """The gateway goes on where the one before has stopped, and tells the others of itself."""
    _go_on(gateway, ledger)
    _share_counts(gateway, table)
    if gateway.config.gateways > 1:
        _share_streams(gateway, table)


def _go_on(gateway: Gateway, ledger: Ledger) -> None:
    gateway.connections.custody = Custody(ledger)
    gateway.begin_numbers(ledger.generation)
    fleet = gateway.fleet
    fleet.remember_lost({Rank(rank): Incarnation(number) for rank, number in ledger.lost().items()})
    if ledger.counter(0):
        fleet.limits = ModelLimits(
            max_total_tokens=ledger.counter(0), vocab_size=ledger.counter(1), block_size=ledger.counter(2)
        )
    fleet.on_limits = lambda limits: ledger.set_counters(
        0, (limits.max_total_tokens, limits.vocab_size, limits.block_size)
    )
    fleet.on_lost = ledger.note_lost
    fleet.on_handled = gateway.connections.custody.handle


def _share_counts(gateway: Gateway, table: SharedTable) -> None:
    """What is counted outlives this gateway, and each of several shows all."""
    gateway.seeds.go_on(table.take_number)
    if (counted := decode(table.saved(table.number))) is not None:
        gateway.counts.go_on(counted)
    gateway.save_counts = gateway.live.on_tick = lambda: table.save(gateway.counts.encoded())
    others = [number for number in table.numbers if number != table.number]
    gateway.counted_elsewhere = lambda: [one for one in (decode(table.saved(n)) for n in others) if one is not None]
    if gateway.config.gateways > 1 and not gateway.number:
        told = gateway.counted_elsewhere
        gateway.live.ticks_elsewhere = lambda: [one.tick for one in told() if one.tick is not None]


def _share_streams(gateway: Gateway, table: SharedTable) -> None:
    """A client that comes back gets its stream at any gateway; new ones come to the least busy."""
    connections = gateway.connections
    connections.on_number = table.note_connections
    connections.should_accept = table.is_least_busy
    names = KeptNames(table)
    gateway.kept_elsewhere = names.elsewhere
    gateway.keeper.on_added, gateway.keeper.on_dropped = names.add, names.drop
    gateway.on_taken_over = names.forget_left
