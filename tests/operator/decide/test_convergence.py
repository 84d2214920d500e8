"""Random worlds: whatever fails, and however reads, replies and writes misbehave, exactly one gang runs
again, from a step that existed and that is no older than what was promised."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.operator.builders import NAMESPACE, now, raw_job
from tests.support.operator.fake_cluster import FakeCluster, FakeNode, is_ancestor
from tests.support.operator.oracle import bases_of, broken_rules, holds
from tests.support.operator.played_kueue import PlayedKueue
from tests.support.operator.simulated_operator import (
    OPERATOR_NAMESPACE,
    SimulatedOperator,
    Trouble,
    calm,
)

from holdfast_core.api import TrainingJob
from holdfast_core.ids import Rank, Worker
from holdfast_core.messages.schema import DeadRank
from holdfast_operator.decide.decide import decide
from holdfast_operator.model import labels
from holdfast_operator.model.job import PodPhase
from holdfast_operator.sidecars.certificates import ca_secret_name

KINDS = (
    "lose pod",
    "delete pod",
    "fail pod",
    "evict pod",
    "rank dies",
    "node dies",
    "node comes back",
    "node is cut off",
    "node is reached again",
    "sidecar restarts",
    "operator restarts",
    "all sidecars are silent",
    "some sidecars are silent",
    "silence ends",
    "job is created again",
    "pods are forged",
    "job cannot be read",
    "pod cannot be read",
    "checkpoint cannot be read",
    "all can be read again",
    "suspend",
    "resume",
    "pods are refused",
    "pods are taken again",
    "spares are wanted",
    "nodes are full",
    "nodes are free",
    "a person starts it over",
    "a person rolls it back",
)
QUEUE_KINDS = (
    "lose pod",
    "delete pod",
    "fail pod",
    "pod succeeds",
    "rank dies",
    "node dies",
    "node comes back",
    "operator restarts",
    "job is created again",
    "suspend",
    "resume",
    "the gang is preempted",
    "the queue is full",
    "the queue has room",
    "workers change",
)
"""Faults of jobs in a queue of Kueue."""
UNKNOWN = "Hibernating"
"""A phase that this release does not have."""
SETTLE_SECONDS = 240


@dataclass(frozen=True, slots=True)
class Fault:
    after_seconds: int
    kind: str
    target: int


def lists_of(kinds: tuple[str, ...]) -> st.SearchStrategy[list[Fault]]:
    return st.lists(
        st.builds(
            Fault,
            after_seconds=st.sampled_from((0, 1, 2, 3, 5, 8, 13, 30, 100, 350)),
            kind=st.sampled_from(kinds),
            target=st.integers(0, 14),
        ),
        max_size=8,
    )


faults = lists_of(KINDS)
queue_faults = lists_of(QUEUE_KINDS)


def build(
    workers: int,
    copies: int,
    with_store: bool,
    spares: int = 0,
    elastic_from: int | None = None,
    at_most: str = "30m",
) -> FakeCluster:
    """Return a cluster with one job.

    Args:
        elastic_from: Its elastic.min, or None if it is not elastic.
        at_most: Its failurePolicy.startOver.atMost.
    """
    checkpoint: dict[str, object] = {"interval": {"steps": 5}, "peer": {"copies": copies}}
    if with_store:
        checkpoint["object"] = {"storeRef": {"name": "main"}, "every": {"steps": 10}}
    nodes = {f"node-{i}": FakeNode(f"node-{i}") for i in range(workers + 2)}
    job = raw_job(workers, checkpoint=checkpoint)
    job["spec"]["spares"] = spares
    job["spec"]["failurePolicy"] = {"startOver": {"atMost": at_most}}
    if elastic_from is not None:
        job["spec"]["elastic"] = {
            "min": elastic_from,
            "shrinkAfterSeconds": 30,
            "growAfterSeconds": 60,
        }
    return FakeCluster(job=job, nodes=nodes)


def build_queued(workers: int) -> FakeCluster:
    """Return a cluster with Kueue and a job with a store and the label of a queue."""
    cluster = build(workers, min(1, workers - 1), True)
    cluster.job["metadata"]["labels"] = {labels.QUEUE_NAME: "team-queue"}
    cluster.touch_job()
    PlayedKueue(cluster).attach()
    return cluster


class Simulation:
    """A cluster and one or two operators."""

    def __init__(self, cluster: FakeCluster, trouble: Trouble, operators: int = 1) -> None:
        self.cluster = cluster
        self.trouble = trouble
        self.operators = [SimulatedOperator(cluster, trouble) for _ in range(operators)]
        self.forged: set[tuple[str, str]] = set()
        self.retained: dict[str, dict[str, Any]] = {}
        """Checkpoints of earlier jobs with this name, with their contents when the job ended."""

    async def advance(self, seconds: int) -> None:
        for _ in range(seconds):
            for operator in self.operators:
                await operator.run_due_pass()
            self.cluster.tick()

    def restart_operators(self) -> None:
        self.operators = [SimulatedOperator(self.cluster, self.trouble) for _ in self.operators]

    def inject(self, fault: Fault) -> None:
        cluster = self.cluster
        nodes = list(cluster.nodes.values())
        node = nodes[fault.target % len(nodes)]
        pods = sorted(cluster.pods)
        name = pods[fault.target % len(pods)] if pods else None
        match fault.kind:
            case "node dies":
                node.dead = True
            case "node comes back":
                node.dead = False
            case "node is cut off":
                node.cut_off = True
            case "node is reached again":
                node.cut_off = False
            case "operator restarts":
                self.restart_operators()
            case "all sidecars are silent":
                cluster.all_silent = True
            case "some sidecars are silent":
                workers = range(cluster.job["spec"]["workers"])
                cluster.silent_workers = {w for w in workers if (fault.target + 1) >> w & 1}
            case "a person starts it over":
                self.start_over()
            case "a person rolls it back":
                self.roll_back(fault.target)
            case "spares are wanted":
                cluster.change_spec(spares=fault.target % 3)
            case "silence ends":
                self.end_silence()
            case "job is created again":
                self.can_be_read()
                for raw in cluster.api.all("checkpoints"):
                    self.retained[raw["metadata"]["name"]] = copy.deepcopy(raw)
                cluster.create_job_again()
            case "pods are forged":
                self.forge(fault.target)
            case "job cannot be read":
                cluster.job["status"]["phase"] = UNKNOWN
                cluster.touch_job()
            case "checkpoint cannot be read":
                for raw in cluster.api.all("checkpoints"):
                    if raw["metadata"]["name"] not in self.retained and "status" in raw:
                        raw["status"]["phase"] = UNKNOWN
                        cluster.api.touch(raw)
            case "all can be read again":
                self.can_be_read()
            case "suspend":
                self.suspend(True)
            case "resume":
                self.suspend(False)
            case "the gang is preempted" if isinstance(cluster.kueue, PlayedKueue):
                for group in cluster.kueue.admitted():
                    cluster.kueue.preempt(group)
            case "the queue is full" if isinstance(cluster.kueue, PlayedKueue):
                cluster.kueue.quota = 0
            case "the queue has room":
                self.make_room()
            case "workers change":
                cluster.change_spec(workers=2 + fault.target % 3)
            case "pods are refused":
                cluster.pod_refusal = "exceeded quota: team"
            case "pods are taken again":
                cluster.pod_refusal = ""
            case "nodes are full":
                cluster.full_nodes = set(list(cluster.nodes)[fault.target % len(nodes) :])
            case "nodes are free":
                cluster.full_nodes = set()
            case "rank dies":
                run = cluster.gang.run
                if run is not None and run.started and not run.finished:
                    rank = fault.target % len(cluster.job["status"]["members"])
                    run.dead = (*run.dead, DeadRank(Rank(rank), Worker(rank), 1, "boom"))
                    run.version += 1
            case _ if name is None:
                pass
            case "lose pod":
                cluster.lose_pod(name)
            case "delete pod":
                cluster.delete_pod(name, cluster.pods[name].view.uid, force=False)
            case "fail pod":
                cluster.fail_pod(name, "Error")
            case "pod succeeds" if sum(cluster.runs(p) for p in cluster.pods) > 1:
                cluster.end_pod(name)
            case "pod succeeds":
                pass  # the job would be complete
            case "evict pod":
                cluster.fail_pod(name, "Evicted")
            case "sidecar restarts":
                cluster.restart_sidecar(name)
            case "pod cannot be read":
                cluster.pods[name].unreadable = True
            case _:
                raise AssertionError(fault.kind)

    def forge(self, target: int) -> None:
        """Forge pods of worker `target` for this round and the next: in another namespace with all
        properties of a real pod, and in the job's own namespace also under other names."""
        status = self.cluster.job["status"]
        for birth in (status.get("restartRound", 0), status.get("restartRound", 0) + 1):
            self.cluster.forge_pod("mallory", target, birth, owned=True)
            for name in (f"job-{target}-r{birth}", f"forged-{target}-r{birth}"):
                self.cluster.forge_pod(NAMESPACE, target, birth, owned=True, name=name)
        self.forged = self.cluster.forged_pods()

    def can_be_read(self) -> None:
        cluster = self.cluster
        if cluster.job["status"].get("phase") == UNKNOWN:
            del cluster.job["status"]["phase"]
            cluster.touch_job()
        for pod in cluster.pods.values():
            pod.unreadable = False
        for raw in cluster.api.all("checkpoints"):
            if (raw.get("status") or {}).get("phase") == UNKNOWN:
                raw["status"]["phase"] = "Committed"
                cluster.api.touch(raw)

    def start_over(self) -> None:
        """Confirm the newest round of the lineage, as `kubectl holdfast restart --from-start` does."""
        lineage = self.cluster.job["status"].get("lineage")
        if lineage:
            self.cluster.change_spec(rollback={"round": lineage[-1]["round"]})

    def roll_back(self, target: int) -> None:
        """Order a return to one of the steps that have a manifest, restorable or not."""
        lineage = self.cluster.job["status"].get("lineage")
        steps = sorted({int(id_.step) for id_ in self.cluster.gang.manifests_made})
        if lineage and steps:
            order = {"round": lineage[-1]["round"], "step": steps[target % len(steps)]}
            self.cluster.change_spec(rollback=order)

    def suspend(self, value: bool) -> None:
        if self.cluster.job["spec"].get("suspend", False) != value:
            self.cluster.change_spec(suspend=value)

    def end_silence(self) -> None:
        self.cluster.all_silent = False
        self.cluster.silent_workers = set()

    def make_room(self) -> None:
        if isinstance(self.cluster.kueue, PlayedKueue):
            self.cluster.kueue.quota = 1000

    def heal(self) -> None:
        self.make_room()
        self.end_silence()
        self.can_be_read()
        self.suspend(False)
        self.cluster.pod_refusal = ""
        self.cluster.full_nodes = set()
        for node in self.cluster.nodes.values():
            node.dead = node.cut_off = False
        for operator in self.operators:
            operator.trouble = calm()
        self.trouble = calm()

    def settled(self) -> bool:
        status = TrainingJob.from_dict(self.cluster.job).status
        run = self.cluster.gang.run
        raw = self.cluster.job["status"]
        members = self.cluster.member_names(raw)
        names = {*members, *self.cluster.spare_names(raw)}
        return (
            run is not None
            and run.started
            and not run.dead
            and run.round == status.restart_round
            and status.is_true("Running")
            and len(members) == self.cluster.job["spec"]["workers"]
            and set(self.cluster.pods) == names
        )

    def waits_rightly(self, copies: int) -> bool:
        """Return whether the job waits for a person to start it over. This is allowed only if no committed
        step is readable, and to start over loses more than the job permits."""
        job = TrainingJob.from_dict(self.cluster.job)
        status, policy = job.status, job.spec.failure_policy.start_over
        running = status.condition("Running")
        if running is None or running.reason != "CheckpointsLost":
            return False
        assert status.is_true("CheckpointsLost")
        assert status.last_committed_step is not None and status.trained_seconds is not None
        limit = policy.limit.total_seconds()
        assert limit == 0 or status.trained_seconds > limit or status.quarantined
        readable = frozenset(self.cluster.sidecars)
        bases = bases_of(self.cluster)
        newest = max(bases)
        owed = [
            p
            for p in self.cluster.gang.promises
            if is_ancestor(p.id, newest, bases) and holds(p, readable, copies)
        ]
        return status.last_persisted is None and not owed


