"""The round that this sidecar is in, and the refusal of messages that do not fit it. Pure: no I/O, no clock.

The refusal table is data (`RULES`), which `refuse` applies; tests/sidecar/base/test_refusals.py has one case
for each cell. Every write request passes `refuse` or `fence` first (I5).

A round has two states. It is *sealed* after its SEAL, or from the start if the pod was created in it:
nothing is written, and only the operator may read. It is *held* after its ROUND was accepted; a ROUND of a
higher version replaces the one before. The SEAL of a newer round seals the sidecar again.

`relay_of` says which worker passes the messages between a worker and the coordinator on (ADR 0016).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from holdfast_core.ids import Digest, RestartRound, ShardRef, Worker, is_spare, ranks_of
from holdfast_core.messages.schema import (
    AcceptedRound,
    CopyRequest,
    FinishCommit,
    GangRequest,
    Member,
    Prune,
    RankSaves,
    Refusal,
    Refused,
    Round,
    Seal,
    WorkerReport,
    WorkerReports,
)


@dataclass(frozen=True, slots=True)
class Caller:
    """Sender of a request according to its certificate: the operator, or the pod of that name."""

    pod: str
    operator: bool = False


OPERATOR = Caller("operator", operator=True)


@dataclass(frozen=True, slots=True)
class RoundState:
    """The state by which requests are fenced."""

    worker: Worker
    """Index of this pod's worker. A spare has an index from FIRST_SPARE until a ROUND names its pod."""
    procs_per_worker: int
    round: RestartRound
    pod: str
    """Name of this pod in its certificate and in ROUND."""
    version_floor: int = 0
    """Version of the newest ROUND of this round that an earlier process of this sidecar recorded on the node
    tier. A ROUND of a lower version is refused."""
    accepted: Round | None = None
    """The accepted ROUND. None while sealed."""
    acceptance: AcceptedRound | None = None
    """What reports say about `accepted`."""
    _by_worker: Mapping[Worker, Member] = field(init=False, repr=False, compare=False)
    _by_pod: Mapping[str, Member] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        members = () if self.accepted is None else self.accepted.members
        object.__setattr__(self, "_by_worker", {m.worker: m for m in members})
        object.__setattr__(self, "_by_pod", {m.pod: m for m in members})

    @property
    def version(self) -> int:
        """Version of the accepted ROUND, 0 while sealed."""
        return self.accepted.version if self.accepted is not None else 0

    @property
    def coordinator(self) -> Worker | None:
        """The worker that coordinates the round. None while sealed."""
        return None if self.accepted is None else self.accepted.coordinator

    @property
    def is_coordinator(self) -> bool:
        return self.coordinator == self.worker

    @property
    def world_size(self) -> int:
        """Number of ranks of the gang, 0 while sealed."""
        return 0 if self.accepted is None else self.accepted.workers * self.procs_per_worker

    @property
    def own_ranks(self) -> range:
        return ranks_of(self.worker, self.procs_per_worker)

    @property
    def waits_for_choice(self) -> bool:
        return self.accepted is not None and self.accepted.policy.keeps_newest

    def refusal(self, round_: RestartRound) -> Refused | None:
        return fence(self, round_)

    def member(self, worker: Worker) -> Member | None:
        return self._by_worker.get(worker)

    def member_of_pod(self, pod: str) -> Member | None:
        return self._by_pod.get(pod)

    def copy_targets(self) -> tuple[Worker, ...]:
        """Return the workers to which this worker has to copy its shards."""
        if self.accepted is None:
            return ()
        return self.accepted.copies.get(self.worker, ())

    def sealed_for(self, round_: RestartRound) -> RoundState:
        """Return the state after the SEAL of a newer round."""
        return replace(self, round=round_, version_floor=0, accepted=None, acceptance=None)

    def named_in(self, message: Round) -> Worker | None:
        """Return the worker that the message names this pod, or None if it does not name it."""
        return next((m.worker for m in message.members if m.pod == self.pod), None)

    def accepting(self, message: Round, content: Digest) -> RoundState:
        """Return the state after `message` was accepted. A spare becomes the worker that it names.

        Args:
            message: The ROUND.
            content: `message.content_digest()`, which takes tens of milliseconds for thousands of workers.
        """
        named = self.named_in(message)
        return replace(
            self,
            worker=self.worker if named is None else named,
            accepted=message,
            acceptance=AcceptedRound(message.version, content),
        )

    def refused(self, code: Refusal, message: str) -> Refused:
        return Refused(code, message, self.round, self.version)


