"""Stores that do not work: the sidecar's real probe finds the reason, and store and job report it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.operator.operator_bed import OperatorBed, training_job
from tests.support.operator.store_pods import (
    condition_of,
    create_store,
    pods_of,
    run_command,
)
from tests.support.servers.minio_server import MinioServer
from tests.support.servers.store_server import ACCESS_KEY, SECRET_KEY

pytestmark = pytest.mark.integration

WRONG_KEYS = {"accessKey": ACCESS_KEY, "secretKey": "not-the-secret-key"}
TEXTS = ("SignatureDoesNotMatch", "the secret key does not belong to this access key")
"""Parts of the message of the probe. `test_object_probe.py` has the messages of all other bad stores."""


@pytest.fixture(scope="module")
def minio() -> Iterator[MinioServer]:
    with MinioServer() as server:
        yield server


def test_a_store_that_does_not_work_reports_why_on_itself_and_on_its_job(
    empty_bed: OperatorBed, minio: MinioServer, tmp_path: Path
) -> None:
    name, reason, bed = "wrong-key", "AccessDenied", empty_bed
    bed.start_operator()
    create_store(bed, name, WRONG_KEYS, f"http://{minio.endpoint}")
    object_tier = {"storeRef": {"name": name}, "every": {"steps": 10}}
    bed.plane.request("POST", bed.path("trainingjobs"), training_job(object=object_tier))
    probe = bed.until("a probe's pod", lambda: next(iter(pods_of(bed, name)), None))
    report = run_command(bed, probe, tmp_path)
    bed.kubelet.probe_answer = report  # of each further probe, too

    found = bed.until(
        "the store is not available",
        lambda: (c := condition_of(bed, name, "Available")).get("status") == "False" and c,
    )
    assert found["reason"] == reason, found
    for text in TEXTS:
        assert text in found["message"]
    assert SECRET_KEY not in found["message"], "no secret is ever repeated"
    assert WRONG_KEYS["secretKey"] not in found["message"]
    bed.until("the store's Event", lambda: texts_of_events(bed, name, reason, TEXTS))

    accepted = bed.until(
        "the job is not accepted",
        lambda: (c := bed.condition("Accepted")).get("reason") == "StoreUnavailable" and c,
    )
    assert accepted["status"] == "False"
    for text in (f"CheckpointStore {name}", *TEXTS):
        assert text in accepted["message"]
    bed.until("the job's Event", lambda: texts_of_events(bed, "gpt", "StoreUnavailable", TEXTS))
    assert bed.pod_names() == [], "no pod waits for a store that does not work"


def texts_of_events(bed: OperatorBed, name: str, reason: str, texts: tuple[str, ...]) -> list[str]:
    """Return the messages of the Events of this reason about an object that contain all `texts`."""
    events = bed.plane.request("GET", f"/api/v1/namespaces/{bed.namespace}/events")["items"]
    return [
        e["message"]
        for e in events
        if (e["involvedObject"]["name"], e["reason"]) == (name, reason)
        and all(text in e["message"] for text in texts)
    ]
