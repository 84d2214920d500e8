"""What this process knows of the sidecars of a job: their manifests, their last answers, and calls under way.

Every worker stores the manifests of the whole gang. An inventory therefore lists them by digest only: with
their contents, the replies of a gang would grow with the square of its size. A digest stands for the same
bytes forever, so a manifest that was fetched earlier, or from another sidecar, is never out of date.

A sidecar is unreachable after two failures in a row. Any answer, including a refusal, makes it reachable.

Each job's coordinator has a long poll. Its `since` is the version up to which everything is durable in the
API. An unexpected error does not end the poll; it is logged once and counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import partial
from ssl import SSLContext

from holdfast_core import logs
from holdfast_core.clock import Clock
from holdfast_core.errors import FormatError, HoldfastError, UnavailableError
from holdfast_core.format.manifest import manifest_digest, parse_manifest_of
from holdfast_core.ids import CheckpointId, Digest, JobUid, RestartRound, Worker
from holdfast_core.messages.schema import CoordinatorState, Inventory, Refusal, RestorePoint
from holdfast_operator.model.job import (
    AckedRound,
    InventoryView,
    ManifestView,
    PodView,
    Reachable,
    SidecarView,
)
from holdfast_operator.model.ownership import Key
from holdfast_operator.sidecars.client import (
    Allowance,
    CallSlots,
    SidecarClient,
    SidecarRefused,
    Standing,
    Target,
)

ALL_SECONDS = 30.0
"""Time-out for the manifests of one inventory. The next one fetches only those that are missing."""

JOBS_PER_SECOND = 25.0
"""Jobs that are looked at in a second without an urgent reason. A look is an answer to a poll and a pass, and
some write the status. It takes some 5 ms of processor time.

Nothing waits for routine news: the progress of the ranks, the goodput, the age of the newest checkpoint. With
few jobs they are seconds old. With a thousand jobs they would take all of the operator's time, so they are as
old as the time in which the operator gets round to each job."""

Fetch = Callable[[CheckpointId], Awaitable[bytes | None]]
"""Reads the document of a manifest from the sidecar that lists it. None: the sidecar has deleted it."""


def routine_seconds(jobs: int) -> float:
    """Return the shortest time between two routine looks at one of so many jobs."""
    return jobs / JOBS_PER_SECOND


class Manifests:
    """The manifests of one job, by digest."""

    def __init__(self, job_uid: JobUid) -> None:
        self._job_uid = job_uid
        self._known: dict[Digest, ManifestView] = {}
        self._locks: dict[Digest, asyncio.Lock] = {}

    async def view(self, inventory: Inventory, ranks: int, fetch: Fetch) -> InventoryView:
        """Return the inventory of a sidecar with the contents of its manifests.

        Manifests that were deleted after the inventory was made are left out.

        Args:
            inventory: The reply of the sidecar.
            ranks: Number of ranks of the job.
            fetch: Reads a manifest from this sidecar. Its errors are raised.

        Raises:
            UnavailableError: The sidecar did not send all manifests in time.
            FormatError: A manifest is malformed, or is another one than was listed.
        """
        found: list[ManifestView] = []
        try:
            async with asyncio.timeout(ALL_SECONDS):
                for digest, checkpoint in inventory.manifests.items():
                    manifest = await self._get(digest, checkpoint, ranks, fetch)
                    if manifest is not None:
                        found.append(manifest)
        except TimeoutError as error:
            raise UnavailableError(
                f"the sidecar of pod {inventory.pod} lists {len(inventory.manifests)} manifests and did "
                f"not send them within {ALL_SECONDS:.0f} s"
            ) from error
        return InventoryView(
            round=inventory.round,
            version=inventory.version,
            worker=inventory.worker,
            launcher=inventory.launcher,
            manifests=tuple(found),
            shards=(*inventory.shards, *inventory.in_memory),
            uncommitted=inventory.uncommitted,
            stored=inventory.stored,
        )

    def keep(self, digests: Set[Digest]) -> None:
        """Forget all manifests but these. A `view` under way fetches what it needs of them again."""
        for digest in (self._locks.keys() | self._known.keys()) - digests:
            self._locks.pop(digest, None)
            self._known.pop(digest, None)

    async def _get(
        self, digest: Digest, checkpoint: CheckpointId, ranks: int, fetch: Fetch
    ) -> ManifestView | None:
        """Return a manifest, or None if the sidecar has deleted it.

        Sidecars that list the same manifest wait for the first of them to send it. If that one fails, the
        next one is asked.
        """
        async with self._locks.setdefault(digest, asyncio.Lock()):
            known = self._known.get(digest)
            if known is None or CheckpointId(known.step, known.round) != checkpoint:
                document = await fetch(checkpoint)
                if document is None:
                    return None
                known = await asyncio.to_thread(self._verified, document, digest, checkpoint, ranks)
                self._known[digest] = known
            return known

    def _verified(
        self, document: bytes, digest: Digest, checkpoint: CheckpointId, ranks: int
    ) -> ManifestView:
        found = manifest_digest(document)
        if found != digest:
            raise FormatError(
                f"manifest of {checkpoint}: the sidecar listed digest {digest} and sent a document with "
                f"digest {found}"
            )
        manifest = parse_manifest_of(document, self._job_uid, checkpoint)
        shards = manifest.shards if manifest.world_size == ranks else ()
        return ManifestView(checkpoint.step, checkpoint.round, digest, manifest.world_size, shards)


SILENT_AFTER = 3
"""Failures in a row after which calls to a pod use the few slots of silent pods (Standing.SILENT)."""
POLL_BURST = 20
POLL_SECONDS_EACH = 0.25
"""Seconds per poll after a burst of POLL_BURST. Each answer may cause a pass over the job, so a coordinator
whose state changes all the time must not take the operator's time from other jobs."""