class From(StrEnum):
    """Permitted sender of a message."""

    OPERATOR = "operator"
    MEMBER = "member"


class To(StrEnum):
    """Sidecar that accepts a message."""

    ANY = "any sidecar"
    COORDINATOR = "the coordinator, or the relay of the sender"


@dataclass(frozen=True, slots=True)
class Rule:
    """Permitted sender and receiver of a message type."""

    sender: From
    receiver: To
    fenced: bool
    """Whether the message is accepted only if it is of exactly the round that is held."""


RULES: dict[type[Any], Rule] = {
    Seal: Rule(From.OPERATOR, To.ANY, fenced=False),
    Round: Rule(From.OPERATOR, To.ANY, fenced=False),
    FinishCommit: Rule(From.OPERATOR, To.ANY, fenced=False),
    GangRequest: Rule(From.OPERATOR, To.COORDINATOR, fenced=True),
    Prune: Rule(From.OPERATOR, To.COORDINATOR, fenced=True),
    CopyRequest: Rule(From.MEMBER, To.ANY, fenced=True),
    WorkerReports: Rule(From.MEMBER, To.COORDINATOR, fenced=True),
    ShardRef: Rule(From.MEMBER, To.ANY, fenced=False),
}


def refuse(state: RoundState, caller: Caller, message: Any) -> Refused | None:
    """Return why `message` is refused, or None if it may be served now.

    The order of the checks (round, sender, receiver) determines only which refusal the caller receives. The
    round is checked first, because the members are not known while the sidecar is sealed.
    """
    rule = RULES[type(message)]
    if isinstance(message, Seal):
        return _not_operator(state, caller) or _stale(state, message.round)
    if isinstance(message, Round):
        return _not_operator(state, caller) or _round_message(state, message)
    if isinstance(message, FinishCommit):
        return _not_operator(state, caller) or _not_between_rounds(state, message)
    if not rule.fenced:
        return refuse_caller(state, caller, type(message))
    return (
        (_not_operator(state, caller) if rule.sender is From.OPERATOR else None)
        or fence(state, message.round)
        or _sender(state, caller, rule.sender)
        or _receiver(state, caller, rule.receiver)
        or _check_sender(state, caller, message)
        or (_not_assigned(state, caller, message) if isinstance(message, CopyRequest) else None)
    )


def refuse_caller(
    state: RoundState, caller: Caller, kind: type[Any], round_: RestartRound | None = None
) -> Refused | None:
    """Return why a message of type `kind` is refused by what is known before its body is read, or None.

    Args:
        state: The round that this sidecar is in.
        caller: The sender.
        kind: Type of the message.
        round_: Round of the message according to the request's header. None if the header is missing.

    The parsed message must pass `refuse` afterwards.
    """
    rule = RULES[kind]
    if rule.sender is From.OPERATOR:
        return _not_operator(state, caller)
    if rule.fenced and round_ is not None and (refused := fence(state, round_)) is not None:
        return refused
    return (
        _sealed(state)
        or _sender(state, caller, rule.sender)
        or _receiver(state, caller, rule.receiver)
    )


def refuse_reader(state: RoundState, caller: Caller) -> Refused | None:
    """Return why a read is refused, or None. The operator and members of the held round may read.

    While sealed, members are refused as well: the members are not known, and a pod that was removed from
    the job may still have a valid certificate. Callers retry until the ROUND has arrived.
    """
    if caller.operator:
        return None
    refused = _sealed(state)
    if refused is None and state.member_of_pod(caller.pod) is None:
        refused = _not_member(state, caller)
    return refused


