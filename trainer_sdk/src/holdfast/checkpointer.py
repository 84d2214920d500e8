"""`Checkpointer`: what a training loop sees of Holdfast.

Owns the order of things in the training thread: restore, allocate, train, save; leaves bytes to
`staging`, words to `session`, and state to `state`. A failed save is a warning and a number, never an
exception in the loop, unless the caller asked for it.
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
from holdfast.state.rng import RNG
from holdfast.state.wish import Wish
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
"""For a slot when a loop is left: it may be left by an exception, which should not be held up for long."""
_ACKNOWLEDGE_SECONDS = 10.0
_SETTLE_SECONDS = 120.0
_COPIES_SECONDS = 120.0
"""How long the end waits for a device's copies: a device may hang in a collective for ever."""
_COPIES_AFTER_ERROR_SECONDS = 10.0
_LET_GO_SECONDS = 5.0


class Checkpointer:
    """Saves and restores the state of one rank. Use it as a context manager, in the main thread.

    dir: folder for checkpoints where there is no sidecar; in a worker pod leave it out.
    interval_steps: optimizer steps between saves (in a pod the job's spec says it). 0: only on request.
    keep_last: committed checkpoints that stay in `dir`, at least 1.
    slots_dir: where the copies of a state lie until they are written to `dir`, instead of /dev/shm: a
      directory of this machine that has `slots` times the room of the state. A pod has its own.
    strict: a checkpoint must hold exactly what the state asks for; False: what does not fit is skipped
      and listed in `skipped`.
    on_save_error: "warn" logs and counts; "raise" raises at this or the next save.
    when_busy: all slots of a rank are still being written when a step begins: every rank leaves its
      save out ("skip"), or waits for a slot ("wait"). The same on every rank.

    Raises ConfigError for other values, and when neither a pod nor `dir` says where checkpoints go.
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
        """How often the ranks rolled back."""
        self._has_saved = False
        """Since the folder was opened, or rolled back: the same on every rank."""
        self._last_saved: Step | None = None
        self._outcomes = Outcomes()
        self._position = Position()
        self._lazy_loaders = LazyLoaderWatch()
        self._loop: TrainingLoop | None = None
        self._left: SaveHandle | None = None
        """The save of a loop that was left by `break`, until it is known what comes next."""
        self._left_error: Exception | None = None
        self._was_interrupted = False
        """Ctrl-C ended a loop after a step that is saved."""
        self.skipped: tuple[str, ...] = ()
        """What the last restore with strict=False left alone, one line each."""

    # ------------------------------------------------------------------ life

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
            return  # a forked child leaves the block of its parent
        waited_out = self._was_interrupted and isinstance(error, KeyboardInterrupt)
        deliberate = error is None or waited_out or _is_clean_exit(error)
        if not deliberate:
            self._forget_left("an exception left the loop: the state may be half updated")
        self.close(wait=deliberate)

    def open(self) -> None:
        """Connect. Called by `with`; once. Raises ConfigError after `close`."""
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
        self._dropped.atexit = False  # the persister sees the end of the process by itself
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
        """End the connection. `wait`: what was saved is safe in the sidecar's hands (in a pod) or
        durable (in a directory) when this returns, or has failed and is counted in `saves_failed`.

        With on_save_error="raise" and `wait`, raises SaveFailedError for such a save, after everything
        is closed. Without `wait` nothing is raised: an exception is on its way already.

        Does nothing in a forked child: the connection, the slots and the persister are the parent's.
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
        else:  # the device may still write into the slots: they stay mapped until the process ends
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
        """Restore, then yield the index of each step still to do, 0 to total - 1.

        The body does one optimizer step: after the body of index i, i + 1 steps are done. Saves when
        the interval says so, on request, at a stop and after the last step. Ends early, with
        `stopping` set, when the gang was asked to stop. `before_rng`: see `restore`.

        `break` and `return` save what is done, as a stop would; an exception in the body does not. The
        first Ctrl-C saves after the step that runs, then raises KeyboardInterrupt. Called again with
        the same models and tensors it goes on where the training stands, without restoring. After
        steps that the script did and reported by itself it restores first, and goes on after them
        where there is nothing to restore.
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
            # Before the first restore the saves of this process are no history to go back to.
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
            # The state's own code may succeed later: as for every save, training goes on.
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
                self._stopping = False  # in a notebook the script may go on in the next cell
            raise KeyboardInterrupt(f"saved after {self._position.done} steps")

    def report(self, **metrics: Any) -> None:
        """Numbers or scalar tensors of the step being done (loss=...): shown in the job's status."""
        self._progress.measured(metrics)

    @property
    def stopping(self) -> bool:
        """The gang was asked to stop (drain, suspend): the state is saved, leave the loop."""
        return self._stopping

    @property
    def interval_steps(self) -> int:
        """Steps between saves that every rank agrees on; 0: only on request."""
        if self._interval_steps is not None:
            return self._interval_steps
        policy = self._session.policy
        return 0 if policy is None else policy.interval_steps

    @property
    def blocked_seconds(self) -> float:
        """Time that saves have cost the training thread so far."""
        return self._blocked_seconds

    @property
    def saves_skipped(self) -> int:
        """Saves that every rank left out because some rank's slots were all still being written."""
        return self._saves_skipped

    @property
    def saves_failed(self) -> int:
        return self._saves_failed

    @property
    def last_committed_step(self) -> int | None:
        """The newest step saved by this Checkpointer that is known to be durable; None before the first.
        Up to date after each save and after `close`."""
        return self._outcomes.watch.last_committed

    @property
    def saves_since_commit(self) -> int:
        """Saves that were due since one became durable, failed and skipped ones included. A number that
        only rises says that nothing is saved any more; a warning says so, too, after a minute."""
        return self._outcomes.watch.saves_since_commit

    def should_save(self, step: int) -> bool:
        """Whether every rank saves after `step` optimizer steps.

        Call it once after each step, on every rank: it also reports the step to the job's status, and
        sets `stopping`. `steps` does it itself. Raises ConfigError for what is no step.
        """
        due = self._wants_save(checked_step(step, "Checkpointer.should_save(step)"))
        if not due:  # otherwise the save reports the step, with what it cost
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
        """Load the round's restore point in place; the number of optimizer steps done, or None.

        After a save of this process: the newest checkpoint that is committed, which is to roll back.
        `step`: that one instead. Both need a folder, and every rank must call it. What is saved
        afterwards replaces the later steps: a run that starts prefers it.

        Order: models, optimizers, schedulers, data loaders, anything else, `before_rng`, random
        number generators. Make iterators of data loaders in `before_rng`: they may draw from them.
        Raises StateMismatchError when the checkpoint does not fit (nothing was loaded then),
        CapacityError, CorruptionError when no copy can be read (from a folder, the state may hold parts
        of a bad one then). Blocks while the sidecar is away: a
        run never starts from nothing because its checkpoint could not be asked for.
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
        wish = Wish(state, self._settings.rank, strict=self._strict)
        try:
            found = restorer.fetch(wish)
        except CorruptionError:
            # Every rank raises this for a step that was asked for: the next call looks again.
            self._has_saved = self._has_saved or step is not None
            raise
        if found is None:
            if before_rng is not None:
                before_rng()
            self._position.restored(0, state)
            return None
        saved = found.saved()
        if found.lies_over is not None and not wish.fits(saved):
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
        # For every rank: each has its own copy, and a rank that reads from a slower tier delays all.
        logger.info("rank %d restored step %d from %s", self._settings.rank, found.step, found.tier)
        self._say("restored step %d from %s", found.step, self._place_name(found))
        return found.step

    def allocate(self, state: Mapping[str, Any]) -> None:
        """Take and touch the shared memory for this state now, before the first step. `steps` does it.

        Raises CapacityError, UnsupportedStateError, StateDictError."""
        require_state(state, "allocate")
        self._open_to_save()
        wish = Wish(state, self._settings.rank, strict=self._strict)
        self._saver.ensure_slots(wish.needed_bytes(), self._round())

    def save(self, step: int, state: Mapping[str, Any]) -> SaveHandle:
        """Copy the state as it is now and return: training may change it at once.

        `step`: optimizer steps done. Every rank must save the same steps. Becoming durable goes on in
        another process; ask the handle. Parameters and optimizer state on a GPU are copied while
        training goes on, up to the next `optimizer.step()`: before anything else changes them, call
        `wait_staged`. With on_save_error="raise", raises SaveFailedError and what prevented the copy
        (CapacityError, UnsupportedStateError, UnavailableError, DeviceError). Raises ConfigError for what
        is no step, before anything is taken. Ctrl-C is raised after the save; a second one at once.
        """
        checked = checked_step(step, "Checkpointer.save(step)")
        require_state(state, "save")
        if self._left is not None and self._left.step == checked:
            self._forget_left("the script saved this step itself")
        with interrupts_at_end():
            return self._save(checked, state, wait=self._when_busy == "wait")

    def wait_staged(self) -> None:
        """What the current CUDA stream is given from now on runs after the copies of the saves so far.

        Call it before anything but an optimizer's own `step` changes parameters or optimizer state
        that is on a GPU. Costs next to nothing: neither blocks the host, nor waits for durability.
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
        # A state's own code may raise anything, and a failed save never ends training.
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
        """Where checkpoints are, in the words of the script; of a restored one, how many are older."""
        if not isinstance(self._place, DirectoryPlace):
            return "the job's checkpoints" if found is None else f"the {found.tier} tier"
        if found is None or self._settings.rank != 0:
            return str(self._dir)
        try:
            older = older_than(self._place.root, found.step)
        except OSError:  # the folder went away since: what was read is restored
            return str(self._dir)
        return f"{self._dir} ({older} older {'exists' if older == 1 else 'exist'})"

    def _require_own(self) -> None:
        """Raises ConfigError in a forked child."""
        if os.getpid() != self._pid:
            raise ConfigError(
                f"Checkpointer: process {self._pid} opened it and this is its forked child "
                f"{os.getpid()}: save and restore in the process that trains"
            )

    def _roll_back(self, step: Step | None) -> None:
        """All ranks: from the next request on, the folder answers with what is committed by now."""
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
        """The loop is over, or its generator was closed in the middle of a body."""
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
        # Whether an exception left the body is not known here, and whether the script goes back to
        # an older step: the bytes of this moment are kept until it is.
        self._left = SaveHandle(Step(done), self._round())
        self._session.hold_back(self._left)
        try:
            self._open_to_save()
            self._start_save(self._left, loop.state, _LEAVE_WAIT_SECONDS)
        except Exception as error:  # noqa: BLE001 - Python would print it and go on: see close
            self._left_error = error

    def _hand_over_left(self) -> None:
        """The state in which a loop was left is wanted. Raises what its save raised."""
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
        """Raises ConfigError where this run may not save into the folder."""
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
        """Before `step` starts: tell the gang if its save would find no slot here."""
        if self._agreement is None or self._when_busy == "wait" or not self._is_due(step):
            return
        if self._ring.slots and not self._ring.has_free() and not self._may_get_free():
            self._agreement.leave_out(step)

    def _may_get_free(self) -> bool:
        """Where the sidecar keeps every step in memory, an older one gives way as soon as the one that
        was handed over just now is complete: before this step ends, unless that was wrong last time."""
        policy = self._session.policy
        keeps = policy is not None and policy.keeps_every_step
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
            # What was asked for, and the last one, is worth waiting for a slot.
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
        """With on_save_error="raise": a save that failed after it was handed over is raised here."""
        while (handle := self._outcomes.next_failed(time.monotonic())) is not None:
            self._failed(
                SaveFailedError(f"save of step {handle.step}: {handle.failure}"), handle.step
            )

    def _count_last(self, *, wait: bool) -> SaveFailedError | None:
        """What failed, or is not durable, when the connection is about to end; counted and logged. Without
        `wait` a folder's unfinished saves have not failed: its persister goes on writing them."""
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
    """The script ended itself in a way that says that all is well."""
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _let_go(pid: int, session: Session, place: Place, stop: HandledSignal) -> None:
    """Of a Checkpointer that nobody refers to any more, as when a notebook's cell runs again: its memory
    and its persister would stay as long as this process."""
    if os.getpid() != pid:
        return  # a forked child has none of it
    stop.restore()
    session.wait_settled(_LET_GO_SECONDS)
    link, session.link = session.link, None
    if link is not None:
        link.close()
    place.close(wait=False)
