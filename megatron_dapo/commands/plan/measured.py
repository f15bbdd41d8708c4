"""An earlier run's measurements in place of a time plan's assumptions: its lengths, and the
slowness of its parts.

A part's factor is measured / estimated for the measured config, on the same hardware's row. It
multiplies the estimate of another config (more samples, another layout), so ratios between configs
stay those of the estimate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_dapo.commands.plan.step_time import Assumptions, Factors, PhaseTimes, num_servers, phase_times
from megatron_dapo.commands.plan.training_time import Efficiency
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.derived import replaces_groups
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.lengths import SPREAD, Lengths
from megatron_dapo.estimates.hardware import Hardware
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.telemetry.metrics_file import records_of

FIRST_STEPS = 2
"""Steps left out at the beginning: they allocate, compile and fill caches."""

Record = dict[str, float]


@dataclass(frozen=True)
class MeasuredRun:
    """A run's config and the records of its steps after the first ones."""

    name: str
    config: Config
    records: Sequence[Record]

    @classmethod
    def of(cls, path: Path) -> "MeasuredRun":
        """Read a run folder. Raises UserError for one without a config, or with too few steps."""
        folder = RunFolder(path)
        try:
            steps = [record for _, record in records_of(folder.metrics) if record and "rollout/tokens_per_s" in record]
        except OSError as error:
            raise UserError(f"--measured {path}: {folder.metrics.name} cannot be read; give a run's folder.") from error
        if len(steps) <= FIRST_STEPS:
            raise UserError(
                f"--measured {path}: {folder.metrics.name} has {len(steps)} steps, but the first {FIRST_STEPS} "
                f"do not count; let the run do more."
            )
        return cls(path.name, load_config(folder.config), steps[FIRST_STEPS:])

    def mean(self, metric: str) -> float:
        """Return a metric's mean over the steps; a step without it counts as 0."""
        return self.total(metric) / len(self.records)

    def total(self, metric: str) -> float:
        """Return a metric's sum over the steps."""
        return sum(record.get(metric, 0.0) for record in self.records)

    def prompt(self) -> float:
        """Return the mean tokens of a prompt."""
        return self._mean_of_samples("prompt_length/mean")

    def lengths(self, longest: int) -> Lengths:
        """Return the distribution of responses with the logged mean and mean square.

        It is cut at the mean of the steps' longest responses, which a step without staleness waits
        for, or at `longest`.
        """
        maxima = [record["response_length/max"] for record in self.records if "response_length/max" in record]
        longest = min([longest, *([round(sum(maxima) / len(maxima))] if maxima else [])])
        mean = min(self._mean_of_samples("response_length/mean"), longest)
        square = self._mean_of_samples("response_length/mean_square")
        return Lengths.with_moments(mean, square, longest) if square else Lengths.with_mean(mean, SPREAD, longest)

    def acceptance(self) -> float:
        """Return the share of groups that carried signal. Raises UserError if none did."""
        kept, dropped = self.total("dapo/num_kept_groups"), self.total("dapo/num_filtered_groups")
        if not kept:
            raise UserError(f"--measured {self.name}: none of its groups carried signal; there is no step to plan.")
        return kept / (kept + dropped)

    def factors(self, spec: ModelSpec, hardware: Hardware, efficiency: Efficiency) -> Factors:
        """Return measured / estimated of each part, for the config that ran."""
        config = self.config
        lengths = self.lengths(config.data.max_response_length)
        acceptance = self.acceptance() if replaces_groups(config) else 1.0
        assumed = Assumptions(hardware, lengths, round(self.prompt()), acceptance, efficiency)
        return self._beside(phase_times(config, spec, assumed))

    def _beside(self, parts: PhaseTimes) -> Factors:
        rollout = self.config.actor_rollout_ref.rollout
        handed_over = self.mean("time/distribute")
        if not rollout.max_staleness:  # else the trainer waits for samples and not for the pipe
            handed_over += max(self.mean("time/rollout") - self.mean("rollout/seconds"), 0.0)
        running = min(self.mean("rollout/slots_used") * rollout.max_concurrency, parts.server.slots)
        per_server = self.total("rollout/num_tokens") / self.total("rollout/seconds") / num_servers(self.config)
        token_s = parts.server.token_s + running * parts.server.token_s_per_request
        return Factors(
            server=running / per_server / token_s,
            update=self.mean("time/update") / parts.training.update,
            log_probs=self.mean("time/old_log_probs") / parts.score if parts.score else 1.0,
            hand_over=handed_over / parts.hand_over,
            push=self.mean("time/weight_sync") / parts.push,
        )

    def _mean_of_samples(self, metric: str) -> float:
        """Return the mean of a mean over a step's samples, weighted by the step's groups."""
        rows = [record for record in self.records if metric in record]
        weights = [record["dapo/num_kept_groups"] + record["dapo/num_filtered_groups"] for record in rows]
        total = sum(weights)
        return (
            sum(record[metric] * weight for record, weight in zip(rows, weights, strict=True)) / total if total else 0.0
        )
