"""The command line of `holdfast run`: the options of torchrun, `--preload`, and the command.

An option that torchrun also has means the same here, in both spellings (`--nproc-per-node`,
`--nproc_per_node`), and has the same variable as its default (`PET_NPROC_PER_NODE`). An option of torchrun
that has no meaning here is refused, and the error names what to use instead.

`holdfast run [options] SCRIPT ...` names a Python script, as with torchrun. `holdfast run [options] -- CMD`
is any command line. Both become a Python script or module, which a fork can run, or another program.
Parsing does not touch the file system, except to resolve the path of an interpreter.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntFlag, StrEnum
from pathlib import Path

from holdfast_core.errors import ConfigError

_STREAMS = re.compile(r"[0-3]")
_BY_RANK = re.compile(r"\d+:[0-3](,\d+:[0-3])*")


class Streams(IntFlag):
    """Output streams of a rank, with torchrun's numbers."""

    NONE = 0
    STDOUT = 1
    STDERR = 2


@dataclass(frozen=True, slots=True)
class StreamChoice:
    """The streams that an option names, for each local rank."""

    every: Streams = Streams.NONE
    by_local_rank: Mapping[int, Streams] = field(default_factory=dict)

    def of(self, local_rank: int) -> Streams:
        return self.by_local_rank.get(local_rank, self.every)

    def __bool__(self) -> bool:
        return bool(self.every or any(self.by_local_rank.values()))


def parse_streams(option: str, text: str | None) -> StreamChoice:
    """Parse `3`, or `0:1,1:3` for local ranks 0 and 1. Raises ConfigError."""
    if text is None:
        return StreamChoice()
    if _STREAMS.fullmatch(text):
        return StreamChoice(Streams(int(text)))
    if not _BY_RANK.fullmatch(text):
        raise ConfigError(
            f"holdfast run: {option} {text}: expected 0, 1 (stdout), 2 (stderr) or 3 (both), or a list by "
            "local rank such as 0:1,1:3"
        )
    chosen: dict[int, Streams] = {}
    for part in text.split(","):
        rank, value = map(int, part.split(":"))
        if rank in chosen:
            raise ConfigError(
                f"holdfast run: {option} {text}: names local rank {rank} twice; 3 stands for both streams"
            )
        chosen[rank] = Streams(value)
    return StreamChoice(by_local_rank=chosen)


@dataclass(frozen=True, slots=True)
class LogOptions:
    directory: str | None = None
    """None: a temporary directory, where a file is needed."""
    redirects: StreamChoice = field(default_factory=StreamChoice)
    tee: StreamChoice = field(default_factory=StreamChoice)


_PYTHON = re.compile(r"python(\d(\.\d+)?)?$")
_HARMLESS_FLAGS = frozenset({"-u", "-B"})
"""Interpreter flags that a forked rank may ignore: its output is line-buffered, and -B only affects
the cache of bytecode."""


class CommandKind(StrEnum):
    SCRIPT = "script"
    """`python FILE ...`, forked from the fork server."""
    MODULE = "module"
    """`python -m NAME ...`, forked from the fork server."""
    EXEC = "exec"
    """Any other command, started by exec in each round, without preloaded modules."""


@dataclass(frozen=True, slots=True)
class Command:
    kind: CommandKind
    argv: tuple[str, ...]
    """SCRIPT and MODULE: file or module name, then its arguments. EXEC: the command and its arguments."""


