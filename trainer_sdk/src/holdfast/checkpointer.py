"""`Checkpointer`, the interface between a training loop and Holdfast.

This module defines the order of operations in the training thread: restore, allocate, train, save.
`slots` stores the bytes, `connection` exchanges the messages, and `state` reads and loads the objects.
A failed save is logged and counted. It raises in the loop only with on_save_error="raise".
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Generator, Mapping, MutableMapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, get_args

from holdfast.base.arguments import checked_count, require_one_of, require_state
from holdfast.base.folder import folder_path
from holdfast.base.handle import SaveHandle
from holdfast.base.layouts import LayoutFiles
from holdfast.base.notices import say
from holdfast.base.settings import RankSettings
from holdfast.checkpoint.outcomes import Outcomes
from holdfast.checkpoint.ownership import report_other_training, take_for_training
from holdfast.checkpoint.places import DirectoryPlace, Place, PodPlace
from holdfast.checkpoint.restoring import Fetched, Restorer
from holdfast.checkpoint.saving import Saver
from holdfast.connection.progress import ProgressReporter
from holdfast.connection.session import Session
from holdfast.directory.choice import older_than
from holdfast.gang.agreement import StepAgreement, Verdict
from holdfast.gang.store import GangStore, connect_store
from holdfast.slots.staging import SlotRing
from holdfast.state.load import load_state
from holdfast.state.restore_target import RestoreTarget
from holdfast.state.rng import RNG
from holdfast.training.lazy_loaders import LazyLoaderWatch
from holdfast.training.loop import Position, TrainingLoop
from holdfast.training.signals import HandledSignal, interrupts_at_end, stop_signal
from holdfast.training.steps import checked_step
from holdfast_core.contract import PodContract
from holdfast_core.errors import (
    CapacityError,
    ConfigError,
    CorruptionError,
    HoldfastError,
    SaveFailedError,
    StateDictError,
    UnavailableError,
)
from holdfast_core.ids import Level, RestartRound, Step
from holdfast_core.messages.schema import Policy

logger = logging.getLogger(__name__)

OnSaveError = Literal["warn", "raise"]
WhenBusy = Literal["skip", "wait"]

_DEFAULT_INTERVAL_STEPS = 100
_BUSY_WAIT_SECONDS = 600.0
_LEAVE_WAIT_SECONDS = 30.0
"""Time to wait for a free slot when a loop is left. An exception that left it should not be delayed for
long."""
_ACKNOWLEDGE_SECONDS = 10.0
_SETTLE_SECONDS = 120.0
_COPIES_SECONDS = 120.0
"""Time that `close` waits for copies from a device. A device may hang in a collective for ever."""
_COPIES_AFTER_ERROR_SECONDS = 10.0
_LET_GO_SECONDS = 5.0


class Checkpointer:
    """Saves and restores the state of one rank. Use it as a context manager, in the main thread.

    dir: folder for checkpoints. Leave it out in a worker pod, where the sidecar writes them.
    interval_steps: optimizer steps between saves, 100 by default; 0 saves only on request. In a pod the
      job's spec sets the interval, and this argument has no effect.
    keep_last: number of committed checkpoints to keep in `dir`, at least 1. A pod ignores it.
    slots: number of slots per rank, at least 1. A slot holds a copy of the rank's state until that copy
      is written to `dir`. A pod ignores it.
    slots_dir: directory on this machine for the slots, instead of /dev/shm. It needs room for `slots`
      copies of the state. A pod ignores it.
    strict: with True the checkpoint must hold exactly what the state contains. With False what does not
      fit is skipped and listed in `skipped`.
    on_save_error: "warn" logs and counts a failed save. "raise" raises its error in this save or in the
      next one.
    when_busy: what to do when a rank has no free slot for a save. With "skip" every rank leaves that save
      out; with "wait" the rank waits up to 10 minutes for a slot. Use the same value on every rank.

    Raises ConfigError for an invalid argument, and outside a worker pod when `dir` is missing.
    """

    def __init__(
        self,
        dir: str | os.PathLike[str] | None = None,
        *,
        interval_steps: int | None = None,
        keep_last: int = 3,
        slots: int = 2,
        slots_dir: str | os.PathLike[str] | None = None,
        strict: bool = True,
        on_save_error: OnSaveError = "warn",
        when_busy: WhenBusy = "skip",
    ) -> None:
        keep_last = checked_count(keep_last, "keep_last", 1)
        slots = checked_count(slots, "slots", 1)
        if interval_steps is not None:
            interval_steps = checked_count(interval_steps, "interval_steps", 0)
        require_one_of(on_save_error, "on_save_error", get_args(OnSaveError))
        require_one_of(when_busy, "when_busy", get_args(WhenBusy))
        self._dir = dir
        self._strict = strict
        self._on_save_error = on_save_error
        self._when_busy = when_busy
        self._settings = RankSettings.from_env()
        contract = PodContract.from_env()
        if contract is not None and dir is None:
            self._place: Place = PodPlace.of(contract)
            self._interval_steps = self._settings.interval_steps
        elif dir is not None:
            own = _DEFAULT_INTERVAL_STEPS if interval_steps is None else interval_steps
            policy = Policy(interval_steps=own, slots=slots, keep_last=keep_last, peer_copies=0)
            memory = None if slots_dir is None else Path(slots_dir).absolute()
            self._place = DirectoryPlace.of(folder_path(dir), self._settings, policy, memory)
            self._interval_steps = own
        else:
            raise ConfigError(
                "Checkpointer: this process is not in a worker pod of a TrainingJob (HOLDFAST_JOB_UID "
                'is not set), so say where checkpoints go: holdfast.Checkpointer(dir="ckpt")'
            )
        round_ = self._settings.round if isinstance(self._place, PodPlace) else None
        self._session = Session(
            self._place.job_uid,
            self._settings.rank,
            round_,
            self._place.peer,
            knows_what_is_durable=isinstance(self._place, DirectoryPlace),
        )
        self._ring = SlotRing(
            self._place.slots_dir, self._settings.rank, self._place.slots, self._place.advice
        )
        self._signal = stop_signal(self._session.want_stop)
        self._store: GangStore | None = None
        self._agreement: StepAgreement | None = None
        self._restorer: Restorer | None = None
        self._dropped: weakref.finalize[..., Checkpointer] | None = None
        self._layouts = LayoutFiles(self._place.layouts_dir)
        self._saver = Saver(self._session, self._ring, self._layouts, self._settings.rank)
        self._progress = ProgressReporter(self._session, self._settings.rank)
        self._pid = os.getpid()
        self._blocked_seconds = 0.0
        self._saves_skipped = 0
        self._found_no_slot = False
        self._saves_failed = 0
        self._said_failure = ""
        self._stopping = False
        self._may_save = False
        self._verdicts: tuple[int, Verdict] | None = None
        self._left_out: int | None = None
        self._began = False
        self._laps = 0
        """Number of times that the ranks rolled back."""
        self._has_saved = False
        """Whether a save was started since the folder was opened or rolled back. The same on every rank."""
        self._last_saved: Step | None = None
        self._outcomes = Outcomes()
        self._position = Position()
        self._lazy_loaders = LazyLoaderWatch()
        self._loop: TrainingLoop | None = None
        self._left: SaveHandle | None = None
        """The held save of a loop that was left early, until a later call keeps or drops it."""
        self._left_error: Exception | None = None
        self._was_interrupted = False
        """Ctrl-C ended a loop after it had saved its last step."""
        self.skipped: tuple[str, ...] = ()
        """One line for each entry that the last restore with strict=False skipped."""

    # ------------------------------------------------------------------ open and close

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if os.getpid() != self._pid:
            return  # a forked child must not close what belongs to its parent
        waited_out = self._was_interrupted and isinstance(error, KeyboardInterrupt)
        deliberate = error is None or waited_out or _is_clean_exit(error)
        if not deliberate:
            self._forget_left("an exception left the loop: the state may be half updated")
        self.close(wait=deliberate)

    def open(self) -> None:
        """Connect to the sidecar, or start the process that writes to `dir`.

        `with` calls this method. Further calls have no effect. Raises ConfigError after `close`.
        """
        if self._session.link is not None:
            self._require_own()
            return
        if self._restorer is not None:
            raise ConfigError("Checkpointer: it was closed; make another one")
        self._pid = os.getpid()
        self._place.open()
        self._ring.directory = self._place.slots_dir
        self._ring.spare = self._place.spare_slots_dir
        if isinstance(self._place, DirectoryPlace):
            self._ring.is_ours = self._place.holds_memory
        self._layouts.directory = self._place.layouts_dir
        self._dropped = weakref.finalize(
            self, _let_go, os.getpid(), self._session, self._place, self._signal
        )
        self._dropped.atexit = False  # the persister detects the end of the process itself
        self._store = connect_store(self._settings)
        self._agreement = self._new_agreement()
        self._restorer = Restorer(
            self._settings, self._place, self._session, self._ring, self._layouts, self._store
        )
        self._restorer.connect()
        if isinstance(self._place, DirectoryPlace) and self._settings.rank == 0:
            report_other_training(self._place)
        self._signal.install()

    def close(self, *, wait: bool = True) -> None:
        """Finish the saves and close the connection.

        wait: with True, wait until the sidecar has acknowledged each save (in a pod) or until each save is
          durable (in a folder). The wait is bounded. A save that fails, or is too late, counts in
          `saves_failed`. Use False when an exception is already being raised.

        With on_save_error="raise" and wait=True, raises SaveFailedError for such saves after everything is
        closed. It raises another error if the save of a loop that was just left early raised that error.
        With wait=False it raises nothing.

        Does nothing in a forked child, because the connection, the slots and the process that writes to
        the folder belong to the parent.
        """
        if os.getpid() != self._pid:
            return
        self._signal.restore()
        link = self._session.link
        if link is None:
            return
        if self._loop is not None:
            self._leave(self._loop)
        left_error, self._left_error = self._left_error, None
        self._hand_over_left()
        self._progress.send(self._round())
        copies_seconds = _COPIES_SECONDS if wait else _COPIES_AFTER_ERROR_SECONDS
        copied = self._saver.wait(copies_seconds)
        if wait:
            if isinstance(self._place, PodPlace):
                self._session.wait_acknowledged(_ACKNOWLEDGE_SECONDS)
            else:
                self._session.wait_settled(_SETTLE_SECONDS)
        failure = self._count_last(wait=wait)
        link.close()
        self._saver.close()
        if copied:
            self._ring.close()
        else:  # the device may still write into the slots, so they stay mapped until the process ends
            logger.warning(
                "a save is lost: its copies from the device were not done within %s s",
                copies_seconds,
            )
        self._place.close(wait=wait)
        self._session.link = None
        if self._dropped is not None:
            self._dropped.detach()
        raised: Exception | None = left_error or failure
        if raised is not None and wait and self._on_save_error == "raise":
            raise raised

    # ------------------------------------------------------------------ the loop

    def steps(
        self,
        total: int,
        state: MutableMapping[str, Any],
        *,
        before_rng: Callable[[], None] | None = None,
    ) -> Generator[int, None, None]:
        """Restore, then yield the index of each step that remains, up to total - 1.

        total: number of optimizer steps of the whole training.
        state: dict of names and objects to save and restore.
        before_rng: see `restore`.

        The loop's body does one optimizer step: after the body of index i, i + 1 steps are done. The
        loop saves at the interval, on request, at a stop and after the last step. It ends early, with
        `stopping` set, when the gang was asked to stop.

        `break` and `return` save the steps that are done; an exception in the body saves nothing. The
        first Ctrl-C saves after the current step and then raises KeyboardInterrupt. A second Ctrl-C
        raises immediately.

        A second call with the same models and tensors continues after the steps that are done, without
        a restore. If the script did and reported steps itself before the first restore, the loop restores
        first. If there is nothing to restore, it continues after those steps.

        Raises ConfigError when the script restores, or starts another loop, inside the body. Also raises
        what `restore` and `save` raise.
        """
        total = checked_step(total, "Checkpointer.steps(total=...)")
        require_state(state, "steps")
        self._opened()
        if self._loop is not None:
            self._leave(self._loop)  # its generator is still open
        self._hand_over_left()
        if self._stopping:
            return
        if self._position.continues(state):
            start = self._position.done
        else:
            # Saves that this process made before its first restore are not a history to roll back to.
            rolls_back = self._has_saved and self._position.is_known
            by_hand = self._position.done_by_hand(state)
            found = self._restore(state, None, before_rng, rolls_back=rolls_back)
            start = by_hand if found is None else found
            if found is None:
                self._say_nothing_found(start)
                if start > 0:
                    self._position.trained(start)
            if start >= total:
                self._say("step %d of %d was done before: nothing is left to do", start, total)
        try:
            self.allocate(state)
        except StateDictError as error:
            # The state's own code may succeed later. As with every failed save, training continues.
            logger.warning("memory for saves is taken at the first save, not now: %s", error)
        self._begin(start)
        loop = self._loop = TrainingLoop(state, self._session.interrupt)
        try:
            for index in range(start, total):
                loop.begins(index)
                yield index
                if self._loop is not loop and self._session.link is not None:
                    raise ConfigError(
                        f"Checkpointer.steps: after index {index} the state was restored or another "
                        "loop began, so that the next index would not be the number of steps done: leave "
                        "the loop with break, call restore, and call steps again"
                    )
                loop.ended()
                self._after_step(Step(index + 1), state, last=index + 1 == total)
                if self._stopping:
                    break
        finally:
            self._leave(loop)
        if loop.was_interrupted:
            self._was_interrupted = True
            if self._session.forget_interrupt() and self._store is None:
                self._stopping = False  # a notebook may continue in its next cell
            raise KeyboardInterrupt(f"saved after {self._position.done} steps")

    def report(self, **metrics: Any) -> None:
        """Report metrics of the current step, such as loss=..., for the job's status.

        Values are numbers or scalar tensors.
        """
        self._progress.measured(metrics)

    @property
    def stopping(self) -> bool:
        """Whether the gang was asked to stop, for example by a drain or a suspend.

        `steps` then saves and ends. In a loop of your own, `should_save` returns True for that step: save
        and then leave the loop.
        """
        return self._stopping

    @property
    def interval_steps(self) -> int:
        """Optimizer steps between saves, the same on every rank. 0 means that ranks save only on request."""
        if self._interval_steps is not None:
            return self._interval_steps
        policy = self._session.policy
        return 0 if policy is None else policy.interval_steps

    @property
    def blocked_seconds(self) -> float:
        """Seconds that saves have blocked the training thread so far."""
        return self._blocked_seconds

    @property
    def saves_skipped(self) -> int:
        """Number of saves that were left out because a rank had no free slot."""
        return self._saves_skipped

    @property
    def saves_failed(self) -> int:
        """Number of saves of this rank that failed, including those that were too late for `close`."""
        return self._saves_failed

    @property
    def last_committed_step(self) -> int | None:
        """The newest durable step of this Checkpointer, or None before the first one.

        It is updated by each save and by `close`.
        """
        return self._outcomes.watch.last_committed

    @property
    def saves_since_commit(self) -> int:
        """Number of saves since the last one became durable, failed and skipped saves included.

        A number that only rises means that no save becomes durable any more. An error is logged after
        5 such saves and 60 seconds.
        """
        return self._outcomes.watch.saves_since_commit

    def should_save(self, step: int) -> bool:
        """Return whether every rank must save after `step` optimizer steps.

        Call it once after each step, on every rank, in a loop that does not use `steps`. It also reports
        the step for the job's status and sets `stopping`. Raises ConfigError for an invalid step.
        """
        due = self._wants_save(checked_step(step, "Checkpointer.should_save(step)"))
        if not due:  # otherwise the save reports the step and the time that it blocked training
            self._progress.send(self._round())
        return due

    # ------------------------------------------------------------------ restore and save

    def restore(
        self,
        state: MutableMapping[str, Any],
        *,
        step: int | None = None,
        before_rng: Callable[[], None] | None = None,
    ) -> int | None:
        """Load the restore point of this round into `state` and return its number of optimizer steps.

        Returns None when there is nothing to restore.

        state: dict of names and objects. They are loaded in place.
        step: load the checkpoint of this step instead, from a folder.
        before_rng: function to call before the random number generators are loaded. Make iterators of
          data loaders in it, because they may draw random numbers.

        Every rank must call it. After a save of this process, or with `step`, the ranks roll back to the
        newest committed checkpoint or to `step`. A rollback works only with a folder. Saves that follow
        replace the later steps of the old history: a run that starts afterwards prefers them.

        Objects are loaded in this order: models, optimizers, schedulers, data loaders, all others, then
        `before_rng` is called, then random number generators.

        Raises StateMismatchError when the checkpoint does not fit, before anything is loaded. Raises
        CorruptionError when no copy can be read; the state may then hold parts of a bad copy if it came
        from a folder. Raises CapacityError when there is no room for the bytes, and ConfigError for a
        rollback in a pod or to a step that the folder does not hold.

        Blocks while the sidecar cannot be reached, so that a run never starts from the beginning only
        because its checkpoint was not available.
        """
        wanted = None if step is None else checked_step(step, "Checkpointer.restore(step)")
        require_state(state, "restore")
        rolls_back = self._has_saved or wanted is not None
        found = self._restore(state, wanted, before_rng, rolls_back=rolls_back)
        if found is None:
            self._say_nothing_found(0)
        return found

    def _restore(
        self,
        state: MutableMapping[str, Any],
        step: Step | None,
        before_rng: Callable[[], None] | None,
        *,
        rolls_back: bool,
    ) -> int | None:
        restorer = self._opened()
        self._forget_left("the state was restored")
        self._saver.prepare()
        if rolls_back:
            self._roll_back(step)
        restore_target = RestoreTarget(state, self._settings.rank, strict=self._strict)
        try:
            found = restorer.fetch(restore_target)
        except CorruptionError:
            # For a requested step every rank raises this, so that the next call rolls back again.
            self._has_saved = self._has_saved or step is not None
            raise
        if found is None:
            if before_rng is not None:
                before_rng()
            self._position.restored(0, state)
            return None
        saved = found.saved()
        if found.lies_over is not None and not restore_target.fits(saved):
            raise CorruptionError(
                f"checkpoint {found.lies_over} turned out bad when parts of it were in the state "
                f"already, and step {found.step} does not cover all of that: build the state anew and "
                "restore again"
            )
        self.skipped = load_state(
            state,
            saved,
            strict=self._strict,
            before_rng=before_rng,
            is_ours=found.is_ours,
        )
        self._position.restored(found.step, state)
        self._ring.touch_meanwhile()
        if before_rng is None and any(isinstance(part, RNG) for part in state.values()):
            self._lazy_loaders.restored()
        for line in self.skipped:
            logger.warning("not restored: %s", line)
        # Logged on every rank: each reads its own copy, and one slow tier delays all ranks.
        logger.info("rank %d restored step %d from %s", self._settings.rank, found.step, found.tier)
        self._say("restored step %d from %s", found.step, self._place_name(found))
        return found.step

    def allocate(self, state: Mapping[str, Any]) -> None:
        """Allocate the slots for this state and write to their memory pages once, before the first step.

        The first save is then as fast as later ones. `steps` calls this method. Raises CapacityError,
        UnsupportedStateError, StateDictError, and ConfigError where this run may not save.
        """
        require_state(state, "allocate")
        self._open_to_save()
        restore_target = RestoreTarget(state, self._settings.rank, strict=self._strict)
        self._saver.ensure_slots(restore_target.needed_bytes(), self._round())

    def save(self, step: int, state: Mapping[str, Any]) -> SaveHandle:
        """Copy the state and return a handle of the save. Training may then change the state.

        step: number of optimizer steps done. Every rank must save the same steps.
        state: dict of names and objects.

        Another process makes the copy durable. The handle has the level that the save has reached.

        Parameters and optimizer state on a GPU are copied while training continues. The next
        `optimizer.step()` waits for these copies. Call `wait_staged` before anything else changes them.

        With on_save_error="raise", raises SaveFailedError for this or an earlier save, or the error that
        prevented the copy: CapacityError, UnsupportedStateError, UnavailableError or DeviceError. Raises
        ConfigError for an invalid step, and where another run trains in the folder. During a save the
        first Ctrl-C takes effect at its end, a second one immediately.
        """
        checked = checked_step(step, "Checkpointer.save(step)")
        require_state(state, "save")
        if self._left is not None and self._left.step == checked:
            self._forget_left("the script saved this step itself")
        with interrupts_at_end():
            return self._save(checked, state, wait=self._when_busy == "wait")

    def wait_staged(self) -> None:
        """Make later work on the current CUDA stream wait for the copies of all saves so far.

        Call it before anything other than an optimizer's `step` changes parameters or optimizer state
        on a GPU. It does not block the host, and it does not wait for durability.
        """
        self._saver.wait_staged()

    # ------------------------------------------------------------------ inside

    def _save(self, step: Step, state: Mapping[str, Any], *, wait: bool) -> SaveHandle:
        self._open_to_save()
        self._hand_over_left()
        wait_seconds = _BUSY_WAIT_SECONDS if wait else 0.0
        return self._start_save(SaveHandle(step, self._round()), state, wait_seconds)

    def _start_save(
        self, handle: SaveHandle, state: Mapping[str, Any], wait_seconds: float
    ) -> SaveHandle:
        step = handle.step
        started = time.monotonic()
        self._has_saved = True
        self._position.trained(step)
        try:
            self._position.saved(state)
            self._raise_older()
            if isinstance(self._place, DirectoryPlace):
                self._place.keep_for_training()
            self._hand_over(handle, state, wait_seconds)
            self._last_saved = handle.step
        except SaveFailedError:
            raise
        # A state's own code may raise any exception, and a failed save must not end training.
        except Exception as error:  # noqa: BLE001 - see above
            handle.fail(Level.LOCAL, f"{type(error).__name__}: {error}")
            self._failed(error, step)
        finally:
            spent = time.monotonic() - started
            self._blocked_seconds += spent
            self._progress.blocked(spent)
            self._progress.finished(step)
            self._progress.send(self._round())
            self._watch_commits()
        self._foresee(step + 1)
        return handle

    def _say(self, message: str, *args: object) -> None:
        if self._settings.rank == 0:
            say(logger, message, *args)

    def _say_nothing_found(self, done: int) -> None:
        start = f"going on after step {done}" if done else "starting from the beginning"
        self._say("nothing to restore from %s: %s", self._place_name(), start)

    def _place_name(self, found: Fetched | None = None) -> str:
        """Return the location of checkpoints for log messages.

        For a checkpoint restored from a folder, rank 0 adds the number of older ones.
        """
        if not isinstance(self._place, DirectoryPlace):
            return "the job's checkpoints" if found is None else f"the {found.tier} tier"
        if found is None or self._settings.rank != 0:
            return str(self._dir)
        try:
            older = older_than(self._place.root, found.step)
        except OSError:  # the folder was removed meanwhile; the state was already read from it
            return str(self._dir)
        return f"{self._dir} ({older} older {'exists' if older == 1 else 'exist'})"

    def _require_own(self) -> None:
        """Raise ConfigError in a forked child."""
        if os.getpid() != self._pid:
            raise ConfigError(
                f"Checkpointer: process {self._pid} opened it and this is its forked child "
                f"{os.getpid()}: save and restore in the process that trains"
            )

    def _roll_back(self, step: Step | None) -> None:
        """Make `step`, or the newest committed step, the restore point. Every rank must call it.

        The next restore request is then answered with that checkpoint.
        """
        restorer = self._opened()
        if isinstance(self._place, DirectoryPlace):
            self._session.wait_settled(_SETTLE_SECONDS)
        restorer.roll_back(step)
        self._has_saved = self._began = False
        self._verdicts = self._left_out = self._last_saved = None
        self._laps += 1
        self._agreement = self._new_agreement()

    def _new_agreement(self) -> StepAgreement:
        return StepAgreement(self._session, self._store, self._settings.rank, self._laps)

    def _leave(self, loop: TrainingLoop) -> None:
        """End a loop. If its body was left early, save the steps done and hold that save back."""
        if self._loop is not loop:
            return
        self._loop = None
        done = loop.steps_done()
        loop.close()
        if done is None or self._session.link is None:
            return
        self._position.trained(done)
        if done == 0 or done == self._last_saved:
            return
        # It is not known here whether an exception left the body, or whether the script will roll back.
        # The bytes of this moment are held until a later call shows which is the case.
        self._left = SaveHandle(Step(done), self._round())
        self._session.hold_back(self._left)
        try:
            self._open_to_save()
            self._start_save(self._left, loop.state, _LEAVE_WAIT_SECONDS)
        except Exception as error:  # noqa: BLE001 - Python would only print it; `close` raises it
            self._left_error = error

    def _hand_over_left(self) -> None:
        """Hand over the held save of a loop that was left early. Raise the error of that save, if any."""
        left, self._left = self._left, None
        error, self._left_error = self._left_error, None
        if left is not None:
            self._session.hand_over_held()
        if error is not None:
            raise error

    def _forget_left(self, why: str) -> None:
        if self._loop is not None:
            self._loop.close()
            self._loop = None
        if self._left is not None:
            self._left = self._left_error = None
            self._last_saved = None
            self._session.drop_held(f"dropped: {why}")

    def _opened(self) -> Restorer:
        self.open()
        if self._restorer is None:
            raise ConfigError("Checkpointer: it could not be opened")
        return self._restorer

    def _open_to_save(self) -> None:
        """Open the connection and acquire the folder's training lock, once.

        Raises ConfigError where this run may not save into the folder.
        """
        self._opened()
        if isinstance(self._place, DirectoryPlace) and not self._may_save:
            take_for_training(self._place, self._store, self._settings.rank)
            self._may_save = True

    def _round(self) -> RestartRound:
        return RestartRound(0) if self._session.round is None else self._session.round

    def _is_due(self, step: int) -> bool:
        interval = self.interval_steps
        return interval > 0 and step % interval == 0

    def _foresee(self, step: int) -> None:
        """Before `step` starts, publish to the gang if this rank would have no slot for its save."""
        if self._agreement is None or self._when_busy == "wait" or not self._is_due(step):
            return
        if self._ring.slots and not self._ring.has_free() and not self._may_get_free():
            self._agreement.leave_out(step)

    def _may_get_free(self) -> bool:
        """Return whether the sidecar is expected to free a slot before the next step ends.

        A sidecar that keeps every step in memory frees the older slot as soon as the step that was just
        handed over is complete. If the previous save found no slot, this expectation was wrong.
        """
        policy = self._session.policy
        keeps = policy is not None and policy.memory_level_enabled
        return keeps and isinstance(self._place, PodPlace) and not self._found_no_slot

    def _is_left_out(self, step: int) -> bool:
        if self._agreement is None or self._when_busy == "wait":
            return False
        if not self._agreement.is_left_out(step):
            return False
        if self._left_out != step:
            self._left_out = step
            self._saves_skipped += 1
            self._progress.skipped()
            self._watch_commits()
            logger.info("save of step %d left out: a rank's slots are still being written", step)
        return True

    def _begin(self, step: int) -> None:
        self._began = True
        if self._agreement is not None:
            self._agreement.begin(step)

    def _verdict(self, step: Step) -> Verdict:
        if self._verdicts is None or self._verdicts[0] != step:
            verdict = Verdict() if self._agreement is None else self._agreement.after_step(step)
            self._verdicts = (step, verdict)
        return self._verdicts[1]

    def _wants_save(self, step: Step) -> bool:
        self._opened()
        self._hand_over_left()
        self._position.trained(step)
        if self._settings.rank == 0:
            self._lazy_loaders.step_done()
        if not self._began:
            self._begin(step - 1)
        verdict = self._verdict(step)
        if verdict.stop:
            self._stopping = True
        asked = verdict.save or verdict.stop
        due = self._is_due(step)
        if due and not asked and self._is_left_out(step):
            due = False
        self._progress.finished(step)
        if not (due or asked):
            self._foresee(step + 1)
        return due or asked

    def _after_step(self, step: Step, state: Mapping[str, Any], *, last: bool) -> None:
        due = self._wants_save(step)
        verdict = self._verdict(step)
        if due or last:
            # A requested save and the last save wait for a free slot instead of being skipped.
            wanted = last or verdict.save or verdict.stop or self._when_busy == "wait"
            self._save(step, state, wait=wanted)
        else:
            self._progress.send(self._round())

    def _hand_over(self, handle: SaveHandle, state: Mapping[str, Any], wait_seconds: float) -> None:
        if self._saver.save(handle, state, wait_seconds):
            self._outcomes.add(handle)
            self._found_no_slot = False
            return
        self._found_no_slot = True
        if wait_seconds:
            raise UnavailableError(
                f"save of step {handle.step}: no slot became free within {wait_seconds:g} s: "
                f"{self._place.where_to_look}"
            )
        self._saves_skipped += 1
        self._progress.skipped()
        handle.fail(Level.LOCAL, "skipped: every slot is still being written")
        logger.info("save of step %d skipped: every slot is still being written", handle.step)

    def _raise_older(self) -> None:
        """Count the saves that failed after they were handed over.

        With on_save_error="raise", raises SaveFailedError for the first of them.
        """
        while (handle := self._outcomes.next_failed(time.monotonic())) is not None:
            self._failed(
                SaveFailedError(f"save of step {handle.step}: {handle.failure}"), handle.step
            )

    def _count_last(self, *, wait: bool) -> SaveFailedError | None:
        """Count and log the saves that have failed or are unfinished before the connection ends.

        Returns the error that describes them, or None if there are none. Without `wait`, unfinished saves
        of a folder do not count: the persister continues to write them.
        """
        failed: list[tuple[Step, str]] = []
        while (handle := self._outcomes.next_failed(time.monotonic())) is not None:
            failed.append((handle.step, handle.failure or "unknown"))
        in_pod = isinstance(self._place, PodPlace)
        for handle in self._outcomes.take_unfinished(
            lambda handle: self._session.was_taken(handle) if in_pod else not wait
        ):
            failed.append((handle.step, f"not durable yet: {self._place.where_to_look}"))
        if not failed:
            return None
        self._saves_failed += len(failed)
        step, why = failed[-1]
        error = SaveFailedError(
            f"{len(failed)} of the last saves did not become durable, the newest is step {step}: {why}. "
            f"The newest durable step of this run is {self.last_committed_step}"
        )
        logger.warning("%s", error)
        return error

    def _watch_commits(self) -> None:
        watch, now = self._outcomes.watch, time.monotonic()
        watch.saved(now)
        seconds = watch.stalled_seconds(now)
        if seconds is not None:
            logger.error(
                "no save has become durable for %.0f s and %d saves; the newest durable step of this run "
                "is %s, %d saves failed, %d were skipped: %s",
                seconds,
                watch.saves_since_commit,
                watch.last_committed,
                self._saves_failed,
                self._saves_skipped,
                self._place.where_to_look,
            )

    def _failed(self, error: Exception, step: Step) -> None:
        self._saves_failed += 1
        if self._on_save_error == "raise":
            if isinstance(error, HoldfastError | OSError):
                raise error
            raise SaveFailedError(
                f"save of step {step}: {type(error).__name__}: {error}"
            ) from error
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, CapacityError) or reason != self._said_failure:
            self._said_failure = reason
            logger.warning("save of step %d failed, training goes on: %s", step, reason)


def _is_clean_exit(error: BaseException) -> bool:
    """Return whether `error` is a SystemExit that reports success."""
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _let_go(pid: int, session: Session, place: Place, stop: HandledSignal) -> None:
    """Release what an unreferenced Checkpointer holds, for example when a notebook's cell runs again.

    Otherwise its memory and its persister would stay until this process ends.
    """
    if os.getpid() != pid:
        return  # the resources belong to the parent
    stop.restore()
    session.wait_settled(_LET_GO_SECONDS)
    link, session.link = session.link, None
    if link is not None:
        link.close()
    place.close(wait=False)
