"""What a Trainer has done, and when it saves.

Everything that belongs to a step is done before its save: its logs, its evaluation, the best metric. The
last step of a pass over the data is therefore saved after the evaluation at the end of the pass. Otherwise
a restart from it would leave that evaluation out.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerState

import holdfast
from holdfast.data.keyed import KeyedCollate
from holdfast.integrations.epochs import EpochStart
from holdfast.integrations.randomness import DrawWatch
from holdfast.integrations.transformers.supported import inexact
from holdfast_core.errors import StateMismatchError

logger = logging.getLogger(__name__)

_PART = "trainer"
_POSITION = "position"


class OlderStepError(Exception):
    """All ranks restored an older step than the restore point, which turned out to be damaged."""


def position_of(point: holdfast.RestorePoint) -> str:
    """Return the Trainer's state, as JSON, of a restore point.

    Raises StateMismatchError where no HoldfastTrainer has saved it.
    """
    part = point.objects.get(_PART)
    if not isinstance(part, Mapping) or not isinstance(part.get(_POSITION), str):
        raise StateMismatchError(
            f"HoldfastTrainer: step {point.step} has no state of a Trainer, it holds "
            f"{', '.join(sorted(point.objects))}: another kind of script saved it; use another folder"
        )
    return str(part[_POSITION])


class TrainerProgress:
    """The part "trainer" of the saved state, and the decisions about saves.

    trainer: the Trainer, with its Checkpointer as `ckpt`. Only the training thread uses both.
    """

    def __init__(self, trainer: Any) -> None:
        self.is_requested = False
        """A callback asked for a save."""
        self.draws = DrawWatch()
        self._trainer = trainer
        self._point: holdfast.RestorePoint | None = None
        self._folder: str | None = None
        self._logs = _LogTexts()
        self._epoch: int | None = None
        self._epoch_start = EpochStart()
        self._begun: Any = None
        """The loader of a pass that began at the restored step, until the generators are loaded."""
        self._is_in_epoch = False
        """The last event was the end of a step, and not of a pass."""
        self._decided: int | None = None
        """The last step after which the ranks have decided about a save."""
        self._was_ended = False
        """A callback ended the training at the restore point."""
        self._is_ended = False
        """A callback ended the training at the step that is saved."""
        self._has_saved = False

    # ------------------------------------------------------------------ restore

    def begins(self, point: holdfast.RestorePoint | None, folder: str | None) -> None:
        """Record that `train` begins at `point`, whose position is in `folder`."""
        self._point, self._folder = point, folder
        self._epoch = self._decided = self._begun = None
        self._was_ended = self._is_ended = self.is_requested = False

    @property
    def is_continued(self) -> bool:
        """Whether `train` has begun at a restore point."""
        return self._point is not None

    def is_ours(self, folder: str | None) -> bool:
        """Return whether `folder` has the position of a checkpoint of Holdfast."""
        return folder is not None and folder == self._folder

    def restore(self) -> None:
        """Load everything except the random number generators.

        Raises OlderStepError where it was another step than that of the position.
        """
        assert self._point is not None
        step = self._trainer.ckpt.restore(self.state(), rng="later")
        if step != self._point.step:
            raise OlderStepError(f"step {self._point.step} is damaged and step {step} was restored")

    def restore_rng(self) -> None:
        """Load the random number generators. The Trainer asks for it when it has fetched its batches.

        At the restored step a pass may have just begun. The Trainer then asks before it fetches.
        """
        self._trainer.ckpt.restore_rng()
        if self._begun is not None:
            self._epoch_start.record(self._begun)
            self._begun = None

    def state(self) -> dict[str, Any]:
        """Return the state of the training."""
        trainer = self._trainer
        scaler = getattr(trainer.accelerator, "scaler", None)
        return {
            "model": trainer.model,
            # Holdfast must see the steps of the optimizer itself to copy its tensors beside training.
            "optimizer": getattr(trainer.optimizer, "optimizer", trainer.optimizer),
            "scheduler": trainer.lr_scheduler,
            **({} if scaler is None else {"scaler": scaler}),
            _PART: self,
            "rng": holdfast.RNG(),
        }

    def state_dict(self) -> dict[str, Any]:
        trainer, state = self._trainer, self._trainer.state
        exported = TrainerState(stateful_callbacks=list(self._callbacks())).stateful_callbacks
        return {
            _POSITION: self._logs.as_json(state, stateful_callbacks=exported),
            "callbacks": [
                [type(one).__name__, one.state().get("attributes", {})] for one in self._callbacks()
            ],
            "flos": float(trainer.current_flos),
            "epoch_start": self._epoch_start.state_dict(),
            "was_ended": self._is_ended and state.global_step < state.max_steps,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        # The Trainer would replace the callbacks by new ones, and only with an option that is off.
        callbacks = list(self._callbacks())
        for name, attributes in saved["callbacks"]:
            found = next((one for one in callbacks if type(one).__name__ == name), None)
            if found is not None:
                callbacks.remove(found)
                for attribute, value in attributes.items():
                    setattr(found, attribute, value)
        self._trainer.current_flos = saved["flos"]
        self._epoch_start.load_state_dict(saved["epoch_start"])
        self._was_ended = saved["was_ended"]

    def _callbacks(self) -> Iterator[Any]:
        for one in (*self._trainer.callback_handler.callbacks, self._trainer.control):
            if isinstance(one, ExportableState):
                yield one

    # ------------------------------------------------------------------ events of the loop

    def training_begins(self) -> None:
        """Allocate the slots, so that the first save is as fast as later ones."""
        state = self.state()
        if self._point is None:
            self._trainer.ckpt.restore(state)  # there is nothing to restore, and the log says so
        self._trainer.ckpt.allocate(state)
        if self.is_finished():
            logger.warning(
                "step %d was the last one%s: there is nothing left to do",
                self._trainer.state.global_step,
                ", because a callback ended the training" if self._was_ended else "",
            )

    def epoch_begins(self, loader: Any) -> None:
        """Give the samplers of a pass over the data the generators with which the pass began."""
        trainer = self._trainer
        epoch = float(trainer.state.epoch)
        is_resumed = self._epoch is None and self._point is not None
        self._epoch = int(epoch) if self._epoch is None else self._epoch + 1
        if hasattr(loader, "set_epoch"):
            # The Trainer sets the epoch of a loader that skips batches, which does not reach the sampler
            # below it if there are several ranks.
            loader.set_epoch(self._epoch)
        if isinstance(trainer.data_collator, KeyedCollate):
            trainer.data_collator.set_epoch(self._epoch)
        if not is_resumed:
            self._epoch_start.record(loader)
        elif epoch.is_integer():
            self._begun = loader
        else:
            self._epoch_start.repeat(loader)
        self.draws.pass_begins()

    def step_ended(self) -> None:
        self._is_in_epoch = True

    def epoch_ended(self) -> None:
        self._is_in_epoch = False
        trainer = self._trainer
        if not float(trainer.state.epoch).is_integer() and not trainer.control.should_training_stop:
            logger.warning(
                "train_dataset: this pass ended after %.4g epochs, so that the Trainer cannot find its "
                "position in later passes after a restart; give an iterable dataset a length "
                "(__len__), or let it repeat its samples",
                trainer.state.epoch,
            )

    def is_finished(self) -> bool:
        """Return whether the restored step was the last one."""
        state = self._trainer.state
        is_restored = self._point is not None and self._point.step == state.global_step
        return is_restored and (self._was_ended or state.global_step >= state.max_steps)

    def is_stopped(self) -> bool:
        """Return whether the gang was asked to stop and has saved. No time is left for an evaluation."""
        is_decided = self._decided == self._trainer.state.global_step
        return is_decided and bool(self._trainer.ckpt.stopping)

    def logged_and_evaluated(self) -> None:
        """Decide whether this step is saved, and save it. Called at the end of each step and each pass."""
        trainer, state, control = self._trainer, self._trainer.state, self._trainer.control
        ends = (
            control.should_training_stop
            or control.should_epoch_stop
            or float(state.epoch).is_integer()
        )
        if self._decided == state.global_step or (self._is_in_epoch and ends):
            return
        self._decided = state.global_step
        self._is_ended = control.should_training_stop
        is_due = trainer.ckpt.should_save(state.global_step)
        if trainer.ckpt.stopping:
            control.should_training_stop = True
        if is_due or self.is_requested or control.should_training_stop:
            self._save(state.global_step)

    def report(self, logs: Mapping[str, Any]) -> None:
        """Report the numbers that the Trainer logs for the job's status."""
        numbers = {name: one for name, one in logs.items() if isinstance(one, int | float)}
        self._trainer.ckpt.report(**numbers)

    def _save(self, step: int) -> None:
        self.is_requested = False
        if not self._has_saved:
            self._has_saved = True
            self.draws.end()
            for line in inexact(self._trainer, has_drawn=self.draws.has_drawn):
                logger.warning("a restart of this training cannot be exact: %s", line)
        is_last = self._trainer.control.should_training_stop
        self._trainer.ckpt.save(step, self.state(), is_last=is_last)
        if is_last:
            # The script may change the parameters next, for example load those of the best model.
            self._trainer.ckpt.wait_staged()


