#!/usr/bin/env bash
# The acceptance run of a cluster, on one of its nodes: `sbatch slurm/acceptance.sh [--config FILE key=value ...]`.
# docs/acceptance.md explains the rungs. The job's last lines are the verdict and the path of the report.
#   OUTPUT   folder of the report, which must be new (default: runs/acceptance-JOBID)
#   PYTHON   interpreter (default: .venv/bin/python)
#SBATCH --job-name=acceptance
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
# Where Slurm knows no GPUs (no GRES): sbatch --gpus-per-node=0.
#SBATCH --gpus-per-node=8
#SBATCH --time=04:00:00
#SBATCH --output=%x-%j.log
set -euo pipefail
[ -f slurm/body.sh ] || cd "$(dirname "$0")/.."
[ -f slurm/body.sh ] || { echo "FAILED (2): submit this from the folder of the repository" >&2; exit 2; }
[ -x "${PYTHON:=.venv/bin/python}" ] || { echo "FAILED (2): there is no $PYTHON: run make setup PLATFORM=cuda" >&2; exit 2; }

exec "$PYTHON" -m launch.acceptance --output "${OUTPUT:-runs/acceptance-${SLURM_JOB_ID:-local}}" "$@"
