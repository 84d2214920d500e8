"""Names of a job's files and objects, relative to the job. They are the same on disk and in the store.

Names consist of numbers and digests only, never of text that a user or a peer chose. The parser refuses
every name that the `*_key` functions do not produce (path traversal, NUL, other widths).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from holdfast_core.errors import FormatError
from holdfast_core.format.canonical import hex_of
from holdfast_core.ids import (
    MAX_RANK,
    MAX_ROUND,
    MAX_STEP,
    CheckpointId,
    Digest,
    JobUid,
    Rank,
    RestartRound,
    ShardRef,
    Step,
)

_DIVIDED_CHECKPOINTS = 250
"""Fewest checkpoints whose shards are listed by parts. A page of a listing has a thousand objects."""
_PARTS = 8
"""Fewest parts. Each further digit of the step gives up to ten times as many."""

SHARDS = "shards"
LAYOUTS = "layouts"
MANIFESTS = "manifests"
REFERENCES = "references"
RUNS = "runs"
"""Markers of the runs that upload to a store without an operator (store.open)."""

_FOLDER = r"s(\d{12})-r(\d{6})"
_SHARD = re.compile(
    rf"shards/{_FOLDER}/rank(\d{{6}})-([0-9a-f]{{16}})\.(shard|pack|layout)", re.ASCII
)
_NEEDED_BY = re.compile(rf"references/{_FOLDER}/by-{_FOLDER}", re.ASCII)
_NEEDS = re.compile(rf"references/{_FOLDER}/needs-{_FOLDER}-(\d{{20}})", re.ASCII)
_CHECKPOINT_FOLDER = re.compile(rf"(shards|references)/{_FOLDER}/", re.ASCII)
_MANIFEST = re.compile(r"manifests/s(\d{12})/r(\d{6})\.json", re.ASCII)
_JOB_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}", re.ASCII)
_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)


class ShardObject(StrEnum):
    """What an object of a shard holds. The value is the end of its name."""

    WHOLE = "shard"
    PACK = "pack"
    LAYOUT = "layout"


@dataclass(frozen=True, slots=True)
class ShardObjectKey:
    checkpoint: CheckpointId
    rank: Rank
    blake3_prefix: str
    """First 16 hex characters of the payload's BLAKE3."""
    kind: ShardObject = ShardObject.WHOLE


@dataclass(frozen=True, slots=True)
class ManifestKey:
    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class NeededByKey:
    """Marker of a checkpoint: objects of it are needed by another one."""

    checkpoint: CheckpointId
    by: CheckpointId


@dataclass(frozen=True, slots=True)
class NeedsKey:
    """Marker of a checkpoint: it needs objects of an earlier one."""

    checkpoint: CheckpointId
    earlier: CheckpointId
    payload_bytes: int
    """Payload bytes that the earlier checkpoint stores for this one."""


def shard_key(ref: ShardRef) -> str:
    """Return `shards/s<step>-r<round>/rank<rank>-<16 hex>.shard`. Raises FormatError."""
    return f"{_of_rank(ref)}.shard"


def pack_key(ref: ShardRef) -> str:
    """Return the name of the shard's pack, which ends in `.pack`. Raises FormatError."""
    return f"{_of_rank(ref)}.pack"


def stored_layout_key(ref: ShardRef) -> str:
    """Return the name of the shard's layout in the object store, which ends in `.layout`."""
    return f"{_of_rank(ref)}.layout"


def node_key(ref: ShardRef) -> str:
    """Return `<job uid>/<shard key>`, by which members read each other's shards. Raises FormatError."""
    return f"{checked_job_uid(ref.job_uid)}/{shard_key(ref)}"


def shards_prefix(checkpoint: CheckpointId) -> str:
    """Return `shards/s<step>-r<round>/`, the prefix of all shards of one checkpoint, with the slash."""
    return f"{SHARDS}/{_folder(checkpoint)}/"


def parts_of(shards: str, checkpoints: Collection[CheckpointId]) -> Collection[str]:
    """Divide the shards below a prefix by longer prefixes, so that parts can be listed at the same time.

    Args:
        shards: The prefix. It is not divided where few of the checkpoints have shards below it.
        checkpoints: The checkpoints. Shards of others may be in no part.
    """
    names = [name for name in map(shards_prefix, checkpoints) if name.startswith(shards)]
    parts, length = {shards}, len(shards)
    while len(parts) < _PARTS and len(names) >= _DIVIDED_CHECKPOINTS:
        length += 1
        parts = {name[:length] for name in names}
    return sorted(parts)


