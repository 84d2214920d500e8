"""`holdfast merge` writes the weighted mean of several checkpoints, with the same bits always."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.support import zygote
from tests.support.crash.failpoints import PANIC_EXIT_CODE, in_every_python
from tests.support.hang import HANG_SECONDS
from tests.support.shards.folders import damage, write_checkpoint
from tests.support.shards.placements import Tensor

import holdfast
from holdfast.__main__ import main
from holdfast.base.settings import current_environment
from holdfast.convert import merging

Array = np.ndarray[Any, Any]
KINDS = {"F16": np.float16, "F32": np.float32, "F64": np.float64, "BF16": np.uint16}


def merge(*words: object) -> int:
    return main(["merge", *map(str, words)])


def source(folder: Path, step: int, tensors: dict[str, tuple[str, Array]], ranks: int = 1) -> str:
    """Write a checkpoint whose tensors are cut along their first dimension, and return its name."""
    given = {
        f"model.{name}": (Tensor(dtype, array.shape, (0,) if array.ndim else None), array)
        for name, (dtype, array) in tensors.items()
    }
    write_checkpoint(folder, given, [ranks], step=step)
    return f"{folder}@{step}"


def floats(data: Array, dtype: str) -> list[float]:
    if dtype == "BF16":
        data = (data.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(invalid="ignore"):  # signaling NaNs
        return [float(value) for value in data.astype(np.float64)]


def nearest(value: float, dtype: str) -> float:
    """Return the value of the type that is nearest to a float64, by comparing exact fractions."""
    if dtype == "F64" or not np.isfinite(value):
        return value
    if dtype == "F32":
        with np.errstate(over="ignore"):
            low = int(np.float32(abs(value)).view(np.uint32))
        around = np.array([max(low, 1) - 1, low, low + 1], np.uint32).view(np.float32)
    elif dtype == "F16":
        around = np.arange(1 << 15, dtype=np.uint16).view(np.float16)
    else:
        around = (np.arange(1 << 15, dtype=np.uint32) << np.uint32(16)).view(np.float32)
    finite = [float(one) for one in around if np.isfinite(one)]
    # Where the power of two above the largest value is nearest, the result is infinite.
    finite.append(_BEYOND[dtype])
    near = sorted(finite, key=lambda one: abs(one - abs(value)))[:4]
    exact = Fraction(abs(value))
    found = min(near, key=lambda one: (abs(Fraction(one) - exact), not _is_even(one, dtype)))
    return float(np.copysign(np.inf if found == _BEYOND[dtype] else found, value))


_BEYOND = {"F16": 2.0**16, "F32": 2.0**128, "BF16": 2.0**128}


def _is_even(value: float, dtype: str) -> bool:
    if value == _BEYOND[dtype]:
        return True
    if dtype == "F16":
        return not int(np.float16(value).view(np.uint16)) & 1
    bits = int(np.float32(value).view(np.uint32))
    return not (bits >> 16 if dtype == "BF16" else bits) & 1


patterns = st.integers(0, (1 << 64) - 1)
weight = st.floats(1e-3, 1e3)


@given(
    dtype=st.sampled_from(sorted(KINDS)),
    rows=st.lists(st.lists(patterns, min_size=4, max_size=4), min_size=2, max_size=5),
    weights=st.lists(weight, min_size=5, max_size=5),
)
@example(
    dtype="BF16", rows=[[0x3F80, 0x3F81, 0x7F7F, 1], [0x3F81, 0x3F82, 0x7F7F, 2]], weights=[1.0] * 5
)
@example(dtype="F16", rows=[[0x7BFF, 1, 2, 0x8000]] * 2, weights=[1.0] * 5)
def test_each_element_is_summed_in_float64_and_rounded_once(
    dtype: str, rows: list[list[int]], weights: list[float]
) -> None:
    """The oracle sums Python's floats one by one, and rounds by exact fractions."""
    stored = [
        np.array(row, np.uint64).astype(f"u{np.dtype(KINDS[dtype]).itemsize}").view(KINDS[dtype])
        for row in rows
    ]
    used = weights[: len(rows)]
    parts = [data.view(np.uint8) for data in stored]
    with np.errstate(all="ignore"):
        means = merging.weighted_mean(parts, dtype, used, 1.0, dtype)
    found = floats(means.view(KINDS[dtype]), dtype)
    for at in range(4):
        expected = 0.0
        for data, one in zip(stored, used, strict=True):
            expected += one * floats(data, dtype)[at]
        rounded = nearest(expected, dtype)
        assert found[at] == rounded or (np.isnan(found[at]) and np.isnan(expected))


