"""The command line of `holdfast run` means what it means to torchrun, or is refused by name."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping

import pytest
from torch.distributed import run as torchrun

from holdfast.__main__ import main
from holdfast.launcher.device_count import count_ranks
from holdfast.launcher.options import (
    REFUSED,
    Command,
    CommandKind,
    RunOptions,
    StreamChoice,
    Streams,
    add_arguments,
    options_from,
    split,
)
from holdfast_core.errors import ConfigError


def parse(line: str, env: Mapping[str, str] | None = None, *, in_pod: bool = False) -> RunOptions:
    words, command, is_command_line = split(["run", *shlex.split(line)])
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    return options_from(
        parser.parse_args(words[1:]),
        command,
        env or {},
        is_command_line=is_command_line,
        in_pod=in_pod,
    )


def words_of(parser: argparse.ArgumentParser) -> set[str]:
    """Return every option that the help of a parser lists."""
    lines = re.findall(r"^  (-.*?)(?:  |$)", parser.format_help(), re.MULTILINE)
    return {word for line in lines for word in re.findall(r"(?<!\S)--?[a-z][\w-]*", line)}


def test_every_option_of_torchrun_is_accepted_or_refused_with_an_advice() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    theirs, accepted = words_of(torchrun.get_args_parser()), words_of(parser)
    assert {"--nproc-per-node", "--nproc_per_node", "-m", "-r", "--role"} <= theirs
    refused = {spelling for name in REFUSED for spelling in (f"--{name}", _underscores(name))}
    assert theirs - accepted <= refused
    assert not accepted & refused


def _underscores(name: str) -> str:
    return "--" + name.replace("-", "_")


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refused_option_is_named_with_what_to_use_instead(name: str) -> None:
    for word in (f"--{name}", _underscores(name)):
        with pytest.raises(ConfigError, match=re.escape(f"{word} of torchrun has no meaning here")):
            parse(f"{word}=1 train.py")
        with pytest.raises(ConfigError, match=re.escape(REFUSED[name])):
            parse(f"--nnodes 1 {word} 1 train.py")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        pytest.param("train.py --lr 1", ("train.py", "--lr", "1"), id="script"),
        pytest.param("-- python train.py", ("train.py",), id="command-line"),
        pytest.param("--nproc-per-node 2 train.py -- -x", ("train.py", "--", "-x"), id="dashes"),
        pytest.param("--nproc_per_node=2 python -u train.py", ("train.py",), id="python"),
        pytest.param("-r3 -t 1 train.py --role x", ("train.py", "--role", "x"), id="own-options"),
        pytest.param("-- train.py", ("train.py",), id="script-after-dashes"),
        pytest.param("program -x", ("program", "-x"), id="script-without-suffix"),
    ],
)
def test_the_first_word_that_is_no_option_is_the_script(
    line: str, expected: tuple[str, ...]
) -> None:
    assert parse(line).command == Command(CommandKind.SCRIPT, expected)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        pytest.param("-m pkg.train -x", Command(CommandKind.MODULE, ("pkg.train", "-x")), id="-m"),
        pytest.param("--module pkg", Command(CommandKind.MODULE, ("pkg",)), id="module"),
        pytest.param(
            "--no-python sh -c x", Command(CommandKind.EXEC, ("sh", "-c", "x")), id="no-python"
        ),
        pytest.param("-- sh -c x", Command(CommandKind.EXEC, ("sh", "-c", "x")), id="command-line"),
    ],
)
def test_modules_and_programs(line: str, expected: Command) -> None:
    assert parse(line).command == expected


def test_a_command_line_of_torchrun_is_read_as_torchrun_reads_it() -> None:
    options = parse(
        "--nnodes=1 --nproc_per_node=8 --standalone --rdzv_id=x --max_restarts=3 --monitor_interval=5 "
        "--log_dir=/logs --tee 3 --redirects=0:1,1:2 --shutdown_timeout 30 train.py"
    )
    assert options.run_id == "x"
    assert (options.nproc, options.max_restarts, options.grace_seconds) == ("8", 3, 30.0)
    assert options.logs.directory == "/logs"
    assert options.logs.tee == StreamChoice(Streams.STDOUT | Streams.STDERR)
    assert options.logs.redirects.of(0) == Streams.STDOUT
    assert options.logs.redirects.of(1) == Streams.STDERR
    assert options.logs.redirects.of(2) == Streams.NONE


TASK = {
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "a[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
}
"""As srun sets them for each of two tasks."""
BATCH = {"SLURM_JOB_NUM_NODES": "2"}
"""As slurm sets them for the batch script of a job."""


@pytest.mark.parametrize(
    ("line", "env", "named"),
    [
        pytest.param("--nnodes 2", {}, "--nnodes 2", id="nodes"),
        pytest.param("--nnodes 1:4", {}, "--nnodes 1:4", id="range"),
        pytest.param("", {"PET_NNODES": "2"}, "--nnodes 2", id="variable"),
        pytest.param("--node-rank 1", {}, "--node-rank", id="node-rank"),
        pytest.param("--rdzv_endpoint h:1", {}, "--rdzv_endpoint", id="endpoint"),
        pytest.param("--master-addr h", {}, "--master-addr", id="master"),
        pytest.param("", TASK, "SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2", id="srun"),
        pytest.param(
            "", {**TASK, "SLURM_STEP_NUM_NODES": "1"}, "SLURM_STEP_NUM_TASKS=2", id="task-per-rank"
        ),
        pytest.param("", BATCH, "SLURM_JOB_NUM_NODES=2", id="batch-script"),
    ],
)
def test_several_nodes_are_refused_and_torchrun_is_named(
    line: str, env: dict[str, str], named: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(f"{line} train.py", env)
    for text in (named, "start torchrun on each node", "srun torchrun"):
        assert text in str(refused.value)


@pytest.mark.parametrize(
    ("line", "env"),
    [
        pytest.param("--nnodes 1", {}, id="one-node"),
        pytest.param("--nnodes 1:1", {}, id="one-node-as-a-range"),
        pytest.param("--standalone", TASK, id="standalone-in-each-task"),
        pytest.param("--standalone", BATCH, id="standalone-in-a-batch-script"),
        pytest.param(
            "",
            {**TASK, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"},
            id="step-of-one-node-in-a-job-of-two",
        ),
    ],
)
def test_one_machine_is_accepted(line: str, env: dict[str, str]) -> None:
    assert parse(f"{line} train.py", env).command.argv == ("train.py",)


def test_the_variables_of_torchrun_are_defaults() -> None:
    env = {"PET_NPROC_PER_NODE": "4", "PET_RDZV_ID": "x"}
    assert (parse("train.py", env).nproc, parse("train.py", env).run_id) == ("4", "x")
    assert parse("--nproc-per-node 2 train.py", env).nproc == "2"


def test_in_a_pod_the_operator_decides_about_nodes() -> None:
    theirs = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto", **TASK}
    assert parse("--nproc-per-node 2 train.py", theirs, in_pod=True).nproc == "2"
    for line in ("--nnodes 2", "--max-restarts 3", "--standalone"):
        with pytest.raises(ConfigError, match="omit it in a TrainingJob"):
            parse(f"{line} train.py", in_pod=True)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        pytest.param("", "no command", id="no-command"),
        pytest.param("--nproc-per-node 0 t.py", "--nproc-per-node 0: expected", id="no-ranks"),
        pytest.param("--nproc-per-node many t.py", "gpu", id="ranks-in-words"),
        pytest.param("--max-restarts -1 t.py", "a number from 0", id="restarts"),
        pytest.param("--tee 4 t.py", "--tee 4", id="streams"),
        pytest.param("--redirects 0:1,x t.py", "--redirects 0:1,x", id="streams-by-rank"),
        pytest.param("--redirects 0:1,0:2 t.py", "local rank 0 twice", id="streams-of-one-rank"),
        pytest.param("--shutdown-timeout nan t.py", "number of seconds", id="seconds"),
    ],
)
def test_a_wrong_command_line_is_refused_with_what_was_expected(line: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        parse(line)


def test_an_unknown_option_and_a_wrong_one_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as unknown:
        main(["run", "--nproc", "2", "train.py"])
    assert unknown.value.code == 2
    assert main(["run", "--start-method", "spawn", "train.py"]) == 2
    assert "--start-method of torchrun has no meaning here" in capsys.readouterr().err


async def test_ranks_can_be_counted_by_processors() -> None:
    import os

    assert await count_ranks("cpu") == len(os.sched_getaffinity(0))
    assert await count_ranks("3") == 3
