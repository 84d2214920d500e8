"""For tests and the local demo: a scripted launcher and ranks on the real socket with real slot
files, a scripted operator over HTTPS, certificates, and a sidecar as a child process.

Nothing here is used by the sidecar itself.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from holdfast_core.clock import SystemClock
from holdfast_core.contract import SidecarContract, peer_dns_name
from holdfast_core.errors import HoldfastError
from holdfast_core.format.digest import digest_of, hex_of
from holdfast_core.format.rank_layout import RankLayout, TensorSlice
from holdfast_core.format.slot import (
    HEADER_BYTES,
    STATE_OFFSET,
    SlotHeader,
    SlotState,
    pack_state,
    slot_name,
)
from holdfast_core.ids import (
    ByteRange,
    Digest,
    JobUid,
    Level,
    Rank,
    RestartRound,
    Step,
    Worker,
)
from holdfast_core.transfer.codec import dumps, loads
from holdfast_core.transfer.messages import (
    PROTOCOL_VERSION,
    CoordinatorState,
    CopyAssignment,
    End,
    Ended,
    Fill,
    Filled,
    Hello,
    HelloReply,
    HostStore,
    Inventory,
    LevelReached,
    LocalRole,
    Member,
    Policy,
    Progress,
    Refused,
    Restore,
    RestorePoint,
    RestoreReply,
    Round,
    Run,
    Seal,
    SlotOffer,
    Stage,
    Staged,
    StoreAddress,
)
from holdfast_core.transfer.socket_frames import read_frame, write_frame
from holdfast_sidecar.client import raise_refused
from holdfast_sidecar.settings import PORTS_FILE, inherited

T = TypeVar("T")

DEADLINE_SECONDS = 30.0


async def until(condition: Callable[[], Any], what: str, seconds: float = DEADLINE_SECONDS) -> Any:
    """Poll until `condition` is truthy; AssertionError with `what` when the time is over."""
    clock = SystemClock()
    deadline = clock.monotonic() + seconds
    while not (value := condition()):
        if clock.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
        await clock.sleep(0.02)
    return value


# --------------------------------------------------------------------------- local side


class LocalClient:
    """One connection to a sidecar's socket."""

    def __init__(self, path: Path, hello: Hello) -> None:
        self._path = path
        self._hello = hello
        self._reader: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._next_id = 0
        self.pushed: list[Any] = []
        self.on_push: Callable[[Any], None] = lambda message: None

    async def connect(self) -> HelloReply:
        """Retries until the socket is there."""
        clock = SystemClock()
        deadline = clock.monotonic() + DEADLINE_SECONDS
        while True:
            try:
                reader, self._writer = await asyncio.open_unix_connection(str(self._path))
                break
            except OSError:
                if clock.monotonic() > deadline:
                    raise
                await clock.sleep(0.05)
        self._reader = asyncio.create_task(self._read(reader))
        reply = await self.request(self._hello)
        assert isinstance(reply, HelloReply), reply
        return reply

    async def request(self, message: Any) -> Any:
        """The reply. Raises RefusedError and its relatives for a refusal."""
        assert self._writer is not None
        self._next_id += 1
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[self._next_id] = future
        self._writer.write(write_frame(message, self._next_id))
        reply = await asyncio.wait_for(future, DEADLINE_SECONDS)
        if isinstance(reply, Refused):
            raise_refused(reply)
        return reply

    def push(self, message: Any) -> None:
        assert self._writer is not None
        self._writer.write(write_frame(message, 0))

    def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
        if self._writer is not None:
            self._writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while (frame := await read_frame(reader)) is not None:
            if frame.id == 0:
                self.pushed.append(frame.message)
                self.on_push(frame.message)
            elif (future := self._waiting.pop(frame.id, None)) is not None and not future.done():
                future.set_result(frame.message)


class FakeLauncher(LocalClient):
    """A launcher without processes: obeys HostStore, Run and End."""

    def __init__(
        self,
        path: Path,
        job_uid: JobUid,
        *,
        running: RestartRound | None = None,
        last_round: RestartRound | None = None,
        port: int = 29400,
    ) -> None:
        super().__init__(
            path,
            Hello(
                PROTOCOL_VERSION,
                job_uid,
                LocalRole.LAUNCHER,
                round=running,
                last_round=last_round,
            ),
        )
        self._port = port
        self.run: Run | None = None
        self.ended: list[RestartRound] = []
        self.on_push = self._obey

    def _obey(self, message: Any) -> None:
        match message:
            case HostStore():
                self.push(StoreAddress(message.round, self._port))
            case Run():
                self.run = message
            case End():
                self.ended.append(message.round)
                self.push(Ended(message.round))

    async def runs(self, round_: int) -> Run:
        """Wait for Run of this round."""
        run: Run = await until(
            lambda: self.run if self.run is not None and self.run.round == round_ else None,
            f"Run of round {round_}",
        )
        return run


