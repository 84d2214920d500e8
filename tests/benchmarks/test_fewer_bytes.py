"""A7, as the benchmark counts it, holds."""

from __future__ import annotations

from benchmarks.datapath.fewer_bytes import ratios, targets


def test_every_case_is_within_its_target() -> None:
    state_bytes = 32 << 20
    found, allowed = ratios(state_bytes), targets(state_bytes)
    assert found.keys() == allowed.keys()
    for name, value in found.items():
        assert 0 < value <= allowed[name], name
