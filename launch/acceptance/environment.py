"""python -m launch.acceptance.environment FILE: import a run's packages, compute on every GPU,
report versions."""

import json
import os
import sys
from pathlib import Path

from megatron_dapo.common.child_environment import set_rank_defaults
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.exit_codes import USER_ERROR_EXIT_CODE
from megatron_dapo.common.files import write_whole


def main(file: Path) -> int:
    """Write versions, the names of the GPUs and the state of Transformer Engine as JSON.

    Exit code 0; 2 if torch cannot use the GPUs, or if Transformer Engine cannot be imported or has
    another cuDNN.
    """
    set_rank_defaults(os.environ)
    import sglang  # noqa: F401  # the servers'
    import torch
    import transformers  # noqa: F401

    import megatron_dapo.trainer  # noqa: F401  # with Megatron-core
    from launch.preflight.machine import versions
    from megatron_dapo.platform import transformer_engine
    from megatron_dapo.platform.device import is_gpu, require_usable_gpus

    engine = transformer_engine.look() if is_gpu() else transformer_engine.EngineHere()
    print(engine)
    try:
        require_usable_gpus()
        if fault := engine.fault():
            raise UserError(f"This machine {fault}")
    except UserError as error:
        print(error.report(), file=sys.stderr)
        return USER_ERROR_EXIT_CODE
    gpus = []
    for number in range(torch.cuda.device_count()):
        total = torch.ones(16, device=f"cuda:{number}").sum().item()
        assert total == 16, f"GPU {number} adds 16 ones up to {total}"
        gpus.append(torch.cuda.get_device_name(number))
    write_whole(
        file, json.dumps({"versions": versions(), "gpus": gpus, "transformer_engine": str(engine)}, indent=1) + "\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
