"""Where the time of generation goes: vLLM as train_ppo.py runs it, under Python's profiler.

    python benchmarks/generation_profile.py 0.5B [--responses 1024] [--tokens 256]

A shape of benchmarks/sft_h200.py with random weights, whose responses all have --tokens tokens. Prints microseconds per
response token without the profiler; then, under it, the slowest functions and the share of vLLM's scheduler and handling
of outputs. (The profiler slows down Python only, so the true share is smaller.)
"""

import argparse
import cProfile
import pstats
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from omegaconf import OmegaConf

from benchmarks.sft_h200 import SHAPES, make_model
from config import load
from engines import device
from engines.fsdp.engine import FSDPEngine
from rollout.vllm import Rollout

IN_PYTHON = (("scheduler.py", "schedule"), ("scheduler.py", "update_from_output"), ("output_processor.py", "process_outputs"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--models", type=Path, default=Path("/dev/shm/rankwise-models"))
    parser.add_argument("--responses", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256)
    arguments = parser.parse_args()
    this_device = device.init()
    config = load("ppo.yaml", [
        f"model.path={make_model(arguments.shape, arguments.models)}", "data.train_files=none", "data.max_prompt_length=64",
        "engine.param_dtype=bfloat16", f"rollout.max_tokens={arguments.tokens}", f"validation.max_tokens={arguments.tokens}",
        f"rollout.max_num_seqs={arguments.responses}"])
    vllm, engine = Rollout(config, this_device), FSDPEngine(config, this_device, total_steps=1, optimize=False)
    vllm.wake("weights")
    vllm.update_weights(engine.export_weights())
    engine.offload("parameters")
    vllm.wake("kv_cache")
    prompts = [list(range(10, 30 + i % 20)) for i in range(arguments.responses)]

    def generate() -> int:
        batch, _ = vllm.generate(prompts, range(len(prompts)), OmegaConf.merge(config.rollout, {"stop": []}))
        return int(batch.fields["loss_mask"].sum())

    generate()                                                  # compiles what is compiled at first use
    start = time.perf_counter()
    num_tokens = generate()
    seconds = time.perf_counter() - start
    print(f"{seconds / num_tokens * 1e6:.1f} microseconds per response token, {num_tokens} tokens", flush=True)
    profiler = cProfile.Profile()
    profiler.runcall(generate)
    stats = pstats.Stats(profiler).sort_stats("tottime").print_stats(20)
    inside = sum(cumulative for (file, _, name), (_, _, _, cumulative, _) in stats.stats.items()
                 if (Path(file).name, name) in IN_PYTHON)
    print(f"{inside / stats.total_tt:.0%} in the scheduler and the handling of outputs")
    vllm.shutdown()


if __name__ == "__main__":
    main()
