"""The critic is transformers' model with a linear head;
the cut of a step does not change its learning.

One start per number of processes runs all its layouts (see layout_worker). Every case is compared
with the plain single-process run, and that run with float64 oracles: values by transformers,
advantages by a loop over the tokens.
"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dapo.data.batching import SampleReward, TrainSample, assemble, sample_rewards
from tests.distributed.layout_runs import assert_same, run_layouts
from tests.synthetic import synthetic_groups
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.distributed

VOCAB, HIDDEN, GAMMA, LAM = 67, 32, 0.99, 0.95
LAYOUTS = {
    1: {"tp1": {}},
    2: {
        "tp2": {"tp": 2},
        "tp2_sp": {"tp": 2, "sp": True},
        "pp2": {"pp": 2},
        "pp2_vpp2": {"pp": 2, "vpp": 2},
        "dp2": {},
        "cp2": {"cp": 2},
    },
    4: {
        "tp2_sp_dp2": {"tp": 2, "sp": True},
        "tp2_sp_pp2": {"tp": 2, "sp": True, "pp": 2},
        "pp2_vpp2_dp2": {"pp": 2, "vpp": 2},
    },
}
# mini-batches of the critic are half of the actor's, and it goes through them twice
PPO = [
    "algorithm.adv_estimator=gae",
    f"algorithm.gamma={GAMMA}",
    f"algorithm.lam={LAM}",
    "critic.ppo_mini_batch_size=2",
    "critic.ppo_epochs=2",
    "critic.optim.lr=1e-3",
    "critic.optim.eps=1e-2",  # see layout_worker
]
SMALL = ["actor_rollout_ref.actor.max_tokens_per_microbatch=96", "critic.max_tokens_per_microbatch=64"]
PADDED = ["actor_rollout_ref.actor.max_tokens_per_microbatch=128", "actor_rollout_ref.model.use_remove_padding=false"]
HUBER = ["critic.loss_type=huber", "critic.cliprange_value=null"]
SHARDED = [*SMALL, "actor_rollout_ref.actor.megatron.use_distributed_optimizer=true"]
# the last chunk is only a head
UNEVEN = [*SMALL, "actor_rollout_ref.actor.megatron.pipeline_layers=[2,1,1,0]"]
VARIANTS = {"whole": [], "small": SMALL, "padded": PADDED, "sharded": SHARDED, "uneven": UNEVEN}
CHOSEN = {
    "tp1": ("whole", "small", "padded"),
    "tp2_sp": ("whole", "small", "padded"),
    "pp2": ("whole", "small", "padded"),
    "pp2_vpp2": ("uneven",),
    "dp2": ("small", "sharded"),
    "tp2_sp_dp2": ("small", "sharded"),
}


def variants(layout: str, critic: Path) -> dict[str, list[str]]:
    path = [*PPO, f"critic.model.path={critic}"]
    chosen = {name: [*path, *VARIANTS[name]] for name in CHOSEN.get(layout, ("small",))}
    others = {"huber": [*path, *HUBER], "body": [*PPO, "critic.value_loss_coef=1.0"]}
    return chosen | (others if layout == "tp1" else {})


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    """The actor, tied; a critic of other weights, with a value head and an unread policy head."""
    folder = tmp_path_factory.mktemp("critic")
    shape = dict(vocab=VOCAB, layers=4, hidden=HIDDEN, heads=4, kv_heads=2)
    actor = make_tiny(folder / "actor", "qwen3", tied=True, **shape)
    return actor, with_value_head(make_tiny(folder / "critic", "qwen3", seed=3, **shape))


def with_value_head(critic: Path) -> Path:
    tensors = load_file(critic / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    tensors["score.weight"] = 0.2 * torch.randn(1, HIDDEN, generator=generator)
    tensors["score.bias"] = torch.tensor([0.3])
    save_file(tensors, critic / "model.safetensors", metadata={"format": "pt"})
    return critic


@pytest.fixture(scope="module")
def results(models, tmp_path_factory) -> dict[str, dict]:
    """ "layout/variant" -> the run's results."""
    actor, critic = models
    layouts = {
        world: {name: (sizes, variants(name, critic)) for name, sizes in of_world.items()}
        for world, of_world in LAYOUTS.items()
    }
    return run_layouts(tmp_path_factory.mktemp("results"), actor, layouts)


CASES = [
    f"{layout}/{name}"
    for layouts in LAYOUTS.values()
    for layout in layouts
    for name in variants(layout, Path())
    if name in VARIANTS and f"{layout}/{name}" != "tp1/whole"
]


@pytest.mark.parametrize("case", CASES)
def test_loss_gradients_and_weights_of_critic_and_actor_are_those_of_one_process(results, case):
    got, expected = results[case], results["tp1/whole"]
    assert_same(got["critic"], expected["critic"])
    assert got["critic"]["first"] == pytest.approx(expected["critic"]["first"], rel=1e-5, abs=1e-6)
    assert_same(got, expected)


@pytest.mark.parametrize("case", CASES)
def test_values_returns_and_whitened_advantages_are_those_of_one_process(results, case):
    got, expected = results[case]["estimates"], results["tp1/whole"]["estimates"]
    assert got.keys() == expected.keys() and len(got) == 3 * 32
    for name, row in expected.items():
        # values of order 1 from 4 layers of float32; returns and advantages are sums of up
        # to 24 of them
        torch.testing.assert_close(got[name], row, rtol=1e-5, atol=1e-5, msg=name)


