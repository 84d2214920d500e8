"""failurePolicy.rules: which rule applies to which failures, and what its action does."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.support.operator.builders import (
    START,
    condition,
    job,
    now,
    pod,
    sidecar,
    status,
    world_of,
)
from tests.support.operator.decisions import begun, counting

from holdfast_core.api import (
    MAX_RECENT_RESTARTS,
    FailureAction,
    FailureReason,
    FailureRule,
    JobCondition,
    PodConditionPattern,
    RestartRecord,
    RestorePointStatus,
    TrainingJob,
    changed,
    merge_patch,
)
from holdfast_core.ids import Rank, RestartRound, Step, Worker
from holdfast_core.messages.schema import CoordinatorState, DeadRank, RestorePoint
from holdfast_operator.decide.decide import decide
from holdfast_operator.decide.facts.evidence import Failure, with_restart
from holdfast_operator.decide.failures import rule_on
from holdfast_operator.decide.report.conditions import never_applies
from holdfast_operator.model.actions import Decision, EmitEvent, WriteStatus
from holdfast_operator.model.job import JobMemory, NodeView, Observed, PodPhase
from holdfast_operator.model.reasons import Reason

ROUND = RestartRound(3)
FAIL, IGNORE = FailureAction.FAIL_JOB, FailureAction.IGNORE
GANG, POD = FailureAction.RESTART_GANG, FailureAction.RESTART_POD


def on_codes(*codes: int, action: FailureAction = FAIL) -> FailureRule:
    return FailureRule(on_exit_codes=codes, action=action)


def on_reasons(*reasons: FailureReason, action: FailureAction = FAIL) -> FailureRule:
    return FailureRule(on_reasons=reasons, action=action)


def on_condition(kind: str, value: str = "True", *, action: FailureAction = FAIL) -> FailureRule:
    pattern = PodConditionPattern.from_dict({"type": kind, "status": value})
    return FailureRule(on_pod_conditions=(pattern,), action=action)


def dead(worker: int, code: int) -> DeadRank:
    return DeadRank(Rank(worker), Worker(worker), code)


def gang(*ended: DeadRank, rules: tuple[FailureRule, ...] = (), **changes: Any) -> Observed:
    """Return a gang of three that trains in round 3, whose newest step is replicated, and of which these
    ranks have ended."""
    pods = changes.pop("pods", (pod(0), pod(1), pod(2)))
    running = condition(JobCondition.RUNNING, True, Reason.TRAINING)
    begun = changes.pop("status", None) or status(
        ROUND,
        (0, 0, 0),
        restore_point=RestorePointStatus(),
        coordinator=Worker(0),
        conditions=(running,),
    )
    newest = RestorePoint(Step(40), ROUND)
    copied = changes.pop("copied", newest)
    base = Observed(
        job=job(3, begun, rules=rules, **changes.pop("spec", {})),
        pods=pods,
        sidecars=tuple(sidecar(p, ROUND, version=1) for p in pods),
        nodes={f"node-{i}": NodeView(f"node-{i}") for i in range(3)},
        coordinator=CoordinatorState(
            5, ROUND, running=True, dead=ended, last_local=newest, last_replicated=copied
        ),
        memory=JobMemory(round=ROUND, round_seen_at=900.0, failure_seen_at=999.0),
    )
    return replace(base, **changes)


def failed(decision: Decision) -> str:
    """Return the message with which the job failed."""
    [write] = [a for a in decision.actions if isinstance(a, WriteStatus)]
    found = write.status.condition(JobCondition.FAILED)
    assert (found.status, found.reason) == ("True", Reason.FAILURE_RULE)
    return found.message


def hung(*late: int) -> Observed:
    """Return a gang that hangs, in which these ranks are late."""
    observed = gang()
    assert observed.coordinator is not None
    text, ranks = "no rank has finished a step for 61 s", tuple(map(Rank, late))
    return replace(observed, coordinator=replace(observed.coordinator, hang=text, late=ranks))


EVICTED = pod(
    2,
    phase=PodPhase.FAILED,
    reason="Evicted",
    disrupted=True,
    conditions=frozenset({("DisruptionTarget", "True")}),
)
OUT_OF_MEMORY = pod(2, phase=PodPhase.FAILED, reason="OOMKilled", trainer_exit_code=137)
BAD_GPU = pod(1, conditions=frozenset({("example.com/GpuHealthy", "False")}))

APPLIES = {
    "an exit code": (gang(dead(1, 3)), (on_codes(3),), FAIL),
    "one of several exit codes": (gang(dead(1, 7)), (on_codes(3, 7),), FAIL),
    "no exit code of the rule": (gang(dead(1, 4)), (on_codes(3),), None),
    "a process that SIGSEGV ended": (gang(dead(1, -11)), (on_codes(139),), FAIL),
    "a signal is not its own number": (gang(dead(1, -11)), (on_codes(11),), None),
    "a shell that reports the signal": (gang(dead(1, 139)), (on_codes(139),), FAIL),
    "the code of a container": (gang(pods=(pod(0), pod(1), OUT_OF_MEMORY)), (on_codes(137),), FAIL),
    "a reason": (gang(dead(1, 1)), (on_reasons(FailureReason.RANK_FAILED),), FAIL),
    "a hang": (hung(1), (on_reasons(FailureReason.HUNG),), FAIL),
    "a hang without late ranks": (hung(), (on_reasons(FailureReason.HUNG),), FAIL),
    "a hang has no exit code": (hung(1), (on_codes(*range(1, 65)),), None),
    "another reason": (gang(dead(1, 1)), (on_reasons(FailureReason.OOM_KILLED),), None),
    "a pod that ran out of memory": (
        gang(pods=(pod(0), pod(1), OUT_OF_MEMORY)),
        (on_reasons(FailureReason.OOM_KILLED),),
        FAIL,
    ),
    "a disruption by its reason": (
        gang(pods=(pod(0), pod(1), EVICTED)),
        (on_reasons(FailureReason.POD_EVICTED),),
        FAIL,
    ),
    "a pod that is gone": (
        gang(pods=(pod(0), pod(1))),
        (on_reasons(FailureReason.POD_LOST),),
        FAIL,
    ),
    "a pod condition": (
        gang(pods=(pod(0), pod(1), EVICTED)),
        (on_condition("DisruptionTarget"),),
        FAIL,
    ),
    "another status of the condition": (
        gang(dead(1, 1), pods=(pod(0), BAD_GPU, pod(2))),
        (on_condition("example.com/GpuHealthy"),),
        None,
    ),
    "a condition that is False": (
        gang(dead(1, 1), pods=(pod(0), BAD_GPU, pod(2))),
        (on_condition("example.com/GpuHealthy", "False"),),
        FAIL,
    ),
    "a condition of a pod that did not fail": (
        gang(dead(2, 1), pods=(pod(0), BAD_GPU, pod(2))),
        (on_condition("example.com/GpuHealthy", "False"),),
        None,
    ),
    "the first rule that matches": (
        gang(dead(1, 3)),
        (on_codes(3, action=GANG), on_codes(3)),
        GANG,
    ),
    "the order of rules, not of ranks": (
        gang(dead(0, 1), dead(1, 3), dead(2, 1)),
        (on_codes(3), on_codes(1, action=IGNORE)),
        FAIL,
    ),
    "the other order of the same rules": (
        gang(dead(0, 1), dead(1, 3), dead(2, 1)),
        (on_codes(1, action=IGNORE), on_codes(3)),
        IGNORE,
    ),
    "no exit code beside a disruption": (
        gang(dead(0, 3), pods=(pod(0), pod(1))),
        (on_codes(3),),
        None,
    ),
    "no pod condition of a failed rank beside a disruption": (
        gang(dead(1, 1), pods=(pod(0), BAD_GPU)),
        (on_condition("example.com/GpuHealthy", "False"),),
        None,
    ),
}


@pytest.mark.fault("Ranks fail at once with different codes")
@pytest.mark.parametrize("case", APPLIES)
def test_the_first_rule_that_matches_applies(case: str) -> None:
    observed, rules, action = APPLIES[case]
    observed = replace(observed, job=job(3, observed.job.status, rules=rules))
    decision = decide(observed, now())
    if action is FAIL:
        assert "(FailJob)" in failed(decision)
        return
    message = begun(decision).status.condition(JobCondition.RESTARTING)
    assert ("failurePolicy.rules[" in message.message) is (action is not None)
    if action is not None:
        assert f"failurePolicy.rules[0] applies ({action})" in message.message


def test_a_job_that_a_rule_fails_says_which_and_why() -> None:
    observed = gang(dead(1, 3), rules=(on_codes(9), on_codes(3)))
    assert failed(decide(observed, now())) == (
        "failurePolicy.rules[1] applies (FailJob): rank 1 ended with code 3"
    )


def test_a_rule_replaces_the_pods_of_the_workers_that_failed() -> None:
    observed = gang(dead(1, 3), dead(2, 1), rules=(on_codes(3, action=POD),))
    assert begun(decide(observed, now())).status.members == (0, 4, 0)
    assert begun(decide(gang(dead(1, 3)), now())).status.members == (0, 0, 0), "without a rule"


@pytest.mark.fault("A rule would replace the pod with the only copy")
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        pytest.param(
            {"copied": RestorePoint(Step(30), ROUND)},
            "the newest committed step is not known to be readable without them",
            id="the newest step has no copies yet",
        ),
        pytest.param(
            {"spec": {"suspend": True}},
            "no pod is created while spec.suspend is true",
            id="the job is about to be suspended",
        ),
    ],
)
def test_a_pod_that_is_needed_is_not_replaced(changes: dict[str, Any], why: str) -> None:
    observed = gang(dead(1, 3), rules=(on_codes(3, action=POD),), **changes)
    action = begun(decide(observed, now()))
    assert action.status.members == (0, 0, 0)
    assert why in action.status.condition(JobCondition.RESTARTING).message


def test_more_pods_than_copies_cover_are_not_replaced_together() -> None:
    """One copy survives the loss of one pod. The rule names two."""
    observed = gang(dead(1, 3), dead(2, 3), rules=(on_codes(3, action=POD),))
    assert begun(decide(observed, now())).status.members == (0, 0, 0)


def test_an_ignored_restart_does_not_count() -> None:
    observed = gang(dead(1, 3), rules=(on_codes(3, action=IGNORE),), spec={"max_restarts": 0})
    after = begun(decide(observed, now())).status
    assert (after.restarts, counting(after)) == (1, 0)
    assert [(r.round, r.ignored) for r in after.recent_restarts] == [(4, True)]


def test_ignored_restarts_wait_as_others_do() -> None:
    """Otherwise a gang that always ends with this code would restart without a pause and without end."""
    records = tuple(
        RestartRecord(
            round=RestartRound(i),
            at=START + timedelta(seconds=900),
            ignored=True,
        )
        for i in range(1, 4)
    )
    observed = gang(dead(1, 3), rules=(on_codes(3, action=IGNORE),))
    begun_ = changed(observed.job.status, recent_restarts=records)
    observed = replace(observed, job=changed(observed.job, status=begun_))
    observed = replace(observed, memory=replace(observed.memory, failure_seen_at=1000.0))
    assert "the next round begins after" in decide(observed, now()).reason


@pytest.mark.parametrize("limit", [0, 1, 10, 999, 1000])
def test_the_budget_is_exact_at_every_limit(limit: int) -> None:
    """As many restarts as the limit are allowed, and ignored ones displace none of them."""
    at = START + timedelta(seconds=900)
    records: tuple[RestartRecord, ...] = ()
    observed = gang(dead(1, 1), spec={"max_restarts": limit})
    for i in range(limit):
        assert not is_spent(observed, records), i
        for ignored in (False, True):
            record = RestartRecord(round=RestartRound(0), at=at, ignored=ignored)
            records = with_restart(records, record)
    assert len(records) == min(2 * limit, MAX_RECENT_RESTARTS)
    assert is_spent(observed, records)


def is_spent(observed: Observed, records: tuple[RestartRecord, ...]) -> bool:
    begun_ = changed(observed.job.status, recent_restarts=records, last_committed_step=Step(40))
    world = replace(observed, job=changed(observed.job, status=begun_))
    return "more than" in decide(world, now()).reason


def test_records_of_an_older_operator_count() -> None:
    """They have no field `ignored`."""
    raw = {"round": 2, "at": "2026-01-01T00:15:00Z", "reason": "RankFailed"}
    observed = gang(dead(1, 1), spec={"max_restarts": 1})
    old = {**merge_patch(observed.job), "status": {"recentRestarts": [raw]}}
    [record] = TrainingJob.from_dict(old).status.recent_restarts
    assert is_spent(observed, (record,))


def test_every_reason_of_a_rule_is_one_that_failures_have() -> None:
    assert {r.value for r in FailureReason} <= {r.value for r in Reason}


def test_the_gang_restarts_where_no_rule_is_written() -> None:
    failure = Failure(Reason.RANK_FAILED, "rank 1 ended with code 1", Worker(1), exit_code=1)
    ruling = rule_on(world_of(gang(dead(1, 1))), (failure,))
    assert (ruling.action, ruling.matched, ruling.note) == (GANG, None, "")


NEVER = {
    "no rules": ((), ()),
    "different codes": ((on_codes(1), on_codes(2)), ()),
    "the same code again": ((on_codes(1), on_codes(1)), (1,)),
    "a part of an earlier rule": ((on_codes(1, 2), on_codes(2, action=IGNORE)), (1,)),
    "two earlier rules together": ((on_codes(1), on_codes(2), on_codes(1, 2)), (2,)),
    "a code that is left": ((on_codes(1), on_codes(1, 2)), ()),
    "a reason again": (
        (on_reasons(FailureReason.NODE_LOST), on_reasons(FailureReason.NODE_LOST, action=IGNORE)),
        (1,),
    ),
    "another status of a condition": ((on_condition("A"), on_condition("A", "False")), ()),
    "a condition again": ((on_condition("A"), on_condition("A", action=IGNORE)), (1,)),
}


@pytest.mark.parametrize("case", NEVER)
def test_a_rule_that_can_never_match_is_found(case: str) -> None:
    rules, idle = NEVER[case]
    assert never_applies(rules) == idle


@pytest.mark.fault("A rule can never match")
def test_a_rule_that_can_never_match_is_reported_until_it_is_gone() -> None:
    rules = (on_codes(1), on_codes(1, action=IGNORE))
    first = decide(gang(rules=rules), now())
    [write] = [a for a in first.actions if isinstance(a, WriteStatus)]
    found = write.status.condition(JobCondition.FAILURE_RULES_APPLY)
    assert (found.status, found.reason) == ("False", Reason.RULE_NEVER_MATCHES)
    assert "failurePolicy.rules[1] can never match" in found.message
    assert [e.reason for e in first.actions if isinstance(e, EmitEvent)] == [found.reason]
    assert write.status.is_true(JobCondition.RUNNING), "the job goes on"

    repaired = gang(rules=rules[:1], status=write.status)
    [write] = [a for a in decide(repaired, now()).actions if isinstance(a, WriteStatus)]
    assert write.status.is_true(JobCondition.FAILURE_RULES_APPLY)
    assert gang().job.status.condition(JobCondition.FAILURE_RULES_APPLY) is None
