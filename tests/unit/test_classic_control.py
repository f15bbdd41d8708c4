"""PPO for classic control: the seed's names, shapes and formulas; states are values, and time
limits no ends.

That it learns is in tests/e2e/test_classic_control.py.
"""

import dataclasses
import json
import math

import pytest
import torch

from benchmarks import bench_classic_control
from examples.classic_control import train
from examples.classic_control.agent import PPO, rollout_advantages
from examples.classic_control.env import AutoReset, make, reset_batch
from examples.classic_control.networks import ActorCriticParams, ActorCriticShared
from examples.classic_control.types import PPOConfig, PPOMetrics, PPOState, PPOTransition
from tests.helpers import REPOSITORY

pytestmark = pytest.mark.unit

SMALL = PPOConfig(hidden_sizes=(8, 6), n_steps=12, n_minibatches=3, n_epochs=2, num_envs=3)


def fresh(config: PPOConfig = SMALL, seed: int = 0) -> PPOState:
    return PPO.init(torch.Generator().manual_seed(seed), obs_shape=(4,), n_actions=2, config=config)


def rollout_of(config: PPOConfig = SMALL, seed: int = 0, time_limit: int = 500):
    """(state, trajectories, last values) of N environments."""
    env, env_params = make("CartPole-v1")
    env, env_params = AutoReset(env), dataclasses.replace(env_params, max_episode_steps=time_limit)
    obs, env_states = reset_batch(env, range(config.num_envs), env_params)
    state, trajectories, _, _, last_values = PPO.collect_rollout_batch(
        fresh(config, seed), obs, env_states, env.step, env_params, config=config
    )
    return state, trajectories, last_values


def numbers(state: PPOState) -> list[torch.Tensor]:
    return [p.detach().clone() for p in state.params.parameters()]


def test_the_config_does_not_change():
    assert hash(PPOConfig()) == hash(PPOConfig())
    with pytest.raises(dataclasses.FrozenInstanceError):
        PPOConfig().lr = 1.0


@pytest.mark.parametrize("shared", [False, True])
def test_every_method_has_the_seeds_shapes(shared):
    config = dataclasses.replace(SMALL, shared_backbone=shared)
    state, obs = fresh(config), torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    assert isinstance(state.params, ActorCriticShared if shared else ActorCriticParams)
    action, log_prob, value, _ = PPO.act(state, obs[0], config=config)
    assert action.shape == log_prob.shape == value.shape == PPO.get_value(state, obs[0], config=config).shape == ()
    actions, log_probs, values, _ = PPO.act_batch(state, obs, config=config)
    assert actions.shape == log_probs.shape == values.shape == (5,)
    assert set(actions.tolist()) <= {0, 1}
    torch.testing.assert_close(PPO.get_value_batch(state, obs, config=config), values)
    again, values_again, entropy = PPO.evaluate_actions(state.params, obs, actions, config=config)
    torch.testing.assert_close(again, log_probs)
    torch.testing.assert_close(values_again, values)
    p = torch.softmax(state.params(obs)[0].double(), -1)
    torch.testing.assert_close(entropy.double(), -(p * p.log()).sum(-1), rtol=1e-5, atol=1e-6)

    env, env_params = make("CartPole-v1")
    env = AutoReset(env)
    first, env_state = env.reset(7, env_params)
    state, one, last_obs, env_state, last_value = PPO.collect_rollout(
        state, first, env_state, env.step, env_params, config=config
    )
    assert one.obs.shape == (12, 4) and last_obs.shape == (4,) and last_value.shape == ()
    assert all(field.shape == (12,) for name, field in one._asdict().items() if name != "obs")
    after, metrics = PPO.update(state, one, last_value, config=config)
    assert after.step == state.step + 1 == 1 and all(math.isfinite(x) for x in metrics)

    state, several, last_values = rollout_of(config)
    assert several.obs.shape == (12, 3, 4) and several.reward.shape == (12, 3) and last_values.shape == (3,)
    assert PPO.update(state, several, last_values, config=config)[0].step == 1


