"""`import store/NAME`: which objects are created of a list, and how the list is asked for."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.support.operator.builders import UID, checkpoint, manifest_digest

from holdfast_cli import importing
from holdfast_cli.errors import CommandError, Unanswered
from holdfast_cli.importing import import_store, parse_list, plan_import
from holdfast_cli.output import Format
from holdfast_core.api import Checkpoint
from holdfast_core.contract import ListContract
from holdfast_core.names import LIST_ANNOTATION


def line(step: int, round_: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "namespace": "team-a",
        "jobUid": UID,
        "step": step,
        "round": round_,
        "job": "job",
        "manifest": manifest_digest(step, round_),
        "bytes": 6_700_000,
        "worldSize": 2,
        "committedAt": "2026-11-01T00:00:00Z",
        **changes,
    }


def log_of(*lines: dict[str, Any]) -> str:
    return "".join(f"{json.dumps(item)}\n" for item in (*lines, {"lines": len(lines)}))


def test_an_object_is_what_the_operator_would_have_called_it() -> None:
    (body,) = plan_import([line(10)], [], "main").objects
    found = Checkpoint.from_dict(body)
    assert found.name == checkpoint(10, 0).name
    assert (found.job, found.spec.step, found.awaits_record) == ("job", 10, True)
    stored = found.spec.stored
    assert (stored.job_uid, stored.store_ref.name, stored.world_size) == (UID, "main", 2)
    assert found.spec.deletion_policy == "Retain"


def test_a_checkpoint_with_an_object_is_known() -> None:
    recorded = checkpoint(10, 0, name="before-lunch").to_dict()
    recorded["metadata"] = {"name": "before-lunch"}
    imported = plan_import([line(20)], [], "main").objects
    found = plan_import([line(10), line(20), line(20, 1)], [recorded, *imported], "main")
    assert [b["spec"]["stored"]["round"] for b in found.objects] == [1]
    assert found.known == 2
    assert found.summary == "import 1 checkpoint (6.4 MiB), 2 known already, 0 unusable"


def test_what_no_restore_could_use_is_left_out() -> None:
    bad = {"namespace": "team-a", "jobUid": UID, "step": 5, "round": 0, "error": "cut"}
    found = plan_import([bad, line(10, bytes="many")], [], "main")
    assert found.objects == ()
    assert [text.rpartition(": ")[2] for text in found.unusable] == [
        "cut",
        "the line of the list is not complete",
    ]


def test_a_run_without_a_cluster_may_have_any_name() -> None:
    (body,) = plan_import([line(10, job="My Run_1", jobUid="a" * 64)], [], "main").objects
    assert body["spec"]["jobRef"]["name"] == "job-my-run-1"
    assert "labels" not in body["metadata"]


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("", "wrote no list: nothing"),
        ("Traceback\nValueError", "wrote no list"),
        ('{"error": "UnavailableError", "message": "refused"}', "UnavailableError: refused"),
        (log_of(line(1), line(2)).partition("\n")[2], "import one job at a time with --job"),
    ],
)
def test_a_log_without_a_whole_list_is_refused(log: str, expected: str) -> None:
    with pytest.raises(CommandError, match=expected):
        parse_list(log)


@dataclass
class Cluster:
    """The requests of the command. The operator is played by `pods`."""

    logged: str
    phase: str = "Succeeded"
    namespace: str = "team-a"
    annotation: str | None = None
    requests: list[str | None] = field(default_factory=list)
    created: list[str] = field(default_factory=list)
    refuses_after: int = 1000

    def patient(self, longest_seconds: float) -> Cluster:
        return self

    def get(self, plural: str, name: str) -> dict[str, Any]:
        annotations = {LIST_ANNOTATION: self.annotation} if self.annotation else {}
        return {"metadata": {"name": name, "uid": "uid-of-main", "annotations": annotations}}

    def items(self, plural: str) -> list[dict[str, Any]]:
        return []

    def patch(self, plural: str, name: str, uid: str, body: dict[str, Any]) -> None:
        assert (plural, name, uid) == ("checkpointstores", "main", "uid-of-main")
        self.annotation = body["metadata"]["annotations"][LIST_ANNOTATION]
        self.requests.append(self.annotation)

    def pods(self, selector: str) -> list[dict[str, Any]]:
        assert selector == "app.kubernetes.io/component=store-list,holdfast.dev/store=main"

        def pod(name: str, request: str | None) -> dict[str, Any]:
            env = [{"name": "HOLDFAST_LIST", "value": request}]
            return {
                "metadata": {"name": name},
                "spec": {"containers": [{"env": env}]},
                "status": {"phase": self.phase},
            }

        return [pod("of-another", "{}"), pod("mine", self.annotation)]

    def log(self, pod: str) -> str:
        assert pod == "mine"
        return self.logged

    def create(self, plural: str, body: dict[str, Any]) -> None:
        if len(self.created) >= self.refuses_after:
            raise CommandError("the API server refused it (403): forbidden")
        self.created.append(body["metadata"]["name"])


def run(cluster: Cluster, **changes: Any) -> None:
    import_store(cluster, "main", **changes)  # type: ignore[arg-type]  # plays the client


def test_the_command_asks_reads_and_creates(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster(log_of(line(10), line(20)))
    run(cluster, job="job")
    asked, taken_back = cluster.requests
    assert asked is not None and taken_back is None
    wanted = ListContract.from_json(asked)
    assert (wanted.namespace, wanted.job) == ("team-a", "job")
    assert cluster.created == ["job-l2msg4-s10-r0", "job-l2msg4-s20-r0"]
    assert "checkpointRef.name: job-l2msg4-s20-r0" in capsys.readouterr().err


def test_a_dry_run_creates_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster(log_of(line(10)))
    run(cluster, dry_run=True, from_namespace="research")
    assert cluster.created == []
    assert cluster.requests[0] is not None
    assert ListContract.from_json(cluster.requests[0]).namespace == "research"
    assert "import 1 checkpoint" in capsys.readouterr().out


def test_a_request_is_taken_back_after_an_error() -> None:
    cluster = Cluster('{"error": "UnavailableError", "message": "refused"}')
    with pytest.raises(CommandError, match="refused"):
        run(cluster)
    assert cluster.annotation is None


@dataclass
class Leaves(Cluster):
    """The API server goes away after the request."""

    def pods(self, selector: str) -> list[dict[str, Any]]:
        raise Unanswered("connection refused")

    def get(self, plural: str, name: str) -> dict[str, Any]:
        if self.requests:
            raise Unanswered("and it is still refused")
        return super().get(plural, name)


@pytest.mark.fault("The API server goes away while a store is listed for an import")
def test_the_first_error_is_shown() -> None:
    with pytest.raises(CommandError, match=r"^connection refused$"):
        run(Leaves(""))


@dataclass
class AskedTwice(Cluster):
    """Another command asks while this one waits, and the operator lists for that one instead."""

    def pods(self, selector: str) -> list[dict[str, Any]]:
        self.annotation = "of another"
        return super().pods(selector)


@pytest.mark.fault("Two `kubectl holdfast import` of one store run at once")
def test_a_request_that_was_replaced_ends_the_wait_and_the_other_one_stands() -> None:
    cluster = AskedTwice(log_of(line(10)))
    with pytest.raises(CommandError, match="has replaced this one: repeat the command"):
        run(cluster)
    assert cluster.annotation == "of another"
    assert cluster.created == []


@pytest.mark.fault("The pod that lists a store cannot start")
def test_a_pod_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "START_SECONDS", 0.0)
    with pytest.raises(CommandError, match="pod mine has not started"):
        run(Cluster("", phase="Pending"))


@pytest.mark.fault("An import is refused in the middle")
def test_an_import_that_is_refused_says_how_far_it_came() -> None:
    cluster = Cluster(log_of(line(10), line(20)), refuses_after=1)
    with pytest.raises(CommandError, match="1 of 2 objects were created; repeat the command"):
        run(cluster)


def test_json_has_the_objects(capsys: pytest.CaptureFixture[str]) -> None:
    run(Cluster(log_of(line(10))), format=Format.JSON, dry_run=True)
    document = json.loads(capsys.readouterr().out)
    assert [b["metadata"]["name"] for b in document["create"]] == ["job-l2msg4-s10-r0"]
