"""The choice of parts, and the order of participants within a part."""

from __future__ import annotations

import pytest
from benchmarks.datapath.parts import FULL, QUICK, another_round, chosen, turns


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        pytest.param([], [part.name for part in FULL], id="all"),
        pytest.param(["A2"], ["save"], id="one-id-of-a-part"),
        pytest.param(["a8", "A1"], ["save", "digests"], id="in-the-order-of-the-run"),
        pytest.param(["A9"], [], id="cannot-be-measured-yet"),
    ],
)
def test_only(only: list[str], expected: list[str]) -> None:
    assert [part.name for part in chosen(FULL, only)] == expected


def test_an_unknown_id_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"--only A99: expected some of A1, A1-MANY, A2, A3, A8"):
        chosen(QUICK, ["A99"])


def test_each_participant_comes_first_in_its_turn_and_all_come_in_each() -> None:
    for part in FULL:
        count = len(part.participants)
        rounds = [turns(part.participants, round_) for round_ in range(count)]
        assert [round_[0] for round_ in rounds] == list(part.participants)
        assert all(
            sorted(p.name for p in round_) == sorted(p.name for p in part.participants)
            for round_ in rounds
        )


def test_names_are_unique_within_a_part_and_ids_over_all() -> None:
    for parts in (FULL, QUICK):
        ids = [id_ for part in parts for id_ in part.ids]
        assert len(ids) == len(set(ids))
        for part in parts:
            names = [participant.name for participant in part.participants]
            assert len(names) == len(set(names))


def test_the_quick_run_needs_no_environment_of_peers() -> None:
    assert not any(p.own_environment for part in QUICK for p in part.participants)


@pytest.mark.parametrize(
    ("done", "spent", "budget", "expected"),
    [
        pytest.param(0, 99.0, 10.0, True, id="the-first-always"),
        pytest.param(1, 5.0, 10.0, True, id="just-fits"),
        pytest.param(1, 5.1, 10.0, False, id="would-go-over"),
        pytest.param(2, 6.0, 10.0, True, id="by-the-mean-of-rounds"),
        pytest.param(4, 999.0, None, True, id="no-budget"),
    ],
)
def test_another_round(done: int, spent: float, budget: float | None, expected: bool) -> None:
    assert another_round(done, spent, budget) is expected
