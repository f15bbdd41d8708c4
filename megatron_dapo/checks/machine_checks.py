"""Demands on this machine (files, folders, packages, keys, code), and checks of an evaluation."""

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_dapo.checks.agent_checks import agent, agent_on_machine
from megatron_dapo.checks.colocated_checks import SHARED_GPU_CHECKS
from megatron_dapo.checks.config_checks import REWARD_CHECKS, prompt_template
from megatron_dapo.checks.known_mistakes import known_mistakes
from megatron_dapo.checks.model_checks import adapted_modules, model_json_of, read_model_json
from megatron_dapo.checks.rollout_checks import ROLLOUT_CHECKS, own_host
from megatron_dapo.common import nvidia_driver
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.import_path import fault_without_import
from megatron_dapo.config.built_ins import IMPORT_PATH
from megatron_dapo.config.derived import uses_servers
from megatron_dapo.config.key_names import MEGATRON, MULTI_TURN
from megatron_dapo.config.keys import known_keys, value_of
from megatron_dapo.config.schema.config import Config
from megatron_dapo.huggingface.lora_settings import lora_settings
from megatron_dapo.huggingface.peft_config import adapter_faults
from megatron_dapo.huggingface.reward_model import architecture_of
from megatron_dapo.huggingface.spec_reader import critic_spec, model_spec
from megatron_dapo.storage.model_folder import ModelFolder
from megatron_dapo.storage.run_folder import RunFolder, batch_steps
from megatron_dapo.storage.server_key import given_server_key, read_server_key

_REWARD_MODEL_KEY = "reward.model.api_key_file"


def _reads_files(config: Config) -> bool:
    return uses_servers(config) or config.sft.enable


def _train_files(config: Config) -> Iterator[str]:
    if not _reads_files(config):
        return
    if not config.data.train_files:
        what = "conversations" if config.sft.enable else "prompts"
        yield f"data.train_files is empty; give one or more .jsonl or .parquet files with {what}."
    yield from _readable("train_files", config.data.train_files)


def _val_files(config: Config) -> Iterator[str]:
    if _reads_files(config):
        yield from _readable("val_files", config.data.val_files)


