"""A peer reports that a copy is corrupt. The sender reads its own shard again to find the cause."""

from __future__ import annotations

from pathlib import Path

from tests.support.shards.builders import BytesSource, payload, shard_header
from tests.support.shards.shard_files import flip_bit
from tests.support.sidecar.flows import AcceptingMember, running_flow

from holdfast_core.errors import CorruptionError
from holdfast_core.ids import RestartRound, ShardRef, TierName
from holdfast_core.messages.schema import Member
from holdfast_sidecar.save.flow import own_shard

SIZE = 1 << 20
CORRUPTIONS = f'holdfast_corruptions_detected_total{{tier="{TierName.NODE}"}} 1.0'


class RefusingOnce(AcceptingMember):
    """A peer that refuses the first copy as corrupt."""

    def put(self, member: Member, round_: RestartRound, ref: ShardRef) -> int:
        if not self.puts:
            self.puts.append(ref)
            raise CorruptionError(f"bulk: {member.pod} refused {ref}: CRC32C does not match")
        return super().put(member, round_, ref)


def quarantined(folder: Path) -> list[Path]:
    return list((folder / "quarantine").glob("*.shard"))


async def test_a_good_copy_stays_and_is_sent_again(tmp_path: Path) -> None:
    peer = RefusingOnce()
    async with running_flow(tmp_path, peer) as world:
        record = world.node.write_shard(shard_header(SIZE), BytesSource(payload(SIZE)))
        world.flow.add(own_shard(record, committed=True))
        await world.until_idle()
        assert peer.puts == [record.ref, record.ref]
        assert world.node.find(record.ref) is not None
        assert CORRUPTIONS not in world.metrics.render().decode()


async def test_a_bad_copy_is_quarantined_and_never_sent_again(tmp_path: Path) -> None:
    peer = RefusingOnce()
    async with running_flow(tmp_path, peer) as world:
        record = world.node.write_shard(shard_header(SIZE), BytesSource(payload(SIZE)))
        flip_bit(world.node.shard_path(record.ref), 4096 + SIZE // 2)
        world.flow.add(own_shard(record, committed=True))
        await world.until_idle()
        assert peer.puts == [record.ref]
        assert world.node.find(record.ref) is None
        assert len(quarantined(tmp_path)) == 1
        assert CORRUPTIONS in world.metrics.render().decode()
