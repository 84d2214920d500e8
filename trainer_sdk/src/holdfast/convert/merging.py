"""Merges the weights of several checkpoints: weighted means, with the same bits on every machine.

Each element is summed in float64, source by source from the oldest step to the newest, and converted once. A
product and a sum are two operations of numpy, so that no processor fuses them. Threads share the parts of
the tensors, and each part is summed by one thread: the number of threads changes no bit.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.convert.exporting import DEFAULT_ENTRY, complete_folder, copy_config, expect_config
from holdfast.convert.safetensors_files import Progress, write_model
from holdfast.convert.selection import CASTS, PartMaker, entry_of
from holdfast.reading.checkpoint import Box, LazyTensor, SavedCheckpoint
from holdfast.reading.opening import Checkpoints, open_checkpoints
from holdfast_core.errors import ConfigError, StateMismatchError, UnsupportedStateError
from holdfast_core.tiers.sources import wait_all

MAX_THREADS = 8
PART_BYTES = 2 << 20
"""The most stored bytes that a thread reads of one source at a time."""
_PARTS_BYTES = 64 << 20
"""Stored bytes of the parts of all sources that all threads hold."""
_OPEN_SHARDS = 48
"""Shards of all sources that stay open between two reads. Each may keep a buffer as long as a part."""
_BLOCK_ELEMENTS = 1 << 15
"""Elements that are converted at a time, so that they stay in the processor's cache."""
_FLOATS = {"F16": np.float16, "F32": np.float32, "F64": np.float64}
_BFLOAT = "BF16"
_COMPLEX = {"C64": "F32"}
"""Types whose real and imaginary parts are merged, with the type of each."""
_SCALED = ("F8_E5M2", "F8_E4M3", "F8_E8M0")

Floats = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class SourceStep:
    """A checkpoint to merge, as it is named on the command line."""

    place: str
    """Folder of checkpoints, or URL of a store."""
    step: int | None
    """None: the checkpoint that a restore would choose."""


@dataclass(frozen=True, slots=True)
class Method:
    """How much each source counts. The weights need not add up to 1: the sum is divided by theirs."""

    name: str
    values: tuple[float, ...] = ()
    """The weights, or the decay."""
    metric: str = ""
    is_highest_best: bool = False
    """Whether a source counts in proportion to its value of the metric. If not, to the inverse."""

    @classmethod
    def parse(cls, text: str) -> Method:
        """Parse `mean`, `ema:DECAY`, `weights:W1,W2,...`, `metric:NAME` or `metric:NAME:max`.

        Raises ConfigError.
        """
        name, colon, rest = text.partition(":")
        if text == "mean":
            return cls("mean")
        if name == "ema" and colon:
            (decay,) = values = _numbers(text, [rest])
            if not 0 < decay < 1:
                raise ConfigError(
                    f"--method {text}: expected a decay between 0 and 1, such as ema:0.9"
                )
            return cls(name, values)
        if name == "weights" and colon:
            values = _numbers(text, rest.split(","))
            if min(values) <= 0:
                raise ConfigError(
                    f"--method {text}: expected weights above 0: leave a source out instead of the weight 0"
                )
            return cls(name, values)
        if name == "metric" and rest:
            metric, _, mode = rest.rpartition(":")
            if mode in ("min", "max") and metric:
                return cls(name, metric=metric, is_highest_best=mode == "max")
            return cls(name, metric=rest)
        raise ConfigError(
            f"--method {text}: expected mean, ema:DECAY, weights:W1,W2,... or metric:NAME, as in ema:0.9"
        )

    def weights(self, count: int) -> tuple[float, ...]:
        """Return the weight of each source, in the order of the command line, or of steps for ema."""
        if self.name == "mean":
            return (1.0,) * count
        if self.name == "weights":
            if len(self.values) != count:
                raise ConfigError(
                    f"--method weights: {len(self.values)} weights for {count} sources: expected one for "
                    "each source, in the order in which they are given"
                )
            return self.values
        # As average = decay * average + (1 - decay) * newer, beginning with the oldest. Products only: a
        # power may be rounded in another way by another C library.
        (decay,) = self.values
        found = [1.0]
        for _ in range(count - 1):
            found = [decay * weight for weight in found] + [1.0 - decay]
        return tuple(found)


def _numbers(text: str, parts: Sequence[str]) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in parts)
    except ValueError:
        found = (math.nan,)
    if not all(map(math.isfinite, found)):
        raise ConfigError(f"--method {text}: expected finite numbers after the colon")
    return found


