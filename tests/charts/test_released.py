"""The released chart: helm reads the package, and pulls the OCI artefact from a registry."""

from __future__ import annotations

import hashlib
import json
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml
from tests.support.chart import CHART, NAMESPACE
from tools.release import chart, version
from tools.release.source import Source

from holdfast_core.api.checkpoint import Checkpoint
from holdfast_core.api.checkpoint_store import CheckpointStore
from holdfast_core.api.training_job import TrainingJob


@contextmanager
def serve_layout(repository: str, files: dict[str, bytes]) -> Iterator[str]:
    """Serve the layout and yield the registry's address, host:port."""
    index = json.loads(files["index.json"])
    manifests = {one["digest"]: one for one in index["manifests"]}
    manifests |= {
        one["annotations"]["org.opencontainers.image.ref.name"]: one for one in index["manifests"]
    }

    class Registry(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            kind, found = self._find()
            self.send_response(200 if found is not None else 404)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(found or b"")))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(found or b"")

        do_HEAD = do_GET

        def _find(self) -> tuple[str, bytes | None]:
            *start, folder, name = self.path.strip("/").split("/")
            if not folder:
                return "application/json", b"{}"
            if start != ["v2", *repository.split("/")]:
                return "application/json", b"{}" if self.path == "/v2/" else None
            kind = "application/octet-stream"
            if folder == "manifests" and (known := manifests.get(name)):
                kind, name = known["mediaType"], known["digest"]
            return kind, files.get(f"blobs/{name.replace(':', '/')}")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


pytestmark = pytest.mark.integration

Helm = Callable[..., subprocess.CompletedProcess[str]]

ROOT = Path(__file__).resolve().parents[2]
VERSION = version.of(ROOT)
SOURCE = Source(VERSION, "5" * 40, 1_700_000_000)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    chart.build(ROOT, SOURCE, folder)
    return folder


@pytest.fixture(scope="module")
def about(helm: Helm, out: Path) -> dict[str, Any]:
    """Return Chart.yaml as helm reads it from the package."""
    text = helm("show", "chart", str(out / f"holdfast-{VERSION}.tgz")).stdout
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def test_the_package_renders_what_the_folder_renders(helm: Helm, out: Path) -> None:
    package = str(out / f"holdfast-{VERSION}.tgz")
    rendered = [helm("template", "x", one, "-n", NAMESPACE).stdout for one in (package, str(CHART))]
    assert rendered[0] == rendered[1]
    assert f"image: holdfast/operator:{VERSION}" in rendered[0].replace('"', "")


def test_helm_pulls_the_oci_artefact_from_a_registry(helm: Helm, out: Path, tmp_path: Path) -> None:
    with tarfile.open(out / f"holdfast-chart-{VERSION}.oci.tar") as layout:
        files = {one.name: layout.extractfile(one).read() for one in layout}  # type: ignore[union-attr]
    with serve_layout("charts/holdfast", files) as registry:
        where = f"oci://{registry}/charts/holdfast"
        helm("pull", where, "--version", VERSION, "--plain-http", "--destination", str(tmp_path))
        refused = helm("pull", where, "--version", "9.9.9", "--plain-http", check=False)
    pulled, package = (folder / f"holdfast-{VERSION}.tgz" for folder in (tmp_path, out))
    assert pulled.read_bytes() == package.read_bytes()
    assert refused.returncode != 0


def test_blobs_of_the_oci_artefact_are_named_by_their_digests(out: Path) -> None:
    with tarfile.open(out / f"holdfast-chart-{VERSION}.oci.tar") as layout:
        blobs = [one for one in layout if one.name.startswith("blobs/sha256/")]
        assert len(blobs) == 3
        for one in blobs:
            data = layout.extractfile(one)
            assert hashlib.sha256(data.read()).hexdigest() == Path(one.name).name


def test_artifact_hub_reads_images_and_kinds_of_this_version(about: dict[str, Any]) -> None:
    found = about["annotations"]
    images = yaml.safe_load(found["artifacthub.io/images"])
    assert [one["image"] for one in images] == [
        f"holdfast/operator:{VERSION}",
        f"holdfast/sidecar:{VERSION}",
    ]
    kinds = yaml.safe_load(found["artifacthub.io/crds"])
    assert [(one["kind"], one["version"], one["name"]) for one in kinds] == [
        ("CheckpointAdoption", "v1alpha1", "checkpointadoptions.holdfast.dev"),
        ("CheckpointGrant", "v1alpha1", "checkpointgrants.holdfast.dev"),
        ("Checkpoint", "v1alpha1", "checkpoints.holdfast.dev"),
        ("CheckpointStore", "v1alpha1", "checkpointstores.holdfast.dev"),
        ("TrainingJob", "v1alpha1", "trainingjobs.holdfast.dev"),
    ]
    assert all(one["description"] for one in kinds)
    assert (about["version"], about["appVersion"]) == (VERSION, VERSION)


def test_the_examples_on_artifact_hub_are_valid_objects(about: dict[str, Any]) -> None:
    examples = yaml.safe_load(about["annotations"]["artifacthub.io/crdsExamples"])
    models = {model.KIND: model for model in (CheckpointStore, TrainingJob, Checkpoint)}
    assert [one["kind"] for one in examples] == list(models)
    for one in examples:
        models[one["kind"]].model_validate(one)


def test_changes_on_artifact_hub_are_a_list_of_texts(about: dict[str, Any]) -> None:
    changes = yaml.safe_load(about["annotations"]["artifacthub.io/changes"])
    assert all(isinstance(one, str) and one for one in changes)
    assert changes


def test_the_same_sources_give_the_same_bytes(out: Path, tmp_path: Path) -> None:
    chart.build(ROOT, SOURCE, tmp_path)
    for path in out.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()
