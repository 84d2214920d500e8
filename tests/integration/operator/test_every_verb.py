"""Every verb on a folder, a bucket and a cluster: the exit code, and a piece of what it prints.

The SDK wrote the folder, and uploaded it to the bucket, on MinIO. The cluster is a real API server with the
objects that an operator would have written: a job whose checkpoints are in the bucket, and one that has lost
all of its own. No operator runs, so that nothing changes between two commands.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.hang import HANG_SECONDS
from tests.support.operator.builders import START, checkpoint, condition, status
from tests.support.operator.operator_account import OperatorAccount
from tests.support.operator.operator_bed import OperatorBed, opened_bed, training_job
from tests.support.operator.waiting import poll
from tests.support.servers.control_plane import find_binary
from tests.support.servers.minio_server import MinioServer
from tests.support.servers.ports import closed_port

import holdfast
from holdfast_cli import cluster
from holdfast_cli.errors import CommandError
from holdfast_cli.injecting import ALLOWED, GAME_DAYS
from holdfast_cli.program import VERBS, run
from holdfast_core.api import JobPhase, LineageEntry, TrainingJob
from holdfast_core.format.canonical import digest_of
from holdfast_core.ids import CheckpointId, JobUid, RestartRound, Step
from holdfast_core.names import JOB_UID_LABEL, checkpoint_name, pod_name

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).resolve().parents[3]
KEEPER = "example.com/keeper"
STEPS = (1, 2, 3, 4)
KINDS = ("folder", "bucket", "cluster")
PREFIX = "runs"
STORED = f"{PREFIX}/standalone/standalone"
"""Where a training in a folder keeps its checkpoints in a bucket."""


@dataclass(frozen=True, slots=True)
class Row:
    """One command, and how it ends."""

    kind: str
    words: str
    """The verb and its arguments, with the names of the bed in braces."""
    code: int
    said: str
    """A piece of stdout or stderr."""

    @property
    def verb(self) -> str:
        return self.words.split()[0]

    def __str__(self) -> str:
        return f"{self.kind}: {self.words}"


ROWS = (
    Row("folder", "completion {folder}", 2, "is not one of 'bash', 'zsh', 'fish'"),
    Row("bucket", "completion {bucket}", 2, "is not one of 'bash', 'zsh', 'fish'"),
    Row("cluster", "completion job/gpt", 2, "is not one of 'bash', 'zsh', 'fish'"),
    Row("folder", "diff {folder}@3 {folder}@4", 0, "1 changed, 1 equal"),
    Row("bucket", "diff {bucket}@3 {folder}@4", 0, "1 changed, 1 equal"),
    Row("cluster", "diff job/gpt@3 checkpoint/{newest}", 0, "1 changed, 1 equal"),
    Row("folder", "doctor {folder}", 2, "`verify` reads a checkpoint of a folder"),
    Row("bucket", "doctor {bucket}", 2, "`verify` reads a checkpoint of a folder"),
    Row("cluster", "doctor job/gpt", 1, "operator"),
    Row("folder", "events {folder}", 2, "`list` and `show`"),
    Row("bucket", "events {bucket}", 2, "`list` and `show`"),
    Row("cluster", "events job/gpt", 0, "Trained as ever"),
    Row("folder", "export {folder} --format hf --to {out}", 0, "exported step 4"),
    Row("bucket", "export {bucket}@3 --format hf --to {out}", 0, "exported step 3"),
    Row("cluster", "export job/gpt@3 --format torch --to {out}", 0, "exported step 3"),
    Row("folder", "import {weights} --format hf --to {out}", 0, "as step 0"),
    Row("bucket", "import {bucket} --format hf --to {out}", 2, "copy the files to a folder"),
    # tests/cli/test_importing.py imports a store: its pod writes a log, which needs a kubelet.
    Row("cluster", "import store/elsewhere", 5, "checkpointstores/elsewhere not found"),
    Row("folder", "inject {folder} --kill rank=0", 2, "Send a signal to the process"),
    Row("bucket", "inject {bucket} --kill rank=0", 2, "Send a signal to the process"),
    Row("cluster", "inject job/gpt --kill pod=1 --yes", 0, "is being deleted"),
    Row("folder", "list {folder}", 0, "PINNED"),
    Row("bucket", "list {bucket}", 0, "PINNED"),
    Row("cluster", "list job/gpt", 0, "{newest}"),
    Row("folder", "logs {folder}", 2, "writes its log where it was started"),
    Row("bucket", "logs {bucket}", 2, "writes its log where it was started"),
    # tests/cli/test_logs.py shows lines: they come from a kubelet.
    Row("cluster", "logs job/gpt", 6, "none of its pods has a log now"),
    Row("folder", "merge {folder}@3 {folder}@4 --method mean --to {out}", 0, "merged 2 tensors"),
    Row("bucket", "merge {bucket}@3 {folder}@4 --method mean --to {out}", 0, "merged 2 tensors"),
    Row("cluster", "merge job/gpt@3 job/gpt@4 --method mean --to {out}", 0, "merged 2 tensors"),
    Row("folder", "pin {folder}@4", 0, "is pinned"),
    Row("bucket", "pin {bucket}@4", 2, "Pin it in the folder that uploads here"),
    Row("cluster", "pin job/gpt@4", 0, "is pinned"),
    Row("folder", "prune {folder} --keep-last 3 --yes", 0, "deleted 1 checkpoint"),
    Row("bucket", "prune {bucket} --keep-last 2 --dry-run", 0, "keep 2: 2 one of the newest"),
    Row("cluster", "prune job/gpt --keep-last 3 --yes", 0, "the operator deletes them now"),
    Row("folder", "restart {folder} --from-start", 2, "when it starts (Checkpointer.restore)"),
    Row("bucket", "restart {bucket} --from-start", 2, "when it starts (Checkpointer.restore)"),
    Row("cluster", "restart job/lost --from-start --yes", 0, "lost starts over"),
    Row("folder", "restore {folder}@4", 2, "when it starts (Checkpointer.restore)"),
    Row("bucket", "restore {bucket}@4", 2, "when it starts (Checkpointer.restore)"),
    Row("cluster", "restore job/gpt@3 --yes", 0, "gpt goes back to step 3"),
    Row("folder", "save {folder}", 2, "by Checkpointer.save"),
    Row("bucket", "save {bucket}", 2, "by Checkpointer.save"),
    Row("cluster", "save job/gpt --pin", 0, "requested"),
    Row("folder", "show {folder}@4", 0, "model.w"),
    Row("bucket", "show {bucket}@4", 0, "model.w"),
    Row("cluster", "show checkpoint/{newest}", 0, "model.w"),
    Row("folder", "status {folder}", 2, "`list` shows the checkpoints of a folder"),
    Row("bucket", "status {bucket}", 2, "`list` shows the checkpoints of a folder"),
    Row("cluster", "status job/gpt", 0, "Running"),
    Row("folder", "top {folder}", 2, "`list` shows the checkpoints of a folder"),
    Row("bucket", "top {bucket}", 2, "`list` shows the checkpoints of a folder"),
    Row("cluster", "top", 0, "gpt"),
    Row("folder", "unpin {folder}@3", 0, "is not pinned"),
    Row("bucket", "unpin {bucket}@3", 2, "Pin it in the folder that uploads here"),
    Row("cluster", "unpin job/gpt@3", 0, "is not pinned"),
    Row("folder", "verify {folder}@4", 0, "Intact"),
    Row("bucket", "verify {bucket}@4", 0, "Intact"),
    # test_drills.py and tests/cli/test_verifying.py wait for the drill: its pod needs a kubelet.
    Row("cluster", "verify job/gpt@4 --no-wait", 0, "is requested"),
)

BAD_ROWS = (
    # What does not exist.
    *(
        Row(kind, words.format(place=place), 5, "expected step 9, found")
        for kind, place in (("folder", "{folder}"), ("bucket", "{bucket}"))
        for words in (
            "diff {place}@9 {place}@4",
            "export {place}@9 --format hf --to {{out}}",
            "merge {place}@9 {place}@4 --method mean --to {{out}}",
            "show {place}@9",
            "verify {place}@9",
        )
    ),
    *(
        Row("cluster", words, 5, "trainingjobs/nothing and checkpointadoptions/nothing not found")
        for words in (
            "diff job/nothing job/gpt@4",
            "events job/nothing",
            "export job/nothing --format hf --to {out}",
            "inject job/nothing --kill rank=0 --yes",
            "logs job/nothing",
            "merge job/nothing job/gpt@4 --method mean --to {out}",
            "pin job/nothing@4",
            "prune job/nothing --yes",
            "restart job/nothing --from-start --yes",
            "restore job/nothing@4 --yes",
            "save job/nothing",
            "show job/nothing",
            "status job/nothing",
            "unpin job/nothing@4",
            "verify job/nothing",
        )
    ),
    Row("cluster", "show checkpoint/nothing", 5, "checkpoints/nothing not found"),
    Row("cluster", "show job/gpt@9", 5, "`kubectl holdfast list gpt` lists what it has"),
    Row("cluster", "restore job/odd@9 --yes", 5, "no checkpoint of step 9 is known"),
    # What is being deleted.
    *(
        Row("cluster", words, 6, "is being deleted")
        for words in (
            "diff checkpoint/{deleting} job/gpt@4",
            "export checkpoint/{deleting} --format hf --to {out}",
            "inject job/leaving --kill pod=0 --yes",
            "merge checkpoint/{deleting} job/gpt@4 --method mean --to {out}",
            "pin checkpoint/{deleting}",
            "restart job/leaving --from-start --yes",
            "restore job/leaving@4 --yes",
            "restore job/odd@1 --yes",
            "save job/leaving",
            "unpin checkpoint/{deleting}",
            "verify checkpoint/{deleting}",
        )
    ),
    Row("cluster", "show checkpoint/{deleting}", 0, "`kubectl holdfast list odd"),
    # What is quarantined, or only on nodes.
    Row("cluster", "restore job/odd@2 --yes", 6, "quarantined"),
    Row("cluster", "restore job/odd@2 --to-new-job fork --yes", 6, "quarantined"),
    Row("cluster", "show checkpoint/{quarantined}", 0, "failurePolicy.releasedSteps of odd"),
    Row("cluster", "export checkpoint/{local} --format hf --to {out}", 6, "not in an object store"),
    Row("cluster", "verify checkpoint/{local}", 6, "not in an object store"),
    # What is pinned stays.
    Row("cluster", "prune job/odd --keep-last 2 --dry-run", 0, "pinned"),
    # A store that is down.
    Row("cluster", "diff checkpoint/{away} checkpoint/{away}", 1, "Connection refused"),
    Row("cluster", "export checkpoint/{away} --format hf --to {out}", 1, "Connection refused"),
    Row("cluster", "show checkpoint/{away}", 0, "what it holds is not shown"),
    # What is damaged, and what a newer release wrote.
    *(
        Row("folder", words.format(place=place), code, said)
        for place, code, said in (
            ("{damaged}", 3, "rank"),
            ("{newer}", 6, "a newer release of Holdfast wrote it"),
        )
        for words in (
            "diff {place}@4 {{folder}}@3",
            "export {place}@4 --format hf --to {{out}}",
            "merge {place}@4 {{folder}}@3 --method mean --to {{out}}",
            "verify {place}@4",
        )
    ),
)
"""Bad input. tests/cli/test_errors.py has the API server that is down, and objects of another version;
tests/cli/test_pruning.py what a clone protects, and tests/cli/test_reading_verbs.py the store of a job of
somebody else."""


@dataclass
class VerbBed:
    """The places of the rows."""

    names: dict[str, str]
    """What the braces in a row stand for."""
    namespace: str
    bed: OperatorBed
    minio: MinioServer

    def add_job(self, name: str, *, finalizers: Sequence[str] = (), **fields: Any) -> JobUid:
        """Create a job whose status has these fields."""
        body = training_job(object={"storeRef": {"name": "main"}, "every": {"steps": 10}})
        body["metadata"] = {"name": name, "finalizers": list(finalizers)}
        made = self._create("trainingjobs", body)
        known = status(lineage=(LineageEntry(round=RestartRound(0)),), **fields)
        made["status"] = (
            TrainingJob.from_dict(made).model_copy(update={"status": known}).to_dict()["status"]
        )
        self._write_status("trainingjobs", made)
        return JobUid(made["metadata"]["uid"])

    def add_pod(self, job: str, uid: JobUid, worker: int) -> None:
        pods = f"/api/v1/namespaces/{self.namespace}/pods"
        name = pod_name(job, uid, worker, 0)
        body = {
            "metadata": {"name": name, "labels": {JOB_UID_LABEL: uid}},
            "spec": {
                "nodeName": self.bed.kubelet.node,
                "containers": [{"name": "trainer", "image": "x"}],
            },
        }
        made = self.bed.plane.request("POST", pods, body)
        made["status"] = {"phase": "Running"}
        self.bed.plane.request("PUT", f"{pods}/{name}/status", made)

    def leave(self, plural: str, name: str) -> None:
        """Delete an object, which a finalizer of another program keeps."""
        self.bed.plane.request("DELETE", self.bed.path(plural, name))

    def add_store(self, name: str, endpoint: str) -> None:
        s3 = {
            "endpoint": endpoint,
            "bucket": self.minio.bucket,
            "prefix": PREFIX,
            "credentialsSecretRef": {"name": "keys"},
        }
        kind = {"apiVersion": "holdfast.dev/v1alpha1", "kind": "CheckpointStore"}
        self._create("checkpointstores", {**kind, "metadata": {"name": name}, "spec": {"s3": s3}})

    def add_checkpoint(
        self, job: str, uid: JobUid, step: int, *, finalizers: Sequence[str] = (), **fields: Any
    ) -> str:
        """Create the object of a step of the bucket. `fields` are those of `builders.checkpoint`."""
        name = checkpoint_name(job, uid, CheckpointId(Step(step), RestartRound(0)))
        known = checkpoint(
            step, 0, name=name, job=job, job_uid=uid, bytes=100, committed_at=START, **fields
        ).to_dict()
        is_stored = fields.get("persisted", True)
        stored = {
            "storeRef": {"name": known["status"].get("store")},
            "jobUid": "standalone",
            "jobNamespace": "standalone",
            "round": 0,
            "manifest": known["status"]["manifest"],
            "bytes": 100,
            "worldSize": 1,
        }
        metadata = {"name": name, "labels": {JOB_UID_LABEL: uid}, "finalizers": list(finalizers)}
        spec = {**known["spec"], "stored": stored} if is_stored else known["spec"]
        body = {**known, "metadata": metadata, "spec": spec}
        made = self._create("checkpoints", body)
        self._write_status("checkpoints", {**made, "status": known["status"]})
        return name

    def _create(self, plural: str, body: dict[str, Any]) -> dict[str, Any]:
        return dict(self.bed.plane.request("POST", self.bed.path(plural), body))

    def _write_status(self, plural: str, made: dict[str, Any]) -> None:
        path = self.bed.path(plural, f"{made['metadata']['name']}/status")
        self.bed.plane.request("PUT", path, made)


def saved(folder: Path, url: str) -> None:
    with holdfast.Checkpointer(
        holdfast.Folder(folder, store=url, keep_last=9), when_busy="wait"
    ) as ckpt:
        for step in STEPS:
            model = {"w": torch.full((64,), float(step)), "frozen": torch.ones(8)}
            ckpt.save(step, {"model": model}).wait("persisted", timeout=HANG_SECONDS)


@pytest.fixture(scope="module")
def minio() -> Iterator[MinioServer]:
    with MinioServer() as server:
        yield server


@pytest.fixture(scope="module")
def places(
    account: OperatorAccount, minio: MinioServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VerbBed]:
    root = tmp_path_factory.mktemp("verbs")
    url = f"s3://{minio.bucket}/{PREFIX}"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in minio.client_environment().items():
            patch.setenv(name, value)
        saved(root / "ckpt", url)
        names = {"folder": str(root / "ckpt"), "bucket": url, "weights": str(root / "weights")}
        words = ["export", names["folder"], "--format", "hf", "--to", names["weights"]]
        assert run(words, "holdfast") == 0
    add_odd_folders(names)
    namespace = "every-verb"
    with opened_bed(account, namespace, root) as bed, closed_port() as closed:
        account.plane.kubectl("label", "namespace", namespace, f"{GAME_DAYS}={ALLOWED}")
        found = VerbBed(names, namespace, bed, minio)
        found.add_store("main", f"http://{minio.endpoint}")
        running = condition("Running", True, "Training")
        uid = found.add_job("gpt", phase=JobPhase.RUNNING, step=Step(5), conditions=(running,))
        for worker in (0, 1):
            found.add_pod("gpt", uid, worker)
        for step in STEPS:
            names["newest"] = found.add_checkpoint("gpt", uid, step)
        lost = condition("CheckpointsLost", True, "NothingLeft")
        found.add_job("lost", phase=JobPhase.RESTARTING, conditions=(lost,))
        record_event(found, uid)
        found.add_store("away", f"http://127.0.0.1:{closed}")
        add_odd_objects(found)
        yield found


def add_odd_objects(places: VerbBed) -> None:
    """Create what the rows of bad input name."""
    training = {"phase": JobPhase.RUNNING, "conditions": (condition("Running", True, "Training"),)}
    second = CheckpointId(Step(2), RestartRound(0))
    uid = places.add_job("odd", step=Step(9), quarantined=(second,), **training)
    quarantined = (
        condition("Committed", True, "Committed"),
        condition("Persisted", True, "Persisted"),
        condition("Quarantined", True, "DigestMismatch"),
        condition("Restorable", False, "Quarantined"),
    )
    places.names |= {
        "deleting": places.add_checkpoint("odd", uid, 1, finalizers=[KEEPER]),
        "quarantined": places.add_checkpoint("odd", uid, 2, conditions=quarantined),
        "pinned": places.add_checkpoint("odd", uid, 3, pin=True),
        "local": places.add_checkpoint("odd", uid, 4, persisted=False, store=None),
        "away": places.add_checkpoint("odd", uid, 5, store="away"),
        "last": places.add_checkpoint("odd", uid, 6),
    }
    places.leave("checkpoints", places.names["deleting"])
    leaving = places.add_job("leaving", finalizers=[KEEPER], step=Step(9), **training)
    places.add_pod("leaving", leaving, 0)
    places.leave("trainingjobs", "leaving")


def add_odd_folders(names: dict[str, str]) -> None:
    """Copy the folder: with a wrong byte in step 4, and with a manifest of a newer release."""
    folder = Path(names["folder"])
    for name in ("damaged", "newer"):
        names[name] = str(shutil.copytree(folder, folder.with_name(name)))
    (shard,) = Path(names["damaged"]).glob("tier/*/shards/s000000000004-*/*.shard")
    data = bytearray(shard.read_bytes())
    data[data.index(struct.pack("<f", 4.0) * 64)] ^= 1
    shard.write_bytes(data)
    (manifest,) = Path(names["newer"]).glob("tier/*/manifests/s000000000004/*.json")
    text = manifest.read_text().splitlines()[0].replace('"formatVersion":1', '"formatVersion":99')
    manifest.write_text(f"{text}\n{digest_of(text.encode())}\n")


def record_event(places: VerbBed, uid: JobUid) -> None:
    about = {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "TrainingJob",
        "namespace": places.namespace,
        "name": "gpt",
        "uid": uid,
    }
    body = {
        "metadata": {"name": "gpt.1"},
        "involvedObject": about,
        "reason": "Trained",
        "message": "Trained as ever",
        "type": "Normal",
        "lastTimestamp": "2026-01-01T00:00:00Z",
    }
    places.bed.plane.request("POST", f"/api/v1/namespaces/{places.namespace}/events", body)


Command = Callable[[str, str], tuple[int, str]]


@pytest.fixture
def command(
    places: VerbBed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Command:
    """Return what runs `kubectl holdfast` with words, and returns the exit code and all that it prints.

    The environment has the keys of the person. The address of the server is there for the bucket only. A
    checkpoint of the cluster is found by what its CheckpointStore says.
    """
    monkeypatch.setattr(cluster, "KUBECONFIG", str(places.bed.plane.kubeconfig))

    def run_words(kind: str, words: str) -> tuple[int, str]:
        for name, value in places.minio.client_environment().items():
            is_key = name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
            monkeypatch.setenv(name, value if is_key or kind == "bucket" else "")
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "")
        names = {**places.names, "out": str(tmp_path / "out")}
        words = words.format(**names)
        code = run(["-n", places.namespace, *words.split()], "kubectl holdfast")
        out, err = capsys.readouterr()
        return code, out + err

    return run_words


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_every_verb_on_a_folder_a_bucket_and_a_cluster(
    places: VerbBed, command: Command, row: Row
) -> None:
    code, said = command(row.kind, row.words)
    assert code == row.code, said
    assert row.said.format(**places.names) in said


def test_kubectl_completes_verbs_and_names(places: VerbBed, tmp_path: Path) -> None:
    """By the programs that cli/pyproject.toml installs, in a folder of PATH."""
    project = tomllib.loads((REPOSITORY / "cli/pyproject.toml").read_text())
    scripts = project["project"]["scripts"]
    for name, entry in scripts.items():
        module, function = entry.split(":")
        program = tmp_path / name
        program.write_text(f"#!{sys.executable}\nfrom {module} import {function}\n{function}()\n")
        program.chmod(0o755)
    kubectl = find_binary("kubectl")
    config = str(places.bed.plane.kubeconfig)
    env = {"HOME": str(tmp_path), "KUBECONFIG": config, "PATH": f"{tmp_path}:{kubectl.parent}"}

    def completed(*words: str) -> list[str]:
        done = subprocess.run(
            [kubectl, "__complete", "holdfast", *words],
            env=env,
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
            check=True,
        )
        return [line.partition("\t")[0] for line in done.stdout.splitlines()]

    assert completed("re") == ["restart", "restore", ":4"]
    jobs = ["gpt", "leaving", "lost", "odd", ":4"]
    words = ("restore", "-n", places.namespace, "")
    poll("names, for which a slow kubectl has two seconds", lambda: completed(*words) == jobs)
    assert completed("show", "./ck") == [":0"], "the shell completes files"


@pytest.mark.parametrize("row", BAD_ROWS, ids=str)
def test_bad_input_is_answered_with_its_state_and_exit_code(
    places: VerbBed, command: Command, tmp_path: Path, row: Row
) -> None:
    code, said = command(row.kind, row.words)
    assert code == row.code, said
    assert row.said.format(**places.names) in said
    assert not (tmp_path / "out").exists()


@pytest.mark.fault("An object is replaced by one of the same name between two requests of a verb")
def test_an_object_that_was_replaced_is_not_changed(
    places: VerbBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "KUBECONFIG", str(places.bed.plane.kubeconfig))
    found = cluster.ClusterClient.connect(None, places.namespace)
    pinned = {"spec": {"pin": True}}
    name = places.names["last"]
    before = found.get("checkpoints", name)
    for change in (found.patch, found.delete_with):
        with pytest.raises(CommandError, match="has changed meanwhile: repeat the command"):
            change("checkpoints", name, "uid-of-another", pinned)
    assert found.get("checkpoints", name) == before


def test_each_verb_has_a_row_for_each_kind_of_target() -> None:
    assert {(row.verb, row.kind) for row in ROWS} == {(v, kind) for v in VERBS for kind in KINDS}
