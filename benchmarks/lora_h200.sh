#!/usr/bin/env bash
# SFT and GRPO with LoRA on one GPU, or with GPUS=2 also on two, for docs/benchmarks.md:
#
#     bash benchmarks/lora_h200.sh
#
# Qwen2.5 shapes with random weights in bf16. TRL's line needs trl, liger-kernel and flash-attn. Set
# VLLM_USE_FLASHINFER_SAMPLER=0 where flashinfer is not installed. PYTHON="echo python3" prints the
# commands.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export OMP_NUM_THREADS=4
cap="data.max_tokens_per_micro_batch" bf16="engine.param_dtype=bfloat16"
sft() { $python benchmarks/sft_h200.py 7B $cap=16384 $bf16 engine.log_prob_chunk_size=8192 "$@"; }
sft
sft model.lora.rank=16
sft model.lora.rank=16 model.lora.dtype=bfloat16
$python benchmarks/trl_sft_h200.py 7B --lora 16 --liger --steps 3
$python benchmarks/lora_h200.py 7B $bf16 $cap=16384 --steps 1
two() { $python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/sft_h200.py 7B $cap=16384 $bf16 \
    engine.log_prob_chunk_size=8192 model.lora.rank=16 "$@"; }
if [ "${GPUS:-1}" = 2 ]; then
    two
    two engine.fsdp_size=1
    $python benchmarks/lora_h200.py 7B --ranks 2 $bf16 $cap=16384 --steps 1 --ways swapped
    $python benchmarks/lora_h200.py 7B --ranks 2 $bf16 $cap=16384 engine.fsdp_size=1 --steps 1 --ways shared
fi
large() { $python benchmarks/lora_h200.py "$@" $bf16 $cap=8192 engine.activation_checkpointing=true engine.torch_compile=never \
    rollout.enforce_eager=true --prompts 32 --n 4 --tokens 64 --steps 1 --ways shared; }
large 32B rollout.gpu_memory_utilization=0.7
large 48B rollout.gpu_memory_utilization=0.85
