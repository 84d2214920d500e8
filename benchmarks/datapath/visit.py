"""One visit: one participant repeats one measurement in a separate process.

`python -m benchmarks.datapath.visit OPTIONS` runs in the workspace's environment or in that of the other
libraries. The last line of its output is `RESULT ` and a JSON object. All participants use the same
functions of this module, so that all are timed in the same way.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.datapath import files, loop
from benchmarks.datapath import state as states
from benchmarks.datapath.processes import cpu_seconds
from benchmarks.datapath.saver import Saver, Started

GIB = 1 << 30
RESULT = "RESULT "
_SETTLE_SECONDS = 0.2
_STEPS_A_BLOCK = 4


@dataclass(frozen=True, slots=True)
class Options:
    kind: str
    """Key of KINDS."""
    name: str
    """Name of the participant within `module`."""
    module: str
    """Name of the module with SAVERS or UPLOADERS."""
    directory: str
    mib: int
    repetitions: int
    seconds: float = 3.0
    """Duration of one training loop."""
    check: bool = False
    """Whether to read the last checkpoint back and compare every bit."""
    store: dict[str, str] | None = None


def save(options: Options) -> dict[str, Any]:
    """Measure `repetitions` saves after a first one. Each is waited for and made durable."""
    state, saver = _participant(options)
    saves: list[dict[str, float]] = []
    last: Started | None = None
    for step in range(1, options.repetitions + 2):
        time.sleep(_SETTLE_SECONDS)
        cpu = cpu_seconds()
        began = time.perf_counter()
        started = saver.start(step)
        blocked = time.perf_counter() - began
        started.wait()
        complete = time.perf_counter() - began
        files.fsync_tree(started.path)
        durable = time.perf_counter() - began
        saves.append(
            {
                "blocked": blocked,
                "complete": complete,
                "durable": durable,
                "cpu": cpu_seconds() - cpu,
            }
        )
        if last is not None and last.disposable:
            files.remove(last.path)
        last = started
        if step <= options.repetitions:
            states.train_a_little(state)
    assert last is not None
    stored = files.total_bytes(last.path)
    saver.close()
    if options.check:
        _check(saver, last.path, state)
    return {
        "bytes": states.size_bytes(state),
        "stored_bytes": stored,
        "first": saves[0],
        "steady": saves[1:],
    }


def chase(options: Options) -> dict[str, Any]:
    """Start two saves without a pause, repeatedly. The second runs while the persister digests the first."""
    state, saver = _participant(options)
    saver.start(1).wait()
    idle: list[float] = []
    chasing: list[float] = []
    step = 1
    for _ in range(options.repetitions):
        time.sleep(_SETTLE_SECONDS)
        began = time.perf_counter()
        first = saver.start(step + 1)
        middle = time.perf_counter()
        second = saver.start(step + 2)
        chasing.append(time.perf_counter() - middle)
        idle.append(middle - began)
        first.wait()
        second.wait()
        step += 2
        states.train_a_little(state)
    saver.close()
    return {"idle": idle, "chasing": chasing}


def loops(options: Options) -> dict[str, Any]:
    """Time a training loop without and with a save at its begin, alternately.

    Then do the same beside a busy core.
    """
    _state, saver = _participant(options)
    saver.start(1).wait()
    step = loop.training_step()
    count = loop.calibrated(step, options.seconds)
    number = 1

    def pair() -> dict[str, float]:
        nonlocal number
        plain = loop.timed(step, count)
        number += 1
        began = time.perf_counter()
        started = saver.start(number)
        loop.timed(step, count)
        with_save = time.perf_counter() - began
        started.wait()
        if started.disposable:
            files.remove(started.path)
        return {"plain": plain, "with_save": with_save}

    quiet = [pair() for _ in range(options.repetitions)]
    with loop.busy_core():
        busy = [pair() for _ in range(options.repetitions)]
    saver.close()
    return {"quiet": quiet, "busy": busy, "steps": count}


def load(options: Options) -> dict[str, Any]:
    """Load from a disk without the help of the page cache, into tensors whose pages are present."""
    state, saver = _participant(options)
    started = saver.start(1)
    started.wait()
    files.fsync_tree(started.path)
    saver.close()
    target = states.emptied(state)
    seconds: list[float] = []
    memory: list[float] = []
    for _ in range(options.repetitions):
        for tensor in target.values():
            tensor.zero_()
        files.forget(started.path)
        if options.name == "holdfast":
            from_disk, from_memory = _restore_twice(started.path, target)
            seconds.append(from_disk)
            memory.append(from_memory)
        else:
            began = time.perf_counter()
            saver.load(started.path, target)
            seconds.append(time.perf_counter() - began)
        wrong = states.differences(state, target)
        if wrong:
            raise ValueError(f"loaded, but {wrong[:3]} differ from the saved values")
    return {"bytes": states.size_bytes(state), "disk": seconds, "memory": memory}


def _restore_twice(path: Path, target: dict[str, Any]) -> tuple[float, float]:
    """Restore from the disk, then from the shared memory that the next save left behind."""
    from benchmarks.datapath.ours import Restoring

    found: list[float] = []
    for expected in ("node", "memory"):
        with Restoring(path) as restoring:
            began = time.perf_counter()
            tier = restoring.restore(target)
            found.append(time.perf_counter() - began)
            if tier != expected:
                raise ValueError(f"restored from {tier}, expected from {expected}")
            if expected == "node":
                restoring.leave_in_memory(target)
    return found[0], found[1]


def every_step(options: Options) -> dict[str, Any]:
    """Compare steps with a save after each to steps without.

    A step takes at least 30 times as long as a memcpy of the state.
    """
    from benchmarks.datapath import limits

    rate = limits.memory(options.mib << 20)["memcpy 2 threads"]
    _state, saver = _participant(options)
    memcpy_seconds = (options.mib << 20) / GIB / rate
    saver.start(1).wait()
    unit = loop.training_step()
    count = loop.calibrated(unit, max(30 * memcpy_seconds, 0.1) * 1.3)
    plain: list[float] = []
    saving: list[float] = []
    waiting: list[Started] = []
    lags: list[int] = []
    number = 1
    for _ in range(options.repetitions):
        plain += [loop.timed(unit, count) for _ in range(_STEPS_A_BLOCK)]
        for _ in range(_STEPS_A_BLOCK):
            began = time.perf_counter()
            loop.timed(unit, count)
            # These steps would be lost if only the disk survived now: this one, and those whose save is not
            # committed yet.
            waiting = [s for s in waiting if s.is_complete is None or not s.is_complete()]
            lags.append(1 + len(waiting))
            number += 1
            waiting.append(saver.start(number))
            saving.append(time.perf_counter() - began)
        for started in waiting:
            started.wait()
    saver.close()
    return {
        "plain": plain,
        "saving": saving,
        "lags": lags,
        "step_over_memcpy": statistics.median(plain) / memcpy_seconds,
    }


def many(options: Options) -> dict[str, Any]:
    """Measure saves of a module with thousands of tensors, and the memcpy of as many bytes."""
    from benchmarks.datapath import limits
    from benchmarks.datapath.many import Many

    trained = Many.make(options.mib)
    make = importlib.import_module(options.module).SAVERS[options.name]
    saver: Saver = make(trained.state(), Path(options.directory))
    rate = limits.memory(trained.size_bytes)["memcpy 2 threads"]
    blocked: list[float] = []
    for step in range(1, options.repetitions + 3):
        trained.train_a_little()
        time.sleep(_SETTLE_SECONDS)
        began = time.perf_counter()
        started = saver.start(step)
        blocked.append(time.perf_counter() - began)
        started.wait()
    saver.close()
    # The first two saves plan the payload and record the structure of the state.
    memcpy = trained.size_bytes / GIB / rate
    return {"first": blocked[:2], "blocked": blocked[2:], "memcpy": memcpy}


def limit(options: Options) -> dict[str, Any]:
    from benchmarks.datapath import limits

    size = options.mib << 20
    match options.name:
        case "memory and disk":
            return {**limits.memory(size), **limits.disk(Path(options.directory), size)}
        case "memory with CRC32C, and disk":
            return {**limits.verified_memcpy(size), **limits.disk(Path(options.directory), size)}
        case "loopback":
            return dict(limits.loopback(size))
        case _:
            raise ValueError(f"limit {options.name!r} is unknown")


def fewer_bytes(options: Options) -> dict[str, Any]:
    from benchmarks.datapath.fewer_bytes import ratios

    return {"uploaded_over_state": ratios()}


def reshard(options: Options) -> dict[str, Any]:
    from benchmarks.datapath.reshard import ratios

    return {"read_over_needed": ratios()}


def upload(options: Options) -> dict[str, Any]:
    """Upload a file from the page cache, under a new key each time. The first upload is a warm-up."""
    if options.store is None:
        raise ValueError("an upload needs a store")
    make = importlib.import_module(options.module).UPLOADERS[options.name]
    uploader = make(options.store, Path(options.directory), options.mib)
    server = int(options.store["server_pid"])
    rows: list[dict[str, float]] = []
    for number in range(options.repetitions + 1):
        step = os.getpid() * 100 + number
        files.warm(uploader.prepare(step))
        cpu, server_cpu = cpu_seconds(), cpu_seconds(server)
        began = time.perf_counter()
        uploader.upload(step)
        rows.append(
            {
                "seconds": time.perf_counter() - began,
                "cpu": cpu_seconds() - cpu,
                "server_cpu": cpu_seconds(server) - server_cpu,
            }
        )
        uploader.remove(step)
    return {"uploads": rows[1:]}


def copy(options: Options) -> dict[str, Any]:
    """Copy a shard to a peer, durably, and from a peer into memory, as torchft's receiver does."""
    if options.name.startswith("holdfast"):
        return _copy_ours(options)
    from benchmarks.peers.transport import TorchftReceiver

    receiver = TorchftReceiver(options.mib, chunks=4 if options.name.endswith("4 chunks") else 0)
    rows: list[dict[str, float]] = []
    expected = states.make(options.mib) if options.check else {}
    for _ in range(options.repetitions + 1):
        cpu = cpu_seconds()
        began = time.perf_counter()
        received = receiver.receive()
        rows.append({"pull": time.perf_counter() - began, "cpu": cpu_seconds() - cpu})
        if expected and states.differences(expected, received):
            raise ValueError("the received bytes differ from the sent bytes")
        del received
    receiver.close()
    return {"copies": rows[1:]}


