"""Keys that contradict the model's config.json are refused before anything starts."""

import pytest

from tests.config_overrides import mistakes
from tests.model_json import MODEL_JSON

pytestmark = pytest.mark.unit

# Each row: overrides that make one mistake, words its one sentence must hold,
# changes of the model's config.json.
MODEL_CONTRADICTIONS = [
    ("trainer.n_procs_per_node=8 tp=8",
     ["size is 8", "num_attention_heads 12"], {"num_key_value_heads": 8}),
    ("trainer.n_procs_per_node=2 tp=2", ["size is 2", "num_key_value_heads 3"],
     {"num_key_value_heads": 3}),
    ("trainer.n_procs_per_node=2 tp=2", ["intermediate_size 255"], {"intermediate_size": 255}),
    ("trainer.n_procs_per_node=2 tp=2", ["hidden_size 97"], {"hidden_size": 97}),
    ("trainer.n_procs_per_node=16 pp=16", ["pipeline_model_parallel_size 16 is 16 chunks", "num_hidden_layers 12"], {}),
    ("trainer.n_procs_per_node=2 pp=2 vpp=8", ["size 2 x virtual", "size 8 is 16 chunks", "num_hidden_layers 12"], {}),
    ("trainer.n_procs_per_node=2 pp=2 megatron.pipeline_layers=[7,6]",
     ["pipeline_layers is [7, 6], 13 layers", "num_hidden_layers is 12"], {}),
    ("megatron.recompute_granularity=full megatron.recompute_num_layers=5", ["recompute_num_layers is 5", "12"], {}),
    ("trainer.n_procs_per_node=2 pp=2 megatron.recompute_granularity=full megatron.recompute_num_layers=3",
     ["recompute_num_layers is 3", "divide the layers of every pipeline chunk (7, 6)"], {"num_hidden_layers": 13}),
    ("trainer.n_procs_per_node=2 pp=2 megatron.pipeline_layers=[8,4] megatron.recompute_granularity=full "
     "megatron.recompute_num_layers=9 megatron.recompute_method=block", ["recompute_num_layers is 9", "at most 8"], {}),
    ("megatron.recompute_granularity=full megatron.recompute_num_layers=13 megatron.recompute_method=block",
     ["recompute_num_layers is 13", "at most"], {}),
    ("", ["max_position_embeddings 3000"], {"max_position_embeddings": 3000}),
    ("rollout.server.tensor_model_parallel_size=5", ["server.tensor_model_parallel_size is 5"], {}),
    ("rollout.server.tensor_model_parallel_size=6", ["size is 6", "neither a divisor nor a multiple", "heads 4"], {}),
    ("rollout.server.tensor_model_parallel_size=4", ["parallel_size is 4", "linear_num_key_heads 2"],
     {"linear_num_key_heads": 2}),
    ("rollout.max_staleness=1 rc.rollout_is=token weight_sync.pause_mode=in_place",
     ["pause_mode is in_place", "state in a Qwen3_5ForCausalLM", "to retract"],
     {"architectures": ["Qwen3_5ForCausalLM"]}),
    ("rollout.stop_token_ids=[1,1000]", ["[1000]", "1000 tokens"], {}),
    ("megatron.fp8=hybrid", ["fp8 is hybrid", "multiples of 16", "intermediate_size / TP is 264"],
     {"intermediate_size": 264}),
    ("megatron.fp8=e4m3 megatron.fp8_recipe=mxfp8", ["fp8 is e4m3", "multiples of 32", "hidden_size is 112"],
     {"hidden_size": 112, "head_dim": 8}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words", "model"), MODEL_CONTRADICTIONS)
def test_a_contradiction_with_the_model_is_one_sentence(text, words, model):
    (sentence,) = mistakes(text, model_json=MODEL_JSON | model)
    assert all(word in sentence for word in words), sentence
    assert mistakes(text, model_json=None) == []


HYBRID_JSON = MODEL_JSON | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "linear_num_key_heads": 4,
    "shared_expert_intermediate_size": 47,  # unused without experts: it need not divide
}
HYBRID_CONTRADICTIONS = [
    ("trainer.n_procs_per_node=8 tp=2 megatron.context_parallel_size=4",
     ["x context_parallel_size is 8", "linear_num_key_heads 4"], {}),
    ("megatron.fp8=hybrid", ["fp8 is hybrid", "gated delta nets", "set it to none"], {}),
    ("megatron.optimizer_offload_fraction=auto", ["offload_fraction is auto", "gated delta nets", "set it to 0"], {}),
    ("trainer.n_procs_per_node=2 tp=2 megatron.sequence_parallel=true megatron.tp_comm_overlap=true",
     ["tp_comm_overlap is true", "gated delta nets", "set it to false"], {}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words", "change"), HYBRID_CONTRADICTIONS)
def test_what_gated_delta_nets_cannot_do_is_one_sentence(text, words, change):
    (sentence,) = mistakes(text, model_json=HYBRID_JSON | change)
    assert all(word in sentence for word in words), sentence


MIXTURE_JSON = MODEL_JSON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "intermediate_size": 255,  # of no layer: it need not divide
    "moe_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
MIXTURE_CONTRADICTIONS = [
    ("trainer.n_procs_per_node=16 ep=16", ["expert_model_parallel_size is 16", "num_experts 8"]),
    ("trainer.n_procs_per_node=8 tp=2 pp=2 megatron.sequence_parallel=true ep=8",
     ["expert_model_parallel_size is 8", "4 ranks of a pipeline stage (TP 2 x DP 2)"]),
    ("trainer.n_procs_per_node=8 tp=2 megatron.sequence_parallel=true ep=4 etp=4",
     ["expert_model_parallel_size is 4 x expert_tensor_parallel_size 4", "8 ranks of a pipeline stage (TP 2 x DP 4)"]),
    ("trainer.n_procs_per_node=2 tp=2", ["sequence_parallel is false", "tensor_model_parallel_size 2", "Qwen3Moe"]),
    ("megatron.fp8=hybrid", ["fp8 is hybrid", "Qwen3MoeForCausalLM", "fp8 to none"]),
    ("rollout.server.tensor_model_parallel_size=3", ["server.tensor_model_parallel_size is 3", "moe_intermediate"]),
    ("actor.router_replay=old", ["router_replay is old", "one optimizer step per rollout step", "rollout or off"]),
    ("actor.router_replay=old data.train_batch_size=1024 algorithm.rollout_correction.bypass_mode=true",
     ["router_replay is old", "with algorithm.rollout_correction.bypass_mode the servers'"]),
    ("actor.router_replay=rollout trainer.synthetic_batch=true", ["router_replay is rollout", "synthetic_batch"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words"), MIXTURE_CONTRADICTIONS)
def test_a_contradiction_with_a_mixture_of_experts_is_one_sentence(text, words):
    (sentence,) = mistakes(text, model_json=MIXTURE_JSON | {"moe_intermediate_size": 64})
    assert all(word in sentence for word in words), sentence


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("trainer.n_procs_per_node=2 tp=2 megatron.sequence_parallel=true", "megatron.tensor_model_parallel_size is 2"),
        ("rollout.server.tensor_model_parallel_size=2", "rollout.server.tensor_model_parallel_size is 2"),
    ],
)
def test_trainer_and_servers_cut_the_expert_of_every_token(text, key):
    model = HYBRID_JSON | MIXTURE_JSON | {"architectures": ["Qwen3_5MoeForCausalLM"]}
    (sentence,) = mistakes(text, model_json=model)
    assert key in sentence and "does not divide the model's shared_expert_intermediate_size 47" in sentence
    assert mistakes(text, model_json=model | {"shared_expert_intermediate_size": 48}) == []
    assert mistakes(text.removesuffix(" megatron.sequence_parallel=true"), model_json=HYBRID_JSON) == []


@pytest.mark.parametrize("num_experts", ["num_experts", "num_local_experts"])
def test_experts_are_spread_over_tensor_and_data_parallel_ranks(num_experts):
    model = {**MIXTURE_JSON, "num_experts": None, num_experts: 8}
    if num_experts != "num_experts":
        del model["num_experts"]
    for text in ("", "tp=2 megatron.sequence_parallel=true ep=8", "pp=2 ep=4", "ep=2", "ep=2 etp=4", "pp=2 etp=2"):
        assert mistakes(f"trainer.n_procs_per_node=8 {text}", model_json=model) == []
    for text in ("rollout", "old data.train_batch_size=1024"):
        assert mistakes(f"actor.router_replay={text}", model_json=model) == []
        (sentence,) = mistakes(f"actor.router_replay={text}")
        assert "router_replay is" in sentence and "no experts (Qwen2ForCausalLM); set it to off" in sentence
    (sentence,) = mistakes("trainer.n_procs_per_node=2 ep=2")
    assert "expert_model_parallel_size is 2" in sentence and "no experts (Qwen2ForCausalLM)" in sentence
    (sentence,) = mistakes("trainer.n_procs_per_node=8 etp=8", model_json=model | {"moe_intermediate_size": 36})
    assert "expert_tensor_parallel_size is 8" in sentence and "moe_intermediate_size 36" in sentence
    assert mistakes("trainer.n_procs_per_node=8 etp=8 actor_rollout_ref.model.lora_rank=4", model_json=model) == []
    biased = model | {"architectures": ["GptOssForCausalLM"]}
    (sentence,) = mistakes("trainer.n_procs_per_node=8 etp=2", model_json=biased)
    assert "expert_tensor_parallel_size is 2" in sentence and "no experts with biases (GptOssForCausalLM)" in sentence
    (sentence,) = mistakes("trainer.n_procs_per_node=2 etp=2")
    assert "expert_tensor_parallel_size is 2" in sentence and "no experts (Qwen2ForCausalLM)" in sentence


def test_tensor_parallel_ranks_share_shared_experts_and_dense_layers():
    model = {key: value for key, value in MIXTURE_JSON.items() if key != "num_experts"}
    model |= {"n_routed_experts": 8, "n_shared_experts": 1}
    model |= {"architectures": ["Glm4MoeForCausalLM"], "intermediate_size": 256, "first_k_dense_replace": 1}
    text = "trainer.n_procs_per_node=8 tp=4 megatron.sequence_parallel=true"
    for change in ({}, {"intermediate_size": 255, "first_k_dense_replace": 0}):
        assert mistakes(text, model_json=model | change) == []
    (sentence,) = mistakes(text, model_json=model | {"intermediate_size": 255})
    assert "does not divide the model's intermediate_size 255" in sentence
    (sentence,) = mistakes(text, model_json=model | {"moe_intermediate_size": 33, "n_shared_experts": 2})
    assert "does not divide the model's n_shared_experts x moe_intermediate_size 66" in sentence


def test_odd_values_in_the_models_file_are_left_to_the_models_package():
    assert (
        mistakes("", model_json={"num_attention_heads": "twelve", "num_hidden_layers": None, "hidden_size": True}) == []
    )
