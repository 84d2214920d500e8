"""A sampler whose position belongs to the gang, so that a training continues on another number of ranks.

Example: a gang of 4 ranks has trained 1,000 samples of an epoch when it is killed. It restarts with 3 ranks.
Each of them continues at sample 1,000 of the same order, so no sample is lost or repeated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from holdfast.base.settings import RankSettings
from holdfast_core.errors import ConfigError, StateMismatchError


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
