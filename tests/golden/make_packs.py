"""Write the golden files of packs and references.

After the first release, run it once for each new format version, into a new folder, and never again for the
same version. One release of zstd made the compressed chunks. Every release of Holdfast must read them, but
another release of zstd may write other bytes.
"""

from __future__ import annotations

import random
from array import array
from pathlib import Path

from tests.support.shards.builders import shard_file, shard_header
from tests.support.shards.packs import trailer_of

from holdfast_core.ids import CheckpointId, RestartRound, ShardRef, Step
from holdfast_core.shards.coding import ChunkEncoder
from holdfast_core.shards.file import head_bytes
from holdfast_core.shards.pack import FORMAT_VERSION, PLAIN, Coding, PackIndex, pack_index

CHUNK_BYTES = 4096
FOLDER = Path(__file__).parent / f"pack_v{FORMAT_VERSION}"
CODED_FOLDER = Path(__file__).parent / f"pack_v{FORMAT_VERSION}_compressed"
BASE = CheckpointId(Step(10), RestartRound(0))
SAVED = {
    # (step, round, rank): the byte of each chunk. The last chunk is shorter.
    (10, 0, 1): b"abcd",
    (20, 3, 0): b"wxyz",
    (20, 3, 1): b"abXz",
}


def payload_of(values: bytes) -> bytes:
    return b"".join(bytes([value]) * CHUNK_BYTES for value in values)[:-96]


def golden_files() -> dict[str, bytes]:
    """Return the contents of the files by name. Rank 1 at step 20 has two chunks from step 10, one from
    rank 0, and one of its own."""
    files: dict[str, bytes] = {}
    refs: dict[tuple[int, int, int], ShardRef] = {}
    for (step, round_, rank), values in SAVED.items():
        data = payload_of(values)
        header = shard_header(
            len(data), step=step, round=round_, rank=rank, world_size=4, chunk_bytes=CHUNK_BYTES
        )
        file, record = shard_file(header, data)
        refs[step, round_, rank] = record.ref
        files[f"step{step}-rank{rank}.shard"] = file
    trailer = trailer_of(
        payload_of(SAVED[20, 3, 1]), step=20, round=3, rank=1, chunk_bytes=CHUNK_BYTES
    )
    index = PackIndex(
        trailer.record.header,
        trailer.record.blake3,
        trailer.table,
        BASE,
        (refs[10, 0, 1], refs[20, 3, 0]),
        array("H", [1, 1, 0, 2]),
    )
    start = head_bytes(trailer.record.header) + 2 * CHUNK_BYTES
    own = files["step20-rank1.shard"][start : start + CHUNK_BYTES]
    files["step20-rank1.pack"] = own + pack_index(index)
    return files


CODED_WIDTHS = (1, 2, 4, 8, PLAIN, 4, PLAIN)
"""Widths of the chunks of the compressed pack. The sixth chunk is stored elsewhere, the last one is
shorter."""


def coded_payload() -> bytes:
    """Return numbers of 1, 2, 4 and 8 bytes, noise, a chunk of step 10, and 1,001 bytes of noise."""
    numbers = [
        b"".join((7 * n * n % 251).to_bytes(width, "little") for n in range(CHUNK_BYTES // width))
        for width in (1, 2, 4, 8)
    ]
    noise = random.Random(20).randbytes(CHUNK_BYTES + 1001)
    return b"".join((*numbers, noise[:CHUNK_BYTES], b"f" * CHUNK_BYTES, noise[CHUNK_BYTES:]))


def coded_index(payload: bytes, base: ShardRef, lengths: list[int]) -> PackIndex:
    trailer = trailer_of(payload, step=20, round=3, rank=1, chunk_bytes=CHUNK_BYTES)
    widths = bytes(0 if length == 0 else w for length, w in zip(lengths, CODED_WIDTHS, strict=True))
    return PackIndex(
        trailer.record.header,
        trailer.record.blake3,
        trailer.table,
        BASE,
        (base,),
        array("H", [0, 0, 0, 0, 0, 1, 0]),
        Coding.of(lengths, widths),
    )


def coded_files(chunks: list[bytes]) -> dict[str, bytes]:
    """Return the contents of the files by name. `chunks`: the stored bytes, b"" for the chunk of step 10."""
    files: dict[str, bytes] = {}
    refs = []
    for step, round_, data in ((10, 0, b"abcdefg"), (20, 3, None)):
        payload = coded_payload() if data is None else payload_of(data)
        header = shard_header(
            len(payload), step=step, round=round_, rank=1, chunk_bytes=CHUNK_BYTES
        )
        files[f"step{step}-rank1.shard"], record = shard_file(header, payload)
        refs.append(record.ref)
    index = coded_index(coded_payload(), refs[0], list(map(len, chunks)))
    files["step20-rank1.pack"] = b"".join(chunks) + pack_index(index)
    return files


def encoded_chunks() -> list[bytes]:
    payload, found = coded_payload(), []
    for number, width in enumerate(CODED_WIDTHS):
        chunk = payload[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
        coded = chunk if width == PLAIN else ChunkEncoder().encode(chunk, width)
        assert coded is not None
        found.append(b"" if number == 5 else coded)
    return found


def main() -> None:
    for folder, files in ((FOLDER, golden_files()), (CODED_FOLDER, coded_files(encoded_chunks()))):
        folder.mkdir(exist_ok=True)
        for name, data in files.items():
            (folder / name).write_bytes(data)


if __name__ == "__main__":
    main()
