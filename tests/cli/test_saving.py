"""`save --wait`: what it says meanwhile, and how it ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.support.clock import ManualClock

from holdfast_cli import progress, saving
from holdfast_cli.errors import CommandError, NotFound, StateError
from holdfast_cli.saving import save


@dataclass
class PlayedCluster:
    """A cluster whose operator answers each look at the Checkpoint with the next of these states."""

    looks: list[dict[str, Any] | None]
    uid: str = "mine"
    job: dict[str, Any] = field(default_factory=lambda: {"metadata": {}, "status": {}})

    def patient(self) -> PlayedCluster:
        return self

    def gang(self, name: str) -> dict[str, Any]:
        return self.job

    def create(self, plural: str, body: dict[str, Any]) -> dict[str, Any]:
        return {**body, "metadata": {**body["metadata"], "uid": "mine"}}

    def get(self, plural: str, name: str) -> dict[str, Any]:
        status = self.looks.pop(0)
        if status is None:
            raise NotFound("gone")
        spec, meta = {"jobRef": {"name": "gpt"}}, {"name": name, "uid": self.uid}
        return {"metadata": meta, "spec": spec, "status": status}


def in_phase(phase: str, message: str = "") -> dict[str, Any]:
    conditions = [{"type": "Committed", "status": "False", "reason": "R", "message": message}]
    return {"phase": phase, "conditions": conditions}


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "LOOK_SECONDS", 0)


def saved(*looks: dict[str, Any] | None, uid: str = "mine") -> Any:
    cluster: Any = PlayedCluster(list(looks), uid)
    return save(cluster, "gpt", "gpt-manual", pin=True, wait=True)


@pytest.mark.fault(
    "A person waits for `kubectl holdfast save --wait` while no operator runs, or the store is down"
)
def test_a_long_wait_says_what_it_waits_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = in_phase("InProgress", "the save is in progress")
    clock = ManualClock()  # no time passes, so that there is nothing to say yet
    monkeypatch.setattr(saving, "Waiting", lambda: progress.Waiting(now=clock.monotonic))
    saved({}, {}, saves, saves, in_phase("Committed"))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(saving, "Waiting", lambda: progress.Waiting(quiet_seconds=0.0))
    saved({}, {}, saves, saves, in_phase("Committed"))
    assert capsys.readouterr().err.splitlines() == [
        "waiting for the operator; `kubectl holdfast doctor` says whether one runs",
        "InProgress: the save is in progress; `kubectl holdfast status gpt` shows the job",
    ]


def test_a_wait_is_mentioned_once_and_after_a_while(capsys: pytest.CaptureFixture[str]) -> None:
    clock = ManualClock()
    waiting = progress.Waiting(5.0, clock.monotonic)
    for what in ("one", "one", "one", "other", "other", "other"):
        waiting.on(what)
        clock.advance(3.0)
    assert capsys.readouterr().err.splitlines() == ["one", "other"]


@pytest.mark.fault(
    "A Checkpoint is pruned, or deleted and created again, while `save --wait` waits"
)
@pytest.mark.parametrize(
    ("looks", "uid"),
    [([{}, None], "mine"), ([in_phase("Deleting")], "mine"), ([in_phase("Committed")], "other")],
)
def test_a_checkpoint_that_is_not_kept_ends_the_wait(
    looks: list[dict[str, Any] | None], uid: str
) -> None:
    with pytest.raises(StateError, match="was deleted meanwhile"):
        saved(*looks, uid=uid)


def test_a_save_that_fails_says_why() -> None:
    with pytest.raises(CommandError, match="failed: the job ended before this was saved"):
        saved(in_phase("Failed", "the job ended before this was saved"))
