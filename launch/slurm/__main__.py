"""python -m launch.slurm COMMAND: the questions that slurm/body.sh asks. None of them runs a
command of Slurm."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from launch.command_line import forget_last_start, parse, parser
from launch.process_names import WAITING
from launch.slurm.cost import JobCost
from launch.slurm.node import run
from launch.slurm.notice import notice_line
from launch.slurm.outcome import NOT_REQUEUED, Facts, done_line, is_done, outcome
from launch.slurm.plan import ROLES, Allocation, JobPlan, make_plan, own_overrides
from launch.slurm.progress import progress
from launch.slurm.servers import wait_for_servers
from megatron_dapo.checks.run_checks import load_and_validate
from megatron_dapo.commands.plan.dry_run import dry_run
from megatron_dapo.common.ends import End, EndKind
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.exit_codes import FAILED_EXIT_CODE, USER_ERROR_EXIT_CODE
from megatron_dapo.common.files import write_whole
from megatron_dapo.common.signals import ignore_signals
from megatron_dapo.common.standard_streams import print_line
from megatron_dapo.config.loader import to_yaml
from megatron_dapo.config.schema.config import Config
from megatron_dapo.first_look import first_look
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.storage.server_key import make_server_key

NOTHING_TO_DO_EXIT_CODE = 76  # of `plan`: the run is done, as the later jobs of a chain find
REQUEUE_EXIT_CODE = 75  # of `end`: requeue the job, please


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["plan"]:
        return _plan_command(argv[1:])
    options_parser = argparse.ArgumentParser(prog="python -m launch.slurm", description=__doc__)
    commands = options_parser.add_subparsers(metavar="COMMAND", required=True)
    commands.add_parser("plan", help="check the config, plan the job, write its folder of logs; prints the folder")

    node = commands.add_parser("node", help="run a role's task on this node")
    node.add_argument("role", choices=ROLES)
    node.add_argument("plan", type=JobPlan.read, metavar="PLAN")
    node.set_defaults(run=lambda arguments: run(arguments.plan, arguments.role))

    wait = commands.add_parser("wait-servers", help="until all servers are healthy")
    wait.add_argument("plan", type=JobPlan.read, metavar="PLAN")
    wait.set_defaults(run=_wait_command)

    end = commands.add_parser("end", help=f"say how the job ended; exit code: the job's, {REQUEUE_EXIT_CODE} = requeue")
    end.add_argument("plan", type=JobPlan.read, metavar="PLAN")
    end.add_argument("--phase", choices=ROLES, required=True)
    end.add_argument("--exit-code", type=int, required=True)
    end.add_argument("--asked-by", default="", metavar="SIGNAL")
    end.add_argument("--servers-ended", action="store_true")
    end.add_argument("--no-requeue", dest="may_requeue", action="store_false")
    end.set_defaults(run=_end_command)
    arguments = options_parser.parse_args(argv)
    return arguments.run(arguments)


def _plan_command(argv: list[str]) -> int:
    """Make the plan. The last line on standard output is the folder that holds plan.sh, or why
    there is no plan."""
    options_parser = parser(
        "launch.slurm plan", "Plan a Slurm job: roles, ports, commands; write the folder of the attempt."
    )
    options_parser.add_argument("--nodes", default="", metavar="A,B,...", help="the job's nodes; none: a dry run")
    options_parser.add_argument("--max-restarts", type=int, metavar="N", help="1.25 times the planned jobs + 2, or 20")
    options_parser.add_argument("--time-limit", metavar="TIME", help="of a job, as for sbatch; Slurm's, or 24:00:00")
    options_parser.add_argument("--min-bandwidth", type=float, metavar="GB/s", help="of the preflight's all-reduce")
    options_parser.add_argument(
        "--notice", type=int, metavar="S", help="seconds before the time limit at which Slurm signals"
    )
    arguments, overrides = parse(options_parser, argv)
    try:
        if not arguments.nodes:
            check = partial(_show_plan, arguments=arguments)
            dry_run(arguments.config, overrides, show=False, check=check, look=first_look)
            return 0
        config = load_and_validate(arguments.config, overrides)
        if is_done(config):
            print(done_line(_run(config), config.trainer.total_training_steps), "already; nothing is left to do")
            return NOTHING_TO_DO_EXIT_CODE
        allocation = Allocation.of(os.environ, arguments.nodes.split(","))
        costs = JobCost.of(config, arguments, allocation.time_limit_s)
        plan = make_plan(config, allocation, progress(_run(config)), arguments.min_bandwidth, costs.max_restarts)
        if plan.restart_count > plan.max_restarts:
            reason = f"requeued {plan.restart_count} times, but MAX_RESTARTS is {plan.max_restarts}"
            print(f"FAILED ({NOT_REQUEUED}): {reason}", flush=True)
            return NOT_REQUEUED
        if plan.server_nodes:
            make_server_key(config)
        config = load_and_validate(arguments.config, [*overrides, *own_overrides(plan, config)])
        first_look(config)
    except UserError as error:
        print(error.report(), file=sys.stderr, flush=True)
        # srun adds its own messages to the latter
        stream = sys.stdout if arguments.nodes else sys.stderr
        print(f"FAILED ({USER_ERROR_EXIT_CODE}): {error.sentences[0]}", file=stream, flush=True)
        return USER_ERROR_EXIT_CODE
    processes = costs.whole_plan(config)
    _write_attempt(plan, config, processes)
    print(plan.text(), *_notice(config, arguments.notice), processes, plan.logs, sep="\n", flush=True)
    return 0


def _write_attempt(plan: JobPlan, config: Config, processes: str) -> None:
    """Write the attempt's folder, logs/latest, and a list of servers without those of an earlier
    attempt; forget its lease of shared GPUs, and its servers' starts."""
    forget_last_start(RunFolder(Path(plan.run)), starts_servers=bool(plan.server_nodes))
    write_whole(plan.config_file, to_yaml(config))
    write_whole(Path(plan.logs) / "plan.txt", f"{plan.text()}\n\n{processes}\n")
    plan.write()
    latest = Path(plan.logs).with_name("latest")
    link = latest.with_name(f".latest.{os.getpid()}")
    link.symlink_to(Path(plan.logs).name)
    link.replace(latest)
    if plan.server_nodes:
        write_whole(Path(plan.run) / "servers.txt", "".join(f"{url}\n" for url in plan.server_urls))


