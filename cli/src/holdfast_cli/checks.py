"""The checks of `doctor`: each is one function of what was read. Pure.

What could not be read is Unread with the reason, and its check says UNKNOWN: it is never taken for good.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, TypeVar

from holdfast_cli.gangs import conditions_of, persisted_name, ranks_of_pod, store_of
from holdfast_cli.top import age_text
from holdfast_cli.views import is_trouble
from holdfast_core.api import parse_quantity_bytes, size_text
from holdfast_core.clock import parse_stamp
from holdfast_core.errors import ConfigError, HoldfastError
from holdfast_core.names import GROUP, first_of

OLDEST_KUBERNETES = (1, 31)
UPGRADE = "helm upgrade --install holdfast charts/holdfast -n holdfast-system --create-namespace"
SKEW_SECONDS = 5.0
"""Difference of clocks from which on times of logs and Events mislead."""
SIGNATURE_SKEW_SECONDS = 900.0
"""Difference from which on S3 refuses signatures (RequestTimeTooSkewed)."""
_LEASE_SECONDS = 40
"""Age of a node's lease after which Kubernetes takes the node for lost. It is renewed every 10 s."""
_START_SECONDS = 60
"""Age from which on a pod should have started."""
_MOST_PODS = 16
_CERTIFICATE_DAYS = 14
_ORPHAN_SHARE = 0.2
_SLOT_ROOM = 65 / 64
"""Room for growth in a slot (docs/training.md, Shared memory)."""


T = TypeVar("T")


class CheckLevel(StrEnum):
    """What a check says. Only FAILURE changes the exit code."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    level: CheckLevel
    looked_at: str
    found: str
    expected: str = ""
    mend: str = ""
    """The command, or the change, that mends it."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What a check is about. Its methods return results."""

    name: str
    looked_at: str

    def ok(self, found: str) -> Check:
        return Check(self.name, CheckLevel.OK, self.looked_at, found)

    def warning(self, found: str, expected: str, mend: str) -> Check:
        return Check(self.name, CheckLevel.WARNING, self.looked_at, found, expected, mend)

    def failure(self, found: str, expected: str, mend: str) -> Check:
        return Check(self.name, CheckLevel.FAILURE, self.looked_at, found, expected, mend)


@dataclass(frozen=True, slots=True)
class Unread:
    """What could not be read, and why."""

    why: str


SILENT = Unread("the API server does not answer")


class NotReadError(HoldfastError):
    """A check needs what could not be read."""


def given(value: T | Unread) -> T:
    """Return what was read. Raises NotReadError if it could not be read."""
    if isinstance(value, Unread):
        raise NotReadError(value.why)
    return value


@dataclass(frozen=True, slots=True)
class Right:
    """A request that a verb of the command line makes."""

    verbs: str
    """The verbs that need it."""
    verb: str
    resource: str
    group: str = ""
    subresource: str = ""

    def __str__(self) -> str:
        kind = f"{self.resource}.{self.group}" if self.group else self.resource
        return f"{self.verb} {kind}{'/' if self.subresource else ''}{self.subresource}"


