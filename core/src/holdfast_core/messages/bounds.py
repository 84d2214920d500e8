"""Bounds of the field values of messages, and the largest body of each message.

The codec enforces them before any other code uses a value. They are far above what an honest sender
needs. They keep a hostile sender from using much memory and time, and from causing a status that the
API server refuses. This module may import identities and formats, but no transport.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

from holdfast_core.format.keys import MAX_RANK, MAX_ROUND, MAX_STEP
from holdfast_core.ids import (
    FIRST_SPARE,
    MAX_SPARES,
    MAX_WORKERS,
    Digest,
    JobUid,
    Rank,
    RestartRound,
    Step,
    Worker,
)

MAX_INT = (1 << 63) - 1
MAX_RANKS = 4096 * 64
"""The largest spec.workers times the largest spec.procsPerWorker (core/api)."""
MAX_LISTED = 1024
"""Largest number of manifests that an inventory lists."""


MAX_STRAGGLERS = 16
"""Largest number of stragglers that a coordinator and a job's status name."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of one value. Each field applies to the types that its text names."""

    low: int = -MAX_INT
    """int, float: the smallest value."""
    high: int = MAX_INT
    """int, float: the largest value."""
    any_float: bool = False
    """float: every value is accepted, NaN and infinities included (a loss may be one of them)."""
    characters: int = 1024
    """str: the largest number of characters. It bounds each key of a dict, too."""
    pattern: re.Pattern[str] | None = None
    """str: a pattern that the whole text must match."""
    clip: bool = False
    """str, dict: a value that is too long is cut instead of refused, and text that is not valid Unicode is
    repaired. Use it only for values that people read."""
    items: int = 4096
    """tuple, dict: the largest number of entries."""


NATURAL = Bounds(low=0)
OF_NEW_TYPE = MappingProxyType(
    {
        Step: Bounds(low=0, high=MAX_STEP),
        Rank: Bounds(low=0, high=MAX_RANK),
        Worker: Bounds(low=0, high=FIRST_SPARE + MAX_SPARES - 1),
        RestartRound: Bounds(low=0, high=MAX_ROUND),
        JobUid: Bounds(characters=64),
        Digest: Bounds(characters=128),
    }
)
"""Bounds of the identity types. They take precedence over a `Bounds` annotation around the type."""

Natural = Annotated[int, NATURAL]
Seconds = Annotated[float, Bounds(low=0, high=10**12)]
"""A finite duration in seconds."""
ClippedText = Annotated[str, Bounds(characters=4096, clip=True)]
"""Text for people. Longer text is cut."""
ShortText = Annotated[str, Bounds(characters=512, clip=True)]
"""Text for people of which a message has one for each rank. Longer text is cut."""
Factor = Annotated[float, Bounds(low=0, high=10**6)]
"""How many times as long as something else takes."""
Reason = Annotated[str, Bounds(pattern=re.compile(r"[A-Za-z][A-Za-z0-9]{0,127}"))]
"""The reason of a condition: one CamelCase word of 1 to 128 characters, as the CRD requires."""
Name = Annotated[str, Bounds(characters=253)]
Document = Annotated[str, Bounds(characters=64 << 20)]
"""The text of a manifest. The parser of the format checks its contents."""
MetricName = Annotated[str, Bounds(characters=128, clip=True)]
Reported = Annotated[
    dict[MetricName, Annotated[float, Bounds(any_float=True)]], Bounds(items=64, clip=True)
]
"""Metrics that a training script reports. Only the first 64 are kept."""

PerRank = Bounds(items=MAX_RANKS)
PerWorker = Bounds(items=MAX_WORKERS)
ManyShards = Bounds(items=4 * MAX_RANKS)

KIB = 1 << 10
MIB = 1 << 20
_DEFAULT_BYTES = 256 * KIB
_MAX_BYTES = MappingProxyType(
    {
        "Stage": 16 * KIB,
        "Seal": 4 * KIB,
        "GangRequest": 4 * KIB,
        "Refused": 64 * KIB,
        "Ok": 16 * KIB,
        "Round": 4 * MIB,
        "WorkerReport": 4 * MIB,
        "Prepared": 16 * MIB,
        "ManifestPut": 64 * MIB,
        "FinishCommit": 64 * MIB,
        "Relay": 64 * MIB,
        "RelayReply": 64 * MIB,
        "ManifestDocument": 64 * MIB,
        "Inventory": 16 * MIB,
        "ManifestList": 16 * MIB,
        "CoordinatorState": 16 * MIB,
    }
)
_ENTRIES = 4096
_ENTRY_BYTES = 10


def body_limit_bytes(kind: type[Any]) -> int:
    """Return the largest JSON body of a message for a job of any size."""
    return _MAX_BYTES.get(kind.__name__, _DEFAULT_BYTES)


def reply_limit_bytes(kind: type[Any], ranks: int) -> int:
    """Return the largest body that a sidecar of a job with `ranks` ranks may send.

    Inventory and CoordinatorState have entries for each rank, so a small job needs only small bodies.
    """
    largest = body_limit_bytes(kind)
    if largest <= _DEFAULT_BYTES:
        return largest
    return min(largest, _DEFAULT_BYTES + 16 * KIB * ranks)


def entries_limit(kind: type[Any], size_bytes: int) -> int | None:
    """Return how many objects and lists a body of `size_bytes` may have. None means any number.

    A body full of empty lists takes thirty times its size in memory when it is parsed, and the parser
    blocks other threads for seconds. Only Inventory and CoordinatorState are limited, because the
    operator, which serves all tenants, reads them from sidecars. Each of their entries takes more than
    10 bytes.
    """
    if kind.__name__ not in ("Inventory", "CoordinatorState"):
        return None
    return _ENTRIES + size_bytes // _ENTRY_BYTES
