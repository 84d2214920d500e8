"""An object of another owner has the name of one that the operator wants to create."""

from __future__ import annotations

import pytest
from tests.support.operator.builders import NAMESPACE
from tests.support.operator.life import Life
from tests.support.operator.oracle import broken_rules

from holdfast_core.names import certificates_secret_name, service_name
from holdfast_operator.model.reasons import Reason


def foreign(life: Life, plural: str, name: str) -> dict[str, object]:
    """Create an object that nothing controls, and return it."""
    return life.cluster.api.put(plural, {"metadata": {"name": name, "namespace": NAMESPACE}})


def warnings(life: Life) -> list[str]:
    return [e.message for e in life.operator.events if e.reason == Reason.NAME_TAKEN]


@pytest.mark.fault("A foreign Secret has the name that certificates would get")
@pytest.mark.parametrize("restarts", [False, True], ids=["one operator", "it is restarted"])
@pytest.mark.parametrize("round_", [0, 1])
def test_a_foreign_secret_under_the_name_of_certificates_stops_no_round(
    round_: int, restarts: bool
) -> None:
    life = Life()
    name = certificates_secret_name("job", life.cluster.uid, 0, round_)
    secret = foreign(life, "secrets", name)
    before = dict(secret)
    if round_ == 1:
        life.run(40)
        assert life.status.is_true("Running")
        life.cluster.lose_pod(life.pod(1))
    for _ in range(60):
        life.run(1)
        if restarts:
            life.restart()
    life.run(20)
    assert life.status.is_true("Running")
    assert life.status.restart_round == round_
    assert secret == before, "it is neither written nor deleted"
    assert broken_rules(life.cluster, life.copies) == []
    if not restarts:
        [text] = warnings(life)
        assert name in text


def test_a_secret_that_a_former_process_created_before_the_pods_does_not_stop_the_round() -> None:
    life = Life().trained()
    life.cluster.lose_pod(life.pod(1))
    seen = len(life.cluster.secrets)
    life.run(20, lambda _: len(life.cluster.secrets) > seen)
    life.restart()
    life.run(60)
    assert life.status.is_true("Running")
    assert broken_rules(life.cluster, life.copies) == []


@pytest.mark.parametrize("plural", ["services", "poddisruptionbudgets"])
def test_other_foreign_objects_are_reported_and_left_alone(plural: str) -> None:
    life = Life()
    found = foreign(life, plural, service_name("job", life.cluster.uid))
    before = dict(found)
    life.run(60)
    assert life.status.is_true("Running")
    assert found == before
    assert any(service_name("job", life.cluster.uid) in text for text in warnings(life))
