"""The references of a checkpoint: the earlier checkpoints whose objects store bytes that it needs.

The document is written before the manifest, and only if there are references. The objects of a
checkpoint are not deleted while a references document of another checkpoint names it. The encoding is
canonical, and the parser accepts canonical documents only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast_core.errors import FormatError
from holdfast_core.format.canonical import dumps_canonical, loads_canonical
from holdfast_core.format.checks import (
    expect_checkpoint,
    expect_document,
    expect_int,
    expect_list,
    expect_object,
)
from holdfast_core.ids import CheckpointId

FORMAT_VERSION = 1
MAX_REFERENCES = 1000

_FIELDS = frozenset({"formatVersion", "references", "restartRound", "step"})
_ENTRY_FIELDS = frozenset({"bytes", "restartRound", "step"})


@dataclass(frozen=True, slots=True)
class References:
    """References document of one checkpoint."""

    checkpoint: CheckpointId
    bytes_in: Mapping[CheckpointId, int]
    """Payload bytes that each earlier checkpoint stores for this one."""

    def to_bytes(self) -> bytes:
        """Return the canonical document. Raises FormatError if `parse_references` would refuse it."""
        data = dumps_canonical(
            {
                "formatVersion": FORMAT_VERSION,
                "step": self.checkpoint.step,
                "restartRound": self.checkpoint.round,
                "references": [
                    {"step": earlier.step, "restartRound": earlier.round, "bytes": count}
                    for earlier, count in sorted(self.bytes_in.items())
                ],
            }
        )
        parse_references(data)
        return data

    def most_needed(self, limit: int) -> tuple[CheckpointId, ...]:
        """Return at most `limit` earlier checkpoints, those that store the most bytes first.

        Of two that store equally many, the newer one comes first.
        """
        order = sorted(self.bytes_in, key=lambda c: (self.bytes_in[c], c), reverse=True)
        return tuple(order[:limit])


def parse_references_of(document: bytes, checkpoint: CheckpointId) -> References:
    """Parse the references that were stored under the name of `checkpoint`.

    Raises FormatError if the document is not valid or belongs to another checkpoint.
    """
    references = parse_references(document)
    if references.checkpoint != checkpoint:
        raise FormatError(f"references of {checkpoint}: the document names {references.checkpoint}")
    return references


def parse_references(document: bytes) -> References:
    """Parse a references document.

    Raises FormatError, with the path of the wrong value, for anything that `References.to_bytes` does not
    produce.
    """
    what = "references"
    root = expect_document(loads_canonical(document, what), what, _FIELDS, version=FORMAT_VERSION)
    own = expect_checkpoint(root, what)
    entries = expect_list(root["references"], f"{what}.references", limit=MAX_REFERENCES)
    found: dict[CheckpointId, int] = {}
    for number, value in enumerate(entries):
        path = f"{what}.references[{number}]"
        entry = expect_object(value, path, _ENTRY_FIELDS)
        earlier = expect_checkpoint(entry, path)
        if earlier == own or (found and earlier <= max(found)):
            raise FormatError(f"{path}: {earlier}: expected other checkpoints, in order, each once")
        found[earlier] = expect_int(entry["bytes"], f"{path}.bytes", low=1)
    return References(own, found)
