"""Upgrades and rollbacks of operator and CRDs under a job that trains, with a played other release."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.support.operator.operator_bed import OperatorBed

pytestmark = pytest.mark.integration

CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/trainingjobs.holdfast.dev"
FORECAST = {"type": "object", "properties": {"steps": {"type": "integer"}}}
NEWER_CONDITION = {
    "type": "ForecastKnown",
    "status": "True",
    "reason": "Measured",
    "message": "the forecast is known",
    "lastTransitionTime": "2026-01-01T00:00:00Z",
}
LATER_FIELDS = ("recoveries", "goodput", "step")
"""Fields that the older release does not have."""


@contextmanager
def other_release(
    bed: OperatorBed, *, adds: dict[str, Any], lacks: tuple[str, ...]
) -> Iterator[None]:
    """Let the CRD of TrainingJobs be that of another release, with other fields of the status."""
    before = bed.plane.request("GET", CRD)["spec"]
    other = copy.deepcopy(before)
    schema = other["versions"][0]["schema"]["openAPIV3Schema"]
    status = schema["properties"]["status"]["properties"]
    status.update(adds)
    for name in lacks:
        del status[name]
    bed.change(CRD, lambda crd: crd.update(spec=other))
    try:
        yield
    finally:
        bed.change(CRD, lambda crd: crd.update(spec=before))


def written(bed: OperatorBed, **fields: Any) -> bool:
    """Write fields of the status as another release does. Return whether the server has kept them."""
    job = bed.path("trainingjobs", "gpt")
    bed.change(job, lambda raw: raw["status"].update(fields), "/status")
    return fields.items() <= bed.status().items()


@pytest.mark.fault("A CRD is upgraded or downgraded under a running job that loses a pod")
def test_a_job_recovers_under_the_crds_of_a_newer_and_of_an_older_release(bed: OperatorBed) -> None:
    """The operator keeps what a newer release wrote, and needs no field that only reports."""
    bed.store_at(0, 40)
    bed.kill_operator()
    with other_release(bed, adds={"forecast": FORECAST}, lacks=()):
        conditions = [*bed.status()["conditions"], NEWER_CONDITION]
        forecast = {"steps": 400}
        bed.until(
            "what a newer operator wrote",
            lambda: written(bed, forecast=forecast, conditions=conditions),
        )
        bed.start_operator()
        bed.lose(1)
        bed.until_recovered(1)
        assert bed.status()["forecast"] == forecast
        assert bed.condition("ForecastKnown") == NEWER_CONDITION
    with other_release(bed, adds={}, lacks=LATER_FIELDS):
        bed.until("the older schema is used", lambda: "recoveries" not in bed.status())
        bed.lose(1)
        bed.until_recovered(2)
        assert not set(LATER_FIELDS) & set(bed.status())
    assert "cannot be read" not in bed.log()
