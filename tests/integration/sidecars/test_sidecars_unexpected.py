"""An unexpected exception fails a save or ends the process, and never silently ends a task."""

from __future__ import annotations

import asyncio
import urllib.request
from typing import Any

import pytest
from tests.support.sidecar import until
from tests.support.sidecar.gang import Gangs

from holdfast_core.ids import Level
from holdfast_sidecar.process.lifecycle import DIED_STATUS

pytestmark = pytest.mark.integration


def sample(gang: Any, worker: int, line: str) -> float:
    """Return the value of one line of the sidecar's metrics, or 0 where it is missing. Blocks."""
    with urllib.request.urlopen(gang.metrics_url(worker)) as reply:
        lines = reply.read().decode().splitlines()
    found = [text for text in lines if text.startswith(f"{line} ")]
    return float(found[0].split()[-1]) if found else 0.0


@pytest.mark.fault("The write of a shard raises an exception that no code expects")
@pytest.mark.parametrize("slots", [2, 3], ids=["written at once", "may wait in memory"])
async def test_a_bug_in_a_write_is_a_counted_failure_of_that_save(gangs: Gangs, slots: int) -> None:
    """The rank is notified, the condition has a reason, and the next save is committed."""
    async with gangs(2) as gang:
        gang.slots = slots
        gang.failpoints[1] = "node.mid_write=raise:RuntimeError@1"
        await gang.start()
        await gang.save(1)
        rank = gang.ranks[1]
        await until(
            lambda: any(m.step == 1 for m in rank.failures),
            "rank 1 is notified that its save failed",
        )
        state = await gang.operator.state_until(0, lambda s: bool(s.failures), "a failure")
        assert [(f.step, f.reason) for f in state.failures] == [(1, "UnexpectedError")]
        line = 'holdfast_saves_failed_total{reason="UnexpectedError"}'
        assert await asyncio.to_thread(sample, gang, 1, line) == 1
        await gang.commit(2, Level.REPLICATED)


@pytest.mark.fault("A background task of the sidecar dies")
async def test_a_task_that_dies_ends_the_process_and_the_next_one_resumes(gangs: Gangs) -> None:
    """The exception is raised after the shard is durable and before its slot is released."""
    async with gangs(2) as gang:
        gang.failpoints[1] = "memory.before_free=raise:RuntimeError@1"
        await gang.start()
        await gang.save(1)
        process = gang.sidecars[1].process
        await until(lambda: process.poll() is not None, "the sidecar ends")
        assert process.returncode == DIED_STATUS
        assert "memory.before_free" in gang.sidecars[1].log.read_text()

        gang.launchers[1].close()
        await gang.relaunch(1)
        await gang.connect_rank(1, 0)
        await gang.launcher(1, last_round=0, running=0)
        await gang.operator.round_all(gang.operator.message(0, version=2, copies=gang.copies))
        await gang.point(1)
        await gang.commit(2, Level.REPLICATED)
