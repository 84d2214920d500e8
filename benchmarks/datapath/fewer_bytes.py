"""A7 towards the store: bytes that the worst rank uploads for each byte of its state.

Counted from the plans that uploads follow, indexes included; nothing is timed and no store is needed.
    python -m benchmarks.datapath.fewer_bytes
"""

from __future__ import annotations

import json
import random
import sys

from holdfast_core.format.pack_plan import BLOCK_CHUNKS
from holdfast_core.format.record import CHUNK_BYTES
from holdfast_core.testing.packs import Saved, plan_ranks, trailer_of

STATE_BYTES = 64 << 20
RANKS = 4
TRAINED = 0.1


def targets(state_bytes: int = STATE_BYTES) -> dict[str, float]:
    """Case -> bytes uploaded / state, at most. The last one is no target of the design: ranks share by
    whole blocks, so one of them may have a block more than its part."""
    block = BLOCK_CHUNKS * CHUNK_BYTES / state_bytes
    return {
        "data-parallel ranks, first save": 1 / RANKS + 0.02,
        "one rank, frozen base, second save": TRAINED + 0.01,
        "one rank, frozen base, sixth save": TRAINED + 0.01,
        "data-parallel ranks, frozen base, second save": TRAINED / RANKS + block + 0.02,
    }


def ratios(state_bytes: int = STATE_BYTES) -> dict[str, float]:
    """The same cases -> what the rank that uploads most has to send."""
    alone = _saves(state_bytes, ranks=1, count=6)
    together = _saves(state_bytes, ranks=RANKS, count=2)
    found = (together[0], alone[1], alone[5], together[1])
    return {
        name: max(saved.upload_bytes(rank) for rank in range(len(saved.trailers))) / state_bytes
        for name, saved in zip(targets(), found, strict=True)
    }


def _saves(state_bytes: int, *, ranks: int, count: int) -> list[Saved]:
    """A frozen base behind what is trained, and some bytes of each rank's own."""
    trained = int(state_bytes * TRAINED)
    frozen = random.Random(0).randbytes(state_bytes - trained - 1000)
    saves: list[Saved] = []
    for step in range(1, count + 1):
        common = random.Random(step).randbytes(trained) + frozen
        payloads = [
            common + random.Random(1000 * step + rank).randbytes(1000) for rank in range(ranks)
        ]
        trailers = [trailer_of(data, step=step, rank=rank) for rank, data in enumerate(payloads)]
        base = saves[-1] if saves else None
        saves.append(plan_ranks(trailers, base, tuple(base.needs) if base else ()))
    return saves


def main() -> int:
    found, allowed = ratios(), targets()
    rows = [
        {"case": name, "uploaded_over_state": round(value, 4), "target": round(allowed[name], 4)}
        for name, value in found.items()
    ]
    print(json.dumps({"A7": rows, "state_bytes": STATE_BYTES}, indent=1))
    return 0 if all(found[name] <= target for name, target in allowed.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
