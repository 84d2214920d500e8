"""Compute figures from the records of visits. Pure: every ratio compares two medians of the same round."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.datapath import fewer_bytes
from benchmarks.datapath.parts import UNMEASURED
from benchmarks.datapath.visits import Record
from benchmarks.report import (
    Figure,
    at_least,
    at_most,
    for_orientation,
    not_measured,
)

GIB = 1 << 30
OURS = "holdfast"
OURS_PLAIN = "holdfast, not encrypted"

BARE = "bare sendfile"

_A7_UNIT = "bytes uploaded / state"

Value = Callable[[dict[str, Any]], float]


class Rounds:
    """The results of one part, by participant and round."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = records

    def names(self) -> list[str]:
        return list(dict.fromkeys(record.name for record in self._records))

    def results(self, name: str) -> dict[int, dict[str, Any]]:
        return {
            record.round: record.result
            for record in self._records
            if record.name == name and record.result is not None
        }

    def values(self, name: str, value: Value) -> dict[int, float]:
        return {round_: value(result) for round_, result in self.results(name).items()}

    def error(self, name: str) -> str:
        """Return why this participant has no result, or "" where it has one."""
        if self.results(name):
            return ""
        return next((r.error for r in self._records if r.name == name), "was not part of this run")


def ratios(ours: dict[int, float], theirs: dict[int, float]) -> list[float]:
    """Return our value divided by theirs for each round in which both were measured."""
    return [ours[r] / theirs[r] for r in sorted(ours.keys() & theirs.keys())]


def best(*rounds: dict[int, float]) -> dict[int, float]:
    """Return the largest value of each round."""
    keys = {key for values in rounds for key in values}
    return {key: max(values[key] for values in rounds if key in values) for key in keys}


def _steady(field: str) -> Value:
    return lambda result: statistics.median(save[field] for save in result["steady"])


def _durable_rate(result: dict[str, Any]) -> float:
    return float(result["bytes"]) / GIB / _steady("durable")(result)


def _compare(
    make: Callable[..., Figure],
    id_: str,
    values: list[float],
    unit: str,
    target: float,
    missing: str,
    **details: Any,
) -> Figure:
    if not values:
        reason = missing or "no round has both sides"
        if make is at_least:
            details["bound"] = ">="
        return not_measured(id_, reason, unit=unit, target=target, **details)
    return make(id_, values, unit, target, **details)


def of_saves(records: Sequence[Record]) -> list[Figure]:
    """Return A1 and A2, a row for each participant, and the machine's limits."""
    rounds = Rounds(records)
    limits = "memory and disk"
    blocked = rounds.values(OURS, _steady("blocked"))
    memcpy = {
        round_: result["bytes"] / GIB / rounds.results(limits)[round_]["memcpy 2 threads"]
        for round_, result in rounds.results(OURS).items()
        if round_ in rounds.results(limits)
    }
    durable = rounds.values(OURS, _durable_rate)
    disk = rounds.values(
        limits, lambda x: max(x["O_DIRECT write 1 thread"], x["O_DIRECT write 2 threads"])
    )
    dcp = best(*(rounds.values(n, _durable_rate) for n in rounds.names() if n.startswith("dcp")))

    def lost(*names: str) -> str:
        return "; ".join(f"{n}: {rounds.error(n)}" for n in (OURS, *names) if rounds.error(n))

    found = [
        _compare(
            at_most,
            "A1",
            ratios(blocked, memcpy),
            "times memcpy by 2 threads",
            1.6,
            lost(limits),
            what="time a save blocks training",
        ),
        _compare(
            at_most,
            "A1-dcp",
            ratios(blocked, rounds.values("dcp-thread", _steady("blocked"))),
            "of DCP async thread",
            0.5,
            lost("dcp-thread"),
        ),
        _compare(
            at_most,
            "A1-dlrover",
            ratios(blocked, rounds.values("dlrover", _steady("blocked"))),
            "of DLRover",
            1.0,
            lost("dlrover"),
        ),
        _compare(
            at_most,
            "A1-first",
            ratios(rounds.values(OURS, lambda x: x["first"]["blocked"]), blocked),
            "first save / steady save",
            1.5,
            lost(),
        ),
        _compare(
            at_least,
            "A2",
            ratios(durable, disk),
            "of O_DIRECT write",
            0.85,
            lost(limits),
            what="save called -> committed, fsynced, in GiB/s",
        ),
        _compare(
            at_least,
            "A2-dcp",
            ratios(durable, dcp),
            "times the fastest DCP of the round",
            2.5,
            lost("dcp-sync"),
        ),
    ]
    found += [_row(rounds, name) for name in rounds.names() if name != limits]
    return found + _limits(rounds, limits)


