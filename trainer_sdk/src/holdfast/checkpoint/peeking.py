"""Reads what the restore point holds, apart from the bytes of its tensors.

1. Every rank asks for the restore point of its round and reads the layouts of the ranks that saved it. They
   have the names, dtypes and shapes of all tensors.
2. Rank 0 requests a payload without tensors in a slot of its own, so that the slots of its ring keep what
   they hold. The payload has the objects of the old rank 0. Rank 0 writes them to the gang's store.
3. The other ranks read them there, so that all ranks get the same values.
4. The ranks agree that all of them have succeeded, as after a restore.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from holdfast.base.restore_point import RestorePoint, TensorInfo
from holdfast.base.settings import RankSettings
from holdfast.checkpoint.restoring import Restorer
from holdfast.connection.session import Session
from holdfast.gang.store import GangStore
from holdfast.slots.staging import SlotRing
from holdfast.state.decoder import Decoder
from holdfast.state.tensors import own_name
from holdfast.state.tree import STATE
from holdfast_core.errors import CorruptionError, FormatError, HoldfastError, UnavailableError
from holdfast_core.format.digest import digest_of
from holdfast_core.format.payload import plan_payload, unpack_objects
from holdfast_core.format.rank_layout import RankLayout, TensorSlice, owner_of, parse_rank_layout
from holdfast_core.ids import RestartRound, Step
from holdfast_core.messages.schema import Fill, Filled, Restore, RestoreReply
from holdfast_core.shm.shared_files import LayoutFiles

_PIECE_CHARACTERS = 1 << 20
"""torch's store refuses values of more than 8 MiB."""

_Infos = dict[str, TensorInfo]


class Peeker:
    """Reads the restore point's names and objects. Only the training thread uses it."""

    def __init__(
        self,
        settings: RankSettings,
        session: Session,
        ring: SlotRing,
        layouts: LayoutFiles,
        restorer: Restorer,
        store: GangStore | None,
    ) -> None:
        self._settings = settings
        self._session = session
        self._ring = ring
        self._layouts = layouts
        self._restorer = restorer
        self._store = store

    def peek(self) -> RestorePoint | None:
        """Return the restore point that all ranks can read, or None if there is nothing to restore.

        Every rank must call it. Raises what `Restorer.fetch` raises, except StateMismatchError.
        """
        return self._restorer.agreed(self._look)

    def _look(self, round_: RestartRound) -> RestorePoint | None:
        """Look once. If rank 0 fails, the others, which wait for what it reads, get an error instead."""
        try:
            found = self._read(round_)
        except UnavailableError:
            raise  # a lost connection: all ranks keep waiting, and this rank tries again
        except HoldfastError as error:
            if self._settings.rank == 0:
                self._publish({"error": str(error)}, "")
            raise
        if found is None:
            return None
        step, shared, own, objects = found
        if self._settings.rank == 0:
            kept = {f: [t.dtype, *t.shape] for f, t in own.items()}
            self._publish({"step": step, "own": kept}, objects)
        return _restore_point(step, shared, own, objects)

    def _read(self, round_: RestartRound) -> tuple[Step, _Infos, _Infos, str] | None:
        """Return the step, the tensors of the gang and those of the old rank 0, and its objects."""
        request = Restore(round_, self._settings.rank, with_layouts=True)
        reply: RestoreReply = self._session.request(request, RestoreReply)
        step = reply.restore_point.step
        if step is None:
            return None
        shared: _Infos = {}
        for saved in reply.layouts:
            layout = parse_rank_layout(self._layouts.read(saved.layout))
            shared |= {f: _info(t) for f, t in layout.tensors.items() if owner_of(f) is None}
        if self._settings.rank != 0:
            objects, own = self._received(step)
            return step, shared, own, objects
        if reply.home is None:
            raise FormatError(f"the reply has no layout of a rank that saved step {step}")
        home = parse_rank_layout(self._layouts.read(reply.home))
        own = {f: _info(t) for f, t in home.tensors.items() if owner_of(f) is not None}
        return step, shared, own, self._read_objects(home)

    # ------------------------------------------------------------------ the objects of rank 0

    def _read_objects(self, home: RankLayout) -> str:
        if not home.objects:
            return json.dumps({STATE: {}})
        room = max(place.length_bytes for place in home.objects.values())
        planned = plan_payload((), room)
        wanted = RankLayout(
            self._settings.rank,
            {},
            dict.fromkeys(home.objects, planned.objects),
            planned.total_bytes,
        )
        document = wanted.to_bytes()
        digest = digest_of(document)
        self._layouts.ensure(document, digest)
        with self._ring.lent(planned.total_bytes) as slot:
            fill = Fill(self._session.current_round, self._settings.rank, (slot.offer(),), digest)
            self._session.request(fill, Filled)
            return slot.payload[planned.objects.start : planned.objects.stop].tobytes().decode()

    def _publish(self, head: dict[str, Any], text: str) -> None:
        if self._store is None:
            return
        key = self._key()
        pieces = range(0, len(text), _PIECE_CHARACTERS)
        for number, start in enumerate(pieces):
            self._store.publish(f"{key}/{number}", text[start : start + _PIECE_CHARACTERS])
        self._store.publish(key, json.dumps({**head, "pieces": len(pieces)}))

    def _received(self, step: Step) -> tuple[str, _Infos]:
        if self._store is None:
            raise UnavailableError(f"rank {self._settings.rank} has no store of its gang")
        key = self._key()
        head = json.loads(self._store.wait(key))
        if "error" in head:
            raise CorruptionError(f"rank 0 could not read step {step}: {head['error']}")
        if head["step"] != step:
            raise CorruptionError(
                f"rank {self._settings.rank} was given step {step} to restore, rank 0 {head['step']}"
            )
        text = "".join(self._store.wait(f"{key}/{number}") for number in range(head["pieces"]))
        own = {f: TensorInfo(dtype, tuple(shape)) for f, (dtype, *shape) in head["own"].items()}
        return text, own

    def _key(self) -> str:
        return f"peek/{self._restorer.agreements}"


def _info(item: TensorSlice) -> TensorInfo:
    return TensorInfo(own_name(item.dtype), item.shape)


def _restore_point(
    step: Step, shared: _Infos, own: Mapping[str, TensorInfo], text: str
) -> RestorePoint:
    """Decode the objects, with a TensorInfo in the place of each tensor."""
    tensors = dict(shared)

    def resolve(reference: dict[str, Any]) -> TensorInfo:
        name = reference["$tensor"]
        found = shared.get(name) or own.get(name)
        if found is None:
            raise FormatError(
                f"step {step}: the state refers to tensor {name!r}, which does not exist"
            )
        if (dtype := reference.get("dtype")) is not None:
            # It is stored as bytes, which are one more dimension.
            found = TensorInfo(str(dtype), found.shape[:-1])
        if name in tensors:
            tensors[name] = found
        return found

    root = unpack_objects(text.encode())
    if not isinstance(root, dict) or not isinstance(root.get(STATE), dict):
        raise FormatError(f"step {step}: the objects contain no state")
    objects = Decoder(resolve).decode(root[STATE])
    if not isinstance(objects, dict):
        raise FormatError(f"step {step}: the state is not a dict")
    return RestorePoint(step, tensors, objects)
