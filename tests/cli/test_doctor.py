"""Checks of `doctor`: what is wrong has a remedy, and what could not be read is not green."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from kubernetes import client
from tests.support.servers.ports import closed_port

from holdfast_cli import checks
from holdfast_cli.checks import RIGHTS, Check, CheckLevel, Findings, Unread, examine
from holdfast_cli.cluster import ClusterClient
from holdfast_cli.doctor import doctor_result, gather
from holdfast_cli.errors import Exit
from holdfast_cli.gangs import persisted_name
from holdfast_cli.output import Format, rendered
from holdfast_core.api import CheckpointStore, TrainingJob
from holdfast_core.api.crd import crd

NOW = datetime(2026, 11, 30, 3, 0, tzinfo=UTC)
UNREAD = Unread("forbidden")


def stamp(seconds_ago: float) -> str:
    return (NOW - timedelta(seconds=seconds_ago)).isoformat()


def conditions(**found: str) -> list[dict[str, str]]:
    """Return conditions, each written as type="status reason message"."""
    rows = []
    for kind, text in found.items():
        status, reason, message = text.split(" ", 2)
        rows.append({"type": kind, "status": status, "reason": reason, "message": message})
    return rows


def named(name: str, **more: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "holdfast-system"}, **more}


def operator(ready: int = 1, version: str = "0.1.0", replicas: int = 1) -> dict[str, Any]:
    found = named("holdfast", spec={"replicas": replicas}, status={"readyReplicas": ready})
    found["metadata"]["labels"] = {"app.kubernetes.io/version": version}
    return found


def lease(seconds_ago: float = 2, holder: str = "pod-1") -> dict[str, Any]:
    spec = {"holderIdentity": holder, "renewTime": stamp(seconds_ago), "leaseDurationSeconds": 10}
    return named("holdfast", spec=spec)


def gang(**found: str) -> dict[str, Any]:
    spec = {
        "workers": 2,
        "procsPerWorker": 2,
        "checkpoint": {"memory": {"sizeLimit": "8Gi"}, "object": {"storeRef": {"name": "main"}}},
    }
    status = {
        "phase": "Running",
        "step": 41,
        "lastPersisted": {"step": 40, "round": 0},
        "conditions": conditions(**(found or {"Running": "True Training ok"})),
    }
    meta = {"name": "gpt", "namespace": "team-a", "uid": "u"}
    return {"kind": "TrainingJob", "metadata": meta, "spec": spec, "status": status}


def checkpoint(bytes_: int = 4 << 30, **found: str) -> dict[str, Any]:
    meta = {"name": persisted_name(gang())}
    status = {"bytes": bytes_, "worldSize": 4, "conditions": conditions(**found)}
    return {"metadata": meta, "status": status}


def store(**found: str) -> dict[str, Any]:
    status = {
        "conditions": conditions(**(found or {"Available": "True Probed ok"})),
        "lastProbe": stamp(60),
        "usage": {"bytes": 1000, "orphans": []},
    }
    return {"metadata": {"name": "main", "namespace": "team-a"}, "status": status}


def pod(**status: Any) -> dict[str, Any]:
    meta = {"name": "gpt-0", "namespace": "team-a"}
    return {"metadata": meta, "spec": {"nodeName": "n-1"}, "status": {"phase": "Running", **status}}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    return pod(phase="Pending", containerStatuses=[{"name": "trainer", "state": state}])


def slow() -> dict[str, Any]:
    found = waiting("ContainerCreating")
    found["metadata"]["creationTimestamp"] = stamp(300)
    return found


def node(**found: str) -> dict[str, Any]:
    return named("n-1", status={"conditions": conditions(**found)})


KNOWN = {kind: crd(kind) for kind in (TrainingJob, CheckpointStore)}


def installed(kind: Any) -> dict[str, Any]:
    found = copy.deepcopy(KNOWN[kind])
    found["metadata"]["labels"] = {"app.kubernetes.io/version": "0.1.0"}
    return found


def facts(**changes: Any) -> Findings:
    """Return what is read where all is well, with changes."""
    policies = ["holdfast-trainingjobs", "holdfast-operator"]
    healthy = Findings(
        now=NOW,
        namespace="team-a",
        version="0.1.0",
        api_version={"gitVersion": "v1.34.1"},
        server_time=NOW,
        certificate_ends=NOW + timedelta(days=100),
        served={"resources": [{"name": "trainingjobs"}, {"name": "checkpointstores"}]},
        kinds=[installed(TrainingJob), installed(CheckpointStore)],
        known_kinds=list(KNOWN.values()),
        operators=[operator()],
        leases={"holdfast-system/holdfast": lease()},
        policies=[named(one) for one in policies],
        bindings=[named(one, spec={"policyName": one}) for one in policies],
        rights=[(right, True) for right in RIGHTS],
        stores=[store()],
        gangs=[gang()],
        pods=[pod()],
        nodes={"n-1": node(Ready="True KubeletReady ok", DiskPressure="False ok ok")},
        node_leases=[named("n-1", spec={"renewTime": stamp(5)})],
        checkpoints=[checkpoint(Verified="True Intact ok")],
        metrics={"gpt-0": "holdfast_saves_failed_total 0.0\n"},
    )
    return replace(healthy, **changes)


def levels(found: Iterable[Check]) -> set[CheckLevel]:
    return {check.level for check in found}


def test_all_is_well() -> None:
    found = examine(facts())
    assert levels(found) == {CheckLevel.OK}
    assert len({check.name for check in found}) >= 14, "each check says that it was made"
    assert doctor_result(found).exit is Exit.SUCCESS


def without_fields(kind: Any, *path: str) -> dict[str, Any]:
    found = installed(kind)
    schema = found["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for part in path[:-1]:
        schema = schema["properties"][part]
    del schema["properties"][path[-1]]
    return found


CASES: list[Any] = [
    pytest.param(
        {"api_version": {"gitVersion": "v1.30.9+k3s1"}}, "FAILURE", "1.31 or newer", id="old server"
    ),
    pytest.param({"now": NOW - timedelta(seconds=40)}, "WARNING", "40 s behind", id="clock"),
    pytest.param({"now": NOW + timedelta(hours=1)}, "FAILURE", "S3 refuses", id="clock beyond S3"),
    pytest.param(
        {"certificate_ends": NOW + timedelta(days=3)}, "WARNING", "in 3 days", id="expires"
    ),
    pytest.param({"certificate_ends": NOW - timedelta(days=1)}, "FAILURE", "renew", id="expired"),
    pytest.param({"served": UNREAD}, "FAILURE", "helm upgrade --install", id="no chart"),
    pytest.param(
        {"served": {"resources": [{"name": "trainingjobs"}]}},
        "FAILURE",
        "without checkpointstores",
        id="half of the chart",
    ),
    pytest.param(
        {"kinds": [installed(TrainingJob), without_fields(CheckpointStore, "spec", "quota")]},
        "FAILURE",
        "checkpointstores .spec.quota",
        id="old kinds",
    ),
    pytest.param({"operators": []}, "FAILURE", "helm upgrade --install", id="no operator"),
    pytest.param(
        {"operators": [operator(0)]}, "FAILURE", "describe deployment holdfast", id="not ready"
    ),
    pytest.param(
        {"operators": [operator(0, replicas=0)]}, "FAILURE", "--replicas=1", id="scaled to 0"
    ),
    pytest.param(
        {"operators": [operator(version="0.0.9")]}, "WARNING", "version 0.0.9", id="old operator"
    ),
    pytest.param({"leases": {}}, "FAILURE", "no process leads", id="no leader"),
    pytest.param(
        {"leases": {"holdfast-system/holdfast": lease(300)}}, "FAILURE", "5m ago", id="dead leader"
    ),
    pytest.param({"policies": [], "bindings": []}, "WARNING", "*-trainingjobs", id="no policies"),
    pytest.param({"bindings": []}, "WARNING", "has no binding", id="no binding"),
    pytest.param(
        {"rights": [(right, right.verb != "delete") for right in RIGHTS]},
        "WARNING",
        "delete checkpoints.holdfast.dev (for prune)",
        id="rights of a verb",
    ),
    pytest.param(
        {"rights": [(right, False) for right in RIGHTS]}, "FAILURE", "--clusterrole=view", id="none"
    ),
    pytest.param(
        {"stores": [store(Available="False AccessDenied 403")]},
        "FAILURE",
        "AccessDenied: 403",
        id="store down",
    ),
    pytest.param(
        {"stores": [store(Listed="True x y")]}, "WARNING", "not probed yet", id="new store"
    ),
    pytest.param(
        {"stores": [store(Available="True a b", QuotaPressure="True NearQuota 90 %")]},
        "WARNING",
        "holdfast prune",
        id="quota",
    ),
    pytest.param(
        {
            "stores": [
                store()
                | {
                    "status": store()["status"]
                    | {"usage": {"bytes": 100, "orphans": [{"kind": "shards", "bytes": 50}]}}
                }
            ]
        },
        "WARNING",
        "sweepOrphansAfter",
        id="orphans",
    ),
    pytest.param(
        {"gangs": [gang(Running="False CheckpointsLost x", CheckpointsLost="True a lost")]},
        "FAILURE",
        "kubectl holdfast restart gpt --from-start",
        id="lost checkpoints",
    ),
    pytest.param(
        {"gangs": [gang(Running="True Training ok", UploadsHeld="True QuotaReached full")]},
        "FAILURE",
        "holdfast prune gpt",
        id="uploads held",
    ),
    pytest.param(
        {"gangs": [gang(Running="False CreateRefused violates PodSecurity")]},
        "WARNING",
        "let the template fit Pod Security",
        id="refused pods",
    ),
    pytest.param(
        {"gangs": [gang() | {"status": {}}]}, "FAILURE", "no operator has seen it", id="unseen job"
    ),
    pytest.param(
        {"pods": [waiting("ImagePullBackOff", "not found")]},
        "FAILURE",
        "imagePullSecrets",
        id="image",
    ),
    pytest.param(
        {"pods": [waiting("CreateContainerConfigError", 'secret "s3" not found')]},
        "FAILURE",
        'secret "s3" not found',
        id="Secret",
    ),
    pytest.param({"pods": [slow()]}, "WARNING", "not started for 5m, as for a volume", id="mount"),
    pytest.param(
        {"pods": [pod(conditions=conditions(PodScheduled="False Unschedulable 0/3 nodes"))]},
        "FAILURE",
        "0/3 nodes",
        id="unschedulable",
    ),
    pytest.param(
        {"pods": [waiting("CrashLoopBackOff")] * 40}, "FAILURE", "24 more pods", id="many pods"
    ),
    pytest.param(
        {"nodes": {"n-1": node(Ready="True a b", DiskPressure="True KubeletHasDiskPressure full")}},
        "FAILURE",
        "kubectl drain n-1",
        id="disk pressure",
    ),
    pytest.param(
        {"node_leases": [named("n-1", spec={"renewTime": stamp(-30)})]},
        "WARNING",
        "30 s in the future",
        id="node ahead",
    ),
    pytest.param(
        {"node_leases": [named("n-1", spec={"renewTime": stamp(300)})]},
        "WARNING",
        "it is lost, or its clock is behind",
        id="node late",
    ),
    pytest.param(
        {"checkpoints": [checkpoint(20 << 30)]},
        "FAILURE",
        "checkpoint.memory.sizeLimit",
        id="slots",
    ),
    pytest.param(
        {"metrics": {"gpt-0": "holdfast_saves_skipped_total 3.0\n"}},
        "WARNING",
        "3 saves were skipped",
        id="skipped saves",
    ),
    pytest.param(
        {"checkpoints": [checkpoint(Verified="False Damaged shard 3")]},
        "FAILURE",
        "Damaged: shard 3",
        id="damaged",
    ),
    pytest.param(
        {"checkpoints": [checkpoint(Verified="Unknown NotRead down")]},
        "WARNING",
        "down",
        id="unread",
    ),
]


@pytest.mark.parametrize(("changes", "level", "words"), CASES)
def test_what_is_wrong_is_reported_with_its_remedy(
    changes: dict[str, Any], level: str, words: str
) -> None:
    found = [check for check in examine(facts(**changes)) if check.level is not CheckLevel.OK]
    assert found, "the check notices it"
    assert levels(found) == {CheckLevel[level]}
    assert all(check.mend for check in found), "each says what mends it"
    text = rendered(doctor_result(found), Format.TABLE)
    assert words in text
    failed = CheckLevel[level] is CheckLevel.FAILURE
    assert doctor_result(found).exit is (Exit.FAILED if failed else Exit.SUCCESS)


READS = (
    "server_time",
    "certificate_ends",
    "kinds",
    "operators",
    "leases",
    "policies",
    "bindings",
    "rights",
    "stores",
    "gangs",
    "pods",
    "node_leases",
    "checkpoints",
)


@pytest.mark.fault("The CLI has no rights, or the chart is half installed, and doctor is asked")
@pytest.mark.parametrize("read", READS)
def test_a_check_that_could_not_be_made_is_not_green(read: str) -> None:
    found = examine(facts(**{read: UNREAD}))
    (unknown, *more) = [check for check in found if check.level is not CheckLevel.OK]
    assert unknown.level is CheckLevel.UNKNOWN and "forbidden" in unknown.found
    assert levels(more) <= {CheckLevel.UNKNOWN}


def test_a_server_that_answers_nothing_still_has_a_report() -> None:
    unread = dict.fromkeys((*READS, "api_version", "served"), UNREAD)
    found = examine(facts(**unread, nodes={"n-1": UNREAD}, metrics={"gpt-0": UNREAD}))
    assert CheckLevel.OK not in levels(found)
    assert doctor_result(found).exit is Exit.FAILED


@pytest.mark.fault("The API server is away, and doctor is asked")
def test_a_server_that_is_away_costs_one_request() -> None:
    configuration = type.__call__(client.Configuration)
    with closed_port() as port:
        configuration.host, configuration.retries = f"http://127.0.0.1:{port}", False
        away = ClusterClient(client.ApiClient(configuration), "team-a", "here", configuration.host)
        found = examine(gather(away, "gpt", None))
    assert found[0].level is CheckLevel.FAILURE and "cannot be reached" in found[0].found
    assert CheckLevel.OK not in levels(found)
    assert doctor_result(found).exit is Exit.FAILED


def test_commands_for_another_namespace_than_the_default_say_so() -> None:
    failed = list(checks.jobs(facts(gangs=[gang(CheckpointsLost="True NoCopy gone")])))
    assert "add -n team-a" in rendered(doctor_result(failed, "team-a"), Format.TABLE)
    assert "add -n" not in rendered(doctor_result(failed), Format.TABLE)
    assert "add -n" not in rendered(doctor_result(examine(facts()), "team-a"), Format.TABLE)


def test_hostile_texts_write_nothing_to_the_terminal() -> None:
    hostile = gang(Running="False x \x1b]0;t\x07\nsecond line" + "y" * 9000)
    text = rendered(doctor_result(list(checks.jobs(facts(gangs=[hostile])))), Format.TABLE)
    assert "\x1b]0" not in text and "\\x1b]0;t" in text
    assert max(map(len, text.splitlines())) < 800


def test_no_job_and_no_store_leave_the_checks_of_the_installation() -> None:
    found = examine(facts(stores=[], gangs=[], pods=[], nodes={}, checkpoints=[], metrics={}))
    assert levels(found) == {CheckLevel.OK}
    assert {"API server", "operator", "your rights"} <= {check.name for check in found}