def _row(rounds: Rounds, name: str) -> Figure:
    blocked = rounds.values(name, _steady("blocked"))
    if not blocked:
        return not_measured(f"save {name}", rounds.error(name), unit="s blocked")
    size = statistics.median(rounds.values(name, lambda x: x["bytes"] / GIB).values())
    middle = statistics.median
    return for_orientation(
        f"save {name}",
        list(blocked.values()),
        "s blocked",
        first_blocked=round(middle(rounds.values(name, _first).values()), 3),
        durable_gib_per_second=round(middle(rounds.values(name, _durable_rate).values()), 3),
        cpu_seconds_per_gib=round(middle(rounds.values(name, _steady("cpu")).values()) / size, 3),
    )


def _first(result: dict[str, Any]) -> float:
    return float(result["first"]["blocked"])


def _limits(rounds: Rounds, name: str) -> list[Figure]:
    by_round = rounds.results(name)
    keys = dict.fromkeys(key for result in by_round.values() for key in result)
    return [
        for_orientation(f"limit {key}", [result[key] for result in by_round.values()], "GiB/s")
        for key in keys
    ]


def of_loops(records: Sequence[Record]) -> list[Figure]:
    """Compute A3: the extra seconds of a training loop that contains a save.

    Extra time may be negative because of noise. The figure is therefore the ratio of medians over all
    rounds. It is not measured where the peer's extra time is no larger than the scatter of the plain loops
    or of either side's extra times.
    """
    rounds = Rounds(records)
    found: list[Figure] = []
    for id_, phase in (("A3", "quiet"), ("A3-busy", "busy")):
        words = "of DCP async thread's extra loop seconds"
        ours, theirs = (_extras(records, name, phase) for name in (OURS, "dcp-thread"))
        if not ours or not theirs:
            why = rounds.error(OURS) or rounds.error("dcp-thread")
            found.append(not_measured(id_, why, unit=words, target=0.25))
            continue
        scatter = max(_scatter(records, phase), _deviation(ours), _deviation(theirs))
        peer = statistics.median(theirs)
        details = {
            "ours_extra_seconds": [round(x, 3) for x in ours],
            "dcp_extra_seconds": [round(x, 3) for x in theirs],
            "scatter_seconds": round(scatter, 3),
        }
        if peer <= scatter:
            why = (
                f"DCP's extra {peer:.3f} s is not more than the scatter of the loops, "
                f"{scatter:.3f} s: the load on this machine varies too much, or the state is too "
                "small"
            )
            found.append(not_measured(id_, why, unit=words, target=0.25, **details))
            continue
        ratio = max(0.0, statistics.median(ours)) / peer
        figure = at_most(id_, [ratio], words, 0.25, **details)
        found.append(replace(figure, repetitions=len(ours)))
    for name in rounds.names():
        extras = _extras(records, name, "quiet")
        if extras:
            busy = [round(x, 3) for x in _extras(records, name, "busy")]
            found.append(
                for_orientation(f"loop {name}", extras, "extra s", busy_extra_seconds=busy)
            )
        else:
            found.append(not_measured(f"loop {name}", rounds.error(name), unit="extra s"))
    return found


def _pairs(
    records: Sequence[Record], phase: str, name: str | None = None
) -> list[dict[str, float]]:
    return [
        pair
        for record in records
        if record.result is not None and name in (None, record.name)
        for pair in record.result[phase]
    ]


def _extras(records: Sequence[Record], name: str, phase: str) -> list[float]:
    return [pair["with_save"] - pair["plain"] for pair in _pairs(records, phase, name)]


def _scatter(records: Sequence[Record], phase: str) -> float:
    """Return the scatter of plain loops within a visit.

    Visits are not comparable with each other, because their numbers of steps differ.
    """
    distances: list[float] = []
    for record in records:
        if record.result is not None:
            distances.append(_deviation([pair["plain"] for pair in record.result[phase]]))
    return statistics.median(distances) if distances else 0.0


