"""CheckpointStore: an object store (S3-compatible, Azure, Google) that jobs of its namespace upload to.

Only sidecars ever read the keys; the operator knows the name of the Secret, not its contents.
"""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, field_serializer, field_validator, model_validator

from holdfast_core.api.base import (
    ApiModel,
    ApiObject,
    Conditions,
    ConditionStatus,
    NameRef,
    Timestamp,
    WithConditions,
)
from holdfast_core.api.rules import (
    DURATION,
    QUANTITY,
    cel_rules,
    duration_within,
    parse_duration,
    quantity_rule,
    remedy,
    rule,
    size_text,
)
from holdfast_core.contract import MAX_LISTED_JOBS, MAX_LISTED_NAMESPACES
from holdfast_core.ids import JobUid


class StoreCondition(StrEnum):
    """Types of the conditions of a CheckpointStore."""

    AVAILABLE = "Available"
    LISTED = "Listed"
    """Whether the newest listing of the store succeeded; absent before the first one."""
    QUOTA_PRESSURE = "QuotaPressure"
    """True while at least 80 % of the quota are used; absent before the store has a quota."""


def _endpoint_rule(kind: str, example: str) -> dict[str, Any]:
    return rule(
        # No user, query or fragment, and a port that exists: anything else would fail in every pod.
        "isURL(self) && self.matches("
        "'^https?://([A-Za-z0-9._-]+|[[][0-9A-Fa-f:.]+[]])(:[1-9][0-9]{0,4})?/?$')"
        " && (url(self).getPort() == '' || int(url(self).getPort()) <= 65535)",
        message_expression=(
            f'\'{kind}.endpoint is "%s", expected http(s)://host:port without a path: write for example '
            f"{example}'.format([self])"
        ),
    )


def _bucket_rule(kind: str, pattern: str, expected: str) -> dict[str, Any]:
    return rule(
        f"self.matches('^{pattern}$')",
        message_expression=(
            f'\'{kind}.bucket is "%s", expected {expected}: write only the name of the bucket, without '
            "scheme and slashes'.format([self])"
        ),
    )


def _prefix(kind: str) -> Any:
    return Field(
        max_length=256,
        description="Start of all keys, without slashes at its ends. Default: none.",
        json_schema_extra=cel_rules(
            rule(
                "self == '' || self.matches('^[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*$')",
                message_expression=(
                    f'\'{kind}.prefix is "%s", expected parts of letters, digits, dots, hyphens and '
                    "underscores, separated by single slashes: remove the slash at its start or "
                    "end'.format([self])"
                ),
            )
        ),
    )


_CaSecretRef = Annotated[
    NameRef | None,
    Field(
        description="Secret with ca.crt, the authority of an https endpoint. Default: the "
        "authorities of the image."
    ),
]
_MaxConcurrency = Annotated[
    int,
    Field(
        ge=1,
        le=64,
        description="Requests that one sidecar has open at a time.",
        json_schema_extra=remedy("4 suits most"),
    ),
]


class S3Spec(ApiModel):
    """Where the bucket is and how to talk to it."""

    endpoint: Annotated[
        str,
        Field(
            max_length=512,
            description="URL of the server, http(s)://host:port without a path.",
            json_schema_extra=cel_rules(_endpoint_rule("s3", "https://minio.storage.svc:9000")),
        ),
    ]
    bucket: Annotated[
        str,
        Field(
            max_length=128,
            description="Name of the bucket; it must exist.",
            json_schema_extra=cel_rules(
                _bucket_rule(
                    "s3",
                    "[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]",
                    "3 to 63 lower-case letters, digits, dots and hyphens",
                )
            ),
        ),
    ]
    prefix: Annotated[str, _prefix("s3")] = ""
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
    ca_secret_ref: _CaSecretRef = None
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
    max_concurrency: _MaxConcurrency = 4


_ID_RULE = rule(
    "self.matches('^[A-Za-z0-9.-]+$')",
    message_expression=(
        '\'azure.webIdentity has the id "%s", expected letters, digits, dots and hyphens: write the id that '
        "Microsoft Entra shows'.format([self])"
    ),
)


