"""Keys that name things absent from this machine are refused before anything starts."""

import json

import pytest

from megatron_dapo.checks.model_checks import read_model_json
from megatron_dapo.checks.run_checks import validate
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.loader import load_config
from megatron_dapo.storage.model_folder import ModelFolder
from tests.config_overrides import overrides
from tests.model_json import MODEL_JSON

pytestmark = pytest.mark.unit


def on_this_machine(folder, text: str = "") -> list[str]:
    paths = [
        f"data.train_files=[{folder}/train.jsonl]",
        "data.val_files=[]",
        f"actor_rollout_ref.model.path={folder}/model",
    ]
    config = load_config(None, paths + overrides(text))
    try:
        validate(config, read_model_json(config))
    except UserError as error:
        return error.sentences
    return []


@pytest.fixture
def machine(tmp_path):
    (tmp_path / "train.jsonl").write_text("")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL_JSON))
    return tmp_path


def test_files_that_are_there_pass(machine):
    assert on_this_machine(machine) == []


def test_a_run_must_name_its_prompts_and_its_model(machine):
    prompts, model = on_this_machine(machine, "data.train_files=[] actor_rollout_ref.model.path=")
    assert prompts.startswith("data.train_files is empty") and model.startswith("actor_rollout_ref.model.path is empty")


def test_missing_and_unreadable_files_are_named(machine):
    (machine / "train.jsonl").unlink()
    (machine / "model" / "config.json").write_text("[not json")
    (machine / "val.csv").write_text("")
    prompts, val, model = on_this_machine(machine, f"data.val_files=[{machine}/val.csv]")
    assert "train.jsonl, which is not a file here" in prompts
    assert "val.csv; only .jsonl and .parquet" in val
    assert "does not hold a JSON object" in model


def test_a_model_folder_without_config_json_and_a_missing_reference_are_named(machine):
    (machine / "model" / "config.json").unlink()
    kl = "actor.use_kl_loss=true actor.kl_loss_coef=0.1 ref.path=/nowhere/ref"
    model, ref = on_this_machine(machine, kl)
    assert "has no config.json" in model
    assert "ref.path is /nowhere/ref, which is not a folder here" in ref


def test_a_checkpoint_of_this_program_is_a_model_too(machine):
    """As `hf_to_megatron` and training write it: config.json is in hf/,
    with its sizes checked too."""
    made = machine / "made"
    (made / "megatron").mkdir(parents=True)
    path = f"actor_rollout_ref.model.path={made}"
    (fault,) = on_this_machine(machine, path)
    assert f"{made}, which has megatron/, but no hf/config.json" in fault
    (machine / "model").rename(made / "hf")
    assert on_this_machine(machine, path) == []
    (sentence,) = on_this_machine(machine, f"{path} rollout.server.tensor_model_parallel_size=5")
    assert "num_attention_heads 12" in sentence
    (wrong,) = on_this_machine(machine, f"actor_rollout_ref.model.path={made}/megatron")
    assert "has no config.json, and no megatron/ with hf/" in wrong


def test_a_model_that_is_not_supported_is_named_before_anything_starts(machine):
    unsupported = MODEL_JSON | {"hidden_act": "gelu", "mlp_bias": True}
    (machine / "model" / "config.json").write_text(json.dumps(unsupported))
    activation, bias = on_this_machine(machine)
    assert "hidden_act: gelu" in activation and "mlp_bias: True" in bias
    (machine / "model" / "config.json").write_text(json.dumps(MODEL_JSON | {"architectures": ["MixtralForCausalLM"]}))
    (architecture,) = on_this_machine(machine)
    assert "MixtralForCausalLM" in architecture and "Qwen3ForCausalLM" in architecture


