"""Start of every run, of any kind: process groups, watchdog, lock, checkpoint, sinks."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from megatron_dapo.checkpointing.config_changes import config_to_plain
from megatron_dapo.checkpointing.manifest import package_versions
from megatron_dapo.checkpointing.model_card import model_card
from megatron_dapo.checkpointing.resume import Start
from megatron_dapo.checkpointing.run_checkpoints import TrainedModel, choose_start
from megatron_dapo.checkpointing.run_lock import RunLock
from megatron_dapo.common.errors import RunStopped
from megatron_dapo.common.files import write_whole
from megatron_dapo.config.loader import to_yaml
from megatron_dapo.config.schema.config import Config
from megatron_dapo.huggingface.spec_reader import read_model_spec
from megatron_dapo.models.build import ModelParts, require_kernel_for_sinks
from megatron_dapo.models.hf_io import export_hf
from megatron_dapo.models.peft_folder import export_adapters
from megatron_dapo.models.user_buffers import release_user_buffers
from megatron_dapo.platform.device import require_usable_gpus
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.platform.watchdog import Watchdog
from megatron_dapo.storage.model_folder import ModelFolder
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.telemetry.closing_table import read_metrics
from megatron_dapo.telemetry.machine import write_machine
from megatron_dapo.telemetry.telemetry import Telemetry
from megatron_dapo.training.critic import Critic
from megatron_dapo.training.policy import Policy

# beyond the watchdog's limits: its message, with the missing ranks, comes before a collective's
HANG_MARGIN_S = 60.0


@dataclass(frozen=True)
class JoinedRanks:
    """This rank among the others of a run, and the folder of the run."""

    layout: ParallelLayout
    run: RunFolder
    watchdog: Watchdog


@contextmanager
def joined_ranks(config: Config, limits: Mapping[str, float], wait_s: float) -> Iterator[JoinedRanks]:
    """Join the process groups, and leave them again on every way out. A RunStopped from the block
    ends here.

    limits: seconds for a phase, by its name.
    wait_s: for all other phases; in them ranks wait for work of rank 0.
    """
    require_usable_gpus()
    megatron = config.actor_rollout_ref.actor.megatron
    require_kernel_for_sinks(read_model_spec(config.actor_rollout_ref.model.path), megatron)
    layout = ParallelLayout.initialize(
        tp=megatron.tensor_model_parallel_size,
        pp=megatron.pipeline_model_parallel_size,
        vpp=megatron.virtual_pipeline_model_parallel_size,
        ep=megatron.expert_model_parallel_size,
        etp=megatron.expert_tensor_parallel_size,
        cp=megatron.context_parallel_size,
        sp=megatron.sequence_parallel,
        seed=config.trainer.seed,
        timeout_s=megatron.timeout_s + HANG_MARGIN_S,
        object_timeout_s=wait_s + HANG_MARGIN_S,
    )
    run = RunFolder.of(config.trainer)
    watchdog = Watchdog(layout.agreement, run.logs / "hang", dict(limits), wait_s, megatron.timeout_s)
    with watchdog:
        with suppress(RunStopped):
            yield JoinedRanks(layout, run, watchdog)
        release_user_buffers()
        layout.shutdown()


def locked_start(config: Config, ranks: JoinedRanks, stack: ExitStack) -> Start:
    """Lock the run folder until the stack is left, and return the run's start. Raises UserError on
    all ranks."""
    lock = RunLock(ranks.run.lock)
    ranks.layout.agreement.leader(f"locking {ranks.run.path}", lock.acquire)
    stack.callback(lock.release)
    return choose_start(config, ranks.run, ranks.layout.agreement)


def open_telemetry(config: Config, ranks: JoinedRanks, start: Start) -> Telemetry:
    """Write the resolved config and the machine into the run folder, and open the sinks there."""
    write_whole(ranks.run.create().config, to_yaml(config))
    write_machine(ranks.run.machine, ranks.layout.world_size)
    return Telemetry(config, ranks.run, start.step if start.folder else None)


def save_model(config: Config, run: RunFolder, layout: ParallelLayout, model: ModelParts) -> None:
    """Write the trained model as a Hugging Face checkpoint, and its adapters, if any, as a PEFT
    folder. Collective; raises UserError on all ranks."""
    source = ModelFolder.of(config.actor_rollout_ref.model.path).hf
    card = _card(config, run) if layout.rank == 0 else None
    export_hf(model, layout, source, run.model, readme=card)
    if model.lora is not None:
        export_adapters(model, layout, str(source), run.adapter)


def _card(config: Config, run: RunFolder) -> str:
    records: list[dict] = []
    with suppress(OSError):  # a model without figures is better than none
        records = read_metrics(run.metrics)
    return model_card(config_to_plain(config), config.trainer.total_training_steps, records, package_versions())


def trained_model(folder: str, part: Policy | Critic) -> TrainedModel:
    """Return a trained model's state for the part `folder` of a checkpoint."""
    return TrainedModel(folder, part.model, part.state.optimizer, part.state.lr_schedule)
