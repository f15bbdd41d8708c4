"""SGLang plug-in: leaves host memory unregistered. SGLang registers it with CUDA on the CPU too,
which raises there."""

TARGET = "sglang.srt.mem_cache.pool_host.common._cuda_host_register"


def leave_unregistered(original, *args, **kwargs):
    """Do nothing: no GPU will copy from there."""


def register():
    """Called by SGLang once, before it forks its processes, which inherit the change."""
    from replacing import run_inside

    run_inside(TARGET, leave_unregistered)
