"""The pods of workers and spares, as whole objects. Pure."""

from __future__ import annotations

from holdfast_core.ids import RestartRound, Worker
from holdfast_operator.decide.facts.world import World
from holdfast_operator.model.actions import DesiredObject
from holdfast_operator.model.job import PodGroup
from holdfast_operator.render.pod import render_pod


def worker_pod(
    world: World,
    worker: Worker,
    birth: RestartRound,
    avoided: tuple[str, ...],
    failed: tuple[str, ...],
    group: PodGroup | None = None,
) -> DesiredObject:
    """Return the pod that is to be created for a worker or a spare. See `render_pod`."""
    observed, secret = world.observed, world.certificates(worker, birth)
    return DesiredObject(
        render_pod(
            observed.job,
            worker,
            birth,
            observed.store,
            observed.sidecar,
            avoided,
            failed,
            group,
            secret,
        )
    )
