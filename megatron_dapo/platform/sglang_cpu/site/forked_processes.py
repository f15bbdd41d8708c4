"""SGLang plug-in: a server's scheduler and detokenizer are forks of it, and do not import SGLang and torch again."""

import multiprocessing
from pathlib import Path

TARGET = "sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes"


def fork_from_here_on(original, *args, **kwargs):
    """Here SGLang makes the first of its processes; it asked for `spawn` before, and from here on it is `fork`.

    A fork has only the thread that forks, and locks that others held stay locked in it: SystemExit where there are
    others (of torch, zmq, a tokenizer), which a newer SGLang may start earlier.
    """
    threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    if len(threads) > 1:
        raise SystemExit(f"A CPU server forks its processes, and has {len(threads)} threads by then: {threads}")
    multiprocessing.set_start_method("fork", force=True)
    return original(*args, **kwargs)


def register():
    """SGLang calls this once, before it makes its processes: as forks they inherit what is changed."""
    from replacing import run_inside

    run_inside(TARGET, fork_from_here_on)
