"""A whole run of an agent, on shared GPUs in turns: openai's client of the lock, a gateway, a real
server that sleeps while the trainer trains, `history: rendered` by a template that cuts earlier
answers."""

import json
from collections import Counter
from itertools import chain

import pytest
from transformers import PreTrainedTokenizerFast

from launch.local import main
from megatron_dapo.commands.report.command import write_report
from megatron_dapo.rollout.batch_files import read_batch
from megatron_dapo.storage.run_folder import RunFolder
from tests.forked_local import run_here
from tests.rendering_agent import NUM_TURNS
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.e2e

NUM_STEPS, N, NUM_PROMPTS = 2, 4, 4
TEMPLATE = (
    "{% for message in messages %}({{ message.content[:3] if message.role == 'assistant' else message.content }})"
    "{% endfor %}"
)
ROLLOUT = "actor_rollout_ref.rollout"
OVERRIDES = {
    "data.max_prompt_length": 64,
    "data.max_response_length": 32,
    "data.train_batch_size": NUM_PROMPTS,
    "actor_rollout_ref.hybrid_engine": "true",
    "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
    "actor_rollout_ref.actor.optim.lr": "1e-3",
    f"{ROLLOUT}.n": N,
    f"{ROLLOUT}.agent.enable": "true",
    f"{ROLLOUT}.agent.function": "tests.rendering_agent:play",
    f"{ROLLOUT}.agent.history": "rendered",
    f"{ROLLOUT}.agent.num_workers": 1,
    "reward.function": "environment",
    "reward.num_workers": 1,
    "trainer.test_freq": 2,
    "trainer.dump_batches": "true",
    "trainer.total_training_steps": NUM_STEPS,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = tmp_path_factory.mktemp("agent")
    make_tiny(folder / "model", "qwen2")
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "asked").mkdir()
    for name, number in (("train", 40), ("val", 4)):
        prompts = [[{"role": "user", "content": f"{i}+{i}="}] for i in range(number)]
        rows = [json.dumps({"prompt": prompt, "data_source": name, "label": ""}) + "\n" for prompt in prompts]
        (folder / f"{name}.jsonl").write_text("".join(rows))
    paths = {
        "actor_rollout_ref.model.path": folder / "model",
        "data.train_files": f"[{folder}/train.jsonl]",
        "data.val_files": f"[{folder}/val.jsonl]",
        f"{ROLLOUT}.agent.kwargs.folder": folder / "asked",
        "trainer.run_dir": folder / "run",
    }
    run_here(main, *[f"{key}={value}" for key, value in (OVERRIDES | paths).items()])
    return RunFolder(folder / "run")


@pytest.fixture(scope="module")
def metrics(run: RunFolder) -> list[dict]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


@pytest.fixture(scope="module")
def groups(run: RunFolder) -> list:
    return [*chain(*(read_batch(run.batches, step).groups for step in range(1, NUM_STEPS + 1)))]


def test_each_prompt_is_what_the_template_shows_of_a_conversation(run, groups):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(run.path.parent / "model")
    asked: Counter = Counter()
    for path in (run.path.parent / "asked").glob("*.json"):
        record = json.loads(path.read_text())
        if not record["is_validation"]:
            for messages in record["asked"]:
                messages = [message | {"content": message["content"] or ""} for message in messages]
                text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                asked[tuple(tokenizer.encode(text, add_special_tokens=False))] += 1
    num_branches = 0
    for branch in (branch for group in groups for sample in group.samples for branch in sample.branches):
        num_branches += 1
        prompt = tuple(branch.prompt_tokens.tolist())
        asked[prompt] -= 1
        assert asked[prompt] >= 0, tokenizer.decode(prompt)
    assert num_branches > 0.8 * NUM_TURNS * NUM_STEPS * N * NUM_PROMPTS  # an answer of three letters is not cut


def test_the_server_saw_exactly_the_tokens_that_are_trained_on(metrics):
    """Bounds as in test_multi_turn.py."""
    compared = [line for line in metrics if "actor/rollout_kl" in line]
    assert len(compared) == NUM_STEPS
    assert all(line["actor/rollout_abs_diff_max"] < 5e-4 and line["actor/grad_norm"] > 0 for line in compared)


def test_the_agent_is_validated_and_the_servers_sleep_after_its_steps(metrics):
    validated = [line for line in metrics if "val/accuracy" in line]
    assert len(validated) == 2 and all(line["val/num_turns_mean"] == NUM_TURNS for line in validated)
    steps = [line for line in metrics if "actor/loss" in line]
    assert all(line["weight_sync/sleep_s"] > 0 and line["weight_sync/wake_s"] > 0 for line in steps)
    assert all(line["agent/num_restarts"] == line["rollout/num_env_failures"] == 0 for line in steps)


def test_the_report_has_every_branch(run, tmp_path):
    write_report([run.path], tmp_path / "report.html")
    shown = [json.loads(line) for line in run.rollout(NUM_STEPS).read_text().splitlines()]
    assert all(len(response["branches"]) > 1 for group in shown for response in group["responses"])
