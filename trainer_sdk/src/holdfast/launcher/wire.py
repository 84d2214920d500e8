"""The words between the launcher and its fork server, on a SOCK_SEQPACKET pair: one packet, one message.

Both ends come from the same installation and the socket has no name, so the messages are trusted;
they are still parsed by the strict codec, which gives errors a path.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from holdfast_core.errors import FormatError
from holdfast_core.messages import codec

MAX_PACKET_BYTES = 160 * 1024
"""Above any sane environment and command line, below the default send buffer of a Unix socket."""


@dataclass(frozen=True, slots=True)
class ForkRank:
    """Launcher -> server, with the write ends of two pipes (stdout, stderr) as descriptors."""

    key: str
    """Chosen by the launcher; names the process in every later message."""
    kind: str
    argv: tuple[str, ...]
    env: dict[str, str]


@dataclass(frozen=True, slots=True)
class ForkStore:
    """Launcher -> server: a process that hosts one TCPStore on a free port."""

    key: str
    host: str
    """Address to listen on; "" for all."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Server -> launcher: everything is imported, the process has one thread."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Forked:
    key: str
    pid: int
    port: int = 0
    """Of a store process."""


@dataclass(frozen=True, slots=True)
class Reaped:
    """A child ended; `code` is its exit code, or -N for signal N."""

    key: str
    pid: int
    code: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The server cannot do what was asked; `key` is empty when it cannot serve at all."""

    key: str
    message: str


Message = ForkRank | ForkStore | Ready | Forked | Reaped | Failed

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (ForkRank, ForkStore, Ready, Forked, Reaped, Failed)
}


def encode(message: Message) -> bytes:
    """Raises FormatError when the message does not fit a packet."""
    packet = json.dumps([type(message).__name__, codec.to_json(message)]).encode()
    if len(packet) > MAX_PACKET_BYTES:
        raise FormatError(
            f"{type(message).__name__}: {len(packet)} bytes, at most {MAX_PACKET_BYTES} fit: the "
            "command line or the environment of the rank is too large"
        )
    return packet


def decode(packet: bytes) -> Message:
    name, body = json.loads(packet)
    message: Message = codec.from_json(_KINDS[name], body)
    return message
