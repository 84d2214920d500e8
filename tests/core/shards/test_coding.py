"""Chunks that are stored compressed are decoded to the original bytes or refused."""

from __future__ import annotations

import random
import struct

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from tests.support.shards.builders import payload, shard_header

from holdfast_core.errors import CorruptionError, FormatError
from holdfast_core.format.rank_layout import RankLayout, TensorSlice
from holdfast_core.ids import ByteRange, Rank
from holdfast_core.shards.coding import ChunkDecoder, ChunkEncoder, chunk_widths
from holdfast_core.shards.pack import PLAIN, WIDTHS, check_stored

PARTS = (b"\0" * 5000, bytes(range(256)) * 20, payload(3000), b"xyz")
chunks = st.lists(st.sampled_from(PARTS) | st.binary(max_size=50), max_size=8).map(b"".join)


def decoded(stored: bytes, width: int, length: int) -> bytes:
    place = bytearray(length)
    ChunkDecoder().decode(memoryview(stored), width, memoryview(place))
    return bytes(place)


@given(chunks, st.sampled_from(WIDTHS))
def test_a_chunk_comes_back(chunk: bytes, width: int) -> None:
    """A chunk of any length, also one that is no multiple of the width."""
    stored = ChunkEncoder().encode(chunk, width)
    if stored is not None:
        assert len(stored) < len(chunk)
        check_stored(len(stored), width, len(chunk))
        assert decoded(stored, width, len(chunk)) == chunk
    assert decoded(chunk, PLAIN, len(chunk)) == chunk


def test_exponents_beside_exponents_are_shorter() -> None:
    """The floats have random mantissas, for which the shuffle is made."""
    noise = random.Random(1)
    floats = struct.pack("<16384f", *(noise.gauss(0, 0.02) for _ in range(16384)))
    coded = {width: ChunkEncoder().encode(floats, width) for width in (1, 4)}
    assert coded[4] is not None
    assert len(coded[4]) < 0.9 * len(floats)
    assert coded[1] is None or len(coded[1]) > 1.05 * len(coded[4])


def test_incompressible_bytes_are_stored_unchanged() -> None:
    noise = random.Random(1).randbytes(1 << 16)
    assert [ChunkEncoder().encode(noise, width) for width in WIDTHS] == [None] * 4


CHUNK = b"\0\0\x80\x3f" * 1000
GOOD = ChunkEncoder().encode(CHUNK, 4)


def body(*planes: bytes) -> bytes:
    return struct.pack(f"<{len(planes)}I", *map(len, planes)) + b"".join(planes)


def frame(data: bytes, **options: object) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)  # type: ignore[arg-type]


ZEROS = frame(b"\0" * 1000)
WRONG = {
    "too short for its lengths": GOOD[:15],
    "cut": GOOD[:-1],
    "longer": GOOD + b"\0",
    "lengths that are not those of the planes": struct.pack("<4I", 1, 2, 3, 4) + GOOD[16:],
    "a plane that is no frame": body(ZEROS, ZEROS, ZEROS, b"no frame"),
    "a plane of another length": body(ZEROS, ZEROS, ZEROS, frame(b"\0" * 1001)),
    "a shorter plane": body(ZEROS, ZEROS, ZEROS, frame(b"\0" * 999)),
    "a plane longer than it is": body(ZEROS, ZEROS, ZEROS, bytes(1001)),
    "a frame and more": body(ZEROS, ZEROS, ZEROS, ZEROS + b"\0"),
    "two frames": body(ZEROS, ZEROS, ZEROS, frame(b"\0" * 500) + frame(b"\0" * 500)),
    "a frame that does not say its length": body(
        ZEROS, ZEROS, ZEROS, frame(b"\0" * 1000, write_content_size=False)
    ),
    "nothing": body(ZEROS, ZEROS, ZEROS, b""),
}


@pytest.mark.parametrize("stored", WRONG.values(), ids=WRONG.keys())
def test_what_is_not_the_chunk_is_refused(stored: bytes) -> None:
    with pytest.raises(CorruptionError):
        decoded(stored, 4, len(CHUNK))


def test_a_bomb_is_not_decoded() -> None:
    """One frame of some KiB claims 64 MiB. Another claims the plane's length and contains 64 MiB."""
    bomb = frame(b"\0" * (64 << 20))
    assert len(bomb) < 1 << 14
    with pytest.raises(CorruptionError, match=r"a frame of 67108864 bytes .* expected 65536"):
        decoded(body(bomb, b"", b"", b""), 4, 1 << 18)
    lying = bomb.replace(struct.pack("<I", 64 << 20), struct.pack("<I", 1 << 16), 1)
    assert zstandard.get_frame_parameters(lying).content_size == 1 << 16
    with pytest.raises(CorruptionError, match="a plane of 65536 bytes"):
        decoded(body(lying, b"", b"", b""), 4, 1 << 18)


def test_a_frame_with_a_dictionary_is_refused() -> None:
    samples = [f"sample {number} of a dictionary".encode() * 9 for number in range(400)]
    dictionary = zstandard.train_dictionary(4096, samples)
    assert zstandard.get_frame_parameters(frame(b"\0" * 1000, dict_data=dictionary)).dict_id
    with pytest.raises(CorruptionError, match="with dictionary"):
        decoded(body(frame(b"\0" * 1000, dict_data=dictionary), ZEROS, ZEROS, ZEROS), 4, 4000)


@given(st.data())
def test_a_flipped_bit_never_makes_more_or_less_than_the_chunk(data: st.DataObject) -> None:
    """The decoder or the chunk table detects the flipped bit. In either case, only the given buffer is
    written."""
    bad = bytearray(GOOD or b"")
    bad[data.draw(st.integers(0, len(bad) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    place = bytearray(b"#" * (len(CHUNK) + 2))
    try:
        ChunkDecoder().decode(memoryview(bytes(bad)), 4, memoryview(place)[1:-1])
    except CorruptionError:
        assert place == b"#" * len(place)
    assert (place[0], place[-1]) == (ord("#"), ord("#"))


@pytest.mark.parametrize(
    ("length", "width"),
    [(4096, 4), (4097, 4), (15, 4), (3, 1), (100, 3), (100, 16), (4095, PLAIN), (0, PLAIN)],
)
def test_lengths_that_cannot_be(length: int, width: int) -> None:
    with pytest.raises(FormatError, match="a chunk of 4096 bytes"):
        check_stored(length, width, 4096)


def test_the_width_of_a_chunk_is_that_of_most_of_its_bytes() -> None:
    """Chunks of 4,096 bytes: header and floats, floats, floats and some halves, halves and objects,
    objects."""

    def layout(**spans: tuple[str, int, int]) -> RankLayout:
        tensors = {
            name: TensorSlice(dtype, (1,), (0,), (1,), ByteRange(start, stop))
            for name, (dtype, start, stop) in spans.items()
        }
        return RankLayout(Rank(0), tensors, {}, 20_000)

    mixed = layout(f=("F32", 1000, 3000), g=("F32", 3000, 11_000), h=("BF16", 11_000, 16_000))
    header = shard_header(20_000, chunk_bytes=4096)
    assert chunk_widths(mixed, header) == bytes([4, 4, 4, 2, 1])
    assert chunk_widths(layout(f=("F32", 0, 20_000)), header) == bytes([4] * 5)
