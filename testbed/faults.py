"""Faults on the running test bed, for tests and manual use: nodes, processes, disks and the store.

Functions take the names that Kubernetes uses. A function that causes a fault returns when it is in force;
one that ends a fault of a node returns when the node is Ready again. Nothing in this module is specific to
a test.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from holdfast_core.contract import CONTROL_PORT
from testbed import cluster
from testbed.config import CONTROL_PLANE, FAULTS, HANG_SECONDS, NODES, POOLS, SHARED, current_bed
from testbed.shell import BedError, each, run

_PARTITION = (
    "iptables -t mangle -{op} PREROUTING -i eth0 -j DROP",
    "iptables -t mangle -{op} POSTROUTING -o eth0 -j DROP",
)
_THROTTLE = """\
device=$(stat -c %Hd:%Ld /proc/{pid}/root{path})
v1=$(sed -n 's/^[0-9]*:blkio://p' /proc/{pid}/cgroup)
if [ -n "$v1" ]; then
  echo /sys/fs/cgroup/blkio$v1/blkio.throttle.write_bps_device $device v1
else
  echo /sys/fs/cgroup$(sed -n 's/^0:://p' /proc/{pid}/cgroup)/io.max $device v2
fi
"""
_STORE_IS_BACK = """\
iptables -S FORWARD | grep -e '--comment store-down' | sed 's/^-A/-D/' | while read -r rule; do
  iptables $rule
