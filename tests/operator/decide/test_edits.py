"""Edits of the spec of a gang that runs are reported with their field and moment, or applied."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from pydantic import create_model
from tests.support.operator.builders import job, now, pod, sidecar, status, store, template
from tests.support.operator.decisions import of_kind
from tests.support.operator.progress import progress_of

from holdfast_core.api import (
    ApiModel,
    Condition,
    RestorePointStatus,
    TrainingJob,
    TrainingJobSpec,
    changed,
)
from holdfast_core.api.checkpoint_policy import MemorySpec, NodeTierSpec
from holdfast_core.api.training_job import CheckpointRef, RestoreFromSpec
from holdfast_core.ids import RestartRound, Worker
from holdfast_core.messages.schema import CoordinatorState
from holdfast_operator.decide.decide import decide
from holdfast_operator.model.actions import EmitEvent, WriteStatus
from holdfast_operator.model.job import JobMemory, Observed, PodView
from holdfast_operator.model.template import part_digests

SOURCE = RestoreFromSpec(checkpoint_ref=CheckpointRef(name="other"))
REFUSAL = 'unknown field "spec.x"'
NEW_IMAGE = template()
NEW_IMAGE["spec"]["containers"][0]["image"] = "example/trainer:2"


STORED = job(3, store="main").spec.checkpoint


def edited(known: TrainingJob, **fields: Any) -> TrainingJob:
    return changed(known, spec=changed(known.spec, **fields))


def created_from(known: TrainingJob, found: PodView, **changes: Any) -> PodView:
    return replace(found, rendered_from=frozenset(part_digests(known).items()), **changes)


def gang(*, running: bool = True, ran: bool = True, **fields: Any) -> Observed:
    """Return a gang of three workers whose spec was edited after its pods were created."""
    before = job(
        3,
        status(2, (0, 0, 0), restore_point=RestorePointStatus(), coordinator=Worker(0)),
    )
    pods = tuple(created_from(before, pod(w), trainer_ran=ran) for w in range(3))
    state = CoordinatorState(
        version=7,
        round=RestartRound(2),
        running=running,
        progress=progress_of(44, 44, 44) if running else None,
    )
    return Observed(
        job=edited(before, **fields),
        pods=pods,
        sidecars=tuple(sidecar(p, 2, version=1) for p in pods),
        store=store(),
        coordinator=state,
        memory=JobMemory(round=RestartRound(2), round_seen_at=0.0),
    )


def spec_applied(observed: Observed) -> Condition | None:
    writes = [a for a in decide(observed, now()).actions if isinstance(a, WriteStatus)]
    found = writes[0].status if writes else observed.job.status
    return found.condition("SpecApplied")


def memory_of(spec: TrainingJobSpec) -> MemorySpec:
    return changed(spec.checkpoint.memory, size_limit="2Gi")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        pytest.param(
            {"template": NEW_IMAGE}, "spec.template (3 of 3 workers: 0, 1, 2)", id="the image"
        ),
        pytest.param(
            {"checkpoint": changed(job(3).spec.checkpoint, memory=memory_of(job(3).spec))},
            "spec.checkpoint.memory (3 of 3 workers: 0, 1, 2)",
            id="the size of the slots",
        ),
        pytest.param(
            {"restore_from": SOURCE},
            "spec.restoreFrom has changed: it is read only before the first checkpoint",
            id="restoreFrom",
        ),
    ],
)
def test_an_edit_that_the_pods_do_not_have_is_reported(fields: dict[str, Any], named: str) -> None:
    found = spec_applied(gang(**fields))
    assert (found.status, found.reason) == ("False", "AppliesLater")
    assert named in found.message
    events = [a for a in decide(gang(**fields), now()).actions if isinstance(a, EmitEvent)]
    assert any(named in e.message for e in events)


def test_a_job_that_was_not_edited_has_no_such_condition() -> None:
    assert spec_applied(gang()) is None
    assert spec_applied(gang(suspend=False, spares=0)) is None


@pytest.mark.parametrize("given", [{}, {"later": 3}], ids=["absent", "set by the API server"])
def test_a_field_of_a_later_release_is_no_edit_of_a_running_job(given: dict[str, int]) -> None:
    known = edited(job(3), restore_from=SOURCE)

    def later(part: ApiModel) -> ApiModel:
        kind = create_model("Later", __base__=type(part), later=(int, 3))
        return kind.model_validate({**part.model_dump(by_alias=True), **given})

    policy = known.spec.checkpoint
    volume = later(policy.node.volume)
    nested = create_model("Later", __base__=NodeTierSpec, volume=(type(volume), volume))
    for node in (later(policy.node), nested()):
        checkpoint = changed(policy, memory=later(policy.memory), node=node)
        upgraded = edited(known, checkpoint=checkpoint, restore_from=later(SOURCE))
        assert part_digests(upgraded) == part_digests(known)


def test_a_gang_that_mixes_images_says_so_until_all_pods_have_the_present_one() -> None:
    observed = gang(template=NEW_IMAGE)
    fresh = created_from(observed.job, pod(1))
    mixed = replace(observed, pods=(observed.pods[0], fresh, observed.pods[2]))
    found = spec_applied(mixed)
    assert (found.status, found.reason) == ("False", "PodsDiffer")
    assert "spec.template (2 of 3 workers: 0, 2)" in found.message
    assert "different templates, images included" in found.message

    known = mixed.job.status.with_condition("SpecApplied", False, "PodsDiffer", "", now().utc)
    all_new = tuple(created_from(observed.job, pod(w)) for w in range(3))
    found = spec_applied(replace(mixed, job=changed(mixed.job, status=known), pods=all_new))
    assert (found.status, found.reason) == ("True", "SpecApplied")


@pytest.mark.parametrize("refused", [False, True], ids=["its types", "by the API server"])
def test_a_template_that_no_pod_can_have_is_reported_while_the_gang_runs(refused: bool) -> None:
    broken = copy.deepcopy(NEW_IMAGE)
    if not refused:
        broken["spec"]["containers"][0]["env"] = {"A": "b"}
    observed = replace(
        gang(template=broken), template_refusal='unknown field "spec.x"' if refused else None
    )
    found = spec_applied(observed)
    assert (found.status, found.reason) == ("False", "InvalidTemplate")
    assert ('unknown field "spec.x"' if refused else "env: is an object") in found.message


def test_while_the_template_is_refused_no_suspension_is_advised() -> None:
    """All pods of a suspended job are deleted, and none could be created from this template."""
    accepted = spec_applied(gang(template=NEW_IMAGE))
    assert accepted is not None and "delete one after the other" in accepted.message
    with_store = gang(template=NEW_IMAGE, checkpoint=STORED)
    advised = spec_applied(with_store)
    assert advised is not None and "set spec.suspend to true" in advised.message
    for observed in (with_store, gang(template=NEW_IMAGE)):
        refused = spec_applied(replace(observed, template_refusal=REFUSAL))
        assert REFUSAL in refused.message
        assert "spec.suspend" not in refused.message
        assert "delete one" not in refused.message
        assert "Correct spec.template" in refused.message


def test_several_edits_are_a_list_with_one_advice() -> None:
    checkpoint = changed(job(3).spec.checkpoint, memory=memory_of(job(3).spec))
    found = spec_applied(gang(template=NEW_IMAGE, checkpoint=checkpoint))
    assert found is not None
    for path in ("spec.template", "spec.checkpoint.memory"):
        assert f"{path} (3 of 3 workers: 0, 1, 2)" in found.message
    assert found.message.count("To replace all pods") == 1


def test_a_gang_is_not_resized_while_its_template_is_refused() -> None:
    """A resize deletes all pods, and none could be created from this template."""
    observed = gang(template=NEW_IMAGE, workers=4, checkpoint=STORED)
    assert stops(observed)
    assert not stops(replace(observed, template_refusal=REFUSAL))


def stops(observed: Observed) -> bool:
    """Return whether a pass asks the gang to stop, as it does before a resize."""
    actions = decide(observed, now()).actions
    return bool(of_kind(actions, "call /v1/stop"))


def deleted(observed: Observed) -> list[str]:
    return [a.name for a in of_kind(decide(observed, now()).actions, "delete Pod")]


def test_pods_in_which_no_rank_ever_ran_are_created_again_from_a_corrected_template() -> None:
    observed = gang(running=False, ran=False, template=NEW_IMAGE)
    assert deleted(observed) == [p.name for p in observed.pods]
    reasons = [a.reason for a in decide(observed, now()).actions if isinstance(a, EmitEvent)]
    assert "TemplateChanged" in reasons


NOT_REPLACED = {
    "a rank ran in them": gang(running=False, ran=True, template=NEW_IMAGE),
    "the gang trains": gang(ran=False, template=NEW_IMAGE),
    "only another part has changed": gang(
        running=False,
        ran=False,
        restore_from=SOURCE,
    ),
    "no pod can be created": gang(
        running=False, ran=False, template={"spec": {"containers": [{"name": "other"}]}}
    ),
    "the API server refuses the template": replace(
        gang(running=False, ran=False, template=NEW_IMAGE), template_refusal=REFUSAL
    ),
    "they have no record of their template": replace(
        gang(running=False, ran=False, template=NEW_IMAGE), pods=(pod(0), pod(1), pod(2))
    ),
}


@pytest.mark.parametrize("case", NOT_REPLACED)
def test_pods_stay_if(case: str) -> None:
    assert deleted(NOT_REPLACED[case]) == []


def test_a_pod_that_may_hold_the_last_copy_of_a_step_stays() -> None:
    observed = gang(running=False, ran=False, template=NEW_IMAGE)
    trained = changed(observed.job.status, step=40, last_committed_step=40)
    assert deleted(replace(observed, job=changed(observed.job, status=trained))) == []
