"""The real sidecar with counters: CPU seconds, bytes on its sockets, and the callbacks of its event loop.

On SIGUSR1 the process writes its counters as JSON to the file that the environment names, and starts new
ones. Run it as `python -m benchmarks.ranks.watched`.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import signal
import sys
import time
from asyncio import selector_events, sslproto
from collections import defaultdict
from pathlib import Path
from typing import Any

from holdfast_sidecar.__main__ import main

COUNTERS = "BENCH_RANKS_COUNTERS"
_SHOWN = 8


class Watch:
    """Counters of this process since the last `take`."""

    def __init__(self) -> None:
        self._collection_began = 0.0
        self._reset()

    def _reset(self) -> None:
        self._cpu = time.process_time()
        self._began = time.monotonic()
        self.sent = 0
        self.received = 0
        self.callbacks = 0
        self.above_5 = 0
        self.above_50 = 0
        self.longest: dict[str, float] = {}
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def ran(self, name: str, seconds: float) -> None:
        """Count one callback that used the CPU for so long."""
        self.callbacks += 1
        self.seconds[name] += seconds
        if seconds > 0.005:
            self.above_5 += 1
            self.above_50 += int(seconds > 0.05)
            self.longest[name] = max(seconds, self.longest.get(name, 0.0))

    def collected(self, phase: str, info: dict[str, int]) -> None:
        """Time a run of the garbage collector, which the callback that it interrupts contains."""
        if phase == "start":
            self._collection_began = time.thread_time()
            return
        seconds = time.thread_time() - self._collection_began
        name = f"garbage collection, generation {info['generation']}"
        self.seconds[name] += seconds
        if seconds > 0.005:
            self.longest[name] = max(seconds, self.longest.get(name, 0.0))

    def take(self) -> dict[str, Any]:
        taken = {
            "cpu_seconds": time.process_time() - self._cpu,
            "wall_seconds": time.monotonic() - self._began,
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "sent_bytes": self.sent,
            "received_bytes": self.received,
            "callbacks": self.callbacks,
            "above_5_ms": self.above_5,
            "above_50_ms": self.above_50,
            "longest_ms": _milliseconds(self.longest),
            "most_ms": _milliseconds(dict(self.seconds)),
        }
        self._reset()
        return taken


def _milliseconds(seconds: dict[str, float]) -> dict[str, float]:
    largest = sorted(seconds.items(), key=lambda item: -item[1])[:_SHOWN]
    return {name: round(value * 1000, 2) for name, value in largest}


def _name(handle: Any) -> str:
    callback = handle._callback
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        coroutine: Any = owner.get_coro()
        return str(getattr(coroutine, "__qualname__", coroutine))
    return str(getattr(callback, "__qualname__", type(callback).__name__))


def install(watch: Watch) -> None:
    """Count every callback of event loops and every byte of TLS connections of this process."""
    run: Any = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        name = _name(handle)
        began = time.thread_time()
        run(handle)
        watch.ran(name, time.thread_time() - began)

    socket_transport: Any = vars(selector_events)["_SelectorSocketTransport"]
    write: Any = socket_transport.write

    def written(transport: Any, data: bytes) -> None:
        watch.sent += len(data)
        write(transport, data)

    update: Any = sslproto.SSLProtocol.buffer_updated

    def updated(protocol: Any, count: int) -> None:
        watch.received += count
        update(protocol, count)

    changed: Any = (
        (asyncio.Handle, "_run", timed),
        (socket_transport, "write", written),
        (sslproto.SSLProtocol, "buffer_updated", updated),
    )
    for owner, attribute, function in changed:
        setattr(owner, attribute, function)
    gc.callbacks.append(watch.collected)


def _write(watch: Watch, path: Path) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(watch.take()))
    temporary.replace(path)


if __name__ == "__main__":
    counters = Watch()
    install(counters)
    target = Path(os.environ[COUNTERS])
    signal.signal(signal.SIGUSR1, lambda *_: _write(counters, target))
    sys.exit(main([]))