def is_retained(before: dict[str, Any], after: dict[str, Any] | None) -> bool:
    """Return whether the Checkpoint of an earlier job is as it was when the job ended.

    If the create of a record had no reply, the record has no status yet. A second operator that has not seen
    the end of the job may still write it: the job had this commit in its status.
    """
    if after is None or before.get("status"):
        return after == before
    status = after.get("status")
    if status:
        uid = before["metadata"]["labels"][labels.JOB_UID]
        assert (status["phase"], status["jobUid"]) == ("Committed", uid)
    meta = {**after["metadata"], "resourceVersion": before["metadata"]["resourceVersion"]}
    return {k: v for k, v in after.items() if k != "status"} | {"metadata": meta} == before


async def run_case(
    cluster: FakeCluster, trouble: Trouble, plan: list[Fault], copies: int, operators: int
) -> None:
    simulation = Simulation(cluster, trouble, operators)
    await simulation.advance(20)
    for fault in plan:
        simulation.inject(fault)
        await simulation.advance(fault.after_seconds)
    simulation.heal()
    for _ in range(SETTLE_SECONDS):
        await simulation.advance(1)
        if simulation.settled():
            break
    if simulation.waits_rightly(copies):
        simulation.start_over()
        for _ in range(SETTLE_SECONDS):
            await simulation.advance(1)
            if simulation.settled():
                break
    assert broken_rules(cluster, copies) == []
    reason = simulation.operators[0].decisions[-1].reason
    assert simulation.settled(), reason
    assert cluster.forged_pods() == simulation.forged
    there = {raw["metadata"]["name"]: raw for raw in cluster.api.all("checkpoints")}
    for name, before in simulation.retained.items():
        assert is_retained(before, there.get(name)), (before, there.get(name))
    for operator in simulation.operators:
        await operator.sweep()
    assert cluster.api.names("secrets", OPERATOR_NAMESPACE) == {ca_secret_name(cluster.uid)}
    live: dict[int, int] = {}
    for name, pod in cluster.pods.items():
        if pod.view.phase is PodPhase.RUNNING:
            worker = cluster.sidecars[name].worker
            live[worker] = live.get(worker, 0) + 1
    assert all(count == 1 for count in live.values())


