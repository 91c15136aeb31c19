"""Seconds that it takes to move a Megatron engine's weights into vLLM, for several layouts of both.

    torchrun --nproc-per-node 2 benchmarks/weight_sync_h200.py 7B --rollout-tp 2 tensor_model_parallel_size=2 \\
        pipeline_model_parallel_size=2 ""

Arguments: a shape of benchmarks/sft_h200.py, then layouts, each the engine's settings in one argument ("" is data parallel).
Random weights, in bf16. Prints lines of a Markdown table on rank 0: medians of --repeats, and the largest difference between
vLLM's log-probabilities of what it then generates and the engine's. (In bf16 both round; the bound in fp32 is tested on a CPU.)
"""

import argparse
import gc
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch.distributed as dist
from megatron.core import parallel_state as mpu
from omegaconf import OmegaConf

from benchmarks.shapes import SHAPES, make_model
from config import load
from engines.megatron.engine import MegatronEngine
from engines.parallel import device
from rollout.vllm.engine import Rollout


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("layouts", nargs="+", help='key=value pairs of "engine" in one argument')
    parser.add_argument("--models", type=Path, default=Path("/dev/shm/rankwise-models"))
    parser.add_argument("--rollout-tp", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    this_device = device.init()
    if dist.get_rank() == 0:
        make_model(arguments.shape, arguments.models)
        print(
            "| shape | GPUs | engine | vLLM | export alone s | update_weights s | largest gap of log p |",
            flush=True,
        )
    dist.barrier()
    vllm = None
    for layout in arguments.layouts:
        config = load(
            "ppo.yaml",
            [
                "model_engine=megatron",
                f"model.path={arguments.models / arguments.shape}",
                "data.train_files=none",
                f"rollout.tensor_parallel_size={arguments.rollout_tp}",
                "rollout.kv_cache_gib=2",
                "rollout.max_tokens=64",
                "validation.max_tokens=64",
                "data.max_prompt_length=64",
                "rollout.max_num_seqs=16",
                *(f"engine.{pair}" for pair in layout.split()),
            ],
        )
        gc.collect()
        if mpu.model_parallel_is_initialized():
            mpu.destroy_model_parallel()
        engine = MegatronEngine(config, this_device, total_steps=1, optimize=False)
        vllm = vllm or Rollout(config, this_device)
        vllm.wake("weights")
        exports, updates = [], []
        for _ in range(arguments.repeats):
            start = device.synchronize()
            for _ in engine.export_weights():
                pass
            middle = device.synchronize()
            vllm.update_weights(engine.export_weights())
            exports.append(middle - start)
            updates.append(device.synchronize() - middle)
        vllm.wake("kv_cache")
        # The same prompts in every replica: tensor- and pipeline-parallel ranks must get the same batch.
        batch, _ = vllm.generate(
            [list(range(10, 20 + i)) for i in range(8)],
            list(range(8)),
            OmegaConf.merge(config.rollout, {"stop": []}),
        )
        gap = (
            (engine.log_probs(batch)[0].cpu() - batch.fields["rollout_log_probs"])
            .abs()
            .max()
            .item()
        )
        vllm.sleep()
        if dist.get_rank() == 0:
            print(
                f"| {arguments.shape} | {dist.get_world_size()} | {layout or 'data parallel'} | TP {arguments.rollout_tp} | "
                f"{median(exports):.3f} | {median(updates):.3f} | {gap:.3f} |",
                flush=True,
            )
        del engine
    vllm.shutdown()


if __name__ == "__main__":
    main()
