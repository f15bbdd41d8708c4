#!/bin/sh
# `make setup-browser`: the Chromium in which tests/e2e opens the report, on Debian and Ubuntu.
set -eu

for name in chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null; then
        echo "setup-browser: $(command -v "$name") is installed."
        exit 0
    fi
done
if ! command -v apt-get >/dev/null; then
    echo "setup-browser: there is no apt-get here; install Chromium with the tools of this system." >&2
    exit 2
fi
if [ "$(id -u)" != 0 ]; then
    echo "setup-browser: apt-get needs root: sudo make setup-browser" >&2
    exit 2
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends chromium
command -v chromium >/dev/null || { echo "setup-browser: Chromium is still missing; see above." >&2; exit 1; }
