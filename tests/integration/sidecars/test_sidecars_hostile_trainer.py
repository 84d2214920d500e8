"""A trainer that manipulates the shared volume: committed shards stay intact, and SEAL is answered."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.support.sidecar.gang import Gangs
from tests.support.sidecar.processes import files_below

from holdfast_core.format.canonical import digest_of
from holdfast_core.ids import Level

pytestmark = pytest.mark.integration


def shards(node: Path) -> dict[str, str]:
    return {p.name: digest_of(p.read_bytes()) for p in files_below(node, "*.shard")}


def links_into(directory: Path, target: Path, names: list[str]) -> None:
    directory.mkdir(exist_ok=True)
    for name in names:
        (directory / name).unlink(missing_ok=True)
        (directory / name).symlink_to(target)


@pytest.mark.fault("A trainer lays links and FIFOs for a running sidecar")
@pytest.mark.fault("A name or a link leads out of the cache")
async def test_links_to_committed_shards_and_fifos_harm_nothing(gangs: Gangs) -> None:
    async with gangs(1) as gang:
        await gang.start()
        await gang.commit(1, Level.LOCAL)
        sidecar = gang.sidecars[0]
        before = shards(sidecar.node)
        assert len(before) == 1
        shard = files_below(sidecar.node, "*.shard")[0]
        slots = gang.ranks[0].names
        links_into(sidecar.shared / "staged", shard, [f"{name}.json" for name in slots])
        links_into(sidecar.shared, sidecar.node / "round.json", ["ports.json.tmp"])
        await gang.commit(2, Level.LOCAL)
        after = shards(sidecar.node)
        assert {name: after[name] for name in before} == before

        # Everything that SEAL reads from the shared volume is now a FIFO, or a link to a shard.
        (sidecar.shared / "staged").rename(sidecar.shared / "moved")
        (sidecar.shared / "staged").mkdir()
        for name in slots:
            os.mkfifo(sidecar.shared / "staged" / f"{name}.json")
        os.mkfifo(sidecar.shared / "slots" / "rank000000.7.slot")
        (sidecar.shared / "slots" / "rank000000.8.slot").symlink_to(shard)
        sidecar.kill()
        await gang.relaunch(0)
        inventory = await gang.operator.seal(0, 1)
        assert [s.step for s in inventory.shards] == [1, 2]

        # The directory of slots is now a link into the sidecar's own volume.
        (sidecar.shared / "slots").rename(sidecar.shared / "slots-moved")
        (sidecar.shared / "slots").symlink_to(sidecar.node)
        inventory = await gang.operator.seal(0, 2)
        assert [s.step for s in inventory.shards] == [1, 2]
        assert shards(sidecar.node) == after
