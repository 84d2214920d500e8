"""A new operator process learns from the coordinators of running gangs what their sidecars have accepted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest
from tests.support.operator.bench import UID, Bench, bench, pod_view
from tests.support.operator.served_sidecar import ServedSidecar

from holdfast_core.ids import FIRST_SPARE, Digest, RestartRound
from holdfast_core.messages.schema import AcceptedRound, CoordinatorState
from holdfast_operator.model.job import AckedRound, PodView, Reachable
from holdfast_operator.sidecars.calls import FIRST_CALLS_PER_SECOND

ACCEPTED = AcceptedRound(4, Digest("b3:content"))
STATE = CoordinatorState(version=7, round=RestartRound(2), running=True, accepted=ACCEPTED)
ACKED = AckedRound(RestartRound(2), 4, Digest("b3:content"))
PODS = tuple(pod_view(worker, 2) for worker in range(4))


async def serve(b: Bench, pods: Iterable[PodView]) -> list[ServedSidecar]:
    return [await b.serve(pod) for pod in pods]


def follow(b: Bench, pods: Iterable[PodView], suspects: frozenset[str] = frozenset()) -> None:
    b.follow(*pods, round_=2, coordinator=0, suspects=suspects, trains=True)


def called(servers: list[ServedSidecar]) -> list[Counter[str]]:
    return [Counter(kind for kind, _ in s.calls) for s in servers]


@pytest.mark.fault("The operator starts while gangs train")
async def test_members_of_a_running_gang_need_no_call_before_the_coordinator_has_answered() -> None:
    async with bench() as b:
        b.clock.stopped = 100.0
        servers = await serve(b, PODS)
        servers[0].state = STATE
        follow(b, PODS)
        await b.until(lambda: b.sidecars.coordinator_state(UID) == STATE)
        assert called(servers[1:]) == [Counter()] * 3
        for pod in PODS:
            view = b.view(pod)
            assert (view.reachable, view.acked) == (Reachable.YES, ACKED)
            assert view.sealed_round == 2, "it is not sealed again"
        assert b.sidecars.all_answer(UID)


async def test_members_are_called_in_turn_for_their_inventories() -> None:
    pods = tuple(pod_view(worker, 2) for worker in range(FIRST_CALLS_PER_SECOND + 5))
    async with bench() as b:
        b.clock.stopped = 100.0
        servers = await serve(b, pods)
        servers[0].state = STATE
        follow(b, pods)
        await b.until(lambda: b.sidecars.coordinator_state(UID) == STATE)

        def known() -> int:
            follow(b, pods)
            return sum(b.view(p).inventory is not None for p in pods)

        await b.until(lambda: known() >= FIRST_CALLS_PER_SECOND)
        assert known() == FIRST_CALLS_PER_SECOND, "the second is not over"
        b.clock.stopped = 101.0
        await b.until(lambda: known() == len(pods))


@pytest.mark.fault("A sidecar has lost its ROUND when the operator starts")
async def test_a_member_that_the_coordinator_no_longer_answers_for_is_called() -> None:
    async with bench() as b:
        b.clock.stopped = 100.0
        servers = await serve(b, PODS)
        servers[0].state = STATE
        follow(b, PODS)
        await b.until(lambda: b.view(PODS[3]).acked == ACKED)
        servers[0].publish(replace(STATE, version=8, accepted=None))
        await b.until(lambda: b.view(PODS[3]).acked is None)
        assert b.view(PODS[3]).reachable is Reachable.UNKNOWN
        follow(b, PODS)
        await b.until(lambda: all(b.view(p).inventory is not None for p in PODS))
        assert b.view(PODS[3]).acked is None, "its ROUND is sent again"


async def test_a_member_whose_first_call_fails_is_called_again_soon() -> None:
    async with bench() as b:
        servers = await serve(b, PODS[:3])
        servers[0].state = STATE
        follow(b, PODS)
        await b.until(lambda: b.view(PODS[3]).acked == ACKED)
        version = STATE.version

        def unreachable() -> bool:
            nonlocal version
            version += 1
            servers[0].publish(replace(STATE, version=version))
            follow(b, PODS)
            view = b.view(PODS[3])
            # Its ROUND is sent when it answers.
            return view.reachable is Reachable.NO and view.acked is None

        await b.until(unreachable)


@pytest.mark.fault(
    "The first inventory call to a sidecar fails while its coordinator answers for it"
)
async def test_a_coordinator_whose_first_inventory_was_damaged_is_asked_again_soon() -> None:
    async with bench() as b:
        b.clock.stopped = 100.0
        (server,) = await serve(b, PODS[:1])
        server.state = STATE
        server.raw_inventory = b"{"
        follow(b, PODS[:1], frozenset({"node-a"}))
        await b.until(lambda: called([server])[0]["inventory"] == 1)
        await b.until(lambda: b.view(PODS[0]).acked == ACKED)
        server.raw_inventory = None
        b.clock.stopped = 110.0

        def known() -> bool:
            follow(b, PODS[:1])
            return b.view(PODS[0]).inventory is not None

        await b.until(known)


async def test_the_coordinator_answers_for_no_spare() -> None:
    spare = pod_view(FIRST_SPARE, 2, ip="127.66.1.1")
    async with bench() as b:
        servers = await serve(b, (PODS[0], spare))
        servers[0].state = STATE
        follow(b, (*PODS, spare))
        await b.until(lambda: b.view(spare).inventory is not None)
        assert b.view(spare).acked is None


async def test_what_a_sidecar_has_told_itself_is_not_replaced() -> None:
    async with bench() as b:
        servers = await serve(b, PODS)
        b.follow(*PODS, round_=2)
        await b.until(lambda: all(b.view(p).inventory is not None for p in PODS))
        servers[0].state = STATE
        follow(b, PODS)
        await b.until(lambda: b.sidecars.coordinator_state(UID) == STATE)
        assert [b.view(p).acked for p in PODS] == [None] * 4


async def test_a_sidecar_on_a_suspect_node_is_called_at_once() -> None:
    async with bench() as b:
        b.clock.stopped = 100.0
        servers = await serve(b, PODS)
        suspect = replace(PODS[3], node="node-b")
        follow(b, (*PODS[:3], suspect), frozenset({"node-b"}))
        await b.until(lambda: b.view(suspect).inventory is not None)
        assert called(servers[1:3]) == [Counter()] * 2


@pytest.mark.fault("The coordinator of a running gang is away when the operator starts")
async def test_a_coordinator_that_does_not_answer_delays_no_other_sidecar() -> None:
    async with bench() as b:
        await serve(b, PODS[1:])

        def answered() -> bool:
            follow(b, PODS)
            return all(b.view(p).inventory is not None for p in PODS[1:])

        await b.until(answered)
        assert b.view(PODS[0]).reachable is Reachable.NO
