"""`Checkpointer`, the interface between a training loop and Holdfast.

This module defines the order of operations in the training thread: restore, allocate, train, save. The
parts are in `checkpoint`: `decisions` says which steps are saved, `saves` makes the saves, `restoring`
restores, and `status` counts and reports. `places` knows where checkpoints go.
A failed save is logged and counted. It raises in the loop only with on_save_error="raise".
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Generator, Mapping, MutableMapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

from holdfast.base.handle import RestorePoint, SaveHandle
from holdfast.base.options import Folder, IntervalRule, OnSaveError, Options, WhenBusy
from holdfast.base.settings import RankSettings
from holdfast.checkpoint.decisions import SaveDecision, interval_of
from holdfast.checkpoint.opened import Opened
from holdfast.checkpoint.restoring import Fetched
from holdfast.checkpoint.status import ProgressReporter, SaveStatus
from holdfast.connection.session import Session
from holdfast.gang.agreement import StepAgreement
from holdfast.places.opening import place_for
from holdfast.places.place import Place
from holdfast.reading.checkpoint import SavedCheckpoint
from holdfast.reading.opening import SavedStep
from holdfast.state.loading.named_tensors import NamedTensors
from holdfast.state.loading.restore_target import RestoreTarget
from holdfast.state.rng import RNG, LaterRng, Load, WhenRng
from holdfast.training.inexact_data import LazyLoaderWatch
from holdfast.training.loop import (
    HandledSignal,
    Position,
    TrainingLoop,
    checked_step,
    interrupts_at_end,
    require_state,
    stop_signal,
)
from holdfast_core.errors import ConfigError, StateDictError
from holdfast_core.ids import Step
from holdfast_core.messages.schema import Interval

logger = logging.getLogger(__name__)

_RELEASE_SECONDS = 5.0


class Checkpointer:
    """Saves and restores the state of one rank. Use it as a context manager, in the main thread.

    dir: folder for checkpoints: its path, or a `Folder` that also says what to keep. Leave it out in a
      worker pod, where the sidecar writes them.
    interval_steps: optimizer steps between saves, 100 by default; 0 saves only on request. In a pod the
      job's spec sets the interval, and the four arguments of the interval have no effect.
    interval_seconds: seconds between saves, instead of `interval_steps`. Rank 0 measures the steps, and all
      ranks save after the same step.
    interval: "auto" computes the seconds between saves from the measured cost of a save and `mtbf_seconds`,
      instead of `interval_steps`.
    mtbf_seconds: the mean time between failures that you expect, for interval="auto"; 6 hours by default.
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
        dir: str | os.PathLike[str] | Folder | None = None,
        *,
        interval_steps: int | None = None,
        interval_seconds: float | None = None,
        interval: IntervalRule | None = None,
        mtbf_seconds: float | None = None,
        strict: bool = True,
        on_save_error: OnSaveError = "warn",
        when_busy: WhenBusy = "skip",
    ) -> None:
        self._options = Options(
            dir if dir is None or isinstance(dir, Folder) else Folder(dir),
            interval_steps,
            strict,
            on_save_error,
            when_busy,
            interval_seconds,
            interval,
            mtbf_seconds,
        ).checked()
        self._settings = RankSettings.from_env()
        place = self._place = place_for(self._options, self._settings)
        traits, rank = place.traits, self._settings.rank
        self._session = Session(
            traits.job_uid,
            rank,
            traits.round,
            traits.peer,
            knows_what_is_durable=traits.knows_what_is_durable,
        )
        self._status = SaveStatus(
            ProgressReporter(self._session, time.monotonic),
            lambda: place.where_to_look,  # not `self`: see `_release_resources`
            raises=self._options.raises,
        )
        self._signal = stop_signal(self._session.requests.request_stop)
        self._pid = os.getpid()
        self._opened: Opened | None = None
        self._is_open = False
        self._dropped: weakref.finalize[..., Checkpointer] | None = None
        self._position = Position()
        self._lazy_loaders = LazyLoaderWatch()
        self._later_rng = LaterRng()
        self._restored_step: int | None = None
        self._loop: TrainingLoop | None = None
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
            self._status.progress.loop_ended(is_error=True)
            self._forget_left("an exception left the loop: the state may be partly updated")
        self.close(wait=deliberate)

    def open(self) -> None:
        """Connect to the sidecar, or start the process that writes to `dir`.

        `with` calls this method. Further calls have no effect. Raises ConfigError after `close`.
        """
        self._parts()

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
        if self._opened is None or not self._is_open:
            return
        if self._loop is not None:
            self._leave(self._loop)
        if wait:
            self._status.progress.loop_ended()
        raised = self._opened.close(wait=wait)
        self._is_open = False
        if self._dropped is not None:
            self._dropped.detach()
        if raised is not None and wait and self._options.raises:
            raise raised

    # ------------------------------------------------------------------ the loop

    def steps(
        self,
        total: int,
        state: MutableMapping[str, Any],
        *,
        before_rng: Callable[[], None] | None = None,
        rng: WhenRng = "now",
    ) -> Generator[int, None, None]:
        """Restore, then yield the index of each step that remains, up to total - 1.

        total: number of optimizer steps of the whole training.
        state: dict of names and objects to save and restore.
        before_rng: see `restore`.
        rng: see `restore`. With "later", call `restore_rng` in the body of the first index.

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
        parts = self._parts()
        if self._loop is not None:
            self._leave(self._loop)  # its generator is still open
        parts.saves.hand_over_left()
        if self.stopping:
            return
        defer = None
        # A loop that was left before `restore_rng` still has generators to load. They stay, if this loop
        # continues it without a restore.
        if not (self._later_rng.is_expected and self._position.continues(state)):
            defer = self._later_rng.begin(state, rng, "Checkpointer.steps")
        start = self._first_index(parts, state, before_rng, defer)
        if start >= total:
            parts.restorer.notify_user(
                "all steps were done before (%d of %d): there is nothing left to do", start, total
            )
        try:
            self.allocate(state)
        except StateDictError as error:
            # The state's own code may succeed later. As with every failed save, training continues.
            logger.warning(
                "the memory for saves is allocated at the first save instead of now: %s", error
            )
        parts.decisions.begin(start)
        self._watch_work(state)
        loop = self._loop = TrainingLoop(state, self._session.requests.interrupt)
        try:
            for index in range(start, total):
                loop.begins(index)
                yield index
                if self._loop is not loop and self._is_open:
                    raise ConfigError(
                        f"Checkpointer.steps: after index {index} the state was restored or another "
                        "loop began, so that the next index would not be the number of steps done: leave "
                        "the loop with break, call restore, and call steps again"
                    )
                loop.ended()
                self._after_step(Step(index + 1), state, is_last=index + 1 == total)
                if self.stopping:
                    break
        finally:
            self._leave(loop)
            if os.getpid() == self._pid:
                self._status.progress.loop_ended()
        if loop.was_interrupted:
            self._was_interrupted = True
            if self._session.requests.forget_interrupt() and self._settings.world_size == 1:
                parts.decisions.stopping = False  # a notebook may continue in its next cell
            raise KeyboardInterrupt(f"saved after {self._position.done} steps")

    def report(self, **metrics: Any) -> None:
        """Report metrics of the current step, such as loss=..., for the job's status.

        Values are numbers or scalar tensors. Each checkpoint keeps the newest finite value of each metric
        that rank 0 has reported: `holdfast.open(...).at(step).metrics()` returns them.
        """
        self._status.progress.measured(metrics)

    def paused(self, why: str) -> AbstractContextManager[None]:
        """Announce that this rank finishes no steps while the context is open, such as in an evaluation.

        Otherwise a job may count as hung: see `spec.failurePolicy.hangs`. It suffices that one rank
        announces it. Use it in the main thread. Saves, restores and the end of `steps` announce themselves.

        why: what the rank does, at most 512 characters.
        """
        return self._status.progress.paused(why)

    @property
    def stopping(self) -> bool:
        """Whether the gang was asked to stop, for example by a drain or a suspend.

        `steps` then saves and ends. In a loop of your own, `should_save` returns True for that step: save
        and then leave the loop.
        """
        return self._opened is not None and self._opened.decisions.stopping

    @property
    def interval_steps(self) -> int:
        """Optimizer steps between saves, the same on every rank. 0 means that ranks save only on request.

        With `interval_seconds` or interval="auto" it is 0 until some steps were measured.
        """
        return self.interval.steps

    @property
    def interval(self) -> Interval:
        """The interval between saves, and the measured durations that it follows from."""
        if self._opened is None:
            return Interval(interval_of(self._place.traits, self._session))
        return self._opened.decisions.interval

    @property
    def blocked_seconds(self) -> float:
        """Seconds that saves have blocked the training thread so far."""
        return self._status.blocked_seconds

    @property
    def saves_skipped(self) -> int:
        """Number of saves that were left out because a rank had no free slot."""
        return self._status.skipped

    @property
    def saves_failed(self) -> int:
        """Number of saves of this rank that failed, including those that were too late for `close`.

        A save that is in the folder counts too when another run took the store before it was uploaded.
        """
        return self._status.failed

    @property
    def restored_step(self) -> int | None:
        """The step that the last restore has loaded, or None if there was nothing to restore.

        Pass it to an experiment tracker, so that it drops what was logged after that step.
        """
        return self._restored_step

    @property
    def rolled_back_from(self) -> int | None:
        """The step that the gang had reached when a person rolled it back below that step, or None.

        It stays the same after restarts, until the training starts from this step or a later one. With it a
        script can skip the data that spoiled the training. The step is as old as the operator's last look at
        the gang, some seconds at most.
        """
        return self._settings.rolled_back_from

    @property
    def run_id(self) -> str:
        """Identity of the training for experiment trackers: the same on all ranks and after each restart.

        In a pod it is the UID of the job. A folder keeps it in the file `run-id`, which its first run
        creates. Raises ConfigError where the folder has none and cannot be written, or where the file is
        damaged.
        """
        if self._opened is None:
            self.open()
        return self._place.run_id

    @property
    def last_committed_step(self) -> int | None:
        """The newest durable step of this Checkpointer, or None before the first one.

        It is updated by each save and by `close`.
        """
        return self._status.last_committed

    @property
    def saves_since_commit(self) -> int:
        """Number of saves since the last one became durable, failed and skipped saves included.

        A number that only rises means that no save becomes durable any more. An error is logged after
        5 such saves and 60 seconds.
        """
        return self._status.saves_since_commit

    def should_save(self, step: int) -> bool:
        """Return whether every rank must save after `step` optimizer steps.

        Call it once after each step, on every rank, in a loop that does not use `steps`. It also reports
        the step for the job's status and sets `stopping`. Raises ConfigError for an invalid step.
        """
        decision = self._decide(checked_step(step, "Checkpointer.should_save(step)"))
        if (
            not decision.saves
        ):  # otherwise the save reports the step and the time that it blocked training
            self._status.progress.send()
        return decision.saves

    # ------------------------------------------------------------------ restore and save

    def peek(self) -> RestorePoint | None:
        """Return what the restore point of this round holds, or None if there is nothing to restore.

        It has the step, the names, dtypes and shapes of the tensors, and all values that are no tensors.
        It reads no bytes of tensors, and it is the same on every rank: values that differ between ranks,
        such as positions in the data, are those of rank 0.

        Every rank must call it. A `restore` after it loads the same checkpoint, even if another process
        commits a newer one meanwhile. If a tensor of that checkpoint turns out to be damaged, all ranks
        restore an older one, and the step that `restore` returns differs. After a save of this process,
        the ranks roll back first, as in `restore`.

        Raises CorruptionError when no copy of it can be read, CapacityError when there is no room for the
        values, and ConfigError for a rollback in a pod.
        """
        parts = self._parts()
        if parts.saves.have_begun:
            self._forget_left("the state is about to be restored")
            parts.roll_back(None)
        return parts.peeker.peek()

    def restore(
        self,
        state: MutableMapping[str, Any],
        *,
        step: int | None = None,
        before_rng: Callable[[], None] | None = None,
        rng: WhenRng = "now",
    ) -> int | None:
        """Load the restore point of this round into `state` and return its number of optimizer steps.

        Returns None when there is nothing to restore.

        state: dict of names and objects. They are loaded in place.
        step: load the checkpoint of this step instead, from a folder.
        before_rng: function to call before the random number generators are loaded. Make iterators of
          data loaders in it, because they may draw random numbers.
        rng: with "later", `restore_rng` loads the random number generators, for a loop that draws numbers
          after the restore and before its first step.

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
        parts = self._parts()
        rolls_back = parts.saves.have_begun or wanted is not None
        defer = self._later_rng.begin(state, rng, "Checkpointer.restore")
        found = self._restore(parts, state, wanted, before_rng, defer, rolls_back=rolls_back)
        if found is None:
            self._notify_nothing_found(parts, 0)
        self._watch_work(state)
        return found

    def restore_tensors(
        self, tensors: Mapping[str, Any], *, step: int | None = None
    ) -> RestorePoint | None:
        """Load only these tensors of the restore point, each by its name.

        Returns the restore point as `peek` does, but with the objects of this rank, and with the arrays
        and tensors that belong to this rank only. Returns None when there is nothing to restore.

        tensors: names of tensors as a save has given them, such as "model.0.weight", with the tensors to
          load into. A DTensor gets its part of the saved tensor. Values are cast to the tensor's dtype.
        step: see `restore`.

        Every rank must call it, and ranks may name different tensors. No other tensors are read. It rolls
        back as `restore` does.

        Raises StateMismatchError for a tensor that is missing or has another shape, before anything is
        loaded. Also raises what `restore` raises.
        """
        wanted = None if step is None else checked_step(step, "Checkpointer.restore_tensors(step)")
        parts = self._parts()
        target = parts.restorer.named(tensors)
        rolls_back = parts.saves.have_begun or wanted is not None
        with self.paused("a restore"):
            found = self._fetch(parts, target, wanted, rolls_back=rolls_back)
            if found is None:
                return None
            self._position.restored(found.step, tensors)
            self._restored_step = found.step
            return parts.restorer.load_tensors(found, target)

    def restore_rng(self) -> None:
        """Load the random number generators that a `restore` with rng="later" has left.

        Call it once after each such `restore` (or `steps`), on every rank, when all that draws random
        numbers before the first step has drawn them: for example after the first batch was fetched. Call
        it also if there was nothing to restore; it then has no effect.

        Without this call, `should_save`, `save` and the loop over `steps` raise ConfigError. It raises
        ConfigError itself if no call is expected, because a second one would repeat random numbers, and
        StateMismatchError when the generators do not fit.
        """
        skipped = self._later_rng.load()
        for line in skipped:
            logger.warning("not restored: %s", line)
        self.skipped += skipped

    def allocate(self, state: Mapping[str, Any]) -> None:
        """Allocate the slots for this state and write to their memory pages once, before the first step.

        The first save is then as fast as later ones. `steps` calls this method. Raises CapacityError,
        UnsupportedStateError, StateDictError, and ConfigError where this run may not save.
        """
        require_state(state, "allocate")
        parts = self._parts()
        self._place.take_for_training()
        parts.saver.allocate(state, self._session.current_round)

    def save(self, step: int, state: Mapping[str, Any], *, is_last: bool = False) -> SaveHandle:
        """Copy the state and return a handle of the save. Training may then change the state.

        step: number of optimizer steps done. Every rank must save the same steps.
        state: dict of names and objects.
        is_last: whether the training ends after this step. Such a save, and one that was requested or
          belongs to a stop, waits up to 10 minutes for a free slot, whatever `when_busy` says.

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
        self._later_rng.expect_loaded(f"step {checked} is saved")
        if self._opened is not None and self._opened.saves.left_step == checked:
            self._forget_left("the script itself saved this step")
        parts = self._parts()
        is_important = is_last or parts.decisions.was_requested(checked)
        with interrupts_at_end():
            return parts.saves.save(checked, state, is_important=is_important)

    def wait_staged(self) -> None:
        """Make later work on the current CUDA stream wait for the copies of all saves so far.

        Call it before anything other than an optimizer's `step` changes parameters or optimizer state
        on a GPU. It does not block the host, and it does not wait for durability.
        """
        if self._opened is not None:
            self._opened.saver.wait_staged()

    # ------------------------------------------------------------------ the folder's checkpoints

    def list(self) -> tuple[SavedStep, ...]:
        """Return the committed checkpoints of the folder, oldest first. A run that starts restores the last.

        Any rank may call it at any time. In a worker pod it raises ConfigError.
        """
        return self._place.list()

    def inspect(self, step: int | None = None) -> SavedCheckpoint:
        """Open the checkpoint of a step, or the newest one, to look at what it holds.

        Any rank may call it at any time. Close the result: it is not pruned before. Raises NotFoundError
        where there is no such checkpoint, and ConfigError in a worker pod.
        """
        wanted = None if step is None else checked_step(step, "Checkpointer.inspect(step)")
        return self._place.checkpoints().at(wanted)

    def delete(self, step: int, *, even_last: bool = False) -> bool:
        """Delete the checkpoint of a step from the folder. Return False if there is none.

        step: number of optimizer steps.
        even_last: delete it also if it is the newest one, which the next run would restore.

        One rank calls it, at any time. A copy in the store (`Folder.store`) stays.

        If the process ends during the call, the checkpoint exists completely or not at all, and the next
        save removes what is left of it.

        Raises ConfigError for the newest checkpoint, except with `even_last` while no training runs in the
        folder; for the one that a running training was restored from; for one that a process reads; and in
        a worker pod.
        """
        wanted = checked_step(step, "Checkpointer.delete(step)")
        return self._place.delete(wanted, even_last=even_last)

    # ------------------------------------------------------------------ inside

    def _parts(self) -> Opened:
        """Return the parts of this rank, and open them if they are not open.

        Raises ConfigError after `close`, and in a forked child.
        """
        if self._opened is not None:
            self._require_usable()
            return self._opened
        self._pid = os.getpid()
        self._opened = Opened(
            self._options,
            self._settings,
            self._place,
            self._session,
            self._status,
            self._position,
        )
        self._is_open = True
        self._dropped = weakref.finalize(
            self,
            _release_resources,
            os.getpid(),
            self._session,
            self._place,
            self._signal,
            self._opened.agreement,
        )
        self._dropped.atexit = False  # the persister detects the end of the process itself
        try:
            self._place.start(self._session)
        except Exception:
            # Without a round no request can succeed, and a restore would wait for a reply forever.
            self.close(wait=False)
            raise
        self._signal.install()
        return self._opened

    def _require_usable(self) -> None:
        if not self._is_open:
            raise ConfigError("Checkpointer: it was closed; create another one")
        if os.getpid() != self._pid:
            raise ConfigError(
                f"Checkpointer: process {self._pid} opened it and this is its forked child "
                f"{os.getpid()}: save and restore in the process that trains"
            )

    def _first_index(
        self,
        parts: Opened,
        state: MutableMapping[str, Any],
        before_rng: Callable[[], None] | None,
        defer_rng: Callable[[Load], None] | None,
    ) -> int:
        """Return the index at which a loop over `state` begins. Restore, unless `state` was trained here."""
        if self._position.continues(state):
            return self._position.done
        # Saves that this process made before its first restore are not a history to roll back to.
        rolls_back = parts.saves.have_begun and self._position.is_known
        by_hand = self._position.done_by_hand(state)
        found = self._restore(parts, state, None, before_rng, defer_rng, rolls_back=rolls_back)
        if found is not None:
            return found
        self._notify_nothing_found(parts, by_hand)
        if by_hand > 0:
            self._position.trained(by_hand)
        return by_hand

    def _restore(
        self,
        parts: Opened,
        state: MutableMapping[str, Any],
        step: Step | None,
        before_rng: Callable[[], None] | None,
        defer_rng: Callable[[Load], None] | None,
        *,
        rolls_back: bool,
    ) -> int | None:
        with self.paused("a restore"):
            target = parts.restore_target(state)
            found = self._fetch(parts, target, step, rolls_back=rolls_back)
            if found is None:
                if before_rng is not None:
                    before_rng()
                self._position.restored(0, state)
                self._restored_step = None
                return None
            self.skipped = parts.restorer.load(found, state, target, before_rng, defer_rng)
            self._position.restored(found.step, state)
            self._restored_step = found.step
            if (
                before_rng is None
                and defer_rng is None
                and any(isinstance(part, RNG) for part in state.values())
            ):
                self._lazy_loaders.restored()
            return found.step

    def _fetch(
        self,
        parts: Opened,
        target: RestoreTarget | NamedTensors,
        step: Step | None,
        *,
        rolls_back: bool,
    ) -> Fetched | None:
        self._forget_left("the state was restored")
        parts.saver.prepare()
        if rolls_back:
            parts.roll_back(step)
        return parts.restorer.fetch(target)

    def _watch_work(self, state: Mapping[str, Any]) -> None:
        """Measure the models of `state`, if the job looks for stragglers."""
        policy = self._session.policy
        if policy is not None and policy.straggler_factor > 0:
            self._status.progress.measure_work(state)

    def _notify_nothing_found(self, parts: Opened, done: int) -> None:
        start = f"continuing after step {done}" if done else "starting at step 0"
        parts.restorer.notify_user("nothing to restore from %s: %s", self._place.location, start)

    def _decide(self, step: Step) -> SaveDecision:
        self._later_rng.expect_loaded(f"step {step} is done")
        parts = self._parts()
        parts.saves.hand_over_left()
        self._position.trained(step)
        if self._settings.rank == 0:
            self._lazy_loaders.step_done()
        decision = parts.decisions.after_step(step)
        self._status.progress.finished(step)
        return decision

    def _after_step(self, step: Step, state: Mapping[str, Any], *, is_last: bool) -> None:
        decision = self._decide(step)
        if decision.saves or is_last:
            # A requested save and the last save wait for a free slot instead of being skipped.
            is_important = is_last or decision.is_requested
            self._parts().saves.save(step, state, is_important=is_important)
        else:
            self._status.progress.send()

    def _leave(self, loop: TrainingLoop) -> None:
        """End a loop. If its body was left early, save the steps done and hold that save back."""
        if self._loop is not loop:
            return
        self._loop = None
        done = loop.steps_done()
        loop.close()
        if done is None or self._opened is None or not self._is_open:
            return
        self._position.trained(done)
        if self._later_rng.is_expected:
            logger.warning(
                "step %d is not saved: the loop was left before restore_rng() was called", done
            )
            return
        if done > 0 and done != self._opened.saves.last:
            self._opened.saves.save_left(Step(done), loop.state)

    def _forget_left(self, why: str) -> None:
        if self._loop is not None:
            self._loop.close()
            self._loop = None
        if self._opened is not None:
            self._opened.saves.drop_left(why)


def _is_clean_exit(error: BaseException) -> bool:
    """Return whether `error` is a SystemExit that reports success."""
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _release_resources(
    pid: int, session: Session, place: Place, stop: HandledSignal, agreement: StepAgreement
) -> None:
    """Release what an unreferenced Checkpointer holds, for example when a notebook's cell runs again.

    Otherwise its memory and its persister would stay until this process ends.
    """
    if os.getpid() != pid:
        return  # the resources belong to the parent
    stop.restore()
    agreement.close()
    session.wait_settled(_RELEASE_SECONDS)
    session.close()
    place.close(wait=False)
