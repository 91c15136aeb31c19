#!/usr/bin/env bash
# Mixtures of experts on one GPU, for docs/benchmarks.md:
#
#     bash benchmarks/experts_h200.sh
#
# Some layers of Qwen3-30B-A3B with random weights and the routers' auxiliary loss: 8B parameters in
# bf16, and 4B with fp32 masters. Set VLLM_USE_FLASHINFER_SAMPLER=0 where flashinfer is not
# installed. PYTHON="echo python3" prints the commands.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export OMP_NUM_THREADS=4
cap="data.max_tokens_per_micro_batch=16384" bf16="engine.param_dtype=bfloat16" aux="engine.router_aux_loss_coef=0.001"
$python benchmarks/sft_h200.py 8B-A1B $bf16 $cap $aux --steps 3
$python benchmarks/sft_h200.py 4B-A1B $cap $aux --steps 3
$python benchmarks/sft_h200.py 4B-A1B model_engine=megatron $cap $aux --steps 3
$python benchmarks/ppo_h200.py 8B-A1B $bf16 $cap $aux --prompts 64 --tokens 256 --steps 1
