#!/bin/sh
# Run all tests with the other line of versions (docs/install.md): the last commit, in a clone with a .venv of its own.
# Variable: PYTHON, of the other line; empty: python3.11 where .venv has Python 3.12, else python3.12.
set -eu
cd "$(dirname "$0")/.."

root=$(pwd)
clone=.cache/other_line
version=$(.venv/bin/python -c 'import sys; print(sys.version_info[1])')
if [ -z "${PYTHON:-}" ]; then
    if [ "$version" = 12 ]; then PYTHON=python3.11; else PYTHON=python3.12; fi
fi
if ! "$PYTHON" -c '' 2>/dev/null; then # a shim of pyenv, for one
    echo "$PYTHON does not run here; name one that does: make test-other-line PYTHON=/path/to/python" >&2
    exit 2
fi
if ! [ -e "$clone" ]; then git clone --quiet . "$clone"; fi
git -C "$clone" fetch --quiet "$root" HEAD
git -C "$clone" checkout --quiet --force --detach FETCH_HEAD
git -C "$clone" clean --quiet --force -d
echo "commit $(git -C "$clone" rev-parse --short HEAD), $PYTHON, in $clone"
exec make -C "$clone" test PYTHON="$PYTHON"
