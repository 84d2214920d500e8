"""Builders of the operator's views with defaults, so that a test names only the fields that it checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

from holdfast_core.api import (
    Checkpoint,
    CheckpointCondition,
    CheckpointPhase,
    CheckpointPolicySpec,
    CheckpointSpec,
    CheckpointStatus,
    Compression,
    Condition,
    ConditionStatus,
    DeletionPolicy,
    FailurePolicySpec,
    FailureRule,
    NameRef,
    ObjectMeta,
    PeerEncryption,
    TrainingJob,
    TrainingJobSpec,
    TrainingJobStatus,
    changed,
)
from holdfast_core.api.checkpoint_policy import (
    MemorySpec,
    ObjectTierSpec,
    PeerTierSpec,
    RetentionSpec,
    SaveInterval,
    UploadInterval,
)
from holdfast_core.api.training_job import CheckpointRef, RestoreFromSpec
from holdfast_core.contract import StoreConfig
from holdfast_core.format.canonical import digest_of
from holdfast_core.format.manifest import JobIdentity, Manifest, ManifestShard
from holdfast_core.format.rank_layout import LayoutDigests
from holdfast_core.ids import (
    CheckpointId,
    Digest,
    JobUid,
    Rank,
    RestartRound,
    ShardRef,
    Step,
    Worker,
)
from holdfast_core.messages.schema import ShardInfo, UncommittedShard
from holdfast_core.names import checkpoint_name, pod_name
from holdfast_operator.decide.facts.world import World
from holdfast_operator.model.job import (
    InventoryView,
    JobMemory,
    ManifestView,
    Now,
    Observed,
    PodPhase,
    PodView,
    Reachable,
    SidecarView,
    StoreView,
)

UID = JobUid("11111111-2222-3333-4444-555555555555")
START = datetime(2026, 1, 1, tzinfo=UTC)
CREATED = START + timedelta(seconds=990)
"""Creation of the job, which is new at `now()`."""
NAMESPACE = "team-a"


def now(seconds: float = 1000.0) -> Now:
    """Return the moment `seconds` after START, on the monotonic and the wall clock."""
    return Now(seconds, datetime.fromtimestamp(START.timestamp() + seconds, UTC))


def world_of(observed: Observed, memory: JobMemory | None = None, *, at: float = 1000.0) -> World:
    """Return what a pass over this job knows at `now(at)`."""
    return World(observed if memory is None else replace(observed, memory=memory), now(at))


def template() -> dict[str, Any]:
    return {
        "spec": {
            "containers": [
                {
                    "name": "trainer",
                    "image": "example/trainer:1",
                    "command": ["holdfast", "run", "--", "python", "train.py"],
                    "resources": {"limits": {"memory": "4Gi"}},
                }
            ]
        }
    }


def spec(
    workers: int = 2,
    *,
    procs_per_worker: int = 1,
    interval_steps: int = 10,
    size_limit: str | None = None,
    peer_copies: int | None = None,
    topology_key: str = "kubernetes.io/hostname",
    encryption: PeerEncryption = PeerEncryption.TLS,
    store: str | None = None,
    object_every_steps: int = 100,
    compression: Compression = Compression.NONE,
    keep_last: int = 3,
    retention: Mapping[str, Any] | None = None,
    restore_from: str | None = None,
    max_restarts: int = 10,
    window: str = "1h",
    rules: tuple[FailureRule, ...] = (),
    interval: SaveInterval | None = None,
    **changes: Any,
) -> TrainingJobSpec:
    """Return a spec, with short names for nested fields; `changes` are fields of TrainingJobSpec."""
    copies = (1 if workers > 1 else 0) if peer_copies is None else peer_copies
    base = TrainingJobSpec(
        workers=workers,
        procs_per_worker=procs_per_worker,
        template=template(),
        checkpoint=CheckpointPolicySpec(
            interval=interval or SaveInterval(steps=interval_steps),
            memory=MemorySpec(size_limit=size_limit),
            peer=PeerTierSpec(copies=copies, topology_key=topology_key, encryption=encryption),
            object=None
            if store is None
            else ObjectTierSpec(
                store_ref=NameRef(name=store),
                every=UploadInterval(steps=object_every_steps),
                compression=compression,
            ),
            retention=RetentionSpec(**{"keep_last": keep_last, **(retention or {})}),
        ),
        restore_from=None
        if restore_from is None
        else RestoreFromSpec(checkpoint_ref=CheckpointRef(name=restore_from)),
        failure_policy=FailurePolicySpec(max_restarts=max_restarts, window=window, rules=rules),
    )
    return changed(base, **changes)


def job(
    workers: int = 2,
    status: TrainingJobStatus | None = None,
    *,
    generation: int = 1,
    deleting: bool = False,
    **changes: Any,
) -> TrainingJob:
    """Return a job named `job`; `changes` are arguments of `spec`."""
    return TrainingJob(
        metadata=ObjectMeta(
            namespace=NAMESPACE,
            name="job",
            uid=UID,
            resource_version="7",
            generation=generation,
            creation_timestamp=CREATED,
            deletion_timestamp=START if deleting else None,
        ),
        spec=spec(workers, **changes),
        status=TrainingJobStatus() if status is None else status,
    )


def metadata(of: TrainingJob, **changes: Any) -> TrainingJob:
    """Return the job with other metadata."""
    return changed(of, metadata=changed(of.metadata, **changes))


def condition(
    kind: str,
    value: bool | None,
    reason: str,
    message: str = "",
    at: datetime = START,
    generation: int | None = None,
) -> Condition:
    """Return a condition; a `value` of None stands for Unknown."""
    return Condition(
        type=kind,
        status=ConditionStatus.of(value),
        reason=reason,
        message=message,
        last_transition_time=at,
        observed_generation=generation,
    )


def raw_job(workers: int = 2, *, checkpoint: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a TrainingJob as the API server returns it before the operator has handled it."""
    return {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {
            "name": "job",
            "namespace": NAMESPACE,
            "uid": UID,
            "resourceVersion": "1",
            "generation": 1,
            "creationTimestamp": "2026-01-01T00:16:30Z",
        },
        "spec": {
            "workers": workers,
            "procsPerWorker": 1,
            "template": template(),
            "checkpoint": {"interval": {"steps": 10}, **(checkpoint or {})},
            "failurePolicy": {"maxRestarts": 1000, "window": "24h"},
        },
        "status": {},
    }


