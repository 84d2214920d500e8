"""State of one loop of `Checkpointer.steps`, and the number of steps done when the loop is left early.

`break`, `return`, an exception and Ctrl-C leave the loop inside a body. What may be saved depends on
whether that body did its optimizer step, and on the reason:

 * Ctrl-C: the loop ends after the current step, as at a stop. A second Ctrl-C raises immediately.
 * `break` and `return`: the script chose to leave, so its state is consistent and is saved.
 * An exception: the state may be half updated, so nothing is saved.

Handlers turn SIGTERM and Ctrl-C into a save and a stop at the next step that all ranks agree on. A handler
only sets a flag, so that a rank inside a collective finishes its step first. If a process hangs, the sender
of the signal kills it after its grace period. In a forked child (such as a data loader's worker) a signal
has the same effect as without a Checkpointer.

Step numbers from scripts may be Python, numpy and torch integers (`checked_step`).
"""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import numpy as np

from holdfast.state.kinds import Shared
from holdfast.state.tensors import is_tensor, torch_module
from holdfast.state.tree import is_stateful, unwrap
from holdfast_core.errors import ConfigError
from holdfast_core.ids import MAX_STEP, Step

logger = logging.getLogger(__name__)


def checked_step(value: Any, what: str) -> Step:
    """Return `value` as a number of optimizer steps.

    Args:
        value: Anything that `operator.index` accepts, such as numpy.int64(5) or a 0-d integer tensor.
        what: The call and the argument, for the error message.

    Raises:
        ConfigError: `value` is not an integer, or is outside of 0 to MAX_STEP.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError as error:
        raise ConfigError(
            f"{what}: expected a whole number of optimizer steps, found {value!r} of type "
            f"{type(value).__name__}; convert it with int(...)"
        ) from error
    if not 0 <= number <= MAX_STEP:
        raise ConfigError(
            f"{what}: expected 0 to {MAX_STEP} optimizer steps, found {number}: pass the number of "
            "steps that are done since the beginning of the training"
        )
    return Step(int(number))


def require_state(state: Any, call: str) -> None:
    """Raise ConfigError unless `state` is a mapping. A script may pass the model itself by mistake."""
    if not isinstance(state, Mapping):
        raise ConfigError(
            f"Checkpointer.{call}: expected the state as a dict of names and objects, such as "
            f'{{"model": model, "optim": optimizer}}, found {type(state).__name__}'
        )


class Position:
    """Number of steps that the state of this process has done, as the Checkpointer has recorded it."""

    def __init__(self) -> None:
        self.done = 0
        self.is_known = False
        """Whether a restore has set the position. A script may save before it restores, such as step 0."""
        self._has_trained = False
        self._parts: dict[str, weakref.ref[Any]] = {}

    def restored(self, done: int, state: Mapping[str, Any]) -> None:
        """Record that `state` was restored at `done` steps, or starts from the beginning with 0."""
        self.done = done
        self.is_known = True
        self._has_trained = False
        self._parts = _parts(state)

    def trained(self, done: int) -> None:
        """Record that the script has done `done` optimizer steps."""
        self.done = done
        self._has_trained = True

    def saved(self, state: Mapping[str, Any]) -> None:
        """Before the first restore, record which objects are trained: those of the saved state."""
        if not self.is_known:
            self._parts = _parts(state)

    def done_by_hand(self, state: Mapping[str, Any]) -> int:
        """Return the steps that the script did on `state` and reported before the first restore.

        A loop over `state` must not number its steps from 0 again, because its saves would then reuse
        step numbers for other bytes.
        """
        return 0 if self.is_known or not self._is_same(state) else self.done

    def continues(self, state: Mapping[str, Any]) -> bool:
        """Return whether `state` was trained since its restore. It must not be restored again then."""
        return self.is_known and self._has_trained and self._is_same(state)

    def _is_same(self, state: Mapping[str, Any]) -> bool:
        parts = _parts(state)
        return all(
            self._parts[name]() is parts[name]() for name in parts.keys() & self._parts.keys()
        )


class TrainingLoop:
    """Number of steps done in one loop, and Ctrl-C during it. Only the iterating thread uses it."""

    def __init__(self, state: Mapping[str, Any], on_interrupt: Callable[[], None]) -> None:
        self.state = state
        self.was_interrupted = False
        """Whether Ctrl-C was pressed. KeyboardInterrupt is raised when the step is done and saved."""
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
        """Record that the body of `index` is about to run."""
        self._index = index
        self._watch.begins()

    def ended(self) -> None:
        """Record that the body has ended normally."""
        self._index = None

    def steps_done(self) -> int | None:
        """Return the steps done when the body was left early.

        Returns None where it was not left early. Also returns None in another thread or process, where
        the generator may be closed long after the body.
        """
        here = (threading.get_ident(), os.getpid()) == (self._thread, self._pid)
        if self._index is None or not here:
            return None
        return self._index + 1 if self._watch.is_done() else self._index

    def close(self) -> None:
        """Stop watching optimizers and handling signals."""
        self._interrupt.restore()
        self._watch.close()

    def _interrupted(self) -> None:
        self.was_interrupted = True
        logger.warning(
            "interrupted: saving after this step; press Ctrl-C again to stop immediately"
        )
        self._on_interrupt()


class StepWatch:
    """Detects whether an optimizer of the state stepped in the current body.

    A body that is left before its optimizer step does not count as done, for example with
    `zip(ckpt.steps(...), loader)` at the end of the loader. A body counts as done where no optimizer can
    be watched, and where no optimizer stepped in the body before it. That is so where a script accumulates
    gradients or updates parameters without an optimizer.
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
    """Return references to the models, optimizers, tensors and arrays of a state.

    A state with other objects belongs to another training.
    """
    found: dict[str, weakref.ref[Any]] = {}
    for name, value in state.items():
        if is_stateful(value) or is_tensor(value) or isinstance(value, np.ndarray):
            # A class of the script may not support weak references.
            with contextlib.suppress(TypeError):
                # A script may wrap the same object anew in each call.
                found[name] = weakref.ref(value.stateful if isinstance(value, Shared) else value)
    return found


