"""Places of the optimizer's state: the machine's memory, or half precision; checkpoints fit both.

Megatron's optimizer for the former runs here as it is, on a tensor that claims to be a GPU's.
"""

from dataclasses import replace

import pytest
import torch

from megatron_dapo.checkpointing.torch_dist.loading import load
from megatron_dapo.checkpointing.torch_dist.optimizer_state import HybridDeviceOptimizer, Slot, slots
from megatron_dapo.checkpointing.torch_dist.saving import save
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.config import Config
from megatron_dapo.estimates.memory import host_memory, model_states
from megatron_dapo.training import optimizer
from megatron_dapo.training.distribute import StepDistributor
from megatron_dapo.training.parked import Parked
from megatron_dapo.training.policy import Policy
from tests.synthetic import synthetic_groups
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.unit

MEGATRON = "actor_rollout_ref.actor.megatron"
SMALL = [
    "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.actor.optim.eps=1e-4",
    f"{MEGATRON}.dtype=bfloat16",
]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("tiny"), "qwen2", layers=2, hidden=16, heads=2))


class OnHost(torch.Tensor):
    """A tensor moved from a GPU that does not exist; results made of it stay on the host too."""

    def __reduce_ex__(self, protocol):
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


class TorchWithoutPinning:
    """torch, with nobody to pin its memory for want of a driver."""

    def __getattr__(self, name: str):
        return getattr(torch, name)

    def empty(self, *shape, pin_memory: bool = False, **options):
        return torch.empty(*shape, **options)


@pytest.fixture
def pretended_gpu(monkeypatch) -> None:
    """Have Megatron's optimizer divide tensors between the two devices
    as if they all were a GPU's."""
    module = HybridDeviceOptimizer.__module__
    monkeypatch.setattr(f"{module}.torch", TorchWithoutPinning())
    monkeypatch.setattr("megatron.core.optimizer.optimizer_config.is_te_min_version", lambda version: True)
    state_options, divide = optimizer._state_options, HybridDeviceOptimizer._get_sub_optimizer_param_groups

    def with_transformer_engine(megatron, model):
        return state_options(megatron, replace(model, uses_transformer_engine=True))

    def divided(self, fraction: float):
        with monkeypatch.context() as patch:
            is_cuda = property(lambda tensor: not isinstance(tensor, OnHost))
            patch.setattr(torch.Tensor, "is_cuda", is_cuda, raising=False)
            patch.setattr(torch.Tensor, "cpu", lambda tensor: tensor.as_subclass(OnHost))
            patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
            return divide(self, fraction)

    monkeypatch.setattr(optimizer, "_state_options", with_transformer_engine)
    monkeypatch.setattr(HybridDeviceOptimizer, "_get_sub_optimizer_param_groups", divided)


def config_of(model_path: str, *overrides: str) -> Config:
    return load_config(None, [*SMALL, f"actor_rollout_ref.model.path={model_path}", *overrides])


def policy_of(layout, model_path: str, *overrides: str) -> tuple[Policy, list]:
    config = config_of(model_path, *overrides)
    policy = Policy(config, layout)
    groups = synthetic_groups(policy.model.spec.vocab_size, num_groups=2)
    return policy, StepDistributor(config, layout, policy.model.spec)(0, groups).mini_batches


def offloaded(layout, model_path: str, fraction: float) -> tuple[Policy, list]:
    return policy_of(layout, model_path, f"{MEGATRON}.optimizer_offload_fraction={fraction}")


def on_host(slot: Slot) -> bool:
    return isinstance(slot.main, OnHost)


def state_of(policy: Policy) -> list[dict[str, torch.Tensor]]:
    plain = [slot.tensors() for slot in slots(policy.state.optimizer)]
    return [{name: values.as_subclass(torch.Tensor).clone() for name, values in each.items()} for each in plain]


def assert_same(got: Policy, expected: Policy) -> None:
    for one, other in zip(state_of(got), state_of(expected), strict=True):
        assert one.keys() == other.keys() == {"exp_avg", "exp_avg_sq", "fp32_param"}
        for name, values in other.items():
            # two steps of fused and of plain Adam: a few roundings of float32
            torch.testing.assert_close(one[name], values, rtol=1e-5, atol=1e-8, msg=lambda text: f"{name}: {text}")  # noqa: B023


