"""The reflector always converges, whatever fails on the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from tests.support.clock import SteppedClock
from tests.support.hang import HANG_SECONDS
from tests.support.operator.served_api import PATH, PLURAL, Fault, ServedApi

from holdfast_core.clock import Clock, SystemClock
from holdfast_operator.kube.api import KubeAccess, KubeApi
from holdfast_operator.model.job import Unreadable
from holdfast_operator.watch.reflector import Collection, Reflector, Timings

FAST = Timings(
    page=2,
    silence_seconds=600.0,
    first_backoff_seconds=0.01,
    max_backoff_seconds=0.05,
    short_watch_seconds=0.01,
)

A = (PLURAL, "", "a")
"""Key of object a."""


@dataclass(frozen=True)
class Thing:
    name: str
    uid: str
    value: int


def parse(raw: object) -> Thing | None:
    assert isinstance(raw, dict)
    if raw["spec"]["value"] < -5:
        raise TypeError("not even a number")
    if raw["spec"]["value"] < 0:
        raise ValueError("negative")
    return Thing(raw["metadata"]["name"], raw["metadata"]["uid"], raw["spec"]["value"])


class RecordingClock(SystemClock):
    """A clock that records its sleeps, and that ends each at once."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)


@dataclass
class Bench:
    server: ServedApi
    reflector: Reflector[Thing]
    seen: list[str] = field(default_factory=list)

    def values(self) -> dict[str, int]:
        items = self.reflector.items.values()
        return {t.name: t.value for t in items if isinstance(t, Thing)}

    def hidden(self) -> dict[str, str]:
        items = self.reflector.items.values()
        return {u.name: u.problem for u in items if isinstance(u, Unreadable)}

    def truth(self) -> dict[str, int]:
        return {n: o["spec"]["value"] for n, o in self.server.all().items()}

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(HANG_SECONDS):
            while not condition():  # noqa: ASYNC110 - not all of it has an event
                await asyncio.sleep(0.005)

    async def watching(self) -> None:
        """Wait until the copy is complete and events arrive."""
        await self.reflector.synced.wait()
        await self.until(lambda: self.server.open_watches > 0)

    async def converged(self) -> None:
        await self.until(lambda: self.values() == self.truth())


@asynccontextmanager
async def bench(
    timings: Timings = FAST,
    refuses: int | None = None,
    faults: Sequence[Fault] = (),
    clock: Clock | None = None,
    **objects: int,
) -> AsyncIterator[Bench]:
    """Run a reflector and its server, which has these objects and answers streamed lists with `refuses`."""
    server = ServedApi(faults=list(faults), refuses_streamed_lists=refuses)
    await server.start()
    for name, value in objects.items():
        server.put(name, value)
    api = KubeApi(KubeAccess(server.url, token="first"))
    await api.start()
    found: list[str] = []

    def on_change(old: Thing | Unreadable | None, new: Thing | Unreadable | None) -> None:
        kind = "add" if old is None else "delete" if new is None else "change"
        thing = new or old
        assert thing is not None
        state = " unreadable" if isinstance(thing, Unreadable) else ""
        found.append(f"{kind} {thing.name} {thing.uid}{state}")

    clock = clock or SystemClock()
    reflector = Reflector(api, Collection(PLURAL, PATH), parse, on_change, clock, timings)
    task = asyncio.create_task(reflector.run())
    try:
        yield Bench(server, reflector, found)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await api.close()
        await server.close()


@pytest.mark.parametrize(
    ("refuses", "streamed"),
    [
        pytest.param(None, 1, id="streamed"),
        pytest.param(400, 0, id="an unknown parameter"),
        pytest.param(422, 0, id="the feature is off"),
    ],
)
async def test_list_then_events(refuses: int | None, streamed: int) -> None:
    async with bench(refuses=refuses, a=1, b=2, c=3, d=4, e=5) as b:
        await b.watching()
        assert b.values() == {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}
        b.server.put("a", 9)
        b.server.remove("b")
        b.server.put("f", 6)
        await b.converged()
        assert b.seen[5:] == ["change a uid-1", "delete b uid-2", "add f uid-6"]
        assert (b.server.lists, b.server.streamed_lists) == (1, streamed)
        assert b.reflector.errors == 0


