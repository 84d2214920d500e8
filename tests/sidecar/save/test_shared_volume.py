"""A trainer that attacks its sidecar through their shared volume can change only its own files."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.shards.builders import JOB_UID, rank_layout
from tests.support.sidecar.contracts import contract_with
from tests.support.tiers.scratch import ScratchTier

from holdfast_core.clock import SystemClock
from holdfast_core.errors import HoldfastError
from holdfast_core.format.canonical import digest_of, hex_of
from holdfast_core.ids import Digest, Rank, RestartRound, Step
from holdfast_core.messages.schema import Stage
from holdfast_core.net import peer_dns_name
from holdfast_core.save.place import MAX_KNOWN, RankLayouts, SlotNote, SlotNotes
from holdfast_core.shm.shared_files import LayoutFiles
from holdfast_core.shm.slot_file import HEADER_BYTES, SlotFile, SlotHeader, SlotState, list_slots
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.base.telemetry import Metrics
from holdfast_sidecar.base.tiers import Pools
from holdfast_sidecar.process.app import start_sidecar
from holdfast_sidecar.wire.intake import Intake, LocalConnections

COMMITTED = b"bytes of a committed shard" * 1000
SLOT = "rank000000.0.slot"
NOTE = SlotNote(Stage(RestartRound(0), Step(3), Rank(0), SLOT, 5, digest_of(b"layout")), 2)


@pytest.fixture
def root() -> Iterator[Path]:
    """Return a directory with a short path: a Unix socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def shared(root: Path) -> Path:
    (root / "shared").mkdir()
    return root / "shared"


@pytest.fixture
def victim(root: Path) -> Path:
    """Return a file of the sidecar's own volume."""
    (root / "node").mkdir(mode=0o700)
    path = root / "node" / "rank000000-committed.shard"
    path.write_bytes(COMMITTED)
    path.chmod(0o600)
    return path


