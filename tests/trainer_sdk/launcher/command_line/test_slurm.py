"""What `srun holdfast run` reads from slurm's variables."""

from __future__ import annotations

import re

import pytest

from holdfast.launcher.command_line.node_options import NodeOptions, NodeWords, node_options
from holdfast.launcher.command_line.slurm import SlurmStep, first_host, slurm_step, unused_nodes
from holdfast_core.errors import ConfigError

TASK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "gpu[03-05]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_NODEID": "1",
}
"""As srun sets them for the second of three tasks."""


def test_a_task_of_srun_knows_its_node_and_where_node_0_is() -> None:
    step = slurm_step(TASK)
    assert step == SlurmStep(3, 1, "gpu03", "slurm-4711.2", 15000 + (7 * 4711 + 2) % 10000)
    assert node_options(NodeWords(), TASK) == NodeOptions(
        3, 1, "gpu03", 15000 + (7 * 4711 + 2) % 10000, "slurm-4711.2"
    )


def test_options_count_more_than_variables() -> None:
    words = NodeWords(rdzv_endpoint="other:99", rdzv_id="mine")
    assert node_options(words, TASK) == NodeOptions(3, 1, "other", 99, "mine")
    assert node_options(NodeWords(standalone=True), TASK) == NodeOptions()
    assert node_options(NodeWords(nnodes="1"), TASK) == NodeOptions()


def test_options_that_say_everything_need_no_valid_variables() -> None:
    words = NodeWords(nnodes="2", node_rank="1", rdzv_endpoint="other:99", rdzv_id="mine")
    for changes in ({"SLURM_STEP_NUM_TASKS": "24"}, {"SLURM_JOB_ID": ""}):
        assert node_options(words, {**TASK, **changes}) == NodeOptions(2, 1, "other", 99, "mine")


def test_two_jobs_on_the_same_nodes_use_different_ports() -> None:
    jobs = [{**TASK, "SLURM_JOB_ID": str(number)} for number in range(4711, 4811)]
    assert len({node_options(NodeWords(), job).port for job in jobs}) == 100


@pytest.mark.parametrize(
    ("nodelist", "expected"),
    [
        pytest.param("login1", "login1", id="one"),
        pytest.param("gpu[003-007,9],login1", "gpu003", id="range"),
        pytest.param("gpu[7,3-4]", "gpu7", id="list"),
        pytest.param("a1,b2", "a1", id="names"),
        pytest.param("rack[0-3]n[1-2].cluster,x", "rack0n1.cluster", id="two-ranges"),
    ],
)
def test_the_first_host_of_a_list(nodelist: str, expected: str) -> None:
    assert first_host(nodelist) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param(
            {"SLURM_STEP_NUM_TASKS": "24"}, "24 tasks on 3 nodes, expected one", id="task-per-rank"
        ),
        pytest.param({"SLURM_STEP_NUM_NODES": "three"}, "SLURM_STEP_NUM_NODES=three", id="words"),
        pytest.param({"SLURM_JOB_ID": ""}, "SLURM_JOB_ID is not set", id="missing"),
    ],
)
def test_an_unexpected_step_is_refused_by_name(changes: dict[str, str], expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        slurm_step({**TASK, **changes})


def test_a_batch_script_is_no_task_and_uses_one_node() -> None:
    batch = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "3", "SLURM_NODEID": "0"}
    assert slurm_step(batch) is None
    assert unused_nodes(batch) == 2
    assert unused_nodes(TASK) == 0
    assert unused_nodes({}) == 0
