"""The operator process: kopf runs its life, from the first settings to an orderly end.

kopf handles the signals, starts the parts of the process by its startup handler, and ends them by its cleanup
handler. It sends no request to the API server, because it cannot hold the copies of our kinds (ADR 0004): the
reflectors of watch/ are the only watch. This is the only module that imports kopf.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import sys
from typing import Any

import kopf

# kopf exports neither this class nor another way to look for no kinds in the cluster.
from kopf._cogs.structs.references import Insights

from holdfast_core import logs
from holdfast_core.clock import SystemClock
from holdfast_core.errors import ConfigError
from holdfast_core.net import use_small_read_buffers
from holdfast_operator.base.metrics import Metrics, PlainPorts
from holdfast_operator.base.settings import Settings
from holdfast_operator.kube.api import KubeAccess, KubeApi, load_access
from holdfast_operator.kube.leadership import Leadership, LeaseName, LeaseThread
from holdfast_operator.loop.controller import Controller


def main() -> None:
    """Run the operator and exit.

    The exit code is 0 after SIGTERM or SIGINT, 1 after a failure (Kubernetes then restarts the container),
    and 2 if a setting is wrong.
    """
    try:
        settings = Settings.from_env()
        access = load_access(settings)
    except ConfigError as error:
        sys.stderr.write(f"holdfast-operator: {error}\n")
        sys.exit(2)
    logs.configure(settings.log_level)
    raise_open_file_limit()
    use_small_read_buffers()
    # The copies of the watches live long. With Python's own thresholds, full garbage collections took a fifth
    # of the processor time of an operator that followed 1,000 jobs.
    gc.set_threshold(50_000, 10, 10)
    sys.exit(asyncio.run(ProcessLife(settings, access).run()))


def raise_open_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit.

    Each job has a long poll with a connection of its own, and some runtimes set a soft limit of 1,024.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class ProcessLife:
    """The life of one operator process. kopf calls `start` and `end`."""

    def __init__(self, settings: Settings, access: KubeAccess) -> None:
        clock = SystemClock()
        metrics = Metrics()
        lease_api = KubeApi(access)
        lease = LeaseName(settings.operator_namespace, settings.lease_name)
        leadership = Leadership(lease_api, lease, settings.pod_name, clock, settings.lease_seconds)
        self._settings = settings
        self._access = access
        self._api = KubeApi(access, leadership.check)
        self._controller = controller = Controller(
            settings, self._api, LeaseThread(leadership, lease_api), clock, metrics
        )
        self._ports = PlainPorts(
            metrics, controller.watch_age_seconds, controller.stalled_watches, clock
        )
        self._work: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._exit_code = 0

    async def run(self) -> int:
        """Run until a signal arrives or the work fails. Return the exit code."""
        registry = kopf.OperatorRegistry()
        # By default kopf keeps the process and calls a handler that has failed again after a minute.
        permanent = kopf.ErrorsMode.PERMANENT
        kopf.on.startup(registry=registry, errors=permanent)(self.start)
        kopf.on.cleanup(registry=registry, errors=permanent)(self.end)
        kopf.on.login(registry=registry)(self._login)
        # kopf looks for kinds that it uses itself, and a process without the API server would end by this.
        nothing = Insights()
        nothing.backbone.selectors.clear()
        await kopf.operator(
            registry=registry,
            insights=nothing,
            clusterwide=True,
            standalone=True,
            # By default kopf uses the name of the Unix user, and uid 65532 of the image has none.
            identity="holdfast",  # type: ignore[arg-type]  # its NewType is private to kopf
            stop_flag=self._stop,
        )
        logs.info("operator ends")
        return self._exit_code

    async def start(self, **_: Any) -> None:
        """Start the work of the process. Its end ends the process, also if a port is in use.

        kopf waits for 5 s at the end if the flag is not set, also after a signal.
        """
        self._work = asyncio.create_task(self._serve())
        self._work.add_done_callback(lambda _: self._stop.set())

    async def _serve(self) -> None:
        settings = self._settings
        await self._api.start()
        await self._ports.start("0.0.0.0", settings.metrics_port, settings.health_port)
        logs.info(
            "operator starts", server=self._access.server, namespaces=settings.watch_namespaces
        )
        await self._controller.run()

    async def end(self, **_: Any) -> None:
        """End the work, which gives the lease back, and close the ports.

        If the work has ended by itself, this is the reason of the end and a failure.
        """
        assert self._work is not None, "kopf calls end only after start"
        if self._work.done():
            error = self._work.exception() or RuntimeError("no part of it has failed")
            logs.failure("the operator's work ended", error)
            self._exit_code = 1
        else:
            logs.info("a signal ends the operator")
            self._work.cancel()
        await asyncio.gather(self._work, return_exceptions=True)
        await self._api.close()
        await self._ports.close()

    async def _login(self, **_: Any) -> kopf.ConnectionInfo:
        """Return the server without credentials. kopf warns at each start if no handler answers."""
        return kopf.ConnectionInfo(server=self._access.server)


if __name__ == "__main__":
    main()