def stateful_parts(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the objects with state_dict in nested containers, after their path."""
    if is_stateful(value):
        yield path, value
        return
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for key, item in items:
        yield from stateful_parts(item, f"{path}.{key}" if path else str(key))


def _optimizers(state: Mapping[str, Any]) -> list[Any]:
    torch = torch_module()
    if torch is None:
        return []
    plain = (unwrap(part) for _, part in stateful_parts(state))
    return [one for one in plain if isinstance(one, torch.optim.Optimizer)]


class HandledSignal:
    """Handler of one signal. It is installed only in the main thread, and not over a script's own handler.

    Args:
        number: The signal.
        default: The handler that Python installs at its start. `restore` installs it again.
        on_signal: Called in the main thread, between two instructions of the script.
        once: Handle only the first signal and leave later ones to `default`.
    """

    def __init__(
        self,
        number: signal.Signals,
        default: Any,
        on_signal: Callable[[], None],
        *,
        once: bool = False,
    ) -> None:
        self._number = number
        self._default = default
        self._on_signal = on_signal
        self._once = once
        self._installed = False
        self._pid = os.getpid()
        _signals.add(self)

    def install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(self._number) is not self._default:
            return
        self._pid = os.getpid()
        signal.signal(self._number, self._handle)
        self._installed = True

    def restore(self) -> None:
        """Install the default handler again.

        Outside the main thread this does nothing, because Python does not allow it there.
        """
        if self._installed and threading.current_thread() is threading.main_thread():
            if signal.getsignal(self._number) == self._handle:
                signal.signal(self._number, self._default)
            self._installed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # This is a child that C code forked, or whose fork hook has not run yet.
        if os.getpid() != self._pid:
            self.restore()
            os.kill(os.getpid(), number)
            return
        if self._once:
            self.restore()
        self._on_signal()


def stop_signal(on_stop: Callable[[], None]) -> HandledSignal:
    """Return a handler of SIGTERM, which Kubernetes and launchers send."""
    return HandledSignal(signal.SIGTERM, signal.SIG_DFL, on_stop)


@contextlib.contextmanager
def interrupts_at_end() -> Iterator[None]:
    """Delay KeyboardInterrupt to the end of this block. A second Ctrl-C raises it immediately.

    Raised inside the block, it could leave a lock held that other threads need, or a slot FULL that was
    never handed over. Later saves could then not become durable.
    """
    was_interrupted = False

    def interrupted() -> None:
        nonlocal was_interrupted
        was_interrupted = True
        logger.warning(
            "interrupted: stopping after this save; press Ctrl-C again to stop immediately"
        )

    handled = HandledSignal(signal.SIGINT, signal.default_int_handler, interrupted, once=True)
    handled.install()
    try:
        yield
    finally:
        handled.restore()
        if was_interrupted:
            raise KeyboardInterrupt


_signals: weakref.WeakSet[HandledSignal] = weakref.WeakSet()


def _restore_all() -> None:
    for one in tuple(_signals):
        one.restore()


os.register_at_fork(after_in_child=_restore_all)
