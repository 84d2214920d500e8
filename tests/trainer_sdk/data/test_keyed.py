"""A keyed collator gives a batch the same random numbers in every worker and at every time."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from holdfast.data import Indexed, indexed, keyed
from holdfast_core.errors import ConfigError


class Rows:
    """A dataset of numbers, with an attribute that a loader does not know."""

    name = "rows"

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        return float(index)


class Stream(IterableDataset[float]):
    def __iter__(self) -> Any:
        return iter([0.0, 1.0])


def noise(samples: list[float]) -> tuple[list[float], list[float]]:
    """Draw one number of each global generator."""
    drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    return samples, drawn


def loader(collate: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(indexed(Rows()), batch_size=3, collate_fn=collate, **options)


def test_a_batch_is_the_same_from_workers_and_from_the_main_process() -> None:
    collate = keyed(noise, seed=5)
    alone = list(loader(collate))
    assert list(loader(collate, num_workers=2)) == alone
    assert next(samples for samples, _ in alone) == [0.0, 1.0, 2.0]
    assert len({tuple(drawn) for _, drawn in alone}) == 4


def test_a_batch_is_the_same_whatever_was_drawn_before_it() -> None:
    collate = keyed(noise, seed=5)
    batch = [Indexed(7, 7.0), Indexed(2, 2.0)]
    first = collate(batch)
    torch.rand(3)
    random.random()
    np.random.rand()
    assert collate(batch) == first


@pytest.mark.parametrize(
    ("seed", "epoch", "indices"), [(6, 0, (7, 2)), (5, 1, (7, 2)), (5, 0, (2, 7)), (5, 0, (7, 3))]
)
def test_another_seed_epoch_or_order_gives_other_numbers(
    seed: int, epoch: int, indices: tuple[int, ...]
) -> None:
    first = keyed(noise, seed=5)([Indexed(7, 0.0), Indexed(2, 0.0)])
    other = keyed(noise, seed=seed)
    other.set_epoch(epoch)
    found = other([Indexed(index, 0.0) for index in indices])
    assert all(a != b for a, b in zip(first[1], found[1], strict=True))


def test_the_generators_of_the_script_do_not_move_even_if_the_collator_raises() -> None:
    def fails(samples: list[float]) -> None:
        noise(samples)
        raise ValueError

    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    expected = noise([])
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    keyed(noise, seed=5)([Indexed(0, 0.0)])
    with pytest.raises(ValueError):
        keyed(fails, seed=5)([Indexed(0, 0.0)])
    assert noise([]) == expected


def test_persistent_workers_see_the_epoch_of_the_main_process() -> None:
    collate = keyed(noise, seed=5)
    workers = loader(collate, num_workers=2, persistent_workers=True)
    first = list(workers)
    collate.set_epoch(1)
    second = list(workers)
    assert second == list(loader(collate))
    assert second != first


def test_spawned_workers_get_the_same_batches() -> None:
    collate = keyed(noise, seed=5)
    spawned = loader(collate, num_workers=1, multiprocessing_context="spawn")
    assert list(spawned) == list(loader(collate))


def test_a_dataset_that_reads_whole_batches_is_asked_for_whole_batches() -> None:
    class Batches(Rows):
        def __getitems__(self, indices: list[int]) -> list[float]:
            return [float(index) + 0.5 for index in indices]

    batches = DataLoader(indexed(Batches()), batch_size=3, collate_fn=keyed(noise, seed=5))
    assert next(iter(batches))[0] == [0.5, 1.5, 2.5]


def test_the_datasets_own_attributes_stay_available() -> None:
    dataset = indexed(Rows())
    assert dataset.name == "rows"
    assert not hasattr(dataset, "set_epoch")
    assert dataset[torch.tensor(3)] == Indexed(3, 3.0)


def test_samples_without_indices_are_refused_with_the_call_that_adds_them() -> None:
    plain = DataLoader(TensorDataset(torch.arange(4)), collate_fn=keyed(noise, seed=5))
    with pytest.raises(ConfigError, match=r"holdfast\.data\.indexed\(dataset\)"):
        next(iter(plain))


def test_an_iterable_dataset_is_refused_with_what_it_must_yield() -> None:
    with pytest.raises(ConfigError, match=r"Indexed\(position, sample\)"):
        indexed(Stream())
