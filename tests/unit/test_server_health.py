"""The states of a server, for the controller and for its supervisor, against tables by hand."""

from itertools import product

import pytest

from megatron_dapo.servers.server_health import ServerEvent, ServerState, StartEvent, StartState

pytestmark = pytest.mark.unit

DOWN, ILL, BEHIND, CURRENT = ServerState.DOWN, ServerState.ILL, ServerState.BEHIND, ServerState.CURRENT
STOPPED, STARTING, WORKING, WAITING = StartState.STOPPED, StartState.STARTING, StartState.WORKING, StartState.WAITING
# columns: in the order of ServerEvent
SERVERS = {
    #        lost, stuck, generated, behind, ready
    DOWN: (DOWN, ILL, DOWN, BEHIND, CURRENT),
    ILL: (ILL, ILL, DOWN, ILL, ILL),
    BEHIND: (DOWN, ILL, BEHIND, BEHIND, CURRENT),
    CURRENT: (DOWN, ILL, CURRENT, BEHIND, CURRENT),
}
# columns: in the order of StartEvent; None: it cannot happen
STARTS = {
    #           started, healthy, ended, stopped
    STOPPED: (STARTING, None, None, STOPPED),
    STARTING: (None, WORKING, WAITING, STOPPED),
    WORKING: (None, None, WAITING, STOPPED),
    WAITING: (STARTING, None, None, STOPPED),
}


def test_the_tables_are_those_by_hand():
    assert [event.name for event in ServerEvent] == ["LOST", "STUCK", "GENERATED", "BEHIND", "READY"]
    assert {state: tuple(map(state.after, ServerEvent)) for state in ServerState} == SERVERS
    assert [event.name for event in StartEvent] == ["STARTED", "HEALTHY", "ENDED", "STOPPED"]
    for (state, row), (place, event) in product(STARTS.items(), enumerate(StartEvent)):
        if row[place] is None:
            with pytest.raises(KeyError):
                state.after(event)
        else:
            assert state.after(event) is row[place], (state, event)


def test_an_ill_server_gets_requests_only_after_it_wrote_a_token():
    """It answers other checks as a well one does, so that none of them may end the state."""
    for event in set(ServerEvent) - {ServerEvent.GENERATED}:
        assert ILL.after(event) is ILL
    assert ILL.after(ServerEvent.GENERATED).after(ServerEvent.READY) is CURRENT


def test_whatever_its_state_a_server_that_answers_and_holds_the_weights_gets_requests():
    for state in ServerState:
        assert state.after(ServerEvent.GENERATED).after(ServerEvent.READY) is CURRENT
