"""Saves of a session after a broken connection, also where the slot has a newer save by then."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from tests.support.hang import HANG_SECONDS

from holdfast.base.handle import SaveHandle, SaveTimeoutError
from holdfast.connection.session import Session
from holdfast.slots.staging import Slot, SlotRing
from holdfast_core.errors import FormatError, RefusedError, SaveFailedError, UnavailableError
from holdfast_core.format.canonical import digest_of
from holdfast_core.ids import JobUid, Level, Rank, RestartRound, Step
from holdfast_core.messages.schema import (
    NO_OBJECT_TIER,
    OVERTAKEN,
    HelloReply,
    Ok,
    Refusal,
    Stage,
    StepOutcome,
)
from holdfast_core.shm.slot_file import SlotFile, SlotState

ROUND, RANK = RestartRound(0), Rank(0)


class RecordingLink:
    """A link that records the messages that are sent; the test answers them."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, Future[Any]]] = []
        self.is_connected = True

    def start(self) -> None:
        """Do nothing."""

    def submit(self, message: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.sent.append((message, future))
        return future

    @property
    def steps(self) -> list[int]:
        return [message.step for message, _ in self.sent]


@pytest.fixture
def slot(tmp_path: Path) -> Slot:
    ring = SlotRing(tmp_path, RANK, 1)
    ring.ensure(4096, ROUND)
    (slot,) = ring.slots
    return slot


def handing_over(folder: Path, slots: int) -> tuple[SlotRing, RecordingLink, Session]:
    """Return a ring of slots, and a session with the link to which it hands saves over."""
    ring, link = SlotRing(folder, RANK, slots), RecordingLink()
    ring.ensure(4096, ROUND)
    return ring, link, session_with(link)


def save(session: Session, slot: Slot, step: int) -> SaveHandle:
    """Fill the slot and hand the save over."""
    handle = SaveHandle(Step(step), ROUND)
    slot.begin(ROUND, Step(step), 100)
    slot.complete()
    session.stage(Stage(ROUND, Step(step), RANK, slot.name, 100, digest_of(b"")), slot, handle)
    return handle


def session_with(link: RecordingLink) -> Session:
    session = Session(JobUid("job"), RANK, ROUND)
    session.open(link)  # type: ignore[arg-type]
    return session


def test_only_the_save_that_is_in_the_slot_is_handed_over_again(slot: Slot) -> None:
    """The older save was dropped while the connection was broken, and its slot contains the newer one."""
    link = RecordingLink()
    session = session_with(link)
    save(session, slot, 1)
    save(session, slot, 2)
    session.hello_accepted(HelloReply(ROUND))
    session.connected()
    assert link.steps == [1, 2, 2]


def test_a_late_refusal_does_not_affect_a_newer_save(slot: Slot) -> None:
    link = RecordingLink()
    session = session_with(link)
    older = save(session, slot, 1)
    save(session, slot, 2)
    link.sent[0][1].set_exception(FormatError("the slot holds step 2"))
    assert slot.header().state is SlotState.FULL
    assert older.settled
    link.sent[1][1].set_exception(FormatError("refused"))
    assert slot.header().state is SlotState.FREE


def test_an_overtaken_save_does_not_count_as_failed(slot: Slot) -> None:
    link = RecordingLink()
    session = session_with(link)
    handle = save(session, slot, 1)
    link.sent[0][1].set_result(Ok(ROUND))
    session.push(StepOutcome(Step(1), ROUND, Level.LOCAL, OVERTAKEN, "by step 2"))
    assert handle.level is None
    assert handle.overtaken
    assert handle.failure is None
    with pytest.raises(SaveFailedError, match="by step 2"):
        handle.wait("persisted", timeout=0)
    reached = save(session, slot, 3)
    session.push(StepOutcome(Step(3), ROUND, Level.LOCAL))
    session.push(StepOutcome(Step(3), ROUND, Level.LOCAL, OVERTAKEN, "by step 4"))
    with pytest.raises(SaveTimeoutError):
        reached.wait("persisted", timeout=0)


def test_a_sidecar_that_restarts_and_waits_for_its_round_keeps_what_it_owned(
    slot: Slot, tmp_path: Path
) -> None:
    """The sidecar refuses saves that are handed over again, and adopts the slot when it receives its
    ROUND."""
    link = RecordingLink()
    session = session_with(link)
    handle = save(session, slot, 1)
    link.sent[0][1].set_result(Ok(ROUND))
    sidecars = SlotFile.open(tmp_path, slot.name)
    sidecars.set_state(SlotState.OWNED)
    session.hello_accepted(HelloReply(ROUND))
    session.connected()
    assert link.steps == [1, 1]
    link.sent[1][1].set_exception(RefusedError(Refusal.SEALED, "waits for its ROUND"))
    header = slot.header()
    assert (header.state, header.step) == (SlotState.OWNED, 1)
    assert not handle.settled
    session.push(StepOutcome(Step(1), ROUND, Level.LOCAL))
    assert handle.durable
    sidecars.close()


@pytest.mark.fault("A step is saved twice while the connection is away")
def test_a_step_that_was_saved_twice_is_handed_over_twice_again(tmp_path: Path) -> None:
    """If only one save were handed over, the slot of the first one would stay FULL until the end."""
    ring, link, session = handing_over(tmp_path, 2)
    for slot in ring.slots:
        save(session, slot, 10)
    session.hello_accepted(HelloReply(ROUND))
    session.connected()
    names = [message.slot for message, _ in link.sent]
    assert names == [slot.name for slot in ring.slots] * 2


@pytest.mark.fault("Levels of a first save arrive before a second save of the step is taken")
def test_levels_of_a_step_count_for_a_second_save_only_when_it_is_acknowledged(
    tmp_path: Path,
) -> None:
    """A level names only the step, and the second save may have other bytes than the first."""
    ring, link, session = handing_over(tmp_path, 3)
    first, same, other = (save(session, slot, 10) for slot in ring.slots)
    link.sent[0][1].set_result(Ok(ROUND))
    session.push(StepOutcome(Step(10), ROUND, Level.LOCAL))
    session.push(StepOutcome(Step(10), ROUND, Level.PERSISTED, "NotUploaded", "there is no room"))
    assert (first.level, same.level, other.level) == (Level.LOCAL, None, None)
    link.sent[1][1].set_result(Ok(ROUND))
    link.sent[2][1].set_exception(RefusedError(Refusal.CONFLICT, "other bytes"))
    assert (first.level, same.level, other.level) == (Level.LOCAL, Level.LOCAL, None)
    assert same.failure == first.failure == "NotUploaded: there is no room"
    assert other.failure == "other bytes"
    assert ring.slots[2].header().state is SlotState.FREE


def test_a_level_that_does_not_exist_ends_its_waits_and_is_no_failure(tmp_path: Path) -> None:
    """A second save of the step is told nothing of its own, and takes this over from the first."""
    ring, link, session = handing_over(tmp_path, 2)
    first, again = (save(session, slot, 10) for slot in ring.slots)
    link.sent[0][1].set_result(Ok(ROUND))
    session.push(StepOutcome(Step(10), ROUND, Level.LOCAL))
    session.push(StepOutcome(Step(10), ROUND, Level.PERSISTED, NO_OBJECT_TIER, "set a store"))
    link.sent[1][1].set_result(Ok(ROUND))
    for handle in (first, again):
        with pytest.raises(SaveFailedError, match=r"did not become persisted: .*set a store"):
            handle.wait("persisted", timeout=0)
        with pytest.raises(SaveTimeoutError):
            handle.wait("replicated", timeout=0)
        assert handle.failure is None


@pytest.mark.fault("A step that is saved again is replaced before the second save is acknowledged")
def test_a_repeated_save_of_a_step_that_was_replaced_meanwhile_is_replaced_too(
    tmp_path: Path,
) -> None:
    """The sidecar sends no further message about the step, so the handle would wait for ever."""
    ring, link, session = handing_over(tmp_path, 2)
    first, again = (save(session, slot, 10) for slot in ring.slots)
    link.sent[0][1].set_result(Ok(ROUND))
    session.push(StepOutcome(Step(10), ROUND, Level.LOCAL, OVERTAKEN, "by step 20"))
    link.sent[1][1].set_result(Ok(ROUND))
    assert again.settled and again.overtaken
    for handle in (first, again):
        assert handle.failure is None
        with pytest.raises(SaveFailedError, match="Overtaken: by step 20"):
            handle.wait("local", timeout=0)


@pytest.mark.fault("A rank closes while the sidecar still compares a repeated save")
def test_a_close_waits_longer_for_the_comparison_of_a_repeated_save(tmp_path: Path) -> None:
    """The sidecar replies when the earlier save has been written, which may take minutes."""
    ring, link, session = handing_over(tmp_path, 3)
    save(session, ring.slots[0], 10)
    again = save(session, ring.slots[1], 10)
    link.sent[0][1].set_result(Ok(ROUND))
    assert not session.wait_acknowledged(0.01)
    reply = threading.Timer(0.2, link.sent[1][1].set_result, [Ok(ROUND)])
    reply.start()
    assert session.wait_acknowledged(0.01, HANG_SECONDS)
    assert session.saves.was_acknowledged(again)
    save(session, ring.slots[2], 11)
    assert not session.wait_acknowledged(0.01, HANG_SECONDS), "a first save is replied to at once"
    link.sent[2][1].set_result(Ok(ROUND))
    save(session, ring.slots[0], 11)
    link.is_connected = False
    assert not session.wait_acknowledged(0.01, HANG_SECONDS), "no reply can arrive"
    reply.join()


@pytest.mark.fault("A sidecar that has written the last save restarts while its rank closes")
def test_a_close_ends_when_the_sidecar_is_back(slot: Slot) -> None:
    """No reply and no level follows, so the rank would wait for the whole time of a reply."""
    waits = threading.Event()

    class Watched(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            waits.set()
            return super().wait(timeout)

    link = RecordingLink()
    session = session_with(link)
    session.saves.changed = Watched()
    save(session, slot, 1)
    link.sent[0][1].set_exception(UnavailableError("the sidecar has ended"))
    slot.abandon()  # as the sidecar freed it
    close = threading.Thread(
        target=session.wait_acknowledged, args=(2 * HANG_SECONDS,), daemon=True
    )
    close.start()
    assert waits.wait(HANG_SECONDS)
    session.connected()
    close.join(HANG_SECONDS)
    assert not close.is_alive()


@pytest.mark.fault("A step is saved again after its first save failed")
def test_a_step_that_is_saved_again_after_a_failure_does_not_make_the_first_save_durable(
    tmp_path: Path,
) -> None:
    ring, link, session = handing_over(tmp_path, 2)
    first, second = (save(session, slot, 10) for slot in ring.slots)
    link.sent[0][1].set_result(Ok(ROUND))
    session.push(StepOutcome(Step(10), ROUND, Level.LOCAL, "NodeVolumeError", "the disk failed"))
    link.sent[1][1].set_result(Ok(ROUND))
    session.push(StepOutcome(Step(10), ROUND, Level.LOCAL))
    assert not first.durable
    assert second.durable
    assert second.failure is None


@pytest.mark.fault("A repeated save is compared while the connection is away")
def test_a_repeated_save_whose_slot_was_freed_during_a_disconnection_is_acknowledged(
    tmp_path: Path,
) -> None:
    ring, link, session = handing_over(tmp_path, 2)
    first, second = (save(session, slot, 10) for slot in ring.slots)
    link.sent[0][1].set_result(Ok(ROUND))
    session.push(StepOutcome(Step(10), ROUND, Level.LOCAL))
    link.sent[1][1].set_exception(UnavailableError("the connection ended"))
    # The sidecar frees the slot when its bytes equal those of the first save.
    ring.slots[1].abandon()
    session.hello_accepted(HelloReply(ROUND))
    session.connected()
    assert first.durable
    assert second.durable


@pytest.mark.fault("A sidecar restarts when a rank has replaced slots that it was writing")
def test_a_save_whose_slot_was_replaced_is_handed_over_again(tmp_path: Path) -> None:
    """Only the sidecar knows whether the slot was written. If not, nothing would end a wait for the save."""
    ring, link, session = handing_over(tmp_path, 2)
    lost, written = (save(session, slot, step) for step, slot in enumerate(ring.slots))
    for _, reply in link.sent:
        reply.set_result(Ok(ROUND))
    ring.ensure(1 << 20, ROUND)  # the state has grown
    session.hello_accepted(HelloReply(ROUND))
    session.connected()
    assert link.steps == [0, 1, 0, 1]
    link.sent[2][1].set_exception(FormatError("the slot holds another save"))
    link.sent[3][1].set_result(Ok(ROUND))
    assert lost.failure == "the slot holds another save"
    assert not written.settled


def test_a_repeated_save_whose_slot_was_replaced_before_its_comparison_has_failed(
    tmp_path: Path,
) -> None:
    """The sidecar finds the shard of the first save, which may have other bytes."""
    ring, link, session = handing_over(tmp_path, 2)
    first, again = (save(session, slot, 10) for slot in ring.slots)
    link.sent[0][1].set_result(Ok(ROUND))
    ring.ensure(1 << 20, ROUND)
    session.hello_accepted(HelloReply(ROUND))
    session.connected()
    for _, reply in link.sent[2:]:
        reply.set_result(Ok(ROUND))
    session.push(StepOutcome(Step(10), ROUND, Level.LOCAL))
    assert first.durable
    assert not again.durable
    assert again.settled
