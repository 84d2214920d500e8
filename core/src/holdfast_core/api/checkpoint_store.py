"""CheckpointStore: an S3-compatible object store that jobs of the same namespace upload to.

Only sidecars ever read the keys; the operator knows the name of the Secret, not its contents.
"""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from holdfast_core.api.base import (
    ApiModel,
    ApiObject,
    Conditions,
    ConditionStatus,
    NameRef,
    Timestamp,
    WithConditions,
)
from holdfast_core.api.rules import DURATION, cel_rules, parse_duration, remedy, rule


class StoreCondition(StrEnum):
    """Types of the conditions of a CheckpointStore."""

    AVAILABLE = "Available"


_ENDPOINT_RULE = rule(
    # No user, query or fragment, and a port that exists: anything else would fail in every pod.
    "isURL(self) && self.matches("
    "'^https?://([A-Za-z0-9._-]+|[[][0-9A-Fa-f:.]+[]])(:[1-9][0-9]{0,4})?/?$')"
    " && (url(self).getPort() == '' || int(url(self).getPort()) <= 65535)",
    message_expression=(
        '\'s3.endpoint is "%s", expected http(s)://host:port without a path: write for example '
        "https://minio.storage.svc:9000'.format([self])"
    ),
)

_BUCKET_RULE = rule(
    "self.matches('^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$')",
    message_expression=(
        '\'s3.bucket is "%s", expected 3 to 63 lower-case letters, digits, dots and hyphens: write '
        "only the name of the bucket, without scheme and slashes'.format([self])"
    ),
)

_PREFIX_RULE = rule(
    "self == '' || self.matches('^[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*$')",
    message_expression=(
        '\'s3.prefix is "%s", expected parts of letters, digits, dots, hyphens and underscores, '
        "separated by single slashes: remove the slash at its start or end'.format([self])"
    ),
)


class S3Spec(ApiModel):
    """Where the bucket is and how to talk to it."""

    endpoint: Annotated[
        str,
        Field(
            max_length=512,
            description="URL of the server, http(s)://host:port without a path.",
            json_schema_extra=cel_rules(_ENDPOINT_RULE),
        ),
    ]
    bucket: Annotated[
        str,
        Field(
            max_length=128,
            description="Name of the bucket; it must exist.",
            json_schema_extra=cel_rules(_BUCKET_RULE),
        ),
    ]
    prefix: Annotated[
        str,
        Field(
            max_length=256,
            description="Start of all keys, without slashes at its ends. Default: none.",
            json_schema_extra=cel_rules(_PREFIX_RULE),
        ),
    ] = ""
    region: Annotated[
        str, Field(min_length=1, max_length=64, description="Region for which requests are signed.")
    ] = "us-east-1"
    credentials_secret_ref: Annotated[
        NameRef,
        Field(
            description="Secret with accessKey, secretKey and optionally sessionToken; mounted in "
            "sidecars only."
        ),
    ]
    ca_secret_ref: Annotated[
        NameRef | None,
        Field(
            description=(
                "Secret with ca.crt, the authority of an https endpoint. Default: the "
                "authorities of the image."
            )
        ),
    ] = None
    part_size_mib: Annotated[
        int,
        Field(
            validation_alias="partSizeMiB",
            serialization_alias="partSizeMiB",
            ge=5,
            le=5120,
            description="Size of the parts of a multipart upload, MiB.",
            json_schema_extra=remedy("S3 takes parts of 5 MiB to 5 GiB; 32 suits most"),
        ),
    ] = 32
    max_concurrency: Annotated[
        int,
        Field(
            ge=1,
            le=64,
            description="Requests that one sidecar has open at a time.",
            json_schema_extra=remedy("4 suits most"),
        ),
    ] = 4