@pytest.mark.fault("The operator or a sidecar dies between a commit and the write of the status")
@pytest.mark.fault("Sidecars fall silent at random beside other faults")
@pytest.mark.fault(
    "Random faults meet jobs that are created again, forged pods and unreadable objects"
)
@pytest.mark.fault("Random faults meet suspensions, resumptions and quotas")
@pytest.mark.fault("Random faults take all checkpoints of a job that may start over, or may not")
@pytest.mark.fault("Random faults meet rollbacks to steps that may be lost")
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    plan=faults,
    workers=st.integers(1, 4),
    copies=st.integers(0, 2),
    with_store=st.booleans(),
    spares=st.integers(0, 2),
    seed=st.integers(0, 1 << 16),
    rough=st.booleans(),
    at_most=st.sampled_from(("30m", "30s", "0s")),
)
def test_converges_and_keeps_its_promises(
    plan: list[Fault],
    workers: int,
    copies: int,
    with_store: bool,
    spares: int,
    seed: int,
    rough: bool,
    at_most: str,
) -> None:
    copies = min(copies, workers - 1)
    chance = 0.15 if rough else 0.0
    trouble = Trouble(Random(seed), stale_read=chance, lost_reply=chance, conflict=chance)
    cluster = build(workers, copies, with_store, spares, at_most=at_most)
    asyncio.run(run_case(cluster, trouble, plan, copies, 1))


