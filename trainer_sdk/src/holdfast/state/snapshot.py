"""The payload of a shard for one state. It is planned once, and again when the structure changes.

The payload describes itself (see core's `format.payload`). The layout document has the same information
for the merge of all ranks' layouts into the layout of a checkpoint.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from holdfast.state.template import Template, make_template
from holdfast.state.tensors import (
    RAW,
    Leaf,
    copy_from_device,
    copy_jobs,
    own_name,
    place_of,
    view_stored,
)
from holdfast.state.tree import STATE, Decoder, Encoder, StateDictCache
from holdfast_core.errors import FormatError, UnsupportedStateError
from holdfast_core.format.digest import digest_of
from holdfast_core.format.payload import (
    LENGTH_BYTES,
    PayloadPlan,
    PayloadTensor,
    header_bytes,
    parse_payload,
    plan_payload,
    unpack_objects,
)
from holdfast_core.format.rank_layout import RankLayout, TensorSlice
from holdfast_core.ids import ByteRange, Digest, Rank

PIECE_BYTES = 32 << 20
"""Largest piece of a tensor that one thread copies."""
BATCH_BYTES = 4 << 20
"""Largest batch of small tensors that one call copies."""
_GRAIN_BYTES = 4096


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pause the collector while a state is read.

    Reading a state of 100,000 tensors makes a million objects that stay alive. The collector would visit all
    of them again and again, which takes as long as the reading itself.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Contents of a state at one moment: references to its tensors, and the rest as JSON."""

    leaves: tuple[Leaf, ...]
    objects: bytes
    """Canonical JSON of everything other than tensors and arrays."""
    keys: tuple[str, ...]
    signature: tuple[Any, ...]
    """Names, dtypes, shapes and offsets of all leaves. A plan is valid while it is the same."""
    modules: tuple[tuple[str, Any], ...] = ()
    """Each module, after its path in the state."""
    optimizers: tuple[Any, ...] = ()
    """All optimizers of the state."""


@dataclass(frozen=True, slots=True)
class DeviceCopy:
    """Copy of one tensor from its device to its place in the payload."""

    leaf: Leaf
    run: Callable[[], None]

    @property
    def source(self) -> Any:
        return self.leaf.source


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Position of every leaf in the payload. It is reused while the structure of the state is the same."""

    signature: tuple[Any, ...]
    keys: tuple[str, ...]
    payload: PayloadPlan
    ranges: Mapping[str, ByteRange]
    layout: bytes
    layout_digest: Digest

    @property
    def payload_bytes(self) -> int:
        return self.payload.total_bytes

    def fits(self, snapshot: Snapshot) -> bool:
        """Return whether the snapshot has this plan's structure and its objects fit into the room."""
        return (
            self.signature == snapshot.signature
            and self.keys == snapshot.keys
            and len(snapshot.objects) <= self.payload.objects.length_bytes
        )