def _deviation(values: Sequence[float]) -> float:
    """Return the median absolute deviation from the median."""
    middle = statistics.median(values)
    return statistics.median(abs(value - middle) for value in values)


_LOAD_LIMITS = "memory with CRC32C, and disk"


def of_loads(records: Sequence[Record]) -> list[Figure]:
    """Compute A4: restores."""
    rounds = Rounds(records)

    def seconds(result: dict[str, Any]) -> float:
        return float(statistics.median(result["disk"]))

    def rate(result: dict[str, Any]) -> float:
        return float(result["bytes"]) / GIB / seconds(result)

    disk = rounds.values(_LOAD_LIMITS, lambda x: x["O_DIRECT read"])
    best_disk = dict.fromkeys(disk, max(disk.values(), default=0.0))
    verified = rounds.values(_LOAD_LIMITS, lambda x: x["memcpy and CRC32C 2 threads"])
    ours = rounds.values(OURS, rate)
    missing = rounds.error(OURS) or rounds.error(_LOAD_LIMITS)
    found = [
        _compare(
            at_least,
            "A4",
            ratios(ours, best_disk),
            "of the run's best O_DIRECT read",
            0.95,
            missing,
            what="restore from disk without page cache, into prefaulted tensors",
            of_the_same_round=[round(x, 3) for x in ratios(ours, disk)],
        ),
        _compare(
            at_most,
            "A4-memory",
            [
                statistics.median(result["memory"]) / (result["bytes"] / GIB / limit)
                for round_, result in rounds.results(OURS).items()
                if (limit := verified.get(round_))
            ],
            "times memcpy and CRC32C by 2 threads",
            1.3,
            missing,
            what="restore from shared memory, into prefaulted tensors",
        ),
    ]
    if dcp := ratios(ours, rounds.values("dcp-sync", rate)):
        found.append(for_orientation("A4-dcp", dcp, "times DCP's GiB/s"))
    for name in rounds.names():
        if name != _LOAD_LIMITS:
            values = list(rounds.values(name, rate).values())
            id_ = f"load {name}"
            found.append(
                for_orientation(id_, values, "GiB/s")
                if values
                else not_measured(id_, rounds.error(name), unit="GiB/s")
            )
    return found + _limits(rounds, _LOAD_LIMITS)


def of_uploads(records: Sequence[Record], mib: int) -> list[Figure]:
    """Compute uploads to MinIO, for orientation only, because MinIO shares the cores.

    `mib` is the size of the file.
    """
    rounds = Rounds(records)
    return [*_beside_boto3(rounds, "A5-minio"), *_uploads_of_each(rounds, "upload", mib)]


def of_drained_uploads(records: Sequence[Record], mib: int) -> list[Figure]:
    """Compute A5: the cost of the client alone, with a server that discards the bytes."""
    rounds = Rounds(records)
    missing = rounds.error(OURS) or rounds.error(BARE)
    faster, cpu = _uploads_against(rounds, BARE)
    what = "upload to a server that answers as S3 does and drops the bytes"
    return [
        _compare(at_least, "A5", faster, "of two bare sendfile threads", 0.9, missing, what=what),
        _compare(
            at_most,
            "A5-cpu",
            cpu,
            "times the CPU seconds of two bare sendfile threads",
            1.2,
            missing,
            what=what,
        ),
        *_beside_boto3(rounds, "A5-boto3"),
        *_uploads_of_each(rounds, "drained upload", mib),
    ]


def _median_upload(field: str) -> Value:
    return lambda result: statistics.median(row[field] for row in result["uploads"])


def _uploads_against(rounds: Rounds, other: str) -> tuple[list[float], list[float]]:
    """Return our speed and our processor seconds, as multiples of the other participant's."""
    seconds, cpu = _median_upload("seconds"), _median_upload("cpu")
    return (
        ratios(rounds.values(other, seconds), rounds.values(OURS, seconds)),
        ratios(rounds.values(OURS, cpu), rounds.values(other, cpu)),
    )


