"""A sweep deletes no object that exists in a checkpoint, may soon belong to one, or is needed."""

from __future__ import annotations

import pytest

from holdfast_core.format.references import References
from holdfast_core.ids import CheckpointId, RestartRound, Step
from holdfast_core.store.prune import dead, needed


def at(step: int, round: int = 2) -> CheckpointId:
    return CheckpointId(Step(step), RestartRound(round))


MANIFESTS = {at(30), at(20, 1), at(90, 1)}
CASES = {
    "exists": (at(20, 1), False),
    "before the newest": (at(25), True),
    "on its way": (at(28), False),
    "behind the newest: begun after this look": (at(31), False),
    "of an older round": (at(95, 1), True),
    "of a newer round: another coordinator's": (at(1, 3), False),
}


@pytest.mark.parametrize(("checkpoint", "expected"), CASES.values(), ids=CASES.keys())
def test_dead(checkpoint: CheckpointId, expected: bool) -> None:
    found = dead({checkpoint}, MANIFESTS, {at(28)}, RestartRound(2))
    assert found == ({checkpoint} if expected else set())


def test_before_anything_of_the_round_exists_nothing_of_it_is_dead() -> None:
    assert dead({at(1), at(1, 1)}, {at(9, 1)}, (), RestartRound(2)) == {at(1, 1)}


def test_needed_by_anybody_whose_word_counts() -> None:
    said = {
        at(30): References(at(30), {at(10): 1, at(20): 1}),
        at(25): References(at(25), {at(5): 1}),
    }
    assert needed(said) == {at(5), at(10), at(20)}
    assert needed(said, ignored={at(25)}) == {at(10), at(20)}
