"""Messages between the launchers of a run. Both ends are of the same release (`PROTOCOL`)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

from holdfast.launcher.command_line.node_options import MAX_NODES
from holdfast_core.errors import FormatError
from holdfast_core.ids import Rank, RestartRound
from holdfast_core.messages import codec
from holdfast_core.messages.bounds import Bounds, ClippedText, Name

PROTOCOL = 1
"""Version of these messages. Launchers of different versions do not form a run."""
MAX_BYTES = 64 * 1024

NodeRank = Annotated[int, Bounds(low=0, high=MAX_NODES - 1)]
Count = Annotated[int, Bounds(low=1, high=1 << 20)]


@dataclass(frozen=True, slots=True)
class Join:
    """First message of a node."""

    node_rank: NodeRank
    nodes: Count
    ranks: Count
    """Ranks that the node starts."""
    host: Name
    """Name of the machine, for logs."""
    last_round: RestartRound | None = None
    """The newest round whose ranks this launcher has forked."""


@dataclass(frozen=True, slots=True)
class Joined:
    """Node 0 to a node: it belongs to the run."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Node 0 to a node: it does not belong to the run."""

    reason: ClippedText
    may_retry: bool
    """Whether the reason may pass."""


@dataclass(frozen=True, slots=True)
class StartRound:
    """Node 0 to a node: fork the ranks of this round."""

    round: RestartRound
    store_port: Annotated[int, Bounds(low=1, high=65535)]
    """Port of the round's store on node 0."""
    store_salt: Name
    """From this and the run's key follows the secret of the store, which is never sent."""
    max_restarts: Annotated[int, Bounds(low=0)]


@dataclass(frozen=True, slots=True)
class EndRound:
    """Node 0 to a node: kill the ranks of this round."""

    round: RestartRound


@dataclass(frozen=True, slots=True)
class RoundEnded:
    """A node to node 0: no rank of this round runs on the node."""

    round: RestartRound


@dataclass(frozen=True, slots=True)
class RankExited:
    """A node to node 0: a rank has ended by itself."""

    round: RestartRound
    rank: Rank
    code: Annotated[int, Bounds(low=-255, high=255)]


@dataclass(frozen=True, slots=True)
class Stop:
    """A launcher has received a signal to stop. The ranks of all nodes save and stop."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Node 0 to a node: the run has ended. The launcher exits with this code."""

    code: Annotated[int, Bounds(low=0, high=255)]
    reason: ClippedText


@dataclass(frozen=True, slots=True)
class Alive:
    """Either end: sent every few seconds, so that silence shows a broken connection."""


_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        Join,
        Joined,
        Refused,
        StartRound,
        EndRound,
        RoundEnded,
        RankExited,
        Stop,
        Leave,
        Alive,
    )
}


def encode(message: Any) -> bytes:
    return json.dumps([type(message).__name__, codec.to_json(message)]).encode()


def decode(body: bytes) -> Any:
    """Return the message. Raises FormatError."""
    value = codec.parse_json(body, "message of a launcher", MAX_BYTES)
    if not isinstance(value, list) or len(value) != 2 or value[0] not in tuple(_KINDS):
        raise FormatError("message of a launcher: expected [type, body] of a known type")
    return codec.from_json(_KINDS[value[0]], value[1])
