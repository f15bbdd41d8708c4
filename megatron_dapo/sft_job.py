"""This rank's parts of supervised fine-tuning, for the loop in sft.py."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from megatron_dapo.checkpointing.model_weights import weight_loader
from megatron_dapo.checkpointing.resume import Start
from megatron_dapo.checkpointing.run_checkpoints import RunCheckpoints, Trained
from megatron_dapo.common.errors import JobError, RunStopped
from megatron_dapo.common.standard_streams import print_line
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.batching import TrainSample
from megatron_dapo.data.conversations import ConversationSet
from megatron_dapo.data.packing import MicroBatch
from megatron_dapo.data.tokenizer import load_tokenizer
from megatron_dapo.platform import watchdog
from megatron_dapo.platform.device import is_gpu, peak_memory
from megatron_dapo.run_setup import JoinedRanks, joined_ranks, locked_start, open_telemetry, save_model, trained_model
from megatron_dapo.storage.model_folder import MEGATRON, ModelFolder
from megatron_dapo.telemetry import performance
from megatron_dapo.telemetry.closing_table import has_validation
from megatron_dapo.telemetry.performance import RankPeak
from megatron_dapo.telemetry.telemetry import NullTelemetry, Telemetry
from megatron_dapo.training.conversation_batches import ConversationDistributor, ConversationDraws
from megatron_dapo.training.in_use import in_use
from megatron_dapo.training.policy import Policy

# for rank 0 to read and tokenize the files, or to write a checkpoint, while the others wait
_WAIT_S = 7200.0
_COMPUTING = ("distribute", "update", "validation")


class SftJob:
    """This rank's parts of the run. Rank 0 has the conversations and writes the metrics."""

    def __init__(self, config: Config, ranks: JoinedRanks, telemetry: Telemetry | NullTelemetry, start: Start) -> None:
        """Read the files on rank 0 and build the model. Collective; raises UserError on all
        ranks."""
        self.config = config
        self.layout = ranks.layout
        self.run = ranks.run
        self.telemetry = telemetry
        self._draws: ConversationDraws | None = None  # on rank 0
        self._held_out_samples: list[TrainSample] | None = None
        held_out = ranks.layout.agreement.leader("reading the conversations", self._read)
        self.policy = Policy(config, ranks.layout, weight_loader(start, "model"))
        self.distributor = ConversationDistributor(config, ranks.layout, self.policy.model.spec)
        self._held_out = self.distributor.held_out(self._held_out_samples) if held_out else None
        self._drawn: list[TrainSample] = []  # of the step, on rank 0
        trained = Trained(trained_model(MEGATRON, self.policy), critic=None, kl_controller=None, rollout=self._draws)
        self.checkpoints = RunCheckpoints(config, ranks.run, ranks.layout, trained, start)

    def _read(self) -> bool:
        """Read all files, on rank 0. Return whether some are held out."""
        data = self.config.data
        tokenizer = load_tokenizer(ModelFolder.of(self.config.actor_rollout_ref.model.path).hf)
        conversations = ConversationSet.load(data.train_files, self.config, tokenizer)
        self._draws = ConversationDraws.of(conversations, self.config)
        reports = conversations.report
        if data.val_files:
            held_out = ConversationSet.load(data.val_files, self.config, tokenizer)
            self._held_out_samples = held_out.samples
            reports = [*reports, *held_out.report]
        drawn = self.config.trainer.total_training_steps * data.train_batch_size
        epochs = drawn / len(conversations.samples)
        print_line("\n".join([*map(str, reports), f"{drawn} conversations are drawn in all: {epochs:.3g} epochs"]))
        return bool(data.val_files)

    def next_batch(self, step: int) -> list[MicroBatch]:
        """Draw the step's conversations, and return this rank's part of them."""
        watchdog.begin_step(step)
        with self.telemetry.phase("distribute"):
            if self._draws is not None:
                self._drawn = self._draws.next(self.config.data.train_batch_size)
            return self.distributor(self._drawn if self._draws is not None else None)

    def update(self, step: int, mini_batch: list[MicroBatch]) -> dict[str, float]:
        """Take one optimizer step; return its metrics."""
        with self.telemetry.phase("checkpoint"):
            self.checkpoints.poll()
        with self.telemetry.phase("update"):
            return self.policy.update([mini_batch], weight_version=step - 1)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Log a step. On GPUs collective over all ranks, for the peaks of memory."""
        peaks = self.layout.gather(RankPeak(self.layout.pp_rank, *peak_memory())) if is_gpu() else []
        if self._draws is not None:
            metrics = metrics | {f"data/{name}": value for name, value in self._draws.cursor.passes().items()}
            metrics |= performance.fine_tuning_metrics(
                [sample.length for sample in self._drawn],
                sum(int(sample.loss_mask.sum()) for sample in self._drawn),
                update_s=self.telemetry.seconds("update"),
                step_s=self.telemetry.step_seconds(),
                num_ranks=self.layout.world_size,
            )
            metrics |= performance.memory_metrics(peaks) if peaks else {}
        self.telemetry.log(step, metrics)

    def validate(self, step: int) -> None:
        """Log the loss of the held-out conversations after this step, if any, and not yet in
        metrics.jsonl."""
        path = self.run.metrics
        if self._held_out is None or self.layout.agreement.leader(f"reading {path}", has_validation, path, step):
            return
        with self.telemetry.phase("validation"):
            metrics = self.policy.held_out_loss(self._held_out.batches())
        self.telemetry.log_validation(step, metrics)

    def save(self, step: int) -> None:
        """Save a checkpoint if one is due. Raises RunStopped if the run was asked to stop."""
        with self.telemetry.phase("checkpoint"):
            is_stopped = self.checkpoints.after_step(step, num_optimizer_steps=1)
        if is_stopped:
            raise RunStopped

    def finish(self) -> None:
        """Wait for the background save, then save the model as a Hugging Face checkpoint, also
        after a failure of that save. Raises JobError, or UserError, on all ranks."""
        try:
            with self.telemetry.phase("checkpoint"):
                self.checkpoints.finish()
        except JobError:
            self._save_model()
            raise
        self._save_model()

    def _save_model(self) -> None:
        with self.telemetry.phase("save_model"):
            save_model(self.config, self.run, self.layout, self.policy.model)


@contextmanager
def running_sft_job(config: Config) -> Iterator[SftJob]:
    """Join the process groups, read the conversations, build the model and yield the job.

    On every way out all of this is taken down again. A RunStopped from the block ends here.
    """
    limits = dict.fromkeys(_COMPUTING, config.actor_rollout_ref.actor.megatron.timeout_s)
    with joined_ranks(config, limits, _WAIT_S) as ranks, ExitStack() as stack:
        start = locked_start(config, ranks, stack)
        is_leader = ranks.layout.rank == 0
        telemetry = open_telemetry(config, ranks, start) if is_leader else NullTelemetry()
        stack.callback(telemetry.close)
        job = SftJob(config, ranks, telemetry, start)
        if is_leader:
            print_line(in_use(job.policy.model, job.policy.state))
        yield job
