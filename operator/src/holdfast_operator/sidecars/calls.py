"""All calls to sidecars. They run as background tasks and leave their results for the next pass.

1. A pass requests a call. If the same call is under way, or the sidecar has just failed, the request is
   dropped, and the next pass requests the call again. No pass waits for a dead pod.
2. A reply becomes part of the pod's SidecarView, and a changed view adds the job's key to the queue.
3. A sidecar is unreachable after two failures in a row. Any answer, including a refusal, makes it reachable.
4. One long poll per job reads the coordinator's state. Its `since` is the version up to which everything is
   durable in the API. An unexpected error does not end the poll; it is logged once and counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from ssl import SSLContext
from typing import Any, Protocol, TypeVar

from holdfast_core.clock import Clock
from holdfast_core.errors import FormatError, HoldfastError, UnavailableError
from holdfast_core.ids import Digest, JobUid, RestartRound, Worker
from holdfast_core.messages.schema import (
    Certificate,
    CoordinatorState,
    GangRequest,
    Inventory,
    Prune,
    PruneReply,
    Refusal,
    Round,
    Seal,
)
from holdfast_operator.base import logs
from holdfast_operator.model.actions import round_digest
from holdfast_operator.model.job import AckedRound, InventoryView, PodView, Reachable, SidecarView
from holdfast_operator.model.keys import Key
from holdfast_operator.sidecars.allowance import Allowance
from holdfast_operator.sidecars.call_slots import CallSlots, Standing
from holdfast_operator.sidecars.certificates import LEAF_LIFE, RENEW_AT
from holdfast_operator.sidecars.client import (
    LeafOutOfTimeError,
    SidecarClient,
    SidecarRefused,
    Target,
)
from holdfast_operator.sidecars.manifests import Manifests

T = TypeVar("T")

UNREACHABLE_AFTER = 2
"""Failures in a row after which a sidecar counts as unreachable."""
LOG_AGAIN_SECONDS = 60.0
"""Shortest time between two log lines about one pod that alternates between answers and silence."""
MAX_LOG_CHARACTERS = 300
"""Longest log line, in characters, that repeats text of a sidecar."""
SILENT_AFTER = 3
"""Failures in a row after which calls to a pod use the few slots of silent pods (Standing.SILENT)."""
STARTING_SECONDS = 15.0
"""Silence of a sidecar that never answered after which it is logged. It may still be starting before."""
FIRST_BACKOFF_SECONDS = 0.25
MAX_BACKOFF_SECONDS = 1.0
"""Longest pause in the first minute of a silence. It then grows with the silence, to LONG_BACKOFF_SECONDS."""
LONG_BACKOFF_SECONDS = 10.0
PROBE_SECONDS = 2.0
"""Time between inventory calls to a sidecar that is not known to be reachable or is on a suspect node."""
KNOWLEDGE_SECONDS = 1800.0
"""Time without any call after which a reachable sidecar is asked for its inventory."""
POLL_AGAIN_SECONDS = 0.2
"""Longest wait of the long poll for the pass that acts on the state just received."""
POLL_BURST = 20
POLL_SECONDS_EACH = 0.25
"""Seconds per poll after a burst of POLL_BURST. Each answer may cause a pass over the job, so a coordinator
whose state changes all the time must not take the operator's time from other jobs."""
POLL_SECONDS_PER_ENTRY = 200e-6
"""Pause after a poll for each entry of the state. Parsing and comparing an entry costs about 10 us, so a
coordinator that always answers immediately uses at most a twentieth of one processor."""
RENEW_AGAIN = timedelta(minutes=1)
"""Shortest time between two renewals of one sidecar. A sidecar that accepted a new leaf and still shows an
expired one counts as failed until then."""
REQUEST_AGAIN_SECONDS = 1.0
URGENT = frozenset({"seal", "round"})
"""Names of calls that a recovery waits for. They go before all other calls (call_slots)."""


