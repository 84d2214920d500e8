"""A sidecar for tests, with a real Unix socket in this process, a directory and configurable faults.

It exchanges the same messages with ranks as the real sidecar, so that training code can be tested without a
cluster.
"""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from holdfast.directory.open_folder import ServiceOptions
from holdfast.directory.persister import Connection, DirectoryService
from holdfast_core.contract import LAYOUTS_DIR, SLOTS_DIR, SOCKET_NAME, PodContract
from holdfast_core.errors import FormatError
from holdfast_core.ids import JobUid, RestartRound, Step, Worker
from holdfast_core.messages.schema import (
    Hello,
    Plan,
    Policy,
    Progress,
    Refusal,
    Refused,
)

JOB_UID = JobUid("fake-job")


@dataclass(slots=True)
class Faults:
    """Faults of the sidecar. They may be changed at any time."""

    refuse: dict[str, Refusal] = field(default_factory=dict)
    """Code with which to refuse a message, by the message's name."""
    delay_seconds: dict[str, float] = field(default_factory=dict)
    """Delay of the reply to a message, by the message's name."""


class FakeSidecar:
    """A fake sidecar. Use it as a context manager, and give `environment()` to the training process.

    Args:
        shared_dir: Directory in place of the pod's shared volume.
        node_dir: Directory for the checkpoints.
        world_size: Number of ranks that must save before a checkpoint is committed.
        interval_steps: Steps between saves; 0 means on request only.
        slots: Slots of each rank.
        keep_last: Number of checkpoints to keep.
        straggler_factor: `Policy.straggler_factor`; 0 means that ranks do not measure their work.
    """

    def __init__(
        self,
        shared_dir: Path,
        node_dir: Path,
        *,
        world_size: int = 1,
        interval_steps: int = 0,
        slots: int = 2,
        keep_last: int = 3,
        straggler_factor: float = 0.0,
    ) -> None:
        self._shared = shared_dir
        self._node = node_dir
        self._world_size = world_size
        self._policy = Policy(
            interval_steps=interval_steps,
            slots=slots,
            keep_last=keep_last,
            peer_copies=0,
            straggler_factor=straggler_factor,
        )
        self._listener: socket.socket | None = None
        self._connections: list[Connection] = []
        self.faults = Faults()
        self.received: list[Any] = []
        """Every received message, in order."""
        self.service: DirectoryService | None = None
        self.round: RestartRound | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self, round_: int | None = None) -> None:
        """Open the directory, choose the newest checkpoint and listen.

        Args:
            round_: The round; None chooses a new one.
        """
        self._shared.mkdir(parents=True, exist_ok=True)
        self.begin_round(round_)
        path = self._shared / SOCKET_NAME
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        listener.listen()
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def begin_round(self, round_: int | None = None) -> None:
        """Finish the staged saves, and begin a new round with a new restore point."""
        if self.service is not None:
            self.service.finish(0.0)
        service = DirectoryService.start(
            ServiceOptions(
                self._node,
                self._shared / SLOTS_DIR,
                self._shared / LAYOUTS_DIR,
                self._world_size,
                range(self._world_size),
                self._policy,
                round=None if round_ is None else RestartRound(round_),
            )
        )
        self.service = service
        self.round = service.round

    def stop(self) -> None:
        """Stop as at SIGTERM, after writing what was staged."""
        self._close_sockets()
        if self.service is not None:
            self.service.finish(1.0)
            self.service = None

    def die(self) -> None:
        """Stop as at SIGKILL. The connections end, and what was staged is not written."""
        self._close_sockets()
        if self.service is not None:
            self.service.abort()
            self.service = None

    def environment(self, **changes: str) -> dict[str, str]:
        """Return the variables of the trainer container, updated with `changes`."""
        contract = PodContract(
            JOB_UID,
            "fake",
            "default",
            Worker(0),
            RestartRound(0),
            self._world_size,
            str(self._shared),
            self._policy.slots,
        )
        return {**contract.to_env(), **changes}

    # ------------------------------------------------------------------ pushes

    def request_save(self) -> None:
        """Request a save of a step that no rank has reported as finished yet."""
        round_ = self._round()
        done = (m.step for m in self.received if isinstance(m, Progress) and m.round == round_)
        self._push_ranks(Plan(round_, save_from=Step(max(done, default=-1) + 1)))

    def request_stop(self) -> None:
        self._push_ranks(Plan(self._round(), stop=True))

    # ------------------------------------------------------------------ inside

    def _round(self) -> RestartRound:
        return RestartRound(0) if self.round is None else self.round

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return  # the listener was closed
            if self.service is None:
                sock.close()
                continue
            connection = Connection(sock, self._current, self._intercept, self._note)
            self._connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        try:
            connection.serve()
        except FormatError as error:
            self._note(error)

    def _current(self) -> DirectoryService:
        if self.service is None:
            raise FormatError("the fake sidecar is stopped")
        return self.service

    def _note(self, message: Any) -> None:
        self.received.append(message)

    def _intercept(self, message: Any) -> Any:
        name = type(message).__name__
        delay = self.faults.delay_seconds.get(name, 0.0)
        if delay:
            threading.Event().wait(delay)
        code = self.faults.refuse.get(name)
        if code is not None:
            return Refused(code, f"the test refuses {name}", self._round())
        return None

    def _push_ranks(self, message: Any) -> None:
        for connection in self._connections:
            hello: Hello | None = connection.hello
            if hello is not None and hello.rank is not None:
                connection.push(message)

    def _close_sockets(self) -> None:
        if self._listener is not None:
            # `close` alone would not wake the thread in `accept`.
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        (self._shared / SOCKET_NAME).unlink(missing_ok=True)
        for connection in self._connections:
            connection.close()
        self._connections = []
