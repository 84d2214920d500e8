"""A pod whose claim finds no volume: the message names the claim and its storage class."""

from __future__ import annotations

import pytest
from tests.support.operator.builders import job, pod

from holdfast_core.api import EphemeralVolumeSpec, changed
from holdfast_core.api.checkpoint_policy import NodeTierSpec, NodeVolumeSpec
from holdfast_operator.decide.facts.scheduling import claim_of

UNBOUND = "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims"


@pytest.mark.parametrize(
    ("classes", "message", "expected"),
    [
        ((), UNBOUND, ""),
        (("nvme",), "0/3 nodes are available: 3 Insufficient cpu", ""),
        (
            ("nvme",),
            UNBOUND,
            ". Its claim is {0}-holdfast-node of storage class nvme: see kubectl describe pvc -n team-a",
        ),
        (
            ("nvme",),
            "0/3 nodes are available: 3 node(s) didn't find available persistent volumes to bind",
            ". Its claim is {0}-holdfast-node of storage class nvme: see kubectl describe pvc -n team-a",
        ),
    ],
)
def test_the_claim_of_a_pod_that_waits(
    classes: tuple[str, ...], message: str, expected: str
) -> None:
    volumes = tuple(EphemeralVolumeSpec(storage_class_name=c, size="1Gi") for c in classes)
    of = job(2)
    node = NodeTierSpec(volume=NodeVolumeSpec(ephemeral=volumes))
    of = changed(of, spec=changed(of.spec, checkpoint=changed(of.spec.checkpoint, node=node)))
    waiting = pod(1, message=message)
    assert claim_of(of, waiting) == expected.format(waiting.name)
