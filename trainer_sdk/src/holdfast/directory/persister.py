"""The persister: the process that writes a rank's checkpoints to a directory.

Its command is `python -m holdfast.directory.persister FD OPTIONS`. FD is a socket to the trainer.

The SDK starts it where there is no sidecar. In a separate process, digests, fsync and commits never hold
the trainer's interpreter lock. When the connection to the trainer has ended, the persister writes what
was staged (a run that starts in the meantime waits for this), waits a bounded time for the other ranks,
and exits.

Its service answers the messages of a sidecar from the directory: restore, fill, stage, levels. One service
serves one rank, or all ranks of a test. The threads of its connections call it. `restore.py` answers
restores, and `saves.py` writes and commits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from holdfast.base.settings import current_environment
from holdfast.directory.open_folder import UPLOAD_SECONDS, OpenFolder, ServiceOptions, parse_options
from holdfast.directory.processes import claim
from holdfast.directory.restore import FolderRestore
from holdfast.directory.saves import FolderSaves, PendingCommits, Push, describe
from holdfast_core.errors import (
    ConfigError,
    HoldfastError,
    RefusedError,
    UnavailableError,
)
from holdfast_core.ids import RestartRound
from holdfast_core.messages.common import raise_refused, refusal_of
from holdfast_core.messages.schema import (
    Fill,
    Hello,
    HelloReply,
    Ok,
    Progress,
    Refusal,
    Refused,
    Restore,
    RestorePoint,
    Stage,
    TakeStore,
)
from holdfast_core.messages.socket_frames import receive_frame, send_frame
from holdfast_core.pacing import BackgroundLimit
from holdfast_core.shm.shared_files import LayoutFiles
from holdfast_core.store_url import parse_store_url

if TYPE_CHECKING:
    from holdfast.directory.folder_store import FolderStore
    from holdfast.directory.uploads import FolderUploads


logger = logging.getLogger(__name__)

MakeUploads = Callable[[OpenFolder, BackgroundLimit], "FolderUploads"]
"""Starts the uploads of a folder that has an object store."""


class DirectoryService:
    """Service over one directory. `start` returns a running one. Call `finish` at its end."""

    def __init__(
        self,
        options: ServiceOptions,
        folder: OpenFolder,
        saves: FolderSaves,
        background: BackgroundLimit,
        uploads: FolderUploads | None,
    ) -> None:
        self._uploads = uploads
        self._options = options
        self._folder = folder
        self._restores = FolderRestore(folder, LayoutFiles(options.layouts_dir))
        self._saves = saves
        self._background = background
        self._is_restored = False
        self.round = folder.round

    @classmethod
    def start(
        cls,
        options: ServiceOptions,
        on_worker_end: Callable[[BaseException], None] = lambda error: None,
        on_folder_lost: Callable[[], None] = lambda: None,
        store: FolderStore | None = None,
        make_uploads: MakeUploads | None = None,
    ) -> Self:
        """Open the directory, determine the round and the restore point, and start the thread of the saves.

        Args:
            options: Directory, ranks and policy.
            on_worker_end: Called in the thread of the saves when an exception has ended it.
            on_folder_lost: Called when the folder was deleted or unmounted. A new service must be started,
                which opens the folder again.
            store: The object store of the folder, for restores.
            make_uploads: Starts uploads to it.

        Raises:
            CorruptionError, UnavailableError: No restore point can be chosen, see `choose`.
            TierError: The directory cannot be opened.
        """
        folder = OpenFolder.open(options, store)
        background = BackgroundLimit(options.slots_dir)
        background.begin()
        has_uploads = make_uploads is not None and not options.read_only
        uploads = make_uploads(folder, background) if make_uploads and has_uploads else None
        commits = PendingCommits(folder, uploads, on_folder_lost)
        saves = FolderSaves(folder, background, commits, on_worker_end)
        saves.start()
        return cls(options, folder, saves, background, uploads)

    @property
    def restore_point(self) -> RestorePoint:
        return self._restores.point

    def write_out(self) -> None:
        """Wait until every staged save is durable on this rank or has failed."""
        self._saves.write_out()

    def finish(self, commit_seconds: float, upload_seconds: float = 0.0) -> bool:
        """Write what is staged, wait for the other ranks' shards and for uploads, then stop.

        Args:
            commit_seconds: Longest wait for the other ranks' shards.
            upload_seconds: Longest wait for uploads to the store.

        Returns:
            Whether every save of this service was committed, and persisted if there is a store.
        """
        committed = self._saves.finish(commit_seconds)
        self._folder.remove_spare_files()
        if self._uploads is not None:
            committed = self._uploads.finish(upload_seconds) and committed
        return committed

    def abort(self) -> None:
        """Stop as a kill would, without writing what is staged."""
        self._saves.abort()
        if self._uploads is not None:
            self._uploads.abort()

    def listen(self, push: Push) -> None:
        """Send a connection, by its `push`, what became of uploads."""
        if self._uploads is not None:
            self._uploads.listen(push)

    def handle(self, message: Any, push: Push) -> Any:
        """Answer a request and return the reply.

        Args:
            message: Restore, Fill or Stage.
            push: Sends later messages about a staged save to its rank.

        Raises:
            StaleRoundError: The request is of an older round.
            HoldfastError: The request cannot be served.
        """
        if not isinstance(message, Restore | Fill | TakeStore | Stage):
            raise RefusedError(
                Refusal.BAD_REQUEST,
                f"{type(message).__name__} is not a request that a folder serves",
            )
        raise_refused(self._saves.round.refusal(message.round))
        match message:
            case Restore():
                return self._restores.restore(message)
            case Fill():
                return self._restores.fill(message)
            case TakeStore():
                return self._take_store()
            case Stage():
                self._keep_restored()
                return self._saves.stage(message, push)

    def progressed(self, message: Progress) -> None:
        """Record a finished step: writing slows down where it delays training steps."""
        if message.rank == self._options.own_ranks[0]:
            self._background.step_done(message.step, message.blocked_seconds)

    def hello_reply(self) -> HelloReply:
        return HelloReply(self.round, self._options.policy)

    def _take_store(self) -> Ok:
        if self._uploads is not None:
            try:
                self._uploads.take()
            except HoldfastError as error:
                raise RefusedError(Refusal.BAD_REQUEST, str(error)) from error
        return Ok(self.round)

    def _keep_restored(self) -> None:
        """Before the first save all ranks have restored. Record what they brought from the store."""
        if self._options.leads and not self._is_restored:
            self._is_restored = True
            self._folder.keep_restored()


class Connection:
    """Serves one connection of a trainer.

    Args:
        sock: The connection. It is closed at the end of `serve`.
        service: Returns what answers the requests.
        intercept: May return a reply in place of the service; None lets the service answer.
        on_message: Called with each message before it is answered, but with a Hello after its answer:
            messages pushed before that do not belong to this connection.
    """

    def __init__(
        self,
        sock: socket.socket,
        service: Callable[[], DirectoryService],
        intercept: Callable[[Any], Any] = lambda _: None,
        on_message: Callable[[Any], None] = lambda _: None,
    ) -> None:
        self._socket = sock
        self._service = service
        self._intercept = intercept
        self._on_message = on_message
        self._lock = threading.Lock()
        self.hello: Hello | None = None

    def serve(self) -> None:
        """Serve requests until the other side closes the connection. Raises FormatError for a bad frame."""
        try:
            while (frame := receive_frame(self._socket)) is not None:
                message = frame.message
                if not isinstance(message, Hello):
                    self._on_message(message)
                if isinstance(message, Progress):
                    self._service().progressed(message)
                elif frame.id != 0:
                    self._send(self._answer(message), frame.id)
                if isinstance(message, Hello):
                    self._on_message(message)
        except UnavailableError:
            return
        finally:
            self.close()

    def push(self, message: Any) -> None:
        """Send a message without a request.

        Nothing is raised if the connection has ended: the other side stages again after it reconnects.
        """
        self._send(message, 0)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the other side has already closed it
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send(self, message: Any, id_: int) -> None:
        with self._lock:
            try:
                send_frame(self._socket, message, id_)
            except UnavailableError:
                return

    def _answer(self, message: Any) -> Any:
        instead = self._intercept(message)
        if instead is not None:
            return instead
        if isinstance(message, Hello):
            self.hello = message
            return self._service().hello_reply()
        try:
            return self._service().handle(message, self.push)
        except HoldfastError as error:
            return self._refused(error)
        except BaseException as error:
            # Otherwise the process would end, and the trainer would repeat the request to the next one.
            logger.exception("serving %s failed", type(message).__name__)
            return self._refused(error)

    def _refused(self, error: BaseException) -> Refused:
        return Refused(refusal_of(error), describe(error), self._service().round)


_NICENESS = 10
"""Nice value of this process: the trainer's threads get about nine tenths of a core that both need."""
_COMMIT_SECONDS = 30.0
"""Time that the last checkpoint may wait for the shards of ranks that still write."""