class Identity(Protocol):
    """Source of the operator's client certificates and of new leaves for sidecars.

    certificates.Certificates implements it.
    """

    async def client(self, job_uid: JobUid) -> SSLContext: ...

    async def renewal_client(self, job_uid: JobUid) -> SSLContext:
        """Return a context that accepts an expired server leaf. Use it only to send a new leaf."""
        ...

    async def renewed(self, job_uid: JobUid, pod: str) -> Certificate: ...


@dataclass(slots=True)
class _Pod:
    """State of the calls to one pod's sidecar. Times are monotonic unless stated otherwise."""

    view: SidecarView
    target: Target
    manifests: Manifests
    """The manifests of the pod's job."""
    answered: bool = False
    """Whether the sidecar has answered this operator process at least once."""
    answered_at: float | None = None
    """When it last answered. This is not in `view`, because a changed view requests a pass."""
    failures: int = 0
    """Failures in a row."""
    failing_since: float | None = None
    """When the first of these failures was recorded."""
    logged_at: float | None = None
    """When its silence was last logged."""
    not_before: float = 0.0
    """Earliest time of the next call, set by the back-off after a failure."""
    called_at: float | None = None
    """When the last call got its slot. None makes an inventory call due."""
    renewed_at: datetime | None = None
    """When it last accepted a new leaf of this operator process (UTC)."""
    renewing: asyncio.Lock = field(default_factory=asyncio.Lock)
    under_way: set[str] = field(default_factory=set)
    starts: tuple[bool, int] = (False, 0)
    """Whether the sidecar has started, and its restart count. A change ends the back-off."""


