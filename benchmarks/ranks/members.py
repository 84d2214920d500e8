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
import re
import resource
import ssl
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.ranks.gang import SMALL, STATES, Gang, address_of, pod_name, small_layout
from benchmarks.ranks.http import Client, Served
from benchmarks.ranks.states import PlayedState
from holdfast_core.format.canonical import digest_of
from holdfast_core.format.rank_layout import RankLayout, layout_digests
from holdfast_core.ids import Level, Rank, RestartRound, Step, Worker
from holdfast_core.messages.codec import dumps, loads
from holdfast_core.messages.report import Answer, Letter, Relay, RelayReply, decode, encode
from holdfast_core.messages.schema import (
    ManifestDocument,
    Ok,
    Plan,
    RankProgress,
    RankSaves,
    ReportedShard,
    ShardInfo,
    WorkerReport,
)
from holdfast_core.net.tls import TlsFiles, client_context, server_context
from holdfast_sidecar.wire.verbs import PATHS, ROUND_HEADER

T = TypeVar("T")

_STEP = re.compile(rb'"step":(\d+)')
_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 0.2, 10.0
"""Pauses between two attempts to send a message. They are those of a sidecar (base/settings.py)."""
_TRIES = 40
_NAMED = "played_name"
"""Attribute of an SSLObject: the server name that the caller asked for, which says whom it means."""


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


class GroupMail:
    """What the relay of a played group sends to the coordinator: letters that come together go together."""

    def __init__(self, now: Now, relay: Callable[[], PlayedMember]) -> None:
        self._now = now
        self._relay = relay
        self._waiting: list[tuple[Letter, asyncio.Future[bytes]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def deliver(self, path: str, member: PlayedMember, body: bytes) -> bytes:
        """Send a letter of a member of the group and return the coordinator's reply."""
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting.append((Letter(path, (member.worker,), body), answer))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())
        return await answer

    async def _send(self) -> None:
        while self._waiting:
            sent, self._waiting = self._waiting, []
            message = Relay(self._now.round, tuple(letter for letter, _ in sent))
            reply = await self._relay().relay(message)
            for (letter, future), answer in zip(sent, reply.answers, strict=True):
                if answer.status == 200:
                    future.set_result(answer.body)
                else:
                    await asyncio.sleep(_FIRST_PAUSE_SECONDS)
                    self._waiting.append((letter, future))


class PlayedMember:
    """One worker: what its sidecar would send and answer, with one rank."""

    def __init__(
        self,
        gang: Gang,
        worker: int,
        birth_round: int,
        now: Now,
        mail: GroupMail,
        state: PlayedState | None,
    ) -> None:
        self._gang = gang
        self._mail = mail
        self._now = now
        self.worker = Worker(worker)
        self.rank = Rank(worker)
        self.pod = pod_name(worker, birth_round)
        self._state = state
        layout = self._layout()
        self._payload_bytes = layout.payload_bytes
        self._digests = layout_digests(layout.to_bytes())
        files = TlsFiles.in_directory(gang.certificates(self.pod))
        self.server = server_context(files)
        self._client = Client(client_context(files), address_of(worker))
        self._has_plan = False
        self._table: dict[Step, ReportedShard] = {}
        self._known: set[ReportedShard] = set()
        """The shards that the coordinator has received."""
        self._replicating: dict[Step, asyncio.Task[None]] = {}
        self._levels: dict[Step, set[Level]] = {}
        self._reached: dict[tuple[Step, Level], asyncio.Event] = {}

    def _layout(self) -> RankLayout:
        """Return the layout of this rank. Those of all ranks would not fit into memory."""
        return small_layout(self.worker) if self._state is None else self._state.layout(self.rank)

    def shard(self, step: Step) -> ShardInfo:
        digest = digest_of(f"shard {self.rank} {step}".encode())
        return ShardInfo(self.rank, self._payload_bytes, digest, digest)

    # ------------------------------------------------------------------ what it sends

    async def send(self, message: Any, reply: type[T]) -> T:
        """Send a message to the coordinator until it is accepted, and return the reply."""
        head = (
            f"POST {PATHS[type(message)]} HTTP/1.1\r\n{ROUND_HEADER}: {message.round}\r\n"
            "Content-Type: application/json"
        )
        relay = self._now.relay(self._gang, self.worker)
        if relay in self._now.where:
            return loads(reply, await self._request(relay, head, dumps(message)))
        return loads(reply, await self._mail.deliver(PATHS[type(message)], self, dumps(message)))

    async def get_manifest(self, step: Step, round_: RestartRound) -> ManifestDocument:
        head = f"GET /v1/manifest?step={step}&round={round_} HTTP/1.1"
        return loads(ManifestDocument, await self._request(0, head, b""))

    async def relay(self, message: Relay) -> RelayReply:
        """Send letters of this member's group to the coordinator."""
        head = f"POST /v1/relay HTTP/1.1\r\n{ROUND_HEADER}: {message.round}"
        return decode(RelayReply, await self._request(0, head, encode(message)))

    async def _request(self, to: int, head: str, body: bytes) -> bytes:
        name = self._gang.server_name(pod_name(to, 0))
        for attempt in range(_TRIES):
            try:
                status, reply = await self._client.request(self._now.where[to], name, head, body)
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
            progress=() if step is None else (RankProgress(self.rank, step),),
            rehydrate_seconds=1.0,
            barrier_open=True,
            saves=() if saved is None else (saved,),
            shards=tuple(s for s in self._table.values() if s not in self._known),
            has_all_shards=not self._known,
            has_plan=self._has_plan,
        )
        sent = set(self._table.values())
        if (await self.send(report, Ok)).wants_shards:
            self._known = set()
            await self.report(step)
        else:
            self._known = sent

    def begin_round(self) -> None:
        """Forget the table of the round before, as a sidecar does when it is sealed."""
        self._table.clear()
        self._known.clear()
        self._has_plan = False

    async def commit(self, step: Step) -> None:
        """Prepare a step, and wait until the coordinator has sent its level REPLICATED."""
        shard = self.shard(step)
        self._table[step] = ReportedShard(step, self._now.round, shard, self._digests)
        await self.report(step)
        await self.level(step, Level.REPLICATED)

    async def level(self, step: Step, level: Level) -> None:
        if level not in self._levels.get(step, ()):
            await self._reached.setdefault((step, level), asyncio.Event()).wait()

    async def _replicate(self, step: Step) -> None:
        self._table[step] = replace(self._table[step], replicated=True)
        await self.report(step)

    def close(self) -> None:
        self._client.close()

    # ------------------------------------------------------------------ what it answers

    def answer(self, path: str, body: bytes) -> bytes:
        match path.partition("?")[0]:
            case "/v1/manifest":
                # The document is not parsed: each member does that on a machine of its own.
                found = _STEP.search(body[:200])
                assert found is not None
                step = Step(int(found.group(1)))
                self._replicating[step] = asyncio.create_task(self._replicate(step))
            case "/v1/plan":
                self._take(loads(Plan, body))
            case other:
                raise SystemExit(f"worker {self.worker} was sent {other}")
        return dumps(Ok(self._now.round))

    def _take(self, plan: Plan) -> None:
        self._has_plan = True
        # A step may be replicated before its level LOCAL was sent here. Then that is not sent any more.
        for found in plan.levels:
            for level in {found.level, Level.LOCAL}:
                self._levels.setdefault(found.step, set()).add(level)
                waiting = self._reached.pop((found.step, level), None)
                if waiting is not None:
                    waiting.set()
        self._prune(plan.drop)

    def _prune(self, steps: tuple[Step, ...]) -> None:
        for step in steps:
            self._table.pop(step, None)
            self._levels.pop(step, None)
            self._replicating.pop(step, None)


