#!/usr/bin/env bash
# The Slurm job of this folder's scripts: plan -> preflight -> servers -> trainer -> ordered end. The last
# line of the job's log says how it ended; docs/cluster.md explains the exit codes and the folder of logs.
#
#   slurm/body.sh [key=value ...]       any key of the config, as docs/config.md lists them
#
# Settings are variables of the environment (`CONTAINER=pyxis IMAGE=... sbatch slurm/dapo_32b.sh`):
#   CONFIG          the recipe; the scripts set it
#   CONTAINER       none (default) | pyxis | apptainer
#   IMAGE, MOUNTS   its image, and its mounted folders as from:to,from:to (default: this folder)
#   PYTHON          interpreter (default: .venv/bin/python, made here once if it is missing; in a container python3)
#   REQUEUE         auto (default): save and requeue before the time limit | off: save and end with 85,
#                   for chains: for i in 1 2 3; do REQUEUE=off sbatch --dependency=singleton slurm/dapo_32b.sh; done
#   MAX_RESTARTS    requeues of one job (default: 1.25 times the jobs that the plan foresees, and 2; at least 20)
#   MIN_BANDWIDTH   floor of the preflight's all-reduce in GB/s (default: launch.preflight's own)
#   NOTICE_S        seconds of #SBATCH --signal, checked by the plan; the scripts set it
#   TIME_LIMIT      of #SBATCH --time, for a dry run, which prints the number of jobs; the scripts set it
#   PREPARE         a Python module and its arguments, run before all else; demo.sh sets it
#   DRY_RUN=1       print nodes, processes, memory and time, and stop; works outside of Slurm too
#
# bash runs srun, scancel and scontrol, since a host of containers may lack a Python; all computation is in
# `python -m launch.slurm`, which runs in the container if there is one.
# shellcheck disable=SC2317  # functions that only traps call
set -euo pipefail

: "${CONFIG:?names the recipe, e.g. CONFIG=configs/dapo_7b.yaml}"
CONTAINER=${CONTAINER:-none} IMAGE=${IMAGE:-} MOUNTS=${MOUNTS:-$PWD:$PWD}
REQUEUE=${REQUEUE:-auto} DRY_RUN=${DRY_RUN:-0}
HAS_SPOKEN=''
GRACE_S=60 # for a step that was asked to end

stamp() { printf '[%(%F %T)T] %s\n' -1 "$*"; }

die() { # CODE SENTENCE
    HAS_SPOKEN=1
    echo "FAILED ($1): $2" >&2
    exit "$1"
}

[[ $REQUEUE = auto || $REQUEUE = off ]] || die 2 "REQUEUE=$REQUEUE is neither auto nor off"
[[ $DRY_RUN = 1 || -n ${SLURM_JOB_ID:-} ]] || die 2 "no Slurm job: sbatch slurm/NAME.sh, or DRY_RUN=1 bash slurm/NAME.sh"

# IN: flags of the container, which follow those of srun and come before the command. HERE: a Python module on this node.
case $CONTAINER in
    none) IN=() ;;
    pyxis) IN=(--container-image="$IMAGE" --container-mounts="$MOUNTS" --container-workdir="$PWD") ;;
    apptainer) IN=(apptainer exec --nv --bind "$MOUNTS" --pwd "$PWD" "$IMAGE") ;;
    *) die 2 "CONTAINER=$CONTAINER is neither none, pyxis nor apptainer" ;;
