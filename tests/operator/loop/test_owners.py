"""Which object the operator reads to learn the restart policy of an adopted gang's controller."""

from __future__ import annotations

from typing import Any, cast

import pytest

from holdfast_core.api import CheckpointAdoption
from holdfast_core.ids import RestartRound, Worker
from holdfast_operator.kube.cluster import Cluster
from holdfast_operator.loop.owners import Owners
from holdfast_operator.model.job import Owner, PodPhase, PodView

ADOPTION = CheckpointAdoption.from_dict(
    {
        "metadata": {"name": "lm", "namespace": "team", "uid": "u", "resourceVersion": "1"},
        "spec": {"workers": 2, "checkpoint": {"interval": {"steps": 10}}},
    }
)


class Reads:
    """The reads of a Cluster, which finds every object and records what was read."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    async def get(self, kind: str, namespace: str, name: str) -> Any:
        self.paths.append(f"{kind} {namespace}/{name}")
        return {"metadata": {"name": name}, "spec": {"backoffLimit": 3}}


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
    ("group", "kind", "read", "text"),
    [
        ("batch", "Job", ["Job team/lm"], "Job lm (backoffLimit 3) creates a lost pod again"),
        ("batch.volcano.sh", "Job", [], "Holdfast does not know its restart policy"),
        ("ray.io", "RayJob", [], "Holdfast does not know its restart policy"),
    ],
)
async def test_the_object_of_the_controllers_group_and_kind_is_read_once(
    group: str, kind: str, read: list[str], text: str
) -> None:
    reads = Reads()
    owners = Owners(cast(Cluster, reads))
    for _ in range(2):
        found = await owners.of(ADOPTION, (pod(group, kind),))
        assert found is not None
        assert text in found.cost
    assert reads.paths == read
