"""Names of the objects that the operator creates for a job, and the label by which they are selected.

Each name contains a digest of the job's uid. A job that is deleted and created again under the same
name therefore cannot collide with pods, Services, Secrets or Checkpoints that remain of the first job.
Names are deterministic: a create request that is repeated, or that two operators send, addresses the
same object.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import lru_cache

from holdfast_core.ids import CheckpointId, JobUid, RestartRound, Worker

GROUP = "holdfast.dev"
"""Group of the API's kinds, and prefix of labels and annotations."""

JOB_UID_LABEL = f"{GROUP}/job-uid"
"""Label with the uid of the TrainingJob. The Service, the NetworkPolicy and the pod anti-affinity select by
it. It does not decide ownership, because any user who may create a pod can copy it. The command line uses it,
too."""

DIGEST_CHARACTERS = 6
"""Length of the uid's digest in names: 30 bits. With a job name of at most 40 characters, a pod's name
stays within 63 characters, the limit of a host name."""

CERTIFICATES_IN_SECRET = 64
"""Number of neighbouring workers whose leaf certificates are in one Secret: 60 KB, of the 1 MiB that a Secret
may have."""

_POD_SUFFIX = re.compile(r"-(0|[1-9][0-9]{0,4})-r(0|[1-9][0-9]{0,8})")


@lru_cache(maxsize=4096)
def job_digest(uid: str) -> str:
    """Return the digest of `uid` in names, in lower-case letters and digits."""
    digest = hashlib.blake2b(uid.encode(), digest_size=5).digest()
    return base64.b32encode(digest).decode().lower()[:DIGEST_CHARACTERS]


def job_prefix(job: str, uid: JobUid) -> str:
    """Return the prefix of the names of all objects of this job."""
    return f"{job}-{job_digest(uid)}"


def pod_name(job: str, uid: JobUid, worker: int, birth_round: int) -> str:
    return f"{job_prefix(job, uid)}-{worker}-r{birth_round}"


def parse_pod_name(job: str, uid: JobUid, name: str) -> tuple[Worker, RestartRound] | None:
    """Return the worker and the birth round in a pod's name, or None if it is not a name of this job."""
    prefix = job_prefix(job, uid)
    if not name.startswith(prefix):
        return None
    found = _POD_SUFFIX.fullmatch(name, len(prefix))
    return None if found is None else (Worker(int(found[1])), RestartRound(int(found[2])))


def worker_name(worker: int) -> str:
    """Return the name of a worker whose pods another controller names, in certificates and ROUND messages."""
    return f"worker-{worker}"


def service_name(job: str, uid: JobUid) -> str:
    """Return the name of the gang's headless Service, which is also the pods' subdomain."""
    return f"{job_prefix(job, uid)}-gang"


def certificates_secret_name(job: str, uid: JobUid, worker: int, birth_round: int) -> str:
    """Return the name of the Secret with the leaf of this worker's pod, created in `birth_round`.

    The Secret has the leaves of CERTIFICATES_IN_SECRET neighbouring workers.
    """
    return f"{job_prefix(job, uid)}-certs-{worker // CERTIFICATES_IN_SECRET}-r{birth_round}"


def checkpoint_name(job: str, uid: JobUid, checkpoint: CheckpointId) -> str:
    """Return the name of the Checkpoint object that records a commit to the object tier."""
    return f"{job_prefix(job, uid)}-{checkpoint}"
