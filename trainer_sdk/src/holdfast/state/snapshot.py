"""The payload of a shard for one state. It is planned once, and again when the structure changes.

The payload describes itself (see core's `format.payload`). The layout document has the same information
for the merge of all ranks' layouts into the layout of a checkpoint.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from holdfast.state.decoder import Decoder
from holdfast.state.kinds import NO_CLASSES, Classes
from holdfast.state.template import Template, make_template
from holdfast.state.tensors import RAW, Leaf, own_name, view_stored
from holdfast.state.tree import STATE, Encoder, StateDictCache, StateText, is_text
from holdfast.state.wrapped import plain_names
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
    gc.disable()
    try:
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
