"""`show`, `pin` and `unpin` of Checkpoint objects: what is shown, what comes next, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import click
import pytest
from tests.support.operator.builders import checkpoint

from holdfast_cli.errors import StateError, UsageError
from holdfast_cli.output import Format, Result, rendered
from holdfast_cli.pinning import pin_object
from holdfast_cli.showing import next_steps, object_lines
from holdfast_cli.targets import ClusterTarget, Kind
from holdfast_core.api import Checkpoint, CheckpointPhase, changed


@dataclass
class Objects:
    """The part of a cluster client that the verbs use."""

    item: Checkpoint
    patched: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)

    def checkpoint_of(self, target: ClusterTarget) -> dict[str, Any]:
        return self.item.to_dict()

    def patch(self, plural: str, name: str, uid: str, body: dict[str, Any]) -> None:
        assert uid == self.item.uid
        self.patched.append((plural, name, body))


def text_of(item: Checkpoint) -> str:
    return click.unstyle(rendered(Result(None, object_lines(item)), Format.TABLE))


def in_phase(phase: CheckpointPhase, **changes: Any) -> Checkpoint:
    item = checkpoint(40, 0, **changes)
    return item.model_copy(update={"status": changed(item.status, phase=phase)})


def test_a_pin_is_written_once(capsys: pytest.CaptureFixture[str]) -> None:
    item = checkpoint(40, 0)
    cluster = Objects(item)
    target = ClusterTarget(item.name, Kind.CHECKPOINT)
    found = pin_object(cluster, target, pin=True)  # type: ignore[arg-type] # it uses two methods
    assert found.text == [f"checkpoint {item.name} is pinned"]
    assert cluster.patched == [("checkpoints", item.name, {"spec": {"pin": True}})]
    cluster = Objects(checkpoint(40, 0, pin=True))
    pin_object(cluster, target, pin=True)  # type: ignore[arg-type] # it uses two methods
    assert cluster.patched == []
    found = pin_object(cluster, target, pin=False)  # type: ignore[arg-type] # it uses two methods
    assert "the retention of the job may delete it" in str(found.text[0])
    assert cluster.patched == [("checkpoints", item.name, {"spec": {"pin": False}})]


@pytest.mark.parametrize(
    ("phase", "said"),
    [
        (CheckpointPhase.DELETING, "is being deleted"),
        (CheckpointPhase.FAILED, "was never saved"),
    ],
)
def test_what_cannot_be_kept_is_not_pinned(phase: CheckpointPhase, said: str) -> None:
    cluster = Objects(in_phase(phase))
    with pytest.raises(StateError, match=said):
        pin_object(cluster, ClusterTarget("x", Kind.CHECKPOINT), pin=True)  # type: ignore[arg-type]
    assert cluster.patched == []


def test_a_job_is_pinned_by_step_only() -> None:
    with pytest.raises(UsageError, match=r"expected job/gpt@STEP, or checkpoint/NAME"):
        pin_object(Objects(checkpoint(40, 0)), ClusterTarget("gpt", Kind.JOB), pin=True)  # type: ignore[arg-type]


def test_a_plain_word_that_is_a_job_pins_no_checkpoint_of_it() -> None:
    cluster = Objects(checkpoint(40, 0))
    with pytest.raises(UsageError, match=r"gpt is a job: expected gpt@STEP, or checkpoint/NAME"):
        pin_object(cluster, ClusterTarget("gpt"), pin=False)  # type: ignore[arg-type]
    assert cluster.patched == []


@pytest.mark.parametrize(
    ("item", "said"),
    [
        (in_phase(CheckpointPhase.DELETING), "it is being deleted; `kubectl holdfast list job"),
        (in_phase(CheckpointPhase.FAILED), "`kubectl holdfast save job"),
        (in_phase(CheckpointPhase.REQUESTED), "`kubectl holdfast status job"),
    ],
)
def test_where_something_is_wrong_the_next_command_is_named(item: Checkpoint, said: str) -> None:
    (step,) = next_steps(item)
    assert step.startswith(said)
    assert text_of(item).endswith(f"next: {step}\n")


def test_nothing_comes_next_for_a_good_one() -> None:
    item = checkpoint(40, 0, bytes=6_700_000)
    assert next_steps(item) == ()
    text = text_of(item)
    for line in ("step                     40", "payload                  6.4 MiB", "Persisted"):
        assert line in text
