"""Gangs that are played: what their coordinators tell the operator while the ranks would train.

A coordinator raises the version of its state as a real one does (wire/server.py): a commit at once, the
progress of the ranks together with other progress. A rank finishes a step every STEP_SECONDS.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from functools import lru_cache

from aiohttp import web
from tests.support.operator.builders import stored_manifest
from tests.support.operator.served_sidecar import ServedSidecar, document_of

from holdfast_core.ids import Digest, JobUid, Rank, RestartRound, Step, Worker
from holdfast_core.messages.codec import dumps, loads
from holdfast_core.messages.schema import (
    AcceptedRound,
    CoordinatorState,
    GangProgress,
    RestorePoint,
    Round,
)
from holdfast_sidecar.coordinator.gathered import common_round
from holdfast_sidecar.wire.server import Versioned

STEP_SECONDS = 5.0
REPORT_SECONDS = 0.5
"""The report interval of a real sidecar. Each report is a change that may wait."""
FIRST_COMMIT = 10
"""Steps after the restore point at which a gang saves for the first time in a round."""


@dataclass(frozen=True, slots=True)
class _ReadRound:
    message: Round
    digest: Digest
    is_complete: bool
    """Whether it has the address of each member."""


@lru_cache(maxsize=64)
def _read_round(body: bytes) -> _ReadRound:
    message = loads(Round, body)
    return _ReadRound(message, message.content_digest(), all(m.address for m in message.members))


@dataclass
class GangSidecar(ServedSidecar):
    """Sidecar of one pod whose state, if it coordinates, has the version of a real coordinator."""

    gang: Gang | None = None
    silent: bool = False
    """Whether it answers neither the operator nor its coordinator."""
    acceptance: AcceptedRound | None = None
    """What it reports to its coordinator about its newest ROUND."""
    versioned: Versioned = field(default_factory=Versioned)

    async def _state(self, request: web.Request) -> web.Response:
        gang = self.gang
        if gang is None or gang.coordinator is not self or gang.state is None:
            return await super()._state(request)
        since = int(request.query["since"])
        self.versioned.acknowledge(since)
        self.versioned.bundle_for(float(request.query["quiet"]))
        await self.versioned.wait_above(since, float(request.query["timeout"]))
        state = gang.current(self.versioned.version)
        self.versioned.delivered(state.version)
        return web.Response(body=dumps(state), content_type="application/json")

    def read_round(self, body: bytes) -> Round:
        # Each member of a real gang parses ROUND on a machine of its own.
        return _read_round(body).message

    async def _round(self, request: web.Request) -> web.Response:
        response = await super()._round(request)
        if self.gang is not None and response.status == 200:
            read = _read_round(await request.read())
            self.acceptance = AcceptedRound(read.message.version, read.digest)
            self.gang.round_received(self, read)
        return response


@dataclass
class Gang:
    """The ranks of one job, one for each worker."""

    uid: JobUid
    workers: int
    members: dict[Worker, GangSidecar] = field(default_factory=dict)
    coordinator: GangSidecar | None = None
    state: CoordinatorState | None = None
    trains_since: float = 0.0
    first_step: int = 0
    ready: dict[RestartRound, set[str]] = field(default_factory=dict)
    """The pods that have received a complete ROUND, by the round."""
    rounds_trained: list[RestartRound] = field(default_factory=list)
    restored_steps: list[int] = field(default_factory=list)

    def round_received(self, sidecar: GangSidecar, read: _ReadRound) -> None:
        """Train as soon as each member has received a complete ROUND of the same round.

        A later ROUND of the same round may name another coordinator, if the first one did not answer in time.
        """
        message = read.message
        if message.round in self.rounds_trained[-1:]:
            if self.coordinator is not self.members[message.coordinator]:
                self._coordinate(self.members[message.coordinator])
            return
        if not read.is_complete or message.round in self.rounds_trained:
            return
        self.ready.setdefault(message.round, set()).add(sidecar.pod)
        ready = self.ready[message.round]
        if len(ready) >= self.workers and ready.issuperset(m.pod for m in message.members):
            self._train(message)

    def _train(self, message: Round) -> None:
        self.rounds_trained.append(message.round)
        self.first_step = message.restore_point.step or 0
        self.restored_steps.append(self.first_step)
        self.trains_since = asyncio.get_running_loop().time()
        step = self.first_step + FIRST_COMMIT
        manifest = stored_manifest(self.uid, step, message.round, self.workers)
        document = document_of(manifest)
        for worker, member in self.members.items():
            kept = sorted({(worker - 1) % self.workers, worker})
            member.hold(document)
            member.shards = {(manifest.checkpoint, Rank(r)): manifest.ref(Rank(r)) for r in kept}
        point = RestorePoint(Step(step), message.round, document.listed.manifest)
        self.state = CoordinatorState(
            version=0,
            round=message.round,
            running=True,
            last_local=point,
            last_replicated=point,
            last_persisted=point,
            last_persisted_bytes=100 * self.workers,
            rehydrate_seconds=0.1,
            rendezvous_seconds=0.2,
            first_step_seconds=0.3,
        )
        self._coordinate(self.members[message.coordinator])

    def _coordinate(self, sidecar: GangSidecar) -> None:
        """Let this sidecar tell the operator the gang's state from now on."""
        self.coordinator = sidecar
        sidecar.versioned = Versioned()
        sidecar.versioned.bump(urgent=True)

    def current(self, version: int) -> CoordinatorState:
        """Return the coordinator's state of this moment."""
        assert self.state is not None
        trained = int((asyncio.get_running_loop().time() - self.trains_since) / STEP_SECONDS)
        step = Step(self.first_step + FIRST_COMMIT + trained)
        progress = GangProgress(step, step, self.workers * step)
        state = self.state
        return CoordinatorState(
            version=version,
            round=state.round,
            running=True,
            last_local=state.last_local,
            last_replicated=state.last_replicated,
            last_persisted=state.last_persisted,
            last_persisted_bytes=state.last_persisted_bytes,
            progress=progress,
            rehydrate_seconds=state.rehydrate_seconds,
            rendezvous_seconds=state.rendezvous_seconds,
            first_step_seconds=state.first_step_seconds,
            accepted=self._accepted(state.round),
        )

    def _accepted(self, round_: RestartRound) -> AcceptedRound | None:
        """Return the ROUND of this round that all members have accepted and report."""
        members = [self.members.get(Worker(index)) for index in range(self.workers)]
        return common_round(
            [
                s.acceptance if s is not None and not s.silent and s.round == round_ else None
                for s in members
            ]
        )

    def claim(self, sidecar: GangSidecar, step: int) -> None:
        """Let a sidecar, whose pod may have been replaced, report a commit of its own round."""
        own = document_of(stored_manifest(self.uid, step, sidecar.round, self.workers))
        point = RestorePoint(own.listed.step, own.listed.round, own.listed.manifest)
        sidecar.add(own)
        assert self.state is not None
        sidecar.state = replace(
            self.state,
            version=10**6,
            round=sidecar.round,
            last_local=point,
            last_replicated=point,
            last_persisted=point,
        )

    def report(self) -> None:
        """Count one report of the gang's members, which carries progress at most."""
        coordinator = self.coordinator
        if coordinator is not None and self.state is not None:
            coordinator.versioned.bump(urgent=False)
