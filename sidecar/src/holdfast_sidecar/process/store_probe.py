"""The command of a store's probe pod."""

from __future__ import annotations

import sys
from pathlib import Path

from holdfast_core.contract import StoreConfig
from holdfast_core.errors import ConfigError
from holdfast_core.store.probe import ProbeReason, ProbeReport, probe
from holdfast_core.store.s3.credentials import FileCredentials


def probe_store(store: str, store_dir: str, report_path: Path) -> int:
    """Probe and leave the report where the kubelet picks it up. 0 if a report was written; what it
    says of the store is in the report."""
    try:
        config = StoreConfig.from_json(store)
        credentials = FileCredentials(store_dir)
        report = probe(config, credentials, ca_file=credentials.ca_file)
    except ConfigError as error:
        report = ProbeReport(False, ProbeReason.CONFIGURATION_INVALID, str(error))
    text = report.to_json()
    sys.stdout.write(text + "\n")
    try:
        report_path.write_text(text)
    except OSError as error:
        sys.stderr.write(f"writing the report to {report_path}: {error}\n")
        return 1
    return 0
