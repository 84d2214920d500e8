"""The versioned level that the operator polls: bundling, acknowledgements, restarts of the process."""

from __future__ import annotations

import asyncio

from tests.support.hang import HANG_SECONDS

from holdfast_sidecar.wire.server import BUNDLE_SECONDS, Versioned


async def test_a_poll_returns_on_an_urgent_change() -> None:
    level = Versioned()
    before = level.version
    poll = asyncio.create_task(level.wait_above(before, 3600))
    await asyncio.sleep(0)
    assert level.bump(urgent=True) == before + 1
    await asyncio.wait_for(poll, HANG_SECONDS)


async def test_changes_that_are_not_urgent_are_bundled() -> None:
    level = Versioned()
    before = level.version
    for _ in range(100):
        level.bump(urgent=False)
    assert level.version == before
    await asyncio.wait_for(level.wait_above(before, 3600), HANG_SECONDS)
    assert level.version == before + 1


async def test_only_versions_that_this_process_delivered_are_acknowledged() -> None:
    """An operator that sends version 57 of an earlier process acknowledges nothing, and still receives an
    answer with a higher number."""
    level = Versioned()
    finished = level.bump(urgent=True)
    level.acknowledge(57)
    assert not level.acknowledged(finished)
    assert level.version > 57
    await asyncio.wait_for(level.wait_above(57, 3600), HANG_SECONDS)
    level.delivered(level.version)
    level.acknowledge(level.version)
    assert level.acknowledged(finished)


async def test_the_end_of_a_life_answers_everybody() -> None:
    level = Versioned()
    poll = asyncio.create_task(level.wait_above(level.version, 3600))
    await asyncio.sleep(0)
    level.close()
    await asyncio.wait_for(poll, HANG_SECONDS)


async def test_the_operator_chooses_how_long_other_changes_are_bundled() -> None:
    level = Versioned()
    level.bundle_for(3600)
    before = level.version
    level.bump(urgent=False)
    await level.wait_above(before, 2 * BUNDLE_SECONDS)
    assert level.version == before, "the change waits"
    level.bump(urgent=True)
    assert level.version == before + 1, "an urgent change does not"
    level.bundle_for(0)
    level.bump(urgent=False)
    await asyncio.wait_for(level.wait_above(before + 1, 3600), HANG_SECONDS)
