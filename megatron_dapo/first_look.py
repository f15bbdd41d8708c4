"""First look at a run: its refusals after a minute come in seconds. Damaged prompts, a config unfit
for the checkpoint, a user's own loss with another return value."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from megatron_dapo.agents.template_probe import template_fault
from megatron_dapo.checkpointing.resume import likely_start
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.derived import has_reference_for_own_loss, may_give_own_reward, uses_servers
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.prompt_dataset import PromptDataset
from megatron_dapo.data.tokenizer import Tokenizer, load_tokenizer
from megatron_dapo.rewards.reward_registry import check_estimator, check_ground_truths, check_reward
from megatron_dapo.storage.model_folder import ModelFolder
from megatron_dapo.storage.run_folder import RunFolder

NUM_ROWS = 1000  # of each file; the run reads the rest
_TRIAL_S = 300.0


def first_look(config: Config) -> None:
    """Look at the first rows of the data, the newest checkpoint and a user's own loss.

    The config is already checked. Raises UserError with the sentences of the run itself. Faults
    visible only in the whole data, or in a whole step, are left to the run.
    """
    sentences: list[str] = []
    for look in (_start, _data, _loss):
        try:
            look(config)
        except UserError as error:
            sentences += error.sentences
    if sentences:
        raise UserError(sentences)


def _start(config: Config) -> None:
    likely_start(RunFolder.of(config.trainer).checkpoints, config)


def _data(config: Config) -> None:
    if not (uses_servers(config) or config.sft.enable):
        return
    tokenizer = load_tokenizer(ModelFolder.of(config.actor_rollout_ref.model.path).hf)
    files = [config.data.train_files, *([config.data.val_files] if config.data.val_files else [])]
    if config.sft.enable:
        from megatron_dapo.data.conversations import ConversationSet  # imports torch

        for names in files:
            ConversationSet.load(names, config, tokenizer, max_rows=NUM_ROWS)
    else:
        _prompts(config, tokenizer)


def _prompts(config: Config, tokenizer: Tokenizer) -> None:
    # imports the clients of servers
    from megatron_dapo.rollout.build_rollout import load_dataset, load_train_prompts

    datasets: list[PromptDataset] = [load_train_prompts(config, tokenizer, NUM_ROWS)]
    if config.data.val_files:
        datasets.append(load_dataset(config.data.val_files, config, tokenizer, max_rows=NUM_ROWS))
    agent = config.actor_rollout_ref.rollout.agent
    is_appended_to = agent.enable and agent.history == "tokens" and config.data.apply_chat_template
    if is_appended_to and (fault := template_fault(tokenizer, agent.template_kwargs)):
        raise UserError(fault)
    prompts = [prompt for dataset in datasets for prompt in dataset.prompts]
    reward = config.reward
    check_reward(reward.function, reward.kwargs, sorted({prompt.data_source for prompt in prompts}))
    check_ground_truths(reward.function, prompts)
    if not may_give_own_reward(config):
        sources = sorted({prompt.data_source for prompt in datasets[0].prompts})
        check_estimator(config.algorithm.adv_estimator, reward.function, sources)


def _loss(config: Config) -> None:
    """Try a loss of the user's own in another process: here it could take a GPU's memory, or leave
    threads."""
    actor = config.actor_rollout_ref.actor
    if actor.loss_function is None:
        return
    options = [*_if(has_reference_for_own_loss(config), "--reference"), *_if(actor.calculate_entropy, "--entropy")]
    with tempfile.TemporaryDirectory() as folder:
        # not its output: the function may print, at its end too
        answer = Path(folder) / "sentences.json"
        command = [sys.executable, "-m", "megatron_dapo.checks.loss_trial", actor.loss_function, str(answer), *options]
        try:
            trial = subprocess.run(command, capture_output=True, timeout=_TRIAL_S, check=False)
        except subprocess.TimeoutExpired:  # it may wait for a run's process groups
            return
        if trial.returncode == 0 and (sentences := json.loads(answer.read_text(encoding="utf-8"))):
            raise UserError(sentences)


def _if(condition: bool, option: str) -> Iterable[str]:
    return [option] if condition else []
