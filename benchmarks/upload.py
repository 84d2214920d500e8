"""A5: a shard into the object store and back, against boto3 and minio-py with default settings.

One MinIO runs on this machine, with its data and all files in memory. Each client is a separate process.
They alternate, so only the ratios are meaningful. Our times include what a checkpoint needs and the other
clients do not do: the CRC32C of every part, HEAD after the upload, and for downloads the CRC32C of every
chunk and BLAKE3 of the payload.

    python -m benchmarks.upload --mib 512 --repetitions 5

Prints a table and, as its last line, JSON: per client and direction GiB/s, CPU seconds per GiB of the
client's process and of the server's (user and system), a list each, and the medians of ours divided by the
others. Where client and server share the cores, the server's CPU limits the GiB/s of every client:
`ceiling` is the limit for a client that needs no CPU. The other clients run in a separate environment (uv
run --no-project), so this file imports only the standard library until it has determined its client.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

GIB = 1 << 30
CLIENTS = ("ours", "boto3", "minio")
Transfer = Callable[[str], None]
"""Takes the name of an object: a new one to put, or one that was put before to get."""
Client = tuple[Transfer, Transfer, Callable[[], object]]
"""Put, get, and removal of the downloaded copy, which is not measured."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--profile", action="store_true", help="cProfile of ours, by cumulative")
    parser.add_argument("--worker", choices=CLIENTS, help=argparse.SUPPRESS)
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        work(arguments.worker, json.loads(arguments.setting))
        return
    folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=arguments.folder))
    try:
        measure(arguments, folder)
    finally:
        shutil.rmtree(folder)


# ------------------------------------------------------------------ parent process


def measure(arguments: argparse.Namespace, folder: Path) -> None:
    from tests.support.servers.minio_server import MinioServer
    from tests.support.shards.builders import shard_header
    from tests.support.shards.shard_files import write_shard

    tempfile.tempdir = str(folder)  # holds the server's data as well
    source = folder / "source"
    source.mkdir()
    size = arguments.mib << 20
    with (
        MinioServer() as server,
        write_shard(source, shard_header(size), os.urandom(size)) as shard,
    ):
        (path,) = source.iterdir()
        ref = shard.record.ref
        keys = server.credentials.keys
        setting = {
            "endpoint": server.endpoint,
            "bucket": server.bucket,
            "access_key": keys.access_key,
            "secret_key": keys.secret_key,
            "folder": str(folder),
            "path": str(path),
            "ref": [ref.job_uid, ref.step, ref.round, ref.rank, ref.blake3],
            "profile": arguments.profile,
        }
        workers = {name: start(name, setting) for name in CLIENTS}
        samples: dict[str, dict[str, list[dict[str, float]]]] = {
            way: {name: [] for name in CLIENTS} for way in ("put", "get")
        }
        file_bytes = shard.record.file_bytes
        # The first round of each client includes imports, connections and buffers, and is not counted.
        for repetition in range(arguments.repetitions + 1):
            turn = repetition % len(CLIENTS)
            for name in (*CLIENTS[turn:], *CLIENTS[:turn]):
                for way in ("put", "get"):
                    busy = server.cpu_seconds()
                    sample = ask(workers[name], way, f"{name}-{repetition}")
                    sample["server_cpu"] = server.cpu_seconds() - busy
                    if repetition:
                        samples[way][name].append(sample)
                for entry in server.data_dir.joinpath(server.bucket).iterdir():
                    shutil.rmtree(entry)  # the data would exhaust the memory
        for worker in workers.values():
            assert worker.stdin is not None
            worker.stdin.close()
            worker.wait(60)
    report(samples, file_bytes / GIB, arguments)


