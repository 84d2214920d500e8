"""DATA frames of the bulk protocol: send a shard file from a reader, and receive it into a writer.

A frame consists of whole chunks where they are small enough. Then the sender verifies the chunks with the
chunk table while it computes the frame's CRC, and detects damage on its disk before it sends the bytes.
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
    """Part of the file that one DATA frame carries. `chunks` is empty unless it consists of whole chunks."""

    span: ByteRange
    chunks: range = range(0)


def spans_without(record: ShardRecord, start: int, have: Sequence[range]) -> Iterator[ByteRange]:
    """Yield the spans of the file from byte `start` on, without the chunks in `have`.

    Args:
        have: Runs of chunks of the payload, in order.

    Raises:
        FormatError: The shard does not have these chunks.
    """
    position = start
    for run in have:
        span = chunk_span(record, run)
        if span.start > position:
            yield ByteRange(position, span.start)
        position = max(position, span.stop)
    if position < record.file_bytes:
        yield ByteRange(position, record.file_bytes)


def chunk_span(record: ShardRecord, chunks: range) -> ByteRange:
    """Return the span of consecutive chunks in the file. Raises FormatError if the shard lacks them."""
    header = record.header
    first = head_bytes(header)
    start = chunks.start * header.chunk_bytes
    stop = min(chunks.stop * header.chunk_bytes, header.payload_bytes)
    if not 0 <= start < stop or chunks.stop > chunk_count(header):
        raise FormatError(f"shard of {record.ref}: the shard has no chunks {chunks}")
    return ByteRange(first + start, first + stop)


def pieces(record: ShardRecord, span: ByteRange) -> Iterator[Piece]:
    """Cut a span of the file into pieces for DATA frames.

    The cuts are at the start and the end of the payload and between chunks. A piece has as many whole chunks
    as fit into MAX_DATA_BYTES. A larger chunk is cut into several pieces.
    """
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
    """Send each piece as a DATA frame. The next piece is read while one is being sent.

    Args:
        before: Called with the number of bytes before each frame is sent.

    Raises:
        CorruptionError: A chunk does not match the chunk table, or the file is too short.
        TierError: The shard cannot be read.
        OSError: The connection failed.
    """
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
    """Verify the chunks of a piece, and return the CRC32C of the whole piece. It reads the bytes once."""
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
    """Send pieces like `send_pieces`, outside TLS except for the head of the shard.

    The digest of the payload does not cover the head, so the head stays inside TLS. If the receiver has it
    already, all pieces are sent outside.
    """
    head = 1 if wanted and wanted[0].span.start == 0 else 0
    send_pieces(line.sock, request, reader, wanted[:head], before)
    line.leave()
    send_pieces(line.sock, request, reader, wanted[head:], before)


def send_data(
    sock: socket.socket, request: BulkFrame, offset: int, data: memoryview, crc: int
) -> None:
    """Send one DATA frame of the shard that `request` names.

    Args:
        offset: Where `data` begins: in the payload for GET_RANGE, otherwise in the file.
        crc: CRC32C of `data`.
    """
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
    """Read the bytes of a DATA frame into the writer's buffer, and return their number.

    The caller passes the number to `writer.advance`, which appends the bytes. Raises what `receive_data`
    raises.
    """
    room = writer.room(min(frame.length, MAX_DATA_BYTES))
    return len(receive_data(sock, frame, request.ref, writer.offset, room))
