"""`kubectl holdfast`: show jobs and checkpoints, save, prune, verify, import, roll back and start over."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from dataclasses import asdict
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live

from holdfast_cli.cluster import VERSION, ClusterClient, ClusterError
from holdfast_cli.drilling import verify_checkpoint
from holdfast_cli.gangs import MemberPod, obstacle_to_start_over
from holdfast_cli.importing import import_store
from holdfast_cli.pruning import prune_store
from holdfast_cli.question import confirm
from holdfast_cli.restoring import order_rollback, restore
from holdfast_cli.views import Screen, checkpoints_view, gangs_view, status_view
from holdfast_core.names import GROUP

_LETTERS = "bcdfghjklmnpqrstvwxz2456789"  # as in the names of pods
_DESCRIPTION = (
    "Show training jobs and their checkpoints, request saves, prune, verify or import what is in a store, "
    "roll jobs back, and start jobs over that have lost every checkpoint."
)
_EXIT_CODES = (
    "Exit codes: 0 success; 1 the cluster cannot be reached, it refused the request, or the save failed "
    "(the message says why); 2 wrong usage; 130 interrupted. `verify` also has 3 and 4."
)


def main() -> None:
    parser = _parser()
    arguments = parser.parse_args()
    if getattr(arguments, "watch", False) and arguments.output == "json":
        parser.error("--watch shows tables only: omit it, or omit --output json")
    _check_restore(parser, arguments)
    everywhere = getattr(arguments, "everywhere", False)
    if everywhere and (arguments.job or arguments.namespace):
        parser.error("--all-namespaces lists everything: omit it, or omit the job and --namespace")
    try:
        cluster = ClusterClient.connect(
            arguments.context, arguments.namespace, everywhere=everywhere
        )
        arguments.run(cluster, arguments)
    except ClusterError as error:
        print(f"kubectl holdfast: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _check_restore(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if arguments.run is not restore or arguments.to_new_job is not None:
        return
    if arguments.step is None:
        parser.error("restore needs --step N, the step to go back to, or --to-new-job NAME")
    if arguments.workers is not None or arguments.dry_run:
        parser.error(
            "--workers and --dry-run belong to --to-new-job: omit them, or name the new job"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kubectl holdfast", description=_DESCRIPTION, epilog=_EXIT_CODES
    )
    _add_place(parser, None)
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    status = verbs.add_parser(
        "status",
        help="show levels, pods, tiers and recoveries of a job, or list all jobs and adoptions",
    )
    status.add_argument(
        "job", nargs="?", help="a TrainingJob or a CheckpointAdoption (default: list all)"
    )
    status.add_argument(
        "-w", "--watch", action="store_true", help="show the table again every second, until Ctrl-C"
    )
    _add_output(status)
    status.set_defaults(run=_status)

    checkpoints = verbs.add_parser(
        "checkpoints", help="list the checkpoints of one job or of all jobs"
    )
    checkpoints.add_argument("job", nargs="?", help="name of the job (default: list all)")
    _add_output(checkpoints)
    checkpoints.set_defaults(run=_checkpoints)

    save = verbs.add_parser("save", help="request a save now, by creating a Checkpoint object")
    save.add_argument("job", help="a TrainingJob or a CheckpointAdoption that trains")
    save.add_argument(
        "--name", default=None, help="name of the Checkpoint (default: <job>-manual-<5 letters>)"
    )
    save.add_argument(
        "--pin", action="store_true", help="keep it: no retention policy removes it later"
    )
    save.add_argument("--wait", action="store_true", help="wait until it is committed")
    save.set_defaults(run=_save)

    prune = verbs.add_parser(
        "prune",
        help="delete the checkpoints in the object store that the retention of a job does not keep",
        description="Show which checkpoints in the object store the retention of a job does not keep, with "
        "their sizes and the reasons, and delete them after a question.",
    )
    prune.add_argument("job", help="a TrainingJob or a CheckpointAdoption")
    prune.add_argument("--dry-run", action="store_true", help="show the plan and delete nothing")
    prune.add_argument("--yes", action="store_true", help="delete without a question")
    prune.add_argument(
        "--keep-last",
        type=_at_least_two,
        default=None,
        metavar="N",
        help="keep N newest checkpoints in place of retention.keepLast, at least 2",
    )
    _add_output(prune)
    prune.set_defaults(run=prune_store)

    verify = verbs.add_parser(
        "verify",
        help="read every byte of a checkpoint in the object store, and compare the digests",
        description="Request a drill of a checkpoint, and wait for what it finds. Exit code: 0 intact, 1 not "
        "read to its end, 3 damaged, 4 not restorable.",
    )
    verify.add_argument("checkpoint", help="a Checkpoint that is in an object store")
    verify.add_argument(
        "--restore",
        action="store_true",
        help="also assemble the state for another number of ranks, and compare",
    )
    verify.add_argument(
        "--world-size",
        type=int,
        default=None,
        metavar="M",
        help="number of ranks of --restore (default: half as many as saved it)",
    )
    verify.add_argument("--no-wait", action="store_true", help="request the drill only")
    verify.set_defaults(run=verify_checkpoint)

    imports = verbs.add_parser(
        "import-store",
        help="make Checkpoint objects of what a store has and this cluster does not know",
        description="List a CheckpointStore, and create a Checkpoint object for each checkpoint that has "
        "none: another cluster wrote it, or etcd was lost. A new job restores one by spec.restoreFrom. "
        "Nothing is deleted or changed, in the store or in the cluster.",
    )
    imports.add_argument("--store", required=True, help="name of the CheckpointStore")
    imports.add_argument(
        "--job", default=None, help="name or uid of one job (default: all of the namespace)"
    )
    imports.add_argument(
        "--from-namespace",
        default=None,
        metavar="NAMESPACE",
        help="namespace of the jobs in the store, where another cluster had another one",
    )
    imports.add_argument(
        "--dry-run", action="store_true", help="show what would be created, and create nothing"
    )
    _add_output(imports)
    imports.set_defaults(run=import_store)

    restart = verbs.add_parser(
        "restart", help="start a job over that has lost all of its checkpoints and waits for that"
    )
    restart.add_argument("job", help="a TrainingJob or a CheckpointAdoption")
    restart.add_argument(
        "--from-start",
        action="store_true",
        required=True,
        help="train from spec.restoreFrom, or from step 0, and give up what was trained since",
    )
    _add_yes(restart)
    restart.set_defaults(run=_restart)
    restore_ = verbs.add_parser(
        "restore",
        help="roll a job back to one of its checkpoints, or fork it",
        description="Show what a rollback of a job to one of its checkpoints gives up, and begin it after a "
        "question. The gang trains again from that step, in its present pods. With --to-new-job the job "
        "stays as it is, and a new job with its spec starts from the checkpoint.",
    )
    restore_.add_argument("job", help="a TrainingJob or a CheckpointAdoption")
    restore_.add_argument(
        "--step",
        type=_step,
        default=None,
        metavar="N",
        help="step of the checkpoint (default of a fork: the newest)",
    )
    restore_.add_argument(
        "--to-new-job", default=None, metavar="NAME", help="create this job with the spec of JOB"
    )
    restore_.add_argument(
        "--workers", type=int, default=None, metavar="M", help="workers of the new job"
    )
    restore_.add_argument(
        "--dry-run", action="store_true", help="print the new job as JSON and create nothing"
    )
    _add_yes(restore_)
    restore_.set_defaults(run=restore)
    for verb in (status, checkpoints, save, prune, verify, imports, restart, restore_):
        _add_place(verb, argparse.SUPPRESS)
    for verb in (status, checkpoints):
        verb.add_argument(
            "-A",
            "--all-namespaces",
            dest="everywhere",
            action="store_true",
            help="list those of all namespaces",
        )
    return parser


def _add_place(parser: argparse.ArgumentParser, default: str | None) -> None:
    """Add the options that kubectl takes before and after the verb. SUPPRESS keeps the value before it."""
    parser.add_argument(
        "-n",
        "--namespace",
        default=default,
        help="namespace of the job (default: the namespace of the context)",
    )
    parser.add_argument(
        "--context",
        default=default,
        help="context of the kubeconfig (default: the active one)",
    )


def _add_yes(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "-y", "--yes", action="store_true", help="do not ask (needed without a terminal)"
    )


def _add_output(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "-o", "--output", choices=["table", "json"], default="table", help="format (default: table)"
    )


def _status(cluster: ClusterClient, arguments: argparse.Namespace) -> None:
    def now() -> RenderableType:
        if arguments.job is None:
            return gangs_view(cluster.gangs(), everywhere=cluster.everywhere)
        return status_view(_screen(cluster, arguments.job))

    if arguments.output == "json":
        shown = cluster.gangs() if arguments.job is None else _document(cluster, arguments.job)
        print(json.dumps(shown, indent=1))
        return
    console = Console()
    if not arguments.watch:
        console.print(now())
        return
    with Live(now(), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(1)
            live.update(now(), refresh=True)


def _screen(cluster: ClusterClient, name: str) -> Screen:
    gang = cluster.gang(name)
    members: list[MemberPod] = []
    problems: list[str] = []
    try:
        members = cluster.members(gang)
    except ClusterError as error:  # the rest of the screen does not need the pods
        problems.append(str(error))
    return Screen(gang, members, cluster.tiers(members), cluster.checkpoints(gang), problems)


def _document(cluster: ClusterClient, name: str) -> dict[str, Any]:
    screen = _screen(cluster, name)
    return {
        "kind": screen.gang["kind"],
        "status": screen.gang.get("status"),
        "pods": [asdict(member) for member in screen.members],
        "tiers": screen.tiers,
        "checkpoints": screen.checkpoints,
        "problems": screen.problems,
    }


def _checkpoints(cluster: ClusterClient, arguments: argparse.Namespace) -> None:
    items = [
        item
        for item in cluster.items("checkpoints")
        if arguments.job in (None, item["spec"].get("jobRef", {}).get("name"))
    ]
    if arguments.output == "json":
        print(json.dumps(items, indent=1))
    else:
        Console().print(checkpoints_view(items, everywhere=cluster.everywhere))


def _save(cluster: ClusterClient, arguments: argparse.Namespace) -> None:
    job = cluster.gang(arguments.job)
    # No step in the name: the step that the request reaches is a later one than that of now.
    letters = "".join(secrets.choice(_LETTERS) for _ in range(5))
    name = arguments.name or f"{arguments.job}-manual-{letters}"
    cluster.create(
        "checkpoints",
        {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "Checkpoint",
            "metadata": {"name": name},
            "spec": {"jobRef": {"name": arguments.job}, "pin": arguments.pin},
        },
    )
    phase = (job.get("status") or {}).get("phase")
    when = (
        ""
        if phase in (None, "Running")
        else f"; {arguments.job} is {phase}, it saves when it trains"
    )
    print(f"checkpoint {name} requested{when}")
    if not arguments.pin:
        print("keepLast removes it later, as any other checkpoint; --pin keeps it")
    while arguments.wait:
        status = cluster.get("checkpoints", name).get("status") or {}
        phase = status.get("phase")
        if phase == "Committed":
            print(f"checkpoint {name} committed")
            return
        if phase == "Failed":
            why = next((c["message"] for c in status["conditions"] if c["type"] == "Committed"), "")
            raise ClusterError(f"checkpoint {name} failed: {why}")
        time.sleep(0.5)


def _at_least_two(text: str) -> int:
    number = int(text)
    if number < 2:
        raise argparse.ArgumentTypeError(
            f"{number} is less than 2: if the newest checkpoint cannot be read, an older one is needed"
        )
    return number


def _step(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is below 0")
    return number


def _restart(cluster: ClusterClient, arguments: argparse.Namespace) -> None:
    gang = cluster.gang(arguments.job)
    obstacle = obstacle_to_start_over(gang)
    if obstacle is not None:
        raise ClusterError(obstacle)
    status = gang["status"]
    lost = next(c["message"] for c in status["conditions"] if c["type"] == "CheckpointsLost")
    if not arguments.yes:
        confirm(
            f"{lost}\nStart {arguments.job} over?",
            refused=f"{arguments.job} was not started over",
            no_terminal=f"{lost}. Without a terminal, --yes confirms it",
        )
    order_rollback(cluster, gang, None)
    print(f"{arguments.job} starts over; kubectl holdfast status {arguments.job} shows it")


if __name__ == "__main__":
    main()