def start(name: str, setting: dict[str, Any]) -> subprocess.Popen[str]:
    python = [sys.executable]
    if name != "ours":
        versions = ["--python", f"{sys.version_info.major}.{sys.version_info.minor}"]
        python = ["uv", "run", "--quiet", "--no-project", *versions, "--with", name, "python"]
    command = [*python, __file__, "--worker", name, "--setting", json.dumps(setting)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(worker: subprocess.Popen[str], way: str, name: str) -> dict[str, float]:
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write(json.dumps([way, name]) + "\n")
    worker.stdin.flush()
    answer = worker.stdout.readline()
    if not answer:
        raise SystemExit(f"the worker for {worker.args!r} ended with {worker.wait()}")
    sample: dict[str, float] = json.loads(answer)
    return sample


def report(
    samples: dict[str, dict[str, list[dict[str, float]]]],
    gib: float,
    arguments: argparse.Namespace,
) -> None:
    cores = len(os.sched_getaffinity(0))
    result: dict[str, Any] = {
        "mib": arguments.mib,
        "repetitions": arguments.repetitions,
        "cores": cores,
        "load_average": os.getloadavg(),
    }
    print(
        f"{'':6}{'client':8}{'GiB/s':>8}{'CPU s/GiB':>11}{'server CPU':>12}{'ceiling':>9}  (medians)"
    )
    for way, by_client in samples.items():
        speed = {n: [gib / s["seconds"] for s in of_one] for n, of_one in by_client.items()}
        cpu = {n: [s["cpu"] / gib for s in of_one] for n, of_one in by_client.items()}
        server = {n: [s["server_cpu"] / gib for s in of_one] for n, of_one in by_client.items()}
        for name in CLIENTS:
            fast, busy, theirs = (statistics.median(x[name]) for x in (speed, cpu, server))
            ceiling = cores / theirs
            print(f"{way:6}{name:8}{fast:8.2f}{busy:11.2f}{theirs:12.2f}{ceiling:9.2f}")
        result[way] = {
            "gib_per_second": speed,
            "cpu_seconds_per_gib": cpu,
            "server_cpu_seconds_per_gib": server,
            "ours_over": {
                name: {
                    "gib_per_second": statistics.median(speed["ours"])
                    / statistics.median(speed[name]),
                    "cpu": statistics.median(cpu["ours"]) / statistics.median(cpu[name]),
                }
                for name in CLIENTS[1:]
            },
        }
    print(json.dumps(result))


# ------------------------------------------------------------------ client processes


def work(name: str, setting: dict[str, Any]) -> None:
    make = {"ours": ours, "boto3": boto3_default, "minio": minio_default}[name]
    put, get, forget = make(setting)
    for line in sys.stdin:
        way, key = json.loads(line)
        transfer = put if way == "put" else get
        began, cpu = time.perf_counter(), time.process_time()
        if setting["profile"] and name == "ours":
            profiled(transfer, key)
        else:
            transfer(key)
        sample = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu}
        forget()
        print(json.dumps(sample), flush=True)


def profiled(transfer: Transfer, key: str) -> None:
    import cProfile
    import pstats

    profile = cProfile.Profile()
    profile.runcall(transfer, key)
    pstats.Stats(profile, stream=sys.stderr).sort_stats("cumulative").print_stats(25)


def ours(setting: dict[str, Any]) -> Client:
    from tests.support.servers.credentials import StaticCredentials

    from holdfast_core.contract import StoreConfig
    from holdfast_core.ids import Digest, JobUid, Rank, RestartRound, ShardRef, Step
    from holdfast_core.node.files import BufferPool
    from holdfast_core.node.shard_file import DiskShardReader
    from holdfast_core.node.tier import DiskNodeTier
    from holdfast_core.store.s3.client import S3Client
    from holdfast_core.store.s3.credentials import Keys
    from holdfast_core.store.s3.store import S3ObjectStore
    from holdfast_core.store.tier import ObjectTier

    job_uid, step, restart_round, rank, digest = setting["ref"]
    ref = ShardRef(
        JobUid(job_uid), Step(step), RestartRound(restart_round), Rank(rank), Digest(digest)
    )
    config = StoreConfig(setting["endpoint"], False, setting["bucket"], "ours", "us-east-1")
    keys = StaticCredentials(Keys(setting["access_key"], setting["secret_key"]))
    tier = ObjectTier(S3ObjectStore(S3Client(config, keys)), config.prefix)
    node = DiskNodeTier(Path(setting["folder"]) / "node", capacity_bytes=1 << 40)
    node.open()

    def put(name: str) -> None:
        with DiskShardReader.open(Path(setting["path"]), ref, BufferPool(1 << 20, keep=2)) as shard:
            tier.upload_shard(name, shard)

    def get(name: str) -> None:
        tier.download_shard(name, ref, node.begin_copy)

    return put, get, lambda: node.delete_shard(ref)


def boto3_default(setting: dict[str, Any]) -> Client:
    import boto3  # only in the peers' environment

    client = boto3.client(
        "s3",
        endpoint_url=f"http://{setting['endpoint']}",
        aws_access_key_id=setting["access_key"],
        aws_secret_access_key=setting["secret_key"],
        region_name="us-east-1",
    )
    bucket, target = setting["bucket"], Path(setting["folder"]) / "boto3.copy"

    def put(name: str) -> None:
        client.upload_file(setting["path"], bucket, name)

    def get(name: str) -> None:
        client.download_file(bucket, name, str(target))

    return put, get, lambda: target.unlink(missing_ok=True)


def minio_default(setting: dict[str, Any]) -> Client:
    from minio import Minio

    client = Minio(
        setting["endpoint"],
        access_key=setting["access_key"],
        secret_key=setting["secret_key"],
        secure=False,
    )
    bucket, target = setting["bucket"], Path(setting["folder"]) / "minio.copy"

    def put(name: str) -> None:
        client.fput_object(bucket, name, setting["path"])

    def get(name: str) -> None:
        client.fget_object(bucket, name, str(target))

    return put, get, lambda: target.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
