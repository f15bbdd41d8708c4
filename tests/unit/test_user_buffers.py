"""`tp_comm_overlap`: micro-batches and buffers of one length,
by a stand-in for Transformer Engine."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron_dapo.checks.run_checks import load_and_validate
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.derived import longest_micro_batch_sample, tokens_multiple
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.actor_rollout_ref import MegatronConfig
from megatron_dapo.huggingface.spec_reader import read_model_spec
from megatron_dapo.models import build
from megatron_dapo.models.build import build_model
from megatron_dapo.models.user_buffers import make_user_buffers, release_user_buffers
from megatron_dapo.training.distribute import StepDistributor
from megatron_dapo.training.policy import Policy
from tests.synthetic import synthetic_groups
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.unit

MEGATRON = "actor_rollout_ref.actor.megatron"
CAP = "actor_rollout_ref.actor.max_tokens_per_microbatch"
# of a run with tensor-parallel ranks; settings left out here are refused, or not needed
WITH_BUFFERS = (
    f"{MEGATRON}.tp_comm_overlap=true",
    f"{MEGATRON}.sequence_parallel=true",
    f"{MEGATRON}.tensor_model_parallel_size=2",
    "trainer.n_procs_per_node=2",
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("tiny"), "qwen3", layers=2, hidden=16, heads=2))


@pytest.fixture
def asked(monkeypatch):
    """The demands on Transformer Engine, by a module in its place."""
    calls: list[dict] = []
    base = SimpleNamespace(
        UserBufferQuantizationMode=SimpleNamespace(NONE="none"),
        initialize_ub=lambda **options: calls.append(options),
        destroy_ub=lambda: calls.append({"destroyed": True}),
    )
    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.module"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["transformer_engine.pytorch.module"].base = base
    yield calls
    release_user_buffers()


def settings(model_path: str, *more: str) -> list[str]:
    return [
        f"actor_rollout_ref.model.path={model_path}", "data.train_batch_size=4", "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2", f"{CAP}=100", f"{MEGATRON}.use_distributed_optimizer=false",
        *more,
    ]  # fmt: skip


def trained(layout, model_path, *more: str):
    """Return the micro-batches' lengths, and metrics and weights after two optimizer steps."""
    config = load_config(None, settings(model_path, *more))
    shard = StepDistributor(config, layout, read_model_spec(model_path))(1, synthetic_groups(60, num_groups=4))
    lengths = [batch.tokens.size(1) for mini_batch in shard.mini_batches for batch in mini_batch]
    policy = Policy(config, layout)
    metrics = policy.update(policy.score(shard.mini_batches), weight_version=0)
    weights = {name: value.detach().clone() for name, value in policy.model.chunks[0].named_parameters()}
    return lengths, metrics, weights


def test_every_micro_batch_is_as_long_as_it_may_be_and_that_changes_nothing(layout, model_path, monkeypatch):
    """Loss, gradient norm and updated weights, in float32: padding adds zeros to sums, and other
    lengths may add them in another order."""
    lengths, metrics, weights = trained(layout, model_path)
    assert len(set(lengths)) > 1
    monkeypatch.setattr("megatron_dapo.training.policy.build_model", _without_buffers)
    full, same, equal = trained(layout, model_path, f"{MEGATRON}.tp_comm_overlap=true")
    assert set(full) == {100} and len(full) == len(lengths)
    assert {name: same[name] for name in metrics} == pytest.approx(metrics, rel=1e-5, abs=1e-7)
    # Adam divides by the gradient's size: at nearly 0,
    # its rounding moves a weight by up to the rate, 1e-6
    for name, value in weights.items():
        torch.testing.assert_close(equal[name], value, rtol=0, atol=2.1e-6)


def _without_buffers(spec, layout, megatron, **options):
    """Build the layers of a CPU, which have no buffers."""
    return build_model(spec, layout, megatron.model_copy(update={"tp_comm_overlap": False}), **options)


@pytest.mark.parametrize(
    ("cap", "more", "length"), [(100, (), 100), (101, (), 100), (103, ("context_parallel_size=2",), 96)]
)
def test_the_length_is_the_cap_as_far_as_it_can_be_cut(cap, more, length):
    """With sequence parallelism TP 2 wants a multiple of 2, with CP 2 besides of 8."""
    config = load_config(None, [*WITH_BUFFERS, f"{CAP}={cap}", *(f"{MEGATRON}.{key}" for key in more)])
    assert tokens_multiple(config, 8 if more else 2) == length
    config = load_config(
        None, [*WITH_BUFFERS, f"{CAP}={cap}", "data.max_prompt_length=1", "data.max_response_length=5"]
    )
    assert longest_micro_batch_sample(config) == cap // 2 * 2