def model(step: int) -> dict[str, tuple[str, Array]]:
    generator = np.random.Generator(np.random.PCG64(step))
    wide = generator.integers(0, 1 << 32, (300, 64), np.uint32) & np.uint32(0xBFFFFFFF)
    return {
        "wide": ("F32", wide.view(np.float32)),
        "half": ("BF16", (wide[:, :8] >> np.uint32(16)).astype(np.uint16)),
        "f16": ("F16", (generator.integers(-999, 999, 33) / 7).astype(np.float16)),
        "f64": ("F64", generator.integers(-(10**9), 10**9, 5) / 3),
        "count": ("I64", np.array(step)),
        "mask": ("BOOL", np.array([step % 2, 1, 0], np.bool_)),
        "empty": ("F32", np.empty((0, 3), np.float32)),
    }


def digest(out: Path) -> str:
    return hashlib.blake2b((out / "model.safetensors").read_bytes(), digest_size=16).hexdigest()


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("mean", "5c0bf86384cd1b9e3bb6356871df5342"),
        ("ema:0.9", "cef629111ef6dc35569267be20e73871"),
        ("weights:0.2,0.3,0.5", "dd99bfa72763a43f43e732a6a2441906"),
    ],
)
def test_the_bits_are_the_same_for_all_threads_and_ranks_and_on_every_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, expected: str
) -> None:
    """The digests are those of one machine. Another processor or numpy must not change them."""
    whole = [source(tmp_path / "whole", step, model(step)) for step in (1, 2, 3)]
    cut = [source(tmp_path / "cut", step, model(step), ranks=4) for step in (1, 2, 3)]
    monkeypatch.setattr(merging, "PART_BYTES", 4096)
    found = []
    for number, (sources, threads) in enumerate([(whole, 1), (whole, 8), (cut, 1), (cut, 8)]):
        out = tmp_path / str(number)
        assert merge(*sources, "--method", method, "--to", out, "--threads", threads) == 0
        found.append(digest(out))
    assert found == [expected] * 4


def test_the_order_of_the_sources_changes_nothing(tmp_path: Path) -> None:
    one, two, three = (source(tmp_path / "ckpt", step, model(step)) for step in (1, 2, 3))
    assert merge(one, two, three, "--method", "ema:0.5", "--to", tmp_path / "a") == 0
    assert merge(two, three, one, "--method", "ema:0.5", "--to", tmp_path / "b") == 0
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    words = ["--method", "weights:1,2,3", "--to", tmp_path / "c"]
    assert merge(one, two, three, *words) == 0
    words = ["--method", "weights:3,1,2", "--to", tmp_path / "d"]
    assert merge(three, one, two, *words) == 0
    assert digest(tmp_path / "c") == digest(tmp_path / "d")


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("mean", (2.0 + 4.0 + 12.0) / 3),
        ("ema:0.75", 0.75 * (0.75 * 2.0 + 0.25 * 4.0) + 0.25 * 12.0),
        ("weights:2,1,1", (2 * 2.0 + 4.0 + 12.0) / 4),
    ],
)
def test_a_method_weights_the_sources(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str, expected: float
) -> None:
    values = {10: 2.0, 20: 4.0, 30: 12.0}
    for step, value in values.items():
        source(
            tmp_path / "ckpt", step, {"w": ("F64", np.full(3, value)), "n": ("I64", np.array(step))}
        )
    sources = [f"{tmp_path / 'ckpt'}@{step}" for step in values]
    assert merge(*sources, "--method", method, "--to", tmp_path / "out") == 0
    found = load_file(tmp_path / "out/model.safetensors")
    assert found["w"].tolist() == [expected] * 3
    assert found["n"].item() == 30  # a number is that of the newest step
    assert "merged 2 tensors of model into" in capsys.readouterr().out