RIGHTS = (
    Right("all verbs", "list", "trainingjobs", GROUP),
    Right("all verbs", "get", "trainingjobs", GROUP),
    Right("list, show, top", "list", "checkpoints", GROUP),
    Right("status, logs, events", "list", "pods"),
    Right("logs", "get", "pods", "", "log"),
    Right("events", "list", "events"),
    Right("save, import", "create", "checkpoints", GROUP),
    Right("verify, pin, unpin", "patch", "checkpoints", GROUP),
    Right("prune", "delete", "checkpoints", GROUP),
    Right("restore, restart", "patch", "trainingjobs", GROUP),
    Right("restore --to-new-job", "create", "trainingjobs", GROUP),
    Right("import", "patch", "checkpointstores", GROUP),
    Right("inject --kill rank", "create", "pods", "", "exec"),
    Right("inject --delete-pod", "delete", "pods"),
)


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything that was read. The defaults are those of a server that does not answer."""

    now: datetime
    """By the clock of this machine, when the API server has answered."""
    namespace: str
    version: str
    """Version of this program."""
    api_version: dict[str, Any] | Unread
    known_kinds: Sequence[dict[str, Any]]
    """The CustomResourceDefinitions of this program."""
    server_time: datetime | Unread = SILENT
    """The Date header of the API server."""
    certificate_ends: datetime | Unread = SILENT
    """End of the API server's certificate."""
    served: dict[str, Any] | Unread = SILENT
    """APIResourceList of our group and version."""
    kinds: Sequence[dict[str, Any]] | Unread = SILENT
    """The CustomResourceDefinitions of the cluster."""
    operators: Sequence[dict[str, Any]] | Unread = SILENT
    """The operator's Deployments."""
    leases: Mapping[str, dict[str, Any]] | Unread = SILENT
    """The operators' leases, by namespace/name."""
    policies: Sequence[dict[str, Any]] | Unread = SILENT
    bindings: Sequence[dict[str, Any]] | Unread = SILENT
    rights: Sequence[tuple[Right, bool]] | Unread = SILENT
    stores: Sequence[dict[str, Any]] | Unread = SILENT
    gangs: Sequence[dict[str, Any]] | Unread = SILENT
    pods: Sequence[dict[str, Any]] | Unread = SILENT
    nodes: Mapping[str, dict[str, Any] | Unread] = field(default_factory=dict)
    """The nodes of the pods, by name."""
    node_leases: Sequence[dict[str, Any]] | Unread = SILENT
    checkpoints: Sequence[dict[str, Any]] | Unread = SILENT
    metrics: Mapping[str, str | Unread] = field(default_factory=dict)
    """Metrics of sidecars, by pod."""


def examine(facts: Findings) -> list[Check]:
    """Return the results of all checks, in the order in which one depends on the other."""
    results = list[Check]()
    for name, checks in _CHECKS.items():
        found = checks(facts)
        try:
            for check in found:
                results.append(check)
        except NotReadError as error:
            results.append(Check(name, CheckLevel.UNKNOWN, "", f"could not be read: {error}"))
    return results


def api_server(facts: Findings) -> Iterator[Check]:
    it = Subject("API server", "its version")
    expected = f"Kubernetes {'.'.join(map(str, OLDEST_KUBERNETES))} or newer"
    if isinstance(facts.api_version, Unread):
        yield it.failure(facts.api_version.why, expected, "kubectl version")
        return
    text = str(facts.api_version.get("gitVersion", "?"))
    numbers = re.match(r"v(\d+)\.(\d+)", text)
    is_new = numbers is not None and (int(numbers[1]), int(numbers[2])) >= OLDEST_KUBERNETES
    yield it.ok(text) if is_new else it.failure(text, expected, "upgrade the cluster")


def clocks(facts: Findings) -> Iterator[Check]:
    it = Subject("clock of this machine", "the Date header of the API server")
    skew = (facts.now - given(facts.server_time)).total_seconds()
    found = f"{abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}"
    yield _skew(it, found, abs(skew), "timedatectl set-ntp true")


def _skew(it: Subject, found: str, seconds: float, mend: str) -> Check:
    if seconds < SKEW_SECONDS:
        return it.ok(found)
    expected = (
        f"less than {SKEW_SECONDS:.0f} s; S3 refuses requests at {SIGNATURE_SKEW_SECONDS:.0f} s"
    )
    is_bad = seconds >= SIGNATURE_SKEW_SECONDS
    return (it.failure if is_bad else it.warning)(found, expected, mend)


