"""How the object store holds the shards of a checkpoint, as those who upload them report it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from holdfast_core.ids import CheckpointId
from holdfast_core.messages.schema import Reference


@dataclass(frozen=True, slots=True)
class StoredAs:
    """How the object store holds a shard, as UPLOADED reports it. Without references: self-contained."""

    base: Reference | None = None
    """The checkpoint whose existence guarantees that of `references`. None if there are none."""
    references: tuple[Reference, ...] = ()
    """Earlier checkpoints that store chunks of this shard."""


SELF_CONTAINED = StoredAs()


def merged(
    stored: Iterable[StoredAs],
) -> tuple[dict[CheckpointId, int], frozenset[CheckpointId]]:
    """Return the bytes that earlier checkpoints store, and the checkpoints that vouch for these."""
    bytes_in: dict[CheckpointId, int] = {}
    bases: set[CheckpointId] = set()
    for stored_as in stored:
        for reference in stored_as.references:
            earlier = CheckpointId(reference.step, reference.round)
            bytes_in[earlier] = bytes_in.get(earlier, 0) + reference.payload_bytes
        if stored_as.base is not None:
            bases.add(CheckpointId(stored_as.base.step, stored_as.base.round))
    return bytes_in, frozenset(bases)
