"""A part of the status that the API server refuses does not prevent the write of the round."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from tests.support.operator.builders import NAMESPACE, START, condition, job, metadata, raw_job
from tests.support.operator.fake_api import FakeApi

from holdfast_core.api import (
    GoodputStatus,
    JobCondition,
    RecoveryStatus,
    TrainingJobStatus,
    changed,
)
from holdfast_core.ids import RestartRound, Step
from holdfast_operator.apply.apply import write_status
from holdfast_operator.kube.api import ApiError, ConflictError
from holdfast_operator.kube.cluster import Cluster

BEFORE = TrainingJobStatus(
    restart_round=RestartRound(3),
    step=Step(7),
    goodput=GoodputStatus(ratio=1.0),
    conditions=(condition(JobCondition.RUNNING, True, "Training", "fine", START, 1),),
)
AFTER = changed(
    BEFORE,
    restart_round=RestartRound(4),
    step=Step(9),
    goodput=changed(GoodputStatus(ratio=1.0), checkpoint_seconds=-1.0),
    recoveries=(
        changed(
            RecoveryStatus(round=RestartRound(4), reason="RankDied"),
            phase_seconds={"rehydrate": -5.0},
        ),
    ),
    conditions=(
        condition(JobCondition.RUNNING, False, "RankDied", "the message", START, 1),
        changed(
            condition(JobCondition.LAST_CHECKPOINT_SUCCEEDED, False, "R", "the message", START, 1),
            reason="x" * 200,
        ),
    ),
)

READ = metadata(job(status=BEFORE), resource_version="1")
KEY = ("trainingjobs", NAMESPACE, "job")


def server(takes: Callable[[str], bool], status: int = 422) -> FakeApi:
    """Return an API server with the job, which accepts a status for which `takes` returns True."""

    def refusal(body: Mapping[str, Any]) -> ApiError | None:
        if takes(json.dumps(body)):
            return None
        return ApiError(status, "Invalid", "status.x: Invalid value")

    api = FakeApi(refuse={("PATCH", "trainingjobs"): refusal})
    api.put("trainingjobs", {**raw_job(), "status": BEFORE.to_dict()})
    return api


@pytest.mark.fault("The API server refuses a detail of the status")
@pytest.mark.parametrize("refused", ["-1.0", "-5.0", "x" * 200, '"the message"'])
def test_a_refused_detail_is_left_as_it_was(refused: str) -> None:
    api = server(lambda text: refused not in text)
    reply, written = asyncio.run(write_status(Cluster(api), READ, AFTER))
    assert reply["metadata"]["resourceVersion"] == api.version
    assert written.restart_round == 4
    assert (written.step, written.goodput) == (7, GoodputStatus(ratio=1.0))
    assert written.is_true(JobCondition.RUNNING) is False
    assert written.condition(JobCondition.LAST_CHECKPOINT_SUCCEEDED) is None
    assert api.objects[KEY]["status"]["restartRound"] == 4


@pytest.mark.parametrize(("status", "asked"), [(422, 2), (409, 1), (500, 1)])
def test_a_write_that_is_refused_as_a_whole_fails(status: int, asked: int) -> None:
    api = server(lambda text: False, status)
    with pytest.raises((ApiError, ConflictError)):
        asyncio.run(write_status(Cluster(api), READ, AFTER))
    assert len(api.requests) == asked


def test_a_job_that_has_changed_since_it_was_read_is_not_written() -> None:
    api = server(lambda text: True)
    with pytest.raises(ConflictError):
        asyncio.run(write_status(Cluster(api), job(status=BEFORE), AFTER))
    assert api.objects[KEY]["status"]["restartRound"] == 3
