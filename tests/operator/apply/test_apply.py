"""The order of effects, and which of them an error or a conflict stops."""

from __future__ import annotations

import asyncio
import traceback
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from tests.support.clock import ManualClock
from tests.support.operator.builders import job
from tests.support.operator.fake_api import FakeApi

from holdfast_core.api import CheckpointPhase, CheckpointStatus, TrainingJobStatus
from holdfast_core.errors import HoldfastError, UnavailableError
from holdfast_core.ids import RestartRound, Step, Worker
from holdfast_core.messages.schema import Prune, RestorePoint, Seal
from holdfast_operator.apply.apply import (
    ActionFailed,
    Applied,
    JobEffects,
    Present,
    apply,
    memory_after,
)
from holdfast_operator.base.metrics import Metrics
from holdfast_operator.kube.api import ApiError, ConflictError
from holdfast_operator.kube.cluster import Cluster, Events
from holdfast_operator.model.actions import (
    Action,
    BeginRound,
    Call,
    CallPath,
    Decision,
    Delete,
    DesiredObject,
    EmitEvent,
    EventKind,
    ReleasePod,
    WriteStatus,
)
from holdfast_operator.model.installation import SidecarSettings
from holdfast_operator.model.job import JobMemory, Observed, RequestedSave
from holdfast_operator.model.reasons import Reason
from holdfast_operator.model.render import (
    render_certificates,
    render_checkpoint,
    render_placeholder,
    render_pod,
    render_service,
)

WRITE = WriteStatus(TrainingJobStatus())
BEGIN = BeginRound(TrainingJobStatus(), confirm_gone=("job-l2msg4-1-r0",))
SIDECAR = SidecarSettings("example/sidecar:1")
SERVICE = DesiredObject(render_service(job(2)))
CERTIFICATES = DesiredObject(render_certificates(job(2), "certs"), ("job-l2msg4-0-r0",))
POD = DesiredObject(render_pod(job(2), Worker(0), RestartRound(0), None, SIDECAR))
PLACEHOLDER = DesiredObject(render_placeholder(job(2), Worker(0), None, SIDECAR))
SEAL = Call(CallPath.SEAL, Worker(1), "job-l2msg4-1-r0", "u", Seal(RestartRound(1)))
OBSOLETE = Delete("Pod", "job-l2msg4-2-r0", "u2", "it is obsolete")
EVENT = EmitEvent(EventKind.NORMAL, "Why", "the message")
PRUNE = Delete(
    "Checkpoint",
    "job-l2msg4-s40-r0",
    "u",
    "it is pruned",
    data=Call(
        CallPath.PRUNE,
        Worker(0),
        "job-l2msg4-0-r0",
        "u0",
        Prune(RestartRound(1), (RestorePoint(Step(40), RestartRound(0)),)),
    ),
)
RECORD = DesiredObject(
    render_checkpoint(
        job(2),
        "job-l2msg4-s40-r0",
        Step(40),
        CheckpointStatus(phase=CheckpointPhase.COMMITTED),
    )
)


@dataclass
class Recorder:
    """Effects that record the calls and raise the errors that a test sets."""

    errors: dict[str, Exception] = field(default_factory=dict)
    """The errors, by the description of the action without its object, such as "create Pod"."""
    exist: set[str] = field(default_factory=set)
    """Names of the pods that exist, and of the objects that are present."""
    pruned: bool = False
    calls: list[str] = field(default_factory=list)

    async def pod_is_gone(self, job: Any, name: str) -> bool:
        return name not in self.exist

    def is_present(self, job: Any, wanted: DesiredObject) -> bool:
        return wanted.name in self.exist

    def call(self, job: Any, call: Call) -> bool:
        self.calls.append(f"call {call.path}")
        return self.pruned and call.path is CallPath.PRUNE

    async def write_status(self, job: Any, status: TrainingJobStatus) -> None:
        self._do("write the status")

    async def put(self, job: Any, wanted: DesiredObject) -> None:
        self._do(f"create {wanted.kind}")

    async def delete(self, job: Any, delete: Delete | ReleasePod) -> None:
        self._do(f"delete {delete.kind}")

    async def emit(self, job: Any, event: EmitEvent) -> None:
        self._do("emit")

    def _do(self, what: str) -> None:
        self.calls.append(what)
        if what in self.errors:
            raise self.errors[what]


def run(effects: Recorder, *actions: Action) -> Applied:
    decision = Decision.of(actions, None, "test")
    return asyncio.run(apply(decision, Observed(job=job(2)), effects))


def test_the_status_is_written_first_and_events_come_last() -> None:
    effects = Recorder()
    applied = run(effects, EVENT, OBSOLETE, POD, CERTIFICATES, SERVICE, WRITE)
    assert applied.complete
    assert effects.calls[0] == "write the status"
    assert effects.calls[-1] == "emit"
    assert effects.calls.index("create Secret") < effects.calls.index("create Pod")


