"""An exception that ends a pass is visible on the job, over an in-memory API."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.clock import ManualClock
from tests.support.operator.builders import raw_job
from tests.support.operator.fake_api import FakeApi

from holdfast_core.api import TrainingJob
from holdfast_core.errors import UnavailableError
from holdfast_operator.apply.apply import ActionFailed, ActionsFailed
from holdfast_operator.apply.reports import Reports
from holdfast_operator.kube.api import ApiError
from holdfast_operator.kube.cluster import Cluster, Events
from holdfast_operator.model.actions import Delete

OTHER = {"type": "Running", "status": "True", "reason": "Training", "lastTransitionTime": "x"}


class Bed:
    def __init__(self) -> None:
        self.api = FakeApi()
        self.raw = self.api.put("trainingjobs", raw_job())
        self.raw["status"] = {"conditions": [OTHER], "step": 7}
        clock, cluster = ManualClock(), Cluster(self.api)
        self.passes = Reports(cluster, Events(cluster, clock), clock)

    async def fail(self, error: Exception) -> None:
        """Run a pass that raises this error. The queue must get it, so that it repeats the pass."""
        with pytest.raises(type(error)) as raised:
            async with self.passes.of_pass(self.job):
                raise error
        assert raised.value is error

    async def fail_actions(self, error: ActionsFailed) -> None:
        """Run a pass in which actions fail."""
        await self.passes.ended(self.job, error)

    async def succeed(self) -> None:
        await self.passes.ended(self.job, None)

    @property
    def job(self) -> TrainingJob:
        return TrainingJob.from_dict(self.raw | {"status": {"conditions": self.conditions[1:]}})

    @property
    def conditions(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.raw["status"]["conditions"]
        return found

    @property
    def reconciled(self) -> tuple[str, str] | None:
        found = [c for c in self.conditions if c["type"] == "Reconciled"]
        return (found[0]["status"], found[0]["message"]) if found else None

    def writes(self) -> int:
        return sum(1 for method, _ in self.api.requests if method == "PATCH")


@pytest.mark.fault("A template has a value of a wrong type, or an unknown field")
async def test_an_unexpected_exception_becomes_a_condition_with_its_text_once() -> None:
    bed = Bed()
    for _ in range(3):
        await bed.fail(TypeError("'str' object has no attribute 'get'"))
    assert bed.reconciled is not None
    value, message = bed.reconciled
    assert value == "False"
    assert message.startswith("TypeError: 'str' object has no attribute 'get'. ")
    assert (bed.writes(), len(bed.api.all("events"))) == (1, 1)
    assert (bed.conditions[0], bed.raw["status"]["step"]) == (OTHER, 7)

    await bed.fail(KeyError("spec"))
    assert bed.reconciled[1].startswith("KeyError: 'spec'. ")
    await bed.succeed()
    assert bed.reconciled[0] == "True"
    writes = bed.writes()
    await bed.succeed()
    assert bed.writes() == writes


async def test_an_error_of_a_call_is_reported_when_it_does_not_pass() -> None:
    bed = Bed()
    await bed.fail(UnavailableError("no answer"))
    await bed.succeed()
    for _ in range(2):
        await bed.fail(UnavailableError("no answer"))
        assert bed.reconciled is None
    await bed.fail(UnavailableError("no answer"))
    assert "no answer" in bed.reconciled[1]


@pytest.mark.fault("A webhook fails each write of the operator, by another connection each time")
async def test_an_error_whose_numbers_differ_is_the_same_error() -> None:
    bed = Bed()
    for port in (41234, 41240, 41301, 41302):
        text = f"failed calling webhook: read tcp 10.1.2.3:{port}->10.96.0.9:443: i/o timeout"
        await bed.fail(ApiError(500, "InternalError", text))
    assert bed.reconciled is not None
    assert ":41301->" in bed.reconciled[1]
    assert bed.writes() == 1


async def test_a_condition_that_could_not_be_written_is_written_later() -> None:
    bed = Bed()
    bed.api.refuse = {("PATCH", "trainingjobs"): ApiError(None, "", "away")}
    await bed.fail(TypeError("x"))
    assert bed.reconciled is None
    bed.api.refuse = {}
    await bed.fail(TypeError("x"))
    assert bed.reconciled is not None


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (
            ApiError(422, "Invalid", "PATCH /x: 422 Invalid: spec.a"),
            "correct what its answer names",
        ),
        (
            ApiError(403, "Forbidden", "POST /x: 403 Forbidden: quota"),
            "correct what its answer names",
        ),
        (
            ApiError(None, "Timeout", "GET /x failed: TimeoutError"),
            "the job itself need not be changed",
        ),
        (ApiError(500, "", "GET /x: 500"), "the job itself need not be changed"),
        (ApiError(429, "", "GET /x: 429"), "the job itself need not be changed"),
        (UnavailableError("no answer"), "the job itself need not be changed"),
        (TypeError("'str' object"), "report it with the operator's log"),
    ],
)
async def test_only_a_refusal_by_the_api_server_is_answered_with_a_correction(
    error: Exception, remedy: str
) -> None:
    bed = Bed()
    for _ in range(3):
        await bed.fail(error)
    text = bed.reconciled[1]
    assert str(error) in text
    assert text.endswith(remedy)


async def test_an_exception_of_an_action_names_the_action_and_its_object() -> None:
    bed, error = Bed(), TypeError("'str' object has no attribute 'get'")
    error.add_note("create Pod job-l2msg4-0-r0")
    await bed.fail(error)
    assert "(create Pod job-l2msg4-0-r0)" in bed.reconciled[1]


POD = Delete("Pod", "job-l2msg4-0-r0", "u", "it is obsolete")


def failed(text: str, number: int, of: int) -> ActionsFailed:
    """Return the error of a pass as `apply` returns it."""
    one = ActionFailed(POD, ApiError(403, "Forbidden", text))
    return ActionsFailed((one,) * number, of)


@pytest.mark.fault("An action of the operator fails in each pass, such as a create that is refused")
async def test_an_error_of_an_action_is_reported_like_one_that_ends_the_pass() -> None:
    bed = Bed()
    text = "DELETE /pods: 403 Forbidden: not allowed"
    for number in (1, 3):
        await bed.fail_actions(failed(text, number, 7))
        assert bed.reconciled is None, "most are over by the next pass"
    await bed.fail_actions(failed(text, 2, 5))
    assert bed.reconciled is not None
    value, message = bed.reconciled
    assert value == "False"
    assert message.startswith(f"2 of 5 actions failed: delete Pod job-l2msg4-0-r0: {text}. ")
    assert message.endswith("correct what its answer names")
    assert len(bed.api.all("events")) == 1
    await bed.succeed()
    assert bed.reconciled[0] == "True"
