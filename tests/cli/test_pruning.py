"""`prune`: the plan as people see it, and what is deleted after a question."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.support.operator.builders import checkpoint, job, manifest_digest, status

from holdfast_cli.errors import CommandError, NotFound
from holdfast_cli.output import Format, Result, rendered
from holdfast_cli.pruning import plan_pruning, prune_store, pruning_document, pruning_table
from holdfast_core.api import Checkpoint, Gang, PersistedStep, changed
from holdfast_core.ids import RestartRound, Step

NOW = datetime(2026, 5, 4, tzinfo=UTC)
FIVE = tuple(checkpoint(step, 0, bytes=6_700_000) for step in (10, 20, 30, 40, 50))


def gang(phase: str = "Running", **spec: Any) -> Gang:
    last = PersistedStep(step=Step(50), round=RestartRound(0), manifest=manifest_digest(50, 0))
    return job(2, status(0, (0, 0), phase=phase, last_persisted=last), store="main", **spec)


def clone(source: str, **changes: Any) -> Gang:
    given = job(2, status(0, **changes), store="main", restore_from=source)
    metadata = changed(given.metadata, name="clone", uid="uid-of-the-clone")
    return given.model_copy(update={"metadata": metadata})


def test_the_plan_names_objects_bytes_and_reasons() -> None:
    checkpoints = (*FIVE[:2], checkpoint(30, 0, pin=True), *FIVE[3:])
    plan = plan_pruning(gang(keep_last=2), checkpoints, (clone(FIVE[0].name),), NOW)
    assert pruning_document(plan) == {
        "prune": [{"checkpoint": "job-l2msg4-s20-r0", "bytes": 6_700_000, "reason": "Superseded"}],
        "bytes": 6_700_000,
        "kept": {"NewestPersisted": 1, "KeepLast": 1, "Pinned": 1, "Cloned": 1},
    }
    assert plan.summary == (
        "prune 1 checkpoint (6.4 MiB), keep 4: 1 the newest one in the object store, 1 one of the newest "
        "(keepLast), 1 pinned, 1 another job starts from it"
    )


def test_a_clone_with_a_checkpoint_of_its_own_needs_its_source_no_more() -> None:
    own = PersistedStep(step=Step(9), round=RestartRound(0), manifest=manifest_digest(9, 0))
    plan = plan_pruning(gang(keep_last=4), FIVE, (clone(FIVE[0].name, last_persisted=own),), NOW)
    assert [p.checkpoint.name for p in plan.prune] == ["job-l2msg4-s10-r0"]


def test_another_number_of_newest_ones_can_be_tried() -> None:
    plan = plan_pruning(gang(keep_last=5), FIVE, (), NOW, keep_last=2)
    assert [p.checkpoint.spec.step for p in plan.prune] == [30, 20, 10]


def test_the_table_names_size_and_reason() -> None:
    plan = plan_pruning(gang(keep_last=4), FIVE, (), NOW)
    assert rendered(Result(None, [pruning_table(plan)]), Format.TABLE).splitlines() == [
        "CHECKPOINT            SIZE  REASON",
        "job-l2msg4-s10-r0  6.4 MiB  no rule keeps it",
    ]


@dataclass
class Cluster:
    """The requests that the command makes, answered from objects."""

    job: Gang
    checkpoints: tuple[Checkpoint, ...] = FIVE
    deleted: list[tuple[str, Any]] = field(default_factory=list)
    refused: dict[str, CommandError] = field(default_factory=dict)
    """The error of a deletion, by the name of the object."""
    everywhere: bool = False

    def gang(self, name: str) -> dict[str, Any]:
        return {**self.job.to_dict(), "kind": "TrainingJob"}

    def gangs(self) -> list[dict[str, Any]]:
        return [self.gang("job")]

    def items(self, plural: str) -> list[dict[str, Any]]:
        return [c.to_dict() for c in self.checkpoints if plural == "checkpoints"]

    def delete_with(self, plural: str, name: str, uid: str, patch: dict[str, Any]) -> None:
        if name in self.refused:
            raise self.refused[name]
        self.deleted.append((name, patch))


def run(cluster: Cluster, **given: Any) -> None:
    prune_store(cluster, "job", **given)  # type: ignore[arg-type]  # a played one


def test_the_operator_deletes_the_data_of_what_is_pruned() -> None:
    cluster = Cluster(gang(keep_last=4))
    run(cluster, yes=True)
    ((name, patch),) = cluster.deleted
    assert name == "job-l2msg4-s10-r0"
    assert patch["spec"] == {"deletionPolicy": "DeleteData"}
    assert patch["metadata"] == {
        "finalizers": ["holdfast.dev/delete-data"],
        "resourceVersion": "1",
    }


def test_what_is_gone_already_stops_no_deletion() -> None:
    cluster = Cluster(gang(keep_last=2))
    run(cluster, yes=True)
    every = [name for name, _ in cluster.deleted]
    cluster = Cluster(gang(keep_last=2), refused={every[0]: NotFound("not found")})
    run(cluster, yes=True)
    assert [name for name, _ in cluster.deleted] == every[1:] != []


def test_a_deletion_that_is_refused_says_how_far_the_prune_came() -> None:
    cluster = Cluster(gang(keep_last=2))
    run(cluster, yes=True)
    every = [name for name, _ in cluster.deleted]
    cluster = Cluster(gang(keep_last=2), refused={every[1]: CommandError("changed meanwhile")})
    said = f"changed meanwhile. 1 of {len(every)} checkpoints are being deleted"
    with pytest.raises(CommandError, match=said):
        run(cluster, yes=True)


def test_a_suspended_job_is_pruned_as_well() -> None:
    cluster = Cluster(gang("Suspended", keep_last=4))
    run(cluster, yes=True)
    assert len(cluster.deleted) == 1


def test_a_dry_run_deletes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster(gang("Restarting", keep_last=4))
    run(cluster, dry_run=True)
    assert not cluster.deleted
    out, err = capsys.readouterr()
    assert "job-l2msg4-s10-r0" in out and "prune 1 checkpoint" in out
    assert "can be deleted when it trains, is suspended or is over" in " ".join(err.split())


@pytest.mark.parametrize(
    ("phase", "given", "said"),
    [
        ("Restarting", {"yes": True}, "job is Restarting: its data"),
        ("Running", {}, "Add --yes"),
    ],
)
def test_nothing_is_deleted_that_nobody_can_or_has_agreed_to(
    phase: str, given: dict[str, Any], said: str
) -> None:
    cluster = Cluster(gang(phase, keep_last=4))
    with pytest.raises(CommandError, match=said):
        run(cluster, **given)
    assert not cluster.deleted


def test_a_plan_of_nothing_asks_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster(gang(keep_last=5))
    run(cluster)
    assert "prune 0 checkpoints" in capsys.readouterr().out
