"""Small parts of the operator's edges: settings, access, expectations, events, statuses, metrics."""

from __future__ import annotations

import asyncio
import base64
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest
from tests.support.clock import ManualClock
from tests.support.operator import builders
from tests.support.operator.builders import metadata
from tests.support.operator.fake_api import FakeApi

from holdfast_core.api import (
    GoodputStatus,
    JobCondition,
    PromotedSpare,
    RecoveryStatus,
    SchedulingStatus,
    SparesStatus,
    TrainingJob,
    TrainingJobStatus,
    changed,
)
from holdfast_core.errors import ConfigError
from holdfast_core.ids import CheckpointId, JobUid, RestartRound, Step, Worker
from holdfast_core.logs import Changed
from holdfast_core.names import service_name
from holdfast_operator.base.metrics import Metrics
from holdfast_operator.base.settings import Settings
from holdfast_operator.kube.api import ApiError, from_kubeconfig, from_service_account, load_access
from holdfast_operator.kube.cluster import Cluster, Events
from holdfast_operator.model.installation import SidecarSettings
from holdfast_operator.model.job import Unreadable
from holdfast_operator.model.reasons import Reason
from holdfast_operator.model.render import render_disruption_budget, render_pod
from holdfast_operator.watch.cache import ClusterCache
from holdfast_operator.watch.reflector import is_at_least

NEEDED = {
    "HOLDFAST_SIDECAR_IMAGE": "i",
    "HOLDFAST_OPERATOR_NAMESPACE": "n",
    "HOLDFAST_LEASE_NAME": "l",
    "HOLDFAST_POD_NAME": "p",
}
NOW = datetime(2026, 5, 1, tzinfo=UTC)


def job(status: TrainingJobStatus | None = None) -> TrainingJob:
    return metadata(builders.job(2, status), namespace="team", name="gpt", uid="u")


# --------------------------------------------------------------------------- settings, access


def test_settings_from_environment() -> None:
    env = {
        **NEEDED,
        "HOLDFAST_WATCH_NAMESPACES": "b, a b",
        "HOLDFAST_METRICS_PORT": "9",
        "HOLDFAST_LEASE_SECONDS": "3",
        "HOLDFAST_WATCH_SILENCE_SECONDS": "8",
        "HOLDFAST_FAILING_NODE_CONDITIONS": "KernelDeadlock, example.com/GpuHealthy=False",
        "HOLDFAST_LEAVING_NODE_TAINTS": "ToBeDeletedByClusterAutoscaler, karpenter.sh/disrupted",
        "KUBERNETES_SERVICE_HOST": "fd00::1",
        "KUBERNETES_SERVICE_PORT": "6443",
    }
    settings = Settings.from_env(env)
    assert settings.watch_namespaces == ("a", "b")
    assert settings.metrics_port == 9
    assert (settings.lease_seconds, settings.watch_silence_seconds) == (3, 8)
    assert settings.failing_conditions == {
        ("KernelDeadlock", "True"),
        ("example.com/GpuHealthy", "False"),
    }
    assert settings.leaving_taints == {"ToBeDeletedByClusterAutoscaler", "karpenter.sh/disrupted"}
    assert settings.api_server == "https://[fd00::1]:6443"
    default = Settings.from_env(NEEDED)
    assert default.watch_namespaces == ()
    assert (default.lease_seconds, default.watch_silence_seconds) == (10, 75)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"HOLDFAST_SIDECAR_IMAGE": ""}, "HOLDFAST_SIDECAR_IMAGE"),
        ({"HOLDFAST_OPERATOR_NAMESPACE": ""}, "HOLDFAST_OPERATOR_NAMESPACE"),
        ({"HOLDFAST_LEASE_NAME": ""}, "HOLDFAST_LEASE_NAME"),
        ({"HOLDFAST_POD_NAME": ""}, "HOLDFAST_POD_NAME"),
        ({"HOLDFAST_METRICS_PORT": "x"}, "HOLDFAST_METRICS_PORT"),
        ({"HOLDFAST_LEASE_SECONDS": "1"}, "HOLDFAST_LEASE_SECONDS=1: expected 2 to 600"),
        ({"HOLDFAST_WATCH_SILENCE_SECONDS": "601"}, "HOLDFAST_WATCH_SILENCE_SECONDS=601"),
        ({"HOLDFAST_LOG_LEVEL": "loud"}, "HOLDFAST_LOG_LEVEL"),
        ({"HOLDFAST_FAILING_NODE_CONDITIONS": "Ready=False"}, "contains 'Ready=False'"),
        ({"HOLDFAST_FAILING_NODE_CONDITIONS": "GpuHealthy=no"}, "contains 'GpuHealthy=no'"),
        ({"HOLDFAST_LEAVING_NODE_TAINTS": "spot:NoSchedule"}, "contains 'spot:NoSchedule'"),
        (
            {"HOLDFAST_LEAVING_NODE_TAINTS": "node.kubernetes.io/unreachable"},
            "nodes that Kubernetes taints as lost are detected in any case",
        ),
        ({"HOLDFAST_WORKER_NETWORK_POLICY": "yes"}, "HOLDFAST_WORKER_NETWORK_POLICY"),
        ({"HOLDFAST_WORKER_NETWORK_POLICY": "[]"}, "HOLDFAST_WORKER_NETWORK_POLICY"),
    ],
)
def test_settings_name_what_is_wrong(change: dict[str, str], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        Settings.from_env({**NEEDED, **change})


def kubeconfig(folder: Path, cluster: dict[str, Any], user: dict[str, Any]) -> Path:
    path = folder / "config"
    config = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": "https://x:1/", **cluster}}],
        "users": [{"name": "u", "user": user}],
    }
    path.write_text(yaml.safe_dump(config))
    return path


