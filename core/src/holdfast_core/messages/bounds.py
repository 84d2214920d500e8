"""How large what a peer sends may be: notes on the fields of messages, and body limits by message.

The codec enforces them before any other code sees a value. They are far above what an honest sender
sends, and keep a hostile one from taking memory and time, or from making a status that the API server
refuses. May import ids and formats; knows no transport.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

from holdfast_core.format.keys import MAX_RANK, MAX_ROUND, MAX_STEP
from holdfast_core.ids import Digest, JobUid, Rank, RestartRound, Step, Worker

MAX_INT = (1 << 63) - 1
MAX_RANKS = 4096 * 64
"""spec.workers times spec.procsPerWorker at their largest (core/api)."""
MAX_WORKERS = 4096


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one value may be; each field matters for the types that it names."""

    low: int = -MAX_INT
    """int, float."""
    high: int = MAX_INT
    any_float: bool = False
    """float: NaN and infinities are values (a loss may be one)."""
    characters: int = 1024
    """str; also each key of a dict[str, ...]."""
    pattern: re.Pattern[str] | None = None
    """str: the whole text must match."""
    clip: bool = False
    """str, dict: what is too long is cut, and text that is not valid Unicode is repaired, instead of
    refused. For what people read only."""
    items: int = 4096
    """tuple, dict."""


NATURAL = Bounds(low=0)
OF_NEW_TYPE = MappingProxyType(
    {
        Step: Bounds(low=0, high=MAX_STEP),
        Rank: Bounds(low=0, high=MAX_RANK),
        Worker: Bounds(low=0, high=MAX_WORKERS - 1),
        RestartRound: Bounds(low=0, high=MAX_ROUND),
        JobUid: Bounds(characters=64),
        Digest: Bounds(characters=128),
    }
)
"""Bounds of the identities, wherever they stand without a note of their own."""

Natural = Annotated[int, NATURAL]
Seconds = Annotated[float, Bounds(low=0, high=10**12)]
"""A duration; finite."""
Words = Annotated[str, Bounds(characters=4096, clip=True)]
"""For people; cut where it is longer."""
Reason = Annotated[str, Bounds(pattern=re.compile(r"[A-Za-z][A-Za-z0-9]{0,127}"))]
"""One CamelCase word, as conditions take it (CRD: 1 to 128 characters)."""
Name = Annotated[str, Bounds(characters=253)]
Pem = Annotated[str, Bounds(characters=64 << 10)]
Document = Annotated[str, Bounds(characters=64 << 20)]
"""The text of a manifest or layout; their own parsers check it."""
MetricName = Annotated[str, Bounds(characters=128, clip=True)]
Reported = Annotated[
    dict[MetricName, Annotated[float, Bounds(any_float=True)]], Bounds(items=64, clip=True)
]
"""What a training script reports: the first 64 values."""

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
        "Ask": 4 * KIB,
        "Refused": 64 * KIB,
        "Ok": 16 * KIB,
        "Round": 4 * MIB,
        "WorkerReport": 4 * MIB,
        "Prepared": 16 * MIB,
        "Holding": 32 * MIB,
        "ManifestPut": 64 * MIB,
        "ManifestDocument": 64 * MIB,
        "Inventory": 16 * MIB,
        "CoordinatorState": 16 * MIB,
    }
)
_ENTRIES = 4096
_ENTRY_BYTES = 10


def body_limit_bytes(kind: type[Any]) -> int:
    """The largest JSON body of a message, whatever the job."""
    return _MAX_BYTES.get(kind.__name__, _DEFAULT_BYTES)


def reply_limit_bytes(kind: type[Any], ranks: int) -> int:
    """The largest body that a job of so many ranks has reason to send: Inventory and
    CoordinatorState have entries for each rank, of which a sidecar of a small job must not send many."""
    largest = body_limit_bytes(kind)
    if largest <= _DEFAULT_BYTES:
        return largest
    return min(largest, _DEFAULT_BYTES + 16 * KIB * ranks)


def entries_limit(kind: type[Any], size_bytes: int) -> int | None:
    """How many objects and lists a body of that size may have; None for any number.

    Empty lists of three bytes take thirty times the body's size when they are parsed, and the parser
    keeps other threads waiting for seconds. Inventory and CoordinatorState are what the operator, which
    serves all tenants, reads from sidecars; each of their entries takes more than 10 bytes.
    """
    if kind.__name__ not in ("Inventory", "CoordinatorState"):
        return None
    return _ENTRIES + size_bytes // _ENTRY_BYTES
