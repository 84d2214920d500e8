"""The payload of a shard for one state. It is planned once, and again when the structure changes.

The payload describes itself (see core's `format.payload`). The layout document has the same information
for the merge of all ranks' layouts into the layout of a checkpoint.

The bytes of a snapshot are copied into the memory of a payload as the plan says. Tensors and arrays are
split and batched so that two threads share the work. The memory is that of a slot, into which each save
copies its snapshot.
"""

from __future__ import annotations

import ctypes
import gc
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import accumulate
from typing import Any

import numpy as np

from holdfast.state.kinds import NO_CLASSES, Classes, plain_names
from holdfast.state.template import Template, make_template
from holdfast.state.tensors import RAW, Leaf, bytes_of, is_tensor, own_name, torch_view, view_stored
from holdfast.state.tree import METRICS, STATE, Decoder, Encoder, StateDictCache, StateText, is_text
from holdfast_core.errors import FormatError, UnsupportedStateError
from holdfast_core.format.canonical import digest_of, dumps_canonical
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

_GRAIN_BYTES = 4096
_MAX_UNUSED = 2
"""The structure often changes once, when the optimizers create their state."""


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pause the collector while a state is read.

    Reading a state of 100,000 tensors makes a million objects that stay alive. The collector would visit all
    of them again and again, which takes as long as the reading itself.
    """
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class Snapshot:
    """Contents of a state at one moment: references to its tensors, and the rest as JSON."""

    sources: Sequence[Any]
    """`Leaf.source` of each leaf."""
    read_leaves: Callable[[], tuple[Leaf, ...]]
    """Returns the leaves. A save of a state in host memory needs only the sources."""
    objects: bytes
    """Canonical JSON of everything other than tensors and arrays."""
    keys: tuple[str, ...]
    signature: tuple[Any, ...]
    """Names, dtypes, shapes and boxes of all leaves. A plan is valid while it is the same."""
    structure: Template | None = None
    """Snapshots with the same template have the same leaves, but for their data."""
    modules: Sequence[tuple[str, Any]] = ()
    """Each module, after its path in the state."""
    optimizers: Sequence[Any] = ()
    """All optimizers of the state."""
    classes: Mapping[str, type[Any] | None] = field(default_factory=dict)
    """See `Encoder.classes`."""

    def with_metrics(self, metrics: Mapping[str, float]) -> Snapshot:
        """Return this snapshot with reported metrics in its objects, where there are some."""
        if not metrics:
            return self
        found = dumps_canonical({METRICS: dict(metrics)})
        return replace(self, objects=b"%b,%b" % (found[:-1], self.objects[1:]))

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        return self.read_leaves()


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
        self.rank = rank
        self._template: Template | None = None
        self._last: tuple[Any, ...] | None = None
        """Signature of the last snapshot that was encoded in full."""
        self._unused = 0
        """Number of templates, one after the other, with which no snapshot was taken."""

    @paused_collector()
    def take(self, state: Mapping[str, Any]) -> Snapshot:
        """Read the state without copying its tensors.

        Raises UnsupportedStateError that names the path of what cannot be saved, and StateDictError that
        names the path of a part whose own state_dict() raised.
        """
        state_dicts = StateDictCache()
        if self._template is not None and self._last is not None:
            found = self._template.collect(state, state_dicts)
            if found is not None:
                self._unused = 0
                return Snapshot(
                    found.sources,
                    partial(self._template.leaves, found),
                    self._template.objects(found),
                    tuple(sorted(state)),
                    self._last,
                    self._template,
                    found.modules,
                    found.optimizers,
                    found.classes,
                )
        encoder = Encoder(self.rank, state_dicts=state_dicts)
        snapshot, text = _encode(state, encoder)
        before, self._last, self._template = self._last, snapshot.signature, None
        # A state whose structure changes at each save needs no templates.
        if self._unused < _MAX_UNUSED or before == self._last:
            self._template = make_template(state, encoder, text)
            self._unused += 1
        return replace(snapshot, structure=self._template)


def _encode(state: Mapping[str, Any], encoder: Encoder) -> tuple[Snapshot, StateText]:
    if not isinstance(state, Mapping):
        raise UnsupportedStateError(
            f"state: expected a dict from names to parts, found {type(state).__name__}"
        )
    for key in state:
        if not isinstance(key, str) or not key or key.startswith("$") or not is_text(key):
            raise UnsupportedStateError(
                f"state: {key!r} is not a valid name: expected a non-empty str that UTF-8 can encode and "
                "that does not begin with '$'"
            )
    try:
        text = encoder.encode_state(state)
    except FormatError as error:
        raise UnsupportedStateError(f"state: {error}") from error
    leaves = tuple(encoder.leaves)
    snapshot = Snapshot(
        tuple(leaf.source for leaf in leaves),
        lambda: leaves,
        text.fill(encoder.cuts or ()),
        tuple(sorted(state)),
        tuple((x.name, x.dtype, x.shape, x.global_shape, x.offsets) for x in leaves),
        modules=encoder.modules,
        optimizers=encoder.optimizers,
        classes=encoder.classes,
    )
    return snapshot, text


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
    found: set[str] = set()
    for path, module in snapshot.modules:
        names = [name for name, one in module.named_parameters() if not one.requires_grad]
        found.update(f"{path}.{name}" for name in plain_names(module, names).values())
    return frozenset(found)


@paused_collector()
def read_payload(source: np.ndarray[Any, Any], classes: Classes = NO_CLASSES) -> dict[str, Any]:
    """Return the saved state, with views into `source`.

    Raises FormatError for an invalid payload, and StateMismatchError; see `Classes`.
    """
    size = header_bytes(source[:LENGTH_BYTES].tobytes(), source.size)
    plan = parse_payload(source[:size].tobytes(), source.size)

    def view(tensor: PayloadTensor, raw_dtype: str | None, is_array: bool) -> Any:
        stored = source[tensor.byte_range.start : tensor.byte_range.stop]
        return view_payload(tensor, stored, raw_dtype, is_array=is_array)

    where = plan.objects
    return build_state(plan, source[where.start : where.stop].tobytes(), view, classes)


def build_state(
    plan: PayloadPlan,
    objects: bytes,
    make: Callable[[PayloadTensor, str | None, bool], Any],
    classes: Classes = NO_CLASSES,
) -> dict[str, Any]:
    """Return the saved state, with the tensors that `make` returns, and HeldState where an object was held.

    Args:
        plan: Parsed header of the payload.
        objects: The objects of the payload.
        make: Returns a tensor, or an array if the last argument is true. The second argument is the dtype
            of a tensor that is stored as bytes. It is called for each tensor in use.
        classes: Classes that enum members and named tuples may have.

    Raises:
        FormatError: The payload is invalid.
        StateMismatchError: A value does not fit its class any more.
    """
    tensors = {tensor.fqn: tensor for tensor in plan.tensors}

    def resolve(reference: dict[str, Any]) -> Any:
        name, dtype = reference["$tensor"], reference.get("dtype")
        tensor = tensors.get(name)
        if tensor is None:
            raise FormatError(f"payload: the state refers to tensor {name!r}, which does not exist")
        if dtype is not None and tensor.dtype != RAW:
            raise FormatError(f"payload: tensor {name!r} of {dtype} is stored as {tensor.dtype}")
        return make(tensor, dtype, bool(reference.get("array")))

    root = unpack_objects(objects)
    if not isinstance(root, dict) or not isinstance(root.get(STATE), dict):
        raise FormatError("payload: the objects contain no state")
    decoded = Decoder(resolve, classes, keeps_held=True).decode(root[STATE])
    if not isinstance(decoded, dict):
        raise FormatError("payload: the state is not a dict")
    return decoded


def view_payload(
    tensor: PayloadTensor,
    stored: np.ndarray[Any, Any],
    raw_dtype: str | None,
    *,
    is_array: bool,
) -> Any:
    """Return a tensor of a payload over its stored bytes; see `build_state` and `view_stored`."""
    dtype = own_name(tensor.dtype) if raw_dtype is None else raw_dtype
    shape = tensor.shape if raw_dtype is None else tensor.shape[:-1]
    return view_stored(stored, dtype, shape, array=is_array)


_NOTHING = nullcontext()
_MOST_OF_ONE_THREAD = 32_768
"""Largest number of elements that torch copies in the calling thread (`at::internal::GRAIN_SIZE`)."""


Copy = Callable[[Sequence[Any]], object]
"""Copies some of the sources into their places. Its argument is `Snapshot.sources`."""


class Places:
    """The memory of a payload, as tensors and arrays into which `copies_into` copies."""

    def __init__(self, memory: np.ndarray[Any, Any]) -> None:
        """`memory` is a uint8 array."""
        self._memory = memory
        self._typed: dict[Any, Any] = {}
        """All of the memory as a flat tensor of each dtype."""

    def of(self, leaf: Leaf, start: int) -> Any:
        """Return the memory of a leaf's stored bytes, which begin at `start`."""
        source, stop = leaf.source, start + leaf.byte_count
        if leaf.is_raw:
            # The memory may not be aligned to the element size, so that only bytes can be copied.
            return self._memory[start:stop]
        if not is_tensor(source):
            return self._memory[start:stop].view(source.dtype).reshape(source.shape)
        import torch

        # In inference mode it would be a tensor that no other thread, and no later save, may write.
        with torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else _NOTHING:
            return self._tensor(source, start)

    def _tensor(self, source: Any, start: int) -> Any:
        dtype, size = source.dtype, source.element_size()
        typed = self._typed.get(dtype)
        if typed is None:
            whole = len(self._memory) // size
            typed = torch_view(self._memory[: whole * size], dtype, (whole,))
            self._typed[dtype] = typed
        # One call for each place. A slice of the bytes, seen as a tensor of the dtype, takes five.
        return typed.as_strided(source.shape, _strides(source.shape), start // size)


def copies_into(
    placed: Iterable[tuple[int, Leaf, Any]], piece_bytes: int, batch_bytes: int
) -> Iterator[tuple[int, Copy]]:
    """Yield calls that together copy the leaves' bytes, each after its byte count.

    Large contiguous tensors in host memory are split and small tensors are batched, so that two threads can
    share the work. A call serves all snapshots in which the leaves differ by nothing but their data.

    Args:
        placed: The position of each leaf's source, the leaf, and its memory; see `Places`. No leaf is empty.
        piece_bytes: Largest size of a piece of a split tensor.
        batch_bytes: Largest size of a batch of two tensors or more.
    """
    batch, batched = _Batch(), 0
    for position, leaf, place in placed:
        source, size = leaf.source, leaf.byte_count
        if leaf.is_raw:
            yield size, _copy_one(_copy_raw, place, position)
        elif isinstance(source, np.ndarray):
            yield size, _copy_one(np.copyto, place, position)
        elif size > piece_bytes and source.device.type == "cpu" and source.is_contiguous():
            element_bytes = source.element_size()
            count = max(1, piece_bytes // element_bytes)
            for number, piece in enumerate(place.view(-1).split(count)):
                copy = _copy_piece(piece, number * count, position)
                yield piece.numel() * element_bytes, copy
        else:
            if batched and batched + size > batch_bytes:
                yield batched, batch.copy
                batch, batched = _Batch(), 0
            batch.add(source, place, position)
            batched += size
    if batched:
        yield batched, batch.copy


class _Batch:
    """Tensors that one call copies.

    torch copies the large ones with its thread pool. Two threads run these calls at the same time, and their
    pools would take the cores from one another: 1 GiB in tensors of 0.5 MiB took 114 ms on two cores, and 78
    with `memmove`, which copies in the calling thread and without Python's lock.
    """

    def __init__(self) -> None:
        self._places: list[Any] = []
        self._positions: list[int] = []
        self._moves: list[tuple[Any, int, int, int]] = []

    def add(self, source: Any, place: Any, position: int) -> None:
        import torch

        plain = type(source) is torch.Tensor and source.is_cpu and source.is_contiguous()
        if plain and source.numel() > _MOST_OF_ONE_THREAD:
            self._moves.append((place, place.data_ptr(), place.nbytes, position))
        else:
            self._places.append(place)
            self._positions.append(position)

    def copy(self, sources: Sequence[Any]) -> None:
        import torch

        if self._places:  # a call for each of thousands would cost more than their bytes
            torch._foreach_copy_(self._places, [sources[i] for i in self._positions])
        for place, address, size, position in self._moves:
            source = sources[position]
            if source.is_neg() or source.is_conj():  # the values are not those in memory
                place.copy_(source)
            else:
                ctypes.memmove(address, source.data_ptr(), size)


def _copy_one(copy: Callable[[Any, Any], object], place: Any, position: int) -> Copy:
    return lambda sources: copy(place, sources[position])


def _copy_piece(piece: Any, first: int, position: int) -> Copy:
    last = first + piece.numel()
    return lambda sources: piece.copy_(sources[position].view(-1)[first:last])


@cache
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    strides = accumulate(reversed(shape[1:]), operator.mul, initial=1)
    return tuple(strides)[::-1] if shape else ()


def stored_tensor(leaf: Leaf) -> Any:
    """Return the tensor that a copy into the leaf's place reads: its source, or the bytes of a raw leaf."""
    return bytes_of(_plain(leaf.source)) if leaf.is_raw else leaf.source


def _copy_raw(target: np.ndarray[Any, Any], source: Any) -> None:
    if is_tensor(source):
        target[:] = bytes_of(_plain(source.cpu())).numpy()
    else:
        target[:] = np.ascontiguousarray(source).reshape(-1).view(np.uint8)


def _plain(source: Any) -> Any:
    """Return a contiguous tensor of the values. The bytes of a conjugate or negative view are different."""
    return source.resolve_conj().resolve_neg().contiguous()


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
