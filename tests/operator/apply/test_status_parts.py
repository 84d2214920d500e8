"""A part of the status that the API server refuses does not prevent the write of the round."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
from tests.support.operator.builders import START, condition, job

from holdfast_core.api import (
    GoodputStatus,
    JobCondition,
    RecoveryStatus,
    TrainingJobStatus,
    changed,
)
from holdfast_core.ids import RestartRound, Step
from holdfast_operator.apply.status_parts import write_status
from holdfast_operator.kube.api import ApiError
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


class Server:
    """An API server that accepts a status for which `takes` returns True."""

    def __init__(self, takes: Callable[[str], bool], status: int = 422) -> None:
        self._takes = takes
        self._status = status
        self.written: list[Mapping[str, Any]] = []
        self.asked = 0

    async def patch_status(
        self,
        kind: str,
        namespace: str,
        name: str,
        resource_version: str,
        status: Mapping[str, Any],
    ) -> Mapping[str, Any]:
        self.asked += 1
        if not self._takes(json.dumps(status)):
            raise ApiError(self._status, "Invalid", "status.x: Invalid value")
        self.written.append(status)
        return {"metadata": {"resourceVersion": "2"}}


@pytest.mark.fault("The API server refuses a detail of the status")
@pytest.mark.parametrize("refused", ["-1.0", "-5.0", "x" * 200, '"the message"'])
def test_a_refused_detail_is_left_as_it_was(refused: str) -> None:
    server = Server(lambda text: refused not in text)
    reply, written = asyncio.run(
        write_status(cast(Cluster, server), job(status=BEFORE), "1", AFTER)
    )
    assert reply["metadata"]["resourceVersion"] == "2"
    assert written.restart_round == 4
    assert (written.step, written.goodput) == (7, GoodputStatus(ratio=1.0))
    assert written.is_true(JobCondition.RUNNING) is False
    assert written.condition(JobCondition.LAST_CHECKPOINT_SUCCEEDED) is None
    assert [s["restartRound"] for s in server.written] == [4]


@pytest.mark.parametrize(("status", "asked"), [(422, 2), (409, 1), (500, 1)])
def test_a_write_that_is_refused_as_a_whole_fails(status: int, asked: int) -> None:
    server = Server(lambda text: False, status)
    with pytest.raises(ApiError):
        asyncio.run(write_status(cast(Cluster, server), job(status=BEFORE), "1", AFTER))
    assert server.asked == asked
