#!/usr/bin/env bash
# A real Slurm cluster on this machine, for tests. Needs root, iproute2, util-linux and what `make setup-slurm` installs.
#
#   local_slurm.sh DIR N    starts node1 ... nodeN, prints "ready", and runs until its standard input ends (Ctrl-D).
#                           Then: export SLURM_CONF=DIR/slurm.conf; sbatch ...      DIR/log has the daemons' logs
#   local_slurm.sh DIR on NODE CMD...    runs CMD on a node
#
# Every node has its own network, hostname, processes, /tmp and /dev/shm; they share the rest of the file system, DIR
# and this checkout. Its first process dies with this script, and with it all that runs on the node: nothing is left.
# Jobs of the partition "urgent" take nodes from those of "cpu", which are told so 60 s before. A node counts two GPUs
# that are none. The partition "gpu" has 32 nodes of 8 GPUs that never start: for `sbatch --test-only`.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin

die() { echo "local_slurm: $*" >&2; exit 1; }

(($# >= 2)) || die "usage: $0 DIR N | $0 DIR on NODE CMD..."
DIR=$(realpath "$1")
CHECKOUT=$(realpath "$(dirname "$0")/../..")
export SLURM_CONF=$DIR/slurm.conf
unset "${!SLURM_JOB@}" "${!SLURM_STEP@}"

# In the namespaces of node $1, as their first process. $2: its address.
node() {
    hostname "$1"
    mount --bind "$DIR/hosts" /etc/hosts
    mount -t tmpfs tmpfs /dev/shm
    own_tmp "$DIR/tmp/$1"
    until ip link show eth0 >/dev/null 2>&1; do sleep 0.02; done # it is put here from outside
    ip link set lo up
    ip addr add "$2/24" dev eth0
    ip link set eth0 up
    slurmd -D -c -f "$SLURM_CONF" -N "$1" >/dev/null 2>&1 &
    wait
}

# The folder $1 in place of the /tmp of all; what lies there and has to be seen stays.
own_tmp() {
    local shared
    mkdir -p "$1"
    chmod 1777 "$1"
    for shared in "$DIR" "$CHECKOUT"; do
        [[ $shared = /tmp/* ]] || continue
        mkdir -p "$1/${shared#/tmp/}"
        mount --rbind "$shared" "$1/${shared#/tmp/}"
    done
    mount --rbind "$1" /tmp
}

write_conf() {
    local i
    for ((i = 1; i <= N; i++)); do
        # the second line is for torch, which looks addresses up in reverse over IPv6
        printf '%s node%s\n' "$NET.$i" "$i" "::ffff:$NET.$i" "$i.v4"
    done >"$DIR/hosts"
    printf '%s localhost\n' 127.0.0.1 ::1 >>"$DIR/hosts"
    for i in 0 1; do ln -s /dev/null "$DIR/gpu$i"; done
    printf 'NodeName=%s Name=gpu File=%s\n' "node[1-$N]" "$DIR/gpu[0-1]" "unborn[1-32]" "$DIR/gpu0" >"$DIR/gres.conf"
    cat >"$SLURM_CONF" <<CONF
ClusterName=tests
SlurmctldHost=$(hostname -s)($NET.254)
SlurmctldPort=$PORT
SlurmUser=root
SlurmdUser=root
# cred_expire is also how long a requeued job waits before it starts again
AuthInfo=socket=$DIR/munge/socket,cred_expire=5
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
SlurmctldPidFile=$DIR/slurmctld.pid
SlurmdPidFile=$DIR/slurmd.%n.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/%n.log
# as in cgroups, which a container cannot make, a signal to a step reaches its tasks and not what they started
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
DefMemPerCPU=1000
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MinJobAge=3600
ResumeProgram=/bin/true
SuspendProgram=/bin/true
SuspendTime=3600
SuspendExcNodes=node[1-$N]
$(for ((i = 1; i <= N; i++)); do echo "NodeName=node$i NodeAddr=$NET.$i CPUs=64 RealMemory=512000 Gres=gpu:2"; done)
NodeName=unborn[1-32] CPUs=128 RealMemory=1000000 Gres=gpu:8 State=CLOUD
PartitionName=cpu Nodes=node[1-$N] Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=node[1-$N] MaxTime=INFINITE PriorityTier=2 PreemptMode=OFF
PartitionName=gpu Nodes=unborn[1-32] MaxTime=INFINITE
CONF
}

# For the background: it dies with this script, however the script ends.
with_us() { exec setpriv --pdeathsig KILL -- "$@"; }

start_node() {
    local outer first=
    with_us unshare --kill-child --pid --mount-proc --mount --uts --ipc --net "$0" "$DIR" node "node$1" "$NET.$1" &
    outer=$!
    while [ -z "$first" ]; do first=$(tr -d ' ' <"/proc/$outer/task/$outer/children"); done # forked in its namespaces
    ip link add "$BRIDGE-$1" master "$BRIDGE" up type veth peer name eth0 netns "$first"
    echo "$first" >"$DIR/node$1.pid"
}

stop() {
    local i
    trap - EXIT
    exec 2>/dev/null # bash reports each of them
    jobs -p | xargs -r kill -KILL || true # one may have ended
    wait
    ip link del "$BRIDGE"
    for ((i = 1; i <= N; i++)); do
        while ip link show "$BRIDGE-$i"; do sleep 0.02; done >/dev/null # it goes with its node
    done
}

cluster() {
    local tool i
    N=$1
    [ "$(id -u)" = 0 ] || die "network namespaces for the nodes need root"
    for tool in slurmctld slurmd munged; do command -v $tool >/dev/null || die "no $tool: make setup-slurm"; done
    mkdir -p "$DIR"/{log,state,munge,spool}
    for ((i = 1; i <= N; i++)); do mkdir "$DIR/spool/node$i"; done
    for ((i = 0; i < 200; i++)); do # the first that no other cluster here has
        BRIDGE=slurm$i NET=10.213.$i PORT=$((16800 + i))
        ! ip link add "$BRIDGE" type bridge 2>/dev/null || break
    done
    trap stop EXIT
    trap 'exit 143' TERM INT HUP
    ip addr add "$NET.254/24" dev "$BRIDGE"
    ip link set "$BRIDGE" up
    write_conf
    (umask 077 && head -c 1024 /dev/urandom >"$DIR/munge/key")
    # --force: DIR may lie in a folder that only we may enter
    with_us munged --force --foreground --key-file="$DIR/munge/key" --socket="$DIR/munge/socket" --num-threads=2 \
        --pid-file="$DIR/munge/pid" --seed-file="$DIR/munge/seed" >"$DIR/log/munged.log" 2>&1 &
    until [ -S "$DIR/munge/socket" ]; do sleep 0.02; done
    with_us slurmctld -D -c -f "$SLURM_CONF" >/dev/null 2>&1 &
    for ((i = 1; i <= N; i++)); do start_node "$i"; done
    while ((SECONDS < 30)); do
        if [ "$(timeout 5 sinfo -h -N -p cpu -o %t 2>/dev/null | grep -cx idle)" = "$N" ]; then
            echo ready
            cat >/dev/null
            exit 0
        fi
        sleep 0.1
    done
    tail -n 20 "$DIR"/log/* >&2
    die "the nodes were not idle after 30 s"
}

case $2 in
    on) exec nsenter --all --target "$(cat "$DIR/$3.pid")" "${@:4}" ;;
    node) node "$3" "$4" ;;
    *) cluster "$2" ;;
esac
