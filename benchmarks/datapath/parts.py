"""The participants of each part of the run, their order, and the figures that a part yields. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

OURS = "benchmarks.datapath.ours"
SAVING = "benchmarks.peers.saving"
STORES = "benchmarks.peers.stores"
TRANSPORT = "benchmarks.peers.transport"
LIMITS = "benchmarks.datapath.limits"
BARE = "benchmarks.datapath.bare"


@dataclass(frozen=True, slots=True)
class Participant:
    name: str
    kind: str
    """What the participant does in its visit: a key of `visit.KINDS`."""
    module: str
    own_environment: bool = False
    """Whether the participant runs with the packages of `benchmarks/peers` instead of the workspace's."""


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    ids: tuple[str, ...]
    participants: tuple[Participant, ...]
    repetitions: int
    """Number of repetitions within one visit."""


def _peers(kind: str, module: str, *names: str) -> tuple[Participant, ...]:
    return tuple(Participant(name, kind, module, own_environment=True) for name in names)


def _limit(name: str) -> Participant:
    return Participant(name, "limit", LIMITS)


_UPLOADERS = (
    Participant("holdfast", "upload", OURS),
    *_peers("upload", STORES, "boto3", "minio-py", "s3torchconnector"),
)

FULL = (
    Part(
        "save",
        ("A1", "A2"),
        (
            _limit("memory and disk"),
            Participant("holdfast", "save", OURS),
            *_peers(
                "save",
                SAVING,
                "torch.save",
                "safetensors",
                "dcp-sync",
                "dcp-thread",
                "dcp-process",
                "dlrover",
                "torchsnapshot",
                "fast-file-writer",
            ),
        ),
        2,
    ),
    Part(
        "loops",
        ("A3",),
        (
            Participant("holdfast", "loops", OURS),
            *_peers("loops", SAVING, "dcp-thread", "dcp-process", "dlrover", "torchsnapshot"),
        ),
        2,
    ),
    Part(
        "load",
        ("A4",),
        (
            _limit("memory with CRC32C, and disk"),
            Participant("holdfast", "load", OURS),
            *_peers("load", SAVING, "dcp-sync", "torch.save", "safetensors"),
        ),
        2,
    ),
    Part("upload", ("A5-MINIO",), _UPLOADERS, 2),
    Part(
        "drained upload",
        ("A5",),
        (Participant("bare sendfile", "upload", BARE), *_UPLOADERS),
        2,
    ),
    Part(
        "copy",
        ("A6",),
        (
            _limit("loopback"),
            Participant("holdfast", "copy", OURS),
            Participant("holdfast, not encrypted", "copy", OURS),
            *_peers("copy", TRANSPORT, "torchft", "torchft, 4 chunks"),
        ),
        2,
    ),
    Part(
        "digests",
        ("A8",),
        (
            Participant("holdfast-digests-on", "chase", OURS),
            Participant("holdfast-digests-off", "chase", OURS),
        ),
        4,
    ),
    Part("fewer-bytes", ("A7",), (Participant("holdfast", "fewer-bytes", OURS),), 1),
    Part("reshard", ("A10",), (Participant("holdfast", "reshard", OURS),), 1),
    Part("many", ("A1-MANY",), (Participant("holdfast", "many", OURS),), 4),
    Part("every-step", ("A11",), (Participant("holdfast", "every-step", OURS),), 2),
)

QUICK = (
    Part(
        "save",
        ("A1", "A2"),
        (
            _limit("memory and disk"),
            Participant("holdfast", "save", OURS),
            Participant("dcp-sync", "save", SAVING),
            Participant("dcp-thread", "save", SAVING),
        ),
        2,
    ),
    Part(
        "loops",
        ("A3",),
        (
            Participant("holdfast", "loops", OURS),
            Participant("dcp-thread", "loops", SAVING),
        ),
        1,
    ),
    Part(
        "digests",
        ("A8",),
        (
            Participant("holdfast-digests-on", "chase", OURS),
            Participant("holdfast-digests-off", "chase", OURS),
        ),
        4,
    ),
    Part("many", ("A1-MANY",), (Participant("holdfast", "many", OURS),), 3),
)

UNMEASURED = {
    "A9": "needs injected kills on a cluster: not part of the run of the data path",
}


def chosen(parts: Sequence[Part], only: Iterable[str]) -> list[Part]:
    """Return the parts that yield these ids, or all parts where `only` is empty.

    Raises ValueError for an id that no part yields.
    """
    wanted = {id_.upper() for id_ in only if id_}
    known = {id_ for part in parts for id_ in part.ids}
    unknown = sorted(wanted - known - set(UNMEASURED))
    if unknown:
        raise ValueError(f"--only {','.join(unknown)}: expected some of {', '.join(sorted(known))}")
    return [part for part in parts if not wanted or wanted & set(part.ids)]


def another_round(done: int, spent_seconds: float, budget_seconds: float | None) -> bool:
    """Return whether one more round of average length fits. The first round always does."""
    if budget_seconds is None or done == 0:
        return True
    return spent_seconds * (done + 1) / done <= budget_seconds


def turns(participants: Sequence[Participant], round_: int) -> list[Participant]:
    """Return the participants, rotated by one place in each round.

    Without the rotation, a participant would always run with the dirty pages of the same predecessor.
    """
    shift = round_ % len(participants)
    return [*participants[shift:], *participants[:shift]]
