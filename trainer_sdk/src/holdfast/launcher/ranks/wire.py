"""Messages between the launcher and its fork server, one per packet of a SOCK_SEQPACKET pair.

Both ends come from the same installation and the socket has no name, so that the messages are trusted.
The codec of messages still parses them, because its errors name the field. Only the packet has a bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast_core.errors import FormatError
from holdfast_core.messages import codec
from holdfast_core.messages.codec import Clipped, ClippedText

MAX_PACKET_BYTES = 160 * 1024
"""Limit of a packet. It is enough for usual environments and command lines, and it is below the default
send buffer of a Unix socket."""


@dataclass(frozen=True, slots=True)
class ForkRank:
    """Launcher to server: fork a rank.

    The write ends of two pipes (stdout, stderr) and the file for its stacks go along with it.
    """

    key: str
    """Name of the process in every later message. The launcher chooses it."""
    kind: str
    argv: tuple[str, ...]
    env: dict[str, str]


@dataclass(frozen=True, slots=True)
class ForkStore:
    """Launcher to server: fork a process that hosts one TCPStore on a free port."""

    key: str
    host: str
    """Address to listen on; "" for all addresses."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Server to launcher: all modules are imported, and the process has one thread."""

    seconds: float
    """Duration of the imports."""


@dataclass(frozen=True, slots=True)
class Forked:
    """Server to launcher: a process was forked."""

    key: str
    pid: int
    port: int = 0
    """Port of a store process, otherwise 0."""


@dataclass(frozen=True, slots=True)
class Reaped:
    """Server to launcher: a child has ended. `code` is its exit code, or -N for signal N."""

    key: str
    pid: int
    code: int


@dataclass(frozen=True, slots=True)
class Failed(Clipped):
    """Server to launcher: a request failed. `key` is empty when the server cannot serve at all."""

    key: str
    message: ClippedText


Message = ForkRank | ForkStore | Ready | Forked | Reaped | Failed

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (ForkRank, ForkStore, Ready, Forked, Reaped, Failed)
}


def encode(message: Message) -> bytes:
    """Return the packet of a message. Raises FormatError when it does not fit into a packet."""
    packet = codec.dumps((type(message).__name__, msgspec.Raw(codec.dumps(message))))
    if len(packet) > MAX_PACKET_BYTES:
        raise FormatError(
            f"{type(message).__name__}: {len(packet)} bytes, at most {MAX_PACKET_BYTES} can be "
            "sent: the command line or the environment of the rank is too large"
        )
    return packet


def decode(packet: bytes) -> Message:
    name, body = codec.loads(tuple[str, msgspec.Raw], packet)
    message: Message = codec.loads(_KINDS[name], bytes(body))
    return message