def test_a_type_is_reached_by_one_conversion(tmp_path: Path) -> None:
    """1 + 2^-8 + 2^-30 is above the middle of two values of bfloat16, and float32 would round it to it."""
    values = [np.array([1.0 + 2.0**-7 + 2.0**-29]), np.array([1.0])]
    sources = [source(tmp_path / "ckpt", step, {"w": ("F64", values[step])}) for step in (0, 1)]
    words = ["--method", "mean", "--to", tmp_path / "out", "--dtype", "bfloat16"]
    assert merge(*sources, *words) == 0
    found = load_file(tmp_path / "out/model.safetensors")["w"]
    assert found.dtype == torch.bfloat16
    assert found.item() == 1 + 2.0**-7


def test_complex_numbers_are_merged_by_their_parts(tmp_path: Path) -> None:
    for step, value in ((1, 1 + 2j), (2, 3 - 4j)):
        source(tmp_path / "ckpt", step, {"z": ("C64", np.full(3, value, np.complex64))})
    sources = [f"{tmp_path / 'ckpt'}@{step}" for step in (1, 2)]
    words = ["--method", "mean", "--to", tmp_path / "out", "--dtype", "float16"]
    assert merge(*sources, *words) == 0
    assert load_file(tmp_path / "out/model.safetensors")["z"].tolist() == [2 - 1j] * 3


def test_a_merge_is_imported_and_trained_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = torch.nn.Linear(2, 2)
    state = {"model": net, "optim": torch.optim.AdamW(net.parameters()), "epoch": 3}
    with holdfast.Checkpointer(tmp_path / "ckpt", when_busy="wait") as ckpt:
        for step in (1, 3):
            with torch.no_grad():
                net.weight.fill_(step)
            ckpt.save(step, state).wait(timeout=HANG_SECONDS)
    folder = tmp_path / "ckpt"
    assert merge(f"{folder}@1", folder, "--method", "mean", "--to", tmp_path / "out") == 0
    out = capsys.readouterr().out
    assert f"0.500000  {folder}@3" in out
    assert "not merged: other entries of the state (epoch, optim); a merge has no optimizer" in out
    words = ["--format", "hf", "--to", str(tmp_path / "next")]
    assert main(["import", str(tmp_path / "out"), *words]) == 0
    other = torch.nn.Linear(2, 2)
    state = {"model": other, "optim": torch.optim.AdamW(other.parameters())}
    with holdfast.Checkpointer(tmp_path / "next", strict=False) as ckpt:
        assert list(ckpt.steps(1, state)) == [0]
    assert other.weight.tolist() == [[2.0, 2.0]] * 2
    assert torch.equal(other.bias, net.bias)


# ------------------------------------------------------------------------ metrics


@pytest.fixture
def reported(tmp_path: Path) -> Path:
    """Return a folder with steps 1 to 3, of which 2 and 3 have metrics."""
    with holdfast.Checkpointer(tmp_path / "ckpt", when_busy="wait") as ckpt:
        for step, metrics in (
            (1, {}),
            (2, {"loss": 0.5, "acc": 1.0}),
            (3, {"loss": 0.25, "acc": 3}),
        ):
            ckpt.report(**metrics)
            ckpt.save(step, {"model": {"w": torch.full((2,), float(step))}}).wait(
                timeout=HANG_SECONDS
            )
        state = {"model": {"w": torch.zeros(2)}}
        ckpt.restore(state)  # as without metrics
    assert state["model"]["w"].tolist() == [3.0, 3.0]
    return tmp_path / "ckpt"


