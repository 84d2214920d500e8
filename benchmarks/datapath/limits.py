"""The limits of this machine, measured in the same run as everything that is compared with them."""

from __future__ import annotations

import mmap
import os
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.servers.pki import Authority

from holdfast_core.format.canonical import crc32c
from holdfast_core.net import TlsFiles, client_context, server_context

GIB = 1 << 30
_BLOCK_BYTES = 16 << 20
_SLICE_BYTES = 1 << 20
_SERVER = "limit.holdfast"


def memory(size_bytes: int) -> dict[str, float]:
    """Measure memory bandwidth in GiB/s: memcpy, and the first touch of shared memory.

    memcpy copies between private buffers whose pages are present, with one and with two threads. A slot
    that is allocated late pays the cost of the first touch.
    """
    source: np.ndarray[Any, Any] = np.ones(size_bytes, np.uint8)
    target: np.ndarray[Any, Any] = np.zeros(size_bytes, np.uint8)
    target[::4096] = 1
    half = size_bytes // 2

    def two() -> None:
        other = threading.Thread(target=np.copyto, args=(target[half:], source[half:]))
        other.start()
        np.copyto(target[:half], source[:half])
        other.join()

    return {
        "memcpy 1 thread": _rate(size_bytes, lambda: np.copyto(target, source)),
        "memcpy 2 threads": _rate(size_bytes, two),
        "first touch of shared memory": _first_touch(size_bytes),
    }


def verified_memcpy(size_bytes: int) -> dict[str, float]:
    """Measure in GiB/s how fast two threads copy memory and compute the CRC32C of what they copied.

    A restore from shared memory does the same. Each thread works on slices that stay in the processor's
    cache, so that the CRC reads the bytes from there.
    """
    source: np.ndarray[Any, Any] = np.ones(size_bytes, np.uint8)
    target: np.ndarray[Any, Any] = np.zeros(size_bytes, np.uint8)
    target[::4096] = 1
    half = size_bytes // 2

    def copy(begin: int, end: int) -> None:
        crc = 0
        for offset in range(begin, end, _SLICE_BYTES):
            piece = slice(offset, min(offset + _SLICE_BYTES, end))
            np.copyto(target[piece], source[piece])
            crc = crc32c(target[piece].data, crc)

    def two() -> None:
        other = threading.Thread(target=copy, args=(half, size_bytes))
        other.start()
        copy(0, half)
        other.join()

    return {"memcpy and CRC32C 2 threads": _rate(size_bytes, two)}