@dataclass(frozen=True, slots=True)
class Merge:
    """What to merge, and where to."""

    sources: tuple[SourceStep, ...]
    method: Method
    target: Path
    entry: str = DEFAULT_ENTRY
    """Entry of the state whose tensors are merged."""
    dtype: str | None = None
    """Type to convert floating-point tensors to. None: as saved."""
    config_from: Path | None = None
    """Folder with config.json, tokenizer and other files to copy."""
    threads: int | None = None
    """None: as many as processors, at most 8."""


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What a merge has written."""

    tensors: int
    sources: tuple[str, ...]
    """The checkpoints, from the oldest step to the newest."""
    shares: tuple[float, ...]
    """The share of each of them."""
    left_out: tuple[str, ...]
    """Entries of the newest state that were not merged."""


class _Source:
    """One open checkpoint. Threads share it, one at a time."""

    def __init__(self, place: str, saved: SavedCheckpoint, entry: str) -> None:
        self.saved = saved
        self.name = f"{place}@{saved.step}"
        exported = entry_of(saved, entry, None)
        self.tensors = {name: one.tensor for name, one in exported.items()}
        self._lock = threading.Lock()

    def read(self, name: str, box: Box) -> Floats:
        """Return the stored bytes of a box. Raises CorruptionError, NotFoundError."""
        with self._lock:
            return self.tensors[name].read_stored(box)


@dataclass(frozen=True, slots=True)
class _MergedTensor:
    """A tensor of the merge, as `safetensors_files.Writable`. Its parts are summed when they are written."""

    name: str
    like: LazyTensor
    """The tensor of the newest source."""
    sources: Sequence[_Source]
    weights: Sequence[float]
    total: float
    stored_dtype: str
    part_bytes: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.like.shape

    def parts(self) -> Iterator[PartMaker]:
        make = self._merged if _part_of(self.stored_dtype) else self._copied
        for box in self.like.boxes(self.part_bytes):
            yield partial(make, box)

    def _copied(self, box: Box) -> memoryview:
        return self.sources[-1].read(self.name, box).data

    def _merged(self, box: Box) -> memoryview:
        stored = _part_of(self.like.stored_dtype)
        parts = [source.read(self.name, box) for source in self.sources]
        # Infinities and NaNs of the sources are not errors of the merge.
        with np.errstate(over="ignore", invalid="ignore"):
            found = weighted_mean(
                parts, stored, self.weights, self.total, _part_of(self.stored_dtype)
            )
        return found.data


def _part_of(dtype: str) -> str:
    """Return the floating-point type of the numbers of a stored type, or "" for one that is not summed."""
    dtype = _COMPLEX.get(dtype, dtype)
    return dtype if dtype == _BFLOAT or dtype in _FLOATS else ""


def weighted_mean(
    parts: Sequence[Floats], stored: str, weights: Sequence[float], total: float, dtype: str
) -> Floats:
    """Return the bytes of the weighted means in a type, each rounded once, to the nearest and ties to even.

    Args:
        parts: The bytes of the same elements of all sources, in the order of the sum.
        stored: Their type.
        weights: How much each source counts.
        total: By what the sums are divided.
        dtype: The type of the means.
    """
    values = [part.view(np.uint16 if stored == _BFLOAT else _FLOATS[stored]) for part in parts]
    count = len(values[0])
    found = np.empty(count, np.uint16 if dtype == _BFLOAT else _FLOATS[dtype])
    size = min(count, _BLOCK_ELEMENTS)
    sums, products = np.empty(size, np.float64), np.empty(size, np.float64)
    patterns = np.empty(size, np.uint32)
    # Block by block, so that the sums stay in the processor's cache.
    for start in range(0, count, _BLOCK_ELEMENTS):
        stop = min(start + _BLOCK_ELEMENTS, count)
        n = stop - start
        block, product, wide = sums[:n], products[:n], patterns[:n]
        block.fill(0.0)
        for source, weight in zip(values, weights, strict=True):
            part = source[start:stop]
            if stored == _BFLOAT:  # the upper half of a float32
                wide[:] = part
                wide <<= np.uint32(16)
                part = wide.view(np.float32)
            product[:] = part
            if weight != 1.0:
                product *= weight
            block += product
        block /= total
        is_nan = np.isnan(block)
        if is_nan.any():
            block[is_nan] = np.nan  # processors differ in sign and payload of those that they make
        found[start:stop] = _bfloat(block) if dtype == _BFLOAT else block.astype(found.dtype)
    return found.view(np.uint8)


def _bfloat(values: Floats) -> Floats:
    """Return the bits of bfloat16, in 32 bits each.

    The way is by float32 rounded to odd: towards zero, and with the last bit set if something was cut off.
    The nearest float32 may be the middle between two values of bfloat16, and would be rounded again.
    """
    nearest = values.astype(np.float32)
    back = nearest.astype(np.float64)
    bits = nearest.view(np.uint32)
    is_inexact = back != values
    bits -= np.abs(back, out=back) > np.abs(values)
    bits |= is_inexact
    last = bits >> np.uint32(16)
    last &= np.uint32(1)
    bits += np.uint32(0x7FFF)
    bits += last
    bits >>= np.uint32(16)
    return bits


def merge(wanted: Merge, progress: Progress = lambda written, total: None) -> MergeReport:
    """Write the merged tensors as safetensors files. The output appears completely or not at all.

    Raises ConfigError for a target that exists and for weights that do not fit the sources,
    StateMismatchError for sources that differ, UnsupportedStateError for a type that cannot be merged,
    NotFoundError, CorruptionError, and errors of the disk.
    """
    expect_config(wanted.config_from)
    if len(wanted.sources) < 2:
        raise ConfigError("merge: expected at least two sources, as in ckpt@100 ckpt@200")
    threads = wanted.threads or min(MAX_THREADS, len(os.sched_getaffinity(0)))
    with ExitStack() as stack:
        sources, weights = _opened(wanted, stack)
        part_bytes = min(PART_BYTES, max(1, _PARTS_BYTES // (threads * len(sources))))
        tensors = _merged(sources, weights, wanted.dtype, part_bytes)
        newest = sources[-1].saved
        with complete_folder(wanted.target) as partial_folder:
            with ThreadPoolExecutor(threads, "holdfast-merge") as pool:
                run = partial(_in_order, pool, threads + 1)
                write_model(partial_folder, tensors, run=run, progress=progress)
            copy_config(wanted.config_from, partial_folder)
        return MergeReport(
            len(tensors),
            tuple(source.name for source in sources),
            tuple(weight / math.fsum(weights) for weight in weights),
            tuple(sorted(newest.objects().keys() - {wanted.entry})),
        )


def _opened(wanted: Merge, stack: ExitStack) -> tuple[Sequence[_Source], Sequence[float]]:
    """Open the sources. Return them and their weights, from the oldest step to the newest.

    Of equal steps, the one that was given last is the newest.
    """
    places: dict[str, Checkpoints] = {}
    sources = []
    open_shards = max(1, _OPEN_SHARDS // len(wanted.sources))
    for given in wanted.sources:
        if given.place not in places:
            places[given.place] = stack.enter_context(open_checkpoints(given.place))
        saved = stack.enter_context(places[given.place].at(given.step))
        saved.keep_open(open_shards)
        sources.append(_Source(given.place, saved, wanted.entry))
    given_weights = (
        tuple(_by_metric(source, wanted.method) for source in sources)
        if wanted.method.metric
        else wanted.method.weights(len(sources))
    )
    order = sorted(range(len(sources)), key=lambda i: sources[i].saved.step)
    if wanted.method.name != "ema":
        given_weights = tuple(given_weights[i] for i in order)
    return [sources[i] for i in order], given_weights


def _by_metric(source: _Source, method: Method) -> float:
    """Return the weight of a source by its value of the metric."""
    found = source.saved.metrics()
    value = found.get(method.metric)
    if value is None:
        has = f"has {', '.join(sorted(found))}" if found else "has no metrics"
        raise ConfigError(
            f"{source.name} has no metric {method.metric!r} ({has}): a script reports it by ckpt.report(...) "
            "before the save; give the weights by --method weights:... instead"
        )
    weight = value if method.is_highest_best else 1.0 / value if value > 0 else math.inf
    if not 0 < weight < math.inf:
        raise ConfigError(
            f"{source.name}: metric {method.metric!r} is {value!r}: expected a value above 0; give the "
            "weights by --method weights:... instead"
        )
    return weight


def _merged(
    sources: Sequence[_Source], weights: Sequence[float], dtype: str | None, part_bytes: int
) -> Mapping[str, _MergedTensor]:
    """Return the merged tensors by name. Raises StateMismatchError, UnsupportedStateError."""
    newest, total, found = sources[-1], 0.0, {}
    for weight in weights:
        total += weight
    for name in sorted({name for source in sources for name in source.tensors}):
        for source in sources:
            _expect_same(name, source, newest)
        like = newest.tensors[name]
        kind = _part_of(like.stored_dtype)
        if like.is_raw or like.stored_dtype in _SCALED:
            raise UnsupportedStateError(
                f"tensor {name!r} of {newest.name} has the type {like.dtype_name}, which is not merged: its "
                "values need a scale, or safetensors does not have it. Merge before the conversion to this "
                "type"
            )
        stored = CASTS[dtype] if dtype and kind and like.stored_dtype not in _COMPLEX else ""
        found[name] = _MergedTensor(
            name, like, sources, weights, total, stored or like.stored_dtype, part_bytes
        )
    return found


def _expect_same(name: str, source: _Source, newest: _Source) -> None:
    one, other = source.tensors.get(name), newest.tensors.get(name)
    if one is None or other is None:
        there, missing = (newest, source) if one is None else (source, newest)
        raise StateMismatchError(
            f"tensor {name!r} is in {there.name}, but not in {missing.name}: merge checkpoints of one model"
        )
    for what, a, b in (
        ("shape", list(one.shape), list(other.shape)),
        ("type", one.dtype_name, other.dtype_name),
    ):
        if a != b:
            raise StateMismatchError(
                f"tensor {name!r} has the {what} {a} in {source.name} and {b} in {newest.name}: merge "
                "checkpoints of one model"
            )


def _in_order(
    pool: ThreadPoolExecutor, ahead: int, calls: Iterator[Callable[[], memoryview]]
) -> Iterator[memoryview]:
    """Make the calls in the pool, and yield their results in order. At most `ahead` wait or run."""
    futures = deque[Future[memoryview]]()
    try:
        for call in calls:
            futures.append(pool.submit(call))
            if len(futures) >= ahead:
                yield futures.popleft().result()
        while futures:
            yield futures.popleft().result()
    finally:
        for future in futures:
            future.cancel()
        wait_all(futures)
