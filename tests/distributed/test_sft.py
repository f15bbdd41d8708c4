"""Fine-tuning on conversations: loss, gradient and weights are those of transformers in float64,
at every layout."""

import json
from pathlib import Path

import pytest
import torch

from tests.distributed.layout_runs import assert_same
from tests.forked_ranks import run_ranks
from tests.sft_files import conversations, make_chat_model, mean_loss_of, write_rows

pytestmark = pytest.mark.distributed

BATCH = 10
LAYOUTS = {
    1: {"tp1": {}},
    2: {"tp2": {"tp": 2}, "tp2_sp": {"tp": 2, "sp": True}, "pp2": {"pp": 2}, "dp2": {}, "cp2": {"cp": 2}},
    4: {"tp2_sp_pp2": {"tp": 2, "sp": True, "pp": 2}, "pp2_vpp2_dp2": {"pp": 2, "vpp": 2}, "tp2_dp2": {"tp": 2}},
}
NAMES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "sp": "sequence_parallel",
}
CUTS = {
    "whole": ["actor_rollout_ref.actor.max_tokens_per_microbatch=4096"],
    "small": ["actor_rollout_ref.actor.max_tokens_per_microbatch=176"],
}
MORE = {  # of one process
    "padded": [*CUTS["small"], "actor_rollout_ref.model.use_remove_padding=false"],
    "composed": [*CUTS["small"], "actor_rollout_ref.actor.fused_kernels=off"],
}
CASES = [f"{layout}/{cut}" for of_world in LAYOUTS.values() for layout in of_world for cut in CUTS]
CASES += [f"tp1/{variant}" for variant in MORE]


def overrides_of(folder: Path) -> list[str]:
    return [
        "sft.enable=true",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"data.train_files=[{folder / 'train.jsonl'}]",
        f"data.val_files=[{folder / 'val.jsonl'}]",
        f"data.train_batch_size={BATCH}",
        "data.shuffle=false",
        "sft.max_length=168",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        # a large epsilon keeps rounding noise of vanishing gradients from becoming whole steps,
        # as in layout_worker
        "actor_rollout_ref.actor.optim.eps=1e-2",
        "actor_rollout_ref.actor.optim.clip_grad=0",
        "actor_rollout_ref.actor.megatron.use_distributed_optimizer=false",
        "actor_rollout_ref.actor.megatron.dtype=float32",
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    make_chat_model(folder / "model", layers=4, vocab=67)
    write_rows(folder / "train.jsonl", conversations(2 * BATCH, seed=1))
    write_rows(folder / "val.jsonl", conversations(7, seed=2))
    return folder


@pytest.fixture(scope="module")
def results(folder) -> dict[str, dict]:
    results: dict[str, dict] = {}
    for world, layouts in LAYOUTS.items():
        rows = []
        for name, sizes in layouts.items():
            keys = [f"actor_rollout_ref.actor.megatron.{NAMES[k]}={json.dumps(v)}" for k, v in sizes.items()]
            variants = {cut: [*keys, *own] for cut, own in (CUTS | (MORE if world == 1 else {})).items()}
            rows.append((name, sizes, variants))
        task = folder / f"task{world}.json"
        out = folder / f"out{world}.pt"
        overrides = [*overrides_of(folder), f"trainer.n_procs_per_node={world}"]
        task.write_text(json.dumps({"overrides": overrides, "out": str(out), "layouts": rows}))
        run_ranks(Path(__file__).with_name("sft_worker.py"), world, str(task))
        results |= torch.load(out)
    return results


@pytest.fixture(scope="module")
def oracle(folder) -> dict:
    """By transformers in float64: each conversation by itself,
    with labels of -100 outside the assistant's words."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)

    def mean_loss(name: str, number: int) -> torch.Tensor:
        return mean_loss_of(lambda tokens: model(input_ids=tokens).logits, folder / "model", folder / name, number)

    with torch.no_grad():
        before = mean_loss("val.jsonl", 7).item()
    loss = mean_loss("train.jsonl", BATCH)
    loss.backward()
    gradients = {name: p.grad.float() for name, p in model.named_parameters()}
    return {"before": before, "loss": loss.item(), "gradients": gradients}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_transformers_in_float64(results, oracle, case):
    got = results[case]
    assert got["steps"][0]["train/loss"] == pytest.approx(oracle["loss"], rel=1e-5)
    assert got["before"]["val/loss"] == pytest.approx(oracle["before"], rel=1e-5)
    norm = sum(float(g.double().square().sum()) for g in oracle["gradients"].values()) ** 0.5
    assert got["steps"][0]["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert_same({"metrics": {}, "gradients": got["gradients"]}, {"metrics": {}, "gradients": oracle["gradients"]})


@pytest.mark.parametrize("case", CASES)
def test_metrics_and_weights_after_two_steps_are_those_of_one_process(results, case):
    expected = results["tp1/whole"]
    got = results[case]
    if got is not expected:
        for step in range(2):
            assert_same({"metrics": got["steps"][step]}, {"metrics": expected["steps"][step]})
        assert_same({"metrics": got["after"], "weights": got["weights"]},
                    {"metrics": expected["after"], "weights": expected["weights"]})  # fmt: skip
    assert got["after"]["val/loss"] < got["before"]["val/loss"]


def test_the_cuts_are_really_different(results):
    assert results["tp1/whole"]["num_micro_batches"] == [1, 1]
    assert min(results["tp1/small"]["num_micro_batches"]) > 1