class WebIdentitySpec(ApiModel):
    """A client of Microsoft Entra that accepts tokens of the service accounts of these pods."""

    client_id: Annotated[
        str,
        Field(
            min_length=1,
            max_length=128,
            description="Id of the managed identity or application.",
            json_schema_extra=cel_rules(_ID_RULE),
        ),
    ]
    tenant_id: Annotated[
        str,
        Field(
            min_length=1,
            max_length=128,
            description="Id of its tenant.",
            json_schema_extra=cel_rules(_ID_RULE),
        ),
    ]
    authority: Annotated[
        str | None,
        Field(
            max_length=512,
            description="URL of the issuer of tokens. Default: that of Azure's public cloud.",
            json_schema_extra=cel_rules(
                _endpoint_rule("azure.webIdentity.authority of", "https://login.microsoftonline.us")
            ),
        ),
    ] = None


_AZURE_RULES = cel_rules(
    rule(
        "has(self.credentialsSecretRef) != has(self.webIdentity)",
        message="azure has none or both of credentialsSecretRef and webIdentity: set one of them",
    )
)


class AzureSpec(ApiModel):
    """Where the container is and how to talk to it."""

    model_config = ConfigDict(json_schema_extra=_AZURE_RULES)

    account: Annotated[
        str,
        Field(
            max_length=128,
            description="Name of the storage account.",
            json_schema_extra=cel_rules(
                rule(
                    "self.matches('^[a-z0-9]{3,24}$')",
                    message_expression=(
                        '\'azure.account is "%s", expected 3 to 24 lower-case letters and digits: write '
                        "only the name of the account, without its host'.format([self])"
                    ),
                )
            ),
        ),
    ]
    container: Annotated[
        str,
        Field(
            max_length=128,
            description="Name of the container; it must exist.",
            json_schema_extra=cel_rules(
                rule(
                    "size(self) >= 3 && size(self) <= 63 && self.matches('^[a-z0-9]+(-[a-z0-9]+)*$')",
                    message_expression=(
                        '\'azure.container is "%s", expected 3 to 63 lower-case letters, digits and single '
                        "hyphens between them: write only the name of the container'.format([self])"
                    ),
                )
            ),
        ),
    ]
    prefix: Annotated[str, _prefix("azure")] = ""
    endpoint: Annotated[
        str | None,
        Field(
            max_length=512,
            description="URL of the server, http(s)://host:port without a path. Default: "
            "https://ACCOUNT.blob.core.windows.net.",
            json_schema_extra=cel_rules(
                _endpoint_rule("azure", "https://account.blob.core.usgovcloudapi.net")
            ),
        ),
    ] = None
    credentials_secret_ref: Annotated[
        NameRef | None,
        Field(
            description="Secret with accountKey or sasToken; mounted in sidecars only. Default: webIdentity."
        ),
    ] = None
    web_identity: Annotated[
        WebIdentitySpec | None,
        Field(
            description="Exchange tokens of the pods' service accounts for those of the store, instead of "
            "keys. The tokens are mounted in sidecars only."
        ),
    ] = None
    ca_secret_ref: _CaSecretRef = None
    max_concurrency: _MaxConcurrency = 4


class GoogleSpec(ApiModel):
    """Where the bucket is and how to talk to it."""

    bucket: Annotated[
        str,
        Field(
            max_length=256,
            description="Name of the bucket; it must exist.",
            json_schema_extra=cel_rules(
                _bucket_rule(
                    "google",
                    "[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]",
                    "3 to 222 lower-case letters, digits, dots, hyphens and underscores",
                )
            ),
        ),
    ]
    prefix: Annotated[str, _prefix("google")] = ""
    endpoint: Annotated[
        str,
        Field(
            max_length=512,
            description="URL of the server, http(s)://host:port without a path.",
            json_schema_extra=cel_rules(
                _endpoint_rule("google", "https://storage-team.p.googleapis.com")
            ),
        ),
    ] = "https://storage.googleapis.com"
    credentials_secret_ref: Annotated[
        NameRef | None,
        Field(
            description="Secret with serviceAccount.json, a key of a service account; mounted in sidecars "
            "only. Default: the identity of the pods' service accounts, for which the metadata server of GKE "
            "gives tokens."
        ),
    ] = None
    ca_secret_ref: _CaSecretRef = None
    max_concurrency: _MaxConcurrency = 4


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


class UsageSpec(ApiModel):
    """When the store is listed, and what is deleted then."""

    every: Annotated[
        Annotated[str, DURATION],
        Field(
            max_length=32,
            description="Time between two listings, a duration from 1m to 24h. While a quota is reached, "
            "at most 1m.",
            json_schema_extra=cel_rules(
                rule(
                    f"{duration_within('1m', '24h')}",
                    message_expression='\'usage.every is "%s", expected 1m to 24h: write for example '
                    "10m'.format([self])",
                )
            ),
        ),
    ] = "10m"
    sweep_orphans_after: Annotated[
        Annotated[str, DURATION],
        Field(
            max_length=32,
            description="Age from which objects that no checkpoint needs and that no upload can need are "
            "deleted, a duration of at least 1h.",
            json_schema_extra=cel_rules(
                rule(
                    f"{duration_within('1h', '87600h')}",
                    message_expression='\'usage.sweepOrphansAfter is "%s", expected at least 1h, because '
                    "younger objects may belong to an upload that is ending: write for example "
                    "24h'.format([self])",
                )
            ),
        ),
    ] = "24h"


