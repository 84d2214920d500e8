"""L1 and L3: what layouts cost at a commit and at a restore, for played states.

`python -m benchmarks.ranks.layouts` prints one line of JSON for each state. The layouts are generated. The
coordinator's part is its real code, from the body of each report to the bytes of the manifest.
"""

from __future__ import annotations

import functools
import json
import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TypeVar

from tests.support.sidecar.contracts import CONTRACT

from benchmarks.ranks.states import PlayedState, llama_70b, many_tensors, moe_1t, unfused_moe
from holdfast_core.format.canonical import digest_of
from holdfast_core.format.manifest import parse_manifest
from holdfast_core.format.rank_layout import layout_digests, parse_rank_layout
from holdfast_core.ids import Rank, RestartRound, Step, Worker
from holdfast_core.messages import codec
from holdfast_core.messages.schema import ReportedShard, ShardInfo, WorkerReport
from holdfast_core.reshard.plan import SliceSearch
from holdfast_sidecar.coordinator.ledger import Ledger
from holdfast_sidecar.coordinator.plan import build_manifest

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LayoutCost:
    """CPU seconds of one process, unless the name says otherwise."""

    state: str
    tensors: int
    layout_bytes: int
    rank_writes: float
    """A rank encodes its layout, once for each structure of its state."""
    node_digests: float
    """A sidecar parses and digests a layout, once for each layout."""
    first_commit: float
    """The coordinator: the reports of all ranks, and the manifest."""
    steady_commit: float
    manifest_bytes: int
    peak_mib: float
    """Largest resident memory of the process so far, with the generators of this benchmark."""
    layouts_read: int
    """Layouts that one rank reads where three quarters as many ranks restore."""
    plan_seconds: float
    """The parse of these layouts, and the plan."""


def cost_of(state: PlayedState) -> LayoutCost:
    """Measure one state. The layouts of all ranks are encoded outside of the measured time."""
    some = digest_of(b"")
    middle = Rank(state.world_size // 2)
    layout = state.layout(middle)
    write_seconds, document = cpu_seconds(layout.to_bytes)
    digest_seconds, _ = cpu_seconds(lambda: layout_digests(document))
    bodies: dict[int, list[bytes]] = {1: [], 2: []}
    for rank in range(state.world_size):
        own = state.layout(Rank(rank))
        shard = ShardInfo(Rank(rank), own.payload_bytes, some, some)
        digests = layout_digests(own.to_bytes())
        for step, found in bodies.items():
            listed = ReportedShard(Step(step), RestartRound(0), shard, digests)
            message = WorkerReport(RestartRound(0), Worker(rank), shards=(listed,))
            found.append(codec.dumps(message))
    workers = tuple(Worker(worker) for worker in range(state.world_size))
    first = frozenset({Rank(0)})
    ledger = Ledger(RestartRound(0), state.world_size, workers, first=first, expects_copies=False)
    seconds: list[float] = []
    manifest = b""
    for found in bodies.values():
        spent, manifest = cpu_seconds(functools.partial(_commit, ledger, found))
        seconds.append(spent)
    reads, plan_seconds = _reshard(state, manifest)
    return LayoutCost(
        state.name,
        len(layout.tensors),
        len(document),
        write_seconds,
        digest_seconds,
        seconds[0],
        seconds[1],
        len(manifest),
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        reads,
        plan_seconds,
    )


def cpu_seconds(call: Callable[[], T]) -> tuple[float, T]:
    before = time.process_time()
    result = call()
    return time.process_time() - before, result


def _commit(ledger: Ledger, bodies: list[bytes]) -> bytes:
    for body in bodies:
        message = codec.loads(WorkerReport, body)
        for found in message.shards:
            ledger.take(found)
    return build_manifest(CONTRACT, None, ledger.steps[found.step]).manifest


def _reshard(state: PlayedState, manifest: bytes) -> tuple[int, float]:
    """Plan for one rank of three quarters as many ranks. Return how many layouts were read, and the CPU."""
    count = max(1, state.world_size * 3 // 4)
    wanted = state.on(count).layout(Rank(count // 2))
    search = SliceSearch(wanted, count, parse_manifest(manifest).shards, {})
    reads, seconds = 0, 0.0
    while (rank := search.next()) is not None:
        document = state.layout(rank).to_bytes()
        reads += 1
        spent, layout = cpu_seconds(functools.partial(parse_rank_layout, document))
        seconds += spent
        spent, _ = cpu_seconds(functools.partial(search.add, rank, layout))
        seconds += spent
    spent, _ = cpu_seconds(search.moves)
    return reads, seconds + spent


if __name__ == "__main__":
    for played in (llama_70b(256), moe_1t(64), unfused_moe(4), many_tensors(100_000, 2)):
        print(json.dumps(asdict(cost_of(played))), flush=True)