esac
[[ $CONTAINER = none || -n $IMAGE ]] || die 2 "CONTAINER=$CONTAINER needs IMAGE=..."
OWN_VENV=''
if [ "$CONTAINER" = none ] && [ -z "${PYTHON:-}" ]; then OWN_VENV=1 PYTHON=$PWD/.venv/bin/python; fi
HERE=("${IN[@]}" "${PYTHON:=python3}" -m)
if [ "$CONTAINER" = pyxis ] && [ -n "${SLURM_JOB_ID:-}" ]; then
    HERE=(srun --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME" --overlap --mem=0 --mpi=none "${HERE[@]}")
elif [ "$CONTAINER" = pyxis ]; then
    HERE=("$PYTHON" -m) # a dry run, on this host
fi
ASK=("${HERE[@]}" launch.slurm)
PLAN=("${ASK[@]}" plan --config "$CONFIG" ${MIN_BANDWIDTH:+--min-bandwidth "$MIN_BANDWIDTH"} ${NOTICE_S:+--notice "$NOTICE_S"}
    ${TIME_LIMIT:+--time-limit "$TIME_LIMIT"} ${MAX_RESTARTS:+--max-restarts "$MAX_RESTARTS"})

prepare() { # on this node, for all
    local words
    if [ -n "$OWN_VENV" ] && [ -x "$PYTHON" ]; then # never changed here: other jobs may be using it
        "$PYTHON" requirements/install.py check ||
            die 2 "$PYTHON has not the packages of requirements/: run make setup, while no job uses it"
    elif [ -n "$OWN_VENV" ]; then
        make setup ${SLURM_GPUS_ON_NODE:+PLATFORM=cuda} ||
            die 2 "there is no $PYTHON: run make setup where packages can be downloaded"
    fi
    read -ra words <<<"${PREPARE:-}"
    ((${#words[@]} == 0)) || "${HERE[@]}" "${words[@]}"
}

if [ "$DRY_RUN" = 1 ]; then
    prepare
    exec "${PLAN[@]}" "$@"
fi
unset SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE # the job's; steps share its memory (--mem=0)

# ------------------------------------------------------------------------------------------------ steps

nap() { # a trapped signal is not kept waiting
    sleep "${1:-1}" &
    wait $! || true
}

alive() { kill -0 "$1" 2>/dev/null; }

code_of() { # PID of an ended process: CODE is its exit code
    CODE=0
    wait "$1" || CODE=$?
}

declare -A STEPS=() # role -> pid of its srun

start() { # ROLE FLAGS...
    local role=$1
    shift
    stamp "$role starts: $LOGS/$role-*.log"
    srun "$@" "${IN[@]}" "$PYTHON" -m launch.slurm node "$role" "$LOGS/plan.json" 2>>"$LOGS/srun-$role.log" &
    STEPS[$role]=$!
}

step_id() { squeue --steps --noheader --job="$SLURM_JOB_ID" --format="%i %j" | awk -v role="$1" '$2 == role { print $1 }'; }

end_step() { # ROLE: have its tasks end their programs (SIGTERM to srun would kill them), wait, end the rest
    local pid=${STEPS[$1]:-} id i
    [ -n "$pid" ] && alive "$pid" || return 0
    id=$(step_id "$1") || id='' # Slurm does not answer, or has not made the step yet: end srun
    stamp "$1 is ended"
    if [ -n "$id" ]; then
        scancel --signal=INT "$id" 2>/dev/null || true # it says "Invalid job id", and does it
    else
        kill "$pid" 2>/dev/null || true # it may end by itself meanwhile
    fi
    for ((i = 0; i < GRACE_S; i++)); do alive "$pid" || return 0; nap; done
    if [ -n "$id" ]; then scancel "$id" 2>/dev/null || true; fi
    for ((i = 0; i < GRACE_S; i++)); do alive "$pid" || return 0; nap; done
    kill -KILL "$pid" 2>/dev/null || true
}

# ------------------------------------------------------------------------------------------------ how it ends

PHASE=plan CODE='' ASKED_BY='' CANCELLED='' SERVERS_ENDED='' LOGS='' told=''

fact() { # NAME: a field of the job from scontrol; empty if Slurm does not answer for ten seconds
    local told='' i
    for ((i = 0; i < 5; i++)); do
        told=$(scontrol show job "$SLURM_JOB_ID" --oneliner 2>/dev/null | grep -o "\b$1=[^ ]*" | cut -d= -f2) || told=''
        [ -z "$told" ] || break
        sleep 2
    done
    echo "$told"
}

is_over() { # for example cancelled; if Slurm does not answer, the job goes on
    case $(fact JobState) in
        '' | RUNNING | SIGNALING | STOPPED | SUSPENDED | RESIZING) return 1 ;;
    esac
}

on_signal() { # the job still runs before the time limit, but not after scancel
    if is_over; then
        CANCELLED=1
    elif [ -z "$ASKED_BY" ]; then
        ASKED_BY=$1
        stamp "$1: the trainer saves, at the latest when its step ends, then the job ends"
        [ -z "${RUN:-}" ] || touch "$RUN/stop"
    fi
}

finish() { # at any end of this script: no step is left, and the last line says how it ended
    local code=$1 flags=() said lost
    trap - EXIT
    trap '' TERM USR1
    if [ -n "$CANCELLED" ]; then
        [ -z "$LOGS" ] || touch "$LOGS/cancelled" || true # for the tasks: Slurm asked them to end without a reason
        lost=$(sinfo --noheader --Node --nodes="$SLURM_JOB_NODELIST" --states=down,fail --format=%N | sort -u | paste -sd' ') || lost=''
        if [ -n "$lost" ]; then
            echo "FAILED (143): Slurm took the job from its nodes during $PHASE: $lost is down"
        else
            echo "FAILED (143): the job was cancelled, or taken from its nodes, during $PHASE" \
                "(JobState $(fact JobState), Reason $(fact Reason))"
        fi
        exit 143
    fi
    if [ "$PHASE" = plan ]; then
        if [ "$code" = 76 ]; then
            echo "$told"
            code=0
        elif [[ ($code = 2 || $code = 13) && -n $told ]]; then
            echo "${told##*$'\n'}" # the planner's last words
        elif [ -z "$HAS_SPOKEN" ]; then
            echo "FAILED ($code): the plan could not be made; see above"
        fi
        exit "$code"
    fi
    for role in trainer servers preflight; do end_step "$role"; done
    [ -z "$SERVERS_ENDED" ] || flags+=(--servers-ended)
    [ "$REQUEUE" = auto ] || flags+=(--no-requeue)
    said=$("${ASK[@]}" end "$LOGS/plan.json" --phase "$PHASE" --exit-code "${CODE:-$code}" --asked-by "$ASKED_BY" \
        "${flags[@]}") && code=0 || code=$?
    [ -z "$said" ] || echo "$said"
    case $code in
        75) requeue ;;
        0 | 2 | 10 | 11 | 12 | 13 | 85) ;; # that was its last line
        *) echo "FAILED ($code): how the job ended during $PHASE could not be told; its logs are in $LOGS" ;;
    esac
    exit "$code"
}