@pytest.mark.parametrize(
    "error", [ConflictError("409"), UnavailableError("timed out")], ids=["conflict", "unknown"]
)
def test_a_status_that_was_not_written_stops_the_pass(error: HoldfastError) -> None:
    effects = Recorder(errors={"write the status": error})
    applied = run(effects, WRITE, POD, EVENT)
    assert not applied.complete
    assert applied.conflict is isinstance(error, ConflictError)
    assert effects.calls == ["write the status"]


def test_a_pod_that_is_there_after_all_costs_no_round() -> None:
    effects = Recorder(exist={"job-l2msg4-1-r0"})
    applied = run(effects, BEGIN, EVENT)
    assert applied.not_gone == ("job-l2msg4-1-r0",)
    assert effects.calls == []


def test_without_certificates_no_worker_is_created_and_seals_are_sent() -> None:
    effects = Recorder(errors={"create Secret": UnavailableError("503")})
    applied = run(effects, CERTIFICATES, POD, PLACEHOLDER, SEAL)
    assert [f.action for f in applied.failed] == [CERTIFICATES]
    assert effects.calls == ["call /v1/seal", "create Secret", "create Pod"]


def test_an_object_that_is_present_costs_no_call() -> None:
    effects = Recorder(exist={SERVICE.name})
    assert run(effects, SERVICE, CERTIFICATES, POD).complete
    assert effects.calls == ["create Secret", "create Pod"]


def test_a_failed_action_does_not_stop_the_others() -> None:
    effects = Recorder(errors={"create Pod": UnavailableError("refused")})
    applied = run(effects, SEAL, POD, OBSOLETE, RECORD)
    assert [f.action for f in applied.failed] == [POD]
    assert {"delete Pod", "create Checkpoint"} <= set(effects.calls)


@pytest.mark.parametrize(
    ("what", "actions", "text"),
    [
        pytest.param(
            "create Pod",
            (SEAL, SERVICE, POD, PLACEHOLDER, OBSOLETE),
            f"2 of 5 actions failed: create Pod {POD.name}: exceeded quota",
            id="creates",
        ),
        pytest.param(
            "delete Pod",
            (WRITE, OBSOLETE),
            f"1 of 2 actions failed: delete Pod {OBSOLETE.name}: exceeded quota",
            id="delete",
        ),
        pytest.param(
            "write the status",
            (WRITE, POD),
            "1 of 1 actions failed: write the status: exceeded quota",
            id="status",
        ),
    ],
)
def test_the_error_of_a_pass_names_action_object_and_answer(
    what: str, actions: tuple[Action, ...], text: str
) -> None:
    applied = run(Recorder(errors={what: ApiError(403, "Forbidden", "exceeded quota")}), *actions)
    assert not applied.complete
    assert str(applied.error) == text


def test_an_unexpected_exception_says_which_action_it_ended() -> None:
    effects = Recorder(errors={"create Pod": TypeError("'str' object has no attribute 'get'")})
    with pytest.raises(TypeError) as raised:
        run(effects, POD)
    assert f"create Pod {POD.name}" in traceback.format_exception_only(raised.value)[-1]


@pytest.mark.parametrize(
    ("deleted", "expected"),
    [
        (True, ["call /v1/prune", "delete Checkpoint"]),
        (False, ["call /v1/prune"]),
    ],
    ids=["confirmed", "not yet"],
)
def test_an_object_goes_only_after_its_data(deleted: bool, expected: list[str]) -> None:
    effects = Recorder(pruned=deleted)
    run(effects, PRUNE)
    assert effects.calls == expected


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
            Applied(failed=(ActionFailed(OBSOLETE, UnavailableError("x")),)),
            NEW,
            id="a delete failed",
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
    decision = replace(Decision.of((), None, "test"), memory=NEW)
    assert memory_after(decision, Observed(job=job(2), memory=OLD), applied) == expected


@pytest.mark.fault("Many checkpoints of a job are pruned within a minute")
async def test_what_is_deleted_is_logged_where_the_events_are_limited(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "holdfast")
    cluster, clock = Cluster(FakeApi()), ManualClock()
    events = Events(cluster, clock)
    nothing: Any = None
    effects = JobEffects(cluster, nothing, nothing, nothing, events, Metrics(), Present(clock))
    for step in (10, 20):
        event = EmitEvent(EventKind.NORMAL, Reason.PRUNING, f"pruning s{step}-r0")
        await effects.emit(job(2), event)
    said = [message for message in caplog.messages if message.startswith("pruning")]
    assert said == ["pruning s10-r0", "pruning s20-r0"]