def rank_document(rank: int, payload_bytes: int) -> bytes:
    """A layout of one rank: one tensor over the whole payload."""
    return RankLayout(
        rank=Rank(rank),
        tensors={
            f"w{rank}": TensorSlice(
                "U8", (payload_bytes,), (0,), (payload_bytes,), ByteRange(0, payload_bytes)
            )
        },
        objects={},
        payload_bytes=payload_bytes,
    ).to_bytes()


class FakeRank(LocalClient):
    """A rank with real slot files: stages bytes and gets them back."""

    def __init__(
        self,
        shared: Path,
        job_uid: JobUid,
        rank: int,
        round_: int,
        *,
        capacity_bytes: int = 1 << 20,
        slots: int = 2,
    ) -> None:
        super().__init__(
            shared / "holdfast.sock",
            Hello(
                PROTOCOL_VERSION,
                job_uid,
                LocalRole.RANK,
                rank=Rank(rank),
                round=RestartRound(round_),
            ),
        )
        self._shared = shared
        self.rank = Rank(rank)
        self.round = RestartRound(round_)
        self._capacity = capacity_bytes
        self.names = tuple(slot_name(self.rank, index) for index in range(slots))
        directory = shared / "slots"
        directory.mkdir(mode=0o770, exist_ok=True)
        (shared / "layouts").mkdir(mode=0o770, exist_ok=True)
        for name in self.names:
            self._allocate(directory / name)

    def _allocate(self, path: Path) -> None:
        """Keeps a slot that is there: its bytes may be what the next restore wants."""
        if path.exists() and path.stat().st_size == HEADER_BYTES + self._capacity:
            return
        with path.open("wb") as file:
            file.write(SlotHeader(SlotState.FREE, self.rank, self._capacity).pack())
            file.truncate(HEADER_BYTES + self._capacity)

    def path(self, name: str) -> Path:
        return self._shared / "slots" / name

    def header(self, name: str) -> SlotHeader:
        with self.path(name).open("rb") as file:
            return SlotHeader.unpack(file.read(HEADER_BYTES))

    def payload(self, name: str) -> bytes:
        header = self.header(name)
        with self.path(name).open("rb") as file:
            file.seek(HEADER_BYTES)
            return file.read(header.payload_bytes)

    def fill_slot(self, name: str, step: int, data: bytes) -> None:
        """FILLING, the bytes, the header, FULL last: as the SDK does it."""
        header = SlotHeader(
            SlotState.FILLING, self.rank, self._capacity, self.round, Step(step), len(data)
        )
        with self.path(name).open("r+b") as file:
            file.write(header.pack())
            file.seek(HEADER_BYTES)
            file.write(data)
            file.flush()
            file.seek(STATE_OFFSET)
            file.write(pack_state(SlotState.FULL))

    def write_layout(self, payload_bytes: int) -> Digest:
        document = rank_document(self.rank, payload_bytes)
        digest = digest_of(document)
        path = self._shared / "layouts" / f"{hex_of(digest)}.json"
        temporary = path.with_suffix(f".{self.rank}.tmp")
        temporary.write_bytes(document)
        temporary.replace(path)
        return digest

    async def save(self, step: int, data: bytes) -> str:
        """Waits for a free slot, stages; returns the slot's name."""
        name: str = await until(
            lambda: next((n for n in self.names if self.header(n).state is SlotState.FREE), None),
            f"a free slot of rank {self.rank}",
        )
        self.fill_slot(name, step, data)
        message = self.stage_message(name, step, data)
        reply = await self.request(message)
        assert reply == Staged(Step(step)), reply
        return name

    def stage_message(self, name: str, step: int, data: bytes) -> Stage:
        layout = self.write_layout(len(data))
        return Stage(self.round, Step(step), self.rank, name, len(data), layout)

    async def reached(self, step: int, level: Level) -> None:
        """Wait until the sidecar has pushed this level (or a higher one) for the step."""
        order = (Level.LOCAL, Level.REPLICATED, Level.PERSISTED)

        def seen() -> bool:
            return any(
                isinstance(m, LevelReached)
                and m.step == step
                and order.index(m.level) >= order.index(level)
                for m in self.pushed
            )

        await until(seen, f"rank {self.rank}: step {step} at level {level}")

    def progress(self, step: int) -> None:
        self.push(Progress(self.round, self.rank, Step(step), {"loss": 1.0}))

    async def restore(self) -> tuple[RestorePoint, bytes | None, Filled | None]:
        """Restore and Fill: the point, the payload and where it came from."""
        reply = await self.request(Restore(self.round, self.rank))
        assert isinstance(reply, RestoreReply), reply
        if reply.restore_point.step is None:
            return reply.restore_point, None, None
        offers = tuple(SlotOffer(n, self._capacity) for n in self.names)
        filled = await self.request(Fill(self.round, self.rank, offers))
        assert isinstance(filled, Filled), filled
        return reply.restore_point, self.payload(filled.slot), filled


# --------------------------------------------------------------------------- processes


