"""Loads a saved state into the current one, in place.

1. Everything is compared first. Nothing is changed if something does not fit.
2. The objects are loaded: models, optimizers with their param_groups, schedulers, data loaders, others.
3. The caller's `before_rng` runs. It makes data iterators, which may draw random numbers.
4. Random number generators are loaded last, or by a later call (`later_rng`).
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Any

import numpy as np

from holdfast.state.kinds import is_named_tuple, plain_names, plain_state, tuple_like
from holdfast.state.loading.load_optimizer import Own, load_optimizer
from holdfast.state.optimizers import misfit
from holdfast.state.rng import RNG, Load
from holdfast.state.snapshot import paused_collector
from holdfast.state.tensors import (
    clone,
    copy_all_in,
    copy_in,
    describe,
    is_alike,
    is_distributed,
    is_tensor,
    local_part,
    torch_module,
)
from holdfast.state.tree import HeldState, StateDictCache, content_of, has_held, is_stateful, unwrap
from holdfast_core.errors import StateMismatchError

_SHOWN = 10
_NOTHING = object()
_EXTRA_STATE = "_extra_state"
"""Last part of the name of what a module's `get_extra_state` returns (torch.nn.modules.module)."""


class _Order(IntEnum):
    MODEL = 0
    OPTIMIZER = 1
    SCHEDULER = 2
    LOADER = 3
    OTHER = 4
    RNG = 5


@dataclass(slots=True)
class _Comparison:
    """The entries that do not fit, by path. With strict=False these paths are skipped."""

    problems: dict[str, str] = field(default_factory=dict)

    def note(self, path: str, expected: str, found: str) -> None:
        self.problems[path] = f"{path}: expected {expected}, found {found}"


def load_state(
    state: MutableMapping[str, Any],
    saved: dict[str, Any],
    *,
    strict: bool = True,
    before_rng: Callable[[], None] | None = None,
    is_ours: bool = False,
    defer: Callable[[Load], None] | None = None,
) -> tuple[str, ...]:
    """Load `saved` into `state`. Return one line for each skipped entry (none when strict).

    Args:
        state: The current state.
        saved: The saved state. Unless `is_ours`, its tensors are views that are valid only during this
            call, and what is kept of them is copied.
        strict: Raise instead of skipping entries that do not fit.
        before_rng: Called before random number generators are loaded.
        is_ours: Whether the tensors of `saved` are those of `state`, or in memory that may be kept. The
            caller has compared `saved` with `state` then: `fits` is true.
        defer: Called with the load of each random number generator, instead of loading it.

    Raises:
        StateMismatchError: Entries do not fit. The error names the first ten with what was expected and
            found, and nothing was loaded. It is also raised when an object's own load_state_dict raises;
            other parts may have been loaded then. With strict=False such an object is skipped.
    """
    comparison = _Comparison() if is_ours else _comparison(state, saved)
    if comparison.problems and strict:
        raise StateMismatchError(_sentence(comparison.problems))
    skip = comparison.problems.keys()
    own: Own = (lambda value: value) if is_ours else _copied
    tasks: list[tuple[_Order, str, Any, Any]] = []
    with paused_collector():
        _merge(state, saved, "", skip, tasks, own)
    tasks.sort(key=lambda task: task[0])
    rest = [task for task in tasks if task[0] is not _Order.RNG]
    last = [task for task in tasks if task[0] is _Order.RNG]
    refused: list[str] = []

    def load(task: tuple[_Order, str, Any, Any]) -> tuple[str, ...]:
        try:
            _load_object(*task[1:], skip, own)
        except StateMismatchError as error:
            if strict:
                raise StateMismatchError(
                    f"{error}; parts of the state are already loaded: create the state again "
                    "before you use it"
                ) from error
            return (str(error),)
        return ()

    for task in rest:
        # Other objects may start processes, which would inherit the pause.
        with paused_collector() if task[0] <= _Order.OPTIMIZER else nullcontext():
            refused += load(task)
    if before_rng is not None:
        before_rng()
    for order, path, target, value in last:
        if defer is None:
            refused += load((order, path, target, value))
        else:
            defer(partial(load, (order, path, target, own(value))))
    return (*comparison.problems.values(), *refused)


