"""spec.checkpoint of a TrainingJob: when a checkpoint is saved, where it goes, what is kept.

The rules beside the fields become validations of the CRD.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from holdfast_core.api.base import ApiModel, NameRef
from holdfast_core.api.rules import (
    DURATION,
    QUANTITY,
    cel_rules,
    duration_rule,
    parse_duration,
    parse_quantity_bytes,
    quantity_rule,
    remedy,
    rule,
)
from holdfast_core.contract import DEFAULT_MTBF_SECONDS
from holdfast_core.retention import BestMode, KeepBest, RetentionPolicy


class PeerEncryption(StrEnum):
    TLS = "TLS"
    NONE = "None"


class Compression(StrEnum):
    NONE = "None"
    ZSTD = "Zstd"


class WhenDeleted(StrEnum):
    """What becomes of the uploaded checkpoints when their job is deleted."""

    RETAIN = "Retain"
    DELETE_DATA = "DeleteData"
    KEEP_LAST = "KeepLast"


def _steps_field(what: str) -> Any:
    return Field(
        ge=1,
        le=1_000_000_000,
        description=f"Number of optimizer steps (whole gang) between two {what}.",
        json_schema_extra=remedy(f"set the number of optimizer steps between two {what}"),
    )


def _seconds_field(what: str) -> Any:
    return Field(
        ge=1,
        le=604_800,
        description=f"Seconds between two {what}, at most a week.",
        json_schema_extra=remedy(f"set the seconds between two {what}"),
    )


class SaveInterval(ApiModel):
    """How often the gang saves: every so many steps, every so many seconds, or as often as it pays."""

    model_config = ConfigDict(
        json_schema_extra=cel_rules(
            rule(
                "[has(self.steps), has(self.seconds), has(self.auto)].filter(given, given).size() == 1",
                message_expression=(
                    "'checkpoint.interval has %d of steps, seconds and auto, expected exactly one: "
                    'write for example {"steps": 100}\'.format([[has(self.steps), '
                    "has(self.seconds), has(self.auto)].filter(given, given).size()])"
                ),
            ),
            rule(
                "!has(self.auto) || self.auto",
                message=(
                    "checkpoint.interval.auto is false, which names no interval: write auto: true, "
                    "or steps or seconds instead"
                ),
                field_path=".auto",
            ),
            rule(
                "!has(self.mtbf) || has(self.auto)",
                message=(
                    "checkpoint.interval.mtbf has an effect only with auto: true: remove it, or "
                    "write auto: true instead of steps or seconds"
                ),
                field_path=".mtbf",
            ),
        )
    )

    steps: Annotated[int | None, _steps_field("saves")] = None
    seconds: Annotated[
        int | None,
        _seconds_field("saves"),
    ] = None
    auto: Annotated[
        bool | None,
        Field(
            description=(
                "true: rank 0 computes the seconds between saves at which saves and lost steps cost "
                "the least in total (Daly), from the measured cost of a save and the mean time "
                "between failures. holdfast_save_interval_seconds shows the result and its inputs."
            )
        ),
    ] = None
    mtbf: Annotated[
        Annotated[str, DURATION] | None,
        Field(
            max_length=32,
            description=(
                "Mean time between failures of the whole gang that you expect, a duration such as "
                "6h, which is the default. Only with auto. Each round corrects it by the restarts "
                "and the training time of the job."
            ),
            json_schema_extra=cel_rules(duration_rule("checkpoint.interval.mtbf", "6h")),
        ),
    ] = None

    @property
    def expected_mtbf_seconds(self) -> float:
        """The mean time between failures before any failure of the job is known."""
        if self.mtbf is None:
            return DEFAULT_MTBF_SECONDS
        return parse_duration(self.mtbf).total_seconds()


class UploadInterval(ApiModel):
    """How often a checkpoint is uploaded."""

    model_config = ConfigDict(
        json_schema_extra=cel_rules(
            rule(
                "has(self.steps) != has(self.seconds)",
                message=(
                    "checkpoint.object.every has both or none of steps and seconds, expected "
                    'exactly one: write for example {"steps": 1000}'
                ),
            )
        )
    )

    steps: Annotated[int | None, _steps_field("uploads")] = None
    seconds: Annotated[int | None, _seconds_field("uploads")] = None


class MemorySpec(ApiModel):
    """The shared-memory slots between the ranks and the sidecar."""

    slots: Annotated[
        int,
        Field(
            ge=1,
            le=8,
            description=(
                "Slots per rank; each stores one snapshot of the rank's state and counts "
                "towards the trainer's memory limit. From 3 on the newest complete step "
                "stays in memory while the node writes an older one."
            ),
            json_schema_extra=remedy(
                "2 let one save overlap the next; 3 keep every step in memory; 1 needs the least "
                "memory, for one copy of the state"
            ),
        ),
    ] = 2
    size_limit: Annotated[
        Annotated[str, QUANTITY] | None,
        Field(
            max_length=32,
            description=(
                "Limit of the shared-memory volume of a pod, a quantity of bytes such as "
                "8Gi. Default: only the trainer's memory limit applies."
            ),
            json_schema_extra=cel_rules(quantity_rule("checkpoint.memory.sizeLimit", "8Gi")),
        ),
    ] = None

    @property
    def size_limit_bytes(self) -> int | None:
        return None if self.size_limit is None else parse_quantity_bytes(self.size_limit)


class EmptyDirSpec(ApiModel):
    """Storage of the node that lives as long as the pod."""

    size_limit: Annotated[
        str,
        QUANTITY,
        Field(
            max_length=32,
            description=(
                "Size of the volume, a quantity of bytes such as 20Gi. The sidecar uses "
                "up to 85 % of it for its own shards, peers' copies and temporary files."
            ),
            json_schema_extra=cel_rules(
                quantity_rule("checkpoint.node.volume.emptyDir.sizeLimit", "20Gi")
            ),
        ),
    ] = "20Gi"


class EphemeralVolumeSpec(ApiModel):
    """A volume that a storage class provides when the pod is created, and that is deleted with the pod."""

    storage_class_name: Annotated[
        str,
        Field(
            min_length=1,
            max_length=253,
            description=(
                "Storage class whose volumes are on disks of the node, for example of a local volume "
                "provisioner. Its volumeBindingMode should be WaitForFirstConsumer."
            ),
        ),
    ]
    size: Annotated[
        str,
        QUANTITY,
        Field(
            max_length=32,
            description=(
                "Requested size, a quantity of bytes such as 500Gi. The sidecar uses up to 85 % of it."
            ),
            json_schema_extra=cel_rules(
                quantity_rule("checkpoint.node.volume.ephemeral.size", "500Gi")
            ),
        ),
    ]


class NodeVolumeSpec(ApiModel):
    """The volume of the node tier."""

    empty_dir: Annotated[
        EmptyDirSpec,
        Field(description="A volume on the node's disk that exists as long as the pod."),
    ] = EmptyDirSpec()
    ephemeral: Annotated[
        tuple[EphemeralVolumeSpec, ...],
        Field(
            max_length=8,
            description=(
                "Volume of a storage class, used instead of emptyDir: a list of at most one entry. To use "
                "several disks of a node, combine them into one RAID or LVM volume."
            ),
            json_schema_extra=cel_rules(
                rule(
                    "size(self) <= 1",
                    message_expression=(
                        "'checkpoint.node.volume.ephemeral must have at most 1 volume, got %d: to use "
                        "several disks of a node, combine them into one RAID or LVM volume, and name the "
                        "storage class of that volume'.format([size(self)])"
                    ),
                )
            ),
        ),
    ] = ()

    @property
    def claim(self) -> EphemeralVolumeSpec | None:
        """The volume of a storage class, or None for an emptyDir."""
        return next(iter(self.ephemeral), None)


class NodeTierSpec(ApiModel):
    """Shards on the disk of the worker's own node."""

    volume: Annotated[NodeVolumeSpec, Field(description="Volume that stores the shards.")] = (
        NodeVolumeSpec()
    )

    @property
    def volume_bytes(self) -> int:
        """Size of the volume of the node tier."""
        claim = self.volume.claim
        return parse_quantity_bytes(
            self.volume.empty_dir.size_limit if claim is None else claim.size
        )


