"""The components of one sidecar, which are created once."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_core.tasks import Signal
from holdfast_sidecar.base.pod import CurrentRound
from holdfast_sidecar.coordinator.role import CoordinatorRole
from holdfast_sidecar.gang.starter import Starter
from holdfast_sidecar.gang.state import LocalGang
from holdfast_sidecar.restore.components import RestoreComponents
from holdfast_sidecar.save.components import SaveComponents


@dataclass(frozen=True, slots=True)
class Components:
    """The components that begin with a ROUND and end with a SEAL, and the state that fences them."""

    current: CurrentRound
    saves: SaveComponents
    restores: RestoreComponents
    gang: LocalGang
    starter: Starter
    role: CoordinatorRole
    changed: Signal[[]]
    """Called when this worker's report to the coordinator may have changed."""

    @property
    def busy(self) -> bool:
        """Whether a save or a restore moves bytes, or may begin to."""
        restores = not self.restores.is_here or self.restores.filler.busy
        saves = not self.saves.stager.idle or self.saves.flow.pending > 0
        return self.current.state.accepted is None or restores or saves

    @property
    def trains(self) -> bool:
        """Whether every rank of this pod runs and has finished a step of the current round."""
        state = self.current()
        return self.gang.trains(state.round, state.own_ranks)

    @property
    def flushed(self) -> bool:
        """Whether preStop may end: all is idle, and no rank of this pod can hand over another save."""
        idle = self.saves.idle and not self._only_here and self.role.may_end
        return idle and not self.gang.may_save

    @property
    def stuck(self) -> bool:
        """Whether nothing that preStop waits for makes progress now, as when other pods are gone."""
        waits = self._only_here and self.saves.flow.idle and bool(self.gang.waits_for_store)
        return (
            self.saves.stager.idle
            and self.saves.flow.stuck
            and not waits
            and not self.gang.may_save
        )

    @property
    def _only_here(self) -> bool:
        return self.saves.only_here(self.gang.waits_for_store)
