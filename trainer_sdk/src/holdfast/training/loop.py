"""One training loop of `Checkpointer.steps`: what is done of it when it is left early.

`break`, `return`, an exception and Ctrl-C all leave the loop in the middle of a body. What may be saved
then depends on whether the optimizer step of that body was done, and on why the loop was left:

 * Ctrl-C: the loop ends after the step that is being done, as at a stop. A second Ctrl-C raises at once.
 * `break` and `return`: the script decided to leave, so its state is whole: it is saved.
 * an exception: the state may be half updated: nothing is saved.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from holdfast.state.tensors import is_tensor, torch_module
from holdfast.state.tree import is_stateful, unwrap
from holdfast.training.signals import HandledSignal

logger = logging.getLogger(__name__)


class Position:
    """How many steps the state of this process has done, as far as the Checkpointer knows."""

    def __init__(self) -> None:
        self.done = 0
        self.is_known = False
        """A restore said where it began. A script may save before it restores: step 0, say."""
        self._has_trained = False
        self._parts: dict[str, weakref.ref[Any]] = {}

    def restored(self, done: int, state: Mapping[str, Any]) -> None:
        """The state holds what a checkpoint held, or was made anew."""
        self.done = done
        self.is_known = True
        self._has_trained = False
        self._parts = _parts(state)

    def trained(self, done: int) -> None:
        """The script did an optimizer step."""
        self.done = done
        self._has_trained = True

    def saved(self, state: Mapping[str, Any]) -> None:
        """`state` is saved. Before the first restore, this is what tells which objects are trained."""
        if not self.is_known:
            self._parts = _parts(state)

    def done_by_hand(self, state: Mapping[str, Any]) -> int:
        """Steps that the script did on `state` and reported before anything was restored. A loop over
        `state` must not number its steps from 0 again: their saves would repeat numbers of other bytes.
        """
        return 0 if self.is_known or not self._is_same(state) else self.done

    def continues(self, state: Mapping[str, Any]) -> bool:
        """Whether `state` was trained here since it was restored: it must not be restored again."""
        return self.is_known and self._has_trained and self._is_same(state)

    def _is_same(self, state: Mapping[str, Any]) -> bool:
        parts = _parts(state)
        return all(
            self._parts[name]() is parts[name]() for name in parts.keys() & self._parts.keys()
        )


class TrainingLoop:
    """Steps done, seen from outside of the body. Used by the thread that iterates, and by no other."""

    def __init__(self, state: Mapping[str, Any], on_interrupt: Callable[[], None]) -> None:
        self.state = state
        self.was_interrupted = False
        """Ctrl-C was pressed: raise KeyboardInterrupt when the step is done and saved."""
        self._on_interrupt = on_interrupt
        self._thread = threading.get_ident()
        self._pid = os.getpid()
        self._index: int | None = None
        self._watch = StepWatch(state)
        self._interrupt = HandledSignal(
            signal.SIGINT, signal.default_int_handler, self._interrupted, once=True
        )
        self._interrupt.install()

    def begins(self, index: int) -> None:
        """The body of `index` is about to run."""
        self._index = index
        self._watch.begins()

    def ended(self) -> None:
        """The body came to its end."""
        self._index = None

    def steps_done(self) -> int | None:
        """Steps done when the body was left; None where it was not left in the middle, or where that
        is found in another thread or process, long after."""
        here = (threading.get_ident(), os.getpid()) == (self._thread, self._pid)
        if self._index is None or not here:
            return None
        return self._index + 1 if self._watch.is_done() else self._index

    def close(self) -> None:
        """Neither watch nor handle signals any more."""
        self._interrupt.restore()
        self._watch.close()

    def _interrupted(self) -> None:
        self.was_interrupted = True
        logger.warning("interrupted: saving after this step; press Ctrl-C again to stop at once")
        self._on_interrupt()


class StepWatch:
    """Whether an optimizer of the state stepped in the body that runs.

    A body that is left before its step (`zip(ckpt.steps(...), loader)` at the end of the loader) has not
    done it. Where no optimizer can be watched, or none stepped in the body before (gradients are
    accumulated, a script steps in a way of its own), a body counts as done.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._hooks = [
            one.register_step_post_hook(self._stepped)
            for one in _optimizers(state)
            if hasattr(one, "_optimizer_step_post_hooks")
        ]
        self._expects = bool(self._hooks)
        self._has_stepped: bool | None = None

    def begins(self) -> None:
        if self._has_stepped is not None:
            self._expects = self._has_stepped
        self._has_stepped = False

    def is_done(self) -> bool:
        return bool(self._has_stepped) or not self._expects

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _stepped(self, *_: Any) -> None:
        self._has_stepped = True


def _parts(state: Mapping[str, Any]) -> dict[str, weakref.ref[Any]]:
    """Models, optimizers, tensors and arrays of a state: other ones are another training."""
    found: dict[str, weakref.ref[Any]] = {}
    for name, value in state.items():
        if is_stateful(value) or is_tensor(value) or isinstance(value, np.ndarray):
            with contextlib.suppress(
                TypeError
            ):  # an object of the script's without weak references
                found[name] = weakref.ref(value)
    return found


def _optimizers(value: Any) -> list[Any]:
    torch = torch_module()
    if torch is None:
        return []
    if is_stateful(value):
        plain = unwrap(value)
        return [plain] if isinstance(plain, torch.optim.Optimizer) else []
    if isinstance(value, Mapping):
        return [one for item in value.values() for one in _optimizers(item)]
    if isinstance(value, list | tuple):
        return [one for item in value for one in _optimizers(item)]
    return []