def certificate(facts: Findings) -> Iterator[Check]:
    it = Subject("certificate of the API server", "the end of its validity")
    ends = given(facts.certificate_ends)
    left = ends - facts.now
    found = f"ends {ends:%Y-%m-%d}, in {left.days} days"
    expected = f"at least {_CERTIFICATE_DAYS} days"
    mend = "kubeadm certs renew apiserver, or renew it as your cluster does"
    if left.days >= _CERTIFICATE_DAYS:
        yield it.ok(found)
    else:
        yield (it.failure if left < timedelta(0) else it.warning)(found, expected, mend)


def kinds(facts: Findings) -> Iterator[Check]:
    """Compare the kinds that the API server knows with those of this program."""
    it = Subject("kinds of Holdfast", f"{GROUP}/v1alpha1")
    expected = f"{len(facts.known_kinds)} kinds of {facts.version}"
    if isinstance(facts.served, Unread):
        yield it.failure(facts.served.why, expected, UPGRADE)
        return
    served = {resource["name"] for resource in facts.served.get("resources") or []}
    plurals = [kind["spec"]["names"]["plural"] for kind in facts.known_kinds]
    if absent := [plural for plural in plurals if plural not in served]:
        yield it.failure(f"without {', '.join(absent)}", expected, UPGRADE)
        return
    known = {kind["metadata"]["name"]: _fields(kind) for kind in facts.known_kinds}
    missing, other = list[str](), set[str]()
    for kind in given(facts.kinds):
        label = (kind["metadata"].get("labels") or {}).get("app.kubernetes.io/version")
        if label not in (None, facts.version):
            other.add(str(label))
        lacking = known.get(kind["metadata"]["name"], set()) - _fields(kind)
        missing += [f"{kind['spec']['names']['plural']} {path}" for path in sorted(lacking)]
    if missing:
        found = f"{len(missing)} fields are missing: {first_of(missing, 4)}"
        yield it.failure(found, expected, UPGRADE)
    elif other:
        yield it.warning(f"version {', '.join(sorted(other))}", expected, UPGRADE)
    else:
        yield it.ok(expected)


def _fields(kind: dict[str, Any]) -> set[str]:
    """Return the paths of all fields in the schema of a CRD."""
    versions = kind["spec"].get("versions") or []
    schema = next((v.get("schema") or {} for v in versions if v["name"] == "v1alpha1"), {})
    found = set[str]()

    def walk(node: Any, path: str) -> None:
        if not isinstance(node, dict):
            return
        for key, value in (node.get("properties") or {}).items():
            found.add(f"{path}.{key}")
            walk(value, f"{path}.{key}")
        for key in ("items", "additionalProperties"):
            walk(node.get(key), f"{path}[]")

    walk(schema.get("openAPIV3Schema"), "")
    return found


def operator(facts: Findings) -> Iterator[Check]:
    it = Subject("operator", "its Deployment")
    operators = given(facts.operators)
    if not operators:
        yield it.failure("there is none", "one Deployment", UPGRADE)
    if len(operators) > 1:
        found = ", ".join(map(_full_name, operators))
        yield it.warning(found, "one, or each with its own watchNamespaces", "helm list -A")
    for one in operators:
        yield _operator(one, facts)
        yield _leader(one, facts)


def _operator(one: dict[str, Any], facts: Findings) -> Check:
    meta, it = one["metadata"], Subject("operator", f"Deployment {_full_name(one)}")
    wanted = one["spec"].get("replicas", 1)
    ready = (one.get("status") or {}).get("readyReplicas") or 0
    version = (meta.get("labels") or {}).get("app.kubernetes.io/version", "?")
    found = f"version {version}, {ready} of {wanted} ready"
    kubectl = f"kubectl -n {meta['namespace']}"
    if wanted == 0:
        mend = f"{kubectl} scale deployment {meta['name']} --replicas=1"
        return it.failure(found, "at least one ready pod", mend)
    if ready == 0:
        mend = f"{kubectl} describe deployment {meta['name']}"
        return it.failure(found, "at least one ready pod", mend)
    if version != facts.version:
        return it.warning(found, f"{facts.version}, the version of this program", UPGRADE)
    if ready < wanted:
        return it.warning(found, "all pods ready", f"{kubectl} get pods")
    return it.ok(found)