requeue() {
    if is_over; then die 143 "saved, but the job was cancelled: it is not requeued"; fi
    if scontrol requeue "$SLURM_JOB_ID"; then
        trap 'exit 85' TERM
        nap 300 # Slurm ends this script
    fi
    echo "SAVED: Slurm does not requeue this job; the same command resumes it"
    exit 85
}

obey_signals() { # to this script and to the trainer's tasks: at a preemption Slurm signals only the steps
    local asked
    for asked in "$LOGS"/asked-*; do
        if [ -z "$ASKED_BY" ] && [ -e "$asked" ]; then on_signal "$(cat "$asked")"; fi
    done
    [ -z "$CANCELLED" ] || exit 143
}

await() { # ROLE: until its step has ended; CODE is its exit code
    while alive "${STEPS[$1]}"; do
        obey_signals
        if grep -qs "launch failed" "$LOGS/srun-$1.log"; then end_step "$1"; fi # its peers would wait for it
        if [ "$1" = trainer ] && [ -z "$SERVERS_ENDED" ] && [ -n "${STEPS[servers]:-}" ] && ! alive "${STEPS[servers]}"; then
            SERVERS_ENDED=1
            stamp "the servers have all ended; the trainer gives up at its own deadline"
        fi
        nap
    done
    obey_signals
    code_of "${STEPS[$1]}"
}

# ------------------------------------------------------------------------------------------------ the job

trap 'finish $?' EXIT
trap 'on_signal USR1' USR1
trap 'on_signal TERM' TERM

stamp "job $SLURM_JOB_ID, attempt ${SLURM_RESTART_COUNT:-0}: $CONFIG $*"
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)
prepare
# told: its last line is the folder of logs
told=$("${PLAN[@]}" --nodes "$nodes" "$@")
echo "$told"
# shellcheck source=/dev/null
source "${told##*$'\n'}/plan.sh"
{ git rev-parse HEAD && git status --short && git diff HEAD; } >"$LOGS/revision.txt" 2>&1 || true
rm -f "$RUN/stop" # of an attempt that ended before it could obey
[ -z "$ASKED_BY" ] || touch "$RUN/stop"

PHASE=preflight
start preflight "${PREFLIGHT_STEP[@]}"
await preflight
[ "$CODE" = 0 ] || exit 10

if ((NUM_SERVER_NODES > 0)); then
    PHASE=servers CODE=''
    start servers "${SERVERS_STEP[@]}"
    "${ASK[@]}" wait-servers "$LOGS/plan.json" &
    waiter=$!
    while alive "$waiter" && alive "${STEPS[servers]}"; do obey_signals; nap; done
    obey_signals
    if alive "$waiter"; then kill -USR2 "$waiter" || true; fi # SIGTERM it leaves to the trainer's tasks
    code_of "$waiter"
    [ "$CODE" = 0 ] || exit 11
fi

PHASE=trainer CODE=''
start trainer "${TRAINER_STEP[@]}"
tail --pid="${STEPS[trainer]}" -n +1 -F "$LOGS/trainer-$HEAD_NODE.log" 2>/dev/null & # rank 0 shows the steps
shown=$!
await trainer
wait "$shown" || true
exit "$CODE"
