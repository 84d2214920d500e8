"""What srun's environment says about the nodes of a step: `srun --ntasks-per-node=1 holdfast run ...`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast_core.errors import ConfigError

_FIRST_PORT = 15000
_PORTS = 10000
"""Ports below the range from which Linux takes ports for outgoing connections (32768 and above)."""
_STEPS_OF_A_JOB = 7
_GROUP = re.compile(r"\[([^\]]*)\]")


@dataclass(frozen=True, slots=True)
class SlurmStep:
    """A step of srun, in which one task runs on each node."""

    nodes: int
    node_rank: int
    first_host: str
    run_id: str
    port: int
    """Port of node 0. It follows from the numbers of job and step, so that two jobs seldom share one."""


def slurm_step(env: Mapping[str, str]) -> SlurmStep | None:
    """Return the step of srun in which this process is a task, or None outside of a step.

    A batch script is no task of a step. Raises ConfigError if srun started several tasks on a node, or for
    a variable with an unexpected value.
    """
    nodelist = env.get("SLURM_STEP_NODELIST")
    if not nodelist or not env.get("SLURM_NODEID"):
        return None
    nodes = _number(env, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    tasks = _number(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if tasks != nodes:
        raise ConfigError(
            f"holdfast run: srun started {tasks} tasks on {nodes} nodes, expected one for each node: "
            "`holdfast run` starts the ranks itself. Use srun --ntasks-per-node=1, and --nproc-per-node "
            "for the ranks of a node"
        )
    job, step = _number(env, "SLURM_JOB_ID"), _number(env, "SLURM_STEP_ID")
    return SlurmStep(
        nodes=nodes,
        node_rank=_number(env, "SLURM_NODEID"),
        first_host=first_host(nodelist),
        run_id=f"slurm-{job}.{step}",
        port=_FIRST_PORT + (_STEPS_OF_A_JOB * job + step) % _PORTS,
    )


def unused_nodes(env: Mapping[str, str]) -> int:
    """Return how many nodes of a slurm job a launcher in its batch script does not use."""
    nodes = env.get("SLURM_JOB_NUM_NODES", "1")
    is_batch_script = "SLURM_JOB_ID" in env and not env.get("SLURM_STEP_NODELIST")
    return int(nodes) - 1 if is_batch_script and nodes.isdecimal() else 0


def first_host(nodelist: str) -> str:
    """Return the first host of slurm's list: `gpu[003-007,9],login1` -> `gpu003`."""
    depth = 0
    for at, character in enumerate(nodelist):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            nodelist = nodelist[:at]
            break
    return _GROUP.sub(lambda match: re.split("[-,]", match[1])[0], nodelist)


def _number(env: Mapping[str, str], *names: str) -> int:
    found = [(name, env[name]) for name in names if env.get(name)]
    if not found or not found[0][1].isdecimal():
        shown = " ".join(f"{name}={text}" for name, text in found) or f"{names[0]} is not set"
        raise ConfigError(
            f"holdfast run: {shown}: expected a whole number, as srun sets it; to start without srun's "
            "variables, pass --standalone, or --nnodes, --node-rank, --rdzv-endpoint and --rdzv-id"
        )
    return int(found[0][1])