@dataclass(slots=True)
class _Job:
    """State of the calls to one job's sidecars."""

    key: Key
    uid: JobUid
    manifests: Manifests
    pods: dict[str, _Pod] = field(default_factory=dict)
    """By uid of the pod."""
    round: RestartRound | None = None
    coordinator_pod: str | None = None
    """Identity of the polled sidecar: uid, IP and restarts of its pod, and the round."""
    poll: asyncio.Task[None] | None = None
    state: CoordinatorState | None = None
    since: int = 0
    """Version of the coordinator's state up to which everything is durable in the API. A failed poll and a
    new coordinator reset it to 0, so that the next poll returns the state without waiting for a change."""
    acted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when `since` grows."""
    pruned: dict[str, PruneReply] = field(default_factory=dict)
    """Replies to prunes that no pass has read yet, by name of the Checkpoint."""
    requests: set[str] = field(default_factory=set)
    """Names of the requests that are being sent."""
    polls: Allowance = field(default_factory=lambda: Allowance(POLL_BURST, POLL_SECONDS_EACH))


class Sidecars:
    """Calls to the sidecars of all jobs, by job uid. Call `follow` before each pass over a job."""

    def __init__(
        self,
        client: SidecarClient,
        identity: Identity,
        clock: Clock,
        enqueue: Callable[[Key], None],
        count_error: Callable[[str], None],
    ) -> None:
        self._client = client
        self._identity = identity
        self._clock = clock
        self._enqueue = enqueue
        self._count_error = count_error
        self._jobs: dict[JobUid, _Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = CallSlots()
        self._log_changes = logs.Changed()

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
    ) -> None:
        """Update the job's pods and start the calls that no decision requests.

        These calls are the first inventory, repeated inventories of silent sidecars, and renewals of leaves.

        Args:
            pods: The job's current pods. Those without an address are ignored.
            coordinator: Worker whose sidecar is polled for its state; None to poll none.
            suspects: Names of nodes whose sidecars are called although they answered lately.
            ranks: Number of ranks of the job, which bounds the size of replies.
        """
        job = self._jobs.setdefault(uid, _Job(key, uid, Manifests(uid)))
        job.round = round_
        present: dict[str, PodView] = {p.uid: p for p in pods if p.ip is not None}
        for gone in [u for u in job.pods if u not in present]:
            del job.pods[gone]
        for pod_uid, pod in present.items():
            target = Target(uid, pod.name, pod.ip or "", ranks)
            known = job.pods.get(pod_uid)
            if known is None:
                job.pods[pod_uid] = _Pod(SidecarView(pod.worker, pod_uid), target, job.manifests)
            elif known.target != target:
                known.target = target
                known.not_before = 0.0
            starts = (pod.sidecar_started, pod.sidecar_restarts)
            if job.pods[pod_uid].starts != starts:
                job.pods[pod_uid].starts = starts
                job.pods[pod_uid].not_before = 0.0
        if not any(p.under_way for p in job.pods.values()):  # a call under way may need the others
            job.manifests.keep(_listed(job))
        self._follow_coordinator(job, present, coordinator)
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

    def seal(self, uid: JobUid, pod_uid: str, round_: RestartRound) -> None:
        """Start a SEAL of the pod's sidecar, unless one is under way or its back-off has not ended."""

        async def call(context: SSLContext, pod: _Pod) -> None:
            reply = await self._client.seal(context, pod.target, Seal(round_))
            inventory = await self._with_manifests(context, pod, reply)
            self._alive(pod)
            pod.view = replace(pod.view, inventory=inventory, sealed_round=inventory.round)

        self._start(uid, pod_uid, "seal", call)

    def send_round(self, uid: JobUid, pod_uid: str, message: Round, sidecar_restarts: int) -> None:
        """Start a ROUND to the pod's sidecar, unless one is under way or its back-off has not ended.

        Args:
            sidecar_restarts: Restart count of the container, recorded with the acknowledgement. A restarted
                sidecar needs ROUND again.
        """

        async def call(context: SSLContext, pod: _Pod) -> None:
            reply = await self._client.round(context, pod.target, message)
            inventory = await self._with_manifests(context, pod, reply)
            self._alive(pod)
            pod.view = replace(
                pod.view,
                inventory=inventory,
                acked=AckedRound(
                    message.round, message.version, round_digest(message), sidecar_restarts
                ),
            )

        self._start(uid, pod_uid, "round", call)

    def request(self, uid: JobUid, pod: str, path: str, message: GangRequest) -> None:
        """Send a request to a pod's sidecar in the background.

        It is repeated until the sidecar accepts it or refuses it with another code than BUSY, until the
        pod is gone, or until another round begins.
        """
        job = self._jobs.get(uid)
        name = f"{path} {message.token} {message.round}"
        if job is None or name in job.requests:
            return
        job.requests.add(name)
        self._spawn(self._ask(job, pod, path, message, name))

    def prune(self, uid: JobUid, pod: str, name: str, message: Prune) -> PruneReply:
        """Return the reply of an earlier call for this Checkpoint, or start a call.

        Args:
            name: Name of the Checkpoint.

        Returns:
            The reply, once; an empty one while no call has ended.
        """
        job = self._jobs.get(uid)
        if job is None:
            return PruneReply(())
        landed = job.pruned.pop(name, None)
        if landed is not None:
            return landed
        known = next((p for p in job.pods.values() if p.target.pod == pod), None)
        if known is not None:

            async def call(context: SSLContext, asked: _Pod) -> None:
                job.pruned[name] = await self._client.prune(context, asked.target, message)
                self._alive(asked)

            self._start(uid, known.view.pod_uid, f"prune {name}", call)
        return PruneReply(())

    # ------------------------------------------------------------------ calls

    def _look_after(self, job: _Job, known: _Pod, pod: PodView, suspects: frozenset[str]) -> None:
        now = self._clock.monotonic()
        age = None if known.called_at is None else now - known.called_at
        silent = known.view.reachable is not Reachable.YES or pod.node in suspects
        due = age is None or (silent and age >= PROBE_SECONDS) or age >= KNOWLEDGE_SECONDS
        if due and not known.under_way and (pod.sidecar_started or age is None or silent):
            self._start(job.uid, pod.uid, "inventory", self._inventory)
        ends_at = known.target.leaf.ends_at
        if (
            ends_at is not None
            and ends_at - self._clock.utc_now() < LEAF_LIFE * (1 - RENEW_AT)
            and not self._just_renewed(known)
        ):
            self._renew(job.uid, known)

    async def _inventory(self, context: SSLContext, pod: _Pod) -> None:
        reply = await self._client.inventory(context, pod.target)
        inventory = await self._with_manifests(context, pod, reply)
        self._alive(pod)
        pod.view = replace(pod.view, inventory=inventory)

    async def _with_manifests(
        self, context: SSLContext, pod: _Pod, inventory: Inventory
    ) -> InventoryView:
        fetch = partial(self._client.manifest, context, pod.target)
        return await pod.manifests.view(inventory, pod.target.ranks, fetch)

    def _renew(self, uid: JobUid, known: _Pod) -> None:
        async def call(context: SSLContext, pod: _Pod) -> None:
            await self._send_leaf(uid, pod)
            self._alive(pod)

        self._start(uid, known.view.pod_uid, "certificate", call)

    def _just_renewed(self, pod: _Pod) -> bool:
        renewed_at = pod.renewed_at
        return renewed_at is not None and abs(self._clock.utc_now() - renewed_at) < RENEW_AGAIN

    async def _send_leaf(self, uid: JobUid, pod: _Pod) -> None:
        """Send the sidecar a new leaf. Its present leaf may be expired."""
        context = await self._identity.renewal_client(uid)
        message = await self._identity.renewed(uid, pod.target.pod)
        await self._client.certificate(context, pod.target, message)
        pod.renewed_at = self._clock.utc_now()
        pod.target.leaf.ends_at = None  # the next connection shows the new leaf
        logs.info("certificate renewed", pod=pod.target.pod)

    async def _call(self, uid: JobUid, pod: _Pod, call: Callable[[SSLContext], Awaitable[T]]) -> T:
        """Call a sidecar. If its leaf has expired, send a new one and repeat the call.

        The operator is responsible for renewing leaves in time, so an expired one is not a failure of the
        pod.
        """
        renewed_at = pod.renewed_at
        try:
            return await call(await self._identity.client(uid))
        except LeafOutOfTimeError:
            if self._just_renewed(pod):
                raise  # the sidecar accepted a new leaf but does not show it
            async with pod.renewing:
                if pod.renewed_at == renewed_at:  # no other call has renewed the leaf meanwhile
                    await self._send_leaf(uid, pod)
        return await call(await self._identity.client(uid))

    def _start(
        self,
        uid: JobUid,
        pod_uid: str,
        name: str,
        call: Callable[[SSLContext, _Pod], Awaitable[None]],
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
        job: _Job,
        pod: _Pod,
        name: str,
        call: Callable[[SSLContext, _Pod], Awaitable[None]],
    ) -> None:
        before = pod.view
        try:
            await self._attempt(job, pod, name, call)
            if pod.view != before or name.startswith("prune "):
                self._enqueue(job.key)
        except Exception as error:  # noqa: BLE001 - the next pass repeats the call
            self._unexpected(f"sending {name} to the sidecar of pod {pod.target.pod}", error)
            self._hold_off(pod)
        finally:
            pod.under_way.discard(name)

    async def _attempt(
        self,
        job: _Job,
        pod: _Pod,
        name: str,
        call: Callable[[SSLContext, _Pod], Awaitable[None]],
    ) -> None:
        try:
            async with self._slots.hold(job.uid, _standing(pod), urgent=name in URGENT):
                pod.called_at = self._clock.monotonic()
                await self._call(job.uid, pod, lambda context: call(context, pod))
        except SidecarRefused as refusal:
            await self._refused(job, pod, name, refusal)
        except UnavailableError as error:
            self._failed(pod, error)
        except FormatError as error:
            self._failed(pod, error)
        except HoldfastError as error:  # the authority cannot be read; not a failure of the pod
            self._log_changes.warning(
                f"identity {job.uid}", (f"cannot get a certificate for calls to sidecars: {error}")
            )
            self._hold_off(pod)

    async def _refused(self, job: _Job, pod: _Pod, name: str, refusal: SidecarRefused) -> None:
        """Record a refusal, which counts as an answer.

        A refusal of STALE_ROUND sets the round for which the sidecar is sealed. After a refused ROUND, the
        sidecar's inventory is read.
        """
        self._alive(pod)
        refused = refusal.refused
        self._log_refusal(f"{pod.target.pod} {name}", f"{name} by {pod.target.pod}", refusal)
        if refused.code is Refusal.STALE_ROUND:
            known = pod.view.sealed_round
            newest = refused.round if known is None else max(known, refused.round)
            pod.view = replace(pod.view, sealed_round=RestartRound(newest))
        if name == "round":
            self._hold_off(pod)
            pod.called_at = None  # before the next ROUND its round and version must be read
            await self._read_inventory(job, pod)

    async def _read_inventory(self, job: _Job, pod: _Pod) -> None:
        try:
            await self._call(job.uid, pod, lambda context: self._inventory(context, pod))
        except SidecarRefused:
            return
        except HoldfastError as error:
            self._failed(pod, error)

    def _log_refusal(self, subject: str, what: str, refusal: SidecarRefused) -> None:
        """Log the refusal once for each code. The sidecar's text may differ each time."""
        if self._log_changes.is_new(subject, refusal.code):
            logs.info(f"{what} was refused: {refusal}"[:MAX_LOG_CHARACTERS])

    def _unexpected(self, what: str, error: Exception) -> None:
        """Count and log an error that only a defect of the operator causes. The caller continues."""
        self._count_error("sidecars")
        if self._log_changes.is_new(f"unexpected {what}", type(error).__name__):
            logs.failure(f"{what}: unexpected error", error)

    def _alive(self, pod: _Pod) -> None:
        if self._log_changes.forget(pod.view.pod_uid):
            logs.info("the sidecar answers again", pod=pod.target.pod)
        pod.answered = True
        pod.answered_at = self._clock.monotonic()
        pod.failures = 0
        pod.failing_since = None
        pod.not_before = 0.0
        pod.view = replace(
            pod.view, reachable=Reachable.YES, unreachable_since=None, unreachable_because=""
        )

    def _failed(self, pod: _Pod, error: HoldfastError) -> None:
        pod.failures += 1
        if pod.failing_since is None:
            pod.failing_since = self._clock.monotonic()
        self._hold_off(pod)
        if pod.failures >= UNREACHABLE_AFTER:
            now = self._clock.monotonic()
            started = pod.answered or now - pod.failing_since >= STARTING_SECONDS
            if started and (pod.logged_at is None or now - pod.logged_at >= LOG_AGAIN_SECONDS):
                pod.logged_at = now
                self._log_changes.warning_once(pod.view.pod_uid, str(error), pod=pod.target.pod)
            pod.view = replace(
                pod.view,
                reachable=Reachable.NO,
                unreachable_since=pod.failing_since,
                unreachable_because=pod.view.unreachable_because or str(error),
            )

    def _hold_off(self, pod: _Pod) -> None:
        now = self._clock.monotonic()
        silent_seconds = 0.0 if pod.failing_since is None else now - pod.failing_since
        pod.not_before = now + back_off_seconds(pod.failures, silent_seconds)

    async def _ask(self, job: _Job, pod: str, path: str, message: GangRequest, name: str) -> None:
        try:
            while self._jobs.get(job.uid) is job and job.round == message.round:
                known = next((p for p in job.pods.values() if p.target.pod == pod), None)
                if known is None:
                    return
                try:
                    await self._call(
                        job.uid,
                        known,
                        partial(
                            self._client.request, target=known.target, path=path, message=message
                        ),
                    )
                    return
                except SidecarRefused as refusal:
                    if refusal.code is not Refusal.BUSY:
                        self._log_refusal(f"{job.uid} {name}", f"{path} by {pod}", refusal)
                        return
                except HoldfastError as error:
                    text = f"calling {path} failed and is tried again: {error}"
                    self._log_changes.info(f"{job.uid} {name}", text[:MAX_LOG_CHARACTERS])
                except Exception as error:  # noqa: BLE001 - the loop repeats the call
                    self._unexpected(f"calling {path} of the sidecar of pod {pod}", error)
                await self._clock.sleep(REQUEST_AGAIN_SECONDS)
        finally:
            job.requests.discard(name)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------------ the coordinator's state

    def _follow_coordinator(
        self, job: _Job, present: dict[str, PodView], coordinator: Worker | None
    ) -> None:
        pod = next((p for p in present.values() if p.worker == coordinator and p.alive), None)
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
        if job.state is not None and job.state.round != job.round:
            job.state = None
        if wanted is not None and pod is not None:
            job.poll = asyncio.create_task(self._poll(job, pod.uid))

    async def _poll(self, job: _Job, pod_uid: str) -> None:
        """Poll the coordinator's state until cancelled or the pod is gone.

        _follow_coordinator cancels the poll when the coordinator, its address, its restarts or the round
        change.
        """
        failures = 0
        while True:
            pod = job.pods.get(pod_uid)
            if pod is None:
                return
            try:
                answered = await self._poll_once(job, pod)
            except Exception as error:  # noqa: BLE001 - a job without its poll makes no progress
                self._unexpected(f"polling coordinator {pod.target.pod}", error)
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

    async def _poll_once(self, job: _Job, pod: _Pod) -> bool:
        """Poll once. If a state was received, store it, wait for its pass, and return True."""
        job.acted.clear()
        try:
            state = await self._call(
                job.uid,
                pod,
                partial(self._client.state, target=pod.target, since=job.since),
            )
        except SidecarRefused as refusal:
            self._alive(pod)
            self._log_refusal(f"poll {job.uid}", f"the state request by {pod.target.pod}", refusal)
            return False
        except HoldfastError as error:
            before = pod.view
            self._failed(pod, error)
            job.since = 0
            if pod.view != before:
                self._enqueue(job.key)
            return False
        self._alive(pod)
        self._log_changes.forget(f"poll {job.uid}")
        if state != job.state:
            job.state = state
            self._enqueue(job.key)
        await self._until_acted(job, state.version)
        wait = job.polls.wait_seconds(self._clock.monotonic())
        await self._clock.sleep(max(wait, _entries(state) * POLL_SECONDS_PER_ENTRY))
        return True

    async def _until_acted(self, job: _Job, version: int) -> None:
        """Wait until a pass has acted on this version, at most POLL_AGAIN_SECONDS.

        The next poll then sends the version as `since`. With an older `since` the sidecar would answer
        immediately with the same state.
        """
        try:
            async with asyncio.timeout(POLL_AGAIN_SECONDS):
                while job.since < version:
                    job.acted.clear()
                    await job.acted.wait()
        except TimeoutError:
            return


def back_off_seconds(failures: int, silent_seconds: float) -> float:
    """Return the pause before the next call.

    Args:
        failures: Failures in a row.
        silent_seconds: Time since the first of them.
    """
    longest = min(max(MAX_BACKOFF_SECONDS, silent_seconds / 60), LONG_BACKOFF_SECONDS)
    return float(min(FIRST_BACKOFF_SECONDS * 2.0 ** min(max(failures - 1, 0), 8), longest))


def _standing(pod: _Pod) -> Standing:
    if pod.failures >= SILENT_AFTER:
        return Standing.SILENT
    return Standing.ANSWERS if pod.answered and not pod.failures else Standing.UNKNOWN


def _listed(job: _Job) -> set[Digest]:
    """Return the digests of all manifests that the job's sidecars list."""
    inventories = (p.view.inventory for p in job.pods.values())
    return {m.manifest for i in inventories if i is not None for m in i.manifests}


def _entries(state: CoordinatorState) -> int:
    lists = (state.steps, state.dead, state.progress, state.tiers, state.failures)
    return sum(len(entries) for entries in lists)