def _beside_boto3(rounds: Rounds, id_: str) -> list[Figure]:
    missing = rounds.error(OURS) or rounds.error("boto3")
    faster, cpu = _uploads_against(rounds, "boto3")
    return [
        for_orientation(id_, values, unit) if values else not_measured(id_, missing, unit=unit)
        for id_, values, unit in (
            (id_, faster, "times boto3's GiB/s"),
            (f"{id_}-cpu", cpu, "of boto3's CPU seconds"),
        )
    ]


def _uploads_of_each(rounds: Rounds, prefix: str, mib: int) -> list[Figure]:
    gib = mib / 1024
    found: list[Figure] = []
    for name in rounds.names():
        seconds = rounds.values(name, _median_upload("seconds"))
        if not seconds:
            found.append(not_measured(f"{prefix} {name}", rounds.error(name), unit="GiB/s"))
            continue
        middle = statistics.median
        cpu, server = (
            rounds.values(name, _median_upload(f)).values() for f in ("cpu", "server_cpu")
        )
        found.append(
            for_orientation(
                f"{prefix} {name}",
                [gib / s for s in seconds.values()],
                "GiB/s",
                cpu_seconds_per_gib=round(middle(cpu) / gib, 3),
                server_cpu_seconds_per_gib=round(middle(server) / gib, 3),
            )
        )
    return found


def of_copies(records: Sequence[Record], mib: int) -> list[Figure]:
    """Compute A6: copies between peers. `mib`: size of the copied shard."""
    rounds = Rounds(records)
    gib = mib / 1024

    def rate(field: str) -> Value:
        return lambda result: gib / statistics.median(row[field] for row in result["copies"])

    pulled = rounds.values(OURS, rate("pull"))
    plain = rounds.values(OURS_PLAIN, rate("pull"))
    torchft = best(
        *(rounds.values(n, rate("pull")) for n in rounds.names() if n.startswith("torchft"))
    )
    found = [
        _compare(
            at_least,
            "A6",
            ratios(plain, rounds.values("loopback", lambda x: x["loopback CRC32C"])),
            "of a plain socket with CRC32C at both ends",
            0.9,
            rounds.error(OURS_PLAIN) or rounds.error("loopback"),
            what="verified, not encrypted, into prefaulted memory of another process",
        ),
    ]
    if faster := ratios(plain, torchft):
        words = "times torchft's HTTP transport, which does not verify"
        found.append(for_orientation("A6-torchft", faster, words))
    tls = ratios(pulled, rounds.values("loopback", lambda x: x["loopback TLS"]))
    if tls:
        found.append(for_orientation("A6-tls", tls, "of loopback TLS"))
    if encrypted := ratios(pulled, torchft):
        words = "times torchft's HTTP transport, which does not encrypt"
        found.append(for_orientation("A6-torchft-tls", encrypted, words))
    for name in rounds.names():
        if name != "loopback":
            values = list(rounds.values(name, rate("pull")).values())
            id_ = f"copy {name}"
            found.append(
                for_orientation(id_, values, "GiB/s into memory")
                if values
                else not_measured(id_, rounds.error(name), unit="GiB/s into memory")
            )
    pushed = list(rounds.values(OURS, rate("push")).values())
    if pushed:
        found.append(
            for_orientation("copy holdfast, durable", pushed, "GiB/s, durable at the peer")
        )
    return found + _limits(rounds, "loopback")


def of_fewer_bytes(records: Sequence[Record]) -> list[Figure]:
    """Compute A7 towards the store. The bytes are counted, so one record is sufficient."""
    rounds = Rounds(records)
    found: dict[str, float] = {}
    for result in rounds.results(OURS).values():
        found = result["uploaded_over_state"]
    figures = []
    for id_, target, cases in (
        ("A7", fewer_bytes.SHARED_TARGET, fewer_bytes.SHARED),
        ("A7-frozen", fewer_bytes.FROZEN_TARGET, fewer_bytes.FROZEN),
        ("A7-both", fewer_bytes.BOTH_TARGET, fewer_bytes.BOTH),
    ):
        shown = {name: round(found[name], 4) for name in cases if name in found}
        if shown:
            worst = max(shown.values())
            figures.append(
                at_most(id_, [worst], _A7_UNIT, target, what="worst rank, worst case", cases=shown)
            )
        else:
            error = rounds.error(OURS)
            figures.append(not_measured(id_, error, unit=_A7_UNIT, target=target))
    return figures


