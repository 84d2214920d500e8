"""The verbs of a person on call, against a real API server and an operator: what they read, and game days."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from kubernetes import config
from tests.support.operator.operator_bed import OperatorBed

from holdfast_cli.checks import CheckLevel, examine
from holdfast_cli.cluster import ClusterClient
from holdfast_cli.doctor import gather
from holdfast_cli.errors import CommandError, StateError
from holdfast_cli.events import read_events
from holdfast_cli.injecting import GAME_DAYS, Fault, Injection, carry_out, prepare
from holdfast_cli.logs import JobLogs, WantedLogs
from holdfast_cli.top import CommitTimes, read_rows

pytestmark = pytest.mark.integration


def client_of(kubeconfig: Path, namespace: str) -> ClusterClient:
    api = config.new_client_from_config(config_file=str(kubeconfig))
    return ClusterClient(api, namespace, "test", api.configuration.host)


@pytest.fixture
def admin(bed: OperatorBed) -> ClusterClient:
    return client_of(bed.plane.kubeconfig, bed.namespace)


@pytest.fixture
def nobody(bed: OperatorBed, tmp_path: Path) -> ClusterClient:
    """Return a client of an account without rights."""
    bed.plane.write_kubeconfig_of(bed.namespace, "default", tmp_path / "nobody")
    return client_of(tmp_path / "nobody", bed.namespace)


def test_top_and_events_show_a_job_that_trains(bed: OperatorBed, admin: ClusterClient) -> None:
    (row,) = read_rows(admin, CommitTimes(admin), datetime.now(UTC))
    assert (row.name, row.phase, row.restarts, row.urgency) == ("gpt", "Running", 0, 3)
    bed.until("an Event", lambda: read_events(admin, "gpt"))
    assert {event.kind for event in read_events(admin, "gpt")} <= {"TrainingJob", "Pod"}


def test_doctor_looks_at_the_installation_and_the_job(
    bed: OperatorBed, admin: ClusterClient
) -> None:
    facts = gather(admin, "gpt", None)
    by_name = {check.name: check for check in examine(facts)}
    for name in ("API server", "clock of this machine", "your rights", "job gpt", "pods"):
        assert by_name[name].level is CheckLevel.OK, by_name[name]
    assert by_name["certificate of the API server"].level is CheckLevel.WARNING, (
        "it ends within a day"
    )
    assert by_name["kinds of Holdfast"].level is CheckLevel.OK, by_name["kinds of Holdfast"]
    assert set(facts.nodes) == {bed.kubelet.node}
    assert facts.node_leases == [], "the node has no lease here"


def test_doctor_is_useful_without_any_right(nobody: ClusterClient) -> None:
    named = {check.name: check for check in examine(gather(nobody, "gpt", None))}
    assert "forbidden" in named["jobs"].found, "also of a job that cannot be read"
    checks = examine(gather(nobody, None, None))
    by_name = {check.name: check for check in checks}
    assert by_name["API server"].level is CheckLevel.OK, "the version may be read by all"
    assert by_name["your rights"].level is CheckLevel.FAILURE
    assert "--clusterrole=view" in by_name["your rights"].mend
    for name in ("operator", "admission policies", "stores", "jobs", "pods", "drills"):
        assert by_name[name].level is CheckLevel.UNKNOWN, by_name[name]
        assert "forbidden" in by_name[name].found


def test_logs_and_events_without_rights_say_which_right_is_missing(
    admin: ClusterClient, nobody: ClusterClient
) -> None:
    with pytest.raises(CommandError, match="cannot get resource"):
        read_events(nobody, "gpt")
    notes: list[str] = []
    logs = JobLogs(admin, WantedLogs("gpt"), notes.append)
    logs.show(lambda line: pytest.fail(f"no kubelet serves {line}"))
    assert len(notes) == 2, "each pod whose log cannot be read is named"


@pytest.mark.fault(
    "A game day in a namespace without the label, and of a pod that is another one by now"
)
def test_a_game_day_needs_the_label_and_hits_only_the_pod_it_named(
    bed: OperatorBed, admin: ClusterClient
) -> None:
    wanted = Injection(Fault.KILL_POD, 1)
    with pytest.raises(StateError, match=f"kubectl label namespace {bed.namespace} {GAME_DAYS}"):
        prepare(admin, "gpt", wanted)
    bed.plane.kubectl("label", "namespace", bed.namespace, f"{GAME_DAYS}=allowed")
    plan = prepare(admin, "gpt", wanted)
    assert plan.pod == bed.pod(1, 0)
    with pytest.raises(CommandError, match=r"409|changed|exists"):
        carry_out(admin, replace(plan, uid="another"))
    assert "being deleted" in carry_out(admin, plan)
    bed.until("the next round", lambda: bed.status().get("restartRound") == 1)


def test_a_command_in_a_pod_needs_the_right_to_exec(
    bed: OperatorBed, nobody: ClusterClient
) -> None:
    with pytest.raises(CommandError, match="does not permit the request"):
        nobody.run_in(bed.pod(0, 0), "trainer", ("true",))
