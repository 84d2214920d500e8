"""Names of a job's objects, the label that selects them, names of phases, and lists of names in messages.

The operator creates these objects. Each name contains a digest of the job's uid. A job that is deleted and
created again under the same name therefore cannot collide with pods, Services, Secrets or Checkpoints that
remain of the first job. Names are deterministic: a create request that is repeated, or that two operators
send, addresses the same object.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from holdfast_core.ids import (
    FIRST_SPARE,
    MAX_SPARES,
    CheckpointId,
    JobUid,
    RestartRound,
    Worker,
    is_spare,
)

GROUP = "holdfast.dev"
"""Group of the API's kinds, and prefix of labels and annotations."""

JOB_UID_LABEL = f"{GROUP}/job-uid"
"""Label with the uid of the TrainingJob. The Service, the NetworkPolicy and the pod anti-affinity select by
it. It does not decide ownership, because any user who may create a pod can copy it. The command line uses it,
too."""

LIST_ANNOTATION = f"{GROUP}/list"
"""Annotation of a CheckpointStore with a ListContract as JSON: a person asks for a list of the store. The
operator runs a pod that writes it into its log, until the annotation changes, goes or is a day old."""
LIST_COMPONENT = "store-list"
"""Value of the label app.kubernetes.io/component of that pod."""

RECOVERY_PHASES = (
    "detect",
    "back_off",
    "seal",
    "schedule",
    "rehydrate",
    "rendezvous",
    "first_step",
)
"""The phases of a recovery, in their order, as the status and the command line name them."""

DIGEST_CHARACTERS = 6
"""Length of the uid's digest in names: 30 bits. With a job name of at most 40 characters, a pod's name
stays within 63 characters, the limit of a host name."""

CERTIFICATES_IN_SECRET = 64
"""Number of neighbouring workers whose leaf certificates are in one Secret: 60 KB, of the 1 MiB that a Secret
may have."""

_PLACEHOLDER_SUFFIX = re.compile(r"-placeholder-(0|[1-9][0-9]{0,4})")
_POD_SUFFIX = re.compile(r"-(s?)(0|[1-9][0-9]{0,4})-r(0|[1-9][0-9]{0,8})")


@lru_cache(maxsize=4096)
def job_digest(uid: str) -> str:
    """Return the digest of `uid` in names, in lower-case letters and digits."""
    digest = hashlib.blake2b(uid.encode(), digest_size=5).digest()
    return base64.b32encode(digest).decode().lower()[:DIGEST_CHARACTERS]


def job_prefix(job: str, uid: JobUid) -> str:
    """Return the prefix of the names of all objects of this job."""
    return f"{job}-{job_digest(uid)}"


def pod_name(job: str, uid: JobUid, worker: int, birth_round: int) -> str:
    """Return the name of a worker's pod, or of a spare pod, whose number has the prefix `s`."""
    index = f"s{worker - FIRST_SPARE}" if is_spare(Worker(worker)) else str(worker)
    return f"{job_prefix(job, uid)}-{index}-r{birth_round}"


def parse_pod_name(job: str, uid: JobUid, name: str) -> tuple[Worker, RestartRound] | None:
    """Return the worker and the birth round in a pod's name, or None if it is not a name of this job."""
    found = _suffix(_POD_SUFFIX, job, uid, name)
    if found is None:
        return None
    number, limit = int(found[2]), MAX_SPARES if found[1] else FIRST_SPARE
    if number >= limit:
        return None
    return Worker(number + (FIRST_SPARE if found[1] else 0)), RestartRound(int(found[3]))


def member_pod_names(job: Mapping[str, Any]) -> list[str]:
    """Return the names of the pods of a gang's workers, by worker.

    Args:
        job: A TrainingJob as the API server returns it. Before its first round it has no workers.
    """
    meta, status = job["metadata"], job.get("status") or {}
    promoted = (status.get("spares") or {}).get("promoted") or []
    spares = {int(worker): pod for worker, _, pod in (text.partition("=") for text in promoted)}
    return [
        spares.get(worker) or pod_name(meta["name"], meta["uid"], worker, birth)
        for worker, birth in enumerate(status.get("members") or [])
    ]


def placeholder_name(job: str, uid: JobUid, worker: int) -> str:
    """Return the name of the pod that looks for a node for this missing worker of an elastic gang."""
    return f"{job_prefix(job, uid)}-placeholder-{worker}"


def parse_placeholder_name(job: str, uid: JobUid, name: str) -> Worker | None:
    """Return the missing worker in a placeholder's name, or None if it is not a name of this job."""
    found = _suffix(_PLACEHOLDER_SUFFIX, job, uid, name)
    return None if found is None else Worker(int(found[1]))


def _suffix(pattern: re.Pattern[str], job: str, uid: JobUid, name: str) -> re.Match[str] | None:
    """Return how the pattern matches what follows the job's prefix in a name, or None."""
    prefix = job_prefix(job, uid)
    return pattern.fullmatch(name, len(prefix)) if name.startswith(prefix) else None


def worker_name(worker: int) -> str:
    """Return the name of a worker whose pods another controller names, in certificates and ROUND messages."""
    return f"worker-{worker}"


def pod_group_name(job: str, uid: JobUid, workers: int, round_: int) -> str:
    """Return the name of the pod group in Kueue that a gang of `workers` new pods begins in this round.

    Kueue also gives this name to its Workload. It is a valid label value, because it is as long as a pod's
    name.
    """
    return f"{job_prefix(job, uid)}-{workers}-g{round_}"


def service_name(job: str, uid: JobUid) -> str:
    """Return the name of the gang's headless Service, which is also the pods' subdomain."""
    return f"{job_prefix(job, uid)}-gang"


def certificates_secret_name(job: str, uid: JobUid, worker: int, birth_round: int) -> str:
    """Return the name of the Secret with the leaf of this worker's pod, created in `birth_round`.

    The Secret has the leaves of CERTIFICATES_IN_SECRET neighbouring workers.
    """
    return f"{job_prefix(job, uid)}-certs-{worker // CERTIFICATES_IN_SECRET}-r{birth_round}"


def another_secret_name(first: str, attempt: int) -> str:
    """Return another name for a Secret of `certificates_secret_name`, because the first one is taken.

    It ends like the first one: templates may not name Secrets with this end.
    """
    head, _, end = first.rpartition("-certs-")
    return f"{head}-{attempt}-certs-{end}"


def checkpoint_name(job: str, uid: JobUid, checkpoint: CheckpointId) -> str:
    """Return the name of the Checkpoint object that records a commit to the object tier."""
    return f"{job_prefix(job, uid)}-{checkpoint}"


def first_of(names: Sequence[object], limit: int = 8) -> str:
    """Return a list of at most `limit` names for a message, and the number of those that are left out."""
    shown = ", ".join(map(str, names[:limit]))
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown
