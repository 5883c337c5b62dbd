#!/usr/bin/env bash
# Train on four machines of eight GPUs under Slurm: sbatch examples/slurm.sh
#
# torchrun starts the workers of each machine; when one of them dies it starts all again from the last checkpoint. Slurm
# sends SIGTERM two minutes before the time is up: the step is finished and saved. Then, or when a machine was taken
# away, the job is queued again and goes on.
#SBATCH --job-name=mgwfbp
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=08:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

RUN="${RUN:-runs/resnet50-$SLURM_JOB_ID}"
DATA="${DATA:?set DATA to a folder with train/CLASS/IMAGE and val/CLASS/IMAGE}"
FIRST_HOST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# A store of its own for every start: in one that outlives a restart, workers find where the dead ones listened.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# --resume with a folder that holds no checkpoint yet begins at the beginning.
srun torchrun \
    --nnodes "$SLURM_NNODES" --nproc-per-node 8 --max-restarts 3 \
    --rdzv-backend c10d --rdzv-endpoint "$FIRST_HOST:29500" --rdzv-id "$SLURM_JOB_ID" \
    -m mgwfbp train --model resnet50 --data "$DATA" --device cuda --autocast bf16 \
    --epochs 90 --batch-size 256 --lr 0.1 --schedule step --warmup-epochs 5 --label-smoothing 0.1 \
    --loaders 8 --checkpoint-steps 500 --output "$RUN" --resume &
STEP=$!

# The batch script gets the signal; passed on to srun it reaches torchrun and through it the workers.
IS_STOPPED=0
trap 'IS_STOPPED=1; kill -TERM "$STEP" 2>/dev/null || true' TERM
STATUS=0
wait "$STEP" || STATUS=$?
if [ "$IS_STOPPED" = 1 ]; then
    wait "$STEP" || true
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$STATUS"
