"""A target is read from a folder, from a store, or from the store of a checkpoint of the cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.api_objects import azure_store_object, google_store_object
from tests.support.operator.builders import UID, checkpoint

from holdfast.base.settings import current_environment
from holdfast_cli.errors import NotFound, StateError, UsageError
from holdfast_cli.options import Session
from holdfast_cli.places import expect_stored, place_of, stored_place, variables_of
from holdfast_cli.targets import ClusterTarget, FolderTarget, Kind, StoreTarget
from holdfast_core.api import Checkpoint, CheckpointStore

STORED = checkpoint(20, 0, store="main")


def store(name: str = "main", **s3: Any) -> CheckpointStore:
    spec = {
        "endpoint": "http://minio.store:9000",
        "bucket": "ckpt",
        "prefix": "runs",
        "credentialsSecretRef": {"name": "keys"},
        **s3,
    }
    return CheckpointStore.from_dict(
        {"metadata": {"name": name, "namespace": "team-a"}, "spec": {"s3": spec}}
    )


class PlayedCluster:
    def __init__(self, *stores: CheckpointStore) -> None:
        self.stores = {one.name: one for one in stores}

    def checkpoint_of(self, target: ClusterTarget) -> dict[str, Any]:
        return checkpoint(20, 0, store=target.name).to_dict()

    def get(self, plural: str, name: str) -> dict[str, Any]:
        assert plural == "checkpointstores"
        return self.stores[name].to_dict()


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """A session whose cluster has the stores main and other, each with a server of its own."""
    for variable in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(variable, "")
    cluster = PlayedCluster(store(), store("other", endpoint="http://elsewhere:9000"))
    monkeypatch.setattr(Session, "cluster", lambda self, target=None: cluster)
    yield Session("kubectl holdfast")


def test_a_checkpoint_of_the_cluster_is_read_from_its_store(played: Session) -> None:
    place = place_of(played, ClusterTarget("main", Kind.CHECKPOINT))
    assert place == StoreTarget(f"s3://ckpt/runs/team-a/{UID}", 20)
    env = current_environment()
    assert (env["AWS_ENDPOINT_URL_S3"], env["AWS_REGION"]) == (
        "http://minio.store:9000",
        "us-east-1",
    )


def test_two_servers_in_one_command_are_refused(played: Session) -> None:
    place_of(played, ClusterTarget("main", Kind.CHECKPOINT))
    place_of(played, ClusterTarget("main", Kind.CHECKPOINT))
    with pytest.raises(UsageError, match="another AWS_ENDPOINT_URL_S3 than the targets before it"):
        place_of(played, ClusterTarget("other", Kind.CHECKPOINT))


def test_the_variables_of_the_person_are_kept() -> None:
    assert variables_of(store(), {"AWS_ENDPOINT_URL": "http://127.0.0.1:9000"}) == {
        "AWS_REGION": "us-east-1"
    }
    assert variables_of(store(), {"AWS_ENDPOINT_URL_S3": "x", "AWS_DEFAULT_REGION": "y"}) == {}


def test_a_checkpoint_in_azure_is_read_from_its_container() -> None:
    azure = CheckpointStore.from_dict(
        azure_store_object(prefix="runs", endpoint="http://azurite:10000")
    )
    found = stored_place(STORED, azure)
    assert found == StoreTarget(f"az://teamastore/checkpoints/runs/team-a/{UID}", 20)
    assert variables_of(azure, {}) == {"AZURE_STORAGE_ENDPOINT": "http://azurite:10000"}
    assert variables_of(azure, {"AZURE_STORAGE_ENDPOINT": "x"}) == {}


def test_a_checkpoint_in_google_is_read_from_its_bucket() -> None:
    google = CheckpointStore.from_dict(google_store_object(prefix="runs"))
    found = stored_place(STORED, google)
    assert found == StoreTarget(f"gs://checkpoints/runs/team-a/{UID}", 20)
    assert variables_of(google, {}) == {"GOOGLE_BASE_URL": "https://storage.googleapis.com"}
    assert variables_of(google, {"GOOGLE_BASE_URL": "x"}) == {}


def test_an_imported_checkpoint_is_where_its_first_job_saved_it() -> None:
    stored = {
        "storeRef": {"name": "main"},
        "jobUid": "0f5c8a3e",
        "jobNamespace": "team-of-the-past",
        "round": 3,
        "manifest": "b3:" + "0" * 64,
        "bytes": 1,
        "worldSize": 2,
    }
    raw = STORED.to_dict()
    raw["spec"]["stored"] = stored
    found = stored_place(Checkpoint.from_dict(raw), store(prefix=""))
    assert found == StoreTarget("s3://ckpt/team-of-the-past/0f5c8a3e", 20)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (checkpoint(20, 0, store="main", deleting=True), "is being deleted"),
        (checkpoint(20, 0, persisted=False, store="main"), "is not in an object store"),
        (checkpoint(20, 0, store=None), "is not in an object store"),
    ],
)
def test_what_is_not_in_a_store_is_refused_with_the_next_command(
    found: Checkpoint, text: str
) -> None:
    with pytest.raises(StateError, match=f"{text}.*kubectl holdfast list job"):
        expect_stored(found)


def test_a_folder_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session("holdfast")
    assert place_of(session, FolderTarget(str(tmp_path), 4)) == FolderTarget(str(tmp_path), 4)
    with pytest.raises(NotFound, match=r"there is no folder \./nowhere"):
        place_of(session, FolderTarget("./nowhere"))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "ckpt").mkdir()
    assert place_of(session, FolderTarget("~/ckpt")) == FolderTarget(str(tmp_path / "ckpt"))


def test_a_misspelt_folder_is_named_where_there_is_no_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A word that is no folder may be a job, but without a cluster it is not."""
    monkeypatch.setattr("holdfast_cli.cluster.KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(NotFound, match="there is no folder ckpd here, and no cluster"):
        Session("holdfast").cluster(ClusterTarget("ckpd"))
