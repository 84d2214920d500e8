"""Answers the messages of a sidecar from a directory: restore, fill, stage, levels.

One instance serves one rank (`holdfast.directory.persister`), or all ranks of a test. Connection threads
call it. `restore.py` answers restores, and the thread of `save_worker.py` writes and commits saves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from holdfast.base.layouts import LayoutFiles
from holdfast.directory.open_folder import OpenFolder
from holdfast.directory.options import ServiceOptions
from holdfast.directory.restore import FolderRestore
from holdfast.directory.save_worker import Push, SaveWorker
from holdfast_core.errors import RefusedError, StaleRoundError
from holdfast_core.ids import RestartRound
from holdfast_core.messages.schema import (
    Fill,
    HelloReply,
    Progress,
    Refusal,
    Restore,
    RestorePoint,
    Stage,
    StageSegment,
)
from holdfast_core.pacing.background_limit import BackgroundLimit


class DirectoryService:
    """Service over one directory. `start` returns a running one. Call `finish` at its end."""

    def __init__(
        self,
        options: ServiceOptions,
        folder: OpenFolder,
        worker: SaveWorker,
        background: BackgroundLimit,
    ) -> None:
        self._options = options
        self._folder = folder
        self._restores = FolderRestore(folder, LayoutFiles(options.layouts_dir))
        self._worker = worker
        self._background = background
        self.round = folder.round

    @classmethod
    def start(
        cls,
        options: ServiceOptions,
        on_worker_end: Callable[[BaseException], None] = lambda error: None,
        on_folder_lost: Callable[[], None] = lambda: None,
    ) -> Self:
        """Open the directory, determine the round and the restore point, and start the worker thread.

        Args:
            options: Directory, ranks and policy.
            on_worker_end: Called in the worker thread when an exception has ended it.
            on_folder_lost: Called when the folder was deleted or unmounted. A new service must be started,
                which opens the folder again.

        Raises:
            CorruptionError, UnavailableError: No restore point can be chosen, see `choose`.
            TierError: The directory cannot be opened.
        """
        folder = OpenFolder.open(options)
        background = BackgroundLimit(options.slots_dir)
        background.begin()
        layouts = LayoutFiles(options.layouts_dir)
        worker = SaveWorker(folder, layouts, background, on_worker_end, on_folder_lost)
        worker.start()
        return cls(options, folder, worker, background)

    @property
    def current_round(self) -> RestartRound:
        return self.round

    @property
    def restore_point(self) -> RestorePoint:
        return self._restores.point

    def write_out(self) -> None:
        """Wait until every staged save is durable on this rank or has failed."""
        self._worker.write_out()

    def finish(self, commit_seconds: float) -> bool:
        """Write what is staged, wait up to `commit_seconds` for the other ranks' shards, then stop.

        Returns whether every save of this service was committed.
        """
        committed = self._worker.finish(commit_seconds)
        self._folder.remove_spare_files()
        return committed

    def abort(self) -> None:
        """Stop as a kill would, without writing what is staged."""
        self._worker.abort()

    def handle(self, message: Any, push: Push) -> Any:
        """Answer a request and return the reply.

        Args:
            message: Restore, Fill or Stage.
            push: Sends later messages about a staged save to its rank.

        Raises:
            StaleRoundError: The request is of an older round.
            HoldfastError: The request cannot be served.
        """
        match message:
            case Restore():
                self._fence(message.round)
                return self._restores.restore(message)
            case Fill():
                self._fence(message.round)
                return self._restores.fill(message)
            case Stage():
                self._fence(message.round)
                return self._worker.stage(message, push)
            case StageSegment():
                self._fence(message.stage.round)
                return self._worker.stage_segment(message, push)
            case _:
                raise RefusedError(
                    Refusal.BAD_REQUEST,
                    (f"{type(message).__name__} is not a request that a folder serves"),
                )

    def progressed(self, message: Progress) -> None:
        """Record a finished step: writing slows down where it delays training steps."""
        if message.rank == self._options.own_ranks[0]:
            self._background.step_done(message.step, message.blocked_seconds)

    def drop_segments(self, push: Push) -> None:
        """Stop the saves that a connection has begun to stream and not completed.

        Args:
            push: The `push` of the connection's requests.
        """
        self._worker.drop_segments(push)

    def hello_reply(self) -> HelloReply:
        return HelloReply(self.round, self._options.policy)

    def _fence(self, round_: RestartRound) -> None:
        if round_ < self.round:
            raise StaleRoundError(
                f"the request carries round {round_}, this folder is in round {self.round}",
                own_round=self.round,
            )
        if round_ > self.round:
            raise RefusedError(
                Refusal.FUTURE_ROUND,
                (f"round {round_} has not begun in this folder, which is in round {self.round}"),
            )
