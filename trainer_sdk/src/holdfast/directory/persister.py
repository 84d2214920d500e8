"""The persister: the process that writes a rank's checkpoints to a directory.

Its command is `python -m holdfast.directory.persister FD OPTIONS`. FD is a socket to the trainer.

The SDK starts it where there is no sidecar. In a separate process, digests, fsync and commits never hold
the trainer's interpreter lock. When the connection to the trainer has ended, the persister writes what
was staged (a run that starts in the meantime waits for this), waits a bounded time for the other ranks,
and exits.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from holdfast.base.settings import current_environment
from holdfast.directory.open_folder import UPLOAD_SECONDS, OpenFolder, ServiceOptions, parse_options
from holdfast.directory.pending import describe
from holdfast.directory.processes import claim
from holdfast.directory.service import Connection, DirectoryService
from holdfast_core.errors import ConfigError, UnavailableError
from holdfast_core.failpoint import failpoint
from holdfast_core.ids import RestartRound
from holdfast_core.messages.schema import Hello, Refusal, Refused
from holdfast_core.messages.socket_frames import receive_frame, send_frame
from holdfast_core.pacing import BackgroundLimit
from holdfast_core.store_url import parse_store_url

logger = logging.getLogger(__name__)

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
    failpoint("persister.started")
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
    from holdfast.directory.uploads import Uploads

    def is_abandoned(seconds: float) -> bool:
        """Wait, and return whether the trainer has ended meanwhile."""
        poll = select.poll()
        poll.register(sock, select.POLLRDHUP)
        return bool(poll.poll(seconds * 1000))

    url = parse_store_url(options.store)
    records = options.root / "store"
    store = FolderStore(url, current_environment(), records, options.run_id, is_abandoned)

    def make_uploads(folder: OpenFolder, background: BackgroundLimit) -> Uploads:
        uploads = Uploads(folder, store, background, options.store_keep_last)
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
