#!/usr/bin/env bash
# Speed and memory of SFT on one host's GPUs, for docs/benchmarks.md:
#
#     bash benchmarks/sft_h200.sh [NUM_GPUS]
#
# Qwen2.5 shapes with random weights, packed batches. With engine.param_dtype=bfloat16, parameters,
# gradients and Adam's state are bf16; without it they are fp32, and forward and backward compute in
# bf16. PYTHON="echo python3" prints the commands.
set -uo pipefail
cd "$(dirname "$0")/.."
gpus=${1:-1} python=${PYTHON:-python3}
export OMP_NUM_THREADS=4
cap="data.max_tokens_per_micro_batch" bf16="engine.param_dtype=bfloat16" zero2="engine.reshard_after_forward=false"
bench() {
    if [ "$gpus" = 1 ]; then $python benchmarks/sft_h200.py "$@"
    else $python -m torch.distributed.run --standalone --nproc-per-node "$gpus" benchmarks/sft_h200.py "$@"; fi
}
echo "| shape | GPUs | tokens per micro-batch | settings | tokens/s per GPU | MFU | peak GiB (estimated) | step s |"
echo "|---|---|---|---|---|---|---|---|"
if [ "$gpus" = 1 ]; then
    bench 7B $cap=16384 $bf16 engine.log_prob_chunk_size=8192 --profile
    bench 7B $cap=8192 $bf16
    bench 7B $cap=16384 $bf16 engine.activation_checkpointing=true
    bench 1.5B $cap=16384 $bf16
    bench 1.5B $cap=16384 $zero2
    bench 0.5B $cap=16384 $bf16
    bench 0.5B $cap=16384 $zero2
else
    bench 7B $cap=16384 $bf16 $zero2 engine.log_prob_chunk_size=8192
    bench 7B $cap=16384 $bf16 $zero2 engine.log_prob_chunk_size=8192 engine.reduce_dtype=bfloat16
    bench 7B $cap=8192
    bench 1.5B $cap=16384 $bf16 $zero2
fi
