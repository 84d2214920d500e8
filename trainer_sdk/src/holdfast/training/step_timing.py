"""What a step takes this rank by itself, without the time in which it waits for other ranks (ADR 0014).

All ranks of a gang finish a step together, so their step times do not show which of them is slow. Two parts
of a step contain no waits for other ranks:

 * the input: from the end of the step before to the first forward pass;
 * the forward passes of the model, or of the innermost modules that FSDP shards. Hooks of torch measure them.
   FSDP gathers the parameters of such a module in hooks that run before and after these.

On a GPU, forward passes are measured by events of its stream, which are read when they are complete. The host
never waits for the device, and no collective is added.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, Protocol

from holdfast.state.kinds import Shared
from holdfast.state.tensors import torch_module
from holdfast.training.loop import stateful_parts
from holdfast_core.messages.schema import RankWork

MEASURED_STEPS = 32
"""Number of last steps whose medians are reported."""
FEWEST_STEPS = 3
"""Number of measured steps below which nothing is reported."""
WARM_UP_STEPS = 3
"""First steps of a process that do not count: they compile and fill caches."""
MOST_UNITS = 8
"""Number of modules of a model that are measured, at most. It bounds the cost in a model of many layers."""
MOST_PASSES = 1024
"""Number of forward passes of all measured modules in a step, at most. A longer step does not count: a script
may train for hours between two saves, and report no steps in between."""
MOST_PENDING = 4
"""Number of steps whose events the device has not reached yet. With more, steps are left out."""


class Marks(Protocol):
    """Points in time on a device."""

    def take(self) -> Any | None:
        """Return the present point, or None if it cannot be measured."""
        ...

    def is_done(self, mark: Any) -> bool:
        """Return whether the device has reached the point. It does not wait."""
        ...

    def seconds(self, start: Any, end: Any) -> float:
        """Return the time between two points that the device has reached."""
        ...


class HostMarks:
    """Points in time on the host, for tensors in its memory."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic

    def take(self) -> float:
        return self._monotonic()

    def is_done(self, mark: float) -> bool:
        return True

    def seconds(self, start: float, end: float) -> float:
        return end - start


class CudaMarks:
    """Points in the current stream of a GPU."""

    def take(self) -> Any | None:
        import torch

        if torch.cuda.is_current_stream_capturing():
            return None  # an event in a captured graph has no time
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def is_done(self, mark: Any) -> bool:
        return bool(mark.query())

    def seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1000.0


@dataclass(slots=True)
class _Step:
    """What was measured in one step."""

    begun_at: float | None
    """When the step before ended, plus the pauses since then. None: it is not known."""
    input_seconds: float | None = None
    """None before the first forward pass."""
    passes: list[tuple[Marks, Any, Any]] = field(default_factory=list)
    """The beginning and the end of each forward pass."""

    @property
    def is_done(self) -> bool:
        return all(marks.is_done(end) for marks, _, end in self.passes)

    @property
    def forward_seconds(self) -> float:
        return sum(marks.seconds(start, end) for marks, start, end in self.passes)


