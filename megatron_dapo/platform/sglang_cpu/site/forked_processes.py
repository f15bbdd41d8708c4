"""SGLang plug-in: a server's scheduler and detokenizer are forks of it, and do not import SGLang
and torch again."""

import multiprocessing
from pathlib import Path

TARGET = "sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes"


def fork_from_here_on(original, *args, **kwargs):
    """Switch from `spawn` to `fork` just before SGLang makes its first process.

    A fork has only the forking thread, and locks held by others stay locked in it. So SystemExit if
    there are other threads (of torch, zmq, a tokenizer), which a newer SGLang may start earlier.
    """
    threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    if len(threads) > 1:
        raise SystemExit(f"A CPU server forks its processes, and has {len(threads)} threads by then: {threads}")
    multiprocessing.set_start_method("fork", force=True)
    return original(*args, **kwargs)


def register():
    """Called by SGLang once, before it forks its processes, which inherit the change."""
    from replacing import run_inside

    run_inside(TARGET, fork_from_here_on)
