"""The program starts quickly, names its verbs, refuses the former ones, and completes commands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.hang import HANG_SECONDS

from holdfast_cli.errors import Exit
from holdfast_cli.program import VERBS, cli, run

HEAVY = ("kubernetes", "numpy", "pydantic", "rich", "torch", "yaml")
_COUNT = f"print(*sorted(m for m in {HEAVY!r} if m in sys.modules), file=sys.stderr)"


def start(program: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a new interpreter, which prints on stderr the heavy packages that it has imported.

    Completion waits for kubectl as long as a busy machine may need.
    """
    code = (
        "import atexit, sys\n"
        f"atexit.register(lambda: {_COUNT})\n"
        "from holdfast_cli import completion\n"
        f"completion.TIMEOUT_SECONDS = {HANG_SECONDS}\n"
        "from holdfast_cli.program import run\n"
        f"sys.exit(run(sys.argv[1:], {program!r}))\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )


@pytest.mark.parametrize("program", ["holdfast", "kubectl holdfast"])
def test_help_names_every_verb_and_imports_nothing_that_is_slow(program: str) -> None:
    ended = start(program, "--help")
    assert ended.returncode == 0
    assert ended.stderr.split() == []
    assert ended.stdout.startswith(f"Usage: {program} ")
    listed = {line.split()[0] for line in ended.stdout.splitlines() if line.startswith("  ")}
    assert listed >= VERBS.keys()
    assert ("run" in listed) is (program == "holdfast")
    assert "Exit codes: 0 success; 1 " in ended.stdout


@pytest.mark.parametrize("name", VERBS)
def test_each_verb_has_a_command_of_its_name_with_help(name: str) -> None:
    command = cli.commands.get(name) or cli.get_command(None, name)  # type: ignore[arg-type]  # unused
    assert command.name == name
    assert command.help


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("checkpoints", "it is `kubectl holdfast list` now"),
        ("import-store", "it is `kubectl holdfast import store/NAME` now"),
        ("run", "`holdfast run --help`"),
    ],
)
def test_a_verb_that_is_elsewhere_is_refused_with_its_name(
    word: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([word, "x"], "kubectl holdfast") == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["save", "./ckpt"], "save does not apply to the folder ./ckpt"),
        (["status", "s3://bucket/x"], "status does not apply to the store s3://bucket/x"),
        (["import", "job/x"], "import does not apply to job/x: expected store/NAME"),
        (["import", "./x"], "needs --format and --to"),
        (["import", "store/main", "--to", "x"], "omit them with store/NAME"),
        (["verify", ".", "--world-size", "2"], "add --restore"),
        (["list", "store/main"], "list does not apply to store/main"),
        (["logs", "./ckpt"], "logs does not apply to the folder ./ckpt"),
        (["logs", "gpt", "--since", "1h", "--round", "2"], "omit one of them"),
        (["logs", "gpt", "--step", "9..3"], "the first step is above the last"),
        (["logs", "gpt", "--since", "soon"], "duration 'soon' cannot be read"),
        (["logs", "gpt@40"], "logs does not take a step"),
        (["events", "s3://bucket/x"], "events does not apply to the store s3://bucket/x"),
        (["events", "store/main"], "expected job/NAME"),
        (["doctor", "./ckpt"], "expected job/NAME or store/NAME. `verify` reads"),
        (["doctor", "checkpoint/x"], "doctor does not apply to checkpoint/x"),
        (["top", "--watch", "-o", "json"], "--watch shows tables only"),
        (["inject", "./ckpt", "--kill", "rank=0"], "inject does not apply to the folder"),
        (["inject", "gpt"], "name one fault"),
        (["inject", "gpt", "--kill", "rank=0", "--delete-pod", "1"], "name one fault"),
        (["inject", "gpt", "--kill", "node=1"], "expected rank=N or pod=N"),
        (["inject", "gpt", "--hang", "pod=1"], "expected rank=N"),
    ],
)
def test_what_a_verb_does_not_take_is_wrong_usage(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words, "kubectl holdfast") == 2
    assert said in capsys.readouterr().err


# --------------------------------------------------------------------------- completion


@pytest.fixture
def kubectl(tmp_path: Path) -> Path:
    """A folder with a kubectl that lists one object of each kind."""
    path = tmp_path / "bin" / "kubectl"
    path.parent.mkdir()
    path.write_text(
        "#!/bin/sh\n"
        'echo "$@" >> "$KUBECTL_LOG"\n'
        'case "$*" in *checkpointstore*) echo checkpointstore.holdfast.dev/main; exit;; esac\n'
        'case "$*" in *trainingjob*) echo trainingjob.holdfast.dev/gpt;; esac\n'
        "echo checkpoint.holdfast.dev/gpt-s40-r0\n"
        "echo error: no connection >&2\n"
    )
    path.chmod(0o755)
    return path.parent


