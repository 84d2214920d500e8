"""`logs`: the logs of all ranks of a job, merged by time, with the rank before each line.

The ranks of a pod share its log. The launcher writes `[rank N] ` before each line of a rank, and says on a
line of its own when it forks the ranks of a round. What a script prints is not trusted: a line is cut at
MAX_LINE_BYTES, and control characters are shown as text.
"""

from __future__ import annotations

import heapq
import json
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from holdfast_cli.errors import CommandError, NotFound, StateError, UsageError
from holdfast_cli.gangs import MAX_STREAMS, pods_of_members, ranks_of_pod, trainer_container
from holdfast_cli.options import Session, place_options, target_argument
from holdfast_cli.output import say, visible
from holdfast_cli.targets import Kind, Target, named, without_step
from holdfast_core.api import parse_duration
from holdfast_core.clock import SystemClock, parse_stamp
from holdfast_core.contract import SIDECAR_CONTAINER
from holdfast_core.names import GROUP, JOB_UID_LABEL

if TYPE_CHECKING:
    from holdfast_cli.cluster import ClusterClient

INSTEAD = "A training without a cluster writes its log where it was started"
MAX_LINE_BYTES = 16 * 1024
MAX_WAITING_LINES = 2000
"""Lines that wait to be sorted while logs are followed. With MAX_LINE_BYTES, they bound the memory."""
_SORT_SECONDS = 0.5
"""For how long a followed line waits for earlier ones of other pods."""
_LOOK_SECONDS = 3.0
"""Pause between two looks for new pods."""
_MARGIN_SECONDS = 120
"""By how much the clocks of nodes may differ from those of operator and reader."""

_RANK = re.compile(r"\[rank (\d{1,9})\] ?")
_ROUND = re.compile(r"\[holdfast\] round (\d{1,18})(?:: forking| begins)")
_STEP = re.compile(
    r"(?<![\w.-])step[\"']?\s{0,4}[:=#]?\s{0,4}(\d{1,18})(?![\w.]*\d)", re.IGNORECASE
)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_WORKER = f"{GROUP}/worker"
_BIRTH = f"{GROUP}/birth-round"
_MESSAGES = ("message", "msg", "event")
_OMITTED = frozenset(
    {"time", "timestamp", "ts", "logger", "job", "namespace", "pod", "worker", "step"}
)


