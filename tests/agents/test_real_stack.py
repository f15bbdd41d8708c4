"""Each client on the real stack: gateway, controller, a real SGLang server of a random model, and a
trainer, in one run. The model's vocabulary has merges, so that a text has many tokenizations."""

import json
import sys
from collections import defaultdict
from itertools import groupby
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from examples.agents.repairs import rows as repairs
from examples.demo_run import Demo
from megatron_dapo.rollout.batch_files import read_batch
from megatron_dapo.storage.run_folder import RunFolder
from tests.agents.environments import EXAMPLES, PROGRAMS, python_of
from tests.forked_local import run_here
from tests.helpers import REPOSITORY
from tests.proofs import amount
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.e2e

VOCABULARY = 1024
MAX_PROMPT, MAX_RESPONSE, MAX_TURN = 2000, 700, 12
NUM_SAMPLES = amount(2, 8)  # per prompt
SPECIAL = ["<pad>", "<|im_end|>", "<unk>", "<|im_start|>"]  # the second is tiny_models' end
TEMPLATE = """\
{%- if tools -%}<|im_start|>system
{% for tool in tools %}{{ tool.function.name }} {% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == "tool" -%}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" -%}<|im_start|>user{%- endif %}
<tool_response>{{ message.content }}</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != "tool" -%}<|im_end|>
{% endif -%}
{%- else -%}<|im_start|>{{ message.role }}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] -%}<tool_call>{{ call.function | tojson }}</tool_call>{%- endfor -%}
<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""

CLIENTS = {  # name: (environment, program, extra_info)
    "openai": ("openai", PROGRAMS / "openai_chat.py", {"mode": "tools"}),
    "openai, streamed": ("openai", PROGRAMS / "openai_chat.py", {"mode": "stream"}),
    "openai, n = 2": ("openai", PROGRAMS / "openai_chat.py", {"mode": "choices"}),
    "openai, stop": ("openai", PROGRAMS / "openai_chat.py", {"mode": "stop"}),
    "openai, compacted": ("openai", PROGRAMS / "openai_chat.py", {"mode": "compacted", "turns": 5}),
    "anthropic": ("anthropic", PROGRAMS / "anthropic_chat.py", {"mode": "tools"}),
    "anthropic, streamed": ("anthropic", PROGRAMS / "anthropic_chat.py", {"mode": "stream"}),
    "openai-agents": ("openai_agents", EXAMPLES / "openai_agents_calculator.py", {}),
    "smolagents, code": ("smolagents", PROGRAMS / "smolagents_code.py", {"system": "Write code."}),
    "smolagents, tools": ("smolagents", PROGRAMS / "smolagents_code.py", {"system": "Call tools.", "mode": "tools"}),
    "mini-swe-agent": ("mini_swe_agent", EXAMPLES / "mini_swe_agent_repair.py", {}),
    "verifiers": (
        "verifiers",
        EXAMPLES / "verifiers_episode.py",
        {
            "env": {
                "taskset": {"id": "guess_taskset"},
                "player": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}},
            },
            "idx": 3,
        },
    ),
}


def make_model(folder: Path) -> Path:
    """Write a random model of 8192 positions, a tokenizer with merges and a chat template."""
    make_tiny(folder, "qwen2", vocab=VOCABULARY, more={"max_position_embeddings": 8192})
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([(REPOSITORY / "docs" / "architecture.md").read_text()], trainer)
    pad, end, unknown, _ = SPECIAL
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, eos_token=end, unk_token=unknown)
    whole.chat_template = TEMPLATE
    whole.save_pretrained(folder)
    return folder


def write_rows(folder: Path, clients: dict) -> tuple[Path, Path]:
    """Write a row for each client; return the files of training and validation."""
    repair = next(repairs())
    lines = []
    for name, (environment, program, extra) in clients.items():
        content = repair["prompt"][0]["content"] if environment == "mini_swe_agent" else f"Say 408, {name}."
        system = [{"role": "system", "content": "Use bash."}] if environment == "mini_swe_agent" else []
        row = {
            "data_source": name,
            "prompt": [*system, {"role": "user", "content": content}],
            "reward_model": {"style": "rule", "ground_truth": repair["reward_model"]["ground_truth"]},
            "extra_info": extra | {"client": [str(python_of(environment)), str(program)]},
        }
        lines.append(json.dumps(row) + "\n")
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "train.jsonl", folder / "val.jsonl"
    paths[0].write_text("".join(lines))
    paths[1].write_text(lines[0])
    return paths


def run_clients(folder: Path, clients: dict, *overrides: str) -> RunFolder:
    """Run one step with the clients' rows."""
    demo = Demo(
        title="clients",
        config="agent_calculator.yaml",
        files=lambda _: write_rows(folder / "rows", clients),
        model=lambda: make_model(folder / "model"),
        next_steps=(),
    )
    rollout = "actor_rollout_ref.rollout"
    run_here(
        demo.run,
        f"data.train_batch_size={len(clients)}",
        f"data.max_prompt_length={MAX_PROMPT}",
        f"data.max_response_length={MAX_RESPONSE}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={len(clients)}",
        "actor_rollout_ref.actor.max_tokens_per_microbatch=4096",
        f"{rollout}.n={NUM_SAMPLES}",
        f"{rollout}.server.max_total_tokens=32768",
        f"{rollout}.agent.function=null",
        f"{rollout}.agent.kwargs={{}}",
        f"{rollout}.agent.tool_parser=tests.agents.random_calls:calls",
        f"{rollout}.agent.max_tokens_per_turn={MAX_TURN}",
        f"{rollout}.agent.max_turns=20",
        f"{rollout}.agent.max_open=8",
        f"{rollout}.agent.timeout_s=300",
        f"{rollout}.agent.num_workers=4",
        f"{rollout}.step_timeout_s=500",
        "algorithm.dynamic_sampling.enable=false",
        "trainer.total_training_steps=1",
        "trainer.test_freq=-1",
        "trainer.dump_batches=true",
        f"trainer.run_dir={folder}/run",
        *overrides,
    )
    return RunFolder(folder / "run")