def raw_store(name: str) -> dict[str, Any]:
    """Return a CheckpointStore whose probe succeeded."""
    return {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "CheckpointStore",
        "metadata": {"name": name, "namespace": NAMESPACE, "generation": 1},
        "spec": {
            "s3": {
                "endpoint": "http://store:9000",
                "bucket": "b",
                "prefix": "p",
                "credentialsSecretRef": {"name": "store-keys"},
            }
        },
        "status": {
            "observedGeneration": 1,
            "lastProbe": "2026-01-01T00:00:00Z",
            "conditions": [
                {
                    "type": "Available",
                    "status": "True",
                    "reason": "Probed",
                    "message": "",
                    "lastTransitionTime": "2026-01-01T00:00:00Z",
                }
            ],
        },
    }


def status(round_: int = 0, members: Iterable[int] = (0, 0), **changes: Any) -> TrainingJobStatus:
    """Return the status of a job whose round was begun."""
    return TrainingJobStatus(
        restart_round=RestartRound(round_),
        members=tuple(RestartRound(m) for m in members),
        **changes,
    )


def pod(worker: int, birth: int = 0, **changes: Any) -> PodView:
    """Return a running pod on its own node."""
    base = PodView(
        name=pod_name("job", UID, worker, birth),
        uid=f"uid-{worker}-r{birth}",
        worker=Worker(worker),
        birth_round=RestartRound(birth),
        phase=PodPhase.RUNNING,
        ip=f"10.0.{birth}.{worker}",
        node=f"node-{worker}",
        ready=True,
        sidecar_started=True,
    )
    return replace(base, **changes)


def sidecar(
    of: PodView,
    round_: int,
    *,
    manifests: Iterable[ManifestView] = (),
    shards: Iterable[ShardRef] = (),
    uncommitted: Iterable[UncommittedShard] = (),
    version: int = 0,
    **changes: Any,
) -> SidecarView:
    """Return a sidecar that acknowledged the seal for `round_`."""
    base = SidecarView(
        worker=of.worker,
        pod_uid=of.uid,
        reachable=Reachable.YES,
        inventory=InventoryView(
            round=RestartRound(round_),
            version=version,
            manifests=tuple(manifests),
            shards=tuple(shards),
            uncommitted=tuple(uncommitted),
        ),
        sealed_round=RestartRound(round_),
    )
    return replace(base, **changes)


def silent(of: PodView, since: float | None = None) -> SidecarView:
    """Return a sidecar that has not answered since `since`, or that was not called yet (None)."""
    reachable = Reachable.UNKNOWN if since is None else Reachable.NO
    return SidecarView(of.worker, of.uid, reachable, unreachable_since=since)


def shard_digest(step: int, round_: int, rank: int) -> Digest:
    return digest_of(f"{step} {round_} {rank}".encode())


