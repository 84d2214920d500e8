"""The process that writes a rank's checkpoints to a directory: `python -m holdfast.persister FD ...`.

Started by the SDK where there is no sidecar, so that digests, fsync and commits never take the
trainer's interpreter lock. It ends with the trainer: after the connection ends it writes what was
staged, waits a bounded time for the other ranks, and leaves.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.directory.connection import Connection
from holdfast.directory.service import DirectoryService, ServiceOptions
from holdfast_core.errors import HoldfastError
from holdfast_core.ids import CheckpointId, Rank, RestartRound, Step
from holdfast_core.transfer.messages import Policy, Refusal, Refused
from holdfast_core.transfer.socket_frames import receive_frame, send_frame

_COMMIT_SECONDS = 30.0
"""How long the last checkpoint may wait for the shards of ranks that still write."""


def arguments(
    *,
    root: Path,
    slots_dir: Path,
    layouts_dir: Path,
    rank: Rank,
    world_size: int,
    policy: Policy,
    round_: RestartRound | None,
    restore: CheckpointId | None,
    rejected: Sequence[CheckpointId],
) -> str:
    """The command line's one value: what `main` reads back."""
    return json.dumps(
        {
            "root": str(root),
            "slotsDir": str(slots_dir),
            "layoutsDir": str(layouts_dir),
            "rank": rank,
            "worldSize": world_size,
            "intervalSteps": policy.interval_steps,
            "slots": policy.slots,
            "keepLast": policy.keep_last,
            "round": round_,
            "restore": None if restore is None else [restore.step, restore.round],
            "rejected": [[c.step, c.round] for c in rejected],
        }
    )


def _options(text: str) -> ServiceOptions:
    value: dict[str, Any] = json.loads(text)
    rank = int(value["rank"])
    round_ = value["round"]
    return ServiceOptions(
        root=Path(value["root"]),
        slots_dir=Path(value["slotsDir"]),
        layouts_dir=Path(value["layoutsDir"]),
        world_size=int(value["worldSize"]),
        own_ranks=range(rank, rank + 1),
        policy=Policy(
            interval_steps=int(value["intervalSteps"]),
            slots=int(value["slots"]),
            keep_last=int(value["keepLast"]),
            peer_copies=0,
        ),
        round=None if round_ is None else RestartRound(round_),
        restore=_checkpoint(value["restore"]),
        choose_restore=round_ is None,
        rejected=tuple(c for c in map(_checkpoint, value["rejected"]) if c is not None),
    )


def _checkpoint(pair: list[int] | None) -> CheckpointId | None:
    return None if pair is None else CheckpointId(Step(pair[0]), RestartRound(pair[1]))


def main(argv: Sequence[str]) -> int:
    """0 when everything that was staged is durable."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they are the trainer's; its end is ours
    logging.basicConfig(level=logging.WARNING, format="[holdfast] %(message)s", stream=sys.stderr)
    sock = socket.socket(fileno=int(argv[0]))
    service = DirectoryService(_options(argv[1]))
    try:
        service.start()
    except (HoldfastError, OSError) as error:
        _refuse_hello(sock, error)
        return 1
    Connection(sock, service).serve()
    service.finish(_COMMIT_SECONDS)
    return 0


def _refuse_hello(sock: socket.socket, error: Exception) -> None:
    """The trainer hears why, in the reply to its Hello."""
    frame = receive_frame(sock)
    if frame is not None:
        refused = Refused(Refusal.NOT_FOUND, str(error), RestartRound(0))
        send_frame(sock, refused, frame.id)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
