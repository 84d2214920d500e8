"""`kubectl holdfast`: status, checkpoints, save.

Exit codes: 0 success; 1 the cluster cannot be reached or refused the request, or the save failed (the
message names the reason); 2 wrong usage; 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from rich.console import Console
from rich.live import Live

from holdfast_cli.cluster import GROUP, VERSION, Cluster, ClusterError
from holdfast_cli.views import checkpoints_view, status_view


def main() -> None:
    arguments = _parser().parse_args()
    try:
        cluster = Cluster.connect(arguments.context, arguments.namespace)
        arguments.run(cluster, arguments)
    except ClusterError as error:
        print(f"kubectl holdfast: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kubectl holdfast", description=__doc__)
    parser.add_argument("-n", "--namespace", help="default: the context's")
    parser.add_argument("--context", help="context of the kubeconfig (default: the active one)")
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    status = verbs.add_parser("status", help="show levels, tiers and recoveries of a job")
    status.add_argument("job")
    status.add_argument("-w", "--watch", action="store_true")
    status.add_argument("-o", "--output", choices=["table", "json"], default="table")
    status.set_defaults(run=_status)

    checkpoints = verbs.add_parser(
        "checkpoints", help=("list the checkpoints of one job or of all jobs")
    )
    checkpoints.add_argument("job", nargs="?")
    checkpoints.add_argument("-o", "--output", choices=["table", "json"], default="table")
    checkpoints.set_defaults(run=_checkpoints)

    save = verbs.add_parser("save", help="request a save now; creates a Checkpoint object")
    save.add_argument("job")
    save.add_argument(
        "--name", default=None, help="name of the Checkpoint (default: <job>-manual-<step>)"
    )
    save.add_argument("--wait", action="store_true", help="wait until it is committed")
    save.set_defaults(run=_save)
    return parser


def _status(cluster: Cluster, arguments: argparse.Namespace) -> None:
    def now() -> Any:
        job = cluster.get("trainingjobs", arguments.job)
        return job, cluster.tiers(job)

    job, tiers = now()
    if arguments.output == "json":
        print(json.dumps({"status": job.get("status"), "tiers": tiers}, indent=1))
        return
    console = Console()
    if not arguments.watch:
        console.print(status_view(job, tiers))
        return
    with Live(status_view(job, tiers), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(1)
            live.update(status_view(*now()), refresh=True)


def _checkpoints(cluster: Cluster, arguments: argparse.Namespace) -> None:
    items = [
        item
        for item in cluster.items("checkpoints")
        if arguments.job in (None, item["spec"].get("jobRef", {}).get("name"))
    ]
    if arguments.output == "json":
        print(json.dumps(items, indent=1))
    else:
        Console().print(checkpoints_view(items))


def _save(cluster: Cluster, arguments: argparse.Namespace) -> None:
    job = cluster.get("trainingjobs", arguments.job)
    step = (job.get("status") or {}).get("step", 0)
    name = arguments.name or f"{arguments.job}-manual-{step}"
    cluster.create(
        "checkpoints",
        {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "Checkpoint",
            "metadata": {"name": name},
            "spec": {"jobRef": {"name": arguments.job}},
        },
    )
    print(f"checkpoint {name} requested")
    while arguments.wait:
        phase = (cluster.get("checkpoints", name).get("status") or {}).get("phase")
        if phase == "Committed":
            print(f"checkpoint {name} committed")
            return
        if phase in ("PartiallyFailed", "Expired"):
            raise ClusterError(f"checkpoint {name}: {phase}")
        time.sleep(0.5)


if __name__ == "__main__":
    main()
