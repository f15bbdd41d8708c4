"""Compares Slurm's notice before the time limit with the time that a run needs to save."""

from megatron_dapo.checks.model_checks import read_model_specs
from megatron_dapo.common.sizes import round_up
from megatron_dapo.config.derived import (
    critic_batching,
    longest_sample,
    needs_old_log_probs,
    needs_reference,
    samples_per_rollout_step,
    uses_critic,
    world_size,
)
from megatron_dapo.config.schema.config import Config
from megatron_dapo.estimates.flops import TRAINING_PASSES, forward_flops
from megatron_dapo.estimates.hardware import HARDWARE

_FLOPS = 0.3 * HARDWARE["h100"].flops  # of a GPU: 30 % of its bfloat16 peak
_SAVE_S = 600.0  # waiting for the last checkpoint, on slow storage


def rest_of_a_step(config: Config) -> float | None:
    """Return the longest time of a step and its save after a request to stop, in seconds.

    Sampling ends at once, but the update does not. The step has samples of full length. None if the
    model's sizes are not on this machine.
    """
    specs = read_model_specs(config)
    if specs is None:
        return None
    num_samples = samples_per_rollout_step(config)
    length = longest_sample(config)
    num_answered = length if config.sft.enable else config.data.max_response_length
    flops = forward_flops(specs[0], [length], num_answered) * num_samples
    passes = TRAINING_PASSES * config.actor_rollout_ref.actor.ppo_epochs
    passes += needs_old_log_probs(config) + needs_reference(config)
    if uses_critic(config):  # of the actor's size, about
        passes += TRAINING_PASSES * critic_batching(config).ppo_epochs + 1
    return flops * passes / (world_size(config) * _FLOPS) + _SAVE_S


def notice_line(config: Config, notice_s: int | None) -> str | None:
    """Return the plan's line that compares Slurm's notice with the time that the run needs, or None
    if either is unknown.

    Args:
        notice_s: seconds before the time limit at which Slurm signals the script; None: unknown.
    """
    needed_s = rest_of_a_step(config)
    if notice_s is None or needed_s is None:
        return None
    needed = f"update and save of a step of longest samples: about {needed_s:.0f} s on GPUs like H100"
    if config.trainer.test_freq > 0:  # the answers' length is unknown before
        needed += ", besides the evaluation that follows a step (trainer.test_freq)"
    if notice_s >= needed_s:
        return f"{notice_s} s before the time limit; {needed}"
    enough = round_up(int(needed_s + 1), 600)
    cure = f"NOTICE_S={enough} sbatch --signal=B:USR1@{enough}"
    return f"{notice_s} s before the time limit IS TOO SHORT; {needed}; give {cure}"
