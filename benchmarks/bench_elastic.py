"""What lost servers cost: the demo with three SGLang servers, of which random ones are killed (SIGKILL) 20 times in 15
steps and restarted by their supervisor. Fails where a sample is lost, comes twice, or is of other weights than due.

python -m benchmarks.bench_elastic [--kills N] [--steps N] [--json FILE]
"""

import argparse
import logging
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.report import plain_table, written
from examples.arithmetic.problems import BASE, write_files
from examples.demo_run import config_path, prompt_files
from megatron_dapo.checks.run_checks import load_and_validate
from megatron_dapo.config.schema.config import Config
from megatron_dapo.servers.supervisor import ServerSupervisor
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.telemetry.closing_table import Summary, closing_table, read_metrics
from tests.elastic import Kills, check_accounts, train

FIRST_KILL_AFTER = 3  # steps that all servers serve, to compare with
MAX_LOG_PROB_DIFFERENCE = 5e-4  # between server and trainer, both fp32; with weights one step old it is 0.3 to 3


def demo_config(folder: Path, num_steps: int, num_kills: int) -> Config:
    train_file, val_file = write_files(folder / "prompts")
    rollout = "actor_rollout_ref.rollout"
    overrides = [
        f"actor_rollout_ref.model.path={BASE}",
        *prompt_files(train_file, val_file)[:1],
        f"{rollout}.server.num_servers=3",
        f"{rollout}.server.max_restarts={num_kills}",
        f"{rollout}.max_retries=20",
        f"trainer.total_training_steps={num_steps}",
        "trainer.save_interval=-1",
        "trainer.dump_batches=true",
        "trainer.logger=[console, jsonl]",
        f"trainer.run_dir={folder}/run",
    ]
    return load_and_validate(str(config_path("demo.yaml")), overrides)


def measured(num_steps: int, num_kills: int) -> dict:
    """One run's figures. Raises AssertionError where a sample is not as it must be."""
    with tempfile.TemporaryDirectory(prefix="elastic-") as folder:
        config = demo_config(Path(folder), num_steps, num_kills)
        run = RunFolder.of(config.trainer)
        kills = Kills(num_kills, FIRST_KILL_AFTER, num_steps - 1, longest_wait_s=5.0)
        start = time.monotonic()
        servers = ServerSupervisor(config, run.logs)
        code = train(config, servers, lambda num_steps: kills.look(num_steps, servers.pids()))
        assert code == 0, run.log("trainer-rank-0").read_text()[-2000:]
        steps = read_metrics(run.metrics)
        accounts = check_accounts(config, num_steps)
        summary = Summary.of(steps)
    difference = max(step.get("actor/rollout_abs_diff_max", 0.0) for step in steps)
    assert difference < MAX_LOG_PROB_DIFFERENCE, f"a server had other weights: log-probs differ by {difference}"
    print(closing_table(summary))
    columns = (
        *("rollout/num_servers_current", "rollout/num_retries", "rollout/num_tokens"),
        *("weight_sync/num_servers", "weight_sync/num_rejoins", "time/step", "time/start"),
    )
    return {
        "num_steps": num_steps,
        "num_kills": len(kills.done),
        "seconds": time.monotonic() - start,
        "accounts": vars(accounts),
        "max_log_prob_difference": difference,
        "losses": vars(summary.losses) if summary.losses else None,
        "steps": [{name: step.get(name, 0.0) for name in columns} for step in steps],
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_elastic", description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=20, metavar="N")
    parser.add_argument("--steps", type=int, default=15, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING)
    result = measured(arguments.steps, arguments.kills)
    table = plain_table(
        f"{result['num_kills']} kills in {result['num_steps']} steps", ("step", "servers", "again", "s", "tokens/s")
    )
    for number, step in enumerate(result["steps"], start=1):
        table.add_row(
            str(number),
            f"{step['rollout/num_servers_current']:.1f}",
            f"{step['weight_sync/num_rejoins']:.0f}",
            f"{step['time/step'] - step['time/start']:.1f}",
            f"{step['rollout/num_tokens'] / (step['time/step'] - step['time/start']):.0f}",
        )
    Console().print(table)
    written("elastic", torch.device("cpu"), [result], arguments.json)


if __name__ == "__main__":
    main()
