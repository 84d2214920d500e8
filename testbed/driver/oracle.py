"""The invariants that every scenario checks at its end, judged from outside the product.

- I1: every committed step can be restored within what its level promises.
- I2: restored bytes are the saved bytes (the final digests equal those of an uninterrupted run).
- I3: there is at most one commit for each job, step and round, and for each step of a lineage.
- I4: within a level's promise the committed step never goes back.
- I5: no round commits after a newer one has begun.
- I6: progress resumes within a bound once faults stop (the waits of the scenario).
- I7: nothing leaks (multipart uploads, temporary files). `Job.delete` waits until nothing of a gang is left.

`judge` is pure: it receives the observations and returns the violations as sentences.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from minio import Minio
from minio.error import S3Error

from testbed.driver.jobs import BUCKET, Job
from testbed.driver.kube import Object
from testbed.driver.store import store_client


@dataclass(frozen=True, slots=True)
class Evidence:
    """The observations of one finished job."""

    history: Sequence[Object]
    """Every status that was received, oldest first."""
    checkpoints: Sequence[Object]
    """Checkpoint objects of the job."""
    stored: Mapping[str, str]
    """Objects by their key below the job's prefix: the text of a manifest, the etag of any other object."""
    uploads_in_progress: Sequence[str]
    copies: int


def judge(evidence: Evidence) -> list[str]:
    """Return a sentence for each violation of an invariant."""
    return [
        *_status_history(evidence.history),
        *_commits(evidence.checkpoints),
        *_restorable(evidence.checkpoints, evidence.stored),
        *(f"I7: multipart upload left behind: {key}" for key in evidence.uploads_in_progress),
    ]


def _status_history(history: Sequence[Object]) -> Iterable[str]:
    previous_round = -1
    previous_persisted: tuple[int, int] | None = None
    chosen: dict[int, object] = {}
    committed = False
    for status in history:
        round_ = int(status.get("restartRound", 0))
        if round_ < previous_round:
            yield f"I5: restartRound decreased from {previous_round} to {round_}"
        previous_round = max(previous_round, round_)
        persisted = status.get("lastPersisted") or {}
        # A person may roll the gang back below a persisted step, and the lineage says so.
        rolled_back_from = int((status.get("lineage") or [{}])[-1].get("rolledBackFrom", -1))
        if persisted:
            now = (int(persisted["round"]), int(persisted["step"]))
            before = previous_persisted or now
            if now[0] < before[0] and before[1] > rolled_back_from:
                yield f"I5: lastPersisted by round {now[0]} after round {before[0]}"
            if now[0] > round_:
                yield f"I5: lastPersisted of round {now[0]} while the round is {round_}"
            previous_persisted = now
        point = status.get("restorePoint")
        if point is not None:
            key = (point.get("step"), point.get("round"), point.get("manifest"))
            if round_ in chosen and chosen[round_] != key:
                yield f"I3: round {round_} has two restore points: {chosen[round_]} and {key}"
            reasons = {c["reason"] for c in status.get("conditions", [])}
            begun = round_ not in chosen and "step" not in point
            if begun and committed and "StartedOver" not in reasons:
                yield f"I4: round {round_} starts from nothing, and no start over is announced"
            chosen[round_] = key
            step = int(point.get("step") or 0)
            floor = int(persisted.get("step", 0)) if int(persisted.get("round", 0)) < round_ else 0
            if f"s{floor}-r{persisted.get('round')}" in status.get("quarantined", ()):
                floor = 0  # ranks failed from it, or a drill found it damaged
            if step < floor and floor > rolled_back_from:
                yield f"I4: round {round_} restored step {step} although {floor} was persisted"
        committed = "lastCommittedStep" in status