def _copy_ours(options: Options) -> dict[str, Any]:
    from benchmarks.datapath.ours import HoldfastCopier

    plain = options.name.endswith("not encrypted")
    copier = HoldfastCopier(Path(options.directory), options.mib, plain=plain)
    rows: list[dict[str, float]] = []
    for number in range(options.repetitions + 1):
        copier.prepare(number + 1)
        began = time.perf_counter()
        copier.push()
        push = time.perf_counter() - began
        cpu = cpu_seconds()
        began = time.perf_counter()
        copier.pull()
        pull = time.perf_counter() - began
        rows.append({"push": push, "pull": pull, "cpu": cpu_seconds() - cpu})
    copier.close()
    return {"copies": rows[1:]}


def _participant(options: Options) -> tuple[dict[str, Any], Saver]:
    make = importlib.import_module(options.module).SAVERS[options.name]
    state = states.make(options.mib)
    saver: Saver = make(state, Path(options.directory))
    return state, saver


def _check(saver: Saver, path: Path, state: dict[str, Any]) -> None:
    target = states.emptied(state)
    saver.load(path, target)
    wrong = states.differences(state, target)
    if wrong:
        raise ValueError(f"saved, but {wrong[:3]} differ when they are read back")


KINDS = {
    "save": save,
    "chase": chase,
    "loops": loops,
    "load": load,
    "every-step": every_step,
    "many": many,
    "limit": limit,
    "upload": upload,
    "copy": copy,
    "fewer-bytes": fewer_bytes,
    "reshard": reshard,
}


def main() -> None:
    options = Options(**json.loads(sys.argv[1]))
    code = 1
    try:
        print(RESULT + json.dumps(KINDS[options.kind](options)), flush=True)
        code = 0
    except Exception:  # noqa: BLE001 - the process that started this visit gets it
        traceback.print_exc()
    finally:
        # Some peers leave threads that never end. The process that started this visit kills their
        # processes.
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
