"""Checks before anything starts: keys against each other, the model and this machine. All reported together."""

import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_dapo.checks.config_checks import CHECKS, SHARED_CHECKS, prompt_template, reward
from megatron_dapo.checks.critic_checks import CRITIC_CHECKS, own_model
from megatron_dapo.checks.model_checks import (
    MODEL_CHECKS,
    adapted_modules,
    model_json_of,
    positions,
    read_model_json,
    read_model_specs,
    servers,
)
from megatron_dapo.checks.recompute import settled
from megatron_dapo.checks.rollout_checks import ROLLOUT_CHECKS, own_host
from megatron_dapo.checks.sft_checks import SFT_CHECKS, is_read
from megatron_dapo.checks.unused_keys import unused_keys
from megatron_dapo.common import nvidia_driver
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.import_path import fault_without_import
from megatron_dapo.config.built_ins import IMPORT_PATH
from megatron_dapo.config.derived import uses_servers, world_size
from megatron_dapo.config.key_names import LOSS_FUNCTION, MEGATRON, MULTI_TURN, WITHOUT_SERVERS, WORLD, keys_of
from megatron_dapo.config.loader import read_config
from megatron_dapo.config.lora_settings import lora_settings
from megatron_dapo.config.mistake import Mistake
from megatron_dapo.config.schema.config import Config
from megatron_dapo.huggingface.model_spec import critic_spec, model_spec
from megatron_dapo.huggingface.peft_config import adapter_faults
from megatron_dapo.huggingface.reward_model import architecture_of
from megatron_dapo.storage.model_folder import ModelFolder
from megatron_dapo.storage.run_folder import RunFolder, batch_steps
from megatron_dapo.storage.server_key import KEY as SERVER_KEY
from megatron_dapo.storage.server_key import given_server_key, read_server_key

_REWARD_MODEL_KEY = "reward.model.api_key_file"


def validate(
    config: Config, model_json: dict[str, Any] | None, check_files: bool = True, num_processes: int | None = None
) -> None:
    """Raise UserError with a sentence for every mistake.

    model_json: the model's config.json; none = its checks are left out. check_files: demand that the files and packages
    that a run needs are named and here; without it, a recipe may leave them open. num_processes: trainer ranks that the
    launcher started, if it did.
    """
    _raise(_mistakes(config, model_json, check_files, num_processes))


def load_and_validate(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    check_files: bool = True,
    num_processes: int | None = None,
    model_json: dict[str, Any] | None = None,
) -> Config:
    """Return the checked config of a file and its overrides, with what `auto` in it stands for, as far as the model is
    here. model_json: config.json of another model than the config's, for which `auto` is left as it is.

    Raises UserError with every mistake: unknown keys and refused values, and what contradicts the rest or this machine
    among the keys whose values are known.
    """
    reading = read_config(path, overrides)
    mistakes = _mistakes(
        reading.config,
        model_json or read_model_json(reading.config),
        check_files,
        num_processes,
        either_kind="sft.enable" in reading.in_doubt,
        overridden=reading.overridden,
    )
    _raise(reading.with_mistakes(mistakes))
    specs = None if model_json else read_model_specs(reading.config)
    return settled(reading.config, *specs) if specs else reading.config


