#!/usr/bin/env bash
# Multi-token prediction and speculative decoding on one GPU, for docs/benchmarks.md:
#
#     bash benchmarks/mtp_h200.sh [OUT_DIR]
#
# MiMo's shapes with constructed weights (benchmarks/shapes.py). Plots of the GPU's memory over a PPO
# step are written to OUT_DIR. Set VLLM_USE_FLASHINFER_SAMPLER=0 where flashinfer is not installed.
# PYTHON="echo python3" prints the commands.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-.} python=${PYTHON:-python3}
export OMP_NUM_THREADS=4
cap="data.max_tokens_per_micro_batch=16384" megatron="model_engine=megatron"
trained="model.mtp.enable=true model.mtp.enable_train=true"
for shape in 0.5B-MTP 1.5B-MTP; do
    $python benchmarks/sft_h200.py $shape $megatron $cap --steps 3
    $python benchmarks/sft_h200.py $shape $megatron $cap $trained --steps 3
done
$python benchmarks/speculative_h200.py 0.5B --ways plain ngram:4 mtp:1 mtp:3
# Drafts of a trained layer, on answers whose lengths have a long tail.
models=/dev/shm/rankwise-models data=/dev/shm/rankwise-mtp
$python benchmarks/make_mtp_data.py $data 0.5B --models $models
$python train_sft.py $megatron $trained $cap model.path=$models/0.5B-MTP-random data.train_files=$data/train.jsonl \
    data.val_files=$data/val.jsonl data.cache_dir=$data/cache data.train_batch_size=64 output_dir=$data/sft optim.lr=5e-4 \
    optim.lr_warmup_steps_ratio=0.1 trainer.total_steps=500 trainer.log_freq=50 trainer.val_before_train=false trainer.save_minutes=0
$python benchmarks/speculative_h200.py 0.5B --ways plain ngram:4 mtp:1 mtp:3 --trained $data/sft/hf --rows $data/val.jsonl \
    --tokens 400 --temperatures 1.0
$python benchmarks/ppo_h200.py 0.5B-MTP $megatron $cap $trained --prompts 64 --n 4 --steps 1 --timeline "$out/memory.png"
$python benchmarks/ppo_h200.py 0.5B-MTP $megatron $cap $trained model.mtp.enable_rollout=true --prompts 64 --n 4 --steps 1 \
    --timeline "$out/memory_drafts.png"
