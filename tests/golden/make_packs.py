"""Writes the golden files of packs and references. Run once, when a version is made; never again for the
same one: a change of these bytes needs a new version and a folder of its own."""

from __future__ import annotations

from array import array
from pathlib import Path

from holdfast_core.format.pack import FORMAT_VERSION, PackIndex, pack_index
from holdfast_core.format.references import References
from holdfast_core.format.shard import head_bytes
from holdfast_core.ids import CheckpointId, RestartRound, ShardRef, Step
from holdfast_core.testing.builders import shard_file, shard_header
from holdfast_core.testing.packs import trailer_of

CHUNK_BYTES = 4096
FOLDER = Path(__file__).parent / f"pack_v{FORMAT_VERSION}"
BASE = CheckpointId(Step(10), RestartRound(0))
NEXT = CheckpointId(Step(20), RestartRound(3))
SAVED = {
    # (step, round, rank): the byte of each chunk; the last chunk is shorter
    (10, 0, 1): b"abcd",
    (20, 3, 0): b"wxyz",
    (20, 3, 1): b"abXz",
}


def payload_of(values: bytes) -> bytes:
    return b"".join(bytes([value]) * CHUNK_BYTES for value in values)[:-96]


def golden_files() -> dict[str, bytes]:
    """Name -> bytes: rank 1 at step 20 has two chunks from step 10, one from rank 0, and one of its
    own."""
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
    files["references.json"] = References(NEXT, index.earlier()).to_bytes()
    return files


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, data in golden_files().items():
        (FOLDER / name).write_bytes(data)


if __name__ == "__main__":
    main()
