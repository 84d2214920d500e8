"""A coordinator of two workers whose reports the test sends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from tests.support.clock import ManualClock
from tests.support.sidecar.contracts import contract_with
from tests.support.sidecar.rounds import first_round
from tests.support.tiers.memory import MemoryTier

from holdfast_core.messages.schema import Policy
from holdfast_core.store.tier import ObjectTier
from holdfast_sidecar.base.failures import Failures
from holdfast_sidecar.base.pod import CurrentRound, Pod
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.base.tasks import Pools
from holdfast_sidecar.base.tiers import Tiers
from holdfast_sidecar.coordinator.commit import Coordinator


class CoordinatorWorld:
    """The coordinator of the first round, or of another one. The context manager closes it."""

    def __init__(
        self,
        folder: Path,
        members: Any,
        policy: Policy | None = None,
        store: ObjectTier | None = None,
        **fields: Any,
    ) -> None:
        """Make the world. `members` receive what the coordinator sends, once it is started.

        `fields` replace fields of the ROUND message.
        """
        message = first_round().accepted
        assert message is not None
        message = replace(message, **fields)
        self.clock = ManualClock()
        self.pools = Pools(disk=1, fetch=1, store=1)
        self.coordinator = Coordinator(
            Pod(
                Settings(contract_with(shared_dir=str(folder))),
                self.clock,
                CurrentRound(first_round()),
            ),
            message if policy is None else replace(message, policy=policy),
            Tiers(MemoryTier(), store, self.pools),
            members,
            Failures(lambda: None),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.coordinator.close()
        self.pools.close()
