"""On-policy distillation: the loss is GKD's reverse KL,
and a student comes near its teacher by it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from examples.distillation.reward import score
from megatron_dapo.config.derived import needs_old_log_probs, num_optimizer_steps_per_rollout_step, uses_full_kl
from megatron_dapo.config.loader import load_config
from megatron_dapo.data.samples import Group, Prompt, Sample
from megatron_dapo.models.weight_source import WeightSource
from megatron_dapo.training.distribute import StepDistributor
from megatron_dapo.training.policy import Policy
from megatron_dapo.training.reference import Reference
from tests.distributed.layout_worker import gathered
from tests.helpers import REPOSITORY
from tests.tiny_models import EOS_ID, PAD_ID, make_tiny

pytestmark = pytest.mark.unit

PROMPT_LENGTH, LONGEST, N = 3, 6, 4
VOCABULARY = 20


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    """Student and teacher. The teacher is the larger one, and its next token depends on the last
    one only. A small student can learn that in a few steps."""
    folder = tmp_path_factory.mktemp("models")
    student = make_tiny(folder / "student", "qwen2", layers=2, hidden=32, heads=4, vocab=VOCABULARY)
    teacher = make_tiny(folder / "teacher", "qwen3", layers=2, hidden=48, heads=4, vocab=VOCABULARY, seed=1)
    weights = load_file(teacher / "model.safetensors")
    for name, tensor in weights.items():
        if "o_proj" in name:
            tensor.zero_()
    save_file(weights, teacher / "model.safetensors", metadata={"format": "pt"})
    return student, teacher


def recipe(models: tuple[Path, Path], *overrides: str):
    student, teacher = models
    paths = [f"actor_rollout_ref.model.path={student}", f"actor_rollout_ref.ref.path={teacher}"]
    sizes = ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]
    return load_config(REPOSITORY / "configs" / "distillation.yaml", [*paths, *sizes, *overrides])


def prompts(number: int, seed: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (number, PROMPT_LENGTH), generator=torch.Generator().manual_seed(seed))


def sampled(student, asked: Tensor, n: int) -> list[list[list[int]]]:
    """n responses of the student to each prompt, at temperature 1."""
    rows = student.generate(
        asked.repeat_interleave(n, 0),
        max_new_tokens=LONGEST,
        do_sample=True,
        top_k=0,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )[:, PROMPT_LENGTH:].tolist()
    ended = [row[: row.index(EOS_ID) + 1] if EOS_ID in row else row for row in rows]
    return [ended[start : start + n] for start in range(0, len(ended), n)]


def groups_of(asked: Tensor, responses: list[list[list[int]]]) -> list[Group]:
    """As the rollout hands them over, with the rewards of the recipe's function."""
    groups = []
    for place, (prompt, of_prompt) in enumerate(zip(asked.tolist(), responses, strict=True)):
        uid = str(place)
        samples = tuple(_sample(uid, tuple(prompt), tuple(response)) for response in of_prompt)
        groups.append(Group(uid, Prompt(place, uid, tuple(prompt), "", "arithmetic", "5"), samples))
    return groups


def _sample(uid: str, prompt: tuple[int, ...], response: tuple[int, ...]) -> Sample:
    reward = score("arithmetic", "5", "5", {})["score"]
    return Sample(
        uid=uid,
        prompt_tokens=prompt,
        response_tokens=response,
        rollout_log_probs=(-1.0,) * len(response),
        loss_mask=(1,) * len(response),
        weight_versions=(0,) * len(response),
        finish_reason="stop",
        raw_reward=reward,
        correct=True,
        reward=reward,
        is_truncated=False,
    )