_WRITER_ENDED = 70
"""Exit status (EX_SOFTWARE): the writer thread failed. The trainer starts another persister and stages its
unsettled saves again."""

_FOLDER_LOST = 72
"""Exit status (EX_OSFILE): the folder was deleted or unmounted. The next persister finds out which."""


def main(argv: Sequence[str]) -> int:
    """Serve the trainer. Return 0 if every staged save was committed."""
    # The trainer handles these signals, and this process ends after it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICENESS)
    logging.basicConfig(level=logging.WARNING, format="[holdfast] %(message)s", stream=sys.stderr)
    sock = socket.socket(fileno=int(argv[0]))
    options = parse_options(argv[1])
    try:
        service = _start(options, sock)
    except Exception as error:  # noqa: BLE001 - the trainer logs it
        _refuse_hello(sock, error)
        return 1
    writing = None if options.writer is None else claim(options.writer)
    sys.audit("holdfast.persister.started")
    try:
        _serve(sock, service)
    except Exception:
        logger.exception(
            "the connection to the trainer failed; the saves that it handed over are written"
        )
    service.write_out()
    if writing is not None:  # the next run can commit what all ranks have written
        writing.release()
    return 0 if service.finish(_COMMIT_SECONDS, UPLOAD_SECONDS) else 1


