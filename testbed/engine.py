"""The test bed's own Docker engine, for a machine without a usable one.

It is reused after a crash. It listens on a Unix socket only, and its bridges reach no network outside this
machine.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType

from testbed import host
from testbed.config import DOCKER_SUITE, HANG_SECONDS, Bed, bed_root, kindest_node
from testbed.shell import BedError, Command, answers, run
from testbed.steps import Step, warn

DEBS = ("docker.io", "docker-cli", "docker-buildx", "tini-static")
BRIDGE = "br-holdfast"
SUBNET = "172.18.0.0/16"
_DISABLED = (
    "io.containerd.grpc.v1.cri",
    "io.containerd.cri.v1.images",
    "io.containerd.cri.v1.runtime",
    "io.containerd.nri.v1.nri",
    "io.containerd.podsandbox.controller.v1.podsandbox",
    "io.containerd.internal.v1.opt",
)


class EngineAction(StrEnum):
    USE = "use"
    START = "start"
    RESTART = "restart"


def decide_engine(*, answers: bool, dockerd_alive: bool, containerd_alive: bool) -> EngineAction:
    """Return how to get a working engine.

    If only a part of it runs, that part is stopped first, because Docker waits for containerd.
    """
    if answers and dockerd_alive and containerd_alive:
        return EngineAction.USE
    if dockerd_alive or containerd_alive:
        return EngineAction.RESTART
    return EngineAction.START


def detect(root: Path) -> Bed:
    """Detect the mode that this machine allows and return its test bed.

    The mode is kept in <root>/mode; delete the file to detect it again.
    """
    mode = os.environ.get("HOLDFAST_TESTBED_MODE", "")
    kept = root / "mode"
    if not mode and kept.is_file():
        mode = kept.read_text().strip()
    if not mode:
        env = dict(os.environ)
        mode = "local"
        if answers(["docker", "info"], env=env):
            try:
                run(["docker", "pull", "-q", kindest_node()], env=env, timeout_seconds=600)
                mode = "registry"
            except BedError as error:  # warn, to explain why Kubernetes is compiled
                warn(
                    "this machine's Docker engine cannot pull images, so the test bed builds all "
                    f"images itself: {error}"
                )
    if mode not in ("registry", "local"):
        raise BedError(f"HOLDFAST_TESTBED_MODE={mode}", "set it to registry or local, or unset it")
    root.mkdir(parents=True, exist_ok=True)
    kept.write_text(mode)
    return Bed(bed_root(), local=mode == "local")


def install_step(bed: Bed) -> Step:
    return Step(
        "docker packages",
        lambda log: install(bed, log),
        inputs=(repr(DEBS),),
        outputs=[bed.engine / "usr/sbin/dockerd"],
        advice="needs Debian's mirror (suite sid)",
    )


def install(bed: Bed, log: Path) -> None:
    host.unpack_debs(bed, DEBS, bed.engine, log=log, suite=DOCKER_SUITE)
    plugins = bed.root / "docker-config/cli-plugins"
    plugins.mkdir(parents=True, exist_ok=True)
    link = plugins / "docker-buildx"
    link.unlink(missing_ok=True)
    link.symlink_to(bed.engine / "usr/libexec/docker/cli-plugins/docker-buildx")


def containerd_config(*, root: Path, state: Path, socket: Path) -> str:
    """Return the configuration of a containerd without the Kubernetes plugins.

    It serves Docker, or fills the nodes' image store.
    """
    return (
        f'version = 2\nroot = "{root}"\nstate = "{state}"\n'
        f"disabled_plugins = {json.dumps(_DISABLED)}\n"
        f'[grpc]\n  address = "{socket}"\n'
    )


def daemon_config(bed: Bed, settings: Mapping[str, object]) -> dict[str, object]:
    ours = {
        "data-root": str(bed.data / "docker"),
        "exec-root": str(bed.run / "docker"),
        "pidfile": str(bed.run / "docker.pid"),
        "hosts": [f"unix://{bed.docker_socket}"],
        "containerd": str(bed.run / "containerd.sock"),
        "storage-driver": "overlay2",
        "exec-opts": ["native.cgroupdriver=cgroupfs"],
        "default-cgroupns-mode": "private",
        "log-opts": {"max-size": "10m"},
        "userland-proxy-path": str(bed.engine / "usr/sbin/docker-proxy"),
        "init-path": str(bed.engine / "usr/bin/tini-static"),
        "ip-forward-no-drop": True,
        "dns": ["127.0.0.1"],
        "ipv6": False,
        "shutdown-timeout": 5,
    }
    return {key: value for key, value in {**ours, **settings}.items() if value is not None}


def our_process(bed: Bed, name: str) -> int | None:
    """Return the pid of a daemon of the test bed, or None if it does not run.

    The process is checked, because the pid file may be stale and its pid reused by another program.
    """
    file = bed.run / ("docker.pid" if name == "dockerd" else f"{name}.pid")
    try:
        pid = int(file.read_text())
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, ValueError, IndexError):
        return None
    return pid if name in command and str(bed.root) in command and state != "Z" else None


def is_up(bed: Bed) -> bool:
    return answers(["docker", "info"], env=bed.environment())


def start(bed: Bed, log: Path) -> str:
    """Ensure that the engine works and its bridges are cut off. Returns its version."""
    have(bed)
    _cut_off_bridges(bed, log)
    host.raise_inotify_limits()
    return version(bed)


def version(bed: Bed) -> str:
    form = "Docker {{.Server.Version}}"
    return run(["docker", "version", "-f", form], env=bed.environment()).strip()


def have(bed: Bed, settings: Mapping[str, object] = MappingProxyType({})) -> None:
    """Use the running engine, or remove what a crash left and start it.

    `settings` override the daemon's configuration; None removes a setting.
    """
    action = decide_engine(
        answers=is_up(bed),
        dockerd_alive=our_process(bed, "dockerd") is not None,
        containerd_alive=our_process(bed, "containerd") is not None,
    )
    if action is not EngineAction.USE:
        if action is EngineAction.RESTART:
            stop_processes(bed)
        for stale in ("docker.pid", "containerd.pid", "docker.sock", "containerd.sock"):
            (bed.run / stale).unlink(missing_ok=True)
        _launch(bed, settings)


def _launch(bed: Bed, settings: Mapping[str, object]) -> None:
    socket = bed.run / "containerd.sock"
    config = bed.root / "containerd.toml"
    state = bed.run / "containerd"
    config.write_text(containerd_config(root=bed.data / "containerd", state=state, socket=socket))
    daemon = bed.root / "daemon.json"
    daemon.write_text(json.dumps(daemon_config(bed, settings), indent=1))
    launch(bed, [bed.bin / "containerd", "-c", config], "containerd", socket.exists)
    dockerd: Command = [bed.engine / "usr/sbin/dockerd", "--config-file", daemon]
    launch(bed, dockerd, "dockerd", lambda: is_up(bed))


def launch(bed: Bed, command: Command, name: str, ready: Callable[[], bool]) -> None:
    """Start a daemon of the test bed and wait until it is ready. `our_process` finds it later."""
    log = bed.logs / f"{name}.log"
    with log.open("ab") as out:
        daemon = subprocess.Popen(
            [str(word) for word in command],
            env=bed.environment(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            cwd="/",
        )
    if name != "dockerd":  # it writes its own pid file, and does not start where it finds one
        (bed.run / f"{name}.pid").write_text(str(daemon.pid))
    deadline = time.monotonic() + HANG_SECONDS
    while not ready():
        if daemon.poll() is not None or time.monotonic() > deadline:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-10:])
            raise BedError(
                f"{name} did not start; {log} ends with:\n{tail}",
                "python3 -m testbed down, then up again",
            )
        time.sleep(0.1)


def _cut_off_bridges(bed: Bed, log: Path) -> None:
    """Create kind's network, and reject the packets of its bridges that would leave this machine."""
    env = bed.environment()
    if not answers(["docker", "network", "inspect", "kind"], env=env):
        name = f"com.docker.network.bridge.name={BRIDGE}"
        create = ["docker", "network", "create", "-d", "bridge", "-o", name, "--subnet", SUBNET]
        run([*create, "kind"], env=env, log=log)
    route = run(["ip", "-o", "route", "get", "192.0.2.1"], check=False)
    if not (outside := re.search(r" dev (\S+)", route)):
        return
    for bridge in (BRIDGE, "docker0"):
        rule = ["DOCKER-USER", "-i", bridge, "-o", outside.group(1), "-j", "REJECT"]
        if not answers(["iptables", "-C", *rule], env=env):
            run(["iptables", "-I", *rule], log=log)


