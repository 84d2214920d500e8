"""Memory for the payloads of one plan: a slot, into which each save copies its snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from holdfast.state.copying.jobs import Copy, Places, copies_into, stored_tensor
from holdfast.state.snapshot import SavePlan, Snapshot
from holdfast.state.tensors import Leaf

PIECE_BYTES = 32 << 20
"""Largest piece of a tensor that one thread copies."""
BATCH_BYTES = 4 << 20
"""Largest batch of small tensors that one call copies."""


@dataclass(slots=True, eq=False)
class DeviceCopy:
    """Describes the copy of one tensor from its device to its place in the payload.

    No code changes an instance. The class is not frozen, because Python needs three times as long to create
    an instance of a frozen class.
    """

    leaf: Leaf
    place: Any
    """Tensor over the memory of the payload, with the shape of what `stored_tensor` returns."""

    @property
    def source(self) -> Any:
        return self.leaf.source


def run_device_copies(copies: Sequence[DeviceCopy], *, non_blocking: bool) -> None:
    """Copy, each on the current stream of its tensor's device.

    Args:
        copies: What `PayloadTarget.device_copies` returned.
        non_blocking: Return before the stream has done them. This requires page-locked places.
    """
    import torch

    # One call for all: a call of `copy_` for each tensor takes Python longer than the driver.
    torch._foreach_copy_(
        [copy.place for copy in copies],
        [stored_tensor(copy.leaf) for copy in copies],
        non_blocking=non_blocking,
    )


class PayloadTarget:
    """Memory for the payloads of one plan. The calls that fill it are made once for each structure."""

    def __init__(self, plan: SavePlan, target: np.ndarray[Any, Any]) -> None:
        """`target` is a uint8 array of at least `plan.payload_bytes` elements."""
        self.plan = plan
        self._target = target
        self._made_for: tuple[Any, Any] | None = None
        self._copies: list[tuple[int, Copy]] = []
        self._places = Places(target)
        self._placed_for: Any = None
        self._placed: list[tuple[int, Any]] = []
        """Position and place of each leaf from which a device has copied."""

    def write(
        self,
        snapshot: Snapshot,
        run: Callable[[list[tuple[int, Callable[[], object]]]], None],
        leave_out: Callable[[object], bool] | None = None,
    ) -> None:
        """Copy the state's current bytes.

        Args:
            snapshot: Snapshot that fits the plan.
            run: Runs the copies and returns when all are done.
            leave_out: Whether to leave out a tensor, which the caller copies itself.
        """
        head, target = self.plan.payload.header, self._target
        target[: len(head)] = np.frombuffer(head, dtype=np.uint8)
        place = self.plan.payload.objects
        text = np.frombuffer(snapshot.objects, dtype=np.uint8)
        target[place.start : place.start + len(text)] = text
        target[place.start + len(text) : place.stop] = ord(" ")
        made_for = snapshot.structure, leave_out
        if snapshot.structure is None or made_for != self._made_for:
            self._copies = list(self._make_copies(snapshot, leave_out))
            self._made_for = made_for
        run([(size, partial(copy, snapshot.sources)) for size, copy in self._copies])

    def _make_copies(
        self, snapshot: Snapshot, leave_out: Callable[[object], bool] | None
    ) -> Iterator[tuple[int, Copy]]:
        places, ranges = self._places, self.plan.ranges
        return copies_into(
            (
                (position, leaf, places.of(leaf, ranges[leaf.name].start))
                for position, leaf in enumerate(snapshot.leaves)
                if leaf.byte_count and (leave_out is None or not leave_out(leaf.source))
            ),
            PIECE_BYTES,
            BATCH_BYTES,
        )

    def device_copies(
        self, snapshot: Snapshot, is_on_device: Callable[[object], bool]
    ) -> list[DeviceCopy]:
        """Return the copies that `write` leaves out with `leave_out=is_on_device`.

        The caller runs them on the stream of its choice.
        """
        leaves = snapshot.leaves
        if snapshot.structure is None or snapshot.structure != self._placed_for:
            self._placed = [
                (position, self._place_of(leaf))
                for position, leaf in enumerate(leaves)
                if leaf.byte_count and is_on_device(leaf.source)
            ]
            self._placed_for = snapshot.structure
        return [DeviceCopy(leaves[position], place) for position, place in self._placed]

    def _place_of(self, leaf: Leaf) -> Any:
        place = self._places.of(leaf, self.plan.ranges[leaf.name].start)
        if not leaf.is_raw:
            return place
        import torch

        return torch.from_numpy(place)