def completed(
    kubectl: Path, tmp_path: Path, *words: str, program: str = "kubectl holdfast"
) -> list[str]:
    """Return what bash would offer for the last word."""
    name = f"_{program.upper().replace(' ', '_')}_COMPLETE"
    ended = start(
        program,
        **{name: "bash_complete"},
        COMP_WORDS=" ".join(["holdfast", *words]),
        COMP_CWORD=str(len(words)),
        PATH=f"{kubectl}:/usr/bin:/bin",
        KUBECTL_LOG=str(tmp_path / "log"),
    )
    assert ended.returncode == 0
    assert ended.stderr.split() == [], "a shell shows no errors, and waits for no import"
    return ended.stdout.split()


def test_a_verb_is_completed(kubectl: Path, tmp_path: Path) -> None:
    assert completed(kubectl, tmp_path, "re") == ["plain,restart", "plain,restore"]
    assert "plain,--namespace" in completed(kubectl, tmp_path, "status", "--na")
    assert "plain,--watch" in completed(kubectl, tmp_path, "status", "gpt", "--w")


def test_a_target_is_completed_by_names_of_the_cluster(kubectl: Path, tmp_path: Path) -> None:
    found = completed(kubectl, tmp_path, "-n", "team-a", "verify", "")
    assert found == ["plain,gpt", "plain,checkpoint/gpt-s40-r0"]
    log = (tmp_path / "log").read_text()
    assert "--namespace=team-a" in log and f"--request-timeout={HANG_SECONDS:g}s" in log
    assert completed(kubectl, tmp_path, "verify", "checkpoint/g") == ["plain,checkpoint/gpt-s40-r0"]
    assert completed(kubectl, tmp_path, "import", "st") == ["plain,store/main"]
    assert completed(kubectl, tmp_path, "merge", "a", "-n", "team-b", "gp") == ["plain,gpt"]


def test_a_path_is_completed_by_the_shell(kubectl: Path, tmp_path: Path) -> None:
    assert completed(kubectl, tmp_path, "verify", "./ck") == ["file,./ck"]
    found = completed(kubectl, tmp_path, "verify", "g", program="holdfast")
    assert found == ["file,g", "plain,gpt"]
    assert (tmp_path / "log").exists()


def test_without_kubectl_there_are_no_names_and_no_error(tmp_path: Path) -> None:
    assert completed(tmp_path / "none", tmp_path, "status", "") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize("program", ["holdfast", "kubectl holdfast"])
def test_each_shell_has_a_script(
    shell: str, program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["completion", shell], program) == 0  # type: ignore[arg-type]  # a literal
    out = capsys.readouterr().out
    assert program.replace(" ", "-") in out
    assert f"_{program.upper().replace(' ', '_')}_COMPLETE" in out


@pytest.mark.fault("The reader of a result ends before it has read it, as `head` does")
def test_a_reader_that_has_ended_gets_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as closed:
        ended = subprocess.run(
            [sys.executable, "-m", "holdfast_cli", "completion", "bash"],
            stdout=closed,
            stderr=subprocess.PIPE,
            timeout=HANG_SECONDS,
            check=False,
        )
    assert (ended.returncode, ended.stderr) == (Exit.FAILED, b"")


@pytest.mark.fault(
    "A path of the command line cannot be looked at, as in a directory of another user"
)
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["list", f"./{'x' * 300}"], Exit.FAILED, "File name too long"),
        (["import", f"./{'x' * 300}", "--format", "hf", "--to", "y"], Exit.FAILED, "too long"),
        (["list", "~no-such-user/ckpt"], Exit.MISSING, "there is no folder ~no-such-user/ckpt"),
    ],
)
def test_a_path_that_cannot_be_looked_at_is_an_error_in_one_sentence(
    words: list[str], code: Exit, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words, "holdfast") == code
    assert said in capsys.readouterr().err


def test_a_kubeconfig_that_cannot_be_looked_at_is_named() -> None:
    ended = start("kubectl holdfast", "list", KUBECONFIG="x" * 300)
    assert (ended.returncode, "Traceback" in ended.stderr) == (Exit.FAILED, False)
    assert "no kubeconfig found at xxx" in ended.stderr