def test_transformer_engine_is_asked_once_for_buffers_of_that_length(asked):
    make_user_buffers(96, 16, 2)
    make_user_buffers(96, 16, 2)  # the reference's
    assert asked == [
        {
            "shape": [96, 16],
            "tp_size": 2,
            "quantization_modes": ["none"],
            "dtype": torch.bfloat16,
            "bootstrap_backend": "nccl",
        }
    ]
    with pytest.raises(UserError, match="the reference 32"):
        make_user_buffers(96, 32, 2)
    release_user_buffers()
    release_user_buffers()
    assert asked[1:] == [{"destroyed": True}]
    make_user_buffers(96, 32, 2)
    assert len(asked) == 3


def test_gpus_that_cannot_have_them_are_a_sentence(asked, monkeypatch):
    def refuse(**_: object) -> None:
        raise RuntimeError("CUDA device, driver and/or toolkit version does not support comm+GEMM overlap.")

    monkeypatch.setattr(sys.modules["transformer_engine.pytorch.module"].base, "initialize_ub", refuse)
    with pytest.raises(UserError) as error:
        make_user_buffers(96, 16, 2)
    (sentence,) = error.value.sentences
    assert f"{MEGATRON}.tp_comm_overlap is true" in sentence and "does not support comm+GEMM" in sentence


def test_megatron_gets_the_length_if_the_layers_are_its(layout, model_path, asked, monkeypatch):
    configs = []
    monkeypatch.setattr(build, "_use_transformer_engine", lambda megatron: True)
    monkeypatch.setattr("megatron.core.models.common.embeddings.rope_utils.fused_apply_rotary_pos_emb", print)
    monkeypatch.setattr("megatron.core.models.common.embeddings.rope_utils.fused_apply_rotary_pos_emb_thd", print)
    its_layer = SimpleNamespace(submodules=SimpleNamespace())
    monkeypatch.setattr(build, "get_gpt_layer_with_transformer_engine_spec", lambda **options: its_layer)
    monkeypatch.setattr(build, "ModelChunk", lambda config, *_, **__: configs.append(config))
    for overlap in (True, False):
        megatron = MegatronConfig(tp_comm_overlap=overlap, dtype="bfloat16")
        # of None: no model is built here
        with pytest.raises(AttributeError, match="rotary_pos_emb"):
            build_model(read_model_spec(model_path), layout, megatron, num_tokens=96)
    assert [config.tp_comm_overlap for config in configs] == [True, False]
    assert [call["shape"] for call in asked] == [[96, 16]]


def test_on_a_cpu_it_is_refused(layout, model_path):
    with pytest.raises(UserError) as error:
        build_model(read_model_spec(model_path), layout, MegatronConfig(tp_comm_overlap=True), num_tokens=96)
    (sentence,) = error.value.sentences
    assert "tp_comm_overlap is true, which needs a GPU" in sentence and "set it to false" in sentence


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (f"{MEGATRON}.sequence_parallel=false", "sequence_parallel is false; set it to true"),
        ("trainer.n_procs_per_node=1", "are no multiple of tensor_model_parallel_size 2"),
        ("actor_rollout_ref.model.use_remove_padding=false", "use_remove_padding is false"),
        (f"{MEGATRON}.use_transformer_engine=off", "use_transformer_engine is off"),
        (f"{MEGATRON}.dtype=float32", "dtype is float32"),
        (f"{MEGATRON}.fp8=hybrid", "fp8 is hybrid"),
        ("algorithm.adv_estimator=gae", "gae has a critic"),
    ],
)
def test_where_it_cannot_work_a_sentence_names_the_other_key(override, words):
    extra = ["trainer.nnodes=2"] if override.startswith("trainer") else []
    with pytest.raises(UserError) as error:
        load_and_validate(None, [*WITH_BUFFERS, *extra, override], check_files=False)
    (sentence,) = [sentence for sentence in error.value.sentences if "tp_comm_overlap" in sentence]
    assert words in sentence and "or tp_comm_overlap to false" in sentence
