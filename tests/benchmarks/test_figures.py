"""Figures from records: ratios within a round, missing results, and results that are too noisy."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.datapath import figures as of
from benchmarks.datapath.parts import UNMEASURED
from benchmarks.datapath.visits import Record
from benchmarks.report import Figure

GIB = 1 << 30
LIMITS = {
    "memcpy 1 thread": 8.0,
    "memcpy 2 threads": 10.0,
    "O_DIRECT write 1 thread": 1.5,
    "O_DIRECT write 2 threads": 2.0,
}


def saved(blocked: float, durable: float, *, first: float | None = None) -> dict[str, Any]:
    """Return the result of a visit of 1 GiB whose two steady saves took the same time."""
    steady = {"blocked": blocked, "complete": durable, "durable": durable, "cpu": 0.25}
    return {
        "bytes": GIB,
        "first": {**steady, "blocked": blocked if first is None else first},
        "steady": [steady, steady],
    }


def records(part: str, **by_name: list[dict[str, Any] | str]) -> list[Record]:
    """Return the records of results or errors, one for each round.

    In names, `_` stands for a space or `-`.
    """
    return [
        Record(part, round_, name, None, result)
        if isinstance(result, str)
        else Record(part, round_, name, result)
        for name, results in by_name.items()
        for round_, result in enumerate(results)
    ]


def by_id(figures: list[Figure]) -> dict[str, Figure]:
    return {figure.id: figure for figure in figures}


def saves(**more: list[dict[str, Any] | str]) -> dict[str, Figure]:
    given: dict[str, list[dict[str, Any] | str]] = {
        "memory and disk": [LIMITS, LIMITS],
        "holdfast": [saved(0.15, 0.5, first=0.3), saved(0.2, 0.5)],
        "dcp-sync": [saved(1.0, 1.0), saved(1.0, 1.0)],
        "dcp-thread": [saved(0.3, 2.0), saved(0.4, 2.0)],
        "dlrover": [saved(0.3, 2.0), saved(0.1, 2.0)],
    }
    return by_id(of.of_saves(records("save", **{**given, **more})))


def test_saves_are_compared_within_their_round() -> None:
    found = saves()
    assert {id_: (f.details["values"], f.ok) for id_, f in found.items() if " " not in id_} == {
        "A1": ([1.5, 2.0], False),
        "A1-dcp": ([0.5, 0.5], True),
        "A1-dlrover": ([0.5, 2.0], False),
        "A1-first": ([2.0, 1.0], True),
        "A2": ([1.0, 1.0], True),
        "A2-dcp": ([2.0, 2.0], False),
    }


def test_the_row_of_a_participant() -> None:
    row = saves()["save dcp-thread"]
    assert (row.value, row.ok) == (0.35, None)
    assert row.details["durable_gib_per_second"] == 0.5
    assert row.details["cpu_seconds_per_gib"] == 0.25
    assert saves()["limit memcpy 2 threads"].value == 10.0


@pytest.mark.parametrize(
    ("missing", "ids", "reason"),
    [
        pytest.param("dlrover", ["A1-dlrover"], "dlrover: no grpc", id="a-peer"),
        pytest.param("memory and disk", ["A1", "A2"], "memory and disk: no grpc", id="the-limits"),
        pytest.param(
            "holdfast",
            ["A1", "A1-dcp", "A1-dlrover", "A1-first", "A2", "A2-dcp"],
            "holdfast: no grpc",
            id="ours",
        ),
    ],
)
def test_a_failed_run_is_named_and_never_passes(missing: str, ids: list[str], reason: str) -> None:
    found = saves(**{missing: ["no grpc"]})
    unmeasured = {f.id: f for f in found.values() if f.value is None and " " not in f.id}
    assert sorted(unmeasured) == ids
    for figure in unmeasured.values():
        assert (figure.ok, figure.details["reason"]) == (None, reason)
        assert figure.target is not None


def test_a_round_that_one_side_lost_is_left_out() -> None:
    found = saves(**{"dcp-thread": [saved(0.3, 2.0), "killed"]})
    assert found["A1-dcp"].details["values"] == [0.5]
    assert found["A1-dcp"].repetitions == 1


def looped(plain: float, extra: float) -> dict[str, Any]:
    pairs = [
        {"plain": plain, "with_save": plain + extra},
        {"plain": plain + 0.1, "with_save": plain + 0.1 + extra},
    ]
    return {"quiet": pairs, "busy": pairs, "steps": 10}


@pytest.mark.parametrize(
    ("ours", "theirs", "value", "ok"),
    [
        pytest.param(0.05, 0.5, 0.1, True, id="less"),
        pytest.param(0.4, 0.5, 0.8, False, id="more"),
        pytest.param(-0.02, 0.5, 0.0, True, id="faster-than-without-is-none"),
        pytest.param(0.0, 0.04, None, None, id="within-the-scatter"),
        pytest.param(0.0, -0.2, None, None, id="the-peer-came-out-negative"),
    ],
)
def test_loops(ours: float, theirs: float, value: float | None, ok: bool | None) -> None:
    found = by_id(
        of.of_loops(
            records("loops", **{"holdfast": [looped(3, ours)], "dcp-thread": [looped(3, theirs)]})
        )
    )
    for id_ in ("A3", "A3-busy"):
        assert (found[id_].value, found[id_].ok) == (value, ok)
    assert found["loop dcp-thread"].value == theirs


def test_loops_whose_extras_vary_more_than_the_cost_of_the_peer_give_no_result() -> None:
    given = {
        "holdfast": [looped(3, 0.0), looped(3, 0.0), looped(3, 0.0)],
        "dcp-thread": [looped(3, -0.2), looped(3, 0.3), looped(3, 1.4)],
    }
    found = by_id(of.of_loops(records("loops", **given)))
    assert (found["A3"].value, found["A3"].target) == (None, 0.25)
    assert found["A3"].details["dcp_extra_seconds"] == [-0.2, -0.2, 0.3, 0.3, 1.4, 1.4]


def test_loads() -> None:
    ours = {"bytes": GIB, "disk": [0.5, 0.5], "memory": [0.25, 0.25]}
    dcp = {"bytes": GIB, "disk": [1.0, 1.0], "memory": []}
    fast, slow = (
        {"O_DIRECT read": rate, "memcpy and CRC32C 2 threads": 5.0} for rate in (2.5, 2.0)
    )
    given: dict[str, list[dict[str, Any] | str]] = {
        "memory with CRC32C, and disk": [slow, fast, slow],
        "holdfast": [ours, ours, ours],
        "dcp-sync": [dcp, dcp, dcp],
    }
    found = by_id(of.of_loads(records("load", **given)))
    assert {id_: (found[id_].value, found[id_].ok) for id_ in ("A4", "A4-memory", "A4-dcp")} == {
        "A4": (0.8, False),
        "A4-memory": (1.25, True),
        "A4-dcp": (2.0, None),
    }
    assert found["A4"].details["of_the_same_round"] == [1.0, 0.8, 1.0]
    assert found["load dcp-sync"].value == 1.0
    assert found["limit O_DIRECT read"].value == 2.0


def uploaded(seconds: float, cpu: float) -> dict[str, Any]:
    return {"uploads": [{"seconds": seconds, "cpu": cpu, "server_cpu": 1.0}]}


def test_uploads_are_compared_where_the_server_costs_nothing() -> None:
    visits: dict[str, list[dict[str, Any] | str]] = {
        "holdfast": [uploaded(0.5, 0.13)],
        "bare sendfile": [uploaded(0.45, 0.1)],
        "boto3": [uploaded(2.0, 2.6)],
    }
    found = by_id(of.of_drained_uploads(records("drained upload", **visits), mib=512))
    assert (found["A5"].value, found["A5"].ok) == (0.9, True)
    assert (found["A5-cpu"].value, found["A5-cpu"].ok) == (1.3, False)
    assert (found["A5-boto3"].value, found["A5-boto3"].ok) == (4.0, None)
    assert (found["A5-boto3-cpu"].value, found["A5-boto3-cpu"].ok) == (0.05, None)
    assert found["drained upload boto3"].value == 0.25
    assert found["drained upload boto3"].details["cpu_seconds_per_gib"] == 5.2
    assert found["drained upload boto3"].details["server_cpu_seconds_per_gib"] == 2.0


def test_uploads_to_a_real_server_are_for_orientation() -> None:
    visits = {"holdfast": [uploaded(0.5, 0.1)], "boto3": [uploaded(2.0, 2.0)]}
    found = by_id(of.of_uploads(records("upload", **visits), mib=512))
    assert (found["A5-minio"].value, found["A5-minio"].ok) == (4.0, None)
    assert (found["A5-minio-cpu"].value, found["A5-minio-cpu"].ok) == (0.05, None)
    assert found["upload boto3"].value == 0.25


def test_copies_are_compared_with_the_faster_of_torchfts() -> None:
    def pulled(seconds: float) -> dict[str, Any]:
        return {"copies": [{"pull": seconds, "push": 4.0, "cpu": 1.0}]}

    found = by_id(
        of.of_copies(
            records(
                "copy",
                **{
                    "loopback": [{"loopback CRC32C": 4.0, "loopback TLS": 1.0}],
                    "holdfast": [pulled(1.25)],
                    "holdfast, not encrypted": [pulled(0.5)],
                    "torchft": [pulled(5.0)],
                    "torchft, 4 chunks": [pulled(2.0)],
                },
            ),
            mib=1024,
        )
    )
    assert (found["A6"].value, found["A6"].ok) == (0.5, False)
    assert (found["A6-torchft"].value, found["A6-torchft"].ok) == (4.0, None)
    assert (found["A6-torchft-tls"].value, found["A6-torchft-tls"].ok) == (1.6, None)
    assert found["A6-tls"].value == 0.8
    assert found["copy holdfast, durable"].value == 0.25


def test_reshard_is_as_good_as_its_worst_case() -> None:
    result = {"read_over_needed": {"rows 8 to 6": 1.05, "columns 4 to 2": 1.2}}
    (figure,) = of.of_reshard(records("reshard", holdfast=[result]))
    assert (figure.id, figure.value, figure.ok) == ("A10", 1.2, False)
    assert figure.details["cases"]["rows 8 to 6"] == 1.05


def test_digests() -> None:
    on, off = {"idle": [1.0], "chasing": [1.1, 1.1]}, {"idle": [1.0], "chasing": [1.0, 1.0]}
    given = {"holdfast-digests-on": [on, on], "holdfast-digests-off": [off, off]}
    (found,) = of.of_digests(records("digests", **given))
    assert (found.value, found.ok, found.repetitions) == (1.1, False, 2)
    assert found.details["idle_ratios"] == [1.0, 1.0]


def test_many_tensors() -> None:
    result = {"first": [0.9, 0.8], "blocked": [0.06, 0.08, 0.07], "memcpy": 0.05}
    (found,) = of.of_many(records("many", holdfast=[result]))
    assert (found.id, found.value, found.ok) == ("A1-many", 1.4, True)


def test_every_step() -> None:
    result = {"plain": [2.0, 2.0], "saving": [2.08, 2.08], "lags": [1, 2], "step_over_memcpy": 40.0}
    found = by_id(of.of_every_step(records("every-step", holdfast=[result])))
    assert (found["A11"].value, found["A11"].ok) == (0.015, True)
    assert found["A11"].details["with_the_memcpy"] == [0.04]
    assert (found["A11-lost"].value, found["A11-lost"].ok) == (2, False)
    assert found["A11"].details["step_over_memcpy"] == [40.0]


def test_a_round_whose_steps_were_too_short_does_not_count() -> None:
    result = {"plain": [2.0], "saving": [3.0], "lags": [2], "step_over_memcpy": 29.0}
    for figure in of.of_every_step(records("every-step", holdfast=[result])):
        assert (figure.value, figure.ok) == (None, None)
        assert figure.details["reason"] == "no step was 30 times the memcpy of the state"


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        pytest.param([], sorted(UNMEASURED), id="all"),
        pytest.param(["A9"], ["A9"], id="one"),
        pytest.param(["A1"], [], id="none"),
    ],
)
def test_what_cannot_be_done_yet_has_a_reason(only: list[str], expected: list[str]) -> None:
    found = of.unmeasured(only)
    assert sorted(f.id for f in found) == expected
    assert all(f.value is None and f.ok is None and f.details["reason"] for f in found)