done
"""
_FREEZE_SECONDS = 60
_FILL = "holdfast-fill"
_OOM_BYTES = 64 << 20


# ------------------------------------------------------------------ nodes


def kill_node(name: str) -> None:
    """Power off the node: all its processes get SIGKILL, and its memory file systems are lost."""
    _refuse_shared(name)
    _docker("kill", name)


def stop_node(name: str) -> None:
    """Shut the node down. Kubelet and containers get SIGTERM first."""
    _refuse_shared(name)
    _docker("stop", "-t", "20", name)


def start_node(name: str, *, ready_within_seconds: float = HANG_SECONDS) -> None:
    """Start the node after `kill_node` or `stop_node`, and wait until it is Ready."""
    bed, began = current_bed(), _now()
    before = cluster.addresses(bed).get(name)
    _docker("start", name)
    if name == CONTROL_PLANE and not cluster.wait_for_api(bed, ready_within_seconds):
        raise BedError(f"no API server responds {ready_within_seconds} s after a start of {name}")
    if before != cluster.addresses(bed).get(name):
        cluster.connect_nodes(bed)  # the other nodes' routes to it are stale
    wait_node_ready(name, since=began, within_seconds=ready_within_seconds)


def pause_node(name: str) -> None:
    """Freeze every process of the node. Its connections stay open and silent; its memory is kept.

    The freezer of cgroup v1 does not get hold of a node that is starting processes at that moment: runc
    tries for a second, thaws the node again and reports "unable to freeze". A busy node is frozen between
    two waves of new processes, hence the repetition.
    """
    _refuse_shared(name)
    ends = time.monotonic() + _FREEZE_SECONDS
    while True:
        try:
            _docker("pause", name)
            return
        except BedError as error:
            if "unable to freeze" not in str(error) or time.monotonic() > ends:
                raise


def unpause_node(name: str, *, ready_within_seconds: float = HANG_SECONDS) -> None:
    began = _now()
    _docker("unpause", name)
    wait_node_ready(name, since=began, within_seconds=ready_within_seconds)


def partition_node(name: str) -> None:
    """Drop every packet between the node and all others, in both directions.

    Its own pods reach each other.
    """
    _refuse_shared(name)
    cluster.in_node(current_bed(), name, f"{_lift()}; {'; '.join(_PARTITION).format(op='I')}")


def rejoin_node(name: str, *, ready_within_seconds: float = HANG_SECONDS) -> None:
    """Undo `partition_node` and wait until the node is Ready.

    Connections that did not time out continue.
    """
    began = _now()
    cluster.in_node(current_bed(), name, _lift())
    wait_node_ready(name, since=began, within_seconds=ready_within_seconds)


def heal_nodes(*, ready_within_seconds: float = HANG_SECONDS) -> None:
    """End every fault of this module on nodes, control ports and the store, also one of a killed process.

    Wait until all nodes are Ready.
    """
    bed, began = current_bed(), _now()
    state = cluster.containers(bed)
    hurt = [name for name in NODES if state.get(name) != "running"]
    if hurt:
        cluster.start_all(bed, {name: state.get(name, "exited") for name in hurt})
        cluster.connect_nodes(bed)
    each(lambda name: cluster.in_node(bed, name, _lift()), NODES)
    each(lambda name: cluster.in_node(bed, name, _silence("D")), NODES)
    cluster.in_node(bed, CONTROL_PLANE, _STORE_IS_BACK)
    for name in hurt:
        wait_node_ready(name, since=began, within_seconds=ready_within_seconds)
    cluster.wait_ready(bed, int(ready_within_seconds))
    _kubectl("uncordon", *NODES)


@contextmanager
def cordoned(*nodes: str) -> Iterator[None]:
    """Let the nodes take no new pods during the block. They are of the pool `faults`."""
    _refuse_shared(*nodes)
    try:
        for name in nodes:
            _kubectl("cordon", name)
        yield
    finally:
        for name in nodes:
            _kubectl("uncordon", name)


def wait_node_ready(name: str, *, since: datetime, within_seconds: float) -> None:
    """Wait until the node is Ready and has renewed its lease after `since`.

    The lease is checked because a dead node stays Ready for a while. Raises BedError.
    """
    deadline = time.monotonic() + within_seconds
    condition = "{.status.conditions[?(@.type=='Ready')].status}"
    while True:
        try:
            ready = _kubectl("get", "node", name, "-o", f"jsonpath={condition}")
            lease = ("get", "lease", "-n", "kube-node-lease", name)
            renewed = _kubectl(*lease, "-o", "jsonpath={.spec.renewTime}")
            if ready == "True" and renewed and datetime.fromisoformat(renewed) > since:
                return
        except BedError as error:
            ready = str(error)
        if time.monotonic() > deadline:
            raise BedError(f"node {name} is not Ready after {within_seconds} s: {ready}")
        time.sleep(0.25)


# ------------------------------------------------------------------ processes and disks of a pod


def kill_process(
    namespace: str, pod: str, container: str, *, match: str | None = None, signal: str = "KILL"
) -> list[int]:
    """Send a signal to processes of one container and return their pids in the node.

    Args:
        match: As for `find_processes`.
        signal: Name of the signal. STOP and CONT freeze and resume.

    Raises:
        BedError: No process matches.
    """
    node, pids = find_processes(namespace, pod, container, match=match)
    send_signal(node, pids, signal)
    return pids


def send_signal(node: str, pids: list[int], signal: str = "KILL") -> None:
    """Send a signal to processes of a node by their pids there."""
    cluster.in_node(current_bed(), node, f"kill -{signal} {' '.join(map(str, pids))}")


def find_processes(
    namespace: str, pod: str, container: str, *, match: str | None = None
) -> tuple[str, list[int]]:
    """Return the node of a container, and the pids of its processes in that node.

    Args:
        match: Regular expression that is searched in the name and command line of each process of the
            container; None selects the container's first process.

    Raises:
        BedError: No process matches.
    """
    node, container_id, first = _locate(namespace, pod, container)
    found = _processes(node, container_id)
    pids = [first] if match is None else [p for p, c in found.items() if re.search(match, c)]
    if not pids:
        listed = "\n".join(f"  {pid} {command}" for pid, command in found.items())
        raise BedError(f"no process of {namespace}/{pod}/{container} matches {match}:\n{listed}")
    return node, pids


def oom_container(namespace: str, pod: str, container: str) -> None:
    """Make the kernel's OOM killer kill a process of the container, as a memory leak would."""
    node, container_id, first = _locate(namespace, pod, container)
    pids = " ".join(map(str, _processes(node, container_id)))
    script = f"""
for pid in {pids}; do echo 1000 > /proc/$pid/oom_score_adj || true; done
v1=$(sed -n 's/^[0-9]*:memory://p' /proc/{first}/cgroup)
if [ -n "$v1" ]; then
  cg=/sys/fs/cgroup/memory$v1; limit=memory.limit_in_bytes; usage=memory.usage_in_bytes
else
  cg=/sys/fs/cgroup$(sed -n 's/^0:://p' /proc/{first}/cgroup); limit=memory.max; usage=memory.current
fi
cd $cg && old=$(cat $limit)
[ -z "$v1" ] || echo 0 > memory.force_empty || true
echo $(( $(cat $usage) + 4194304 )) > $limit || true
timeout 10 sh -c 'echo $$ > cgroup.procs; head -c {_OOM_BYTES} /dev/zero | tail -c {_OOM_BYTES} >/dev/null'
[ ! -e $limit ] || echo $old > $limit
exit 0
"""
    cluster.in_node(current_bed(), node, script)


