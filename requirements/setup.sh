#!/bin/sh
# Find a Python that runs and is one of ours, and let it make .venv. Variables: PYTHON, PLATFORM (both may be empty).
set -eu
cd "$(dirname "$0")/.."

usable() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' >/dev/null 2>&1
}

if [ -n "${PYTHON:-}" ]; then
    if ! usable "$PYTHON"; then
        echo "setup: PYTHON=$PYTHON is not a Python 3.11 or 3.12 that runs and has venv and ensurepip." >&2
        exit 2
    fi
    exec "$PYTHON" requirements/install.py "${PLATFORM:-}"
fi

# what .venv was made with comes first; then names that may be shims of pyenv, which exist and fail. Python 3.12 has the
# main line of versions for clusters (docs/install.md)
made_with=$(sed -n 's/^executable = //p' .venv/pyvenv.cfg 2>/dev/null || true)
names="python3.11 python3.12"
if [ "${PLATFORM:-}" = cuda ]; then names="python3.12 python3.11"; fi
for candidate in "$made_with" $names python3; do
    if [ -n "$candidate" ] && usable "$candidate"; then
        exec "$candidate" requirements/install.py "${PLATFORM:-}"
    fi
done
echo "setup: found no Python 3.11 or 3.12 with venv and ensurepip (on Debian: apt install python3-venv)." >&2
echo "       Name one: make setup PYTHON=/path/to/python3.11" >&2
exit 2
