"""What a new operator process writes for a gang that trains undisturbed: nothing at first."""

from __future__ import annotations

from tests.support.operator.builders import NAMESPACE, UID
from tests.support.operator.life import Life

from holdfast_core.api import JobCondition
from holdfast_core.names import service_name
from holdfast_operator.apply.job_effects import SURE_SECONDS

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
        (second for second in range(int(SURE_SECONDS) + 10) if _exists_after_a_second(life)), None
    )
    assert created is not None


def _exists_after_a_second(life: Life) -> bool:
    life.run(1)
    return SERVICE in life.cluster.services
