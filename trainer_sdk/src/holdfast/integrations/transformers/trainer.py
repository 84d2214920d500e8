"""The overridden methods of a Trainer. `progress` has what they do.

The order of a restart:

1. `train` looks at the restore point, on all ranks. The Trainer reads its position from a folder with
   nothing but `trainer_state.json`, which `train` writes from the restore point.
2. The Trainer creates optimizer and scheduler, then asks for their state. Everything is restored there.
3. When the pass over the data begins, its samplers get the generators of that pass (`EpochStart`).
4. The Trainer skips the batches that are done, fetches the next ones, then asks for its random number
   generators. They are loaded there.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import SaveStrategy

import holdfast
from holdfast.integrations.transformers.progress import (
    OlderStepError,
    TrainerEvents,
    TrainerProgress,
    position_of,
)
from holdfast.integrations.transformers.supported import require_supported
from holdfast.integrations.versions import warn_if_untested
from holdfast_core.errors import ConfigError

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


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
