"""spec.checkpoint of a TrainingJob: when a checkpoint is saved, where it goes, what is kept.

The rules beside the fields become validations of the CRD.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field

from holdfast_core.api.base import ApiModel
from holdfast_core.api.cel import cel_rules, remedy, rule
from holdfast_core.api.meta import NameRef
from holdfast_core.api.quantities import QUANTITY, parse_quantity_bytes, quantity_rule
from holdfast_core.contract import MAX_RING_BYTES, MIN_RING_BYTES


class PeerEncryption(StrEnum):
    TLS = "TLS"
    NONE = "None"


class Compression(StrEnum):
    NONE = "None"
    ZSTD = "Zstd"


class WhenDeleted(StrEnum):
    RETAIN = "Retain"


class StepInterval(ApiModel):
    """Every so many optimizer steps."""

    steps: Annotated[
        int,
        Field(
            ge=1,
            le=1_000_000_000,
            description="Number of optimizer steps (whole gang).",
            json_schema_extra=remedy("set the number of optimizer steps between two checkpoints"),
        ),
    ]


def _ring_size(text: str) -> str:
    if not MIN_RING_BYTES <= parse_quantity_bytes(text) <= MAX_RING_BYTES:
        raise ValueError(f"{text!r}: expected a quantity of bytes from 16Mi to 64Gi")
    return text


class MemorySpec(ApiModel):
    """The shared-memory ring between the ranks and the sidecar."""

    slots: Annotated[
        int,
        Field(
            ge=0,
            le=8,
            description=(
                "Slots per rank; each stores one snapshot of the rank's state and counts "
                "towards the trainer's memory limit. From 3 on the newest complete step "
                "stays in memory while the node writes an older one. With 0 no snapshot is "
                "stored: each save streams to the node through a ring of ringSize, and blocks "
                "training until it is durable."
            ),
            json_schema_extra=remedy(
                "2 let one save overlap the next; 3 keep every step in memory; 0 streams"
            ),
        ),
    ] = 2
    ring_size: Annotated[
        Annotated[str, QUANTITY],
        Field(
            max_length=32,
            description=(
                "Size of each rank's ring in shared memory if slots is 0, a quantity of bytes "
                "from 16Mi to 64Gi."
            ),
            json_schema_extra=cel_rules(
                rule(
                    "isQuantity(self) && quantity(self).compareTo(quantity('16Mi')) >= 0"
                    " && quantity(self).compareTo(quantity('64Gi')) <= 0",
                    message_expression=(
                        '\'checkpoint.memory.ringSize is "%s", expected a quantity of bytes from '
                        "16Mi to 64Gi: write for example 1Gi'.format([self])"
                    ),
                )
            ),
        ),
        AfterValidator(_ring_size),
    ] = "1Gi"
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

    @property
    def ring_bytes(self) -> int:
        return parse_quantity_bytes(self.ring_size)


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


class NodeVolumeSpec(ApiModel):
    """The volume of the node tier."""

    empty_dir: Annotated[
        EmptyDirSpec,
        Field(description="A volume on the node's disk that exists as long as the pod."),
    ] = EmptyDirSpec()


class NodeTierSpec(ApiModel):
    """Shards on the disk of the worker's own node."""

    volume: Annotated[NodeVolumeSpec, Field(description="Volume that stores the shards.")] = (
        NodeVolumeSpec()
    )

    @property
    def size_limit_bytes(self) -> int:
        return parse_quantity_bytes(self.volume.empty_dir.size_limit)


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
        StepInterval,
        Field(description="How often a checkpoint is uploaded: a multiple of interval.steps."),
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


class RetentionSpec(ApiModel):
    """Which checkpoints are kept."""

    keep_last: Annotated[
        int,
        Field(
            ge=2,
            le=1000,
            description="Number of newest committed checkpoints that are kept in every tier.",
            json_schema_extra=remedy(
                "if the newest checkpoint cannot be read, an older one is needed"
            ),
        ),
    ] = 3
    when_deleted: Annotated[
        WhenDeleted,
        Field(description="What happens to uploaded checkpoints when the job is deleted: Retain."),
    ] = WhenDeleted.RETAIN


class CheckpointPolicySpec(ApiModel):
    """When a checkpoint is saved, where it goes and how long it stays."""

    model_config = ConfigDict(
        json_schema_extra=cel_rules(
            rule(
                "!has(self.object) || self.interval.steps < 1"
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
        )
    )

    interval: Annotated[
        StepInterval,
        Field(description=("How often the gang saves to shared memory and to the node.")),
    ]
    memory: Annotated[MemorySpec, Field(description="The shared-memory ring.")] = MemorySpec()
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
