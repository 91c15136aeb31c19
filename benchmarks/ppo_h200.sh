#!/usr/bin/env bash
# A GRPO step by stage on one host's GPUs, for docs/benchmarks.md:
#
#     bash benchmarks/ppo_h200.sh [NUM_GPUS] [more arguments]
#
# 256 prompts x 4 responses of 512 tokens; parameters, gradients and Adam's state in bf16 (Megatron:
# fp32 masters). Set VLLM_USE_FLASHINFER_SAMPLER=0 where flashinfer is not installed.
# PYTHON="echo python3" prints the commands.
set -uo pipefail
cd "$(dirname "$0")/.."
gpus=${1:-1} python=${PYTHON:-python3}
shift
export OMP_NUM_THREADS=4
bf16="engine.param_dtype=bfloat16" cap="data.max_tokens_per_micro_batch"
bench() { $python benchmarks/ppo_h200.py "$@" --ranks "$gpus"; }
if [ "$gpus" = 1 ]; then
    bench 0.5B $bf16 --prompts 8 --n 2 --tokens 32 --steps 20 --cycles "$@"      # memory asleep over 20 rounds
    bench 0.5B $bf16 $cap=16384 --steps 2 --trl 32 "$@"                            # TRL 1.16 on the same work
    bench 7B $bf16 $cap=8192 --steps 2 "$@"
else
    bench 0.5B $bf16 $cap=16384 --steps 2 "$@"
    bench 0.5B model_engine=megatron "engine.tensor_model_parallel_size=$gpus" $cap=16384 --steps 1 \
        "rollout.tensor_parallel_size=$gpus" "$@"
    bench 0.5B $bf16 $cap=16384 --steps 2 "rollout.tensor_parallel_size=$gpus" "$@"
    bench 7B $bf16 $cap=8192 --steps 2 "rollout.tensor_parallel_size=$gpus" "$@"
fi