def _readable(key: str, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        if not Path(name).is_file():
            yield f"data.{key} holds {name}, which is not a file here; correct the path."
        elif Path(name).suffix not in (".jsonl", ".parquet"):
            yield f"data.{key} holds {name}; only .jsonl and .parquet files are read: convert it."


def _files_to_evaluate(config: Config) -> Iterator[str]:
    if not config.data.val_files:
        yield "there is nothing to answer; give --data FILE, a .jsonl or .parquet file."
    yield from _readable("val_files", config.data.val_files)


def _model_to_evaluate(config: Config) -> Iterator[str]:
    path = config.actor_rollout_ref.model.path
    if not path:
        yield "no model is named; give --model DIR, or --checkpoint DIR."
    elif fault := ModelFolder.of(path).fault():
        yield f"actor_rollout_ref.model.path is {path}, which {fault}"
    else:
        yield from _model("actor_rollout_ref.model.path", path)


def _replayed_batches(config: Config) -> Iterator[str]:
    folder = config.trainer.replay
    if not folder:
        return
    dumped = batch_steps(folder)
    if not dumped:
        yield (
            f"trainer.replay is {folder}, which holds no step_NNNNNN.json.gz; give the folder batches/ of a run with "
            f"trainer.dump_batches=true."
        )
    elif dumped[-1] < config.trainer.total_training_steps:
        yield (
            f"trainer.replay is {folder}, whose last batch is that of step {dumped[-1]}, but "
            f"trainer.total_training_steps is {config.trainer.total_training_steps}; set it to {dumped[-1]} or less."
        )


def _replay_of_itself(config: Config) -> Iterator[str]:
    folder = config.trainer.replay
    if not folder:
        return
    run = RunFolder.of(config.trainer)
    if Path(folder).resolve() == run.batches.resolve():
        yield (
            f"trainer.replay is {folder}, which is of the run folder {run.path} itself; give the replay a run folder "
            f"of its own with trainer.run_dir, or it would mix its metrics and model with that run's."
        )


_CHECKPOINTS = ("actor_rollout_ref.model.path", "actor_rollout_ref.ref.path", "critic.model.path")
_FOLDERS = (*_CHECKPOINTS, "actor_rollout_ref.model.lora_adapter_path", "reward.model.path")
_DATA = ("data.train_files", "data.val_files")


def _run_folder(config: Config) -> Iterator[str]:
    """Yield a mistake for a run writing into its inputs: a folder of a model or the data, or a part
    of the run folder it replaces.

    Inputs beside these parts, such as runs/NAME/base, are allowed, and so is a run folder below the
    data's.
    """
    for key in _FOLDERS:
        yield from known_mistakes([_run_in_input], config, key)
    yield from known_mistakes([_run_beside_data], config)
    for key in (*_FOLDERS, *_DATA):
        yield from known_mistakes([_input_in_run], config, key)


def _places(config: Config, key: str) -> list[Path]:
    """Return the absolute paths in a key."""
    value = value_of(config, key)
    names = value if isinstance(value, list) else [value]
    return [Path(name).resolve() for name in names if name]


def _run_in_input(config: Config, key: str) -> Iterator[str]:
    run = RunFolder.of(config.trainer)
    path = run.path.resolve()
    for place in _places(config, key):
        if path.is_relative_to(place):
            yield (
                f"trainer.run_dir is {run.path}, which is {'in ' if path != place else ''}the folder of {key}; choose "
                f"another one, or the run would write its own files there."
            )


def _run_beside_data(config: Config) -> Iterator[str]:
    run = RunFolder.of(config.trainer)
    files = [(key, file) for key in _DATA for file in _places(config, key)]
    for key, file in files:
        if run.path.resolve() == file.parent:
            yield (
                f"trainer.run_dir is {run.path}, which is the folder of {file.name} ({key}); choose another one, such "
                f"as a new folder there, or the run would write its own files beside it."
            )
            break


def _input_in_run(config: Config, key: str) -> Iterator[str]:
    written = RunFolder.of(config.trainer).written
    for place in _places(config, key):
        part = next((part for part in written if place.is_relative_to(part.resolve())), None)
        if part is not None:
            yield f"{key} is {place}, in {part}, which this run writes itself; choose another trainer.run_dir."


def _checkpoints(config: Config) -> Iterator[str]:
    for key in _CHECKPOINTS:
        yield from known_mistakes([_checkpoint], config, key)


def _checkpoint(config: Config, key: str) -> Iterator[str]:
    path = value_of(config, key)
    if path and (fault := ModelFolder.of(path).fault()):
        yield f"{key} is {path}, which {fault}"
    elif path:
        yield from _model(key, path)
    elif key == "actor_rollout_ref.model.path":
        yield f"{key} is empty; give the folder of a Hugging Face checkpoint, or of one of ours."


def _model(key: str, path: str) -> Iterator[str]:
    source = f"{key}: {ModelFolder.of(path).config_json}"
    model_json = model_json_of(path)
    if model_json is None:
        yield f"{source} does not hold a JSON object; download it again."
        return
    try:
        spec_of = critic_spec if key == "critic.model.path" else model_spec
        spec_of(model_json, source=source)
    except UserError as error:
        yield from error.sentences


def _adapter(config: Config) -> Iterator[str]:
    lora = lora_settings(config)
    folder = config.actor_rollout_ref.model.lora_adapter_path
    if lora is None or folder is None:
        return
    modules = adapted_modules(config, read_model_json(config) or {})
    for name, text in adapter_faults(folder, lora, modules) if modules else ():
        yield f"actor_rollout_ref.model.{name} is {text}"


def _transformer_engine(config: Config) -> Iterator[str]:
    """Look for Transformer Engine, on machines with GPUs only: recipes are read and jobs are
    planned on others too."""
    if nvidia_driver.is_loaded():
        yield from known_mistakes([_packed_attention], config)
        if importlib.util.find_spec("transformer_engine") is None:
            yield from known_mistakes(_WITHOUT_TRANSFORMER_ENGINE, config)


def _packed_attention(config: Config) -> Iterator[str]:
    megatron = config.actor_rollout_ref.actor.megatron
    cp = megatron.context_parallel_size
    if cp > 1 and megatron.dtype == "float32":
        yield (
            f"{MEGATRON}.context_parallel_size is {cp}, but dtype is float32, in which Transformer Engine has no "
            f"packed attention; set dtype to bfloat16, or context_parallel_size to 1."
        )


_ABSENT = "but the package transformer_engine is not installed here; install it (docs/install.md)"


def _its_layers(config: Config) -> Iterator[str]:
    if config.actor_rollout_ref.actor.megatron.use_transformer_engine == "on":
        yield f"{MEGATRON}.use_transformer_engine is on, {_ABSENT}, or set auto."


def _its_contexts(config: Config) -> Iterator[str]:
    megatron = config.actor_rollout_ref.actor.megatron
    cp = megatron.context_parallel_size
    if cp > 1 and megatron.use_transformer_engine == "auto":
        yield f"{MEGATRON}.context_parallel_size is {cp}, {_ABSENT}, or set context_parallel_size to 1."


def _its_user_buffers(config: Config) -> Iterator[str]:
    megatron = config.actor_rollout_ref.actor.megatron
    if megatron.tp_comm_overlap and megatron.use_transformer_engine == "auto":
        yield f"{MEGATRON}.tp_comm_overlap is true, {_ABSENT}, or set tp_comm_overlap to false."


def _its_fp8(config: Config) -> Iterator[str]:
    megatron = config.actor_rollout_ref.actor.megatron
    if megatron.fp8 != "none" and megatron.use_transformer_engine != "off":
        yield f"{MEGATRON}.fp8 is {megatron.fp8}, {_ABSENT}, or set fp8 to none."


_WITHOUT_TRANSFORMER_ENGINE = (_its_layers, _its_contexts, _its_user_buffers, _its_fp8)


def _reward_model(config: Config) -> Iterator[str]:
    if path := config.reward.model.path:
        try:
            architecture_of(str(ModelFolder.of(path).hf))
        except UserError as error:
            yield from error.sentences


def _reward_model_key(config: Config) -> Iterator[str]:
    if config.reward.model.url and config.reward.model.api_key_file:
        try:
            read_server_key(config.reward.model.api_key_file, _REWARD_MODEL_KEY)
        except UserError as error:
            yield from error.sentences


def _server_key(config: Config) -> Iterator[str]:
    if uses_servers(config):
        try:
            given_server_key(config)
        except UserError as error:
            yield from error.sentences


def _own_code(config: Config) -> Iterator[str]:
    for key in known_keys().values():
        if key.takes_import_path:
            yield from known_mistakes([_own_code_of], config, key.name)


def _own_code_of(config: Config, key: str) -> Iterator[str]:
    value = value_of(config, key)
    for path in value if isinstance(value, list) else [value]:
        yield from _not_there(key, path, {"reward.shaping": 2, "data.curriculum": 2, "trainer.logger": 3}.get(key, 1))


def _own_reward(config: Config) -> Iterator[str]:
    yield from _not_there("reward.function", config.reward.function)


def _own_environment(config: Config) -> Iterator[str]:
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    if multi_turn.enable:
        yield from _not_there(f"{MULTI_TURN}.environment", multi_turn.environment)


def _code_of_rollout(config: Config) -> Iterator[str]:
    if uses_servers(config):
        yield from known_mistakes((_own_reward, _own_environment, agent_on_machine), config)


def _not_there(key: str, path: str | None, num_arguments: int | None = None) -> Iterator[str]:
    """Look for a function or a class of the user's own in its file, long before its import."""
    if path and IMPORT_PATH.fullmatch(path) and (fault := fault_without_import(path, num_arguments)):
        yield f"{key} is {path}, {fault}"


MACHINE_CHECKS = (
    _train_files,
    _val_files,
    _replayed_batches,
    _replay_of_itself,
    _run_folder,
    _checkpoints,
    _adapter,
    _transformer_engine,
    _server_key,
    _reward_model,
    _reward_model_key,
    own_host,
    *SHARED_GPU_CHECKS,
    _own_code,
    _code_of_rollout,
)
EVALUATION_CHECKS = (
    *ROLLOUT_CHECKS,
    prompt_template,
    *REWARD_CHECKS,
    _files_to_evaluate,
    _model_to_evaluate,
    _server_key,
    _reward_model,
    _reward_model_key,
    own_host,
    _own_reward,
    _own_environment,
    agent,
    agent_on_machine,
)
