"""Golden files of every version stay readable, and this release writes those of the newest bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open
from tests.golden.make_format import golden_files

from holdfast_core.format.canonical import digest_of
from holdfast_core.format.manifest import Manifest, manifest_digest, parse_manifest
from holdfast_core.format.payload import parse_payload, unpack_objects
from holdfast_core.format.rank_layout import parse_rank_layout
from holdfast_core.ids import Rank
from holdfast_core.shards.file import FORMAT_VERSION, head_bytes
from holdfast_core.shards.stream import ShardStream

GOLDEN = Path(__file__).parent
FOLDERS = sorted(GOLDEN.glob("format_v*"))
MANIFESTS = {"format_v1": "b3:e86e78f3e5ae2c223eb682508066b357ab7ed02ed25afa14bb98d34ae428b772"}
"""Digest of the manifest of each version. It covers the digests of the shards."""


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def folder(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


def test_the_newest_files_are_still_written_bit_for_bit() -> None:
    newest = GOLDEN / f"format_v{FORMAT_VERSION}"
    assert golden_files() == {path.name: path.read_bytes() for path in newest.iterdir()}


def test_the_digests_of_each_version_are_the_ones_of_then() -> None:
    digests = {f.name: manifest_digest((f / "manifest.json").read_bytes()) for f in FOLDERS}
    assert digests == MANIFESTS


def parsed_manifest(folder: Path) -> Manifest:
    return parse_manifest((folder / "manifest.json").read_bytes())


@pytest.mark.parametrize("rank", [0, 1])
def test_shards_read(folder: Path, rank: int) -> None:
    manifest = parsed_manifest(folder)
    file = (folder / f"rank{rank}.shard").read_bytes()
    stream = ShardStream(manifest.ref(Rank(rank)), len(file))
    stream.feed(memoryview(file))
    trailer = stream.finish()
    header = trailer.record.header
    start = head_bytes(header)
    payload = file[start : start + header.payload_bytes]
    assert payload == (folder / f"rank{rank}.safetensors").read_bytes()
    assert trailer.record.chunk_table == manifest.shards[rank].chunk_table
    plan = parse_payload(payload, len(payload))
    assert unpack_objects(payload[plan.objects.start : plan.objects.stop]) == {"rng": [rank, 10]}
    document = (folder / f"rank{rank}.layout.json").read_bytes()
    layout = parse_rank_layout(document)
    assert digest_of(document) == header.layout
    assert layout.tensors["weight"].byte_range == plan.byte_range("weight")
    with safe_open(folder / f"rank{rank}.safetensors", framework="pt") as tensors:
        assert tensors.get_tensor("step").item() == 10


def test_documents_read(folder: Path) -> None:
    manifest = parsed_manifest(folder)
    assert (manifest.step, manifest.restart_round, manifest.world_size) == (10, 3, 2)
    for shard in manifest.shards:
        document = (folder / f"rank{shard.rank}.layout.json").read_bytes()
        assert shard.layout == digest_of(document)
        assert parse_rank_layout(document).tensors["weight"].shape == (4, 3)
    assert [shard.same_tensors for shard in manifest.shards] == [0, 0]
    assert [shard.same_boxes for shard in manifest.shards] == [0, 1]
