"""Verify this node's copy of a shard of which another member received corrupt bytes."""

from __future__ import annotations

from holdfast_core.errors import HoldfastError, NotFoundError
from holdfast_core.ids import ShardRef, TierName
from holdfast_core.messages.schema import Suspect
from holdfast_core.tasks import Tasks
from holdfast_sidecar.base import logs
from holdfast_sidecar.base.telemetry import Telemetry
from holdfast_sidecar.base.tiers import Tiers


class Verifier:
    """Handler of SUSPECT. The sender is not trusted: only a read here decides that a copy is bad."""

    def __init__(self, tiers: Tiers, telemetry: Telemetry) -> None:
        self._tiers = tiers
        self._telemetry = telemetry
        self._tasks = Tasks()

    def suspect(self, message: Suspect) -> None:
        """Begin to verify the shard. A bad copy is quarantined."""
        ref = ShardRef(
            message.job_uid, message.step, message.step_round, message.rank, message.blake3
        )
        self._tasks.spawn(self._verify(ref), "verify")

    async def close(self) -> None:
        await self._tasks.cancel()

    async def _verify(self, ref: ShardRef) -> None:
        failures = self._telemetry.failures
        try:
            damage = await self._tiers.quarantine_if_damaged(
                ref, self._tiers.pools.fill, self._telemetry.metrics
            )
        except NotFoundError:
            return
        except (HoldfastError, OSError) as error:
            failures.note("verification", TierName.NODE, error)
            return
        if damage is not None:
            logs.warning("quarantined a bad copy", rank=ref.rank, step=ref.step, error=str(damage))
        failures.healthy("verification")