def layout_key(digest: Digest) -> str:
    """Return `layouts/<64 hex>.json`, the name of a layout on a node tier."""
    return f"{LAYOUTS}/{hex_of(digest)}.json"


def manifest_key(checkpoint: CheckpointId) -> str:
    """Return `manifests/s<step>/r<round>.json`."""
    return f"{MANIFESTS}/{_folder(checkpoint, '/')}.json"


def references_prefix(checkpoint: CheckpointId) -> str:
    """Return `references/s<step>-r<round>/`, the prefix of all markers of one checkpoint."""
    return f"{REFERENCES}/{_folder(checkpoint)}/"


def needed_by_key(checkpoint: CheckpointId, by: CheckpointId) -> str:
    """Return the name of the marker that another checkpoint needs objects of this one."""
    return f"{references_prefix(checkpoint)}by-{_folder(by)}"


def needs_key(checkpoint: CheckpointId, earlier: CheckpointId, payload_bytes: int) -> str:
    """Return the name of the marker that this checkpoint needs objects of an earlier one."""
    count = _number(payload_bytes, 20, 10**20 - 1, "number of bytes")
    return f"{references_prefix(checkpoint)}needs-{_folder(earlier)}-{count}"


def checkpoint_of_folder(prefix: str) -> CheckpointId | None:
    """Return the checkpoint whose `shards_prefix` or `references_prefix` this is; None for other text."""
    match = _CHECKPOINT_FOLDER.fullmatch(prefix)
    return None if match is None else _parsed(*match.groups()[1:])


def job_prefix(namespace: str, job_uid: JobUid) -> str:
    """Return `<namespace>/<job uid>/`, the prefix of all objects of one job in the store, with the slash.

    Raises FormatError if the namespace or the uid is not valid.
    """
    if _NAMESPACE.fullmatch(namespace) is None:
        raise FormatError(
            f"namespace {namespace!r} is not a DNS label and cannot be part of an object key"
        )
    return f"{namespace}/{checked_job_uid(job_uid)}/"


def checked_job_uid(job_uid: JobUid) -> JobUid:
    """Return `job_uid`. Raises FormatError unless it is safe as one path component."""
    if _JOB_UID.fullmatch(job_uid) is None:
        shown = job_uid[:140]
        raise FormatError(f"job uid {shown!r}: expected letters, digits, - and _, at most 128")
    return job_uid


Key = ShardObjectKey | ManifestKey | NeededByKey | NeedsKey


def parse_key(key: str) -> Key:
    """Parse a name that a `*_key` function produced for the store. Raises FormatError for any other name."""
    if match := _SHARD.fullmatch(key):
        step, round_, rank, prefix, kind = match.groups()
        return ShardObjectKey(_parsed(step, round_), Rank(int(rank)), prefix, ShardObject(kind))
    if match := _MANIFEST.fullmatch(key):
        return ManifestKey(_parsed(*match.groups()))
    if match := _NEEDED_BY.fullmatch(key):
        step, round_, *by = match.groups()
        return NeededByKey(_parsed(step, round_), _parsed(*by))
    if match := _NEEDS.fullmatch(key):
        step, round_, *earlier, count = match.groups()
        return NeedsKey(_parsed(step, round_), _parsed(*earlier), int(count))
    raise FormatError(f"key {key[:200]!r} is not a key that Holdfast writes")


def _of_rank(ref: ShardRef) -> str:
    checkpoint = CheckpointId(ref.step, ref.round)
    rank = _number(ref.rank, 6, MAX_RANK, "rank")
    return f"{shards_prefix(checkpoint)}rank{rank}-{hex_of(ref.blake3)[:16]}"


def _folder(checkpoint: CheckpointId, separator: str = "-") -> str:
    step = _number(checkpoint.step, 12, MAX_STEP, "step")
    return f"s{step}{separator}r{_number(checkpoint.round, 6, MAX_ROUND, 'round')}"


def _parsed(step: str, round_: str) -> CheckpointId:
    return CheckpointId(Step(int(step)), RestartRound(int(round_)))


def _number(value: int, width: int, limit: int, what: str) -> str:
    if not 0 <= value <= limit:
        raise FormatError(f"{what} {value} is not within 0..{limit}: it cannot be part of a key")
    return f"{value:0{width}d}"