def within_guard(call: Callable[[], Any]) -> Any:
    """Run the call in a thread, since a FIFO may block it for ever. Its error is raised here."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append((call(), None))
        except (HoldfastError, OSError) as error:
            result.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HANG_SECONDS)
    assert result, "the call still waits"
    value, error = result[0]
    if error is not None:
        raise error
    return value


def assert_untouched(victim: Path) -> None:
    assert victim.read_bytes() == COMMITTED
    assert victim.stat().st_mode & 0o777 == 0o600
    assert victim.parent.stat().st_mode & 0o7777 == 0o700
    assert [p.name for p in victim.parent.iterdir()] == [victim.name]


# --------------------------------------------------------------------------- notes


@pytest.mark.fault("A trainer puts a link in place of a note")
def test_a_note_is_not_written_through_a_link(shared: Path, victim: Path) -> None:
    notes = SlotNotes(shared / "staged")
    notes.write(NOTE)
    note = shared / "staged" / f"{SLOT}.json"
    note.unlink()
    note.symlink_to(victim)
    notes.write(NOTE)
    assert_untouched(victim)
    assert notes.read(SLOT) == NOTE


@pytest.mark.fault("A trainer puts a hard link in place of a note")
def test_a_note_is_not_written_through_a_hard_link(shared: Path) -> None:
    """The link is a second name for another file of the sidecar in the same volume."""
    other = shared / "other"
    other.write_bytes(COMMITTED)
    notes = SlotNotes(shared / "staged")
    notes.write(NOTE)
    note = shared / "staged" / f"{SLOT}.json"
    note.unlink()
    os.link(other, note)
    notes.write(NOTE)
    assert other.read_bytes() == COMMITTED
    assert notes.read(SLOT) == NOTE


@pytest.mark.fault("A trainer replaces the directory of the notes")
@pytest.mark.parametrize("when", ["before the first note", "between two notes"])
def test_notes_do_not_follow_a_directory_that_was_replaced(
    shared: Path, victim: Path, when: str
) -> None:
    notes = SlotNotes(shared / "staged")
    if when == "between two notes":
        notes.write(NOTE)
        (shared / "staged").rename(shared / "elsewhere")
    (shared / "staged").symlink_to(victim.parent)
    notes.write(NOTE)
    notes.remove("unknown")
    assert_untouched(victim)
    assert notes.read(SLOT) == NOTE


def test_a_notes_directory_that_others_may_write_to_is_not_used(shared: Path) -> None:
    (shared / "staged").mkdir()
    (shared / "staged").chmod(0o777)
    notes = SlotNotes(shared / "staged")
    notes.write(NOTE)
    assert (shared / "staged").stat().st_mode & 0o022 == 0
    assert notes.read(SLOT) == NOTE


def test_a_notes_directory_that_is_a_file_is_moved_aside(shared: Path) -> None:
    (shared / "staged").write_bytes(b"")
    notes = SlotNotes(shared / "staged")
    notes.write(NOTE)
    assert notes.read(SLOT) == NOTE


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def _directory(path: Path) -> None:
    path.mkdir()


def _sparse(path: Path) -> None:
    """Create a sparse file as large as the file system of the test allows."""
    path.touch()
    for exponent in (60, 50, 43, 40):
        try:
            os.truncate(path, 1 << exponent)
        except OSError:
            continue
        return
    raise AssertionError("no sparse file could be made")


HOSTILE = [
    pytest.param(make, id=make.__name__.strip("_"))
    for make in (_fifo, _socket, _directory, _sparse)
]


@pytest.mark.fault("A trainer puts a FIFO, socket, directory or sparse file in place of a note")
@pytest.mark.parametrize("make", HOSTILE)
def test_a_note_that_is_no_regular_file_is_refused_at_once(
    shared: Path, make: Callable[[Path], None]
) -> None:
    """A seal reads the notes and must not wait for a writer that never comes."""
    notes = SlotNotes(shared / "staged")
    notes.write(NOTE)
    note = shared / "staged" / f"{SLOT}.json"
    note.unlink()
    make(note)
    with pytest.raises((HoldfastError, OSError)):
        within_guard(lambda: notes.read(SLOT))


# --------------------------------------------------------------------------- layouts


DOCUMENT = rank_layout()
DIGEST: Digest = digest_of(DOCUMENT)
STAGE = Stage(RestartRound(0), Step(3), Rank(0), SLOT, 5, DIGEST)


@pytest.fixture
def layouts(shared: Path) -> Iterator[RankLayouts]:
    pools = Pools(disk=1, fetch=1, store=1)
    yield RankLayouts(shared / "layouts", ScratchTier(), pools)
    pools.close()


@pytest.mark.fault("A trainer puts a link in place of a layout or of its temporary file")
def test_a_layout_is_not_given_through_a_link(
    shared: Path, victim: Path, layouts: RankLayouts
) -> None:
    """The links have the name of the layout and the names that are easy to guess for a temporary file."""
    (shared / "layouts").mkdir()
    name = f"{hex_of(DIGEST)}.json"
    for guess in (name, f".{name}.sidecar", f".{name}.tmp", f"{name}.tmp"):
        (shared / "layouts" / guess).symlink_to(victim)
    assert asyncio.run(layouts.publish(DOCUMENT)) == DIGEST
    assert_untouched(victim)
    assert (shared / "layouts" / name).read_bytes() == DOCUMENT


@pytest.mark.fault("A state has another structure at each save, for months")
async def test_only_the_layouts_of_the_newest_saves_are_remembered(
    shared: Path, layouts: RankLayouts
) -> None:
    """In a pod that lives for months, the sidecar would need all its memory for them."""
    files = LayoutFiles(shared / "layouts")
    kept = DOCUMENT
    others = [rank_layout(rows_per_rank=100 + save) for save in range(MAX_KNOWN)]
    for document in (kept, *others[:-1], kept, others[-1]):
        files.ensure(document, digest_of(document))
        await layouts.ensure(replace(NOTE.stage, layout=digest_of(document)))
    assert len(layouts.known) == MAX_KNOWN
    assert {digest_of(kept), digest_of(others[-1])} <= layouts.known.keys()


@pytest.mark.fault("A trainer puts a link in place of the directory of layouts")
def test_a_layout_is_not_given_into_a_directory_that_is_a_link(
    shared: Path, victim: Path, layouts: RankLayouts
) -> None:
    (shared / "layouts").symlink_to(victim.parent)
    with pytest.raises(HoldfastError):
        asyncio.run(layouts.publish(DOCUMENT))
    assert_untouched(victim)


@pytest.mark.fault("A layout is read through a link")
def test_a_layout_is_not_read_through_a_link(
    shared: Path, victim: Path, layouts: RankLayouts
) -> None:
    (shared / "layouts").mkdir()
    (victim.parent / "layout").write_bytes(DOCUMENT)
    (shared / "layouts" / f"{hex_of(DIGEST)}.json").symlink_to(victim.parent / "layout")
    with pytest.raises(HoldfastError):
        asyncio.run(layouts.ensure(STAGE))


@pytest.mark.fault("A trainer puts a FIFO, socket, directory or sparse file in place of a layout")
@pytest.mark.parametrize("make", HOSTILE)
def test_a_layout_that_is_no_regular_file_is_refused_at_once(
    shared: Path, layouts: RankLayouts, make: Callable[[Path], None]
) -> None:
    (shared / "layouts").mkdir()
    make(shared / "layouts" / f"{hex_of(DIGEST)}.json")
    with pytest.raises(HoldfastError):
        within_guard(lambda: asyncio.run(layouts.ensure(STAGE)))


# --------------------------------------------------------------------------- slots


def slot_file(path: Path, *, capacity_bytes: int = 4096) -> None:
    header = SlotHeader(
        SlotState.FULL, Rank(0), capacity_bytes, RestartRound(0), Step(1), capacity_bytes
    )
    path.write_bytes(header.pack())
    os.truncate(path, HEADER_BYTES + capacity_bytes)


@pytest.mark.fault("A trainer puts a link in place of the directory of slots")
def test_slots_are_not_opened_in_a_directory_that_is_a_link(shared: Path, victim: Path) -> None:
    """A file of the sidecar's volume that has the name of a slot is not written to."""
    slot_file(victim.parent / SLOT)
    (shared / "slots").symlink_to(victim.parent)
    assert list_slots(shared / "slots") == ()
    with pytest.raises(HoldfastError):
        SlotFile.open(shared / "slots", SLOT)


