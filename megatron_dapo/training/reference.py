"""The reference model: frozen, built only where a KL coefficient is non-zero."""

from collections.abc import Sequence

from megatron_dapo.config import Config
from megatron_dapo.models import build_model, load_hf_weights, read_model_spec
from megatron_dapo.platform import ParallelLayout
from megatron_dapo.training.head_options import head_options
from megatron_dapo.training.optimizer import half_precision
from megatron_dapo.training.policy import MiniBatch, WeightLoader, with_log_probs
from megatron_dapo.training.schedule import Schedule


class Reference:
    """Same layout as the actor, no gradients, no optimizer."""

    def __init__(self, config: Config, layout: ParallelLayout, load: WeightLoader = load_hf_weights) -> None:
        actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
        path = config.actor_rollout_ref.ref.path or config.actor_rollout_ref.model.path
        spec = read_model_spec(path)
        model = build_model(spec, layout, actor.megatron, **head_options(config, layout, spec))
        load(model, path, layout)
        for chunk in model.chunks:
            chunk.requires_grad_(False)
        self._schedule = Schedule(model, half_precision(model), rollout.temperature)

    def score(self, mini_batches: Sequence[MiniBatch]) -> list[MiniBatch]:
        """The same mini-batches with the reference's log-probs, on the last stage. Collective over all ranks."""
        return with_log_probs(self._schedule, mini_batches, "ref")
