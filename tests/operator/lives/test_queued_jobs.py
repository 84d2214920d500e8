"""Jobs whose pods are a group in a queue of Kueue, with a played Kueue (ADR 0012)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.support.operator.builders import NAMESPACE, UID
from tests.support.operator.decisions import counting
from tests.support.operator.life import Life, after_each_death, runs
from tests.support.operator.oracle import broken_rules
from tests.support.operator.played_kueue import MANAGED, PlayedKueue

from holdfast_core.api import JobCondition
from holdfast_core.ids import JobUid
from holdfast_core.names import pod_group_name
from holdfast_operator.model import labels
from holdfast_operator.model.job import PodPhase
from holdfast_operator.model.reasons import Reason

TIME_OUT = 60


class Queued(Life):
    """A job of four pods with a store, in a cluster with Kueue."""

    def __init__(self, *, quota: int = 1000, queue: str = "team-queue", every: int = 5) -> None:
        super().__init__(store=True, every=every)
        self.kueue = PlayedKueue(self.cluster, quota)
        self.kueue.attach()
        self.set_label(labels.QUEUE_NAME, queue)
        self.change_spec(scheduleTimeoutSeconds=TIME_OUT)

    def set_label(self, name: str, value: str) -> None:
        """Set a label of the job as `kubectl label` does. The generation stays."""
        self.cluster.job["metadata"].setdefault("labels", {})[name] = value
        self.cluster.touch_job()

    def queued(self) -> tuple[str, str, str]:
        return self.condition(JobCondition.QUEUED)

    def groups(self) -> set[str]:
        """Return the groups of the pods that exist."""
        pods = self.cluster.api.all("pods", NAMESPACE)
        return {p["metadata"]["labels"].get(labels.POD_GROUP, "") for p in pods}

    def finalizers(self) -> int:
        pods = self.cluster.api.all("pods", NAMESPACE)
        return sum(MANAGED in p["metadata"].get("finalizers", []) for p in pods)

    def trains(self) -> None:
        """Assert that the whole gang trains, and that Kueue had nothing to correct or to refuse."""
        self.run(120, until=runs)
        assert runs(self.status), self.status.conditions
        self.run(3)
        assert self.kueue.errors == []
        assert self.kueue.excess == []
        assert self.kueue.collected == []
        assert len(self.cluster.pods) == len(self.status.members)
        assert self.groups() == self.kueue.admitted()
        assert self.finalizers() == len(self.status.members)
        assert broken_rules(self.cluster, self.copies) == []


def group(workers: int, round_: int) -> str:
    return pod_group_name("job", UID, workers, round_)


def trained(**options: int) -> Queued:
    life = Queued(**options)
    life.run(40)
    assert runs(life.status)
    return life


# --------------------------------------------------------------------------- start


@pytest.mark.fault("A gang waits for its queue in Kueue for longer than its time-outs")
def test_a_gang_waits_for_its_queue_and_starts_when_it_is_admitted() -> None:
    life = Queued(quota=3)
    life.run(3 * TIME_OUT)
    assert len(life.cluster.pods) == 4
    assert life.nothing_was_deleted(), "a gated pod does not count for scheduleTimeoutSeconds"
    assert life.status.restart_round == 0
    value, reason, message = life.queued()
    assert (value, reason) == ("True", Reason.WAITING_FOR_QUEUE)
    assert message.startswith("4 of 4 pods wait until Kueue admits them to LocalQueue team-queue")
    assert f"kubectl -n {NAMESPACE} describe workload {group(4, 0)}" in message
    assert life.condition(JobCondition.RUNNING)[:2] == ("False", Reason.WAITING_FOR_QUEUE)
    assert life.status.start_time is None, "the wait does not count for activeDeadlineSeconds"

    life.kueue.quota = 4
    life.trains()
    assert life.groups() == {group(4, 0)}
    assert life.queued()[:2] == ("False", Reason.ADMITTED_BY_QUEUE)
    assert life.status.start_time is not None
    assert life.status.restarts == 0


def test_a_deadline_does_not_run_while_the_gang_waits_for_its_queue() -> None:
    life = Queued(quota=3)
    life.change_spec(activeDeadlineSeconds=100)
    life.run(200)
    life.kueue.quota = 4
    life.trains()
    life.run(110, until=lambda s: s.is_true(JobCondition.FAILED))
    assert life.status.condition(JobCondition.FAILED).reason == Reason.DEADLINE_EXCEEDED


@pytest.mark.fault("The queue of a job does not exist")
def test_a_queue_that_does_not_exist_is_named_and_corrected_by_a_suspension() -> None:
    life = Queued(queue="no-such-queue")
    life.run(20)
    message = life.queued()[2]
    assert "LocalQueue no-such-queue" in message
    assert "create the LocalQueue, or suspend the job, correct its label and resume it" in message
    life.change_spec(suspend=True)
    life.run(10)
    life.set_label(labels.QUEUE_NAME, "team-queue")
    life.change_spec(suspend=False)
    life.trains()


# --------------------------------------------------------------------------- lost pods


@pytest.mark.fault("A pod of a queued gang is deleted, and ends with code 0 or with an error")
@pytest.mark.parametrize("ends_as", [PodPhase.FAILED, PodPhase.SUCCEEDED])
def test_a_replacement_joins_the_group_once_the_lost_pod_no_longer_counts(
    ends_as: PodPhase,
) -> None:
    life = trained()
    life.cluster.ends_as = ends_as
    before = {p.view.uid for w, p in life.cluster.pods.items()}
    for worker in (1, 3, 1):
        name = life.pod(worker)
        life.cluster.delete_pod(name, life.cluster.pods[name].view.uid, force=False)
        life.run(2)
        life.trains()
    assert life.groups() == {group(4, 0)}
    after = {p.view.uid for p in life.cluster.pods.values()}
    assert len(before & after) == 2, "survivors stay"
    assert counting(life.status) == 0


@pytest.mark.fault("A worker is lost after the pod of another one has succeeded")
def test_a_pod_that_succeeded_is_removed_before_it_is_replaced() -> None:
    life = trained()
    pod = life.cluster.pods[life.pod(2)]
    life.cluster.end_pod(pod.view.name)
    life.run(1)
    life.cluster.lose_pod(life.pod(1))
    life.run(2)
    life.trains()
    assert life.groups() == {group(4, 0)}


@pytest.mark.fault("Nodes of a queued gang are lost, one, two or all")
@pytest.mark.parametrize("lost", [1, 2, 4])
def test_pods_of_lost_nodes_leave_and_are_replaced(lost: int) -> None:
    """Their kubelets never report them as failed, so Kueue would keep their finalizers for ever."""
    life = trained()
    gone = [life.pod(worker) for worker in range(lost)]
    for name in gone:
        life.cluster.nodes[life.cluster.pods[name].view.node or ""].dead = True
    life.cluster.nodes["node-6"] = type(next(iter(life.cluster.nodes.values())))("node-6")
    life.run(400, until=lambda s: not runs(s))
    life.trains()
    assert not set(gone) & set(life.cluster.pods)
    assert life.groups() == {group(4, 0) if lost < 4 else group(4, life.status.restart_round or 0)}


def test_a_replacement_that_starts_keeps_its_group_when_all_other_pods_are_lost() -> None:
    life = trained()
    life.cluster.hold_starts = True
    life.cluster.lose_pod(life.pod(1))
    life.run(6)
    assert life.cluster.pods[life.pod(1)].view.node is not None
    for worker in (0, 2, 3):
        life.cluster.lose_pod(life.pod(worker))
    life.run(6)
    life.cluster.hold_starts = False
    life.trains()
    assert life.groups() == {group(4, 0)}


# --------------------------------------------------------------------------- preemption


@pytest.mark.fault("Kueue preempts the gang, whose ranks return 0 or fail")
@pytest.mark.parametrize("ends_as", [PodPhase.FAILED, PodPhase.SUCCEEDED])
def test_a_preempted_gang_waits_in_its_queue_and_continues(ends_as: PodPhase) -> None:
    """Pods whose ranks have saved and stopped return 0, so Kueue may finish their group."""
    life = trained()
    life.change_spec(failurePolicy={"maxRestarts": 0})
    life.cluster.ends_as = ends_as
    step = life.newest()
    life.kueue.preempt(group(4, 0))
    life.kueue.quota = 0
    life.run(3 * TIME_OUT)
    assert life.queued()[:2] == ("True", Reason.WAITING_FOR_QUEUE)
    assert all(p.view.node is None for p in life.cluster.pods.values())
    assert life.groups() == {group(4, life.status.restart_round or 0)}
    assert life.kueue.admitted() == set()
    record = life.status.last_recovery
    assert record.reason == Reason.POD_EVICTED
    life.kueue.quota = 4
    life.trains()
    assert life.newest() >= step
    assert counting(life.status) == 0


@pytest.mark.fault("The pods of a preempted gang have all succeeded when the operator starts")
def test_a_preempted_gang_whose_pods_have_all_succeeded_is_not_complete() -> None:
    """Ranks that save for a preemption return 0. Neither the operator nor Kueue runs when they end."""
    life = trained()
    life.cluster.ends_as = PodPhase.SUCCEEDED
    life.kueue.preempt(group(4, 0))
    life.cluster.tick()
    life.cluster.kueue = None
    for _ in range(10):
        life.cluster.tick()
    life.kueue.attach()
    assert [p.view.phase for p in life.cluster.pods.values()] == [PodPhase.SUCCEEDED] * 4
    life.restart()
    life.run(5)
    life.trains()
    assert group(4, 0) not in life.groups()


@pytest.mark.fault("Kueue preempts the gang while it replaces a pod")
@pytest.mark.parametrize("seconds", range(0, 9, 2))
def test_a_gang_is_preempted_while_it_replaces_a_pod(seconds: int) -> None:
    life = trained()
    life.cluster.lose_pod(life.pod(1))
    life.run(seconds)
    life.kueue.preempt(next(iter(life.kueue.admitted())))
    life.run(3)
    life.trains()


# --------------------------------------------------------------------------- suspension, size, queue


def test_a_suspended_job_frees_its_quota_and_gets_another_group() -> None:
    life = trained()
    life.change_spec(suspend=True)
    life.run(60, until=lambda s: s.is_true(JobCondition.SUSPENDED))
    life.run(10)
    assert life.cluster.pods == {}
    assert life.kueue.workloads == {}
    assert not life.status.is_true(JobCondition.QUEUED)
    life.change_spec(suspend=False)
    life.trains()
    assert group(4, 0) not in life.groups()


@pytest.mark.fault("A queued job is resumed while the Workload of its old group is collected")
@pytest.mark.parametrize("seconds", range(0, 8))
def test_a_job_resumes_while_the_workload_of_its_old_group_is_collected(seconds: int) -> None:
    life = trained()
    life.change_spec(suspend=True)
    life.run(60, until=lambda s: s.is_true(JobCondition.SUSPENDED))
    life.run(seconds)
    life.change_spec(suspend=False)
    life.run(2)
    life.trains()


def test_a_resize_begins_a_group_of_another_size() -> None:
    life = trained()
    life.kueue.quota = 5  # the old group must end before the new one is admitted
    life.change_spec(workers=5)
    life.run(60, until=lambda s: len(s.members) == 5)
    life.trains()
    assert life.groups() == {group(5, life.status.restart_round or 0)}


@pytest.mark.fault("The label of the queue changes while the gang trains")
def test_another_queue_takes_effect_when_the_gang_has_no_pods() -> None:
    life = trained()
    life.kueue.queues.add("other-queue")
    life.set_label(labels.QUEUE_NAME, "other-queue")
    life.run(20)
    value, reason, message = life.queued()
    assert (value, reason) == ("False", Reason.QUEUE_CHANGES_LATER)
    assert (
        "are in LocalQueue team-queue, and the labels of the job name LocalQueue other" in message
    )
    assert "set spec.suspend to true" in message
    life.cluster.lose_pod(life.pod(1))
    life.run(2)
    life.trains()  # the replacement joins the group in the old queue
    life.change_spec(suspend=True)
    life.run(60, until=lambda s: s.is_true(JobCondition.SUSPENDED))
    life.change_spec(suspend=False)
    life.run(5)
    life.trains()
    assert life.queued()[:2] == ("False", Reason.ADMITTED_BY_QUEUE)
    assert [w.queue for w in life.kueue.workloads.values() if w.admitted] == ["other-queue"]


def test_a_running_job_that_gets_the_label_is_queued_after_a_suspension() -> None:
    life = Life(store=True, every=5)
    kueue = PlayedKueue(life.cluster)
    kueue.attach()
    life.run(40)
    life.cluster.job["metadata"]["labels"] = {labels.QUEUE_NAME: "team-queue"}
    life.cluster.touch_job()
    life.cluster.lose_pod(life.pod(1))
    life.run(60)
    assert runs(life.status)
    assert life.condition(JobCondition.QUEUED)[:2] == ("False", Reason.QUEUE_CHANGES_LATER)
    assert kueue.workloads == {}
    life.change_spec(suspend=True)
    life.run(60, until=lambda s: s.is_true(JobCondition.SUSPENDED))
    life.change_spec(suspend=False)
    life.run(60, until=runs)
    assert runs(life.status)
    assert len(kueue.admitted()) == 1


# --------------------------------------------------------------------------- ends


@pytest.mark.fault(
    "A queued job is deleted and created again, also across a restart of the operator"
)
@pytest.mark.parametrize("restarts", [False, True], ids=["operator lives", "operator restarts"])
def test_the_pods_of_a_job_that_was_created_again_end(restarts: bool) -> None:
    life = trained()
    life.cluster.create_job_again()
    if restarts:
        life.restart()
    life.run(40)
    life.trains()
    assert {p.job_uid for p in life.cluster.pods.values()} == {JobUid(life.cluster.uid)}


@pytest.mark.fault("A queued job cannot be parsed, and its pods are deleted")
def test_the_deleted_pods_of_a_job_that_cannot_be_read_end() -> None:
    life = trained()
    life.cluster.job["status"]["phase"] = "Hibernating"
    life.cluster.touch_job()
    for name, pod in list(life.cluster.pods.items()):
        life.cluster.delete_pod(name, pod.view.uid, force=False)
    life.run(10)
    assert life.cluster.pods == {}


@pytest.mark.fault("A queued job fails and keeps its failed pods")
def test_a_failed_job_keeps_its_ended_pods_and_frees_its_quota() -> None:
    life = trained()
    life.change_spec(failurePolicy={"rules": [{"action": "FailJob", "onReasons": ["PodFailed"]}]})
    life.cluster.fail_pod(life.pod(2), "Error")
    life.run(30)
    assert life.status.is_true(JobCondition.FAILED)
    assert len(life.cluster.pods) == 1, "the failed pod stays for its logs"
    assert life.kueue.admitted() == set()
    assert life.finalizers() == 0


# --------------------------------------------------------------------------- the operator dies


def preempted(life: Queued) -> None:
    life.kueue.preempt(group(4, 0))


def loses_a_pod(life: Queued) -> None:
    name = life.pod(1)
    life.cluster.delete_pod(name, life.cluster.pods[name].view.uid, force=False)


def suspended_and_resumed(life: Queued) -> None:
    life.change_spec(suspend=True)
    life.run(60, until=lambda s: s.is_true(JobCondition.SUSPENDED))
    life.change_spec(suspend=False)


def resized(life: Queued) -> None:
    life.change_spec(workers=3)


@pytest.mark.fault(
    "The operator dies after each write of a preemption, a loss, a suspension and a resize in a "
    "queue"
)
@pytest.mark.parametrize(
    ("change", "ends_as"),
    [
        (preempted, PodPhase.FAILED),
        (preempted, PodPhase.SUCCEEDED),
        (loses_a_pod, PodPhase.SUCCEEDED),
        (suspended_and_resumed, PodPhase.FAILED),
        (resized, PodPhase.FAILED),
    ],
    ids=lambda c: str(getattr(c, "__name__", c)),
)
def test_the_operator_dies_after_each_write(
    change: Callable[[Queued], None], ends_as: PodPhase
) -> None:
    begun = trained()
    begun.cluster.ends_as = ends_as
    change(begun)
    for life in after_each_death(begun, seconds=20):
        life.run(15)
        life.trains()


@pytest.mark.fault("A queued job is deleted")
@pytest.mark.fault("The operator dies after each write of the deletion of a queued job")
def test_the_operator_dies_after_each_write_of_a_deleted_job() -> None:
    begun = trained()
    begun.cluster.delete_job()
    for life in after_each_death(begun, seconds=20):
        life.run(20)
        assert life.cluster.pods == {}
        assert life.kueue.workloads == {}
