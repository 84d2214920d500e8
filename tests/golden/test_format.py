"""The golden files stay readable, and this release writes them bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open
from tests.golden.make_format import golden_files

from holdfast_core.format.digest import digest_of
from holdfast_core.format.manifest import manifest_digest, parse_manifest
from holdfast_core.format.payload import parse_payload, unpack_objects
from holdfast_core.format.rank_layout import parse_rank_layout
from holdfast_core.ids import Rank
from holdfast_core.shards.file import FORMAT_VERSION, head_bytes
from holdfast_core.shards.stream import ShardStream

FOLDER = Path(__file__).parent / f"format_v{FORMAT_VERSION}"
MANIFEST = "b3:e86e78f3e5ae2c223eb682508066b357ab7ed02ed25afa14bb98d34ae428b772"


def read(name: str) -> bytes:
    return (FOLDER / name).read_bytes()


def test_the_newest_files_are_still_written_bit_for_bit() -> None:
    assert golden_files() == {path.name: path.read_bytes() for path in FOLDER.iterdir()}


def test_the_digests_are_the_ones_of_then() -> None:
    assert manifest_digest(read("manifest.json")) == MANIFEST


@pytest.mark.parametrize("rank", [0, 1])
def test_shards_read(rank: int) -> None:
    manifest = parse_manifest(read("manifest.json"))
    file = read(f"rank{rank}.shard")
    stream = ShardStream(manifest.ref(Rank(rank)), len(file))
    stream.feed(memoryview(file))
    trailer = stream.finish()
    header = trailer.record.header
    start = head_bytes(header)
    payload = file[start : start + header.payload_bytes]
    assert payload == read(f"rank{rank}.safetensors")
    assert trailer.record.chunk_table == manifest.shards[rank].chunk_table
    plan = parse_payload(payload, len(payload))
    assert unpack_objects(payload[plan.objects.start : plan.objects.stop]) == {"rng": [rank, 10]}
    layout = parse_rank_layout(read(f"rank{rank}.layout.json"))
    assert digest_of(read(f"rank{rank}.layout.json")) == header.layout
    assert layout.tensors["weight"].byte_range == plan.byte_range("weight")
    with safe_open(FOLDER / f"rank{rank}.safetensors", framework="pt") as tensors:
        assert tensors.get_tensor("step").item() == 10


def test_documents_read() -> None:
    manifest = parse_manifest(read("manifest.json"))
    assert (manifest.step, manifest.restart_round, manifest.world_size) == (10, 3, 2)
    for shard in manifest.shards:
        document = read(f"rank{shard.rank}.layout.json")
        assert shard.layout == digest_of(document)
        assert parse_rank_layout(document).tensors["weight"].shape == (4, 3)
    assert [shard.same_tensors for shard in manifest.shards] == [0, 0]
    assert [shard.same_boxes for shard in manifest.shards] == [0, 1]
