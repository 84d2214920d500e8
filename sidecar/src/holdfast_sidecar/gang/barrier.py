"""Restore barrier of this pod: decide whether its launcher may fork the ranks of the round. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_core.ids import RestartRound
from holdfast_core.messages.schema import Run, StoreAddress
from holdfast_sidecar.base.rounds import RoundState


@dataclass(frozen=True, slots=True)
class Facts:
    """Input of `open_barrier`."""

    state: RoundState
    restored: bool
    """Whether all that this node must have of the restore point is here, or there is no restore point."""
    store_address: StoreAddress | None
    """Address of the round's TCPStore, if it is known."""
    launcher_connected: bool
    running_round: RestartRound | None
    """Round whose ranks run in this pod now, as the launcher reported it."""
    last_round: RestartRound | None
    """Newest round that the launcher has ever forked ranks for."""


def open_barrier(facts: Facts) -> Run | str:
    """Return `Run` for the launcher, or a message that names what is still missing."""
    state = facts.state
    accepted = state.accepted
    if accepted is None:
        return f"no ROUND for round {state.round} yet"
    if not facts.restored:
        return "the shards of the restore point are not on the node yet"
    waiting = [m.worker for m in accepted.members if not m.address]
    if waiting or len(accepted.members) < accepted.workers:
        return f"workers without an address: {waiting or 'not all workers are members yet'}"
    if facts.store_address is None:
        return f"the address of the gang's store is unknown so far (worker {accepted.store_host} hosts it)"
    if not facts.launcher_connected:
        return "the launcher is not connected"
    if facts.running_round is not None:
        return f"ranks of round {facts.running_round} still run"
    if facts.last_round is not None and facts.last_round >= state.round:
        return f"the launcher ran round {facts.last_round} already"
    return Run(
        round=state.round,
        restore_point=accepted.restore_point,
        world_size=state.world_size,
        group_rank=state.worker,
        store=facts.store_address,
        policy=accepted.policy,
        rolled_back_from=accepted.rolled_back_from,
    )
