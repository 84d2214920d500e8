"""R4: how long a save blocks the trainer, compared with torch DCP's async save in a thread.

Both save the same state to the same folder, alternately, in one process. Only the ratio is meaningful.
Prints one JSON line: {"ours": [seconds...], "dcp": [seconds...]}.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path

import holdfast


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--repetitions", type=int, default=10)
    arguments = parser.parse_args()

    import torch
    from torch.distributed.checkpoint.state_dict_saver import async_save

    torch.manual_seed(1)
    count = arguments.mib // 4
    state = {"model": {f"w{i}": torch.randn(1 << 20) for i in range(count)}}
    ours: list[float] = []
    theirs: list[float] = []
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        checkpointer = holdfast.Checkpointer(dir=Path(folder) / "ours", interval_steps=1)
        with checkpointer:
            checkpointer.restore(state)
            for step in range(arguments.repetitions + 1):
                began = time.perf_counter()
                handle = checkpointer.save(step + 1, state)
                blocked = time.perf_counter() - began
                handle.wait("local", timeout=120)

                began = time.perf_counter()
                saving = async_save(state, checkpoint_id=str(Path(folder) / f"dcp{step}"))
                their_blocked = time.perf_counter() - began
                assert isinstance(saving, Future)
                saving.result()
                if step:  # excludes the one-time cost of planning and buffers
                    ours.append(blocked)
                    theirs.append(their_blocked)
                for tensor in state["model"].values():
                    tensor.add_(1)
    print(json.dumps({"ours": ours, "dcp": theirs}))


if __name__ == "__main__":
    main()