def _leader(one: dict[str, Any], facts: Findings) -> Check:
    place = _full_name(one)
    it = Subject("leader of the operator", f"Lease {place}")
    mend = f"kubectl -n {one['metadata']['namespace']} logs deployment/{one['metadata']['name']}"
    spec = given(facts.leases).get(place, {}).get("spec") or {}
    if not spec.get("holderIdentity") or not spec.get("renewTime"):
        return it.failure("no process leads", "a holder", mend)
    age = _seconds_since(facts, spec["renewTime"])
    limit = 3 * int(spec.get("leaseDurationSeconds") or 10)
    found = f"{spec['holderIdentity']} renewed it {age_text(age)} ago"
    return it.ok(found) if age < limit else it.failure(found, f"at most {limit} s ago", mend)


_POLICIES = {
    "-trainingjobs": "who creates a TrainingJob may create pods, and templates stay out of the sidecar",
    "-operator": "the operator's account changes only objects of Holdfast",
}
"""End of the name of each policy that protects something, and what it protects."""


def policies(facts: Findings) -> Iterator[Check]:
    it = Subject(
        "admission policies", "ValidatingAdmissionPolicies of the chart and their bindings"
    )
    found = {policy["metadata"]["name"]: policy for policy in given(facts.policies)}
    bound = {binding["spec"].get("policyName") for binding in given(facts.bindings)}
    problems = [
        f"there is no policy *{end} ({meaning})"
        for end, meaning in _POLICIES.items()
        if not any(name.endswith(end) for name in found)
    ]
    for name, policy in found.items():
        if name not in bound:
            problems.append(f"policy {name} has no binding")
        if ((policy.get("status") or {}).get("typeChecking") or {}).get("expressionWarnings"):
            problems.append(f"policy {name} does not fit the kinds of this cluster")
    if problems:
        mend = f"{UPGRADE} --set admissionPolicy.enabled=true,operatorPolicy.enabled=true"
        yield it.warning("; ".join(problems), "all of them bound", mend)
    else:
        yield it.ok(", ".join(sorted(found)))


def rights(facts: Findings) -> Iterator[Check]:
    it = Subject("your rights", f"what you may do in namespace {facts.namespace}")
    asked = given(facts.rights)
    denied = [right for right, allowed in asked if not allowed]
    if not denied:
        yield it.ok(f"all {len(asked)} requests of the verbs are allowed")
        return
    needed = any(right.verbs == "all verbs" for right in denied)
    found = "not allowed: " + "; ".join(f"{right} (for {right.verbs})" for right in denied)
    role = "view" if needed else "edit"
    mend = (
        f"kubectl create rolebinding holdfast-{role} -n {facts.namespace} --clusterrole={role} --user=YOU, "
        "by an administrator"
    )
    say = it.failure if needed else it.warning
    yield say(found, f"the role {role} in the namespace", mend)


def stores(facts: Findings) -> Iterator[Check]:
    for store in given(facts.stores):
        yield from _store(store, facts)


def _store(store: dict[str, Any], facts: Findings) -> Iterator[Check]:
    meta, conditions = store["metadata"], conditions_of(store)
    status = store.get("status") or {}
    name, looked = f"store {meta['name']}", f"checkpointstore/{meta['name']}"
    it, expected = Subject(name, looked), "Available=True"
    where = f"kubectl -n {meta['namespace']} describe checkpointstore {meta['name']}"
    available = conditions.get("Available")
    if available is None:
        yield it.warning("it was not probed yet", expected, f"{where}; is the operator ready?")
        return
    if available["status"] != "True":
        yield it.failure(_said(available), expected, where)
    else:
        probed = status.get("lastProbe")
        age = f", probed {age_text(_seconds_since(facts, probed))} ago" if probed else ""
        yield it.ok(f"{available['reason']}{age}")
    listed = conditions.get("Listed")
    if listed is not None and listed["status"] != "True":
        yield Subject(f"{name}: listing", looked).warning(_said(listed), "Listed=True", where)
    pressure = conditions.get("QuotaPressure")
    if pressure is not None and pressure["status"] == "True":
        full = Subject(f"{name}: quota", looked)
        mend = "kubectl holdfast prune JOB, or raise spec.quota"
        say = full.failure if status.get("reachedQuotas") else full.warning
        yield say(_said(pressure), "less than 80 % used", mend)
    if status.get("usage"):
        yield _orphans(status["usage"], Subject(f"{name}: orphans", looked))


