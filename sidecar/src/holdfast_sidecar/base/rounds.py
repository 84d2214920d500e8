"""Which round this sidecar is in, and what that makes it refuse. Pure: no I/O, no clock.

The refusal table lives here as data (`RULES`), and `refuse` reads it; tests/sidecar/base/test_refusals.py has
one case for each cell. Everything that writes passes through `refuse` first (I5).

States of one round: sealed (SEAL heard or the pod was born in it; no ROUND yet: nothing is written,
and only the operator may read) -> held (ROUND accepted; higher versions replace it) -> sealed for a
newer one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from holdfast_core.ids import RestartRound, Worker, ranks_of
from holdfast_core.messages.schema import (
    Ask,
    Certificate,
    Holding,
    HoldNotice,
    LevelNotice,
    ManifestPut,
    Member,
    PersistRequest,
    Prepared,
    Prune,
    Refusal,
    Refused,
    Replicated,
    Round,
    Seal,
    Suspect,
    Uploaded,
    WorkerReport,
)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request, as its certificate says: the operator, or the pod of that name."""

    pod: str
    operator: bool = False


OPERATOR = Caller("operator", operator=True)


@dataclass(frozen=True, slots=True)
class RoundState:
    """The fencing state. `held` is the ROUND of `round`, None while sealed."""

    worker: Worker
    procs_per_worker: int
    round: RestartRound
    version_floor: int = 0
    """Version of the ROUND recorded before this process started: an older one is not accepted."""
    held: Round | None = None

    @property
    def version(self) -> int:
        return self.held.version if self.held is not None else 0

    @property
    def is_coordinator(self) -> bool:
        return self.held is not None and self.held.coordinator == self.worker

    @property
    def world_size(self) -> int:
        return 0 if self.held is None else self.held.workers * self.procs_per_worker

    @property
    def own_ranks(self) -> range:
        return ranks_of(self.worker, self.procs_per_worker)

    def member(self, worker: Worker) -> Member | None:
        if self.held is None:
            return None
        return next((m for m in self.held.members if m.worker == worker), None)

    def member_of_pod(self, pod: str) -> Member | None:
        if self.held is None:
            return None
        return next((m for m in self.held.members if m.pod == pod), None)

    def copy_targets(self) -> tuple[Worker, ...]:
        if self.held is None:
            return ()
        return tuple(c.target for c in self.held.copies if c.source == self.worker)

    def sealed_for(self, round_: RestartRound) -> RoundState:
        return replace(self, round=round_, version_floor=0, held=None)

    def holding(self, message: Round) -> RoundState:
        return replace(self, held=message)

    def refused(self, code: Refusal, message: str) -> Refused:
        return Refused(code, message, self.round, self.version)


class From(StrEnum):
    OPERATOR = "operator"
    MEMBER = "member"
    COORDINATOR = "coordinator"
    OPERATOR_OR_COORDINATOR = "operator or coordinator"


class To(StrEnum):
    ANY = "any sidecar"
    COORDINATOR = "the coordinator"
    ASKED = "the coordinator, or the sidecar of rank 0 when the coordinator asks"


@dataclass(frozen=True, slots=True)
class Rule:
    """Who may send a message to whom; `fenced`: only in exactly the round that is held."""

    sender: From
    receiver: To
    fenced: bool


RULES: dict[type[Any], Rule] = {
    Seal: Rule(From.OPERATOR, To.ANY, fenced=False),
    Round: Rule(From.OPERATOR, To.ANY, fenced=False),
    Certificate: Rule(From.OPERATOR, To.ANY, fenced=False),
    Ask: Rule(From.OPERATOR_OR_COORDINATOR, To.ASKED, fenced=True),
    Prune: Rule(From.OPERATOR, To.COORDINATOR, fenced=True),
    Prepared: Rule(From.MEMBER, To.COORDINATOR, fenced=True),
    Holding: Rule(From.MEMBER, To.COORDINATOR, fenced=True),
    Replicated: Rule(From.MEMBER, To.COORDINATOR, fenced=True),
    Uploaded: Rule(From.MEMBER, To.COORDINATOR, fenced=True),
    WorkerReport: Rule(From.MEMBER, To.COORDINATOR, fenced=True),
    ManifestPut: Rule(From.COORDINATOR, To.ANY, fenced=True),
    LevelNotice: Rule(From.COORDINATOR, To.ANY, fenced=True),
    HoldNotice: Rule(From.COORDINATOR, To.ANY, fenced=True),
    PersistRequest: Rule(From.COORDINATOR, To.ANY, fenced=True),
    Suspect: Rule(From.MEMBER, To.ANY, fenced=False),
}


