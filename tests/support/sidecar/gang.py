"""A gang of real sidecar processes on loopback: real TLS, scripted ranks, a scripted operator."""

from __future__ import annotations

import asyncio
import json
import random
import time
import urllib.request
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Self

from tests.support.crash.failpoints import VARIABLE
from tests.support.servers.pki import Authority
from tests.support.sidecar.local import FakeLauncher
from tests.support.sidecar.operator import FakeOperator
from tests.support.sidecar.processes import SidecarProcess
from tests.support.sidecar.ranks import FakeRank

from holdfast_core.contract import SidecarContract, StoreConfig
from holdfast_core.format.manifest import JobIdentity, manifest_document
from holdfast_core.format.rank_layout import RankLayout, TensorSlice, element_bytes
from holdfast_core.ids import (
    ByteRange,
    CheckpointId,
    JobUid,
    Level,
    Rank,
    RestartRound,
    TierName,
    Worker,
)
from holdfast_core.messages.schema import (
    CoordinatorState,
    FinishCommit,
    Inventory,
    Member,
    Ok,
    Policy,
    Prune,
    RestorePoint,
    Round,
    UncommittedShard,
)
from holdfast_core.net import TlsFiles, client_context, operator_dns_name, peer_dns_name
from holdfast_sidecar.base.settings import PORTS_FILE

JOB_UID = JobUid("11111111-2222-3333-4444-555555555555")
NAMESPACE = "team-a"

_REUSED_SECONDS = 0.25
"""A little longer than a sidecar reuses one rendering of its metrics."""