def parse_command(
    text: Sequence[str],
    *,
    is_module: bool = False,
    is_command_line: bool = True,
    executable: str = sys.executable,
) -> Command:
    """Parse a command. Raises ConfigError when it is empty.

    A bare `python` means the interpreter that runs the launcher, as with torchrun. A command with the path
    of another interpreter, or with interpreter flags that a forked process cannot support, is run by exec.

    Args:
        text: The words of the command.
        is_module: Whether the first word is the name of a module (`-m`).
        is_command_line: Whether the first word is a program. Otherwise it is a Python script, or an
            interpreter. A first word that ends in `.py` is always a script.
        executable: The interpreter that runs the launcher.
    """
    if not text:
        raise ConfigError(
            "holdfast run: no command; expected: holdfast run [options] train.py ..., or "
            "holdfast run [options] -- COMMAND ..."
        )
    if is_module:
        return Command(CommandKind.MODULE, tuple(text))
    if not _is_python(text[0]):
        is_script = text[0].endswith(".py") or not is_command_line
        return Command(CommandKind.SCRIPT if is_script else CommandKind.EXEC, tuple(text))
    if not _is_own_python(text[0], executable):
        return Command(CommandKind.EXEC, tuple(text))
    rest = list(text[1:])
    while rest and rest[0] in _HARMLESS_FLAGS:
        rest.pop(0)
    if len(rest) >= 2 and rest[0] == "-m":
        return Command(CommandKind.MODULE, tuple(rest[1:]))
    if rest and not rest[0].startswith("-"):
        return Command(CommandKind.SCRIPT, tuple(rest))
    return Command(CommandKind.EXEC, (executable, *text[1:]))


def _is_python(word: str) -> bool:
    return _PYTHON.match(Path(word).name) is not None


def _is_own_python(word: str, executable: str) -> bool:
    path = Path(word)
    if path.name == word:
        return True
    own = Path(executable)
    # Two virtual environments may link to the same interpreter. They differ in their directories.
    return os.path.realpath(word) == os.path.realpath(executable) and (
        Path(os.path.realpath(path.parent)) == Path(os.path.realpath(own.parent))
    )


DEFAULT_GRACE_SECONDS = 10.0
_COUNTED = ("auto", "cpu", "gpu", "xpu")


@dataclass(frozen=True, slots=True)
class RunOptions:
    command: Command
    nproc: str | None
    """Ranks of this machine: a number, or what to count (`gpu`, `cpu`, `xpu`, `auto`). None: the default."""
    logs: LogOptions
    run_id: str = ""
    """Name of the run in TORCHELASTIC_RUN_ID and in the paths of log files. "": a random one."""
    preload: tuple[str, ...] = ()
    max_restarts: int = 0
    grace_seconds: float | None = None
    """Time from SIGTERM to SIGKILL for the ranks. None: that of the pod, else DEFAULT_GRACE_SECONDS."""


@dataclass(frozen=True, slots=True)
class _Option:
    name: str
    help: str
    metavar: str = ""
    """Name of the value. An option without one is a flag."""
    short: str = ""
    repeats: bool = False

    @property
    def words(self) -> list[str]:
        words = [self.short] if self.short else []
        return [*words, *dict.fromkeys((f"--{self.name}", f"--{self.name.replace('-', '_')}"))]

    @property
    def attribute(self) -> str:
        return self.name.replace("-", "_")


_OPTIONS = (
    _Option(
        "nproc-per-node",
        "ranks of this machine: a number, or gpu, xpu, cpu or auto to count devices (default: "
        "spec.procsPerWorker in a TrainingJob, else 1)",
        "N",
    ),
    _Option("nnodes", "1, as for torchrun; several nodes are started by torchrun", "1"),
    _Option("rdzv-id", "name of this run in the paths of --log-dir", "ID"),
    _Option("standalone", "run on this machine only, also in a slurm job of several nodes"),
    _Option("max-restarts", "how often all ranks may be restarted in place (default 0)", "N"),
    _Option(
        "monitor-interval",
        "accepted, as for torchrun, without effect: the launcher notices the end of a rank at once",
        "SECONDS",
    ),
    _Option("module", "SCRIPT is the name of a module, as with python -m", short="-m"),
    _Option("no-python", "SCRIPT is a program that is not a Python script"),
    _Option("log-dir", "folder for the files of --redirects and --tee", "DIR"),
    _Option(
        "redirects",
        "streams that go to a file only: 1 stdout, 2 stderr, 3 both; or by local rank: 0:1,1:3",
        "STREAMS",
        short="-r",
    ),
    _Option("tee", "streams that go to a file and to the console", "STREAMS", short="-t"),
    _Option(
        "shutdown-timeout",
        f"time from SIGTERM to SIGKILL for the ranks (default {DEFAULT_GRACE_SECONDS:g}; in a TrainingJob "
        "a part of the pod's grace period)",
        "SECONDS",
    ),
    _Option(
        "preload",
        "module, in addition to torch, that the fork server imports before it forks ranks; repeat it, "
        "or separate modules by commas",
        "MODULE",
        repeats=True,
    ),
)