async def test_a_server_without_streamed_lists_is_asked_for_pages_at_once() -> None:
    async with bench(replace(FAST, first_backoff_seconds=3600.0), refuses=422, a=1) as b:
        await b.watching()
        assert b.values() == {"a": 1}


async def test_one_request_lists_and_watches() -> None:
    async with bench(a=1, b=2) as b:
        await b.watching()
        b.server.put("a", 9)
        await b.converged()
        assert b.server.watches == 1


@pytest.mark.fault(
    "A streamed list of the API server ends, fails or falls silent before its last object"
)
@pytest.mark.fault(
    "An API server that has just started does not know the rights of the operator yet"
)
@pytest.mark.parametrize("fault", [f for f in Fault if f is not Fault.EXPIRED_CONTINUE])
async def test_a_streamed_list_that_does_not_end_is_replaced_by_pages(fault: Fault) -> None:
    """A part of the objects is never taken for all of them.

    A server that is busy, or does not know our rights yet, is asked for the same again.
    """
    silent = fault in (Fault.SILENT, Fault.NO_BOOKMARK)
    # A server that answers on a busy machine is not silent for as long.
    timings = replace(FAST, silence_seconds=2.0) if silent else FAST
    async with bench(timings, faults=[fault], a=1, b=2, c=3) as b:
        await b.watching()
        assert b.values() == b.truth()
        assert b.server.faults == []
        assert sorted(b.seen) == ["add a uid-1", "add b uid-2", "add c uid-3"]
        assert b.server.lists - b.server.streamed_lists == (
            fault not in (Fault.BUSY, Fault.FORBIDDEN)
        )


async def test_a_server_that_never_ends_a_streamed_list_is_asked_for_pages() -> None:
    timings = replace(FAST, streamed_list_seconds=0.3)
    async with bench(timings, faults=[Fault.NO_BOOKMARK], a=1) as b:
        while not b.reflector.synced.is_set():
            b.server.bookmark()
            await asyncio.sleep(0.02)
        await b.watching()
        assert b.values() == {"a": 1}
        assert b.reflector.errors == 0


async def test_an_object_that_changes_while_the_list_arrives_is_taken_as_it_is_then() -> None:
    """The server sends changes between the present objects and the bookmark."""
    async with bench(faults=[Fault.NO_BOOKMARK], a=1, b=2) as b:
        await b.until(lambda: b.server.open_watches > 0)
        b.server.put("a", 7)
        b.server.put("c", 3)
        b.server.remove("b")
        b.server.bookmark()
        assert not b.reflector.synced.is_set()
        assert b.reflector.last_contact is None
        b.reflector.relist_soon()
        b.server.bookmark(ends_list=True)
        await b.reflector.synced.wait()
        assert b.values() == {"a": 7, "c": 3}
        assert b.seen == ["add a uid-1", "add c uid-3"]
        assert b.server.watches == 1


@pytest.mark.parametrize("refuses", [None, 422], ids=["streamed", "pages"])
@pytest.mark.parametrize(
    "fault", [f for f in Fault if f not in (Fault.EXPIRED_CONTINUE, Fault.NO_BOOKMARK)]
)
async def test_every_fault_heals(fault: Fault, refuses: int | None) -> None:
    # Elsewhere a watch that seems silent because the machine is busy would lose events of the test.
    timings = replace(FAST, silence_seconds=0.3) if fault is Fault.SILENT else FAST
    async with bench(timings, refuses, a=1, b=2) as b:
        await b.watching()
        b.server.faults[:] = [fault] * 3
        with b.server.silence():
            b.server.remove("a")
            b.server.put("c", 3)
        b.server.end_watches()
        # After silence alone, the reflector watches from the same version.
        if fault is Fault.SILENT:
            await b.until(lambda: not b.server.faults)
            b.server.faults[:] = [Fault.GONE]
            await b.until(lambda: b.reflector.items.keys() != {"uid-1", "uid-2"})
            b.server.end_watches()
            b.server.faults[:] = [Fault.GONE]
        elif fault not in (Fault.GONE, Fault.GONE_EVENT):
            b.server.faults.append(Fault.GONE)
        await b.converged()
        assert "delete a uid-1" in b.seen
        assert b.seen.count("add c uid-3") == 1


