"""What an operator writes for a gang that trains undisturbed, after its start or an outage: nothing at first.

With a thousand such gangs, these writes would delay the recovery of others.
"""

from __future__ import annotations

import pytest
from tests.support.operator.builders import NAMESPACE, UID
from tests.support.operator.life import Life

from holdfast_core.api import JobCondition
from holdfast_core.names import service_name
from holdfast_operator.apply.apply import SURE_SECONDS
from holdfast_operator.decide.report.status import LEVELS_EVERY_SECONDS
from holdfast_operator.kube.api import ApiError

SERVICE = service_name("job", UID)


def training() -> Life:
    life = Life()
    life.run(60, lambda status: status.is_true(JobCondition.RUNNING))
    life.run(20)
    assert life.status.is_true(JobCondition.RUNNING)
    return life


def test_a_new_process_writes_nothing_in_its_first_passes() -> None:
    life = training()
    life.restart()
    writes: list[None] = []
    life.operator.on_write(lambda: writes.append(None))
    life.run(5)
    assert len(life.operator.decisions) == 5
    assert not writes


def test_a_service_that_was_deleted_meanwhile_is_created_again() -> None:
    life = training()
    life.cluster.api.remove("services", NAMESPACE, SERVICE)
    life.restart()
    created = next(
        (
            second
            for second in range(int(SURE_SECONDS["Service"]) + 10)
            if _exists_after_a_second(life)
        ),
        None,
    )
    assert created is not None


@pytest.mark.fault(
    "Looks for the objects of all jobs, and writes of progress, have failed while the API server "
    "was away"
)
def test_after_an_outage_the_objects_of_all_jobs_are_not_looked_for_at_once() -> None:
    """The look of the outage counts. A Service that was deleted is still created again."""
    life = training()
    api = life.cluster.api
    for plural in ("services", "poddisruptionbudgets"):
        api.refuse["POST", plural] = ApiError(503, "ServiceUnavailable", "away")
    life.run(int(SURE_SECONDS["Service"]) + 5)
    assert ("POST", f"/api/v1/namespaces/{NAMESPACE}/services") in api.requests
    api.refuse.clear()
    api.requests.clear()
    api.remove("services", NAMESPACE, SERVICE)
    life.run(10)
    assert [path for method, path in api.requests if method == "POST"] == []
    assert any(_exists_after_a_second(life) for _ in range(int(SURE_SECONDS["Service"])))


@pytest.mark.fault(
    "Looks for the objects of all jobs, and writes of progress, have failed while the API server "
    "was away"
)
def test_while_writes_fail_progress_is_tried_as_rarely_as_it_is_written() -> None:
    life = training()
    api = life.cluster.api
    api.refuse["PATCH", "trainingjobs"] = ApiError(503, "ServiceUnavailable", "away")
    api.requests.clear()
    life.run(60)
    attempts = [path for method, path in api.requests if method == "PATCH"]
    assert 1 <= len(attempts) <= 60 / LEVELS_EVERY_SECONDS + 1


def _exists_after_a_second(life: Life) -> bool:
    life.run(1)
    return SERVICE in life.cluster.services
