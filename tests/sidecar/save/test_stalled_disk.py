"""A write that hangs is reported while it hangs, and its result is accepted when it returns."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.sidecar.contracts import contract_with
from tests.support.sidecar.ranks import FakeRank
from tests.support.sidecar.rounds import accepted, round_message
from tests.support.sidecar.stagers import stager_of
from tests.support.sidecar.waiting import until
from tests.support.tiers.scratch import ScratchTier

from holdfast_core.ids import JobUid
from holdfast_core.save.staging import WriteOutcome
from holdfast_core.shm.slot_file import SlotState
from holdfast_core.tasks import until_done
from holdfast_core.tiers.base import PayloadSource, ShardHeader, ShardRecord
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.base.telemetry import Failures
from holdfast_sidecar.base.tiers import Pools

JOB = JobUid("5d4a")
PAYLOAD = bytes(range(256)) * 16


class HangingNode(ScratchTier):
    """A tier that reads half of a payload, and the rest when the test lets it continue."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def write_shard(self, header: ShardHeader, source: PayloadSource) -> ShardRecord:
        source.read_into(0, memoryview(bytearray(header.payload_bytes // 2)))
        assert self.go_on.wait(HANG_SECONDS)
        return super().write_shard(header, source)


def settings_in(folder: Path) -> Settings:
    contract = contract_with(job_uid=JOB, shared_dir=str(folder))
    return Settings(contract, disk_quiet_seconds=0.02)


def message_of(failures: Failures) -> str:
    """Return the message of the only failure, or "" while there is progress."""
    return "".join(failure.message for failure in failures.current)


@pytest.mark.fault("A write to the disk hangs")
async def test_a_disk_that_hangs_is_reported_until_it_continues(tmp_path: Path) -> None:
    reported, written = asyncio.Event(), asyncio.Event()
    outcomes: list[WriteOutcome] = []

    def noted(outcome: WriteOutcome) -> None:
        outcomes.append(outcome)
        written.set()

    node, pools, failures = HangingNode(), Pools(disk=1, fetch=1, store=1), Failures(reported.set)
    settings = settings_in(tmp_path)
    state = accepted(round_message(workers=1))
    stager = stager_of(settings, state, node, pools, failures)
    stager.ended.subscribe(noted)
    rank = FakeRank(tmp_path, JOB, 0, 0)
    await stager.stage(lambda: state, rank.fill(7, PAYLOAD))

    await asyncio.wait_for(reported.wait(), HANG_SECONDS)
    # The first reports may arrive before the write has begun.
    half = f"{len(PAYLOAD) // 2} of {len(PAYLOAD)} bytes"
    await until(lambda: half in message_of(failures), "a report of the half that was written")
    (failure,) = failures.current
    assert (failure.reason, failure.step) == ("NodeVolumeHangs", 7)
    assert not stager.idle
    assert rank.header(rank.names[0]).state is SlotState.OWNED, "the bytes may still be read"

    node.go_on.set()
    await asyncio.wait_for(written.wait(), HANG_SECONDS)
    (outcome,) = outcomes
    assert outcome.record is not None
    assert failures.current == ()
    assert rank.header(rank.names[0]).state is SlotState.FREE
    pools.close()


@pytest.mark.fault("A write waits for those of other ranks")
async def test_a_write_that_waits_for_another_one_is_not_reported(tmp_path: Path) -> None:
    """With one thread the second write cannot begin. The report names the write that hangs, not that one."""
    steps: set[int | None] = set()

    def is_long_reported() -> bool:
        steps.update(failure.step for failure in failures.current)
        return "none for 1 s" in message_of(failures)

    node, pools, failures = (
        HangingNode(),
        Pools(disk=1, fetch=1, store=1),
        Failures(asyncio.Event().set),
    )
    state = accepted(round_message(workers=1))
    stager = stager_of(settings_in(tmp_path), state, node, pools, failures)
    rank = FakeRank(tmp_path, JOB, 0, 0)
    await stager.stage(lambda: state, rank.fill(7, PAYLOAD))
    rank.fill_slot(rank.names[1], 8, PAYLOAD)
    await stager.stage(lambda: state, rank.stage_message(rank.names[1], 8, PAYLOAD))
    await until(is_long_reported, "many reports of the write that hangs")
    assert steps == {7}
    node.go_on.set()
    await until(lambda: stager.idle, "both are written")
    pools.close()


async def test_a_slow_call_is_not_a_stalled_one() -> None:
    """A call is reported as stalled only while its progress does not change between two checks."""
    noted: list[str] = []
    looks = iter([0, 1, 2, 2, 2, 3])
    ended = asyncio.get_running_loop().create_future()

    def progress() -> int:
        look = next(looks, None)
        if look is None:
            if not ended.done():
                ended.set_result("done")
            return 3
        return look

    result = await until_done(
        ended,
        progress,
        quiet_seconds=0.001,
        stalled=lambda seconds: noted.append(f"stalled {seconds:.3f}"),
        moving=lambda: noted.append("moving"),
    )
    assert result == "done"
    assert noted[:3] == ["stalled 0.001", "stalled 0.002", "moving"]


def test_an_error_of_the_call_is_raised() -> None:
    async def broken() -> None:
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        asyncio.run(
            until_done(broken(), lambda: 0, quiet_seconds=30, stalled=print, moving=lambda: None)
        )


class HangingReadBack(ScratchTier):
    """A tier that reads the whole payload and half of its file back, and the rest when `go_on` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def write_shard(self, header: ShardHeader, source: PayloadSource) -> ShardRecord:
        source.read_into(0, memoryview(bytearray(header.payload_bytes)))
        source.verified(header.payload_bytes // 2)
        assert self.go_on.wait(HANG_SECONDS)
        return super().write_shard(header, source)


@pytest.mark.fault("The full read-back of a first save is slow")
async def test_the_read_back_of_a_write_counts_as_progress(tmp_path: Path) -> None:
    """The first write of a rank is read back whole, which takes as long as the write itself."""
    reported, written = asyncio.Event(), asyncio.Event()
    node, pools = HangingReadBack(), Pools(disk=1, fetch=1, store=1)
    failures, settings = Failures(reported.set), settings_in(tmp_path)
    state = accepted(round_message(workers=1))
    stager = stager_of(settings, state, node, pools, failures)
    stager.ended.subscribe(lambda outcome: written.set())
    await stager.stage(lambda: state, FakeRank(tmp_path, JOB, 0, 0).fill(7, PAYLOAD))
    await asyncio.wait_for(reported.wait(), HANG_SECONDS)
    size = len(PAYLOAD)
    half = f"{size // 2} of them read back"
    await until(lambda: half in message_of(failures), "a report of the half that was read back")
    assert f"{size} of {size} bytes were written" in message_of(failures)
    node.go_on.set()
    await asyncio.wait_for(written.wait(), HANG_SECONDS)
    pools.close()
