"""The cache of sidecars with real TLS servers: what a pass reads after each event."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.operator.bench import (
    AUTHORITY,
    KEY,
    UID,
    bench,
    pod_view,
)

from holdfast_core.ids import FIRST_SPARE, Digest, RestartRound, Step, Worker
from holdfast_core.messages.schema import (
    CoordinatorState,
    GangRequest,
    Member,
    Policy,
    Prune,
    RestorePoint,
    Round,
)
from holdfast_core.net import peer_dns_name
from holdfast_operator.model.actions import CallPath
from holdfast_operator.model.job import Reachable
from holdfast_operator.sidecars.certificates import (
    new_authority,
    new_leaf,
)
from holdfast_operator.sidecars.state import (
    FIRST_REFUSED_SECONDS,
    POLL_AGAIN_SECONDS,
    back_off_seconds,
)


def round_message(round_: int, version: int) -> Round:
    return Round(
        round=RestartRound(round_),
        version=version,
        restore_point=RestorePoint(),
        coordinator=Worker(0),
        store_host=Worker(0),
        workers=1,
        members=(Member(Worker(0), "gpt-0-r0", "127.66.0.1"),),
        copies={},
        policy=Policy(interval_steps=10),
    )


async def test_the_first_call_fetches_the_inventory() -> None:
    async with bench() as b:
        pod = pod_view(0)
        await b.serve(pod)
        b.follow(pod)
        assert b.view(pod).reachable is Reachable.UNKNOWN
        await b.until(lambda: b.view(pod).reachable is Reachable.YES)
        inventory = b.view(pod).inventory
        assert inventory.round == 0
        assert b.enqueued == [KEY]


async def test_a_spare_is_asked_again_until_its_launcher_is_connected() -> None:
    async with bench() as b:
        pod = pod_view(FIRST_SPARE, ip="127.66.0.9")
        server = await b.serve(pod)

        def asked_again() -> bool:
            b.follow(pod)
            return [kind for kind, _ in server.calls].count("inventory") > 2

        await b.until(asked_again)
        inventory = b.view(pod).inventory
        assert (inventory.worker, inventory.launcher) == (FIRST_SPARE, False)
        server.launcher = True

        def ready() -> bool:
            b.follow(pod)
            found = b.view(pod).inventory
            return found is not None and found.launcher

        await b.until(ready)
        became = replace(pod, worker=Worker(1), birth_round=RestartRound(1))
        b.follow(became)
        assert b.view(pod).worker == 1


async def test_two_failures_make_it_unreachable_and_an_answer_reachable_again() -> None:
    async with bench() as b:
        pod = pod_view(0)
        b.follow(pod)
        await b.until(lambda: bool(b.sidecars.views(UID)))

        def retry() -> bool:
            b.seal(pod, 1)
            return b.view(pod).reachable is Reachable.NO

        await b.until(retry)
        assert b.view(pod).unreachable_since is not None
        server = await b.serve(pod)

        def sealed() -> bool:
            b.seal(pod, 1)
            return b.view(pod).sealed_round == 1

        await b.until(sealed)
        assert b.view(pod).reachable is Reachable.YES
        assert b.view(pod).unreachable_since is None
        assert server.round == 1


@pytest.mark.fault("A sidecar is silent for hours")
@pytest.mark.parametrize(
    ("failures", "silent_seconds", "pause"),
    [
        (1, 0.0, 0.25),
        (2, 1.0, 0.5),
        (3, 2.0, 1.0),
        (50, 55.0, 1.0),
        (90, 180.0, 3.0),
        (4000, 86_400.0, 10.0),
        (1, 86_400.0, 0.25),
    ],
)
def test_a_silent_sidecar_is_called_less_and_less_often(
    failures: int, silent_seconds: float, pause: float
) -> None:
    assert back_off_seconds(failures, silent_seconds) == pause


async def test_a_pass_never_waits_and_never_sends_the_same_call_twice_at_once() -> None:
    async with bench() as b:
        pod = pod_view(0)
        server = await b.answering(pod)
        for _ in range(50):
            b.seal(pod, 1)
        await b.until(lambda: b.view(pod).sealed_round == 1)
        assert [kind for kind, _ in server.calls].count("seal") == 1


async def test_a_refused_round_brings_the_newest_version_of_the_sidecar() -> None:
    async with bench() as b:
        pod = pod_view(0)
        server = await b.answering(pod)
        b.send_round(pod, round_message(0, 1))
        await b.until(lambda: b.view(pod).acked is not None)
        acked = b.view(pod).acked
        assert (acked.round, acked.version, acked.sidecar_restarts) == (0, 1, 0)
        server.version = 7
        b.send_round(pod, round_message(0, 2))
        await b.until(lambda: (i := b.view(pod).inventory) is not None and i.version == 7)
        assert b.view(pod).reachable is Reachable.YES


async def test_a_stale_seal_returns_the_higher_round() -> None:
    async with bench() as b:
        pod = pod_view(0)
        server = await b.serve(pod)
        server.round = RestartRound(9)
        b.follow(pod)
        await b.until(lambda: b.view(pod).reachable is Reachable.YES)
        b.seal(pod, 3)
        await b.until(lambda: b.view(pod).sealed_round == 9)


async def test_the_long_poll_follows_the_coordinator_and_acknowledges_versions() -> None:
    async with bench() as b:
        pod, other = pod_view(0), pod_view(1)
        server, second = await b.serve(pod), await b.serve(other)
        b.follow(pod, other, coordinator=0)
        server.publish(CoordinatorState(3, RestartRound(0)))
        await b.until(lambda: b.sidecars.coordinator_state(UID) is not None)
        b.sidecars.acted_on(UID, 3)
        await b.until(lambda: server.since == 3)
        server.publish(CoordinatorState(4, RestartRound(0), finished=True))
        await b.until(lambda: (s := b.sidecars.coordinator_state(UID)) is not None and s.finished)
        # The operator names another coordinator, whose versions start again.
        second.publish(CoordinatorState(1, RestartRound(0), running=True))
        b.follow(pod, other, coordinator=1)
        await b.until(lambda: (s := b.sidecars.coordinator_state(UID)) is not None and s.running)
        assert second.since == 0
        b.follow(pod, other, round_=1)
        assert b.sidecars.coordinator_state(UID) is None


async def test_save_now_is_sent_until_a_sidecar_accepts_it_and_prune_returns_later() -> None:
    async with bench() as b:
        pod = pod_view(0)
        b.follow(pod)
        b.call(pod, CallPath.SAVE, GangRequest(RestartRound(0), "t"))
        await asyncio.sleep(0.1)
        server = await b.serve(pod)
        await b.until(lambda: "save-now" in [kind for kind, _ in server.calls])
        point = RestorePoint(Step(10), RestartRound(0), Digest("b3:aa"))
        message = Prune(RestartRound(0), (point,))
        await b.until(lambda: b.call(pod, CallPath.PRUNE, message))
        assert [kind for kind, _ in server.calls].count("prune") == 1


@pytest.mark.fault("The store refuses for ever to delete some checkpoints of a job")
async def test_a_prune_that_is_refused_causes_no_pass() -> None:
    """That pass would order the prune again, and so on."""
    async with bench() as b:
        pod = pod_view(0)
        server = await b.answering(pod)
        server.refuses_prunes = True
        message = Prune(
            RestartRound(0), (RestorePoint(Step(10), RestartRound(0), Digest("b3:aa")),)
        )

        def calls() -> int:
            b.call(pod, CallPath.PRUNE, message)
            return [kind for kind, _ in server.calls].count("prune")

        await b.until(lambda: calls() == 1)
        b.enqueued.clear()
        await b.until(lambda: calls() == 3)  # the second one has ended
        assert b.enqueued == []


@pytest.mark.fault("A node is suspect while its sidecar deletes checkpoints in a slow store")
async def test_a_sidecar_whose_prune_takes_long_is_called_on_a_suspect_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("holdfast_operator.sidecars.client.PRUNE_SECONDS", 2 * HANG_SECONDS)
    async with bench() as b:
        pod = pod_view(0)
        server = await b.answering(pod)
        server.slow_store = asyncio.Event()
        point = RestorePoint(Step(10), RestartRound(0), Digest("b3:aa"))
        b.call(pod, CallPath.PRUNE, Prune(RestartRound(0), (point,)))
        await b.until(lambda: "prune" in [kind for kind, _ in server.calls])
        server.calls.clear()

        def called() -> bool:
            b.follow(pod, suspects=frozenset({"node-a"}))
            return "inventory" in [kind for kind, _ in server.calls]

        await b.until(called)


@pytest.mark.parametrize("case", ["another pod's name", "another job's authority"])
async def test_a_sidecar_with_a_certificate_of_another_pod_is_sent_nothing(case: str) -> None:
    async with bench() as b:
        pod = pod_view(0)
        asked = pod if case == "another job's authority" else replace(pod, name="gpt-5-r0")
        authority = AUTHORITY if case == "another pod's name" else new_authority("other")
        server = await b.serve(pod, new_leaf(authority, peer_dns_name(asked.name, UID)))

        def unreachable() -> bool:
            b.follow(pod)
            b.seal(pod, 1)
            return b.view(pod).reachable is Reachable.NO

        await b.until(unreachable)
        assert server.calls == []


async def test_a_sidecar_on_a_suspected_node_is_called_at_once() -> None:
    async with bench() as b:
        pod = pod_view(0)
        server = await b.answering(pod)
        await server.close()

        def silent() -> bool:
            b.follow(pod, suspects=frozenset({"node-a"}))
            return b.view(pod).reachable is Reachable.NO

        await b.until(silent)


async def test_a_terminating_pod_is_called_when_its_node_is_silent() -> None:
    """The operator restarted in the meantime. The pod can be removed only after a call to it has failed."""
    async with bench() as b:
        pod = replace(pod_view(0), terminating=True)

        def silent() -> bool:
            b.follow(pod, suspects=frozenset({"node-a"}))
            return b.view(pod).reachable is Reachable.NO

        await b.until(silent)


async def test_an_answer_of_another_pod_at_the_address_does_not_count() -> None:
    async with bench() as b:
        pod = pod_view(0)
        stranger = replace(pod, name="gpt-5-r0")
        await b.serve(stranger)

        def unreachable() -> bool:
            b.follow(pod)
            b.seal(pod, 1)
            return b.view(pod).reachable is Reachable.NO

        await b.until(unreachable)
        assert b.servers[0].calls == []


async def test_the_polls_of_a_coordinator_share_a_connection() -> None:
    async with bench() as b:
        pod = pod_view(0)
        server = await b.serve(pod)

        def is_known(version: int) -> bool:
            state = b.sidecars.coordinator_state(UID)
            return state is not None and state.version == version

        b.follow(pod, coordinator=0)
        for version in range(3, 10):
            server.publish(CoordinatorState(version, RestartRound(0)))
            await b.until(partial(is_known, version))
            b.sidecars.acted_on(UID, version)
        await b.until(lambda: server.since == 9)
        assert [kind for kind, _ in server.calls].count("state") >= 8
        assert server.handshakes <= 4, (
            "one for the polls; the inventory may have been read more than once"
        )


async def test_round_uses_the_connection_of_seal_and_closes_it() -> None:
    async with bench() as b:
        pod = pod_view(0)
        server = await b.answering(pod)
        for number in (1, 2):
            before = server.handshakes
            b.seal(pod, number)
            await b.until(lambda number=number: b.view(pod).sealed_round == number)
            b.send_round(pod, round_message(number, 1))
            await b.until(lambda number=number: len(server.rounds) == number)
            assert server.handshakes == before + 1


async def test_a_round_whose_kept_connection_breaks_is_sent_again_on_a_new_one() -> None:
    """The sidecar may have closed it meanwhile, which is no failure of the sidecar."""
    async with bench() as b:
        pod = pod_view(0)
        server = await b.answering(pod)
        b.seal(pod, 1)
        await b.until(lambda: b.view(pod).sealed_round == 1)
        server.cuts, before = 1, server.handshakes
        b.send_round(pod, round_message(1, 1))
        await b.until(lambda: [kind for kind, _ in server.calls].count("round") == 2)
        assert server.handshakes == before + 1
        await b.until(lambda: b.view(pod).acked is not None)


class TimedPolls(list[tuple[str, Any]]):
    """Calls that a sidecar has received, with the times of the polls.

    A poll follows on the reply to the one before it, so that a slow machine makes a pause only longer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def append(self, call: tuple[str, Any]) -> None:
        super().append(call)
        if call[0] == "state":
            self.times.append(asyncio.get_running_loop().time())