def test_the_cuts_are_really_different(results):
    num = {cut: results[f"tp1/{cut}"]["critic"]["num_micro_batches"] for cut in CHOSEN["tp1"]}
    assert num["whole"] == [1] * 4 and sum(num["small"]) > sum(num["padded"]) >= 4
    assert sum(results["tp1/small"]["num_micro_batches"]) < sum(num["small"])


@pytest.fixture(scope="module")
def samples() -> list[TrainSample]:
    return assemble(synthetic_groups(VOCAB), estimator="gae")


@pytest.fixture(scope="module")
def rewards() -> dict[int, SampleReward]:
    return sample_rewards(synthetic_groups(VOCAB))


@pytest.fixture(scope="module")
def values(models, samples, tmp_path_factory) -> dict[int, torch.Tensor]:
    return transformers_values(models[1], samples, tmp_path_factory.mktemp("body"), torch.float64)


def transformers_values(
    critic: Path, samples: list[TrainSample], folder: Path, dtype: torch.dtype
) -> dict[int, torch.Tensor]:
    """Of every position: the last hidden states of transformers, computed in dtype,
    times the head."""
    from transformers import AutoModel

    head = load_file(critic / "model.safetensors")
    weight, bias = (head[f"score.{name}"].to(dtype).double() for name in ("weight", "bias"))
    body = shutil.copytree(critic, folder / "model")
    tensors = {name: tensor for name, tensor in head.items() if not name.startswith("score")}
    save_file(tensors, body / "model.safetensors", metadata={"format": "pt"})
    eager = dict(attn_implementation="eager", experts_implementation="eager")
    model = AutoModel.from_pretrained(body, dtype=dtype, **eager).eval()
    values = {}
    with torch.no_grad():
        for sample in samples:
            hidden = model(torch.from_numpy(sample.tokens)[None]).last_hidden_state[0]
            values[sample.sample_id] = hidden.double() @ weight[0] + bias
    return values


def test_values_equal_transformers_and_are_0_at_uncounted_tokens(results, samples, values):
    for sample in samples:
        expected = torch.where(torch.from_numpy(sample.loss_mask) != 0, values[sample.sample_id], 0.0)
        got = results["tp1/whole"]["estimates"][f"values/{sample.sample_id}"]
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_returns_and_advantages_are_those_of_a_loop_over_the_tokens(results, samples, rewards, values):
    """GAE (arXiv 1506.02438) over counted tokens only, the reward at the last of them;
    whitened over all."""
    returns, advantages = {}, {}
    for sample in samples:
        counted = [t for t, mask in enumerate(sample.loss_mask) if mask]
        following, advantage = 0.0, 0.0
        for t in reversed(counted):
            value = float(values[sample.sample_id][t])
            reward = rewards[sample.sample_id].reward if t == counted[-1] else 0.0
            advantage = reward + GAMMA * following - value + GAMMA * LAM * advantage
            following = value
            advantages[sample.sample_id, t], returns[sample.sample_id, t] = advantage, advantage + value
    every = torch.tensor(list(advantages.values()), dtype=torch.float64)
    estimates = results["tp1/whole"]["estimates"]
    for (i, t), advantage in advantages.items():
        assert float(estimates[f"returns/{i}"][t]) == pytest.approx(returns[i, t], abs=2e-5)
        whitened = (advantage - float(every.mean())) / float(every.std())
        assert float(estimates[f"advantages/{i}"][t]) == pytest.approx(whitened, abs=2e-5)


def test_the_first_loss_is_the_mean_over_tokens_of_the_clipped_one(results, samples):
    """At the first optimizer step the values are the old ones, so nothing is clipped yet; explained
    variance is of the old values."""
    first, estimates = results["tp1/whole"]["critic"]["first"], results["tp1/whole"]["estimates"]
    huber = results["tp1/huber"]["critic"]["first"]
    matches = []
    for half in _pairs_of_groups(samples):
        values, returns = (
            torch.cat([estimates[f"{name}/{s.sample_id}"][torch.from_numpy(s.loss_mask) != 0] for s in half]).double()
            for name in ("values", "returns")
        )
        errors = (returns - values).abs()
        linear = torch.where(errors < 1, 0.5 * errors.square(), errors - 0.5)
        explained = 1 - (returns - values).var() / returns.var()
        wanted = {
            "critic/vf_loss": errors.square().mean(),
            "critic/vf_clipfrac": 0.0,
            "critic/value_mean": values.mean(),
            "critic/return_mean": returns.mean(),
            "critic/explained_variance": explained,
        }
        same = all(abs(first[name] - float(value)) < 1e-5 for name, value in wanted.items())
        matches.append(same and abs(huber["critic/vf_loss"] - float(linear.mean())) < 1e-5)
    assert sum(matches) == 1  # one of the pairs of groups is the first mini-batch


def _pairs_of_groups(samples: list[TrainSample]) -> list[list[TrainSample]]:
    uids = sorted({sample.uid for sample in samples})
    pairs = [(a, b) for i, a in enumerate(uids) for b in uids[i + 1 :]]
    return [[sample for sample in samples if sample.uid in pair] for pair in pairs]


def test_a_critic_of_a_policys_checkpoint_begins_with_values_of_0_and_learns(results):
    """Its head is new, its body is the (tied) policy's: only the head has a first gradient."""
    run = results["tp1/body"]
    assert all(not row.any() for name, row in run["estimates"].items() if name.startswith("values/"))
    moved = {name for name, gradient in run["critic"]["gradients"].items() if gradient.any()}
    assert moved == {"score.weight", "score.bias"}
    assert "lm_head.weight" not in run["critic"]["weights"]
    assert run["critic"]["metrics"]["critic/vf_loss"] < run["critic"]["first"]["critic/vf_loss"]
