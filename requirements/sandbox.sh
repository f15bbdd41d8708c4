#!/bin/sh
# `make setup-sandbox`: bubblewrap, for the reward function code_tests, on Debian and Ubuntu.
set -eu

if command -v bwrap >/dev/null; then
    echo "setup-sandbox: $(bwrap --version) is installed."
    exit 0
fi
if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    echo "setup-sandbox: install the package bubblewrap with the tools of this system (apt-get needs root)." >&2
    exit 2
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends bubblewrap
