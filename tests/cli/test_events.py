"""`events` merges what Kubernetes and the operator say about a job, and folds what repeats."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from holdfast_cli.events import MAX_ROWS, events_result, folded, row_of, subjects_of
from holdfast_cli.output import Format, rendered
from holdfast_core.ids import JobUid
from holdfast_core.names import job_prefix

NOW = datetime(2026, 11, 30, 3, 0, tzinfo=UTC)
PREFIX = job_prefix("gpt", JobUid("uid-1"))


def event(
    reason: str = "Hung",
    *,
    kind: str = "TrainingJob",
    name: str = "gpt",
    uid: str = "uid-1",
    at: str = "02:50:00",
    **more: Any,
) -> dict[str, Any]:
    stamp = f"2026-11-30T{at}Z"
    return {
        "metadata": {"creationTimestamp": stamp},
        "involvedObject": {"kind": kind, "name": name, "uid": uid},
        "type": "Normal",
        "reason": reason,
        "message": "text",
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "count": 1,
    } | more


def gang(store: str | None = "main") -> dict[str, Any]:
    checkpoint = {"object": {"storeRef": {"name": store}}} if store else {}
    return {"metadata": {"name": "gpt", "uid": "uid-1"}, "spec": {"checkpoint": checkpoint}}


def test_events_of_the_job_its_pods_checkpoints_and_store_are_shown() -> None:
    pods = [{"metadata": {"uid": "adopted-pod"}}]
    subjects = subjects_of(gang(), pods)
    shown = [
        event(),
        event(kind="Pod", name=f"{PREFIX}-0-r0", uid="gone"),
        event(kind="Pod", name="trainjob-node-0", uid="adopted-pod"),
        event(kind="Checkpoint", name=f"{PREFIX}-s40-r0", uid="c"),
        event(kind="CheckpointStore", name="main", uid="s"),
    ]
    others = [
        event(uid="another", name="gpt2"),
        event(kind="Pod", name="gpt-0", uid="x"),
        event(kind="CheckpointStore", name="other", uid="s2"),
        {"metadata": {}, "reason": "no object"},
    ]
    assert [subjects.has(one) for one in shown] == [True] * len(shown)
    assert [subjects.has(one) for one in others] == [False] * len(others)
    assert not subjects_of(gang(None), []).has(shown[-1])


def test_repeated_events_become_one_row_and_the_newest_is_last() -> None:
    rows = folded(
        row_of(one)
        for one in [
            event("Hung", at="02:59:00"),
            event("Straggler", at="02:10:00", count=4),
            event("Straggler", at="02:58:00", count=3),
            event("Straggler", at="02:57:00", message="another text"),
        ]
    )
    assert [(row.reason, row.count) for row in rows] == [
        ("Straggler", 1),
        ("Straggler", 7),
        ("Hung", 1),
    ]
    assert (rows[1].first.minute, rows[1].last.minute) == (10, 58)


def test_events_in_the_form_of_the_scheduler_have_times() -> None:
    row = row_of(
        event(
            firstTimestamp=None,
            lastTimestamp=None,
            count=None,
            eventTime="2026-11-30T02:00:00.123456Z",
            series={"count": 9, "lastObservedTime": "2026-11-30T02:30:00.000000Z"},
        )
    )
    assert (row.first.hour, row.last.minute, row.count) == (2, 30, 9)


def test_hostile_events_neither_fill_the_memory_nor_write_to_the_terminal() -> None:
    rows = folded(row_of(event(f"R{n}", message="x\x1b]0;t\x07" * 9000)) for n in range(5000))
    assert len(rows) == MAX_ROWS
    assert all(len(row.message) <= 2000 for row in rows)
    assert row_of(event(firstTimestamp="never", lastTimestamp="never")).last.year == 1970
    text = rendered(events_result(rows[:1], "gpt", NOW), Format.TABLE)
    assert "\x1b" not in text and "\\x1b]0;t\\x07" in text


def test_warnings_are_coloured_and_no_event_is_a_sentence() -> None:
    text = rendered(events_result([row_of(event(type="Warning"))], "gpt", NOW), Format.TABLE)
    assert "\x1b[33mHung" in text and "10m" in text
    assert "gpt has no Events now" in rendered(events_result([], "gpt", NOW), Format.TABLE)
