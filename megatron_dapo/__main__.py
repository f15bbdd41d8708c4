"""The command line: `megatron-dapo COMMAND`, or python -m megatron_dapo COMMAND.

A command imports its modules when it is chosen, so that --help is there at once.
"""

import argparse
import faulthandler
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import megatron_dapo
from megatron_dapo.common import ends
from megatron_dapo.common.ends import EndKind
from megatron_dapo.common.errors import SharedUserError, UserError
from megatron_dapo.common.exit_codes import FAILED_EXIT_CODE, SAVED_EXIT_CODE, USER_ERROR_EXIT_CODE
from megatron_dapo.common.heavy_packages import absence
from megatron_dapo.common.standard_streams import open_standard_streams, print_line

if TYPE_CHECKING:
    from megatron_dapo.config.schema.config import Config

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
    words = list(sys.argv[1:] if argv is None else argv)
    for num_words in (1, 2):
        if program := _PROGRAMS.get(" ".join(words[:num_words])):
            module, _ = program
            return import_module(module).main(words[num_words:])
    parser = _parser(next((word for word in words if word in _COMMANDS), ""))
    arguments, overrides = parser.parse_known_args(words)
    if stray := [text for text in overrides if text.startswith("-") or not arguments.takes_overrides]:
        parser.error(f"unknown argument {stray[0]}")
    arguments.overrides = overrides
    return arguments.run(arguments)


def _parser(chosen: str) -> argparse.ArgumentParser:
    """Return the parser with the options of one command; the others have only a name."""
    is_installed = Path(sys.argv[0]).name == _SCRIPT
    parser = argparse.ArgumentParser(
        prog=_SCRIPT if is_installed else "python -m megatron_dapo",
        description="DAPO training for language models.",
        epilog="COMMAND --help explains a command.",
    )
    parser.add_argument("--version", action="version", version=f"megatron-dapo {megatron_dapo.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (fill, text) in _COMMANDS.items():
        command = commands.add_parser(name, help=text)
        command.set_defaults(takes_overrides=False)
        if name == chosen:
            fill(command)
    for name, (_, text) in _PROGRAMS.items():
        commands.add_parser(name, help=text)
    return parser


def _fill_train(parser: argparse.ArgumentParser) -> None:
    from megatron_dapo.config.recipes import add_config_arguments

    parser.usage = f"{parser.prog} [--config FILE | --config-name NAME] [options] [key=value ...]"
    parser.description = "Train. One process per rank: start it under torchrun, or use `python -m launch.local`."
    parser.epilog = "key=value sets any key of the config, e.g. trainer.seed=2; docs/config.md lists them all."
    add_config_arguments(parser)
    parser.add_argument("--replay", metavar="DIR", help="train on batches that trainer.dump_batches=true wrote")
    parser.add_argument("--dry-run", action="store_true", help="check, print the config and the process plan, and stop")
    parser.set_defaults(run=_train, takes_overrides=True)


def _fill_sft(parser: argparse.ArgumentParser) -> None:
    from megatron_dapo.config.recipes import add_config_arguments

    parser.usage = f"{parser.prog} [--config FILE | --config-name NAME] [options] [key=value ...]"
    parser.description = (
        "Fine-tune on conversations, with the loss on the assistant's tokens. One process per rank: start it under "
        "torchrun, or use `python -m launch.local` with sft.enable=true."
    )
    parser.epilog = "key=value sets any key of the config, as for train; docs/sft.md has the keys that are read."
    add_config_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="check, print the config and the process plan, and stop")
    parser.set_defaults(run=_sft, replay=None, takes_overrides=True)


def _fill_plan(parser: argparse.ArgumentParser) -> None:
    from megatron_dapo.commands.plan.command import add_plan_arguments

    parser.usage = f"{parser.prog} (--config FILE | --config-name NAME) [options] [key=value ...]"
    parser.description = (
        "Estimate memory and time of a run before it starts. docs/plan.md has the source of every formula."
    )
    parser.epilog = "key=value sets any key of the config, as for train."
    add_plan_arguments(parser)
    parser.set_defaults(run=_plan, takes_overrides=True)


def _fill_eval(parser: argparse.ArgumentParser) -> None:
    from megatron_dapo.commands.evaluation.command import add_eval_arguments

    parser.usage = f"{parser.prog} (--model DIR | --checkpoint DIR | --server URL) [options] [key=value ...]"
    parser.description = (
        "Answer prompts several times, score the answers and report avg@n, pass@k, maj@n, with intervals."
    )
    parser.epilog = (
        "Without --config a model or checkpoint of a run is asked and scored as in that run. "
        "rollout.val_n and val_temperature say how it is sampled; docs/evaluation.md has examples."
    )
    add_eval_arguments(parser)
    parser.set_defaults(run=_eval, takes_overrides=True)


def _fill_report(parser: argparse.ArgumentParser) -> None:
    from megatron_dapo.commands.report.command import add_report_arguments

    parser.usage = f"{parser.prog} RUN [RUN ...] [-o FILE | --watch]"
    parser.description = "Make one file that any browser opens without network, or serve it while the run goes on."
    add_report_arguments(parser)
    parser.set_defaults(run=_report)


def _fill_config_reference(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_config_reference)


