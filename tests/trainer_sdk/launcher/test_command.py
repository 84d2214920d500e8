"""Which commands the launcher forks, and which it executes."""

from __future__ import annotations

import sys

import pytest

from holdfast.launcher.options import Command, CommandKind, parse_command
from holdfast_core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            ["python", "train.py", "--lr", "1"],
            Command(CommandKind.SCRIPT, ("train.py", "--lr", "1")),
            id="script",
        ),
        pytest.param(
            ["python3", "-u", "train.py"],
            Command(CommandKind.SCRIPT, ("train.py",)),
            id="unbuffered",
        ),
        pytest.param(
            [sys.executable, "train.py"], Command(CommandKind.SCRIPT, ("train.py",)), id="own-path"
        ),
        pytest.param(
            ["python3", "-m", "pkg.train", "-x"],
            Command(CommandKind.MODULE, ("pkg.train", "-x")),
            id="module",
        ),
        pytest.param(
            ["python", "-c", "pass"],
            Command(CommandKind.EXEC, (sys.executable, "-c", "pass")),
            id="inline-code",
        ),
        pytest.param(
            ["/opt/other/bin/python", "train.py"],
            Command(CommandKind.EXEC, ("/opt/other/bin/python", "train.py")),
            id="another-interpreter",
        ),
        pytest.param(["./train.sh"], Command(CommandKind.EXEC, ("./train.sh",)), id="anything"),
    ],
)
def test_the_command_line_is_parsed(text: list[str], expected: Command) -> None:
    assert parse_command(text) == expected


def test_a_missing_command_is_refused() -> None:
    with pytest.raises(ConfigError, match="no command"):
        parse_command([])
