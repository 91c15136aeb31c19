#!/usr/bin/env bash
# SFT and GRPO with images on one GPU, for docs/benchmarks.md:
#
#     bash benchmarks/images_h200.sh
#
# The shape of Qwen2.5-VL-7B with random weights in bf16, and an image of 1,008 tokens in each row.
# vLLM needs torchvision for this model. Set VLLM_USE_FLASHINFER_SAMPLER=0 where flashinfer is not
# installed. PYTHON="echo python3" prints the commands.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export OMP_NUM_THREADS=4
cap="data.max_tokens_per_micro_batch" bf16="engine.param_dtype=bfloat16" checkpointing="engine.activation_checkpointing=true"
$python benchmarks/sft_h200.py 7B-VL $bf16 $cap=16384 $checkpointing --steps 3
$python benchmarks/sft_h200.py 7B-VL $bf16 $cap=8192 "model.freeze=[visual]" --steps 3
$python benchmarks/ppo_h200.py 7B-VL $bf16 $cap=16384 $checkpointing rollout.gpu_memory_utilization=0.5 --prompts 32 --n 4 --tokens 256 --steps 1