def refuse(state: RoundState, caller: Caller, message: Any) -> Refused | None:
    """None if `message` may be served now; else why not.

    The order (round, sender, receiver) matters for what the caller learns, not for safety; while
    sealed no members are known, so the round comes first.
    """
    rule = RULES[type(message)]
    if isinstance(message, Seal):
        return _not_operator(state, caller) or _stale(state, message.round)
    if isinstance(message, Round):
        return _not_operator(state, caller) or _round_message(state, message)
    if not rule.fenced:
        return refuse_caller(state, caller, type(message))
    return (
        (_not_operator(state, caller) if rule.sender is From.OPERATOR else None)
        or fence(state, message.round)
        or _sender(state, caller, rule.sender)
        or _receiver(state, caller, rule.receiver)
        or _speaks_for_itself(state, caller, message)
    )


def refuse_caller(
    state: RoundState, caller: Caller, kind: type[Any], round_: RestartRound | None = None
) -> Refused | None:
    """Refuse a message of that kind by what is known before its body is read.

    `round_` is the round that the caller says the message is of, None where it says none. The message
    itself passes through `refuse` afterwards.
    """
    rule = RULES[kind]
    if rule.sender is From.OPERATOR:
        return _not_operator(state, caller)
    if rule.fenced and round_ is not None and (refused := fence(state, round_)) is not None:
        return refused
    if caller.operator:
        return _sender(state, caller, rule.sender)
    return _sealed(state) or _sender(state, caller, rule.sender)


def refuse_reader(state: RoundState, caller: Caller) -> Refused | None:
    """Reads are for the operator and for members of the round that is held.

    A sidecar that is sealed does not know its members: a pod that was removed from the job may still
    have a valid certificate. Callers ask again until the ROUND has arrived.
    """
    if caller.operator:
        return None
    refused = _sealed(state)
    if refused is None and state.member_of_pod(caller.pod) is None:
        refused = _not_member(state, caller)
    return refused


def fence(state: RoundState, round_: RestartRound) -> Refused | None:
    """The round check of everything that writes, also of Stage, Fill and copies."""
    if round_ < state.round:
        return _stale(state, round_)
    if round_ > state.round:
        return state.refused(
            Refusal.FUTURE_ROUND,
            f"round {round_} is not known here: worker {state.worker} is in round {state.round}",
        )
    return _sealed(state)


def refuse_copy(state: RoundState, caller: Caller, round_: RestartRound) -> Refused | None:
    """May `caller` put a copy here: the right round, a member, and assigned? (Whether there is room
    is the node tier's to say.)"""
    refused = fence(state, round_)
    if refused is not None:
        return refused
    member = state.member_of_pod(caller.pod)
    if member is None:
        return _not_member(state, caller)
    held = state.held
    assigned = held is not None and any(
        c.source == member.worker and c.target == state.worker for c in held.copies
    )
    if not assigned:
        return state.refused(
            Refusal.NOT_ASSIGNED,
            f"no copies of worker {member.worker} are assigned to worker {state.worker} "
            f"in round {state.round}",
        )
    return None


def refuse_state(state: RoundState, caller: Caller) -> Refused | None:
    """GET /v1/state is answered by the coordinator alone."""
    refused = refuse_reader(state, caller)
    if refused is not None or state.is_coordinator:
        return refused
    return _not_coordinator(state)


def refuse_rendezvous(state: RoundState, caller: Caller, round_: RestartRound) -> Refused | None:
    refused = fence(state, round_) or refuse_reader(state, caller)
    if refused is not None:
        return refused
    if state.held is not None and state.held.store_host != state.worker:
        return state.refused(
            Refusal.NOT_FOUND,
            f"worker {state.worker} does not host the store of round {round_}: "
            f"worker {state.held.store_host} does",
        )
    return None