_QUOTA_RULES = cel_rules(
    rule(
        "has(self.bytes) || has(self.perNamespace) || has(self.perJob)",
        message="quota has no limit: set quota.bytes, quota.perNamespace or quota.perJob, or remove quota",
    ),
    *(
        rule(
            f"!has(self.{less}) || !has(self.{more})"
            f" || quantity(self.{less}).compareTo(quantity(self.{more})) <= 0",
            message_expression=(
                f"'quota.{less} is %s and quota.{more} is %s: the first could never be reached. Lower "
                f"{less} or raise {more}'.format([self.{less}, self.{more}])"
            ),
            field_path=f".{less}",
        )
        for less, more in (
            ("perNamespace", "bytes"),
            ("perJob", "bytes"),
            ("perJob", "perNamespace"),
        )
    ),
)


def _limit(name: str, description: str, example: str) -> Any:
    return Field(
        max_length=32,
        description=f"{description}, a quantity such as {example}. Default: no limit.",
        json_schema_extra=cel_rules(quantity_rule(f"quota.{name}", example)),
    )


class QuotaSpec(ApiModel):
    """The most bytes that the store may hold below its prefix. At a limit the next upload waits."""

    model_config = ConfigDict(json_schema_extra=_QUOTA_RULES)

    bytes: Annotated[
        Annotated[str, QUANTITY] | None,
        _limit("bytes", "Limit of all objects below the prefix", "10Ti"),
    ] = None
    per_namespace: Annotated[
        Annotated[str, QUANTITY] | None,
        _limit("perNamespace", "Limit of the objects of each namespace", "2Ti"),
    ] = None
    per_job: Annotated[
        Annotated[str, QUANTITY] | None,
        _limit("perJob", "Limit of the objects of each job", "500Gi"),
    ] = None


_ONE_PLACE = "the store has none or several of s3, azure and google: set one of them"


class CheckpointStoreSpec(ApiModel):
    """The object store."""

    model_config = ConfigDict(
        json_schema_extra=cel_rules(
            rule(
                "[has(self.s3), has(self.azure), has(self.google)].exists_one(given, given)",
                message=_ONE_PLACE,
            )
        )
    )

    s3: Annotated[S3Spec | None, Field(description="An S3-compatible object store.")] = None
    azure: Annotated[AzureSpec | None, Field(description="A container of Azure Blob Storage.")] = (
        None
    )
    google: Annotated[GoogleSpec | None, Field(description="A bucket of Google Cloud Storage.")] = (
        None
    )

    @property
    def place(self) -> S3Spec | AzureSpec | GoogleSpec:
        """The one that is given."""
        found = self.s3 or self.azure or self.google
        assert found is not None, "the validator requires one of them"
        return found

    @model_validator(mode="after")
    def _has_one_place(self) -> Self:
        """Refuse what the CRD's rule refuses, for objects of a cluster with older CRDs."""
        if sum(place is not None for place in (self.s3, self.azure, self.google)) != 1:
            raise ValueError(_ONE_PLACE)
        return self

    quota: Annotated[
        QuotaSpec | None,
        Field(
            description="Limits of what the store holds. At a limit, the next upload of a job waits. Saves "
            "on nodes and copies at peers go on, and nothing is deleted that the retention keeps."
        ),
    ] = None
    usage: Annotated[
        UsageSpec,
        Field(description="When the store is listed, and when orphans are deleted."),
    ] = UsageSpec()
    verify: Annotated[
        VerifySpec | None,
        Field(
            description="Drill checkpoints of this store from time to time. Default: only on request."
        ),
    ] = None


