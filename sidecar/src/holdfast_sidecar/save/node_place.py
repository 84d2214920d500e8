"""The node tier of a pod as the place where its saves become durable."""

from __future__ import annotations

from functools import partial

from holdfast_core.ids import Level, TierName
from holdfast_core.messages.schema import SaveFailed, Stage
from holdfast_core.save.place import RankLayouts, SavePlace
from holdfast_core.save.slots import SlotNotes
from holdfast_core.shm.slot_file import SlotFile
from holdfast_core.tiers.base import NodeTier
from holdfast_sidecar.base.pod import Pod
from holdfast_sidecar.base.telemetry import Telemetry


def node_place(pod: Pod, node: NodeTier, layouts: RankLayouts) -> SavePlace:
    settings = pod.settings
    return SavePlace(
        job_uid=pod.job_uid,
        slots_dir=settings.slots_dir,
        open_slot=partial(SlotFile.open, settings.slots_dir),
        ensure_layout=lambda stage: layouts.ensure(stage.layout),
        write_shard=node.write_shard,
        list_shards=node.list_shards,
        delete_shard=node.delete_shard,
        notes=SlotNotes(settings.staged_dir),
        room_seconds=settings.room_seconds,
        disk_quiet_seconds=settings.disk_quiet_seconds,
    )


class NodeReports:
    """Reports of the writes to the node tier: metrics, and failures for the coordinator."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._metrics = telemetry.metrics
        self._failures = telemetry.failures

    def stored(self, stage: Stage, payload_bytes: int, seconds: float) -> None:
        self.continues(stage)
        self._metrics.stored(TierName.NODE, payload_bytes, seconds)

    def no_room(self, stage: Stage, error: Exception) -> None:
        self._failures.note(_subject(stage), TierName.NODE, error, step=stage.step)

    def hangs(self, stage: Stage, text: str) -> None:
        self._failures.note_text(
            _subject(stage), TierName.NODE, "NodeVolumeHangs", text, step=stage.step
        )

    def continues(self, stage: Stage) -> None:
        self._failures.healthy(_subject(stage))

    def failed(self, stage: Stage, error: Exception) -> SaveFailed:
        failure = self._failures.note(_subject(stage), TierName.NODE, error, step=stage.step)
        self._metrics.save_failed(failure.reason)
        return SaveFailed(stage.step, stage.round, Level.LOCAL, failure.reason, failure.message)

    def dropped(self, steps: int) -> None:
        self._metrics.dropped(steps)


def _subject(stage: Stage) -> str:
    return f"save of rank {stage.rank}"
