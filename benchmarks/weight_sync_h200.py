"""Seconds to move an engine's weights into vLLM, for several layouts of both.

    torchrun --nproc-per-node 2 benchmarks/weight_sync_h200.py 7B --rollout-tp 2 \\
        tensor_model_parallel_size=2 pipeline_model_parallel_size=2 ""
    torchrun --nproc-per-node 1 benchmarks/weight_sync_h200.py 7B --engine fsdp "" \\
        --rollout rollout.quantization=fp8 algorithm.rollout_is=token

Arguments: a shape of benchmarks/shapes.py, then layouts. A layout is one argument with the
engine's settings, separated by spaces; "" is data parallel. The weights are random, in bf16.
--rollout takes settings that all layouts share.

Prints lines of a Markdown table on rank 0: medians of --repeats, and the largest difference between
vLLM's and the engine's log-probabilities of tokens that vLLM generates afterwards. In bf16 both are
rounded; a test on a CPU bounds the difference in fp32.
"""

import argparse
import gc
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from benchmarks.harness import MODELS, make_parser, model_settings, print_row
from benchmarks.shapes import SHAPES, make_model
from config import load
from engines.base import Engine
from engines.build import engine_class
from engines.parallel import device
from rollout.vllm.engine import Rollout

NUM_PROMPTS = 8


@dataclass
class Sync:
    """Medians of one layout.

    Attributes:
        export: seconds to export the weights and drop them.
        update: seconds to export them and load them into vLLM.
        gap: the largest difference of log-probabilities.
    """

    export: float
    update: float
    gap: float


def time_sync(engine: Engine, vllm: Rollout, repeats: int) -> Sync:
    vllm.wake("weights")
    exports = []
    updates = []
    for _ in range(repeats):
        start = device.synchronize()
        for _ in engine.export_weights():
            pass
        exported = device.synchronize()
        vllm.update_weights(engine.export_weights())
        exports.append(exported - start)
        updates.append(device.synchronize() - exported)
    vllm.wake("kv_cache")
    gap = largest_gap(engine, vllm)
    vllm.sleep()
    return Sync(median(exports), median(updates), gap)


def largest_gap(engine: Engine, vllm: Rollout) -> float:
    """Return the largest difference between the log-probabilities of vLLM and of the engine."""
    # Every replica gets the same prompts, since tensor- and pipeline-parallel ranks of the engine
    # must get the same batch.
    prompts = [list(range(10, 20 + i)) for i in range(NUM_PROMPTS)]
    sampling = OmegaConf.merge(engine.config.rollout, {"stop": []})
    batch, _ = vllm.generate(prompts, list(range(NUM_PROMPTS)), sampling)
    log_probs = engine.log_probs(batch)[0].cpu()
    return (log_probs - batch.fields["rollout_log_probs"]).abs().max().item()


def forget_groups(engine: str) -> None:
    """Destroy Megatron's process groups, so that the next layout can make its own."""
    if engine != "megatron":
        return
    from megatron.core import parallel_state as mpu  # not installed in every environment

    if mpu.model_parallel_is_initialized():
        mpu.destroy_model_parallel()


def load_config(arguments: argparse.Namespace, layout: str) -> DictConfig:
    settings = [
        *model_settings(arguments.models / arguments.shape),
        f"model_engine={arguments.engine}",
        f"rollout.tensor_parallel_size={arguments.rollout_tp}",
        "rollout.kv_cache_gib=2",
        "rollout.max_tokens=64",
        "validation.max_tokens=64",
        "data.max_prompt_length=64",
        "rollout.max_num_seqs=16",
        *arguments.rollout,
        *(f"engine.{setting}" for setting in layout.split()),
    ]
    return load("ppo.yaml", settings)


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("layouts", nargs="+", help='settings of "engine" in one argument')
    parser.add_argument("--models", type=Path, default=MODELS)
    parser.add_argument("--engine", choices=("fsdp", "megatron"), default="megatron")
    parser.add_argument("--rollout", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--rollout-tp", type=int, default=1, help="vLLM's tensor-parallel size")
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    this_device = device.init()
    is_first_rank = dist.get_rank() == 0
    if is_first_rank:
        make_model(arguments.shape, arguments.models)
        times = ("export alone s", "update_weights s")
        print_row("shape", "GPUs", "engine", "vLLM", *times, "largest gap of log p")
    dist.barrier()
    vllm = None
    for layout in arguments.layouts:
        config = load_config(arguments, layout)
        gc.collect()
        forget_groups(arguments.engine)
        engine = engine_class(arguments.engine)(config, this_device, total_steps=1, optimize=False)
        if vllm is None:
            vllm = Rollout(config, this_device)
        sync = time_sync(engine, vllm, arguments.repeats)
        if is_first_rank:
            print_row(
                arguments.shape,
                dist.get_world_size(),
                layout or "data parallel",
                f"TP {arguments.rollout_tp}",
                f"{sync.export:.3f}",
                f"{sync.update:.3f}",
                f"{sync.gap:.3f}",
            )
        del engine
    vllm.shutdown()


if __name__ == "__main__":
    main()
