"""A server that answers as an S3 store does and discards the bytes, to measure the cost of a client alone.

It is not a complete S3 server: it does not verify signatures, stores only sizes and checksums, and cannot
list objects. The kernel drops the bodies unread (MSG_TRUNC), so that the processor time is left to the
client. Each connection has a thread, which handles its requests sequentially.
"""

from __future__ import annotations

import itertools
import socket
import socketserver
import sys
import threading
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

_SLICE_BYTES = 4 << 20
_CRC = "x-amz-checksum-crc32c"
_XML = '<?xml version="1.0" encoding="UTF-8"?>'


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    """Header names are in lower case."""


@dataclass(frozen=True, slots=True)
class Reply:
    status: str = "200 OK"
    headers: dict[str, str] = field(default_factory=dict)
    body: str = ""


@dataclass(slots=True)
class _Object:
    size_bytes: int
    crc32c: str | None


def parse_head(head: bytes) -> Request:
    """Parse the request line and the headers. Raises ValueError."""
    lines = head.decode("latin-1").split("\r\n")
    method, target, _ = lines[0].split(" ", 2)
    pairs = (line.partition(":") for line in lines[1:] if line)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    url = urlsplit(target)
    return Request(method, url.path, parse_qs(url.query, keep_blank_values=True), headers)


class Memory:
    """Sizes and checksums of the objects that were uploaded. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, _Object] = {}
        self._parts: dict[str, dict[str, int]] = {}
        self._uploads = itertools.count(1)

    def answer(self, request: Request, body_bytes: int) -> Reply:
        with self._lock:
            return self._answer(request, body_bytes)

    def _answer(self, request: Request, body_bytes: int) -> Reply:
        path, query, headers = request.path, request.query, request.headers
        match request.method:
            case "POST" if "uploads" in query:
                upload = str(next(self._uploads))
                self._parts[upload] = {}
                return Reply(
                    body=f"{_XML}<InitiateMultipartUploadResult><UploadId>{upload}</UploadId>"
                    "</InitiateMultipartUploadResult>"
                )
            case "POST" if "uploadId" in query:
                size = sum(self._parts.pop(query["uploadId"][0], {}).values())
                self._objects[path] = _Object(size, headers.get(_CRC))
                return Reply(
                    body=f'{_XML}<CompleteMultipartUploadResult><ETag>"whole"</ETag>'
                    "</CompleteMultipartUploadResult>"
                )
            case "POST" if "delete" in query:  # its body, the list of objects, was discarded
                return Reply(body=f"{_XML}<DeleteResult></DeleteResult>")
            case "PUT" if "uploadId" in query:
                number = query["partNumber"][0]
                self._parts[query["uploadId"][0]][number] = body_bytes
                return Reply(headers=_stored(headers, f"part{number}"))
            case "PUT":
                size = int(headers.get("x-amz-decoded-content-length", body_bytes))
                self._objects[path] = _Object(size, headers.get(_CRC))
                return Reply(headers=_stored(headers, "whole"))
            case "HEAD":
                found = self._objects.get(path)
                if found is None:
                    return Reply("404 Not Found")
                checksum = {} if found.crc32c is None else {_CRC: found.crc32c}
                return Reply(headers={"Content-Length": str(found.size_bytes), **checksum})
            case "DELETE":
                self._objects.pop(path, None)
                return Reply("204 No Content")
            case "GET" if "uploads" in query:
                return Reply(
                    body=f"{_XML}<ListMultipartUploadsResult></ListMultipartUploadsResult>"
                )
            case "GET" if "location" in query:
                return Reply(body=f"{_XML}<LocationConstraint></LocationConstraint>")
            case "GET" if path.count("/") < 2 or path.endswith("/"):
                return Reply(body=f"{_XML}<ListBucketResult></ListBucketResult>")
            case _:
                words = f"{request.method} of {path}: this server accepts only uploads"
                return Reply(
                    "501 Not Implemented",
                    body=f"{_XML}<Error><Code>NotImplemented</Code><Message>{words}</Message></Error>",
                )


def _stored(headers: dict[str, str], etag: str) -> dict[str, str]:
    echoed = {_CRC: headers[_CRC]} if _CRC in headers else {}
    return {"ETag": f'"{etag}"', **echoed}


class _Connection(socketserver.BaseRequestHandler):
    server: _Server
    request: socket.socket

    def handle(self) -> None:
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._early = b""
        self._waste = memoryview(bytearray(_SLICE_BYTES))
        while (head := self._until(b"\r\n\r\n")) is not None:
            request = parse_head(head)
            if "expect" in request.headers:
                self.request.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            size = self._drop_body(request)
            self._send(request, self.server.memory.answer(request, size))

    def _drop_body(self, request: Request) -> int:
        if request.headers.get("transfer-encoding", "").lower() != "chunked":
            return self._drop(int(request.headers.get("content-length", 0)))
        total = 0
        while line := self._until(b"\r\n"):
            length = int(line.split(b";")[0], 16)
            if length == 0:
                break
            total += self._drop(length)
            self._until(b"\r\n")
        while self._until(b"\r\n"):  # trailers, up to an empty line
            continue
        return total

    def _until(self, end: bytes) -> bytes | None:
        """Return the bytes before `end`, or None where the client has closed the connection."""
        while end not in self._early:
            data = self.request.recv(16 << 10)
            if not data:
                return None
            self._early += data
        found, _, self._early = self._early.partition(end)
        return found

    def _drop(self, length: int) -> int:
        left = length - len(self._early)
        self._early = self._early[length:]
        while left > 0:
            count = self.request.recv_into(self._waste, min(left, _SLICE_BYTES), socket.MSG_TRUNC)
            if count == 0:
                raise ConnectionResetError(f"the client closed with {left} bytes to come")
            left -= count
        return length

    def _send(self, request: Request, reply: Reply) -> None:
        body = reply.body.encode()
        headers = {"Content-Length": str(len(body)), "Content-Type": "application/xml"}
        headers.update(reply.headers)
        lines = [f"HTTP/1.1 {reply.status}", *(f"{k}: {v}" for k, v in headers.items())]
        head = "\r\n".join(lines) + "\r\n\r\n"
        self.request.sendall(head.encode() + (b"" if request.method == "HEAD" else body))


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.memory = Memory()


def main() -> int:
    with _Server() as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
