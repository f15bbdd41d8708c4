"""One rank of a training run: `python -m megatron_dapo train OVERRIDES...`, in a forked rank."""

import sys

from megatron_dapo.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
