"""Through which workers messages between a worker and the coordinator go."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.sidecar.rounds import round_message

from holdfast_core.ids import MAX_WORKERS, Worker
from holdfast_core.messages.schema import Round
from holdfast_sidecar.base.rounds import next_hop, relay_of

SMALL = round_message(workers=1)


def gang(workers: int, coordinator: int, fan_in: int) -> Round:
    return replace(SMALL, workers=workers, coordinator=Worker(coordinator), fan_in=fan_in)


gangs = st.integers(1, 300).flatmap(
    lambda workers: st.builds(
        gang, st.just(workers), st.integers(0, workers - 1), st.integers(1, 80)
    )
)


@given(gangs)
def test_every_worker_reaches_the_coordinator_by_at_most_one_relay(message: Round) -> None:
    for number in range(message.workers):
        worker = Worker(number)
        if worker == message.coordinator:
            continue
        hop = next_hop(message, worker)
        assert hop != worker
        assert message.coordinator in (hop, next_hop(message, hop))


@given(gangs)
def test_a_relay_is_a_worker_of_its_group(message: Round) -> None:
    for number in range(message.workers):
        relay = relay_of(message, Worker(number))
        assert relay < message.workers
        assert relay // message.fan_in == number // message.fan_in
        assert relay_of(message, relay) == relay


@given(st.integers(1, 64), st.data())
def test_a_gang_of_one_group_has_no_relay_but_the_coordinator(
    workers: int, data: st.DataObject
) -> None:
    message = gang(workers, data.draw(st.integers(0, workers - 1)), 64)
    relays = {relay_of(message, Worker(w)) for w in range(workers)}
    assert relays == {message.coordinator}


@pytest.mark.parametrize("coordinator", [0, 17, MAX_WORKERS - 1])
def test_no_worker_of_the_largest_gang_has_more_than_126_neighbours(coordinator: int) -> None:
    message = gang(MAX_WORKERS, coordinator, 64)
    neighbours: dict[Worker, set[Worker]] = {}
    for number in range(MAX_WORKERS):
        worker = Worker(number)
        if worker != message.coordinator:
            hop = next_hop(message, worker)
            neighbours.setdefault(worker, set()).add(hop)
            neighbours.setdefault(hop, set()).add(worker)
    assert max(map(len, neighbours.values())) == 126
