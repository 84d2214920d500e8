"""The components that take a shard from a slot to all its tiers, the first of which is the node tier."""

from __future__ import annotations

from functools import partial

from holdfast_core.messages.schema import Stage
from holdfast_core.pacing import BackgroundLimit
from holdfast_core.save.place import RankLayouts, SavePlace, SlotNotes, shard_header
from holdfast_core.save.staging import Stager
from holdfast_core.shm.slot_file import SlotFile
from holdfast_core.tasks import Signal
from holdfast_core.tiers.base import NodeTier
from holdfast_sidecar.base.pod import Pod
from holdfast_sidecar.base.telemetry import NodeReports, Telemetry
from holdfast_sidecar.base.tiers import Tiers
from holdfast_sidecar.save.flow import Flow
from holdfast_sidecar.wire.bulk import Members


def node_place(pod: Pod, node: NodeTier, layouts: RankLayouts) -> SavePlace:
    settings = pod.settings

    def has_stored(message: Stage) -> bool:
        headers = (record.header for record in node.list_shards())
        return any(h == shard_header(message, pod.job_uid, h.world_size) for h in headers)

    return SavePlace(
        job_uid=pod.job_uid,
        slots_dir=settings.slots_dir,
        open_slot=partial(SlotFile.open, settings.slots_dir),
        ensure_layout=layouts.ensure,
        write_shard=node.write_shard,
        has_stored=has_stored,
        list_shards=node.list_shards,
        notes=SlotNotes(settings.staged_dir),
        room_seconds=settings.room_seconds,
        disk_quiet_seconds=settings.disk_quiet_seconds,
    )


class SaveComponents:
    """The saves of this pod's ranks: slots, and shards on the node tier."""

    def __init__(
        self,
        pod: Pod,
        tiers: Tiers,
        members: Members,
        telemetry: Telemetry,
        background: BackgroundLimit,
        changed: Signal[[]],
    ) -> None:
        """Create the components. `changed` is called when this worker's report may have changed."""
        self.layouts = RankLayouts(pod.settings.layouts_dir, tiers.node, tiers.pools)
        self.stager = Stager(
            node_place(pod, tiers.node, self.layouts),
            tiers.pools,
            NodeReports(telemetry),
            background,
            pod.clock,
        )
        self.stager.changed.subscribe(changed)
        self.flow = Flow(pod, tiers, members, self.layouts, telemetry, changed)
        self._current = pod.current
        self._store = tiers.store

    @property
    def idle(self) -> bool:
        """Whether everything that was handed over is durable, copied and uploaded by this pod as required."""
        waiting = not (self.flow.idle and self.flow.is_known) or self.flow.expects_commit
        return self.stager.idle and not self.stager.waits and not waiting

    def only_here(self, waits_for_store: bool | None) -> bool:
        """Return whether the newest step is lost with the pods that end, unless the store receives it.

        False for a job without an object store, because no flush can change it.

        Args:
            waits_for_store: The coordinator's reply to the report that the pod ends. None: there is none yet.
        """
        if self._current().accepted is None or self._store is None or waits_for_store is False:
            return False
        newest = max((s.ref.step for s in self.flow.shards() if s.reported), default=None)
        return newest is not None and (self.flow.persisted is None or self.flow.persisted < newest)
