"""The pod of this sidecar: its settings, its clock, the round that it is in, and pauses between retries."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from holdfast_core.clock import Clock
from holdfast_core.contract import SidecarContract
from holdfast_core.ids import JobUid, RestartRound
from holdfast_core.messages.schema import RestorePoint
from holdfast_core.tasks import Backoff
from holdfast_sidecar.base.rounds import RoundState
from holdfast_sidecar.base.settings import Settings


class Patience:
    """Pauses of one action that is retried until it succeeds, with the time after which to report it."""

    def __init__(self, clock: Clock, backoff: Backoff, seconds: float) -> None:
        self._clock = clock
        self._backoff = backoff
        self._end = clock.monotonic() + seconds

    @property
    def over(self) -> bool:
        """Whether the retries have lasted long enough to be reported. They may continue."""
        return self._clock.monotonic() >= self._end

    def next_seconds(self) -> float:
        return self._backoff.next_seconds()

    async def pause(self) -> None:
        await self._clock.sleep(self.next_seconds())


class CurrentRound:
    """Owner of the fencing state. Only SEAL and ROUND replace it.

    Other components call it each time they need the state, and keep no copy.
    """

    def __init__(self, state: RoundState) -> None:
        self._state = state
        self._replaced = asyncio.Event()

    def __call__(self) -> RoundState:
        return self._state

    @property
    def state(self) -> RoundState:
        return self._state

    @state.setter
    def state(self, state: RoundState) -> None:
        self._state = state
        replaced, self._replaced = self._replaced, asyncio.Event()
        replaced.set()

    async def replaced(self) -> None:
        """Wait until the state is replaced."""
        await self._replaced.wait()

    async def unsealed(self, round_: RestartRound) -> None:
        """Wait while this sidecar is sealed for this round.

        Ranks run in it only if the sidecar has restarted. It then receives its ROUND again.
        """
        while self._state.round == round_ and self._state.accepted is None:
            await self._replaced.wait()


@dataclass(frozen=True, slots=True)
class Pod:
    """Identity of a pod, with the clock of its waits and the state of its round."""

    settings: Settings
    clock: Clock
    current: CurrentRound

    @property
    def contract(self) -> SidecarContract:
        return self.settings.contract

    @property
    def job_uid(self) -> JobUid:
        return self.settings.contract.job_uid

    @property
    def state(self) -> RoundState:
        return self.current.state

    def job_uid_of(self, point: RestorePoint) -> JobUid:
        """Return the uid of the job that saved a restore point."""
        return point.job_uid or self.job_uid

    def namespace_of(self, point: RestorePoint) -> str:
        """Return the namespace, in the keys of the store, of the job that saved a restore point."""
        return point.job_namespace or self.contract.namespace

    def backoff(self) -> Backoff:
        """Return the pauses between the attempts of one action."""
        return Backoff(self.settings.backoff_first_seconds, self.settings.backoff_last_seconds)

    def patience(self) -> Patience:
        """Return the pauses of a restore that waits for its sources, from now on."""
        return Patience(self.clock, self.backoff(), self.settings.restore_patience_seconds)
