"""`inject`: game days. It causes one fault in a job, with the rights of the person who asks for it.

A rank or a sidecar is signalled by a command in its container, and a pod is deleted or evicted. Only a
namespace with the label GAME_DAYS permits it, so that a wrong namespace or context costs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import click

from holdfast_cli.errors import CommandError, NotFound, StateError, UsageError
from holdfast_cli.gangs import pods_of_members, ranks_of_pod, trainer_container
from holdfast_cli.logs import printable
from holdfast_cli.options import Session, place_options, target_argument, yes_option
from holdfast_cli.output import Result
from holdfast_cli.question import confirm
from holdfast_cli.targets import Kind, Target, named, without_step
from holdfast_core.contract import SIDECAR_CONTAINER
from holdfast_core.names import GROUP, JOB_UID_LABEL

if TYPE_CHECKING:
    from holdfast_cli.cluster import ClusterClient

INSTEAD = "Send a signal to the process of a rank there"
GAME_DAYS = f"{GROUP}/game-days"
"""Label of a namespace whose jobs may be disturbed, with the value ALLOWED."""
ALLOWED = "allowed"

_SIGNAL_RANK = """
import os, sys
rank, index, number = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
found = {}
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        name, _, rest = open(f"/proc/{pid}/stat").read().partition(" (")[2].rpartition(") ")
    except OSError:
        continue
    if name.startswith("holdfast-rank"):
        fields = rest.split()
        found[int(pid)] = name, int(fields[1]), int(fields[19])
ranks = sorted((start, pid, name) for pid, (name, parent, start) in found.items() if parent not in found)
named = [pid for _, pid, name in ranks if name == f"holdfast-rank{rank}"]
# The kernel cuts long names, so ranks from 100 on are found by the order in which they were forked.
chosen = named or [pid for _, pid, name in ranks[index:index + 1] if name == "holdfast-rank"]
if not chosen:
    sys.exit(f"no process of rank {rank} runs here")
