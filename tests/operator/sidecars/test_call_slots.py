"""Which calls wait for which others: by kind of pod and by job, with recoveries first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from holdfast_core.ids import JobUid
from holdfast_operator.sidecars.client import JOB_SHARE, CallSlots, Standing

FEW = {Standing.ANSWERS: 8, Standing.UNKNOWN: 8, Standing.SILENT: 8}
HEALTHY = JobUid("healthy")


class Calls:
    """Calls that keep their slot until `end`. `began` lists them in the order in which they began."""

    def __init__(self, slots: CallSlots) -> None:
        self._slots = slots
        self._end: dict[str, asyncio.Event] = {}
        self.tasks: list[asyncio.Task[None]] = []
        self.began: list[str] = []

    async def start(
        self, name: str, job: str, standing: Standing = Standing.ANSWERS, *, urgent: bool = False
    ) -> None:
        self._end[name] = asyncio.Event()

        async def call() -> None:
            async with self._slots.hold(JobUid(job), standing, urgent=urgent):
                self.began.append(name)
                await self._end[name].wait()

        self.tasks.append(asyncio.create_task(call()))
        await settle()

    async def end(self, name: str) -> None:
        self._end[name].set()
        await settle()


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


def run_scenario(scenario: Callable[[Calls], object]) -> None:
    async def run() -> None:
        calls = Calls(CallSlots(FEW))
        try:
            await scenario(calls)  # type: ignore[misc]  # a coroutine function
        finally:
            for task in calls.tasks:
                task.cancel()
            await asyncio.gather(*calls.tasks, return_exceptions=True)

    asyncio.run(run())


@pytest.mark.fault("Thousands of silent pods exist beside a healthy job")
def test_silent_pods_of_many_jobs_take_no_slot_of_pods_that_answer() -> None:
    async def scenario(calls: Calls) -> None:
        for n in range(200):
            await calls.start(f"silent {n}", f"job {n}", Standing.SILENT, urgent=True)
            await calls.start(f"new {n}", f"job {n}", Standing.UNKNOWN)
        assert len(calls.began) == 16
        await calls.start("seal", HEALTHY, urgent=True)
        assert calls.began[-1] == "seal"

    run_scenario(scenario)


@pytest.mark.fault("One job is large or hostile")
def test_one_job_does_not_take_the_slots_of_all() -> None:
    async def scenario(calls: Calls) -> None:
        for n in range(50):
            await calls.start(f"large {n}", "large")
        assert len(calls.began) == max(1, 8 // JOB_SHARE)
        await calls.start("poll", HEALTHY)
        assert calls.began[-1] == "poll"

    run_scenario(scenario)


@pytest.mark.fault("A recovery begins among many polls")
def test_recoveries_go_first_and_jobs_take_turns() -> None:
    async def scenario(calls: Calls) -> None:
        for n in range(8):
            await calls.start(f"first {n}", f"job {n}")
        for n in range(8):
            await calls.start(f"second {n}", f"job {n}")
        await calls.start("inventory", HEALTHY)
        await calls.start("seal", HEALTHY, urgent=True)
        await calls.end("first 0")
        assert calls.began[-1] == "seal"
        await calls.end("first 1")
        assert calls.began[-1] == "second 0"
        await calls.end("seal")
        assert calls.began[-1] == "second 1"

    run_scenario(scenario)


@pytest.mark.fault("One job asks for many calls to its sidecars")
def test_a_job_that_was_served_goes_last() -> None:
    async def scenario(calls: Calls) -> None:
        for n in range(8):
            await calls.start(f"first {n}", f"job {n}")
        for name in ("second 0", "third 0"):
            await calls.start(name, "job 0")
        await calls.start("inventory", HEALTHY)
        await calls.end("first 0")
        assert calls.began[-1] == "second 0"
        await calls.end("second 0")
        assert calls.began[-1] == "inventory"

    run_scenario(scenario)


def test_a_call_that_is_cancelled_gives_its_slot_or_its_place_back() -> None:
    async def scenario(calls: Calls) -> None:
        await calls.start("one", "a")
        await calls.start("two", "a")
        await calls.start("three", "a")
        calls.tasks[1].cancel()
        calls.tasks[0].cancel()
        await settle()
        assert calls.began == ["one", "three"]
        calls.tasks[2].cancel()
        await settle()
        for n in range(8):
            await calls.start(f"more {n}", f"job {n}")
        assert len(calls.began) == 10

    run_scenario(scenario)
