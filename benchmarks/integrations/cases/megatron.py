"""Megatron-core with its distributed optimizer, beside `dist_checkpointing.save`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.integrations.case import SCRIPTS, Blocked, Case

SAVES = 8
FORMAT = {"distrib_optim_sharding_type": "fully_reshardable"}


def _blocked(folder: Path) -> Blocked:
    import tests.support.frameworks.megatron_cpu  # noqa: F401 - before Megatron is used
    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing, distributed, parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    from benchmarks.integrations.timed import TimedCheckpointer, timed
    from holdfast.integrations import megatron

    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(num_layers=3, hidden_size=512, num_attention_heads=8)
    gpt = GPTModel(config, gpt_layer_specs.get_gpt_layer_local_spec(), 512, 16)
    settings = distributed.DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = distributed.DistributedDataParallel(config, settings, gpt)
    rule = OptimizerConfig(lr=1e-3, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(rule, [model])

    def state() -> dict[str, Any]:
        layers = gpt.sharded_state_dict(metadata=FORMAT)
        return {"gpt": layers, "adam": optimizer.sharded_state_dict(layers, metadata=FORMAT)}

    ours: list[float] = []
    theirs: list[float] = []
    tokens = torch.arange(32).reshape(2, 16)
    with TimedCheckpointer(folder / "ours", interval_steps=1) as ckpt:
        for step in range(1, SAVES + 2):
            model.zero_grad_buffer()
            model(tokens, torch.arange(16), None, labels=tokens).mean().backward()
            distributed.finalize_model_grads([model])
            optimizer.step()
            with timed(ours):
                megatron.save(step, state(), ckpt)
            ckpt.settle()
            place = folder / f"theirs-{step}"
            place.mkdir()
            with timed(theirs):
                dist_checkpointing.save(state(), str(place))
    parameters = sum(p.numel() for p in gpt.parameters())
    dist.destroy_process_group()
    # fp32 parameters, the optimizer's copy of them, and two moments
    return Blocked(ours[1:], theirs[1:], 16 * parameters)


CASE = Case(
    name="megatron",
    distribution="megatron-core",
    lines=7,
    script=SCRIPTS / "page_of_one_rank.py",
    arguments=("megatron.md",),
    preload=("tests.support.frameworks.megatron_cpu", "holdfast.integrations.megatron"),
    theirs="dist_checkpointing.save",
    blocked=_blocked,
)