os.kill(chosen[0], number)
print(chosen[0])
"""
_SIGNAL_FIRST = "import os, sys; os.kill(1, int(sys.argv[1]))"
_KILL, _STOP, _TERMINATE = 9, 19, 15


class Fault(StrEnum):
    """What can be injected."""

    KILL_RANK = "kill rank"
    """SIGKILL to the process of a rank."""
    HANG_RANK = "hang rank"
    """SIGSTOP to the process of a rank."""
    KILL_POD = "kill pod"
    """Deletion without a grace period, as a lost node ends a pod."""
    DELETE_POD = "delete pod"
    EVICT_POD = "evict pod"
    """As `kubectl drain` does: the PodDisruptionBudget may refuse it."""
    DRAIN_SIDECAR = "drain sidecar"
    """SIGTERM to a sidecar, which writes what it holds, ends and starts again."""


@dataclass(frozen=True, slots=True)
class Injection:
    """One fault."""

    fault: Fault
    number: int
    """The rank, or the worker of the pod."""


_KILLED = re.compile(r"(rank|pod)=(\d{1,9})")


def parse_kill(text: str) -> Injection:
    """Return what `--kill rank=N` or `--kill pod=N` asks for. Raises UsageError."""
    found = _KILLED.fullmatch(text)
    if found is None:
        raise UsageError(f"{text!r} names no rank and no pod: expected rank=N or pod=N")
    fault = Fault.KILL_RANK if found[1] == "rank" else Fault.KILL_POD
    return Injection(fault, int(found[2]))


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """Where a fault goes, and what follows."""

    injection: Injection
    job: str
    worker: int
    index: int
    """Number of the rank within its pod."""
    pod: str
    uid: str
    node: str
    container: str

    def __str__(self) -> str:
        """Say what will happen, and what Holdfast does then."""
        number, where = self.injection.number, f"pod {self.pod} on node {self.node}"
        match self.injection.fault:
            case Fault.KILL_RANK:
                return (
                    f"SIGKILL to the process of rank {number} in {where}. The gang restarts in its pods from "
                    "the newest committed step."
                )
            case Fault.HANG_RANK:
                return (
                    f"SIGSTOP to the process of rank {number} in {where}. No rank finishes a step until the "
                    "gang counts as hung (failurePolicy.hangs) and restarts."
                )
            case Fault.KILL_POD:
                return (
                    f"{where} of worker {number} is deleted without a grace period, as if its node were "
                    "lost. A new pod takes its place. Steps that were only there are lost."
                )
            case Fault.DELETE_POD:
                return (
                    f"{where} of worker {number} is deleted. The gang saves and stops, and a new pod takes "
                    "its place: no step should be lost."
                )
            case Fault.EVICT_POD:
                return (
                    f"{where} of worker {number} is evicted, as by kubectl drain. The gang saves and stops, "
                    "and a new pod takes its place: no step should be lost."
                )
            case Fault.DRAIN_SIDECAR:
                return (
                    f"SIGTERM to the sidecar in {where} of worker {number}. It writes what it holds, ends "
                    "and starts again in the pod. The ranks go on."
                )


def obstacle_to_game_days(namespace: dict[str, Any]) -> str | None:
    """Return why the jobs of a namespace may not be disturbed, and how to permit it, or None."""
    name = namespace["metadata"]["name"]
    if (namespace["metadata"].get("labels") or {}).get(GAME_DAYS) == ALLOWED:
        return None
    return (
        f"namespace {name} does not permit game days: kubectl label namespace {name} {GAME_DAYS}={ALLOWED} "
        "permits them for all of its jobs"
    )


def plan(gang: dict[str, Any], pods: list[dict[str, Any]], injection: Injection) -> PlannedFault:
    """Return where the fault goes.

    Raises:
        NotFound: The gang has no such rank or worker, or it has no pod now.
        StateError: The gang is over or being deleted, or the pod does not run.
    """
    name, number, per_pod = gang["metadata"]["name"], injection.number, ranks_of_pod(gang)
    status = gang.get("status") or {}
    if gang["metadata"].get("deletionTimestamp"):
        raise StateError(f"{name} is being deleted: choose another job")
    if status.get("phase") in ("Succeeded", "Failed", "Suspended"):
        raise StateError(
            f"{name} is {status['phase']}: it has nothing to recover from. Choose another job"
        )
    is_rank = injection.fault in (Fault.KILL_RANK, Fault.HANG_RANK)
    present = pods_of_members(gang, pods)
    worker = number // per_pod if is_rank else number
    if worker >= len(present):
        what, most = ("rank", len(present) * per_pod) if is_rank else ("worker", len(present))
        raise NotFound(
            f"{name} has {most} {what}s now, numbered from 0: there is no {what} {number}"
        )
    pod = present[worker]
    if pod is None:
        raise NotFound(
            f"worker {worker} of {name} has no pod now; kubectl holdfast status {name} shows why"
        )
    meta, phase = pod["metadata"], (pod.get("status") or {}).get("phase")
    if meta.get("deletionTimestamp") or phase != "Running":
        shown = "being deleted" if meta.get("deletionTimestamp") else phase or "not started"
        raise StateError(f"pod {meta['name']} of worker {worker} is {shown}: wait until it runs")
    is_sidecar = injection.fault is Fault.DRAIN_SIDECAR
    return PlannedFault(
        injection,
        name,
        worker,
        number % per_pod if is_rank else 0,
        meta["name"],
        meta["uid"],
        pod["spec"].get("nodeName") or "-",
        SIDECAR_CONTAINER if is_sidecar else trainer_container(gang),
    )


def prepare(cluster: ClusterClient, name: str, injection: Injection) -> PlannedFault:
    """Return the plan, after the namespace was asked. Nothing is done yet."""
    obstacle = obstacle_to_game_days(cluster.ask("CoreV1Api.read_namespace", cluster.namespace))
    if obstacle is not None:
        raise StateError(obstacle)
    gang = cluster.gang(name)
    return plan(gang, cluster.pods(f"{JOB_UID_LABEL}={gang['metadata']['uid']}"), injection)


def carry_out(cluster: ClusterClient, wanted: PlannedFault) -> str:
    """Cause the fault, and return what was done.

    Raises:
        CommandError: It was refused, or the process was not there.
    """
    return _DEEDS[wanted.injection.fault](cluster, wanted)


def _signal_rank(number: int) -> Callable[[ClusterClient, PlannedFault], str]:
    def deed(cluster: ClusterClient, wanted: PlannedFault) -> str:
        rank = wanted.injection.number
        words = ("python3", "-c", _SIGNAL_RANK, str(rank), str(wanted.index), str(number))
        said = _run(cluster, wanted, words)
        return f"process {said} of rank {rank} got signal {number}"

    return deed


def _drain_sidecar(cluster: ClusterClient, wanted: PlannedFault) -> str:
    _run(cluster, wanted, ("python3", "-c", _SIGNAL_FIRST, str(_TERMINATE)))
    return f"the sidecar of worker {wanted.worker} got signal {_TERMINATE}"


def _run(cluster: ClusterClient, wanted: PlannedFault, words: tuple[str, ...]) -> str:
    code, said = cluster.run_in(wanted.pod, wanted.container, words)
    text = printable(" ".join(said.split()))[:300]
    if code != 0:
        raise CommandError(
            f"the command in container {wanted.container} of pod {wanted.pod} ended with {code}: {text}; the "
            "image needs python3, and the ranks holdfast run"
        )
    return text


def _delete(grace_seconds: int | None) -> Callable[[ClusterClient, PlannedFault], str]:
    def deed(cluster: ClusterClient, wanted: PlannedFault) -> str:
        body: dict[str, Any] = {"preconditions": {"uid": wanted.uid}}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        cluster.ask(
            "CoreV1Api.delete_namespaced_pod", wanted.pod, cluster.namespace, body=body, tries=1
        )
        return f"pod {wanted.pod} is being deleted"

    return deed


def _evict(cluster: ClusterClient, wanted: PlannedFault) -> str:
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": wanted.pod, "namespace": cluster.namespace},
        "deleteOptions": {"preconditions": {"uid": wanted.uid}},
    }
    cluster.ask(
        "CoreV1Api.create_namespaced_pod_eviction", wanted.pod, cluster.namespace, body, tries=1
    )
    return f"pod {wanted.pod} is evicted"


_DEEDS: dict[Fault, Callable[[ClusterClient, PlannedFault], str]] = {
    Fault.KILL_RANK: _signal_rank(_KILL),
    Fault.HANG_RANK: _signal_rank(_STOP),
    Fault.KILL_POD: _delete(0),
    Fault.DELETE_POD: _delete(None),
    Fault.EVICT_POD: _evict,
    Fault.DRAIN_SIDECAR: _drain_sidecar,
}


_OPTIONS = {
    "delete_pod": Fault.DELETE_POD,
    "evict_pod": Fault.EVICT_POD,
    "drain_sidecar": Fault.DRAIN_SIDECAR,
}


@click.command(
    "inject",
    help="Cause one fault in a job, to see how it recovers. Only in a namespace with the label "
    f"{GAME_DAYS}={ALLOWED}, and after a question.",
)
@target_argument(Kind.JOB)
@click.option("--kill", metavar="rank=N|pod=N", help="Kill a rank, or a pod as a lost node does.")
@click.option("--hang", metavar="rank=N", help="Stop the process of a rank.")
@click.option("--delete-pod", type=click.IntRange(min=0), metavar="N", help="Delete a pod.")
@click.option("--evict-pod", type=click.IntRange(min=0), metavar="N", help="Evict a pod.")
@click.option(
    "--drain-sidecar", type=click.IntRange(min=0), metavar="N", help="Restart a sidecar in order."
)
@yes_option
@place_options
@click.pass_obj
def command(session: Session, /, target: Target, yes: bool, **faults: Any) -> Result:
    found = without_step(named(target, "inject", (Kind.JOB,), INSTEAD), "inject")
    job = found.name
    injection = parse_faults({name: value for name, value in faults.items() if value is not None})
    cluster = session.cluster(found)
    wanted = prepare(cluster, job, injection)
    if not yes:
        confirm(
            f"{wanted}\nDo it?",
            refused=f"nothing was done to {job}",
            no_terminal=f"{wanted}\nWithout a terminal, --yes confirms it",
        )
    done = carry_out(cluster, wanted)
    shows = f"{session.program} status {job} -w shows the recovery"
    return Result({"fault": injection.fault, "pod": wanted.pod, "done": done}, [done, shows])


def parse_faults(given: dict[str, Any]) -> Injection:
    """Return the fault of the options that were given. Raises UsageError unless it is exactly one."""
    if len(given) != 1:
        raise UsageError("name one fault, for example --kill rank=2 (--help lists them)")
    ((option, value),) = given.items()
    if option == "kill":
        return parse_kill(value)
    if option == "hang":
        found = parse_kill(value)
        if found.fault is not Fault.KILL_RANK:
            raise UsageError(f"--hang {value!r}: expected rank=N, for example rank=2")
        return Injection(Fault.HANG_RANK, found.number)
    return Injection(_OPTIONS[option], value)
