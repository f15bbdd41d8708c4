"""What leaves the GPU while servers use it: storages, each once, found again at every call."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_dapo.config.loader import load_config
from megatron_dapo.platform.cpu_ledger import CpuLedger
from megatron_dapo.training.distribute import StepDistributor
from megatron_dapo.training.parked import STATES, WEIGHTS, Parked, holdings
from megatron_dapo.training.policy import Policy
from megatron_dapo.training.roles import NoCritic, NoReference
from tests.live_bytes import resident_storages
from tests.synthetic import synthetic_groups

pytestmark = pytest.mark.unit

SMALL = [
    "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.megatron.dtype=bfloat16",
    "actor_rollout_ref.actor.megatron.use_distributed_optimizer=true",
]


def make_policy(layout, model_path) -> Policy:
    return Policy(load_config(None, [*SMALL, f"actor_rollout_ref.model.path={model_path}"]), layout)


def step(policy: Policy, layout, model_path, seed: int = 0) -> None:
    config = load_config(None, [*SMALL, f"actor_rollout_ref.model.path={model_path}"])
    groups = synthetic_groups(policy.model.spec.vocab_size, num_groups=2, seed=seed)
    shard = StepDistributor(config, layout, policy.model.spec)(0, groups)
    policy.update(policy.score(shard.mini_batches), weight_version=0)


def frozen(*weights: Tensor) -> SimpleNamespace:
    """A reference with these weights."""
    chunk = torch.nn.ParameterList([torch.nn.Parameter(weight, requires_grad=False) for weight in weights])
    return SimpleNamespace(model=SimpleNamespace(chunks=[chunk]))


def trained(weight: Tensor, optimizer: object) -> SimpleNamespace:
    """A critic with this weight and optimizer, and a buffer of gradients."""
    buffer = SimpleNamespace(param_data=None, grad_data=torch.ones(8))
    stage = SimpleNamespace(buffers=[buffer], expert_parallel_buffers=[])
    return SimpleNamespace(model=frozen(weight).model, state=SimpleNamespace(stages=[stage], optimizer=optimizer))


class Box:
    """An optimizer of an unknown kind."""

    def __init__(self, **things: object) -> None:
        self.__dict__ |= things

    def zero_grad(self) -> None:
        pass


def parked_of(*roles, params: bool = True, optimizer: bool = True) -> Parked:
    return Parked(roles, params=params, optimizer=optimizer)


def test_all_of_a_trained_model_goes_and_comes_back_as_it_was(layout, model_path):
    before = set(resident_storages())
    policy = make_policy(layout, model_path)
    step(policy, layout, model_path)
    tables = {buffer.untyped_storage() for chunk in policy.model.chunks for buffer in chunk.buffers()}
    own = [storage for storage in resident_storages() if storage not in before | tables]
    held = holdings(policy)
    kept = [(t, t.clone()) for t in (*held[WEIGHTS].values(), *held[STATES].values())]
    gradients = [buffer.grad_data for stage in policy.state.stages for buffer in stage.buffers]
    num_bytes = sum(storage.nbytes() for storage in own)
    num_trained = sum(p.numel() for chunk in policy.model.chunks for p in chunk.parameters())

    parked = parked_of(policy, NoReference.model, NoCritic.model)
    assert parked.needed_bytes() == 0
    parked.park_states()
    assert parked.num_bytes >= 12 * num_trained  # float32: a main weight and two moments
    parked.park_weights()
    assert parked.num_bytes >= 2 * num_trained
    rest = sum(storage.nbytes() for storage in own)
    assert rest < num_bytes / 10  # rotary tables and counters; forgotten moments would be a fifth
    needed = parked.needed_bytes()
    assert needed == num_bytes - rest >= 18 * num_trained
    parked.restore()
    assert parked.num_bytes == needed - sum(gradient.nbytes for gradient in gradients)
    assert all(torch.equal(tensor, copy) for tensor, copy in kept)
    assert not any(gradient.any() for gradient in gradients)


def test_moments_made_by_a_later_step_are_found(layout, model_path):
    policy = make_policy(layout, model_path)
    parked = parked_of(policy)
    parked.park_states()
    without = parked.needed_bytes()
    parked.restore()
    step(policy, layout, model_path)
    parked.park_states()
    num_trained = sum(p.numel() for chunk in policy.model.chunks for p in chunk.parameters())
    assert parked.needed_bytes() >= without + 8 * num_trained
    parked.restore()
    step(policy, layout, model_path, seed=1)  # nothing is missing


def test_a_call_again_or_too_many_changes_nothing():
    weight = torch.arange(6.0)
    moment = torch.arange(4.0)
    parked = parked_of(trained(weight.clone(), Box(moment=moment)))
    parked.restore()
    for _ in range(2):
        parked.park_states()
        parked.park_states()
        assert parked.num_bytes == 0 and parked.needed_bytes() == 4 * (4 + 8)
        parked.park_weights()
        parked.park_weights()
        assert parked.needed_bytes() == 4 * (4 + 8 + 6)
        parked.restore()
        assert parked.num_bytes == 4 * (4 + 6) and parked.needed_bytes() == 0
        parked.restore()
        assert parked.num_bytes == 0
    assert torch.equal(moment, torch.arange(4.0))


def test_weights_that_share_a_storage_move_once_and_stay_shared():
    whole = torch.arange(12.0)
    role, other = frozen(whole[:4], whole[4:], whole[:4]), frozen(whole[2:6])
    parked = parked_of(role, other)
    parked.park_weights()
    assert parked.num_bytes == parked.needed_bytes() == 4 * 12
    assert whole.untyped_storage().nbytes() == 0
    parked.restore()
    first, second, third = role.model.chunks[0]
    assert torch.equal(torch.cat([first, second]), torch.arange(12.0))
    third.data[0] = 7.0
    assert first[0] == whole[0] == 7.0


@pytest.mark.parametrize(("params", "optimizer"), [(False, True), (True, False)])
def test_what_the_config_keeps_on_the_gpu_stays_there(params, optimizer):
    weight, moment = torch.arange(6.0), torch.arange(4.0)
    role = trained(weight, Box(moment=moment))
    parked = parked_of(role, params=params, optimizer=optimizer)
    parked.park_states()
    parked.park_weights()
    assert bool(weight.untyped_storage().nbytes()) != params
    assert bool(moment.untyped_storage().nbytes()) != optimizer
    (buffer,) = role.state.stages[0].buffers
    assert buffer.grad_data.untyped_storage().nbytes() == 0  # gradients go anyway
    parked.restore()
    assert torch.equal(weight, torch.arange(6.0)) and torch.equal(moment, torch.arange(4.0))
    assert not buffer.grad_data.any()


def test_an_optimizers_tensors_are_found_wherever_it_keeps_them():
    """Megatron's lines and kinds of optimizers have other names and other containers."""
    tensors = [torch.ones(n) for n in range(1, 6)]
    inner = Box(by_tensor={tensors[0]: {"moment": tensors[1]}}, groups=[[tensors[2]]])
    tensors[2].main = tensors[3]
    chained = Box(parts=(inner, None), back=inner, module=torch.nn.Linear(2, 2), call=lambda: tensors)
    inner.owner, inner.extra = chained, {"x": [(tensors[4],)]}
    parked = parked_of(trained(torch.ones(3), chained))
    parked.park_states()
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0] * 5
    assert chained.module.weight.untyped_storage().nbytes() > 0  # no tensor of the optimizer
    parked.restore()
    assert all(torch.equal(tensor, torch.ones(n)) for n, tensor in enumerate(tensors, start=1))


