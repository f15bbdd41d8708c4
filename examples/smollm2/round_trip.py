"""SmolLM2-135M to Megatron, back, and served: the same bytes, and transformers' log-probs.

`python -m examples.smollm2.round_trip` downloads 93 MB the first time; exit code 1 for a
difference.
"""

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from examples.cache import cache_folder
from examples.smollm2 import problems
from examples.smollm2.model import ensure_model
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.loader import load_config
from megatron_dapo.storage.server_key import read_server_key

NUM_PROMPTS, NUM_TOKENS = 16, 24
# Two float32 programs: each may differ from float64 by 8e-5 at log-probs of -10 (seen), and by far
# less in the mean.
LARGEST, MEAN = 5e-4, 1e-5
START_S = 600.0  # until the server is healthy; 20 to 60 s on a machine at rest
REQUEST_S = 300.0


def main() -> int:
    started = time.monotonic()
    try:
        source = ensure_model()
    except UserError as error:
        print(error.report(), file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(dir=cache_folder(), prefix=".round_trip.") as work:
        back = there_and_back(source, Path(work))
        different = [file.name for file in source.iterdir() if file.read_bytes() != (back / file.name).read_bytes()]
        extra = {file.name for file in back.iterdir()} - {file.name for file in source.iterdir()}
        prompts = chat_prompts(back)
        generations = asyncio.run(sampled(back, Path(work), prompts))
    differences = log_prob_differences(source, prompts, generations)
    largest, mean = max(differences), sum(differences) / len(differences)
    print(f"files:     {f'DIFFERENT: {different + sorted(extra)}' if different or extra else 'equal to the byte'}")
    print(f"log-probs: {len(differences)} sampled tokens; SGLang and transformers differ by {mean:.1e} in the mean,")
    print(f"           {largest:.1e} at most (allowed: {MEAN:.0e}, {LARGEST:.0e})")
    print(f"{time.monotonic() - started:.0f} s")
    return 1 if different or extra or largest > LARGEST or mean > MEAN else 0


def there_and_back(source: Path, work: Path) -> Path:
    """Convert Hugging Face -> Megatron -> Hugging Face, and return the last folder."""
    megatron, back = str(work / "megatron"), str(work / "back")
    for name, *arguments in (
        ("hf_to_megatron", "--hf-model", str(source), "--output", megatron),
        ("megatron_to_hf", "--checkpoint", megatron, "--output", back),
    ):
        subprocess.run([sys.executable, "-m", f"checkpoints_tools.{name}", *arguments], check=True)
    return Path(back)


def chat_prompts(model: Path) -> list[list[int]]:
    from megatron_dapo.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model)
    chats = [[{"role": "user", "content": problem.prompt}] for problem in problems.split()[0][:NUM_PROMPTS]]
    return [list(tokenizer.encode_prompt(chat, True)[0]) for chat in chats]


async def sampled(model: Path, log_dir: Path, prompts: Sequence[Sequence[int]]) -> list:
    """Start a server and return one answer to each prompt."""
    from megatron_dapo.servers.client import SamplingParams, SGLangClient
    from megatron_dapo.servers.supervisor import ServerSupervisor

    server = "actor_rollout_ref.rollout.server"
    run = f"trainer.run_dir={log_dir}"
    overrides = [f"actor_rollout_ref.model.path={model}", f"{server}.startup_timeout_s={START_S}", run]
    supervisor = ServerSupervisor(load_config(None, [*overrides, f"{server}.max_total_tokens=4096"]), log_dir)
    supervisor.start()
    try:
        supervisor.wait_healthy()
        params = SamplingParams(max_new_tokens=NUM_TOKENS)
        async with SGLangClient(supervisor.urls[0], read_server_key(supervisor.key_file)) as client:
            return await asyncio.gather(*(client.generate(prompt, params, REQUEST_S) for prompt in prompts))
    finally:
        supervisor.stop()


def log_prob_differences(model: Path, prompts: Sequence[Sequence[int]], generations: Sequence) -> list[float]:
    """Return |SGLang's log-prob - transformers', in float32| of every sampled token."""
    import torch
    from transformers import AutoModelForCausalLM

    reference, differences = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(), []
    for prompt, generation in zip(prompts, generations, strict=True):
        tokens = torch.tensor([[*prompt, *generation.tokens.tolist()]])
        with torch.no_grad():
            log_probs = reference(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected = log_probs.gather(1, tokens[0, len(prompt) :, None])[:, 0]
        differences += (torch.tensor(generation.log_probs) - expected).abs().tolist()
    return differences


if __name__ == "__main__":
    sys.exit(main())
