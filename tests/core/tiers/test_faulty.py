from __future__ import annotations

import pytest
from tests.support.crash.failpoints import parse_rules
from tests.support.shards.builders import JOB_UID, BytesSource, payload, shard_file, shard_header
from tests.support.tiers.faulty import Fault, FaultKind, Faults, FaultyNodeTier
from tests.support.tiers.memory import MemoryTier

from holdfast_core.errors import (
    CapacityError,
    ConfigError,
    CorruptionError,
    FormatError,
    UnavailableError,
)
from holdfast_core.format.manifest import parse_manifest
from holdfast_core.ids import CheckpointId, RestartRound, Step

CHECKPOINT = CheckpointId(Step(10), RestartRound(0))


def test_an_error_strikes_the_calls_it_names() -> None:
    full = CapacityError("volume is full")
    faults = Faults([Fault("write_shard", FaultKind.ERR, first=2, times=1, error=full)])
    tier = FaultyNodeTier(MemoryTier(), faults)
    for rank in (0, 1, 1):
        header = shard_header(10, rank=rank)
        if faults.calls("write_shard") == 1:
            with pytest.raises(CapacityError, match="full"):
                tier.write_shard(header, BytesSource(payload(10)))
        else:
            tier.write_shard(header, BytesSource(payload(10)))
    assert len(tier.list_shards()) == 2


def test_a_fault_without_an_error_raises_unavailable() -> None:
    tier = FaultyNodeTier(MemoryTier(), Faults([Fault("free_bytes", FaultKind.ERR)]))
    with pytest.raises(UnavailableError):
        tier.free_bytes()


def test_a_flip_in_a_copy_is_seen_by_the_tier_below() -> None:
    tier = FaultyNodeTier(MemoryTier(), Faults([Fault("copy.write", FaultKind.FLIP)]))
    file, record = shard_file(shard_header(5000), payload(5000))
    writer = tier.begin_copy(record.ref, len(file))
    with pytest.raises(CorruptionError):
        writer.write(file)
        writer.commit()


def test_a_flip_in_a_document_is_seen_by_its_parser() -> None:
    tier = FaultyNodeTier(MemoryTier(), Faults([Fault("get_manifest", FaultKind.FLIP)]))
    tier.put_manifest(JOB_UID, CHECKPOINT, b'{"a":1}')
    with pytest.raises(FormatError):
        parse_manifest(tier.get_manifest(JOB_UID, CHECKPOINT))


def test_faults_end() -> None:
    faults = Faults([Fault("list_shards", FaultKind.ERR)])
    tier = FaultyNodeTier(MemoryTier(), faults)
    with pytest.raises(UnavailableError):
        tier.list_shards()
    faults.clear()
    assert tier.list_shards() == ()


@pytest.mark.parametrize("text", ["x", "x=", "x=boom", "x=err@y", "x=sleep:z"])
def test_failpoint_rules_that_make_no_sense(text: str) -> None:
    with pytest.raises(ConfigError, match="no rule"):
        parse_rules(text)


def test_failpoint_rules() -> None:
    (a, b) = parse_rules("node.write=err@3,x.y=sleep:0.5")
    assert (a.name, a.action, a.at) == ("node.write", "err", 3)
    assert (b.name, b.action, b.seconds, b.at) == ("x.y", "sleep", 0.5, None)
