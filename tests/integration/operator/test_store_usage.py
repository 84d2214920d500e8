"""The operator, a real API server and a real MinIO: status.usage is what LIST says, and a quota is said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.operator.operator_bed import OperatorBed
from tests.support.operator.store_pods import condition_of, create_store, pods_of, run_command
from tests.support.servers.minio_server import MinioServer
from tests.support.servers.store_server import ACCESS_KEY, SECRET_KEY
from tests.support.shards.builders import JOB_UID
from tests.support.tiers.stores import s3_store

from holdfast_core.ids import CheckpointId, RestartRound, Step
from holdfast_core.store.tier import ObjectTier
from holdfast_core.store.upload import Document

pytestmark = pytest.mark.integration
KEYS = {"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}
MIB = 1 << 20


@pytest.fixture(scope="module")
def minio() -> Iterator[MinioServer]:
    with MinioServer() as server:
        yield server


def test_the_usage_of_a_store_is_what_list_says_and_a_quota_is_said(
    empty_bed: OperatorBed, minio: MinioServer, tmp_path: Path
) -> None:
    bed, objects = empty_bed, s3_store(minio.config(""), minio.credentials)
    tier = ObjectTier(objects)
    tier.put_manifest("team-a", JOB_UID, CheckpointId(Step(1), RestartRound(0)), b"{}")
    objects.write(f"team-a/{JOB_UID}/shards/other", Document(b"x" * 3 * MIB))
    bed.start_operator()
    create_store(bed, "main", KEYS, f"http://{minio.endpoint}", quota={"bytes": "2Mi"})

    def finish(verb: str) -> str:
        pod: dict[str, Any] = bed.until(
            f"the pod of the {verb}",
            lambda: next(
                (
                    p
                    for p in pods_of(bed, "main")
                    if p["metadata"]["name"].startswith(f"holdfast-{verb}-")
                    and "deletionTimestamp" not in p["metadata"]
                ),
                None,
            ),
        )
        message = run_command(bed, pod, tmp_path)
        bed.kubelet.finish_pod(pod["metadata"]["name"], message)
        return message

    assert json.loads(finish("probe"))["available"]
    finish("usage")
    usage = bed.until(
        "the usage",
        lambda: (
            bed.plane.request("GET", bed.path("checkpointstores", "main"))
            .get("status", {})
            .get("usage")
        ),
    )
    listed = objects.list("").objects
    assert (usage["bytes"], usage["objects"]) == (
        sum(item.size_bytes for item in listed),
        len(listed),
    )
    assert usage["jobs"][0]["uid"] == JOB_UID
    assert usage["size"] == "3.0 MiB"
    pressure = condition_of(bed, "main", "QuotaPressure")
    assert (pressure["status"], pressure["reason"]) == ("True", "QuotaReached")
    store = bed.plane.request("GET", bed.path("checkpointstores", "main"))
    assert [r["limitBytes"] for r in store["status"]["reachedQuotas"]] == [2 * MIB]

    raised = {"bytes": "100Mi"}
    bed.change(
        bed.path("checkpointstores", "main"), lambda store: store["spec"].update(quota=raised)
    )
    finish("probe")  # of the new spec
    bed.until(
        "the raised quota",
        lambda: condition_of(bed, "main", "QuotaPressure").get("reason") == "WithinQuota",
    )
    store = bed.plane.request("GET", bed.path("checkpointstores", "main"))
    assert not store["status"].get("reachedQuotas")
    objects.close()


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({"quota": {}}, "quota has no limit"),
        ({"quota": {"bytes": "20m"}}, "quota.bytes"),
        ({"quota": {"bytes": "1Gi", "perJob": "2Gi"}}, "quota.perJob is 2Gi"),
        ({"usage": {"every": "5s"}}, "usage.every"),
        ({"usage": {"sweepOrphansAfter": "10m"}}, "usage.sweepOrphansAfter"),
    ],
)
def test_bad_quotas_and_periods_are_refused_with_a_remedy(
    empty_bed: OperatorBed, spec: dict[str, Any], text: str
) -> None:
    with pytest.raises(Exception, match=text.replace(".", r"\.")):
        create_store(empty_bed, "bad", KEYS, "http://minio:9000", **spec)
