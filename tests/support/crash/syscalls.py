"""System calls that change a file, as a tracer reads them from a stopped process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_AT_FDCWD = -100
_PATH_BYTES = 4096

_ARM64 = {
    "openat": 56, "openat2": 437, "write": 64, "pwrite64": 68, "writev": 66, "pwritev": 70,
    "pwritev2": 287, "fsync": 82, "fdatasync": 83, "fallocate": 47, "ftruncate": 46,
    "truncate": 45, "renameat": 38, "renameat2": 276, "linkat": 37, "symlinkat": 36,
    "unlinkat": 35, "mkdirat": 34, "flock": 32, "fchmod": 52, "fchmodat": 53, "sendfile": 71,
    "copy_file_range": 285,
}  # fmt: skip
_X86_64 = {
    "open": 2, "creat": 85, "openat": 257, "openat2": 437, "write": 1, "pwrite64": 18,
    "writev": 20, "pwritev": 296, "pwritev2": 328, "fsync": 74, "fdatasync": 75,
    "fallocate": 285, "ftruncate": 77, "truncate": 76, "rename": 82, "renameat": 264,
    "renameat2": 316, "link": 86, "linkat": 265, "symlink": 88, "symlinkat": 266, "unlink": 87,
    "unlinkat": 263, "rmdir": 84, "mkdir": 83, "mkdirat": 258, "flock": 73, "chmod": 90,
    "fchmod": 91, "fchmodat": 268, "sendfile": 40, "copy_file_range": 326,
}  # fmt: skip
NAMES: Mapping[str, Mapping[int, str]] = {
    "x86_64": {number: name for name, number in _X86_64.items()},
    "aarch64": {number: name for name, number in _ARM64.items()},
}
"""Maps `platform.machine()` to a map from system call number to name."""

_FIRST_PATH_AT_0 = {
    "open": "openat", "creat": "creat", "rename": "renameat", "link": "linkat",
    "unlink": "unlinkat", "rmdir": "unlinkat", "mkdir": "mkdirat", "chmod": "fchmodat",
    "truncate": "truncate",
}  # fmt: skip
"""Calls that take no directory descriptor, with the name that `Call.name` uses for them."""
_TWO_PATHS = frozenset({"renameat", "renameat2", "linkat", "rename", "link"})
_PATH_AT_1 = frozenset(
    {"openat", "openat2", "unlinkat", "mkdirat", "fchmodat", "renameat", "renameat2", "linkat"}
)


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    """Name of the variant with a directory descriptor: `openat` for open, `unlinkat` for rmdir."""
    path: str
    """Absolute path; for a call on a descriptor, the path of its file."""
    to_path: str = ""
    descriptor: int | None = None
    identity: tuple[int, int] = (0, 0)
    """(device, inode) behind the descriptor."""
    offset: int = 0
    """Offset of a write, or the new size of ftruncate and fallocate."""
    data: bytes = b""
    creates: bool = False
    truncates: bool = False

    def inode(self, known: Mapping[tuple[int, int], int]) -> int:
        return known[self.identity]


def read_call(pid: int, name: str, arguments: tuple[int, ...]) -> Call | None:
    """Read the system call at which process `pid` is stopped. Returns None for an open that only reads."""
    if name in _FIRST_PATH_AT_0 or name in _PATH_AT_1 or name in ("symlink", "symlinkat"):
        return _of_paths(pid, name, arguments)
    return _of_descriptor(pid, name, arguments)


def _of_paths(pid: int, name: str, arguments: tuple[int, ...]) -> Call | None:
    plain = _FIRST_PATH_AT_0.get(name, "renameat" if name == "renameat2" else name)
    if name in _PATH_AT_1:
        path = _path(pid, arguments[0], arguments[1])
        to_path = _path(pid, arguments[2], arguments[3]) if name in _TWO_PATHS else ""
        flags = arguments[2]
    else:
        path = _path(pid, _AT_FDCWD, arguments[0])
        to_path = _path(pid, _AT_FDCWD, arguments[1]) if name in _TWO_PATHS else ""
        flags = arguments[1]
    if plain != "openat":
        return Call(plain, path, to_path)
    if not flags & (os.O_CREAT | os.O_TRUNC):
        return None
    there = os.path.lexists(path)
    return Call("openat", path, creates=not there, truncates=there and bool(flags & os.O_TRUNC))


def _of_descriptor(pid: int, name: str, arguments: tuple[int, ...]) -> Call:
    descriptor = _signed(arguments[0])
    link = Path(f"/proc/{pid}/fd/{descriptor}")
    try:
        path, found = str(link.readlink()), link.stat()
    except OSError:
        return Call(name, "", descriptor=descriptor)  # the descriptor is not open
    identity = (found.st_dev, found.st_ino)
    match name:
        case "write":
            data, offset = _memory(pid, arguments[1], arguments[2]), _position(pid, descriptor)
        case "pwrite64":
            data, offset = _memory(pid, arguments[1], arguments[2]), arguments[3]
        case "ftruncate":
            data, offset = b"", arguments[1]
        case "fallocate":
            data, offset = b"", arguments[2] + arguments[3]
        case _:
            data, offset = b"", 0
    return Call(name, path, "", descriptor, identity, offset, data)


def _path(pid: int, directory: int, address: int) -> str:
    text = os.fsdecode(_text(pid, address))
    if text.startswith("/"):
        return os.path.normpath(text)
    at = _signed(directory)
    base = Path(f"/proc/{pid}/cwd" if at == _AT_FDCWD else f"/proc/{pid}/fd/{at}").readlink()
    return os.path.normpath(base / text)


def _text(pid: int, address: int) -> bytes:
    """Read the string at `address` up to its NUL, page by page, because the next page may be unmapped."""
    found = b""
    while b"\0" not in found and len(found) < 2 * _PATH_BYTES:
        start = address + len(found)
        found += _memory(pid, start, _PATH_BYTES - start % _PATH_BYTES)
    return found.partition(b"\0")[0]


def _memory(pid: int, address: int, length: int) -> bytes:
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        return memory.read(length)


def _position(pid: int, descriptor: int) -> int:
    with open(f"/proc/{pid}/fdinfo/{descriptor}") as info:
        return int(info.readline().split()[1])


def _signed(word: int) -> int:
    return (word & 0xFFFFFFFF) - ((word & 0x80000000) << 1)
