"""`import`: save weights of another tool in a folder, or make Checkpoint objects of what a store has.

A store is imported where another cluster wrote it, or etcd was lost. The command holds no keys of the store.
It asks by an annotation of the CheckpointStore, the operator runs a pod that lists the store into its log,
and the command reads the log and creates the objects, all with the rights of the person. It deletes nothing
and changes no object. A CheckpointStore has one request at a time: the newest one counts, and the command
whose request it replaces fails.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast_cli.errors import CommandError, NotFound, UsageError
from holdfast_cli.gangs import VERSION
from holdfast_cli.options import Session, common_options, expanded, target_argument
from holdfast_cli.output import Column, Format, Result, Table, say, show
from holdfast_cli.progress import NO_OPERATOR, Waiting
from holdfast_cli.targets import ClusterTarget, Kind, PlaceTarget, StoreTarget, Target, local_path
from holdfast_core.api import DeletionPolicy, size_text
from holdfast_core.clock import SystemClock, stamp
from holdfast_core.contract import ListContract
from holdfast_core.ids import CheckpointId, JobUid, RestartRound, Step
from holdfast_core.names import (
    GROUP,
    JOB_UID_LABEL,
    LIST_ANNOTATION,
    LIST_COMPONENT,
    checkpoint_name,
)

if TYPE_CHECKING:
    from holdfast_cli.cluster import ClusterClient

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
        CommandError: The store could not be listed, or the kubelet has cut the log.
    """
    lines = log.splitlines()
    try:
        end = json.loads(lines[-1])
        if "error" in end:
            raise CommandError(f"the store cannot be listed: {end['error']}: {end['message']}")
        found = [json.loads(line) for line in lines[-1 - end["lines"] : -1]]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        text = log.strip()[-500:] or "nothing"
        raise CommandError(f"the pod that lists the store wrote no list: {text}") from error
    if len(found) != end["lines"]:
        raise CommandError(
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


def import_table(found: StoreImport) -> Table:
    """Return the table of what is imported."""
    columns: list[Column | str] = [
        "CHECKPOINT",
        Column("SIZE", right=True),
        Column("RANKS", right=True),
        "COMMITTED",
    ]
    rows = []
    for body in found.objects:
        stored = body["spec"]["stored"]
        size = size_text(stored["bytes"])
        rows.append((body["metadata"]["name"], size, stored["worldSize"], stored["committedAt"]))
    return Table(columns, rows)


@click.command(
    "import",
    help="Save weights of another tool as step 0 of a new folder, where TARGET is the folder or the file "
    "with the weights. Or, where it is store/NAME, create a Checkpoint object for each checkpoint of the "
    "CheckpointStore that has none: another cluster wrote it, or etcd was lost. A new job restores one by "
    "spec.restoreFrom. Nothing is deleted or changed, in the store or in the cluster.",
)
@target_argument(Kind.STORE)
@click.option("--format", type=click.Choice(["hf", "dcp", "torch"]), help="Format of the weights.")
@click.option(
    "--to", metavar="DIR", callback=expanded, help="Folder without checkpoints, for the weights."
)
@click.option("--entry", help="Entry of the state that gets the weights (default: model).")
@click.option("--job", help="Name or uid of one job of the store (default: all of the namespace).")
@click.option(
    "--from-namespace",
    metavar="NAMESPACE",
    help="Namespace of the jobs in the store, where another cluster had another one.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be created, and create nothing.")
@common_options
@click.pass_obj
def command(
    session: Session,
    target: Target,
    format: Any,
    to: str | None,
    entry: str | None,
    job: str | None,
    from_namespace: str | None,
    dry_run: bool,
) -> Result | None:
    if isinstance(target, ClusterTarget):
        if target.kind is None and session.program == "holdfast":
            raise _no_weights(str(target))
        if target.kind is not Kind.STORE or target.step is not None:
            raise UsageError(
                f"import does not apply to {target}: expected store/NAME, or ./{target.name} for a folder"
            )
        if format or to or entry:
            raise UsageError(
                "--format, --to and --entry are for weights: omit them with store/NAME"
            )
        import_store(
            session.cluster(),
            target.name,
            session.format,
            job=job,
            from_namespace=from_namespace,
            dry_run=dry_run,
        )
        return None
    if job or from_namespace or dry_run:
        raise UsageError("--job, --from-namespace and --dry-run are for store/NAME: omit them")
    if format is None or to is None:
        raise UsageError(
            f"an import of weights needs --format and --to DIR; store/{Path(target.place).name} names a "
            "CheckpointStore"
        )
    return _import_weights(target, format, to, entry)


def _import_weights(target: PlaceTarget, format: Any, to: str, entry: str | None) -> Result:
    from holdfast.conversion import Import, import_weights
    from holdfast.convert.exporting import DEFAULT_ENTRY

    if target.step is not None:
        raise UsageError(f"weights have no step: omit @{target.step}")
    if isinstance(target, StoreTarget):
        raise UsageError(
            f"import reads weights of a folder or a file: copy the files to a folder from {target}. "
            "store/NAME imports the checkpoints of a CheckpointStore"
        )
    source = local_path(target.place)
    if not source.exists():
        raise _no_weights(target.place)
    count = import_weights(Import(source, format, to, entry or DEFAULT_ENTRY))
    text = f"imported {count} tensors of {target.place} as step 0 of {to}"
    return Result({"tensors": count, "source": target.place, "to": to, "step": 0}, [text])


def _no_weights(name: str) -> NotFound:
    return NotFound(
        f"there is no file or folder {name}: correct the name; store/NAME names a CheckpointStore"
    )


def import_store(
    cluster: ClusterClient,
    store: str,
    format: Format = Format.TABLE,
    *,
    job: str | None = None,
    from_namespace: str | None = None,
    dry_run: bool = False,
) -> None:
    """List the store, show what this cluster does not know, and create its objects."""
    token, now = secrets.token_hex(8), stamp(SystemClock().utc_now())
    wanted = ListContract(from_namespace or cluster.namespace, job, token, now).to_json()
    uid = cluster.get("checkpointstores", store)["metadata"]["uid"]
    annotate(cluster, store, uid, wanted)
    try:
        listed = parse_list(_log_of(cluster.patient(START_SECONDS), store, wanted))
    finally:
        # The operator forgets it after a day. A failure here must not hide why the list has failed.
        with suppress(CommandError):
            if _is_asked(cluster, store, wanted):
                annotate(cluster, store, uid, None)
    found = plan_import(listed, cluster.items("checkpoints"), store)
    document = {"create": found.objects, "known": found.known, "unusable": found.unusable}
    table = [import_table(found)] if found.objects else []
    show(Result(document, [*table, found.summary]), format)
    for why in found.unusable:
        say(f"left out: {why}")
    if dry_run or not found.objects:
        return
    for number, body in enumerate(found.objects):
        try:
            cluster.create("checkpoints", body)
        except CommandError as error:
            raise CommandError(
                f"{error}. {number} of {len(found.objects)} objects were created; repeat the command to "
                "create the others"
            ) from error
    newest = found.objects[-1]["metadata"]["name"]
    say(f"created; a new job restores one with spec.restoreFrom.checkpointRef.name: {newest}")


def annotate(cluster: ClusterClient, store: str, uid: str, request: str | None) -> None:
    """Ask the operator for a list of the store, or take the request back."""
    body = {"metadata": {"annotations": {LIST_ANNOTATION: request}}}
    cluster.patch("checkpointstores", store, uid, body)


def _is_asked(cluster: ClusterClient, store: str, wanted: str) -> bool:
    """Return whether the CheckpointStore has this request. Another command may have replaced it."""
    annotations = cluster.get("checkpointstores", store)["metadata"].get("annotations") or {}
    return bool(annotations.get(LIST_ANNOTATION) == wanted)


def _log_of(cluster: ClusterClient, store: str, wanted: str) -> str:
    """Return the log of the pod that carries out this request, when it has ended."""
    started = time.monotonic()
    selector = f"app.kubernetes.io/component={LIST_COMPONENT},{GROUP}/store={store}"
    why, waiting = f"waiting for {NO_OPERATOR}", Waiting()
    while True:
        pod = next((p for p in cluster.pods(selector) if _request_of(p) == wanted), None)
        phase = "" if pod is None else (pod.get("status") or {}).get("phase")
        if pod is not None and phase in ("Succeeded", "Failed"):
            return cluster.log(pod["metadata"]["name"])
        if pod is not None:
            state = "has not started" if phase == "Pending" else "lists the store"
            why = f"pod {pod['metadata']['name']} {state}"
        if pod is None and not _is_asked(cluster, store, wanted):
            raise CommandError(
                f"another request for a list of CheckpointStore {store} has replaced this one: repeat the "
                "command when the other one has ended"
            )
        waits = pod is None or phase == "Pending"
        if waits and time.monotonic() - started > START_SECONDS:
            raise CommandError(
                f"CheckpointStore {store} was not listed within {START_SECONDS:.0f} s: {why}. "
                f"kubectl describe checkpointstore {store} -n {cluster.namespace} may say why"
            )
        waiting.on(why)
        time.sleep(LOOK_SECONDS)


def _request_of(pod: Mapping[str, Any]) -> str | None:
    variables = pod["spec"]["containers"][0].get("env") or []
    return next((v.get("value") for v in variables if v["name"] == "HOLDFAST_LIST"), None)