def command_of(*words: object) -> str:
    command = json.dumps([*map(str, words), "{task_file}", "{result_file}"])
    return f"actor_rollout_ref.rollout.agent.command={command}"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunFolder:
    return run_clients(
        tmp_path_factory.mktemp("clients"), CLIENTS, command_of(sys.executable, PROGRAMS / "any_client.py")
    )


@pytest.fixture(scope="module")
def samples(run) -> dict[str, list]:
    """The trajectories of each client."""
    groups = read_batch(run.batches, 1).groups
    return {group.prompt.data_source: list(group.samples) for group in groups}


@pytest.fixture(scope="module")
def model(run):
    return AutoModelForCausalLM.from_pretrained(run.path.parent / "model").float().eval()


def test_each_client_played_all_its_trajectories(samples):
    assert {name: len(of_client) for name, of_client in samples.items()} == dict.fromkeys(CLIENTS, NUM_SAMPLES)
    for name, of_client in samples.items():
        assert [sample.reward_error for sample in of_client] == [None] * NUM_SAMPLES, name
        assert all(sample.num_written_tokens > 0 for sample in of_client), name


@torch.no_grad()
def test_every_row_read_at_once_has_the_log_probs_of_the_server(samples, model):
    """transformers reads the rows; bounds as in tests/e2e/test_multi_turn.py."""
    num_compared = 0
    for name, of_client in samples.items():
        for branch in (branch for sample in of_client for branch in sample.branches):
            tokens = torch.tensor([*branch.prompt_tokens, *branch.response_tokens])
            log_probs = model(tokens[None]).logits[0].log_softmax(-1)
            read = log_probs[len(branch.prompt_tokens) - 1 : -1].gather(1, tokens[len(branch.prompt_tokens) :, None])
            written = torch.from_numpy(branch.loss_mask.copy()).bool()
            difference = (read[:, 0] - torch.from_numpy(branch.rollout_log_probs.copy()))[written].abs()
            assert difference.max() < 5e-4, name
            num_compared += len(difference)
    assert num_compared > 20 * len(CLIENTS)


def test_clients_that_append_have_one_row_and_those_that_rewrite_have_more(samples):
    branches = {name: [len(sample.branches) for sample in of_client] for name, of_client in samples.items()}
    for name in ("openai", "openai, streamed", "anthropic", "anthropic, streamed", "openai-agents", "verifiers"):
        assert branches[name] == [1] * NUM_SAMPLES, name
    for name in ("openai, n = 2", "openai, compacted", "smolagents, code", "smolagents, tools"):
        assert min(branches[name]) > 1, name


def test_retokenizing_would_have_changed_many_turns(samples, run, capsys):
    """The table of docs/agents.md."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(run.path.parent / "model")
    table = defaultdict(lambda: [0, 0, 0, 0])
    for name, of_client in samples.items():
        for sample in of_client:
            for branch in sample.branches:
                for own, part in groupby(zip(branch.response_tokens, branch.loss_mask, strict=True), lambda x: x[1]):
                    tokens = [int(token) for token, _ in part]
                    if own:
                        text = tokenizer.decode(tokens, skip_special_tokens=False)
                        table[name][2] += 1
                        table[name][3] += tokenizer.encode(text, add_special_tokens=False) != tokens
                table[name][1] += 1
            table[name][0] += 1
    with capsys.disabled():
        print(f"\n{'client':<22}{'trajectories':>14}{'rows':>6}{'turns':>7}{'retokenizing changes':>22}{'here':>6}")
        for name, (trajectories, num_rows, turns, changed) in table.items():
            print(f"{name:<22}{trajectories:>14}{num_rows:>6}{turns:>7}{changed / turns:>22.0%}{0:>6}")
    assert all(changed for *_, changed in table.values())


def test_an_agent_in_a_sandbox_has_its_answer_scored_outside(tmp_path):
    """mini-swe-agent has no network, and reaches its model all the same."""
    clients = {"mini-swe-agent": CLIENTS["mini-swe-agent"]}
    command = command_of(python_of("mini_swe_agent"), EXAMPLES / "mini_swe_agent_repair.py")
    run = run_clients(
        tmp_path,
        clients,
        command,
        "actor_rollout_ref.rollout.agent.sandbox=true",
        "reward.function=code_tests",
    )
    (group,) = read_batch(run.batches, 1).groups
    assert len(group.samples) == NUM_SAMPLES
    for sample in group.samples:
        assert sample.reward_error is None and not sample.correct and sample.num_written_tokens > 0
