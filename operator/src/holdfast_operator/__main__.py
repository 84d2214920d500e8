"""Start and orderly end of the operator process: settings, logs, signals, ports, the controller and kopf."""

from __future__ import annotations

import asyncio
import gc
import resource
import signal
import sys

from holdfast_core.clock import Clock, SystemClock
from holdfast_core.errors import ConfigError
from holdfast_core.net.tls import use_small_read_buffers
from holdfast_operator.base import logs
from holdfast_operator.base.metrics import Metrics, PlainPorts
from holdfast_operator.base.settings import Settings
from holdfast_operator.kube.api import KubeAccess, KubeApi, load_access
from holdfast_operator.kube.leadership import Leadership, LeaseName, LeaseThread
from holdfast_operator.loop.controller import Controller
from holdfast_operator.loop.handlers import HandlerInputs, run_kopf


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
    sys.exit(asyncio.run(run(settings, access)))


def raise_open_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit.

    Each job has a long poll with a connection of its own, and some runtimes set a soft limit of 1,024.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def follow_with_kopf(controller: Controller, inputs: HandlerInputs, clock: Clock) -> None:
    """Start kopf when this process leads and has handled all objects.

    kopf lists all objects without pages, and then handles each. Beside the operator's own first LISTs and
    passes this would cost memory and delay the passes.
    """
    await controller.wait_handled()
    await run_kopf(inputs, clock)


async def run(settings: Settings, access: KubeAccess) -> int:
    """Run until a signal arrives or the controller fails. Return the exit code."""
    metrics = Metrics()
    clock = SystemClock()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    lease_api = KubeApi(access)
    lease = LeaseName(settings.operator_namespace, settings.lease_name)
    leadership = Leadership(lease_api, lease, settings.pod_name, clock, settings.lease_seconds)
    api = KubeApi(access, leadership.check)
    await api.start()
    controller = Controller(settings, api, LeaseThread(leadership, lease_api), clock, metrics)
    ports = PlainPorts(metrics, controller.watch_age_seconds, controller.stalled_watches, clock)
    await ports.start("0.0.0.0", settings.metrics_port, settings.health_port)
    logs.info("operator starts", server=access.server, namespaces=settings.watch_namespaces)
    work = asyncio.create_task(controller.run())
    inputs = HandlerInputs(
        settings, access, controller.enqueue_hint, lambda: metrics.unexpected("kopf")
    )
    kopf = asyncio.create_task(follow_with_kopf(controller, inputs, clock))
    signalled = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({work, signalled}, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            logs.info("a signal ends the operator")
            return 0
        error = work.exception() or RuntimeError("the controller stopped without a request")
        logs.failure("controller ended", error)
        return 1
    finally:
        for task in (work, kopf, signalled):
            task.cancel()
        await asyncio.gather(work, kopf, signalled, return_exceptions=True)
        await api.close()
        await ports.close()
        logs.info("operator ends")


if __name__ == "__main__":
    main()