def _notice(config: Config, notice_s: int | None) -> list[str]:
    line = notice_line(config, notice_s)
    return [f"notice: {line}"] if line else []


def _show_plan(config: Config, arguments: argparse.Namespace) -> None:
    """Print nodes, processes, memory and time."""
    costs = JobCost.of(config, arguments, None)
    plan = make_plan(config, Allocation.imagined(config), min_bandwidth=arguments.min_bandwidth)
    print_line("\n".join([plan.text(), *_notice(config, arguments.notice), "", costs.whole_plan(config)]))


def _wait_command(arguments: argparse.Namespace) -> int:
    ignore_signals([signal.SIGTERM])  # in its own step: Slurm's signal before it takes the nodes
    fault = wait_for_servers(arguments.plan)
    if fault:
        print(fault, flush=True)
    kind = EndKind.FAILED if fault else EndKind.DONE
    code = FAILED_EXIT_CODE if fault else 0
    with suppress(OSError):  # the exit code says it as well
        arguments.plan.ends.write(WAITING, End(kind, code, fault or ""))
    return code


def _end_command(arguments: argparse.Namespace) -> int:
    fields = ("phase", "exit_code", "asked_by", "servers_ended", "may_requeue")
    ended = outcome(arguments.plan, Facts(**{name: getattr(arguments, name) for name in fields}))
    print(ended.line, flush=True)
    return REQUEUE_EXIT_CODE if ended.requeue else ended.code


def _run(config: Config) -> str:
    return str(RunFolder.of(config.trainer).path)


if __name__ == "__main__":
    sys.exit(main())