def printable(text: str) -> str:
    """Return text that moves no cursor and changes no title, however hostile its author is.

    Of a line that a progress bar wrote over, the last version stays.
    """
    shown = _COLOURS.sub("", text).rstrip("\r").rpartition("\r")[2]
    return visible(shown).replace("\n", "\\n")


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a log."""

    time_ns: int
    """When the node received it, nanoseconds since 1970 by its clock."""
    source: str
    """Who wrote it: `rank 3`, `worker 1` (its launcher) or `sidecar 1`."""
    rank: int | None
    round: int | None
    """The round in which it was written. None: not known."""
    step: int | None
    """The step that it names, or that the last line of the rank before it named."""
    text: str

    def __str__(self) -> str:
        return f"[{self.source}] {self.text}"


@dataclass(frozen=True, slots=True)
class Selection:
    """Which lines are shown. None: any."""

    ranks: frozenset[int] | None = None
    round: int | None = None
    is_followed: bool = False
    """Whether later rounds than `round` are shown, too."""
    steps: tuple[int | None, int | None] | None = None
    """First and last step."""

    def has(self, line: LogLine) -> bool:
        if self.ranks is not None and line.rank not in self.ranks:
            return False
        if self.round is not None:
            if line.round is None:
                return False
            if line.round < self.round or (line.round > self.round and not self.is_followed):
                return False
        if self.steps is None:
            return True
        first, last = self.steps
        return line.step is not None and (
            (first is None or line.step >= first) and (last is None or line.step <= last)
        )


def parse_steps(text: str) -> tuple[int | None, int | None]:
    """Return first and last step of `A..B`, `A..`, `..B` or `A`. Raises UsageError."""
    first, dots, last = text.partition("..")
    if not dots:
        last = first
    ends = (first, last)
    if not any(ends) or not all(
        e == "" or (e.isascii() and e.isdigit() and len(e) <= 18) for e in ends
    ):
        raise UsageError(f"--step {text!r}: expected A..B, A.., ..B or A, for example 100..120")
    numbers = tuple(int(e) if e else None for e in ends)
    if None not in numbers and numbers[0] > numbers[1]:  # type: ignore[operator]  # neither is None
        raise UsageError(f"--step {text}: the first step is above the last")
    return numbers[0], numbers[1]


@dataclass(slots=True)
class LogReader:
    """Turns the log of one container into lines. It remembers the round, and the last step of each rank."""

    worker: int
    ranks_of_pod: int
    is_sidecar: bool = False
    round: int | None = None
    """Round of the lines that are read now. None: not known yet."""
    present_round: int | None = None
    present_since_ns: int | None = None
    """When the restore point of the present round was chosen. Lines after that are of this round."""
    _steps: dict[int, int] = field(default_factory=dict)
    """The last step of each rank of the pod."""

    def read(self, raw: bytes) -> LogLine | None:
        """Return the line, or None if it has no time stamp: the log was cut there."""
        stamp, _, rest = raw.decode(errors="replace").partition(" ")
        try:
            time_ns = nanoseconds(stamp)
        except ValueError:
            return None
        rank, text = None, rest
        found = _RANK.match(rest)
        # A script may print anything, also the rank of another pod.
        if found is not None and int(found[1]) // self.ranks_of_pod == self.worker:
            rank, text = int(found[1]), rest[found.end() :]
        fields = _fields(text)
        self._note_round(rank, text, fields)
        step = _step(text, fields)
        if step is not None and rank is not None:
            self._steps[rank] = step
        source = f"{'sidecar' if self.is_sidecar else 'worker'} {self.worker}"
        if rank is not None:
            source = f"rank {rank}"
        return LogLine(
            time_ns,
            source,
            rank,
            self._round_at(time_ns),
            None if rank is None else self._steps.get(rank),
            printable(text if fields is None else _sentence(fields, step)),
        )

    def _note_round(self, rank: int | None, text: str, fields: Mapping[str, Any] | None) -> None:
        found = _ROUND.match(text) if rank is None else None
        if found is not None:
            self.round = int(found[1])
        if self.is_sidecar and fields and fields.get("message") == "round begins":
            number = fields.get("round")
            self.round = number if isinstance(number, int) else self.round

    def _round_at(self, time_ns: int) -> int | None:
        if self.round is None and self.present_since_ns is not None:
            return self.present_round if time_ns >= self.present_since_ns else None
        return self.round


def nanoseconds(stamp: str) -> int:
    """Return an RFC 3339 time as nanoseconds since 1970. Raises ValueError."""
    moment = parse_stamp(stamp)
    seconds = int(moment.replace(microsecond=0).timestamp())
    fraction = re.search(r"\.(\d{1,9})", stamp)
    return seconds * 10**9 + (int(fraction[1].ljust(9, "0")) if fraction else 0)


def _fields(text: str) -> dict[str, Any] | None:
    """Return the fields of a line that is a JSON object with a message or a step."""
    if not text.startswith("{"):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(found, dict) and ("step" in found or any(name in found for name in _MESSAGES)):
        return found
    return None


def _step(text: str, fields: Mapping[str, Any] | None) -> int | None:
    """Return the step that a line names."""
    if fields is not None:
        step = fields.get("step")
        return step if isinstance(step, int) and not isinstance(step, bool) and step >= 0 else None
    found = _STEP.search(text)
    return None if found is None else int(found[1])


def _sentence(fields: Mapping[str, Any], step: int | None) -> str:
    """Return a structured line for people: its step, a level above info, its message and the other fields."""
    words = [] if step is None else [f"step {step}"]
    if fields.get("level") not in (None, "info", "INFO"):
        words.append(str(fields["level"]))
    named = next((name for name in _MESSAGES if name in fields), None)
    if named is not None:
        words.append(str(fields[named]))
    others = (k for k in fields if k not in _OMITTED and k not in (named, "level"))
    return " ".join([*words, *(f"{name}={_value(fields[name])}" for name in others)])


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def split_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Return the lines of a stream, each cut at MAX_LINE_BYTES, whatever its length is."""
    kept, is_cut = b"", False
    for chunk in chunks:
        *lines, rest = chunk.split(b"\n")
        for line in lines:
            yield _cut(kept + line, is_cut)
            kept, is_cut = b"", False
        kept += rest
        if len(kept) > MAX_LINE_BYTES:
            kept, is_cut = kept[:MAX_LINE_BYTES], True
    if kept:
        yield _cut(kept, is_cut)


