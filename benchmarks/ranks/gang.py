"""What all processes of the benchmark know about the gang: its size, names, addresses and certificates."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from benchmarks.ranks import states
from benchmarks.ranks.states import PlayedState
from holdfast_core.format.rank_layout import RankLayout, TensorSlice
from holdfast_core.ids import ByteRange, JobUid, Rank
from holdfast_core.net import peer_dns_name

JOB_UID = JobUid("11111111-2222-3333-4444-555555555555")
PAYLOAD_BYTES = 4096
SMALL = "small"
STATES: Mapping[str, Callable[[int], PlayedState]] = {
    "llama-70b": states.llama_70b,
    "unfused-moe": states.unfused_moe,
    "moe-1t": states.moe_1t,
}


@dataclass(frozen=True, slots=True)
class Gang:
    folder: Path
    workers: int
    real: tuple[int, int]
    """The workers whose sidecars are real processes. The first one coordinates."""
    port: int
    """Control port of all played members."""
    state: str = SMALL
    """Name of the state whose layouts the played members have."""
    fan_in: int = 64
    """`Round.fan_in`. The second real worker is the relay of its group in a gang of several groups."""

    @property
    def played(self) -> list[int]:
        return [w for w in range(self.workers) if w not in self.real]

    def certificates(self, pod: str) -> Path:
        return self.folder / "certificates" / pod

    def server_name(self, pod: str) -> str:
        return peer_dns_name(pod, JOB_UID)

    def write(self) -> None:
        data = {**asdict(self), "folder": str(self.folder)}
        (self.folder / "gang.json").write_text(json.dumps(data))

    @classmethod
    def read(cls, folder: Path) -> Self:
        data = json.loads((folder / "gang.json").read_text())
        real, state = tuple(data["real"]), data["state"]
        return cls(folder, data["workers"], real, data["port"], state=state)


def pod_name(worker: int, birth_round: int) -> str:
    return f"gpt-{worker}-r{birth_round}"


def address_of(worker: int) -> str:
    """Return the loopback address of a worker: 127.1.0.1 for worker 0."""
    return f"127.{1 + worker // 62500}.{worker // 250 % 250}.{worker % 250 + 1}"


def small_layout(rank: int) -> RankLayout:
    """Return the layout of a rank, with one tensor that covers its whole payload."""
    whole = TensorSlice("U8", (PAYLOAD_BYTES,), (0,), (PAYLOAD_BYTES,), ByteRange(0, PAYLOAD_BYTES))
    return RankLayout(Rank(rank), {f"w{rank}": whole}, {}, PAYLOAD_BYTES)
