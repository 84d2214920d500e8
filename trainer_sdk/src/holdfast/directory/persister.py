"""The process that writes a rank's checkpoints to a directory.

Its command is `python -m holdfast.directory.persister FD OPTIONS`.

Started by the SDK where there is no sidecar, so that digests, fsync and commits never take the
trainer's interpreter lock. It ends with the trainer: after the connection ends it writes what was
staged (a run that starts meanwhile waits for that), waits a bounded time for the other ranks, and
leaves.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence

from holdfast.directory.claims import claim
from holdfast.directory.connection import Connection, in_words
from holdfast.directory.options import parse_options
from holdfast.directory.service import DirectoryService
from holdfast_core.errors import UnavailableError
from holdfast_core.failpoint import failpoint
from holdfast_core.ids import RestartRound
from holdfast_core.messages.schema import Refusal, Refused
from holdfast_core.messages.socket_frames import receive_frame, send_frame

logger = logging.getLogger(__name__)

_NICENESS = 10
"""Where cores are scarce the trainer's threads come first, nine times out of ten."""
_COMMIT_SECONDS = 30.0
"""How long the last checkpoint may wait for the shards of ranks that still write."""


_WRITER_ENDED = 70
"""Exit status (EX_SOFTWARE): the trainer starts another process, and hands over again what it holds."""

_FOLDER_LOST = 72
"""Exit status (EX_OSFILE): the folder was deleted or unmounted. The next process looks which."""


def main(argv: Sequence[str]) -> int:
    """0 when everything that was staged has been committed."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they are the trainer's; its end is ours
    os.nice(_NICENESS)
    logging.basicConfig(level=logging.WARNING, format="[holdfast] %(message)s", stream=sys.stderr)
    sock = socket.socket(fileno=int(argv[0]))
    options = parse_options(argv[1])
    service = DirectoryService(
        options,
        on_worker_end=lambda error: os._exit(_WRITER_ENDED),
        on_folder_lost=lambda: os._exit(_FOLDER_LOST),
    )
    try:
        service.start()
    except Exception as error:  # noqa: BLE001 - the trainer logs it
        _refuse_hello(sock, error)
        return 1
    writing = None if options.writer is None else claim(options.writer)
    failpoint("persister.started")
    try:
        Connection(sock, service).serve()
    except Exception:
        logger.exception("the connection to the trainer failed; what it has handed over is written")
    service.write_out()
    if writing is not None:  # what all ranks have written, the next run may commit itself
        writing.release()
    return 0 if service.finish(_COMMIT_SECONDS) else 1


def _refuse_hello(sock: socket.socket, error: Exception) -> None:
    """The trainer hears why, in the reply to its Hello."""
    frame = receive_frame(sock)
    if frame is not None:
        code = Refusal.BUSY if isinstance(error, UnavailableError) else Refusal.NOT_FOUND
        refused = Refused(code, in_words(error), RestartRound(0))
        send_frame(sock, refused, frame.id)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
