"""The model of a sidecar for tests of the operator: a pod's disk, and the round for which it is sealed.

It seals, accepts ROUND messages and lists its inventory by the rules of docs/protocol.md. Names stand for
bytes. Tests in memory call it directly (toy_link.py); served_sidecar.py serves it over mutual TLS.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.support.operator.builders import held, manifest, uncommitted

from holdfast_core.format.manifest import parse_manifest
from holdfast_core.ids import CheckpointId, Digest, Rank, RestartRound, ShardRef, Worker, is_spare
from holdfast_core.messages.schema import FinishCommit, Inventory, Refusal, Refused, Round
from holdfast_operator.model.job import ManifestView


@dataclass
class FakeSidecar:
    """The sidecar of one pod. A spare becomes the worker that ROUND names."""

    worker: Worker
    pod: str
    round: RestartRound
    version: int = 0
    """Version of the newest ROUND of the sealed round; 0 if there is none."""
    launcher: bool = False
    message: Round | None = None
    """The newest ROUND, of the sealed round or of an earlier one."""
    manifests: dict[CheckpointId, ManifestView] = field(default_factory=dict)
    shards: dict[tuple[CheckpointId, Rank], ShardRef] = field(default_factory=dict)
    saved: dict[CheckpointId, int] = field(default_factory=dict)
    """Number of ranks that saved each checkpoint of which this worker wrote its own shard."""
    stored: dict[Digest, CheckpointId] | None = None
    """What it has found in the object store for the round for which it is sealed."""

    def seal(
        self, round_: RestartRound, found: dict[Digest, CheckpointId] | None = None
    ) -> Inventory | Refused:
        """Seal the disk for this round. `found` is what a look into the object store finds, if it looks."""
        if round_ < self.round:
            return self.refuse(Refusal.STALE_ROUND, f"seal {round_}")
        if round_ > self.round:
            self.round, self.version, self.stored = round_, 0, None
        if found is not None:
            self.stored = found
        return self.inventory()

    def take_round(self, message: Round) -> Inventory | Refused:
        if message.round > self.round:
            return self.refuse(Refusal.NOT_SEALED, f"ROUND {message.round}")
        if (message.round, message.version) <= (self.round, self.version):
            return self.refuse(Refusal.NOT_NEWER, f"ROUND {message.round}.{message.version}")
        named = next((m.worker for m in message.members if m.pod == self.pod), self.worker)
        if not is_spare(self.worker):
            assert named == self.worker, f"{self.pod} is worker {self.worker}, not {named}"
        self.worker, self.version, self.message = named, message.version, message
        self.stored = None
        return self.inventory()

    def finish_commit(self, message: FinishCommit) -> Inventory | Refused:
        if (message.round, 0) != (self.round, self.version):
            return self.refuse(Refusal.NOT_SEALED, f"finish {message.round}")
        found = parse_manifest(message.manifest.encode())
        id_ = found.checkpoint
        assert found.world_size == self.saved[id_]
        assert (id_, Rank(self.worker)) in self.shards
        self.manifests[id_] = manifest(id_.step, id_.round, found.world_size)
        return self.inventory()

    def restart(self) -> None:
        """Forget what a sidecar holds in memory only."""
        self.message, self.version = None, 0

    def keep(self, id_: CheckpointId, rank: Rank) -> None:
        self.shards[(id_, rank)] = held(id_.step, id_.round, rank)

    def inventory(self) -> Inventory:
        return Inventory(
            worker=self.worker,
            pod=self.pod,
            round=self.round,
            version=self.version,
            manifests={m.manifest: id_ for id_, m in self.manifests.items()},
            shards=tuple(self.shards.values()),
            uncommitted=tuple(
                uncommitted(id_.step, id_.round, self.worker, size)
                for id_, size in self.saved.items()
                if id_ not in self.manifests and (id_, Rank(self.worker)) in self.shards
            ),
            launcher=self.launcher,
            stored=self.stored,
        )

    def refuse(self, code: Refusal, tried: str) -> Refused:
        text = f"{tried}, own {self.round}.{self.version}"
        return Refused(code, text, self.round, self.version)