_SEVERAL_NODES = (
    "For several nodes without Kubernetes, start torchrun on each node, under slurm by srun torchrun; the "
    "script makes the same checkpoints (docs/training.md, Several nodes)"
)
_NO_NODES = f"omit it: `holdfast run` starts the ranks of one machine or pod. {_SEVERAL_NODES}"

REFUSED = {
    "duplicate-stderr-filters": "use --tee, and filter the file",
    "duplicate-stdout-filters": "use --tee, and filter the file",
    "event-log-handler": "omit it: the launcher logs to its standard error",
    "local-addr": _NO_NODES,
    "local-ranks-filter": "use --redirects, for example --redirects 1:3,2:3 for local ranks 1 and 2",
    "log-line-prefix-template": "omit it: each line begins with [rank N]",
    "logs-specs": "use --log-dir with --redirects or --tee",
    "master-addr": _NO_NODES,
    "master-port": _NO_NODES,
    "node-rank": _NO_NODES,
    "numa-binding": "omit it and bind the ranks in the script, or put numactl before holdfast",
    "print-completion": "see holdfast run --help",
    "rdzv-backend": _NO_NODES,
    "rdzv-conf": _NO_NODES,
    "rdzv-endpoint": _NO_NODES,
    "role": "omit it: all ranks have the role default",
    "run-path": "omit it: a Python script is run in a forked process anyway",
    "signals-to-handle": "omit it: SIGTERM, SIGINT and SIGHUP make the ranks save and stop",
    "start-method": "omit it: ranks are forked from a process that has imported torch",
    "virtual-local-rank": "omit it and set the device by LOCAL_RANK",
}
"""Options of torchrun that have no meaning here, and what to do instead."""

