"""The command line: python -m megatron_dapo COMMAND."""

import argparse
import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Sequence

from megatron_dapo.checks.run_checks import load_and_validate
from megatron_dapo.commands.evaluation.command import add_eval_arguments, evaluate
from megatron_dapo.commands.plan.command import add_plan_arguments, plan
from megatron_dapo.commands.plan.dry_run import dry_run
from megatron_dapo.commands.report.command import add_report_arguments, report
from megatron_dapo.common import ends
from megatron_dapo.common.child_environment import COMMON, set_rank_defaults
from megatron_dapo.common.ends import EndKind
from megatron_dapo.common.errors import SharedUserError, UserError
from megatron_dapo.common.exit_codes import FAILED_EXIT_CODE, SAVED_EXIT_CODE, USER_ERROR_EXIT_CODE
from megatron_dapo.common.large_imports import large_imports
from megatron_dapo.common.parent_death import end_with_parent
from megatron_dapo.common.standard_streams import open_standard_streams, print_line
from megatron_dapo.config.derived import shares_gpus, starts_servers
from megatron_dapo.config.json_schema import config_schema
from megatron_dapo.config.key_reference import config_reference
from megatron_dapo.config.recipes import add_config_arguments
from megatron_dapo.config.schema.config import Config
from megatron_dapo.first_look import first_look
from megatron_dapo.storage.run_folder import RunFolder

