"""The order of effects, and which of them an error or a conflict stops."""

from __future__ import annotations

import asyncio
import traceback
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from tests.support.operator.builders import job

from holdfast_core.api import CheckpointPhase, CheckpointStatus, TrainingJobStatus
from holdfast_core.errors import HoldfastError, UnavailableError
from holdfast_core.ids import RestartRound, Step, Worker
from holdfast_core.messages.schema import PruneReply, RestorePoint
from holdfast_operator.apply.apply import ActionFailed, Applied, apply, memory_after
from holdfast_operator.kube.api import ApiError
from holdfast_operator.model.actions import (
    Action,
    BeginRound,
    CreateCertificates,
    CreateCheckpointObject,
    CreatePod,
    CreateService,
    Decision,
    DeletePod,
    EmitEvent,
    EventKind,
    PruneObject,
    RequestSave,
    SealWorker,
    WriteStatus,
)
from holdfast_operator.model.effects import ConflictError
from holdfast_operator.model.job import JobMemory, Observed, RequestedSave
from holdfast_operator.render.pod import SidecarSettings

WRITE = WriteStatus("7", TrainingJobStatus())
BEGIN = BeginRound("7", TrainingJobStatus(), confirm_gone=("job-l2msg4-1-r0",))
SERVICE = CreateService("job-l2msg4-gang")
CERTIFICATES = CreateCertificates("job-l2msg4-certs-0-r0", RestartRound(0), ("job-l2msg4-0-r0",))
POD = CreatePod("job-l2msg4-0-r0", Worker(0), RestartRound(0))
SEAL = SealWorker(Worker(1), "job-l2msg4-1-r0", "u", "10.0.0.1", RestartRound(1))
OBSOLETE = DeletePod("job-l2msg4-2-r0", "u2")
EVENT = EmitEvent(EventKind.NORMAL, "Why", "the message")
PRUNE = PruneObject(
    Worker(0),
    "job-l2msg4-0-r0",
    "10.0.0.1",
    RestartRound(1),
    "job-l2msg4-s40-r0",
    "u",
    RestorePoint(Step(40), RestartRound(0)),
)
RECORD = CreateCheckpointObject(
    "job-l2msg4-s40-r0",
    Step(40),
    CheckpointStatus(phase=CheckpointPhase.COMMITTED),
)


@dataclass
class Recorder:
    """Effects that record the calls and raise the errors that a test sets."""

    errors: dict[str, Exception] = field(default_factory=dict)
    present: set[str] = field(default_factory=set)
    pruned: tuple[RestorePoint, ...] = ()
    calls: list[str] = field(default_factory=list)

    async def pod_is_gone(self, job: Any, name: str) -> bool:
        return name not in self.present

    async def prune(self, job: Any, action: Any) -> PruneReply:
        await self._call("prune")
        return PruneReply(self.pruned)

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.errors:
            raise self.errors[name]

    def __getattr__(self, name: str) -> Any:
        async def call(*_: Any, **__: Any) -> None:
            await self._call(name)

        return call


def run(effects: Recorder, *actions: Action) -> Applied:
    decision = Decision(actions, None, "test", JobMemory())
    observed = Observed(job=job(2))
    return asyncio.run(apply(decision, observed, effects, SidecarSettings("example/sidecar:1")))


def test_the_status_is_written_first_and_events_come_last() -> None:
    effects = Recorder()
    applied = run(effects, EVENT, OBSOLETE, POD, CERTIFICATES, SERVICE, WRITE)
    assert applied.complete
    assert effects.calls[0] == "write_job_status"
    assert effects.calls[-1] == "emit"
    assert effects.calls.index("create_certificates") < effects.calls.index("create_pod")


@pytest.mark.parametrize(
    "error", [ConflictError("409"), UnavailableError("timed out")], ids=["conflict", "unknown"]
)
def test_a_status_that_was_not_written_stops_the_pass(error: HoldfastError) -> None:
    effects = Recorder(errors={"write_job_status": error})
    applied = run(effects, WRITE, POD, EVENT)
    assert not applied.complete
    assert applied.conflict is isinstance(error, ConflictError)
    assert effects.calls == ["write_job_status"]


