"""A gang of one worker, whose rank is a Checkpointer of the test's process."""

from __future__ import annotations

import pytest
from tests.support.sidecar.gang import Gang

from holdfast_core.contract import PodContract
from holdfast_core.messages.schema import Policy


class OneWorker:
    """A real sidecar, and the environment of its rank."""

    def __init__(self, gang: Gang, monkeypatch: pytest.MonkeyPatch, slots: int) -> None:
        self.gang = gang
        self.policy = Policy(interval_steps=1, slots=slots, peer_copies=0)
        self._monkeypatch = monkeypatch
        self._round = 0
        self._version = 1

    async def begin(self) -> None:
        """Start the sidecar and round 0."""
        await self.gang.start(policy=self.policy)
        self._become_rank()

    async def next_round(self, step: int) -> None:
        """Seal the round and begin the next one at the committed `step`."""
        point = await self.gang.point(step, local=True)
        self._round += 1
        await self.gang.operator.seal(0, self._round)
        await self.gang.begin(self._round, restore=point, policy=self.policy)
        self._become_rank()

    async def sidecar_is_back(self) -> None:
        """Bring a sidecar that was started again into the round."""
        gang = self.gang
        gang.launchers.pop(0).close()
        await gang.learn(0)
        await gang.launcher(0, last_round=self._round, running=self._round)
        self._version += 1
        message = gang.operator.message(
            self._round, version=self._version, copies=(), policy=self.policy
        )
        await gang.operator.round_all(message)

    def _become_rank(self) -> None:
        self.gang.ranks[0].close()
        for path in (self.gang.sidecars[0].shared / "slots").glob("*.slot"):
            path.unlink()  # those of the scripted rank
        of = self.gang.sidecars[0].contract
        contract = PodContract(
            of.job_uid,
            of.job,
            of.namespace,
            of.worker,
            of.birth_round,
            1,
            of.shared_dir,
            slots=self.policy.slots,
        )
        env = {"HOLDFAST_ROUND": str(self._round), "RANK": "0", "WORLD_SIZE": "1"}
        for name, value in {**contract.to_env(), **env}.items():
            self._monkeypatch.setenv(name, value)
