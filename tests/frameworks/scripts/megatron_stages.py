"""Saves and loads a sharded state dict of pipeline stages: `megatron_stages.py LOAD SAVE`, steps or "no".

Each rank is a pipeline stage with its part of four layers. Rank and number of ranks decide which part of the
embedding it holds, as tensor parallelism does.
"""

import io
import os
import sys

import numpy as np
import torch
from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedObject
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from tests.support.frameworks.megatron_parts import part
from tests.support.hang import HANG_SECONDS

import holdfast
from holdfast.integrations import megatron

LAYERS = 4
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
mine = range(rank * LAYERS // ranks, (rank + 1) * LAYERS // ranks)
rows = range(rank * 8 // ranks, (rank + 1) * 8 // ranks)


def layer(number):
    return torch.arange(6.0).reshape(2, 3) + 10 * number


embedding = torch.arange(32.0).reshape(8, 4)


def fused(scale):
    """Return a factory whose tensor is saved as two."""

    def build(key, data, replica_id, flattened_range):
        gate, up = data.chunk(2)
        return {"w": part(f"{key}.w", gate, (2,), (0,)), "v": part(f"{key}.v", up, (2,), (0,))}

    merge = lambda parts: torch.cat([parts["w"], parts["v"]])  # noqa: E731
    return ShardedTensorFactory("mlp", torch.arange(4.0) * scale, build, merge)


def state(scale, *, is_new):
    layers = {
        f"decoder.layers.{index}.weight": part(
            "decoder.layers.weight", layer(n) * scale, (LAYERS, 2, 3), (n, 0, 0), prepended=1
        )
        for index, n in enumerate(mine)
    }
    numbers = {"python": (3, (1, 2)), "numpy": np.arange(3) * int(scale), "torch": torch.ones(2)}
    extra = io.BytesIO(b"amax" if is_new else b"")
    found = {
        "model": {
            **layers,
            "embedding.weight": part(
                "embedding.weight",
                embedding[rows.start : rows.stop] * scale,
                (8, 4),
                (rows.start, 0),
            ),
            "mlp": fused(scale),
            "extra": ShardedObject("extra", extra, (1,), (0,), (0, 0, rank)),
        },
        "rng_state": [ShardedObject("rng", numbers, (1,), (0,), rank)],
        "local": LocalNonpersistentObject(f"rank {rank}"),
    }
    if is_new:
        found |= {"iteration": 7, "param_groups": [{"lr": 0.5}]}
    return found


def check(loaded):
    for index, n in enumerate(mine):
        assert torch.equal(loaded["model"][f"decoder.layers.{index}.weight"], layer(n))
    expected = embedding[rows.start : rows.stop]
    assert torch.equal(loaded["model"]["embedding.weight"], expected)
    assert loaded["model"]["mlp"].tolist() == [0, 1, 2, 3]
    assert loaded["model"]["extra"].getvalue() == b"amax"
    (numbers,) = loaded["rng_state"]
    assert numbers["python"] == (3, (1, 2))
    assert numbers["numpy"].tolist() == [0, 1, 2]
    assert numbers["torch"].tolist() == [1, 1]
    assert loaded["local"] == f"rank {rank}"
    assert (loaded["iteration"], loaded["param_groups"]) == (7, [{"lr": 0.5}])


load, save = sys.argv[1:]
with holdfast.Checkpointer("ckpt", interval_steps=0, on_save_error="raise") as ckpt:
    if load != "no":
        loaded = megatron.load(state(0.0, is_new=False), ckpt)
        check(loaded)
    if save != "no":
        megatron.save(int(save), state(1.0, is_new=True), ckpt).wait(timeout=HANG_SECONDS)
print("digest of nothing: the checks are above", flush=True)
