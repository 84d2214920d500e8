"""Handler of the messages that the launcher and the ranks send on the pod's socket."""

from __future__ import annotations

from typing import Any

from holdfast_core import logs
from holdfast_core.errors import FormatError
from holdfast_core.ids import Rank
from holdfast_core.messages.schema import (
    Fill,
    HelloReply,
    LauncherState,
    Ok,
    Policy,
    Progress,
    Restore,
    Stage,
)
from holdfast_core.pacing import BackgroundLimit, bytes_each_step
from holdfast_core.save.staging import WriteOutcome
from holdfast_core.tasks import Tasks
from holdfast_sidecar.base.rounds import RoundState
from holdfast_sidecar.base.telemetry import Metrics
from holdfast_sidecar.gang.state import RankNotices
from holdfast_sidecar.process.components import Components
from holdfast_sidecar.save.flow import own_shard
from holdfast_sidecar.wire.intake import LocalConnection, LocalConnections

_LAST_MESSAGES_SECONDS = 5.0
"""Seconds that the end of the pod's work waits for the ranks' connections to end."""


class Local:
    """The intake's `LocalHandler`."""

    def __init__(
        self,
        components: Components,
        connections: LocalConnections,
        notices: RankNotices,
        background: BackgroundLimit,
        metrics: Metrics,
        node_bytes: int,
    ) -> None:
        """Create the handler, and subscribe it to the ends of slot writes.

        `node_bytes` is what each rank may use of the node volume.
        """
        self._components = components
        self._filler = components.restores.filler
        self._connections = connections
        self._notices = notices
        self._background = background
        self._metrics = metrics
        self._node_bytes = node_bytes
        self._tasks = Tasks()
        self._finishing = Tasks()
        self._components.saves.stager.ended.subscribe(self._written)

    @property
    def state(self) -> RoundState:
        return self._components.current()

    # ------------------------------------------------------------------ connections

    def hello(self, connection: LocalConnection) -> HelloReply:
        state = self.state
        hello = connection.hello
        if hello is not None:
            # These pushes follow the reply, because the other side waits for it before it reads pushes.
            if hello.rank is None:
                self._tasks.soon(lambda: self._components.starter.hello(hello), "launcher hello")
            else:
                self._tasks.soon(lambda: self._notices.repeat(connection), "rank hello")
        policy = None if state.accepted is None else state.accepted.policy
        return HelloReply(state.round, policy, self._node_bytes)

    def gone(self, connection: LocalConnection) -> None:
        hello = connection.hello
        if hello is not None and hello.rank is None:
            if self._connections.launcher is None:
                self._components.starter.gone(connection)
            self._components.changed()

    # ------------------------------------------------------------------ requests

    async def request(self, connection: LocalConnection, message: Any) -> Any:
        if isinstance(message, Stage | Restore | Fill):
            # After a restart, a refusal would lose the rank's last save, or end a rank that restores.
            await self._components.current.unsealed(message.round)
        if isinstance(message, Restore | Fill) and message.round == self.state.round:
            await self._components.restores.rehydrator.settled()
        match message:
            case Stage():
                await self._components.saves.stager.stage(self._components.current, message)
                if message.rank == 0:
                    self._components.gang.saved.staged(message.step)
                return Ok(message.round)
            case Restore():
                return await self._filler.restore(self.state, message)
            case Fill(reads_files=True):
                return await self._filler.opened(self.state, message)
            case Fill():
                return await self._filler.fill(self.state, message)
            case _:
                raise FormatError(f"{type(message).__name__} is not a request of this socket")

    # ------------------------------------------------------------------ pushes

    def notify(self, connection: LocalConnection, message: Any) -> None:
        match message:
            case Progress() if message.round == self.state.round and self._own(message.rank):
                self._progressed(message)
            case Progress():
                return  # It is of another round or pod: ranks of an older round are being ended.
            case LauncherState():
                self._components.starter.reported(message)
                if self._components.gang.finished and not self._finishing:
                    self._finishing.spawn(self._finish(), "last messages of the ranks")
            case _:
                raise FormatError(f"{type(message).__name__} is not a push message of this socket")
        self._components.changed()

    def _own(self, rank: Rank) -> bool:
        return rank in self.state.own_ranks

    def _progressed(self, message: Progress) -> None:
        progress = self._components.gang.progress
        before = progress.get(message.rank, Progress(message.round, message.rank, message.step))
        self._components.gang.progressed(message)
        self._metrics.trained(message.round)
        if message.rank == self.state.own_ranks[0]:
            # The ranks of a gang finish a step together, so the reports of one of them suffice.
            self._background.step_done(message.step, message.blocked_seconds)
            self._metrics.limited(self._background.limit)
        self._metrics.stalled(
            message.blocked_seconds - before.blocked_seconds,
            message.saves_skipped - before.saves_skipped,
        )

    async def _finish(self) -> None:
        """Report that all ranks have returned, when all that they have sent is read.

        They have exited, but their last Progress may still be unread on their own connections. It must be in
        the state that reports `done`, because the operator takes that state as the last one.
        """
        if not await self._connections.ranks_ended(_LAST_MESSAGES_SECONDS):
            logs.warning(
                "a connection of a rank is still open although the rank has ended",
                seconds=_LAST_MESSAGES_SECONDS,
            )
        if self._components.gang.finished:  # the round may have been sealed meanwhile
            self._components.gang.done = True
            self._background.remove_limit()
            self._components.changed()

    def _interval_steps(self, policy: Policy) -> int:
        """Return the steps between two saves. 0: they are not known yet."""
        first = self._components.gang.progress.get(Rank(self.state.own_ranks[0]))
        if first is None or first.interval is None:
            return policy.interval_steps
        return first.interval.steps

    def _upload_steps(self, policy: Policy) -> int | None:
        """Return the steps between two uploads. None: nothing is uploaded.

        If they are given as a time, it is at most every save.
        """
        if policy.object_every_seconds is None:
            return policy.object_every_steps
        return self._interval_steps(policy)

    # ------------------------------------------------------------------ slots

    def _written(self, outcome: WriteOutcome) -> None:
        """Handle the end of a slot's write: push a failure to the rank, or add the shard to the flow."""
        accepted = self.state.accepted
        if outcome.failed is not None:
            self._connections.push_rank(outcome.stage.rank, outcome.failed)
        elif (
            outcome.record is not None
            and accepted is not None
            and outcome.record.header.round == self.state.round
        ):
            policy = accepted.policy
            self._background.expect(
                bytes_each_step(
                    outcome.record.header.payload_bytes * len(self.state.own_ranks),
                    self._interval_steps(policy),
                    len(self.state.copy_targets()),
                    self._upload_steps(policy),
                )
            )
            self._components.saves.flow.add(own_shard(outcome.record))
        self._components.changed()