def test_a_pod_that_is_there_after_all_costs_no_round() -> None:
    effects = Recorder(present={"job-l2msg4-1-r0"})
    applied = run(effects, BEGIN, EVENT)
    assert applied.not_gone == ("job-l2msg4-1-r0",)
    assert effects.calls == []


def test_without_certificates_no_pod_is_created_and_seals_are_sent() -> None:
    effects = Recorder(errors={"create_certificates": UnavailableError("503")})
    applied = run(effects, CERTIFICATES, POD, SEAL)
    assert [f.action for f in applied.failed] == [CERTIFICATES]
    assert effects.calls == ["create_certificates", "seal"]


def test_a_failed_action_does_not_stop_the_others() -> None:
    effects = Recorder(errors={"seal": UnavailableError("refused")})
    applied = run(effects, SEAL, POD, OBSOLETE, RECORD)
    assert [f.action for f in applied.failed] == [SEAL]
    assert {"create_pod", "delete_pod", "create_checkpoint"} <= set(effects.calls)


@pytest.mark.parametrize(
    ("call", "action", "error", "text"),
    [
        pytest.param(
            "create_pod",
            POD,
            ApiError(403, "Forbidden", "quota"),
            f"action CreatePod {POD.name}",
            id="create",
        ),
        pytest.param(
            "write_job_status",
            WRITE,
            ApiError(500, "", "away"),
            "action WriteStatus",
            id="status",
        ),
        pytest.param("seal", SEAL, UnavailableError("no answer"), None, id="silent sidecar"),
    ],
)
def test_an_error_names_its_action_unless_a_condition_names_the_sidecar(
    call: str, action: Action, error: HoldfastError, text: str | None
) -> None:
    applied = run(Recorder(errors={call: error}), action)
    assert not applied.complete
    notes = [e.__notes__ for e in applied.errors]
    assert notes == ([] if text is None else [[text]])


def test_an_unexpected_exception_says_which_action_it_ended() -> None:
    effects = Recorder(errors={"create_pod": TypeError("'str' object has no attribute 'get'")})
    with pytest.raises(TypeError) as raised:
        run(effects, POD)
    assert f"action CreatePod {POD.name}" in traceback.format_exception_only(raised.value)[-1]


@pytest.mark.parametrize(
    ("deleted", "expected"),
    [
        ((RestorePoint(Step(40), RestartRound(0)),), ["prune", "delete_checkpoint"]),
        ((), ["prune"]),
        ((RestorePoint(Step(41), RestartRound(0)),), ["prune"]),
    ],
    ids=["confirmed", "not yet", "something else"],
)
def test_an_object_goes_only_after_its_data(
    deleted: tuple[RestorePoint, ...], expected: list[str]
) -> None:
    effects = Recorder(pruned=deleted)
    run(effects, PRUNE)
    assert effects.calls == expected


ASK = RequestSave(Worker(0), "job-l2msg4-0-r0", "10.0.0.1", RestartRound(1), "before-lunch")
OLD = JobMemory(round=RestartRound(1), levels_written_at=10.0, counted_at=10.0)
NEW = replace(
    OLD,
    round_seen_at=20.0,
    levels_written_at=20.0,
    counted_at=20.0,
    save_requests=(RequestedSave("before-lunch", RestartRound(1), None, "before-lunch"),),
)


@pytest.mark.parametrize(
    ("applied", "expected"),
    [
        pytest.param(Applied(), NEW, id="all done"),
        pytest.param(
            Applied(failed=(ActionFailed(SEAL, UnavailableError("x")),)), NEW, id="a seal failed"
        ),
        pytest.param(
            Applied(failed=(ActionFailed(ASK, UnavailableError("x")),)),
            replace(NEW, save_requests=()),
            id="a save request failed",
        ),
        pytest.param(Applied(conflict=True), replace(OLD, round_seen_at=20.0), id="conflict"),
        pytest.param(
            Applied(failed=(ActionFailed(WRITE, UnavailableError("x")),)),
            replace(OLD, round_seen_at=20.0, levels_written_at=20.0),
            id="status not written",
        ),
    ],
)
def test_memory_keeps_observations_and_forgets_failed_actions(
    applied: Applied, expected: JobMemory
) -> None:
    decision = Decision((), None, "test", NEW)
    assert memory_after(decision, Observed(job=job(2), memory=OLD), applied) == expected
