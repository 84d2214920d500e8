"""The long poll of each job's coordinator.

Its `since` is the version up to which everything is durable in the API. An unexpected error does not end the
poll; it is logged once and counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from ssl import SSLContext

from holdfast_core.clock import Clock
from holdfast_core.errors import HoldfastError
from holdfast_core.ids import JobUid, Worker
from holdfast_core.messages.schema import CoordinatorState, Refusal
from holdfast_operator.model.installation import routine_seconds
from holdfast_operator.model.job import PodView
from holdfast_operator.model.ownership import Key
from holdfast_operator.sidecars.client import SidecarClient, SidecarRefused
from holdfast_operator.sidecars.limits import CallSlots
from holdfast_operator.sidecars.state import Answers, JobCalls, PodCalls, back_off_seconds

POLL_AGAIN_SECONDS = 0.2
"""Longest wait of the long poll for the pass that acts on the state just received. It doubles with each poll
that no pass has acted on, to MAX_POLL_AGAIN_SECONDS. Otherwise the polls of a thousand jobs would take the
time that their passes wait for."""
MAX_POLL_AGAIN_SECONDS = 5.0
ROUTINE_SECONDS = 1.0
"""If the polls of a job are further apart than this, because there are many jobs, mere progress requests no
pass. The next routine pass reads it."""
FIRST_REFUSED_SECONDS = 0.25
MAX_REFUSED_SECONDS = 30.0
"""Shortest and longest wait after a sidecar has answered that it does not coordinate. It doubles with each
such answer. A ROUND that the sidecar receives from this process ends it."""
POLL_SECONDS_PER_ENTRY = 200e-6
"""Pause after a poll for each entry of the state. Parsing and comparing an entry costs about 10 us, so a
coordinator that always answers immediately uses at most a twentieth of one processor."""


class CoordinatorPolls:
    """Poller of the coordinators of all jobs, one task for each."""

    def __init__(
        self,
        client: SidecarClient,
        context: Callable[[JobUid], Awaitable[SSLContext]],
        answers: Answers,
        clock: Clock,
        enqueue: Callable[[Key], None],
        slots: CallSlots,
    ) -> None:
        self._client = client
        self._context = context
        self._answers = answers
        self._clock = clock
        self._enqueue = enqueue
        self._slots = slots
        self._running = 0
        """Number of jobs that are polled."""

    def follow(
        self, job: JobCalls, present: Mapping[str, PodView], coordinator: Worker | None
    ) -> None:
        """Poll the sidecar of this worker from now on; None to poll none.

        Args:
            job: The state of the job's calls.
            present: The job's pods that have an address, by uid.
            coordinator: The worker.
        """
        # A coordinator that leaves is polled until it has ended: it commits the last step of its gang.
        serving = [p for p in present.values() if p.worker == coordinator and not p.ended]
        pod = min(serving, key=lambda p: not p.alive, default=None)
        if coordinator is None or pod is None or job.round is None:
            wanted = None
        else:
            wanted = f"{pod.uid} {pod.ip} {pod.sidecar_restarts} {job.round}"
        if wanted == job.coordinator_pod and (wanted is None or job.poll is not None):
            return
        if job.poll is not None:
            job.poll.cancel()
            job.poll = None
        job.coordinator_pod = wanted
        job.since = 0
        job.act_seconds = POLL_AGAIN_SECONDS
        job.refused_seconds = FIRST_REFUSED_SECONDS
        if job.state is not None and job.state.round != job.round:
            job.state = None
        if wanted is not None and pod is not None:
            job.poll = asyncio.create_task(self._poll(job, pod.uid))

    async def _poll(self, job: JobCalls, pod_uid: str) -> None:
        self._running += 1
        try:
            await self._poll_until_gone(job, pod_uid)
        finally:
            self._running -= 1

    async def _poll_until_gone(self, job: JobCalls, pod_uid: str) -> None:
        """Poll the coordinator's state until cancelled or the pod is gone.

        `follow` cancels the poll when the coordinator, its address, its restarts or the round change.
        """
        failures = 0
        while True:
            pod = job.pods.get(pod_uid)
            if pod is None:
                return
            try:
                answered = await self._poll_once(job, pod)
            except Exception as error:  # noqa: BLE001 - a job without its poll makes no progress
                self._answers.unexpected(f"polling coordinator {pod.target.pod}", error)
                answered = False
            if answered:
                failures = 0
                continue
            failing = pod.failing_since
            now = self._clock.monotonic()
            failures += 1
            await self._clock.sleep(
                back_off_seconds(failures, 0.0 if failing is None else now - failing)
            )

    async def _poll_once(self, job: JobCalls, pod: PodCalls) -> bool:
        """Poll once. If a state was received, store it, wait for its pass, and return True.

        A sidecar that has not become the coordinator yet counts as well. The first poll of a coordinator,
        and the first after a failure, uses a call slot: a thousand handshakes at once would all exceed their
        time-outs, and coordinators that answer would count as silent. Like SEAL it goes before inventories,
        because a recovery waits for it.
        """
        quiet = routine_seconds(self._running)
        job.acted.clear()
        pod.round_received.clear()
        try:
            context = await self._context(job.uid)
            call = partial(self._client.state, context, pod.target, job.since, quiet)
            if job.since:
                state = await call()
            else:
                async with self._slots.hold(job.uid, pod.standing, urgent=True):
                    state = await call()
        except SidecarRefused as refusal:
            self._answers.answered(pod)
            self._answers.log_refusal(
                f"poll {job.uid}", f"the state request by {pod.target.pod}", refusal
            )
            if refusal.code is not Refusal.NOT_COORDINATOR:
                return False
            await self._until_round_received(job, pod)
            return True
        except HoldfastError as error:
            before = pod.view
            self._answers.failed(pod, error)
            job.since = 0
            if pod.view != before:
                self._enqueue(job.key)
            return False
        self._answers.answered(pod)
        self._answers.log_changes.forget(f"poll {job.uid}")
        older, job.state = job.state, state
        job.take_report(state)
        if quiet > ROUTINE_SECONDS and _is_routine(job, older, state):
            job.since = state.version
        elif state != older:
            self._enqueue(job.key)
        await self._until_acted(job, state.version)
        wait = job.polls.wait_seconds(self._clock.monotonic())
        await self._clock.sleep(max(wait, _entries(state) * POLL_SECONDS_PER_ENTRY))
        return True

    async def _until_round_received(self, job: JobCalls, pod: PodCalls) -> None:
        """Wait until the sidecar has received a ROUND, at most `job.refused_seconds`."""
        try:
            async with asyncio.timeout(job.refused_seconds):
                await pod.round_received.wait()
            job.refused_seconds = FIRST_REFUSED_SECONDS
        except TimeoutError:
            job.refused_seconds = min(2 * job.refused_seconds, MAX_REFUSED_SECONDS)

    async def _until_acted(self, job: JobCalls, version: int) -> None:
        """Wait until a pass has acted on this version, at most `job.act_seconds`.

        The next poll then sends the version as `since`. With an older `since` the sidecar would answer
        immediately with the same state.
        """
        try:
            async with asyncio.timeout(job.act_seconds):
                while job.since < version:
                    job.acted.clear()
                    await job.acted.wait()
            job.act_seconds = POLL_AGAIN_SECONDS
        except TimeoutError:
            job.act_seconds = min(2 * job.act_seconds, MAX_POLL_AGAIN_SECONDS)


def _is_routine(job: JobCalls, before: CoordinatorState | None, state: CoordinatorState) -> bool:
    """Return whether only progress is new in a state, and everything before is durable in the API."""
    if before is None or job.since < before.version:
        return False
    return replace(state, version=before.version, progress=before.progress) == before


def _entries(state: CoordinatorState) -> int:
    lists = (state.steps, state.dead, state.failures)
    return sum(len(entries) for entries in lists)