@pytest.mark.fault("A trainer makes a slot a hard link")
def test_a_slot_with_a_second_name_is_not_opened(shared: Path) -> None:
    (shared / "slots").mkdir()
    slot_file(shared / "a-file-of-the-sidecar")
    os.link(shared / "a-file-of-the-sidecar", shared / "slots" / SLOT)
    with pytest.raises(HoldfastError, match="hard links"):
        SlotFile.open(shared / "slots", SLOT)


@pytest.mark.fault("A slot is a link to a file of the sidecar")
def test_a_slot_that_is_a_link_is_not_opened(shared: Path, victim: Path) -> None:
    """Otherwise the sidecar would write to a file of its own volume whose contents look like a slot."""
    slot_file(victim.parent / "slot")
    (shared / "slots").mkdir()
    (shared / "slots" / SLOT).symlink_to(victim.parent / "slot")
    with pytest.raises(HoldfastError):
        SlotFile.open(shared / "slots", SLOT)


@pytest.mark.parametrize("make", HOSTILE[:3])
def test_a_slot_that_is_no_regular_file_is_refused_at_once(
    shared: Path, make: Callable[[Path], None]
) -> None:
    (shared / "slots").mkdir()
    make(shared / "slots" / SLOT)
    with pytest.raises(HoldfastError):
        within_guard(lambda: SlotFile.open(shared / "slots", SLOT))


