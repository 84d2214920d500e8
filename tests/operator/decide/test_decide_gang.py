"""Pods, seals, certificates, ROUND, coordinator and copies."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.operator.builders import (
    checkpoint,
    condition,
    held,
    job,
    manifest,
    now,
    pod,
    sidecar,
    silent,
    status,
    world_of,
)
from tests.support.operator.decisions import of_kind

from holdfast_core.api import (
    Compression,
    JobCondition,
    LineageEntry,
    PeerEncryption,
    RestorePointStatus,
    changed,
)
from holdfast_core.ids import Digest, RestartRound, Step, Worker
from holdfast_core.messages.codec import MAX_MANY, dumps, loads
from holdfast_core.messages.schema import Round
from holdfast_operator.decide.decide import decide
from holdfast_operator.decide.gang import place_copies, round_message
from holdfast_operator.model.actions import BeginRound, ChooseRestorePoint, Delete, WriteStatus
from holdfast_operator.model.job import (
    AckedRound,
    JobMemory,
    NodeView,
    Observed,
    PodView,
    SidecarView,
)
from holdfast_operator.model.reasons import Reason

MEMORY = JobMemory(round=RestartRound(1), round_seen_at=999.0)
CHOSEN = status(1, (0, 1), restore_point=RestorePointStatus(), coordinator=Worker(0))


def acked(observed: Observed, of: SidecarView, **changes: Any) -> SidecarView:
    """Return the sidecar after it accepted the current ROUND."""
    digest = round_message(world_of(observed)).content_digest()
    assert of.inventory is not None
    return replace(
        of,
        inventory=replace(of.inventory, version=1),
        acked=replace(AckedRound(RestartRound(1), 1, digest), **changes),
    )


def test_a_new_job_begins_round_0_and_touches_nothing_else() -> None:
    decision = decide(Observed(job=job(3)), now())
    (action,) = of_kind(decision.actions, BeginRound)
    assert action.status.restart_round == 0
    assert action.status.members == (0, 0, 0)
    assert action.status.phase == "Starting"
    assert action.status.is_true("Accepted")
    assert not of_kind(decision.actions, "create Pod", "create Service")


def test_the_first_round_is_above_what_sidecars_remember() -> None:
    old = pod(0, 4)
    decision = decide(Observed(job=job(1), pods=(old,), sidecars=(sidecar(old, 6),)), now())
    (action,) = of_kind(decision.actions, BeginRound)
    assert action.status.restart_round == 7
    assert action.status.members == (4,), "its pod may hold the newest copies"


def test_a_new_round_creates_service_certificates_and_pods() -> None:
    decision = decide(Observed(job=job(2, status(0))), now())
    assert of_kind(decision.actions, "create Service")[0].name == "job-l2msg4-gang"
    (secret,) = of_kind(decision.actions, "create Secret")
    assert secret.name == "job-l2msg4-certs-0-r0"
    assert secret.leaves == ("job-l2msg4-0-r0", "job-l2msg4-1-r0")
    assert [a.name for a in of_kind(decision.actions, "create Pod")] == [
        "job-l2msg4-0-r0",
        "job-l2msg4-1-r0",
    ]


def test_recovery_seals_survivors_creates_the_missing_and_deletes_the_obsolete() -> None:
    old, survivor = pod(1, 0), pod(0)
    observed = Observed(
        job=job(2, status(1, (0, 1))),
        pods=(survivor, old),
        sidecars=(silent(survivor), silent(old)),
        memory=MEMORY,
    )
    actions = decide(observed, now()).actions
    (seal,) = of_kind(actions, "call /v1/seal")
    assert (seal.worker, seal.message.round, seal.pod_uid) == (0, 1, survivor.uid)
    assert [a.name for a in of_kind(actions, "create Pod")] == ["job-l2msg4-1-r1"]
    assert of_kind(actions, "delete Pod") == [
        Delete("Pod", "job-l2msg4-1-r0", old.uid, "", force=False)
    ]
    assert not of_kind(actions, "call /v1/round", ChooseRestorePoint)


@pytest.mark.parametrize(
    ("lost", "terminating", "expected"),
    [
        pytest.param(False, False, [False], id="deleted with grace"),
        pytest.param(False, True, [], id="on its way out"),
        pytest.param(True, False, [True], id="by force from a lost node"),
        pytest.param(True, True, [True], id="no kubelet will confirm"),
    ],
)
def test_obsolete_pods(lost: bool, terminating: bool, expected: list[bool]) -> None:
    old = pod(1, 0, terminating=terminating)
    observed = Observed(
        job=job(2, status(1, (0, 1), lineage=(LineageEntry(round=RestartRound(0)),))),
        pods=(pod(0), old, pod(1, 1, node="node-9")),
        sidecars=(silent(old, 900.0), silent(pod(0))),
        nodes={"node-1": NodeView("node-1", lost_because="is gone" if lost else "")},
        memory=MEMORY,
    )
    assert [a.force for a in of_kind(decide(observed, now()).actions, "delete Pod")] == expected


RUNNING = condition(JobCondition.RUNNING, True, Reason.TRAINING)


@pytest.mark.parametrize(
    ("running", "coordinator", "seconds", "calls"),
    [
        pytest.param(True, silent(pod(0)), 0.0, False, id="not answered yet"),
        pytest.param(True, None, 0.0, False, id="without an address yet"),
        pytest.param(True, None, 11.0, True, id="without an address for long"),
        pytest.param(True, silent(pod(0)), 300.0, False, id="its call waits for a slot for long"),
        pytest.param(True, silent(pod(0), 990.0), 0.0, True, id="unreachable"),
        pytest.param(True, sidecar(pod(0), 1), 0.0, True, id="answers, but not as coordinator"),
        pytest.param(False, silent(pod(0)), 0.0, True, id="the gang starts"),
    ],
)
def test_a_new_process_first_waits_for_the_coordinator_of_a_running_gang(
    running: bool, coordinator: SidecarView | None, seconds: float, calls: bool
) -> None:
    conditions = (RUNNING,) if running else ()
    observed = Observed(
        job=job(2, changed(CHOSEN, conditions=conditions)),
        pods=(pod(0), pod(1, 1)),
        sidecars=(*(() if coordinator is None else (coordinator,)), silent(pod(1, 1))),
        memory=replace(MEMORY, round_seen_at=1000.0 - seconds),
    )
    found = of_kind(decide(observed, now()).actions, "call /v1/seal", "call /v1/round")
    assert bool(found) == calls


def test_choosing_touches_no_pods() -> None:
    survivor = pod(0)
    seen = sidecar(
        survivor, 1, manifests=[manifest(10, 0)], shards=[held(10, 0, r) for r in (0, 1)]
    )
    obsolete = pod(1, 0)
    observed = Observed(
        job=job(2, status(1, (0, 1), step=Step(17), last_committed_step=Step(10))),
        pods=(survivor, pod(1, 1), obsolete),
        sidecars=(seen,),
        memory=MEMORY,
    )
    actions = decide(observed, now()).actions
    (choice,) = of_kind(actions, ChooseRestorePoint)
    assert choice.status.restore_point.step == 10
    assert choice.status.coordinator == 0
    assert choice.status.step == 10
    assert [(e.round, str(e.base)) for e in choice.status.lineage] == [(1, "s10-r0")]
    assert not of_kind(actions, "create Pod", "delete Pod", "call /v1/seal", WriteStatus)


# --------------------------------------------------------------------------- ROUND


def gang(**changes: Any) -> Observed:
    pods = (pod(0), pod(1, 1))
    base = Observed(
        job=job(2, CHOSEN),
        pods=pods,
        sidecars=tuple(sidecar(p, 1) for p in pods),
        memory=MEMORY,
    )
    return replace(base, **changes)


def test_round_goes_to_every_member() -> None:
    sent = of_kind(decide(gang(), now()).actions, "call /v1/round")
    assert [a.worker for a in sent] == [0, 1]
    message = sent[0].message.message
    assert (message.round, message.version, message.coordinator, message.store_host) == (1, 1, 0, 0)
    assert [(m.worker, m.pod, m.address) for m in message.members] == [
        (0, "job-l2msg4-0-r0", "10.0.0.0"),
        (1, "job-l2msg4-1-r1", "10.0.1.1"),
    ]
    assert message.copies == {0: (1,), 1: (0,)}
    assert message.policy.interval_steps == 10


@pytest.mark.parametrize("encryption", PeerEncryption)
@pytest.mark.parametrize("compression", Compression)
def test_a_round_message_names_the_encryption_of_copies_and_the_compression_of_uploads(
    encryption: PeerEncryption, compression: Compression
) -> None:
    of = job(2, CHOSEN, store="main", encryption=encryption, compression=compression)
    sent = of_kind(decide(gang(job=of), now()).actions, "call /v1/round")
    policies = [
        (a.message.message.policy.peer_encryption, a.message.message.policy.object_compression)
        for a in sent
    ]
    assert policies == [(encryption.value, compression.value)] * 2


def test_round_is_encoded_and_digested_once_for_all_members() -> None:
    one, other = of_kind(decide(gang(), now()).actions, "call /v1/round")
    assert one.message is other.message
    assert one.message.body is other.message.body
    assert one.message.body == dumps(one.message.message)
    assert one.message.digest == one.message.message.content_digest()


def test_a_sidecar_that_has_the_round_receives_it_once() -> None:
    observed = gang()
    acknowledged = tuple(acked(observed, s) for s in observed.sidecars)
    assert not of_kind(
        decide(replace(observed, sidecars=acknowledged), now()).actions, "call /v1/round"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"digest": Digest("b3:old")},
        {"round": RestartRound(0)},
        {"sidecar_restarts": 9},
    ],
    ids=lambda c: next(iter(c)),
)
def test_a_sidecar_that_lost_the_round_receives_it_again(changes: dict[str, Any]) -> None:
    observed = gang()
    first, second = observed.sidecars
    observed = replace(
        observed, sidecars=(acked(observed, first), acked(observed, second, **changes))
    )
    sent = of_kind(decide(observed, now()).actions, "call /v1/round")
    assert [(a.worker, a.message.message.version) for a in sent] == [(1, 2)]


def test_the_version_is_above_that_of_every_sidecar() -> None:
    pods = (pod(0), pod(1, 1))
    observed = gang(sidecars=(sidecar(pods[0], 1, version=6), sidecar(pods[1], 1, version=2)))
    sent = of_kind(decide(observed, now()).actions, "call /v1/round")
    assert {a.message.message.version for a in sent} == {7}


def test_a_survivor_receives_the_round_only_after_its_seal() -> None:
    pods = (pod(0), pod(1, 1))
    observed = gang(sidecars=(sidecar(pods[0], 0), sidecar(pods[1], 1)))
    actions = decide(observed, now()).actions
    assert [a.worker for a in of_kind(actions, "call /v1/round")] == [1]
    assert [a.worker for a in of_kind(actions, "call /v1/seal")] == [0]


def test_members_without_an_address_are_named_and_repeated_slowly() -> None:
    pods = (pod(0), pod(1, 1, ip=None))
    observed = gang(pods=pods, sidecars=(sidecar(pods[0], 1),))
    first = decide(observed, now())
    (sent,) = of_kind(first.actions, "call /v1/round")
    assert sent.message.message.members[1].address == ""
    again = replace(observed, memory=first.memory)
    assert not of_kind(decide(again, now(1000.5)).actions, "call /v1/round")
    assert of_kind(decide(again, now(1001.5)).actions, "call /v1/round")


def test_holds_are_named() -> None:
    kept = checkpoint(10, 0, pin=True)
    observed = gang(checkpoints=(kept, checkpoint(20, 0)))
    assert round_message(world_of(observed)).pinned == (10,)


@pytest.mark.fault("A job has more pinned checkpoints than a message can name")
def test_of_too_many_pins_those_that_only_nodes_have_are_named() -> None:
    alone = checkpoint(1, 0, pin=True, persisted=False)
    again = checkpoint(1, 1, pin=True)
    pins = (alone, again, *(checkpoint(step, 0, pin=True) for step in range(2, MAX_MANY + 5)))
    message = round_message(world_of(gang(checkpoints=pins)))
    assert message.pinned == (1, *range(6, MAX_MANY + 5))
    assert loads(Round, dumps(message)) == message


# --------------------------------------------------------------------------- coordinator


@pytest.mark.parametrize(
    ("since", "named"), [(995.0, None), (989.0, 1)], ids=["6 s silent", "11 s silent"]
)
def test_a_silent_coordinator_is_renamed(since: float, named: int | None) -> None:
    pods = (pod(0), pod(1, 1))
    observed = gang(sidecars=(silent(pods[0], since), sidecar(pods[1], 1)))
    writes = of_kind(decide(observed, now()).actions, WriteStatus)
    assert [w.status.coordinator for w in writes if w.status.coordinator != 0] == (
        [] if named is None else [named]
    )


def test_the_first_coordinator_is_the_lowest_survivor_that_answers() -> None:
    pods = (pod(0, 1), pod(1), pod(2))
    shards = [held(10, 0, rank) for rank in range(3)]
    observed = Observed(
        job=job(3, status(1, (1, 0, 0))),
        pods=pods,
        sidecars=(
            sidecar(pods[0], 1),
            silent(pods[1], 990.0),
            sidecar(pods[2], 1, manifests=[manifest(10, 0, 3)], shards=shards),
        ),
        memory=MEMORY,
    )
    (choice,) = of_kind(decide(observed, now()).actions, ChooseRestorePoint)
    assert choice.status.coordinator == 2


# --------------------------------------------------------------------------- copies


@pytest.mark.parametrize(
    ("domains", "copies", "expected"),
    [
        pytest.param(("a",), 1, [], id="one worker has no peer"),
        pytest.param(("a", "b"), 0, [], id="no copies"),
        pytest.param(("a", "a"), 1, [(0, 1), (1, 0)], id="one node: better than none"),
        pytest.param(("a", "b"), 3, [(0, 1), (1, 0)], id="at most workers - 1"),
        pytest.param(
            ("a", "a", "b", "b"), 1, [(0, 2), (1, 3), (2, 0), (3, 1)], id="two nodes of two"
        ),
        pytest.param(("a", "a", "a", "b"), 1, [(0, 3), (1, 3), (2, 3), (3, 0)], id="one outside"),
    ],
)
def test_copies(domains: tuple[str, ...], copies: int, expected: list[tuple[int, int]]) -> None:
    assert pairs(domains, copies) == expected


def pairs(domains: tuple[str, ...], copies: int) -> list[tuple[int, int]]:
    """Return each worker with each worker that keeps copies of its shards."""
    placed = place_copies(domains, copies)
    return [(source, target) for source, targets in placed.items() for target in targets]


@given(
    domains=st.lists(st.sampled_from("abcdef"), min_size=1, max_size=24).map(tuple),
    copies=st.integers(0, 3),
)
def test_copies_are_elsewhere_and_balanced(domains: tuple[str, ...], copies: int) -> None:
    placed = pairs(domains, copies)
    wanted = min(copies, len(domains) - 1)
    per_source = Counter(source for source, _ in placed)
    assert all(per_source[Worker(w)] == wanted for w in range(len(domains)))
    assert len(set(placed)) == len(placed)
    assert all(source != target for source, target in placed)
    sizes = Counter(domains)
    if wanted and len(sizes) > 1:
        for worker, own in enumerate(domains):
            targets = [domains[target] for source, target in placed if source == worker]
            assert any(t != own for t in targets)
    if wanted == 1 and 2 * max(sizes.values()) <= len(domains):
        assert set(Counter(target for _, target in placed).values()) == {1}


def test_a_large_gang_receives_the_round_in_one_pass() -> None:
    workers = 512
    pods: tuple[PodView, ...] = tuple(pod(w) for w in range(workers))
    observed = Observed(
        job=job(workers, status(0, (0,) * workers, restore_point=RestorePointStatus())),
        pods=pods,
        sidecars=tuple(sidecar(p, 0) for p in pods),
    )
    assert len(of_kind(decide(observed, now()).actions, "call /v1/round")) == workers