def test_with_a_shared_backbone_both_heads_move_the_same_layers():
    obs = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    for shared in (False, True):
        logits, value = fresh(dataclasses.replace(SMALL, shared_backbone=shared)).params(obs)
        of_actor, of_critic = ({id(node) for node in _leaves(x.sum().grad_fn)} for x in (logits, value))
        assert bool(of_actor & of_critic) == shared


def _leaves(node) -> list[torch.Tensor]:
    """The parameters that a result depends on."""
    if hasattr(node, "variable"):
        return [node.variable]
    return [leaf for child, _ in node.next_functions if child for leaf in _leaves(child)]


def test_a_state_is_a_value_and_everything_follows_from_the_seed():
    state, trajectories, last_values = rollout_of()
    same, again, _ = rollout_of()
    other = rollout_of(seed=1)[1]
    assert all(torch.equal(a, b) for a, b in zip(trajectories, again, strict=True))
    assert not torch.equal(trajectories.action, other.action)
    obs, before = trajectories.obs[0], numbers(state)
    actions = [PPO.act_batch(state, obs.repeat(50, 1), config=SMALL)[0] for _ in range(2)]
    assert torch.equal(*actions), "acting changed the state it was given"
    after = [PPO.update(s, trajectories, last_values, config=SMALL) for s in (state, state, same)]
    assert all(torch.equal(a, b) for a, b in zip(before, numbers(state), strict=True)), "so did updating"
    assert not any(torch.equal(a, b) for a, b in zip(before, numbers(after[0][0]), strict=True))
    for one, metrics in after[1:]:
        assert metrics == after[0][1]
        assert all(torch.equal(a, b) for a, b in zip(numbers(one), numbers(after[0][0]), strict=True))
    # and the moments of Adam came along
    moved = PPO.update(after[0][0], trajectories, last_values, config=SMALL)[0].opt_state.state_dict()["state"]
    assert {int(entry["step"]) for entry in moved.values()} == {2 * 2 * 3}


class Given(torch.nn.Module):
    """Logits and value of observation i (one-hot) as they are written down."""

    def __init__(self, logits: list[list[float]], values: list[float]) -> None:
        super().__init__()
        self.logits, self.values = (torch.nn.Parameter(torch.tensor(x)) for x in (logits, values))

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return obs @ self.logits, obs @ self.values


def test_the_metrics_of_an_update_are_those_worked_out_by_hand():
    """Three steps with p = 1/2 for both actions; the episode ends after the second, the value after
    the third is 1.

    gamma 1/2, lambda 1/2. A_3 = 2 + 0.5 * 1 - 1 = 1.5; A_2 = 1 - 2 = -1; A_1 = 1 + 0.5 * 2 - 1.5 +
    0.25 * A_2 = 0.25. Returns 1.75, 1, 2.5; whitened advantages (A - 0.25) / sqrt(1.5625) = 0, -1,
    1.
    """
    config = PPOConfig(gamma=0.5, gae_lambda=0.5, n_epochs=1, n_minibatches=1, vf_coef=0.5, ent_coef=0.1)
    # now; the values of the rollout were 1.5, 2, 1
    params = Given([[0.0, 0.0]] * 3, [1.8, 2.1, 1.0])
    state = PPOState(params, torch.optim.Adam(params.parameters()), 0, torch.Generator())
    half = math.log(0.5)
    trajectory = PPOTransition(
        obs=torch.eye(3),
        action=torch.tensor([0, 1, 0]),
        reward=torch.tensor([1.0, 1.0, 2.0]),
        done=torch.tensor([False, True, False]),
        # ratios 1, 0.5 and 1.5
        log_prob=torch.tensor([half, half - math.log(0.5), half - math.log(1.5)]),
        value=torch.tensor([1.5, 2.0, 1.0]),
        bootstrap=torch.zeros(3),
    )
    advantages, returns = rollout_advantages(trajectory, torch.tensor(1.0), config)
    torch.testing.assert_close(advantages, torch.tensor([0.25, -1.0, 1.5]))
    torch.testing.assert_close(returns, torch.tensor([1.75, 1.0, 2.5]))
    _, metrics = PPO.update(state, trajectory, torch.tensor(1.0), config=config)
    actor = -(0.0 - 0.8 + 1.2) / 3  # min(-0.5, -0.8) and min(1.5, 1.2)
    critic = 0.5 * (max(0.05**2, 0.05**2) + 1.1**2 + 1.5**2) / 3  # 1.8 is clipped to 1.7, as far from 1.75
    entropy, kl = math.log(2), -(0.0 + math.log(0.5) + math.log(1.5)) / 3
    expected = PPOMetrics(actor + 0.5 * critic - 0.1 * entropy, actor, critic, entropy, kl)
    assert metrics == pytest.approx(expected, abs=1e-5)


