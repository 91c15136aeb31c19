#!/usr/bin/env bash
# How speed and memory scale over the GPUs of one host, for docs/benchmarks.md:
#
#     bash benchmarks/scaling.sh NUM_GPUS [PART ...]
#
# PART: sft, experts and grpo go into one table (benchmarks/scaling.py); lengths (GRPO with log-normal
# lengths), context (context parallelism chosen per batch), weights (from Megatron into vLLM) and resume
# (a killed run goes on with half of the GPUs) print their own. Without parts: all of them. Set
# VLLM_USE_FLASHINFER_SAMPLER=0 where flashinfer is not installed. PYTHON="echo python3" prints the
# commands. SHAPE=tiny and more SETTINGS try `resume` on a CPU.
set -uo pipefail
cd "$(dirname "$0")/.."
gpus=$1 python=${PYTHON:-python3} shape=${SHAPE:-0.5B} settings=${SETTINGS:-}
shift
parts=${*:-sft experts grpo lengths context weights resume}
bf16="engine.param_dtype=bfloat16"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
torchrun() { $python -m torch.distributed.run --standalone --nproc-per-node "$@"; }

# One run trains for 12 steps. The other is killed after the sixth and goes on with half of the GPUs.
# Prints the losses of both.
resume() {
    local work=/tmp/rankwise-resume models=/tmp/rankwise-resume/models
    mkdir -p $work
    $python benchmarks/make_sft_data.py $work $((gpus * 200))
    $python -c "from pathlib import Path; from benchmarks.ppo_h200 import make_assets, make_policy
make_assets(Path('$work'), 8); make_policy('$shape', Path('$models'), Path('$work/tokenizer'))"
    local train="train_sft.py model.path=$models/$shape data.train_files=$work/train.jsonl data.train_batch_size=$((gpus * 8))
        data.max_length=1024 trainer.total_steps=12 trainer.save_freq=6 $bf16 $settings"
    rm -rf $work/whole $work/killed
    torchrun "$gpus" $train output_dir=$work/whole > $work/whole.log
    # save_freq=6 writes the checkpoint; the seventh step is lost and taken again.
    torchrun "$gpus" $train output_dir=$work/killed > $work/killed.log &
    until [ "$(wc -l < $work/killed/metrics.jsonl 2>/dev/null || echo 0)" -ge 8 ] || ! kill -0 $!; do sleep 0.05; done
    pkill -KILL -f "output_dir=$work/killed"
    torchrun $((gpus / 2)) $train output_dir=$work/killed > $work/resumed.log
    $python - $work <<'PYTHON'
import json, sys
for name in ("whole", "killed"):
    lines = [json.loads(line) for line in open(f"{sys.argv[1]}/{name}/metrics.jsonl")]
    losses = {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}
    print(f"| {name} | {' | '.join(f'{loss:.4f}' for loss in losses.values())} |")
PYTHON
}

tabled=()
for part in $parts; do
    case $part in sft | experts | grpo) tabled+=("$part") ;; esac
done
[ ${#tabled[@]} -eq 0 ] || $python benchmarks/scaling.py "$gpus" --parts "${tabled[@]}"
for part in $parts; do
    case $part in
    sft | experts | grpo) ;;
    lengths)
        $python benchmarks/long_tails.py 0.5B $bf16 --ranks "$gpus" --prompts $((gpus * 64)) --steps 4 \
            --oversample 1.5 --max-staleness 4
        ;;
    context) torchrun "$gpus" benchmarks/dynamic_cp.py --measure 0.5B $bf16 --steps 4 ;;
    weights)
        for tp in 1 2; do
            torchrun "$gpus" benchmarks/weight_sync_h200.py 7B --rollout-tp $tp tensor_model_parallel_size=2 \
                pipeline_model_parallel_size=2 ""
        done
        ;;
    resume) resume ;;
    *) echo "error: unknown part $part" >&2 && exit 2 ;;
    esac
done
