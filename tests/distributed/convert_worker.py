"""Run on every rank: the commands of checkpoints_tools,
one after the other in one set of processes.

Argument: a JSON file, [[command, [argument, ...]], ...].
Rank 0 prints the exit code of each that has one.
"""

import json
import sys
from pathlib import Path

from checkpoints_tools import hf_to_megatron, megatron_to_hf, verify_checkpoint
from checkpoints_tools.job import ConversionRanks, leave_gpus_alone
from tests.distributed.process_groups import end_groups

COMMANDS = {
    "hf_to_megatron": (hf_to_megatron.parser, hf_to_megatron.convert),
    "megatron_to_hf": (megatron_to_hf.parser, megatron_to_hf.convert),
    "verify_checkpoint": (verify_checkpoint.parser, verify_checkpoint.verify),
}


def main() -> None:
    leave_gpus_alone()
    job = ConversionRanks()
    for command, arguments in json.loads(Path(sys.argv[1]).read_text()):
        parser, work = COMMANDS[command]
        code = work(job, parser().parse_args(arguments))
        if job.is_main:
            print(f"{command}: {code or 0}", flush=True)
        end_groups()
    job.leave()


if __name__ == "__main__":
    main()
