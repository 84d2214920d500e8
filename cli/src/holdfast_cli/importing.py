"""`kubectl holdfast import-store`: make Checkpoint objects of what a store has and this cluster lacks.

Another cluster wrote it, or etcd was lost. The command holds no keys of the store. It asks by an annotation
of the CheckpointStore, the operator runs a pod that lists the store into its log, and the command reads the
log and creates the objects, all with the rights of the person. It deletes nothing and changes no object.
"""

from __future__ import annotations

import argparse
import json
import re
import secrets
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from holdfast_cli.cluster import VERSION, ClusterClient, ClusterError
from holdfast_core.api import DeletionPolicy, size_text
from holdfast_core.contract import ListContract
from holdfast_core.ids import CheckpointId, JobUid, RestartRound, Step
from holdfast_core.names import (
    GROUP,
    JOB_UID_LABEL,
    LIST_ANNOTATION,
    LIST_COMPONENT,
    checkpoint_name,
)

START_SECONDS = 90.0
"""Longest wait for the pod to start. The operator creates it at once, and then its image is pulled."""
LOOK_SECONDS = 0.5
_JOB_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
"""Name of a TrainingJob. A training without a cluster may have another one."""
_LABEL = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_EXPECTED: dict[str, type] = {
    "namespace": str,
    "jobUid": str,
    "step": int,
    "round": int,
    "job": str,
    "manifest": str,
    "bytes": int,
    "worldSize": int,
    "committedAt": str,
}


@dataclass(frozen=True, slots=True)
class StoreImport:
    """What an import creates and leaves out."""

    objects: tuple[dict[str, Any], ...]
    """Bodies of the Checkpoints, in order of job, step and round."""
    known: int
    """Number of the checkpoints that have an object already."""
    unusable: tuple[str, ...]
    """Why a checkpoint is left out, for each one whose manifest no restore could use."""

    @property
    def summary(self) -> str:
        number, bytes_ = len(self.objects), sum(b["spec"]["stored"]["bytes"] for b in self.objects)
        return (
            f"import {number} checkpoint{'' if number == 1 else 's'} ({size_text(bytes_)}), "
            f"{self.known} known already, {len(self.unusable)} unusable"
        )


def parse_list(log: str) -> list[dict[str, Any]]:
    """Parse the log of the pod: a line for each checkpoint, and a last one that counts them.

    Raises:
        ClusterError: The store could not be listed, or the kubelet has cut the log.
    """
    lines = log.splitlines()
    try:
        end = json.loads(lines[-1])
        if "error" in end:
            raise ClusterError(f"the store cannot be listed: {end['error']}: {end['message']}")
        found = [json.loads(line) for line in lines[-1 - end["lines"] : -1]]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        text = log.strip()[-500:] or "nothing"
        raise ClusterError(f"the pod that lists the store wrote no list: {text}") from error
    if len(found) != end["lines"]:
        raise ClusterError(
            f"the list has {end['lines']} checkpoints, and the kubelet kept only the last {len(found)} lines "
            "of the log: import one job at a time with --job"
        )
    return found


def plan_import(
    listed: Iterable[Mapping[str, Any]],
    existing: Iterable[Mapping[str, Any]],
    store: str,
) -> StoreImport:
    """Return the objects of the listed checkpoints that have none.

    Args:
        listed: Lines of the list.
        existing: The Checkpoints of the namespace.
        store: Name of the CheckpointStore that was listed.
    """
    known, names = set[tuple[Any, Any, Any]](), set[str]()
    for item in existing:
        spec, status = item["spec"], item.get("status") or {}
        stored = spec.get("stored") or {}
        uid, round_ = (stored.get(k, status.get(k)) for k in ("jobUid", "round"))
        known.add((uid, spec.get("step"), round_))
        names.add(item["metadata"]["name"])
    objects, unusable, before = list[dict[str, Any]](), list[str](), 0
    for line in listed:
        if any(type(line.get(k)) is not kind for k, kind in _EXPECTED.items()):
            why = line.get("error", "the line of the list is not complete")
            unusable.append(
                f"step {line.get('step')} of round {line.get('round')} of job {line.get('jobUid')}: {why}"
            )
            continue
        body = _body(line, store)
        if (line["jobUid"], line["step"], line["round"]) in known or body["metadata"][
            "name"
        ] in names:
            before += 1
        else:
            objects.append(body)
    return StoreImport(tuple(objects), before, tuple(unusable))


