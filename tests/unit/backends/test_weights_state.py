"""The page that says whether a seat's weights are there."""

import os
import signal

import pytest

from everserve.backends.cuda.weights_state import WeightsState, identity_of
from everserve.memory.names import WEIGHTS_STATE_BYTES
from everserve.memory.owned import create_memory
from everserve.model.bundled import DEMO_MODEL
from everserve.model.config import ModelConfig
from everserve.tables.ids import Role
from tests.support.specs import resized

MODEL = ModelConfig.from_directory(DEMO_MODEL)
ARGUMENTS = {
    "source": "/models/demo",
    "config": MODEL,
    "dtype": "bfloat16",
    "roles": (Role.ATTENTION,),
}
IDENTITY = identity_of(**ARGUMENTS)


@pytest.fixture
def fd():
    fd = create_memory("weights-state-1", WEIGHTS_STATE_BYTES)
    yield fd
    os.close(fd)


def test_life(fd):
    other = identity_of(**ARGUMENTS | {"dtype": "float16"})
    state = WeightsState(fd)
    assert not state.holds(IDENTITY) and not state.holds(bytes(32)), "nothing is there at first"
    state.begin(IDENTITY)
    assert not state.holds(IDENTITY)
    state.complete(IDENTITY)
    assert state.holds(IDENTITY) and not state.holds(other)
    assert WeightsState(fd).holds(IDENTITY), "the memory is the descriptor's, not the mapping's"
    state.begin(other)
    assert not state.holds(IDENTITY) and not state.holds(other)
    with pytest.raises(AssertionError, match="not begun"):
        state.complete(IDENTITY)


@pytest.mark.parametrize("is_complete", [False, True])
def test_what_a_writer_that_dies_leaves(fd, is_complete):
    pid = os.fork()
    if pid == 0:
        state = WeightsState(fd)
        state.begin(IDENTITY)
        if is_complete:
            state.complete(IDENTITY)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert WeightsState(fd).holds(IDENTITY) is is_complete


def test_everything_that_decides_which_bytes_lie_where_is_in_the_identity():
    changes = [
        {"source": "/models/other"},
        {"config": resized(MODEL, hidden_size=512)},
        {"dtype": "float32"},
        {"roles": (Role.ATTENTION, Role.EXPERT)},
    ]
    identities = {identity_of(**ARGUMENTS | change) for change in changes}
    assert len(identities) == len(changes) and IDENTITY not in identities
    assert identity_of(**ARGUMENTS) == IDENTITY


def test_memory_that_is_too_small_is_refused():
    small = os.memfd_create("small")
    with pytest.raises(ValueError, match="this memory has 0"):
        WeightsState(small)
    os.close(small)
