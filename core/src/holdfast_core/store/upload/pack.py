"""A pack without compression as the source of an object: runs of chunks of the shard file, then the index.

This module reads no file. shards.pack_plan decides which chunks a pack leaves out, and store.rules which
objects other checkpoints need.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holdfast_core.format.digest import append_crc, crc32c
from holdfast_core.shards.file import head_bytes
from holdfast_core.shards.pack import HERE, PackIndex, pack_index
from holdfast_core.tiers.base import ShardReader
from holdfast_core.tiers.objects import FileRange, Part


class PlainPack:
    """ObjectSource of a pack. Each part consists of runs of chunks; the index comes last.

    Part boundaries lie on chunk boundaries, so the checksums follow from the chunk table and no payload
    is read to compute them.
    """

    made_while_sent = False

    def __init__(self, reader: ShardReader, index: PackIndex) -> None:
        """`reader` is the shard on the node. Raises FormatError for an index that a reader would refuse."""
        self._reader = reader
        self._index = index
        self._tail = pack_index(index)

    @property
    def size_limit(self) -> int:
        return self._index.stored_bytes + len(self._tail)

    def parts(self, part_bytes: int) -> Iterator[Part]:
        """Make the parts. They are `part_bytes` long, rounded up to whole chunks."""
        index, tail = self._index, self._tail
        size, stored, total = index.header.chunk_bytes, index.stored_bytes, self.size_limit
        part_bytes = -(-part_bytes // size) * size
        chunks = [chunk for run in index.runs() if run.place == HERE for chunk in run.chunks]
        for start in range(0, total, part_bytes):
            stop = min(start + part_bytes, total)
            inside = chunks[start // size : -(-min(stop, stored) // size)]
            after = tail[max(0, start - stored) : max(0, stop - stored)]
            files = tuple(self._file_ranges(inside))
            crc = self._checksum(inside, after)
            yield Part((*files, after) if after else files, stop - start, crc, stop == total)

    def verify(self) -> None:
        self._reader.verify()

    def _file_ranges(self, chunks: Sequence[int]) -> Iterator[FileRange]:
        header = self._index.header
        first = head_bytes(header)
        start = 0
        for at in range(1, len(chunks) + 1):
            if at == len(chunks) or chunks[at] != chunks[at - 1] + 1:
                offset = chunks[start] * header.chunk_bytes
                stop = min((chunks[at - 1] + 1) * header.chunk_bytes, header.payload_bytes)
                yield FileRange(self._reader.fd, first + offset, stop - offset)
                start = at

    def _checksum(self, chunks: Sequence[int], after: bytes) -> int:
        header, crc = self._index.header, 0
        for chunk in chunks:
            length = min(header.chunk_bytes, header.payload_bytes - chunk * header.chunk_bytes)
            crc = append_crc(crc, self._index.table.crcs[chunk], length)
        return append_crc(crc, crc32c(after), len(after))
