#!/usr/bin/env bash
# Speed and memory of SFT on one host's GPUs, the README's table:  bash benchmarks/sft_h200.sh [NUM_GPUS]
# Qwen2.5 shapes, random weights, packed batches. engine.param_dtype=bfloat16: parameters, gradients and Adam's state in bf16;
# without it they are fp32, and forward and backward compute in bf16.
set -uo pipefail
gpus=${1:-1}
cap="data.max_tokens_per_micro_batch" bf16="engine.param_dtype=bfloat16" zero2="engine.reshard_after_forward=false"
bench() {
    if [ "$gpus" = 1 ]; then python3 benchmarks/sft_h200.py "$@"
    else OMP_NUM_THREADS=4 python3 -m torch.distributed.run --standalone --nproc-per-node "$gpus" benchmarks/sft_h200.py "$@"; fi
}
echo "| shape | GPUs | tokens a micro-batch | settings | tokens/s a GPU | MFU | peak GiB (estimated) | step s |"
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