def test_the_optimizer_is_adam_with_the_seeds_eps_behind_a_clipped_gradient():
    config = dataclasses.replace(SMALL, n_epochs=1, n_minibatches=1, max_grad_norm=1e-3)
    state, trajectories, last_values = rollout_of(config)
    assert type(state.opt_state) is torch.optim.Adam
    assert (state.opt_state.defaults["eps"], state.opt_state.defaults["lr"]) == (1e-5, config.lr)
    # a step is the gradient
    state = state._replace(opt_state=torch.optim.SGD(state.params.parameters(), lr=1.0))
    before = torch.cat([p.flatten() for p in numbers(state)])
    after, _ = PPO.update(state, trajectories, last_values, config=config)
    moved = torch.cat([p.flatten() for p in numbers(after)]) - before
    assert moved.double().norm() == pytest.approx(1e-3, rel=1e-3)


def test_where_the_time_limit_ends_an_episode_the_value_of_what_would_have_come_counts():
    """CartPole with a limit of 5 steps: no pole falls that fast."""
    state, trajectories, last_values = rollout_of(time_limit=5)
    ends = torch.zeros(12, 3, dtype=torch.bool)
    ends[[4, 9]] = True
    assert torch.equal(trajectories.done, ends)
    assert torch.equal(trajectories.bootstrap != 0, ends)
    # an episode's first observation is drawn from +-0.05, its last is further out: it is not the
    # next step's observation
    env, env_params = make("CartPole-v1")
    obs, env_state = env.reset(0, env_params)
    for action in trajectories.action[:5, 0].tolist():
        obs = env.step(env_state, action, env_params).obs
    expected = PPO.get_value(state, obs, config=SMALL)
    torch.testing.assert_close(trajectories.bootstrap[4, 0], expected)
    advantages, _ = rollout_advantages(trajectories, last_values, SMALL)
    torch.testing.assert_close(advantages[4, 0], 1 + 0.99 * expected - trajectories.value[4, 0])


def test_a_fallen_pole_is_an_end():
    """Pushed to one side it falls within a dozen steps; the next observation is a new episode's."""
    env, env_params = make("CartPole-v1")
    plain, auto = env, AutoReset(env)
    _, env_state = auto.reset(0, env_params)
    steps = [auto.step(env_state, 1, env_params) for _ in range(12)]
    (end,) = [step for step in steps if step.terminated]
    assert not end.truncated and end.final_obs[2].abs() > 0.2 > 0.05 >= end.obs.abs().max()
    _, env_state = plain.reset(0, env_params)
    assert torch.equal(plain.step(env_state, 1, env_params).final_obs, steps[0].obs)


def test_the_example_and_its_benchmark_run(capsys):
    train.main(["--env-steps", "512"])
    assert "100 fresh episodes: mean return" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        train.main(["--env-steps", "511"])
    result = bench_classic_control.main(["--quick"])
    assert "ours" in {row["implementation"] for row in result["results"][0]["rows"]}


def test_the_committed_benchmark_shows_both_implementations_solving_it():
    committed = json.loads((REPOSITORY / "benchmarks" / "results" / "classic_control_cpu.json").read_text())
    (result,) = committed["results"]
    assert result["config"] == json.loads(json.dumps(dataclasses.asdict(train.CARTPOLE)))
    mean_returns = {(row["implementation"], row["seed"]): row["mean_return"] for row in result["rows"]}
    assert mean_returns.keys() == {(name, seed) for name in bench_classic_control.IMPLEMENTATIONS for seed in range(3)}
    assert all(mean >= train.SOLVED for mean in mean_returns.values())
    assert {"stable-baselines3", "gymnasium"} == committed["packages"].keys()
