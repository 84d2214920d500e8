"""The node volume is checked before the first step."""

from __future__ import annotations

import pytest

from holdfast.slots.capacity import node_room_warning
from holdfast_core.errors import CapacityError
from holdfast_core.messages.schema import Policy

MIB = 1 << 20
POLICY = Policy(10, keep_last=3, peer_copies=1)
"""Four checkpoints of two shards each."""


def test_room_for_all_kept_checkpoints_and_one_that_is_saved_suffices() -> None:
    assert node_room_warning(100 * MIB, POLICY, 800 * MIB) == ""


def test_less_room_is_a_warning_with_both_numbers_and_what_to_change() -> None:
    text = node_room_warning(100 * MIB, POLICY, 800 * MIB - 1)
    for part in (800 * MIB - 1, 800 * MIB, "spec.checkpoint.node.volume", "retention.keepLast"):
        assert str(part) in text


def test_without_copies_half_the_room_suffices() -> None:
    assert node_room_warning(100 * MIB, Policy(10, peer_copies=0), 400 * MIB) == ""


def test_a_volume_that_is_smaller_than_one_save_is_refused() -> None:
    with pytest.raises(
        CapacityError, match=rf"has {MIB - 1} bytes .* needs {MIB}: raise the size of "
    ):
        node_room_warning(MIB, POLICY, MIB - 1)


def test_a_volume_with_room_for_one_save_is_not_refused() -> None:
    assert node_room_warning(MIB, POLICY, MIB)