def reverse_kl(student, teacher, asked: Tensor, responses: list[list[list[int]]]) -> tuple[Tensor, int]:
    """The sum over all response tokens y_n of KL(p_S(. | y_<n, x) || p_T(. | y_<n, x)), and the
    number of tokens."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for prompt, of_prompt in zip(asked.tolist(), responses, strict=True):
        for response in of_prompt:
            tokens = torch.tensor([[*prompt, *response]])
            of_response = slice(PROMPT_LENGTH - 1, -1)
            log_p = student(tokens).logits[0, of_response].log_softmax(-1)
            log_q = teacher(tokens).logits[0, of_response].log_softmax(-1).detach()
            total = total + (log_p.exp() * (log_p - log_q)).sum()
            count += len(response)
    return total, count


def read(folder: Path):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    # it would keep the gradient of one token from its row
    model.get_input_embeddings().padding_idx = None
    return model


def test_the_recipe_distils_on_policy_and_reports_what_is_right_without_learning_from_it(models):
    config = recipe(models)
    assert uses_full_kl(config) and config.actor_rollout_ref.actor.kl_loss_coef == 1.0
    assert num_optimizer_steps_per_rollout_step(config) == 1 and not needs_old_log_probs(config)
    assert score("arithmetic", "1:5", "5", {}) == {"score": 0.0, "acc": 1.0}
    assert score("arithmetic", "5:1", "5", {}) == {"score": 0.0, "acc": 0.0}


def test_the_loss_and_its_gradient_are_those_of_gkd_with_the_reverse_kl_on_the_students_samples(layout, models):
    """arXiv 2306.13649, algorithm 1 with lambda = 1 and D the reverse KL; sampling gets no
    gradient. The mean is over tokens."""
    config = recipe(models, "actor_rollout_ref.actor.megatron.use_distributed_optimizer=false")
    student, teacher = map(read, models)
    asked = prompts(8, seed=0)
    torch.manual_seed(0)
    responses = sampled(student, asked, N)
    policy = Policy(config, layout)
    shard = StepDistributor(config, layout, policy.model.spec)(0, groups_of(asked, responses))
    (mini_batch,) = Reference(config, layout).score(shard.mini_batches)
    metrics = policy.metrics_of(policy.accumulate_gradients(mini_batch))

    total, count = reverse_kl(student, teacher, asked, responses)
    expected = total / count
    expected.backward()
    assert metrics["actor/loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert metrics["actor/kl_loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert metrics["actor/pg_loss"] == 0.0
    gradients = gathered(WeightSource(policy.model, layout, value=lambda p: p.main_grad), layout)
    for name, parameter in student.named_parameters():
        error = (gradients[name].double() - parameter.grad).norm()
        assert error < 1e-5 * parameter.grad.norm() + 1e-7, name


def test_the_gradient_is_the_expectation_of_the_one_that_scores_the_sampled_token():
    """On-policy distillation by a per-token reward: -(log p(v) - log q(v)) of the drawn token v."""
    logits = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    log_q = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    log_p = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum(), logits, retain_graph=True)
    reward = -(log_p - log_q).detach()
    estimates = [torch.autograd.grad(-reward[v] * log_p[v], logits, retain_graph=True)[0] for v in range(7)]
    expectation = sum(p * estimate for p, estimate in zip(log_p.exp().detach(), estimates, strict=True))
    assert torch.allclose(expectation, exact, rtol=1e-12)


def test_a_small_student_comes_near_its_teacher_on_its_own_samples(layout, models):
    """Each step samples from the student as it is. The comparison is on other prompts, by
    transformers in float64."""
    config = recipe(models, "actor_rollout_ref.actor.optim.lr=2e-2")
    torch.manual_seed(1)
    student, teacher = map(read, models)
    held_out = prompts(24, seed=100)

    def distance() -> float:
        with torch.no_grad():
            total, count = reverse_kl(student, teacher, held_out, sampled(student, held_out, N))
        return total.item() / count

    before = distance()
    policy, reference = Policy(config, layout), Reference(config, layout)
    distribute = StepDistributor(config, layout, policy.model.spec)
    reported = []
    for step in range(30):
        asked = prompts(8, seed=step)
        shard = distribute(step, groups_of(asked, sampled(student, asked, N)))
        metrics = policy.update(reference.score(shard.mini_batches), weight_version=step)
        reported.append(metrics["actor/kl_loss"])
        student.load_state_dict(gathered(policy.weight_source(), layout))
    assert distance() < before / 3
    assert reported[-1] < reported[0] / 3
