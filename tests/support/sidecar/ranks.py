"""A scripted rank with real slot files."""

from __future__ import annotations

from pathlib import Path

from tests.support.sidecar.local import LocalClient
from tests.support.sidecar.waiting import until

from holdfast_core.format.canonical import digest_of, hex_of
from holdfast_core.format.rank_layout import RankLayout, TensorSlice
from holdfast_core.ids import (
    ByteRange,
    Digest,
    JobUid,
    Level,
    Rank,
    RestartRound,
    Step,
)
from holdfast_core.messages.codec import dumps
from holdfast_core.messages.schema import (
    NO_OBJECT_TIER,
    PROTOCOL_VERSION,
    Fill,
    Filled,
    Hello,
    Ok,
    Progress,
    Restore,
    RestorePoint,
    RestoreReply,
    Stage,
    StepOutcome,
)
from holdfast_core.save.place import SlotNote
from holdfast_core.shm.slot_file import (
    HEADER_BYTES,
    STATE_OFFSET,
    SlotHeader,
    SlotState,
    pack_state,
    slot_name,
)


def rank_document(rank: int, payload_bytes: int) -> bytes:
    """Return the layout of one rank, with one tensor that covers the whole payload."""
    return RankLayout(
        rank=Rank(rank),
        tensors={
            f"w{rank}": TensorSlice(
                "U8", (payload_bytes,), (0,), (payload_bytes,), ByteRange(0, payload_bytes)
            )
        },
        objects={},
        payload_bytes=payload_bytes,
    ).to_bytes()


