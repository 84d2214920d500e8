"""Which object the operator reads to learn the restart policy of an adopted gang's controller."""

from __future__ import annotations

import pytest
from tests.support.operator.fake_api import FakeApi

from holdfast_core.api import CheckpointAdoption
from holdfast_core.ids import RestartRound, Worker
from holdfast_operator.kube.api import ApiError
from holdfast_operator.kube.cluster import Cluster
from holdfast_operator.loop.observe import Owners
from holdfast_operator.model.job import Owner, PodPhase, PodView

ADOPTION = CheckpointAdoption.from_dict(
    {
        "metadata": {"name": "lm", "namespace": "team", "uid": "u", "resourceVersion": "1"},
        "spec": {"workers": 2, "checkpoint": {"interval": {"steps": 10}}},
    }
)


def pod(group: str, kind: str) -> PodView:
    owner = Owner(kind=kind, name="lm", uid="o", group=group)
    return PodView(
        "lm-0",
        "a",
        Worker(0),
        RestartRound(0),
        PodPhase.RUNNING,
        identity="worker-0",
        controller=owner,
    )


@pytest.mark.parametrize(
    ("group", "kind", "text"),
    [
        ("batch", "Job", "Job lm (backoffLimit 3) creates a lost pod again"),
        ("batch.volcano.sh", "Job", "Holdfast does not know its restart policy"),
        ("ray.io", "RayJob", "Holdfast does not know its restart policy"),
    ],
)
async def test_the_object_of_the_controllers_group_and_kind_is_read_once(
    group: str, kind: str, text: str
) -> None:
    """A Job of batch/v1 has the name of each controller. It must not be taken for one of another group."""
    api = FakeApi()
    api.put("jobs", {"metadata": {"name": "lm", "namespace": "team"}, "spec": {"backoffLimit": 3}})
    owners = Owners(Cluster(api))
    for _ in range(2):
        found = await owners.of(ADOPTION, (pod(group, kind),))
        assert text in found.cost
        api.refuse["GET", "jobs"] = ApiError(500, "InternalError", "read again")
