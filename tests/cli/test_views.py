"""What a person sees: each view from a plain object, on complete and on sparse input."""

from __future__ import annotations

from datetime import UTC, datetime

import click
import pytest

from holdfast_cli.gangs import members, silence_of_operator
from holdfast_cli.output import Format, Result, rendered
from holdfast_cli.views import (
    SHOWN_RECOVERIES,
    TIERS,
    Screen,
    checkpoints_table,
    gangs_lines,
    goodput_bar,
    phases_line,
    status_lines,
)
from holdfast_core.api import PromotedSpare
from holdfast_core.ids import JobUid, RestartRound, Worker
from holdfast_core.names import RECOVERY_PHASES, pod_name

JOB = {
    "kind": "TrainingJob",
    "metadata": {"name": "gpt"},
    "spec": {"workers": 2},
    "status": {
        "phase": "Running",
        "restartRound": 1,
        "step": 57,
        "lastCommittedStep": 50,
        "lastPersisted": {"step": 40, "round": 1},
        "readyWorkers": "2/2",
        "goodput": {"ratio": 0.75},
        "recoveries": [
            {"round": 1, "reason": "RankFailed", "workers": [1], "totalSeconds": 2.0},
            {
                "round": 2,
                "reason": "PodLost",
                "workers": [3],
                "nodes": ["node-3"],
                "phaseSeconds": {"seal": 0.3},
                "restoredStep": 20,
                "lostSteps": 7,
            },
        ],
        "conditions": [
            {
                "type": "RemoteTierHealthy",
                "status": "False",
                "reason": "AccessDenied",
                "message": "403 SignatureDoesNotMatch",
            }
        ],
    },
}


def shown(lines) -> str:
    return click.unstyle(rendered(Result(None, lines), Format.TABLE))


def test_status_shows_levels_tiers_and_what_is_wrong():
    text = shown(status_lines(Screen(JOB, tiers={0: {"memory": 50, "node": 50}, 1: {"node": 40}})))
    for expected in (
        "gpt",
        "Running",
        "57",
        "50",
        "40",
        "2/2",
        "75.0%",
        "AccessDenied",
        "memory",
    ):
        assert expected in text


@pytest.mark.fault("A person asks for `kubectl holdfast status` while no operator runs")
@pytest.mark.parametrize(
    ("phase", "written", "expected"),
    [
        ("Running", "2026-05-01T11:59:30Z", None),
        ("Running", "2026-05-01T11:20:00Z", "no operator has written this status for 40 minutes"),
        ("Running", "2026-05-01T13:00:00Z", None),
        ("Running", None, None),
        ("Suspended", "2026-05-01T08:00:00Z", None),
        ("", "2026-05-01T11:50:00Z", "for 10 minutes: `kubectl holdfast doctor`"),
    ],
)
def test_a_status_that_no_operator_writes_is_said_to_be_old(phase, written, expected):
    entries = [
        {"manager": "kubectl", "time": "2026-05-01T11:59:59Z"},
        {"manager": "holdfast-operator", "subresource": "status", "time": written},
    ]
    meta = {"name": "gpt", "creationTimestamp": written, "managedFields": entries}
    gang = {"metadata": meta, "status": {"phase": phase} if phase else {}}
    found = silence_of_operator(gang, datetime(2026, 5, 1, 12, tzinfo=UTC))
    assert found is None if expected is None else expected in found


def test_status_of_a_job_that_the_operator_has_not_handled_yet():
    new = {"kind": "TrainingJob", "metadata": {"name": "new"}, "spec": {"workers": 3}}
    text = shown(status_lines(Screen(new)))
    assert "Pending" in text and "0/3" in text


def test_goodput_bar_is_bounded():
    assert goodput_bar(None) == "-"
    assert goodput_bar(1.4).startswith("█" * 24)
    assert "░" * 24 in goodput_bar(-1)


def test_stragglers_are_listed_if_there_are_any():
    slow = {**JOB, "status": {**JOB["status"], "stragglers": [5, 12]}}
    assert "ranks 5, 12" in shown(status_lines(Screen(slow)))
    assert "stragglers" not in shown(status_lines(Screen(JOB)))


