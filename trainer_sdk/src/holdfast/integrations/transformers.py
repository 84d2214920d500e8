"""Saves and restores trainings of Hugging Face's Trainer and its subclasses.

The order of a restart:

1. `train` looks at the restore point, on all ranks. The Trainer reads its position from a folder with
   nothing but `trainer_state.json`, which `train` writes from the restore point.
2. The Trainer creates optimizer and scheduler, then asks for their state. Everything is restored there.
3. When the pass over the data begins, its samplers get the generators of that pass (`EpochStart`).
4. The Trainer skips the batches that are done, fetches the next ones, then asks for its random number
   generators. They are loaded there.

Everything that belongs to a step is done before its save: its logs, its evaluation, the best metric. The
last step of a pass over the data is therefore saved after the evaluation at the end of the pass. Otherwise
a restart from it would leave that evaluation out.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import SaveStrategy

import holdfast
from holdfast.data import KeyedCollate
from holdfast.integrations.epochs import DrawWatch, EpochStart
from holdfast.integrations.versions import warn_if_untested
from holdfast_core.errors import ConfigError, StateMismatchError

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


_EXACT_WITHOUT_WARM_UP = 2
"""Ranks whose sums do not depend on the order of the gradients: a + b equals b + a."""


def require_supported(trainer: Any) -> None:
    """Raise ConfigError, with the option to set, for an option that HoldfastTrainer does not support."""
    for reason in _refusals(trainer):
        raise ConfigError(f"HoldfastTrainer: {reason}")


def _refusals(trainer: Any) -> Iterator[str]:
    args = trainer.args
    saves_best = args.save_strategy == SaveStrategy.BEST and args.save_only_model
    if args.save_strategy != SaveStrategy.NO and not saves_best:
        yield (
            f'save_strategy="{args.save_strategy.value}" lets the Trainer save the training as well: set '
            'TrainingArguments(save_strategy="no"), or, for load_best_model_at_end, '
            'TrainingArguments(save_strategy="best", save_only_model=True)'
        )
    if args.enable_jit_checkpoint:
        yield (
            "enable_jit_checkpoint=True lets the Trainer handle SIGTERM and save as well: set "
            "TrainingArguments(enable_jit_checkpoint=False); Holdfast saves at SIGTERM"
        )
    if args.auto_find_batch_size:
        yield (
            "auto_find_batch_size=True starts the training again from its first step after each attempt: "
            "set TrainingArguments(auto_find_batch_size=False, per_device_train_batch_size=...)"
        )
    if trainer.is_deepspeed_enabled:
        yield (
            "the Trainer's DeepSpeed engine keeps its state outside of the Trainer: train without "
            "deepspeed=..., for example with fsdp, or see docs/integrations/README.md for DeepSpeed"
        )
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None and getattr(plugin, "fsdp_version", 1) != 2:
        yield (
            "the parameters of FSDP 1 do not say which part of a tensor they hold: set "
            'fsdp_config={"fsdp_version": 2}'
        )


def inexact(trainer: Any, *, has_drawn: bool) -> Iterator[str]:
    """Yield one line for each part of the state that cannot be exact after a restart."""
    args = trainer.args
    if has_drawn:
        yield (
            "train_dataset, data_collator: they draw from the global random number generators while a "
            "batch is fetched, so that batches differ after a restart; wrap them with "
            "holdfast.data.indexed and holdfast.data.keyed (docs/training.md, section 3)"
        )
    if args.ignore_data_skip:
        yield (
            "args.ignore_data_skip: the data begins again at a restart; set it to False to continue "
            "where the training was"
        )
    wrapped = trainer.model_wrapped
    rebuilds = getattr(wrapped, "find_unused_parameters", True) is False
    if args.world_size > _EXACT_WITHOUT_WARM_UP and rebuilds and not wrapped.static_graph:
        yield (
            "args.ddp_find_unused_parameters: DistributedDataParallel orders its buckets anew after the "
            "first step of each process, so that the first step after a restart adds gradients in "
            "another order; set ddp_find_unused_parameters=True"
        )


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


class HoldfastTrainerMixin(_Base):  # type: ignore[misc]
    """Makes a subclass of Trainer save and restore with a Checkpointer.

    It stands in front of the subclass: `class MyTrainer(HoldfastTrainerMixin, SFTTrainer)`.

    ckpt: the Checkpointer of this training, open while `train` runs.

    All other arguments are those of the subclass. Raises ConfigError where the Trainer would save by itself
    as well, and for options that prevent an exact resume. The error names the option to set.
    """

    def __init__(self, *args: Any, ckpt: holdfast.Checkpointer, **kwargs: Any) -> None:
        warn_if_untested("transformers")
        super().__init__(*args, **kwargs)
        require_supported(self)
        self.ckpt = ckpt
        self._holdfast = TrainerProgress(self)
        self.add_callback(TrainerEvents(self._holdfast))

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, **kwargs: Any
    ) -> Any:
        """Continue from the restore point, or start where there is none.

        resume_from_checkpoint: a folder that the Trainer itself has saved (True: the newest of them), to
          begin with. It is ignored as soon as there is a restore point, so that every start can pass it.

        Raises ConfigError for a hyperparameter search, and StateMismatchError where the checkpoint was not
        saved by this class.
        """
        require_supported(self)
        if trial is not None:
            raise ConfigError(
                "HoldfastTrainer.train(trial): a hyperparameter search trains several models, and a "
                "Checkpointer saves one training: search with transformers.Trainer"
            )
        while True:
            point = self.ckpt.peek()
            if point is None:
                self._holdfast.begins(None, None)
                return super().train(resume_from_checkpoint, **kwargs)
            if resume_from_checkpoint:
                logger.warning(
                    "resume_from_checkpoint=%r is ignored, because Holdfast has saved step %d",
                    resume_from_checkpoint,
                    point.step,
                )
            with tempfile.TemporaryDirectory(prefix="holdfast-trainer-") as folder:
                (Path(folder) / TRAINER_STATE_NAME).write_text(position_of(point))
                self._holdfast.begins(point, folder)
                try:
                    return super().train(folder, **kwargs)
                except OlderStepError as error:
                    # The Trainer has read the position of a checkpoint that turned out to be damaged.
                    logger.warning("%s: the Trainer starts again from it", error)

    # ------------------------------------------------------------------ called by the Trainer to load

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        if not self._holdfast.is_ours(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._holdfast.is_ours(checkpoint):
            self._holdfast.restore()
        else:
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if not self._holdfast.is_ours(checkpoint):
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._holdfast.is_ours(checkpoint):
            self._holdfast.restore_rng()
        else:
            super()._load_rng_state(checkpoint)

    # ------------------------------------------------------------------ called by the Trainer in its loop

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        if self._holdfast.is_finished():
            # The Trainer compares the number of steps only after a step, and would train one more.
            self.control.should_training_stop = True
            return [], None
        with self._holdfast.draws.watched():
            return super().get_batch_samples(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        with self.ckpt.paused("an evaluation of the Trainer"):
            return super().evaluation_loop(*args, **kwargs)

    def _evaluate(self, *args: Any, skip_scheduler: bool = False, **kwargs: Any) -> Any:
        if skip_scheduler and self._holdfast.is_continued:
            return {}  # args.eval_on_start: it was done before the first step
        return super()._evaluate(*args, skip_scheduler=skip_scheduler, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if not (self._holdfast.is_finished() or self._holdfast.is_stopped()):
            super()._maybe_log_save_evaluate(*args, **kwargs)
            self._holdfast.logged_and_evaluated()

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        is_best = self.state.best_global_step == self.state.global_step
        if self.args.save_strategy == SaveStrategy.BEST and is_best:
            super()._save_checkpoint(*args, **kwargs)  # the weights for load_best_model_at_end
        else:
            self._holdfast.is_requested = True  # a callback has set control.should_save


class HoldfastTrainer(HoldfastTrainerMixin, Trainer):  # type: ignore[misc]
    """transformers.Trainer that saves and restores with the Checkpointer `ckpt`, a keyword argument."""
