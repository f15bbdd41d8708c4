"""Run on every rank: every case of tests/head_cases.py through the training head, saved by rank 0.
Argument: the file."""

import sys
from dataclasses import replace

import torch
import torch.distributed as dist

from megatron_dapo.kernels.full_kl import linear_full_kl
from megatron_dapo.kernels.fused_head import Head, KLReference, fused_dapo_head, head_full_kl, head_log_probs
from megatron_dapo.kernels.linear_logprob import linear_logprob_entropy
from megatron_dapo.kernels.row_plan import RowPlan
from tests.head_cases import CASES, Case, Inputs, inputs_of, loss_of


def run(case: Case, group: dist.ProcessGroup, sequence_parallel: bool, tied: bool) -> dict:
    """This rank's answers, its gradients brought together. tied: the weight is an embedding's too,
    with Megatron's marks."""
    rank, size = group.rank(), group.size()
    columns = case.vocab // size
    shard = inputs_of(case).weight_VH[rank * columns : (rank + 1) * columns]
    weight = torch.nn.Parameter(shard.clone())
    weight.main_grad = torch.zeros_like(shard, dtype=torch.float64 if case.dtype == torch.float64 else torch.float32)
    weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, tied
    for micro_batch in range(case.num_micro_batches):
        inputs = inputs_of(case, micro_batch)
        answer, hidden, plain, kl = one_pass(case, inputs, weight, group, sequence_parallel)
        if tied and case.rows:
            # the embedding's own use of the weight
            (answer.loss_sum + weight[0].double().sum()).backward()
        else:
            answer.loss_sum.backward()
        # as Megatron's hook does
        if weight.grad is not None and (not weight.grad_added_to_main_grad or weight.zero_out_wgrad):
            weight.main_grad += weight.grad
        weight.grad = None
    grad_hidden = hidden.grad
    if sequence_parallel:
        grad_hidden = torch.cat(gathered(hidden.grad, group))
    return {
        "loss_sum": answer.loss_sum.detach(),
        "log_probs": answer.log_probs,
        "entropy": answer.entropy,
        "plain": plain,
        "kl": kl,
        "sums": answer.sums,
        "maxima": answer.maxima,
        "grad_hidden": grad_hidden,
        "grad_weight": torch.cat(gathered(weight.main_grad, group)),
    }


def one_pass(case: Case, inputs: Inputs, weight: torch.nn.Parameter, group, sequence_parallel: bool):
    local = inputs.hidden_LH
    if sequence_parallel:
        local = local.chunk(group.size())[group.rank()] if case.rows else local
    hidden = local.clone().requires_grad_()
    plan = RowPlan.make(
        inputs.counted, case.rows, case.chunk_size, torch.device("cpu"), group if sequence_parallel else None
    )
    head, reference, kl = Head(weight, group, case.num_valid, inputs.temperature), None, None
    plain = head_log_probs(hidden, inputs.targets, plan, head)[0]
    if case.full_kl:
        its = inputs.ref_hidden_LH
        its = its.chunk(group.size())[group.rank()] if sequence_parallel and case.rows else its
        reference = KLReference(plan.kept_rows(its), inputs.ref_weight_VH.chunk(group.size())[group.rank()])
        with_kl, kl = head_full_kl(hidden, inputs.targets, plan, head, reference)
        assert torch.equal(with_kl, plain)
    dtype = weight.main_grad.dtype
    fields = ("weights", "advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs")
    tokens = replace(inputs.tokens, **{name: getattr(inputs.tokens, name).to(dtype) for name in fields})
    answer = fused_dapo_head(hidden, inputs.targets, plan, tokens, loss_of(case), head, reference=reference)
    return answer, hidden, plain, kl


def composed(case: Case, group: dist.ProcessGroup) -> dict:
    """The composable head: log-probs, and the ranks' shares of d hidden summed."""
    inputs, columns = inputs_of(case), case.vocab // group.size()
    hidden = inputs.hidden_LH[torch.from_numpy(inputs.counted)].clone().requires_grad_()
    weight = inputs.weight_VH.split(columns)[group.rank()].clone().requires_grad_()
    settings = {"temperature": inputs.temperature, "num_valid_columns": case.num_valid, "chunk_size": case.chunk_size}
    log_probs, entropy = linear_logprob_entropy(hidden, weight, inputs.targets, group=group, **settings)
    total, kl = log_probs.sum() + 0.5 * entropy.sum(), None
    if case.full_kl:
        its = inputs.ref_hidden_LH[torch.from_numpy(inputs.counted)]
        its = its, inputs.ref_weight_VH.chunk(group.size())[group.rank()]
        kl = linear_full_kl(hidden, weight, *its, group=group, **settings)
        total, kl = total + 0.3 * kl.sum(), kl.detach()
    total.backward()
    dist.all_reduce(hidden.grad, group=group)
    grad_weight = torch.cat(gathered(weight.grad, group))
    return {"log_probs": log_probs.detach(), "kl": kl, "grad_hidden": hidden.grad, "grad_weight": grad_weight}


def gathered(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    parts: list = [None] * group.size()
    dist.all_gather_object(parts, tensor, group=group)
    return parts


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    results = {}
    for name, case in CASES.items():
        for sequence_parallel in (False, True):
            key = f"{name}/{'sp' if sequence_parallel else 'tp'}"
            results[key] = gathered(run(case, group, sequence_parallel, tied=False), group)
            tied_key = f"{name}/tied_{'sp' if sequence_parallel else 'tp'}"
            results[tied_key] = gathered(run(case, group, sequence_parallel, tied=True), group)
            results[f"{key}/again"] = gathered(run(case, group, sequence_parallel, tied=False), group)
        if case.rows:
            results[f"{name}/composed"] = gathered(composed(case, group), group)
    if group.rank() == 0:
        torch.save(results, sys.argv[1])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