class PeerTierSpec(ApiModel):
    """Copies of every shard on the nodes of other workers."""

    copies: Annotated[
        int,
        Field(
            ge=0,
            le=3,
            description=(
                "Copies of a shard on other workers; a replicated step survives the loss "
                "of this number of nodes. Must be less than spec.workers."
            ),
            json_schema_extra=remedy("1 survives the loss of one node"),
        ),
    ] = 1
    topology_key: Annotated[
        str,
        Field(
            min_length=1,
            max_length=317,
            description="Label of nodes; copies go to a worker whose node has another value.",
        ),
    ] = "kubernetes.io/hostname"
    encryption: Annotated[
        PeerEncryption,
        Field(
            description=(
                "How copies are sent: TLS, or None for a network on which no other party "
                "can read. With None both sides are authenticated too, and every byte is "
                "verified by its digest, but the state of the job is sent unencrypted."
            )
        ),
    ] = PeerEncryption.TLS


class ObjectTierSpec(ApiModel):
    """The tier that survives the loss of everything: an S3-compatible object store."""

    store_ref: Annotated[
        NameRef, Field(description="The CheckpointStore, in the same namespace. Immutable.")
    ]
    every: Annotated[
        UploadInterval,
        Field(
            description=(
                "How often a checkpoint is uploaded. steps: the first save at or after each multiple "
                "of it, which must be a multiple of interval.steps if both are given. seconds: the "
                "first save so many seconds after the last upload began, and the first save of each "
                "round."
            )
        ),
    ]
    compression: Annotated[
        Compression,
        Field(
            description=(
                "How uploads are stored: None, as they are, or Zstd, which groups the "
                "bytes of numbers by significance and compresses them. It uses one CPU "
                "core during an upload and has to be decoded at a restore. Reads are "
                "verified in both cases. A change applies to later uploads."
            )
        ),
    ] = Compression.NONE


