"""`python3 -m testbed VERB`: see README.md, or --help."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence

from testbed import (
    cluster,
    controllers,
    engine,
    faults,
    host,
    images,
    load,
    minio,
    nodeimage,
    tools,
)
from testbed.config import CLUSTER, Bed, bed_root, current_bed
from testbed.shell import BedError
from testbed.steps import Step, report_error, run_steps


def engine_steps(bed: Bed) -> list[Step]:
    if not bed.local:
        return []
    start = Step("docker engine", lambda log: engine.start(bed, log), always=True)
    return [engine.install_step(bed), start]


def project_steps(bed: Bed) -> list[Step]:
    return [
        Step("images", lambda log: images.build_all(bed, log), always=True),
        Step("load", lambda log: load.load(bed, log), always=True),
    ]


def prepare() -> Bed:
    bed = engine.detect(bed_root())
    host.check_prerequisites(bed)
    return bed


def up(arguments: argparse.Namespace) -> None:
    bed, started = prepare(), time.monotonic()
    steps = [*tools.tool_steps(bed), *engine_steps(bed)]
    if bed.local:
        steps += nodeimage.image_steps(bed)
    ours = () if arguments.bare else project_steps(bed)
    preload = () if arguments.bare else [image.tag for image in images.IMAGES]
    steps += ours[:1]  # images first: a new cluster's nodes start with them
    steps.append(Step("cluster", lambda log: cluster.up(bed, log, preload), always=True))
    steps += ours[1:]
    steps.append(Step("pools", lambda _: cluster.apply_pools(bed), always=True))
    steps.append(Step("minio", lambda log: minio.deploy(bed, log), always=True))
    run_steps(steps, bed)
    print(f'up in {time.monotonic() - started:.0f} s; eval "$(python3 -m testbed env)"')


def only_tools(_: argparse.Namespace) -> None:
    bed = prepare()
    run_steps(tools.tool_steps(bed), bed)


def only_images(_: argparse.Namespace) -> None:
    bed = current_bed()
    run_steps([*engine_steps(bed), *project_steps(bed)[:1]], bed)


def only_load(arguments: argparse.Namespace) -> None:
    bed = current_bed()
    step = Step("load", lambda log: load.load(bed, log, arguments.tags), always=True)
    run_steps([step], bed)


def only_minio(_: argparse.Namespace) -> None:
    bed = current_bed()
    run_steps([Step("minio", lambda log: minio.deploy(bed, log), always=True)], bed)


def with_controller(arguments: argparse.Namespace) -> None:
    bed, of = (
        current_bed(),
        controllers.remove_steps if arguments.remove else controllers.install_steps,
    )
    run_steps(of(bed, arguments.controller), bed)


def down(_: argparse.Namespace) -> None:
    bed = current_bed()
    if not bed.local or engine.is_up(bed):
        cluster.delete(bed)
    if bed.local:
        engine.stop(bed)
    print(f"cluster {CLUSTER} is deleted; builds and images stay in {bed.root}")


def status(_: argparse.Namespace) -> None:
    bed = current_bed()
    print(f"folder   {bed.root} ({'own engine' if bed.local else 'machine engine'})")
    missing = [n for s in tools.needed(bed) for n in s.packages if not (bed.bin / n).exists()]
    print(f"tools    {'missing: ' + ', '.join(missing) if missing else 'all built'}")
    running = engine.is_up(bed)
    print(f"engine   {'up' if running else 'down'}")
    if running:
        state = cluster.containers(bed)
        print("nodes    " + (", ".join(f"{k} {v}" for k, v in sorted(state.items())) or "none"))
        for image in images.IMAGES:
            print(f"image    {image.tag} {images.image_label(bed, image.tag) or 'not built'}")
        if cluster.api_answers(bed):
            print(cluster.describe(bed))
    print(f"logs     {bed.logs}")


def env(_: argparse.Namespace) -> None:
    for name, value in current_bed().exports().items():
        print(f"export {name}={shlex.quote(value)}")


NODE_FAULTS = {
    "stop": faults.stop_node,
    "start": faults.start_node,
    "kill": faults.kill_node,
    "pause": faults.pause_node,
    "unpause": faults.unpause_node,
    "partition": faults.partition_node,
    "rejoin": faults.rejoin_node,
}


def node(arguments: argparse.Namespace) -> None:
    NODE_FAULTS[arguments.fault](arguments.node)


def heal(_: argparse.Namespace) -> None:
    faults.heal_nodes()


def kill_process(arguments: argparse.Namespace) -> None:
    a = arguments
    pids = faults.kill_process(a.namespace, a.pod, a.container, match=a.match, signal=a.signal)
    print(*pids)


def oom(arguments: argparse.Namespace) -> None:
    faults.oom_container(arguments.namespace, arguments.pod, arguments.container)


def fill_disk(arguments: argparse.Namespace) -> None:
    a = arguments
    print(faults.fill_disk(a.namespace, a.pod, a.container, a.path, a.bytes))


def free_disk(arguments: argparse.Namespace) -> None:
    a = arguments
    faults.free_disk(a.namespace, a.pod, a.container, a.path)


def slow_disk(arguments: argparse.Namespace) -> None:
    a = arguments
    with faults.slow_disk(a.namespace, a.pod, a.container, a.path, a.bytes_per_second):
        time.sleep(a.seconds)


def store_down(arguments: argparse.Namespace) -> None:
    with faults.store_down(hang=arguments.hang):
        time.sleep(arguments.seconds)


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="python3 -m testbed", description=__doc__)
    verbs = root.add_subparsers(required=True, metavar="VERB")

    def verb(name: str, action: object, text: str) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=text, description=text)
        added.set_defaults(action=action)
        return added

    started = verb("up", up, "tools, engine, cluster, images, MinIO; resumes where it stopped")
    started.add_argument("--bare", action="store_true", help="do not build the project's images")
    verb("down", down, "delete the cluster and stop the test bed's engine; keep builds")
    verb("status", status, "show what runs, what is built, and where the logs are")
    verb("env", env, "print exports for a shell: PATH, KUBECONFIG, DOCKER_HOST")
    verb("tools", only_tools, "build the binaries only: kube-apiserver, etcd, helm, MinIO, ...")
    verb("images", only_images, "build the project's images whose inputs changed")
    loading = verb("load", only_load, "load changed images into the nodes")
    loading.add_argument("tags", nargs="*", help="default: the project's images")
    verb("minio", only_minio, "deploy MinIO and create its bucket")
    for controller in controllers.CONTROLLERS:
        text = f"build the controller of {controller.kinds}, and install it in the cluster"
        added = verb(controller.name, with_controller, text)
        added.set_defaults(controller=controller)
        added.add_argument(
            "--remove", action="store_true", help="remove it with its CRDs, and what it needs"
        )
    on_node = verb("node", node, "start or end a fault of a node")
    on_node.add_argument("fault", choices=NODE_FAULTS)
    on_node.add_argument("node")
    verb("heal", heal, "end all faults of nodes and of the store")

    def in_pod(name: str, action: object, text: str) -> argparse.ArgumentParser:
        added = verb(name, action, text)
        for option in ("--namespace", "--pod", "--container"):
            added.add_argument(option, required=True)
        return added

    kill = in_pod("kill-process", kill_process, "signal processes of a container")
    kill.add_argument("--match", help="regular expression on the command line; default: the first")
    kill.add_argument("--signal", default="KILL")
    in_pod("oom", oom, "let the kernel's OOM killer take a process of a container")
    fill = in_pod("fill-disk", fill_disk, "occupy space in a file system of a container")
    fill.add_argument("path")
    fill.add_argument("bytes", type=int)
    in_pod("free-disk", free_disk, "free the space that fill-disk occupied").add_argument("path")
    slow = in_pod(
        "slow-disk", slow_disk, ("limit the write rate of a container's disk for some seconds")
    )
    slow.add_argument("path")
    slow.add_argument("bytes_per_second", type=int)
    slow.add_argument("seconds", type=float)
    store = verb("store-down", store_down, "make MinIO unreachable for some seconds")
    store.add_argument("seconds", type=float)
    store.add_argument("--hang", action="store_true", help="drop packets instead of resetting")
    return root


def main(words: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(words)
    try:
        arguments.action(arguments)
    except BedError as error:
        return report_error("testbed", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
