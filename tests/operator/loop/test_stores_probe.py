"""When a store is probed, how the end of the probe's pod is interpreted, and which list a person gets."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from holdfast_core.api import CheckpointStore, CheckpointStoreStatus, StoreFeatures, changed
from holdfast_core.api.base import Condition
from holdfast_core.clock import stamp
from holdfast_core.contract import ListContract, StoreConfig, StoreVerb
from holdfast_core.names import LIST_ANNOTATION, LIST_COMPONENT
from holdfast_operator.decide.stores import (
    list_command,
    next_look_seconds,
    probe_command,
    probe_due,
    with_probe,
)
from holdfast_operator.model.command_pods import (
    CommandUnderway,
    CommandView,
    parse_report,
    render_command,
    state_of,
)
from holdfast_operator.model.installation import SidecarSettings
from holdfast_operator.model.job import store_view
from holdfast_operator.model.ownership import store_key
from holdfast_operator.watch.records import CommandPod, ForeignPod, read_pod

NOW = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
PROBED = "2026-05-01T11:55:00Z"


def store(
    available: bool | None = None,
    reason: str = "Probed",
    last_probe: str | None = None,
    observed: int | None = 1,
    ca: str | None = None,
    since: str = "2026-05-01T10:00:00Z",
) -> CheckpointStore:
    status: dict[str, Any] = {"observedGeneration": observed}
    if last_probe is not None:
        status["lastProbe"] = last_probe
    if available is not None:
        status["conditions"] = [
            {
                "type": "Available",
                "status": str(available),
                "reason": reason,
                "message": "the message",
                "lastTransitionTime": since,
            }
        ]
    s3: dict[str, Any] = {
        "endpoint": "https://minio.storage.svc:9000",
        "bucket": "b",
        "prefix": "p",
        "credentialsSecretRef": {"name": "keys"},
    }
    if ca is not None:
        s3["caSecretRef"] = {"name": ca}
    return CheckpointStore.from_dict(
        {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": CheckpointStore.KIND,
            "metadata": {
                "name": "main",
                "namespace": "team",
                "uid": "u",
                "generation": 1,
                "resourceVersion": "5",
            },
            "spec": {"s3": s3},
            "status": status,
        }
    )


def pod(**changes: Any) -> CommandView:
    values: dict[str, Any] = {
        "name": "holdfast-probe-main-x",
        "uid": "p",
        "phase": "Pending",
        "terminating": False,
        "waiting_reason": None,
        "waiting_message": "",
        "message": None,
        "unscheduled": None,
    }
    return CommandView(**{**values, **changes})


def probe_name(record: CheckpointStore) -> str:
    return probe_command(record).pod_name(record)


def result(record: CheckpointStore, seen: CommandView, age: float) -> Condition | None:
    state = state_of(seen, probe_command(record), record, age)
    if isinstance(state, CommandUnderway):
        return None
    return with_probe(record, state, NOW).condition("Available")


def after(record: CheckpointStore, text: str) -> CheckpointStoreStatus:
    """Return the status after a probe whose pod wrote this termination message."""
    return with_probe(record, parse_report(text, "the probe's pod"), NOW)


@pytest.mark.fault("The API server's clock is ahead of that of the operator, which probes a store")
@pytest.mark.parametrize(
    ("name", "record", "job_start", "due"),
    [
        ("never probed", store(), None, True),
        ("changed since", store(True, last_probe=PROBED, observed=0), None, True),
        ("available", store(True, last_probe=PROBED), None, False),
        ("a job began to use it", store(True, last_probe=PROBED), NOW, True),
        ("its job is older", store(True, last_probe=PROBED), NOW - timedelta(hours=1), False),
        (
            "a job began, by a clock that is ahead",
            store(True, last_probe="2026-05-01T11:59:00Z"),
            NOW + timedelta(minutes=3),
            False,
        ),
        (
            "a job began, by a clock that is ahead, and the last probe is old",
            store(True, last_probe=PROBED),
            NOW + timedelta(minutes=3),
            True,
        ),
        ("unavailable, 5 minutes ago", store(False, "AccessDenied", PROBED), None, True),
        (
            "unavailable, a clock was set back",
            store(False, "R", "2026-05-03T12:00:00Z"),
            None,
            True,
        ),
        (
            "unavailable for long, 1 minute ago",
            store(False, "AccessDenied", "2026-05-01T11:59:00Z"),
            None,
            False,
        ),
    ],
)
def test_due(name: str, record: CheckpointStore, job_start: datetime | None, due: bool) -> None:
    assert probe_due(record, job_start, NOW) is due


def test_next_look() -> None:
    assert next_look_seconds(store(True, last_probe=PROBED), NOW) is None
    just_now = "2026-05-01T12:00:00Z"
    assert next_look_seconds(store(False, "AccessDenied", just_now), NOW) == 120.0
    tomorrow = "2026-05-02T12:00:00Z"
    assert next_look_seconds(store(False, "AccessDenied", tomorrow), NOW) == 120.0


@pytest.mark.parametrize(
    ("since", "wait"),
    [
        ("2026-05-01T12:00:00Z", 2.0),
        ("2026-05-01T11:59:50Z", 10.0),
        ("2026-05-01T11:59:00Z", 60.0),
        ("2026-05-01T09:00:00Z", 120.0),
    ],
)
def test_unavailable_store_is_probed_soon_and_then_less_often(since: str, wait: float) -> None:
    refused = store(False, "ProbeRefused", "2026-05-01T12:00:00Z", since=since)
    assert next_look_seconds(refused, NOW) == wait
    assert probe_due(refused, None, NOW + timedelta(seconds=wait - 1)) is False
    assert probe_due(refused, None, NOW + timedelta(seconds=wait)) is True


def test_name_is_the_same_until_a_probe_has_ended() -> None:
    assert probe_name(store()) == probe_name(store())
    assert probe_name(store()) != probe_name(store(True, last_probe=PROBED))
    assert probe_name(store()).startswith("holdfast-probe-main-")


def test_pod_holds_the_keys_and_no_privilege() -> None:
    record = store(ca="ca")
    command = probe_command(record)
    body = render_command(record, command, SidecarSettings("image:1"))
    spec = body["spec"]
    container = spec["containers"][0]
    assert container["image"] == "image:1"
    assert container["command"] == ["holdfast-sidecar", "probe-store"]
    env = {e["name"]: e["value"] for e in container["env"]}
    config = StoreConfig.from_json(env["HOLDFAST_STORE"])
    assert (config.endpoint, config.secure, config.bucket) == ("minio.storage.svc:9000", True, "b")
    assert env["HOLDFAST_STORE_DIR"] == container["volumeMounts"][0]["mountPath"]
    sources = spec["volumes"][0]["projected"]["sources"]
    assert [s["secret"]["name"] for s in sources] == ["keys", "ca"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert body["metadata"]["ownerReferences"][0]["uid"] == "u"
    assert body["metadata"]["labels"]["app.kubernetes.io/component"] == "store-probe"


def test_pod_is_read_as_a_command_of_its_store() -> None:
    record = store()
    command = probe_command(record)
    body = render_command(record, command, SidecarSettings("image:1"))
    body["metadata"]["uid"] = "p"
    read = read_pod(body)
    assert isinstance(read, CommandPod)
    assert (read.store.uid, read.key) == ("u", store_key("team", "main"))
    assert (read.view.name, read.verb) == (probe_name(record), StoreVerb.PROBE)
    body["metadata"]["ownerReferences"][0]["kind"] = "TrainingJob"
    assert isinstance(read_pod(body), ForeignPod), "no pass reads its result"


ANSWER = json.dumps(
    {
        "available": False,
        "reason": "AccessDenied",
        "message": "The Access Key Id you provided does not exist",
        "features": {"conditionalPut": True, "checksum": False, "unknown": True},
    }
)


@pytest.mark.parametrize(
    ("name", "seen", "age", "reason"),
    [
        ("runs", pod(phase="Running"), 60, None),
        ("is being created", pod(waiting_reason="ContainerCreating"), 19, None),
        ("hangs for its Secret", pod(waiting_reason="ContainerCreating"), 21, "SecretNotFound"),
        ("key missing", pod(waiting_reason="CreateContainerConfigError"), 21, "SecretNotFound"),
        ("image", pod(waiting_reason="ErrImagePull", waiting_message="no"), 21, "ProbeFailed"),
        ("no node", pod(unscheduled="0/3 nodes"), 21, "ProbeFailed"),
        ("no node yet", pod(unscheduled="0/3 nodes"), 5, None),
        ("never ends", pod(phase="Running"), 1000, "ProbeFailed"),
        ("answered", pod(phase="Failed", message=ANSWER), 1, "AccessDenied"),
        ("crashed", pod(phase="Failed", message="Traceback: x"), 1, "ProbeFailed"),
        ("evicted", pod(phase="Failed", message=""), 1, "ProbeFailed"),
    ],
)
def test_end(name: str, seen: CommandView, age: float, reason: str | None) -> None:
    found = result(store(), seen, age)
    assert (None if found is None else found.reason) == reason


@pytest.mark.fault("The pod of a store's command is killed for memory or time, or is evicted")
@pytest.mark.parametrize(
    ("ended", "of_pod", "text"),
    [
        ({"reason": "OOMKilled", "exitCode": 137}, {}, "failed: OOMKilled, exit code 137"),
        (
            {"reason": "Error", "exitCode": 143},
            {
                "reason": "DeadlineExceeded",
                "message": "Pod was active for longer than its deadline",
            },
            "failed: Pod was active for longer than its deadline",
        ),
        (None, {"reason": "Evicted", "message": "low on memory"}, "failed: low on memory"),
        ({"message": "Traceback: x", "exitCode": 1}, {"message": "y"}, "failed: Traceback: x"),
    ],
)
def test_a_pod_without_a_report_says_how_it_ended(
    ended: dict[str, Any] | None, of_pod: dict[str, Any], text: str
) -> None:
    record = store()
    body = render_command(record, probe_command(record), SidecarSettings("image:1"))
    body["metadata"]["uid"] = "p"
    statuses = [] if ended is None else [{"state": {"terminated": ended}}]
    body["status"] = {"phase": "Failed", "containerStatuses": statuses, **of_pod}
    read = read_pod(body)
    assert isinstance(read, CommandPod)
    found = result(record, read.view, 1)
    assert found is not None and found.message.endswith(text)


def test_a_missing_secret_is_named_with_a_remedy() -> None:
    found = result(store(ca="authority"), pod(waiting_reason="ContainerCreating"), 30)
    assert found is not None
    for word in ("Secret keys", "accessKey and secretKey", "Secret authority", "team"):
        assert word in found.message


@pytest.mark.parametrize("text", ["", "[]", "null", '{"available": "yes"}', "{", "5"])
def test_a_hostile_termination_message_is_a_failed_probe(text: str) -> None:
    found = after(store(), text).condition("Available")
    assert (found.is_false, found.reason) == (True, "ProbeFailed")


def test_status_keeps_the_transition_time() -> None:
    record = store(False, "AccessDenied", PROBED)
    status = after(record, ANSWER)
    assert status.conditions[0].last_transition_time == NOW - timedelta(hours=2)
    assert status.features == StoreFeatures(conditional_put=True, checksum=False)
    assert status.last_probe == NOW
    now_well = after(record, '{"available": true}')
    assert now_well.conditions[0].last_transition_time == NOW


def test_a_probe_that_fails_early_keeps_the_known_features() -> None:
    seen = after(store(True), ANSWER)
    again = changed(store(True), status=seen)
    assert after(again, "no answer").features == seen.features


def test_a_store_is_available_to_a_job_after_a_probe_of_its_generation() -> None:
    assert store_view(store()).available is None
    assert store_view(store(True, last_probe=PROBED)).available is True
    assert store_view(store(True, last_probe=PROBED, observed=0)).available is None
    assert store_view(store(ca="a")).ca_secret == "a"


# --------------------------------------------------------------------------- lists


def asks(request: str | None) -> CheckpointStore:
    record = store(available=True)
    annotations = None if request is None else {LIST_ANNOTATION: request}
    return changed(record, metadata=changed(record.metadata, annotations=annotations))


def test_a_list_runs_once_for_each_request() -> None:
    first, second = (list_command(asks(ListContract("team", None, r).to_json()), NOW) for r in "ab")
    assert first.pod_name(asks("x")) != second.pod_name(asks("x"))
    body = render_command(asks("x"), first, SidecarSettings("image:1"))
    assert body["metadata"]["labels"]["app.kubernetes.io/component"] == LIST_COMPONENT
    (container,) = body["spec"]["containers"]
    assert container["command"] == ["holdfast-sidecar", "list-store"]
    assert {"name": "HOLDFAST_LIST", "value": first.seed} in container["env"]


@pytest.mark.parametrize("request_", [None, "", "x" * 2000])
def test_without_a_request_there_is_no_list(request_: str | None) -> None:
    assert list_command(asks(request_), NOW) is None


@pytest.mark.fault("An import of a store is killed before it takes its request back")
@pytest.mark.parametrize(("hours", "is_due"), [(-30, True), (0, True), (23, True), (25, False)])
def test_a_request_that_nobody_takes_back_counts_for_a_day(hours: int, is_due: bool) -> None:
    asked = stamp(NOW - timedelta(hours=hours))
    found = list_command(asks(ListContract("team", None, "a", asked).to_json()), NOW)
    assert (found is not None) is is_due
