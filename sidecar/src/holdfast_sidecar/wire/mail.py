"""Letters that wait for the next request to the same worker."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from holdfast_core.errors import FormatError, HoldfastError
from holdfast_core.ids import Worker
from holdfast_core.messages.report import Answer, Letter
from holdfast_core.tasks import Tasks

_MAX_LETTERS = 256
_MAX_BYTES = 16 << 20
"""Bytes of a request from which on it takes no further letter."""


@dataclass(slots=True)
class _Waiting:
    path: str
    worker: Worker
    body: bytes
    answer: asyncio.Future[Answer]


class Mail:
    """Sender of letters to one worker. Those that come during a request go together into the next one."""

    def __init__(self, send: Callable[[tuple[Letter, ...]], Awaitable[Sequence[Answer]]]) -> None:
        """Create the sender. `send` makes one request and returns an answer for each worker in order."""
        self._send = send
        self._waiting: deque[_Waiting] = deque()
        self._tasks = Tasks()
        self._sending = False

    async def deliver(self, path: str, worker: Worker, body: bytes) -> Answer:
        """Send a letter and return its answer. Raises what `send` raises."""
        waiting = _Waiting(path, worker, body, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if not self._sending:
            self._sending = True
            self._tasks.spawn(self._run(), "mail")
        return await waiting.answer

    async def close(self) -> None:
        await self._tasks.cancel()
        for waiting in self._waiting:
            waiting.answer.cancel()

    async def _run(self) -> None:
        try:
            while self._waiting:
                await self._send_some()
        finally:
            self._sending = False

    async def _send_some(self) -> None:
        letters, sent = self._next_letters()
        if not sent:
            return
        try:
            answers = await self._send(letters)
            if len(answers) != len(sent):
                raise FormatError(f"{len(answers)} answers to letters for {len(sent)} workers")
        except HoldfastError as error:
            for waiting in chain(*sent):
                if not waiting.answer.done():
                    waiting.answer.set_exception(error)
        except asyncio.CancelledError:
            for waiting in chain(*sent):
                waiting.answer.cancel()
            raise
        else:
            for same, answer in zip(sent, answers, strict=True):
                for waiting in same:
                    if not waiting.answer.done():
                        waiting.answer.set_result(answer)

    def _next_letters(self) -> tuple[tuple[Letter, ...], list[list[_Waiting]]]:
        """Return the letters of the next request, and who waits for each of its answers.

        Several wait for one answer if a sender has repeated its message before the first was sent.
        """
        groups: dict[tuple[str, bytes], dict[Worker, list[_Waiting]]] = {}
        size_bytes = 0
        while self._waiting and len(groups) < _MAX_LETTERS and size_bytes < _MAX_BYTES:
            waiting = self._waiting.popleft()
            if waiting.answer.done():
                continue  # Its sender has given up.
            group = groups.setdefault((waiting.path, waiting.body), {})
            size_bytes += 0 if group else len(waiting.body)
            group.setdefault(waiting.worker, []).append(waiting)
        letters = tuple(Letter(path, tuple(group), body) for (path, body), group in groups.items())
        return letters, [same for group in groups.values() for same in group.values()]