def fits(state: Mapping[str, Any], saved: dict[str, Any]) -> bool:
    """Return whether names, shapes and types of `saved` fit, so that `load_state` would skip nothing.

    This does not call an object's own load_state_dict, which may still refuse its part.
    """
    return not _comparison(state, saved).problems


@paused_collector()
def _comparison(state: Mapping[str, Any], saved: dict[str, Any]) -> _Comparison:
    comparison = _Comparison()
    _compare(state, saved, "", comparison, exact=True)
    return comparison


def _sentence(problems: dict[str, str]) -> str:
    lines = list(problems.values())
    shown = "\n  ".join(lines[:_SHOWN])
    more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return (
        f"the checkpoint does not fit this state in {len(lines)} places:\n  {shown}{more}\nnothing "
        "was loaded. Build the same model and optimizer, or restore with strict=False"
    )


def _order_of(value: Any) -> _Order:
    torch = torch_module()
    if isinstance(value, RNG):
        return _Order.RNG
    if torch is not None:
        if isinstance(value, torch.nn.Module):
            return _Order.MODEL
        if isinstance(value, torch.optim.Optimizer):
            return _Order.OPTIMIZER
        if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            return _Order.SCHEDULER
    if hasattr(value, "__iter__") or hasattr(value, "set_epoch"):
        return _Order.LOADER
    return _Order.OTHER


def _is_array(value: Any) -> bool:
    return is_tensor(value) or isinstance(value, np.ndarray)


def _holds_arrays(value: Any) -> bool:
    """Return whether `value` contains tensors, arrays or stateful objects."""
    if _is_array(value) or is_stateful(value):
        return True
    if isinstance(value, dict):
        return any(_holds_arrays(v) for v in value.values())
    if isinstance(value, list | tuple):
        return any(_holds_arrays(v) for v in value)
    return False


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


# ------------------------------------------------------------------------------- compare


def _compare(current: Any, saved: Any, path: str, out: _Comparison, *, exact: bool) -> None:
    """Record in `out` what does not fit.

    With `exact` (the top level, and modules) a saved entry that the state does not have is a problem too.
    """
    if is_stateful(current):
        _compare_object(unwrap(current), content_of(saved), path, out)
    elif _is_array(current):
        _compare_array(current, saved, path, out)
    elif isinstance(current, dict | MutableMapping):
        if not isinstance(saved, dict):
            out.note(path, "a dict", type(saved).__name__)
            return
        if path and _is_data(current, saved):
            return
        for key, value in current.items():
            if key in saved:
                _compare(value, saved[key], _join(path, key), out, exact=False)
            else:
                out.note(_join(path, key), type(value).__name__, "nothing in the checkpoint")
        if exact:
            for key in saved.keys() - current.keys():
                out.note(_join(path, key), "nothing", "an entry of the checkpoint")
    elif isinstance(current, list | tuple) and _holds_arrays(current):
        if is_named_tuple(type(current)) and type(saved) is not type(current):
            out.note(path, type(current).__name__, type(saved).__name__)
            return
        if not isinstance(saved, list | tuple) or len(saved) != len(current):
            size = len(saved) if isinstance(saved, list | tuple) else type(saved).__name__
            out.note(path, f"{len(current)} entries", str(size))
            return
        for position, (one, other) in enumerate(zip(current, saved, strict=True)):
            _compare(one, other, _join(path, position), out, exact=False)


def _compare_array(current: Any, saved: Any, path: str, out: _Comparison) -> None:
    if not _is_array(saved):
        out.note(path, describe(current), type(saved).__name__)
        return
    local = local_part(current)
    if not is_alike(local, saved):
        out.note(path, describe(local), describe(saved))


