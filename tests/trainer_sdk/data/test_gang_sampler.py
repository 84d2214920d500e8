"""The position of GangSampler: no sample is lost or repeated, whatever happens to the gang."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from holdfast.data import GangSampler
from holdfast_core.errors import ConfigError, StateMismatchError


def gang(samples: int, ranks: int, **options: object) -> list[GangSampler]:
    return [
        GangSampler(range(samples), ranks, rank, seed=3, **options)  # type: ignore[arg-type]
        for rank in range(ranks)
    ]


def order_of(samples: int, epoch: int) -> list[int]:
    (one,) = gang(samples, 1)
    one.set_epoch(epoch)
    return list(one)


@st.composite
def lives(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, int]]]:
    """Draw a number of samples, and for each life of a gang its ranks, saved steps and lost steps."""
    samples = draw(st.integers(8, 90))
    life = st.tuples(st.integers(1, 5), st.integers(0, 12), st.integers(0, 4))
    return samples, draw(st.lists(life, min_size=1, max_size=6))


@pytest.mark.fault("A gang restarts with another number of ranks in the middle of an epoch")
@given(lives(), st.integers(1, 4))
def test_over_kills_and_changes_of_the_ranks_every_sample_is_trained_once(
    plan: tuple[int, list[tuple[int, int, int]]], batch: int
) -> None:
    samples, steps = plan
    trained: list[int] = []
    state = None
    for ranks, saved_steps, lost_steps in steps:
        members = gang(samples, ranks)
        for member in members:
            if state is not None:
                member.load_state_dict(state)
        if state is not None and state["position"] == samples:
            break
        streams = [iter(member) for member in members]
        left = len(members[0]) - members[0].state_dict()["taken"]
        for _ in range(min(saved_steps, left // batch)):
            for _ in range(batch):
                trained += [next(stream) for stream in streams]
        states = [member.state_dict() for member in members]
        assert all(one == states[0] for one in states)
        state = states[0]
        for _ in range(min(lost_steps, left - min(saved_steps, left // batch) * batch)):
            for stream in streams:
                next(stream)  # trained after the save, and lost with the kill
    order = order_of(samples, 0)
    position = state["position"] if state is not None else 0
    # Only the padding at the very end of an epoch may be trained a second time.
    assert trained[:position] == order[:position]
    assert trained[position:] == order[: len(trained) - position]
    assert len(trained) - position < 5


@given(st.integers(5, 60), st.integers(1, 5), st.integers(1, 5), st.integers(0, 30))
def test_with_drop_last_fewer_samples_than_ranks_are_left_out_and_none_is_repeated(
    samples: int, before: int, after: int, steps: int
) -> None:
    first = gang(samples, before, drop_last=True)
    streams = [iter(one) for one in first]
    trained = [next(stream) for _ in range(min(steps, samples // before)) for stream in streams]
    second = gang(samples, after, drop_last=True)
    for one in second:
        one.load_state_dict(first[0].state_dict())
    if samples - second[0].position >= after:
        rest = [list(one) for one in second]
        assert len({len(one) for one in rest}) == 1
        trained += [index for step in zip(*rest, strict=True) for index in step]
    assert len(set(trained)) == len(trained)
    assert samples - len(trained) < max(before, after)
    assert trained == order_of(samples, 0)[: len(trained)]


@given(st.integers(1, 50), st.integers(1, 4), st.integers(0, 3))
def test_without_changes_an_epoch_has_the_length_that_len_says(
    samples: int, ranks: int, epoch: int
) -> None:
    for one in gang(samples, ranks):
        one.set_epoch(epoch)
        assert len(one) == len(list(one)) == len(one) == -(-samples // ranks)


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    assert order_of(50, 1) == order_of(50, 1)
    assert order_of(50, 0) != order_of(50, 1)
    shifted = GangSampler(range(50), 1, 0, seed=4)
    assert list(shifted) not in (order_of(50, 0), order_of(50, 1))  # seed + 1 is no next epoch
    assert sorted(order_of(50, 0)) == list(range(50))
    assert list(GangSampler(range(5), 1, 0, shuffle=False)) == [0, 1, 2, 3, 4]


def test_the_next_iterator_after_an_epoch_begins_the_next_one() -> None:
    (one,) = gang(6, 1)
    first, second = list(one), list(one)
    assert (first, second) == (order_of(6, 0), order_of(6, 1))
    one.set_epoch(1)  # the one that has just ended
    assert list(one) == order_of(6, 2)


def test_setting_the_epoch_under_way_keeps_the_position() -> None:
    (one,) = gang(6, 1)
    stream = iter(one)
    begun = [next(stream), next(stream)]
    one.set_epoch(0)
    assert begun + list(one) == order_of(6, 0)
    one.set_epoch(5)
    assert one.position == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_followed_batches_count_when_they_are_handed_out(workers: int) -> None:
    """Workers take samples ahead. The position must not, or a restart would lose them."""
    (one,) = gang(20, 1)
    loader = DataLoader(range(20), 4, sampler=one, num_workers=workers)  # type: ignore[arg-type]
    batches = one.follow(loader)
    begun = [next(batches), next(batches)]
    saved = one.state_dict()
    assert saved["position"] == 8
    batches.close()
    (again,) = gang(20, 1)
    again.load_state_dict(saved)
    loader = DataLoader(range(20), 4, sampler=again, num_workers=workers)  # type: ignore[arg-type]
    rest = list(again.follow(loader))
    assert torch.cat([*begun, *rest]).tolist() == order_of(20, 0)
    assert again.state_dict()["position"] == 20


def test_leaving_the_batches_early_gives_back_what_was_taken_ahead() -> None:
    (one,) = gang(20, 1)
    loader = DataLoader(range(20), 4, sampler=one, num_workers=2)  # type: ignore[arg-type]
    for batch in one.follow(loader):
        begun = batch
        break
    rest = list(one.follow(loader))
    assert torch.cat([begun, *rest]).tolist() == order_of(20, 0)


def test_a_loader_with_another_sampler_is_refused() -> None:
    (one,) = gang(20, 1)
    with pytest.raises(ConfigError, match="sampler=sampler"):
        next(one.follow(DataLoader(range(20), 4)))  # type: ignore[arg-type]
    whole = DataLoader(range(20), None, sampler=one)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="fixed batch size"):
        next(one.follow(whole))


@pytest.mark.parametrize("change", [{"seed": 9}, {"samples": 21}, {"shuffle": False}])
def test_a_position_of_another_order_is_refused(change: dict[str, object]) -> None:
    (one,) = gang(20, 1)
    with pytest.raises(StateMismatchError, match=next(iter(change))):
        one.load_state_dict({**one.state_dict(), **change})


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 4 samples, found 3"):
        gang(3, 4, drop_last=True)