@pytest.mark.fault("Random faults strike a job in a queue")
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    plan=queue_faults,
    workers=st.integers(1, 4),
    seed=st.integers(0, 1 << 16),
    rough=st.booleans(),
    ends_as=st.sampled_from((PodPhase.FAILED, PodPhase.SUCCEEDED)),
)
def test_a_job_in_a_queue_converges_and_leaves_no_pods(
    plan: list[Fault], workers: int, seed: int, rough: bool, ends_as: PodPhase
) -> None:
    cluster = build_queued(workers)
    cluster.ends_as = ends_as
    chance = 0.15 if rough else 0.0
    trouble = Trouble(Random(seed), stale_read=chance, lost_reply=chance, conflict=chance)
    asyncio.run(run_case(cluster, trouble, plan, min(1, workers - 1), 1))
    kueue = cluster.kueue
    assert isinstance(kueue, PlayedKueue)
    assert kueue.errors == []
    pods = cluster.api.all("pods", NAMESPACE)
    assert {p["metadata"]["labels"][labels.POD_GROUP] for p in pods} == kueue.admitted()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    plan=faults,
    workers=st.integers(2, 4),
    copies=st.integers(0, 1),
    seed=st.integers(0, 1 << 16),
    operators=st.integers(1, 2),
)
def test_an_elastic_gang_has_all_of_its_workers_in_the_end(
    plan: list[Fault], workers: int, copies: int, seed: int, operators: int
) -> None:
    trouble = Trouble(Random(seed), stale_read=0.1, lost_reply=0.1, conflict=0.05)
    cluster = build(workers, copies, True, elastic_from=copies + 1)
    cluster.pods_per_node = 2
    asyncio.run(run_case(cluster, trouble, plan, copies, operators))


