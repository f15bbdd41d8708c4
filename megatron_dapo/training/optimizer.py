"""Megatron's data-parallel wrapper, AdamW (bf16 with fp32 main weights) and learning-rate
schedule."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.own_function import OwnFunction, finite
from megatron_dapo.config.derived import state_keys
from megatron_dapo.config.key_names import MEGATRON
from megatron_dapo.config.keys import show_text
from megatron_dapo.config.schema.actor_rollout_ref import MegatronConfig, OptimConfig
from megatron_dapo.config.schema.critic_config import CriticOptimConfig
from megatron_dapo.models.build import ModelParts
from megatron_dapo.platform.parallel import ParallelLayout


@dataclass(frozen=True)
class TrainingState:
    """The trained model's optimizer."""

    stages: list[DistributedDataParallel]
    """The model chunks, wrapped."""
    optimizer: MegatronOptimizer
    """Over all stages."""
    lr_schedule: OptimizerParamScheduler
    """Stepped once per rollout step."""
    num_threads: int
    """Of torch on the host, during optimizer steps."""

    @property
    def lr(self) -> float:
        return max(group["lr"] for group in self.optimizer.param_groups)

    def zero_gradients(self) -> None:
        for stage in self.stages:
            stage.zero_grad_buffer()
        self.optimizer.zero_grad()

    def finish_gathers(self) -> None:
        """Complete the weights on every rank after the last optimizer step, before they are pushed
        and saved; no forward pass does it then. Does nothing if `step` gathers them."""
        for stage in self.stages:
            if stage.ddp_config.overlap_param_gather:
                stage.start_param_sync(force_sync=True)

    def step(self) -> float:
        """Take one optimizer step with the accumulated gradients; return their unclipped norm.

        An infinite or NaN norm is the same on all ranks: all stop, before such weights reach a
        server.
        """
        before = torch.get_num_threads()
        torch.set_num_threads(self.num_threads)
        try:
            succeeded, norm, _ = self.optimizer.step()
        finally:
            torch.set_num_threads(before)
        if not succeeded or not math.isfinite(norm):
            raise FloatingPointError(f"the gradient norm of a mini-batch is {norm}; the run stops here")
        return float(norm)


def half_precision(model: ModelParts) -> list[torch.nn.Module]:
    """Return the chunks as they run: in half precision Megatron converts at the first and the last
    stage."""
    return [Float16Module(model.config, chunk) for chunk in model.chunks] if model.config.bf16 else list(model.chunks)


def step_threads(megatron: MegatronConfig, layout: ParallelLayout) -> int:
    """Return this rank's number of threads for optimizer steps. Collective over all ranks.

    An offloaded optimizer gets the rank's share of the cores, which idle meanwhile: launchers give
    a rank one thread. More than one thread is the user's choice.
    """
    threads = torch.get_num_threads()
    if not megatron.optimizer_offload_fraction:
        return threads
    share = layout.share_of_cores()  # called by all ranks, with any number of threads
    return share if threads == 1 else threads


def make_training_state(
    model: ModelParts,
    megatron: MegatronConfig,
    optim: OptimConfig,
    num_rollout_steps: int,
    num_threads: int | None = None,
) -> TrainingState:
    """Wrap the loaded model for training, and set the callbacks that Megatron's schedules read from
    its config.

    Args:
        num_threads: `TrainingState.num_threads`; None: torch's current number.

    Raises:
        UserError: if the requested form of the optimizer's state needs something this machine
            lacks.
    """
    state_options = _state_options(megatron, model)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=megatron.use_distributed_optimizer,
        overlap_grad_reduce=megatron.overlap_grad_reduce,
        overlap_param_gather=megatron.overlap_param_gather,
        # it would stop the host once per bucket, and one rank while the others wait for it:
        # `TrainingState.step` stops on the norm, the same on all ranks
        check_for_nan_in_grad=False,
    )
    stages = [
        DistributedDataParallel(model.config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(half_precision(model))
    ]
    _accumulate_in_products(stages)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=optim.lr,
            min_lr=optim.min_lr,
            weight_decay=optim.weight_decay,
            adam_beta1=optim.betas[0],
            adam_beta2=optim.betas[1],
            adam_eps=optim.eps,
            # infinity clips nothing, and the norm is still reported
            clip_grad=optim.clip_grad or float("inf"),
            bf16=model.config.bf16,
            params_dtype=model.config.params_dtype,
            use_distributed_optimizer=megatron.use_distributed_optimizer,
            **state_options,
        ),
        stages,
        use_gloo_process_groups=False,
    )
    model.config.finalize_model_grads_func = finalize_model_grads
    model.config.grad_scale_func = optimizer.scale_loss
    if megatron.overlap_grad_reduce:
        no_sync = [stage.no_sync for stage in stages]
        model.config.no_sync_func = no_sync if len(stages) > 1 else no_sync[0]
    return TrainingState(
        stages, optimizer, _lr_schedule(optimizer, optim, num_rollout_steps), num_threads or torch.get_num_threads()
    )