async def test_gone_in_the_middle_of_a_list_starts_it_again() -> None:
    faults = [Fault.EXPIRED_CONTINUE] * 2
    async with bench(refuses=422, faults=faults, a=1, b=2, c=3) as b:
        await b.converged()
        assert sorted(b.seen) == ["add a uid-1", "add b uid-2", "add c uid-3"]


async def test_recreated_object_is_a_delete_and_an_add() -> None:
    async with bench(a=1) as b:
        await b.watching()
        b.server.faults[:] = [Fault.GONE]
        with b.server.silence():
            b.server.remove("a")
            b.server.put("a", 1)
        b.server.end_watches()
        await b.until(lambda: set(b.reflector.items) == {"uid-2"})
        assert b.seen == ["add a uid-1", "delete a uid-1", "add a uid-2"]


async def test_storm_of_410_is_not_a_storm_of_requests() -> None:
    clock = RecordingClock()
    async with bench(clock=clock, faults=[Fault.GONE] * 1000, a=1) as b:
        await b.until(lambda: b.server.lists >= 20)
        pauses, lists = list(clock.slept), b.server.lists
    assert len(pauses) >= lists - 1, "a pause before each further list"
    assert pauses[0] >= FAST.first_backoff_seconds / 2
    assert min(pauses[5:]) >= FAST.max_backoff_seconds / 2


@pytest.mark.fault("An object in a watch cannot be parsed")
async def test_equal_record_is_no_event_and_an_unreadable_object_is_not_gone() -> None:
    async with bench(a=1, bad=-1) as b:
        await b.watching()
        assert b.values() == {"a": 1}
        b.server.put("a", 1)
        b.server.put("bad", 7)
        await b.converged()
        b.server.put("bad", -9)
        await b.until(lambda: b.values() == {"a": 1})
        assert b.hidden() == {"bad": "TypeError: not even a number"}
        b.server.remove("bad")
        b.server.put("a", 2)
        await b.until(lambda: b.values() == {"a": 2})
        assert b.seen == [
            "add a uid-1",
            "add bad uid-2 unreadable",
            "change bad uid-2",
            "change bad uid-2 unreadable",
            "delete bad uid-2 unreadable",
            "change a uid-1",
        ]
        assert b.server.lists == 1, "one object that cannot be read does not stop the watch"


async def test_an_object_that_a_list_lacked_is_found_without_an_event() -> None:
    async with bench(replace(FAST, relist_soonest_seconds=0.0), a=1, b=2) as b:
        hidden = b.server.api.objects.pop(A)
        await b.watching()
        b.server.api.objects[A] = hidden
        assert b.values() == {"b": 2}
        for _ in range(5):  # passes of several jobs ask for it while the watch ends
            b.reflector.relist_soon()
            await asyncio.sleep(0)
        await b.converged()
        assert b.reflector.errors == 0
        b.server.put("b", 3)
        await b.converged()


async def test_lists_that_are_asked_for_are_limited() -> None:
    async with bench(a=1) as b:
        await b.watching()
        b.reflector.relist_soon()
        b.server.put("a", 2)
        await b.converged()
        assert b.reflector.lists == 1


async def test_a_reply_is_stored_before_its_event_and_reported_once() -> None:
    async with bench(a=1) as b:
        await b.watching()
        with b.server.silence():
            b.server.put("a", 5)
        b.reflector.take(b.server.get("a"))
        assert b.values() == {"a": 5}
        b.server.send("a")
        b.server.put("b", 2)
        await b.converged()
        assert b.seen == ["add a uid-1", "change a uid-1", "add b uid-2"]
        b.server.put("a", 6)
        await b.converged()


