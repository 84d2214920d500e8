"""All calls to sidecars, as background tasks whose results wait in a cache for the next pass.

1. A pass asks for a call; if the same is under way, or the sidecar has just failed, nothing happens:
   the pass asks again when it is repeated. No pass ever waits for the network of a dead pod.
2. A reply becomes part of the pod's SidecarView, and the job's key is put on the queue.
3. Two failures in a row make a sidecar unreachable; any answer, also a refusal, makes it reachable.
4. One long poll a job follows the coordinator's state, `since` the version that is durably acted on.
   Whatever an answer does to it, the poll goes on: an unexpected error is logged once and counted.
Decides nothing.
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
from holdfast_core.ids import JobUid, RestartRound, Worker
from holdfast_core.messages.schema import (
    Ask,
    Certificate,
    CoordinatorState,
    Inventory,
    ManifestInfo,
    Prune,
    PruneReply,
    Refusal,
    Round,
    Seal,
)
from holdfast_operator.base import logs
from holdfast_operator.model.actions import round_digest
from holdfast_operator.model.job import AckedRound, PodView, Reachable, SidecarView
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

T = TypeVar("T")

UNREACHABLE_AFTER = 2
SAID_SECONDS = 60.0
"""The least time between two lines about one pod that answers and falls silent again and again."""
MAX_WORDS = 300
"""Characters of one log line that repeats what a sidecar said."""
SILENT_AFTER = 3
"""Failures in a row; from then on the calls to a pod share the few slots of silent ones."""
STARTING_SECONDS = 15.0
"""A sidecar that never answered may still be starting: its silence is not worth a line before."""
FIRST_BACKOFF_SECONDS = 0.25
MAX_BACKOFF_SECONDS = 1.0
"""In the first minute of a silence; afterwards the pause grows with it up to LONG_BACKOFF_SECONDS."""
LONG_BACKOFF_SECONDS = 10.0
PROBE_SECONDS = 2.0
"""Between calls to a sidecar that is unknown, silent or on a silent node."""
KNOWLEDGE_SECONDS = 1800.0
"""A sidecar that nobody called for so long is asked for its inventory."""
POLL_AGAIN_SECONDS = 0.2
POLL_BURST = 20
POLL_SECONDS_EACH = 0.25
"""Each answer to a poll may be a pass over the job: a coordinator that has news all the time must
not take the operator from other jobs."""
POLL_SECONDS_PER_ENTRY = 200e-6
"""Parsing and comparing an entry of the state costs about 10 us: a coordinator that answers at once
each time gets a twentieth of one processor, whatever it sends."""
RENEW_AGAIN = timedelta(minutes=1)
"""A sidecar that took a new leaf and shows an expired one is silent, not renewed with each call."""
ASK_AGAIN_SECONDS = 1.0
URGENT = frozenset({"seal", "round"})
"""Calls that a recovery waits for."""


class Identity(Protocol):
    """What the operator shows to sidecars, and new leaves for them (certificates.Certificates)."""

    async def client(self, job_uid: JobUid) -> SSLContext: ...

    async def renewal_client(self, job_uid: JobUid) -> SSLContext:
        """Accepts a leaf outside of its validity period: to send a new one."""
        ...

    async def renewed(self, job_uid: JobUid, pod: str) -> Certificate: ...


@dataclass(slots=True)
class _Pod:
    """What is known of one pod's sidecar."""

    view: SidecarView
    target: Target
    answered: bool = False
    """Ever, while this operator runs."""
    heard_at: float | None = None
    """When it last answered. Not in `view`, whose changes ask for a pass."""
    failures: int = 0
    failing_since: float | None = None
    said_at: float | None = None
    """When a line about its silence was logged last."""
    not_before: float = 0.0
    """Monotonic: no call before, because the last one failed."""
    called_at: float | None = None
    leaf_from: datetime | None = None
    """When the leaf that it shows was issued (UTC)."""
    renewing: asyncio.Lock = field(default_factory=asyncio.Lock)
    under_way: set[str] = field(default_factory=set)
    starts: tuple[bool, int] = (False, 0)
    """Started, and container restarts: a change is worth a call at once."""


