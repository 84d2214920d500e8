"""States that a power cut may leave of a recorded log of changes to a directory tree.

This module does no I/O except in `build`. The model assumes only what POSIX guarantees, which covers ext4
and xfs. The fsync of a file makes its bytes and its size durable; the fsync of a directory makes its names
durable. Any subset of the changes that are not durable may survive, in any order. A rename is atomic. A
write of several blocks may be torn.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = 0
"""Inode of the recorded directory, which exists before the first change."""
WINDOW = 3
"""Largest number of changes that are lost, or that survive, while all others do the opposite. It applies
where there are too many pending changes to try all subsets."""
_ALL_SUBSETS_UP_TO = 6
_BLOCK_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Create:
    parent: int
    name: str
    inode: int
    directory: bool


@dataclass(frozen=True, slots=True)
class Link:
    parent: int
    name: str
    inode: int


@dataclass(frozen=True, slots=True)
class Rename:
    parent: int
    name: str
    to_parent: int
    to_name: str
    inode: int


@dataclass(frozen=True, slots=True)
class Remove:
    parent: int
    name: str


@dataclass(frozen=True, slots=True)
class Write:
    inode: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Resize:
    inode: int
    size: int
    shrinks: bool
    """Whether the file may become smaller; False for a preallocation."""


@dataclass(frozen=True, slots=True)
class Sync:
    inode: int


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Acknowledgement that the program gave its user. It is not a change."""

    text: str


Change = Create | Link | Rename | Remove | Write | Resize
Op = Change | Sync | Acknowledged


@dataclass(frozen=True, slots=True)
class PowerCut:
    """Tree that a power cut may leave, and what the program had acknowledged before it."""

    after: int
    """Number of ops of the log that had begun."""
    lost: tuple[Change, ...]
    acknowledged: tuple[str, ...]
    tree: Tree


Tree = tuple[tuple[str, bytes | None], ...]
"""Pairs of a path below the root and its content, sorted; the content of a directory is None."""


def power_cuts(log: Sequence[Op], *, at: Sequence[int] | None = None) -> Iterator[PowerCut]:
    """Yield each different pair of tree and acknowledgements once.

    `at` restricts the cuts to those after that many ops of the log; None means after every op.
    """
    ops = tuple(torn(log))
    places = range(len(ops) + 1) if at is None else [_torn_index(log, n) for n in at]
    seen: set[tuple[Tree, tuple[str, ...]]] = set()
    for after in places:
        done = ops[:after]
        acknowledged = tuple(op.text for op in done if isinstance(op, Acknowledged))
        changes = [n for n, op in enumerate(done) if not isinstance(op, Sync | Acknowledged)]
        pending = [n for n in changes if not _is_durable(done, n)]
        for lost in _subsets(pending):
            kept = [done[n] for n in changes if n not in lost]
            tree = tree_of([op for op in kept if not isinstance(op, Sync | Acknowledged)])
            if (tree, acknowledged) not in seen:
                seen.add((tree, acknowledged))
                gone = tuple(ops[n] for n in sorted(lost))
                yield PowerCut(
                    after,
                    tuple(op for op in gone if not isinstance(op, Sync | Acknowledged)),
                    acknowledged,
                    tree,
                )


def torn(log: Sequence[Op]) -> Iterator[Op]:
    """Split each write of more than a block into two, either of which may be lost."""
    for op in log:
        if isinstance(op, Write) and len(op.data) > _BLOCK_BYTES:
            cut = len(op.data) // 2 // _BLOCK_BYTES * _BLOCK_BYTES or _BLOCK_BYTES
            yield Write(op.inode, op.offset, op.data[:cut])
            yield Write(op.inode, op.offset + cut, op.data[cut:])
        else:
            yield op


def _torn_index(log: Sequence[Op], after: int) -> int:
    return len(tuple(torn(log[:after])))


def _is_durable(done: Sequence[Op], number: int) -> bool:
    touched = _touches(done[number])
    return any(isinstance(op, Sync) and op.inode in touched for op in done[number + 1 :])


def _touches(op: Op) -> tuple[int, ...]:
    """Return the inodes of which any fsync makes the op durable."""
    match op:
        case Create() | Link() | Remove():
            return (op.parent,)
        case Rename():
            return (op.parent, op.to_parent)
        case Write() | Resize():
            return (op.inode,)
        case Sync() | Acknowledged():
            return ()


def _subsets(pending: Sequence[int]) -> Iterator[frozenset[int]]:
    """Yield the sets of changes to lose: all subsets if there are few, else those within `WINDOW`."""
    everything = frozenset(pending)
    if len(pending) <= _ALL_SUBSETS_UP_TO:
        for size in range(len(pending) + 1):
            yield from map(frozenset, itertools.combinations(pending, size))
        return
    for size in range(WINDOW + 1):
        for few in itertools.combinations(pending, size):
            yield frozenset(few)
            yield everything - frozenset(few)


@dataclass(slots=True)
class _Inode:
    names: dict[str, int] | None
    """Names in a directory; None for a file."""
    data: bytearray = field(default_factory=bytearray)

    def entries(self) -> dict[str, int]:
        return {} if self.names is None else self.names


def tree_of(changes: Sequence[Change]) -> Tree:
    """Return the tree that these changes, applied in order, make of an empty directory."""
    inodes: dict[int, _Inode] = {ROOT: _Inode({})}

    def directory(inode: int) -> dict[str, int]:
        # A directory's own name may be lost while names in it are durable. They are then unreachable.
        return inodes.setdefault(inode, _Inode({})).entries()

    def file(inode: int) -> bytearray:
        return inodes.setdefault(inode, _Inode(None)).data

    for change in changes:
        match change:
            case Create():
                inodes.setdefault(change.inode, _Inode({} if change.directory else None))
                directory(change.parent)[change.name] = change.inode
            case Link():
                file(change.inode)
                directory(change.parent)[change.name] = change.inode
            case Rename():
                file(change.inode)
                held = directory(change.parent)
                if held.get(change.name) == change.inode:
                    del held[change.name]
                directory(change.to_parent)[change.to_name] = change.inode
            case Remove():
                directory(change.parent).pop(change.name, None)
            case Write():
                data = file(change.inode)
                data.extend(bytes(max(0, change.offset - len(data))))
                data[change.offset : change.offset + len(change.data)] = change.data
            case Resize():
                data = file(change.inode)
                data.extend(bytes(max(0, change.size - len(data))))
                if change.shrinks:
                    del data[change.size :]
    return tuple(sorted(_walk(inodes, ROOT, "")))


def _walk(inodes: dict[int, _Inode], inode: int, prefix: str) -> Iterator[tuple[str, bytes | None]]:
    for name, child in inodes[inode].entries().items():
        held = inodes[child]
        if held.names is None:
            yield prefix + name, bytes(held.data)
        else:
            yield prefix + name, None
            yield from _walk(inodes, child, f"{prefix}{name}/")


def build(tree: Tree, root: Path) -> None:
    """Create the tree below `root`, which must be empty."""
    for path, content in tree:
        if content is None:
            (root / path).mkdir(mode=0o700)
        else:
            (root / path).write_bytes(content)
