#!/usr/bin/env bash
# Qwen2.5-7B by DAPO on one node (configs/one_node_7b.yaml): 8 GPUs of 80 GB that train and sample in turns.
#   sbatch slurm/one_node.sh [key=value ...]         its settings are in slurm/body.sh; DRY_RUN=1 bash slurm/one_node.sh
#   CONFIG=configs/one_node_qwen3_30b_a3b.yaml sbatch slurm/one_node.sh         another recipe of one node
#SBATCH --job-name=one_node
#SBATCH --nodes=1
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

export CONFIG=${CONFIG:-configs/one_node_7b.yaml} NOTICE_S=${NOTICE_S:-7200} TIME_LIMIT=${TIME_LIMIT:-24:00:00}
exec bash slurm/body.sh "$@"
