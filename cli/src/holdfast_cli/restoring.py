"""`kubectl holdfast restore`: roll a job back to one of its checkpoints.

The command only sets spec.rollback. The operator carries the order out, and refuses it for the same reasons.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from holdfast_cli.cluster import ClusterClient, ClusterError
from holdfast_cli.gangs import KINDS, obstacle_to_order
from holdfast_cli.pruning import parse_gang
from holdfast_cli.question import confirm
from holdfast_core.api import Checkpoint, Gang, JobCondition
from holdfast_core.ids import Step
from holdfast_core.rollback import find_unfit


def order_rollback(cluster: ClusterClient, gang: dict[str, Any], step: Step | None) -> None:
    """Order the gang to train again from a step, or to start over if that is None.

    The order names the newest round of the lineage. It has no effect if another round has chosen its restore
    point since `gang` was read, so that it never gives up what a person has not seen.
    """
    order = {"round": gang["status"]["lineage"][-1]["round"], "step": step}
    cluster.patch(KINDS[gang["kind"]], gang["metadata"]["name"], {"spec": {"rollback": order}})


def restore(cluster: ClusterClient, arguments: argparse.Namespace) -> None:
    """Roll a job back to a step, after a question."""
    raw, step = cluster.gang(arguments.job), Step(arguments.step)
    obstacle = obstacle_to_order(raw)
    if obstacle is not None:
        raise ClusterError(obstacle)
    gang = parse_gang(raw)
    unfit = find_unfit(gang, own_checkpoints(cluster, gang), step, newest_on_nodes(gang))
    if unfit is not None:
        raise ClusterError(unfit.message)
    plan = describe_rollback(gang, step)
    if not arguments.yes:
        confirm(
            f"{plan}\nRoll {gang.name} back?",
            refused=f"{gang.name} was not rolled back",
            no_terminal=f"{plan}\nWithout a terminal, --yes confirms it",
        )
    order_rollback(cluster, raw, step)
    print(
        f"{gang.name} goes back to step {step}; condition RolledBack of the job says how far it is"
    )


def own_checkpoints(cluster: ClusterClient, gang: Gang) -> Sequence[Checkpoint]:
    """Return the Checkpoints that a gang has committed."""
    found = cluster.checkpoints({"metadata": {"uid": gang.metadata.uid}})
    return [Checkpoint.from_dict(raw) for raw in found]


def newest_on_nodes(gang: Gang) -> set[Step]:
    """Return the steps of which the status knows that the nodes of the gang have them."""
    status = gang.status
    found = {status.last_committed_step, status.last_replicated_step}
    return {step for step in found if step is not None}


def describe_rollback(gang: Gang, step: Step) -> str:
    """Return what a rollback to this step gives up."""
    status = gang.status
    at = "no step yet" if status.step is None else f"step {status.step}"
    again = max(0, (status.step or 0) - step)
    lines = [
        f"{gang.name} has trained {at}. It goes back to step {step}, which can be restored.",
        f"{again} steps are trained again. Checkpoints after step {step} stay until the retention takes "
        "them; only a fork can use them then.",
    ]
    suspended = gang.spec.suspend if gang.KIND == "TrainingJob" else False
    if suspended or status.is_true(JobCondition.SUSPENDED):
        lines.append("The job is suspended, and goes back when it resumes.")
    health = status.condition(JobCondition.REMOTE_TIER_HEALTHY)
    if health is not None and health.is_false:
        lines.append(
            f"The object store does not work now, and the rollback may wait: {health.message}"
        )
    return "\n".join(lines)