def _commits(checkpoints: Sequence[Object]) -> Iterable[str]:
    seen: dict[tuple[int, int], str] = {}
    for item in checkpoints:
        status = item.get("status") or {}
        manifest = status.get("manifest")
        if not manifest:
            continue
        key = (int(item["spec"].get("step") or 0), int(status.get("round") or 0))
        if key in seen and seen[key] != manifest:
            yield f"I3: two manifests for step {key[0]} round {key[1]}"
        seen[key] = manifest


def _restorable(checkpoints: Sequence[Object], stored: Mapping[str, str]) -> Iterable[str]:
    for item in checkpoints:
        status = item.get("status") or {}
        if status.get("phase") != "Committed":
            continue
        step, round_ = int(item["spec"]["step"]), int(status["round"])
        name = item["metadata"]["name"]
        folder = f"s{step:012d}-r{round_:06d}"
        key = f"manifests/s{step:012d}/r{round_:06d}.json"
        text = stored.get(key)
        if text is None:
            yield f"I1: {name} is Committed but {key} is not in the store"
            continue
        for shard in json.loads(text)["shards"]:
            hexes = str(shard["blake3"]).removeprefix("b3:")[:16]
            rank = int(shard["rank"])
            shard_key = f"shards/{folder}/rank{rank:06d}-{hexes}"
            if not {f"{shard_key}.shard", f"{shard_key}.pack"} & stored.keys():
                yield f"I1: {name} names {shard_key}.shard, which is not in the store, nor its pack"
        for marker in stored:
            needed, slash, by = marker.removeprefix("references/").partition("/by-")
            if not slash or by != folder:
                continue
            if not any(key.startswith(f"shards/{needed}/") for key in stored):
                yield f"I1: {name} needs objects of shards/{needed}, of which none is in the store"


def compare_digests(reference: Mapping[int, str], found: Mapping[int, str]) -> list[str]:
    """Return a sentence for each rank whose digest violates I2."""
    if not reference:
        return ["I2: the uninterrupted run printed no final digest"]
    problems = [
        (
            f"I2: rank {rank} ended with {found.get(rank, 'nothing')}, expected {want} as in an "
            "uninterrupted run"
        )
        for rank, want in sorted(reference.items())
        if found.get(rank) != want
    ]
    return problems


# ------------------------------------------------------------------ gathering


def stored_objects(store: Minio, namespace: str, job_uid: str) -> dict[str, str]:
    prefix = f"e2e/{namespace}/{job_uid}/"
    stored: dict[str, str] = {}
    for item in store.list_objects(BUCKET, prefix, recursive=True):
        key = item.object_name.removeprefix(prefix)
        if key.startswith("manifests/"):
            try:
                with contextlib.closing(store.get_object(BUCKET, item.object_name)) as reply:
                    stored[key] = reply.read().decode()
            except S3Error as error:
                if error.code != "NoSuchKey":  # it was pruned after the listing
                    raise
        else:
            stored[key] = item.etag
    return stored


def uploads_in_progress(store: Minio, namespace: str, job_uid: str) -> list[str]:
    """Return the keys of multipart uploads that are neither complete nor aborted."""
    prefix = f"e2e/{namespace}/{job_uid}/"
    found = store._list_multipart_uploads(BUCKET, prefix=prefix)  # it has no public name
    return [upload.object_name for upload in found.uploads]


def gather(job: Job, *, copies: int = 1) -> Evidence:
    uid = job.uid
    store = store_client(job.kube)
    return Evidence(
        history=[seen.status for seen in job.history],
        checkpoints=[
            item
            for item in job.kube.items("Checkpoint", job.namespace)
            if item["metadata"].get("labels", {}).get("holdfast.dev/job-uid") == uid
        ],
        stored=stored_objects(store, job.namespace, uid),
        uploads_in_progress=uploads_in_progress(store, job.namespace, uid),
        copies=copies,
    )


def digest_of(values: Iterable[str]) -> str:
    """Return one short digest of all ranks' digests, for display."""
    return hashlib.sha256("".join(values).encode()).hexdigest()[:16]