@dataclass(slots=True)
class PodCalls:
    """State of the calls to one pod's sidecar. Times are monotonic unless stated otherwise."""

    view: SidecarView
    target: Target
    manifests: Manifests
    """The manifests of the pod's job."""
    wanted: frozenset[Digest] = frozenset()
    """Digests of the manifests of its latest inventory, until all of them are there."""
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
    is_reported: bool = False
    """Whether `view` has the round and its content from the coordinator's state. The sidecar itself has not
    answered this process with them yet."""
    round_received: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the sidecar may have received a ROUND that makes it the coordinator."""
    under_way: set[str] = field(default_factory=set)
    starts: tuple[bool, int] = (False, 0)
    """Whether the sidecar has started, and its restart count. A change ends the back-off."""

    @property
    def has_launcher(self) -> bool:
        """Return whether the launcher was connected when the sidecar last sent its inventory."""
        return self.view.inventory is not None and self.view.inventory.launcher

    @property
    def standing(self) -> Standing:
        """Return which slots a call to the pod uses."""
        if self.failures >= SILENT_AFTER:
            return Standing.SILENT
        return Standing.ANSWERS if self.answered and not self.failures else Standing.UNKNOWN

    @property
    def knows_sidecar(self) -> bool:
        """Return whether the sidecar itself has answered this process with the round that it is in."""
        view = self.view
        own = view.acked is not None or view.sealed_round is not None
        return view.inventory is not None or (own and not self.is_reported)

    def newest(self, inventory: InventoryView) -> InventoryView:
        """Return this inventory, or the known one if that is of a newer round.

        The manifests of an inventory may be sent after those of a SEAL that began later. A sidecar's round
        never goes back.
        """
        known = self.view.inventory
        return known if known is not None and known.round > inventory.round else inventory


@dataclass(slots=True)
class JobCalls:
    """State of the calls to one job's sidecars."""

    key: Key
    uid: JobUid
    manifests: Manifests
    pods: dict[str, PodCalls] = field(default_factory=dict)
    """By uid of the pod."""
    round: RestartRound | None = None
    gang: frozenset[str] = frozenset()
    """Uids of the pods for which the coordinator of a gang that trains can answer."""
    awaits_coordinator: bool = False
    """Whether the coordinator of a gang that trains has neither answered this process nor failed to."""
    coordinator_pod: str | None = None
    """Identity of the polled sidecar: uid, IP and restarts of its pod, and the round."""
    poll: asyncio.Task[None] | None = None
    state: CoordinatorState | None = None
    since: int = 0
    """Version of the coordinator's state up to which everything is durable in the API. A failed poll and a
    new coordinator reset it to 0, so that the next poll returns the state without waiting for a change."""
    acted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when `since` grows."""
    act_seconds: float = 0.0
    """Longest wait of the poll for the pass that acts on its answer."""
    refused_seconds: float = 0.0
    """Longest wait of the poll for a ROUND after the sidecar has answered that it does not coordinate."""
    pruned: set[tuple[RestorePoint, ...]] = field(default_factory=set)
    """Checkpoints that prunes have deleted and of which no pass has read it yet."""
    requests: set[str] = field(default_factory=set)
    """Names of the requests that are being sent."""
    polls: Allowance = field(default_factory=lambda: Allowance(POLL_BURST, POLL_SECONDS_EACH))

    def take_report(self, state: CoordinatorState) -> None:
        """Take from the coordinator's state what it says about sidecars that this process does not know yet.

        A new process would otherwise call every sidecar of the cluster before it knows that nothing has
        happened (ADR 0005). Sidecars for which the coordinator no longer answers are called, and so are those
        that did not answer their first call.
        """
        accepted = state.accepted if state.round == self.round else None
        for uid, pod in self.pods.items():
            if pod.knows_sidecar:
                pod.is_reported = False
            elif accepted is not None and uid in self.gang and not pod.failures:
                acked = AckedRound(state.round, accepted.version, accepted.content, pod.starts[1])
                pod.is_reported = True
                pod.view = replace(
                    pod.view, reachable=Reachable.YES, sealed_round=state.round, acked=acked
                )
            elif pod.is_reported:
                pod.is_reported = False
                reachable = Reachable.YES if pod.answered else Reachable.UNKNOWN
                pod.view = SidecarView(pod.view.worker, pod.view.pod_uid, reachable)

    @property
    def listed(self) -> set[Digest]:
        """Return the digests of all manifests that the job's sidecars list."""
        inventories = (p.view.inventory for p in self.pods.values())
        found = {m.manifest for i in inventories if i is not None for m in i.manifests}
        return found.union(*(p.wanted for p in self.pods.values()))