def fill_disk(namespace: str, pod: str, container: str, path: str, size_bytes: int) -> int:
    """Occupy space in the file system at `path` in the container, and return the bytes taken.

    Fewer than `size_bytes` means that the file system is full. `free_disk` releases the space.
    """
    node, _, first = _locate(namespace, pod, container)
    target = f"/proc/{first}/root{path}/{_FILL}"
    write = f"fallocate -l {size_bytes} {target} || head -c {size_bytes} /dev/zero > {target}"
    script = f"{{ {write}; }} 2>/dev/null || true; stat -c %s {target}"
    return int(cluster.in_node(current_bed(), node, script))


def free_disk(namespace: str, pod: str, container: str, path: str) -> None:
    """Delete the file of `fill_disk`."""
    node, _, first = _locate(namespace, pod, container)
    cluster.in_node(current_bed(), node, f"rm -f /proc/{first}/root{path}/{_FILL}")


@contextmanager
def slow_disk(
    namespace: str, pod: str, container: str, path: str, bytes_per_second: int
) -> Iterator[None]:
    """Throttle the container's writes to the disk below `path`, by the kernel's block I/O controller.

    With 1 byte per second they hang. Raises BedError for a file system without a disk (tmpfs).
    """
    node, _, first = _locate(namespace, pod, container)
    found = cluster.in_node(current_bed(), node, _THROTTLE.format(pid=first, path=path)).split()
    if len(found) != 3:
        raise BedError(f"{namespace}/{pod}/{container}: no throttle for {path}: {found}")
    file, device, version = found
    limit = {"v1": "{}", "v2": "wbps={}"}[version].format(bytes_per_second)
    free = {"v1": "0", "v2": "wbps=max"}[version]
    cluster.in_node(current_bed(), node, f"echo '{device} {limit}' > {file}")
    try:
        yield
    finally:  # the file disappears with the container
        script = f"[ ! -e {file} ] || echo '{device} {free}' > {file}"
        cluster.in_node(current_bed(), node, script)


# ------------------------------------------------------------------ the store


@contextmanager
def store_down(*, hang: bool = False, nodes: Collection[str] = ()) -> Iterator[None]:
    """Make MinIO unreachable: connections, including open ones, are reset.

    Stored objects are kept.

    Args:
        hang: Drop packets instead, so that requests get no answer.
        nodes: Nodes of the pool `faults` whose pods do not reach the store; by default all pods.
    """
    _refuse_shared(*nodes)
    bed = current_bed()
    networks = cluster.pod_networks(bed) if nodes else {}
    sources = [f"-s {networks[node]}" for node in nodes] or [""]
    cluster.in_node(bed, CONTROL_PLANE, _STORE_IS_BACK)
    target = "DROP" if hang else "REJECT --reject-with tcp-reset"
    rules = [
        f"iptables -I FORWARD {source} -p tcp --dport 9000 -m comment --comment store-down -j {target}"
        for source in sources
    ]
    cluster.in_node(bed, CONTROL_PLANE, "set -e\n" + "\n".join(rules))
    try:
        yield
    finally:
        cluster.in_node(bed, CONTROL_PLANE, _STORE_IS_BACK)


# ------------------------------------------------------------------ the control connections


