"""Servers with FP8 weights: contradictions are refused, and they start as the push needs it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_dapo.checks import fp8_server_checks
from megatron_dapo.common import nvidia_driver
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.loader import load_config
from megatron_dapo.estimates.model_shapes import MODEL_SHAPES
from megatron_dapo.huggingface.fp8_form import odd_widths, quantization_config
from megatron_dapo.huggingface.spec_reader import model_spec, read_model_spec
from megatron_dapo.servers.run_servers import _of_reward_model
from megatron_dapo.servers.server_command import sglang_command
from tests.config_overrides import mistakes
from tests.fake_rollout import run_in_folder
from tests.model_json import MODEL_JSON
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.unit

FP8 = "rollout.quantization=fp8"
SOUND = f"{FP8} rc.rollout_is=token"
SERVER = "rollout.server"
NULL = "quantization to null"
MIXTURE = MODEL_JSON | {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip

# overrides -> words of the one sentence, the cure among them
REFUSED = [
    (FP8, ["rollout_is is none", "rollout_is to token", "rollout_rs", "bypass_mode", NULL]),
    (f"{FP8} rc.rollout_token_veto_threshold=1e-4", ["rollout_is is none", NULL]),
    (f"{SOUND} actor_rollout_ref.hybrid_engine=true", ["hybrid_engine true", NULL, "hybrid_engine to false"]),
    (f"{SOUND} rollout.deterministic=true", ["deterministic is true", NULL, "deterministic to false"]),
    (f"{SOUND} {SERVER}.extra_args=[--quantization,fp8]", ["--quantization", "leave it out", NULL]),
    (f"{SOUND} {SERVER}.extra_args=[--json-model-o=x]", ["--json-model-o", "leave it out", NULL]),
    (f"{SOUND} {SERVER}.extra_args=[--load-format,auto]", ["--load-format", "leave it out", NULL]),
    (f"{SOUND} {SERVER}.tensor_model_parallel_size=4",
     ["gate_proj is 192 wide", "4 ranks", "add --ep-size 2 to", "parallel_size to 2", NULL]),
    (f"{SOUND} {SERVER}.tensor_model_parallel_size=4 {SERVER}.extra_args=[--ep-size,'1']", ["gate_proj is 192 wide"]),
    # SGLang takes the last one, under any of its names
    (f"{SOUND} {SERVER}.tensor_model_parallel_size=4 {SERVER}.extra_args=[--ep-size,'2',--ep,'1']", ["is 192 wide"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words"), REFUSED, ids=[row[0] for row in REFUSED])
def test_a_contradiction_to_fp8_servers_is_one_sentence_with_key_value_and_cure(text, words):
    (sentence,) = mistakes(text, model_json=MIXTURE)
    assert all(word in sentence for word in ["rollout.quantization", "fp8", *words]), sentence


@pytest.mark.parametrize(
    "text",
    [
        SOUND,
        f"{FP8} rc.rollout_rs=seq_mean_k3 rc.rollout_rs_threshold=0.01",
        f"{FP8} rc.bypass_mode=true",
        f"{FP8} actor.loss_function=my.module:loss",  # it gets the servers' log-probs
        f"{SOUND} actor_rollout_ref.model.lora_rank=8",
        f"{SOUND} rollout.max_staleness=1 weight_sync.pause_mode=in_place",
        f"{SOUND} reward.model.path=/models/judge",
        f"{SOUND} {SERVER}.tensor_model_parallel_size=2",
        f"{SOUND} {SERVER}.tensor_model_parallel_size=4 {SERVER}.extra_args=[--ep-size,'2']",
        f"{SOUND} {SERVER}.tensor_model_parallel_size=4 {SERVER}.extra_args=[--expert-parallel-size=4]",
        f"{SOUND} {SERVER}.tensor_model_parallel_size=4 {SERVER}.extra_args=[--ep,'1',--ep-size,'2']",
        f"{SOUND} {SERVER}.tensor_model_parallel_size=4 {SERVER}.extra_args=[--moe-a2a-backend,deepep]",
        # its ranks are unknown
        f"{SOUND} {SERVER}.tensor_model_parallel_size=4 rollout.server_urls=[http://127.0.0.1:1]",
    ],
)
def test_what_fp8_servers_allow(text):
    assert mistakes(text, model_json=MIXTURE) == []


def test_dense_models_and_stacks_of_experts_are_refused():
    (sentence,) = mistakes(SOUND)
    assert "Qwen2ForCausalLM has no experts" in sentence and "set it to null" in sentence
    (sentence,) = mistakes(SOUND, model_json=MODEL_SHAPES["gpt-oss-20b"])
    assert "no blocks of the experts of GptOssForCausalLM" in sentence and "set it to null" in sentence


def test_a_checkpoint_that_is_in_fp8_itself_is_refused():
    content = MIXTURE | {"quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(UserError, match="quantization_config.*convert the weights to bfloat16"):
        model_spec(content)


SIZES = [1, 2, 4, 8, 16]


def fitting() -> Iterator[tuple[str, list[int], list[tuple[int, int]]]]:
    """The page's table, by hand, of published sizes: heads x 128 (keys and values: at least one head
    a rank), experts and shared experts, dense layers over the ranks. Model, TP of its servers, and TP
    with --ep-size."""
    page = (Path(__file__).parents[2] / "docs" / "servers.md").read_text(encoding="utf-8")
    table = page.partition("| model | GPUs per server |\n|---|---|\n")[2].partition("\n\n")[0]
    for row in table.splitlines():
        models, cell = row.strip("| ").split(" | ")
        with_ep = [(int(tp), int(ep)) for tp, ep in re.findall(r"(\d+) with `--ep-size (\d+)`", cell)]
        alone = [int(tp) for tp in re.findall(r"\d+", cell.partition(";")[0].partition("none")[0])]
        if " to " in cell:
            alone = [tp for tp in SIZES if alone[0] <= tp <= alone[-1]]
        for model in models.lower().split(", "):
            (name,) = {model, f"{model}-80b-a3b"} & MODEL_SHAPES.keys()
            yield name, alone, with_ep


@pytest.mark.parametrize(("name", "alone", "with_ep"), [*fitting()])
def test_the_servers_of_published_models_that_blocks_fit_on(name, alone, with_ep):
    spec = model_spec(MODEL_SHAPES[name])
    assert [tp for tp in SIZES if not odd_widths(spec, tp, tp)] == alone
    layouts = []
    for tp in (2, 4, 8):
        parts = [ep for ep in SIZES if ep <= tp and not odd_widths(spec, tp, tp // ep)]
        layouts += [(tp, ep) for ep in parts[:1] if tp not in alone]
    assert layouts == with_ep


@pytest.mark.parametrize(
    ("capability", "is_refused"), [("8.0", True), ("8.6", True), ("8.9", False), ("9.0", False), ("10.0", True)]
)
def test_gpus_that_hold_no_blocks_as_they_are_sent_are_refused_on_the_servers_machine(
    tmp_path, monkeypatch, capability, is_refused
):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(nvidia_driver, "answer", lambda *words: asked.append(words) or f"NVIDIA X, {capability}\n" * 2)
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    config = load_config(None, [f"actor_rollout_ref.model.path={tmp_path}", f"actor_rollout_ref.{FP8}"])
    if is_refused:
        with pytest.raises(UserError, match=rf"is fp8.*NVIDIA X has {capability}; set it to null") as error:
            sglang_command(config, "127.0.0.1", 31000, ["4", "5"])
        assert len(error.value.sentences) == 1
    else:
        sglang_command(config, "127.0.0.1", 31000, ["4", "5"])
    assert asked[0][0] == "--id=4,5"


@pytest.mark.parametrize("listing", ["", "no devices were found\n", "NVIDIA X, [N/A]\n"])
def test_a_driver_that_does_not_say_stops_nobody(monkeypatch, listing):
    monkeypatch.setattr(nvidia_driver, "answer", lambda *_: listing)
    assert list(fp8_server_checks.gpu_faults(["0"])) == []


def test_servers_start_without_weights_and_are_told_of_blocks_and_the_reward_model_never(tmp_path):
    model = make_tiny(tmp_path / "model", "qwen3_moe", layers=1)
    classifier = tmp_path / "classifier"
    classifier.mkdir()
    (classifier / "config.json").write_text('{"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1}')
    (classifier / "tokenizer.json").write_text("{}")
    keys = [f"actor_rollout_ref.model.path={model}", f"reward.model.path={classifier}"]
    config = load_config(None, [*keys, f"actor_rollout_ref.{FP8}"])
    words = list(sglang_command(config, "h", 1, []).command)
    assert words[words.index("--load-format") + 1] == "dummy"
    override = json.loads(words[words.index("--json-model-override-args") + 1])
    assert override == {"quantization_config": quantization_config(read_model_spec(model))}
    for other in (load_config(None, keys), _of_reward_model(config)):
        words = " ".join(sglang_command(other, "h", 1, []).command)
        assert "quantization_config" not in words and "--load-format" not in words


BLOCKS = json.dumps({"quantization_config": {"weight_block_size": [128, 128]}})


@pytest.mark.parametrize(
    ("held", "key", "other"), [("{}", "fp8", "null"), (None, "fp8", "null"), (BLOCKS, "null", "fp8")]
)
def test_a_given_server_that_would_take_weights_of_another_form_is_named_at_the_start(
    folder, monkeypatch, held, key, other
):
    async def info(self, request):
        from aiohttp import web

        return web.json_response({"json_model_override_args": held})

    monkeypatch.setattr("tests.fake_rollout.FakeServer._server_info", info)
    words = rf"quantization is {key}, but server http://127.0.0.1:\d+ was not started for it; start it by .*{other}"
    with pytest.raises(UserError, match=words):
        run_in_folder(folder, None, overrides=[f"actor_rollout_ref.rollout.quantization={key}"])