def test_kubeconfig_with_data_files_and_tokens(tmp_path: Path) -> None:
    data = base64.b64encode(b"PEM").decode()
    (tmp_path / "ca.crt").write_text("CA")
    (tmp_path / "token").write_text("first\n")
    access = from_kubeconfig(
        kubeconfig(
            tmp_path,
            {"certificate-authority": "ca.crt"},
            {"client-certificate-data": data, "client-key-data": data, "tokenFile": "token"},
        )
    )
    assert (access.server, access.ca_pem) == ("https://x:1", "CA")
    assert (access.certificate_pem, access.key_pem) == ("PEM", "PEM")
    assert access.current_token() == "first"
    (tmp_path / "token").write_text("second")
    assert access.current_token() == "second"


@pytest.mark.parametrize(
    ("cluster", "user", "word"),
    [
        ({"insecure-skip-tls-verify": True}, {"token": "t"}, "insecure"),
        ({}, {"exec": {"command": "aws"}}, "plug-in"),
        ({"certificate-authority": "missing"}, {"token": "t"}, "missing"),
        ({"certificate-authority-data": "%%%"}, {"token": "t"}, "base64"),
    ],
)
def test_kubeconfig_refusals(
    tmp_path: Path, cluster: dict[str, Any], user: dict[str, Any], word: str
) -> None:
    with pytest.raises(ConfigError, match=word):
        from_kubeconfig(kubeconfig(tmp_path, cluster, user))