@pytest.mark.fault("A sparse slot claims more than the volume holds")
def test_a_slot_that_claims_more_than_its_volume_holds_is_refused(shared: Path) -> None:
    """The pages of the file are holes: they cost the trainer nothing, and the sidecar would read for
    years."""
    (shared / "slots").mkdir()
    volume = os.statvfs(shared)
    slot_file(shared / "slots" / SLOT, capacity_bytes=volume.f_blocks * volume.f_frsize + 1)
    slot = SlotFile.open(shared / "slots", SLOT)
    try:
        with pytest.raises(HoldfastError, match="the volume has"):
            slot.header()
    finally:
        slot.close()


@pytest.mark.fault("A trainer shrinks a slot under its reader")
def test_a_slot_that_shrinks_under_the_reader_is_an_error(shared: Path) -> None:
    (shared / "slots").mkdir()
    slot_file(shared / "slots" / SLOT, capacity_bytes=1 << 20)
    slot = SlotFile.open(shared / "slots", SLOT)
    try:
        pieces = slot.pieces(0, 1 << 20, 4096)
        next(pieces)
        os.truncate(shared / "slots" / SLOT, HEADER_BYTES)
        with pytest.raises(HoldfastError, match="truncated"):
            next(pieces)
    finally:
        slot.close()


def test_a_directory_of_many_names_is_not_listed_whole(shared: Path) -> None:
    (shared / "slots").mkdir()
    for number in range(2000):
        (shared / "slots" / f"rank{number:06d}.0.slot").touch()
    assert len(list_slots(shared / "slots")) == 1024


# --------------------------------------------------------------------------- socket, ports


@pytest.mark.fault("Another process has taken the path of the pod's socket")
@pytest.mark.parametrize("make", [_fifo, _socket, _directory])
def test_the_socket_takes_the_place_of_what_lies_there(
    shared: Path, make: Callable[[Path], None]
) -> None:
    make(shared / "holdfast.sock")

    async def scenario() -> None:
        nothing: Any = None
        intake = Intake(shared / "holdfast.sock", JOB_UID, nothing, LocalConnections())
        await intake.start()
        _, writer = await asyncio.open_unix_connection(str(shared / "holdfast.sock"))
        writer.close()
        await intake.close()

    asyncio.run(scenario())
    assert (shared / "holdfast.sock").stat().st_mode & 0o777 == 0o660


def test_the_socket_is_not_created_through_a_link(shared: Path, victim: Path) -> None:
    (shared / "holdfast.sock").symlink_to(victim)

    async def scenario() -> None:
        nothing: Any = None
        intake = Intake(shared / "holdfast.sock", JOB_UID, nothing, LocalConnections())
        await intake.start()
        await intake.close()

    asyncio.run(scenario())
    assert_untouched(victim)


@pytest.mark.fault("Links lie in wait when a sidecar starts")
def test_the_sidecar_leaves_nothing_but_its_socket_where_the_trainer_can_replace_it(
    root: Path, shared: Path
) -> None:
    """When the sidecar starts, there are links with the names of all files that it writes."""
    from tests.support.servers.pki import Authority

    (root / "node").mkdir(mode=0o700)
    target = root / "target"
    target.write_bytes(COMMITTED)
    for name in ("ports.json", "ports.json.tmp", "holdfast.sock"):
        (shared / name).symlink_to(target)
    certs = Authority().write_leaf(root / "certs", peer_dns_name("gpt-0-r0", JOB_UID))
    contract = contract_with(
        shared_dir=str(shared),
        node_dir=str(root / "node"),
        certs_dir=str(certs),
        control_port=0,
        bulk_port=0,
        metrics_port=0,
    )

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            await start_sidecar(Settings(contract), SystemClock(), Metrics(), stack)

    asyncio.run(scenario())
    assert target.read_bytes() == COMMITTED
    assert (shared / "ports.json").is_symlink()