def _serve(sock: socket.socket, service: DirectoryService) -> None:
    def received(message: Any) -> None:
        if isinstance(message, Hello):
            service.listen(connection.push)

    connection = Connection(sock, lambda: service, on_message=received)
    connection.serve()


def _start(options: ServiceOptions, sock: socket.socket) -> DirectoryService:
    """Start the service, with an object store if the folder has one. Raises what its `start` raises."""
    start = partial(
        DirectoryService.start,
        options,
        on_worker_end=lambda error: os._exit(_WRITER_ENDED),
        on_folder_lost=lambda: os._exit(_FOLDER_LOST),
    )
    if options.store is None:
        return start()
    # Only a process that has a store imports what the extra installs.
    from holdfast.directory.folder_store import FolderStore
    from holdfast.directory.uploads import FolderUploads

    def is_abandoned(seconds: float) -> bool:
        """Wait, and return whether the trainer has ended meanwhile."""
        poll = select.poll()
        poll.register(sock, select.POLLRDHUP)
        return bool(poll.poll(seconds * 1000))

    url = parse_store_url(options.store)
    records = options.root / "store"
    store = FolderStore(url, current_environment(), records, options.run_id, is_abandoned)

    def make_uploads(folder: OpenFolder, background: BackgroundLimit) -> FolderUploads:
        uploads = FolderUploads(folder, store, background, options.store_keep_last)
        uploads.start()
        return uploads

    return start(store=store, make_uploads=make_uploads)


def _refuse_hello(sock: socket.socket, error: Exception) -> None:
    """Refuse the trainer's Hello with the error as the reason."""
    frame = receive_frame(sock)
    if frame is not None:
        code = Refusal.NOT_FOUND
        if isinstance(error, UnavailableError):
            code = Refusal.BUSY
        elif isinstance(error, ConfigError):
            code = Refusal.BAD_REQUEST
        refused = Refused(code, describe(error), RestartRound(0))
        send_frame(sock, refused, frame.id)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
