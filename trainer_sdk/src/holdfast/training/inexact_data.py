"""Finds data that cannot continue exactly after a restart, to say so once.

A state that a library saves incompletely is found at the first save. A library's objects are recognised by
their attributes, because the SDK imports none of these libraries.

A data loader iterator that a script makes after its random number generators were restored is found at the
first step: `iter(DataLoader)` draws a seed from torch's generator, which shifts every random number that
follows. The order of data and dropout then differ from an uninterrupted run.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Mapping
from typing import Any

from holdfast.state.rng import RNG
from holdfast.state.tensors import torch_module
from holdfast.state.tree import is_stateful
from holdfast.training.loop import stateful_parts

logger = logging.getLogger(__name__)

_BUFFER = "BufferShuffledExamplesIterable"
"""Class of the shuffle buffer of Hugging Face datasets, whose examples its state_dict leaves out."""


def inexact_data(state: Mapping[str, Any]) -> list[str]:
    """Return one sentence, with its path, for each part of `state` whose data cannot continue exactly."""
    parts = dict(stateful_parts(state))
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


class LazyLoaderWatch:
    """Checks for such iterators once after each restore, when the first step is done."""

    def __init__(self) -> None:
        self._next_seed: int | None = None

    def restored(self) -> None:
        """Record the seed that an iterator would draw next. Call it after the generators were restored.

        The seed is drawn from a copy, so that torch's generator does not change.
        """
        torch = torch_module()
        if torch is None:
            return
        copied = torch.Generator()
        copied.set_state(torch.get_rng_state())
        self._next_seed = _draw(torch, copied)

    def step_done(self) -> None:
        """Warn if an iterator drew its seed from the restored generator."""
        seed, self._next_seed = self._next_seed, None
        if seed is not None and any(one._base_seed == seed for one in _iterators()):
            logger.warning(
                "an iterator of a DataLoader was created after the random number generators were "
                "restored and drew from them: the order of data and all random numbers differ "
                "from a run without the interruption. Create it in before_rng: ckpt.steps(total, "
                "state, before_rng=start), see docs/training.md section 3"
            )


def _draw(torch: Any, generator: Any) -> int:
    """Draw a number in the way in which torch.utils.data.dataloader draws `_base_seed`."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def _iterators() -> list[Any]:
    module = sys.modules.get("torch.utils.data.dataloader")
    base = getattr(module, "_BaseDataLoaderIter", None)
    if base is None:
        return []
    kinds = [base]
    for kind in kinds:
        kinds += kind.__subclasses__()
    # An instance refers to its class. This scans all objects of the process once, in C.
    found = gc.get_referrers(*kinds)
    return [one for one in found if isinstance(one, base) and hasattr(one, "_base_seed")]
