"""Random numbers of a batch that depend on its samples, and not on when and where it is fetched.

A collator that draws from the global generators (masking, augmentation) makes an exact resume impossible,
whatever is saved: loaders fetch batches ahead, so that a saved generator has already drawn for batches
that were not trained yet, and the workers of a loader have generators that no checkpoint holds. `keyed`
seeds the generators for each batch with the indices of its samples. The batch then has the same bytes in
every process, at every time.
"""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from holdfast_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Indexed:
    """A sample with its index in the dataset."""

    index: int
    sample: Any


def indexed(dataset: Any) -> IndexedDataset:
    """Return `dataset` with `Indexed` samples, which `keyed` needs.

    dataset: a dataset with `__len__` and `__getitem__`. Its other attributes stay available.

    Raises ConfigError for an iterable dataset: yield `Indexed(position, sample)` from it instead, where
    `position` counts the samples of the whole gang.
    """
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise ConfigError(
            f"holdfast.data.indexed: {type(dataset).__qualname__} has no indices (__getitem__ and "
            "__len__): let it yield holdfast.data.Indexed(position, sample), where position counts the "
            "samples of all ranks"
        )
    return IndexedDataset(dataset)


class IndexedDataset:
    """A dataset whose samples carry their indices. `indexed` makes it."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Indexed:
        return Indexed(operator.index(index), self.dataset[index])

    def __getitems__(self, indices: Sequence[Any]) -> list[Indexed]:
        """Return the samples of a batch. Loaders call this method, and datasets may read batches faster."""
        read = getattr(self.dataset, "__getitems__", None)
        samples = read(indices) if callable(read) else [self.dataset[one] for one in indices]
        return [
            Indexed(operator.index(index), sample)
            for index, sample in zip(indices, samples, strict=True)
        ]

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # not set yet, while a worker unpickles this object
            raise AttributeError(name)
        return getattr(self.dataset, name)


def keyed(collate: Callable[..., Any], seed: int) -> KeyedCollate:
    """Return `collate` with random numbers that depend on the batch alone.

    While `collate` runs, the global generators of Python, numpy and torch (CPU) are seeded with `seed`, the
    epoch and the indices of the batch. Afterwards they have their earlier states again.

    collate: the collate function of a data loader. It gets the plain samples.
    seed: any integer, the same in every start of every rank.

    The dataset must be `indexed(dataset)`. Call `set_epoch(epoch)` of the result before each pass over the
    data, or else a batch of the same samples gets the same random numbers in every pass. The adapter for
    Hugging Face's Trainer calls it.
    """
    return KeyedCollate(collate, seed)


class KeyedCollate:
    """A collate function with random numbers of its own for each batch. `keyed` makes it."""

    def __init__(self, collate: Callable[..., Any], seed: int) -> None:
        self._collate = collate
        self._seed = operator.index(seed)
        # Workers that persist between epochs have a copy of this object, which must see a later epoch.
        self._epoch = torch.zeros((), dtype=torch.int64)
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]

    def set_epoch(self, epoch: int) -> None:
        """Use other random numbers in this pass over the data than in other passes."""
        self._epoch.fill_(epoch)

    def __call__(self, samples: Sequence[Indexed], *args: Any, **kwargs: Any) -> Any:
        """Collate the plain samples.

        Raises ConfigError when the samples have no indices.
        """
        for sample in samples:
            if not isinstance(sample, Indexed):
                raise ConfigError(
                    f"holdfast.data.keyed: expected samples with indices, found a {type(sample).__name__}: "
                    "pass holdfast.data.indexed(dataset) to the data loader or the trainer, also for "
                    "evaluation"
                )
        key = (self._seed, int(self._epoch), *(sample.index for sample in samples))
        with _seeded(key):
            return self._collate([sample.sample for sample in samples], *args, **kwargs)


@contextmanager
def _seeded(key: tuple[int, ...]) -> Iterator[None]:
    """Seed the global generators of the CPU with `key`, and restore them at the end."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    digest = hashlib.blake2b(repr(key).encode(), digest_size=32).digest()
    try:
        random.seed(digest)
        np.random.seed(np.frombuffer(digest, dtype=np.uint32))
        # torch.manual_seed would also seed the generators of the devices.
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
