"""A drill of a stored checkpoint against a plain download of the same objects: GiB/s, CPU and memory.

One MinIO runs on this machine, with its data in memory. A checkpoint of four whole shards is stored once. In
turns, `holdfast-sidecar drill` reads it in a process of its own, and boto3 and minio-py with default settings
download its objects into memory, one after the other. A last drill also assembles the state. The machine's
other work hits all of them, so the ratios of one run are compared. The drill verifies every byte by BLAKE3
and writes nothing; the downloads verify nothing and write files.

    python -m benchmarks.drill --mib 1024 --repetitions 5

Writes benchmarks/results/drill.json, and exits with 1 if the drill is slower than 0.8 of boto3 (the median of
the ratios of the turns) or needs more than 256 MiB of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.servers.minio_server import MinioServer
from tests.support.shards.placements import Tensor
from tests.support.tiers.stored_checkpoints import NAMESPACE, StoredStep, store_step
from tests.support.tiers.stores import s3_tier

from benchmarks.upload import GIB, ask, start
from holdfast_core.contract import DrillContract, StoreConfig
from holdfast_core.format import keys
from holdfast_core.shards.file import CHUNK_BYTES

RESULT = Path(__file__).parent / "results" / "drill.json"
OTHERS = ("boto3", "minio")
LEAST_OVER_BOTO3 = 0.8
MOST_BYTES = 256 << 20
COLUMNS = 1024
RESTORED_FOR = 3
"""Ranks for which the last drill assembles the state that four ranks saved."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=arguments.folder))
    tempfile.tempdir = str(folder)  # holds the server's data as well
    try:
        result = measure(arguments.mib << 20, arguments.repetitions, folder)
    finally:
        shutil.rmtree(folder)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0 if result["passed"] else 1


def measure(size_bytes: int, repetitions: int, folder: Path) -> dict[str, Any]:
    with MinioServer() as server:
        config = server.config("drill")
        step = stored(server, config, folder, size_bytes)
        keys_of_server = server.credentials.keys
        (folder / "accessKey").write_text(keys_of_server.access_key)
        (folder / "secretKey").write_text(keys_of_server.secret_key)
        setting = {
            "endpoint": server.endpoint,
            "bucket": server.bucket,
            "access_key": keys_of_server.access_key,
            "secret_key": keys_of_server.secret_key,
            "folder": str(folder),
            "path": "",
            "profile": False,
        }
        objects = [object_key(config, step, rank) for rank in range(4)]
        others = {name: start(name, setting) for name in OTHERS}
        samples: dict[str, list[dict[str, float]]] = {name: [] for name in ("drill", *OTHERS)}
        # The first turn of each includes imports and connections of the others, and is not counted.
        for repetition in range(repetitions + 1):
            busy = server.cpu_seconds()
            found = {"drill": drilled(config, step, folder, size_bytes)}
            found["drill"]["server_cpu"] = server.cpu_seconds() - busy
            for name, process in others.items():
                busy = server.cpu_seconds()
                parts = [ask(process, "get", key) for key in objects]
                found[name] = {
                    "seconds": sum(part["seconds"] for part in parts),
                    "cpu": sum(part["cpu"] for part in parts),
                    "server_cpu": server.cpu_seconds() - busy,
                }
            if repetition:
                for name, sample in found.items():
                    samples[name].append(sample)
        for process in others.values():
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)
        restoring = drilled(config, step, folder, size_bytes, RESTORED_FOR)
    return report(samples, restoring, size_bytes)


def stored(server: MinioServer, config: StoreConfig, folder: Path, size_bytes: int) -> StoredStep:
    """Store a checkpoint of four whole shards, and remove the local files."""
    local = folder / "local"
    local.mkdir()
    rows = size_bytes // (4 * COLUMNS)
    weights = np.frombuffer(os.urandom(rows * COLUMNS * 4), np.uint32).reshape(rows, COLUMNS)
    with closing(s3_tier(config, server.credentials)) as tier:
        step = store_step(
            tier,
            local,
            1,
            {"weights": weights},
            packed=False,
            mesh=(1, 4),
            tensors={"weights": Tensor("U32", (rows, COLUMNS), (None, 0))},
            chunk_bytes=CHUNK_BYTES,
        )
    step.close()
    shutil.rmtree(local)
    return step


def object_key(config: StoreConfig, step: StoredStep, rank: int) -> str:
    ref = step.readers[rank].record.ref
    return f"{config.prefix}/{keys.job_prefix(NAMESPACE, ref.job_uid)}{keys.shard_key(ref)}"


def drilled(
    config: StoreConfig,
    step: StoredStep,
    folder: Path,
    size_bytes: int,
    world_size: int | None = None,
) -> dict[str, float]:
    """Run one drill as its pod does."""
    request = step.request
    wanted = DrillContract(
        NAMESPACE, request.job_uid, manifest=request.manifest, world_size=world_size
    )
    log = folder / "log"
    began = time.perf_counter()
    pid = os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "holdfast_sidecar", "drill"],
        {
            **os.environ,
            "HOLDFAST_STORE": config.to_json(),
            "HOLDFAST_STORE_DIR": str(folder),
            "HOLDFAST_DRILL": wanted.to_json(),
            "HOLDFAST_TERMINATION_LOG": str(log),
        },
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )
    peak = 0
    while True:
        # The peak of wait4 includes the memory of this process, from before the program was started.
        peak = max(peak, peak_bytes(pid))
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            break
        time.sleep(0.05)
    whole = time.perf_counter() - began
    found = json.loads(log.read_text())
    if os.waitstatus_to_exitcode(status) or found["readBytes"] < size_bytes:
        raise SystemExit(f"the drill failed: {found}")
    return {
        "seconds": found["seconds"],
        "process_seconds": whole,
        "cpu": usage.ru_utime + usage.ru_stime,
        "peak_bytes": peak,
    }


def peak_bytes(pid: int) -> int:
    """Return the largest resident memory of a process so far, or 0 if it has ended."""
    text = Path(f"/proc/{pid}/status").read_text()
    for line in text.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def report(
    samples: dict[str, list[dict[str, float]]], restoring: dict[str, float], size_bytes: int
) -> dict[str, Any]:
    gib = size_bytes / GIB
    speed = {name: [gib / s["seconds"] for s in found] for name, found in samples.items()}
    over = {
        name: statistics.median(
            ours / theirs for ours, theirs in zip(speed["drill"], speed[name], strict=True)
        )
        for name in OTHERS
    }
    peak = max(sample["peak_bytes"] for sample in (*samples["drill"], restoring))
    return {
        "mib": size_bytes >> 20,
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg(),
        "gib_per_second": speed,
        "cpu_seconds_per_gib": {
            name: [sample["cpu"] / gib for sample in found] for name, found in samples.items()
        },
        "server_cpu_seconds_per_gib": {
            name: [sample["server_cpu"] / gib for sample in found]
            for name, found in samples.items()
        },
        "process_seconds": [sample["process_seconds"] for sample in samples["drill"]],
        "drill_over": over,
        "peak_mib": [round(s["peak_bytes"] / (1 << 20), 1) for s in samples["drill"]],
        "restoring": {
            "world_size": RESTORED_FOR,
            "seconds": restoring["seconds"],
            "peak_mib": round(restoring["peak_bytes"] / (1 << 20), 1),
        },
        "passed": over["boto3"] >= LEAST_OVER_BOTO3 and peak <= MOST_BYTES,
    }


if __name__ == "__main__":
    sys.exit(main())