def test_the_hosts_tensors_of_an_optimizer_stay():
    elsewhere = torch.ones(5, device="meta")  # as the host is for a GPU
    parked = parked_of(trained(torch.ones(3), Box(moment=torch.ones(4), offloaded=elsewhere)))
    parked.park_states()
    assert parked.num_bytes == 4 * 4 and elsewhere.untyped_storage().nbytes() == 4 * 5


@pytest.mark.parametrize("shared", [torch.from_numpy(np.ones(3)), torch.ones(3).share_memory_()])
def test_a_weight_in_foreign_memory_is_refused_by_name(shared):
    own = torch.ones(2)
    with pytest.raises(AssertionError, match=r"1 of chunk 0 .*shares its memory.*cannot leave the GPU"):
        parked_of(frozen(own, shared)).park_weights()
    assert own.untyped_storage().nbytes() > 0  # nothing has moved


def test_the_ledger_shows_each_kind_as_it_goes_and_comes(monkeypatch, tmp_path):
    monkeypatch.setenv("MEGATRON_DAPO_LEDGER", str(tmp_path))
    monkeypatch.setenv("MEGATRON_DAPO_LEDGER_BYTES", "100")
    monkeypatch.setenv("LOCAL_RANK", "0")
    ledger = CpuLedger(tmp_path / "gpu0.jsonl", 100)
    optimizer = Box(moment=torch.arange(4.0))
    weight = torch.arange(6.0)
    parked = parked_of(trained(weight, optimizer))
    assert ledger.held() == {"trainer": 4 * (6 + 4 + 8)}
    optimizer.second = torch.arange(5.0)
    parked.park_states()
    assert ledger.held() == {"trainer": 4 * 6} and parked.needed_bytes() == 4 * (4 + 5 + 8)
    lines = map(json.loads, ledger.path.read_text().splitlines())
    states = [line["bytes"] for line in lines if line["what"] == "optimizer states"]
    assert states == [4 * 4, 4 * 5, -4 * (4 + 5)]  # also what was made since the last call
    parked.park_weights()
    assert ledger.free_bytes() == 100
    ledger.take("server", 10, "weights")
    with pytest.raises(MemoryError, match=r"trainer needs 36 bytes for optimizer states.*server 10"):
        parked.restore()
    ledger.give("server", 10, "weights")
    parked.restore()  # what had come back before the error is not taken twice
    assert ledger.held() == {"trainer": 4 * (6 + 4 + 5 + 8)}
    assert torch.equal(weight, torch.arange(6.0)) and torch.equal(optimizer.second, torch.arange(5.0))


def test_a_reference_of_its_own_and_one_that_is_the_actor_move_once(layout, model_path):
    policy = make_policy(layout, model_path)
    as_reference = SimpleNamespace(model=replace(policy.model))
    parked = parked_of(policy, as_reference)
    parked.park_weights()
    num_bytes = parked.needed_bytes()
    parked.restore()
    alone = parked_of(policy)
    alone.park_weights()
    assert alone.needed_bytes() == num_bytes > 0
    alone.restore()
