"""The DATA of the bulk wire: a shard file cut into frames, out of a reader and into a writer.

A frame is whole chunks wherever chunks are small enough, so that its CRC follows from the chunk
table's: damage on the sender's disk shows before the bytes leave it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from holdfast_core.errors import CorruptionError, FormatError
from holdfast_core.format.digest import append_crc, crc32c
from holdfast_core.ids import ByteRange
from holdfast_core.peer.connection import Line
from holdfast_core.peer.protocol import (
    MAX_DATA_BYTES,
    BulkFrame,
    Incoming,
    Kind,
    receive_data,
    send_frame,
)
from holdfast_core.shards.file import chunk_count, head_bytes
from holdfast_core.shards.record import ShardRecord
from holdfast_core.tiers.base import CopyWriter, ShardReader


@dataclass(frozen=True, slots=True)
class Piece:
    """Of one DATA frame: bytes of the file, and the chunks that they are, if they are whole ones."""

    span: ByteRange
    chunks: range = range(0)


def spans_without(record: ShardRecord, start: int, have: Sequence[range]) -> Iterator[ByteRange]:
    """The file from byte `start` on without these chunks of its payload, which are in order.
    Raises FormatError where there are no such chunks."""
    position = start
    for run in have:
        held = chunk_span(record, run)
        if held.start > position:
            yield ByteRange(position, held.start)
        position = max(position, held.stop)
    if position < record.file_bytes:
        yield ByteRange(position, record.file_bytes)


def chunk_span(record: ShardRecord, chunks: range) -> ByteRange:
    """Where chunks in a row lie in the file. Raises FormatError."""
    header = record.header
    first = head_bytes(header)
    start = chunks.start * header.chunk_bytes
    stop = min(chunks.stop * header.chunk_bytes, header.payload_bytes)
    if not 0 <= start < stop or chunks.stop > chunk_count(header):
        raise FormatError(f"shard of {record.ref}: has no chunks {chunks}")
    return ByteRange(first + start, first + stop)


def pieces(record: ShardRecord, span: ByteRange) -> Iterator[Piece]:
    """A part of the file. Cut where the payload begins and ends, and at its chunks; as many of them
    as MAX_DATA_BYTES hold."""
    chunk_bytes = record.header.chunk_bytes
    together = MAX_DATA_BYTES // chunk_bytes
    payload = ByteRange(
        head_bytes(record.header), head_bytes(record.header) + record.header.payload_bytes
    )
    position = span.start
    while position < span.stop:
        if position < payload.start:
            stop = payload.start
        elif position < payload.stop:
            first, within = divmod(position - payload.start, chunk_bytes)
            if within == 0 and together:
                stop = min(position + together * chunk_bytes, payload.stop, span.stop)
                count = -(-(stop - position) // chunk_bytes)
                yield Piece(ByteRange(position, stop), range(first, first + count))
                position = stop
                continue
            stop = min(payload.start + (first + 1) * chunk_bytes, payload.stop)
        else:
            stop = record.file_bytes
        stop = min(stop, span.stop, position + MAX_DATA_BYTES)
        yield Piece(ByteRange(position, stop))
        position = stop


def send_pieces(
    sock: socket.socket,
    request: BulkFrame,
    reader: ShardReader,
    wanted: Sequence[Piece],
    before: Callable[[int], None],
) -> None:
    """A DATA frame of each piece; the next one is read while one is sent. `before` is called with
    the bytes of each. Raises CorruptionError where a chunk is not what the table says, TierError of
    the own disk, OSError of the connection."""
    with closing(reader.read_file(piece.span for piece in wanted)) as views:
        for piece, view in zip(wanted, views, strict=True):
            if len(view) != piece.span.length_bytes:
                raise CorruptionError(
                    f"shard of {request.ref}: the file ends at {piece.span.start + len(view)} of "
                    f"{reader.record.file_bytes}"
                )
            crc = _checked_crc(reader, request, piece, view) if piece.chunks else crc32c(view)
            before(len(view))
            send_data(sock, request, piece.span.start, view, crc)


def _checked_crc(reader: ShardReader, request: BulkFrame, piece: Piece, view: memoryview) -> int:
    """CRC of the whole frame, from those of its chunks: one pass over the bytes."""
    chunk_bytes = reader.record.header.chunk_bytes
    whole = 0
    for start, chunk in zip(range(0, len(view), chunk_bytes), piece.chunks, strict=True):
        data = view[start : start + chunk_bytes]
        crc = crc32c(data)
        if crc != reader.table.crcs[chunk]:
            raise CorruptionError(f"shard of {request.ref}: CRC32C of chunk {chunk} does not match")
        whole = append_crc(whole, crc, len(data))
    return whole


def send_outside(
    line: Line,
    request: BulkFrame,
    reader: ShardReader,
    wanted: Sequence[Piece],
    before: Callable[[int], None],
) -> None:
    """Like `send_pieces`, and leaves TLS after the head (which the digest of the payload does not
    cover) or, where the receiver has that already, at once."""
    head = 1 if wanted and wanted[0].span.start == 0 else 0
    send_pieces(line.sock, request, reader, wanted[:head], before)
    line.leave()
    send_pieces(line.sock, request, reader, wanted[head:], before)


def send_data(
    sock: socket.socket, request: BulkFrame, offset: int, data: memoryview, crc: int
) -> None:
    """One DATA frame of the shard that `request` names; `crc` is that of `data`."""
    frame = BulkFrame(
        Kind.DATA,
        request.ref,
        request.round,
        offset=offset,
        length=len(data),
        crc32c=crc,
    )
    send_frame(sock, frame, data)


def receive_piece(sock: Incoming, frame: BulkFrame, request: BulkFrame, writer: CopyWriter) -> int:
    """The bytes of a DATA frame into the writer's room; they count after `writer.advance` of the
    number that this returns. Raises what `receive_data` raises."""
    room = writer.room(min(frame.length, MAX_DATA_BYTES))
    return len(receive_data(sock, frame, request.ref, writer.offset, room))