class Snapshots:
    """Takes the snapshots of one training, quickly while the structure of its state stays the same."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._template: Template | None = None
        self._last: tuple[Any, ...] | None = None
        """Signature of the last snapshot that was encoded in full."""
        self._unsupported: tuple[Any, ...] | None = None
        """Signature of a state for which no template can be made."""

    @paused_collector()
    def take(self, state: Mapping[str, Any]) -> Snapshot:
        """Read the state without copying its tensors. Raises what `take_snapshot` raises."""
        state_dicts = StateDictCache()
        if self._template is not None and self._last is not None:
            found = self._template.collect(state, state_dicts)
            if found is not None:
                keys = tuple(sorted(state))
                return Snapshot(
                    found.leaves, found.objects, keys, self._last, found.modules, found.optimizers
                )
        encoder = Encoder(self._rank, state_dicts=state_dicts)
        snapshot = _encode(state, encoder)
        before, self._last, self._template = self._last, snapshot.signature, None
        # A template is made when a structure is met twice: a state that always changes needs none.
        if before == self._last != self._unsupported:
            self._template = make_template(state, encoder)
            if self._template is None:
                self._unsupported = self._last
        return snapshot


@paused_collector()
def take_snapshot(state: Mapping[str, Any], rank: Rank) -> Snapshot:
    """Read the state without copying its tensors.

    Raises UnsupportedStateError that names the path of what cannot be saved, and StateDictError that names
    the path of a part whose own state_dict() raised.
    """
    return _encode(state, Encoder(rank))


def _encode(state: Mapping[str, Any], encoder: Encoder) -> Snapshot:
    if not isinstance(state, Mapping):
        raise UnsupportedStateError(
            f"state: expected a dict from names to parts, found {type(state).__name__}"
        )
    for key in state:
        if not isinstance(key, str) or not key:
            raise UnsupportedStateError(
                f"state: {key!r} is not a valid name: expected a non-empty str"
            )
    try:
        objects = encoder.encode_state(state)
    except FormatError as error:
        raise UnsupportedStateError(f"state: {error}") from error
    leaves = tuple(encoder.leaves)
    return Snapshot(
        leaves,
        objects,
        tuple(sorted(state)),
        tuple((leaf.name, leaf.dtype, leaf.shape, leaf.offsets) for leaf in leaves),
        tuple(encoder.modules),
        tuple(encoder.optimizers),
    )


@paused_collector()
def plan_save(snapshot: Snapshot, rank: Rank) -> SavePlan:
    """Plan the payload, with room for objects that grow, such as counters and lists."""
    room = len(snapshot.objects) + len(snapshot.objects) // 4 + _GRAIN_BYTES
    room += -room % _GRAIN_BYTES
    payload = plan_payload(
        ((x.name, x.dtype, x.shape) for x in snapshot.leaves), room, _frozen(snapshot)
    )
    ranges = {tensor.fqn: tensor.byte_range for tensor in payload.tensors}
    layout = RankLayout(
        rank=rank,
        tensors={
            leaf.name: TensorSlice(
                leaf.dtype, leaf.global_shape, leaf.offsets, leaf.shape, ranges[leaf.name]
            )
            for leaf in snapshot.leaves
        },
        objects={key: payload.objects for key in snapshot.keys},
        payload_bytes=payload.total_bytes,
    ).to_bytes()
    return SavePlan(snapshot.signature, snapshot.keys, payload, ranges, layout, digest_of(layout))


def _frozen(snapshot: Snapshot) -> frozenset[str]:
    """Return the names of parameters without gradients, which no optimizer changes.

    If a module uses other names in its state_dict, its parameters count as trained. That only makes saves
    transfer more bytes.
    """
    return frozenset(
        f"{path}.{name}"
        for path, module in snapshot.modules
        for name, parameter in module.named_parameters()
        if not parameter.requires_grad
    )


class PayloadTarget:
    """Memory for the payloads of one plan. The views of its tensors are made once and used by each save."""

    def __init__(self, plan: SavePlan, target: np.ndarray[Any, Any]) -> None:
        """`target` is a uint8 array of at least `plan.payload_bytes` elements."""
        self.plan = plan
        self._target = target
        self._places: dict[str, tuple[tuple[bool, bool], Any]] = {}
        """The place of each leaf, after what the type of its view depends on."""

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
        leaves = snapshot.leaves
        if leave_out is not None:
            leaves = tuple(leaf for leaf in leaves if not leave_out(leaf.source))
        pairs = ((leaf, self._place(leaf)) for leaf in leaves)
        run(copy_jobs(pairs, PIECE_BYTES, BATCH_BYTES))

    def _place(self, leaf: Leaf) -> Any:
        kind = leaf.is_raw, isinstance(leaf.source, np.ndarray)
        found = self._places.get(leaf.name)
        if found is None or found[0] != kind:
            where = self.plan.ranges[leaf.name]
            found = kind, place_of(leaf, self._target[where.start : where.stop])
            self._places[leaf.name] = found
        return found[1]


def device_copies(
    plan: SavePlan,
    snapshot: Snapshot,
    target: np.ndarray[Any, Any],
    is_on_device: Callable[[object], bool],
    *,
    non_blocking: bool,
) -> list[DeviceCopy]:
    """Return the copies that `PayloadTarget.write` leaves out with `leave_out=is_on_device`.

    The caller runs them on the stream of its choice.
    """
    copies: list[DeviceCopy] = []
    for leaf in snapshot.leaves:
        if leaf.byte_count and is_on_device(leaf.source):
            where = plan.ranges[leaf.name]
            place = target[where.start : where.stop]
            run = partial(copy_from_device, leaf, place, non_blocking=non_blocking)
            copies.append(DeviceCopy(leaf, run))
    return copies


@paused_collector()
def read_payload(source: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return the saved state, with views into `source`. Raises FormatError for an invalid payload."""
    size = header_bytes(source[:LENGTH_BYTES].tobytes(), source.size)
    plan = parse_payload(source[:size].tobytes(), source.size)

    def stored(tensor: PayloadTensor) -> np.ndarray[Any, Any]:
        return source[tensor.byte_range.start : tensor.byte_range.stop]

    where = plan.objects
    return build_state(plan, source[where.start : where.stop].tobytes(), stored)


def build_state(
    plan: PayloadPlan, objects: bytes, stored: Callable[[PayloadTensor], np.ndarray[Any, Any]]
) -> dict[str, Any]:
    """Return the saved state, with tensors over the memory that `stored` returns for each of them.

    Args:
        plan: Parsed header of the payload.
        objects: The objects of the payload.
        stored: Returns the uint8 array of a tensor. It is called for each tensor in use.

    Raises:
        FormatError: The payload is invalid.
    """
    tensors = {tensor.fqn: tensor for tensor in plan.tensors}

    def resolve(reference: dict[str, Any]) -> Any:
        return _view(tensors, reference, stored)

    root = unpack_objects(objects)
    if not isinstance(root, dict) or not isinstance(root.get(STATE), dict):
        raise FormatError("payload: the objects contain no state")
    decoded = Decoder(resolve).decode(root[STATE])
    if not isinstance(decoded, dict):
        raise FormatError("payload: the state is not a dict")
    return decoded


def _view(
    tensors: dict[str, PayloadTensor],
    reference: dict[str, Any],
    stored: Callable[[PayloadTensor], np.ndarray[Any, Any]],
) -> Any:
    name = reference["$tensor"]
    tensor = tensors.get(name)
    if tensor is None:
        raise FormatError(f"payload: the state refers to tensor {name!r}, which does not exist")
    dtype = reference.get("dtype")
    if dtype is not None and tensor.dtype != RAW:
        raise FormatError(f"payload: tensor {name!r} of {dtype} is stored as {tensor.dtype}")
    shape = tensor.shape if dtype is None else tensor.shape[:-1]
    return view_stored(
        stored(tensor),
        own_name(tensor.dtype) if dtype is None else dtype,
        shape,
        array=bool(reference.get("array")),
    )
