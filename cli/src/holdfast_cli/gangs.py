"""TrainingJobs and CheckpointAdoptions as the plug-in shows them, and the pods of their workers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast_cli.errors import NotFound, StateError
from holdfast_core.clock import parse_stamp
from holdfast_core.contract import TRAINER_CONTAINER
from holdfast_core.ids import CheckpointId, JobUid, RestartRound, Step
from holdfast_core.names import checkpoint_name, member_pod_names

if TYPE_CHECKING:
    from holdfast_core.api.base import ApiModel

    M = TypeVar("M", bound=ApiModel)

VERSION = "v1alpha1"
"""Version of the custom resources."""
KINDS = {"TrainingJob": "trainingjobs", "CheckpointAdoption": "checkpointadoptions"}
"""Plural of each kind of gang."""
MAX_STREAMS = 64
"""Logs that are read at the same time."""


def parsed(kind: type[M], raw: Mapping[str, Any]) -> M:
    """Parse an object of the API.

    Raises:
        StateError: It has a value that only another version of the custom resources knows.
    """
    from pydantic import ValidationError  # here, because completion and --help need no models

    try:
        return kind.from_dict(raw)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise StateError(
            f"{kind.__name__} {raw['metadata']['name']} is of another version: {field} has the value "
            f"{first['input']!r}, which this program does not know. `kubectl holdfast doctor` compares the "
            "versions; install the holdfast-cli of the release in the cluster"
        ) from error


@dataclass(frozen=True, slots=True)
class MemberPod:
    """A worker of the current round and its pod. The texts are "-" if the pod does not exist."""

    worker: int
    pod: str
    node: str
    phase: str
    restarts: int
    """Restarts of the pod's containers."""

    @property
    def exists(self) -> bool:
        return self.pod != "-"