def disk(directory: Path, size_bytes: int) -> dict[str, float]:
    """Measure the disk in GiB/s with O_DIRECT and 16 MiB a call.

    Writes end with fsync and use one and two threads; reads use two, and the best of three counts.
    """
    path = directory / "limit.bin"
    size_bytes = max(_BLOCK_BYTES, size_bytes // _BLOCK_BYTES * _BLOCK_BYTES)
    blocks = [mmap.mmap(-1, _BLOCK_BYTES) for _ in range(2)]
    for block in blocks:
        block[:] = os.urandom(4096) * (_BLOCK_BYTES // 4096)
    try:
        found: dict[str, float] = {}
        for threads in (1, 2):
            path.unlink(missing_ok=True)
            began = time.perf_counter()
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
            _in_threads(
                blocks[:threads],
                size_bytes,
                lambda block, offset, fd=descriptor: os.pwrite(fd, block, offset),  # type: ignore[misc]
            )
            os.fsync(descriptor)
            os.close(descriptor)
            words = "1 thread" if threads == 1 else "2 threads"
            found[f"O_DIRECT write {words}"] = size_bytes / GIB / (time.perf_counter() - began)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        found["O_DIRECT read"] = _rate(
            size_bytes,
            lambda: _in_threads(
                blocks, size_bytes, lambda block, offset: os.preadv(descriptor, [block], offset)
            ),
        )
        os.close(descriptor)
        return found
    finally:
        path.unlink(missing_ok=True)


def loopback(size_bytes: int) -> dict[str, float]:
    """Measure one loopback connection to another process in GiB/s.

    The receiver's memory is present. The first measurement sends from shared memory with sendfile,
    unencrypted. In the second, both ends compute the CRC32C of each slice of 1 MiB in addition. The third
    sends slices of 1 MiB through TLS 1.3.
    """
    with tempfile.TemporaryDirectory(prefix="holdfast-limit-") as folder:
        authority = Authority()
        leaf = authority.write_leaf(Path(folder), _SERVER)
        return {
            "loopback sendfile": _send(size_bytes, None),
            "loopback CRC32C": _send(size_bytes, None, verified=True),
            "loopback TLS": _send(size_bytes, TlsFiles.in_directory(leaf)),
        }


def _rate(size_bytes: int, copy: Callable[[], object]) -> float:
    """Return the best rate of three attempts, because other load can only lower it."""
    best = 0.0
    for _ in range(3):
        began = time.perf_counter()
        copy()
        best = max(best, size_bytes / GIB / (time.perf_counter() - began))
    return best


def _first_touch(size_bytes: int) -> float:
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(size_bytes)
        memory_map = mmap.mmap(file.fileno(), size_bytes)
        pages: np.ndarray[Any, Any] = np.frombuffer(memory_map, np.uint8)
        began = time.perf_counter()
        pages[::4096] = 1
        return size_bytes / GIB / (time.perf_counter() - began)


def _in_threads(
    blocks: list[mmap.mmap], size_bytes: int, move: Callable[[mmap.mmap, int], int]
) -> None:
    """Move the whole range. Each thread owns one buffer and takes the next offset until none is left."""
    offsets = iter(range(0, size_bytes, _BLOCK_BYTES))
    lock = threading.Lock()
    short: list[int] = []

    def work(block: mmap.mmap) -> None:
        while True:
            with lock:
                offset = next(offsets, None)
            if offset is None:
                return
            if move(block, offset) != _BLOCK_BYTES:
                short.append(offset)

    threads = [threading.Thread(target=work, args=(block,)) for block in blocks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if short:
        raise OSError(f"direct I/O of {_BLOCK_BYTES} bytes at {short[0]} transferred fewer bytes")


def _send(size_bytes: int, files: TlsFiles | None, *, verified: bool = False) -> float:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    receiver = context.Process(
        target=_receive, args=(theirs, size_bytes, files, verified), daemon=True
    )
    receiver.start()
    try:
        port = ours.recv()
        with socket.create_connection(("127.0.0.1", port)) as plain:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if files is None:
                seconds = _sendfile(plain, size_bytes, verified=verified)
            else:
                tls = client_context(files).wrap_socket(plain, server_hostname=_SERVER)
                seconds = _send_slices(tls, size_bytes)
        return size_bytes / GIB / seconds
    finally:
        receiver.join(30)
        receiver.kill()


def _sendfile(sock: socket.socket, size_bytes: int, *, verified: bool) -> float:
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        piece = os.urandom(_SLICE_BYTES)
        for _ in range(size_bytes // _SLICE_BYTES):
            file.write(piece)
        file.flush()
        mapped = memoryview(mmap.mmap(file.fileno(), size_bytes))
        slice_bytes = _SLICE_BYTES if verified else size_bytes
        began = time.perf_counter()
        crc = 0
        for start in range(0, size_bytes, slice_bytes):
            end = min(start + slice_bytes, size_bytes)
            if verified:
                crc = crc32c(mapped[start:end], crc)
            offset = start
            while offset < end:
                offset += os.sendfile(sock.fileno(), file.fileno(), offset, end - offset)
        _expect(sock, crc)
        return time.perf_counter() - began


def _send_slices(sock: ssl.SSLSocket, size_bytes: int) -> float:
    piece = memoryview(os.urandom(_SLICE_BYTES))
    began = time.perf_counter()
    for _ in range(size_bytes // _SLICE_BYTES):
        sock.sendall(piece)
    _expect(sock, 0)
    return time.perf_counter() - began


def _expect(sock: socket.socket, crc: int) -> None:
    """Wait for the receiver's CRC32C of all bytes, which is 0 where it computes none."""
    received = int.from_bytes(sock.recv(4))
    if received != crc:
        raise OSError(f"the receiver computed CRC32C {received:08x}, the sender {crc:08x}")


def _receive(
    pipe: Connection, size_bytes: int, files: TlsFiles | None, verified: bool = False
) -> None:
    buffer = mmap.mmap(-1, size_bytes)
    pages: np.ndarray[Any, Any] = np.frombuffer(buffer, np.uint8)
    pages[::4096] = 1
    view = memoryview(buffer)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        connection, _ = listener.accept()
        if files is not None:
            connection = server_context(files).wrap_socket(connection, server_side=True)
        got = checked = crc = 0
        while got < size_bytes:
            count = connection.recv_into(view[got:])
            if count == 0:
                raise ConnectionResetError(f"the sender closed after {got} of {size_bytes} bytes")
            got += count
            if verified and (got - checked >= _SLICE_BYTES or got == size_bytes):
                crc = crc32c(view[checked:got], crc)
                checked = got
        connection.sendall(crc.to_bytes(4))
        connection.close()