def fence(state: RoundState, round_: RestartRound) -> Refused | None:
    """Return why a write of `round_` is refused, or None. Stage, Fill and copies under way also use this."""
    if round_ < state.round:
        return _stale(state, round_)
    if round_ > state.round:
        return state.refused(
            Refusal.FUTURE_ROUND,
            (
                f"round {round_} is unknown to this sidecar: worker {state.worker} is in round "
                f"{state.round}"
            ),
        )
    return _sealed(state)


def refuse_state(state: RoundState, caller: Caller) -> Refused | None:
    """Return why GET /v1/state is refused, or None. Only the coordinator serves it."""
    refused = refuse_reader(state, caller)
    if refused is not None or state.is_coordinator:
        return refused
    return _not_coordinator(state)


def refuse_rendezvous(state: RoundState, caller: Caller, round_: RestartRound) -> Refused | None:
    """Return why GET /v1/rendezvous is refused, or None.

    The worker that hosts the store serves it, and a relay serves its group.
    """
    refused = fence(state, round_) or refuse_reader(state, caller)
    if refused is not None:
        return refused
    accepted = state.accepted
    if (
        accepted is not None
        and accepted.store_host != state.worker
        and not _is_relay_of(state, caller)
    ):
        return state.refused(
            Refusal.NOT_FOUND,
            f"worker {state.worker} does not host the store of round {round_}: "
            f"worker {accepted.store_host} does",
        )
    return None


def refuse_plan(state: RoundState, caller: Caller, round_: RestartRound) -> Refused | None:
    """Return why GET /v1/plan is refused, or None. The coordinator serves it, and a relay its group."""
    if caller.operator:
        return _not_member(state, caller)
    refused = fence(state, round_) or refuse_reader(state, caller)
    return refused or _receiver(state, caller, To.COORDINATOR)


def _sealed(state: RoundState) -> Refused | None:
    if state.accepted is not None:
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
    newest = state.version if state.accepted is not None else state.version_floor - 1
    if message.version <= newest:
        return state.refused(
            Refusal.NOT_NEWER,
            f"ROUND {message.round} version {message.version} is not above {newest}",
        )
    return _other_worker(state, message)


def _not_between_rounds(state: RoundState, message: FinishCommit) -> Refused | None:
    """Return why no commit may be finished, if the sidecar is not between SEAL and ROUND of this round."""
    if message.round < state.round:
        return _stale(state, message.round)
    if message.round == state.round and state.accepted is None:
        return None
    return state.refused(
        Refusal.NOT_SEALED,
        f"a commit is finished between SEAL and ROUND {message.round}: worker {state.worker} is in round "
        f"{state.round}, version {state.version}",
    )


def _other_worker(state: RoundState, message: Round) -> Refused | None:
    """Return why a ROUND is refused that gives this pod no worker, or another one than it has.

    A pod stores the shards of one worker only, and a spare has no ranks until it becomes a worker.
    """
    own = state.named_in(message)
    if own is None and is_spare(state.worker):
        return state.refused(
            Refusal.NOT_MEMBER, f"ROUND {message.round} names no worker for spare pod {state.pod}"
        )
    if own is None or is_spare(state.worker) or own == state.worker:
        return None
    return state.refused(
        Refusal.BAD_REQUEST,
        f"ROUND {message.round} names pod {state.pod} as worker {own}: it is worker {state.worker}",
    )


def _not_operator(state: RoundState, caller: Caller) -> Refused | None:
    if caller.operator:
        return None
    return state.refused(
        Refusal.NOT_MEMBER, f"pod {caller.pod} may not send this message: only the operator may"
    )


def _not_member(state: RoundState, caller: Caller) -> Refused:
    return state.refused(Refusal.NOT_MEMBER, f"{caller.pod} is not a member of round {state.round}")


def _not_coordinator(state: RoundState) -> Refused:
    named = "none" if state.accepted is None else f"worker {state.accepted.coordinator}"
    return state.refused(
        Refusal.NOT_COORDINATOR,
        f"worker {state.worker} is not the coordinator of round {state.round}: {named} is",
    )


def _is_relay_of(state: RoundState, caller: Caller) -> bool:
    """Return whether this worker passes on what the caller sends to the coordinator."""
    member, accepted = state.member_of_pod(caller.pod), state.accepted
    return (
        member is not None
        and accepted is not None
        and relay_of(accepted, member.worker) == state.worker
    )


