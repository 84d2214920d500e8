"""Keys that would become names which the format reserves are refused by the first save, with their path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast_core.errors import UnsupportedStateError

TENSOR = np.ones(2)


@pytest.mark.fault("A state has keys that the format reserves")
@pytest.mark.parametrize(
    ("state", "path"),
    [
        ({"$tensor": TENSOR}, "$tensor"),
        ({"a\udcff": TENSOR}, "udcff"),
        ({"__metadata__": TENSOR}, "__metadata__"),
        ({"__holdfast_objects__": TENSOR}, "__holdfast_objects__"),
        ({"w@rank0": TENSOR}, "w@rank0"),
        ({"m": {"w@rank12~2": TENSOR}}, "m.w@rank12~2"),
        ({"m": {"a\0": TENSOR}}, "without NUL"),
        ({"m": {"a" * 5000: TENSOR}}, "at most"),
    ],
)
def test_a_reserved_name_is_refused_with_its_path(
    tmp_path: Path, state: dict[str, Any], path: str
) -> None:
    with (
        holdfast.Checkpointer(dir=tmp_path, interval_steps=0, on_save_error="raise") as ckpt,
        pytest.raises(UnsupportedStateError) as raised,
    ):
        ckpt.save(1, state)
    assert path in str(raised.value)


@pytest.mark.parametrize(
    "state",
    [
        {"m": {"$tensor": 5, "__metadata__": TENSOR}},
        {"w@rank": TENSOR, "v@rank0.x": TENSOR},
        {"w@rank0": 5, "s": "\udcff", "k": {"\udcff": 1}},
        {"d": np.longdouble(1.5), "c": np.clongdouble(1)},
    ],
)
def test_a_similar_name_is_kept(tmp_path: Path, state: dict[str, Any]) -> None:
    with holdfast.Checkpointer(dir=tmp_path, interval_steps=0, on_save_error="raise") as ckpt:
        ckpt.save(1, state).wait("local")
        assert ckpt.restore(state) == 1
