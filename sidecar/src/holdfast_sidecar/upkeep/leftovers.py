"""Delete data in the object store that no checkpoint needs.

Lost pods and deletions leave unfinished uploads and objects behind. The coordinator
looks for them periodically in the background; no save or restore waits for it. After an error nothing more
is deleted until the next period.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast_core.clock import Clock
from holdfast_core.contract import SidecarContract
from holdfast_core.errors import HoldfastError
from holdfast_core.ids import CheckpointId, RestartRound
from holdfast_core.store.rules import QUIET, STALE_UPLOADS
from holdfast_core.store.tier import ObjectTier
from holdfast_sidecar.base import logs
from holdfast_sidecar.base.tasks import Pools

_SWEEP_SECONDS = 900.0
_SWEEPS_A_REAP = 24
"""Number of sweeps between two searches for unfinished uploads."""


class Leftovers:
    """Periodic clean-up of the job's objects in the store, by the coordinator of a round."""

    def __init__(
        self,
        contract: SidecarContract,
        round_: RestartRound,
        store: ObjectTier | None,
        *,
        pools: Pools,
        clock: Clock,
        uploading: Callable[[], frozenset[CheckpointId]],
    ) -> None:
        """Create the clean-up.

        Args:
            contract: The contract of this pod, which names the job.
            round_: The round of this coordinator.
            store: The object store. None: there is nothing to clean up.
            pools: The calls run in its `store` pool.
            clock: Measures the periods.
            uploading: Returns the checkpoints that are being uploaded. It is called from other threads.
        """
        self._contract = contract
        self._round = round_
        self._store = store
        self._pools = pools
        self._clock = clock
        self._uploading = uploading

    async def run(self) -> None:
        """Clean up periodically until cancelled. Returns only if there is no object store."""
        store = self._store
        if store is None:
            return
        while True:
            await self._reap(store)
            for _ in range(_SWEEPS_A_REAP):
                await self._clock.sleep(_SWEEP_SECONDS)
                await self._sweep(store)

    async def _reap(self, store: ObjectTier) -> None:
        contract = self._contract
        try:
            await self._pools.store.run(
                store.abort_stale, contract.namespace, contract.job_uid, STALE_UPLOADS
            )
        except HoldfastError as error:
            logs.warning("listing unfinished uploads failed", error=str(error))

    async def _sweep(self, store: ObjectTier) -> None:
        contract = self._contract
        try:
            swept = await self._pools.store.run(
                store.sweep,
                contract.namespace,
                contract.job_uid,
                self._round,
                QUIET,
                self._uploading,
            )
        except HoldfastError as error:
            logs.warning("sweeping the store failed", error=str(error))
        else:
            if swept:
                logs.info("swept", checkpoints=sorted(map(str, swept)))
