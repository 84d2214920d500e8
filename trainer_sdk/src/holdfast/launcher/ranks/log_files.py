"""Files for the output of ranks.

The files of a rank are DIR/<run id>/attempt_<round>/<rank>/stdout.log and stderr.log. A run that is started
again under the same run id appends to them.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from holdfast.launcher.command_line.log_options import LogOptions, Streams
from holdfast_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StreamFile:
    """A file that holds a stream of a rank, and whether the console shows the stream, too."""

    file: BinaryIO
    on_console: bool


class LogFiles:
    """Opens the files of ranks.

    Args:
        options: What the command line says.
        run_id: Identity of the run.
    """

    def __init__(self, options: LogOptions, run_id: str) -> None:
        self._options = options
        self._run_id = re.sub(r"[^A-Za-z0-9._-]", "_", run_id) or "run"
        self._root: Path | None = None

    def prepare(self) -> Path | None:
        """Create the directory and return it, or None if no stream goes to a file.

        Raises ConfigError where the directory cannot be created.
        """
        options = self._options
        if not options.redirects and not options.tee:
            return None
        try:
            base = Path(options.directory or tempfile.mkdtemp(prefix="holdfast-logs-"))
            self._root = base / self._run_id
            self._root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"holdfast run: --log-dir {options.directory}: {error}") from error
        return self._root

    def open(self, local_rank: int, rank: int, attempt: int) -> dict[Streams, StreamFile]:
        """Open the files of a rank. The caller closes them. Raises OSError."""
        if self._root is None:
            return {}
        redirected, teed = (c.of(local_rank) for c in (self._options.redirects, self._options.tee))
        files = {}
        for stream, name in ((Streams.STDOUT, "stdout.log"), (Streams.STDERR, "stderr.log")):
            if stream & (redirected | teed):
                path = self._root / f"attempt_{attempt}" / str(rank) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                files[stream] = StreamFile(path.open("ab"), on_console=bool(stream & teed))
        return files
