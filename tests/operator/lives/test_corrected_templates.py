"""A user corrects a template while no rank has ever run."""

from __future__ import annotations

import copy

import pytest
from tests.support.operator.builders import NAMESPACE
from tests.support.operator.life import Life
from tests.support.operator.oracle import broken_rules


def images(life: Life) -> set[str]:
    """Return the images of the trainers of all pods."""
    pods = life.cluster.api.all("pods", NAMESPACE)
    return {p["spec"]["containers"][0]["image"] for p in pods}


@pytest.mark.fault("A template is corrected whose pods could not start")
def test_pods_that_cannot_start_are_created_again_from_the_corrected_template() -> None:
    life = Life()
    life.cluster.hold_starts = True
    life.run(20)
    before = images(life)
    corrected = copy.deepcopy(life.cluster.job["spec"]["template"])
    corrected["spec"]["containers"][0]["image"] = "example/trainer:corrected"
    life.change_spec(template=corrected)
    life.run(20)
    assert before != images(life) == {"example/trainer:corrected"}
    life.cluster.hold_starts = False
    life.run(40)
    assert life.status.is_true("Running")
    assert life.status.restarts == 0, "it costs no round"
    assert broken_rules(life.cluster, life.copies) == []


def test_a_gang_that_trains_keeps_its_pods_and_says_that_an_edit_comes_later() -> None:
    life = Life(store=True, every=5).trained()
    before = images(life)
    corrected = copy.deepcopy(life.cluster.job["spec"]["template"])
    corrected["spec"]["containers"][0]["image"] = "example/trainer:2"
    life.change_spec(template=corrected)
    life.run(20)
    assert images(life) == before
    found = life.status.condition("SpecApplied")
    assert (found.status, found.reason) == ("False", "AppliesLater")
    life.change_spec(suspend=True)
    life.run(60)
    life.change_spec(suspend=False)
    life.run(60)
    assert images(life) == {"example/trainer:2"}
    found = life.status.condition("SpecApplied")
    assert found is not None and found.status == "True"
