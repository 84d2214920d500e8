"""Answers of a hostile sidecar may harm its own job, but no other job."""

from __future__ import annotations

import json
import logging
import socket
import ssl
from dataclasses import replace

import aiohttp
import pytest
from tests.support.operator.bench import KEY, UID, bench, pod_view

from holdfast_core.ids import Digest, JobUid, RestartRound
from holdfast_core.messages.codec import dumps
from holdfast_core.messages.schema import CoordinatorState
from holdfast_operator.model.job import Reachable
from holdfast_operator.sidecars.state import MAX_LOG_CHARACTERS, POLL_BURST, POLL_SECONDS_EACH

DIGEST = Digest("b3:" + "0" * 64)
GOOD = CoordinatorState(7, RestartRound(0), running=True)


def state_with(**fields: object) -> bytes:
    return json.dumps({**json.loads(dumps(GOOD)), **fields}).encode()


def rank(**fields: object) -> dict[str, object]:
    return {"rank": 0, "step": 1, **fields}


HOSTILE = {
    "not JSON": b"{",
    "a number too large for a float": state_with(progress=[rank(blocked_seconds=10**400)]),
    "infinite": state_with(progress=[rank(blocked_seconds=1)]).replace(
        b'"blocked_seconds": 1', b'"blocked_seconds": 1e999'
    ),
    "negative": state_with(rehydrate_seconds=-5),
    "a version of thousands of digits": state_with(version=10**4000),
    "a long reason": state_with(failures=[{"tier": "node", "reason": "x" * 999, "message": ""}]),
    "half a surrogate pair": state_with(last_local={"step": 1, "round": 0, "manifest": "\ud800"}),
    "deep": state_with(more=0).replace(b'"more": 0', b'"more": ' + b"[" * 20000 + b"]" * 20000),
    "larger than the job has reason for": state_with(more="x" * (1 << 20)),
    "more ranks than there can be": state_with(progress=[rank()] * 30000),
}


@pytest.mark.fault(
    "A sidecar answers a poll with values that are too large, infinite, negative, deep or no text"
)
@pytest.mark.parametrize("case", HOSTILE)
async def test_the_poll_goes_on_after_any_answer(case: str) -> None:
    async with bench() as b:
        pod = pod_view(0)
        server = await b.serve(pod)
        server.raw_state = HOSTILE[case]
        b.follow(pod, coordinator=0)
        await b.until(lambda: [kind for kind, _ in server.calls].count("state") >= 2)
        assert b.sidecars.coordinator_state(UID) is None
        server.raw_state = None
        server.publish(GOOD)
        await b.until(lambda: b.sidecars.coordinator_state(UID) == GOOD)
        assert b.errors == []


@pytest.mark.fault("The answer of a sidecar meets a defect of the operator")
async def test_the_poll_goes_on_after_an_error_that_was_not_expected() -> None:
    """A defect of the operator: the consumer of the news fails once."""
    async with bench() as b:
        pod = pod_view(0)
        server = await b.serve(pod)
        b.follow(pod, coordinator=0)
        await b.until(lambda: b.view(pod).reachable is Reachable.YES)
        b.defects.append(RecursionError("unexpected"))
        server.publish(GOOD)
        await b.until(lambda: b.errors == ["sidecars"])
        server.publish(replace(GOOD, version=8))
        await b.until(
            lambda: (s := b.sidecars.coordinator_state(UID)) is not None and s.version == 8
        )