def of_reshard(records: Sequence[Record]) -> list[Figure]:
    """Compute A10. The bytes are counted, so one record is sufficient."""
    rounds = Rounds(records)
    cases: dict[str, float] = {}
    for result in rounds.results(OURS).values():
        cases = result["read_over_needed"]
    if not cases:
        return [not_measured("A10", rounds.error(OURS), unit="bytes read / needed", target=1.1)]
    worst = max(cases.values())
    shown = {name: round(value, 3) for name, value in cases.items()}
    return [at_most("A10", [worst], "bytes read / needed", 1.1, what="worst rank", cases=shown)]


def of_digests(records: Sequence[Record]) -> list[Figure]:
    """Compute A8: the second of two consecutive saves, which runs while the persister digests the first."""
    rounds = Rounds(records)
    on, off = "holdfast-digests-on", "holdfast-digests-off"

    def middle(field: str) -> Value:
        return lambda result: statistics.median(result[field])

    idle = ratios(rounds.values(on, middle("idle")), rounds.values(off, middle("idle")))
    return [
        _compare(
            at_most,
            "A8",
            ratios(rounds.values(on, middle("chasing")), rounds.values(off, middle("chasing"))),
            "time blocked with digests / without",
            1.05,
            rounds.error(on) or rounds.error(off),
            idle_ratios=[round(x, 3) for x in idle],
        )
    ]


def of_every_step(records: Sequence[Record]) -> list[Figure]:
    """Compute A11 in a directory, without peer copies. Rounds in which a step became shorter do not count.

    A perfect copy costs one memcpy of the state, so the figure is what a save costs beyond that.
    """
    rounds = Rounds([r for r in records if r.result is None or r.result["step_over_memcpy"] >= 30])
    missing = Rounds(records).error(OURS) or "no step was 30 times the memcpy of the state"
    what = "saved at every step in shared memory and on the disk; a directory has no peer copy"
    lags = rounds.values(OURS, lambda x: max(x["lags"])).values()
    slower = rounds.values(
        OURS, lambda x: statistics.median(x["saving"]) / statistics.median(x["plain"]) - 1
    )
    steps = rounds.values(OURS, lambda x: x["step_over_memcpy"])
    return [
        _compare(
            at_most,
            "A11",
            [slower[round_] - 1 / steps[round_] for round_ in slower],
            "slower beyond one memcpy of the state, as a share of the step",
            0.015,
            missing,
            what=what,
            with_the_memcpy=[round(x, 4) for x in slower.values()],
            step_over_memcpy=[round(x, 1) for x in steps.values()],
        ),
        _compare(
            at_most,
            "A11-lost",
            [max(lags)] if lags else [],  # the worst round counts, not a median
            "steps not on the disk at the end of a step, worst of all rounds",
            1,
            missing,
            what=what,
        ),
    ]


def of_many(records: Sequence[Record]) -> list[Figure]:
    """Compute A1-many: saves of a state with many tensors."""
    rounds = Rounds(records)
    values = rounds.values(OURS, lambda x: statistics.median(x["blocked"]) / x["memcpy"])
    return [
        _compare(
            at_most,
            "A1-many",
            list(values.values()),
            "times memcpy by 2 threads",
            1.6,
            rounds.error(OURS),
            what="time a save blocks the training of a module with 2,892 tensors",
        )
    ]


def unmeasured(only: Sequence[str]) -> list[Figure]:
    """Return a row for each target that Holdfast cannot be measured against yet."""
    return [
        not_measured(id_, reason) for id_, reason in UNMEASURED.items() if not only or id_ in only
    ]


def of_part(name: str, records: Sequence[Record], mib: int) -> list[Figure]:
    match name:
        case "save":
            return of_saves(records)
        case "loops":
            return of_loops(records)
        case "load":
            return of_loads(records)
        case "upload":
            return of_uploads(records, mib)
        case "drained upload":
            return of_drained_uploads(records, mib)
        case "copy":
            return of_copies(records, mib)
        case "fewer-bytes":
            return of_fewer_bytes(records)
        case "reshard":
            return of_reshard(records)
        case "digests":
            return of_digests(records)
        case "many":
            return of_many(records)
        case "every-step":
            return of_every_step(records)
        case _:
            raise ValueError(f"there are no figures for part {name!r}")