def test_a_checkpoint_keeps_what_was_reported(reported: Path) -> None:
    with holdfast.open(reported) as opened:
        found = [opened.at(step).metrics() for step in (1, 2, 3)]
    assert found == [{}, {"loss": 0.5, "acc": 1.0}, {"loss": 0.25, "acc": 3.0}]


@pytest.mark.parametrize(
    ("method", "expected"),
    [("metric:loss", (2 * 2 + 4 * 3) / 6), ("metric:loss:min", 16 / 6), ("metric:acc:max", 11 / 4)],
)
def test_a_metric_weights_the_sources(
    reported: Path, tmp_path: Path, method: str, expected: float
) -> None:
    sources = [f"{reported}@2", f"{reported}@3"]
    assert merge(*sources, "--method", method, "--to", tmp_path / "out") == 0
    found = load_file(tmp_path / "out/model.safetensors")["w"]
    assert found.tolist() == [float(np.float32(expected))] * 2


def test_sources_may_be_in_a_store_and_have_their_metrics_there(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    store = f"file://{tmp_path / 'store'}"
    folder = holdfast.Folder(tmp_path / "ckpt", store=store)
    with holdfast.Checkpointer(folder, interval_steps=0) as ckpt:
        for step, loss in ((1, 1.0), (2, 0.5)):
            ckpt.report(loss=loss)
            ckpt.save(step, {"model": {"w": np.full(64, float(step))}}).wait("persisted")
    sources = [f"{store}@1", f"{tmp_path / 'ckpt'}@2", store]
    assert merge(*sources, "--method", "metric:loss", "--to", tmp_path / "out") == 0
    found = load_file(tmp_path / "out/model.safetensors")["w"]
    assert found.tolist() == [(1.0 + 2 * 2.0 + 2 * 2.0) / 5] * 64


# ------------------------------------------------------------------------ bad input


def other(step: int, name: str, value: tuple[str, Array] | None) -> dict[str, tuple[str, Array]]:
    found = {"w": ("F32", np.ones((2, 3), np.float32)), "n": ("I64", np.array(step))}
    if value is None:
        del found[name]
    else:
        found[name] = value
    return found


@pytest.mark.fault("Checkpoints to merge differ in names, shapes or types of their tensors")
@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        (other(2, "w", None), "tensor 'w' is in .*ckpt@1, but not in .*ckpt@2"),
        (other(2, "b", ("F32", np.ones(1, np.float32))), "tensor 'b' is in .*@2, but not in .*@1"),
        (
            other(2, "w", ("F32", np.ones((3, 2), np.float32))),
            r"tensor 'w' has the shape \[2, 3\] in .*@1 and \[3, 2\] in .*@2",
        ),
        (
            other(2, "w", ("F16", np.ones((2, 3), np.float16))),
            "tensor 'w' has the type float32 in .*@1 and float16 in .*@2",
        ),
        (other(2, "n", ("I32", np.array(2, np.int32))), "tensor 'n' has the type int64 in .*@1"),
    ],
    ids=["missing", "more", "shape", "type", "integers"],
)
def test_checkpoints_that_differ_are_refused_by_name(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    tensors: dict[str, tuple[str, Array]],
    text: str,
) -> None:
    sources = [source(tmp_path / "ckpt", 1, other(1, "n", ("I64", np.array(1))))]
    sources.append(source(tmp_path / "ckpt", 2, tensors))
    assert merge(*sources, "--method", "mean", "--to", tmp_path / "out") == 1
    assert re.search(text, capsys.readouterr().err)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt"]


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (["{}@2", "{}@9"], 5, "expected step 9, found steps 1, 2, 3"),
        (["{}@2", "./nowhere@3"], 5, "there is no folder ./nowhere"),
        (["{}@2"], 2, "expected at least two sources"),
        (["{}@2", "{}@3", "--entry", "net"], 2, "no tensors below 'net'"),
        (["{}@2", "{}@3", "--to", "{}"], 6, "exists already"),
        (["{}@2", "{}@3", "--config-from", "nowhere"], 2, "expected a config.json"),
        (["{}@2", "{}@3", "--method", "median"], 2, "--method median: expected mean, ema:DECAY"),
        (["{}@2", "{}@3", "--method", "ema"], 2, "--method ema: expected mean"),
        (["{}@2", "{}@3", "--method", "ema:1"], 2, "expected a decay between 0 and 1"),
        (["{}@2", "{}@3", "--method", "weights:1,x"], 2, "expected finite numbers"),
        (["{}@2", "{}@3", "--method", "weights:1,nan"], 2, "expected finite numbers"),
        (["{}@2", "{}@3", "--method", "weights:1,0"], 2, "expected weights above 0"),
        (["{}@2", "{}@3", "--method", "weights:1"], 2, "1 weights for 2 sources"),
        (["{}@2", "{}@3", "--method", "metric:"], 2, "expected mean, ema:DECAY"),
        (["{}@2", "{}@3", "--method", "metric:val"], 2, "@2 has no metric 'val' (has acc, loss)"),
        (
            ["{}@2", "{}@1", "--method", "metric:loss"],
            2,
            "@1 has no metric 'loss' (has no metrics)",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input(
    reported: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: Sequence[str],
    status: int,
    text: str,
) -> None:
    given = [word.format(reported) for word in words]
    if "--to" not in given:
        given += ["--to", str(tmp_path / "out")]
    if "--method" not in given:
        given += ["--method", "mean"]
    assert merge(*given) == status
    assert text in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt"]


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_a_metric_without_a_weight_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: float
) -> None:
    with holdfast.Checkpointer(tmp_path / "ckpt", when_busy="wait") as ckpt:
        for step in (1, 2):
            ckpt.report(loss=value)
            ckpt.save(step, {"model": {"w": torch.ones(2)}}).wait(timeout=HANG_SECONDS)
    sources = [f"{tmp_path / 'ckpt'}@{step}" for step in (1, 2)]
    assert merge(*sources, "--method", "metric:loss", "--to", tmp_path / "out") == 2
    assert f"metric 'loss' is {value!r}: expected a value above 0" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.complex128], ids=str)