class StepTiming:
    """Measure the steps of one rank. Only the training thread uses it.

    Args:
        monotonic: Returns seconds since an arbitrary point.
        marks: Measures all forward passes, for tests.
    """

    def __init__(self, monotonic: Callable[[], float], marks: Marks | None = None) -> None:
        self._monotonic = monotonic
        self._marks = marks
        self._hooks: list[Any] = []
        self._parameters = 0
        self._thread = threading.get_ident()
        self._step = _Step(None)
        self._open: dict[int, tuple[Marks, Any | None]] = {}
        """The beginning of the forward pass of each module that is in one, by the module's id."""
        self._pending = deque[_Step]()
        self._left_out = 0
        """Steps that did not count, up to WARM_UP_STEPS."""
        self._measured = deque[tuple[float, float]](maxlen=MEASURED_STEPS)

    def watch(self, state: Mapping[str, Any]) -> None:
        """Measure the models in `state`, instead of those of an earlier call."""
        self.stop()
        self._thread = threading.get_ident()
        models = [m for m in _models(state) if not _is_scripted(m)]
        self._parameters = sum(p.numel() for model in models for p in model.parameters())
        for model in models:
            # It must run before the hooks of FSDP, which may wait for other ranks.
            self._hooks.append(model.register_forward_pre_hook(_Hook(self.arrives), prepend=True))
        for unit in _disjoint(u for model in models for u in units_of(model)):
            marks = self._marks or _marks_for(unit, self._monotonic)
            self._hooks.append(unit.register_forward_pre_hook(_Hook(partial(self.begins, marks))))
            self._hooks.append(unit.register_forward_hook(_Hook(self.ends)))

    def stop(self) -> None:
        """Remove the hooks from the models. The next step does not count."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._step = _Step(None)
        self._open = {}

    def finished(self) -> None:
        """Record that a step is done, and that the next one begins."""
        step, self._step = self._step, _Step(self._monotonic())
        self._open = {}
        if step.input_seconds is not None and len(self._pending) < MOST_PENDING:
            self._pending.append(step)
        while self._pending and self._pending[0].is_done:
            done = self._pending.popleft()
            if self._left_out < WARM_UP_STEPS:
                self._left_out += 1
            elif done.input_seconds is not None:
                self._measured.append((done.input_seconds, done.forward_seconds))

    def paused(self, began: float) -> None:
        """Leave out a pause from `began`, in seconds of the clock, until now."""
        step = self._step
        if step.begun_at is not None and step.input_seconds is None:
            step.begun_at += self._monotonic() - max(began, step.begun_at)

    @property
    def found(self) -> RankWork | None:
        """The medians of the last steps, or None before enough of them were measured."""
        if len(self._measured) < FEWEST_STEPS:
            return None
        return RankWork(
            max(0.0, median(i for i, _ in self._measured)),
            max(0.0, median(f for _, f in self._measured)),
            self._parameters,
        )

    def arrives(self, module: Any) -> None:
        """Record that a batch has arrived at a model, if this is a forward pass of the training."""
        step = self._step
        if step.begun_at is None or step.input_seconds is not None or not self._counts(module):
            return
        step.input_seconds = self._monotonic() - step.begun_at

    def begins(self, marks: Marks, module: Any) -> None:
        """Record the beginning of a forward pass, if it belongs to the training."""
        if self._step.begun_at is None or not self._counts(module):
            return
        self.arrives(module)  # a script may call a part of the model only
        self._open[id(module)] = marks, marks.take()

    def ends(self, module: Any) -> None:
        """Record the end of a forward pass."""
        marks, start = self._open.pop(id(module), (None, None))
        if marks is None or start is None or not self._counts(module):
            return
        end = marks.take()
        if end is not None:
            self._step.passes.append((marks, start, end))
        if len(self._step.passes) > MOST_PASSES:
            self._step = _Step(None)

    def _counts(self, module: Any) -> bool:
        """Return whether a forward pass belongs to the training, not to an evaluation."""
        import torch

        trains = bool(module.training) and torch.is_grad_enabled()
        return trains and threading.get_ident() == self._thread


class _Hook:
    """A hook of a module. Copies of the module, such as a moving average of it, are not measured."""

    def __init__(self, record: Callable[[Any], None]) -> None:
        self._record = record

    def __call__(self, module: Any, *_: Any) -> None:
        if not _is_compiling():
            self._record(module)

    def __reduce__(self) -> tuple[type[_NoHook], tuple[()]]:
        return _NoHook, ()


class _NoHook:
    """What a hook becomes in a copy of the model, and in a model that is pickled."""

    def __call__(self, *_: Any) -> None:
        return None


def _is_compiling() -> bool:
    """Return whether torch.compile traces this code. The graph then contains nothing of the hook."""
    import torch

    return bool(torch.compiler.is_compiling())


def _is_scripted(model: Any) -> bool:
    """Return whether `model` is compiled by TorchScript. It takes no hooks then."""
    import torch

    return isinstance(model, torch.jit.ScriptModule)


def _models(state: Mapping[str, Any]) -> Iterator[Any]:
    torch = torch_module()
    for _, part in stateful_parts(state):
        while isinstance(part, Shared):
            part = part.stateful
        if torch is not None and isinstance(part, torch.nn.Module):
            yield part


def units_of(model: Any) -> list[Any]:
    """Return modules of `model` whose forward passes contain no collective of DDP or FSDP.

    The forward pass of DistributedDataParallel may broadcast buffers. That of a module that FSDP shards
    begins with the gathering of its parameters only in hooks, unless it contains other such modules.
    """
    torch = torch_module()
    if torch is None or _is_scripted(model):
        return []
    if isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
        return units_of(model.module)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return [model]
    kinds = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    sharded = [m for m in model.modules() if isinstance(m, kinds)]
    innermost = [m for m in sharded if sum(isinstance(c, kinds) for c in m.modules()) == 1]
    if not innermost:
        return [model]
    wrapper = fsdp.FullyShardedDataParallel
    found = [m.module if isinstance(m, wrapper) else m for m in innermost]
    count = min(MOST_UNITS, len(found))
    return [found[i * len(found) // count] for i in range(count)]


def _disjoint(units: Iterable[Any]) -> list[Any]:
    """Return each module once, without those that are a part of another one."""
    found = list({id(u): u for u in units}.values())
    parts = {id(part) for u in found for part in u.modules() if part is not u}
    return [u for u in found if id(u) not in parts]


def _marks_for(unit: Any, monotonic: Callable[[], float]) -> Marks:
    parameter = next(unit.parameters(), None)
    on_gpu = parameter is not None and parameter.device.type == "cuda"
    return CudaMarks() if on_gpu else HostMarks(monotonic)
