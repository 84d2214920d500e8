"""The contract with Kueue: what its pod integration reads of a pod, and what the operator writes (ADR 0012).

The names are written out, because they are Kueue's: pkg/controller/jobs/pod/constants/constants.go,
pkg/controller/constants/constants.go and pkg/constants/constants.go of kubernetes-sigs/kueue.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from tests.support.operator.builders import NAMESPACE, job, metadata, raw_job
from tests.support.operator.fake_api import FakeApi

from holdfast_core.api import TrainingJob
from holdfast_core.ids import JobUid, RestartRound, Worker
from holdfast_core.names import pod_group_name, pod_name
from holdfast_operator.decide.facts.scheduling import wanted_group
from holdfast_operator.kube.cluster import Cluster
from holdfast_operator.model.installation import SidecarSettings
from holdfast_operator.model.ownership import worker_identity
from holdfast_operator.model.render import render_pod
from holdfast_operator.watch.records import pod_view

SIDECAR = SidecarSettings("example/sidecar:1")
ROUND = RestartRound(3)
LABEL_VALUE = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
"""A label value that is also a DNS subdomain: Kueue gives the name to its Workload."""


def queued_job(workers: int = 2, **marks: str) -> TrainingJob:
    return metadata(job(workers), labels={"kueue.x-k8s.io/queue-name": "team-queue", **marks})


def render(of: TrainingJob, worker: int = 0, **options: Any) -> dict[str, Any]:
    group = wanted_group(of, of.spec.workers, ROUND)
    return render_pod(of, Worker(worker), ROUND, None, SIDECAR, group=group, **options)


def kueue_marks(pod: dict[str, Any]) -> dict[str, dict[str, str]]:
    meta = pod["metadata"]
    return {
        part: {k: v for k, v in meta.get(part, {}).items() if "kueue" in k}
        for part in ("labels", "annotations")
    }


def test_the_webhook_gates_pods_with_the_label_of_a_queue() -> None:
    pod = render(queued_job())
    assert pod["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-queue"
    assert "schedulingGates" not in pod["spec"], "the webhook adds the gate and the finalizer"
    assert "finalizers" not in pod["metadata"]


def test_each_pod_names_the_group_and_its_total_count() -> None:
    expected = {
        "labels": {
            "kueue.x-k8s.io/queue-name": "team-queue",
            "kueue.x-k8s.io/pod-group-name": "job-l2msg4-2-g3",
        },
        "annotations": {
            "kueue.x-k8s.io/pod-group-total-count": "2",
            "kueue.x-k8s.io/role-hash": "worker",
        },
    }
    of = queued_job()
    assert [kueue_marks(render(of, w)) for w in (0, 1)] == [expected, expected]


def test_pods_that_avoid_nodes_have_the_same_role_as_the_others() -> None:
    of = queued_job()
    plain, avoiding = render(of), render(of, avoided_nodes=("node-a",), failed_nodes=("node-b",))
    assert plain["spec"]["affinity"] != avoiding["spec"]["affinity"]
    assert kueue_marks(plain) == kueue_marks(avoiding)


def test_the_priority_class_is_the_label_of_the_job() -> None:
    pod = render(queued_job(**{"kueue.x-k8s.io/priority-class": "high"}))
    assert pod["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "high"
    assert "kueue.x-k8s.io/priority-class" not in render(queued_job())["metadata"]["labels"]


def test_the_labels_of_the_job_override_those_of_the_template() -> None:
    of = queued_job()
    marks = {"kueue.x-k8s.io/queue-name": "other", "kueue.x-k8s.io/pod-group-name": "other"}
    notes = {"kueue.x-k8s.io/pod-group-total-count": "9", "kueue.x-k8s.io/role-hash": "other"}
    template = {**of.spec.template, "metadata": {"labels": marks, "annotations": notes}}
    other = metadata(job(2, template=template), labels=of.metadata.labels)
    assert kueue_marks(render(other)) == kueue_marks(render(of))


def test_a_job_in_no_queue_has_nothing_of_kueue() -> None:
    assert kueue_marks(render(job(2))) == {"labels": {}, "annotations": {}}


@pytest.mark.parametrize("name", ["a", "a" * 40, "a-b-" + "c" * 36, "x" + "-" * 38 + "x"])
@pytest.mark.parametrize(("workers", "round_"), [(1, 0), (4096, 999_999_999)])
def test_the_name_of_a_group_is_valid_for_every_job(name: str, workers: int, round_: int) -> None:
    uid = JobUid("11111111-2222-3333-4444-555555555555")
    found = pod_group_name(name, uid, workers, round_)
    assert len(found) <= 63
    assert LABEL_VALUE.fullmatch(found)
    assert str(workers) in found
    assert found != pod_name(name, uid, workers, round_)


def test_groups_of_other_sizes_rounds_and_jobs_have_other_names() -> None:
    uid, other = JobUid("1"), JobUid("2")
    names = {
        pod_group_name("job", uid, 4, 0),
        pod_group_name("job", uid, 5, 0),
        pod_group_name("job", uid, 4, 1),
        pod_group_name("job", other, 4, 0),
    }
    assert len(names) == 4


# --------------------------------------------------------------------------- what Kueue writes


def raw_pod(**changes: Any) -> dict[str, Any]:
    """Return a pod as Kueue's webhook leaves it."""
    of = TrainingJob.from_dict(raw_job())
    marks = {"kueue.x-k8s.io/queue-name": "team-queue"}
    body = render(metadata(of, labels=marks))
    body["metadata"] |= {
        "uid": "uid-1",
        "finalizers": ["example.com/other", "kueue.x-k8s.io/managed"],
        **changes,
    }
    body["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
    return body


def test_the_gate_the_finalizer_and_the_group_are_read() -> None:
    raw = raw_pod()
    identity = worker_identity(raw)
    assert identity is not None
    view = pod_view(raw, identity)
    assert (view.queued, view.has_kueue_finalizer) == (True, True)
    assert (view.group.name, view.group.queue, view.group.pods) == (
        "job-l2msg4-2-g3",
        "team-queue",
        2,
    )
    raw["spec"]["schedulingGates"] = [{"name": "example.com/other"}]
    raw["metadata"]["finalizers"] = ["example.com/other"]
    view = pod_view(raw, identity)
    assert (view.queued, view.has_kueue_finalizer) == (False, False)


@pytest.mark.parametrize("count", [None, "", "many", "-1"])
def test_an_unusable_total_count_belongs_to_no_group_of_the_operator(count: str | None) -> None:
    raw = raw_pod()
    raw["metadata"]["annotations"]["kueue.x-k8s.io/pod-group-total-count"] = count
    identity = worker_identity(raw)
    assert identity is not None
    group = pod_view(raw, identity).group
    assert group.pods == 0


def test_a_preempted_pod_is_evicted_and_says_why() -> None:
    raw = raw_pod()
    told = {"reason": "WorkloadEvictedDueToPreempted", "message": "Preempted to accommodate x"}
    raw["status"] = {
        "phase": "Running",
        "conditions": [{"type": "TerminationTarget", "status": "True", **told}],
    }
    identity = worker_identity(raw)
    assert identity is not None
    view = pod_view(raw, identity)
    assert view.disrupted
    assert (view.reason, view.message) == (told["reason"], told["message"])


# --------------------------------------------------------------------------- the finalizer


def release(raw: dict[str, Any], *, uid: str = "uid-1", ends_group: bool = False) -> dict[str, Any]:
    api = FakeApi()
    stored = api.put("pods", raw)
    name = raw["metadata"]["name"]
    asyncio.run(Cluster(api).release_pod(NAMESPACE, name, uid, ends_group=ends_group))
    return stored


def test_only_the_finalizer_of_kueue_is_removed() -> None:
    meta = release(raw_pod())["metadata"]
    assert meta["finalizers"] == ["example.com/other"]
    assert "kueue.x-k8s.io/retriable-in-group" not in meta["annotations"]


def test_the_pods_of_a_job_that_is_over_end_their_group() -> None:
    meta = release(raw_pod(), ends_group=True)["metadata"]
    assert meta["finalizers"] == ["example.com/other"]
    assert meta["annotations"]["kueue.x-k8s.io/retriable-in-group"] == "false"


def test_a_pod_of_the_same_name_with_another_uid_is_left_alone() -> None:
    before = raw_pod()
    assert (
        release(raw_pod(), uid="uid-2")["metadata"]["finalizers"]
        == (before["metadata"]["finalizers"])
    )


def test_a_pod_that_is_gone_needs_no_release() -> None:
    asyncio.run(Cluster(FakeApi()).release_pod(NAMESPACE, "gone", "uid-1", ends_group=False))
