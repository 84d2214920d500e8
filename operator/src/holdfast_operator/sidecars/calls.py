"""All calls to sidecars. They run as background tasks and leave their results for the next pass.

1. A pass requests a call. If the same call is under way, or the sidecar has just failed, the request is
   dropped, and the next pass requests the call again. No pass waits for a dead pod.
2. A reply becomes part of the pod's SidecarView, and a changed view adds the job's key to the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import replace
from functools import partial
from math import inf
from ssl import SSLContext
from typing import Any, assert_never

from holdfast_core.clock import Clock
from holdfast_core.errors import FormatError, HoldfastError, UnavailableError
from holdfast_core.ids import JobUid, RestartRound, Worker, is_spare
from holdfast_core.messages.schema import (
    CoordinatorState,
    FinishCommit,
    GangRequest,
    Inventory,
    Prune,
    Refusal,
    Seal,
)
from holdfast_operator.model.actions import Call, CallPath, OutgoingRound
from holdfast_operator.model.job import AckedRound, PodView, Reachable, SidecarView
from holdfast_operator.model.ownership import Key
from holdfast_operator.sidecars.client import (
    Allowance,
    CallSlots,
    SidecarClient,
    SidecarRefused,
    Target,
)
from holdfast_operator.sidecars.state import (
    MAX_LOG_CHARACTERS,
    Answers,
    CoordinatorPolls,
    JobCalls,
    Manifests,
    PodCalls,
)

PROBE_SECONDS = 2.0
"""Time between inventory calls to a sidecar that is not known to be reachable, or is on a suspect node and
failed to answer its last call."""
SUSPECT_SECONDS = 5.0
"""Time between inventory calls to a sidecar on a suspect node that answers. All nodes of a gang are suspect
while its ranks are dead, and a thousand such gangs would take all of the operator's time."""
SPARE_SECONDS = 10.0
"""Time between inventory calls to a spare that is ready. It has no coordinator that would notice its end."""
KNOWLEDGE_SECONDS = 1800.0
"""Time without any call after which a reachable sidecar is asked for its inventory."""
FIRST_CALLS_PER_SECOND = 25
"""Sidecars that a new process calls for the first time in a second while their coordinators answer for them.
The call reads the inventory."""
REQUEST_AGAIN_SECONDS = 1.0


def _name(path: CallPath) -> str:
    """Return the name of a call, which keeps the same call from being under way twice."""
    return path.rpartition("/")[2]


URGENT = frozenset(map(_name, (CallPath.SEAL, CallPath.FINISH_COMMIT, CallPath.ROUND)))
"""Names of calls that a recovery waits for. They go before all other calls (CallSlots)."""


