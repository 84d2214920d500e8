"""The least that an upload can cost: two threads that only call sendfile to the server of A5.

Each thread has a connection and sends half of the file as one PUT, without a signature, a checksum or a
retry.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

_THREADS = 2
_OK = b"HTTP/1.1 200 OK\r\n"


class BareUploader:
    def __init__(self, store: dict[str, str], directory: Path, mib: int) -> None:
        host, port = store["endpoint"].rsplit(":", 1)
        self._address = (host, int(port))
        self._bucket = store["bucket"]
        self._path = directory / "source"
        self._path.write_bytes(os.urandom(1 << 20) * mib)
        self._size = mib << 20

    def prepare(self, step: int) -> Path:
        return self._path

    def upload(self, step: int) -> None:
        """Send all parts at the same time. Raises OSError where the server does not accept one."""
        refused: list[Exception] = []

        def send(number: int) -> None:
            try:
                self._send(step, number)
            except OSError as error:
                refused.append(error)

        threads = [threading.Thread(target=send, args=(n,)) for n in range(_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if refused:
            raise refused[0]

    def remove(self, step: int) -> None:
        return  # the server keeps no bytes

    def _send(self, step: int, number: int) -> None:
        begin, end = (self._size * n // _THREADS for n in (number, number + 1))
        key = f"/{self._bucket}/bare/{step}/{number}"
        head = f"PUT {key} HTTP/1.1\r\nHost: bare\r\nContent-Length: {end - begin}\r\n\r\n"
        with socket.create_connection(self._address) as sock, self._path.open("rb") as file:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(head.encode())
            while begin < end:
                begin += os.sendfile(sock.fileno(), file.fileno(), begin, end - begin)
            reply = sock.recv(16 << 10)
            if not reply.startswith(_OK):
                raise OSError(f"PUT {key}: the server answered {reply[:100]!r}")


UPLOADERS: dict[str, Callable[[dict[str, str], Path, int], BareUploader]] = {
    "bare sendfile": BareUploader
}
