"""Assembly of a rank's payload from verified ranges of several shard files.

A shard that fails verification is quarantined and not read again. Where another shard holds the same
slices, that shard is read instead.
"""

from __future__ import annotations

import logging

from holdfast_core.errors import CorruptionError, NotFoundError
from holdfast_core.format.layout import parse_layout
from holdfast_core.format.manifest import Manifest
from holdfast_core.format.rank_layout import RankLayout
from holdfast_core.ids import Rank
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.reshard.assemble import Copying, check_source
from holdfast_core.reshard.plan import plan_without
from holdfast_core.reshard.reads import by_source
from holdfast_core.shm.slot_file import SlotFile
from holdfast_core.shm.slot_fill import begin_assembly
from holdfast_core.tiers.sources import ReaderSource

logger = logging.getLogger(__name__)


def assemble_payload(
    tier: DiskNodeTier, manifest: Manifest, wanted: RankLayout, slot: SlotFile
) -> int:
    """Assemble the payload of the layout `wanted` in the slot. Return the number of bytes read.

    Raises:
        StateMismatchError: The checkpoint holds other tensors.
        NotFoundError: Too many shards are bad. The bad ones are quarantined.
        FormatError: A layout is invalid.
    """
    source = parse_layout(tier.get_layout(manifest.layout))
    free = begin_assembly(slot, wanted)
    bad: dict[Rank, str] = {}
    total = 0
    while True:
        moves = plan_without(wanted, source, bad)
        try:
            for rank, group in by_source(moves).items():
                ref = manifest.ref(rank)
                with ReaderSource(tier.open_shard(ref)) as shard:
                    record = shard.trailer.record
                    check_source(record, manifest.shards[rank], source.ranks[rank])
                    copying = Copying(group)
                    copying.take(shard, slot)
                    total += copying.read_bytes
            slot.write_header(free)
            return total
        except CorruptionError as error:
            bad[rank] = str(error)
            tier.quarantine(ref, str(error))
        except NotFoundError as error:
            bad[rank] = str(error)  # another rank's process has quarantined it in the meantime
        logger.warning("shard of rank %d: %s: its slices are read elsewhere", rank, bad[rank])
