"""The sizes of the rungs, for a machine with so many GPUs, or with none."""

from dataclasses import dataclass, replace

from megatron_dapo.config.schema.config import Config

_MEGATRON = "actor_rollout_ref.actor.megatron"
_SERVER = "actor_rollout_ref.rollout.server"

SYNTHETIC = "trainer.synthetic_batch=true"

MIN_GPU_BANDWIDTH = 150.0
"""Required bus bandwidth (GB/s) of the all-reduce over one node's GPUs, without --min-bandwidth. It
needs NVLink: PCIe 5.0 x16, NCCL's fallback, has at most 64 GB/s per direction (PCI-SIG). It is half
of an A100's NVLink per direction and a third of an H100's (`megatron_dapo.estimates.hardware`)."""

_MEASURED_PROMPTS = 64


@dataclass(frozen=True)
class Layout:
    """Tensor, pipeline and data parallelism of a trainer on one machine."""

    tp: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def num_ranks(self) -> int:
        """Return the number of trainer ranks."""
        return self.tp * self.pp * self.dp

    def overrides(self) -> list[str]:
        """Return the keys of this layout, with sequence parallelism if possible."""
        return [
            f"{_MEGATRON}.tensor_model_parallel_size={self.tp}",
            f"{_MEGATRON}.pipeline_model_parallel_size={self.pp}",
            f"{_MEGATRON}.sequence_parallel={str(self.tp > 1).lower()}",
            f"trainer.n_procs_per_node={self.num_ranks}",
        ]

    def __str__(self) -> str:
        return f"TP {self.tp}, PP {self.pp}, DP {self.dp}"


@dataclass(frozen=True)
class Sizes:
    """The sizes of the small rungs, which train the demo's model."""

    num_gpus: int
    """Of the machine; 0: the rungs run on the CPU."""
    whole: Layout
    """The layout compared with one process."""
    resumed: Layout
    """Of the killed and resumed run, and of the run that shares its GPUs with servers."""
    beside_servers: Layout
    """Of the trainer if servers have the other GPUs."""
    num_servers: int
    server_tp: int = 1

    def servers(self) -> list[str]:
        """Return the keys of a run with these servers."""
        return [
            f"{_SERVER}.num_servers={self.num_servers}",
            f"{_SERVER}.tensor_model_parallel_size={self.server_tp}",
        ]

    @property
    def num_sharing(self) -> int:
        """Return the number of servers on the GPUs of `resumed`."""
        return self.resumed.num_ranks // self.server_tp

    def sharing(self) -> list[str]:
        """Return the keys of a run whose servers are on its own GPUs."""
        servers = replace(self, num_servers=self.num_sharing).servers()
        return ["actor_rollout_ref.hybrid_engine=true", *self.resumed.overrides(), *servers]


_CPU = Sizes(0, Layout(2, 2, 2), Layout(dp=2), Layout(2), num_servers=2)
# the most GPUs first
_BY_GPUS = (
    Sizes(8, Layout(2, 2, 2), Layout(2, 2, 2), Layout(2, 2), num_servers=2, server_tp=2),
    Sizes(4, Layout(2, 2), Layout(2, dp=2), Layout(2), num_servers=2),
    Sizes(2, Layout(2), Layout(dp=2), Layout(), num_servers=1),
    Sizes(1, Layout(), Layout(), Layout(), num_servers=1),
)


def sizes_of(num_gpus: int) -> Sizes:
    """Return the largest sizes that fit into this many GPUs; 0 = on the CPU."""
    return next((sizes for sizes in _BY_GPUS if sizes.num_gpus <= num_gpus), _CPU)


def measured(config: Config) -> list[str]:
    """Return the keys for a step of a recipe small enough to be measured in minutes.

    They ask for synthetic batches of about 64 prompts, in whole mini-batches, but no more than the
    recipe's own. An optimizer step, and with it the memory and the tokens per second, stays the
    same.
    """
    mini = config.actor_rollout_ref.actor.ppo_mini_batch_size
    prompts = min(config.data.train_batch_size, -(-_MEASURED_PROMPTS // mini) * mini)
    # meaningless here, and would have to equal the batch size without a filter
    return [SYNTHETIC, f"data.train_batch_size={prompts}", "data.gen_batch_size=null"]
