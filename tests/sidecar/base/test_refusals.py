"""The refusal table of docs/protocol.md: one case for each message, state of the receiver, and sender."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from tests.support.sidecar.rounds import accepted, round_message

from holdfast_core.format.rank_layout import LayoutDigests
from holdfast_core.ids import (
    FIRST_SPARE,
    Digest,
    JobUid,
    Level,
    Rank,
    RestartRound,
    ShardRef,
    Step,
    TierName,
    Worker,
)
from holdfast_core.messages.report import Letter, Relay
from holdfast_core.messages.schema import (
    CopyAssignment,
    CopyRequest,
    DeadRank,
    FinishCommit,
    GangRequest,
    LevelReached,
    ManifestPut,
    Plan,
    Prune,
    RankProgress,
    RankSaves,
    Refusal,
    ReportedShard,
    Round,
    Seal,
    ShardInfo,
    Suspect,
    WorkerReport,
)
from holdfast_sidecar.base.rounds import (
    OPERATOR,
    RULES,
    Caller,
    RoundState,
    refuse,
    refuse_caller,
    refuse_reader,
    refuse_rendezvous,
    refuse_state,
)

DIGEST = Digest("b3:" + "0" * 64)
NOW, OLD, NEW = RestartRound(5), RestartRound(4), RestartRound(6)


def round_of_three(round_: int = 5, version: int = 3) -> Round:
    """Return a ROUND with coordinator 1 and store host 2, where copies go from 0 to 1 to 2 to 0."""
    return round_message(
        round_,
        workers=3,
        version=version,
        coordinator=Worker(1),
        store_host=Worker(2),
        copies=tuple(CopyAssignment(Worker(w), Worker((w + 1) % 3)) for w in range(3)),
    )


def accepting(worker: int) -> RoundState:
    return accepted(round_of_three(), worker=worker, procs_per_worker=2)


def sealed(worker: int) -> RoundState:
    return RoundState(Worker(worker), 2, NOW, f"gpt-{worker}-r0")


def spare(pod: str) -> RoundState:
    """Return the state of a spare pod of this name."""
    return RoundState(FIRST_SPARE, 2, NOW, pod)


def restarted(floor: int) -> RoundState:
    """Return the state of a process that has just started; its round.json contains a ROUND of that
    version."""
    return RoundState(Worker(0), 2, NOW, "gpt-0-r0", version_floor=floor)


COORDINATOR = accepting(1)
PLAIN = accepting(0)
MEMBER = [Caller(f"gpt-{w}-r0") for w in range(3)]
STRANGER = Caller("gpt-0-r9")


def copy(round_: RestartRound = NOW, rank: int = 0) -> CopyRequest:
    return CopyRequest(round_, ShardRef(JobUid("job"), Step(7), OLD, Rank(rank), DIGEST))


def report(round_: RestartRound = NOW, worker: int = 0, rank: int = 0) -> WorkerReport:
    return WorkerReport(
        round_,
        Worker(worker),
        progress=(RankProgress(Rank(rank), Step(1)),),
        dead=(DeadRank(Rank(rank), Worker(worker), 1),),
    )


FOREIGN = {
    "progress": WorkerReport(NOW, Worker(0), progress=(RankProgress(Rank(9), Step(1)),)),
    "death": WorkerReport(NOW, Worker(0), dead=(DeadRank(Rank(9), Worker(0), 1),)),
    "shards": WorkerReport(
        NOW,
        Worker(0),
        shards=(
            ReportedShard(
                Step(7),
                NOW,
                ShardInfo(Rank(9), 10, DIGEST, DIGEST),
                LayoutDigests(DIGEST, DIGEST, DIGEST),
            ),
        ),
    ),
    "saves": WorkerReport(NOW, Worker(0), saves=(RankSaves(Rank(9), Step(1)),)),
}


def manifest(round_: RestartRound = NOW) -> ManifestPut:
    return ManifestPut(round_, Step(7), "{}")


def finish(round_: RestartRound = NOW) -> FinishCommit:
    return FinishCommit(round_, Step(7), OLD, "{}")


def plan(round_: RestartRound = NOW) -> Plan:
    return Plan(round_, (LevelReached(Step(7), NOW, Level.LOCAL),))


def ask(round_: RestartRound = NOW) -> GangRequest:
    return GangRequest(round_, "token")


def prune(round_: RestartRound = NOW) -> Prune:
    return Prune(round_, ())


def relayed(round_: RestartRound = NOW, *workers: int) -> Relay:
    letters = tuple(Letter("/v1/report", (Worker(w),), b"{}") for w in workers)
    return Relay(round_, letters)


def in_groups(worker: int) -> RoundState:
    """Return the state of a worker of six in groups of two. Worker 1 coordinates, 2 and 4 are relays."""
    message = round_message(5, workers=6, version=3, coordinator=Worker(1), fan_in=2)
    return accepted(message, worker=worker, procs_per_worker=2)


GROUPED = [Caller(f"gpt-{w}-r0") for w in range(6)]


SUSPECT = Suspect(JobUid("job"), Step(1), NOW, Rank(0), DIGEST)


@dataclass(frozen=True)
class Case:
    name: str
    state: RoundState
    caller: Caller
    message: Any
    expected: Refusal | None


def fenced(name: str, make: Any, receiver: int, caller: Caller) -> list[Case]:
    """Return the cases that all messages that write have in common."""
    return [
        Case(f"{name}: current round", accepting(receiver), caller, make(), None),
        Case(f"{name}: older round", accepting(receiver), caller, make(OLD), Refusal.STALE_ROUND),
        Case(f"{name}: newer round", accepting(receiver), caller, make(NEW), Refusal.FUTURE_ROUND),
        Case(f"{name}: sealed", sealed(receiver), caller, make(), Refusal.SEALED),
        Case(
            f"{name}: sealed, older round",
            sealed(receiver),
            caller,
            make(OLD),
            Refusal.STALE_ROUND,
        ),
    ]


CASES = [
    # SEAL
    Case("seal: newer", PLAIN, OPERATOR, Seal(NEW), None),
    Case("seal: the same again", PLAIN, OPERATOR, Seal(NOW), None),
    Case("seal: older", PLAIN, OPERATOR, Seal(OLD), Refusal.STALE_ROUND),
    Case("seal: older, sealed", sealed(0), OPERATOR, Seal(OLD), Refusal.STALE_ROUND),
    Case("seal: from a member", PLAIN, MEMBER[1], Seal(NEW), Refusal.NOT_MEMBER),
    # ROUND
    Case("round: sealed for it", sealed(0), OPERATOR, round_of_three(), None),
    Case("round: higher version", PLAIN, OPERATOR, round_of_three(version=4), None),
    Case("round: same version", PLAIN, OPERATOR, round_of_three(version=3), Refusal.NOT_NEWER),
    Case("round: lower version", PLAIN, OPERATOR, round_of_three(version=2), Refusal.NOT_NEWER),
    Case("round: older", PLAIN, OPERATOR, round_of_three(4, 9), Refusal.STALE_ROUND),
    Case("round: never sealed", PLAIN, OPERATOR, round_of_three(6), Refusal.NOT_SEALED),
    Case("round: repeated after a restart", restarted(3), OPERATOR, round_of_three(), None),
    Case(
        "round: older version after a restart",
        restarted(4),
        OPERATOR,
        round_of_three(),
        Refusal.NOT_NEWER,
    ),
    Case("round: a spare that it names", spare("gpt-2-r0"), OPERATOR, round_of_three(), None),
    Case(
        "round: a spare that it does not name",
        spare("gpt-s0-r0"),
        OPERATOR,
        round_of_three(),
        Refusal.NOT_MEMBER,
    ),
    Case(
        "round: another worker than before",
        replace(sealed(1), pod="gpt-2-r0"),
        OPERATOR,
        round_of_three(),
        Refusal.BAD_REQUEST,
    ),
    # between SEAL and ROUND
    Case("finish: sealed for it", sealed(0), OPERATOR, finish(), None),
    Case("finish: sealed for an older one", sealed(0), OPERATOR, finish(NEW), Refusal.NOT_SEALED),
    Case("finish: older", sealed(0), OPERATOR, finish(OLD), Refusal.STALE_ROUND),
    Case("finish: after ROUND", PLAIN, OPERATOR, finish(), Refusal.NOT_SEALED),
    Case("finish: from a member", sealed(0), MEMBER[1], finish(), Refusal.NOT_MEMBER),
    Case("copy: to a spare", spare("gpt-2-r0"), MEMBER[1], copy(rank=2), Refusal.SEALED),
    Case("round: from a member", sealed(0), MEMBER[1], round_of_three(), Refusal.NOT_MEMBER),
    # messages to the coordinator
    *fenced("report", report, 1, MEMBER[0]),
    *[
        case
        for name, make in (("report", report),)
        for case in (
            Case(f"{name}: from a stranger", COORDINATOR, STRANGER, make(), Refusal.NOT_MEMBER),
            Case(f"{name}: elsewhere", PLAIN, MEMBER[0], make(), Refusal.NOT_COORDINATOR),
            Case(
                f"{name}: for another worker",
                COORDINATOR,
                MEMBER[0],
                make(worker=2, rank=4),
                Refusal.NOT_MEMBER,
            ),
            Case(
                f"{name}: for a rank of another worker",
                COORDINATOR,
                MEMBER[0],
                make(rank=2),
                Refusal.NOT_MEMBER,
            ),
            Case(f"{name}: of its second rank", COORDINATOR, MEMBER[0], make(rank=1), None),
        )
    ],
    # copies
    *fenced("copy", copy, 1, MEMBER[0]),
    Case("copy: of its second rank", accepting(1), MEMBER[0], copy(rank=1), None),
    Case("copy: of another's rank", accepting(1), MEMBER[0], copy(rank=2), Refusal.NOT_ASSIGNED),
    Case("copy: not assigned", accepting(2), MEMBER[0], copy(), Refusal.NOT_ASSIGNED),
    Case("copy: from a stranger", accepting(1), STRANGER, copy(), Refusal.NOT_MEMBER),
    Case("copy: from the operator", accepting(1), OPERATOR, copy(), Refusal.NOT_MEMBER),
    # messages of the coordinator
    *fenced("manifest", manifest, 0, MEMBER[1]),
    *fenced("plan", plan, 0, MEMBER[1]),
    Case("manifest: to itself", COORDINATOR, MEMBER[1], manifest(), None),
    Case("manifest: from another member", PLAIN, MEMBER[2], manifest(), Refusal.NOT_MEMBER),
    Case("manifest: from a stranger", PLAIN, STRANGER, manifest(), Refusal.NOT_MEMBER),
    Case("manifest: from the operator", PLAIN, OPERATOR, manifest(), Refusal.NOT_MEMBER),
    Case("plan: from another member", PLAIN, MEMBER[2], plan(), Refusal.NOT_MEMBER),
    # a report of ranks that its worker does not run
    *(
        Case(
            f"report: {name} of a foreign rank", COORDINATOR, MEMBER[0], message, Refusal.NOT_MEMBER
        )
        for name, message in FOREIGN.items()
    ),
    # save-now and stop
    *fenced("ask", ask, 1, OPERATOR),
    Case("ask: operator elsewhere", PLAIN, OPERATOR, ask(), Refusal.NOT_COORDINATOR),
    Case("ask: handed on to rank 0", PLAIN, MEMBER[1], ask(), None),
    Case("ask: handed on elsewhere", accepting(2), MEMBER[1], ask(), Refusal.NOT_COORDINATOR),
    Case("ask: from another member", PLAIN, MEMBER[2], ask(), Refusal.NOT_MEMBER),
    # prune of the object store
    *fenced("prune", prune, 1, OPERATOR),
    Case("prune: elsewhere", PLAIN, OPERATOR, prune(), Refusal.NOT_COORDINATOR),
    Case("prune: from a member", COORDINATOR, MEMBER[0], prune(), Refusal.NOT_MEMBER),
    # the rest
    Case("suspect: a member", PLAIN, MEMBER[1], SUSPECT, None),
    Case("suspect: a former member", PLAIN, STRANGER, SUSPECT, Refusal.NOT_MEMBER),
    # relays
    Case("relay: current round", in_groups(1), GROUPED[2], relayed(), None),
    Case("relay: older round", in_groups(1), GROUPED[2], relayed(OLD), Refusal.STALE_ROUND),
    Case("relay: newer round", in_groups(1), GROUPED[2], relayed(NEW), Refusal.FUTURE_ROUND),
    Case("relay: sealed", sealed(1), MEMBER[0], relayed(), Refusal.SEALED),
    Case("relay: in a single group", COORDINATOR, MEMBER[0], relayed(), Refusal.NOT_MEMBER),
    Case(
        "relay: up, empty, from no relay", in_groups(1), GROUPED[3], relayed(), Refusal.NOT_MEMBER
    ),
    Case("relay: from a stranger", COORDINATOR, STRANGER, relayed(), Refusal.NOT_MEMBER),
    Case("relay: up", in_groups(1), GROUPED[2], relayed(NOW, 2, 3), None),
    Case("relay: up, another group", in_groups(1), GROUPED[2], relayed(NOW, 5), Refusal.NOT_MEMBER),
    Case("relay: up, from no relay", in_groups(1), GROUPED[3], relayed(NOW, 3), Refusal.NOT_MEMBER),
    Case(
        "relay: up, no such worker", in_groups(1), GROUPED[4], relayed(NOW, 6), Refusal.NOT_MEMBER
    ),
    Case(
        "relay: up, elsewhere", in_groups(4), GROUPED[2], relayed(NOW, 3), Refusal.NOT_COORDINATOR
    ),
    Case("relay: down", in_groups(2), GROUPED[1], relayed(NOW, 3), None),
    Case(
        "relay: down, another group", in_groups(2), GROUPED[1], relayed(NOW, 4), Refusal.NOT_MEMBER
    ),
    Case("relay: down, to no relay", in_groups(3), GROUPED[1], relayed(NOW, 3), Refusal.NOT_MEMBER),
    Case(
        "relay: a path with a host",
        in_groups(2),
        GROUPED[1],
        Relay(NOW, (Letter("@10.0.0.9/v1/plan", (Worker(3),), b"{}"),)),
        Refusal.BAD_REQUEST,
    ),
    Case(
        "relay: a letter without a sender",
        in_groups(1),
        GROUPED[2],
        Relay(NOW, (Letter("/v1/report", (), b"{}"),)),
        Refusal.BAD_REQUEST,
    ),
    Case("report: to its relay", in_groups(2), GROUPED[3], report(worker=3, rank=6), None),
    Case(
        "report: to another relay",
        in_groups(4),
        GROUPED[3],
        report(worker=3, rank=6),
        Refusal.NOT_COORDINATOR,
    ),
    Case("report: past its relay", in_groups(1), GROUPED[3], report(worker=3, rank=6), None),
    Case("manifest: from its relay", in_groups(3), GROUPED[2], manifest(), None),
    Case("manifest: from another relay", in_groups(3), GROUPED[4], manifest(), Refusal.NOT_MEMBER),
    Case("suspect: sealed", sealed(0), MEMBER[1], SUSPECT, Refusal.SEALED),
]


@pytest.mark.fault("A message or a copy belongs to an older round")
@pytest.mark.fault("A relay sends letters of workers of another group")
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_refusal(case: Case) -> None:
    """Before the body is read, nothing is refused that is served, and nothing for another reason."""
    refused = refuse(case.state, case.caller, case.message)
    assert (None if refused is None else refused.code) == case.expected
    if refused is not None:
        assert refused.round == case.state.round
        assert refused.version == case.state.version
    round_ = getattr(case.message, "round", None)
    early = refuse_caller(case.state, case.caller, type(case.message), round_)
    assert early is None or early.code == case.expected


def test_every_message_has_cases() -> None:
    assert {type(case.message) for case in CASES} == set(RULES)


@pytest.mark.parametrize(
    ("state", "caller", "expected"),
    [
        pytest.param(accepting(1), OPERATOR, None, id="the coordinator"),
        pytest.param(accepting(1), MEMBER[0], None, id="a member asks"),
        pytest.param(accepting(1), STRANGER, Refusal.NOT_MEMBER, id="a former member asks"),
        pytest.param(accepting(0), OPERATOR, Refusal.NOT_COORDINATOR, id="another"),
        pytest.param(sealed(1), OPERATOR, Refusal.NOT_COORDINATOR, id="sealed"),
    ],
)
def test_state_poll(state: RoundState, caller: Caller, expected: Refusal | None) -> None:
    refused = refuse_state(state, caller)
    assert (None if refused is None else refused.code) == expected


@pytest.mark.parametrize(
    ("state", "caller", "round_", "expected"),
    [
        pytest.param(accepting(2), MEMBER[0], NOW, None, id="the store host"),
        pytest.param(accepting(2), STRANGER, NOW, Refusal.NOT_MEMBER, id="a former member"),
        pytest.param(accepting(0), MEMBER[0], NOW, Refusal.NOT_FOUND, id="another"),
        pytest.param(accepting(2), MEMBER[0], OLD, Refusal.STALE_ROUND, id="older"),
        pytest.param(accepting(2), MEMBER[0], NEW, Refusal.FUTURE_ROUND, id="newer"),
        pytest.param(sealed(2), MEMBER[0], NOW, Refusal.SEALED, id="sealed"),
        pytest.param(in_groups(4), GROUPED[5], NOW, None, id="its relay"),
        pytest.param(in_groups(4), GROUPED[3], NOW, Refusal.NOT_FOUND, id="another relay"),
    ],
)
def test_rendezvous(
    state: RoundState, caller: Caller, round_: RestartRound, expected: Refusal | None
) -> None:
    refused = refuse_rendezvous(state, caller, round_)
    assert (None if refused is None else refused.code) == expected


@pytest.mark.fault("A caller asks for shards that it may not read")
@pytest.mark.parametrize(
    ("state", "caller", "expected"),
    [
        pytest.param(accepting(1), OPERATOR, None, id="the operator"),
        pytest.param(sealed(1), OPERATOR, None, id="the operator, sealed"),
        pytest.param(accepting(1), MEMBER[2], None, id="a member"),
        pytest.param(accepting(1), STRANGER, Refusal.NOT_MEMBER, id="a former member"),
        pytest.param(sealed(1), MEMBER[2], Refusal.SEALED, id="a member, sealed"),
        pytest.param(sealed(1), STRANGER, Refusal.SEALED, id="a former member, sealed"),
    ],
)
def test_readers(state: RoundState, caller: Caller, expected: Refusal | None) -> None:
    refused = refuse_reader(state, caller)
    assert (None if refused is None else refused.code) == expected


@pytest.mark.parametrize(
    "name",
    [
        "relay: in a single group",
        "relay: up, empty, from no relay",
        "relay: up, elsewhere",
        "relay: down, to no relay",
        "report: to another relay",
    ],
)
def test_a_member_that_sends_it_elsewhere_is_refused_before_its_body_is_read(name: str) -> None:
    (case,) = (case for case in CASES if case.name == name)
    early = refuse_caller(case.state, case.caller, type(case.message), NOW)
    assert early is not None
    assert early.code == case.expected


@pytest.mark.fault("A former member sends each kind of message, whatever round it names")
@pytest.mark.fault("A pod of an older round sends old shards")
@pytest.mark.parametrize("kind", RULES, ids=lambda kind: kind.__name__)
def test_a_former_member_is_refused_before_its_body_is_read(kind: type[object]) -> None:
    """This holds whichever round the message names."""
    for state in (PLAIN, sealed(0)):
        for round_ in (None, OLD, NOW, NEW):
            assert refuse_caller(state, STRANGER, kind, round_) is not None, (state, round_)


def test_tier_names_are_not_refusals() -> None:
    """Replies contain codes and tiers as strings, so no code may equal a tier."""
    assert not {str(c) for c in Refusal} & {str(t) for t in TierName}


def test_a_spare_becomes_the_worker_that_round_names_and_stays_it() -> None:
    message = round_of_three()
    becomes = spare("gpt-2-r0").accepting(message, message.content_digest())
    assert becomes.worker == 2
    assert list(becomes.own_ranks) == [4, 5]
    assert becomes.sealed_for(NEW).worker == 2
    assert sealed(1).accepting(message, message.content_digest()).worker == 1
