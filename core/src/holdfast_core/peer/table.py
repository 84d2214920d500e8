"""Send and receive the trailer of a shard, which has its chunk table, before any of its chunks.

The table is bound to the payload's digest. A caller that requests a shard by its digest can therefore trust
the table of any peer. In shards of version 1 it is not bound: the caller compares the table's digest with
the manifest's.
"""

from __future__ import annotations

import socket

from holdfast_core.errors import CorruptionError, FormatError
from holdfast_core.format.digest import crc32c
from holdfast_core.peer.data import send_data
from holdfast_core.peer.protocol import (
    MAX_DATA_BYTES,
    BulkFrame,
    Incoming,
    receive_data,
    receive_frame,
)
from holdfast_core.shards.file import Trailer, pack_trailer, trailer_offset, unpack_trailer
from holdfast_core.shards.stream import check_ref
from holdfast_core.tiers.base import ShardReader

MAX_TRAILER_BYTES = 256 << 20
"""Largest trailer that is accepted. It suffices for a payload of 1.8 TiB."""


def send_table(sock: socket.socket, request: BulkFrame, reader: ShardReader) -> None:
    """Send the trailer as DATA frames, with their offsets in the file. Raises OSError."""
    header = reader.record.header
    data = memoryview(pack_trailer(header, reader.record.blake3, reader.table))
    start = trailer_offset(header)
    for offset in range(0, len(data), MAX_DATA_BYTES):
        piece = data[offset : offset + MAX_DATA_BYTES]
        send_data(sock, request, start + offset, piece, crc32c(piece))


def receive_table(sock: Incoming, request: BulkFrame, file_bytes: int) -> Trailer:
    """Receive the trailer of the shard that `request` names.

    Args:
        file_bytes: Size of the shard file, which the peer has announced.

    Raises:
        CorruptionError: It is not the trailer of that shard or of a file of that size.
        FormatError: The frames or the trailer are not valid.
        UnavailableError: The bytes were damaged in transit, or the peer is too slow.
        OSError: The connection failed.
    """
    found = bytearray()
    start = 0
    while not found or start + len(found) < file_bytes:
        frame = receive_frame(sock)
        if frame is None:
            raise ConnectionResetError("the peer closed the connection within the chunk table")
        if not found:
            start = frame.offset
            if not 0 < file_bytes - start <= MAX_TRAILER_BYTES:
                raise FormatError(
                    f"bulk: trailer of {request.ref} at {start} of {file_bytes} bytes, at most "
                    f"{MAX_TRAILER_BYTES} are accepted"
                )
        due = min(MAX_DATA_BYTES, file_bytes - start - len(found))
        if frame.length < due:
            # Each frame needs a buffer, so frames that are smaller than a correct peer's are refused.
            raise FormatError(
                f"bulk: {frame.length} bytes of the trailer of {request.ref}, expected {due}"
            )
        room = memoryview(bytearray(due))
        found += receive_data(sock, frame, request.ref, start + len(found), room)
    trailer = unpack_trailer(bytes(found))
    check_ref(trailer.record, request.ref)
    if trailer.record.file_bytes != file_bytes:
        raise CorruptionError(
            f"bulk: {request.ref}: its trailer describes a file of {trailer.record.file_bytes} "
            f"bytes, expected the announced {file_bytes}"
        )
    return trailer
