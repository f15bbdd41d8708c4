#!/usr/bin/env bash
# Qwen2.5-32B by DAPO, the reference run, on 16 nodes of 8 GPUs of 80 GB. They train and sample in turns, a mode that no GPU
# has run yet: try slurm/one_node.sh first. DRY_RUN=1 prints days and jobs of each; settings are in slurm/body.sh.
#   sbatch slurm/dapo_32b.sh [key=value ...]                            all nodes do both: configs/dapo_32b_in_turns.yaml
#   CONFIG=configs/dapo_32b.yaml sbatch slurm/dapo_32b.sh               8 train, then 8 sample: the same algorithm, slower
#   CONFIG=configs/dapo_32b_async.yaml sbatch slurm/dapo_32b.sh         4 train while 12 sample: tokens up to 16 steps old
#SBATCH --job-name=dapo_32b
#SBATCH --nodes=16
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

export CONFIG=${CONFIG:-configs/dapo_32b_in_turns.yaml} NOTICE_S=${NOTICE_S:-7200} TIME_LIMIT=${TIME_LIMIT:-24:00:00}
exec bash slurm/body.sh "$@"
