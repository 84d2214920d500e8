"""One connection to a DirectoryService: reads requests, answers them and pushes levels."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from typing import Any, Protocol

from holdfast_core.errors import HoldfastError, UnavailableError
from holdfast_core.ids import RestartRound
from holdfast_core.messages.refusals import refusal_of
from holdfast_core.messages.schema import Hello, HelloReply, Progress, Refused
from holdfast_core.messages.socket_frames import receive_frame, send_frame

logger = logging.getLogger(__name__)

_MAX_REASON_CHARACTERS = 2000


def describe(error: BaseException) -> str:
    """Return the text of an error for a message to the trainer.

    The text starts with the type, except for errors of Holdfast, which explain themselves.
    """
    text = str(error) if isinstance(error, HoldfastError) else f"{type(error).__name__}: {error}"
    return text[:_MAX_REASON_CHARACTERS]


class Service(Protocol):
    """Interface of a Connection to what answers requests: a DirectoryService, or a wrapper of one."""

    @property
    def current_round(self) -> RestartRound: ...

    def hello_reply(self) -> HelloReply: ...

    def handle(self, message: Any, push: Callable[[Any], None]) -> Any: ...

    def progressed(self, message: Progress) -> None: ...


class Connection:
    """Serves one connection of a trainer.

    Args:
        sock: The connection. It is closed at the end of `serve`.
        service: Answers the requests.
        intercept: May return a reply in place of the service; None lets the service answer.
        on_message: Called with each message before it is answered, but with a Hello after its answer:
            messages pushed before that do not belong to this connection.
    """

    def __init__(
        self,
        sock: socket.socket,
        service: Service,
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
                    self._service.progressed(message)
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
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side has already closed it
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
            return self._service.hello_reply()
        try:
            return self._service.handle(message, self.push)
        except HoldfastError as error:
            return self._refused(error)
        except BaseException as error:
            # Otherwise the process would end, and the trainer would repeat the request to the next one.
            logger.exception("serving %s failed", type(message).__name__)
            return self._refused(error)

    def _refused(self, error: BaseException) -> Refused:
        return Refused(refusal_of(error), describe(error), self._service.current_round)
