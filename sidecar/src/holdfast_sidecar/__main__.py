"""Entry point: the sidecar itself, and the commands that probes and hooks run.

holdfast-sidecar [serve]      run the sidecar (SIGTERM: flush, then exit)
holdfast-sidecar healthz      wait until the pod's socket accepts connections (startupProbe)
holdfast-sidecar pre-stop     wait for a limited time until everything handed over is safe (preStop)
holdfast-sidecar probe-store  probe the object store and write the report for the kubelet
holdfast-sidecar drill        read a whole stored checkpoint and write the report for the kubelet
holdfast-sidecar delete       delete checkpoints of a job in the store and write the report for the kubelet
holdfast-sidecar usage        list the store, delete old orphans, and write the report for the kubelet
holdfast-sidecar list-store   write the checkpoints that the object store has to stdout
"""

from __future__ import annotations

import argparse
import os
import sys

from holdfast_core import logs
from holdfast_core.contract import StoreVerb
from holdfast_core.errors import HoldfastError
from holdfast_sidecar.base.settings import (
    Settings,
    node_dir,
    request_environment,
    shared_dir,
    store_environment,
    termination_log,
)
from holdfast_sidecar.process.hooks import healthz, pre_stop

_WARNINGS = 20
"""Lines per minute of one warning or error. A trainer may cause any number, with requests that fail."""


def _serve() -> int:
    # These imports take half a second, which probes and hooks do not need to spend.
    import asyncio

    from holdfast_core.net import use_small_read_buffers
    from holdfast_sidecar.process.app import serve

    use_small_read_buffers()
    settings = Settings.from_env()
    contract = settings.contract
    logs.configure(
        own_warnings=_WARNINGS,
        job=contract.job,
        namespace=contract.namespace,
        worker=contract.worker,
        pod=contract.pod_name,
    )
    status = asyncio.run(serve(settings))
    if status:
        # A thread that hangs on a disk or a network must not keep the failed process alive.
        logs.flush()
        os._exit(status)
    return status


def _in_store(verb: StoreVerb) -> int:
    """Run the command of a pod that holds the keys of a store."""
    from holdfast_sidecar.process.store_delete import delete_in_store
    from holdfast_sidecar.process.store_drill import drill_store
    from holdfast_sidecar.process.store_list import list_store
    from holdfast_sidecar.process.store_probe import probe_store
    from holdfast_sidecar.process.store_usage import store_usage

    where, report = store_environment(), termination_log()
    if verb is StoreVerb.PROBE:
        return probe_store(*where, report)
    commands = {
        StoreVerb.DELETE: delete_in_store,
        StoreVerb.DRILL: drill_store,
        StoreVerb.LIST: list_store,
        StoreVerb.USAGE: store_usage,
    }
    return commands[verb](*where, request_environment(verb), report)


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code. 2 means a HoldfastError, whose text is on stderr."""
    of_store = {verb.command: verb for verb in StoreVerb}
    parser = argparse.ArgumentParser(prog="holdfast-sidecar")
    parser.add_argument(
        "command",
        nargs="?",
        default="serve",
        choices=("serve", "healthz", "pre-stop", *of_store),
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=25.0,
        help="longest time that healthz or pre-stop waits, in seconds",
    )
    options = parser.parse_args(arguments)
    try:
        match options.command:
            case "healthz":
                return healthz(shared_dir(), timeout_seconds=options.timeout)
            case "pre-stop":
                return pre_stop(node_dir(), timeout_seconds=options.timeout)
            case "serve":
                return _serve()
            case command:
                return _in_store(of_store[command])
    except HoldfastError as error:
        sys.stderr.write(f"holdfast-sidecar {options.command}: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
