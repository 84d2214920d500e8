"""Finds data in a state that cannot continue exactly after a restart, to say so at the first save.

A library's objects are recognised by their attributes, because the SDK imports none of these libraries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.state.rng import RNG
from holdfast.state.tree import is_stateful

_BUFFER = "BufferShuffledExamplesIterable"
"""Class of the shuffle buffer of Hugging Face datasets, whose examples its state_dict leaves out."""


def inexact_data(state: Mapping[str, Any]) -> list[str]:
    """Return one sentence, with its path, for each part of `state` whose data cannot continue exactly."""
    parts = dict(_stateful(state, ""))
    generators = [
        one for part in parts.values() if isinstance(part, RNG) for one in part.generators
    ]
    return [line for path, part in parts.items() for line in _of_part(path, part, generators)]


def inexact_loader(path: str, loader: Any, generators: list[Any]) -> list[str]:
    """Return one sentence, with its path, for each reason why a loader does not continue exactly.

    generators: those that are saved.
    """
    if not is_stateful(loader):
        kind = type(loader)
        return [
            f"{path}: {kind.__module__}.{kind.__qualname__} has no state_dict, so its epoch begins again "
            "after a restart: use torchdata's StatefulDataLoader, or holdfast.data.GangSampler"
        ]
    return _of_part(path, loader, generators)


def _of_part(path: str, part: Any, generators: list[Any]) -> list[str]:
    lines = []
    dataset = part if hasattr(part, "_ex_iterable") else getattr(part, "dataset", None)
    if _has_buffer(getattr(dataset, "_ex_iterable", None)):
        lines.append(
            f"{path}: the shuffle buffer of datasets is not part of its state_dict, so a restart loses the "
            "examples in the buffer: shuffle the data before the training, or use a map-style dataset with "
            "holdfast.data.GangSampler"
        )
    generator = getattr(part, "generator", None)
    is_loader = hasattr(part, "batch_sampler") and hasattr(part, "dataset")
    if is_loader and generator is not None and not any(one is generator for one in generators):
        lines.append(
            f"{path}.generator: no holdfast.RNG saves this generator, so the order of later epochs differs "
            "after a restart: add holdfast.RNG(generator) to the state, or pass no generator to the loader"
        )
    return lines


def _has_buffer(iterable: Any) -> bool:
    """Return whether a shuffle buffer is among the steps of a dataset of `datasets`."""
    if iterable is None:
        return False
    if type(iterable).__name__ == _BUFFER:
        return True
    inner = [
        getattr(iterable, "ex_iterable", None),
        *(getattr(iterable, "ex_iterables", None) or ()),
    ]
    return any(_has_buffer(one) for one in inner)


def _stateful(value: Any, path: str) -> Iterator[tuple[str, Any]]:
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
        yield from _stateful(item, f"{path}.{key}" if path else str(key))
