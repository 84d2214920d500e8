"""Write the golden files of the format.

After the first release, run it once for each new format version, into a new folder, and never again for the
same version.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.shards.builders import (
    manifest,
    rank_layout,
    rank_payload,
    shard_file,
    shard_header,
)

from holdfast_core.format.canonical import digest_of
from holdfast_core.shards.file import FORMAT_VERSION

WORLD_SIZE = 2
CHUNK_BYTES = 4 << 20
"""Chunk size of these shards. Each shard has its own chunk size, and readers accept any."""
FOLDER = Path(__file__).parent / f"format_v{FORMAT_VERSION}"


def golden_files() -> dict[str, bytes]:
    """Return the contents of the files by name, as the present code writes them."""
    files: dict[str, bytes] = {}
    records = []
    for rank in range(WORLD_SIZE):
        data = rank_payload(rank=rank, world_size=WORLD_SIZE)
        document = rank_layout(rank=rank, world_size=WORLD_SIZE)
        header = shard_header(
            len(data),
            rank=rank,
            round=3,
            world_size=WORLD_SIZE,
            layout=digest_of(document),
            chunk_bytes=CHUNK_BYTES,
        )
        file, record = shard_file(header, data)
        records.append(record)
        files[f"rank{rank}.shard"] = file
        files[f"rank{rank}.layout.json"] = document
        files[f"rank{rank}.safetensors"] = data
    parent = digest_of(b"the manifest before")
    files["manifest.json"] = manifest(records, parent=parent).to_bytes()
    return files


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, data in golden_files().items():
        (FOLDER / name).write_bytes(data)


if __name__ == "__main__":
    main()