class Sidecars:
    """Calls to the sidecars of all jobs, by job uid. Call `follow` before each pass over a job.

    Args:
        identity: Returns the TLS context for calls to a job's sidecars. Raises HoldfastError.
    """

    def __init__(
        self,
        client: SidecarClient,
        identity: Callable[[JobUid], Awaitable[SSLContext]],
        clock: Clock,
        enqueue: Callable[[Key], None],
        count_error: Callable[[str], None],
    ) -> None:
        self._client = client
        self._clock = clock
        self._enqueue = enqueue
        self._answers = Answers(clock, count_error)
        self._identity = identity
        self._slots = CallSlots()
        self._polls = CoordinatorPolls(client, identity, self._answers, clock, enqueue, self._slots)
        self._jobs: dict[JobUid, JobCalls] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._first_calls = Allowance(FIRST_CALLS_PER_SECOND, 1 / FIRST_CALLS_PER_SECOND)

    async def close(self) -> None:
        tasks = [*self._tasks, *(j.poll for j in self._jobs.values() if j.poll is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------ what a pass reads

    def views(self, uid: JobUid) -> tuple[SidecarView, ...]:
        job = self._jobs.get(uid)
        return (
            ()
            if job is None
            else tuple(replace(p.view, answered_at=p.answered_at) for p in job.pods.values())
        )

    def coordinator_state(self, uid: JobUid) -> CoordinatorState | None:
        """Return the newest state that a coordinator sent, or None. Its round may be an older one."""
        job = self._jobs.get(uid)
        return None if job is None else job.state

    def all_answer(self, uid: JobUid) -> bool:
        """Return whether all sidecars of the job answered their last call, and report no dead rank."""
        job = self._jobs.get(uid)
        if job is None or (job.state is not None and job.state.dead):
            return False
        return all(p.view.reachable is Reachable.YES for p in job.pods.values())

    # ------------------------------------------------------------------ who there is

    def follow(
        self,
        key: Key,
        uid: JobUid,
        round_: RestartRound | None,
        pods: Iterable[PodView],
        coordinator: Worker | None,
        suspects: frozenset[str],
        *,
        ranks: int,
        gang: frozenset[str],
    ) -> None:
        """Update the job's pods and start the calls that no decision requests.

        These calls are the first inventory, and repeated inventories of silent sidecars.

        Args:
            pods: The job's current pods. Those without an address are ignored.
            coordinator: Worker whose sidecar is polled for its state; None to poll none.
            suspects: Names of nodes whose sidecars are called although they answered lately.
            ranks: Number of ranks of the job, which bounds the size of replies.
            gang: Uids of the pods of a gang that trains according to its status: its coordinator can answer
                for them. Empty for a gang that does not.
        """
        job = self._jobs.setdefault(uid, JobCalls(key, uid, Manifests(uid)))
        job.round = round_
        present: dict[str, PodView] = {p.uid: p for p in pods if p.ip is not None}
        for gone in [u for u in job.pods if u not in present]:
            del job.pods[gone]
        for pod_uid, pod in present.items():
            target = Target(uid, pod.peer_name, pod.ip or "", ranks)
            known = job.pods.get(pod_uid)
            if known is None:
                job.pods[pod_uid] = PodCalls(
                    SidecarView(pod.worker, pod_uid), target, job.manifests
                )
            elif known.view.worker != pod.worker:  # the spare has become a worker
                known.view = replace(known.view, worker=pod.worker)
            elif known.target != target:
                known.target = target
                known.not_before = 0.0
            starts = (pod.sidecar_started, pod.sidecar_restarts)
            if job.pods[pod_uid].starts != starts:
                job.pods[pod_uid].starts = starts
                job.pods[pod_uid].not_before = 0.0
        job.manifests.keep(job.listed)
        self._polls.follow(job, present, coordinator)
        job.gang = gang
        job.awaits_coordinator = bool(gang) and any(
            p.view.worker == coordinator and p.view.reachable is Reachable.UNKNOWN
            for p in job.pods.values()
        )
        for pod_uid, pod in present.items():
            # On a suspect node, terminating pods are called as well: its kubelet may not report their end.
            if pod.alive or pod.node in suspects:
                self._look_after(job, job.pods[pod_uid], pod, suspects)

    def forget(self, uid: JobUid) -> None:
        job = self._jobs.pop(uid, None)
        if job is not None and job.poll is not None:
            job.poll.cancel()

    def acted_on(self, uid: JobUid, version: int | None) -> None:
        """Record that everything up to this version of the coordinator's state is durable in the API."""
        job = self._jobs.get(uid)
        if job is not None and version is not None and version > job.since:
            job.since = version
            job.acted.set()

    # ------------------------------------------------------------------ what a pass asks for

    def call(self, uid: JobUid, call: Call) -> bool:
        """Start a call of a decision, unless it is under way or the back-off of its pod has not ended.

        Returns:
            Whether the call is a prune of checkpoints that an earlier one has deleted, once.
        """
        match call.message:
            case GangRequest() as message:
                self._request(uid, call, message)
            case Prune() as message:
                return self._prune(uid, call, message)
            case Seal() | FinishCommit() | OutgoingRound():
                self._start(uid, call.pod_uid, _name(call.path), partial(self._change, call))
            case _:
                assert_never(call.message)
        return False

    async def _change(self, call: Call, context: SSLContext, pod: PodCalls) -> None:
        """Send SEAL, FinishCommit or ROUND.

        The restart count of the container at the start of ROUND is recorded with the acknowledgement. A
        restarted sidecar needs ROUND again.
        """
        message, (_, restarts) = call.message, pod.starts
        sent = message.body if isinstance(message, OutgoingRound) else message
        reply = await self._client.change(context, pod.target, call.path, sent)
        await self._take(context, pod, reply)
        if isinstance(message, Seal):
            pod.view = replace(pod.view, sealed_round=reply.round)
        if isinstance(message, OutgoingRound):
            pod.round_received.set()
            of = message.message
            acked = AckedRound(of.round, of.version, message.digest, restarts)
            pod.view = replace(pod.view, acked=acked)

    def _request(self, uid: JobUid, call: Call, message: GangRequest) -> None:
        """Send a request to a pod's sidecar in the background.

        It is repeated until the sidecar accepts it or refuses it with another code than BUSY, until the
        pod is gone, or until another round begins.
        """
        job = self._jobs.get(uid)
        name = f"{call.path} {message.token} {message.round}"
        if job is None or name in job.requests:
            return
        job.requests.add(name)
        self._spawn(self._ask(job, call, message, name))

    def _prune(self, uid: JobUid, call: Call, message: Prune) -> bool:
        """Return once whether an earlier call has deleted the same checkpoints, or start a call."""
        job = self._jobs.get(uid)
        if job is None:
            return False
        if message.checkpoints in job.pruned:
            job.pruned.remove(message.checkpoints)
            return True

        async def prune(context: SSLContext, asked: PodCalls) -> None:
            await self._client.prune(context, asked.target, message)
            job.pruned.add(message.checkpoints)
            self._answers.answered(asked)
            self._enqueue(job.key)

        steps = ", ".join(f"step {c.step} of round {c.round}" for c in message.checkpoints)
        self._start(uid, call.pod_uid, f"prune {steps}", prune)
        return False

    # ------------------------------------------------------------------ calls

    def _look_after(
        self, job: JobCalls, known: PodCalls, pod: PodView, suspects: frozenset[str]
    ) -> None:
        # A prune may take a minute, in which a lost node must be found.
        quick = [name for name in known.under_way if not name.startswith("prune ")]
        if not quick and self._is_due(job, known, pod, suspect=pod.node in suspects):
            self._start(job.uid, pod.uid, "inventory", self._inventory)

    def _is_due(self, job: JobCalls, known: PodCalls, pod: PodView, *, suspect: bool) -> bool:
        """Return whether the sidecar's inventory is to be read now."""
        now = self._clock.monotonic()
        age = inf if known.called_at is None else now - known.called_at
        if suspect or (known.called_at is not None and known.view.reachable is not Reachable.YES):
            answers = known.view.reachable is Reachable.YES and not known.failures
            return age >= (SUSPECT_SECONDS if answers else PROBE_SECONDS)
        if known.is_reported:  # a first call may have failed before the coordinator answered
            return age >= PROBE_SECONDS and self._first_calls.try_use(now)
        if known.called_at is None:
            return not (job.awaits_coordinator and pod.uid in job.gang)
        if is_spare(pod.worker) and pod.sidecar_started:
            return age >= (SPARE_SECONDS if known.has_launcher else PROBE_SECONDS)
        return age >= KNOWLEDGE_SECONDS and pod.sidecar_started

    async def _inventory(self, context: SSLContext, pod: PodCalls) -> None:
        await self._take(context, pod, await self._client.inventory(context, pod.target))

    async def _take(self, context: SSLContext, pod: PodCalls, inventory: Inventory) -> None:
        """Fetch the manifests of an inventory that are not known, and record it as the sidecar's answer."""
        fetch = partial(self._client.manifest, context, pod.target)
        pod.wanted = frozenset(inventory.manifests)
        found = await pod.manifests.view(inventory, pod.target.ranks, fetch)
        pod.wanted = frozenset()
        self._answers.answered(pod)
        pod.view = replace(pod.view, inventory=pod.newest(found))

    def _start(
        self,
        uid: JobUid,
        pod_uid: str,
        name: str,
        call: Callable[[SSLContext, PodCalls], Awaitable[None]],
    ) -> None:
        job = self._jobs.get(uid)
        pod = None if job is None else job.pods.get(pod_uid)
        if job is None or pod is None or name in pod.under_way:
            return
        if self._clock.monotonic() < pod.not_before:
            return
        pod.under_way.add(name)
        self._spawn(self._run(job, pod, name, call))

    async def _run(
        self,
        job: JobCalls,
        pod: PodCalls,
        name: str,
        call: Callable[[SSLContext, PodCalls], Awaitable[None]],
    ) -> None:
        before = pod.view
        try:
            await self._attempt(job, pod, name, call)
            if pod.view != before:
                self._enqueue(job.key)
        except Exception as error:  # noqa: BLE001 - the next pass repeats the call
            self._answers.unexpected(
                f"sending {name} to the sidecar of pod {pod.target.pod}", error
            )
            self._answers.back_off(pod)
        finally:
            pod.under_way.discard(name)

    async def _attempt(
        self,
        job: JobCalls,
        pod: PodCalls,
        name: str,
        call: Callable[[SSLContext, PodCalls], Awaitable[None]],
    ) -> None:
        try:
            async with self._slots.hold(job.uid, pod.standing, urgent=name in URGENT):
                pod.called_at = self._clock.monotonic()
                await call(await self._identity(job.uid), pod)
        except SidecarRefused as refusal:
            await self._refused(job, pod, name, refusal)
        except (UnavailableError, FormatError) as error:
            self._answers.failed(pod, error)
        except HoldfastError as error:  # the authority cannot be read; not a failure of the pod
            self._answers.log_changes.warning(
                f"identity {job.uid}", f"cannot get a certificate for calls to sidecars: {error}"
            )
            self._answers.back_off(pod)

    async def _refused(
        self, job: JobCalls, pod: PodCalls, name: str, refusal: SidecarRefused
    ) -> None:
        """Record a refusal, which counts as an answer.

        A refusal of STALE_ROUND sets the round for which the sidecar is sealed. After a refused ROUND, the
        sidecar's inventory is read.
        """
        self._answers.answered(pod)
        refused = refusal.refused
        self._answers.log_refusal(
            f"{pod.target.pod} {name}", f"{name} by {pod.target.pod}", refusal
        )
        if refused.code is Refusal.STALE_ROUND:
            known = pod.view.sealed_round
            newest = refused.round if known is None else max(known, refused.round)
            pod.view = replace(pod.view, sealed_round=RestartRound(newest))
        if name == _name(CallPath.ROUND):
            pod.round_received.set()
            self._answers.back_off(pod)
            pod.called_at = None  # before the next ROUND its round and version must be read
            await self._read_inventory(job, pod)

    async def _read_inventory(self, job: JobCalls, pod: PodCalls) -> None:
        try:
            await self._inventory(await self._identity(job.uid), pod)
        except SidecarRefused:
            return
        except HoldfastError as error:
            self._answers.failed(pod, error)

    async def _ask(self, job: JobCalls, call: Call, message: GangRequest, name: str) -> None:
        pod, path = call.pod, call.path
        try:
            while self._jobs.get(job.uid) is job and job.round == message.round:
                known = job.pods.get(call.pod_uid)
                if known is None:
                    return
                try:
                    context = await self._identity(job.uid)
                    await self._client.request(context, known.target, path, message)
                    return
                except SidecarRefused as refusal:
                    if refusal.code is not Refusal.BUSY:
                        self._answers.log_refusal(f"{job.uid} {name}", f"{path} by {pod}", refusal)
                        return
                except HoldfastError as error:
                    text = f"calling {path} failed and is tried again: {error}"
                    self._answers.log_changes.info(f"{job.uid} {name}", text[:MAX_LOG_CHARACTERS])
                except Exception as error:  # noqa: BLE001 - the loop repeats the call
                    self._answers.unexpected(f"calling {path} of the sidecar of pod {pod}", error)
                await self._clock.sleep(REQUEST_AGAIN_SECONDS)
        finally:
            job.requests.discard(name)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
