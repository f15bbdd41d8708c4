"""CPU adaptation of SGLang: environment and arguments of a server's processes, only without CUDA.

All of it is in `site/`, first on the PYTHONPATH of the server's processes only:

    adaptation                        reason
    --------------------------------  ------------------------------------------------------------
    sgl_kernel (stand-in package)     SGLang imports its CUDA kernels on the CPU too, and calls none
    torchvision (stand-in package)    imported for image models; the real one fails to load beside
                                        a CPU torch
    attention_sinks (plug-in, by      torch_native takes no attention sinks, and SGLang refuses it
      the dist-info, SGLang's           for gpt-oss; the next two compute with them
      public way)
    batch_invariant (plug-in)         SGLang's deterministic inference needs operators with results
                                        independent of the batch; it has them for GPUs only
    batched_decode (plug-in)          torch_native decodes request by request in Python: 4 to 5
                                        times slower with 64 requests in flight
    batched_extend (plug-in)          the same for prompts: a call per request and layer
    forked_processes (plug-in)        CUDA needs spawned processes, which import everything again:
                                        a start then takes 28 s of CPU, forked 10
    fp8_products (plug-in)            SGLang has products with FP8 blocks for GPUs and CPUs with AMX
    gated_delta_net (plug-in), and    SGLang has this layer for GPUs and CPUs with AMX; its other CPUs
      sgl_kernel.mamba                  lack its operators
    host_memory (plug-in)             the routers' choice of experts is kept in memory registered
                                        with CUDA, which raises without a GPU
    memory_saver (plug-in)            with --enable-memory-saver: the package for it is GPUs' only
    prompt_end (plug-in)              on request to end, a server without requests waits up to 5 s,
                                        time needed only on GPUs
    sleep_when_paused (plug-in)       a paused server's scheduler polls for requests all the time,
                                        and takes a core from the trainer during its push

A stand-in's functions refuse to be called, by name. A plug-in without its target stops the server
and names it. `server_arguments` has the arguments for the CPU.
"""

import os
from importlib.util import find_spec
from pathlib import Path

from megatron_dapo.common.child_environment import ONE_THREAD

SITE = Path(__file__).parent / "site"

# else each batch is copied into buffers of constant size, needed only by CUDA graphs
NO_COPIES = {"SGLANG_EAGER_INPUT_NO_COPY": "1"}

# else the allocator gives a step's keys and values back to the kernel, and the next step waits for
# memory page by page
KEEPS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**28)}

# else g++ compiles functions decorated with torch.compile (Gemma 3's rotary embedding, routers), at
# the start of gpt-oss or at the first request of others: 20 to 30 s, on machines that otherwise
# need no compiler
NOTHING_COMPILED = {"TORCHDYNAMO_DISABLE": "1"}

# for deterministic inference: else the batch decides the cuts of a long prompt. SGLang guesses the
# share of memory from the size of a chunk, and finds none; the cache is bounded by
# --max-total-tokens
WHOLE_PROMPTS = ("--chunked-prefill-size", "-1", "--mem-fraction-static", "0.8")

MAX_TOTAL_TOKENS = 16384
MAX_RUNNING_REQUESTS = 64

# of recurrent states: SGLang lets one request take that many, for itself and the cache of prefixes
STATES_PER_REQUEST = 3


def server_environment(environ: dict[str, str] | None = None, tensor_model_parallel_size: int = 1) -> dict[str, str]:
    """Return the environment of a CPU server, based on this process's or the passed one. Raises
    RuntimeError if SGLang is not installed or has no plug-ins."""
    environ = dict(os.environ if environ is None else environ)
    _check_sglang()
    path = [str(SITE), *filter(None, [environ.get("PYTHONPATH")])]
    if tensor_model_parallel_size > 1:  # without it SGLang wants a NUMA node per rank
        cores = (str(rank % (os.cpu_count() or 1)) for rank in range(tensor_model_parallel_size))
        environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(cores))
    # two threads spin on barriers and take 2.3 times the CPU, and a process that has some cannot be
    # forked
    settings = ONE_THREAD | NO_COPIES | {"PYTHONPATH": os.pathsep.join(path), "SGLANG_USE_CPU_ENGINE": "1"}
    return KEEPS_MEMORY | NOTHING_COMPILED | environ | settings


def server_arguments(max_total_tokens: int | None = None, max_running_requests: int | None = None) -> list[str]:
    """Return the arguments of `sglang.launch_server` on the CPU."""
    num_requests = max_running_requests or MAX_RUNNING_REQUESTS
    return [
        *("--device", "cpu"),
        *("--attention-backend", "torch_native"),
        *(
            "--max-total-tokens",
            str(max_total_tokens or MAX_TOTAL_TOKENS),
        ),  # else the KV cache takes most of the memory
        *("--max-running-requests", str(num_requests)),
        # else states of hybrids take half of the memory
        *("--max-mamba-cache-size", str(STATES_PER_REQUEST * num_requests)),
        "--disable-overlap-schedule",
        # torch_native looks for a layer's window in the cache of all tokens
        "--disable-hybrid-swa-memory",
        "--sleep-on-idle",  # else an idle server keeps a core busy
        "--skip-server-warmup",
    ]


def _check_sglang() -> None:
    """Check that SGLang is installed and has plug-ins. Without them the decode would silently stay
    slow."""
    package = find_spec("sglang")
    if package is None or not package.submodule_search_locations:
        raise RuntimeError("SGLang is not installed; `make setup` installs it.")
    plugins = Path(package.submodule_search_locations[0]) / "srt" / "plugins" / "hook_registry.py"
    if not plugins.exists():
        raise RuntimeError(f"The CPU adaptation of SGLang needs its plug-ins, and {plugins} is gone.")