class TrainerEvents(TrainerCallback):  # type: ignore[misc]
    """Calls `TrainerProgress` at the events of the loop, and reports what the Trainer logs."""

    def __init__(self, progress: TrainerProgress) -> None:
        self._progress = progress

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._progress.training_begins()

    def on_epoch_begin(self, *_: Any, train_dataloader: Any = None, **__: Any) -> None:
        self._progress.epoch_begins(train_dataloader)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._progress.step_ended()

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self._progress.epoch_ended()

    def on_log(self, *_: Any, logs: Mapping[str, Any] | None = None, **__: Any) -> None:
        self._progress.report(logs or {})


class _LogTexts:
    """The log history as JSON. Each entry is encoded once, because a long history is saved many times."""

    def __init__(self) -> None:
        self._history: list[Any] = []
        self._texts: list[str] = []

    def as_json(self, state: Any, **changed: Any) -> str:
        """Return a TrainerState as the JSON that it reads, with some fields changed."""
        if state.log_history is not self._history:
            self._history, self._texts = state.log_history, []
        self._texts += map(_encoded, self._history[len(self._texts) :])
        fields = {one.name: getattr(state, one.name) for one in dataclasses.fields(state)}
        texts = [
            f"{json.dumps(k)}: {_encoded(v)}"
            for k, v in (fields | changed).items()
            if k != "log_history"
        ]
        return f'{{{", ".join(texts)}, "log_history": [{", ".join(self._texts)}]}}'


def _encoded(value: Any) -> str:
    # Metrics may be scalars of numpy or torch.
    return json.dumps(value, default=lambda one: one.item())
