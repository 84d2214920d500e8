"""The life of the operator process: it starts, restarts, is killed, and runs twice."""

from __future__ import annotations

import signal
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.operator.operator_bed import (
    WORKERS,
    OperatorBed,
    training,
)
from tests.support.servers.ports import free_port

from holdfast_core.names import certificates_secret_name, service_name

pytestmark = pytest.mark.integration


def test_a_new_job_is_started_with_all_of_its_objects(bed: OperatorBed) -> None:
    status = bed.status()
    assert status["restartRound"] == 0
    assert status["members"] == [0, 0]
    assert status["phase"] == "Running"
    core = f"/api/v1/namespaces/{bed.namespace}"
    assert (
        bed.plane.request("GET", f"{core}/services/{service_name('gpt', bed.uid())}")["spec"][
            "clusterIP"
        ]
        == "None"
    )
    secret = bed.plane.request(
        "GET", f"{core}/secrets/{certificates_secret_name('gpt', bed.uid(), 0, 0)}"
    )
    assert secret["immutable"] is True
    assert sorted(secret["data"]) == [
        "ca.crt",
        *(f"{bed.pod(w, 0)}.{end}" for w in range(WORKERS) for end in ("crt", "key")),
    ]
    uid = bed.plane.request("GET", bed.path("trainingjobs", "gpt"))["metadata"]["uid"]
    assert secret["metadata"]["ownerReferences"][0]["uid"] == uid
    ca_path = f"/api/v1/namespaces/holdfast-system/secrets/holdfast-ca-{uid}"
    assert sorted(bed.plane.request("GET", ca_path)["data"]) == ["ca.crt", "ca.key"]
    events = bed.plane.request("GET", f"{core}/events")["items"]
    assert "RoundBegan" in {e["reason"] for e in events}
    metrics = urllib.request.urlopen(f"http://127.0.0.1:{bed.metrics_port}/metrics").read().decode()
    assert 'holdfast_restart_rounds_total{reason="FirstRound"} 1.0' in metrics
    for path in ("healthz", "readyz"):
        with urllib.request.urlopen(f"http://127.0.0.1:{bed.health_port}/{path}") as reply:
            assert reply.status == 200
    bed.plane.request("DELETE", bed.path("trainingjobs", "gpt"))
    bed.until("the authority goes with its job", lambda: bed.is_gone(ca_path))


def test_a_restarted_operator_does_not_disturb_a_running_gang(bed: OperatorBed) -> None:
    sidecar = bed.kubelet.sidecars[bed.pod(0, 0)]
    sent = tuple(sidecar.rounds)
    bed.kill_operator()
    bed.start_operator()
    sidecar.since = -1
    bed.until("the coordinator is followed again", lambda: sidecar.since >= 0)
    bed.kubelet.publish(bed.pod(0, 0), replace(training(7, 0, 41)))
    bed.until("acted on", lambda: sidecar.since == 7)
    assert bed.status()["restartRound"] == 0
    assert bed.status().get("restarts", 0) == 0
    assert sidecar.round == 0
    # The acknowledgements are lost, so the operator sends ROUND again: the same one, with a version above
    # the newest of every member.
    again = sidecar.rounds[len(sent) :]
    assert {message.content_digest() for message in again} <= {sent[-1].content_digest()}


@pytest.mark.fault("Two operators are active")
def test_two_operators_do_what_one_does(empty_bed: OperatorBed, tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    ports = {"metrics_port": free_port(), "health_port": free_port()}
    second = replace(empty_bed, folder=tmp_path / "second", process=None, **ports)
    empty_bed.start_operator()
    second.start_operator()
    try:
        empty_bed.train()
        empty_bed.kubelet.delete_pod(empty_bed.pod(1, 0))
        empty_bed.until("round 1", lambda: empty_bed.status().get("restartRound") == 1)
        empty_bed.until(
            "new pod", lambda: empty_bed.pod_names() == [empty_bed.pod(0, 0), empty_bed.pod(1, 1)]
        )
        assert empty_bed.status()["restartRound"] == 1
        assert empty_bed.status()["restarts"] == 1
        for bed in (empty_bed, second):
            assert bed.process is not None
            assert bed.process.poll() is None, bed.log()
    finally:
        second.kill_operator()


def test_sigterm_ends_the_process_in_order(empty_bed: OperatorBed) -> None:
    empty_bed.executed = True
    empty_bed.start_operator()
    empty_bed.until("in sync", lambda: "in sync" in empty_bed.log())
    process = empty_bed.process
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=HANG_SECONDS) == 0
    assert "operator ends" in empty_bed.log()
