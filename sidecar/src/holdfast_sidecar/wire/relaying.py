"""Pass messages between the coordinator and the other workers of this worker's group on (ADR 0016).

Nothing is acknowledged here: a sender receives the reply of the receiver, or an error.
"""

from __future__ import annotations

import asyncio
from typing import Any

from holdfast_core.errors import HoldfastError, RefusedError, UnavailableError
from holdfast_core.ids import Worker
from holdfast_core.messages.common import refusal_of
from holdfast_core.messages.report import Answer, Letter, Relay, RelayReply, decode, encode
from holdfast_core.messages.schema import (
    Refusal,
)
from holdfast_sidecar.base.pod import CurrentRound
from holdfast_sidecar.base.rounds import RULES, Caller, From, To
from holdfast_sidecar.wire.client import Dispatch, Peers, body_of
from holdfast_sidecar.wire.verbs import BY_PATH, Route

_MEMBER_SECONDS = 10.0
"""How long a relay waits for a worker of its group. It is less than a sender waits for the relay."""
_OFF_LOOP_BYTES = 256 << 10
_AT_ONCE = 16
"""Letters that are handled before other work of the event loop gets its turn."""


class Relaying:
    """Handler of Relay, and of messages to the coordinator from workers of this worker's group."""

    def __init__(self, current: CurrentRound, peers: Peers) -> None:
        self._current = current
        self._peers = peers

    async def to_coordinator(self, path: str, message: Any) -> Any:
        """Send a worker's message to the coordinator with others, and return its reply.

        Raises:
            RefusedError: The coordinator refuses it. BUSY if it cannot be reached.
            StaleRoundError, NotFoundError: As the coordinator's refusal says.
        """
        accepted = self._current().accepted
        if accepted is None:
            raise RefusedError(Refusal.SEALED, f"{path}: the relay waits for its ROUND")
        mail = self._peers.mail(accepted.coordinator)
        try:
            answer = await mail.deliver(path, message.worker, encode(message))
            body = body_of(answer, f"POST {path} to the coordinator")
        except UnavailableError as error:
            raise RefusedError(Refusal.BUSY, str(error)) from error
        return decode(BY_PATH[path].reply, body)

    async def serve(self, message: Relay, dispatch: Dispatch) -> RelayReply:
        """Handle letters of a group as its coordinator, or deliver letters of the coordinator.

        Args:
            message: The letters. The refusal table has admitted them.
            dispatch: Handles a message of a worker, after the refusal table has admitted it.
        """
        if self._current().is_coordinator:
            answers = []
            for count, letter in enumerate(message.letters):
                answers.append(await self._handled(letter, dispatch))
                if count % _AT_ONCE == _AT_ONCE - 1:
                    await asyncio.sleep(0)
            return RelayReply(message.round, tuple(answers))
        found = await asyncio.gather(
            *(
                self._delivered(worker, letter, message)
                for letter in message.letters
                for worker in letter.workers
            )
        )
        return RelayReply(message.round, tuple(found))

    async def _handled(self, letter: Letter, dispatch: Dispatch) -> Answer:
        """Return the coordinator's answer to a letter of a worker."""
        state = self._current()
        try:
            endpoint, member = BY_PATH.get(letter.path), state.member(letter.workers[0])
            if endpoint is None or member is None or not _is_for_coordinator(endpoint):
                raise RefusedError(
                    Refusal.BAD_REQUEST,
                    f"{letter.path} is no message from worker {letter.workers[0]} to a coordinator",
                )
            if len(letter.body) < _OFF_LOOP_BYTES:
                message = decode(endpoint.request, letter.body)
            else:
                message = await asyncio.to_thread(decode, endpoint.request, letter.body)
            reply = await dispatch(Caller(member.pod), letter.path, message)
        except HoldfastError as error:
            code = refusal_of(error)
            status = 400 if code is Refusal.BAD_REQUEST else 409
            return Answer(status, encode(self._current().refused(code, str(error))))
        return Answer(200, encode(reply))

    async def _delivered(self, worker: Worker, letter: Letter, message: Relay) -> Answer:
        """Return the answer of a worker of this group to a letter of the coordinator."""
        round_ = message.round if letter.body else None
        try:
            return await self._peers.exchange(
                worker, letter.path, round_, letter.body, seconds=_MEMBER_SECONDS
            )
        except HoldfastError as error:
            return Answer(503, str(error).encode())


def _is_for_coordinator(endpoint: Route) -> bool:
    rule = RULES[endpoint.request]
    return rule.sender is From.MEMBER and rule.receiver is To.COORDINATOR
