"""Upload plan of a pack without compression: runs of chunks of the open shard file, then the index.

This module reads no file. shards.pack_plan decides which chunks a pack leaves out, and store.prune which
objects other checkpoints need.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast_core.format.digest import append_crc, crc32c
from holdfast_core.ids import ByteRange
from holdfast_core.shards.file import head_bytes
from holdfast_core.shards.pack import HERE, PackIndex, pack_index
from holdfast_core.store.s3.http import Body, FileBody, JoinedBody
from holdfast_core.store.upload.parts import MAX_PARTS, Part, PartPlan


@dataclass(frozen=True, slots=True)
class PackParts:
    """The parts of a pack and their bodies. Each part consists of runs of chunks; the index comes last.

    Part boundaries lie on chunk boundaries, so the checksums follow from the chunk table and no payload
    is read to compute them.
    """

    plan: PartPlan
    bodies: tuple[Body, ...]
    """The body of each part of the plan."""

    def body(self, part: Part) -> Body:
        return self.bodies[part.number - 1]


def plan_pack_parts(fd: int, index: PackIndex, part_bytes: int) -> PackParts:
    """Plan the parts of a pack.

    Parts are `part_bytes` long, rounded up to whole chunks, or longer if 10,000 parts were too few. `fd`
    is the whole shard file. Raises FormatError for an index that a reader would refuse.
    """
    tail = pack_index(index)
    size = index.header.chunk_bytes
    stored = index.stored_bytes
    total = stored + len(tail)
    part_bytes = -(-max(part_bytes, -(-total // MAX_PARTS)) // size) * size
    chunks = [chunk for run in index.runs() if run.place == HERE for chunk in run.chunks]
    parts: list[Part] = []
    bodies: list[Body] = []
    whole = 0
    for number, start in enumerate(range(0, total, part_bytes), start=1):
        span = ByteRange(start, min(start + part_bytes, total))
        inside = chunks[start // size : -(-min(span.stop, stored) // size)]
        after = tail[max(0, start - stored) : max(0, span.stop - stored)]
        files = tuple(_file_ranges(fd, index, inside))
        crc = _checksum(index, inside, after)
        whole = append_crc(whole, crc, span.length_bytes)
        parts.append(Part(number, span, crc))
        bodies.append(JoinedBody((*files, after) if after else files))
    return PackParts(PartPlan(tuple(parts), total, whole), tuple(bodies))


def _file_ranges(fd: int, index: PackIndex, chunks: list[int]) -> Iterator[FileBody]:
    header = index.header
    first = head_bytes(header)
    start = 0
    for at in range(1, len(chunks) + 1):
        if at == len(chunks) or chunks[at] != chunks[at - 1] + 1:
            offset = chunks[start] * header.chunk_bytes
            stop = min((chunks[at - 1] + 1) * header.chunk_bytes, header.payload_bytes)
            yield FileBody(fd, first + offset, stop - offset)
            start = at


def _checksum(index: PackIndex, chunks: list[int], after: bytes) -> int:
    header, crc = index.header, 0
    for chunk in chunks:
        length = min(header.chunk_bytes, header.payload_bytes - chunk * header.chunk_bytes)
        crc = append_crc(crc, index.table.crcs[chunk], length)
    return append_crc(crc, crc32c(after), len(after))
