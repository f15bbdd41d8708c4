#!/usr/bin/env bash
# The demo (two-digit sums, on CPUs) over the nodes of a Slurm job: `sbatch slurm/demo.sh [key=value ...]`.
# TRAINER_NODES, RANKS_PER_NODE and SERVER_NODES set the roles; sbatch --nodes must be the sum of the nodes.
#SBATCH --job-name=dapo-demo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=01:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail
[ -f slurm/body.sh ] || cd "$(dirname "$0")/.."
[ -f slurm/body.sh ] || { echo "FAILED (2): submit this from the folder of the repository" >&2; exit 2; }

export CONFIG=configs/demo.yaml
data=$PWD/.cache/arithmetic server=actor_rollout_ref.rollout.server
[ -f "$data/val.jsonl" ] || export PREPARE="examples.arithmetic.problems .cache/arithmetic"
exec bash slurm/body.sh "data.train_files=[$data/train.jsonl]" "data.val_files=[$data/val.jsonl]" \
    "trainer.nnodes=${TRAINER_NODES:-1}" "trainer.n_procs_per_node=${RANKS_PER_NODE:-2}" \
    "$server.nnodes=${SERVER_NODES:-1}" "$server.num_servers=${SERVER_NODES:-1}" "$@"
