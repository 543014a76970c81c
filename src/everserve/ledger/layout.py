"""What a ledger has room for, and where things are in it.

    | header | connections | requests | pages |

All numbers are little-endian, of 8 bytes. A reference to a page or a request is its index + 1; 0 is none.
"""

from dataclasses import dataclass

MAGIC = 0x7265_6764_656C_3031  # "10ledger"
VERSION = 1
WORD = 8
PAGE_BYTES = 16 << 10
PAGE_HEAD_BYTES = 16  # where in its chain the page begins; the next page
DATA_BYTES = PAGE_BYTES - PAGE_HEAD_BYTES
HEADER_BYTES = 4 << 10
CONNECTION_BYTES = 256
REQUEST_BYTES = 64

# The header, in words.
H_MAGIC = 0  # and version, number of connections, of requests, of pages
H_GENERATION = 8  # of the gateway that writes
H_PULSE = 9  # counted by it
H_HANDLING = 10  # the connection whose request it is busy with at this instruction
H_READY = 11  # the last generation that has served
H_CRASHED = 12  # the gateway before ended by its own fault
H_GIVEN = 13  # how often a gateway has given its connections to the next keeper
H_FOLLOWER = 14  # the process that has got them last
H_COUNTERS = 16  # for the gateway's own numbers
NUM_COUNTERS = 16
H_LOST = 64  # of each rank, the latest incarnation that was declared gone
NUM_RANKS = 384

# A connection, in words.
C_COOKIE = 0  # of its socket; 0: the slot is free
C_INBOX, C_RING = 1, 2  # first pages
C_SUSPICION = 3  # what the deaths of gateways in a row say against its request
C_PREPARING = 4  # its request has come, and has no record yet
C_COMMITS = 8  # two copies
COMMIT_WORDS = 8

# A request, in words.
R_STATE = 0
R_PAGE = 1  # the first one of its journal
R_LENGTH = 2  # of the journal, in bytes
R_READER = 3  # the cookie of the connection that reads its answer
R_RENDERED = 4  # how far it was ever given to a connection: the journal's length << 32 | events

_NUM_SPARE = 256


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How much of everything."""

    num_connections: int
    num_requests: int
    num_pages: int

    @classmethod
    def of(cls, num_connections: int, num_requests: int, num_bytes: int) -> "Shape":
        """With so much memory for what is received, sent and recorded. It is taken only as far as it is used."""
        return cls(
            num_connections=num_connections,
            num_requests=num_requests,
            num_pages=_NUM_SPARE + num_bytes // DATA_BYTES,
        )

    @property
    def connections_at(self) -> int:
        return HEADER_BYTES

    @property
    def requests_at(self) -> int:
        return self.connections_at + self.num_connections * CONNECTION_BYTES

    @property
    def pages_at(self) -> int:
        end = self.requests_at + self.num_requests * REQUEST_BYTES
        return -(-end // PAGE_BYTES) * PAGE_BYTES

    @property
    def num_bytes(self) -> int:
        return self.pages_at + self.num_pages * PAGE_BYTES