class KeepEverySpec(ApiModel):
    """Checkpoints at a distance from each other that are kept for good."""

    model_config = ConfigDict(
        json_schema_extra=cel_rules(
            rule(
                "has(self.steps) != has(self.duration)",
                message=(
                    "checkpoint.retention.keepEvery has both or none of steps and duration, expected "
                    'exactly one: write for example {"steps": 10000} or {"duration": "6h"}'
                ),
            )
        )
    )

    steps: Annotated[
        int | None,
        Field(
            ge=1,
            le=1_000_000_000,
            description="The first uploaded checkpoint at or after each multiple of this number of steps "
            "stays.",
            json_schema_extra=remedy("set the number of steps between two of them"),
        ),
    ] = None
    duration: Annotated[
        Annotated[str, DURATION] | None,
        Field(
            max_length=32,
            description="The first uploaded checkpoint of each such period stays, a duration such as 6h. "
            "Periods are counted from 1970 in UTC: with 6h they begin at 0, 6, 12 and 18 o'clock.",
            json_schema_extra=cel_rules(
                duration_rule("checkpoint.retention.keepEvery.duration", "6h")
            ),
        ),
    ] = None


class KeepBestSpec(ApiModel):
    """Checkpoints with the best values of a metric."""

    metric: Annotated[
        str,
        Field(
            min_length=1,
            max_length=128,
            description="Name of a metric that rank 0 reports before the save, as by "
            "ckpt.report(val_loss=...). A checkpoint without a finite value is never the best.",
        ),
    ]
    mode: Annotated[
        BestMode,
        Field(
            description="min: the lowest values are the best ones; max: the highest. As in Lightning's "
            "ModelCheckpoint."
        ),
    ]
    count: Annotated[
        int,
        Field(
            ge=1,
            le=100,
            description="Number of the best checkpoints that stay. Of two equal values, the older one "
            "counts.",
            json_schema_extra=remedy("1 keeps the best one only"),
        ),
    ] = 1


