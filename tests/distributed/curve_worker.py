"""Run on every rank: the demo's training, 20 steps on the same samples, with fused kernels on and
off.

Arguments: the file for rank 0's results, {"layout/auto|off": {"curve": [metrics of each step],
"calls": [of the fused head, of the composed head]}}; the layouts.
"""

import random
import sys

import torch
import torch.distributed as dist

from examples.arithmetic.problems import Sum, split
from megatron_dapo.config.loader import load_config
from megatron_dapo.data.samples import Group, Prompt, Sample
from megatron_dapo.data.tokenizer import load_tokenizer
from megatron_dapo.models import log_prob_head
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.training.distribute import StepDistributor
from megatron_dapo.training.policy import Policy
from tests.distributed.process_groups import leave
from tests.helpers import REPOSITORY

NUM_STEPS, NUM_GROUPS, N = 20, 8, 4
LAYOUTS = {"tp2_sp": {"tp": 2, "sp": True}, "pp2": {"pp": 2}}
COMMON = [
    f"data.train_batch_size={NUM_GROUPS}",
    f"actor_rollout_ref.rollout.n={N}",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.entropy_coef=0.001",
    "actor_rollout_ref.actor.log_prob_chunk_size=64",  # several chunks in every micro-batch
]


def groups_of_step(step: int, encode) -> list[Group]:
    """Answers such as the demo's model gives, right and wrong, to the demo's problems."""
    rng = random.Random(step)
    return [_group(rng, f"{step}-{i}", problem, encode) for i, problem in enumerate(rng.sample(split()[0], NUM_GROUPS))]


def _group(rng: random.Random, uid: str, problem: Sum, encode) -> Group:
    prompt = Prompt(0, uid, encode(problem.prompt), problem.prompt, "arithmetic", problem.answer)
    ones = problem.a % 10 + problem.b % 10
    wrong = str(problem.a + problem.b + rng.choice([-10, -1, 1, 10]))
    texts = [problem.answer, wrong, f"{problem.a % 10}+{problem.b % 10}+0={ones}:{problem.answer}", "hm " * 3 + wrong]
    samples = tuple(_sample(rng, uid, prompt, text, text.endswith(problem.answer), encode) for text in texts)
    return Group(uid, prompt, samples)


def _sample(rng: random.Random, uid: str, prompt: Prompt, text: str, correct: bool, encode) -> Sample:
    tokens = encode(text)
    return Sample(
        uid=uid,
        prompt_tokens=prompt.tokens,
        response_tokens=tokens,
        rollout_log_probs=tuple(-rng.random() for _ in tokens),
        loss_mask=(1,) * len(tokens),
        weight_versions=(0,) * len(tokens),
        finish_reason="stop",
        raw_reward=float(correct),
        correct=correct,
        reward=float(correct),
        is_truncated=False,
    )


def train(layout: ParallelLayout, sizes: dict, fused: str) -> list[dict[str, float]]:
    megatron = "actor_rollout_ref.actor.megatron"
    config = load_config(
        str(REPOSITORY / "configs/demo.yaml"),
        [
            *COMMON,
            f"actor_rollout_ref.model.path={REPOSITORY / 'examples/arithmetic/base'}",
            f"{megatron}.tensor_model_parallel_size={sizes.get('tp', 1)}",
            f"{megatron}.pipeline_model_parallel_size={sizes.get('pp', 1)}",
            f"{megatron}.sequence_parallel={str(sizes.get('sp', False)).lower()}",
            f"actor_rollout_ref.actor.fused_kernels={fused}",
        ],
    )
    tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)

    def encode(text: str) -> tuple[int, ...]:
        return tokenizer.encode_prompt(text, apply_chat_template=False)[0]

    policy = Policy(config, layout)
    distribute = StepDistributor(config, layout, policy.model.spec)
    curve = []
    for step in range(NUM_STEPS):
        shard = distribute(step, groups_of_step(step, encode) if layout.rank == 0 else None)
        curve.append(policy.update(policy.score(shard.mini_batches), weight_version=step))
    return curve


def counted(function):
    """The function, and a list with one entry per call of it."""
    calls = []

    def wrapper(*args, **kwargs):
        calls.append(None)
        return function(*args, **kwargs)

    return wrapper, calls


def main() -> None:
    torch.set_num_threads(1)
    results = {}
    log_prob_head.fused_dapo_head, fused_calls = counted(log_prob_head.fused_dapo_head)
    log_prob_head.linear_logprob_entropy, composed_calls = counted(log_prob_head.linear_logprob_entropy)
    out, *names = sys.argv[1:]
    for name, sizes in ((name, LAYOUTS[name]) for name in names):
        layout = ParallelLayout.initialize(**sizes)
        for fused in ("auto", "off"):
            fused_calls.clear(), composed_calls.clear()
            curve = train(layout, sizes, fused)
            calls = torch.tensor([len(fused_calls), len(composed_calls)])
            dist.all_reduce(calls)
            results[f"{name}/{fused}"] = {"curve": curve, "calls": calls.tolist()}
        leave(layout)
    if dist.get_rank() == 0:
        torch.save(results, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