def test_transformer_engine_is_asked_for_only_where_it_is_installed(machine, monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    # a laptop, for reading recipes
    assert on_this_machine(machine, "megatron.use_transformer_engine=on") == []
    (tmp_path / "version").touch()
    monkeypatch.setattr("megatron_dapo.common.nvidia_driver.VERSION_FILE", tmp_path / "version")
    (sentence,) = on_this_machine(machine, "megatron.use_transformer_engine=on")
    assert "transformer_engine is not installed here" in sentence
    assert on_this_machine(machine, "megatron.use_transformer_engine=auto") == []
    (sentence,) = on_this_machine(machine, "megatron.fp8=hybrid")
    assert "fp8 is hybrid, but the package transformer_engine is not installed here" in sentence
    assert "set fp8 to none" in sentence
    two_ranks = "megatron.context_parallel_size=2 trainer.n_procs_per_node=2"
    (sentence,) = on_this_machine(machine, two_ranks)
    assert "context_parallel_size is 2, but the package transformer_engine is not installed here" in sentence
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert on_this_machine(machine, two_ranks) == []
    (sentence,) = on_this_machine(machine, f"{two_ranks} megatron.dtype=float32")
    assert "context_parallel_size is 2, but dtype is float32" in sentence


@pytest.mark.parametrize(
    ("path", "command"),
    [
        ("Qwen/Qwen2.5-7B", "`hf download Qwen/Qwen2.5-7B --local-dir models/Qwen2.5-7B`"),
        ("models/Qwen2.5-7B", None),
        ("/nowhere/Qwen2.5-7B", None),
        ("../Qwen2.5-7B", None),
        ("Qwen2.5-7B", None),
        ("here/Qwen2.5-7B", None),
        ("a/b; rm -rf x", None),
    ],
)
def test_a_name_of_the_hub_is_told_how_to_be_downloaded(tmp_path, monkeypatch, path, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    fault = ModelFolder.of(path).fault()
    assert fault.startswith("is not a folder here; give the folder of a Hugging Face checkpoint")
    assert command in fault if command else "hf download" not in fault


INTO_INPUTS = {  # the run folder, and the inputs it must not touch
    "the model's own folder": ("model", {}, "the folder of actor_rollout_ref.model.path"),
    "a folder in a model's": ("model/runs/1", {}, "in the folder of actor_rollout_ref.model.path"),
    "a link to it": ("link", {}, "the folder of actor_rollout_ref.model.path"),
    "the teacher's folder": ("ref", {"actor_rollout_ref.ref.path": "ref"}, "the folder of actor_rollout_ref.ref.path"),
    "the data's own folder": ("data", {}, "the folder of train.jsonl (data.train_files)"),
    "the trained model": ("run", {"actor_rollout_ref.model.path": "run/model"}, "which this run writes itself"),
    "where the trained model will be": (".", {}, "which this run writes itself"),
    "a checkpoint": ("run", {"actor_rollout_ref.model.path": "run/checkpoints/step_000003"}, "run/checkpoints, which"),
    "samples": ("run", {"data.train_files": "[run/rollouts/step_000001.jsonl]"}, "run/rollouts, which this run writes"),
}
BESIDE_INPUTS = {
    "a folder in the data's": ("data/run", {}),
    "the folder above all": (".", {"actor_rollout_ref.model.path": "base"}),
    "a base model in the run folder": ("run", {"actor_rollout_ref.model.path": "run/base"}),
    "a model that was set aside": ("run", {"actor_rollout_ref.model.path": "run/earlier_1/model"}),
    "data in a folder of the run's": ("run", {"data.train_files": "[run/prompts/train.jsonl]"}),
    "a name that begins alike": ("model2", {}),
    "logs beside the data": ("run", {"trainer.log_dir": "."}),
}


def about_run_folder(tmp_path, monkeypatch, run: str, changed: dict[str, str]) -> list[str]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "model")
    settings = {"data.train_files": "[data/train.jsonl]", "actor_rollout_ref.model.path": "model"} | changed
    config = load_config(None, [f"trainer.run_dir={run}", *(f"{key}={value}" for key, value in settings.items())])
    try:
        validate(config, None)
    except UserError as error:
        return [text for text in error.sentences if "trainer.run_dir" in text]
    return []


@pytest.mark.parametrize("name", INTO_INPUTS)
def test_a_run_does_not_write_into_what_it_reads(tmp_path, monkeypatch, name):
    run, changed, words = INTO_INPUTS[name]
    (sentence,) = about_run_folder(tmp_path, monkeypatch, run, changed)
    assert words in sentence and "choose another" in sentence


@pytest.mark.parametrize("name", BESIDE_INPUTS)
def test_a_run_folder_beside_what_is_read_is_no_mistake(tmp_path, monkeypatch, name):
    assert not about_run_folder(tmp_path, monkeypatch, *BESIDE_INPUTS[name])