@pytest.mark.parametrize(
    ("of_the_user", "during"),
    [(1, 3), (2, 2)],  # 7 cores of two ranks; OMP_NUM_THREADS=2, though launchers set 1
)
def test_a_state_on_the_host_is_stepped_by_the_ranks_share_of_its_machines_cores(
    layout, model_path, pretended_gpu, monkeypatch, of_the_user, during
):
    cores = set(range(7))
    ranks = [("here", cores), ("here", cores), ("here", {8, 9}), ("elsewhere", cores)]
    monkeypatch.setattr("os.sched_getaffinity", lambda process: cores)
    monkeypatch.setattr("megatron_dapo.platform.parallel.node_name", lambda: "here")
    gather = type(layout).gather
    everyone = [(name, sorted(ours)) for name, ours in ranks]
    monkeypatch.setattr(type(layout), "gather", lambda self, own: everyone if own in everyone else gather(self, own))
    step, threads = HybridDeviceOptimizer.step, []

    def watched(self, *arguments):
        threads.append(torch.get_num_threads())
        return step(self, *arguments)

    monkeypatch.setattr(HybridDeviceOptimizer, "step", watched)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(of_the_user)
        policy, mini_batches = offloaded(layout, model_path, 1.0)
        policy.update(mini_batches, weight_version=0)
        assert threads == [during] and torch.get_num_threads() == of_the_user
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("fraction", [0.4, 1.0])
def test_a_state_on_the_host_is_stepped_as_one_on_the_gpu(layout, model_path, pretended_gpu, fraction):
    plain, mini_batches = policy_of(layout, model_path)
    apart, _ = offloaded(layout, model_path, fraction)
    for version in range(2):
        expected, got = (policy.update(mini_batches, weight_version=version) for policy in (plain, apart))
        assert got["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-4)
    assert_same(apart, plain)
    for one, other in zip(plain.model.chunks[0].parameters(), apart.model.chunks[0].parameters(), strict=True):
        # one unit in bfloat16's last place
        torch.testing.assert_close(other, one, rtol=2**-7, atol=1e-6)
    assert {slot.num_steps for slot in slots(apart.state.optimizer)} == {2}


@pytest.mark.parametrize("fraction", [0.4, 1.0])
def test_the_memory_estimate_knows_the_hosts_share(layout, model_path, pretended_gpu, fraction):
    apart, mini_batches = offloaded(layout, model_path, fraction)
    apart.update(mini_batches, weight_version=0)
    config = config_of(model_path, f"{MEGATRON}.optimizer_offload_fraction={fraction}")
    on_gpu = {is_host: 0 for is_host in (False, True)}
    for slot in slots(apart.state.optimizer):
        on_gpu[on_host(slot)] += sum(values.numel() * values.element_size() for values in slot.tensors().values())
    estimated = model_states(config, apart.model.spec, 0).optimizer
    whole = sum(on_gpu.values())
    largest = max(slot.main.numel() for slot in slots(apart.state.optimizer)) * 12
    assert on_gpu[False] <= estimated == pytest.approx((1 - fraction) * whole, abs=1)
    assert estimated - on_gpu[False] < largest  # tensors are not divided
    # 12 bytes of state and 4 of gradient each
    assert host_memory(config, apart.model.spec) == pytest.approx(fraction * whole / 12 * 16, abs=1)


def test_checkpoints_go_from_the_host_to_the_gpu_and_back(layout, model_path, pretended_gpu, tmp_path):
    plain, mini_batches = policy_of(layout, model_path)
    apart, _ = offloaded(layout, model_path, 0.4)
    again, _ = offloaded(layout, model_path, 0.7)
    apart.update(mini_batches, weight_version=0)
    for writer, reader, folder in ((apart, plain, tmp_path / "first"), (plain, again, tmp_path / "second")):
        save(folder, writer.model, layout, optimizer=writer.state.optimizer).finish()
        load(folder, reader.model, layout, optimizer=reader.state.optimizer)
        for one, other in zip(state_of(reader), state_of(writer), strict=True):
            assert all(torch.equal(one[name], other[name]) for name in other)
        assert {slot.num_steps for slot in slots(reader.state.optimizer)} == {1}
    for policy in (plain, apart, again):
        policy.update(mini_batches, weight_version=1)
    assert_same(apart, plain)
    assert_same(again, plain)


class HalfMoments(torch.optim.Optimizer):
    """A stand-in for Transformer Engine's Adam (TE 2.20, optimizers/fused_adam.py). It keeps
    weights and moments by itself, of the given dtypes, and counts the steps of a group."""

    master_weights = True

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        assert not store_param_remainders
        for name in ("exp_avg", "exp_avg_sq"):
            self.state[param][name] = torch.zeros_like(param, dtype=torch.bfloat16)
        self.state[param]["master_param"] = param.detach().clone().float()


def test_moments_in_half_precision_are_saved_as_such_and_read_as_any():
    """Slots give the optimizer's own memory, so that a load fills it, in the dtype that it has."""
    parameter = torch.nn.Parameter(torch.randn(6).bfloat16())
    shard = parameter.detach()[2:5]
    inner = HalfMoments([shard], {})
    slot = Slot(parameter, shard, inner, first=2, sharded=True)
    tensors = slot.tensors()
    assert {name: values.dtype for name, values in tensors.items()} == {
        "exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16, "fp32_param": torch.float32,
    }  # fmt: skip
    assert torch.equal(tensors["fp32_param"], shard.float())
    for values in tensors.values():
        values.copy_(torch.arange(3.0))  # as torch's reader does with float32
    assert all(inner.state[shard][name].tolist() == [0, 1, 2] for name in ("exp_avg", "exp_avg_sq", "master_param"))
    slot.set_num_steps(5)
    assert inner.param_groups[0]["step"] == slot.num_steps == 5


@pytest.mark.parametrize("key", ["optimizer_offload_fraction=0.5", "exp_avg_dtype=bfloat16"])
def test_what_this_machine_lacks_is_said_with_the_cure(layout, model_path, key):
    with pytest.raises(UserError) as error:
        policy_of(layout, model_path, f"{MEGATRON}.{key}")
    (sentence,) = error.value.sentences
    name, _, value = key.partition("=")
    assert f"{MEGATRON}.{name} is {value}" in sentence and "leave it out" in sentence


def test_a_divided_state_is_the_same_after_it_was_parked(layout, model_path, pretended_gpu):
    """Megatron's optimizer for it holds tensors in containers of its own."""
    states = []
    for parks in (False, True):
        policy, mini_batches = offloaded(layout, model_path, 0.5)
        policy.update(mini_batches, weight_version=0)
        if parks:
            parked = Parked([policy], params=True, optimizer=True)
            parked.park_states()
            state = [tensor for slot in slots(policy.state.optimizer) for tensor in slot.tensors().values()]
            assert state and not any(tensor.untyped_storage().nbytes() for tensor in state)
            parked.park_weights()
            parked.restore()
        policy.update(mini_batches, weight_version=0)
        states.append(state_of(policy))
    for one, other in zip(*states, strict=True):
        assert all(torch.equal(values, other[name]) for name, values in one.items())
