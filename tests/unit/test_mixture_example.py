"""The mixture that the example trains is the demo's base model, cut into experts."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.arithmetic import mixture
from examples.arithmetic.problems import BASE
from megatron_dapo.huggingface.spec_reader import read_model_spec

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(("noise", "is_same"), [(0.0, True), (mixture.NOISE, False)])
def test_without_noise_it_gives_the_log_probs_of_the_base_model(tmp_path, monkeypatch, noise, is_same):
    monkeypatch.setattr(mixture, "NOISE", noise)
    mixture.upcycled(tmp_path / "mixture")
    how = dict(dtype=torch.float64, experts_implementation="eager")
    tokens = torch.randint(3, 60, (4, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        dense, cut = (
            AutoModelForCausalLM.from_pretrained(path, **how)(tokens).logits.log_softmax(-1)
            for path in (BASE, tmp_path / "mixture")
        )
    # halves are exact in bfloat16, and the routers' weights of a token, which are float32,
    # add up to 1
    assert ((dense - cut).abs().max().item() < 1e-5) is is_same
    moe = read_model_spec(tmp_path / "mixture").moe
    assert (moe.num_experts, moe.experts_per_token, moe.num_dense_layers) == (8, 2, 1)
