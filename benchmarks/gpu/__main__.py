"""`make bench-gpu` writes what saves cost a training on a GPU to results/gpu.json.

The same training runs in loops of equal length: without saves, with Holdfast's, and with those of torch DCP
(asynchronous, page-locked memory). The loops alternate, so that background load affects all of them alike.
The unit is the time of one blocking copy of the state into page-locked memory in the same run.

`--look` prints the GPU and measures nothing. `--device cpu` shows without a GPU that the program runs; it
writes no result. The exit code is 2 without a GPU, and 1 where a target was missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import report
from benchmarks.gpu.figures import Costs, Pair, figures_of
from benchmarks.gpu.savers import Saver, dcp_saver, holdfast_saver
from benchmarks.gpu.training import BlockingCopy, Training
from benchmarks.report import Figure

_COPIES_PER_STEP = 4
"""A step is at least this many times as long as a copy of the state, as it is for large models."""


def main() -> int:
    arguments = _parsed()
    if arguments.device == "cuda" and (missing := _missing_gpu()) is not None:
        print(missing, file=sys.stderr)
        return 2
    print(_machine(arguments.device), flush=True)
    if arguments.look:
        return 0
    with tempfile.TemporaryDirectory(
        prefix="holdfast-bench-gpu-", dir=arguments.directory
    ) as folder:
        figures = _measure(arguments, Path(folder))
    print(report.table(figures))
    if arguments.device == "cpu":
        return 0
    print(f"written: {report.write('gpu', figures)}")
    return 1 if any(figure.ok is False for figure in figures) else 0


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.gpu")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--look", action="store_true", help="print the GPU and stop")
    parser.add_argument("--mib", type=int, default=1024, help="size of the state")
    parser.add_argument("--width", type=int, default=2048, help="of a layer of the model")
    parser.add_argument("--rounds", type=int, default=10, help="loops of each kind")
    parser.add_argument("--steps", type=int, default=8, help="steps of a loop; one save a loop")
    parser.add_argument("--directory", type=Path, help="for the checkpoints; the temporary one")
    return parser.parse_args()


def _missing_gpu() -> str | None:
    """Return why there is no GPU to measure, or None if there is one."""
    import torch

    if torch.cuda.is_available():
        return None
    return (
        f"Looked for a GPU with torch {torch.__version__} (CUDA {torch.version.cuda}): "
        "torch.cuda.is_available() is false, so nothing was measured or tested. Run this on a machine with a "
        "GPU and a driver that suits this CUDA version; `nvidia-smi` shows both."
    )


def _machine(device: str) -> str:
    import torch

    if device == "cpu":
        return "device: cpu (shows that the program runs; its figures say nothing about a GPU)"
    properties = torch.cuda.get_device_properties(0)
    return (
        f"device: {properties.name}, {properties.total_memory >> 30} GiB, "
        f"torch {torch.__version__}, CUDA {torch.version.cuda}"
    )


def _measure(arguments: argparse.Namespace, folder: Path) -> list[Figure]:
    training = Training.make(arguments.device, arguments.mib, arguments.width)
    copy = BlockingCopy(training)
    copy.seconds()
    training.lengthen(_COPIES_PER_STEP * min(copy.seconds() for _ in range(3)))
    print(
        f"state: {training.size_bytes >> 20} MiB, {training.passes_per_step} passes a step",
        flush=True,
    )
    costs = {"Holdfast": Costs(), "torch DCP": Costs()}
    savers = {
        "Holdfast": holdfast_saver(training, folder),
        "torch DCP": dcp_saver(training, folder),
    }
    try:
        step = 0
        for saver in savers.values():  # the first save allocates memory
            step += 1
            saver.save(step)()
        for round_ in range(arguments.rounds):
            for name, saver in savers.items():
                for add, behind in ((costs[name].add, False), (costs[name].add_behind, True)):
                    step += 1
                    pair = _pair_of_loops(training, saver, step, arguments.steps, behind)
                    add(pair, copy.seconds())
            print(f"round {round_ + 1}/{arguments.rounds}", flush=True)
    finally:
        for saver in savers.values():
            saver.close()
    return figures_of(costs["Holdfast"], costs["torch DCP"])


def _pair_of_loops(training: Training, saver: Saver, step: int, count: int, behind: bool) -> Pair:
    """Run a loop without a save, then one that begins with a save, and wait until the save is complete."""
    without, _ = _loop(training, count, lambda: None, behind)
    waits: list[Callable[[], object]] = []
    with_save, blocked = _loop(training, count, lambda: waits.append(saver.save(step)), behind)
    _finish(waits)
    return Pair(without, with_save, blocked)


def _loop(
    training: Training, count: int, save: Callable[[], None], behind: bool
) -> tuple[float, float]:
    """Return the seconds of a loop, and those in `save`.

    `behind`: the GPU still has a step to do when `save` is called, as in scripts that do not read a result of
    each step. Otherwise it is idle.
    """
    training.step()
    training.synchronize()
    began = time.perf_counter()
    if behind:
        training.step()
    called = time.perf_counter()
    save()
    blocked = time.perf_counter() - called
    for _ in range(count):
        training.step()
    training.synchronize()
    return time.perf_counter() - began, blocked


def _finish(waits: Sequence[Callable[[], object]]) -> None:
    """Wait until the saves are complete, so that they do not slow down the next loop."""
    for wait in waits:
        wait()


if __name__ == "__main__":
    sys.exit(main())