def manifest_digest(step: int, round_: int) -> Digest:
    return digest_of(f"manifest-{step}-{round_}".encode())


@lru_cache(maxsize=4096)
def manifest(step: int, round_: int, world_size: int = 2) -> ManifestView:
    return ManifestView(
        step=Step(step),
        round=RestartRound(round_),
        manifest=manifest_digest(step, round_),
        world_size=world_size,
        shards=tuple(
            ManifestShard(
                Rank(r),
                100,
                shard_digest(step, round_, r),
                Digest("b3:table"),
                Digest("b3:layout"),
                Rank(0),
                Rank(r),
            )
            for r in range(world_size)
        ),
    )


def stored_manifest(job_uid: JobUid, step: int, round_: int = 0, ranks: int = 8) -> Manifest:
    """Return a manifest as sidecars store it."""
    return Manifest(
        job=JobIdentity("team", "gpt", job_uid),
        step=Step(step),
        restart_round=RestartRound(round_),
        world_size=ranks,
        parent=None,
        shards=tuple(
            ManifestShard(
                Rank(r),
                100,
                shard_digest(step, round_, r),
                digest_of(b"t"),
                digest_of(b"layout"),
                Rank(0),
                Rank(r),
            )
            for r in range(ranks)
        ),
    )


def held(step: int, round_: int, rank: int) -> ShardRef:
    digest = shard_digest(step, round_, rank)
    return ShardRef(UID, Step(step), RestartRound(round_), Rank(rank), digest)


def uncommitted(step: int, round_: int, rank: int, world_size: int = 2) -> UncommittedShard:
    """Return a shard on a node tier whose checkpoint has no manifest there."""
    digest = digest_of(f"{step}-{round_}-{rank}".encode())
    shard = ShardInfo(Rank(rank), 100, digest, digest)
    return UncommittedShard(
        Step(step), RestartRound(round_), world_size, shard, LayoutDigests(digest, digest, digest)
    )


def store(**changes: Any) -> StoreView:
    config = StoreConfig(
        endpoint="store:9000", secure=False, bucket="b", prefix="p", region="us-east-1"
    )
    base = StoreView(name="main", config=config, credentials_secret="store-keys", available=True)
    return replace(base, **changes)


def checkpoint(
    step: int | None,
    round_: int | None,
    *,
    name: str | None = None,
    job: str = "job",
    pin: bool = False,
    deletion_policy: str = "Retain",
    deleting: bool = False,
    has_finalizer: bool = False,
    persisted: bool = True,
    **changes: Any,
) -> Checkpoint:
    """Return the Checkpoint of a persisted commit; `changes` are fields of its status."""
    if name is None:
        assert step is not None and round_ is not None
        name = checkpoint_name("job", UID, CheckpointId(Step(step), RestartRound(round_)))
    status = CheckpointStatus(
        **{
            "phase": CheckpointPhase.COMMITTED,
            "round": round_,
            "manifest": None if step is None else manifest_digest(step, round_ or 0),
            "job_uid": UID,
            "object_uid": f"ckpt-{step}-{round_}",
            "world_size": 2,
            "store": "main",
            "when_deleted": "Retain",
            "conditions": (
                condition(CheckpointCondition.COMMITTED, True, "Committed"),
                condition(CheckpointCondition.REPLICATED, True, "Committed"),
                condition(CheckpointCondition.PERSISTED, persisted, "Persisted"),
                condition(CheckpointCondition.RESTORABLE, True, "Persisted"),
                condition(CheckpointCondition.PINNED, pin, "R"),
            ),
            **changes,
        }
    )
    return Checkpoint(
        metadata=ObjectMeta(
            namespace=NAMESPACE,
            name=name,
            uid=f"ckpt-{step}-{round_}",
            resource_version="1",
            creation_timestamp=START,
            deletion_timestamp=START if deleting else None,
            finalizers=(Checkpoint.FINALIZER,) if has_finalizer else (),
        ),
        spec=CheckpointSpec(
            job_ref=NameRef(name=job),
            step=None if step is None else Step(step),
            pin=pin,
            deletion_policy=DeletionPolicy(deletion_policy),
        ),
        status=status,
    )


def request(name: str = "before-lunch", **status: Any) -> Checkpoint:
    """Return a Checkpoint that requests a save; `status` are fields of its status."""
    return Checkpoint(
        metadata=ObjectMeta(namespace=NAMESPACE, name=name, uid="u", resource_version="5"),
        spec=CheckpointSpec(job_ref=NameRef(name="job")),
        status=CheckpointStatus(**status),
    )