def _sender(state: RoundState, caller: Caller, sender: From) -> Refused | None:
    match sender:
        case From.OPERATOR:
            return None
        case From.MEMBER:
            member = state.member_of_pod(caller.pod)
            return None if member is not None else _not_member(state, caller)


def _receiver(state: RoundState, caller: Caller, receiver: To) -> Refused | None:
    match receiver:
        case To.ANY:
            return None
        case To.COORDINATOR:
            accepts = state.is_coordinator or _is_relay_of(state, caller)
            return None if accepts else _not_coordinator(state)


def _check_sender(state: RoundState, caller: Caller, message: Any) -> Refused | None:
    """Return why reports are refused that a member sends for others or for ranks they do not run.

    The coordinator takes the reports of a group from its relay, too.
    """
    member, accepted = state.member_of_pod(caller.pod), state.accepted
    if not isinstance(message, WorkerReports) or accepted is None:
        return None
    for report in message.reports:
        may = member is not None and (
            member.worker == report.worker
            or (
                state.is_coordinator
                and state.member(report.worker) is not None
                and relay_of(accepted, report.worker) == member.worker
            )
        )
        if not may:
            return state.refused(
                Refusal.NOT_MEMBER, f"{caller.pod} is not worker {report.worker} of this round"
            )
        refused = fence(state, report.round) or _foreign_ranks(state, report)
        if refused is not None:
            return refused
    return None


def _foreign_ranks(state: RoundState, report: WorkerReport) -> Refused | None:
    ranks = [d.rank for d in report.dead] + [p.rank for p in report.progress]
    ranks += [s.rank for s in report.stacks] + [s.rank for s in report.saves]
    ranks += [s.shard.rank for s in report.shards]
    own = ranks_of(report.worker, state.procs_per_worker)
    if all(rank in own for rank in ranks):
        return None
    return state.refused(
        Refusal.NOT_MEMBER, f"worker {report.worker} runs ranks {own.start}..{own.stop - 1} only"
    )


def _not_assigned(state: RoundState, caller: Caller, message: CopyRequest) -> Refused | None:
    """Return why a copy is refused, or None.

    ROUND must assign the caller's copies to this worker, and the shard must be of one of the caller's ranks.
    The node tier checks whether there is room.
    """
    member, accepted = state.member_of_pod(caller.pod), state.accepted
    if member is None or accepted is None:
        return _not_member(state, caller)
    if state.worker not in accepted.copies.get(member.worker, ()):
        return state.refused(
            Refusal.NOT_ASSIGNED,
            f"no copies of worker {member.worker} are assigned to worker {state.worker} "
            f"in round {state.round}",
        )
    if message.shard.rank in ranks_of(member.worker, state.procs_per_worker):
        return None
    return state.refused(
        Refusal.NOT_ASSIGNED,
        f"{caller.pod} may not request a copy of rank {message.shard.rank}, which it does not run",
    )


def relay_of(message: Round, worker: Worker) -> Worker:
    """Return the relay of a worker's group. The coordinator is the relay of its own group."""
    group = worker // message.fan_in
    if message.coordinator // message.fan_in == group:
        return message.coordinator
    return Worker(group * message.fan_in)


def next_hop(message: Round, worker: Worker) -> Worker:
    """Return the worker that a worker reports to, and that it gets the plan from."""
    relay = relay_of(message, worker)
    return message.coordinator if relay == worker else relay


def waiting_saves(report: WorkerReport) -> tuple[RankSaves, ...]:
    """Return the saves of the ranks that have steps waiting in slots, which they need for further saves."""
    return tuple(saves for saves in report.saves if saves.waiting)


def urgent_part(report: WorkerReport) -> tuple[object, ...]:
    """Return the part of a report whose changes are sent, and shown to the operator, without delay."""
    return (
        report.dead,
        report.failures,
        report.rehydrate_seconds,
        report.barrier_open,
        report.cannot_restore,
        report.restore_may_succeed,
        report.done,
        report.idle and report.done,
        report.ends,
        report.leaves,
        bool(report.progress),
        report.stacks_token,
    )
