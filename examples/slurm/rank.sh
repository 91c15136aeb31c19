#!/usr/bin/env bash
# Start one rank under srun: translate Slurm's variables into torch's, then run the command.
#   srun examples/slurm/rank.sh python train_sft.py my.yaml
set -euo pipefail
export RANK=${SLURM_PROCID:?start this with srun} LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
: "${MASTER_ADDR:?export MASTER_ADDR, the first node: scontrol show hostnames \"\$SLURM_JOB_NODELIST\" | head -n 1}"
export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-29500} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$@"
