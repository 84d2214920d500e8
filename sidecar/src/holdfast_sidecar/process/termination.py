"""The report of a container that runs one command and ends."""

from __future__ import annotations

import sys
from pathlib import Path


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