def _orphans(usage: dict[str, Any], it: Subject) -> Check:
    orphans = usage.get("orphans") or []
    wasted, total = sum(one["bytes"] for one in orphans), usage["bytes"]
    named = ", ".join(f"{one['kind']} {size_text(one['bytes'])}" for one in orphans)
    found = f"{size_text(wasted)} of {size_text(total)} belong to no checkpoint"
    if wasted <= _ORPHAN_SHARE * total:
        return it.ok(found)
    mend = "they are deleted after usage.sweepOrphansAfter (24h); shorten it to free them sooner"
    return it.warning(f"{found} ({named})", f"at most {_ORPHAN_SHARE:.0%}", mend)


_MENDS = {
    "Accepted": "correct the spec as the message says: kubectl edit {kind} {name}",
    "CheckpointsLost": "kubectl holdfast restart {name} --from-start",
    "UploadsHeld": "kubectl holdfast prune {name}, or raise the quota of the store",
    "Quarantined": "kubectl holdfast verify CHECKPOINT, then failurePolicy.releasedSteps releases it",
    "CheckpointMissing": "restore the objects of the store, or correct its bucket and prefix",
    "RemoteTierHealthy": "kubectl holdfast doctor store/{store}",
    "SidecarsUnreachable": "kubectl holdfast logs {name} --sidecar",
    "HangsRepeat": "kubectl holdfast logs {name}: announce pauses with ckpt.paused()",
    "LastCheckpointSucceeded": "kubectl holdfast logs {name} --sidecar",
    "Failed": "kubectl holdfast logs {name}; create a new job with restoreFrom",
}
"""What mends a condition, where it is not what `events` shows."""
_REASONS = {
    "CreateRefused": "raise the quota, or let the template fit Pod Security: the message names the rule",
    "ContainerCannotStart": "correct the image or the Secret: kubectl edit {kind} {name}",
    "WaitingForQueue": "kubectl get workloads: Kueue admits the gang when there is room",
    "WaitingForHolders": "bring the node back, or give the step up: kubectl delete pod POD",
    "PodNotStarted": "kubectl describe pod POD: a volume, a Secret or a network is missing",
}
"""The same for the reason of Running=False."""
_ALSO_TROUBLE = frozenset(
    {("Quarantined", "True"), ("LastCheckpointSucceeded", "False"), ("Unschedulable", "True")}
)


def jobs(facts: Findings) -> Iterator[Check]:
    """Report the conditions of jobs that say that something is wrong."""
    for gang in given(facts.gangs):
        yield from _job(gang)