def _fill_config_schema(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_config_schema)


def _fill_completion(parser: argparse.ArgumentParser) -> None:
    parser.description = 'For bash, in ~/.bashrc: eval "$(megatron-dapo completion)"'
    parser.set_defaults(run=_completion)


def _sft(arguments: argparse.Namespace) -> int:
    arguments.overrides = [*arguments.overrides, "sft.enable=true"]
    return _train(arguments)


def _train(arguments: argparse.Namespace) -> int:
    from megatron_dapo.common.child_environment import set_rank_defaults
    from megatron_dapo.common.large_imports import large_imports
    from megatron_dapo.common.parent_death import end_with_parent
    from megatron_dapo.config.derived import shares_gpus
    from megatron_dapo.storage.run_folder import RunFolder

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
            from megatron_dapo.commands.plan.dry_run import dry_run
            from megatron_dapo.first_look import first_look

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


def _checked_config(path: str | None, overrides: list[str], num_processes: int | None) -> "Config":
    from megatron_dapo.checks.run_checks import load_and_validate
    from megatron_dapo.config.derived import shares_gpus, starts_servers

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
    from megatron_dapo.commands.plan.command import plan

    try:
        plan(arguments, arguments.overrides)
    except UserError as error:
        print(error.report(), file=sys.stderr, flush=True)
        return USER_ERROR_EXIT_CODE
    return 0


def _eval(arguments: argparse.Namespace) -> int:
    from megatron_dapo.commands.evaluation.command import evaluate
    from megatron_dapo.common.child_environment import COMMON

    open_standard_streams()
    os.environ.update(COMMON)
    try:
        return evaluate(arguments, arguments.overrides)
    except UserError as error:
        print(error.report(), file=sys.stderr, flush=True)
        return USER_ERROR_EXIT_CODE


def _report(arguments: argparse.Namespace) -> int:
    from megatron_dapo.commands.report.command import report

    try:
        report(arguments)
    except UserError as error:
        print(error.report(), file=sys.stderr, flush=True)
        return USER_ERROR_EXIT_CODE
    return 0


def _config_reference(arguments: argparse.Namespace) -> int:
    from megatron_dapo.config.key_reference import config_reference

    print_line(config_reference().removesuffix("\n"))
    return 0


def _config_schema(arguments: argparse.Namespace) -> int:
    from megatron_dapo.config.json_schema import config_schema

    print_line(config_schema().removesuffix("\n"))
    return 0


def _completion(arguments: argparse.Namespace) -> int:
    from megatron_dapo.commands.completion import completion

    options = {}
    for name, (fill, _) in _COMMANDS.items():
        parser = argparse.ArgumentParser(prog=name)
        fill(parser)
        options[name] = set(re.findall(r"--[a-z][a-z-]*", parser.format_help()))
    print_line(completion([*_COMMANDS, *_PROGRAMS], options).removesuffix("\n"))
    return 0


_SCRIPT = "megatron-dapo"
# name: (adds options, usage and the function to run; a line of help)
_COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], str]] = {
    "train": (_fill_train, "train, or show what would be started"),
    "sft": (
        _fill_sft,
        "fine-tune on conversations, before reinforcement learning, or show what would be started",
    ),
    "plan": (_fill_plan, "show the memory and the time that a run will need; starts nothing"),
    "eval": (_fill_eval, "answer prompt files with a model, and say how good it is"),
    "report": (_fill_report, "make a page about runs: curves, times, events, answers"),
    "config-reference": (_fill_config_reference, "print every config key, as docs/config.md"),
    "config-schema": (_fill_config_schema, "print the JSON schema of a config, for editors"),
    "completion": (_fill_completion, "print the script that completes words in bash"),
}
# programs beside the core: (module, as of `python -m`; a line of help)
_PROGRAMS = {
    "local": ("launch.local", "train on this machine: servers and trainer, started and stopped together"),
    "acceptance": ("launch.acceptance.__main__", "check a new machine, rung by rung"),
    "convert to-megatron": ("checkpoints_tools.hf_to_megatron", "convert a Hugging Face checkpoint to Megatron's"),
    "convert to-hf": ("checkpoints_tools.megatron_to_hf", "convert a checkpoint of training to Hugging Face's format"),
    "inspect": ("checkpoints_tools.inspect_checkpoint", "show the content of a checkpoint, or compare two"),
    "verify": ("checkpoints_tools.verify_checkpoint", "compare a converted checkpoint with its source"),
}


def console() -> None:
    """Run the installed command. Like `python -m` it finds modules of the current folder, such as a
    reward function."""
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())
    run_and_end()


def _code() -> int:
    """Return the exit code of `main`; 2 for a missing package, in one sentence."""
    try:
        return main()
    except ModuleNotFoundError as error:
        if (mistake := absence(error.name)) is None:
            raise
        print(mistake.report(), file=sys.stderr, flush=True)
        return USER_ERROR_EXIT_CODE


def run_and_end() -> None:
    """Run `main` and end this process after any failure.

    A library, or a thread in a hung storage call, may hold up the interpreter's end for ever. The
    other ranks and the launcher would wait with it.
    """
    end = ends.end_of_code(FAILED_EXIT_CODE)
    try:
        code = _code()
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
