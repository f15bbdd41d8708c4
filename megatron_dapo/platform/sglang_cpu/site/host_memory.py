"""SGLang plug-in: memory of the host is not registered with CUDA, which SGLang does on the CPU too; there it raises."""

TARGET = "sglang.srt.mem_cache.pool_host.common._cuda_host_register"


def leave_unregistered(original, *args, **kwargs):
    """Do nothing: no GPU will copy from there."""


def register():
    """SGLang calls this once, before it makes its processes: as forks they inherit what is changed."""
    from replacing import run_inside

    run_inside(TARGET, leave_unregistered)
