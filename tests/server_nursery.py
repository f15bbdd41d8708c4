"""Starts SGLang servers by forking: one import for all, and a new server after a second.

python -m tests.server_nursery

Run it with the environment of a server. Commands are lines of its input, as JSON, and so are its
answers. ["start", ARGUMENTS, ENVIRONMENT, LOG] is answered with the server's process id, ["poll",
PID] with its exit code, null while it runs. The end of the input ends it, and with it all servers.
"""

import json
import os
import sys
import tempfile

import setproctitle

from megatron_dapo.common.large_imports import large_imports
from megatron_dapo.common.parent_death import end_with_parent
from megatron_dapo.servers import keyed_sglang


def import_sglang() -> None:
    """Import the modules of keyed_sglang.main. No thread may start: forks have one thread only."""
    os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", keyed_sglang.SERVED_MODELS)
    with large_imports():
        import sglang.launch_server
        from sglang.srt.plugins import load_plugins

        load_plugins()
        import sglang.srt.entrypoints.http_server  # noqa: F401
    if (num_threads := len(os.listdir("/proc/self/task"))) > 1:
        raise RuntimeError(f"an import started {num_threads - 1} threads; forks of this process would be without them")


def serve(arguments: list[str], environment: dict[str, str], log: str) -> int:
    """Be a server; return its exit code."""
    os.setsid()
    nothing, output = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_APPEND)
    for number, descriptor in enumerate((nothing, output, output)):
        os.dup2(descriptor, number)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # an import may have asked for it
    sys.argv = [keyed_sglang.__file__, *arguments]
    return keyed_sglang.main()


def exit_code(server: int) -> int | None:
    """Return a finished server's exit code, as subprocess.Popen gives it."""
    ended, status = os.waitpid(server, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def main() -> int:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # SGLang's prints are no answer
    import_sglang()
    # it finds the place of titles by the variables at the start of the process
    setproctitle.getproctitle()
    sys.stdout.flush()
    nursery = os.getpid()
    for line in sys.stdin:
        command, *values = json.loads(line)
        if command == "start":
            server = os.fork()
            if not server:
                end_with_parent(nursery)
                answers.close()
                return serve(*values)
            answer: int | None = server
        else:
            answer = exit_code(*values)
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # to take thousands of modules apart would take a second


if __name__ == "__main__":
    sys.exit(main())
