"""`peer.encryption: None`: payloads outside TLS, and what an attacker on the network can do to them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator

import pytest
from tests.support.peer.bulk_pair import Meddle, Pair, Wire, bytes_of, filled, started
from tests.support.shards.builders import payload
from tests.support.tiers.faulty import Faults, Faulty
from tests.support.tiers.scratch import ScratchTier

from holdfast_core.errors import CorruptionError, RefusedError, UnavailableError
from holdfast_core.format.keys import node_key
from holdfast_core.ids import ByteRange, RestartRound
from holdfast_core.messages.schema import ReadObject, ReadReply, Refusal, Refused
from holdfast_core.net import TlsFiles
from holdfast_core.peer.protocol import receive_message, send_message

SIZE = 9 << 20
MIB = 1 << 20

SAME_CRC = sum(int(bit) << place for place, bit in enumerate(f"{0x11EDC6F41:033b}")).to_bytes(
    5, "little"
)
"""The generator of CRC32C: five bytes by which data can be changed without a change of its CRC32C."""


def flip_a_bit(at: int = 1000, *, keeps_crc: bool = False) -> Meddle:
    """Return a function that flips one bit of the payload in the clear, near byte `at`.

    With `keeps_crc` it flips several bits, so that the CRC32C stays the same.
    """
    # There are several marks, because the end of a read may cut one.
    marks = [payload(SIZE)[start : start + 16] for start in range(at, at + 960, 16)]
    done = False

    def meddle(held: bytearray) -> bytearray:
        nonlocal done
        passed = bytearray(held)
        held.clear()
        found = [place for mark in marks if (place := passed.find(mark)) >= 0]
        if found and not done:
            for offset, bits in enumerate(SAME_CRC if keeps_crc else b"\x01"):
                passed[found[0] + offset] ^= bits
            done = True
        return passed

    return meddle


def is_plain(seen: bytearray) -> bool:
    """Return whether payload was sent in the clear on this connection."""
    return any(payload(SIZE)[at : at + 16] in seen for at in range(0, SIZE, MIB))


@pytest.fixture
def pair(certificates: tuple[TlsFiles, TlsFiles]) -> Iterator[Pair]:
    for found in started(certificates, ScratchTier()):
        found.handler.plain = True
        yield found


@pytest.mark.parametrize("size", [4 * MIB, SIZE])
def test_payloads_travel_in_the_clear_and_nothing_else_does(
    pair: Pair, wires: Callable[..., Wire], size: int
) -> None:
    target = ScratchTier()
    record = filled(pair.tier, size)
    wire = wires()
    pair.copy(target, record.ref, wire.port, plain=True)
    (seen,) = wire.seen
    data = payload(size)
    assert data[:1000] in seen and data[-1000:] in seen
    # Only the payload is in the clear: neither request, reply nor trailer.
    for secret in (
        record.ref.job_uid.encode(),
        b"blake3",
        b"length_bytes",
        record.header.layout.encode(),
    ):
        assert secret not in seen
    assert bytes_of(target, record) == data


def test_a_range_that_is_not_worth_a_connection_stays_inside_tls(
    pair: Pair, wires: Callable[..., Wire]
) -> None:
    record, wire = filled(pair.tier, MIB), wires()
    pair.copy(ScratchTier(), record.ref, wire.port, plain=True)
    (seen,) = wire.seen
    assert not is_plain(seen)


@pytest.mark.parametrize(
    ("server_allows", "caller_asks"), [(False, True), (True, False), (False, False)]
)
def test_one_side_alone_does_not_leave_tls(
    pair: Pair, wires: Callable[..., Wire], server_allows: bool, caller_asks: bool
) -> None:
    pair.handler.plain = server_allows
    record = filled(pair.tier)
    wire = wires()
    pair.copy(ScratchTier(), record.ref, wire.port, attempts=1, plain=caller_asks)
    assert sum(map(len, wire.seen)) > SIZE
    assert not any(map(is_plain, wire.seen))


@pytest.mark.parametrize("at", [1000, SIZE - 1000])
def test_a_changed_shard_is_not_kept_and_copied_again_inside_tls(
    pair: Pair, wires: Callable[..., Wire], at: int
) -> None:
    record = filled(pair.tier)
    target = ScratchTier(capacity_bytes=64 << 20)
    wire = wires(meddle=flip_a_bit(at))
    assert pair.copy(target, record.ref, wire.port, plain=True).record == record
    assert bytes_of(target, record) == payload(SIZE)
    assert [is_plain(seen) for seen in wire.seen] == [True, False]
    assert target.free_bytes() == (64 << 20) - record.file_bytes


@pytest.mark.fault("An attacker changes bytes of a range outside TLS")
def test_changed_ranges_are_read_again_inside_tls(pair: Pair, wires: Callable[..., Wire]) -> None:
    record = filled(pair.tier)
    wire = wires(meddle=flip_a_bit(5 * MIB))
    with pair.open(record.ref, wire.port, plain=True) as shard:
        assert b"".join(bytes(view) for view in shard.read([range(36)])) == payload(SIZE)
    assert [is_plain(seen) for seen in wire.seen] == [True, False]
    assert len(wire.seen[1]) < MIB, "only the chunk that was changed is read again"


def test_an_attack_on_plain_copies_is_no_fault_of_the_peer(
    pair: Pair, wires: Callable[..., Wire]
) -> None:
    """A CorruptionError would make the owner verify its shard, and the fetcher ask another place."""
    record = filled(pair.tier)
    wire = wires(meddle=flip_a_bit(keeps_crc=True))
    target = ScratchTier(capacity_bytes=64 << 20)
    with pytest.raises(UnavailableError, match="outside TLS"):
        pair.copy(target, record.ref, wire.port, attempts=1, plain=True)
    assert target.list_shards() == ()
    assert target.free_bytes() == 64 << 20


def test_a_refusal_in_the_clear_is_not_believed(pair: Pair, wires: Callable[..., Wire]) -> None:
    """The attacker replaces bytes of the payload by a reply, and ends the connection."""
    record = filled(pair.tier)
    left, right = socket.socketpair()
    with left, right:
        send_message(left, ReadReply(refused=a_refusal()))
        forged = right.recv(4096)
    mark = payload(SIZE)[:16]

    def meddle(held: bytearray) -> bytearray:
        passed = bytearray(held)
        held.clear()
        at = passed.find(mark)
        return passed if at < 0 else passed[:at] + forged

    wire = wires(meddle=meddle, cuts=[2 * MIB])
    target = ScratchTier()
    pair.copy(target, record.ref, wire.port, plain=True)
    assert bytes_of(target, record) == payload(SIZE)
    assert len(wire.seen) == 2 and not is_plain(wire.seen[1])


def a_refusal() -> Refused:
    return Refused(Refusal.NOT_FOUND, "forged", RestartRound(0))


@pytest.mark.fault("An attacker injects a request outside TLS")
def test_a_request_in_the_clear_is_not_answered(pair: Pair) -> None:
    """After the bytes the server closes the connection, so an attacker who injects a request gets nothing."""
    key = node_key(filled(pair.tier, 1000).ref)
    with pair.peer().connected() as line:
        send_message(line.sock, ReadObject(key, ByteRange(4096, 5096), plain=True))
        reply = receive_message(line.sock, ReadReply)
        assert reply is not None and reply.plain
        line.leave()
        with contextlib.suppress(OSError):
            send_message(line.sock, ReadObject(key))
        found = b""
        with contextlib.suppress(ConnectionResetError):
            while data := line.sock.recv(65536):
                found += data
    assert len(found) <= 1000


def test_a_broken_copy_goes_on_where_it_stopped(pair: Pair, wires: Callable[..., Wire]) -> None:
    record = filled(pair.tier)
    target = Faulty(ScratchTier(), faults := Faults())
    wire = wires(cuts=[6 * MIB])
    assert pair.copy(target, record.ref, wire.port, plain=True).record == record
    assert faults.calls("begin_copy") == 1
    assert len(wire.seen[1]) < SIZE - 3 * MIB
    assert [is_plain(seen) for seen in wire.seen] == [True, False]


def test_a_bad_shard_is_reported_inside_tls(pair: Pair, wires: Callable[..., Wire]) -> None:
    record = filled(pair.tier)
    pair.tier.damage(record.ref, 5 * MIB)
    target, wire = ScratchTier(), wires()
    with pytest.raises(CorruptionError, match="not match"):
        pair.copy(target, record.ref, wire.port, plain=True)
    inside = [is_plain(seen) for seen in wire.seen[1:]]
    assert is_plain(wire.seen[0]) and inside and not any(inside)
    assert target.list_shards() == ()


def test_refusals_are_received(pair: Pair) -> None:
    record = filled(pair.tier)
    pair.handler.error = RefusedError(Refusal.NOT_MEMBER, "not you")
    with pytest.raises(RefusedError, match="not you"):
        pair.copy(ScratchTier(), record.ref, plain=True)
