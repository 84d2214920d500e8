"""Data with the same order and random numbers after a restart. This module imports torch.

`GangSampler` has a position that belongs to the gang, so that a training continues on another number of
ranks. Example: a gang of 4 ranks has trained 1,000 samples of an epoch when it is killed. It restarts with 3
ranks. Each of them continues at sample 1,000 of the same order, so no sample is lost or repeated.

`keyed` makes random numbers of a batch depend on its samples, and not on when and where it is fetched. A
collator that draws from the global generators (masking, augmentation) makes an exact resume impossible,
whatever is saved: loaders fetch batches ahead, so that a saved generator has already drawn for batches that
were not trained yet, and the workers of a loader have generators that no checkpoint holds. `keyed` seeds the
generators for each batch with the indices of its samples. The batch then has the same bytes in every process,
at every time.
"""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from holdfast.base.settings import RankSettings
from holdfast_core.errors import ConfigError, StateMismatchError

__all__ = ["GangSampler", "Indexed", "indexed", "keyed"]


class GangSampler(DistributedSampler[int]):
    """Distributes the samples of a map-style dataset over the ranks, and saves the position of the gang.

    dataset: only its length is used.
    num_replicas, rank: numbers of data parallel ranks and of this rank. They default to those of
      torch.distributed if it is initialised, and else to those of the launcher's environment.
    shuffle: draw the order of each epoch from `seed` and the epoch alone. Without it the samples keep the
      dataset's order.
    drop_last: what happens to the last samples of an epoch that cannot be divided among the ranks. With
      True they are left out: fewer than the number of ranks. With False the epoch is filled up with its
      first samples, which are trained twice: fewer than the number of ranks, too.

    The order does not depend on the number of ranks. Rank r of W takes every W-th sample, so that the ranks
    together always take the samples of the order from front to back. The position is the number of samples
    of the epoch that the gang has taken, and the same on every rank as long as every rank takes the same
    number of samples between two saves.

    An iterator continues at the position. When the epoch is done, the next iterator begins the next epoch;
    `set_epoch` of a framework or of a loop may name the same one.

    Put it into a StatefulDataLoader and save that loader, or save the sampler itself and iterate over
    `follow(loader)`.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        gang_rank, gang_size = _place_in_gang()
        super().__init__(
            dataset,  # type: ignore[arg-type]  # only its length is used
            gang_size if num_replicas is None else num_replicas,
            gang_rank if rank is None else rank,
            shuffle,
            seed,
            drop_last,
        )
        self._samples = len(dataset)
        least = self.num_replicas if drop_last else 1
        if self._samples < least:
            raise ConfigError(
                f"GangSampler: expected a dataset of at least {least} samples, found {self._samples}"
            )
        self._position = 0
        self._taken = 0
        """Samples of this epoch that each rank has taken."""
        self._followed: tuple[int, int] | None = None
        """Position and samples taken by the batches that `follow` has handed out."""

    @property
    def position(self) -> int:
        """Number of samples of the epoch that the gang has taken."""
        return self._position if self._followed is None else self._followed[0]

    def __iter__(self) -> Iterator[int]:
        # This is a generator: frameworks make an iterator before they load a position or set an epoch.
        if self._left() == 0:
            self.set_epoch(self.epoch + 1)
        order = self._order()
        for _ in range(self._left()):
            index = (self._position + self.rank) % self._samples
            self._position, self._taken = self._after(1)
            yield int(order[index])

    def __len__(self) -> int:
        """Return the number of samples that this rank takes in this epoch, those already taken included."""
        return self._taken + self._left()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. The position is kept if it is the epoch under way."""
        if epoch != self.epoch:
            super().set_epoch(epoch)
            self._position = self._taken = 0

    def follow(self, loader: Iterable[Any]) -> Generator[Any, None, None]:
        """Yield the batches of one epoch, and count samples when their batch is handed out.

        Worker processes of a DataLoader take samples from the sampler ahead of the training. A
        StatefulDataLoader accounts for that itself, any other loader needs this method.

        Raises ConfigError for a loader with another sampler, or without a fixed batch size.
        """
        samplers = (
            getattr(loader, "sampler", None),
            getattr(getattr(loader, "batch_sampler", None), "sampler", None),
        )
        if self not in samplers:
            raise ConfigError(
                "GangSampler.follow(loader): this sampler is not the loader's: pass it as "
                "DataLoader(..., sampler=sampler)"
            )
        size = getattr(loader, "batch_size", None) or getattr(
            getattr(loader, "batch_sampler", None), "batch_size", None
        )
        if not isinstance(size, int):
            raise ConfigError(
                f"GangSampler.follow(loader): expected a loader with a fixed batch size, found {size!r}"
            )
        if self._left() == 0:
            self.set_epoch(self.epoch + 1)
        position, taken, left = self._position, self._taken, self._left()
        self._followed = position, taken
        try:
            for batch in loader:
                count = min(size, left)
                left -= count
                taken += count
                position = min(position + count * self.num_replicas, self._samples)
                self._followed = position, taken
                yield batch
            self._followed = self._position, self._taken  # the loader may leave out the last batch
        finally:
            self._position, self._taken = self._followed
            self._followed = None

    def state_dict(self) -> dict[str, Any]:
        taken = self._taken if self._followed is None else self._followed[1]
        return {
            "epoch": self.epoch,
            "position": self.position,
            "taken": taken,
            "seed": self.seed,
            "samples": self._samples,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position. Raises StateMismatchError if it belongs to another order."""
        for name, have in (
            ("seed", self.seed),
            ("samples", self._samples),
            ("shuffle", self.shuffle),
        ):
            if state[name] != have:
                raise StateMismatchError(
                    f"GangSampler: the position {state['position']} of epoch {state['epoch']} was saved "
                    f"with {name}={state[name]}, and this sampler has {name}={have}: the order of the "
                    f"samples differs. Use the same {name}, or start a new training"
                )
        super().set_epoch(state["epoch"])
        self._position, self._taken = state["position"], state["taken"]
        self._followed = None

    def _left(self) -> int:
        """Return the number of samples that each rank still takes in this epoch."""
        rest = self._samples - self._position
        return rest // self.num_replicas if self.drop_last else -(-rest // self.num_replicas)

    def _after(self, count: int) -> tuple[int, int]:
        """Return position and samples taken after each rank has taken `count` more."""
        position = min(self._position + count * self.num_replicas, self._samples)
        return position, self._taken + count

    def _order(self) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self._samples)
        # With `seed + epoch` as the seed, two trainings with neighbouring seeds would share their orders.
        digest = hashlib.blake2b(f"{self.seed} {self.epoch}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big", signed=True))
        return torch.randperm(self._samples, generator=generator)


def _place_in_gang() -> tuple[int, int]:
    """Return the number of this rank and the number of ranks."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    settings = RankSettings.from_env()
    return settings.rank, settings.world_size


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
