"""The played members of a gang, in one process: `python -m benchmarks.ranks.members <folder>`.

The folder has `gang.json` (see `Gang`) and a certificate for each member. Commands are lines of JSON on the
standard input; each is answered by one line when all members are through with it:

    {"do": "round", "round": 0, "version": 1, "real": [[worker, address, port], ...]}
    {"do": "replace", "round": 1, "workers": [7]}
    {"do": "report", "step": 5}
    {"do": "commit", "step": 5}
    {"do": "manifest", "worker": 7, "step": 5, "round": 0}
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.ranks.gang import SMALL, STATES, Gang, address_of, pod_name, small_layout
from benchmarks.ranks.http import Client
from benchmarks.ranks.states import PlayedState
from holdfast_core.format.canonical import digest_of
from holdfast_core.format.rank_layout import RankLayout, layout_digests
from holdfast_core.ids import Level, Rank, RestartRound, Step, Worker
from holdfast_core.messages.codec import dumps, loads
from holdfast_core.messages.schema import (
    Ok,
    Plan,
    Progress,
    RankSaves,
    ReportedShard,
    ShardInfo,
    WorkerReport,
    WorkerReports,
)
from holdfast_core.net import TlsFiles, client_context
from holdfast_sidecar.wire.following import is_newer
from holdfast_sidecar.wire.verbs import PATHS, ROUND_HEADER

T = TypeVar("T")

_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 0.2, 10.0
"""Pauses between two attempts to send a message. They are those of a sidecar (base/settings.py)."""
_TRIES = 40


@dataclass(slots=True)
class Now:
    """The round that all played members are in."""

    round: RestartRound
    version: int
    where: dict[int, tuple[str, int]]
    """Addresses and control ports of the real sidecars. The first one is the coordinator's."""

    def relay(self, gang: Gang, worker: int) -> int:
        """Return the relay of a worker. The coordinator is worker 0."""
        return worker // gang.fan_in * gang.fan_in


class Group:
    """What a group of workers shares: its relay reports for all, and gets the plan and manifests for them."""

    def __init__(self, now: Now, relay: Callable[[], PlayedMember]) -> None:
        self._now = now
        self._relay = relay
        self._waiting: list[tuple[WorkerReport, asyncio.Future[Ok]]] = []
        self._sending: asyncio.Task[None] | None = None
        self._manifests: dict[Step, asyncio.Task[bytes]] = {}
        self.members: dict[int, PlayedMember] = {}

    async def manifest(self, step: Step, round_: RestartRound) -> bytes:
        """Return a manifest, which the relay fetches once for its group."""
        if step not in self._manifests:
            coming = asyncio.create_task(self._relay().get_manifest(step, round_))
            self._manifests = {step: coming}
        return await self._manifests[step]

    async def report(self, report: WorkerReport) -> Ok:
        """Send the report of a member with others, and return the coordinator's reply."""
        answer: asyncio.Future[Ok] = asyncio.get_running_loop().create_future()
        self._waiting.append((report, answer))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())
        return await answer

    async def _send(self) -> None:
        while self._waiting:
            sent, self._waiting = self._waiting, []
            reports = WorkerReports(self._now.round, tuple(report for report, _ in sent))
            reply = await self._relay().send(reports, Ok, to=0)
            for _, future in sent:
                future.set_result(reply)