UNREACHABLE_AFTER = 2
"""Failures in a row after which a sidecar counts as unreachable."""
LOG_AGAIN_SECONDS = 60.0
"""Shortest time between two log lines about one pod that alternates between answers and silence."""
MAX_LOG_CHARACTERS = 300
"""Longest log line, in characters, that repeats text of a sidecar."""
STARTING_SECONDS = 15.0
"""Silence of a sidecar that never answered after which it is logged. It may still be starting before."""
FIRST_BACKOFF_SECONDS = 0.25
MAX_BACKOFF_SECONDS = 1.0
"""Longest pause in the first minute of a silence. It then grows with the silence, to LONG_BACKOFF_SECONDS."""
LONG_BACKOFF_SECONDS = 10.0


class Answers:
    """Recorder of the ends of all calls."""

    def __init__(self, clock: Clock, count_error: Callable[[str], None]) -> None:
        self._clock = clock
        self._count_error = count_error
        self.log_changes = logs.Changed()

    def answered(self, pod: PodCalls) -> None:
        if self.log_changes.forget(pod.view.pod_uid):
            logs.info("the sidecar answers again", pod=pod.target.pod)
        pod.answered = True
        pod.answered_at = self._clock.monotonic()
        pod.failures = 0
        pod.failing_since = None
        pod.not_before = 0.0
        pod.view = replace(
            pod.view, reachable=Reachable.YES, unreachable_since=None, unreachable_because=""
        )

    def failed(self, pod: PodCalls, error: HoldfastError) -> None:
        pod.failures += 1
        if pod.failing_since is None:
            pod.failing_since = self._clock.monotonic()
        self.back_off(pod)
        if pod.failures >= UNREACHABLE_AFTER:
            now = self._clock.monotonic()
            started = pod.answered or now - pod.failing_since >= STARTING_SECONDS
            if started and (pod.logged_at is None or now - pod.logged_at >= LOG_AGAIN_SECONDS):
                pod.logged_at = now
                self.log_changes.warning_once(pod.view.pod_uid, str(error), pod=pod.target.pod)
            pod.view = replace(
                pod.view,
                reachable=Reachable.NO,
                unreachable_since=pod.failing_since,
                unreachable_because=pod.view.unreachable_because or str(error),
            )

    def back_off(self, pod: PodCalls) -> None:
        now = self._clock.monotonic()
        silent_seconds = 0.0 if pod.failing_since is None else now - pod.failing_since
        pod.not_before = now + back_off_seconds(pod.failures, silent_seconds)

    def log_refusal(self, subject: str, what: str, refusal: SidecarRefused) -> None:
        """Log the refusal once for each code. The sidecar's text may differ each time."""
        if self.log_changes.is_new(subject, refusal.code):
            logs.info(f"{what} was refused: {refusal}"[:MAX_LOG_CHARACTERS])

    def unexpected(self, what: str, error: Exception) -> None:
        """Count and log an error that only a defect of the operator causes. The caller continues."""
        self._count_error("sidecars")
        if self.log_changes.is_new(f"unexpected {what}", type(error).__name__):
            logs.failure(f"{what}: unexpected error", error)


def back_off_seconds(failures: int, silent_seconds: float) -> float:
    """Return the pause before the next call.

    Args:
        failures: Failures in a row.
        silent_seconds: Time since the first of them.
    """
    longest = min(max(MAX_BACKOFF_SECONDS, silent_seconds / 60), LONG_BACKOFF_SECONDS)
    return float(min(FIRST_BACKOFF_SECONDS * 2.0 ** min(max(failures - 1, 0), 8), longest))


# --------------------------------------------------------------------------- the long poll of a coordinator


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
                # A new process waits until the coordinator has answered or failed (gang.awaits_coordinator).
                cause = f"polling it ended with an unexpected {type(error).__name__}"
                self._answers.failed(pod, UnavailableError(cause))
                job.since = 0
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
    lists = (state.committed, state.dead, state.failures)
    return sum(len(entries) for entries in lists)
