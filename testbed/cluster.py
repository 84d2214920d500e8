"""The kind cluster: its creation, start after a crash, pod network and deletion."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Mapping
from enum import StrEnum
from pathlib import Path

from testbed import nodeimage, template
from testbed.config import (
    CLUSTER,
    CONTROL_PLANE,
    HANG_SECONDS,
    NODES,
    PACKAGE,
    POOL_LABEL,
    POOLS,
    Bed,
    digest,
    kindest_node,
)
from testbed.shell import BedError, Command, answers, each, run

_RESTARTED_SECONDS = 180
"""Time for the API server of a cluster that was started again, after which the cluster is created anew."""
_CNI = {
    "cniVersion": "1.0.0",
    "name": "holdfast",
    "plugins": [
        {"type": "ptp", "ipMasq": False, "mtu": 1500},
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ],
}


class ClusterAction(StrEnum):
    USE = "use"
    START = "start"
    CREATE = "create"
    RECREATE = "recreate"


def decide_cluster(
    containers: Mapping[str, str],
    *,
    expected: tuple[str, ...],
    same_inputs: bool,
    api_answers: bool,
) -> tuple[ClusterAction, str]:
    """Return the action that gives a working cluster, and its reason.

    Args:
        containers: Docker's state of each node container, by name.
        expected: Names of the nodes that the cluster must have.
        same_inputs: Whether the cluster was completely created from the current inputs.
        api_answers: Whether the API server is ready.
    """
    if not containers:
        return ClusterAction.CREATE, "there is no cluster"
    if set(containers) != set(expected):
        return ClusterAction.RECREATE, "its nodes differ from the configuration"
    if not same_inputs:
        return ClusterAction.RECREATE, (
            "it was created from other inputs, or its creation was interrupted"
        )
    stopped = sorted(name for name, state in containers.items() if state != "running")
    if stopped:
        return ClusterAction.START, f"stopped: {', '.join(stopped)}"
    if not api_answers:
        return ClusterAction.START, "its API server does not respond"
    return ClusterAction.USE, "it works"


def kind_config(bed: Bed) -> str:
    """Return kind's configuration, as JSON, which is also YAML and needs no library."""
    nodes: list[dict[str, object]] = []
    pools = {name: pool for pool, names in POOLS.items() for name in names}
    for name in NODES:
        node: dict[str, object] = {"role": "control-plane" if name == CONTROL_PLANE else "worker"}
        if name in pools:
            node["labels"] = {POOL_LABEL: pools[name]}
        if bed.local:
            store = {"hostPath": str(bed.nodes / name), "containerPath": "/var/lib/containerd"}
            node["extraMounts"] = [store]
        nodes.append(node)
    networking: dict[str, object] = {"ipFamily": "ipv4", "apiServerAddress": "127.0.0.1"}
    patches = []
    if bed.local:
        networking["disableDefaultCNI"] = True
        patches.append(
            "kind: KubeletConfiguration\n"
            f"failCgroupV1: {json.dumps(Path('/sys/fs/cgroup/cgroup.controllers').exists())}\n"
            "featureGates: {KubeletInUserNamespace: true}\n"
        )
    return json.dumps(
        {
            "kind": "Cluster",
            "apiVersion": "kind.x-k8s.io/v1alpha4",
            "networking": networking,
            "kubeadmConfigPatches": patches,
            "nodes": nodes,
        },
        indent=1,
    )


def containers(bed: Bed) -> dict[str, str]:
    """Return the state of each node container by name (running, exited, paused, created, dead)."""
    words = ["docker", "ps", "-a", "--filter", f"label=io.x-k8s.kind.cluster={CLUSTER}"]
    out = run([*words, "--format", "{{.Names}} {{.State}}"], env=bed.environment())
    return dict(line.split() for line in out.splitlines())


def kubectl(
    bed: Bed, *words: str, stdin: str | None = None, timeout_seconds: float = HANG_SECONDS
) -> str:
    data = None if stdin is None else stdin.encode()
    command = ["kubectl", *words]
    return run(command, env=bed.environment(), stdin=data, timeout_seconds=timeout_seconds)


def api_answers(bed: Bed) -> bool:
    command = ["kubectl", "get", "--raw", "/readyz", "--request-timeout=30s"]
    return bed.kubeconfig.is_file() and answers(command, env=bed.environment())