def _compare_object(current: Any, saved: Any, path: str, out: _Comparison) -> None:
    match _order_of(current):
        case _Order.MODEL:
            expected = dict(plain_state(current, current.state_dict()))
            if isinstance(saved, dict):
                # set_extra_state decides which tensors fit. Some of them grow in training.
                for name in filter(_is_extra_state, expected.keys() & saved.keys()):
                    if is_tensor(expected[name]) and is_tensor(saved[name]):
                        expected[name] = saved[name]
            _compare(expected, saved, path, out, exact=True)
        case _Order.OPTIMIZER:
            reason = misfit(current, saved)
            if reason is not None:
                out.note(path, *reason)
        case _Order.SCHEDULER | _Order.LOADER | _Order.OTHER | _Order.RNG:
            pass  # their own load_state_dict decides what fits
    if has_held(saved):
        inner = _Comparison()
        _compare_held(StateDictCache().call(current, path), saved, path, inner)
        if inner.problems:  # with strict=False the object is skipped as a whole
            out.problems[path] = "\n  ".join(inner.problems.values())


def _compare_held(current: Any, saved: Any, path: str, out: _Comparison) -> None:
    """Record the saved states of held objects for which the current object holds no object that fits."""
    if isinstance(saved, HeldState):
        if is_stateful(current):
            _compare(current, saved, path, out, exact=False)
        else:
            out.note(
                path,
                "nothing" if current is _NOTHING else type(current).__name__,
                f"the state of {saved.kind}, which only such an object can load",
            )
    elif isinstance(saved, dict | list | tuple):
        for key, value in _items(saved):
            _compare_held(_item(current, key), value, _join(path, key), out)


def _items(saved: Any) -> Iterable[tuple[Any, Any]]:
    return saved.items() if isinstance(saved, dict) else enumerate(saved)


def _item(current: Any, key: Any) -> Any:
    """Return the entry of a container, or _NOTHING if it has none."""
    if isinstance(current, dict):
        return current.get(key, _NOTHING)
    is_there = isinstance(current, list | tuple) and type(key) is int and key < len(current)
    return current[key] if is_there else _NOTHING


# ------------------------------------------------------------------------------- merge


def _merge(current: Any, saved: Any, path: str, skip: Any, tasks: list[Any], own: Own) -> Any:
    """Load containers and tensors, and append objects to `tasks`. Return the value to keep."""
    if path in skip:
        return current
    if is_stateful(current):
        _add_object(current, saved, path, tasks)
        return current
    if _is_array(current):
        copy_in(current, saved)
        return current
    if isinstance(current, dict | MutableMapping) and isinstance(saved, dict):
        if path and _is_data(current, saved):
            current.clear()
        for key, value in saved.items():
            inner = _join(path, key)
            if key in current:
                current[key] = _merge(current[key], value, inner, skip, tasks, own)
            elif inner not in skip:
                current[key] = own(_without_marks(value))
        if path:
            _order_as(current, saved)
        return current
    if isinstance(current, list | tuple) and _holds_arrays(current):
        items = [
            _merge(one, other, _join(path, position), skip, tasks, own)
            for position, (one, other) in enumerate(zip(current, saved, strict=True))
        ]
        if isinstance(current, tuple):
            return tuple_like(current, items)
        current[:] = items
        return current
    kept = own(_without_marks(saved))
    if isinstance(current, list) and isinstance(kept, list):
        current[:] = kept
        return current
    return kept


def _add_object(
    current: Any, saved: Any, path: str, tasks: list[Any], latest: _Order = _Order.OTHER
) -> None:
    """Append the loads of an object and of those that it holds, which come first.

    Args:
        current: The object.
        saved: Its saved state.
        path: Path in the state.
        tasks: The loads.
        latest: Order of the object that holds this one.
    """
    target, saved = unwrap(current), content_of(saved)
    order = _order_of(target)
    if order is not _Order.RNG:
        order = min(order, latest)
    if has_held(saved):
        now = StateDictCache().call(target, path)
        saved = _with_held(now, saved, path, tasks, order)
    tasks.append((order, path, target, saved))


def _with_held(current: Any, saved: Any, path: str, tasks: list[Any], order: _Order) -> Any:
    """Return a saved state_dict with the current objects in the place of their saved states."""
    if isinstance(saved, HeldState):
        _add_object(current, saved, path, tasks, order)
        return current
    if not has_held(saved):
        return saved
    items = {
        key: _with_held(_item(current, key), value, _join(path, key), tasks, order)
        for key, value in _items(saved)
    }
    return _with_items(saved, items)


