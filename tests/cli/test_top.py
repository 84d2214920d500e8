"""`top` shows one line for each job, and first those that a person should look at."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from threading import Barrier
from typing import Any

import pytest
from tests.support.hang import HANG_SECONDS

from holdfast_cli.output import Format, rendered
from holdfast_cli.top import (
    WIDTH,
    CommitTimes,
    age_text,
    job_rows,
    read_rows,
    shortened,
    top_result,
)
from holdfast_core.ids import CheckpointId, JobUid, RestartRound, Step
from holdfast_core.names import checkpoint_name

NOW = datetime(2026, 11, 30, 3, 0, tzinfo=UTC)
RUNS = {"Running": ("True", "Training")}


def gang(name: str, conditions: dict[str, tuple[str, str]], **status: Any) -> dict[str, Any]:
    found = [
        {"type": kind, "status": value, "reason": reason, "message": ""}
        for kind, (value, reason) in conditions.items()
    ]
    return {
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": "team-a", "uid": f"uid-{name}"},
        "spec": {"workers": 2, "checkpoint": {"object": {"storeRef": {"name": "main"}}}},
        "status": {"conditions": found, **status},
    }


def store(**bytes_by_uid: int) -> dict[str, Any]:
    jobs = [{"uid": uid.replace("_", "-"), "bytes": b} for uid, b in bytes_by_uid.items()]
    meta = {"name": "main", "namespace": "team-a"}
    return {"metadata": meta, "status": {"usage": {"jobs": jobs}}}


def names(*gangs: dict[str, Any]) -> list[str]:
    return [row.name for row in job_rows(gangs, [], lambda *_: None, NOW)]


def test_jobs_that_wait_for_a_person_come_first_and_those_that_are_over_last() -> None:
    assert names(
        gang("done", {"Running": ("False", "Completed"), "Complete": ("True", "Completed")}),
        gang("trains", RUNS, goodput={"ratio": 0.99}),
        gang("trains-badly", RUNS, goodput={"ratio": 0.5}),
        gang("no-store", RUNS | {"RemoteTierHealthy": ("False", "AccessDenied")}),
        gang("restarts", {"Running": ("False", "WaitingForPods")}),
        gang("paused", {"Running": ("False", "Suspended"), "Suspended": ("True", "Suspended")}),
        gang("lost", {"Running": ("False", "CheckpointsLost"), "CheckpointsLost": ("True", "x")}),
        gang("failed", {"Running": ("False", "x"), "Failed": ("True", "BackoffLimitExceeded")}),
    ) == ["failed", "lost", "restarts", "no-store", "trains-badly", "trains", "done", "paused"]


def test_a_row_has_the_age_of_the_persisted_step_and_the_bytes_in_the_store() -> None:
    asked = []

    def committed(namespace: str, name: str) -> datetime:
        asked.append((namespace, name))
        return NOW - timedelta(minutes=12)

    job = gang("gpt", RUNS, lastPersisted={"step": 40, "round": 1}, restarts=3, phase="Running")
    (row,) = job_rows([job], [store(uid_gpt=3 << 30)], committed, NOW)
    checkpoint = CheckpointId(Step(40), RestartRound(1))
    assert asked == [("team-a", checkpoint_name("gpt", JobUid("uid-gpt"), checkpoint))]
    assert (row.persisted_step, row.persisted_age_seconds) == (40, 720)
    assert (row.stored_bytes, row.restarts, row.reason) == (3 << 30, 3, "Training")
    text = rendered(top_result([row], everywhere=False), Format.TABLE)
    assert "12m" in text and "3.0 GiB" in text


def test_what_is_not_known_is_shown_as_such() -> None:
    job = {"kind": "TrainingJob", "metadata": {"name": "new", "namespace": "team-a", "uid": "u"}}
    (row,) = job_rows([job | {"spec": {"workers": 1}}], [], lambda *_: None, NOW)
    assert (row.phase, row.urgency) == ("Pending", 1)
    assert (row.step, row.persisted_age_seconds, row.goodput, row.stored_bytes) == (None,) * 4
    assert "has no TrainingJob" in rendered(top_result([], everywhere=True), Format.TABLE)


class Answers:
    """A cluster with so many jobs, which answers for a Checkpoint when all of them are asked for."""

    def __init__(self, jobs: int) -> None:
        self.jobs = [
            gang(f"j{n}", RUNS, lastPersisted={"step": 40, "round": 0}) for n in range(jobs)
        ]
        self.all_asked = Barrier(jobs)

    def gangs(self) -> list[dict[str, Any]]:
        return self.jobs

    def items(self, plural: str) -> list[dict[str, Any]]:
        return []

    def in_namespace(self, namespace: str) -> Answers:
        return self

    def get(self, plural: str, name: str) -> dict[str, Any]:
        self.all_asked.wait(HANG_SECONDS)
        return {"status": {"committedAt": "2026-11-30T02:48:00Z"}}


def test_the_times_of_many_jobs_are_read_at_the_same_time() -> None:
    cluster: Any = Answers(8)
    rows = read_rows(cluster, CommitTimes(cluster), NOW)
    assert [row.persisted_age_seconds for row in rows] == [720] * 8


@pytest.mark.parametrize("everywhere", [False, True])
def test_the_table_fits_a_terminal_and_wide_names_all(everywhere: bool) -> None:
    long = "a-job-with-a-very-long-name-of-40-letters"[:40]
    job = gang(
        long,
        {"Running": ("False", "WaitingForHolders")},
        phase="Restarting",
        step=12_345_678,
        lastPersisted={"step": 12_345_000, "round": 1},
        goodput={"ratio": 1.0},
        restarts=999,
    )
    rows = job_rows([job], [store(**{f"uid_{long}": 1023 << 20})], lambda *_: NOW, NOW)
    result = top_result(rows, everywhere=everywhere)
    lines = rendered(result, Format.TABLE).splitlines()
    assert max(map(len, lines)) <= WIDTH + len("\x1b[33m\x1b[0m") * 2
    wide = rendered(result, Format.WIDE)
    assert long in wide and "WaitingForHolders" in wide


@pytest.mark.parametrize(
    ("seconds", "text"), [(-3, "0s"), (119, "119s"), (120, "2m"), (7200, "2h"), (200_000, "2d")]
)
def test_ages(seconds: int, text: str) -> None:
    assert age_text(seconds) == text


def test_a_name_that_is_too_long_keeps_both_of_its_ends() -> None:
    assert shortened("gpt", 12) == "gpt"
    assert shortened("experiment-0001-lr3e-4", 12) == "exper…lr3e-4"
