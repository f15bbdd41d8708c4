"""Starts a config's SGLang servers on this machine, prints their URLs, and keeps them alive until
it is stopped.

python -m launch.sglang_server --config FILE [--serve WHICH] [--first-port N] [--log-dir DIR]
[--node NAME] [--server-nodes A,B,...] [--meeting-port N] [key=value]
"""

import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from launch.command_line import STOP_SIGNALS, checked_config, parse, parser, show_log
from launch.process_names import supervisor_name
from megatron_dapo.common import ends
from megatron_dapo.common.ends import EndFolder, EndKind
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.exit_codes import FAILED_EXIT_CODE, USER_ERROR_EXIT_CODE
from megatron_dapo.common.signals import StopSignals
from megatron_dapo.common.standard_streams import print_line
from megatron_dapo.config.schema.config import Config
from megatron_dapo.servers.several_nodes.server_node import NodeGroup
from megatron_dapo.storage.run_folder import RunFolder, make_folder

log = logging.getLogger("launch")

POLL_INTERVAL_S = 0.5
SERVE = {"rollout": ("rollout",), "reward-model": ("reward_model",), "both": ("rollout", "reward_model")}
_KEYS_OF_KEY = {
    "rollout": "actor_rollout_ref.rollout.server_api_key_file",
    "reward-model": "reward.model.api_key_file",
    "both": "actor_rollout_ref.rollout.server_api_key_file, reward.model.api_key_file",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 after SIGTERM, Ctrl-C or SIGHUP; 1 if the servers failed; 2 for
    mistakes of the user."""
    options_parser = parser(
        "launch.sglang_server", "Start this node's SGLang servers and keep them alive until SIGTERM or Ctrl-C."
    )
    options_parser.add_argument(
        "--serve", choices=SERVE, default="rollout", help="the rollout's servers (default), reward.model.path, or both"
    )
    options_parser.add_argument(
        "--first-port", type=int, metavar="N", help="the servers listen on N, N+1, ...; else on free ports"
    )
    options_parser.add_argument(
        "--log-dir", type=Path, metavar="DIR", help="folder of the logs; else logs/ of the run folder"
    )
    options_parser.add_argument(
        "--node", metavar="NAME", help="the log files are server-NAME-N.log; our own messages go only to the terminal"
    )
    options_parser.add_argument(
        "--server-nodes",
        metavar="A,B,...",
        help="the nodes of each server, its leader first, --node among them; else all of a server is here",
    )
    options_parser.add_argument(
        "--meeting-port", type=int, metavar="N", help="of the leader, from which on the processes of its servers meet"
    )
    arguments, overrides = parse(options_parser, argv)
    ends.begin(supervisor_name(arguments.node), ends.own_folder())
    try:
        config = checked_config(arguments.config, overrides, check_files=False)
        names, port = arguments.server_nodes, arguments.meeting_port
        group = NodeGroup.of(config, names.split(","), arguments.node, port) if names else None
        return serve(config, arguments.log_dir, arguments.first_port, arguments.node, arguments.serve, group)
    except UserError as error:
        ends.record_end(EndKind.USER_ERROR, USER_ERROR_EXIT_CODE, error.sentences[0])
        print(error.report(), file=sys.stderr)
        return USER_ERROR_EXIT_CODE
    except KeyboardInterrupt:  # before the first process was started
        return 130


def serve(
    config: Config,
    log_dir: Path | None = None,
    first_port: int | None = None,
    node: str | None = None,
    which: str = "rollout",
    group: NodeGroup | None = None,
) -> int:
    """Start and supervise the servers until a stop signal; prints one URL per line when all of them
    are healthy.

    node: for several nodes with the same log_dir. which: a key of SERVE. group: the nodes of
    servers over several nodes; all of them are here otherwise. Followers have no URL, and end with
    exit code 0 once their leaders are stopped or given up.
    """
    # these import torch: after the config was checked
    from megatron_dapo.servers.run_servers import RunServers
    from megatron_dapo.servers.supervisor import ServerFailure

    if "reward_model" in SERVE[which] and not config.reward.model.path:
        raise UserError(f"reward.model.path is null, so that --serve {which} has no reward model to serve; give it.")

    ends.begin(supervisor_name(node), ends.own_folder() or EndFolder(RunFolder.of(config.trainer).ends, start=""))
    log_dir = make_folder(log_dir or RunFolder.of(config.trainer).logs, "--log-dir")
    with show_log(None if node else log_dir / "servers.log"), StopSignals(STOP_SIGNALS) as stop:
        starts = {kind: kind in SERVE[which] for kind in SERVE["both"]}
        servers = RunServers(config, log_dir, **starts, first_port=first_port, node=node, group=group)
        log.info("the servers demand the key in %s (%s)", servers.key_file, _KEYS_OF_KEY[which])
        was_told = False
        try:
            servers.start()
            while stop.received is None and not servers.are_over:
                if servers.check() and not was_told and servers.urls:
                    print_line("\n".join(servers.urls))
                    was_told = True
                time.sleep(POLL_INTERVAL_S)
            ends.record_end(EndKind.DONE, 0)
            return 0
        except ServerFailure as error:
            ends.record_end(EndKind.FAILED, FAILED_EXIT_CODE, error.summary())
            print(f"The servers failed: {error}", file=sys.stderr)
            return FAILED_EXIT_CODE
        finally:
            servers.stop()


if __name__ == "__main__":
    sys.exit(main())