class Gang:
    """Workers 0..n-1 with one rank each, all on this machine."""

    def __init__(
        self, root: Path, workers: int, *, store: StoreConfig | None, store_dir: Path
    ) -> None:
        self.root = root
        self.workers = workers
        self.store = store
        self.store_dir = store_dir
        self.node_capacity_bytes = 1 << 30
        self.small_nodes: dict[int, int] = {}
        """Capacity of workers whose node is smaller than that."""
        self.slot_bytes = 1 << 20
        self.slots = 2
        self.procs_per_worker = 1
        self.failpoints: dict[int, str] = {}
        self.authority = Authority()
        self.sidecars: dict[int, SidecarProcess] = {}
        self.launchers: dict[int, FakeLauncher] = {}
        self.ranks: dict[int, FakeRank] = {}
        certificates = self.authority.write_leaf(root / "operator", operator_dns_name(JOB_UID))
        self.operator = FakeOperator(JOB_UID, client_context(TlsFiles.in_directory(certificates)))
        self.copies = tuple((w, (w + 1) % workers) for w in range(workers)) if workers > 1 else ()

    def contract(self, worker: int, birth_round: int) -> SidecarContract:
        home = self.root / f"w{worker}-r{birth_round}"
        pod = f"gpt-{worker}-r{birth_round}"
        certificates = self.authority.write_leaf(home / "certs", peer_dns_name(pod, JOB_UID))
        return SidecarContract(
            job_uid=JOB_UID,
            job="gpt",
            namespace=NAMESPACE,
            worker=Worker(worker),
            birth_round=RestartRound(birth_round),
            procs_per_worker=self.procs_per_worker,
            shared_dir=str(home / "shared"),
            pod_name=pod,
            pod_ip="127.0.0.1",
            node_dir=str(home / "node"),
            node_capacity_bytes=self.small_nodes.get(worker, self.node_capacity_bytes),
            certs_dir=str(certificates),
            store_dir=str(self.store_dir),
            store=self.store.to_json() if self.store is not None else "",
            control_port=0,
            bulk_port=0,
            metrics_port=0,
        )

    async def launch(self, worker: int, birth_round: int = 0) -> None:
        """Start the sidecar of a new pod, whose node tier and shared volume are empty."""
        sidecar = SidecarProcess(
            self.contract(worker, birth_round), self.root / f"w{worker}-r{birth_round}.log"
        )
        self.sidecars[worker] = sidecar
        failing = self.failpoints.get(worker)
        sidecar.start(None if failing is None else {VARIABLE: failing})
        await self.learn(worker)

    async def relaunch(self, worker: int) -> None:
        """Restart the sidecar's container: a new process with the same volumes. Its ports are new here."""
        self.sidecars[worker].start()
        await self.learn(worker)

    async def learn(self, worker: int) -> None:
        sidecar = self.sidecars[worker]
        self.operator.members[worker] = Member(
            Worker(worker), sidecar.contract.pod_name, await sidecar.address()
        )

    async def launcher(
        self, worker: int, *, last_round: int | None = None, running: int | None = None
    ) -> FakeLauncher:
        launcher = FakeLauncher(
            self.sidecars[worker].shared / "holdfast.sock",
            JOB_UID,
            running=None if running is None else RestartRound(running),
            last_round=None if last_round is None else RestartRound(last_round),
        )
        await launcher.connect()
        self.launchers[worker] = launcher
        return launcher

    async def begin(self, round_: int, **fields: object) -> Round:
        """ROUND to everybody, launchers for pods without one, Run everywhere, ranks connected."""
        fields.setdefault("copies", self.copies)
        message = self.operator.message(round_, **fields)  # type: ignore[arg-type]
        await self.operator.round_all(message)
        for worker in range(self.workers):
            if worker not in self.launchers:
                await self.launcher(worker)
        for worker in range(self.workers):
            await self.launchers[worker].runs(round_)
        for worker in range(self.workers):
            await self.connect_rank(worker, round_)
        return message

    async def connect_rank(self, worker: int, round_: int) -> FakeRank:
        if worker in self.ranks:
            self.ranks[worker].close()
        rank = FakeRank(
            self.sidecars[worker].shared,
            JOB_UID,
            worker,
            round_,
            capacity_bytes=self.slot_bytes,
            slots=self.slots,
        )
        await rank.connect()
        self.ranks[worker] = rank
        return rank

    async def start(self, **fields: object) -> Round:
        for worker in range(self.workers):
            await self.launch(worker)
        return await self.begin(0, **fields)

    async def save(self, step: int) -> dict[int, bytes]:
        """Every rank stages other bytes of another length; returns them."""
        saved = {w: payload(step, w) for w in range(self.workers)}
        for worker, data in saved.items():
            await self.ranks[worker].save(step, data)
            self.ranks[worker].progress(step)
        return saved

    async def commit(self, step: int, level: Level) -> dict[int, bytes]:
        saved = await self.save(step)
        for rank in self.ranks.values():
            await rank.reached(step, level)
        return saved

    async def point(self, step: int, *, local: bool = False) -> RestorePoint:
        """Return the committed step that the coordinator (worker 0) names."""

        def newest(state: CoordinatorState) -> RestorePoint | None:
            return state.last_local if local else state.last_replicated

        def there(state: CoordinatorState) -> bool:
            point = newest(state)
            return point is not None and point.step == step

        point = newest(await self.operator.state_until(0, there, f"step {step} committed"))
        assert point is not None
        return point

    async def replicated(self, coordinator: int, steps: Collection[int]) -> None:
        """Wait until this worker reports these steps and no others, and the last as its newest replicated."""

        def there(state: CoordinatorState) -> bool:
            point = state.last_replicated
            found = set(state.committed)
            return point is not None and point.step == max(steps) and found == set(steps)

        await self.operator.state_until(
            coordinator, there, f"steps {sorted(steps)} at worker {coordinator}"
        )

    async def restored(self) -> dict[int, bytes | None]:
        return {w: (await rank.restore())[1] for w, rank in self.ranks.items()}

    async def persist(self, step: int, states: dict[int, bytes], dtype: str = "U8") -> RestorePoint:
        """Save these states, with one tensor each, and wait until the step is persisted."""
        for worker, data in states.items():
            await self.ranks[worker].save(step, data, one_tensor(worker, len(data), dtype))
            self.ranks[worker].progress(step)
        for rank in self.ranks.values():
            await rank.reached(step, Level.PERSISTED)
        return await self.persisted(step)

    async def persisted(self, step: int) -> RestorePoint:
        """Wait until the coordinator (worker 0) names the step as its newest persisted one."""

        def there(state: CoordinatorState) -> bool:
            return state.last_persisted is not None and state.last_persisted.step == step

        state = await self.operator.state_until(0, there, f"step {step} persisted")
        assert state.last_persisted is not None
        return state.last_persisted

    async def restored_after_loss_of_all(
        self, point: RestorePoint, policy: Policy
    ) -> dict[int, tuple[bytes | None, TierName]]:
        """Lose every pod and start round 1 at `point` in new ones.

        Returns the payload that each rank restores, and the tier that it came from.
        """
        for worker in range(self.workers):
            self.lose(worker)
        for worker in range(self.workers):
            await self.launch(worker, birth_round=1)
        await self.begin(1, restore=point, policy=policy, copies=())
        found = {}
        for worker, rank in self.ranks.items():
            _, data, filled = await rank.restore()
            assert filled is not None
            found[worker] = (data, filled.tier)
        return found

    def counted(self, worker: int, name: str) -> dict[str, int]:
        """Return a counter of the sidecar's metrics by tier. The call blocks."""
        lines = self.metrics(worker).splitlines()
        found = [line for line in lines if line.startswith(f'{name}{{tier="')]
        return {line.split('"')[1]: int(float(line.split()[-1])) for line in found}

    async def sent_bytes(self, worker: int, tier: TierName) -> int:
        """Return the bytes that the worker has sent to the tier, as its sidecar counts them."""
        counted = await asyncio.to_thread(self.counted, worker, "holdfast_sent_bytes_total")
        return counted.get(tier, 0)

    async def finish(self, worker: int, shards: Sequence[UncommittedShard]) -> Inventory:
        """Have a sealed worker write the manifest of a step, as the operator does (ADR 0018).

        Args:
            worker: The worker.
            shards: The shards of the step, in order of the ranks.
        """
        id_ = CheckpointId(shards[0].step, shards[0].round)
        document = manifest_document(
            JobIdentity(NAMESPACE, "gpt", JOB_UID),
            id_,
            None,
            [(s.shard, s.layout) for s in shards],
        )
        sealed = (await self.operator.inventory(worker)).round
        message = FinishCommit(sealed, document.decode())
        return await self.operator.call(worker, "/v1/finish-commit", message, Inventory)

    async def prune(self, *points: RestorePoint) -> None:
        """Let the coordinator (worker 0) delete these checkpoints from the store."""
        message = Prune(RestartRound(0), points)
        await self.operator.call(0, "/v1/prune", message, Ok)

    def metrics(self, worker: int) -> str:
        """Return the page of the sidecar's metrics, as they are now. Blocks."""
        time.sleep(_REUSED_SECONDS)  # an older rendering would not count what was just done
        with urllib.request.urlopen(self.metrics_url(worker)) as reply:
            page: str = reply.read().decode()
        return page

    def metrics_url(self, worker: int) -> str:
        ports = json.loads((self.sidecars[worker].node / PORTS_FILE).read_text())
        return f"http://127.0.0.1:{ports['metrics']}/metrics"

    def lose(self, worker: int) -> None:
        """Lose the pod: kill its processes. Its volumes are lost with it."""
        self.sidecars[worker].kill()
        self.launchers.pop(worker).close()
        self.ranks.pop(worker).close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        for local in (*self.launchers.values(), *self.ranks.values()):
            local.close()
        self.kill()

    def kill(self) -> None:
        for sidecar in self.sidecars.values():
            sidecar.kill()


def one_tensor(rank: int, size_bytes: int, dtype: str = "U8") -> bytes:
    """Return the layout of a rank that holds the whole of the tensor `w`."""
    count = size_bytes // element_bytes(dtype, "w")
    whole = TensorSlice(dtype, (count,), (0,), (count,), ByteRange(0, size_bytes))
    return RankLayout(Rank(rank), {"w": whole}, {}, size_bytes).to_bytes()


def payload(step: int, worker: int) -> bytes:
    return random.Random(step * 1000 + worker).randbytes(100_000 + 1000 * worker + step)


Gangs = Callable[..., Gang]
"""The fixture `gangs` of tests/integration/sidecars."""
