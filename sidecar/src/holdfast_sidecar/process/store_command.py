"""What the commands share that a pod with the keys of a store runs: the store, and the report at the end."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from holdfast_core.contract import StoreConfig
from holdfast_core.errors import HoldfastError
from holdfast_core.store.access import access_in_pod
from holdfast_core.store.tier import ObjectTier

_MESSAGE_CHARACTERS = 2000
"""The kubelet keeps 4 KiB of a report."""


def open_tier(store: str, store_dir: str) -> ObjectTier:
    """Open a store with the keys that the pod mounts. The caller closes it. Raises HoldfastError.

    Args:
        store: `StoreConfig` as JSON.
        store_dir: Directory with the credentials.
    """
    access = access_in_pod(StoreConfig.from_json(store), store_dir)
    config = access.config
    return ObjectTier(access.open(), config.prefix, readers=config.max_concurrency)


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


def report_on(work: Callable[[], tuple[str, int]], path: Path) -> int:
    """Write what the work reports, or the HoldfastError with which it failed, as `write_report` does.

    Args:
        work: Returns the report and the exit code.

    Returns:
        The exit code. It is 1 after a failure, and if the report could not be written.
    """
    try:
        text, status = work()
    except HoldfastError as error:
        message = str(error).encode("ascii", "replace").decode()[:_MESSAGE_CHARACTERS]
        text, status = json.dumps({"error": type(error).__name__, "message": message}), 1
    return status if write_report(text, path) else 1