def _without_marks(saved: Any) -> Any:
    """Return a saved value with the contents of held objects, which it has no objects for."""
    if isinstance(saved, HeldState):
        return _without_marks(saved.content)
    if not has_held(saved):
        return saved
    return _with_items(saved, {key: _without_marks(value) for key, value in _items(saved)})


def _with_items(saved: Any, items: dict[Any, Any]) -> Any:
    """Return a container like `saved` with other items."""
    if isinstance(saved, dict):
        like = copy.copy(saved)  # a Counter stays a Counter
        for key, item in items.items():  # Counter.update would add
            like[key] = item
        return like
    return list(items.values()) if isinstance(saved, list) else tuple_like(saved, items.values())


def _is_data(current: Any, saved: dict[Any, Any]) -> bool:
    """Return whether the keys of a dict are data, as in a Counter, and not names that a script expects.

    Such a dict is restored as it was saved: keys that were added later are removed.
    """
    if _holds_arrays(current) or _holds_arrays(saved):
        return False
    if isinstance(current, Counter | defaultdict):
        return True
    return any(not isinstance(key, str) for key in (*current, *saved))


def _order_as(current: Any, saved: dict[Any, Any]) -> None:
    """Put the keys of a built-in dict into the order of `saved`, and all other keys after them."""
    wanted = [key for key in saved if key in current]
    wanted += [key for key in current if key not in saved]
    if type(current) in (dict, OrderedDict, Counter, defaultdict) and list(current) != wanted:
        for key in wanted:
            current[key] = current.pop(key)


def _copied(value: Any) -> Any:
    """Return a deep copy of a saved value, in new memory."""
    if _is_array(value):
        return clone(value)
    if is_stateful(value):
        return value  # the object that another object holds
    if isinstance(value, dict):
        kept = copy.copy(value)  # a Counter stays a Counter
        for key, item in value.items():
            kept[key] = _copied(item)
        return kept
    if isinstance(value, list):
        return [_copied(v) for v in value]
    if type(value) is tuple or is_named_tuple(type(value)):
        return tuple_like(value, map(_copied, value))
    return value


# ------------------------------------------------------------------------------- objects


def _load_object(path: str, target: Any, saved: Any, skip: Any, own: Own) -> None:
    try:
        match _order_of(target):
            case _Order.MODEL:
                _load_module(target, saved, path, skip, own)
            case _Order.OPTIMIZER:
                load_optimizer(target, saved, own)
            case _Order.SCHEDULER | _Order.LOADER | _Order.OTHER | _Order.RNG:
                target.load_state_dict(own(saved))
    except StateMismatchError:
        raise
    except Exception as error:
        raise StateMismatchError(
            f"{path}: {type(target).__name__}.load_state_dict refused the saved state: {error}"
        ) from error


def _load_module(module: Any, saved: dict[str, Any], path: str, skip: Any, own: Own) -> None:
    fitting = {k: v for k, v in saved.items() if _join(path, k) not in skip}
    current = module.state_dict()
    own_names = {plain: name for name, plain in plain_names(module, current).items()}
    fitting = {own_names.get(name, name): value for name, value in fitting.items()}
    # torch searches the whole dict once for each submodule: 25,000 submodules take a minute.
    from holdfast.state.loading.load_optimizer import only_copies

    copies_here = only_copies(module) or any(map(is_distributed, current.values()))
    pairs = []
    for name, value in current.items():
        # get_extra_state may return a new tensor. Only set_extra_state can load it.
        is_own = is_tensor(value) and not _is_extra_state(name)
        # load_state_dict writes outside of inference mode, where torch does not allow it.
        is_copied = is_own and (copies_here or value.is_inference())
        if is_copied and name in fitting:
            pairs.append((value, fitting.pop(name)))
    copy_all_in(pairs)
    # load_state_dict copies tensors itself. Other values must not keep views of the slot.
    kept = {k: v if is_tensor(v) and not _is_extra_state(k) else own(v) for k, v in fitting.items()}
    module.load_state_dict(kept, strict=False)


def _is_extra_state(name: str) -> bool:
    return name.rpartition(".")[2] == _EXTRA_STATE