class PlayedMember:
    """One worker: what its sidecar would send and answer, with one rank."""

    def __init__(
        self,
        gang: Gang,
        worker: int,
        birth_round: int,
        now: Now,
        group: Group,
        state: PlayedState | None,
    ) -> None:
        self._gang = gang
        self._group = group
        self._now = now
        self.worker = Worker(worker)
        self.rank = Rank(worker)
        self.pod = pod_name(worker, birth_round)
        self._state = state
        layout = self._layout()
        self._payload_bytes = layout.payload_bytes
        self._digests = layout_digests(layout.to_bytes())
        files = TlsFiles.in_directory(gang.certificates(self.pod))
        self._client, self._plans = (
            Client(client_context(files), address_of(worker)) for _ in range(2)
        )
        self._following: asyncio.Task[None] | None = None
        self._table: dict[Step, ReportedShard] = {}
        self._known: set[ReportedShard] = set()
        """The shards that the coordinator has received."""
        self._storing: dict[Step, asyncio.Task[None]] = {}
        self._levels: dict[Step, set[Level]] = {}
        self._reached: dict[tuple[Step, Level], asyncio.Event] = {}

    def _layout(self) -> RankLayout:
        """Return the layout of this rank. Those of all ranks would not fit into memory."""
        return small_layout(self.worker) if self._state is None else self._state.layout(self.rank)

    def shard(self, step: Step) -> ShardInfo:
        digest = digest_of(f"shard {self.rank} {step}".encode())
        return ShardInfo(self.rank, self._payload_bytes, digest, digest)

    # ------------------------------------------------------------------ what it sends

    @property
    def _relay(self) -> int:
        return self._now.relay(self._gang, self.worker)

    async def send(self, message: Any, reply: type[T], *, to: int) -> T:
        """Send a message to a real sidecar until it is accepted, and return the reply."""
        head = (
            f"POST {PATHS[type(message)]} HTTP/1.1\r\n{ROUND_HEADER}: {message.round}\r\n"
            "Content-Type: application/json"
        )
        return loads(reply, await self._request(to, head, dumps(message)))

    async def _send_report(self, report: WorkerReport) -> Ok:
        if self._relay in self._now.where:
            return await self.send(WorkerReports(report.round, (report,)), Ok, to=self._relay)
        return await self._group.report(report)

    def _begin_to_follow(self) -> None:
        """Begin to keep up with the plan, if this member gets it from a real sidecar."""
        if self._following is not None:
            return
        if self._relay in self._now.where:
            self._following = asyncio.create_task(self._follow(self._relay, {self.worker: self}))
        elif self._relay == self.worker:
            self._following = asyncio.create_task(self._follow(0, self._group.members))

    async def _follow(self, source: int, members: Mapping[int, PlayedMember]) -> None:
        """Request each newer plan, and have it carried out by these members."""
        plan = Plan(self._now.round)
        name = self._gang.server_name(pod_name(source, 0))
        while True:
            known = f"coordinator={plan.coordinator}&since={plan.version}"
            head = f"GET /v1/plan?round={plan.round}&{known}&timeout=20 HTTP/1.1"
            try:
                where = self._now.where[source]
                status, reply = await self._plans.request(where, name, head, b"")
            except OSError:
                status, reply = 0, b""
            if plan.round != self._now.round:
                plan = Plan(self._now.round)
            if status != 200:
                await asyncio.sleep(_FIRST_PAUSE_SECONDS)
                continue
            found = loads(Plan, reply)
            if found.round != plan.round:
                await asyncio.sleep(_FIRST_PAUSE_SECONDS)
                continue
            if is_newer(found, plan.coordinator, plan.version):
                plan = found
                for member in tuple(members.values()):
                    member.take(plan)

    async def get_manifest(self, step: Step, round_: RestartRound, of: int = 0) -> bytes:
        """Request a manifest from a real sidecar."""
        head = f"GET /v1/manifest?step={step}&round={round_} HTTP/1.1"
        return await self._request(of, head, b"")

    async def _request(
        self, to: int, head: str, body: bytes, client: Client | None = None
    ) -> bytes:
        name = self._gang.server_name(pod_name(to, 0))
        for attempt in range(_TRIES):
            try:
                status, reply = await (client or self._client).request(
                    self._now.where[to], name, head, body
                )
            except OSError:
                status, reply = 0, b"the connection was closed"
            if status == 200:
                return reply
            pause = min(_LAST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2**attempt)
            await asyncio.sleep(random.uniform(pause / 2, pause))
        raise SystemExit(f"worker {self.worker}: {head}: {reply[:500]!r}")

    async def report(self, step: Step | None) -> None:
        saved = None if step is None else RankSaves(self.rank, step)
        report = WorkerReport(
            round=self._now.round,
            worker=self.worker,
            progress=() if step is None else (Progress(self._now.round, self.rank, step),),
            rehydrate_seconds=1.0,
            barrier_open=True,
            saves=() if saved is None else (saved,),
            shards=tuple(self._unknown()),
            has_all_shards=not self._known,
        )
        sent = set(self._table.values())
        if self.worker in (await self._send_report(report)).wants_shards:
            self._known = set()
            await self.report(step)
        else:
            self._known = sent

    def _unknown(self) -> Iterator[ReportedShard]:
        """Yield what the coordinator does not know of the table. It needs each layout once."""
        described = {(s.step, s.shard) for s in self._known}
        for shard in self._table.values():
            if shard not in self._known:
                known = (shard.step, shard.shard) in described
                yield replace(shard, layout=None) if known else shard

    def begin_round(self) -> None:
        """Forget the table of the round before, as a sidecar does when it is sealed."""
        self._table.clear()
        self._storing.clear()
        self._known.clear()
        self._begin_to_follow()

    async def commit(self, step: Step) -> None:
        """Prepare a step, and wait until the coordinator has sent its level REPLICATED."""
        shard = self.shard(step)
        self._table[step] = ReportedShard(step, self._now.round, shard, self._digests)
        await self.report(step)
        await self.level(step, Level.REPLICATED)

    async def level(self, step: Step, level: Level) -> None:
        if level not in self._levels.get(step, ()):
            await self._reached.setdefault((step, level), asyncio.Event()).wait()

    async def _store(self, step: Step) -> None:
        """Fetch a manifest, and report that this node has it, and then that all copies of the shard exist.

        The document is not parsed: each member does that on a machine of its own.
        """
        if self._relay in self._now.where:
            await self.get_manifest(step, self._now.round, self._relay)
        else:
            await self._group.manifest(step, self._now.round)
        self._table[step] = replace(self._table[step], committed=True)
        await self.report(step)
        self._table[step] = replace(self._table[step], replicated=True)
        await self.report(step)

    def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
        self._client.close()
        self._plans.close()

    # ------------------------------------------------------------------ the plan

    def take(self, plan: Plan) -> None:
        # A step may be replicated before its level LOCAL was sent here. Then that is not sent any more.
        for found in plan.levels:
            for level in {found.level, Level.LOCAL}:
                self._levels.setdefault(found.step, set()).add(level)
                waiting = self._reached.pop((found.step, level), None)
                if waiting is not None:
                    waiting.set()
        self._prune(plan.drop)
        for checkpoint, _ in plan.manifests:
            if checkpoint.step not in self._storing:
                self._storing[checkpoint.step] = asyncio.create_task(self._store(checkpoint.step))

    def _prune(self, steps: tuple[Step, ...]) -> None:
        for step in steps:
            self._table.pop(step, None)
            self._levels.pop(step, None)
            self._storing.pop(step, None)


