"""The sidecar's Prometheus metrics, in a registry of their own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from holdfast_core.ids import TierName

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class Metrics:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._stall = Counter(
            "holdfast_checkpoint_stall_seconds",
            "Time that saves held up the trainers of this pod",
            registry=self._registry,
        )
        self._durable = Histogram(
            "holdfast_checkpoint_durable_seconds",
            "From the hand-off of a shard until it is durable in the tier",
            ["tier"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._bytes = Counter(
            "holdfast_checkpoint_bytes",
            "Payload bytes written to the tier",
            ["tier"],
            registry=self._registry,
        )
        self._recovery = Histogram(
            "holdfast_recovery_seconds",
            "Time that a part of a recovery took in this pod",
            ["phase"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._corruptions = Counter(
            "holdfast_corruptions_detected",
            "Copies that did not match their digest and were quarantined or refused",
            ["tier"],
            registry=self._registry,
        )
        self._skipped = Counter(
            "holdfast_saves_skipped",
            "Saves that ranks skipped because no slot was free",
            registry=self._registry,
        )
        self._queue = Gauge(
            "holdfast_shards_pending",
            "Shards of this pod that still have to be told, copied or uploaded",
            registry=self._registry,
        )
        self._round = Gauge(
            "holdfast_restart_round", "Restart round of this sidecar", registry=self._registry
        )
        self._free = Gauge(
            "holdfast_node_free_bytes",
            "Bytes that may still be written to the node volume",
            registry=self._registry,
        )

    def stored(self, tier: TierName, payload_bytes: int, seconds: float) -> None:
        self._bytes.labels(tier.value).inc(payload_bytes)
        self._durable.labels(tier.value).observe(seconds)

    def stalled(self, seconds: float, saves_skipped: int) -> None:
        if seconds > 0:
            self._stall.inc(seconds)
        if saves_skipped > 0:
            self._skipped.inc(saves_skipped)

    def recovered(self, phase: str, seconds: float) -> None:
        self._recovery.labels(phase).observe(seconds)

    def corruption(self, tier: TierName) -> None:
        self._corruptions.labels(tier.value).inc()

    def level(self, *, pending: int, round_: int) -> None:
        self._queue.set(pending)
        self._round.set(round_)

    def free(self, free_bytes: int) -> None:
        self._free.set(free_bytes)

    def render(self) -> bytes:
        return generate_latest(self._registry)
