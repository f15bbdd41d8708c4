#!/usr/bin/env bash
# Qwen3-235B-A22B by DAPO (configs/dapo_qwen3_235b_a22b.yaml): 12 trainer and 20 server nodes of 8 GPUs of 80 GB.
#   sbatch slurm/dapo_qwen3_235b_a22b.sh [key=value ...]         its settings are in slurm/body.sh
#   DRY_RUN=1 bash slurm/dapo_qwen3_235b_a22b.sh
#SBATCH --job-name=dapo_qwen3_235b_a22b
#SBATCH --nodes=32
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
# Where Slurm knows no GPUs (no GRES): sbatch --gpus-per-node=0.
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
# Two hours before the end the run is asked to save: sampling ends at once, but the update does not.
# NOTICE_S repeats this time for the plan, which checks it; TIME_LIMIT repeats --time, for a dry run.
#SBATCH --signal=B:USR1@7200
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail
[ -f slurm/body.sh ] || cd "$(dirname "$0")/.."
[ -f slurm/body.sh ] || { echo "FAILED (2): submit this from the folder of the repository" >&2; exit 2; }

export CONFIG=${CONFIG:-configs/dapo_qwen3_235b_a22b.yaml} NOTICE_S=${NOTICE_S:-7200} TIME_LIMIT=${TIME_LIMIT:-24:00:00}
exec bash slurm/body.sh "$@"
