#!/usr/bin/env bash
# How speed and memory scale over the GPUs of one host, for docs/benchmarks.md:
#
#     bash benchmarks/scaling.sh NUM_GPUS [PART ...]
#
# PART: sft, experts and grpo go into one table (benchmarks/scaling.py); lengths (GRPO with log-normal
# lengths), context (context parallelism chosen per batch), weights (from Megatron into vLLM) and resume
# (a killed run goes on with half of the GPUs) print their own. Without parts: all of them. Set
# VLLM_USE_FLASHINFER_SAMPLER=0 where flashinfer is not installed. PYTHON="echo python3" prints the
# commands.
set -uo pipefail
cd "$(dirname "$0")/.."
gpus=$1 python=${PYTHON:-python3}
shift
parts=${*:-sft experts grpo lengths context weights resume}
bf16="engine.param_dtype=bfloat16"
export OMP_NUM_THREADS=4
torchrun() { $python -m torch.distributed.run --standalone --nproc-per-node "$gpus" "$@"; }

in_one_table=()
for part in $parts; do
    case $part in
    sft | experts | grpo) in_one_table+=("$part") ;;
    lengths | context | weights | resume) ;;
    *) echo "error: there is no part $part: choose from sft experts grpo lengths context weights resume" >&2; exit 2 ;;
    esac
done
[ ${#in_one_table[@]} -eq 0 ] || $python benchmarks/scaling.py "$gpus" --parts "${in_one_table[@]}"
for part in $parts; do
    case $part in
    lengths)
        $python benchmarks/long_tails.py 0.5B $bf16 --ranks "$gpus" --prompts $((gpus * 64)) --steps 4 \
            --oversample 1.5 --max-staleness 4
        ;;
    context) torchrun benchmarks/dynamic_cp.py --measure 0.5B $bf16 --steps 4 ;;
    weights)
        for tp in 1 2; do
            torchrun benchmarks/weight_sync_h200.py 7B --rollout-tp $tp tensor_model_parallel_size=2 \
                pipeline_model_parallel_size=2 ""
        done
        ;;
    resume) $python benchmarks/resume.py "$gpus" ;;
    esac
done
