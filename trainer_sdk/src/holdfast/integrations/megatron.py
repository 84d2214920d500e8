"""Sharded state dicts of Megatron-core over Holdfast.

    save(step, sharded_state_dict, checkpointer)
    state = load(sharded_state_dict, checkpointer)

They take the place of `megatron.core.dist_checkpointing.save` and `load`. This module needs the attributes of
Megatron's classes and not the package: `ShardedTensor`, `ShardedObject`, `ShardedTensorFactory` and
`LocalNonpersistentObject` are known by them.

Every tensor is saved under its key, with its box in the whole tensor. So a checkpoint loads with other
tensor, pipeline and data parallel sizes. Other values are JSON, saved as tensors of bytes under names of
their own, so that any rank can load the value of any other one.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

from holdfast.base.handle import RestorePoint, SaveHandle, TensorInfo
from holdfast.base.settings import RankSettings
from holdfast.checkpointer import Checkpointer
from holdfast.integrations.boxes import as_box, by_first_part
from holdfast.integrations.versions import warn_if_untested
from holdfast.state.tree import Decoder, Encoder
from holdfast_core.errors import (
    CorruptionError,
    FormatError,
    StateMismatchError,
    UnsupportedStateError,
)
from holdfast_core.format.canonical import dumps_canonical

COMMON = "megatron:common"
"""Name of the values that are in no sharded object. Rank 0 saves them for all."""
_OBJECT = "megatron:object/"


def save(step: int, sharded_state_dict: Mapping[str, Any], ckpt: Checkpointer) -> SaveHandle:
    """Copy a sharded state dict and return the handle of the save. Every rank must call it.

    step: number of optimizer steps done.
    sharded_state_dict: as `model.sharded_state_dict()` and the optimizer's make it, with any other values.

    Raises UnsupportedStateError for a flattened range and for a value that cannot be saved, with its key.
    """
    warn_if_untested("megatron-core")
    tensors: dict[str, torch.Tensor] = {}

    def add(leaf: Any) -> None:
        if _is_tensor(leaf):
            tensors[_name(leaf)] = _box(leaf)
        elif _is_object(leaf) and _is_main(leaf.replica_id):
            _add_value(tensors, _object_name(leaf), _portable(leaf.data))

    built = _mapped(dict(sharded_state_dict), _build)
    _mapped(built, add, only_sharded=True)
    if RankSettings.from_env().rank == 0:
        _add_value(tensors, COMMON, _common(built))
    return ckpt.save(step, by_first_part(tensors))


def load(
    sharded_state_dict: Mapping[str, Any], ckpt: Checkpointer, *, step: int | None = None
) -> dict[str, Any] | None:
    """Load the restore point, or that of `step`, and return the state dict. Every rank must call it.

    Tensors are loaded into those of `sharded_state_dict`, and new ones are made where it has none. The result
    also has the common values of the checkpoint. Returns None when there is nothing to restore.

    Raises StateMismatchError for a tensor or object that is missing or has another shape, and
    CorruptionError for a checkpoint that turns out to be damaged. The next load then takes an older one.
    """
    point = ckpt.restore_tensors({}, step=step)
    if point is None:
        return None
    built = _mapped(dict(sharded_state_dict), _build)
    tensors: dict[str, torch.Tensor] = {}
    objects: list[str] = [COMMON]

    def add(leaf: Any) -> None:
        if _is_tensor(leaf):
            if leaf.data is None:
                leaf.data = torch.empty(tuple(leaf.local_shape), dtype=leaf.dtype)
            tensors[_name(leaf)] = _box(leaf)
        elif _is_object(leaf):
            objects.append(_object_name(leaf))

    _mapped(built, add, only_sharded=True)
    values = _Values(ckpt, point, objects)
    values.read(tensors)

    def loaded(leaf: Any) -> Any:
        if _is_object(leaf):
            value = values.get(_object_name(leaf))
            return io.BytesIO(value) if isinstance(leaf.data, io.BytesIO) else value
        return leaf.data if _is_tensor(leaf) else leaf

    common = values.get(COMMON)
    return dict(_merged(common, _finished(sharded_state_dict, built, loaded)))


# ------------------------------------------------------------------------------- Megatron's classes


def _is_tensor(leaf: object) -> bool:
    return hasattr(leaf, "prepend_axis_num") and hasattr(leaf, "global_offset")


def _is_object(leaf: object) -> bool:
    return not _is_tensor(leaf) and hasattr(leaf, "global_offset") and hasattr(leaf, "key")


def _is_factory(leaf: object) -> bool:
    return callable(getattr(leaf, "build", None)) and callable(getattr(leaf, "merge_fn", None))


def _is_local(leaf: object) -> bool:
    return callable(getattr(leaf, "unwrap", None)) and hasattr(leaf, "obj")


def _is_sharded(leaf: object) -> bool:
    return _is_tensor(leaf) or _is_object(leaf) or _is_factory(leaf)


def _build(leaf: Any) -> Any:
    return _mapped(leaf.build(), _build) if _is_factory(leaf) else leaf


def _is_main(replica_id: int | tuple[int, ...]) -> bool:
    return replica_id == 0 if isinstance(replica_id, int) else not any(replica_id)


def _name(tensor: Any) -> str:
    """Return the key and the position in the prepended dimensions, such as layers.weight/3.

    A rank has several boxes of such a key, one for each of its layers, and a name has one box.
    """
    return "/".join([tensor.key, *map(str, tensor.global_offset[: tensor.prepend_axis_num])])


def _object_name(one: Any) -> str:
    where = ".".join(map(str, one.global_offset))
    return f"{_OBJECT}{one.key}/{where}"


def _box(tensor: Any) -> torch.Tensor:
    if getattr(tensor, "flattened_range", None) is not None:
        raise UnsupportedStateError(
            f"{tensor.key}: its flattened_range {tensor.flattened_range} is no box of the tensor: make the "
            "optimizer's sharded state dict in a space of whole tensors (fully_reshardable or "
            "fully_sharded_model_space)"
        )
    skipped = tensor.prepend_axis_num
    return as_box(tensor.data, tensor.global_shape[skipped:], tensor.global_offset[skipped:])


# ------------------------------------------------------------------------------- nested state dicts


def _mapped(value: Any, change: Callable[[Any], Any], *, only_sharded: bool = False) -> Any:
    """Return a copy of nested dicts and lists in which `change` has replaced the leaves."""
    if isinstance(value, dict):
        return {k: _mapped(v, change, only_sharded=only_sharded) for k, v in value.items()}
    if isinstance(value, list):
        return [_mapped(v, change, only_sharded=only_sharded) for v in value]
    return change(value) if not only_sharded or _is_sharded(value) else value


def _common(value: Any) -> Any:
    """Return the values in no sharded object. None stands for the others in a list."""
    if isinstance(value, dict):
        return {k: _common(v) for k, v in value.items() if not (_is_sharded(v) or _is_local(v))}
    if isinstance(value, list):
        return [None if _is_sharded(v) or _is_local(v) else _common(v) for v in value]
    return value


def _finished(given: Any, built: Any, loaded: Callable[[Any], Any]) -> Any:
    """Return the sharded leaves with their values. Leave out other values, which the checkpoint has."""
    if _is_factory(given):
        return given.merge_fn(_mapped(built, loaded))
    if isinstance(given, dict):
        inner = {k: _finished(v, built[k], loaded) for k, v in given.items()}
        return {k: v for k, v in inner.items() if v is not _NOTHING}
    if isinstance(given, list):
        return [_finished(v, one, loaded) for v, one in zip(given, built, strict=True)]
    if _is_local(given):
        return given.unwrap()
    return loaded(built) if _is_sharded(given) else _NOTHING


_NOTHING = object()


def _merged(common: Any, loaded: Any) -> Any:
    if isinstance(common, dict) and isinstance(loaded, dict):
        both = {k: _merged(common[k], v) for k, v in loaded.items() if k in common}
        return {**common, **loaded, **both}
    if isinstance(loaded, list):
        base = common if isinstance(common, list) else []
        rest = [None] * (len(loaded) - len(base))
        return [_merged(a, b) for a, b in zip([*base, *rest], loaded, strict=True)]
    return common if loaded is _NOTHING else loaded


# ------------------------------------------------------------------------------- values


def _portable(value: Any) -> Any:
    return value.getvalue() if isinstance(value, io.BytesIO) else value


def _add_value(tensors: dict[str, torch.Tensor], name: str, value: Any) -> None:
    """Add a value as JSON in a tensor of bytes, and the tensors and arrays in it under their own names."""
    encoder = Encoder()
    text = dumps_canonical(encoder.encode(value, name))
    tensors[name] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    for leaf in encoder.leaves:
        tensors[leaf.name] = torch.as_tensor(leaf.source)


class _Values:
    """Values of a checkpoint. Their JSON is read first, then the tensors in them with those of the state."""

    def __init__(self, ckpt: Checkpointer, point: RestorePoint, names: list[str]) -> None:
        saved = point.tensors
        missing = sorted(name for name in set(names) if name not in saved)
        if missing:
            raise StateMismatchError(
                f"the checkpoint has no {', '.join(missing[:10])}: it was saved by another model, or not by "
                "holdfast.integrations.megatron"
            )
        self._ckpt = ckpt
        self._step = point.step
        self._saved = saved
        texts = {name: _new(saved[name]) for name in names}
        self._restore(texts)
        self._json = {name: json.loads(one.numpy().tobytes()) for name, one in texts.items()}
        self._tensors: dict[str, torch.Tensor] = {}
        for body in self._json.values():
            Decoder(self._wanted).decode(body)

    def read(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load the tensors of the state and those in the values."""
        self._restore({**self._tensors, **tensors})

    def get(self, name: str) -> Any:
        return Decoder(self._found).decode(self._json[name])

    def _restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        restored = self._ckpt.restore_tensors(tensors)
        if restored is None or restored.step != self._step:
            # What was read before belongs to another step.
            raise CorruptionError(
                f"step {self._step} is damaged, and an older step was restored in its place: start again, "
                "or load again"
            )

    def _wanted(self, reference: dict[str, Any]) -> None:
        name = reference["$tensor"]
        if name not in self._saved:
            raise FormatError(f"the checkpoint refers to tensor {name!r}, which it does not hold")
        self._tensors[name] = _new(self._saved[name])

    def _found(self, reference: dict[str, Any]) -> Any:
        one = self._tensors[reference["$tensor"]]
        return one.numpy() if reference.get("array") else one


def _new(info: TensorInfo) -> torch.Tensor:
    return torch.empty(info.shape, dtype=getattr(torch, info.dtype))
