"""The command that the probe pod of an object store runs."""

from __future__ import annotations

from pathlib import Path

from holdfast_core.contract import StoreConfig
from holdfast_core.errors import ConfigError
from holdfast_core.store.access import access_in_pod
from holdfast_core.store.probe import ProbeReason, ProbeReport
from holdfast_sidecar.process.store_command import write_report


def probe_store(store: str, store_dir: str, report_path: Path) -> int:
    """Probe the object store and write the report to the file that the kubelet reads.

    Args:
        store: `StoreConfig` as JSON.
        store_dir: Directory with the credentials.
        report_path: The termination log of the container.

    Returns:
        0 if the report was written, whether or not the store is usable; else 1.
    """
    try:
        report = access_in_pod(StoreConfig.from_json(store), store_dir).probe()
    except ConfigError as error:
        report = ProbeReport(False, ProbeReason.CONFIGURATION_INVALID, str(error))
    report = report or ProbeReport(True, ProbeReason.AVAILABLE, "a directory needs no probe")
    return 0 if write_report(report.to_json(), report_path) else 1
