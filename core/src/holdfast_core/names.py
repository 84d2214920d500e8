"""Names of the objects that the operator creates for a job.

Each name holds a digest of the job's uid. A job that was deleted and created again under the same
name therefore never meets the pods, Services, Secrets or Checkpoints of the job before it, in
whatever state those still are. The same job and round give the same name, so a create that was
repeated, or that two operators make, meets its own object.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import lru_cache

from holdfast_core.ids import CheckpointId, JobUid, RestartRound, Worker

DIGEST_CHARACTERS = 6
"""30 bits. A job's name has at most 40 characters, so that a pod's name stays below 63, the limit of
a host name."""

_POD_SUFFIX = re.compile(r"-(0|[1-9][0-9]{0,4})-r(0|[1-9][0-9]{0,8})")


@lru_cache(maxsize=4096)
def job_digest(uid: str) -> str:
    """Lower-case letters and digits that stand for this uid in names."""
    digest = hashlib.blake2b(uid.encode(), digest_size=5).digest()
    return base64.b32encode(digest).decode().lower()[:DIGEST_CHARACTERS]


def job_prefix(job: str, uid: JobUid) -> str:
    """What the name of every object of this job begins with."""
    return f"{job}-{job_digest(uid)}"


def pod_name(job: str, uid: JobUid, worker: int, birth_round: int) -> str:
    return f"{job_prefix(job, uid)}-{worker}-r{birth_round}"


def parse_pod_name(job: str, uid: JobUid, name: str) -> tuple[Worker, RestartRound] | None:
    """Worker and birth round of a pod of this job; None where the job gives no pod that name."""
    prefix = job_prefix(job, uid)
    if not name.startswith(prefix):
        return None
    found = _POD_SUFFIX.fullmatch(name, len(prefix))
    return None if found is None else (Worker(int(found[1])), RestartRound(int(found[2])))


def service_name(job: str, uid: JobUid) -> str:
    """The headless Service of the gang, also the pods' subdomain."""
    return f"{job_prefix(job, uid)}-gang"


def certificates_secret_name(job: str, uid: JobUid, birth_round: int) -> str:
    """Secret with the leaves of the pods that are born in that round."""
    return f"{job_prefix(job, uid)}-certs-r{birth_round}"


def checkpoint_name(job: str, uid: JobUid, checkpoint: CheckpointId) -> str:
    """The Checkpoint object that records a commit of the object tier."""
    return f"{job_prefix(job, uid)}-{checkpoint}"
