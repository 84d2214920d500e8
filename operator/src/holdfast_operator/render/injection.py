"""What pods of another controller get at admission, as the admission policy of the chart reads it. Pure.

The policy adds what differs between pods: the index, the certificate, the address, and the time in which the
ranks stop, which is half of the grace period that the other controller has chosen.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast_core.api import CheckpointAdoption, InjectionStatus, Variable
from holdfast_core.contract import PREFIX
from holdfast_core.ids import RestartRound, Worker
from holdfast_core.names import CERTIFICATES_IN_SECRET
from holdfast_operator.model.job import StoreView
from holdfast_operator.model.pod_source import certificates_prefix
from holdfast_operator.render.pod import POD_IP_VARIABLE, sidecar_contract, trainer_contract

_OF_A_POD = frozenset(
    {f"{PREFIX}WORKER", f"{PREFIX}POD_NAME", f"{PREFIX}STOP_SECONDS", POD_IP_VARIABLE}
)


def injection(job: CheckpointAdoption, store: StoreView | None) -> InjectionStatus:
    """Return the part of the pods that is the same for all workers of the gang."""
    worker, birth = Worker(0), RestartRound(0)
    memory, node = job.spec.checkpoint.memory, job.spec.checkpoint.node
    return InjectionStatus(
        trainer_env=_shared(trainer_contract(job, worker, birth).to_env()),
        sidecar_env=_shared(sidecar_contract(job, worker, birth, store, "").to_env()),
        certificates=certificates_prefix(job),
        workers_per_secret=CERTIFICATES_IN_SECRET,
        node_size=str(node.volume_bytes),
        shared_size=None if memory.size_limit_bytes is None else str(memory.size_limit_bytes),
        credentials_secret=None if store is None else store.credentials_secret,
        ca_secret=None if store is None else store.ca_secret,
    )


def _shared(values: Mapping[str, str]) -> tuple[Variable, ...]:
    return tuple(
        Variable(name=name, value=value) for name, value in values.items() if name not in _OF_A_POD
    )