def _job(gang: dict[str, Any]) -> Iterator[Check]:
    name, conditions = gang["metadata"]["name"], conditions_of(gang)
    status, kind = gang.get("status") or {}, gang["kind"].lower()
    words = {"name": name, "kind": kind, "store": store_of(gang) or "NAME"}
    it, show = Subject(f"job {name}", f"{kind}/{name}"), f"kubectl holdfast events {name}"
    if not conditions:
        mend = f"{show}; is the operator ready, and does it watch this namespace?"
        yield it.failure("no operator has seen it", "conditions", mend)
        return
    true = {kind for kind, c in conditions.items() if c["status"] == "True"}
    troubles = [
        c for c in conditions.values() if is_trouble(c) or (c["type"], c["status"]) in _ALSO_TROUBLE
    ]
    for condition in troubles:
        mend = _MENDS.get(condition["type"], show).format(**words)
        expected = f"{condition['type']}={'False' if condition['type'] in true else 'True'}"
        yield it.failure(_said(condition), expected, mend)
    if troubles:
        return  # they say why it does not run
    if "Running" in true or true & {"Complete", "Failed", "Suspended"}:
        yield it.ok(f"{status.get('phase', 'Pending')} at step {status.get('step', '-')}")
    elif "Running" in conditions:
        running = conditions["Running"]
        mend = _REASONS.get(running["reason"], show).format(**words)
        yield it.warning(_said(running), "Running=True", mend)


_WAITS = {
    "ErrImagePull": "correct the image, or add imagePullSecrets to the template",
    "ImagePullBackOff": "correct the image, or add imagePullSecrets to the template",
    "InvalidImageName": "correct the image in the template",
    "CreateContainerConfigError": "create the Secret or ConfigMap that the message names",
    "CreateContainerError": "kubectl describe pod {pod}",
    "CrashLoopBackOff": "kubectl logs {pod} -c {container} --previous",
}


def pods(facts: Findings) -> Iterator[Check]:
    """Report pods that do not start, with the reason."""
    it, found = Subject("pods", f"pods of jobs in {facts.namespace}"), given(facts.pods)
    problems = [check for pod in found for check in _pod(pod, facts)]
    yield from problems[:_MOST_PODS]
    if len(problems) > _MOST_PODS:
        text = f"{len(problems) - _MOST_PODS} more pods do not start"
        yield it.failure(text, "all start", "kubectl get pods")
    elif found and not problems:
        yield it.ok(f"{len(found)}, and nothing keeps one from starting")


def _pod(pod: dict[str, Any], facts: Findings) -> Iterator[Check]:
    meta, status = pod["metadata"], pod.get("status") or {}
    it = Subject(f"pod {meta['name']}", f"pod/{meta['name']}")
    if meta.get("deletionTimestamp"):
        return
    scheduled = conditions_of(pod).get("PodScheduled")
    if scheduled is not None and scheduled["status"] == "False":
        if scheduled.get("reason") == "SchedulingGated":
            yield it.warning(_said(scheduled), "a node", "kubectl get workloads")
        else:
            mend = "kubectl describe nodes: free or add what is missing"
            yield it.failure(_said(scheduled), "a node", mend)
        return
    statuses = [
        *(status.get("initContainerStatuses") or []),
        *(status.get("containerStatuses") or []),
    ]
    for container in statuses:
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") in _WAITS:
            mend = _WAITS[waiting["reason"]].format(pod=meta["name"], container=container["name"])
            found = (
                f"container {container['name']}: {waiting['reason']}: {waiting.get('message', '')}"
            )
            yield it.failure(found, "a running container", mend)
            return
    describe, phase = f"kubectl describe {it.looked_at}", status.get("phase")
    created = meta.get("creationTimestamp")
    seconds = _seconds_since(facts, created) if created else 0
    if phase == "Pending" and seconds > _START_SECONDS:
        found = f"not started for {age_text(seconds)}, as for a volume or a Secret that is missing"
        yield it.warning(found, "Running", describe)
    elif phase == "Failed" and status.get("reason"):
        yield it.warning(f"{status['reason']}: {status.get('message', '')}", "Running", describe)


def nodes(facts: Findings) -> Iterator[Check]:
    """Report pressure on the nodes of the jobs."""
    found = [given(node) for node in facts.nodes.values()]
    problems = [check for node in found for check in _pressures(node)]
    yield from problems
    if found and not problems:
        it = Subject("nodes", "conditions of the nodes of the jobs")
        yield it.ok(f"{len(found)} ready, and none has pressure")