@pytest.mark.fault("Two operators are active")
@pytest.mark.fault("Random faults meet two operators at once")
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=faults, seed=st.integers(0, 1 << 16))
def test_two_operators_at_once_do_no_harm(plan: list[Fault], seed: int) -> None:
    trouble = Trouble(Random(seed), stale_read=0.2, lost_reply=0.1, conflict=0.05)
    asyncio.run(run_case(build(3, 1, True, spares=1), trouble, plan, 1, 2))


@settings(max_examples=15, deadline=None)
@given(plan=faults, seed=st.integers(0, 1 << 16))
def test_the_same_observation_gives_the_same_decision(plan: list[Fault], seed: int) -> None:
    async def scenario() -> None:
        cluster = build(3, 1, True, spares=1)
        simulation = Simulation(cluster, Trouble(Random(seed), 0.2, 0.2, 0.1))
        for fault in plan:
            simulation.inject(fault)
            await simulation.advance(min(fault.after_seconds, 5))
            observed = await simulation.operators[0].observe()
            if observed is None:
                continue  # the job cannot be read
            moment = now(cluster.seconds)
            first, second = decide(observed, moment), decide(observed, moment)
            assert first == second
            shuffled = replace(
                observed,
                pods=tuple(reversed(observed.pods)),
                sidecars=tuple(reversed(observed.sidecars)),
                checkpoints=tuple(reversed(observed.checkpoints)),
            )
            assert set(map(repr, decide(shuffled, moment).actions)) == set(map(repr, first.actions))

    asyncio.run(scenario())
