"""A run's records on the way to a service, by its real client.

write_records.py LOGGER RUN_FOLDER PACKAGES [RESUMED_AFTER]

Each line of standard input is a record; PACKAGES has those of the program that this environment
lacks. After the start, each record and the end a line says OK, or why not. The word `crash` in
place of a record ends the process at once.
"""

import json
import os
import sys
from pathlib import Path


def main(logger: str, folder: str, packages: str, resumed_after: str = "") -> None:
    sys.path.append(packages)
    from megatron_dapo.common.errors import UserError
    from megatron_dapo.config.loader import load_config
    from megatron_dapo.storage.run_folder import RunFolder
    from megatron_dapo.telemetry.sample_table import sample_table
    from megatron_dapo.telemetry.sinks import Record, make_sink
    from tests.synthetic import synthetic_groups

    config = load_config(None, [f"trainer.logger=[{logger}]", "trainer.experiment_name=mine"])
    try:
        sink = make_sink(logger, config, RunFolder(Path(folder)), int(resumed_after) if resumed_after else None)
    except UserError as error:
        tell(str(error))
        return
    tell("OK")
    for line in sys.stdin:
        if line.strip() == "crash":
            os._exit(1)
        record = json.loads(line)
        groups = synthetic_groups(14, num_groups=2, n=4)
        samples = None if record["is_validation"] else sample_table(config, record["step"], groups)
        try:
            sink.write(Record(**record, samples=samples))
        except OSError as error:
            tell(str(error))
        else:
            tell("OK")
    sink.close()
    tell("OK")


def tell(text: str) -> None:
    print(json.dumps(text), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