async def test_a_sidecar_that_does_not_coordinate_yet_is_polled_when_it_has_received_its_round() -> (
    None
):
    """The polls of many gangs that start would delay the ROUND that they wait for."""
    async with bench() as b:
        pod = pod_view(0)
        server = await b.serve(pod)
        server.calls = polls = TimedPolls()
        b.follow(pod, coordinator=0)
        await b.until(lambda: len(polls.times) >= 5)
        assert polls.times[4] - polls.times[3] > FIRST_REFUSED_SECONDS * 2**3 - 0.1
        server.state = CoordinatorState(1, RestartRound(0), running=True)
        b.send_round(pod, round_message(0, 1))
        await b.until(lambda: b.sidecars.coordinator_state(UID) is not None)


async def test_a_state_on_which_no_pass_acts_is_read_less_and_less_often() -> None:
    """A pass that waits in the queue would wait longer if all coordinators were polled meanwhile."""
    async with bench() as b:
        pod = pod_view(0)
        server = await b.serve(pod)
        server.state = CoordinatorState(3, RestartRound(0))
        server.calls = polls = TimedPolls()
        b.follow(pod, coordinator=0)
        await b.until(lambda: len(polls.times) >= 5)
        assert (
            polls.times[4] - polls.times[0] > sum(POLL_AGAIN_SECONDS * 2**n for n in range(4)) - 0.1
        )