@contextmanager
def sidecars_silent(nodes: Collection[str]) -> Iterator[None]:
    """Drop every packet to the control port of every pod, as a default-deny NetworkPolicy does.

    Open connections get no answer either. Ranks, copies and metrics are not affected.

    Args:
        nodes: Nodes of the pool `faults` with the pods.
    """
    _refuse_shared(*nodes)
    bed = current_bed()
    each(lambda name: cluster.in_node(bed, name, _silence("D")), nodes)
    each(lambda name: cluster.in_node(bed, name, _silence("I")), nodes)
    try:
        yield
    finally:
        each(lambda name: cluster.in_node(bed, name, _silence("D")), nodes)


def _silence(op: str) -> str:
    rule = f"FORWARD -p tcp --dport {CONTROL_PORT} -m comment --comment sidecars-silent -j DROP"
    if op == "D":
        return f"while iptables -D {rule} 2>/dev/null; do :; done"
    return f"iptables -I {rule}"


# ------------------------------------------------------------------ how


def _refuse_shared(*nodes: str) -> None:
    """Raise BedError for a node on which other scenarios run at the same time.

    Their pods would be hit too, and the first scenario that ends its fault would end it for all. A gang that
    starts while one of two nodes takes no pods has all of its workers, and all copies, on the other one.
    """
    for name in nodes:
        if name in POOLS[SHARED]:
            raise BedError(
                f"node {name} is in the pool `{SHARED}`, where other scenarios have pods: use a node of the "
                f"pool `{FAULTS}`; a test has it with the mark `node_faults`"
            )


def _lift() -> str:
    """Return commands that remove all rules of a partition, however often they were added."""
    return "; ".join(f"while {rule.format(op='D')} 2>/dev/null; do :; done" for rule in _PARTITION)


def _now() -> datetime:
    return datetime.now(UTC)


def _docker(*words: str) -> str:
    return run(["docker", *words], env=current_bed().environment(), timeout_seconds=HANG_SECONDS)


def _kubectl(*words: str) -> str:
    return cluster.kubectl(current_bed(), "--request-timeout=60s", *words, timeout_seconds=120)


def find_container(pod: dict[str, Any], container: str) -> tuple[str, str]:
    """Return node and container id from a pod's record.

    Raises BedError that names the running containers.
    """
    status = pod["status"]
    records = [*status.get("containerStatuses", []), *status.get("initContainerStatuses", [])]
    running = {
        str(record["name"]): str(record["containerID"]).split("://")[1]
        for record in records
        if "running" in record["state"]
    }
    if container not in running:
        name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
        raise BedError(
            f"{container} of {name} does not run; running: {', '.join(running) or 'none'}"
        )
    return str(pod["spec"]["nodeName"]), running[container]


def _locate(namespace: str, pod: str, container: str) -> tuple[str, str, int]:
    """Return the node, the container id, and the pid in the node of the container's first process."""
    record = json.loads(_kubectl("get", "pod", "-n", namespace, pod, "-o", "json"))
    node, container_id = find_container(record, container)
    tasks = cluster.in_node(current_bed(), node, "ctr -n k8s.io tasks ls")
    return node, container_id, pid_of_task(tasks, container_id)


def pid_of_task(listing: str, container_id: str) -> int:
    """Return the pid of a container's first process from the output of `ctr tasks ls`: TASK PID STATUS.

    Raises BedError if the container has no task.
    """
    for line in listing.splitlines()[1:]:
        task, pid, *_ = line.split()
        if task == container_id:
            return int(pid)
    raise BedError(f"container {container_id} has no task; found:\n{listing}")


def _processes(node: str, container_id: str) -> dict[int, str]:
    """Return name and command line of the container's processes, by pid in the node.

    Processes are found by their cgroup.
    """
    script = (
        f"for f in $(grep -l {container_id} /proc/[0-9]*/cgroup 2>/dev/null); do d=${{f%/cgroup}}; "
        "echo ${d#/proc/} $(cat $d/comm 2>/dev/null) $(tr '\\0' ' ' < $d/cmdline 2>/dev/null); done"
    )
    return parse_processes(cluster.in_node(current_bed(), node, script))


def parse_processes(text: str) -> dict[int, str]:
    """Parse lines of a pid and a command line.

    A process that ended in the meantime has no command line and is left out.
    """
    pairs = [line.split(" ", 1) for line in text.splitlines()]
    return {int(pair[0]): pair[1] for pair in pairs if len(pair) == 2 and pair[1].strip()}
