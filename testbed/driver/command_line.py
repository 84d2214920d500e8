"""`kubectl holdfast`, as a person of the test bed's cluster runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testbed.config import HANG_SECONDS
from testbed.driver.kube import kubeconfig_path


def run_holdfast(
    namespace: str, *words: str, timeout_seconds: float = HANG_SECONDS
) -> subprocess.CompletedProcess[str]:
    """Run `kubectl holdfast` with these words, and return its exit code and what it has printed."""
    return subprocess.run(
        _command(namespace, words),
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )


@contextmanager
def running_holdfast(
    namespace: str, *words: str, output: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `kubectl holdfast` in the background, and kill it at the end. What it prints is in the file."""
    with output.open("wb") as file:
        process = subprocess.Popen(
            _command(namespace, words), env=_environment(), stdout=file, stderr=subprocess.STDOUT
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _command(namespace: str, words: tuple[str, ...]) -> list[str]:
    return [sys.executable, "-m", "holdfast_cli", "-n", namespace, *words]


def _environment() -> dict[str, str]:
    return {**os.environ, "KUBECONFIG": kubeconfig_path()}
