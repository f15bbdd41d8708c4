#!/bin/sh
# What the recipes of this folder run in the image, as root and in the folder of the repository:
#     sh containers/install.sh system     packages of Ubuntu 24.04
#     sh containers/install.sh python     .venv by `make setup PLATFORM=cuda`, and Transformer Engine
set -eu

case ${1:-} in
    system)
        export DEBIAN_FRONTEND=noninteractive
        apt-get update
        # g++ and Python's headers: Triton and SGLang compile on the nodes. numactl: SGLang binds its processes with it.
        # The last line: InfiniBand; without these libraries NCCL uses sockets and does not say so.
        apt-get install --yes --no-install-recommends \
            g++ make numactl python3.12 python3.12-dev python3.12-venv \
            ibverbs-providers libibverbs1 librdmacm1 rdma-core
        rm -rf /var/lib/apt/lists/*
        ;;
    python)
        export PIP_NO_CACHE_DIR=1
        make setup PLATFORM=cuda PYTHON=python3.12
        # the recipes of the paper's runs need it; its torch part is compiled here, with the headers of the lock's cuDNN
        # and NCCL, which are those it runs with
        PIP_CONSTRAINT='' NVTE_BUILD_USE_NVIDIA_WHEELS=1 .venv/bin/python -m pip install --no-build-isolation -r requirements/transformer_engine.txt
        ;;
    *)
        echo "install.sh: ${1:-nothing} is neither system nor python" >&2
        exit 2
        ;;
esac
