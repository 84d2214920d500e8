"""When a store is listed, what its report means, and which limits of a quota hold uploads."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.support.operator.builders import NAMESPACE, raw_store

from holdfast_core.api import (
    Checkpoint,
    CheckpointStore,
    CheckpointStoreStatus,
    ReachedQuota,
    changed,
)
from holdfast_core.contract import UsageContract
from holdfast_core.ids import JobUid
from holdfast_operator.base.metrics import Metrics
from holdfast_operator.decide.usages import (
    MAX_NAMED_JOBS,
    listing_command,
    location,
    quota_is_new,
    request_of,
    seconds_to_listing,
    uses,
    with_listing,
    with_quota,
)
from holdfast_operator.model.command_pods import CommandFailed, CommandFailure, CommandReport
from holdfast_operator.model.reasons import Reason

NOW = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
GIB = 1 << 30
JOB, OTHER = JobUid("uid-a"), JobUid("uid-b")
REPORT: dict[str, Any] = {
    "bytes": 10 * GIB,
    "objects": 42,
    "checkpoints": 7,
    "orphans": {
        "shards": {"objects": 2, "bytes": 5, "oldestSeconds": 9000},
        "uploads": {"objects": 0, "bytes": 0, "oldestSeconds": 0},
    },
    "swept": {"objects": 1, "bytes": 3},
    "namespaces": [[NAMESPACE, 8 * GIB, 30], ["team-b", 2 * GIB, 10]],
    "jobs": [[NAMESPACE, JOB, 7 * GIB, 20], ["team-b", OTHER, 2 * GIB, 10]],
}


def store(quota: dict[str, str] | None = None, **status: Any) -> CheckpointStore:
    raw = raw_store("main")
    raw["metadata"] |= {"uid": "s", "generation": 1, "resourceVersion": "1"}
    if quota is not None:
        raw["spec"]["quota"] = quota
    raw["status"] = {**raw.get("status", {}), **status}
    return CheckpointStore.from_dict(raw)


def after(record: CheckpointStore, report: dict[str, Any]) -> CheckpointStoreStatus:
    return with_listing(record, CommandReport(report), {JOB: "train"}, NOW)


def judged(
    quota: dict[str, str], report: dict[str, Any] | None = None, pinned: tuple[int, ...] = ()
) -> CheckpointStoreStatus:
    """Return the status of a store with this quota after this listing, with pins of these sizes."""
    record = store(quota)
    if report is not None:
        record = changed(record, status=after(record, report))
    return with_quota(record, [pin(size) for size in pinned], NOW)


def limited(record: CheckpointStore) -> CheckpointStore:
    """Return the store after a listing, with what its quota means then."""
    listed = changed(record, status=after(record, REPORT))
    return changed(listed, status=with_quota(listed, (), NOW))


def pin(size: int) -> Checkpoint:
    return Checkpoint.from_dict(
        {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "Checkpoint",
            "metadata": {
                "name": f"c-{size}",
                "namespace": NAMESPACE,
                "uid": f"c{size}",
                "resourceVersion": "1",
                "creationTimestamp": "2026-05-01T11:00:00Z",
            },
            "spec": {"jobRef": {"name": "train"}, "step": 1, "pin": True},
            "status": {"bytes": size, "jobUid": JOB},
        }
    )


def pressure(status: CheckpointStoreStatus) -> tuple[str, str, str]:
    found = status.condition("QuotaPressure")
    return str(found.status), found.reason, found.message


def test_a_listing_becomes_the_usage_with_names_of_known_jobs() -> None:
    usage = after(store(), REPORT).usage
    assert (usage.bytes, usage.objects, usage.checkpoints) == (10 * GIB, 42, 7)
    assert [(j.name, j.bytes) for j in usage.jobs] == [("train", 7 * GIB), (None, 2 * GIB)]
    assert usage.other_bytes == GIB
    assert [(o.kind, o.bytes, o.oldest_seconds) for o in usage.orphans] == [("shards", 5, 9000)]
    assert usage.to_dict()["size"] == "10.0 GiB"
    assert usage.listed_at == NOW


@pytest.mark.parametrize(
    "result",
    [
        CommandFailed(CommandFailure.FAILED, "the usage's pod failed"),
        CommandReport({"error": "UnavailableError", "message": "no answer"}),
        CommandReport({**REPORT, "bytes": -1}),
        CommandReport({**REPORT, "jobs": [[NAMESPACE, JOB]]}),
        CommandReport({**REPORT, "jobs": "many"}),
        CommandReport({**REPORT, "namespaces": [["n" * 500, 1, 1]]}),
        CommandReport({}),
    ],
    ids=["no report", "error", "negative", "short row", "no rows", "long name", "empty"],
)
def test_a_failed_listing_keeps_the_numbers_and_says_why(
    result: CommandReport | CommandFailed,
) -> None:
    record = store()
    known = changed(record, status=after(record, REPORT))
    status = with_listing(known, result, {}, NOW + timedelta(minutes=10))
    assert status.usage == known.status.usage
    condition = status.condition("Listed")
    assert condition is not None and condition.is_false
    assert condition.reason == Reason.LIST_FAILED and condition.message
    assert status.last_listing == NOW + timedelta(minutes=10), "the next try is a new pod"


def test_the_time_of_the_next_listing() -> None:
    record = store()
    assert seconds_to_listing(record, NOW) == 0
    known = changed(record, status=after(record, REPORT))
    assert seconds_to_listing(known, NOW + timedelta(minutes=4)) == 360
    reached = changed(
        known, status=changed(known.status, reached_quotas=(ReachedQuota(bytes=2, limit_bytes=1),))
    )
    assert seconds_to_listing(reached, NOW + timedelta(seconds=20)) == 40, "uploads wait for it"
    assert seconds_to_listing(known, NOW - timedelta(days=2)) == 0, "a clock was set back"


def test_another_place_is_listed_soon_and_the_old_numbers_hold_nothing() -> None:
    record = store({"bytes": "1Gi"})
    known = limited(record)
    assert known.status.reached_quotas
    s3 = changed(record.spec.s3, prefix="elsewhere")
    moved = changed(known, spec=changed(record.spec, s3=s3))
    assert location(moved) != location(record)
    assert with_quota(moved, (), NOW).reached_quotas == ()
    assert seconds_to_listing(moved, NOW + timedelta(seconds=61)) == 0


def test_the_pod_changes_with_each_result_only() -> None:
    record = store()
    name = listing_command(record, UsageContract()).pod_name(record)
    other = listing_command(record, UsageContract(3600, (JOB,))).pod_name(record)
    assert other == name, "two operators create the same pod"
    listed = changed(record, status=after(record, REPORT))
    assert listing_command(listed, UsageContract()).pod_name(record) != name


@pytest.mark.fault("Thousands of jobs that are over stay in a cluster")
def test_a_listing_sweeps_only_if_all_jobs_that_may_upload_are_named() -> None:
    record = store()
    assert request_of(record, {JOB}, {OTHER}) == UsageContract(86400, (JOB,), (OTHER,))
    many = {JobUid(f"j{number:04}") for number in range(MAX_NAMED_JOBS)}
    assert request_of(record, {*many, JOB}, {OTHER}) == UsageContract()
    found = request_of(record, {JOB}, many)
    assert found == UsageContract(86400, (JOB,), tuple(sorted(many))[:-1])


@pytest.mark.parametrize(
    ("quota", "condition", "reached"),
    [
        ({"bytes": "20Gi"}, ("False", "WithinQuota"), []),
        ({"bytes": "12Gi"}, ("True", "NearQuota"), []),
        ({"bytes": "10Gi"}, ("True", "QuotaReached"), [(None, None)]),
        ({"perNamespace": "8Gi"}, ("True", "QuotaReached"), [(NAMESPACE, None)]),
        ({"perJob": "7Gi"}, ("True", "QuotaReached"), [(NAMESPACE, JOB)]),
        (
            {"bytes": "9Gi", "perNamespace": "2Gi", "perJob": "2Gi"},
            ("True", "QuotaReached"),
            [
                (NAMESPACE, None),
                (NAMESPACE, JOB),
                (None, None),
                ("team-b", None),
                ("team-b", OTHER),
            ],
        ),
    ],
)
def test_limits(
    quota: dict[str, str],
    condition: tuple[str, str],
    reached: list[tuple[str | None, str | None]],
) -> None:
    status = judged(quota, REPORT)
    assert pressure(status)[:2] == condition
    assert [(r.namespace, r.job_uid) for r in status.reached_quotas] == reached


def test_a_reached_limit_says_numbers_and_the_next_command() -> None:
    text = pressure(judged({"perJob": "5Gi"}, REPORT))[2]
    assert "job train: 7.0 GiB of 5.0 GiB (quota.perJob, 140%)" in text
    assert "listed at 2026-05-01T12:00:00Z" in text
    assert "kubectl holdfast prune JOB" in text and "spec.quota" in text


def test_a_limit_holds_only_those_whom_it_is_for() -> None:
    of_job = ReachedQuota(namespace=NAMESPACE, job_uid=JOB, bytes=2, limit_bytes=1)
    of_namespace = ReachedQuota(namespace=NAMESPACE, bytes=2, limit_bytes=1)
    of_all = ReachedQuota(bytes=2, limit_bytes=1)
    held = [
        (r.holds(NAMESPACE, JOB), r.holds(NAMESPACE, OTHER), r.holds("x", OTHER))
        for r in (of_job, of_namespace, of_all)
    ]
    assert held == [(True, False, False), (True, True, False), (True, True, True)]


def test_a_quota_whose_store_was_not_listed_holds_nothing() -> None:
    status = judged({"bytes": "1Mi"})
    assert pressure(status)[:2] == ("Unknown", "NotListed")
    assert status.reached_quotas == ()


def test_a_quota_below_the_pins_is_said_before_any_listing() -> None:
    status = judged({"bytes": "3Gi", "perJob": "1Gi"}, pinned=(2 * GIB, 2 * GIB + 1))
    value, reason, text = pressure(status)
    assert (value, reason) == ("True", "PinsExceedQuota")
    assert "pins: 4.0 GiB of 3.0 GiB" in text and "pins of job train" in text
    assert "Nothing pinned is deleted" in text
    assert status.reached_quotas == (), "nothing is known of the store yet"


def test_pins_within_the_quota_are_no_pressure() -> None:
    assert pressure(judged({"bytes": "20Gi"}, REPORT, (2 * GIB,)))[1] == "WithinQuota"


def test_a_quota_that_is_raised_or_removed_lets_uploads_go_on_at_once() -> None:
    record = store({"bytes": "1Gi"})
    known = limited(record)
    assert not quota_is_new(known)
    assert known.status.reached_quotas
    for quota in ({"bytes": "100Gi"}, None):
        raised = store(quota)
        raised = changed(
            raised, metadata=changed(raised.metadata, generation=2), status=known.status
        )
        assert quota_is_new(raised)
        status = with_quota(raised, (), NOW)
        assert status.reached_quotas == ()
        assert pressure(status)[0] == "False"


def test_a_store_without_a_quota_gets_no_condition() -> None:
    record = store()
    assert not quota_is_new(record)
    assert with_quota(record, (), NOW).condition("QuotaPressure") is None
    assert uses(changed(record, status=after(record, REPORT))) == []


def test_metrics_follow_the_listing_and_forget_what_is_gone() -> None:
    metrics = Metrics()
    usage = after(store(), REPORT).usage
    metrics.store_listed("a", "main", usage, 0.5)

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(
            name, {"namespace": "a", "store": "main", **labels}
        )

    assert value("holdfast_store_bytes") == 10 * GIB
    assert value("holdfast_store_quota_ratio") == 0.5
    assert value("holdfast_store_job_bytes", job_namespace=NAMESPACE, job="train") == 7 * GIB
    assert value("holdfast_store_namespace_bytes", job_namespace="team-b") == 2 * GIB
    assert value("holdfast_store_orphan_bytes", kind="shards") == 5
    metrics.store_listed("a", "main", None, None)
    assert value("holdfast_store_bytes") is None
    assert value("holdfast_store_job_bytes", job_namespace=NAMESPACE, job="train") is None
