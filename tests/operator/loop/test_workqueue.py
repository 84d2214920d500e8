"""A key is processed by one worker at a time, is queued at most once, and is queued again after an error."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from tests.support.clock import ManualClock

from holdfast_operator.loop.workqueue import WorkQueue


def make(clock: ManualClock, errors: list[str] | None = None) -> WorkQueue[str]:
    reported = errors if errors is not None else []
    return WorkQueue(clock, lambda key, error: reported.append(f"{key}: {error}"), random.Random(7))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_key_is_queued_once_and_worked_on_again_if_added_meanwhile() -> None:
    queue, gate, done = make(ManualClock()), asyncio.Event(), list[str]()

    async def handle(key: str) -> None:
        done.append(key)
        await gate.wait()

    for _ in range(3):
        queue.add("a")
    assert queue.depth == 1
    task = asyncio.create_task(queue.run(4, handle))
    await settle()
    queue.add("a")
    queue.add("a")
    await settle()
    assert done == ["a"]  # four workers, but a key is processed only once at a time
    gate.set()
    await settle()
    assert done == ["a", "a"]
    await stop(task)


async def test_earliest_delay_counts_and_a_pass_forgets_it() -> None:
    clock = ManualClock()
    queue, done = make(clock), list[float]()

    async def handle(key: str) -> None:
        done.append(clock.monotonic() - 1000)

    task = asyncio.create_task(queue.run(1, handle))
    queue.add_after("a", 10)
    queue.add_after("a", 5)
    queue.add_after("a", 20)
    await settle()
    clock.advance(5)
    await settle()
    assert done == [5]
    queue.add_after("a", 10)
    await settle()
    clock.advance(3)
    queue.add("a")
    await settle()
    clock.advance(100)
    await settle()
    assert done == [5, 8]
    await stop(task)


async def test_a_key_that_rests_is_taken_once_at_the_end_of_its_rest() -> None:
    clock = ManualClock()
    queue, done = make(clock), list[tuple[str, float]]()

    async def handle(key: str) -> None:
        done.append((key, clock.monotonic() - 1000))
        if key == "large":
            queue.add(key)
            queue.rest(key, 4)

    task = asyncio.create_task(queue.run(2, handle))
    queue.add("large")
    await settle()
    for _ in range(3):
        clock.advance(1)
        queue.add("large")
        queue.add_after("large", 0.5)
        queue.add("small")
        await settle()
    clock.advance(0.875)
    await settle()
    assert done == [("large", 0), ("small", 1), ("small", 2), ("small", 3)]
    clock.advance(0.25)
    await settle()
    assert done[4:] == [("large", 4.125)]
    await stop(task)


async def test_error_brings_the_key_back_later_and_later() -> None:
    clock, errors = ManualClock(), list[str]()
    queue, tries = make(clock, errors), list[float]()

    async def handle(key: str) -> None:
        tries.append(clock.monotonic())
        if len(tries) < 4:
            raise RuntimeError("no")

    task = asyncio.create_task(queue.run(2, handle))
    queue.add("a")
    for _ in range(100):
        await settle()
        clock.advance(0.05)
    await settle()
    assert len(tries) == 4
    gaps = [b - a for a, b in pairwise(tries)]
    assert gaps[0] < gaps[2]
    assert errors == ["a: no"] * 3
    await stop(task)


@given(st.lists(st.sampled_from("abc"), max_size=40), st.integers(1, 4))
def test_never_two_workers_on_one_key(keys: list[str], workers: int) -> None:
    async def story() -> None:
        queue, active, worst = make(ManualClock()), list[str](), [0]

        async def handle(key: str) -> None:
            active.append(key)
            worst[0] = max(worst[0], active.count(key))
            await asyncio.sleep(0)
            active.remove(key)

        task = asyncio.create_task(queue.run(workers, handle))
        for key in keys:
            queue.add(key)
            await asyncio.sleep(0)
        await settle()
        await settle()
        assert worst[0] <= 1
        assert queue.depth == 0
        await stop(task)

    asyncio.run(story())


async def test_keys_that_come_first_overtake_the_others() -> None:
    first, done = {"recovers"}, list[str]()
    queue: WorkQueue[str] = WorkQueue(
        ManualClock(), lambda *_: None, random.Random(7), first.__contains__
    )

    async def handle(key: str) -> None:
        done.append(key)

    for key in ("new", "later", "newer", "recovers"):
        queue.add(key)
    first.add("later")
    queue.add("later")  # it has become urgent while it waited
    assert queue.depth == 4
    task = asyncio.create_task(queue.run(1, handle))
    await settle()
    assert done == ["recovers", "later", "new", "newer"]
    assert queue.depth == 0
    queue.add("new")
    await settle()
    assert done[4:] == ["new"]
    await stop(task)