async def test_events_from_before_a_reply_do_not_replace_it() -> None:
    async with bench(a=1) as b:
        await b.watching()
        before = deepcopy(b.server.get("a"))
        with b.server.silence():
            b.server.put("a", 5)
        reply = b.server.get("a")
        b.reflector.take(reply)
        b.server.api.objects[A] = before
        b.server.send("a")
        b.server.put("b", 2)
        await b.until(lambda: "b" in b.values())
        assert b.values() == {"a": 5, "b": 2}
        b.server.api.objects[A] = reply
        b.server.put("a", 7)
        await b.converged()


async def test_a_list_that_began_before_a_reply_does_not_replace_it() -> None:
    async with bench(a=1) as b:
        await b.watching()
        b.server.faults[:] = [Fault.GONE, Fault.NO_BOOKMARK]
        b.server.end_watches()
        await b.until(lambda: not b.server.faults and b.server.open_watches > 0)
        with b.server.silence():
            b.server.put("a", 5)
        b.reflector.take(b.server.get("a"))
        b.server.bookmark(ends_list=True)
        await b.until(lambda: b.reflector.lists == 2)
        assert b.values() == {"a": 5}


@pytest.mark.parametrize("refuses", [None, 422], ids=["streamed", "pages"])
async def test_a_list_that_begins_after_a_reply_replaces_it(refuses: int | None) -> None:
    """etcd may have been restored to a copy from before the write, of which no event has arrived."""
    async with bench(refuses=refuses, a=1) as b:
        await b.watching()
        before = deepcopy(b.server.get("a"))
        with b.server.silence():
            b.server.put("a", 5)
        b.reflector.take(b.server.get("a"))
        b.server.api.objects[A] = before
        b.server.faults[:] = [Fault.GONE]
        b.server.end_watches()
        await b.until(lambda: b.reflector.lists == 2)
        assert b.values() == {"a": 1}


async def test_a_reply_for_an_object_that_is_gone_or_has_no_number_is_left_out() -> None:
    async with bench(a=1) as b:
        await b.watching()
        known = b.server.get("a")
        b.reflector.take(
            {
                **known,
                "metadata": {**known["metadata"], "resourceVersion": "x"},
                "spec": {"value": 9},
            }
        )
        assert b.values() == {"a": 1}
        b.server.remove("a")
        await b.converged()
        b.reflector.take(known)
        assert b.values() == {}
        assert b.seen == ["add a uid-1", "delete a uid-1"]


async def test_contact_follows_events_and_bookmarks() -> None:
    clock = SteppedClock(1000)
    async with bench(clock=clock, a=1) as b:
        await b.watching()
        assert b.reflector.last_contact == 1000
        clock.advance(5)
        b.server.bookmark()
        await b.until(lambda: b.reflector.last_contact == 1005)


async def test_a_contact_after_a_silence_begins_a_new_time_of_contact() -> None:
    clock = SteppedClock(1000)
    async with bench(replace(FAST, quiet_seconds=30), clock=clock, a=1) as b:
        await b.watching()
        assert b.reflector.contact_since == 1000
        clock.advance(30)
        b.server.put("a", 2)
        await b.until(lambda: b.reflector.last_contact == 1030)
        assert b.reflector.contact_since == 1000, "no silence of more than 30 s"
        clock.advance(31)
        b.server.put("a", 3)
        await b.until(lambda: b.reflector.last_contact == 1061)
        assert b.reflector.contact_since == 1061


async def test_token_file_is_read_for_each_request(tmp_path: Path) -> None:
    server = ServedApi()
    await server.start()
    token = tmp_path / "token"
    token.write_text("one\n")
    api = KubeApi(KubeAccess(server.url, token_file=token))
    await api.start()
    await api.get(PATH)
    token.write_text("two\n")
    await api.get(PATH)
    assert server.tokens == ["Bearer one", "Bearer two"]
    await api.close()
    await server.close()
