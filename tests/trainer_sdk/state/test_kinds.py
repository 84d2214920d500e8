"""Enum members, named tuples and subclasses of numbers and texts are saved without pickle and come back."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.support.trainer.payloads import RANK, stored
from tests.support.trainer.snapshots import take_snapshot

from holdfast.state.loading.load import load_state
from holdfast.state.loading.restore_target import RestoreTarget
from holdfast.state.snapshot import Snapshots, read_payload
from holdfast_core.errors import StateMismatchError


class Stage(enum.IntEnum):
    WARM = 1
    FULL = 2


class Split(enum.Enum):
    TRAIN = "train"
    TEST = ("test", 1)


class Name(str, enum.Enum):  # noqa: UP042 (libraries still have such enums)
    ADAM = "adam"


class Flags(enum.Flag):
    A = 1
    B = 2


class Seconds(float): ...


class Version(str):
    def __str__(self) -> str:
        return "not the text"


class Point(NamedTuple):
    x: Any
    y: Any


def restored(
    current: dict[str, Any], saved: dict[str, Any], *, strict: bool = True
) -> dict[str, Any]:
    classes = RestoreTarget(current, Snapshots(RANK), strict=strict).classes
    load_state(current, read_payload(stored(saved), classes), strict=strict)
    return current


@pytest.mark.parametrize(
    ("current", "saved"),
    [
        pytest.param(Stage.WARM, Stage.FULL, id="int-enum"),
        pytest.param(Split.TRAIN, Split.TEST, id="enum"),
        pytest.param(Name.ADAM, Name.ADAM, id="str-enum"),
        pytest.param(Flags.A, Flags.A | Flags.B, id="flags"),
        pytest.param(Point(0, 0), Point(1, [2.5]), id="named-tuple"),
        pytest.param([Split.TRAIN], [Split.TEST, Split.TRAIN], id="longer-list"),
        pytest.param({Split.TRAIN: 0}, {Split.TEST: 2, Split.TRAIN: 3}, id="keys"),
        pytest.param(Point(Stage.WARM, ()), Point(Stage.FULL, (Stage.WARM,)), id="nested"),
    ],
)
def test_a_value_of_the_scripts_own_class_comes_back_as_one(current: Any, saved: Any) -> None:
    back = restored({"v": current}, {"v": saved})["v"]
    assert repr(back) == repr(saved)
    assert type(back) is type(saved)


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        pytest.param(Stage.FULL, 2, id="int-enum"),
        pytest.param(Split.TEST, ("test", 1), id="enum"),
        pytest.param(Name.ADAM, "adam", id="str-enum"),
        pytest.param(Seconds(1.5), 1.5, id="float"),
        pytest.param(Version("2.5"), "2.5", id="str"),
        pytest.param(Point(1, Stage.WARM), (1, 1), id="named-tuple"),
    ],
)
def test_a_value_of_a_class_that_the_state_does_not_hold_comes_back_as_built_in(
    saved: Any, expected: Any
) -> None:
    back = restored({"v": None}, {"v": saved})["v"]
    assert repr(back) == repr(expected)


def test_an_object_gets_members_of_the_enums_that_it_has() -> None:
    class Loader:
        def __init__(self, split: Split) -> None:
            self.split = split

        def state_dict(self) -> dict[str, Any]:
            return {"split": self.split}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.split = state["split"]

    loader = Loader(Split.TRAIN)
    restored({"data": loader}, {"data": Loader(Split.TEST)})
    assert loader.split is Split.TEST


def test_tensors_in_a_named_tuple_are_loaded_in_place() -> None:
    first, second = torch.zeros(3), np.zeros(2)
    state = {"v": Point(first, second)}
    restored(state, {"v": Point(torch.ones(3), np.full(2, 5.0))})
    assert type(state["v"]) is Point
    assert state["v"].x is first
    assert first.tolist() == [1.0, 1.0, 1.0]
    assert second.tolist() == [5.0, 5.0]


def test_names_of_tensors_do_not_depend_on_how_an_enum_is_printed() -> None:
    state = {"v": {Name.ADAM: torch.ones(1), Stage.FULL: torch.ones(1)}}
    assert [leaf.name for leaf in take_snapshot(state, RANK).leaves] == ["v.adam", "v.2"]


@pytest.mark.fault("An enum lost the member that a checkpoint holds")
def test_a_member_that_the_enum_no_longer_has_is_refused() -> None:
    class Old(enum.Enum):
        GONE = "gone"

    class New(enum.Enum):
        HERE = "here"

    New.__qualname__ = Old.__qualname__
    with pytest.raises(StateMismatchError, match=r"'gone' as a member of .*Old"):
        restored({"v": [New.HERE]}, {"v": [Old.GONE]})
    state = restored({"v": [New.HERE]}, {"v": [Old.GONE]}, strict=False)
    assert state == {"v": ["gone"]}


def test_fields_of_a_named_tuple_are_found_by_name() -> None:
    class Swapped(NamedTuple):
        y: Any
        x: Any

    class Longer(NamedTuple):
        x: Any
        y: Any
        z: Any

    Swapped.__qualname__ = Longer.__qualname__ = Point.__qualname__
    assert restored({"v": Swapped(0, 0)}, {"v": Point(1, 2)}) == {"v": Swapped(y=2, x=1)}
    with pytest.raises(StateMismatchError, match="fields x, y, expected x, y, z"):
        restored({"v": Longer(0, 0, 0)}, {"v": Point(1, 2)})
    assert restored({"v": Longer(0, 0, 0)}, {"v": Point(1, 2)}, strict=False) == {"v": (1, 2)}


def test_two_classes_of_one_name_are_not_mixed_up() -> None:
    def enum_of(value: int) -> Any:
        class Local(enum.IntEnum):
            ONE = value

        return Local

    one, other = enum_of(1), enum_of(2)
    back = restored({"a": one.ONE, "b": other.ONE}, {"a": one.ONE, "b": other.ONE})
    assert [(type(value), value) for value in back.values()] == [(int, 1), (int, 2)]


def test_later_snapshots_see_another_member_and_another_item() -> None:
    state = {"v": Point(torch.ones(2), Stage.WARM), "w": torch.ones(1)}
    snapshots = Snapshots(RANK)
    for _ in range(3):
        snapshots.take(state)
    state["v"] = Point(torch.zeros(2), Stage.FULL)
    assert snapshots.take(state).objects == take_snapshot(state, RANK).objects
    assert [leaf.source.tolist() for leaf in snapshots.take(state).leaves] == [[0.0, 0.0], [1.0]]