def test_service_account_and_nothing(tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_text("CA")
    (tmp_path / "token").write_text("t")
    access = from_service_account("https://k:443", tmp_path)
    assert (access.ca_pem, access.current_token()) == ("CA", "t")
    with pytest.raises(ConfigError, match="KUBECONFIG"):
        load_access(Settings.from_env(NEEDED))


# --------------------------------------------------------------------------- our own writes


async def test_writes_hold_a_pass_until_they_are_seen_or_expire() -> None:
    clock, api, gang = ManualClock(), FakeApi(), job()
    cache = ClusterCache(api, clock, (), lambda key: None, lambda job: None)
    pods = [
        api.put("pods", render_pod(gang, Worker(n), RestartRound(0), None, SidecarSettings("i:1")))
        for n in range(2)
    ]
    seen, late = (p["metadata"] for p in pods)

    async def look() -> None:
        for reflector in cache.reflectors:
            await reflector.relist()

    api.remove("pods", late["namespace"], late["name"])
    await look()
    assert cache.wait_seconds(gang.uid) is None
    cache.expect(gang, seen["uid"], created=True)
    assert cache.wait_seconds(gang.uid) is None, "the watch was faster than the reply"
    cache.expect(gang, seen["uid"], created=False)
    clock.advance(1)
    cache.expect(gang, late["uid"], created=True)
    clock.advance(1)
    assert cache.wait_seconds(gang.uid) == 4.0
    assert cache.wait_seconds(JobUid("other")) is None
    api.put("pods", pods[1])
    await look()
    assert cache.wait_seconds(gang.uid) == 3.0
    api.remove("pods", seen["namespace"], seen["name"])
    await look()
    assert cache.wait_seconds(gang.uid) is None
    cache.expect(gang, "lost", created=True)
    clock.advance(5)
    assert cache.wait_seconds(gang.uid) is None


async def test_each_change_of_a_pod_looks_only_at_this_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass creates all pods of a gang, and the watch delivers them one after the other."""
    api, gang, workers = FakeApi(), job(), 50
    cache = ClusterCache(api, ManualClock(), (), lambda key: None, lambda job: None)
    looks: list[str] = []
    get = cache.pods.get

    def counted(uid: str) -> object:
        looks.append(uid)
        return get(uid)

    monkeypatch.setattr(cache.pods, "get", counted)
    for n in range(workers):
        pod = render_pod(gang, Worker(n), RestartRound(0), None, SidecarSettings("i:1"))
        cache.expect(gang, api.put("pods", pod)["metadata"]["uid"], created=True)
    for reflector in cache.reflectors:
        await reflector.relist()
    assert len(looks) == 2 * workers
    assert cache.wait_seconds(gang.uid) is None


@pytest.mark.parametrize(
    ("seen", "expected", "result"),
    [("10", "9", True), ("9", "10", False), ("9", "9", True), ("a", "a", True), ("b", "a", False)],
)
def test_resource_versions(seen: str, expected: str, result: bool) -> None:
    assert is_at_least(seen, expected) is result


# --------------------------------------------------------------------------- events, logs


async def test_events_at_most_one_a_minute_a_reason() -> None:
    clock, api = ManualClock(), FakeApi()
    events = Events(Cluster(api), clock)
    subject = Unreadable("TrainingJob", "team", "gpt", "u", "a field")
    for _ in range(5):
        await events.emit(subject, "Warning", "PodLost", "the message")
    await events.emit(subject, "Normal", "Accepted", "the message")
    assert [e["reason"] for e in api.all("events", "team")] == ["PodLost", "Accepted"]
    clock.advance(61)
    await events.emit(subject, "Warning", "PodLost", "w" * 5000)
    newest = api.all("events")[-1]
    assert (newest["count"], len(newest["message"])) == (5, 1000)
    assert newest["involvedObject"]["uid"] == "u"
    api.refuse["POST", "events"] = ApiError(403, "Forbidden", "no")
    await events.emit(subject, "Normal", "Other", "never raises")


def test_changed_forgets() -> None:
    logged = Changed()
    assert not logged.forget("a")
    logged.info("a", "x")
    assert logged.forget("a")
    assert not logged.forget("a")


# --------------------------------------------------------------------------- statuses, metrics


def test_metrics_show_ready_and_promoted_spares() -> None:
    metrics = Metrics()
    two = TrainingJobStatus(
        restart_round=RestartRound(0), spares=SparesStatus(ready=2, births=(RestartRound(0),) * 2)
    )
    metrics.status_written(job(), two)
    taken = PromotedSpare(worker=Worker(1), pod="gpt-s0-r0")
    one = changed(two, spares=changed(two.spares, ready=1, promoted=(taken,)))
    metrics.status_written(job(two), one)
    metrics.status_written(job(one), one)
    text = generate_latest(metrics.registry).decode()
    assert 'holdfast_job_spares_ready{job="gpt",namespace="team"} 1.0' in text
    assert 'holdfast_job_spares_promoted_total{job="gpt",namespace="team"} 1.0' in text
    metrics.status_written(job(one), changed(one, spares=None))
    assert (
        'spares_ready{job="gpt",namespace="team"} 0.0' in generate_latest(metrics.registry).decode()
    )
    metrics.forget("team", "gpt")
    assert 'spares_ready{job="gpt"' not in generate_latest(metrics.registry).decode()


def test_metrics_count_what_a_status_write_adds() -> None:
    metrics = Metrics()
    first = TrainingJobStatus(restart_round=RestartRound(0), goodput=GoodputStatus(ratio=0.5))
    metrics.status_written(job(), first)
    second = TrainingJobStatus(
        restart_round=RestartRound(1),
        recoveries=(
            RecoveryStatus(
                round=RestartRound(1), reason="PodLost", phase_seconds={"detect": 0.5}, lost_steps=3
            ),
        ),
        goodput=GoodputStatus(ratio=0.25),
    )
    metrics.status_written(job(first), second)
    metrics.status_written(job(second), second)
    (interrupted,) = second.recoveries
    third = changed(
        second,
        restart_round=RestartRound(2),
        recoveries=(
            interrupted.with_phases(seal=0.25),
            RecoveryStatus(round=RestartRound(2), reason="PodLost", phase_seconds={"detect": 0.5}),
        ),
    )
    metrics.status_written(job(second), third)
    fourth = changed(
        third,
        restart_round=RestartRound(3),
        scheduling=SchedulingStatus(timeouts=1, retry_at=builders.START),
    )
    metrics.status_written(job(third), fourth)
    metrics.status_written(job(fourth), changed(fourth, scheduling=SchedulingStatus(timeouts=1)))
    text = generate_latest(metrics.registry).decode()
    assert 'holdfast_restart_rounds_total{reason="FirstRound"} 1.0' in text
    assert 'holdfast_restart_rounds_total{reason="PodLost"} 2.0' in text
    assert 'holdfast_restart_rounds_total{reason="NotScheduled"} 1.0' in text
    assert 'holdfast_schedule_timeouts_total{job="gpt",namespace="team"} 1.0' in text
    assert 'holdfast_recovery_seconds_count{phase="detect"} 2.0' in text
    assert 'holdfast_recovery_seconds_count{phase="seal"} 1.0' in text
    assert 'holdfast_lost_steps_total{job="gpt",namespace="team"} 3.0' in text
    assert 'holdfast_goodput_ratio{job="gpt",namespace="team"} 0.25' in text
    assert "process_resident_memory_bytes" in text
    metrics.forget("team", "gpt")
    assert "holdfast_goodput_ratio{" not in generate_latest(metrics.registry).decode()


def test_a_job_that_is_over_raises_no_alert_about_its_goodput() -> None:
    metrics = Metrics()
    trains = TrainingJobStatus(restart_round=RestartRound(0), goodput=GoodputStatus(ratio=0.5))
    metrics.status_written(job(), trains)
    over = changed(trains, completion_time=builders.START)
    metrics.status_written(job(trains), over)
    metrics.status_written(job(over), over)
    assert "holdfast_goodput_ratio{" not in generate_latest(metrics.registry).decode()


# --------------------------------------------------------------------------- PodDisruptionBudgets


def test_a_disruption_budget_that_exists_gets_the_new_number() -> None:
    """It is created, changed, and created again after a user has deleted it."""
    name = service_name("job", builders.UID)
    api, key = FakeApi(), ("poddisruptionbudgets", "team-a", name)
    cluster = Cluster(api)

    def set_to(number: int) -> int:
        body = render_disruption_budget(builders.job(number + 1), number + 1)
        asyncio.run(cluster.set_disruption_budget(body))
        return int(api.objects[key]["spec"]["minAvailable"])

    assert [set_to(1), set_to(2), set_to(2)] == [1, 2, 2]
    del api.objects[key]
    assert set_to(0) == 0


def test_only_a_job_that_was_in_a_queue_has_the_metric_of_the_queue() -> None:
    metrics = Metrics()

    def shown(queued: bool | None) -> list[str]:
        status = TrainingJobStatus()
        if queued is not None:
            status = status.with_condition(
                JobCondition.QUEUED, queued, Reason.NOT_QUEUED, "text", NOW, 1
            )
        metrics.status_written(job(), status)
        return lines()

    def lines() -> list[str]:
        text = generate_latest(metrics.registry).decode()
        return [line for line in text.splitlines() if line.startswith("holdfast_job_queued{")]

    series = 'holdfast_job_queued{job="gpt",namespace="team"}'
    assert shown(None) == []
    assert shown(True) == [f"{series} 1.0"]
    assert shown(False) == [f"{series} 0.0"]
    metrics.forget("team", "gpt")
    assert lines() == []


def test_each_quarantine_is_counted_once() -> None:
    metrics = Metrics()
    first, second = (CheckpointId(Step(s), RestartRound(0)) for s in (20, 30))
    for old, new in (((), (first,)), ((first,), (first, second)), ((first, second), (second,))):
        before, after = (TrainingJobStatus(quarantined=found) for found in (old, new))
        metrics.status_written(job(before), after)
    text = generate_latest(metrics.registry).decode()
    assert 'holdfast_checkpoints_quarantined_total{job="gpt",namespace="team"} 2.0' in text
