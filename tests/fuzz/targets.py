"""All parsers of bytes that other processes write, each with valid inputs and the errors that it may raise.

A target fails if its parser raises any other error, or if an accepted value changes when it is written and
read again.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fuzz.examples import example
from tests.support.api_objects import checkpoint_object, job_object, store_object
from tests.support.operator.builders import raw_job

from holdfast.launcher.pod import RoundRecord
from holdfast_core.api import Checkpoint, CheckpointStore, TrainingJob
from holdfast_core.clock import SystemClock
from holdfast_core.contract import StoreConfig
from holdfast_core.errors import ConfigError, CorruptionError, FormatError, HoldfastError
from holdfast_core.format.canonical import loads_strict, sealed
from holdfast_core.format.keys import parse_key
from holdfast_core.format.manifest import parse_manifest
from holdfast_core.format.payload import header_bytes, parse_payload, unpack_objects
from holdfast_core.format.rank_layout import parse_rank_layout
from holdfast_core.ids import JobUid, Rank, RestartRound, Step
from holdfast_core.messages import schema
from holdfast_core.messages.codec import dumps, loads
from holdfast_core.messages.socket_frames import MESSAGES, RawFrame, parse_body, write_frame
from holdfast_core.node.documents import ROUND_FILE, WORKER_FILE, PodRecords
from holdfast_core.node.files import DurableDirectories
from holdfast_core.peer.protocol import receive_message, send_message
from holdfast_core.shards.file import (
    FOOTER,
    head_bytes,
    identity_json,
    pack_head,
    parse_identity,
    trailer_bytes_of,
    unpack_head,
    unpack_trailer,
)
from holdfast_core.shards.pack import index_bytes_of, unpack_index
from holdfast_core.shards.stream import ShardStream
from holdfast_core.shm.slot_file import SlotHeader, SlotState
from holdfast_operator.decide.stores import with_probe
from holdfast_operator.model.command_pods import parse_report

GOLDEN = Path(__file__).parent.parent / "golden"
JOB_UID = JobUid("11111111-2222-3333-4444-555555555555")


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    parse: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    refuses: tuple[type[Exception], ...] = (FormatError,)

    def run(self, data: bytes) -> None:
        """Parse the input. Raises any error that the parser must not raise."""
        try:
            self.parse(data)
        except self.refuses:
            return


# --------------------------------------------------------------------------- wire


def _messages() -> Iterator[Target]:
    kinds = [
        k for k in vars(schema).values() if isinstance(k, type) and dataclasses.is_dataclass(k)
    ]
    for kind in kinds:
        seeds = tuple(dumps(example(kind, full=full)) for full in (True, False))
        yield Target(f"message-{kind.__name__}", _message(kind), seeds)
        if kind.__name__ in MESSAGES:
            frames = tuple(write_frame(example(kind, full=full), 7)[4:] for full in (True, False))
            yield Target(f"frame-{kind.__name__}", _frame, frames)


def _message(kind: type[Any]) -> Callable[[bytes], object]:
    def parse(data: bytes) -> None:
        message = loads(kind, data)
        written = dumps(message)
        assert dumps(loads(kind, written)) == written

    return parse


def _frame(body: bytes) -> None:
    frame = parse_body(body)
    if not isinstance(frame.message, RawFrame):
        assert parse_body(write_frame(frame.message, frame.id)[4:]).id == frame.id


class Wire:
    """A socket that delivers these bytes and collects what is sent."""

    def __init__(self, data: bytes = b"") -> None:
        self._data = data
        self.sent = bytearray()

    def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0) -> int:
        part = self._data[: min(len(buffer), nbytes or len(buffer))]
        buffer[: len(part)] = part
        self._data = self._data[len(part) :]
        return len(part)

    def sendall(self, data: bytes) -> None:
        self.sent += data


def _bulk() -> Iterator[Target]:
    for kind in (schema.ReadObject, schema.ReadReply):

        def written(message: object) -> bytes:
            wire = Wire()
            send_message(wire, message)  # type: ignore[arg-type]  # sendall is all that it uses
            return bytes(wire.sent)

        def parse(data: bytes, kind: type[Any] = kind) -> None:
            message = receive_message(Wire(data), kind)
            if message is not None:
                assert receive_message(Wire(written(message)), kind) == message

        examples = (written(example(kind, full=True)), written(example(kind, full=False)))
        yield Target(f"bulk-{kind.__name__}", parse, examples, (FormatError, OSError))


# --------------------------------------------------------------------------- files


def _golden(*names: str) -> tuple[bytes, ...]:
    return tuple((GOLDEN / name).read_bytes() for name in names)


def _documents() -> Iterator[Target]:
    def same(parse: Callable[[bytes], Any]) -> Callable[[bytes], object]:
        def check(data: bytes) -> None:
            assert parse(data).to_bytes() == data, "a document has one spelling"

        return check

    yield Target("manifest", same(parse_manifest), _golden("format_v1/manifest.json"))
    yield Target("rank-layout", same(parse_rank_layout), _golden("format_v1/rank1.layout.json"))
    yield Target(
        "key",
        lambda data: parse_key(data.decode(errors="surrogateescape")),
        (
            b"shards/s000000000010-r000000/rank000001-0123456789abcdef.shard",
            b"references/s000000000010-r000000/by-s000000000020-r000000",
            b"references/s000000000020-r000000/needs-s000000000010-r000000-00000000000000000005",
            b"manifests/s000000000010/r000000.json",
            b"shards/s000000000010-r000000/rank000001-0123456789abcdef.layout",
        ),
    )
    yield Target("round.json", _round_json, (b'{"round":3,"version":1}',), (CorruptionError,))
    yield Target("worker.json", _worker_json, (b'{"worker":3}',), (CorruptionError,))
    yield Target("launcher-round", _launcher_round, (b'{"round": 3}',))
    yield Target(
        "store-config",
        lambda data: StoreConfig.from_json(data.decode(errors="surrogateescape")),
        (b'{"endpoint":"s:9000","secure":false,"bucket":"b","prefix":"p","region":"r"}',),
        (ConfigError,),
    )


def _in_file(data: bytes, read: Callable[[Path], object]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(data)
        read(path)


def _records(path: Path, name: str) -> PodRecords:
    path.rename(path.with_name(name))
    return PodRecords(path.parent, DurableDirectories(path.parent))


def _round_json(data: bytes) -> None:
    _in_file(data, lambda path: _records(path, ROUND_FILE).read_round())


def _worker_json(data: bytes) -> None:
    _in_file(data, lambda path: _records(path, WORKER_FILE).read_worker())


def _launcher_round(data: bytes) -> None:
    _in_file(sealed(data), lambda path: RoundRecord(path).read())


def _shards() -> Iterator[Target]:
    shards = _golden("format_v1/rank0.shard")
    heads = tuple(shard[:4096] for shard in shards)
    refuses = (CorruptionError, FormatError)
    yield Target("shard-head", _shard_head, heads, refuses)
    identities = tuple(json.dumps(identity_json(unpack_head(h))).encode() for h in heads)
    yield Target("shard-identity", _shard_identity, identities)
    trailers = tuple(s[-trailer_bytes_of(s[-FOOTER.size :]) :] for s in shards)
    yield Target("shard-trailer", _shard_trailer, trailers, refuses)
    ref = parse_manifest(_golden("format_v1/manifest.json")[0]).ref(Rank(0))

    def stream(data: bytes) -> None:
        feed = ShardStream(ref, len(data))
        feed.feed(memoryview(data))
        assert feed.finish().record.ref == ref

    yield Target("shard", stream, shards, refuses)
    packs = _golden("pack_v1/step20-rank1.pack", "pack_v1_compressed/step20-rank1.pack")
    yield Target("pack", _pack, packs, refuses)
    payloads = _golden("format_v1/rank0.safetensors")
    yield Target("payload", _payload, payloads)
    yield Target("objects", unpack_objects, (b'{"rng":[1,2]}', b'{"a":{"$bytes":"aGk="}}'))
    slots = (
        SlotHeader(SlotState.FULL, Rank(1), 100, RestartRound(3), Step(10), 90).pack(),
        SlotHeader(SlotState.FREE, Rank(0), 100).pack(),
    )
    yield Target("slot-header", SlotHeader.unpack, slots)


def _shard_head(data: bytes) -> None:
    header = unpack_head(data)
    assert unpack_head(data[: head_bytes(header)]) == header


def _shard_identity(data: bytes) -> None:
    header = parse_identity(loads_strict(data, "identity"), "identity")
    assert unpack_head(pack_head(header)) == header


def _shard_trailer(data: bytes) -> None:
    length = trailer_bytes_of(data[-FOOTER.size :])
    unpack_trailer(data[-length:])


def _pack(data: bytes) -> None:
    length = index_bytes_of(data[-FOOTER.size :])
    index = unpack_index(data[-length:], len(data))
    assert sum(len(run.chunks) for run in index.runs()) == len(index.places)


def _payload(data: bytes) -> None:
    size = header_bytes(data, len(data))
    parse_payload(data[:size], len(data))


# --------------------------------------------------------------------------- API objects


def _api() -> Iterator[Target]:
    meta = {"uid": "u", "resourceVersion": "5", "creationTimestamp": "2026-05-01T00:00:00Z"}

    def stored(raw: dict[str, Any], **more: Any) -> bytes:
        metadata = {"name": "n", "namespace": "team", **raw["metadata"], **meta}
        return json.dumps({**raw, "metadata": metadata, **more}).encode()

    status = {
        "phase": "Running",
        "restartRound": 3,
        "step": 40,
        "members": [0, 3],
        "restorePoint": {"step": 10, "round": 0},
        "lineage": [{"round": 0}, {"round": 3, "base": "s10-r0", "baseManifest": "b3:00"}],
        "quarantined": ["s20-r0"],
        "missing": ["s30-r1"],
        "recentRestarts": [{"round": 3, "at": "2026-05-01T00:00:00Z", "failedFrom": "s20-r0"}],
        "goodput": {"ratio": 0.5, "trainingSeconds": 3},
        "recoveries": [{"round": 3, "reason": "RankDied", "workers": [1], "lostSteps": 2}],
        "startTime": "2026-05-01T00:00:00Z",
        "conditions": [
            {
                "type": "Running",
                "status": "True",
                "reason": "Training",
                "message": "the message",
                "lastTransitionTime": "2026-05-01T00:00:00Z",
            }
        ],
    }
    # The reflectors allow these errors: such an object is not changed, and is reported once.
    refuses = (ValueError, HoldfastError)
    jobs = (stored(job_object()), stored(job_object(), status=status), stored(raw_job()))
    yield Target("TrainingJob", _object(TrainingJob.from_dict), jobs, refuses)
    saved = {"phase": "Committed", "round": 3, "manifest": "b3:00", "worldSize": 2, "bytes": 9}
    yield Target(
        "Checkpoint",
        _object(Checkpoint.from_dict),
        (stored(checkpoint_object()), stored(checkpoint_object(), status=saved)),
        refuses,
    )
    features = {"observedGeneration": 1, "features": {"conditionalPut": True}}
    yield Target(
        "CheckpointStore",
        _object(CheckpointStore.from_dict),
        (stored(store_object()), stored(store_object(), status=features)),
        refuses,
    )
    yield Target(
        "probe-message",
        lambda data: with_probe(
            CheckpointStore.from_dict(store_object()),
            parse_report(data.decode(errors="surrogateescape"), "the pod"),
            SystemClock().utc_now(),
        ),
        (b'{"available": true, "reason": "Probed", "features": {"checksum": true}}',),
        (),
    )


def _object(read: Callable[[Any], object]) -> Callable[[bytes], object]:
    """Return a parser for documents whose `metadata` is an object, as the API server guarantees."""

    def parse(data: bytes) -> None:
        try:
            raw = json.loads(data)
        except RecursionError:
            return  # the API server refuses such a depth
        if not isinstance(raw, dict) or not isinstance(raw.get("metadata"), dict):
            return
        read(raw)

    return parse


TARGETS = {
    target.name: target for target in (*_messages(), *_bulk(), *_documents(), *_shards(), *_api())
}