def test_recoveries_have_a_row_each_and_the_newest_its_phases():
    lines = shown(status_lines(Screen(JOB))).splitlines()
    [head] = [n for n, line in enumerate(lines) if "RECOVERY" in line]
    rows = [line.split() for line in lines[head + 1 : head + 3]]
    assert rows == [
        ["round", "2", "PodLost", "3", "-", "20", "7"],
        ["round", "1", "RankFailed", "1", "2.0", "s", "-", "-"],
    ]
    assert "round 2 (node-3): seal 0.3 s" in lines[head + 3]
    none = {**JOB, "status": {**JOB["status"], "recoveries": []}}
    assert "RECOVERY" not in shown(status_lines(Screen(none)))


def test_of_ten_recoveries_the_newest_are_shown():
    many = [
        {
            "round": n,
            "reason": "SidecarUnreachable",
            "workers": list(range(8)),
            "nodes": [f"node-{i}.example.internal" for i in range(8)],
            "totalSeconds": 123.4,
            "restoredStep": 123456,
            "lostSteps": 12345,
            "phaseSeconds": dict.fromkeys(RECOVERY_PHASES, 12.3),
            "sources": dict.fromkeys(TIERS, 1024),
        }
        for n in range(1, 11)
    ]
    job = {**JOB, "status": {**JOB["status"], "recoveries": many}}
    text = shown(status_lines(Screen(job)))
    assert sum("SidecarUnreachable" in line for line in text.splitlines()) == SHOWN_RECOVERIES
    assert "5 earlier ones" in text
    assert len(text.splitlines()) < 30


def test_the_phases_of_a_recovery_are_named_in_their_order():
    closed = {
        "round": 5,
        "reason": "NodeLost",
        "begunAt": "2026-01-01T00:00:00Z",
        "totalSeconds": 23.1,
        "phaseSeconds": {"back_off": 0.0, "detect": 20.2, "first_step": 0.4, "seal": 2.5},
        "sources": {"object": 1, "memory": 7},
    }
    assert phases_line(closed) == (
        "round 5: detect 20.2 s, back off 0.0 s, seal 2.5 s, first step 0.4 s. "
        "Ranks by the tier of their state: memory 7, object 1"
    )


def test_checkpoints_are_listed_by_step():
    items = [
        {"metadata": {"name": "b"}, "spec": {"step": 20, "jobRef": {"name": "gpt"}}},
        {
            "metadata": {"name": "a"},
            "spec": {"step": 10, "pin": True},
            "status": {"size": "2.0 KiB"},
        },
    ]
    text = shown([checkpoints_table(items)])
    assert text.index("a ") < text.index("b ") and "2.0 KiB" in text and "yes" in text


def adoption(**status):
    return {
        "kind": "CheckpointAdoption",
        "metadata": {"name": "lm", "uid": "u"},
        "spec": {"workers": 2},
        "status": status,
    }


def pod(name, uid, **metadata):
    counts = {"initContainerStatuses": [{"restartCount": 2}], "containerStatuses": [{}]}
    return {
        "metadata": {"name": name, "uid": uid, **metadata},
        "spec": {"nodeName": "node-1"},
        "status": {"phase": "Running", **counts},
    }


def test_an_adoption_is_shown_with_its_pods_checkpoints_and_what_its_controller_costs():
    adopted = {
        "type": "Adopted",
        "status": "True",
        "reason": "PodsAdopted",
        "message": "Job lm creates only the lost pod again",
    }
    given = adoption(
        members=[0, 1],
        pods=[{"worker": 0, "uid": "a", "birth": 0}, {"worker": 1, "uid": "c", "birth": 1}],
        conditions=[adopted],
    )
    steps = [
        {"metadata": {"name": f"lm-s{step}"}, "spec": {"step": step}} for step in (10, 40, 30, 20)
    ]
    found = members(given, [pod("lm-0-x", "a"), pod("lm-1-old", "b"), pod("lm-1-new", "c")])
    text = shown(status_lines(Screen(given, found, checkpoints=steps)))
    assert "CheckpointAdoption lm" in text
    assert "Adopted: PodsAdopted: Job lm creates only the lost pod again" in text
    assert "lm-0-x" in text and "lm-1-new" in text and "lm-1-old" not in text
    assert "lm-s40" in text and "lm-s20" in text and "lm-s10" not in text


