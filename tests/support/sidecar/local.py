"""A client of the sidecar's socket, and a launcher double without processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support.sidecar.waiting import DEADLINE_SECONDS, until

from holdfast_core.clock import SystemClock
from holdfast_core.errors import UnavailableError
from holdfast_core.ids import (
    JobUid,
    RestartRound,
)
from holdfast_core.messages.common import raise_refused
from holdfast_core.messages.schema import (
    PROTOCOL_VERSION,
    DeadRank,
    Hello,
    HelloReply,
    LauncherPlan,
    LauncherState,
    Refused,
    Run,
    StoreAddress,
)
from holdfast_core.messages.socket_frames import Frame, read_frame, write_frame


class LocalClient:
    """Client with one connection to a sidecar's socket."""

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
        """Connect and send the hello. Retries until the socket accepts connections."""
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
        """Send a request and return its reply.

        Raises RefusedError or a related error for a refusal, and UnavailableError if the sidecar closes the
        connection, for example because it dies, before it has replied.
        """
        assert self._writer is not None
        assert self._reader is not None
        if self._reader.done():
            raise UnavailableError(f"the sidecar has closed the connection at {self._path}")
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
        try:
            with suppress(UnavailableError):  # the sidecar was killed
                while (frame := await read_frame(reader)) is not None:
                    self._take(frame)
        finally:
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(
                        UnavailableError(f"the sidecar closed {self._path} without a reply")
                    )

    def _take(self, frame: Frame) -> None:
        if frame.id == 0:
            self.pushed.append(frame.message)
            self.on_push(frame.message)
        elif (future := self._waiting.pop(frame.id, None)) is not None and not future.done():
            future.set_result(frame.message)


class FakeLauncher(LocalClient):
    """Launcher double without processes that carries out plans."""

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
                round=running,
                last_round=last_round,
            ),
        )
        self._port = port
        self._store: StoreAddress | None = None
        self._below: RestartRound | None = None
        self._running = running
        self._finished = False
        self.run: Run | None = None
        self.ended: list[RestartRound] = []
        self.on_push = self._obey

    def _obey(self, plan: LauncherPlan) -> None:
        if self._running is not None and self._running < plan.round:
            self._running = None
            self.ended.append(plan.round)
        self._below = plan.round
        if plan.hosts_store:
            self._store = StoreAddress(plan.round, self._port, "secret of the round")
        if plan.run is not None and plan.run != self.run:
            self.run, self._running = plan.run, plan.run.round
        self.report()

    def report(self, *dead: DeadRank) -> None:
        """Send the state, with these ranks that have ended by themselves."""
        below = self._below if self._running is None else None
        self.push(
            LauncherState(
                self._running, below, dead=dead, store=self._store, finished=self._finished
            )
        )

    async def finish(self) -> None:
        """Report that all ranks of the pod returned 0, and wait for the release."""
        self._finished = True
        self.report()
        await until(lambda: any(plan.released for plan in self.pushed), "the release")

    async def runs(self, round_: int) -> Run:
        """Wait for the Run message of this round and return it."""
        run: Run = await until(
            lambda: self.run if self.run is not None and self.run.round == round_ else None,
            f"Run of round {round_}",
        )
        return run
