"""`verify` of a checkpoint of the cluster: the request, what is shown meanwhile, and the exit codes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.support.operator.builders import START, checkpoint, condition

from holdfast_cli import verifying
from holdfast_cli.errors import CommandError, Exit, NotFound, StateError
from holdfast_cli.output import Format, Result, rendered
from holdfast_cli.verifying import drill, obstacle_to_drill, progress
from holdfast_core.api import Checkpoint, CheckpointPhase, DrillStatus, changed
from holdfast_core.api.checkpoint import RequestedDrill

STORED = checkpoint(20, 0, bytes=6_700_000, store="main")


@dataclass
class PlayedCluster:
    """A cluster with one Checkpoint, whose operator answers the third look at a request."""

    checkpoint: Checkpoint
    answer: Callable[[Checkpoint, str], Checkpoint | None]
    patches: list[dict[str, Any]] = field(default_factory=list)
    looks: int = 0

    def patient(self) -> PlayedCluster:
        return self

    def get(self, plural: str, name: str) -> dict[str, Any]:
        if plural == "checkpointstores":
            assert name == "main"
            under_way = {"checkpoint": self.checkpoint.name, "since": "2026-05-04T00:00:00Z"}
            return {"status": {"drills": under_way if self.looks > 2 else {"checkpoint": "other"}}}
        self.looks += 1
        if self.patches and self.looks > 3:
            trigger = self.patches[0]["spec"]["verify"]["trigger"]
            found = self.answer(self.checkpoint, trigger)
            if found is None:
                raise NotFound("gone")
            return found.to_dict()
        return self.checkpoint.to_dict()

    def patch(self, plural: str, name: str, uid: str, body: dict[str, Any]) -> None:
        assert (plural, name, uid) == ("checkpoints", self.checkpoint.name, self.checkpoint.uid)
        self.patches.append(body)
        wanted = RequestedDrill.from_dict(body["spec"]["verify"])
        self.checkpoint = changed(
            self.checkpoint, spec=changed(self.checkpoint.spec, verify=wanted)
        )


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "POLL_SECONDS", 0)


def drilled(of: Checkpoint, trigger: str, value: bool | None, reason: str) -> Checkpoint:
    drill = DrillStatus(
        ended_at=START,
        trigger=trigger,
        bytes=1 << 30,
        seconds=4.0,
        gib_per_second=0.25,
        world_size=4,
    )
    conditions = (*of.status.conditions, condition("Verified", value, reason))
    at = None if value is None else START
    status = changed(of.status, drill=drill, conditions=conditions, verified_at=at)
    return changed(of, status=status)


def verify(cluster: Any, **options: Any) -> Result:
    return drill(
        cluster, STORED.name, **{"restore": False, "world_size": None, "wait": True, **options}
    )


@pytest.mark.parametrize(
    ("value", "reason", "status", "text"),
    [
        (True, "Intact", Exit.SUCCESS, "assembled for 4 ranks: equal"),
        (False, "Damaged", Exit.DAMAGED, "Damaged: "),
        (False, "NotRestorable", Exit.NOT_RESTORABLE, "NotRestorable: "),
    ],
)
def test_the_exit_code_says_what_a_drill_found(
    capsys: pytest.CaptureFixture[str], value: bool, reason: str, status: Exit, text: str
) -> None:
    cluster = PlayedCluster(STORED, lambda c, trigger: drilled(c, trigger, value, reason))
    found = verify(cluster, restore=True, world_size=4)
    assert found.exit == status
    shown = rendered(found, Format.TABLE)
    assert text in shown and "read 1.0 GiB in 4.0 s (256.0 MiB/s)" in shown
    assert capsys.readouterr().err.splitlines() == [
        "waiting for the drill of checkpoint other",
        "reading 6.4 MiB since 2026-05-04T00:00:00Z",
    ]
    (wanted,) = cluster.patches
    assert wanted["spec"]["verify"] == {
        "trigger": wanted["spec"]["verify"]["trigger"],
        "restore": True,
        "worldSize": 4,
    }


def test_a_drill_that_was_cut_short_is_an_error() -> None:
    cluster = PlayedCluster(STORED, lambda c, t: drilled(c, t, None, "StoreUnavailable"))
    with pytest.raises(CommandError, match="not read to its end"):
        verify(cluster)


def test_each_request_has_another_trigger() -> None:
    clusters = [PlayedCluster(STORED, lambda c, t: None) for _ in range(2)]
    for cluster in clusters:
        verify(cluster, wait=False)
    first, second = (c.patches[0]["spec"]["verify"]["trigger"] for c in clusters)
    assert first != second
    assert len(first) <= 64


@pytest.mark.fault("A checkpoint is deleted while `kubectl holdfast verify` waits for its drill")
def test_a_checkpoint_that_is_deleted_meanwhile_ends_the_wait() -> None:
    with pytest.raises(StateError, match="deleted meanwhile"):
        verify(PlayedCluster(STORED, lambda c, t: None))
    pruned = changed(STORED, status=changed(STORED.status, phase=CheckpointPhase.DELETING))
    with pytest.raises(StateError, match="being deleted"):
        verify(PlayedCluster(STORED, lambda c, t: pruned))


@pytest.mark.fault(
    "Another person requests a drill of the same checkpoint before the first request begins"
)
def test_a_request_that_another_one_has_replaced_ends_the_wait() -> None:
    def answer(found: Checkpoint, trigger: str) -> Checkpoint:
        other = changed(found.spec, verify=RequestedDrill(trigger="other"))
        return changed(drilled(found, "other", True, "Intact"), spec=other)

    with pytest.raises(CommandError, match="another request"):
        verify(PlayedCluster(STORED, answer))


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (checkpoint(20, 0, deleting=True), "is being deleted"),
        (checkpoint(20, 0, phase=None), "not saved yet"),
        (checkpoint(20, 0, persisted=False), "is not in an object store"),
        (checkpoint(20, 0, store=None), "is not in an object store"),
    ],
)
def test_what_cannot_be_drilled_is_said_at_once(found: Checkpoint, text: str) -> None:
    obstacle = obstacle_to_drill(found)
    assert obstacle is not None and text in obstacle


def test_a_store_without_a_drill_waits_for_the_operator() -> None:
    text = progress({}, STORED)
    assert text.startswith("waiting for the operator; `kubectl holdfast doctor` says")