class FakeRank(LocalClient):
    """Rank double with real slot files that stages payloads and restores them."""

    def __init__(
        self,
        shared: Path,
        job_uid: JobUid,
        rank: int,
        round_: int,
        *,
        capacity_bytes: int = 1 << 20,
        slots: int = 2,
    ) -> None:
        super().__init__(
            shared / "holdfast.sock",
            Hello(
                PROTOCOL_VERSION,
                job_uid,
                rank=Rank(rank),
                round=RestartRound(round_),
            ),
        )
        self._shared = shared
        self.rank = Rank(rank)
        self.round = RestartRound(round_)
        self._capacity = capacity_bytes
        self.names = tuple(slot_name(self.rank, index) for index in range(slots))
        directory = shared / "slots"
        directory.mkdir(mode=0o770, exist_ok=True)
        (shared / "layouts").mkdir(mode=0o770, exist_ok=True)
        for name in self.names:
            self._allocate(directory / name)

    def _allocate(self, path: Path) -> None:
        """Create a slot file, unless it exists with the right size.

        An existing slot may hold the bytes of the next restore.
        """
        if path.exists() and path.stat().st_size == HEADER_BYTES + self._capacity:
            return
        with path.open("wb") as file:
            file.write(SlotHeader(SlotState.FREE, self.rank, self._capacity).pack())
            file.truncate(HEADER_BYTES + self._capacity)

    def path(self, name: str) -> Path:
        return self._shared / "slots" / name

    def header(self, name: str) -> SlotHeader:
        with self.path(name).open("rb") as file:
            return SlotHeader.unpack(file.read(HEADER_BYTES))

    def payload(self, name: str) -> bytes:
        header = self.header(name)
        with self.path(name).open("rb") as file:
            file.seek(HEADER_BYTES)
            return file.read(header.payload_bytes)

    def fill_slot(self, name: str, step: int, data: bytes) -> None:
        """Write state FILLING, the header and the payload, and the state FULL last, as the SDK does."""
        header = SlotHeader(
            SlotState.FILLING, self.rank, self._capacity, self.round, Step(step), len(data)
        )
        with self.path(name).open("r+b") as file:
            file.write(header.pack())
            file.seek(HEADER_BYTES)
            file.write(data)
            file.flush()
            file.seek(STATE_OFFSET)
            file.write(pack_state(SlotState.FULL))

    def fill(self, step: int, data: bytes) -> Stage:
        """Fill the first slot and return the message that hands it over, without sending it."""
        name = self.names[0]
        self.fill_slot(name, step, data)
        return self.stage_message(name, step, data)

    def free_slot(self, name: str) -> None:
        with self.path(name).open("r+b") as file:
            file.seek(STATE_OFFSET)
            file.write(pack_state(SlotState.FREE))

    def own_slot(self, name: str, message: Stage, *, world_size: int = 1) -> None:
        """Put the slot into the state in which a sidecar leaves it that dies after its reply to Stage."""
        staged = self._shared / "staged"
        staged.mkdir(exist_ok=True)
        note = SlotNote(message, world_size)
        (staged / f"{name}.json").write_bytes(dumps(note))
        with self.path(name).open("r+b") as file:
            file.seek(STATE_OFFSET)
            file.write(pack_state(SlotState.OWNED))

    def write_layout(self, document: bytes) -> Digest:
        digest = digest_of(document)
        path = self._shared / "layouts" / f"{hex_of(digest)}.json"
        temporary = path.with_suffix(f".{self.rank}.tmp")
        temporary.write_bytes(document)
        temporary.replace(path)
        return digest

    async def save(self, step: int, data: bytes, layout: bytes | None = None) -> str:
        """Wait for a free slot, fill and stage it, and return its name.

        `layout` is the rank's layout document; the default is `rank_document`.
        """
        name: str = await until(
            lambda: next((n for n in self.names if self.header(n).state is SlotState.FREE), None),
            f"a free slot of rank {self.rank}",
        )
        self.fill_slot(name, step, data)
        message = self.stage_message(name, step, data, layout)
        reply = await self.request(message)
        assert isinstance(reply, Ok), reply
        return name

    def stage_message(
        self, name: str, step: int, data: bytes, layout: bytes | None = None
    ) -> Stage:
        digest = self.write_layout(layout or rank_document(self.rank, len(data)))
        return Stage(self.round, Step(step), self.rank, name, len(data), digest)

    @property
    def failures(self) -> list[StepOutcome]:
        """Messages about saves that failed. That there is no object store is no failure of a save."""
        failed = (m for m in self.pushed if isinstance(m, StepOutcome) and m.failed)
        return [m for m in failed if m.reason != NO_OBJECT_TIER]

    async def reached(self, step: int, level: Level) -> None:
        """Wait until the sidecar has reported this level, or a higher one, for the step."""

        def seen() -> bool:
            return any(
                isinstance(m, StepOutcome)
                and not m.failed
                and m.step == step
                and m.level.includes(level)
                for m in self.pushed
            )

        await until(seen, f"rank {self.rank}: step {step} at level {level}")

    def progress(self, step: int) -> None:
        self.push(Progress(self.round, self.rank, Step(step), {"loss": 1.0}))

    async def reshard(self, wanted: RankLayout) -> tuple[RestoreReply, bytes, Filled]:
        """Restore with a new layout.

        Returns the reply to Restore, the payload, and the reply to Fill, which states its source.
        """
        reply = await self.request(Restore(self.round, self.rank, with_layouts=True))
        assert isinstance(reply, RestoreReply), reply
        digest = self.write_layout(wanted.to_bytes())
        filled = await self.request(Fill(self.round, self.rank, tuple(self.names), digest))
        assert isinstance(filled, Filled), filled
        with self.path(filled.slot).open("rb") as file:
            file.seek(HEADER_BYTES)
            return reply, file.read(filled.payload_bytes), filled

    async def restore(self) -> tuple[RestorePoint, bytes | None, Filled | None]:
        """Restore the rank.

        Returns the restore point, the payload, and the reply to Fill, which states its source. Payload and
        reply are None for an empty restore point.
        """
        reply = await self.request(Restore(self.round, self.rank))
        assert isinstance(reply, RestoreReply), reply
        if reply.restore_point.step is None:
            return reply.restore_point, None, None
        filled = await self.request(Fill(self.round, self.rank, tuple(self.names)))
        assert isinstance(filled, Filled), filled
        return reply.restore_point, self.payload(filled.slot), filled
