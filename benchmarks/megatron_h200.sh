#!/usr/bin/env bash
# The Megatron engine against FSDP2 on one host's GPUs, for docs/benchmarks.md:
#
#     bash benchmarks/megatron_h200.sh [NUM_GPUS]
#
# SFT steps of Qwen2.5 shapes with random weights, in bf16 with fp32 masters, 4 micro-batches per GPU
# and step on every layout; then the seconds of a weight sync into vLLM. Set
# VLLM_USE_FLASHINFER_SAMPLER=0 where flashinfer is not installed. PYTHON="echo python3" prints the
# commands.
set -uo pipefail
cd "$(dirname "$0")/.."
gpus=${1:-2} python=${PYTHON:-python3}
# With one queue to the device, communication starts before the matrix product that hides it.
export CUDA_DEVICE_MAX_CONNECTIONS=1 OMP_NUM_THREADS=4
cap="data.max_tokens_per_micro_batch" megatron="model_engine=megatron" tp2="engine.tensor_model_parallel_size=2"
pp2="engine.pipeline_model_parallel_size=2" vpp2="engine.virtual_pipeline_model_parallel_size=2"
# With fp32 gradients 7B does not fit on two GPUs.
bf16_gradients="engine.override_ddp_config.grad_reduce_in_fp32=false"
torchrun() { $python -m torch.distributed.run --standalone --nproc-per-node "$gpus" "$@"; }
bench() { torchrun benchmarks/sft_h200.py "$@"; }

echo "| shape | GPUs | tokens per micro-batch | settings | tokens/s per GPU | MFU | peak GiB (estimated) | step s |"
echo "|---|---|---|---|---|---|---|---|"
for shape in 7B 0.5B; do
    bench $shape $cap=8192
    bench $shape $cap=8192 $megatron $tp2 --micro-batches 8
    bench $shape $cap=8192 $megatron $pp2 --micro-batches 8
    bench $shape $cap=8192 $megatron $pp2 $vpp2 --micro-batches 8
    bench $shape $cap=8192 $megatron engine.overlap_grad_reduce=true $([ $shape = 7B ] && echo $bf16_gradients)
done
bench 7B $cap=16384 $megatron $tp2 --micro-batches 4
for tp in 1 2; do
    torchrun benchmarks/weight_sync_h200.py 7B --rollout-tp $tp "${tp2#engine.}" "${pp2#engine.}" ""
done