def load_for_evaluation(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Return the config of an evaluation; only what that reads is checked. Raises UserError with every mistake."""
    reading = read_config(path, overrides)
    config = reading.config
    mistakes = [mistake for check in EVALUATION_CHECKS for mistake in check(config)]
    model_json = read_model_json(config)
    if model_json is not None:
        mistakes += [mistake for check in (positions, servers) for mistake in check(config, model_json)]
    _raise(reading.with_mistakes(mistakes))
    return config


def _raise(mistakes: list[Mistake]) -> None:
    if mistakes:
        raise UserError(mistake.text for mistake in mistakes)


def _mistakes(
    config: Config,
    model_json: dict[str, Any] | None,
    check_files: bool,
    num_processes: int | None,
    either_kind: bool = False,
    overridden: frozenset[str] = frozenset(),
) -> list[Mistake]:
    """Return the mistakes of a config; either_kind: only those that fine-tuning and reinforcement learning share.
    overridden: keys that the command line gives."""
    own_checks = SFT_CHECKS if config.sft.enable else (*CHECKS, *CRITIC_CHECKS)
    checks = SHARED_CHECKS if either_kind else own_checks
    mistakes = [
        mistake
        for mistake in unused_keys(config, overridden)
        if not (either_kind or config.sft.enable) or is_read(mistake.keys[0])
    ]
    mistakes += [mistake for check in checks for mistake in check(config)]
    if model_json is not None:
        mistakes += [mistake for check in (*MODEL_CHECKS, own_model) for mistake in check(config, model_json)]
    if check_files:
        mistakes += [mistake for check in MACHINE_CHECKS for mistake in check(config)]
    if num_processes is not None and num_processes != world_size(config):
        text = (
            f"The launcher started {num_processes} processes, but trainer.nnodes {config.trainer.nnodes} x "
            f"trainer.n_procs_per_node {config.trainer.n_procs_per_node} is {world_size(config)}; make them agree."
        )
        mistakes.append(Mistake(WORLD, text))
    return mistakes


def _prompt_files(config: Config) -> Iterator[Mistake]:
    if not (uses_servers(config) or config.sft.enable):
        return
    if not config.data.train_files:
        what = "conversations" if config.sft.enable else "prompts"
        yield Mistake(
            ("data.train_files", "sft.enable", *WITHOUT_SERVERS),
            f"data.train_files is empty; give one or more .jsonl or .parquet files with {what}.",
        )
    yield from _readable("train_files", config.data.train_files)
    yield from _readable("val_files", config.data.val_files)


def _readable(key: str, names: Sequence[str]) -> Iterator[Mistake]:
    for name in names:
        if not Path(name).is_file():
            yield Mistake(
                (f"data.{key}", *WITHOUT_SERVERS),
                f"data.{key} holds {name}, which is not a file here; correct the path.",
            )
        elif Path(name).suffix not in (".jsonl", ".parquet"):
            yield Mistake(
                (f"data.{key}", *WITHOUT_SERVERS),
                f"data.{key} holds {name}; only .jsonl and .parquet files are read: convert it.",
            )


def _files_to_evaluate(config: Config) -> Iterator[Mistake]:
    if not config.data.val_files:
        yield Mistake(("data.val_files",), "there is nothing to answer; give --data FILE, a .jsonl or .parquet file.")
    yield from _readable("val_files", config.data.val_files)


def _model_to_evaluate(config: Config) -> Iterator[Mistake]:
    path = config.actor_rollout_ref.model.path
    if not path:
        yield Mistake(("actor_rollout_ref.model.path",), "no model is named; give --model DIR, or --checkpoint DIR.")
    elif fault := ModelFolder.of(path).fault():
        yield Mistake(("actor_rollout_ref.model.path",), f"actor_rollout_ref.model.path is {path}, which {fault}")
    else:
        yield from _model("actor_rollout_ref.model.path", path)


def _replay(config: Config) -> Iterator[Mistake]:
    folder = config.trainer.replay
    steps = config.trainer.total_training_steps
    if not folder:
        return
    dumped = batch_steps(folder)
    if not dumped:
        yield Mistake(
            ("trainer.replay",),
            f"trainer.replay is {folder}, which holds no step_NNNNNN.json.gz; give the folder batches/ of a run with "
            f"trainer.dump_batches=true.",
        )
    elif dumped[-1] < steps:
        yield Mistake(
            ("trainer.replay", "trainer.total_training_steps"),
            f"trainer.replay is {folder}, whose last batch is that of step {dumped[-1]}, but "
            f"trainer.total_training_steps is {steps}; set it to {dumped[-1]} or less.",
        )
    run = RunFolder.of(config.trainer)
    if Path(folder).resolve() == run.batches.resolve():
        yield Mistake(
            ("trainer.replay", "trainer.run_dir", "trainer.experiment_name"),
            f"trainer.replay is {folder}, which is of the run folder {run.path} itself; give the replay a run folder "
            f"of its own with trainer.run_dir, or it would mix its metrics and model with that run's.",
        )


def _run_folder(config: Config) -> Iterator[Mistake]:
    """Yield a mistake where the run would write into what it reads: a folder that holds a model or the data, or a part
    of the run folder that it replaces. Inputs beside these parts, such as runs/NAME/base, are left alone, and so is a
    run folder below that of the data."""
    run = RunFolder.of(config.trainer)
    path = run.path.resolve()
    other = ("trainer.run_dir", "trainer.experiment_name")
    models = {
        **_models(config),
        "actor_rollout_ref.model.lora_adapter_path": config.actor_rollout_ref.model.lora_adapter_path,
        "reward.model.path": config.reward.model.path,
    }
    data = {"data.train_files": config.data.train_files, "data.val_files": config.data.val_files}
    inputs = [(key, Path(model).resolve()) for key, model in models.items() if model]
    files = [(key, Path(name).resolve()) for key, names in data.items() for name in names]
    for key, place in inputs:
        if path.is_relative_to(place):
            yield Mistake(
                (*other, key),
                f"trainer.run_dir is {run.path}, which is {'in ' if path != place else ''}the folder of {key}; choose "
                f"another one, or the run would write its own files there.",
            )
    for key, file in files:
        if path == file.parent:
            yield Mistake(
                (*other, key),
                f"trainer.run_dir is {run.path}, which is the folder of {file.name} ({key}); choose another one, such "
                f"as a new folder there, or the run would write its own files beside it.",
            )
            break
    for key, place in (*inputs, *files):
        part = next((part for part in run.written if place.is_relative_to(part.resolve())), None)
        if part is not None:
            yield Mistake(
                (*other, key),
                f"{key} is {place}, in {part}, which this run writes itself; choose another trainer.run_dir.",
            )


def _models(config: Config) -> dict[str, str | None]:
    return {
        "actor_rollout_ref.model.path": config.actor_rollout_ref.model.path,
        "actor_rollout_ref.ref.path": config.actor_rollout_ref.ref.path,
        "critic.model.path": config.critic.model.path,
    }


def _checkpoints(config: Config) -> Iterator[Mistake]:
    if not config.actor_rollout_ref.model.path:
        yield Mistake(
            ("actor_rollout_ref.model.path",),
            "actor_rollout_ref.model.path is empty; give the folder of a Hugging Face checkpoint, or of one of ours.",
        )
    for key, path in _models(config).items():
        if path and (fault := ModelFolder.of(path).fault()):
            yield Mistake((key,), f"{key} is {path}, which {fault}")
        elif path:
            yield from _model(key, path)


def _model(key: str, path: str) -> Iterator[Mistake]:
    source = f"{key}: {ModelFolder.of(path).config_json}"
    model_json = model_json_of(path)
    if model_json is None:
        yield Mistake((key,), f"{source} does not hold a JSON object; download it again.")
        return
    try:
        spec_of = critic_spec if key == "critic.model.path" else model_spec
        spec_of(model_json, source=source)
    except UserError as error:
        yield from (Mistake((key,), sentence) for sentence in error.sentences)


def _adapter(config: Config) -> Iterator[Mistake]:
    lora = lora_settings(config)
    folder = config.actor_rollout_ref.model.lora_adapter_path
    if lora is None or folder is None:
        return
    modules = adapted_modules(config, read_model_json(config) or {})
    for name, text in adapter_faults(folder, lora, modules) if modules else ():
        keys = keys_of("actor_rollout_ref.model", name, "lora_rank", "lora_adapter_path")
        yield Mistake(keys, f"{keys[0]} is {text}")


def _transformer_engine(config: Config) -> Iterator[Mistake]:
    """Look for Transformer Engine on machines with GPUs alone: a recipe is read, and a job planned, on others too."""
    megatron = config.actor_rollout_ref.actor.megatron
    if not nvidia_driver.is_loaded():
        return
    if megatron.context_parallel_size > 1 and megatron.dtype == "float32":
        yield Mistake(
            (f"{MEGATRON}.context_parallel_size", f"{MEGATRON}.dtype"),
            f"{MEGATRON}.context_parallel_size is {megatron.context_parallel_size}, but dtype is float32, in which "
            f"Transformer Engine has no packed attention; set dtype to bfloat16, or context_parallel_size to 1.",
        )
    if importlib.util.find_spec("transformer_engine") is not None:
        return
    absent = "but the package transformer_engine is not installed here; install it (docs/install.md)"
    if megatron.use_transformer_engine == "on":
        yield Mistake(
            (f"{MEGATRON}.use_transformer_engine",), f"{MEGATRON}.use_transformer_engine is on, {absent}, or set auto."
        )
    if megatron.context_parallel_size > 1 and megatron.use_transformer_engine == "auto":
        yield Mistake(
            (f"{MEGATRON}.context_parallel_size", f"{MEGATRON}.use_transformer_engine"),
            f"{MEGATRON}.context_parallel_size is {megatron.context_parallel_size}, {absent}, or set "
            f"context_parallel_size to 1.",
        )
    if megatron.tp_comm_overlap and megatron.use_transformer_engine == "auto":
        yield Mistake(
            (f"{MEGATRON}.tp_comm_overlap", f"{MEGATRON}.use_transformer_engine"),
            f"{MEGATRON}.tp_comm_overlap is true, {absent}, or set tp_comm_overlap to false.",
        )
    if megatron.fp8 != "none" and megatron.use_transformer_engine != "off":
        yield Mistake(
            (f"{MEGATRON}.fp8", f"{MEGATRON}.use_transformer_engine"),
            f"{MEGATRON}.fp8 is {megatron.fp8}, {absent}, or set fp8 to none.",
        )


def _reward_model(config: Config) -> Iterator[Mistake]:
    if path := config.reward.model.path:
        try:
            architecture_of(str(ModelFolder.of(path).hf))
        except UserError as error:
            yield from (Mistake(("reward.model.path",), sentence) for sentence in error.sentences)
    if config.reward.model.url and config.reward.model.api_key_file:
        try:
            read_server_key(config.reward.model.api_key_file, _REWARD_MODEL_KEY)
        except UserError as error:
            yield from (Mistake((_REWARD_MODEL_KEY,), sentence) for sentence in error.sentences)


def _server_key(config: Config) -> Iterator[Mistake]:
    if uses_servers(config):
        try:
            given_server_key(config)
        except UserError as error:
            yield from (Mistake((SERVER_KEY,), text) for text in error.sentences)


def _own_code(config: Config) -> Iterator[Mistake]:
    """Look for functions and classes of the user's own in their files; what imports them does so much later."""
    yield from _not_there(_paths_to_own_code(config))


def _rewarding_code(config: Config) -> Iterator[Mistake]:
    yield from _not_there(_paths_of_rewards(config))


def _not_there(paths: Iterable[tuple[tuple[str, ...], str | None]]) -> Iterator[Mistake]:
    for keys, path in paths:
        if path and IMPORT_PATH.fullmatch(path) and (fault := fault_without_import(path)):
            yield Mistake(keys, f"{keys[0]} is {path}, {fault}")


def _paths_to_own_code(config: Config) -> Iterator[tuple[tuple[str, ...], str | None]]:
    """Yield (keys, path), the keys being that of the path and those that decide whether it is used."""
    yield (LOSS_FUNCTION,), config.actor_rollout_ref.actor.loss_function
    if not uses_servers(config):
        return
    yield from _paths_of_rewards(config)


def _paths_of_rewards(config: Config) -> Iterator[tuple[tuple[str, ...], str | None]]:
    yield ("reward.function", *WITHOUT_SERVERS), config.reward.function
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    if multi_turn.enable:
        yield (f"{MULTI_TURN}.environment", f"{MULTI_TURN}.enable", *WITHOUT_SERVERS), multi_turn.environment


MACHINE_CHECKS = (
    _prompt_files,
    _replay,
    _run_folder,
    _checkpoints,
    _adapter,
    _transformer_engine,
    _server_key,
    _reward_model,
    own_host,
    _own_code,
)
EVALUATION_CHECKS = (
    *ROLLOUT_CHECKS,
    prompt_template,
    reward,
    _files_to_evaluate,
    _model_to_evaluate,
    _server_key,
    _reward_model,
    own_host,
    _rewarding_code,
)
