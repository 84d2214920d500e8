"""Builders of shards, layouts and manifests with defaults, so that a test names only the fields that it
checks.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from holdfast_core.format.canonical import digest_of, dumps_canonical
from holdfast_core.format.manifest import JobIdentity, Manifest, manifest_document, manifest_shards
from holdfast_core.format.payload import PayloadPlan, plan_payload
from holdfast_core.format.rank_layout import LayoutDigests, RankLayout, TensorSlice, layout_digests
from holdfast_core.ids import Digest, JobUid, Rank, RestartRound, Step
from holdfast_core.shards.file import (
    CHUNK_BYTES,
    ShardHeader,
    ShardRecord,
    align,
    pack_head,
    pack_trailer,
)
from holdfast_core.shards.stream import PayloadDigester

JOB_UID = JobUid("11111111-2222-3333-4444-555555555555")
JOB = JobIdentity("team-a", "gpt-small", JOB_UID)


class BytesSource:
    """PayloadSource over bytes that counts its reads, and the bytes of its file that were read back."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.reads = 0
        self.verified_bytes = 0

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.reads += 1
        buffer[:] = self._data[offset : offset + len(buffer)]

    def verified(self, byte_count: int) -> None:
        self.verified_bytes += byte_count


def payload(size_bytes: int, *, seed: int = 0) -> bytes:
    """Return random bytes that depend only on `size_bytes` and `seed`."""
    return random.Random(seed).randbytes(size_bytes)


def shard_header(
    payload_bytes: int,
    *,
    job_uid: JobUid = JOB_UID,
    round: int = 0,
    step: int = 10,
    rank: int = 0,
    world_size: int = 4,
    layout: Digest | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> ShardHeader:
    return ShardHeader(
        job_uid=job_uid,
        round=RestartRound(round),
        step=Step(step),
        rank=Rank(rank),
        world_size=world_size,
        layout=layout or digest_of(rank_layout(rank=rank, world_size=max(4, world_size))),
        payload_bytes=payload_bytes,
        chunk_bytes=chunk_bytes,
    )


def shard_file(header: ShardHeader, data: bytes) -> tuple[bytes, ShardRecord]:
    """Return the bytes of the shard file and its record."""
    digester = PayloadDigester(header)
    digester.update(memoryview(data))
    record, table = digester.finish()
    body = data.ljust(align(len(data)), b"\0")
    return pack_head(header) + body + pack_trailer(header, record.blake3, table), record


def rank_layout(*, rank: int = 0, world_size: int = 4, rows_per_rank: int = 2) -> bytes:
    """Return the layout of a row-sharded F32 weight of 3 columns, a replicated I64 scalar and the state
    `rng`.
    """
    document, _ = rank_layout_and_plan(
        rank=rank, world_size=world_size, rows_per_rank=rows_per_rank
    )
    return document


def rank_layout_and_plan(
    *, rank: int = 0, world_size: int = 4, rows_per_rank: int = 2, objects_capacity_bytes: int = 64
) -> tuple[bytes, PayloadPlan]:
    local = (rows_per_rank, 3)
    plan = plan_payload([("weight", "F32", local), ("step", "I64", ())], objects_capacity_bytes)
    layout = RankLayout(
        rank=Rank(rank),
        tensors={
            "weight": TensorSlice(
                "F32",
                (rows_per_rank * world_size, 3),
                (rows_per_rank * rank, 0),
                local,
                plan.byte_range("weight"),
            ),
            "step": TensorSlice("I64", (), (), (), plan.byte_range("step")),
        },
        objects={"rng": plan.objects},
        payload_bytes=plan.total_bytes,
    )
    return layout.to_bytes(), plan


def rank_payload(*, rank: int = 0, world_size: int = 4, step: int = 10) -> bytes:
    """Return a complete safetensors payload that fits `rank_layout`.

    The weight is zero except for its last byte, which depends on the rank.
    """
    _, plan = rank_layout_and_plan(rank=rank, world_size=world_size)
    weight = plan.byte_range("weight")
    data = bytearray(plan.header)
    data += step.to_bytes(8, "little", signed=True)
    data += bytes(weight.length_bytes - 1) + bytes([rank % 64])
    data += pack_objects({"rng": [rank, step]}, plan.objects.length_bytes)
    return bytes(data)


def layout_digests_of(header: ShardHeader) -> LayoutDigests:
    """Return the digests of a layout that has the header's digest, with the tensors of `rank_layout`."""
    made = layout_digests(rank_layout(rank=header.rank, world_size=max(4, header.world_size)))
    return replace(made, layout=header.layout)


def manifest(records: Sequence[ShardRecord], *, parent: Digest | None = None) -> Manifest:
    """Return the manifest of shards of one step and round, in order of rank."""
    header = records[0].header
    return Manifest(
        job=msgspec.structs.replace(JOB, uid=header.job_uid),
        step=header.step,
        restart_round=header.round,
        world_size=len(records),
        parent=parent,
        shards=manifest_shards(
            [(record.info, layout_digests_of(record.header)) for record in records]
        ),
    )


def build_manifest(
    job: JobIdentity,
    shards: Iterable[tuple[ShardRecord, LayoutDigests]],
    *,
    parent: Digest | None,
) -> bytes:
    """Return the manifest document of the shards of all ranks, which may be in any order."""
    ordered = sorted(shards, key=lambda shard: shard[0].header.rank)
    entries = [(record.info, layout) for record, layout in ordered]
    return manifest_document(job, ordered[0][0].checkpoint, parent, entries)


def weights(size_bytes: int, *, seed: int = 0) -> bytes:
    """Return bytes that compress like a tensor of floats.

    Of every four bytes, three are noise and one has few values. Compression saves about a sixth if the
    bytes are grouped by their position, and little otherwise.
    """
    data = bytearray(payload(size_bytes, seed=seed))
    few = payload(-(-(size_bytes - 3) // 4) if size_bytes > 3 else 0, seed=seed + 1)
    data[3::4] = few.translate(bytes(0x38 + (byte & 7) for byte in range(256)))
    return bytes(data)


def pack_objects(value: Any, capacity_bytes: int) -> bytes:
    """Return the objects of a payload as canonical JSON, padded to the capacity."""
    text = dumps_canonical(value)
    assert len(text) <= capacity_bytes
    return text.ljust(capacity_bytes)