class Played:
    """All played members, and the port on which they answer."""

    def __init__(self, gang: Gang) -> None:
        self._gang = gang
        self._now = Now(RestartRound(0), 0, {})
        self._state = None if gang.state == SMALL else STATES[gang.state](gang.workers)
        self._mail: dict[int, GroupMail] = {}
        self._members: dict[int, PlayedMember] = {}
        self._names: dict[str, PlayedMember] = {}

    async def start(self) -> None:
        context = next(iter(self._members.values())).server
        context.sni_callback = self._chosen
        for member in self._members.values():
            member.server.sni_callback = self._chosen
        loop = asyncio.get_running_loop()
        await loop.create_server(
            lambda: Served(self._answer, lambda found: str(vars(found)[_NAMED])),
            "0.0.0.0",
            self._gang.port,
            ssl=context,
            backlog=4096,
            ssl_handshake_timeout=120,
        )

    def _chosen(self, found: ssl.SSLObject, name: str, _: ssl.SSLContext) -> None:
        found.context = self._names[name].server
        setattr(found, _NAMED, name)

    def _answer(self, name: str, method: str, path: str, body: bytes) -> bytes:
        member = self._names[name]
        if path != "/v1/relay":
            return member.answer(path, body)
        message = decode(Relay, body)
        # The members of a group are in this process: their relay needs no connection to reach them.
        answers = tuple(
            Answer(200, self._members[worker].answer(letter.path, letter.body))
            for letter in message.letters
            for worker in letter.workers
        )
        return encode(RelayReply(message.round, answers))

    def add(self, worker: int, birth_round: int) -> None:
        if worker in self._members:
            self._members[worker].close()
        relay = self._now.relay(self._gang, worker)
        mail = self._mail.setdefault(relay, GroupMail(self._now, lambda: self._members[relay]))
        state = self._state
        member = PlayedMember(self._gang, worker, birth_round, self._now, mail, state)
        self._members[worker] = member
        self._names[self._gang.server_name(member.pod)] = member

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
                extra["bytes"] = len(dumps(found))
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
    await played.start()
    print(json.dumps({"ready": True}), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(await played.do(json.loads(line))), flush=True)


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1])))