def test_a_type_that_cannot_be_merged_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: torch.dtype
) -> None:
    with holdfast.Checkpointer(tmp_path / "ckpt", when_busy="wait") as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"model": {"w": torch.ones(2).to(kind)}}).wait(timeout=HANG_SECONDS)
    sources = [f"{tmp_path / 'ckpt'}@{step}" for step in (1, 2)]
    assert merge(*sources, "--method", "mean", "--to", tmp_path / "out") == 1
    name = str(kind).removeprefix("torch.")
    assert f"tensor 'w' of {sources[1]} has the type {name}" in capsys.readouterr().err


# ------------------------------------------------------------------------ faults


@pytest.mark.fault("A merge is killed before or between its files, or before its rename")
@pytest.mark.parametrize("where", ["export.file_written", "export.before_rename"])
def test_a_killed_merge_leaves_no_folder_that_looks_complete_and_can_be_repeated(
    tmp_path: Path, where: str
) -> None:
    sources = [source(tmp_path / "ckpt", step, model(step)) for step in (1, 2)]
    words = ["merge", *sources, "--method", "mean", "--to", str(tmp_path / "out")]
    ended = zygote.run(
        [sys.executable, "-m", "holdfast", *words],
        env={**current_environment(), **in_every_python(tmp_path, f"{where}=panic")},
    )
    assert ended.returncode == PANIC_EXIT_CODE
    assert not (tmp_path / "out").exists()
    assert main(words) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert not (tmp_path / "out.holdfast-partial").exists()


@pytest.mark.fault("A byte of a shard changed, while checkpoints are merged")
def test_damaged_bytes_are_not_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = {"w": ("F32", np.ones((1 << 16, 4), np.float32))}
    sources = [source(tmp_path / name, 1, large) for name in ("one", "two")]
    path = damage(tmp_path / "two", 0, offset=700_000)
    assert merge(*sources, "--method", "mean", "--to", tmp_path / "out", "--threads", 4) == 3
    assert str(path) in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
