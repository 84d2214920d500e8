"""obstore beside Holdfast's own S3 client: the same object to one MinIO and back, in turns.

Both send a file in parts of 32 MiB and read it in ranges of 8 MiB, four requests at a time. Holdfast's client
also sends a CRC32C of each part, and compares the stored object's with it. Server, data and both clients are
on this machine, with everything in memory, so only the ratios of one turn count.

    python -m benchmarks.stores --mib 256 --repetitions 5

Writes benchmarks/results/stores.json: GiB/s and processor seconds a GiB of each client and turn, and the
medians of obstore's over Holdfast's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import obstore
from obstore.store import S3Store
from tests.support.servers.minio_server import MinioServer
from tests.support.servers.store_server import ACCESS_KEY, REGION, SECRET_KEY
from tests.support.tiers.stores import s3_store

from holdfast_core.format.canonical import crc32c
from holdfast_core.tiers.objects import FileRange, Part

RESULT = Path(__file__).parent / "results" / "stores.json"
GIB = 1 << 30
PART = 32 << 20
RANGE = 8 << 20
AT_ONCE = 4


@dataclass(frozen=True)
class FileSource:
    """ObjectSource of a file whose checksums are known, as those of a shard are."""

    fd: int
    size_limit: int
    crcs: tuple[int, ...]
    made_while_sent: bool = False

    def parts(self, part_bytes: int) -> Iterator[Part]:
        assert part_bytes == PART
        for number, start in enumerate(range(0, self.size_limit, PART)):
            length = min(PART, self.size_limit - start)
            piece = FileRange(self.fd, start, length)
            is_last = start + length == self.size_limit
            yield Part((piece,), length, self.crcs[number], is_last)

    def verify(self) -> None:
        """Do nothing: the file does not change."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    load = os.getloadavg()
    tempfile.tempdir = "/dev/shm"
    with MinioServer() as server, tempfile.NamedTemporaryFile() as file:
        for _ in range(arguments.mib):
            file.write(os.urandom(1 << 20))
        file.flush()
        turns = measure(server, Path(file.name), arguments.mib << 20, arguments.repetitions)
    result = {
        "mib": arguments.mib,
        "repetitions": arguments.repetitions,
        "cores": len(os.sched_getaffinity(0)),
        "load_average_before": load,
        "turns": turns,
        "obstore_over_ours": {
            way: {
                name: statistics.median(
                    turn["obstore"][way][name] / turn["ours"][way][name] for turn in turns
                )
                for name in ("gib_per_second", "cpu_seconds_per_gib")
            }
            for way in ("put", "get")
        },
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["obstore_over_ours"], indent=2))


def measure(server: MinioServer, path: Path, size: int, repetitions: int) -> list[dict[str, Any]]:
    config = replace(server.config(""), part_size_mib=PART >> 20, max_concurrency=AT_ONCE)
    ours = s3_store(config, server.credentials)
    theirs = S3Store(
        server.bucket,
        endpoint=f"http://{server.endpoint}",
        access_key_id=ACCESS_KEY,
        secret_access_key=SECRET_KEY,
        region=REGION,
        unsigned_payload=True,  # as Holdfast's client: SHA-256 of all bytes would decide the comparison
        client_options={"allow_http": True, "timeout": "10min"},
    )
    fd = os.open(path, os.O_RDONLY)
    crcs = tuple(crc32c(os.pread(fd, PART, start)) for start in range(0, size, PART))
    source, buffer = FileSource(fd, size, crcs), memoryview(bytearray(size))

    def their_range(key: str, start: int) -> None:
        found = obstore.get_range(theirs, key, start=start, length=RANGE)
        buffer[start : start + RANGE] = memoryview(found)

    def our_range(key: str, start: int) -> None:
        ours.read_into(key, start, buffer[start : start + RANGE])

    clients: dict[str, tuple[Callable[[str], object], Callable[[str, int], None]]] = {
        "ours": (lambda key: ours.write(key, source), our_range),
        "obstore": (
            lambda key: obstore.put(
                theirs, key, path, use_multipart=True, chunk_size=PART, max_concurrency=AT_ONCE
            ),
            their_range,
        ),
    }
    turns = list[dict[str, Any]]()
    for number in range(repetitions + 1):
        turn: dict[str, Any] = {}
        for name in sorted(clients, reverse=number % 2 == 1):
            put, get = clients[name]
            key = f"{name}/{number}"
            turn[name] = {"put": timed(size, lambda put=put, key=key: put(key))}  # type: ignore[misc]
            buffer[:] = bytes(size)
            turn[name]["get"] = timed(size, lambda get=get, key=key: read(get, key, size))  # type: ignore[misc]
            assert crc32c(buffer[-RANGE:]) == crc32c(os.pread(fd, RANGE, size - RANGE))
            ours.delete([key])
        if number:  # the first turn opens connections
            turns.append(turn)
    ours.close()
    os.close(fd)
    return turns


def read(get: Callable[[str, int], None], key: str, size: int) -> None:
    with ThreadPoolExecutor(AT_ONCE) as threads:
        for _ in threads.map(lambda start: get(key, start), range(0, size, RANGE)):
            pass


def timed(size: int, call: Callable[[], object]) -> dict[str, float]:
    began, busy = time.perf_counter(), time.process_time()
    call()
    seconds, cpu = time.perf_counter() - began, time.process_time() - busy
    return {"gib_per_second": size / GIB / seconds, "cpu_seconds_per_gib": cpu * GIB / size}


if __name__ == "__main__":
    main()