_DECIDED_BY_A_JOB = ("nnodes", "rdzv-id", "standalone", "max-restarts")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to `parser`, for its help and for `options_from`."""
    for option in _OPTIONS:
        if not option.metavar:
            parser.add_argument(*option.words, action="store_true", help=option.help)
        elif option.repeats:
            parser.add_argument(
                *option.words, action="append", metavar=option.metavar, help=option.help
            )
        else:
            parser.add_argument(*option.words, metavar=option.metavar, help=option.help)


def split(words: Sequence[str]) -> tuple[list[str], list[str], bool]:
    """Split a command line into options and command. Return whether `--` stands between them.

    The first word is the verb. The command begins at the first other word that is neither an option nor
    its value. Raises ConfigError for an option of torchrun that is refused.
    """
    takes_value = {word: bool(option.metavar) for option in _OPTIONS for word in option.words}
    at = 1
    while at < len(words):
        word = words[at]
        if word == "--":
            return list(words[:at]), list(words[at + 1 :]), True
        if not word.startswith("-"):
            break
        name, _, value = word.partition("=")
        advice = REFUSED.get(name.lstrip("-").replace("_", "-"))
        if advice is not None and name.startswith("--"):
            raise ConfigError(f"holdfast run: {name} of torchrun has no meaning here: {advice}")
        at += 2 if takes_value.get(word, False) and not value else 1
    return list(words[:at]), list(words[at:]), False


def options_from(
    arguments: argparse.Namespace,
    words: Sequence[str],
    env: Mapping[str, str],
    *,
    is_command_line: bool,
    in_pod: bool = False,
) -> RunOptions:
    """Return the options of a command line. Raises ConfigError for invalid values.

    Args:
        arguments: What the parser has read.
        words: The command.
        env: Environment of the launcher: defaults of torchrun (PET_*), and variables of slurm.
        is_command_line: Whether `--` stands before the command.
        in_pod: Whether this is a worker pod, where the operator decides about nodes and restarts. Its
            environment may have variables of another controller, which are ignored.
    """
    if in_pod:
        _expect_none_for_a_job(arguments)
        env = {}
    _set_defaults(arguments, env)
    _expect_one_machine(arguments, env)
    nproc = arguments.nproc_per_node
    if nproc is not None and nproc not in _COUNTED:
        _number("--nproc-per-node", nproc, f"a number from 1, or {', '.join(_COUNTED)}", 1)
    if arguments.monitor_interval is not None:
        _seconds("--monitor-interval", arguments.monitor_interval)
    grace = arguments.shutdown_timeout
    return RunOptions(
        parse_command(
            words,
            is_module=arguments.module,
            is_command_line=is_command_line or arguments.no_python,
        ),
        nproc,
        LogOptions(
            arguments.log_dir,
            parse_streams("--redirects", arguments.redirects),
            parse_streams("--tee", arguments.tee),
        ),
        arguments.rdzv_id or "",
        tuple(name for word in arguments.preload or () for name in word.split(",") if name),
        _number("--max-restarts", arguments.max_restarts or "0", "a number from 0", 0),
        None if grace is None else _seconds("--shutdown-timeout", grace),
    )


def _expect_none_for_a_job(arguments: argparse.Namespace) -> None:
    given = [name for name in _DECIDED_BY_A_JOB if getattr(arguments, name.replace("-", "_"))]
    if given:
        names = ", ".join(f"--{name}" for name in given)
        raise ConfigError(
            f"holdfast run: {names}: omit it in a TrainingJob, where spec.workers and spec.failurePolicy "
            "decide"
        )


def _expect_one_machine(arguments: argparse.Namespace, env: Mapping[str, str]) -> None:
    """Raise ConfigError for a run on several nodes, or in several tasks of a slurm step.

    In such tasks each launcher would start a whole training, and all would use the same folder. With
    --standalone the user says that each is a training of its own.
    """
    if arguments.nnodes not in (None, "1", "1:1"):
        raise ConfigError(
            f"holdfast run: --nnodes {arguments.nnodes}: expected 1, because `holdfast run` starts the "
            f"ranks of one machine. {_SEVERAL_NODES}"
        )
    is_step = bool(env.get("SLURM_STEP_NODELIST"))
    names = (
        ("SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS") if is_step else ("SLURM_JOB_NUM_NODES",)
    )
    found = [f"{name}={env[name]}" for name in names if env.get(name, "1") != "1"]
    if found and not arguments.standalone:
        raise ConfigError(
            f"holdfast run: {' '.join(found)}: expected one node and one task, because `holdfast run` "
            f"starts the ranks of one machine. {_SEVERAL_NODES}. To run on this machine only, pass "
            "--standalone"
        )


def _set_defaults(arguments: argparse.Namespace, env: Mapping[str, str]) -> None:
    for option in _OPTIONS:
        text = env.get(f"PET_{option.attribute.upper()}", "")
        if text and not option.repeats and not getattr(arguments, option.attribute):
            value = text if option.metavar else text != "0"
            setattr(arguments, option.attribute, value)


def _number(name: str, text: str, expected: str, lowest: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = lowest - 1
    if number < lowest:
        raise ConfigError(f"holdfast run: {name} {text}: expected {expected}")
    return number


def _seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ConfigError(f"holdfast run: {name} {text}: expected a number of seconds from 0")
    return seconds