def _pressures(node: dict[str, Any]) -> Iterator[Check]:
    name = node["metadata"]["name"]
    it = Subject(f"node {name}", f"node/{name}")
    mend = f"kubectl describe node {name}; kubectl drain {name} moves its workers, one at a time"
    for kind, condition in conditions_of(node).items():
        wanted = "True" if kind == "Ready" else "False"
        if (kind == "Ready" or kind.endswith("Pressure")) and condition["status"] != wanted:
            yield it.failure(_said(condition), f"{kind}={wanted}", mend)


def node_clocks(facts: Findings) -> Iterator[Check]:
    """Report leases of nodes that are late, or ahead of the API server's clock."""
    now, looked = given(facts.server_time), "leases of the nodes of the jobs"
    ages = {
        lease["metadata"]["name"]: (now - parse_stamp(renewed)).total_seconds()
        for lease in given(facts.node_leases)
        if (renewed := (lease.get("spec") or {}).get("renewTime"))
    }
    problems = []
    for node, age in ages.items():
        it = Subject(f"clock of node {node}", looked)
        if age < -SKEW_SECONDS:
            found = f"renewed {-age:.0f} s in the future"
            problems.append(_skew(it, found, -age, f"start the time service on {node}"))
        elif age > _LEASE_SECONDS:
            found = f"renewed {age_text(age)} ago: it is lost, or its clock is behind"
            mend = f"kubectl describe node {node}; start the time service on it"
            problems.append(it.warning(found, f"at most {_LEASE_SECONDS} s", mend))
    yield from problems
    if ages and not problems:
        yield Subject("clocks of nodes", looked).ok(f"{len(ages)} renewed their leases in time")


def shared_memory(facts: Findings) -> Iterator[Check]:
    """Compare the slots of a pod with the memory that it may use."""
    by_name = {item["metadata"]["name"]: item for item in given(facts.checkpoints)}
    for gang in given(facts.gangs):
        newest = by_name.get(persisted_name(gang) or "", {})
        limit, status = _memory_limit(gang), newest.get("status") or {}
        if limit is None or not status.get("bytes") or not status.get("worldSize"):
            continue
        setting, size = limit
        slots = int(((gang["spec"].get("checkpoint") or {}).get("memory") or {}).get("slots") or 2)
        state = status["bytes"] / status["worldSize"]
        needed = int(ranks_of_pod(gang) * slots * max(state * _SLOT_ROOM, state + (1 << 20)))
        it = Subject(
            f"shared memory of {gang['metadata']['name']}", f"its newest Checkpoint and {setting}"
        )
        found = f"{slots} slots a rank need {size_text(needed)} of {size_text(size)} in a pod"
        mend = f"raise {setting}, or lower checkpoint.memory.slots"
        if needed <= 0.9 * size:
            yield it.ok(found)
        else:
            yield (it.failure if needed > size else it.warning)(found, "at most 90 %", mend)


def _memory_limit(gang: dict[str, Any]) -> tuple[str, int] | None:
    """Return the limit of the slots of a pod and the field that has it, or None."""
    memory = (gang["spec"].get("checkpoint") or {}).get("memory") or {}
    limits = [("checkpoint.memory.sizeLimit", memory.get("sizeLimit"))]
    containers = ((gang["spec"].get("template") or {}).get("spec") or {}).get("containers") or []
    for container in containers:
        if container.get("name") == "trainer":
            limited = ((container.get("resources") or {}).get("limits") or {}).get("memory")
            limits.append(("the memory limit of container trainer", limited))
    found = []
    for setting, text in limits:
        try:
            if text is not None:
                found.append((setting, parse_quantity_bytes(str(text))))
        except ConfigError:  # the API server refuses it, so another program wrote it
            continue
    return min(found, key=lambda one: one[1]) if found else None