# launchers end all ranks at the first failure, and rank 0 should fail first: it prints the reason
_FOR_RANK_0_S = 5.0
# for a failed process to end
_END_S = 60.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code.

    - 0: done.
    - 1: the rollout failed for good.
    - 2: mistakes of the user, printed to stderr.
    - 15: the servers' log-probs disagree with the trainer's model.
    - 85: the run was asked to stop, and is saved.
    """
    parser = _parser()
    arguments, overrides = parser.parse_known_args(argv)
    if stray := [text for text in overrides if text.startswith("-") or not arguments.takes_overrides]:
        parser.error(f"unknown argument {stray[0]}")
    arguments.overrides = overrides
    return arguments.run(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m megatron_dapo", description="DAPO training for language models.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    train = commands.add_parser(
        "train",
        help="train, or show what would be started",
        usage="python -m megatron_dapo train [--config FILE | --config-name NAME] [options] [key=value ...]",
        description="Train. One process per rank: start it under torchrun, or use `python -m launch.local`.",
        epilog="key=value sets any key of the config, e.g. trainer.seed=2; docs/config.md lists them all.",
    )
    add_config_arguments(train)
    train.add_argument("--replay", metavar="DIR", help="train on batches that trainer.dump_batches=true wrote")
    train.add_argument("--dry-run", action="store_true", help="check, print the config and the process plan, and stop")
    train.set_defaults(run=_train, takes_overrides=True)

    sft = commands.add_parser(
        "sft",
        help="fine-tune on conversations, before reinforcement learning, or show what would be started",
        usage="python -m megatron_dapo sft [--config FILE | --config-name NAME] [options] [key=value ...]",
        description="Fine-tune on conversations, with the loss on the assistant's tokens. One process per rank: start "
        "it under torchrun, or use `python -m launch.local` with sft.enable=true.",
        epilog="key=value sets any key of the config, as for train; docs/sft.md has the keys that are read.",
    )
    add_config_arguments(sft)
    sft.add_argument("--dry-run", action="store_true", help="check, print the config and the process plan, and stop")
    sft.set_defaults(run=_sft, replay=None, takes_overrides=True)

    plan_parser = commands.add_parser(
        "plan",
        help="show the memory and the time that a run will need; starts nothing",
        usage="python -m megatron_dapo plan (--config FILE | --config-name NAME) [options] [key=value ...]",
        description="Estimate memory and time of a run before it starts. docs/plan.md has the source of every formula.",
        epilog="key=value sets any key of the config, as for train.",
    )
    add_plan_arguments(plan_parser)
    plan_parser.set_defaults(run=_plan, takes_overrides=True)

    evaluation = commands.add_parser(
        "eval",
        help="answer prompt files with a model, and say how good it is",
        usage="python -m megatron_dapo eval (--model DIR | --checkpoint DIR | --server URL) [options] [key=value ...]",
        description="Answer prompts several times, score the answers and report avg@n, pass@k, maj@n, with intervals.",
        epilog="Without --config a model or checkpoint of a run is asked and scored as in that run. "
        "rollout.val_n and val_temperature say how it is sampled; docs/evaluation.md has examples.",
    )
    add_eval_arguments(evaluation)
    evaluation.set_defaults(run=_eval, takes_overrides=True)

    report_parser = commands.add_parser(
        "report",
        help="make a page about runs: curves, times, events, answers",
        usage="python -m megatron_dapo report RUN [RUN ...] [-o FILE | --watch]",
        description="Make one file that any browser opens without network, or serve it while the run goes on.",
    )
    add_report_arguments(report_parser)
    report_parser.set_defaults(run=_report, takes_overrides=False)

    reference = commands.add_parser("config-reference", help="print every config key, as docs/config.md")
    reference.set_defaults(run=_config_reference, takes_overrides=False)

    schema = commands.add_parser("config-schema", help="print the JSON schema of a config, for editors")
    schema.set_defaults(run=_config_schema, takes_overrides=False)
    return parser


def _sft(arguments: argparse.Namespace) -> int:
    arguments.overrides = [*arguments.overrides, "sft.enable=true"]
    return _train(arguments)


def _train(arguments: argparse.Namespace) -> int:
    open_standard_streams()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a killed torchrun leaves its ranks behind
        end_with_parent(os.getppid())
    rank = int(os.environ.get("RANK", "0"))
    if not arguments.dry_run:
        ends.begin(ends.rank_name(rank), ends.own_folder())
    overrides = [*arguments.overrides, *([f"trainer.replay={arguments.replay}"] if arguments.replay else [])]
    started = os.environ.get("WORLD_SIZE")
    num_processes = int(started) if started else None if arguments.dry_run else 1
    try:
        if arguments.dry_run:
            dry_run(arguments.config, overrides, num_processes=num_processes, show=rank == 0, look=first_look)
            return 0
        config = _checked_config(arguments.config, overrides, num_processes)
        ends.begin(ends.rank_name(rank), ends.EndFolder(RunFolder.of(config.trainer).ends, start=""))
    except UserError as error:  # the same on every rank: one prints it
        if not arguments.dry_run:
            ends.record_end(EndKind.USER_ERROR, USER_ERROR_EXIT_CODE, error.sentences[0])
        if rank == 0:
            print(error.report(), file=sys.stderr, flush=True)
        else:
            time.sleep(_FOR_RANK_0_S)
        return USER_ERROR_EXIT_CODE

    set_rank_defaults(os.environ, exports_memory=shares_gpus(config))
    with large_imports():  # here: a dry run must not wait for torch
        from megatron_dapo.common.rollout_errors import RolloutError
        from megatron_dapo.sft import fine_tune
        from megatron_dapo.trainer import train

    try:
        is_done = fine_tune(config) if config.sft.enable else train(config)
    except RolloutError as error:  # the same on every rank, and all work is saved
        ends.record_end(error.end_kind, error.exit_code, f"The rollout failed: {error}")
        if rank == 0:
            if error.failures:  # an unforeseen error
                traceback.print_exc()
            print(f"The rollout failed: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(_FOR_RANK_0_S)
        return error.exit_code
    except UserError as error:
        ends.record_end(EndKind.USER_ERROR, USER_ERROR_EXIT_CODE, error.sentences[0])
        if not isinstance(error, SharedUserError):  # may concern only this rank
            print(f"Rank {rank}: {error.report()}", file=sys.stderr)
        elif rank == 0:
            print(error.report(), file=sys.stderr, flush=True)
        else:
            time.sleep(_FOR_RANK_0_S)
        return USER_ERROR_EXIT_CODE
    return 0 if is_done else SAVED_EXIT_CODE


def _checked_config(path: str | None, overrides: list[str], num_processes: int | None) -> Config:
    config = load_and_validate(path, overrides, num_processes=num_processes)
    if shares_gpus(config) and ends.own_folder() is None:
        # nobody renews the lease: servers would not start at an earlier run's, or sleep already
        raise UserError(
            "actor_rollout_ref.hybrid_engine is true, but torchrun, mpirun or a shell started this trainer apart from "
            "its servers, which sleep and wake with it from their start on; use `python -m launch.local` or a Slurm "
            "job (slurm/one_node.sh), or set hybrid_engine to false."
        )
    if starts_servers(config):  # here they must run already
        raise UserError(
            "actor_rollout_ref.rollout.server_urls is empty; give the URLs of running servers, or server_urls_file, or "
            "use `python -m launch.local`, which starts them."
        )
    return config


def _plan(arguments: argparse.Namespace) -> int:
    try:
        plan(arguments, arguments.overrides)
    except UserError as error:
        print(error.report(), file=sys.stderr, flush=True)
        return USER_ERROR_EXIT_CODE
    return 0


def _eval(arguments: argparse.Namespace) -> int:
    open_standard_streams()
    os.environ.update(COMMON)
    try:
        return evaluate(arguments, arguments.overrides)
    except UserError as error:
        print(error.report(), file=sys.stderr, flush=True)
        return USER_ERROR_EXIT_CODE


def _report(arguments: argparse.Namespace) -> int:
    try:
        report(arguments)
    except UserError as error:
        print(error.report(), file=sys.stderr, flush=True)
        return USER_ERROR_EXIT_CODE
    return 0


def _config_reference(arguments: argparse.Namespace) -> int:
    print_line(config_reference().removesuffix("\n"))
    return 0


def _config_schema(arguments: argparse.Namespace) -> int:
    print_line(config_schema().removesuffix("\n"))
    return 0


def run_and_end() -> None:
    """Run `main` and end this process after any failure.

    A library, or a thread in a hung storage call, may hold up the interpreter's end for ever. The
    other ranks and the launcher would wait with it.
    """
    end = ends.end_of_code(FAILED_EXIT_CODE)
    try:
        code = main()
        end = ends.end_of_code(code)
    except BaseException as error:
        end = ends.end_of_error(error)
        raise
    finally:
        if not end.kind.is_good and sys.stderr is not None:
            # on standard error, and then exit code 1
            faulthandler.dump_traceback_later(_END_S, exit=True)
        ends.write_own_end(end)
    sys.exit(code)


if __name__ == "__main__":
    run_and_end()
