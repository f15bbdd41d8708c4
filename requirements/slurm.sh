#!/bin/sh
# `make setup-slurm`: what tests/slurm needs, on Debian and Ubuntu. The tests start daemons of their own.
set -eu
PATH=$PATH:/usr/sbin:/sbin

is_complete() {
    for tool in slurmctld slurmd sbatch munged ip shellcheck; do command -v "$tool" >/dev/null || return 1; done
    set -- /usr/lib/*/pmix2/lib/libpmix.so
    [ -e "$1" ]
}

if is_complete; then
    echo "setup-slurm: Slurm $(slurmctld -V | cut -d' ' -f2) is installed."
    exit 0
fi
if ! command -v apt-get >/dev/null; then
    echo "setup-slurm: there is no apt-get here; install slurmctld, slurmd, sbatch, munge, iproute2 and shellcheck" \
        "with the tools of this system." >&2
    exit 2
fi
if [ "$(id -u)" != 0 ]; then
    echo "setup-slurm: apt-get needs root: sudo make setup-slurm" >&2
    exit 2
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends slurmctld slurmd slurm-client munge libpmix2 iproute2 shellcheck
for library in /usr/lib/*/pmix2/lib/libpmix.so.2; do # Slurm's plug-in asks for it by this name
    [ ! -e "$library" ] || ln -sf libpmix.so.2 "${library%.2}"
done
is_complete || { echo "setup-slurm: something is still missing; see above." >&2; exit 1; }