def _cut(line: bytes, is_cut: bool) -> bytes:
    if is_cut or len(line) > MAX_LINE_BYTES:
        return line[:MAX_LINE_BYTES] + " … (cut)".encode()
    return line


@dataclass(frozen=True, slots=True)
class LogSource:
    """A container whose log is read."""

    worker: int
    pod: str
    uid: str
    container: str
    restarts: int
    """Restarts of the container. Each has a log of its own."""
    birth_round: int | None
    state: str
    """`running`, `terminated`, or why the container has not started."""

    @property
    def key(self) -> tuple[str, int]:
        return self.uid, self.restarts

    @property
    def has_started(self) -> bool:
        return self.state in ("running", "terminated")


def find_sources(
    gang: dict[str, Any],
    pods: Sequence[dict[str, Any]],
    *,
    is_sidecar: bool,
    ranks: frozenset[int] | None,
    are_others_wanted: bool = False,
) -> list[LogSource]:
    """Return the containers of the gang's workers, by worker.

    Args:
        gang: The TrainingJob or CheckpointAdoption.
        pods: The pods with its label.
        is_sidecar: Whether the sidecars are read in place of the ranks.
        ranks: The ranks that are shown. None: all.
        are_others_wanted: Whether pods that are no members of the present round are read, too.
    """
    container = SIDECAR_CONTAINER if is_sidecar else trainer_container(gang)
    present = {
        worker: pod for worker, pod in enumerate(pods_of_members(gang, pods)) if pod is not None
    }
    found = list(present.items())
    if are_others_wanted:
        members = {pod["metadata"]["uid"] for pod in present.values()}
        for pod in pods:
            worker = _number(pod, _WORKER)
            if worker is not None and pod["metadata"]["uid"] not in members:
                found.append((worker, pod))
    if ranks is not None:
        workers = {rank // ranks_of_pod(gang) for rank in ranks}
        found = [(worker, pod) for worker, pod in found if worker in workers]
    return [_source(worker, pod, container) for worker, pod in found]


def _source(worker: int, pod: dict[str, Any], container: str) -> LogSource:
    status = pod.get("status") or {}
    statuses = [
        *(status.get("initContainerStatuses") or []),
        *(status.get("containerStatuses") or []),
    ]
    found: dict[str, Any] = next((s for s in statuses if s["name"] == container), {})
    states = found.get("state") or {}
    state = next((name for name in ("running", "terminated") if name in states), None)
    waiting = (states.get("waiting") or {}).get("reason") or "not started"
    if state is None and found.get("restartCount"):
        state = "terminated"  # the container waits to start again, and its last log can be read
    meta = pod["metadata"]
    return LogSource(
        worker,
        meta["name"],
        meta["uid"],
        container,
        found.get("restartCount") or 0,
        _number(pod, _BIRTH),
        state or waiting,
    )


def _number(pod: dict[str, Any], label: str) -> int | None:
    text = (pod["metadata"].get("labels") or {}).get(label, "")
    return int(text) if text.isascii() and text.isdigit() else None


@dataclass(frozen=True, slots=True)
class WantedLogs:
    """What the command line says."""

    name: str
    """The job."""
    follow: bool = False
    ranks: frozenset[int] | None = None
    since: timedelta | None = None
    round: int | None = None
    sidecar: bool = False
    steps: tuple[int | None, int | None] | None = None


Show = Callable[[LogLine], None]
Note = Callable[[str], None]


class JobLogs:
    """Reads the logs of one job.

    Args:
        cluster: The cluster.
        options: What the command line says.
        note: Receives messages about pods whose logs cannot be read.
    """

    def __init__(self, cluster: ClusterClient, options: WantedLogs, note: Note) -> None:
        self._cluster = cluster
        self._options = options
        self._note = note
        self._gang = cluster.gang(options.name)
        status = self._gang.get("status") or {}
        self._present: int | None = status.get("restartRound")
        chosen = status.get("chosenAt")
        self._chosen_at: datetime | None = None if chosen is None else parse_stamp(chosen)
        wanted = options.round
        if wanted is None and options.since is None:
            wanted = self._present
        self._check()
        self._selection = Selection(options.ranks, wanted, options.follow, options.steps)
        self._are_older_wanted = wanted != self._present
        """Whether lines of earlier rounds are shown."""
        self._noted: set[tuple[str, str]] = set()

    def _check(self) -> None:
        name, round_, present = self._options.name, self._options.round, self._present
        if round_ is not None and (present is None or round_ > present):
            at = "has not begun" if present is None else f"is in round {present}"
            raise StateError(f"{name} {at}: there is no round {round_} yet")
        world_size = self._gang["spec"]["workers"] * ranks_of_pod(self._gang)
        beyond = [rank for rank in self._options.ranks or () if rank >= world_size]
        if beyond:
            raise UsageError(
                f"{name} has ranks 0 to {world_size - 1}: there is no rank {min(beyond)}"
            )

    def sources(self) -> list[LogSource]:
        """Return the containers of the job that can be read now.

        Raises:
            StateError: They are more than can be read at the same time.
        """
        pods = self._cluster.pods(f"{JOB_UID_LABEL}={self._gang['metadata']['uid']}")
        found = find_sources(
            self._gang,
            pods,
            is_sidecar=self._options.sidecar,
            ranks=self._options.ranks,
            are_others_wanted=self._are_older_wanted,
        )
        if len(found) > MAX_STREAMS:
            raise StateError(
                f"{self._options.name} has {len(found)} pods, and logs reads {MAX_STREAMS} at the same time: "
                "choose ranks with --rank"
            )
        for source in found:
            if not source.has_started:
                self.note_once(
                    source.pod, f"worker {source.worker}: pod {source.pod}: {source.state}"
                )
        return [source for source in found if source.has_started]

    def note_once(self, name: str, text: str) -> None:
        if (name, text) not in self._noted:
            self._noted.add((name, text))
            self._note(printable(text))

    def show(self, show: Show) -> None:
        """Show what the logs have now. Raises StateError if there is none."""
        sources = self.sources()
        if not sources:
            phase = (self._gang.get("status") or {}).get("phase") or "Pending"
            raise StateError(
                f"{self._options.name} is {phase}, and none of its pods has a log now; "
                f"kubectl holdfast events {self._options.name} shows what happened"
            )
        logs = [self._whole(source) for source in sources]
        for line in heapq.merge(*logs, key=lambda line: line.time_ns):
            show(line)

    def _whole(self, source: LogSource) -> Iterator[LogLine]:
        """Return the selected lines of a container, with those of its last restart before it if asked for."""
        reader = self.reader(source)
        if source.restarts and self._are_older_wanted:
            yield from self._lines(source, reader, LogPosition(), previous=True)
        yield from self._lines(source, reader, LogPosition())

    def _lines(
        self, source: LogSource, reader: LogReader, position: LogPosition, *, previous: bool = False
    ) -> Iterator[LogLine]:
        try:
            yield from self.read(source, reader, position, follow=False, previous=previous)
        except (CommandError, OSError) as error:
            self.note_once(source.pod, f"worker {source.worker}: pod {source.pod}: {error}")

    def reader(self, source: LogSource) -> LogReader:
        """Return a reader that knows the round in which the log begins, if that is known."""
        is_whole = self._since_seconds() is None
        is_new = source.birth_round == self._present
        since = self._chosen_at
        return LogReader(
            worker=source.worker,
            ranks_of_pod=ranks_of_pod(self._gang),
            is_sidecar=self._options.sidecar,
            round=source.birth_round if is_whole or is_new else None,
            present_round=self._present,
            present_since_ns=None if since is None else int(since.timestamp()) * 10**9,
        )

    def _since_seconds(self) -> int | None:
        """Return the age of the oldest lines that are needed. None: the whole log."""
        if self._options.since is not None:
            return max(1, int(self._options.since.total_seconds()))
        if self._are_older_wanted or self._chosen_at is None:
            return None
        age = SystemClock().utc_now() - self._chosen_at
        return max(1, int(age.total_seconds()) + _MARGIN_SECONDS)

    def read(
        self,
        source: LogSource,
        reader: LogReader,
        position: LogPosition,
        *,
        follow: bool,
        previous: bool = False,
    ) -> Iterator[LogLine]:
        """Return the selected lines of a container that are behind the position, and move it."""
        seconds = position.since_seconds() or self._since_seconds()
        chunks = self._cluster.log_chunks(
            source.pod,
            source.container,
            since_seconds=seconds,
            follow=follow,
            previous=previous,
        )
        for raw in split_lines(chunks):
            line = reader.read(raw)
            if line is not None and position.passes(line.time_ns) and self._selection.has(line):
                yield line

    def follow(self, show: Show) -> None:
        """Show lines as they are written, until the job is over and its logs have ended.

        Pods that end are followed no longer, and new ones are found within some seconds. Raises NotFound if
        the job is deleted.
        """
        self.sources()  # raises what the thread of a log could only note
        _Follower(self, self._options.name).run(show)

    def look_again(self) -> bool:
        """Read the job again. Return whether it is over. Raises NotFound if it is gone."""
        gang = self._cluster.gang(self._options.name)
        if gang["metadata"]["uid"] != self._gang["metadata"]["uid"]:
            raise NotFound(
                f"{self._options.name} is another job now"
            )  # its rounds begin at 0 again
        self._gang = gang
        status = self._gang.get("status") or {}
        self._present = status.get("restartRound")
        chosen = status.get("chosenAt")
        self._chosen_at = None if chosen is None else parse_stamp(chosen)
        true = {c["type"] for c in status.get("conditions") or [] if c["status"] == "True"}
        return bool(true & {"Complete", "Failed"})

    def note_failure(self, source: LogSource, error: Exception) -> None:
        self.note_once(source.pod, f"worker {source.worker}: pod {source.pod}: {error}")


@dataclass(slots=True)
class LogPosition:
    """How far a log was read, so that it can be opened again without a line twice."""

    last_ns: int = 0
    lines_at_last: int = 0
    """Lines with the time of the last one."""
    _read_at: float | None = None
    _behind: int = 0
    """Lines at `last_ns` that are still to come again since the log was opened again."""

    def since_seconds(self) -> int | None:
        """Return from which age on a log must be read again. None: it was not read yet."""
        self._behind = self.lines_at_last
        if self._read_at is None:
            return None
        # Both ends are of the reader's own clock: that of the node may be another.
        return int(time.monotonic() - self._read_at) + 10

    def passes(self, time_ns: int) -> bool:
        """Note a line. Return whether it was not passed before.

        Only a log that was opened again repeats lines. Otherwise an earlier time is that of a clock that was
        set back.
        """
        self._read_at = time.monotonic()
        if self._behind and time_ns <= self.last_ns:
            self._behind -= time_ns == self.last_ns
            return False
        is_same = time_ns == self.last_ns
        self.lines_at_last = self.lines_at_last + 1 if is_same else 1
        self.last_ns, self._behind = time_ns, 0
        return True


class _Follower:
    """Follows the logs of all pods of a job, each in a thread of its own.

    The threads put lines into a queue that is bounded: a terminal that is slow slows them down.
    """

    def __init__(self, logs: JobLogs, name: str) -> None:
        self._logs = logs
        self._name = name
        self._lines: queue.Queue[LogLine] = queue.Queue(MAX_WAITING_LINES)
        self._readers: dict[tuple[str, int], tuple[LogReader, LogPosition]] = {}
        self._threads: dict[tuple[str, int], threading.Thread] = {}
        self._ended: set[tuple[str, int]] = set()
        """Logs that were read to the end of their containers."""
        self._waiting: list[tuple[int, int, float, LogLine]] = []
        """Heap of lines by time, with a number that keeps those of one time in order, and their arrival."""
        self._count = 0

    def run(self, show: Show) -> None:
        look_at, is_over = 0.0, False
        while True:
            now = time.monotonic()
            if now >= look_at:
                try:
                    is_over, look_at = self._look(), now + _LOOK_SECONDS
                except NotFound:
                    self._flush(show)
                    raise
            self._take(_SORT_SECONDS / 5)
            self._show_sorted(show, time.monotonic() - _SORT_SECONDS)
            if is_over and not any(thread.is_alive() for thread in self._threads.values()):
                self._flush(show)
                if self._lines.empty():
                    return

    def _look(self) -> bool:
        """Start to follow what is not followed yet, and return whether the job is over."""
        try:
            is_over = self._logs.look_again()
            sources = self._logs.sources()
        except NotFound as error:
            raise NotFound(f"{self._name} was deleted meanwhile") from error
        except CommandError as error:
            self._logs.note_once(self._name, str(error))
            return False
        known = {source.key for source in sources}
        for key in self._readers.keys() - known:  # so that a long watch does not grow
            if key not in self._threads or not self._threads[key].is_alive():
                self._readers.pop(key)
                self._threads.pop(key, None)
        self._ended &= known
        for source in sources:
            thread = self._threads.get(source.key)
            if source.key not in self._ended and (thread is None or not thread.is_alive()):
                self._start(source)
                is_over = False
        return is_over

    def _start(self, source: LogSource) -> None:
        if source.key not in self._readers:
            self._readers[source.key] = self._logs.reader(source), LogPosition()
        # A daemon: a read that waits for a line must not delay the end of the command.
        thread = threading.Thread(target=self._follow, args=(source,), daemon=True)
        self._threads[source.key] = thread
        thread.start()

    def _follow(self, source: LogSource) -> None:
        reader, position = self._readers[source.key]
        try:
            for line in self._logs.read(source, reader, position, follow=True):
                self._lines.put(line)
        except CommandError as error:
            if not isinstance(error, NotFound):  # a pod that is gone is no failure
                self._logs.note_failure(source, error)
        except OSError:
            return  # it broke, and is opened again at the next look, from where it was
        if source.state == "terminated":
            self._ended.add(source.key)

    def _take(self, seconds: float) -> None:
        """Move lines from the queue into the heap, and wait this long for the first one."""
        try:
            line = self._lines.get(timeout=seconds) if seconds else self._lines.get_nowait()
            while True:
                self._count += 1
                heapq.heappush(self._waiting, (line.time_ns, self._count, time.monotonic(), line))
                if len(self._waiting) >= MAX_WAITING_LINES:
                    return
                line = self._lines.get_nowait()
        except queue.Empty:
            return

    def _flush(self, show: Show) -> None:
        self._take(0)
        self._show_sorted(show, float("inf"))

    def _show_sorted(self, show: Show, arrived_before: float) -> None:
        """Show the earliest lines until one has not waited for long, or the heap is not full."""
        while self._waiting and (
            self._waiting[0][2] <= arrived_before or len(self._waiting) >= MAX_WAITING_LINES
        ):
            show(heapq.heappop(self._waiting)[3])


@click.command(
    "logs",
    help="Show the logs of all ranks of a job, merged by time, with the rank before each line. Without "
    "--since and --round it shows the present round.",
)
@target_argument(Kind.JOB)
@click.option("-f", "--follow", is_flag=True, help="Show further lines as they are written.")
@click.option("--rank", "ranks", type=click.IntRange(min=0), multiple=True, help="Only this rank.")
@click.option("--since", metavar="DURATION", help="Lines of the last 10m, 1h30m, of all rounds.")
@click.option("--round", "round_", type=click.IntRange(min=0), help="Lines of this round.")
@click.option("--step", metavar="A..B", help="Lines that name these steps, and those behind them.")
@click.option("--sidecar", is_flag=True, help="The logs of the sidecars in place of the ranks'.")
@place_options
@click.pass_obj
def command(
    session: Session,
    target: Target,
    follow: bool,
    ranks: tuple[int, ...],
    since: str | None,
    round_: int | None,
    step: str | None,
    sidecar: bool,
) -> None:
    if since is not None and round_ is not None:
        raise UsageError("--since and --round choose lines by time and by round: omit one of them")
    if sidecar and step is not None:
        raise UsageError("--step belongs to the lines of ranks: omit it, or omit --sidecar")
    if follow and round_ is not None:
        raise UsageError(
            "--follow shows the present round and later ones: omit it, or omit --round"
        )
    job = without_step(named(target, "logs", (Kind.JOB,), INSTEAD), "logs")
    options = WantedLogs(
        job.name,
        follow,
        frozenset(ranks) or None,
        None if since is None else parse_duration(since),
        round_,
        sidecar,
        None if step is None else parse_steps(step),
    )
    logs = JobLogs(session.cluster(job), options, say)
    (logs.follow if follow else logs.show)(lambda line: click.echo(str(line)))
