"""Loads the newest checkpoint of a GPT with other parallel sizes, and saves it again: `TP PP STEP`.

Where there is no checkpoint it trains two steps first, so that the optimizer has moments.
"""

import sys

import torch
from megatron.core import distributed as ddp
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from tests.support.hang import HANG_SECONDS

import holdfast
from holdfast.integrations import megatron

FORMAT = {"distrib_optim_sharding_type": "fully_reshardable"}
tensor, pipeline, step = map(int, sys.argv[1:])
holdfast.pin_threads(1)
torch.distributed.init_process_group("gloo")
parallel_state.initialize_model_parallel(tensor, pipeline)
tensor_parallel.model_parallel_cuda_manual_seed(step)
config = TransformerConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    tensor_model_parallel_size=tensor,
    pipeline_model_parallel_size=pipeline,
    pipeline_dtype=torch.float32,
)
gpt = GPTModel(
    config,
    gpt_layer_specs.get_gpt_layer_local_spec(),
    64,
    16,
    pre_process=parallel_state.is_pipeline_first_stage(),
    post_process=parallel_state.is_pipeline_last_stage(),
)
sharded = ddp.DistributedDataParallelConfig(use_distributed_optimizer=True)
model = ddp.DistributedDataParallel(config, sharded, gpt)
options = OptimizerConfig(lr=1e-3, use_distributed_optimizer=True)
optimizer = get_megatron_optimizer(options, [model])


def state(is_loading=False):
    layers = gpt.sharded_state_dict(metadata=FORMAT)
    moments = optimizer.sharded_state_dict(layers, is_loading, metadata=FORMAT)
    return {"model": layers, "optimizer": moments}


with holdfast.Checkpointer(
    holdfast.Folder("ckpt", keep_last=4), interval_steps=0, on_save_error="raise"
) as ckpt:
    if ckpt.peek() is None:
        for number in range(2):
            tokens = torch.arange(32).reshape(2, 16) + number
            model.zero_grad_buffer()
            loss = model(tokens, torch.arange(16), None, labels=tokens.roll(-1))
            loss.mean().backward()
            ddp.finalize_model_grads([model])
            optimizer.step()
    else:
        loaded = megatron.load(state(is_loading=True), ckpt)
        gpt.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
    megatron.save(step, state(), ckpt).wait(timeout=HANG_SECONDS)
