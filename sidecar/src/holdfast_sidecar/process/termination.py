"""The report of a container that runs one command and ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from holdfast_core.errors import HoldfastError

_MESSAGE_CHARACTERS = 2000
"""The kubelet keeps 4 KiB of a report."""


def write_report(text: str, path: Path) -> bool:
    """Write a report to the file that the kubelet reads, and to stdout. Return whether the file was written.

    Args:
        text: The report, one line.
        path: The termination log of the container.
    """
    sys.stdout.write(text + "\n")
    try:
        path.write_text(text)
    except OSError as error:
        sys.stderr.write(f"writing the report to {path}: {error}\n")
        return False
    return True


def write_failure(error: HoldfastError, path: Path) -> bool:
    """Write the report of a command that failed, as `write_report` does."""
    message = str(error).encode("ascii", "replace").decode()[:_MESSAGE_CHARACTERS]
    return write_report(json.dumps({"error": type(error).__name__, "message": message}), path)