def stop_processes(bed: Bed, names: Sequence[str] = ("dockerd", "containerd")) -> None:
    for name in names:
        pid = our_process(bed, name)
        if pid is None:
            continue
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 30
        while our_process(bed, name) is not None:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)


def stop(bed: Bed) -> None:
    """Stop the test bed's engine and remove its firewall rules and bridges. Images and builds stay."""
    if is_up(bed):
        run(["docker", "network", "rm", "kind"], env=bed.environment(), check=False)
    stop_processes(bed)
    for table in ("filter", "nat", "raw"):
        _remove_rules(table)
    for bridge in (BRIDGE, "docker0"):
        run(["ip", "link", "del", bridge], check=False)


def _remove_rules(table: str) -> None:
    rules = run(["iptables", "-t", table, "-S"], check=False).splitlines()
    for rule in rules_to_delete(rules):
        run(["iptables", "-t", table, *shlex.split(rule)], check=False)


def rules_to_delete(rules: list[str]) -> list[str]:
    """Return iptables arguments that remove Docker's rules: jumps first, then contents, then the chains."""
    jumps = [
        rule.replace("-A ", "-D ", 1)
        for rule in rules
        if rule.startswith("-A ")
        and not rule.startswith("-A DOCKER")
        and (re.search(r"-j DOCKER", rule) or re.search(r"-s 172\.1[78]\.0\.0/16 ", rule))
    ]
    chains = [rule.split()[1] for rule in rules if rule.startswith("-N DOCKER")]
    return [*jumps, *(f"-F {chain}" for chain in chains), *(f"-X {chain}" for chain in chains)]