class Played:
    """All played members."""

    def __init__(self, gang: Gang) -> None:
        self._gang = gang
        self._now = Now(RestartRound(0), 0, {})
        self._state = None if gang.state == SMALL else STATES[gang.state](gang.workers)
        self._groups: dict[int, Group] = {}
        self._members: dict[int, PlayedMember] = {}

    def add(self, worker: int, birth_round: int) -> None:
        if worker in self._members:
            self._members[worker].close()
        relay = self._now.relay(self._gang, worker)
        group = self._groups.setdefault(relay, Group(self._now, lambda: self._members[relay]))
        state = self._state
        member = PlayedMember(self._gang, worker, birth_round, self._now, group, state)
        self._members[worker] = group.members[worker] = member

    async def do(self, command: dict[str, Any]) -> dict[str, Any]:
        """Carry a command out in all members, and return what is known about it."""
        members = list(self._members.values())
        step = Step(command.get("step", 0))
        began = time.monotonic()
        extra: dict[str, Any] = {}
        match command["do"]:
            case "round":
                self._now.round = RestartRound(command["round"])
                self._now.version = command["version"]
                self._now.where = {w: (host, port) for w, host, port in command["real"]}
                for member in members:
                    member.begin_round()
                await asyncio.gather(*(m.report(None) for m in members))
            case "replace":
                for worker in command["workers"]:
                    self.add(worker, command["round"])
            case "report":
                await asyncio.gather(*(m.report(step) for m in members))
            case "commit":
                commits = asyncio.gather(*(m.commit(step) for m in members))
                await asyncio.gather(*(m.level(step, Level.LOCAL) for m in members))
                extra["local_seconds"] = time.monotonic() - began
                await commits
            case "manifest":
                found = await self._members[command["worker"]].get_manifest(
                    step, RestartRound(command["round"])
                )
                extra["bytes"] = len(found)
            case other:
                raise SystemExit(f"unknown command {other}")
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "wall_seconds": time.monotonic() - began,
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
            **extra,
        }


async def _serve(folder: Path) -> None:
    gang = Gang.read(folder)
    played = Played(gang)
    for worker in gang.played:
        played.add(worker, 0)
    print(json.dumps({"ready": True}), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(await played.do(json.loads(line))), flush=True)


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1])))
