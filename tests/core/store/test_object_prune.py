"""A sweep deletes no object that exists in a checkpoint, may soon belong to one, or is needed."""

from __future__ import annotations

import pytest

from holdfast_core.ids import CheckpointId, RestartRound, Step
from holdfast_core.store.rules import dead


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
def test_a_checkpoint_is_dead_only_if_it_can_never_get_a_manifest(
    checkpoint: CheckpointId, expected: bool
) -> None:
    found = dead({checkpoint}, MANIFESTS, {at(28)}, RestartRound(2))
    assert found == ({checkpoint} if expected else set())


def test_no_checkpoint_of_a_round_without_manifests_is_dead() -> None:
    assert dead({at(1), at(1, 1)}, {at(9, 1)}, (), RestartRound(2)) == {at(1, 1)}
