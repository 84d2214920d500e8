"""The command that lists a store in a pod of its own, and deletes what no checkpoint needs."""

from __future__ import annotations

from contextlib import closing
from datetime import timedelta
from pathlib import Path

from holdfast_core.contract import UsageContract
from holdfast_core.store.usage import StoreUsage, sweep, usage_of
from holdfast_sidecar.process.store_command import open_tier, report_on


def store_usage(store: str, store_dir: str, request: str, report_path: Path) -> int:
    """List a store and write the report to the file that the kubelet reads, and to stdout.

    Args:
        store: `StoreConfig` as JSON.
        store_dir: Directory with the credentials.
        request: `UsageContract` as JSON.
        report_path: The termination log of the container.

    Returns:
        0 if the store was listed and the report written, else 1.
    """
    return report_on(lambda: (_listed(store, store_dir, request).to_json(), 0), report_path)


def _listed(store: str, store_dir: str, request: str) -> StoreUsage:
    wanted = UsageContract.from_json(request)
    with closing(open_tier(store, store_dir)) as tier:
        usage = usage_of(tier)
        if wanted.sweep_after_seconds is None:
            return usage
        grace = timedelta(seconds=wanted.sweep_after_seconds)
        return sweep(tier, usage, grace, running=wanted.running, ended=wanted.ended)
