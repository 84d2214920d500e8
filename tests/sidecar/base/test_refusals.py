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
    Rank,
    RestartRound,
    ShardRef,
    Step,
    TierName,
    Worker,
)
from holdfast_core.messages.schema import (
    CopyRequest,
    DeadRank,
    FinishCommit,
    GangRequest,
    Progress,
    Prune,
    RankSaves,
    Refusal,
    ReportedShard,
    Round,
    Seal,
    ShardInfo,
    WorkerReport,
    WorkerReports,
)
from holdfast_sidecar.base.rounds import (
    OPERATOR,
    RULES,
    Caller,
    RoundState,
    refuse,
    refuse_caller,
    refuse_plan,
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
        copies={Worker(w): (Worker((w + 1) % 3),) for w in range(3)},
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


def report(round_: RestartRound = NOW, worker: int = 0, rank: int = 0) -> WorkerReports:
    return reports_of(
        WorkerReport(
            round_,
            Worker(worker),
            progress=(Progress(round_, Rank(rank), Step(1)),),
            dead=(DeadRank(Rank(rank), Worker(worker), 1),),
        )
    )


def reports_of(*reports: WorkerReport) -> WorkerReports:
    return WorkerReports(reports[0].round, reports)


def merged(*workers: int) -> WorkerReports:
    """Return what a relay sends for these workers."""
    return WorkerReports(NOW, tuple(WorkerReport(NOW, Worker(worker)) for worker in workers))


FOREIGN = {
    "progress": WorkerReport(NOW, Worker(0), progress=(Progress(NOW, Rank(9), Step(1)),)),
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


def finish(round_: RestartRound = NOW) -> FinishCommit:
    return FinishCommit(round_, "{}")


def ask(round_: RestartRound = NOW) -> GangRequest:
    return GangRequest(round_, "token")


def prune(round_: RestartRound = NOW) -> Prune:
    return Prune(round_, ())


def in_groups(worker: int) -> RoundState:
    """Return the state of a worker of six in groups of two. Worker 1 coordinates, 2 and 4 are relays."""
    message = round_message(5, workers=6, version=3, coordinator=Worker(1), fan_in=2)
    return accepted(message, worker=worker, procs_per_worker=2)


GROUPED = [Caller(f"gpt-{w}-r0") for w in range(6)]


SUSPECT = ShardRef(JobUid("job"), Step(1), NOW, Rank(0), DIGEST)


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
    # a report of ranks that its worker does not run
    *(
        Case(
            f"report: {name} of a foreign rank",
            COORDINATOR,
            MEMBER[0],
            reports_of(message),
            Refusal.NOT_MEMBER,
        )
        for name, message in FOREIGN.items()
    ),
    # save-now and stop
    *fenced("ask", ask, 1, OPERATOR),
    Case("ask: operator elsewhere", PLAIN, OPERATOR, ask(), Refusal.NOT_COORDINATOR),
    Case("ask: from a member", COORDINATOR, MEMBER[0], ask(), Refusal.NOT_MEMBER),
    # prune of the object store
    *fenced("prune", prune, 1, OPERATOR),
    Case("prune: elsewhere", PLAIN, OPERATOR, prune(), Refusal.NOT_COORDINATOR),
    Case("prune: from a member", COORDINATOR, MEMBER[0], prune(), Refusal.NOT_MEMBER),
    # the rest
    Case("suspect: a member", PLAIN, MEMBER[1], SUSPECT, None),
    Case("suspect: a former member", PLAIN, STRANGER, SUSPECT, Refusal.NOT_MEMBER),
    # relays
    Case("reports: of a group", in_groups(1), GROUPED[2], merged(2, 3), None),
    Case("reports: none", in_groups(1), GROUPED[2], merged(), None),
    Case("reports: another group", in_groups(1), GROUPED[2], merged(2, 5), Refusal.NOT_MEMBER),
    Case("reports: from no relay", in_groups(1), GROUPED[3], merged(3, 2), Refusal.NOT_MEMBER),
    Case("reports: no such worker", in_groups(1), GROUPED[4], merged(4, 6), Refusal.NOT_MEMBER),
    Case("reports: from a stranger", COORDINATOR, STRANGER, merged(0), Refusal.NOT_MEMBER),
    Case("reports: elsewhere", in_groups(4), GROUPED[2], merged(3), Refusal.NOT_COORDINATOR),
    Case("reports: of others, to a relay", in_groups(2), GROUPED[3], merged(2), Refusal.NOT_MEMBER),
    Case(
        "reports: one of an older round",
        in_groups(1),
        GROUPED[2],
        WorkerReports(NOW, (WorkerReport(OLD, Worker(2)),)),
        Refusal.STALE_ROUND,
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
    Case("suspect: sealed", sealed(0), MEMBER[1], SUSPECT, Refusal.SEALED),
]


@pytest.mark.fault("A message or a copy belongs to an older round")
@pytest.mark.fault("A relay sends reports of workers of another group")
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


@pytest.mark.parametrize(
    ("state", "caller", "round_", "expected"),
    [
        pytest.param(accepting(1), MEMBER[0], NOW, None, id="the coordinator"),
        pytest.param(accepting(1), STRANGER, NOW, Refusal.NOT_MEMBER, id="a former member"),
        pytest.param(accepting(1), OPERATOR, NOW, Refusal.NOT_MEMBER, id="the operator"),
        pytest.param(accepting(0), MEMBER[2], NOW, Refusal.NOT_COORDINATOR, id="another"),
        pytest.param(accepting(1), MEMBER[0], OLD, Refusal.STALE_ROUND, id="older"),
        pytest.param(accepting(1), MEMBER[0], NEW, Refusal.FUTURE_ROUND, id="newer"),
        pytest.param(sealed(1), MEMBER[0], NOW, Refusal.SEALED, id="sealed"),
        pytest.param(in_groups(4), GROUPED[5], NOW, None, id="its relay"),
        pytest.param(in_groups(4), GROUPED[3], NOW, Refusal.NOT_COORDINATOR, id="another relay"),
    ],
)
def test_plan_poll(
    state: RoundState, caller: Caller, round_: RestartRound, expected: Refusal | None
) -> None:
    refused = refuse_plan(state, caller, round_)
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
        "report: elsewhere",
        "reports: elsewhere",
        "reports: from a stranger",
        "report: to another relay",
    ],
)
def test_a_member_that_sends_it_elsewhere_is_refused_before_its_body_is_read(name: str) -> None:
    (case,) = (case for case in CASES if case.name == name)
    early = refuse_caller(case.state, case.caller, type(case.message), NOW)
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