@pytest.mark.fault(
    "Each poll of a coordinator meets a defect of the operator, such as a damaged authority"
)
async def test_a_coordinator_whose_poll_always_ends_with_an_unexpected_error_is_unreachable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A new process otherwise waits for its first answer without end (gang.awaits_coordinator)."""

    async def broken(_: JobUid) -> ssl.SSLContext:
        raise ValueError("Unable to load PEM file")

    monkeypatch.setattr("tests.support.operator.bench.identity", broken)
    async with bench() as b:
        pod = pod_view(0)
        await b.serve(pod)
        b.follow(pod, coordinator=0, trains=True)
        await b.until(lambda: len(b.clock.slept) > 2 or b.view(pod).reachable is Reachable.NO)
        assert b.view(pod).reachable is Reachable.NO
        assert "ValueError" in b.view(pod).unreachable_because


@pytest.mark.fault("The answer of a sidecar meets a defect of the operator")
async def test_a_call_that_ends_with_an_unexpected_error_is_made_again() -> None:
    async with bench() as b:
        pod = pod_view(0)
        await b.serve(pod)
        b.defects.append(KeyError("unexpected"))
        b.follow(pod)
        await b.until(lambda: b.errors == ["sidecars"])

        def sealed() -> bool:
            b.seal(pod, 1)
            return b.view(pod).sealed_round == 1

        await b.until(sealed)


@pytest.mark.fault("An inventory is larger than its job can be")
async def test_an_inventory_that_is_larger_than_its_job_is_refused() -> None:
    async with bench() as b:
        bad, good = pod_view(0), pod_view(1)
        server = await b.serve(bad)
        shard = {"step": 1, "round": 0, "rank": 0, "payload_bytes": 1, "blake3": "b3:00"}
        many = [{**shard, "tier": "node"}] * 200_000
        server.raw_inventory = json.dumps(
            {"worker": 0, "pod": bad.name, "round": 0, "version": 0, "shards": many}
        ).encode()
        await b.serve(good)
        b.follow(bad, good)
        await b.until(lambda: b.view(good).reachable is Reachable.YES)
        await b.until(lambda: "inventory" in [kind for kind, _ in server.calls])

        def silent() -> bool:
            b.follow(bad, good, suspects=frozenset({"node-a"}))
            return b.view(bad).reachable is Reachable.NO

        await b.until(silent)
        assert b.view(bad).inventory is None
        assert b.view(good).reachable is Reachable.YES


@pytest.mark.fault("Silent pods accept connections and do not answer")
async def test_a_seal_does_not_wait_for_the_silent_pods_of_other_jobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each silent pod accepts the connection and sends nothing, so that no call to it ends here."""
    endless = aiohttp.ClientTimeout(total=None)
    monkeypatch.setattr(aiohttp, "ClientTimeout", lambda **_: endless)
    async with bench() as b:
        pod = pod_view(0)
        await b.serve(pod)
        b.follow(pod)
        await b.until(lambda: b.view(pod).reachable is Reachable.YES)
        with socket.create_server(("127.67.0.1", b.port), backlog=1024):
            jobs = [JobUid(f"silent-{n}") for n in range(60)]
            for uid in jobs:
                pods = [replace(pod_view(n), uid=f"{uid}-{n}", ip="127.67.0.1") for n in range(5)]
                b.sidecars.follow(
                    KEY, uid, RestartRound(0), pods, None, frozenset(), ranks=5, gang=frozenset()
                )
            assert sum(len(b.sidecars.views(uid)) for uid in jobs) == 300
            b.seal(pod, 1)
            await b.until(lambda: b.view(pod).sealed_round == 1)


@pytest.mark.fault("A coordinator has news all the time")
async def test_a_coordinator_with_news_all_the_time_does_not_take_all_the_time() -> None:
    """Every answer differs and arrives without delay. After a burst, the operator polls at a steady rate."""
    async with bench() as b:
        pod = pod_view(0)
        server = await b.serve(pod)
        server.publish(replace(GOOD, version=1))
        b.follow(pod, coordinator=0)

        def acted() -> bool:
            """Handle the news as a pass does, and publish the next news of the sidecar."""
            state = b.sidecars.coordinator_state(UID)
            if state is not None and server.state == state:
                b.sidecars.acted_on(UID, state.version)
                server.publish(replace(GOOD, version=state.version + 1))
            return state is not None and state.version > POLL_BURST + 3

        # The clock stands still between the answers, so the speed of the machine does not matter.
        b.clock.stopped = b.clock.monotonic()
        await b.until(acted)
        assert [s for s in b.clock.slept if s >= POLL_SECONDS_EACH]


@pytest.mark.fault("A sidecar words its refusals differently each time")
async def test_refusals_of_a_sidecar_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """The sidecar refuses with another text of 5,000 characters each time."""
    with caplog.at_level(logging.INFO, "holdfast"):
        async with bench() as b:
            pod = pod_view(0)
            server = await b.serve(pod)
            b.follow(pod, coordinator=0)
            for n in range(3):
                server.refuses_state = f"{n} " + "x" * 5000
                server.calls.clear()
                await b.until(lambda: len(server.calls) >= 2)
    refusals = [r.getMessage() for r in caplog.records if "refused" in r.getMessage()]
    assert len(refusals) == 1
    assert len(refusals[0]) <= MAX_LOG_CHARACTERS