class VerifySpec(ApiModel):
    """Drills: short-lived pods that read every byte of checkpoints of this store."""

    every: Annotated[
        str,
        DURATION,
        Field(
            max_length=32,
            description="Time from the start of one round of drills to the next, at least 1m.",
            json_schema_extra=cel_rules(
                rule(
                    r"self.matches('^([0-9]+(\\.[0-9]+)?(ms|s|m|h))+$') && "
                    "duration(self) >= duration('1m')",
                    message_expression=(
                        '\'verify.every is "%s", expected a duration of at least 1m with units h, m, s or '
                        "ms: write for example 24h'.format([self])"
                    ),
                )
            ),
        ),
    ] = "24h"
    sample: Annotated[
        int,
        Field(
            ge=1,
            le=100,
            description="Number of checkpoints that each round drills, one after the other. Those come "
            "first whose last drill is the longest ago.",
            json_schema_extra=remedy("1 suits most; a round of many large checkpoints takes long"),
        ),
    ] = 1
    restore: Annotated[
        bool,
        Field(
            description="true: also assemble the state for another number of ranks, and compare tensors."
        ),
    ] = False

    @property
    def interval(self) -> timedelta:
        return parse_duration(self.every)


class CheckpointStoreSpec(ApiModel):
    """The object store."""

    s3: Annotated[S3Spec, Field(description="An S3-compatible object store.")]
    verify: Annotated[
        VerifySpec | None,
        Field(
            description="Drill checkpoints of this store from time to time. Default: only on request."
        ),
    ] = None


class StoreFeatures(ApiModel):
    """What the probe saw the server do."""

    conditional_put: Annotated[
        bool | None, Field(description="If-None-Match: * refuses to overwrite an object.")
    ] = None
    checksum: Annotated[bool | None, Field(description="A wrong CRC32C of a body is refused.")] = (
        None
    )
    multipart: Annotated[bool | None, Field(description="Multipart uploads work.")] = None
    range_get: Annotated[bool | None, Field(description="Ranged reads work.")] = None


class StoreDrills(ApiModel):
    """The drills of the store's checkpoints."""

    round_at: Annotated[
        Timestamp | None, Field(description="When the newest round of spec.verify began (UTC).")
    ] = None
    left: Annotated[int, Field(ge=0, description="Drills that are left in this round.")] = 0
    count: Annotated[int, Field(ge=0, description="Drills of all rounds.")] = 0
    checkpoint: Annotated[
        str, Field(max_length=253, description="Checkpoint that is drilled now. Empty: none.")
    ] = ""
    uid: Annotated[str, Field(max_length=64, description="uid of that Checkpoint.")] = ""
    since: Annotated[
        Timestamp | None, Field(description="When its drill was decided on (UTC).")
    ] = None
    trigger: Annotated[
        str,
        Field(
            max_length=64, description="The request that this drill fulfils. Empty: spec.verify."
        ),
    ] = ""
    again_after: Annotated[
        Timestamp | None,
        Field(
            description="Before this time no further drill of the round begins, because one could not "
            "read its checkpoint (UTC)."
        ),
    ] = None


class CheckpointStoreStatus(WithConditions):
    """What the newest probe saw, and the drills."""

    conditions: Conditions = ()
    features: Annotated[
        StoreFeatures | None, Field(description="Features of the server that the probe found.")
    ] = None
    last_probe: Annotated[
        Timestamp | None, Field(description="When the store was last probed (UTC).")
    ] = None
    drills: Annotated[StoreDrills | None, Field(description="Drills. Absent: there was none.")] = (
        None
    )
    observed_generation: Annotated[
        int | None, Field(ge=0, description="metadata.generation that this status describes.")
    ] = None


class CheckpointStore(ApiObject):
    """An S3-compatible object store that jobs of the same namespace upload checkpoints to."""

    KIND: ClassVar[str] = "CheckpointStore"
    PLURAL: ClassVar[str] = "checkpointstores"
    SHORT_NAME: ClassVar[str] = "ckptstore"

    api_version: Literal["holdfast.dev/v1alpha1"] = "holdfast.dev/v1alpha1"
    kind: Literal["CheckpointStore"] = "CheckpointStore"
    spec: CheckpointStoreSpec
    status: CheckpointStoreStatus = CheckpointStoreStatus()

    @property
    def available(self) -> bool | None:
        """Return the result of the newest probe, or None if the store was not probed yet."""
        found = self.status.condition(StoreCondition.AVAILABLE)
        if found is None or found.status is ConditionStatus.UNKNOWN:
            return None
        return found.is_true
