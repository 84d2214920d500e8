"""The bed of the benchmark: API server, operator, played nodes, and a thousand TrainingJobs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import AsyncExitStack
from http.client import HTTPException
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.chart import NAMESPACE as SYSTEM
from tests.support.operator.operator_account import OperatorAccount, install_crds
from tests.support.operator.operator_bed import GROUP, STORE, training_job
from tests.support.operator.served_sidecar import ServedSidecar
from tests.support.servers.control_plane import ControlPlane, ControlPlaneError

from benchmarks.scale.kubelets import Kubelets, Pod, in_parallel
from benchmarks.scale.leases import LeaseProcess
from benchmarks.scale.operator_process import OperatorProcess
from holdfast_operator.kube.api import ApiError, KubeApi, from_kubeconfig

NAMESPACE = "training"
_JOBS = f"{GROUP}/namespaces/{NAMESPACE}/trainingjobs"
_FEW_JOBS = 50
"""Most jobs that are read one by one."""
_NOT_NOW = (None, 429, 500, 503, 504)
"""Statuses of an API server that is silent or busy. It shares the cores with all others."""


class Bed:
    """A cluster with played nodes, as `async with Bed(...)`.

    Args:
        folder: Folder for logs and certificates.
        jobs: Number of TrainingJobs.
        workers: Workers of each job, one rank each.
        nodes: Number of nodes.
    """

    def __init__(self, folder: Path, jobs: int, workers: int, nodes: int) -> None:
        self._folder = folder
        self.jobs = jobs
        self.workers = workers
        self.nodes = nodes
        self._stack = AsyncExitStack()
        self._names: dict[str, str] = {}
        """Names of the jobs by uid."""
        self.calls: Counter[str] = Counter()
        """Requests to sidecars by path."""
        self.called: dict[str, dict[str, float]] = {}
        """By path and name of the pod: when the operator called it first since `forget_calls`."""

    async def __aenter__(self) -> Self:
        stack = self._stack
        self.plane = stack.enter_context(ControlPlane(keep_logs_in=self._folder))
        await asyncio.to_thread(self._install)
        self.api = KubeApi(from_kubeconfig(self.plane.kubeconfig))
        await self.api.start()
        stack.push_async_callback(self.api.close)
        leases = LeaseProcess(self.plane.kubeconfig)
        leases.start()
        stack.callback(leases.kill)
        self.kubelets = Kubelets(self.api, leases, self.nodes, self.workers, self._called)
        await self.kubelets.create_nodes()
        task = asyncio.create_task(self.kubelets.run())
        stack.push_async_callback(_ended, task)
        self._task = task
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    def _install(self) -> None:
        install_crds(self.plane)
        for name in (SYSTEM, NAMESPACE, "kube-node-lease"):
            if not self.plane.kubectl("get", "namespace", name, "--ignore-not-found"):
                self.plane.create_namespace(name)
        self.account = OperatorAccount(self.plane, self._folder)
        self.account.install()
        self.account.may_watch(NAMESPACE)

    def operator(self, lease: str = "holdfast") -> OperatorProcess:
        process = OperatorProcess(
            self.account, NAMESPACE, self._folder / f"operator-{lease}.log", lease
        )
        self._stack.callback(process.kill)
        return process

    # ------------------------------------------------------------------ jobs

    async def create_jobs(self) -> None:
        await self.api.post(f"{GROUP}/namespaces/{NAMESPACE}/checkpointstores", STORE)

        async def create(number: int) -> None:
            job = training_job(store="main")
            job["metadata"]["name"] = f"gpt-{number:04d}"
            job["spec"]["workers"] = self.workers
            created = await self.api.post(_JOBS, job)
            self._names[created["metadata"]["uid"]] = job["metadata"]["name"]

        await in_parallel(create, range(self.jobs), 8)

    async def statuses(self, chosen: Collection[str] | None = None) -> dict[str, dict[str, Any]]:
        """Return the status of each job, or of the chosen ones, by its uid.

        A few chosen jobs are read one by one. A LIST of 1,000 jobs takes the API server a second of processor
        time, which a measured recovery would miss.
        """
        if chosen is not None and len(chosen) <= _FEW_JOBS:
            jobs = [await self.api.get(f"{_JOBS}/{self._names[uid]}") for uid in chosen]
        else:
            jobs = (await self.api.get(_JOBS))["items"]
        found = {j["metadata"]["uid"]: j.get("status") or {} for j in jobs}
        return {u: s for u, s in found.items() if chosen is None or u in chosen}

    async def trained(
        self, rounds: Callable[[str], int], chosen: Collection[str] | None = None
    ) -> int:
        """Return how many of these jobs train in the round that the function names, or a later one."""
        return sum(
            s.get("restartRound", -1) >= rounds(uid) and _is_running(s)
            for uid, s in (await self.statuses(chosen)).items()
        )

    async def delete_pods(self, options: dict[str, Any]) -> None:
        """Delete all present pods: by one request, and those that it leaves one by one.

        The API server ends a request after a minute, in which it does not delete 10,000 pods on two cores.
        """
        old = list(self.kubelets.pods.values())
        path = f"/api/v1/namespaces/{NAMESPACE}/pods"
        with contextlib.suppress(OSError, HTTPException, ControlPlaneError):
            await asyncio.to_thread(self.plane.request, "DELETE", path, options)

        async def delete(pod: Pod) -> None:
            present = self.kubelets.pods.get(pod.uid)
            if present is not None and not present.deleting:
                await self.delete_pod(pod, options)

        await in_parallel(delete, old)

    async def delete_pod(self, pod: Pod, options: dict[str, Any]) -> float:
        """Delete a pod, or find that it is gone. Return when the request began that succeeded.

        A request that a silent or busy API server does not answer or refuses is repeated.
        """
        while True:
            begun = time.monotonic()
            try:
                await self.api.delete(pod.path, options)
            except ApiError as error:
                if error.status in _NOT_NOW:
                    await asyncio.sleep(1)
                    continue
                if error.status != 404:
                    raise
            return begun

    # ------------------------------------------------------------------ what the operator does

    def forget_calls(self) -> None:
        self.calls.clear()
        self.called.clear()

    def _called(self, sidecar: ServedSidecar, path: str) -> None:
        self.calls[path] += 1
        self.called.setdefault(path, {}).setdefault(sidecar.pod, time.monotonic())

    async def until(
        self, what: str, done: Callable[[], Any], seconds: float, every: float = 0.25
    ) -> float:
        """Wait until the condition is true and return the seconds. Raises TimeoutError with `what`."""
        begun = time.monotonic()
        while True:
            if self._task.done():
                self._task.result()
            if await _is_done(done):
                return time.monotonic() - begun
            if time.monotonic() - begun > seconds:
                raise TimeoutError(f"{what} did not happen within {seconds:.0f} s")
            await asyncio.sleep(every)


async def _is_done(done: Callable[[], Any]) -> bool:
    """Return whether the condition is true. False while the API server asks to repeat a request (429)."""
    try:
        result = done()
        return bool(await result if asyncio.iscoroutine(result) else result)
    except ApiError as error:
        if error.status != 429:
            raise
        return False


def _is_running(status: dict[str, Any]) -> bool:
    return any(
        c["type"] == "Running" and c["status"] == "True" for c in status.get("conditions") or []
    )


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