class StoreFeatures(ApiModel):
    """What the probe saw the server do."""

    conditional_put: Annotated[
        bool | None, Field(description="A conditional write does not replace an object.")
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


class NamespaceUsageStatus(ApiModel):
    """What the jobs of one namespace have in the store."""

    namespace: Annotated[str, Field(max_length=63, description="Namespace of the jobs.")]
    bytes: Annotated[int, Field(ge=0, description="Bytes of their objects.")]
    objects: Annotated[int, Field(ge=0, description="Number of their objects.")]


class JobUsageStatus(ApiModel):
    """What one job has in the store."""

    namespace: Annotated[str, Field(max_length=63, description="Namespace of the job.")]
    uid: Annotated[JobUid, Field(max_length=128, description="uid of the job.")]
    name: Annotated[
        str | None,
        Field(
            max_length=253, description="Name of the job. Absent: this cluster does not have it."
        ),
    ] = None
    bytes: Annotated[int, Field(ge=0, description="Bytes of its objects.")]
    objects: Annotated[int, Field(ge=0, description="Number of its objects.")]


class OrphanStatus(ApiModel):
    """Objects of one kind that no checkpoint needs, and that are at least an hour old."""

    kind: Annotated[
        str, Field(max_length=32, description="shards, layouts, markers or uploads (unfinished).")
    ]
    bytes: Annotated[int, Field(ge=0, description="Their bytes.")]
    objects: Annotated[int, Field(ge=0, description="Their number.")]
    oldest_seconds: Annotated[
        int, Field(ge=0, description="Age of the oldest by the store's clock, seconds.")
    ]


class UsageStatus(ApiModel):
    """What the newest listing of the store's prefix found."""

    listed_at: Annotated[Timestamp, Field(description="When the listing ended (UTC).")]
    location: Annotated[
        str, Field(max_length=1024, description="Endpoint, bucket and prefix that were listed.")
    ]
    bytes: Annotated[int, Field(ge=0, description="Bytes of all objects, as LIST says.")]
    size: Annotated[
        str,
        Field(max_length=16, description="The same with a unit, computed, for the SIZE column."),
    ] = ""
    objects: Annotated[int, Field(ge=0, description="Number of all objects.")]
    checkpoints: Annotated[int, Field(ge=0, description="Number of manifests.")]
    namespaces: Annotated[
        tuple[NamespaceUsageStatus, ...],
        Field(
            max_length=MAX_LISTED_NAMESPACES,
            description="The largest namespaces, the largest first.",
        ),
    ] = ()
    jobs: Annotated[
        tuple[JobUsageStatus, ...],
        Field(max_length=MAX_LISTED_JOBS, description="The largest jobs, the largest first."),
    ] = ()
    other_bytes: Annotated[
        int,
        Field(ge=0, description="Bytes of all other jobs, and of objects of other programs."),
    ] = 0
    orphans: Annotated[
        tuple[OrphanStatus, ...],
        Field(max_length=8, description="What no checkpoint needs, by kind. No entry: none."),
    ] = ()
    swept_bytes: Annotated[
        int, Field(ge=0, description="Bytes of orphans that were deleted before this listing.")
    ] = 0

    @field_validator("size", mode="before")
    @classmethod
    def _never_read_back(cls, _: Any) -> str:
        return ""

    @field_serializer("size")
    def _size(self, _: str) -> str:
        return size_text(self.bytes)


class ReachedQuota(ApiModel):
    """A limit of the quota at which the next upload of some jobs waits."""

    namespace: Annotated[
        str | None, Field(max_length=63, description="Absent: the limit of the whole store.")
    ] = None
    job_uid: Annotated[
        JobUid | None, Field(max_length=128, description="Absent: the limit of more than one job.")
    ] = None
    bytes: Annotated[int, Field(ge=0, description="Bytes that are used.")]
    limit_bytes: Annotated[int, Field(ge=0, description="The limit.")]

    def holds(self, namespace: str, job_uid: JobUid) -> bool:
        """Return whether the uploads of a job wait for this limit."""
        return self.namespace in (None, namespace) and self.job_uid in (None, job_uid)


class CheckpointStoreStatus(WithConditions):
    """What the newest probe and the newest listing saw, and the drills."""

    conditions: Conditions = ()
    usage: Annotated[
        UsageStatus | None,
        Field(description="What the store holds. Absent: it was not listed yet."),
    ] = None
    last_listing: Annotated[
        Timestamp | None,
        Field(description="When the newest attempt to list the store ended (UTC)."),
    ] = None
    reached_quotas: Annotated[
        tuple[ReachedQuota, ...],
        Field(
            max_length=1 + MAX_LISTED_NAMESPACES + MAX_LISTED_JOBS,
            description="Limits of the quota that are reached. The uploads of these jobs wait.",
        ),
    ] = ()
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
    """An object store, S3-compatible, of Azure or of Google, that jobs of the same namespace upload to."""

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
