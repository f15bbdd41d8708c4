"""The reference model: frozen, built only for a nonzero KL coefficient; with LoRA the actor without
its adapters."""

from collections.abc import Sequence
from dataclasses import replace

from megatron_dapo.common.errors import UserError
from megatron_dapo.config.derived import tokens_multiple, uses_full_kl
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.packing import MicroBatch
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.huggingface.spec_reader import read_model_spec
from megatron_dapo.models.build import build_model
from megatron_dapo.models.hf_io import load_hf_weights
from megatron_dapo.models.log_prob_head import Scores
from megatron_dapo.models.lora import without_adapters
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.training.head_options import head_options
from megatron_dapo.training.optimizer import half_precision
from megatron_dapo.training.policy import MiniBatch, Policy, WeightLoader, with_scores
from megatron_dapo.training.schedule import Schedule


class ActorAsReference:
    """The actor's frozen weights, without its adapters: no second copy of them."""

    def __init__(self, config: Config, policy: Policy) -> None:
        self._policy = policy
        self.model = policy.model
        self._keeps_hidden = uses_full_kl(config)

    def score(self, mini_batches: Sequence[MiniBatch]) -> list[MiniBatch]:
        """Do the same as `Reference.score`, with routers that choose freely, even if the policy's
        replay experts."""
        free = [[replace(batch, experts=None) for batch in mini_batch] for mini_batch in mini_batches]
        with without_adapters(self._policy.model.chunks):
            scored = _with_reference(self._policy.schedule, free, keep_hidden=self._keeps_hidden)
        return [
            [replace(part, experts=batch.experts) for part, batch in zip(*pair, strict=True)]
            for pair in zip(scored, mini_batches, strict=True)
        ]


class Reference:
    """Same layout as the actor, no gradients, no optimizer."""

    def __init__(self, config: Config, layout: ParallelLayout, load: WeightLoader = load_hf_weights) -> None:
        actor = config.actor_rollout_ref.actor
        rollout = config.actor_rollout_ref.rollout
        path = config.actor_rollout_ref.ref.path or config.actor_rollout_ref.model.path
        spec = read_model_spec(path)
        self._keeps_hidden = uses_full_kl(config)
        if self._keeps_hidden:
            check_vocabulary(spec, read_model_spec(config.actor_rollout_ref.model.path))
        self.model = build_model(
            spec,
            layout,
            actor.megatron,
            **head_options(config, layout, spec),
            num_tokens=tokens_multiple(config, layout.sequence_multiple),
        )
        load(self.model, path, layout)
        for chunk in self.model.chunks:
            chunk.requires_grad_(False)
        self._schedule = Schedule(self.model, half_precision(self.model), rollout.temperature)

    def score(self, mini_batches: Sequence[MiniBatch]) -> list[MiniBatch]:
        """Return the same mini-batches with the reference's log-probs on the last stage. Collective
        over all ranks.

        For a KL over the whole vocabulary it adds its last hidden states of the counted rows.
        """
        return _with_reference(self._schedule, mini_batches, keep_hidden=self._keeps_hidden)


def _with_reference(schedule: Schedule, mini_batches: Sequence[MiniBatch], *, keep_hidden: bool) -> list[MiniBatch]:
    def fill(batch: MicroBatch, scores: Scores) -> MicroBatch:
        batch = batch.with_log_probs(ref=scores.log_probs)
        if scores.kept is None:
            return batch
        return replace(batch, ref_hidden=scores.kept.hidden_KH, ref_weight=scores.kept.weight_VH)

    return with_scores(schedule, mini_batches, fill, keep_hidden=keep_hidden)


def check_vocabulary(reference: ModelSpec, actor: ModelSpec) -> None:
    """Raise UserError if the models of a KL over the whole vocabulary have different
    vocabularies."""
    if reference.vocab_size != actor.vocab_size:
        raise UserError(
            f"The model of actor_rollout_ref.ref.path has a vocabulary of {reference.vocab_size}, the actor one of "
            f"{actor.vocab_size}: a KL of type full compares the probabilities of every token; give a reference of the "
            "same vocabulary, or another kl_loss_type and kl_penalty."
        )