def accepted(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the gang that the operator has not refused. A namespace may have one of each kind of a name."""
    return next((gang for gang in found if not _is_refused(gang)), found[0])


def newest_of(
    gang: dict[str, Any], checkpoints: Iterable[dict[str, Any]], step: int | None
) -> dict[str, Any]:
    """Return the Checkpoint of a step, or the newest one in an object store.

    The restart round counts before the step, because after a rollback a newer checkpoint has a lower step.

    Raises:
        NotFound: The gang has none.
    """

    def age(item: dict[str, Any]) -> tuple[int, int]:
        return (item.get("status") or {}).get("round") or 0, item["spec"].get("step") or 0

    name = gang["metadata"]["name"]
    if step is not None:
        found = [item for item in checkpoints if item["spec"].get("step") == step]
        wanted = f"checkpoint of step {step}"
    else:
        found = [item for item in checkpoints if _is(item, "Persisted", "True")]
        wanted = "checkpoint in an object store"
    if not found:
        raise NotFound(
            f"job {name} has no {wanted}: `kubectl holdfast list {name}` lists what it has"
        )
    return max(found, key=age)


def obstacle_to_order(gang: dict[str, Any]) -> str | None:
    """Return why no order can change from where this gang trains, and what to do instead. None: it can."""
    name, status = gang["metadata"]["name"], gang.get("status") or {}
    conditions = {c["type"]: c for c in status.get("conditions", [])}
    if gang["metadata"].get("deletionTimestamp"):
        return f"{name} is being deleted: create another job, which may name a checkpoint in restoreFrom"
    for end in ("Complete", "Failed"):
        if end in conditions and conditions[end]["status"] == "True":
            return f"{name} is over ({end}): create a new job, which may name a checkpoint in restoreFrom"
    if _is_refused(gang):
        return f"{name} is not accepted: {conditions['Accepted']['message']}"
    return None if status.get("lineage") else f"{name} has not begun yet"


def obstacle_to_start_over(gang: dict[str, Any]) -> str | None:
    """Return why the gang cannot be started over now, and what to do instead. None: it waits for that."""
    found = obstacle_to_order(gang)
    if found is not None:
        return found
    name, status = gang["metadata"]["name"], gang["status"]
    conditions = {c["type"]: c for c in status["conditions"]}
    true = {kind for kind, c in conditions.items() if c["status"] == "True"}
    if "Suspended" in true or gang["spec"].get("suspend"):
        return f"{name} is suspended: set spec.suspend to false first"
    if "CheckpointsLost" in true:
        return None
    if "Running" in true:
        step = status.get("step", 0)
        return (
            f"{name} trains, and to start it over would lose step {step} and all before it. "
            f"`kubectl holdfast restore {name}@STEP` rolls it back to a checkpoint; create another job "
            "to train from the start"
        )
    running = conditions["Running"]
    return f"{name} does not wait for a start over. {running['reason']}: {running['message']}"


def _is_refused(gang: dict[str, Any]) -> bool:
    return _is(gang, "Accepted", "False")


def _is(item: dict[str, Any], kind: str, value: str) -> bool:
    """Return whether an object has a condition with this status."""
    conditions = (item.get("status") or {}).get("conditions", [])
    return any((c["type"], c["status"]) == (kind, value) for c in conditions)


def members(gang: dict[str, Any], pods: Iterable[dict[str, Any]]) -> list[MemberPod]:
    """Return the workers of the current round by index.

    Args:
        gang: See `pods_of_members`.
        pods: The pods with the label of the gang.
    """
    return [_member(worker, pod) for worker, pod in enumerate(pods_of_members(gang, pods))]


def pods_of_members(
    gang: dict[str, Any], pods: Iterable[dict[str, Any]]
) -> list[dict[str, Any] | None]:
    """Return the pod of each worker of the current round, or None where it does not exist.

    Args:
        gang: A TrainingJob, whose pods have names that follow from its status or are in it, or a
            CheckpointAdoption, whose status records the uids of its pods.
        pods: The pods with the label of the gang.
    """
    status = gang.get("status") or {}
    by_name = {pod["metadata"]["name"]: pod for pod in pods}
    if gang["kind"] == "TrainingJob":
        return [by_name.get(name) for name in member_pod_names(gang)]
    by_uid = {pod["metadata"]["uid"]: pod for pod in by_name.values()}
    recorded = {pod["worker"]: pod["uid"] for pod in status.get("pods") or []}
    workers = range(len(status.get("members") or []))
    return [by_uid.get(recorded.get(worker, "")) for worker in workers]


def _member(worker: int, pod: dict[str, Any] | None) -> MemberPod:
    if pod is None:
        return MemberPod(worker, "-", "-", "-", 0)
    status = pod.get("status") or {}
    statuses = [
        *(status.get("initContainerStatuses") or []),
        *(status.get("containerStatuses") or []),
    ]
    return MemberPod(
        worker,
        pod["metadata"]["name"],
        pod["spec"].get("nodeName") or "-",
        "Terminating" if pod["metadata"].get("deletionTimestamp") else status.get("phase", "-"),
        sum(container.get("restartCount", 0) for container in statuses),
    )


def silence_of_operator(gang: Mapping[str, Any], now: datetime) -> str | None:
    """Return for how long no operator has written the status of a gang, if that is too long, or None.

    While a gang trains, its goodput is written several times a minute. Clocks may differ by some minutes.
    """
    meta, status = gang["metadata"], gang.get("status") or {}
    entries = [e for e in meta.get("managedFields") or [] if e.get("subresource") == "status"]
    times = [e["time"] for e in entries if e.get("time")] if status else [meta["creationTimestamp"]]
    if not times or status.get("phase", "Running") != "Running":
        return None
    minutes = int((now - parse_stamp(max(times))).total_seconds() / 60)
    text = f"no operator has written this status for {minutes} minutes"
    return f"{text}: `kubectl holdfast doctor` says whether one runs" if minutes >= 5 else None


def trainer_container(gang: dict[str, Any]) -> str:
    """Return the name of the container in which the ranks run."""
    return str(gang["spec"].get("container") or TRAINER_CONTAINER)


def ranks_of_pod(gang: dict[str, Any]) -> int:
    """Return the number of ranks in each pod."""
    return int(gang["spec"].get("procsPerWorker") or 1)


def store_of(gang: dict[str, Any]) -> str | None:
    """Return the name of the gang's CheckpointStore, or None."""
    stored = (gang["spec"].get("checkpoint") or {}).get("object") or {}
    name = (stored.get("storeRef") or {}).get("name")
    return None if name is None else str(name)


def persisted_name(gang: dict[str, Any]) -> str | None:
    """Return the name of the Checkpoint object of the newest persisted step, or None."""
    persisted = (gang.get("status") or {}).get("lastPersisted")
    if not persisted:
        return None
    checkpoint = CheckpointId(Step(persisted["step"]), RestartRound(persisted["round"]))
    meta = gang["metadata"]
    return checkpoint_name(meta["name"], JobUid(meta["uid"]), checkpoint)


def conditions_of(item: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the conditions of an object by type."""
    return {c["type"]: c for c in (item.get("status") or {}).get("conditions") or []}
