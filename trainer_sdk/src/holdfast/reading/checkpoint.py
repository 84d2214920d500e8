"""One committed checkpoint: what it holds, and its values, read when they are needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.reading.boxes import BoxReader
from holdfast.reading.source import CheckpointSource
from holdfast.reading.tensor import LazyTensor, may_be_raw
from holdfast.state.tree import STATE, Decoder
from holdfast_core.closing import Closing
from holdfast_core.errors import ConfigError, CorruptionError, FormatError, NotFoundError
from holdfast_core.format.payload import unpack_objects
from holdfast_core.format.rank_layout import RankLayout
from holdfast_core.ids import CheckpointId, Rank
from holdfast_core.reshard.boxes import holders_of, saved_state


class SavedCheckpoint(Closing):
    """A checkpoint that can be read without the script that saved it. Use it in one thread at a time.

    While it is open, the training that writes to the folder does not prune it. Call `close`, or use it as a
    context manager.
    """

    def __init__(self, source: CheckpointSource, checkpoint: CheckpointId) -> None:
        """Open a checkpoint. Raises NotFoundError, CorruptionError, FormatError."""
        self._reader = BoxReader(source, checkpoint)
        self._manifest = self._reader.manifest
        self._raw: dict[str, str] | None = None

    def __repr__(self) -> str:
        return f"SavedCheckpoint(step={self.step}, ranks={self.world_size}, bytes={self.nbytes})"

    @property
    def step(self) -> int:
        """Number of optimizer steps done."""
        return self._manifest.step

    @property
    def round(self) -> int:
        """Restart round of the run that saved it."""
        return self._manifest.restart_round

    @property
    def world_size(self) -> int:
        """Number of ranks that saved it."""
        return self._manifest.world_size

    @property
    def nbytes(self) -> int:
        """Bytes of all ranks' payloads."""
        return self._manifest.payload_bytes

    def tensors(self) -> Mapping[str, LazyTensor]:
        """Return the tensors of the gang by name, each whole. No tensor is read yet.

        Tensors that belong to one rank alone, such as states of generators, are in `objects(rank)` only.

        Raises CorruptionError when no layout of a rank with some of the tensors can be read.
        """
        groups = [
            (self._layout_of_any(ranks), len(ranks))
            for ranks in holders_of(self._manifest.shards).values()
        ]
        found = saved_state(groups[0][0], groups, self.world_size).tensors
        return {
            name: self._tensor(name, found[name].dtype, found[name].shape) for name in sorted(found)
        }

    def objects(self, rank: int = 0) -> dict[str, Any]:
        """Return the state that a rank saved, nested as it was, with a LazyTensor for each tensor.

        A tensor of which the rank had a part is the whole tensor. A member of an enum is its value, and a
        named tuple a plain tuple. Raises ConfigError for a rank that did not save, and CorruptionError.
        """
        if not 0 <= rank < self.world_size:
            raise ConfigError(
                f"{self._reader.name} was saved by {self.world_size} ranks: expected a rank from 0 to "
                f"{self.world_size - 1}, found {rank!r}"
            )
        layout = self._layout_of_any([Rank(rank)])
        decoded = Decoder(lambda reference: self._referred(layout, reference)).decode(
            self._encoded(Rank(rank))
        )
        if not isinstance(decoded, dict):
            raise FormatError(f"{self._reader.name}: the state of rank {rank} is not a dict")
        return decoded

    def close(self) -> None:
        """Release the checkpoint, which may then be pruned."""
        self._reader.close()

    # ------------------------------------------------------------------ inside

    def _encoded(self, rank: Rank) -> dict[str, Any]:
        root = unpack_objects(self._reader.read_objects(rank))
        if not isinstance(root, dict) or not isinstance(root.get(STATE), dict):
            raise FormatError(f"{self._reader.name}: the objects of rank {rank} contain no state")
        found: dict[str, Any] = root[STATE]
        return found

    def _referred(self, layout: RankLayout, reference: dict[str, Any]) -> LazyTensor:
        name = reference["$tensor"]
        item = layout.tensors.get(name)
        if item is None:
            raise FormatError(
                f"{self._reader.name}: the state of rank {layout.rank} refers to tensor {name!r}, which "
                "is not in its layout"
            )
        return LazyTensor(
            name,
            (item.dtype, tuple(item.shape)),
            self._reader,
            raw_dtype=reference.get("dtype"),
            is_array=bool(reference.get("array")),
        )

    def _tensor(self, name: str, dtype: str, shape: tuple[int, ...]) -> LazyTensor:
        raw = self._raw_dtypes().get(name) if may_be_raw(dtype, shape) else None
        return LazyTensor(name, (dtype, tuple(shape)), self._reader, raw_dtype=raw)

    def _raw_dtypes(self) -> dict[str, str]:
        """Return the dtypes of tensors whose types safetensors does not have, by name."""
        if self._raw is None:
            found: dict[str, str] = {}
            for ranks in holders_of(self._manifest.shards).values():
                for reference in _references(self._encoded(ranks[0])):
                    if "dtype" in reference:
                        found[reference["$tensor"]] = reference["dtype"]
            self._raw = found
        return self._raw

    def _layout_of_any(self, ranks: list[Rank]) -> RankLayout:
        """Return the layout of the first of these ranks that can be read."""
        reasons: list[str] = []
        for rank in ranks:
            try:
                return self._reader.layout(rank)
            except (FormatError, NotFoundError) as error:
                reasons.append(str(error))
        raise CorruptionError(
            f"{self._reader.name}: no layout of the ranks {ranks[0]} to {ranks[-1]} can be read: "
            f"{'; '.join(reasons[:3])}"
        )


def _references(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the references to tensors in encoded objects."""
    if isinstance(value, list):
        for item in value:
            yield from _references(item)
    elif isinstance(value, dict):
        if "$tensor" in value:
            yield value
        else:
            for item in value.values():
                yield from _references(item)