def _body(line: Mapping[str, Any], store: str) -> dict[str, Any]:
    job, uid = line["job"], line["jobUid"]
    if _JOB_NAME.fullmatch(job) is None:
        job = re.sub(r"[^a-z0-9]+", "-", f"job-{job}".lower())[:40].strip("-")
    checkpoint = CheckpointId(Step(line["step"]), RestartRound(line["round"]))
    metadata: dict[str, Any] = {"name": checkpoint_name(job, JobUid(uid), checkpoint)}
    if _LABEL.fullmatch(uid):
        metadata["labels"] = {JOB_UID_LABEL: uid}
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "Checkpoint",
        "metadata": metadata,
        "spec": {
            "jobRef": {"name": job},
            "step": line["step"],
            "deletionPolicy": DeletionPolicy.RETAIN.value,
            "stored": {
                "storeRef": {"name": store},
                "jobUid": uid,
                "jobNamespace": line["namespace"],
                "round": line["round"],
                "manifest": line["manifest"],
                "bytes": line["bytes"],
                "worldSize": line["worldSize"],
                "committedAt": line["committedAt"],
            },
        },
    }


def import_view(found: StoreImport) -> Table:
    """Return the table of what is imported. It fits into 80 columns; long names are folded."""
    table = Table(box=None, padding=(0, 2, 0, 0), width=80)
    table.add_column("CHECKPOINT", overflow="fold", ratio=1)
    table.add_column("SIZE", no_wrap=True, justify="right")
    table.add_column("RANKS", no_wrap=True, justify="right")
    table.add_column("COMMITTED", no_wrap=True)
    for body in found.objects:
        stored = body["spec"]["stored"]
        size, ranks = size_text(stored["bytes"]), str(stored["worldSize"])
        table.add_row(body["metadata"]["name"], size, ranks, stored["committedAt"])
    return table


def import_store(cluster: ClusterClient, arguments: argparse.Namespace) -> None:
    """List the store, show what this cluster does not know, and create its objects."""
    namespace = arguments.from_namespace or cluster.namespace
    wanted = ListContract(namespace, arguments.job, secrets.token_hex(8)).to_json()
    cluster.get("checkpointstores", arguments.store)
    annotate(cluster, arguments.store, wanted)
    try:
        listed = parse_list(_log_of(cluster, arguments.store, wanted))
    finally:
        annotate(cluster, arguments.store, None)
    found = plan_import(listed, cluster.items("checkpoints"), arguments.store)
    if arguments.output == "json":
        document = {"create": found.objects, "known": found.known, "unusable": found.unusable}
        print(json.dumps(document, indent=1))
    else:
        if found.objects:
            Console(width=80).print(import_view(found))
        print(textwrap.fill(found.summary, 80))
    for why in found.unusable:
        print(textwrap.fill(f"left out: {why}", 80), file=sys.stderr)
    if arguments.dry_run or not found.objects:
        return
    for number, body in enumerate(found.objects):
        try:
            cluster.create("checkpoints", body)
        except ClusterError as error:
            raise ClusterError(
                f"{error}. {number} of {len(found.objects)} objects were created; repeat the command to "
                "create the others"
            ) from error
    newest = found.objects[-1]["metadata"]["name"]
    print(f"created; a new job restores one with spec.restoreFrom.checkpointRef.name: {newest}")


def annotate(cluster: ClusterClient, store: str, request: str | None) -> None:
    """Ask the operator for a list of the store, or take the request back."""
    body = {"metadata": {"annotations": {LIST_ANNOTATION: request}}}
    cluster.patch("checkpointstores", store, body)


def _log_of(cluster: ClusterClient, store: str, wanted: str) -> str:
    """Return the log of the pod that carries out this request, when it has ended."""
    started = time.monotonic()
    selector = f"app.kubernetes.io/component={LIST_COMPONENT},{GROUP}/store={store}"
    why = "the operator has created no pod for it"
    while True:
        pod = next((p for p in cluster.pods(selector) if _request_of(p) == wanted), None)
        phase = "" if pod is None else (pod.get("status") or {}).get("phase")
        if pod is not None and phase in ("Succeeded", "Failed"):
            return cluster.log(pod["metadata"]["name"])
        if pod is not None:
            why = f"pod {pod['metadata']['name']} has not started"
        waits = pod is None or phase == "Pending"
        if waits and time.monotonic() - started > START_SECONDS:
            raise ClusterError(
                f"CheckpointStore {store} was not listed within {START_SECONDS:.0f} s: {why}. "
                f"kubectl describe checkpointstore {store} -n {cluster.namespace} may say why"
            )
        time.sleep(LOOK_SECONDS)


def _request_of(pod: Mapping[str, Any]) -> str | None:
    variables = pod["spec"]["containers"][0].get("env") or []
    return next((v.get("value") for v in variables if v["name"] == "HOLDFAST_LIST"), None)
