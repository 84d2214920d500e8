"""The components that bring the restore point to this node and into the slots."""

from __future__ import annotations

from functools import partial

from holdfast_core.tasks import Signal
from holdfast_sidecar.base.pod import Pod
from holdfast_sidecar.base.telemetry import Metrics
from holdfast_sidecar.base.tiers import Tiers
from holdfast_sidecar.restore.fetch import Fetcher, PodPlaces
from holdfast_sidecar.restore.fill import Filler
from holdfast_sidecar.restore.rehydrate import Rehydrator
from holdfast_sidecar.save.components import SaveComponents
from holdfast_sidecar.wire.bulk import Members


class RestoreComponents:
    """The restores of this pod's ranks."""

    def __init__(
        self,
        pod: Pod,
        tiers: Tiers,
        members: Members,
        saves: SaveComponents,
        metrics: Metrics,
        changed: Signal[[]],
    ) -> None:
        """Create the components. `changed` is called when this worker's report may have changed."""
        self.progressed: Signal[[]] = Signal()
        """Called when the restore point is on this node, or when a reason why it is not has changed."""
        self.progressed.subscribe(changed)
        self.fetcher = Fetcher(pod, tiers, members, metrics)
        self.rehydrator = Rehydrator(pod, self.fetcher, metrics, self.progressed)
        places = partial(
            PodPlaces,
            tiers=tiers,
            bulk=members.bulk,
            fetcher=self.fetcher,
            metrics=metrics,
            procs_per_worker=pod.contract.procs_per_worker,
        )
        self.filler = Filler(pod, tiers, saves, self.rehydrator, places, metrics)
        self.filler.changed.subscribe(changed)

    @property
    def is_here(self) -> bool:
        """Whether the restore point of the round is on this node."""
        return self.rehydrator.restored is not None
