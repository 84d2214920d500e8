"""Copy a whole shard from a peer to this node. Chunks that other shards on this node have are not requested.

The copy is still a whole file that depends on no other (ADR 0029). It is written in order: the head, which
the trailer determines, then the payload from the peer and from this node, then the trailer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from holdfast_core.errors import CorruptionError, UnavailableError
from holdfast_core.ids import ByteRange, ShardRef
from holdfast_core.peer.equal_chunks import Run
from holdfast_core.peer.local_chunks import LocalChunks
from holdfast_core.peer.protocol import PIECE_BYTES, Attempts, Peer
from holdfast_core.peer.shard import Answer, PeerShard
from holdfast_core.shards.chunks import payload_span
from holdfast_core.shards.file import head_bytes, pack_head, pack_trailer, trailer_offset
from holdfast_core.shards.record import ShardRecord
from holdfast_core.tiers.base import CopyWriter, NodeTier


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy that is durable on this node."""

    record: ShardRecord
    received_bytes: int
    """Bytes that the peer sent for it, the trailer included."""


def copy_shard(
    peer: Peer, ref: ShardRef, tier: NodeTier, may_go_on: Callable[[], None] = lambda: None
) -> Copied:
    """Copy a shard from a peer to the node tier. It is verified and durable when this returns.

    Blocks. After a broken connection the copy continues where it stopped.

    Args:
        peer: The peer.
        ref: The shard. The node tier does not hold it.
        tier: The node tier of this node.
        may_go_on: Called before each piece and before the commit. An error that it raises ends the copy.

    Raises:
        NotFoundError: The peer does not have the shard.
        CorruptionError: The peer's copy is corrupt. Another source may have a good one.
        RefusedError: The peer refuses the request.
        CapacityError: The shard does not fit on this node.
        AccessDeniedError: A side refuses the other's certificate.
        FormatError: The peer violates the protocol.
        UnavailableError: All attempts failed.

    After an error no part of the copy remains.
    """
    attempts = Attempts(peer.options.attempts)
    with PeerShard.open(peer, ref) as shard, LocalChunks(tier, shard.trailer) as local:
        while True:
            # A copy that a change outside TLS has damaged starts again, inside TLS.
            with _Copy(shard, local, tier) as copy:
                try:
                    while not copy.complete:
                        before = copy.position
                        try:
                            copy.receive(may_go_on)
                        except UnavailableError as error:
                            if copy.position > before:
                                attempts.progressed()
                            attempts.failed(error)
                    may_go_on()
                    return Copied(copy.commit(), copy.received_bytes)
                except CorruptionError as error:
                    if not shard.left_tls:
                        raise
                    shard.stay_inside()
                    attempts.failed(
                        UnavailableError(f"bulk: {ref} from {peer}: outside TLS: {error}")
                    )


class _Copy:
    """One writer of the shard file, and the position that it has reached in the payload."""

    def __init__(self, shard: PeerShard, local: LocalChunks, tier: NodeTier) -> None:
        record = shard.trailer.record
        self._shard = shard
        self._local = local
        self._header = record.header
        self._head_bytes = head_bytes(record.header)
        self._writer: CopyWriter = tier.begin_copy(record.ref, record.file_bytes)
        self.received_bytes = record.file_bytes - trailer_offset(record.header)

    def __enter__(self) -> Self:
        self._writer.write(pack_head(self._header))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._writer.abort()

    @property
    def position(self) -> int:
        """Number of bytes of the payload that were written."""
        return self._writer.offset - self._head_bytes

    @property
    def complete(self) -> bool:
        return self.position >= self._header.payload_bytes

    def receive(self, may_go_on: Callable[[], None]) -> None:
        """Write the rest of the payload from this node's shards and the peer."""
        runs = self._local.runs(self.position)
        missing = self._missing(runs)
        if not missing:
            for run in runs:
                self._local.take(run, self._writer, may_go_on)
            return
        with self._shard.answer(missing) as answer:
            for run in runs:
                stop = payload_span(self._header, run.chunks).start
                self._receive_until(stop, answer, may_go_on)
                self._local.take(run, self._writer, may_go_on)
            self._receive_until(self._header.payload_bytes, answer, may_go_on)

    def _receive_until(self, stop: int, answer: Answer, may_go_on: Callable[[], None]) -> None:
        while (left := stop - self.position) > 0:
            may_go_on()
            room = self._writer.room(min(left, PIECE_BYTES))
            answer.receive_into(room)
            self._writer.advance(len(room))
            self.received_bytes += len(room)

    def _missing(self, runs: tuple[Run, ...]) -> list[ByteRange]:
        """Return the spans of the payload, from the present position on, that are not in `runs`."""
        missing: list[ByteRange] = []
        position = self.position
        for run in runs:
            held = payload_span(self._header, run.chunks)
            if held.start > position:
                missing.append(ByteRange(position, held.start))
            position = held.stop
        if position < self._header.payload_bytes:
            missing.append(ByteRange(position, self._header.payload_bytes))
        return missing

    def commit(self) -> ShardRecord:
        """Write the end of the file, and make it durable. Raises CorruptionError."""
        trailer = self._shard.trailer
        padding = trailer_offset(self._header) - self._head_bytes - self._header.payload_bytes
        end = pack_trailer(self._header, trailer.record.blake3, trailer.table)
        self._writer.write(bytes(padding) + end)
        return self._writer.commit()