@dataclass(slots=True)
class SidecarProcess:
    """`python -m holdfast_sidecar` as a child, with its directories."""

    contract: SidecarContract
    log: Path
    process: subprocess.Popen[bytes] | None = None
    launches: int = 0

    @property
    def shared(self) -> Path:
        return Path(self.contract.shared_dir)

    @property
    def node(self) -> Path:
        return Path(self.contract.node_dir)

    def start(self, extra: dict[str, str] | None = None) -> None:
        for directory in (self.shared, self.node):
            directory.mkdir(parents=True, exist_ok=True)
        (self.shared / PORTS_FILE).unlink(missing_ok=True)
        self.launches += 1
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "holdfast_sidecar"],
                env={**inherited(), **self.contract.to_env(), **(extra or {})},
                stdout=log,
                stderr=log,
            )

    async def address(self) -> str:
        """`ip:control:bulk`, once the process listens."""
        path = self.shared / PORTS_FILE

        def ready() -> bool:
            if self.process is not None and self.process.poll() is not None:
                raise AssertionError(f"sidecar exited: {self.log.read_text()[-3000:]}")
            return path.exists()

        await until(ready, f"sidecar of {self.contract.pod_name} listens")
        ports = json.loads(path.read_text())
        return f"{self.contract.pod_ip}:{ports['control']}:{ports['bulk']}"

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


# --------------------------------------------------------------------------- operator


@dataclass(slots=True)
class FakeOperator:
    """Speaks to sidecars as the operator does; decides nothing."""

    job_uid: JobUid
    context: ssl.SSLContext
    members: dict[int, Member] = field(default_factory=dict)

    async def call(self, worker: int, path: str, message: Any, reply: type[T]) -> T:
        """POST (or GET when `message` is None). Raises the refusal."""
        member = self.members[worker]
        host, control, _ = member.address.split(":")
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self.context)) as session,
            session.request(
                "GET" if message is None else "POST",
                f"https://{host}:{control}{path}",
                data=None if message is None else dumps(message),
                server_hostname=peer_dns_name(member.pod, self.job_uid),
                timeout=aiohttp.ClientTimeout(total=DEADLINE_SECONDS + 30),
            ) as response,
        ):
            data = await response.read()
            if response.status != 200:
                raise_refused(loads(Refused, data))
            return loads(reply, data)

    async def seal(self, worker: int, round_: int) -> Inventory:
        return await self.call(worker, "/v1/seal", Seal(RestartRound(round_)), Inventory)

    async def round(self, worker: int, message: Round) -> Inventory:
        return await self.call(worker, "/v1/round", message, Inventory)

    async def round_all(self, message: Round) -> list[Inventory]:
        return list(await asyncio.gather(*(self.round(m.worker, message) for m in message.members)))

    async def inventory(self, worker: int) -> Inventory:
        return await self.call(worker, "/v1/inventory", None, Inventory)

    async def state(self, coordinator: int, since: int = 0, timeout: int = 0) -> CoordinatorState:
        return await self.call(
            coordinator, f"/v1/state?since={since}&timeout={timeout}", None, CoordinatorState
        )

    async def state_until(
        self,
        coordinator: int,
        condition: Callable[[CoordinatorState], bool],
        what: str,
        *,
        acknowledge: bool = True,
    ) -> CoordinatorState:
        """Long-poll as the operator does until the state is as wanted."""
        clock = SystemClock()
        deadline = clock.monotonic() + DEADLINE_SECONDS
        since = 0
        while True:
            try:
                state = await self.state(coordinator, since, 2)
            except (HoldfastError, aiohttp.ClientError):
                await clock.sleep(0.1)
                state = None
            if state is not None and condition(state):
                return state
            if clock.monotonic() > deadline:
                raise AssertionError(f"not within {DEADLINE_SECONDS} s: {what}; {state}")
            since = state.version if state is not None and acknowledge else 0

    def message(
        self,
        round_: int,
        *,
        version: int = 1,
        restore: RestorePoint | None = None,
        copies: tuple[tuple[int, int], ...] = (),
        policy: Policy | None = None,
        coordinator: int = 0,
        store_host: int = 0,
        last_persisted: RestorePoint | None = None,
    ) -> Round:
        """ROUND over the members known."""
        return Round(
            round=RestartRound(round_),
            version=version,
            restore_point=restore or RestorePoint(),
            coordinator=Worker(coordinator),
            store_host=Worker(store_host),
            workers=len(self.members),
            members=tuple(self.members[w] for w in sorted(self.members)),
            copies=tuple(CopyAssignment(Worker(a), Worker(b)) for a, b in copies),
            policy=policy or Policy(interval_steps=1, peer_copies=1 if copies else 0),
            last_persisted=last_persisted,
        )


def flip_a_bit(node_dir: Path, *, rank: int) -> Path:
    """Damage the payload of the one shard of `rank` on this node; returns its file."""
    (path,) = node_dir.rglob(f"rank{rank:06d}-*.shard")
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + 5000)
        byte = file.read(1)[0]
        file.seek(HEADER_BYTES + 5000)
        file.write(bytes([byte ^ 0x40]))
    return path
