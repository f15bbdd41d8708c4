"""`make demo`: DAPO on two-digit sums, with the whole machinery on one machine: on its CPU, or
(not yet run there) on its GPUs.

python -m examples.arithmetic.demo [key=value ...]
"""

import importlib.metadata
import os
import sys
from collections.abc import Sequence

from examples.arithmetic.problems import BASE, write_files
from examples.demo_run import Demo
from megatron_dapo.checks.gpu_checks import Gpu, machine_here
from megatron_dapo.common.sizes import GB


def on_gpus(gpus: Sequence[Gpu], torch_version: str) -> list[str]:
    """Return the overrides for a machine with these GPUs: two train and one samples; one or two are
    shared by trainer and servers. None for a torch without CUDA: the run is on the CPU."""
    if not gpus or "+cpu" in torch_version:
        return []
    memory = f"trainer.gpu_memory_gb={min(gpu.memory for gpu in gpus) // GB}"
    if len(gpus) > 2:
        return [memory]
    shared = [memory, "actor_rollout_ref.hybrid_engine=true", f"trainer.n_procs_per_node={len(gpus)}"]
    shared.append(f"actor_rollout_ref.rollout.server.num_servers={len(gpus)}")
    if len(gpus) == 1:
        megatron = "actor_rollout_ref.actor.megatron"
        shared += [f"{megatron}.tensor_model_parallel_size=1", f"{megatron}.sequence_parallel=false"]
    else:
        shared.append("trainer.gpu_reserve_gb=3")  # two ranks keep less of a GPU than a node's
    return shared


def machine() -> list[str]:
    """Return the overrides for this machine."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    here = machine_here(None if names is None else names.split(","))
    return on_gpus(here.gpus, importlib.metadata.version("torch"))


DEMO = Demo(
    title="DAPO on two-digit sums: a 0.6 M parameter Qwen2 over characters learns to work them out digit by digit.",
    config="demo.yaml",
    files=write_files,
    machine=machine,
    model=lambda: BASE,
    next_steps=(
        (
            "switch a technique off",
            ".venv/bin/python -m examples.arithmetic.demo algorithm.dynamic_sampling.enable=false",
        ),
        ("train a real language model", "make demo-llm"),
        ("use your own data and reward", "README.md, 'Your own data and reward'"),
    ),
)

if __name__ == "__main__":
    sys.exit(DEMO.run(sys.argv[1:]))