_COUNTERS = {
    "holdfast_saves_failed_total": (
        True,
        "shards could not be written to the node tier",
        "free or enlarge the node volume: checkpoint.node.volume",
    ),
    "holdfast_corruptions_detected_total": (
        False,
        "copies did not match their digest and were replaced",
        "kubectl holdfast verify CHECKPOINT; test the disk and the memory of the node",
    ),
    "holdfast_saves_skipped_total": (
        False,
        "saves were skipped, because no slot was free",
        "raise checkpoint.memory.slots, or save less often",
    ),
    "holdfast_unexpected_errors_total": (
        False,
        "unexpected exceptions",
        "kubectl holdfast logs JOB --sidecar",
    ),
}
"""Counters that stay 0 while all is well: whether others are a failure, what is counted, the remedy."""
_SAMPLE = re.compile(r"^(\w+)(?:\{[^}\n]*\})? ([0-9.e+-]+)$", re.MULTILINE)


def sidecars(facts: Findings) -> Iterator[Check]:
    """Report what the metrics of the sidecars count."""
    it = Subject("sidecars", f"metrics of {len(facts.metrics)} sidecars")
    totals, pods_of = Counter[str](), dict[str, list[str]]()
    for pod, text in facts.metrics.items():
        for metric, value in _SAMPLE.findall(given(text)):
            if metric in _COUNTERS and float(value) > 0:
                totals[metric] += int(float(value))
                pods_of.setdefault(metric, []).append(pod)
    for metric, count in totals.items():
        is_failure, meaning, mend = _COUNTERS[metric]
        found = f"{count} {meaning} ({first_of(sorted(set(pods_of[metric])), 3)})"
        yield (it.failure if is_failure else it.warning)(found, f"{metric} is 0", mend)
    if facts.metrics and not totals:
        yield it.ok("no failed save, no damaged copy")


_DRILLED = {"False": (8, Subject.failure), "Unknown": (4, Subject.warning)}
"""Status of Verified that is no good: how many Checkpoints are named, and how they are."""


def drills(facts: Findings) -> Iterator[Check]:
    """Report drills that found damage."""
    checkpoints = given(facts.checkpoints)
    verified = {
        item["metadata"]["name"]: condition
        for item in checkpoints
        if (condition := conditions_of(item).get("Verified")) is not None
    }
    bad = False
    for status, (most, say) in _DRILLED.items():
        found = [(name, c) for name, c in verified.items() if c["status"] == status]
        bad = bad or bool(found)
        for name, condition in found[:most]:
            it = Subject("drills", f"checkpoint/{name}")
            yield say(it, _said(condition), "Verified=True", f"kubectl holdfast verify {name}")
    if checkpoints and not bad:
        it = Subject("drills", f"condition Verified of {len(checkpoints)} Checkpoints")
        yield it.ok(f"{len(verified)} were read, and all of them are intact")


_CHECKS: dict[str, Callable[[Findings], Iterator[Check]]] = {
    "API server": api_server,
    "clock of this machine": clocks,
    "certificate of the API server": certificate,
    "kinds of Holdfast": kinds,
    "operator": operator,
    "admission policies": policies,
    "your rights": rights,
    "stores": stores,
    "jobs": jobs,
    "pods": pods,
    "nodes": nodes,
    "clocks of nodes": node_clocks,
    "shared memory": shared_memory,
    "sidecars": sidecars,
    "drills": drills,
}


def _said(condition: Mapping[str, Any]) -> str:
    reason, message = condition.get("reason") or "", condition.get("message") or ""
    head = f"{condition['type']}={condition['status']}"
    return ": ".join(part for part in (head, reason, message) if part)


def _full_name(item: dict[str, Any]) -> str:
    return f"{item['metadata']['namespace']}/{item['metadata']['name']}"


def _seconds_since(facts: Findings, stamp: str) -> float:
    """Return the age of a time by the API server's clock, or by our own if that is not known."""
    now = facts.now if isinstance(facts.server_time, Unread) else facts.server_time
    return (now - parse_stamp(stamp)).total_seconds()
