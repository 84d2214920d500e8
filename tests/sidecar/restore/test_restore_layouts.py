"""The layout that a rank receives for its shard, and the documents from which it is made."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.sidecar.reshard_world import Turning
from tests.support.shards.builders import (
    JOB,
    BytesSource,
    build_manifest,
    rank_layout,
    rank_payload,
    shard_header,
)
from tests.support.tiers.scratch import ScratchTier

from holdfast_core.errors import (
    HoldfastError,
    NotFoundError,
    RefusedError,
    UnavailableError,
)
from holdfast_core.format.canonical import digest_of, hex_of
from holdfast_core.format.manifest import parse_manifest
from holdfast_core.format.rank_layout import layout_digests
from holdfast_core.ids import Digest, Rank, RestartRound, TierName, Worker
from holdfast_core.messages.schema import (
    Fill,
    Policy,
    Refusal,
    Restore,
    RestorePoint,
    RestoreReply,
    Round,
)
from holdfast_core.save.place import RankLayouts
from holdfast_sidecar.base.rounds import RoundState
from holdfast_sidecar.base.telemetry import Metrics
from holdfast_sidecar.base.tiers import Pools, Tiers
from holdfast_sidecar.restore.fill import Filler
from holdfast_sidecar.restore.rehydrate import Restored

NOW = RestartRound(1)
RANK = Rank(1)
OWN = rank_layout(rank=RANK, world_size=2)
OTHER = rank_layout(rank=0, world_size=2)


class Pod:
    """Worker 1 of two with one rank each.

    Also stands for the Rehydrator, with the restore point, and the layouts of the ranks that saved it.
    """

    def __init__(self, root: Path) -> None:
        self.directory = root / "layouts"
        self.node = ScratchTier()
        payloads = [rank_payload(rank=rank, world_size=2) for rank in range(2)]
        records = [
            self.node.write_shard(
                shard_header(
                    len(data),
                    rank=rank,
                    world_size=2,
                    layout=digest_of(rank_layout(rank=rank, world_size=2)),
                ),
                BytesSource(data),
            )
            for rank, data in enumerate(payloads)
        ]
        shards = zip(records, map(layout_digests, (OTHER, OWN)), strict=True)
        manifest = parse_manifest(build_manifest(JOB, shards, parent=None))
        self.payload_bytes = len(payloads[RANK])
        self.documents: list[bytes | HoldfastError] = [OTHER, OWN]
        self.read: list[Rank] = []
        self.clock = Turning()
        self.restored = Restored(
            RestorePoint(manifest.step, manifest.restart_round),
            manifest,
            {RANK: records[RANK].ref},
            {RANK: self.payload_bytes},
            {RANK: TierName.NODE},
        )

    async def layout(self, restored: Restored, rank: Rank) -> bytes:
        assert restored is self.restored
        self.read.append(rank)
        document = self.documents[rank]
        if isinstance(document, HoldfastError):
            raise document
        return document

    def ask(self, message: Restore | Fill) -> Any:
        state = RoundState(Worker(1), 1, NOW, "gpt-1-r0", accepted=round_of_two())

        async def scenario() -> Any:
            pools = Pools(disk=1, fetch=1, store=1)
            absent: Any = None
            pod: Any = SimpleNamespace(patience=self.clock.patience)
            saves: Any = SimpleNamespace(
                layouts=RankLayouts(self.directory, self.node, pools), stager=absent
            )
            filler = Filler(
                pod,
                Tiers(self.node, None, pools),
                saves,
                self,  # type: ignore[arg-type]
                absent,
                Metrics(),
            )
            try:
                if isinstance(message, Restore):
                    return await filler.restore(state, message)
                return await filler.fill(state, message)
            finally:
                pools.close()

        return asyncio.run(scenario())

    def restore(self, *, with_layouts: bool = False) -> RestoreReply:
        reply = self.ask(Restore(NOW, RANK, with_layouts=with_layouts))
        assert isinstance(reply, RestoreReply)
        assert (reply.world_size, reply.payload_bytes) == (2, self.payload_bytes)
        return reply

    def given(self, digest: Digest | None) -> bytes | None:
        """Return the document that the rank reads."""
        return None if digest is None else (self.directory / f"{hex_of(digest)}.json").read_bytes()


def round_of_two() -> Round:
    return Round(NOW, 1, RestorePoint(), Worker(0), Worker(0), 2, (), (), Policy(interval_steps=1))


@pytest.fixture
def pod(tmp_path: Path) -> Pod:
    return Pod(tmp_path)


def test_a_rank_gets_the_layout_of_its_shard_alone(pod: Pod) -> None:
    pod.documents[0] = NotFoundError("no place has it")
    reply = pod.restore()
    assert (pod.given(reply.rank_layout), reply.home, reply.layouts) == (OWN, None, {})
    assert pod.read == [RANK]


def test_a_rank_that_asks_has_its_homes_layout_and_one_of_each_kind(pod: Pod) -> None:
    """Both ranks saved the same tensors, so the home stands for both."""
    reply = pod.restore(with_layouts=True)
    assert (pod.given(reply.rank_layout), pod.given(reply.home)) == (OWN, OWN)
    assert [(pod.given(digest), ranks) for digest, ranks in reply.layouts.items()] == [(OWN, 2)]
    assert set(pod.read) == {RANK}


def test_ranks_that_saved_other_tensors_have_a_layout_of_their_own(pod: Pod) -> None:
    manifest = pod.restored.manifest
    shards = (
        manifest.shards[0],
        msgspec.structs.replace(manifest.shards[1], same_tensors=Rank(1)),
    )
    pod.restored = replace(pod.restored, manifest=msgspec.structs.replace(manifest, shards=shards))
    reply = pod.restore(with_layouts=True)
    assert [(pod.given(digest), ranks) for digest, ranks in reply.layouts.items()] == [
        (OTHER, 1),
        (OWN, 1),
    ]


def test_any_rank_of_a_kind_will_do(pod: Pod) -> None:
    """A rank of another number of ranks has a home of another kind than these two."""
    manifest = pod.restored.manifest
    third = msgspec.structs.replace(
        manifest.shards[1], rank=Rank(2), same_tensors=Rank(2), same_boxes=Rank(2)
    )
    three = msgspec.structs.replace(manifest, world_size=3, shards=(third, *manifest.shards))
    first = msgspec.structs.replace(third, rank=Rank(0), same_tensors=Rank(0), same_boxes=Rank(0))
    kinds = (
        first,
        msgspec.structs.replace(manifest.shards[0], rank=Rank(1), same_tensors=Rank(1)),
        msgspec.structs.replace(manifest.shards[1], rank=Rank(2), same_tensors=Rank(0)),
    )
    pod.restored = Restored(
        pod.restored.point,
        msgspec.structs.replace(three, shards=kinds),
        {},
        {},
        {},
        is_of_others=True,
    )
    pod.documents = [NotFoundError("lost"), OTHER, OWN]
    reply = pod.ask(Restore(NOW, RANK))
    found = [(pod.given(digest), ranks) for digest, ranks in reply.layouts.items()]
    assert found == [(OWN, 2), (OTHER, 1)]


@pytest.mark.parametrize("document", [NotFoundError("no place has it")], ids=["nowhere"])
def test_a_shard_is_restored_without_its_layout(pod: Pod, document: HoldfastError) -> None:
    """The shard is valid without its layout, so the loss of the document must not lose a checkpoint."""
    pod.documents[RANK] = document
    reply = pod.restore()
    assert (reply.rank_layout, reply.home) == (None, None)


def test_a_requested_layout_that_no_place_has_is_reported(pod: Pod) -> None:
    pod.documents[RANK] = NotFoundError("layout at worker 0: it has none")
    with pytest.raises(NotFoundError, match="worker 0"):
        pod.restore(with_layouts=True)


def test_another_number_of_ranks_must_send_its_layout(pod: Pod) -> None:
    point, manifest = pod.restored.point, pod.restored.manifest
    pod.restored = Restored(point, manifest, {}, {}, {}, is_of_others=True)
    reply = pod.ask(Restore(NOW, RANK))
    assert (reply.world_size, reply.rank_layout, pod.given(reply.home)) == (2, None, OWN)
    with pytest.raises(RefusedError, match="expected one, because another number"):
        pod.ask(Fill(NOW, RANK, ()))


def test_a_rank_gets_its_shard_although_the_layout_cannot_be_written(pod: Pod) -> None:
    """Slots may have filled the shared volume."""
    pod.directory.write_text("no folder: stands for a volume that takes no more")
    assert pod.restore().rank_layout is None


def test_a_layout_that_was_given_before_is_not_written_again(pod: Pod) -> None:
    given = pod.restore()
    before = {path.name: path.stat().st_ino for path in pod.directory.iterdir()}
    assert pod.restore() == given
    assert {path.name: path.stat().st_ino for path in pod.directory.iterdir()} == before


def test_a_layout_that_was_cut_short_is_given_again(pod: Pod) -> None:
    pod.directory.mkdir()
    (pod.directory / f"{hex_of(digest_of(OWN))}.json").write_bytes(OWN[:10])
    assert pod.given(pod.restore().rank_layout) == OWN


def test_a_layout_whose_holder_comes_back_is_waited_for(pod: Pod) -> None:
    """Without the layout, a rank with other offsets and the same shapes would accept this part as its own."""
    pod.documents[RANK] = UnavailableError("worker 0: connection refused")

    def back(waits: int) -> None:
        if waits == 3:
            pod.documents[RANK] = OWN

    pod.clock.at = back
    assert pod.given(pod.restore().rank_layout) == OWN
    assert pod.clock.waits == 3


@pytest.mark.parametrize("with_layouts", [False, True])
def test_a_layout_whose_holder_stays_away_is_no_missing_one(pod: Pod, with_layouts: bool) -> None:
    pod.documents[RANK] = UnavailableError("worker 0: connection refused")
    with pytest.raises(RefusedError, match=r"cannot be read: worker 0: connection") as caught:
        pod.restore(with_layouts=with_layouts)
    assert caught.value.code == Refusal.BUSY


def test_a_layout_is_not_waited_for_beyond_its_round(pod: Pod) -> None:
    pod.documents[RANK] = UnavailableError("worker 0: connection refused")
    later = replace(pod.restored)

    def sealed(waits: int) -> None:
        pod.restored = later

    pod.clock.at = sealed
    with pytest.raises(RefusedError, match="the round of the restore ended"):
        pod.restore()
    assert pod.clock.waits == 1
