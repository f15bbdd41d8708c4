"""Chooses the log-prob head: fused if the kernels pass their check."""

import functools
import logging

from megatron_dapo.config.derived import log_prob_chunk_size, needs_old_log_probs, uses_full_kl
from megatron_dapo.config.schema.config import Config
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.kernels.self_check import Check, largest_errors
from megatron_dapo.platform.agreement import Agreement
from megatron_dapo.platform.device import device, is_gpu, model_dtype
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.training.loss_config import correction_per_step, loss_config

log = logging.getLogger(__name__)


def head_options(config: Config, layout: ParallelLayout, spec: ModelSpec) -> dict:
    """Return the keyword arguments of `build_model`. Collective over all ranks: one rank's doubt
    turns the fused head off."""
    actor = config.actor_rollout_ref.actor
    loss = loss_config(config)
    fused = actor.fused_kernels == "auto" and _all_ranks_pass(
        Check(
            model_dtype(actor.megatron.dtype),
            num_columns=spec.padded_vocab_size(layout.tp) // layout.tp,
            loss=loss,
            has_old_log_probs=needs_old_log_probs(config) or loss.bypass_mode,
            has_importance=correction_per_step(config) is not None,
            full_kl=uses_full_kl(config),
        ),
        layout.agreement,
    )
    return {"head_chunk_size": log_prob_chunk_size(config, on_gpu=is_gpu()), "fused_head": fused}


@functools.cache  # actor and reference ask the same
def _all_ranks_pass(check: Check, agreement: Agreement) -> bool:
    problem = _problem(check)
    if problem:
        log.warning(
            "THE FUSED KERNELS ARE OFF: on rank %d their check against float64 failed (%s). Training goes on with the "
            "composed head, several times slower on a GPU; actor_rollout_ref.actor.fused_kernels=off "
            "silences this.",
            agreement.rank,
            problem,
        )
    return not any(agreement.gather(problem))


def _problem(check: Check) -> str:
    """Return the kernels' fault on this rank, or ""."""
    try:
        # NaN is wrong too
        wrong = [e for e in largest_errors(check, device()) if not e.error <= e.bound]
        return ", ".join(f"{e.name} off by {e.error:.1e}, allowed {e.bound:.1e}" for e in wrong)
    except Exception as error:  # a compiler or kernel: the run works without it
        return _with_causes(error)


def _with_causes(error: BaseException) -> str:
    """Return an error on one line, with its causes and contexts.

    A compiler's own words are often in the innermost one.
    """
    chain = []
    link: BaseException | None = error
    while link is not None:
        chain.append(": ".join([type(link).__name__, " ".join(str(link).split())]))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return ", caused by ".join(chain)