@pytest.mark.parametrize(
    ("value", "reason", "listed"),
    [
        ("True", "Stopping", True),
        ("False", "ResizeFailed", True),
        ("False", "NoObjectTier", True),
        ("False", "Resized", False),
    ],
)
def test_a_resize_that_goes_on_or_is_refused_is_shown(value, reason, listed):
    condition = {"type": "Resizing", "status": value, "reason": reason, "message": "to have 3"}
    text = shown(status_lines(Screen(adoption(conditions=[condition]))))
    assert (f"Resizing: {reason}: to have 3" in text) is listed


def test_an_elastic_gang_is_shown_with_the_workers_that_it_wants():
    condition = {
        "type": "WorkersMissing",
        "status": "True",
        "reason": "Shrunk",
        "message": "the gang continues with 3 of 4 workers",
    }
    gang = adoption(readyWorkers="3/4", conditions=[condition])
    text = shown(status_lines(Screen(gang)))
    assert "3/4" in text
    assert "WorkersMissing: Shrunk: the gang continues with 3 of 4 workers" in text


def test_a_worker_whose_pod_is_gone_or_leaves_is_still_listed():
    given = adoption(members=[0, 0], pods=[{"worker": 1, "uid": "b", "birth": 0}])
    lost, leaving = members(given, [pod("lm-1", "b", deletionTimestamp="2026-01-01T00:00:00Z")])
    assert (lost.worker, lost.exists, lost.phase) == (0, False, "-")
    assert (leaving.worker, leaving.pod, leaving.node) == (1, "lm-1", "node-1")
    assert (leaving.phase, leaving.restarts) == ("Terminating", 2)


def test_pods_of_a_training_job_are_found_by_the_birth_rounds_of_its_members():
    job = {
        "kind": "TrainingJob",
        "metadata": {"name": "gpt", "uid": "u"},
        "spec": {"workers": 1},
        "status": {"members": [3]},
    }
    name = pod_name("gpt", JobUid("u"), Worker(0), RestartRound(3))
    former = pod_name("gpt", JobUid("u"), Worker(0), RestartRound(2))
    (member,) = members(job, [pod(former, "a"), pod(name, "b")])
    assert member.pod == name


def test_the_pod_of_a_worker_may_have_been_a_spare():
    promoted = PromotedSpare(worker=Worker(0), pod="gpt-x-s0-r0")
    job = {
        "kind": "TrainingJob",
        "metadata": {"name": "gpt", "uid": "u"},
        "spec": {"workers": 1},
        "status": {
            "members": [3],
            "spares": {"promoted": [str(promoted)]},
        },
    }
    (member,) = members(job, [pod("gpt-x-s0-r0", "a"), pod("gpt-x-s0-r3", "b")])
    assert (member.worker, member.pod) == (0, "gpt-x-s0-r0")


def test_spares_have_a_row_if_the_job_has_some():
    assert "spares" not in shown(status_lines(Screen(JOB)))
    status = {**JOB["status"], "spares": {"ready": 1, "births": [0, 0]}}
    with_spares = {**JOB, "spec": {**JOB["spec"], "spares": 2}, "status": status}
    assert "1/2 ready" in shown(status_lines(Screen(with_spares)))


def test_gangs_of_both_kinds_are_listed():
    text = shown(gangs_lines([JOB, adoption(phase="Restarting", restarts=7)]))
    assert text.index("TrainingJobs") < text.index("gpt") < text.index("CheckpointAdoptions")
    for expected in ("Running", "Restarting", "0/2", "75.0%", " 7 "):
        assert expected in text
    assert "no TrainingJob and no CheckpointAdoption" in shown(gangs_lines([]))


def test_a_job_that_does_not_run_says_why_in_the_list_and_on_its_screen():
    why = "pods of workers 1 have no node: 0/3 nodes are available"
    condition = {"type": "Running", "status": "False", "reason": "NotScheduled", "message": why}
    job = {
        "kind": "TrainingJob",
        "metadata": {"name": "new"},
        "spec": {"workers": 3},
        "status": {"phase": "Starting", "conditions": [condition]},
    }
    assert f"Running: NotScheduled: {why}" in shown(status_lines(Screen(job)))
    assert "NotScheduled" in shown(gangs_lines([job]))
