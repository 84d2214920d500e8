"""A payload that is copied segment by segment has the same bytes as one that is copied at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.support.trainer.payloads import RANK, stored
from tests.support.trainer.snapshots import take_snapshot

from holdfast.slots.segments import SEGMENT_SLOTS, segment_bytes, segments_of
from holdfast.slots.staging import Copier
from holdfast.state.copying.segments import SegmentWriter
from holdfast.state.snapshot import plan_save
from holdfast_core.shards.record import CHUNK_BYTES

KIB = 1 << 10


def state() -> dict[str, Any]:
    torch.manual_seed(5)
    base = torch.randn(500, 700)
    return {
        "large": torch.randn(300_000),
        "turned": base.t(),
        "conjugate": torch.randn(70_000, dtype=torch.complex64).conj(),
        "raw": torch.randn(400_000).to(torch.float8_e4m3fn),
        "half": torch.randn(7_777).bfloat16(),
        "flags": torch.rand(999) > 0.5,
        "array": np.arange(60_000).reshape(600, 100).T,
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3.0),
        "many": [torch.randn(index) for index in range(1, 60)],
        "text": "x" * 9_000,
    }


@pytest.mark.parametrize("size", [256 * KIB, 300 * KIB, 1 << 20], ids=str)
def test_the_segments_are_the_payload(size: int) -> None:
    saved = state()
    snapshot = take_snapshot(saved, RANK)
    plan = plan_save(snapshot, RANK)
    writer, found = SegmentWriter(plan, snapshot), []
    for segment in segments_of(plan.payload_bytes, size):
        target = np.full(segment.length_bytes, 255, dtype=np.uint8)
        writer.write(segment, target, Copier().run)
        found.append(target)
    assert np.concatenate(found).tobytes() == stored(saved).tobytes()


@pytest.mark.parametrize(
    ("ring", "payload", "expected"),
    [
        pytest.param(1 << 30, 100 << 30, 128 << 20, id="an eighth of the ring"),
        pytest.param(1 << 30, 1, CHUNK_BYTES, id="no more than the payload needs"),
        pytest.param(1 << 30, 800 << 20, 100 << 20, id="an eighth of the payload"),
        pytest.param(17 << 20, 100 << 30, 2 << 20, id="whole chunks"),
    ],
)
def test_the_size_of_a_segment(ring: int, payload: int, expected: int) -> None:
    size = segment_bytes(ring, payload)
    assert size == expected
    assert size * SEGMENT_SLOTS <= max(ring, SEGMENT_SLOTS * CHUNK_BYTES)