def _state_options(megatron: MegatronConfig, model: ModelParts) -> dict[str, Any]:
    """Return options for the state of Megatron's optimizer: host memory, or half precision.

    Both are paths of its precision-aware optimizer, which needs Transformer Engine's optimizer.
    Without that an offloaded parameter would keep its float32 weight on the GPU as well. The
    remainders of weights, 2 bytes in place of 4, are not used: a checkpoint has float32.
    """
    keys = state_keys(megatron)
    if not keys:
        return {}
    if not model.uses_transformer_engine:
        (name, value), *_ = keys.items()
        raise UserError(
            f"{MEGATRON}.{name} is {show_text(value)}, which needs a GPU, bfloat16 and Transformer Engine; one of "
            f"them is missing here: leave it out."
        )
    if fraction := megatron.optimizer_offload_fraction:
        how = dict(optimizer_cpu_offload=True, optimizer_offload_fraction=fraction, overlap_cpu_optimizer_d2h_h2d=True)
    else:
        how = dict(store_param_remainders=False, **{name: getattr(torch, str(dtype)) for name, dtype in keys.items()})
    return dict(use_precision_aware_optimizer=True, **how)


def _accumulate_in_products(stages: list[DistributedDataParallel]) -> None:
    """Have Transformer Engine's layers add a weight's gradient to its main_grad in the product that
    computes it.

    This needs neither a buffer nor two passes over it. The layers then mark the parameter, and
    Megatron's hook adds nothing. TE 2.20 (module/linear.py) requires main_grad, so this comes after
    DDP's buffers, and never for a reference.

    Megatron's own setting, when it constructs the layers, is a key that its output layer refuses
    without apex.
    """
    for stage in stages:
        for module in stage.modules():
            is_trained = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
            if is_trained and hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True


class _OwnDecay(OptimizerParamScheduler):
    """Megatron's schedule, with the decay by a function of the user's own.

    It gets the finished share of the decay, from 0 to 1, and returns that of max_lr - min_lr.
    """

    def __init__(self, decay: OwnFunction, *arguments: Any, **keywords: Any) -> None:
        self._decay = decay
        for percent in range(101):  # a failure at the start, rather than at the run's last step
            self._share(percent / 100)
        super().__init__(*arguments, **keywords)

    def get_lr(self, param_group: dict) -> float:
        steps = self.num_steps - self.lr_warmup_steps
        if steps <= 0 and self.lr_warmup_steps > 0:
            return super().get_lr(param_group)
        share = self._share(min(steps / (self.lr_decay_steps - self.lr_warmup_steps), 1.0))
        low, high = (float(param_group.get(name, getattr(self, name))) for name in ("min_lr", "max_lr"))
        return low + share * (high - low)

    def _share(self, progress: float) -> float:
        return self._decay(_not_negative, "a finite number from 0", f"progress {progress:g}", progress)


def _not_negative(answer: Any) -> float:
    if (number := finite(answer)) < 0:
        raise ValueError(answer)
    return number


def _lr_schedule(optimizer: MegatronOptimizer, optim: OptimConfig, num_rollout_steps: int) -> OptimizerParamScheduler:
    schedule: Callable[..., OptimizerParamScheduler] = OptimizerParamScheduler
    if ":" in optim.lr_decay_style:
        role = "critic" if isinstance(optim, CriticOptimConfig) else "actor_rollout_ref.actor"
        schedule = partial(_OwnDecay, OwnFunction.load(f"{role}.optim.lr_decay_style", optim.lr_decay_style))
    return schedule(
        optimizer,
        init_lr=0.0,
        max_lr=optim.lr,
        min_lr=optim.min_lr,
        lr_warmup_steps=optim.lr_warmup_steps,
        lr_decay_steps=max(num_rollout_steps, optim.lr_warmup_steps + 1),
        lr_decay_style=optim.lr_decay_style,
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
