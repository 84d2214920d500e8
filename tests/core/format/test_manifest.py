from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.shards.builders import manifest, payload, shard_file, shard_header

from holdfast_core.errors import FormatError
from holdfast_core.format.canonical import dumps_canonical
from holdfast_core.format.manifest import Manifest, manifest_digest, parse_manifest
from holdfast_core.ids import Rank


def sample() -> Manifest:
    return manifest(
        [
            shard_file(shard_header(100, rank=rank, world_size=2), payload(100, seed=rank))[1]
            for rank in range(2)
        ]
    )


def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    value = json.loads(sample().to_bytes())
    change(value)
    return dumps_canonical(value)


def test_round_trip_is_exact() -> None:
    document = sample().to_bytes()
    assert parse_manifest(document) == sample()
    assert parse_manifest(document).to_bytes() == document
    assert manifest_digest(document).startswith("b3:")


def test_a_manifest_names_its_shards() -> None:
    record = shard_file(shard_header(100, rank=1, world_size=2), payload(100, seed=1))[1]
    assert sample().ref(Rank(1)) == record.ref
    assert sample().payload_bytes == 200
    with pytest.raises(FormatError, match="found 2"):
        sample().ref(Rank(2))


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda m: m.pop("step"), "manifest: .*required field `step`"),
        (lambda m: m.update(extra=1), "unknown field `extra`"),
        (lambda m: m.update(formatVersion=2), "formatVersion: version 2"),
        (lambda m: m.update(formatVersion=True), "formatVersion"),
        (lambda m: m.update(step=-1), "manifest.step"),
        (lambda m: m.update(step=1.0), "manifest.step"),
        (lambda m: m.update(step=2**63), "manifest.step"),
        (lambda m: m.update(worldSize=3), "manifest.shards"),
        (lambda m: m.update(worldSize=100_001), "worldSize"),
        (lambda m: m.update(parent="b3:x"), "manifest.parent"),
        (lambda m: m["shards"][0].update(layout=None), r"shards\[0\].layout"),
        (lambda m: m["shards"][1].update(layout="b3:x"), r"shards\[1\].layout"),
        (lambda m: m["shards"][0].update(sameTensors=1), r"shards\[0\].sameTensors"),
        (lambda m: m["shards"][1].update(sameTensors=-1), r"shards\[1\].sameTensors"),
        (lambda m: m["shards"][1].update(sameBoxes=2), r"shards\[1\].sameBoxes"),
        (lambda m: m["shards"][1].update(sameBoxes=0, sameTensors=1), r"shards\[1\].sameBoxes"),
        (lambda m: m["job"].update(uid="../../etc"), "job uid"),
        (lambda m: m["job"].update(name="a\0"), "job.name"),
        (lambda m: m["shards"].reverse(), r"shards\[0\].rank"),
        (lambda m: m["shards"][1].update(rank=0), r"shards\[1\].rank"),
        (lambda m: m["shards"][1].update(bytes=-5), r"shards\[1\].bytes"),
        (lambda m: m["shards"][1].update(bytes=2**63), r"shards\[1\].bytes"),
        (lambda m: m["shards"][0].pop("chunkTable"), r"shards\[0\]: .*`chunkTable`"),
        (lambda m: m.update(shards={}), "manifest.shards: Expected `array`"),
    ],
)
def test_every_contradiction_is_refused_with_its_path(
    change: Callable[[dict[str, Any]], object], path: str
) -> None:
    with pytest.raises(FormatError, match=path):
        parse_manifest(changed(change))


@pytest.mark.parametrize("document", [b"", b"[]", b"null", b"{}", b'{"formatVersion":1}'])
def test_what_is_no_manifest_is_refused(document: bytes) -> None:
    with pytest.raises(FormatError, match="manifest"):
        parse_manifest(document)


def test_duplicate_keys_are_refused() -> None:
    document = sample().to_bytes()
    with pytest.raises(FormatError, match="duplicate"):
        parse_manifest(document.replace(b'"step":10', b'"step":10,"step":10'))