def wait_for_api(bed: Bed, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not api_answers(bed):
        if time.monotonic() > deadline:
            return False
        time.sleep(1)
    return True


def node_image(bed: Bed) -> str:
    return nodeimage.node_tag() if bed.local else kindest_node()


def inputs(bed: Bed) -> str:
    return digest(kind_config(bed), node_image(bed), PACKAGE / "cluster.py")


def up(bed: Bed, log: Path, preload: Collection[str] = ()) -> str:
    """Ensure that the cluster runs, all nodes are Ready, and pods reach each other.

    In local mode the nodes of a new cluster start with the images of `preload`. Returns a note on what was
    done.
    """
    stamp = bed.stamps / "cluster inputs"
    state = containers(bed)
    action, reason = decide_cluster(
        state,
        expected=NODES,
        same_inputs=stamp.is_file() and stamp.read_text() == inputs(bed),
        api_answers=api_answers(bed),
    )
    if action is ClusterAction.START:
        refused = start_all(bed, state)
        if refused:
            action, reason = ClusterAction.RECREATE, f"{reason}; {refused}"
        elif not wait_for_api(bed, _RESTARTED_SECONDS):
            action, reason = (
                ClusterAction.RECREATE,
                (f"{reason}; no API server responds {_RESTARTED_SECONDS} s after a start"),
            )
    if action in (ClusterAction.CREATE, ClusterAction.RECREATE):
        create(bed, log, preload)
    if action is not ClusterAction.USE:
        connect_nodes(bed)
    wait_ready(bed)
    stamp.write_text(inputs(bed))
    return f"{action}: {reason}"


def start_all(bed: Bed, state: Mapping[str, str]) -> str:
    """Start all nodes. Return a message with the nodes that Docker does not start, or an empty string.

    Docker is asked, because the API server reports a dead node as Ready for most of a minute.
    """
    paused = [name for name, value in state.items() if value == "paused"]
    if paused:
        run(["docker", "unpause", *paused], env=bed.environment())
    first = [CONTROL_PLANE, *(name for name in state if name != CONTROL_PLANE)]
    run(
        ["docker", "start", *first],
        env=bed.environment(),
        check=False,
        timeout_seconds=HANG_SECONDS,
    )
    down = sorted(name for name, value in containers(bed).items() if value != "running")
    return f"Docker does not start {', '.join(down)}" if down else ""


def create(bed: Bed, log: Path, preload: Collection[str] = ()) -> None:
    delete(bed, log)
    if bed.local:
        if preload:
            template.add(bed, preload, log)
        each(lambda name: template.link(bed, name), NODES)
    config = bed.root / "kind.json"
    config.write_text(kind_config(bed))
    # Without --retain kind would delete the nodes after a failure, with their logs. `delete` removes them.
    words: Command = [
        "kind",
        "create",
        "cluster",
        "--retain",
        "--name",
        CLUSTER,
        "--config",
        config,
    ]
    words += ["--image", node_image(bed), "--kubeconfig", bed.kubeconfig]
    run(words, env=bed.environment(), log=log)
    if bed.local:
        pin_addresses(bed)
    keep_from_workers(bed)


def keep_from_workers(bed: Bed) -> None:
    """Pin DNS and, in kind's published node image, the volume provisioner to the control plane.

    A test that kills a worker node then kills only its own pods.
    """
    pin = {"nodeSelector": {"node-role.kubernetes.io/control-plane": ""}}
    patch = json.dumps({"spec": {"template": {"spec": pin}}})
    for namespace in ("kube-system", "local-path-storage"):
        for name in kubectl(bed, "-n", namespace, "get", "deploy", "-o", "name").split():
            kubectl(bed, "-n", namespace, "patch", name, "-p", patch)


def delete(bed: Bed, log: Path | None = None) -> None:
    (bed.stamps / "cluster inputs").unlink(missing_ok=True)
    env = bed.environment()
    command: Command = ["kind", "delete", "cluster", "--name", CLUSTER]
    run([*command, "--kubeconfig", bed.kubeconfig], env=env, check=False, log=log)
    left = list(containers(bed))
    if left:
        run(["docker", "rm", "-f", "-v", *left], env=env, log=log)
    if bed.nodes.exists():
        run(["rm", "-rf", bed.nodes], log=log)


def addresses(bed: Bed) -> dict[str, str]:
    """Return the address of each running node by name."""
    form = '{{.Name}} {{with index .NetworkSettings.Networks "kind"}}{{.IPAddress}}{{end}}'
    out = run(["docker", "inspect", "-f", form, *NODES], env=bed.environment())
    pairs = [line.lstrip("/").split() for line in out.splitlines()]
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def pin_addresses(bed: Bed) -> None:
    """Fix the present address of each node.

    Otherwise Docker may give a restarted node another address, possibly that of a node that starts later,
    which then cannot start.
    """
    for node, address in addresses(bed).items():
        run(["docker", "network", "disconnect", "kind", node], env=bed.environment())
        words = ["docker", "network", "connect", "--ip", address, "kind", node]
        run(words, env=bed.environment())
    if not wait_for_api(bed, HANG_SECONDS):
        raise BedError("no API server responds although the address of its node was corrected")


def pod_networks(bed: Bed) -> dict[str, str]:
    """Return each node's pod CIDR by name.

    It waits, because the controller manager assigns them after the nodes have joined. Raises BedError after
    HANG_SECONDS.
    """
    form = '{range .items[*]}{.metadata.name}={.spec.podCIDR}{"\\n"}{end}'
    deadline = time.monotonic() + HANG_SECONDS
    while True:
        out = kubectl(bed, "get", "nodes", "-o", f"jsonpath={form}")
        found = dict(line.split("=", 1) for line in out.split())
        if len([cidr for cidr in found.values() if cidr]) == len(NODES):
            return found
        if time.monotonic() > deadline:
            raise BedError(f"nodes without a pod network: {found}")
        time.sleep(0.5)


def routes_script(node: str, networks: Mapping[str, str], hosts: Mapping[str, str]) -> str:
    """Return commands that route the pod networks of all other nodes. The node runs them at every start."""
    return "".join(
        f"ip route replace {networks[other]} via {hosts[other]}\n"
        for other in sorted(networks)
        if other != node and other in hosts
    )


def cni_config(network: str) -> str:
    plugins = json.loads(json.dumps(_CNI))
    plugins["plugins"][0]["ipam"] = {
        "type": "host-local",
        "dataDir": "/run/cni-ipam",
        "routes": [{"dst": "0.0.0.0/0"}],
        "ranges": [[{"subnet": network}]],
    }
    return json.dumps(plugins)


def connect_nodes(bed: Bed) -> None:
    """Set up the pod network of local mode: a CNI configuration and routes in every running node.

    In registry mode this does nothing, because kind's own network does it.
    """
    if not bed.local:
        return
    networks, hosts = pod_networks(bed), addresses(bed)

    def apply(node: str) -> None:
        script = (
            "set -e; mkdir -p /etc/holdfast /etc/cni/net.d\n"
            f"cat > /etc/holdfast/routes <<'END'\n{routes_script(node, networks, hosts)}END\n"
            f"cat > /etc/cni/net.d/10-holdfast.conflist <<'END'\n{cni_config(networks[node])}\nEND\n"
            "sh /etc/holdfast/routes\n"
        )
        in_node(bed, node, script)

    each(apply, hosts)


def in_node(bed: Bed, node: str, script: str) -> str:
    """Run a shell script inside a node and return its stdout."""
    command = ["docker", "exec", "-i", node, "sh"]
    data = script.encode()
    return run(command, env=bed.environment(), stdin=data, timeout_seconds=HANG_SECONDS)


def apply_pools(bed: Bed) -> str:
    """Keep the pods of each namespace that names a pool on the nodes of that pool."""
    kubectl(bed, "apply", "-f", str(PACKAGE / "manifests/pools.yaml"))
    return ", ".join(f"{pool}: {len(names)} nodes" for pool, names in POOLS.items())


def wait_ready(bed: Bed, seconds: int = HANG_SECONDS) -> None:
    wait = [f"--timeout={seconds}s", "wait", "--for=condition=Ready", "node", "--all"]
    kubectl(bed, *wait, timeout_seconds=seconds + 10)
    rollout = ["rollout", "status", "deploy/coredns", "-n", "kube-system", f"--timeout={seconds}s"]
    kubectl(bed, *rollout, timeout_seconds=seconds + 10)


def describe(bed: Bed) -> str:
    form = "custom-columns=NODE:.metadata.name,READY:.status.conditions[?(@.type=='Ready')].status"
    return re.sub(r"(?m)^", "  ", kubectl(bed, "get", "nodes", "-o", form).rstrip())