@dataclass(slots=True)
class _Job:
    key: Key
    uid: JobUid
    pods: dict[str, _Pod] = field(default_factory=dict)
    round: RestartRound | None = None
    coordinator: Target | None = None
    coordinator_pod: str | None = None
    poll: asyncio.Task[None] | None = None
    state: CoordinatorState | None = None
    since: int = 0
    acted: asyncio.Event = field(default_factory=asyncio.Event)
    pruned: dict[str, PruneReply] = field(default_factory=dict)
    asks: set[str] = field(default_factory=set)
    polls: Allowance = field(default_factory=lambda: Allowance(POLL_BURST, POLL_SECONDS_EACH))


class Sidecars:
    """By job uid; `follow` says which pods there are, before each pass."""

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
        self._said = logs.Changed()

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
            else tuple(replace(p.view, heard_at=p.heard_at) for p in job.pods.values())
        )

    def coordinator_state(self, uid: JobUid) -> CoordinatorState | None:
        """The newest reply of the coordinator that is followed now."""
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
        """The pods of now, the worker that coordinates, and the nodes whose leases are late.

        `coordinator` None: there is no state to follow. Starts the calls that nobody decides on:
        first contact, re-checks of the silent, renewal of leaves.
        """
        job = self._jobs.setdefault(uid, _Job(key, uid))
        job.round = round_
        present: dict[str, PodView] = {p.uid: p for p in pods if p.ip is not None}
        for gone in [u for u in job.pods if u not in present]:
            del job.pods[gone]
        for pod_uid, pod in present.items():
            target = Target(uid, pod.name, pod.ip or "", ranks)
            known = job.pods.get(pod_uid)
            if known is None:
                job.pods[pod_uid] = _Pod(SidecarView(pod.worker, pod_uid), target)
            elif known.target != target:
                known.target = target
                known.not_before = 0.0
            starts = (pod.sidecar_started, pod.sidecar_restarts)
            if job.pods[pod_uid].starts != starts:
                if starts[1] != job.pods[pod_uid].starts[1]:
                    job.pods[pod_uid].leaf_from = None  # it shows the leaf of its Secret again
                job.pods[pod_uid].starts = starts
                job.pods[pod_uid].not_before = 0.0
        self._follow_coordinator(job, present, coordinator)
        for pod_uid, pod in present.items():
            # Of a silent node a pod on its way out is asked, too: nobody else tells whether it is gone.
            if pod.alive or pod.node in suspects:
                self._look_after(job, job.pods[pod_uid], pod, suspects)

    def forget(self, uid: JobUid) -> None:
        job = self._jobs.pop(uid, None)
        if job is not None and job.poll is not None:
            job.poll.cancel()

    def acted_on(self, uid: JobUid, version: int | None) -> None:
        """Everything up to this version of the coordinator's state is durable in the API."""
        job = self._jobs.get(uid)
        if job is not None and version is not None and version > job.since:
            job.since = version
            job.acted.set()

    # ------------------------------------------------------------------ what a pass asks for

    def seal(self, uid: JobUid, pod_uid: str, round_: RestartRound) -> None:
        async def call(context: SSLContext, pod: _Pod) -> None:
            inventory = await self._client.seal(context, pod.target, Seal(round_))
            inventory = self._shared(uid, inventory)
            self._alive(pod)
            pod.view = replace(pod.view, inventory=inventory, sealed_round=inventory.round)

        self._start(uid, pod_uid, "seal", call)

    def send_round(self, uid: JobUid, pod_uid: str, message: Round, sidecar_restarts: int) -> None:
        async def call(context: SSLContext, pod: _Pod) -> None:
            inventory = await self._client.round(context, pod.target, message)
            inventory = self._shared(uid, inventory)
            self._alive(pod)
            pod.view = replace(
                pod.view,
                inventory=inventory,
                acked=AckedRound(
                    message.round, message.version, round_digest(message), sidecar_restarts
                ),
            )

        self._start(uid, pod_uid, "round", call)

    def ask(self, uid: JobUid, pod: str, path: str, message: Ask) -> None:
        """Repeated until the sidecar takes it, refuses it for good, or the round is another."""
        job = self._jobs.get(uid)
        name = f"{path} {message.token} {message.round}"
        if job is None or name in job.asks:
            return
        job.asks.add(name)
        self._spawn(self._ask(job, pod, path, message, name))

    def prune(self, uid: JobUid, pod: str, name: str, message: Prune) -> PruneReply:
        """The reply of an earlier call for this Checkpoint, or an empty one: it was started."""
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
        leaf_from = known.leaf_from or pod.created_at
        if leaf_from is not None and self._clock.utc_now() - leaf_from > LEAF_LIFE * RENEW_AT:
            self._renew(job.uid, known)

    async def _inventory(self, context: SSLContext, pod: _Pod) -> None:
        inventory = await self._client.inventory(context, pod.target)
        inventory = self._shared(JobUid(pod.target.job_uid), inventory)
        self._alive(pod)
        pod.view = replace(pod.view, inventory=inventory)

    def _shared(self, uid: JobUid, inventory: Inventory) -> Inventory:
        """The inventory with the manifests that other pods listed before: each worker lists all of
        them, and a copy for each worker would take memory by the square of the gang."""
        job = self._jobs.get(uid)
        views = () if job is None else (p.view.inventory for p in job.pods.values())
        known = {_identity(m): m for i in views if i is not None for m in i.manifests}
        same = (known.get(_identity(m)) for m in inventory.manifests)
        shared = (k if k == m else m for k, m in zip(same, inventory.manifests, strict=True))
        return replace(inventory, manifests=tuple(m for m in shared if m is not None))

    def _renew(self, uid: JobUid, known: _Pod) -> None:
        async def call(context: SSLContext, pod: _Pod) -> None:
            await self._send_leaf(uid, pod)
            self._alive(pod)

        self._start(uid, known.view.pod_uid, "certificate", call)

    async def _send_leaf(self, uid: JobUid, pod: _Pod) -> None:
        """Give the sidecar a new leaf, whatever the age of the one that it shows."""
        context = await self._identity.renewal_client(uid)
        message = await self._identity.renewed(uid, pod.target.pod)
        issued = self._clock.utc_now()
        await self._client.certificate(context, pod.target, message)
        pod.leaf_from = issued
        logs.info("certificate renewed", pod=pod.target.pod)

    async def _call(self, uid: JobUid, pod: _Pod, call: Callable[[SSLContext], Awaitable[T]]) -> T:
        """Call a sidecar; one whose leaf has expired gets a new one first and is called again. That
        it was not renewed in time is the operator's doing, so it is no failure of the pod."""
        leaf_from = pod.leaf_from
        try:
            return await call(await self._identity.client(uid))
        except LeafOutOfTimeError:
            if leaf_from is not None and abs(self._clock.utc_now() - leaf_from) < RENEW_AGAIN:
                raise  # it took a new leaf, and does not show it
            async with pod.renewing:
                if pod.leaf_from == leaf_from:  # no other call has renewed it meanwhile
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
        except Exception as error:  # noqa: BLE001 - the next pass tries it again
            self._unexpected(f"{name} to the sidecar of pod {pod.target.pod}", error)
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
        except HoldfastError as error:  # the authority cannot be read: no fault of the pod
            self._said.warning(f"identity {job.uid}", f"no certificate to call with: {error}")
            self._hold_off(pod)

    async def _refused(self, job: _Job, pod: _Pod, name: str, refusal: SidecarRefused) -> None:
        """An answer all the same; where it knows of a newer round, what it holds is asked for."""
        self._alive(pod)
        refused = refusal.refused
        self._say_refusal(f"{pod.target.pod} {name}", f"{name} by {pod.target.pod}", refusal)
        if refused.code is Refusal.STALE_ROUND:
            known = pod.view.sealed_round
            newest = refused.round if known is None else max(known, refused.round)
            pod.view = replace(pod.view, sealed_round=RestartRound(newest))
        if name == "round":
            self._hold_off(pod)
            pod.called_at = None  # not newer, not sealed...: learn its round and version first
            await self._learn(job, pod)

    async def _learn(self, job: _Job, pod: _Pod) -> None:
        try:
            await self._call(job.uid, pod, lambda context: self._inventory(context, pod))
        except SidecarRefused:
            return
        except HoldfastError as error:
            self._failed(pod, error)

    def _say_refusal(self, subject: str, what: str, refusal: SidecarRefused) -> None:
        """Once for each code: the words are the sidecar's, and may differ each time."""
        if self._said.is_new(subject, refusal.code):
            logs.info(f"refused: {what}: {refusal}"[:MAX_WORDS])

    def _unexpected(self, what: str, error: Exception) -> None:
        """A defect of the operator that an answer brought out: it must end no task for good."""
        self._count_error("sidecars")
        if self._said.is_new(f"unexpected {what}", type(error).__name__):
            logs.failure(f"{what} ended with an unexpected error", error)

    def _alive(self, pod: _Pod) -> None:
        if self._said.forget(pod.view.pod_uid):
            logs.info("sidecar answers again", pod=pod.target.pod)
        pod.answered = True
        pod.heard_at = self._clock.monotonic()
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
            if started and (pod.said_at is None or now - pod.said_at >= SAID_SECONDS):
                pod.said_at = now
                self._said.warning_once(pod.view.pod_uid, str(error), pod=pod.target.pod)
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

    async def _ask(self, job: _Job, pod: str, path: str, message: Ask, name: str) -> None:
        try:
            while self._jobs.get(job.uid) is job and job.round == message.round:
                known = next((p for p in job.pods.values() if p.target.pod == pod), None)
                if known is None:
                    return
                try:
                    await self._call(
                        job.uid,
                        known,
                        partial(self._client.ask, target=known.target, path=path, message=message),
                    )
                    return
                except SidecarRefused as refusal:
                    if refusal.code is not Refusal.BUSY:
                        self._say_refusal(f"{job.uid} {name}", f"{path} by {pod}", refusal)
                        return
                except HoldfastError as error:
                    words = f"{path} is tried again: {error}"
                    self._said.info(f"{job.uid} {name}", words[:MAX_WORDS])
                except Exception as error:  # noqa: BLE001 - it is tried again
                    self._unexpected(f"{path} to the sidecar of pod {pod}", error)
                await self._clock.sleep(ASK_AGAIN_SECONDS)
        finally:
            job.asks.discard(name)

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
        """Until cancelled by the next coordinator or round."""
        failures = 0
        while True:
            pod = job.pods.get(pod_uid)
            if pod is None:
                return
            try:
                answered = await self._poll_once(job, pod)
            except Exception as error:  # noqa: BLE001 - without its poll a job is blind for ever
                self._unexpected(f"the poll of coordinator {pod.target.pod}", error)
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
        """True where there is a state, and it was acted on or had its time to be."""
        job.acted.clear()
        try:
            state = await self._call(
                job.uid,
                pod,
                partial(self._client.state, target=pod.target, since=job.since),
            )
        except SidecarRefused as refusal:
            self._alive(pod)
            self._say_refusal(f"poll {job.uid}", f"its state by {pod.target.pod}", refusal)
            return False
        except HoldfastError as error:
            before = pod.view
            self._failed(pod, error)
            job.since = 0
            if pod.view != before:
                self._enqueue(job.key)
            return False
        self._alive(pod)
        self._said.forget(f"poll {job.uid}")
        if state != job.state:
            job.state = state
            self._enqueue(job.key)
        await self._until_acted(job, state.version)
        wait = job.polls.wait_seconds(self._clock.monotonic())
        await self._clock.sleep(max(wait, _entries(state) * POLL_SECONDS_PER_ENTRY))
        return True

    async def _until_acted(self, job: _Job, version: int) -> None:
        """Let the pass act on what was just delivered: the next poll says so by `since`. A state
        that is not acted on yet would be answered at once again, so polls keep a distance."""
        try:
            async with asyncio.timeout(POLL_AGAIN_SECONDS):
                while job.since < version:
                    job.acted.clear()
                    await job.acted.wait()
        except TimeoutError:
            return


def back_off_seconds(failures: int, silent_seconds: float) -> float:
    """The pause after so many failures in a row, the first of them so long ago."""
    longest = min(max(MAX_BACKOFF_SECONDS, silent_seconds / 60), LONG_BACKOFF_SECONDS)
    return float(min(FIRST_BACKOFF_SECONDS * 2.0 ** min(max(failures - 1, 0), 8), longest))


def _standing(pod: _Pod) -> Standing:
    if pod.failures >= SILENT_AFTER:
        return Standing.SILENT
    return Standing.ANSWERS if pod.answered and not pod.failures else Standing.UNKNOWN


def _identity(manifest: ManifestInfo) -> tuple[object, ...]:
    return (manifest.step, manifest.round, manifest.manifest)


def _entries(state: CoordinatorState) -> int:
    lists = (state.steps, state.dead, state.progress, state.tiers, state.failures)
    return sum(len(entries) for entries in lists)