class RetentionSpec(ApiModel):
    """Which checkpoints are kept: those that any of these rules keeps, and those that something needs."""

    keep_last: Annotated[
        int,
        Field(
            ge=2,
            le=1000,
            description="Number of newest committed checkpoints that are kept, on the nodes and in the "
            "object store. The other rules apply to the object store only.",
            json_schema_extra=remedy(
                "if the newest checkpoint cannot be read, an older one is needed"
            ),
        ),
    ] = 3
    keep_every: Annotated[
        KeepEverySpec | None,
        Field(
            description="Keeps checkpoints at a distance from each other for good, by steps or by time. "
            "Default: none."
        ),
    ] = None
    keep_for: Annotated[
        Annotated[str, DURATION] | None,
        Field(
            max_length=32,
            description="Keeps each checkpoint for this time after its commit, as the ttl of a Velero "
            "backup, a duration such as 720h. Default: none.",
            json_schema_extra=cel_rules(duration_rule("checkpoint.retention.keepFor", "720h")),
        ),
    ] = None
    hourly: Annotated[
        int,
        Field(
            ge=0,
            le=8760,
            description="Keeps the newest checkpoint of each of the last so many hours (UTC) that have "
            "one, as restic's --keep-hourly.",
            json_schema_extra=remedy("24 keeps one for each hour of a day"),
        ),
    ] = 0
    daily: Annotated[
        int,
        Field(
            ge=0,
            le=3650,
            description="Keeps the newest checkpoint of each of the last so many days (UTC) that have "
            "one, as restic's --keep-daily.",
            json_schema_extra=remedy("7 keeps one for each day of a week"),
        ),
    ] = 0
    keep_best: Annotated[
        KeepBestSpec | None,
        Field(description="Keeps the checkpoints with the best values of a metric. Default: none."),
    ] = None
    when_deleted: Annotated[
        WhenDeleted,
        Field(
            description="What happens to the job's data in the object store when the job is deleted. Retain: "
            "all of it stays, with the Checkpoint objects. DeleteData: all of it is deleted, with the "
            "objects. KeepLast: all but the newest checkpoint is deleted. A checkpoint that is pinned, or "
            "from which another job starts, stays as long as that is so."
        ),
    ] = WhenDeleted.RETAIN

    @property
    def policy(self) -> RetentionPolicy:
        """The rules for the object store."""
        every, best = self.keep_every, self.keep_best
        duration = None if every is None else every.duration
        return RetentionPolicy(
            keep_last=self.keep_last,
            every_steps=None if every is None else every.steps,
            every=None if duration is None else parse_duration(duration),
            keep_for=None if self.keep_for is None else parse_duration(self.keep_for),
            hourly=self.hourly,
            daily=self.daily,
            best=None if best is None else KeepBest(best.metric, best.mode, best.count),
        )


class CheckpointPolicySpec(ApiModel):
    """When a checkpoint is saved, where it goes and how long it stays."""

    model_config = ConfigDict(
        json_schema_extra=cel_rules(
            rule(
                "!has(self.object) || !has(self.object.every.steps) || !has(self.interval.steps)"
                " || self.interval.steps < 1"
                " || self.object.every.steps % self.interval.steps == 0",
                message_expression=(
                    "'checkpoint.object.every.steps is %d, not a multiple of "
                    "checkpoint.interval.steps (%d): only a step that is saved can be uploaded; "
                    "choose a multiple'.format([self.object.every.steps, self.interval.steps])"
                ),
                field_path=".object.every.steps",
            ),
            rule(
                "has(self.object) == has(oldSelf.object) && (!has(self.object)"
                " || self.object.storeRef.name == oldSelf.object.storeRef.name)",
                message=(
                    "checkpoint.object.storeRef is immutable: the lineage of this job's "
                    "checkpoints is in that store; create a new job with restoreFrom to move"
                ),
                field_path=".object",
                forbidden=True,
            ),
            rule(
                "has(self.object) || !has(self.retention) || !(has(self.retention.keepEvery) ||"
                " has(self.retention.keepFor) || has(self.retention.keepBest) ||"
                " (has(self.retention.hourly) && self.retention.hourly > 0) ||"
                " (has(self.retention.daily) && self.retention.daily > 0) ||"
                " (has(self.retention.whenDeleted) && self.retention.whenDeleted != 'Retain'))",
                message=(
                    "checkpoint.retention has rules for the object store (keepEvery, keepFor, hourly, daily, "
                    "keepBest or whenDeleted), but the job has none: set checkpoint.object, or keep only "
                    "keepLast"
                ),
                field_path=".retention",
            ),
        )
    )

    interval: Annotated[
        SaveInterval,
        Field(description=("How often the gang saves to shared memory and to the node.")),
    ]
    memory: Annotated[MemorySpec, Field(description="The shared-memory slots.")] = MemorySpec()
    node: Annotated[NodeTierSpec, Field(description="Shards on the node of the worker.")] = (
        NodeTierSpec()
    )
    peer: Annotated[
        PeerTierSpec | None,
        Field(
            description=(
                "Copies on other workers. Default: 1 copy, or none if the job has one worker."
            )
        ),
    ] = None
    object: Annotated[
        ObjectTierSpec | None, Field(description="Upload to an object store. Default: none.")
    ] = None
    retention: Annotated[RetentionSpec, Field(description="Which checkpoints are kept.")] = (
        RetentionSpec()
    )
