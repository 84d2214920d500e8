"""A merge of ten checkpoints against reading them: GiB/s, CPU and memory, and equal bits for all threads.

Ten checkpoints of four ranks each lie in one folder. In turns, a process reads all tensors of all of them by
`holdfast.open`, in parts of 64 MiB as an export does, and `holdfast merge` writes their mean with 1, 2 and 8
threads, each in a process of its own. Speeds are bytes of the sources over the seconds of the work, without
the start of the process. The machine's other work hits all of them, so the ratios of one turn are compared.

    python -m benchmarks.merge --mib 1024 --repetitions 3

Writes benchmarks/results/merge.json, and exits with 1 if the merge with 2 threads is slower than 0.8 of the
reading (the median of the turns), needs more than 300 MiB of memory, or gives other bits with other threads.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.shards.folders import write_checkpoint
from tests.support.shards.placements import Tensor

from benchmarks.drill import peak_bytes
from holdfast.__main__ import main as holdfast
from holdfast.reading.opening import open_checkpoints

RESULT = Path(__file__).parent / "results" / "merge.json"
GIB = 1 << 30
SOURCES = 10
RANKS = 4
LAYERS = 16
COLUMNS = 1024
THREADS = (1, 2, 8)
JUDGED = 2
LEAST_OVER_READING = 0.8
MOST_BYTES = 300 << 20
READ_BYTES = 64 << 20
DTYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="size of one checkpoint")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--dtype", choices=sorted(DTYPES), action="append")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(*arguments.child)
    result: dict[str, Any] = {"mib": arguments.mib, "sources": SOURCES, "ranks": RANKS}
    for dtype in arguments.dtype or sorted(DTYPES):
        folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=arguments.folder))
        try:
            result[dtype] = measure(folder, dtype, arguments.mib << 20, arguments.repetitions)
        finally:
            shutil.rmtree(folder)
    result["cores"] = len(os.sched_getaffinity(0))
    result["load_average"] = os.getloadavg()
    result["passed"] = all(
        found["merge_over_reading"][str(JUDGED)] >= LEAST_OVER_READING
        and found["peak_mib"] * (1 << 20) <= MOST_BYTES
        and found["same_bits"]
        for name, found in result.items()
        if name in DTYPES
    )
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0 if result["passed"] else 1


def measure(folder: Path, dtype: str, size_bytes: int, repetitions: int) -> dict[str, Any]:
    written(folder / "ckpt", dtype, size_bytes)
    samples: dict[str, list[dict[str, float]]] = {}
    digests = set()
    # The first turn fills the page cache, and is not counted.
    for repetition in range(repetitions + 1):
        found = {"read": run(["read", str(folder / "ckpt")])}
        for threads in THREADS:
            out = folder / "out"
            found[str(threads)] = run(["merge", str(folder / "ckpt"), str(out), str(threads)])
            digests.add(digest(out))
            shutil.rmtree(out)
        for name, sample in found.items() if repetition else ():
            samples.setdefault(name, []).append(sample)
    gib = SOURCES * size_bytes / GIB
    reading = [gib / sample["seconds"] for sample in samples["read"]]
    speed = {name: [gib / s["seconds"] for s in found] for name, found in samples.items()}
    return {
        "gib_per_second": speed,
        "cpu_seconds_per_gib": {
            name: [sample["cpu"] / gib for sample in found] for name, found in samples.items()
        },
        "merge_over_reading": {
            str(threads): statistics.median(
                ours / theirs for ours, theirs in zip(speed[str(threads)], reading, strict=True)
            )
            for threads in THREADS
        },
        "peak_mib": max(
            round(s["peak_bytes"] / (1 << 20), 1) for t in THREADS for s in samples[str(t)]
        ),
        "same_bits": len(digests) == 1,
    }


def written(folder: Path, dtype: str, size_bytes: int) -> None:
    """Write the checkpoints, of which each rank holds some rows of each tensor."""
    stored, item_bytes = DTYPES[dtype]
    rows = size_bytes // (LAYERS * COLUMNS * item_bytes)
    tensor = Tensor(stored, (rows, COLUMNS), (0,))
    generator = np.random.default_rng(0)
    values = [generator.standard_normal((rows, COLUMNS), np.float32) for _ in range(LAYERS)]
    for step in range(1, SOURCES + 1):
        arrays = {}
        for layer in range(LAYERS):
            values[layer] += np.float32(0.01)
            whole = values[layer]
            if dtype == "bfloat16":
                whole = (whole.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
            arrays[f"model.layers.{layer}.weight"] = (tensor, whole)
        write_checkpoint(folder, arrays, [RANKS], step=step)


def run(words: list[str]) -> dict[str, float]:
    """Run a child process to its end, and return its seconds, CPU and peak of memory."""
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    pid = os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "benchmarks.merge", "--child", str(writer), *words],
        dict(os.environ),
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )
    os.close(writer)
    peak = 0
    while True:
        peak = max(peak, peak_bytes(pid))
        if os.waitpid(pid, os.WNOHANG)[0]:
            break
        time.sleep(0.05)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    if not text:
        raise SystemExit(f"{words} failed")
    return {**json.loads(text), "peak_bytes": peak}


def child(pipe: str, verb: str, folder: str, *words: str) -> int:
    began, cpu = time.perf_counter(), time.process_time()
    if verb == "read":
        with open_checkpoints(folder) as opened:
            for step in opened.steps():
                with opened.at(step) as saved:
                    for tensor in saved.tensors().values():
                        for box in tensor.boxes(READ_BYTES):
                            tensor.read_stored(box)
    else:
        out, threads = words
        sources = [f"{folder}@{step}" for step in range(1, SOURCES + 1)]
        options = ["--method", "mean", "--to", out, "--threads", threads]
        if status := holdfast(["merge", *sources, *options]):
            return status
    found = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu}
    os.write(int(pipe), json.dumps(found).encode())
    return 0


def digest(out: Path) -> str:
    found = hashlib.blake2b()
    for path in sorted(out.iterdir()):
        with open(path, "rb") as file:
            found.update(hashlib.file_digest(file, "blake2b").digest())
    return found.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