def _sealed(state: RoundState) -> Refused | None:
    if state.held is not None:
        return None
    return state.refused(
        Refusal.SEALED,
        f"worker {state.worker} is sealed for round {state.round} and waits for its ROUND",
    )


def _stale(state: RoundState, round_: RestartRound) -> Refused | None:
    if round_ >= state.round:
        return None
    return state.refused(
        Refusal.STALE_ROUND,
        f"round {round_} is over: worker {state.worker} is in round {state.round}",
    )


def _round_message(state: RoundState, message: Round) -> Refused | None:
    if message.round < state.round:
        return _stale(state, message.round)
    if message.round > state.round:
        return state.refused(
            Refusal.NOT_SEALED,
            f"ROUND {message.round} without SEAL: worker {state.worker} is in round {state.round}",
        )
    newest = state.version if state.held is not None else state.version_floor - 1
    if message.version <= newest:
        return state.refused(
            Refusal.NOT_NEWER,
            f"ROUND {message.round} version {message.version} is not above {newest}",
        )
    return None


def _not_operator(state: RoundState, caller: Caller) -> Refused | None:
    if caller.operator:
        return None
    return state.refused(
        Refusal.NOT_MEMBER, f"pod {caller.pod} may not say this: only the operator may"
    )


def _not_member(state: RoundState, caller: Caller) -> Refused:
    return state.refused(Refusal.NOT_MEMBER, f"{caller.pod} is not a member of round {state.round}")


def _not_coordinator(state: RoundState) -> Refused:
    named = "none" if state.held is None else f"worker {state.held.coordinator}"
    return state.refused(
        Refusal.NOT_COORDINATOR,
        f"worker {state.worker} is not the coordinator of round {state.round}: {named} is",
    )


def _is_coordinator_pod(state: RoundState, caller: Caller) -> bool:
    member = state.member_of_pod(caller.pod)
    return member is not None and state.held is not None and member.worker == state.held.coordinator


def _sender(state: RoundState, caller: Caller, sender: From) -> Refused | None:
    match sender:
        case From.OPERATOR:
            return None
        case From.MEMBER:
            member = state.member_of_pod(caller.pod)
            return None if member is not None else _not_member(state, caller)
        case From.COORDINATOR:
            return None if _is_coordinator_pod(state, caller) else _not_member(state, caller)
        case From.OPERATOR_OR_COORDINATOR:
            if caller.operator or _is_coordinator_pod(state, caller):
                return None
            return _not_member(state, caller)


def _receiver(state: RoundState, caller: Caller, receiver: To) -> Refused | None:
    match receiver:
        case To.ANY:
            return None
        case To.COORDINATOR:
            return None if state.is_coordinator else _not_coordinator(state)
        case To.ASKED:
            asked = state.is_coordinator if caller.operator else state.worker == 0
            return None if asked else _not_coordinator(state)


def _speaks_for_itself(state: RoundState, caller: Caller, message: Any) -> Refused | None:
    """A worker reports its own ranks only: a spoofed rank is refused like a stranger."""
    if not isinstance(message, Prepared | Holding | Replicated | Uploaded | WorkerReport):
        return None
    member = state.member_of_pod(caller.pod)
    if member is None or member.worker != message.worker:
        return state.refused(
            Refusal.NOT_MEMBER, f"{caller.pod} is not worker {message.worker} of this round"
        )
    match message:
        case Prepared():
            ranks = [message.shard.rank]
        case Holding():
            ranks = [
                rank for r in message.ranks for rank in (r.rank, *(s.shard.rank for s in r.shards))
            ]
        case Replicated() | Uploaded():
            ranks = [message.rank]
        case WorkerReport():
            ranks = [d.rank for d in message.dead] + [p.rank for p in message.progress]
    own = ranks_of(message.worker, state.procs_per_worker)
    if all(rank in own for rank in ranks):
        return None
    return state.refused(
        Refusal.NOT_MEMBER, f"worker {message.worker} runs ranks {own.start}..{own.stop - 1} only"
    )
