"""The table of refused server options against SGLang's own parser."""

import subprocess
import sys

import pytest

from megatron_dapo.checks.rollout_checks import REFUSED_OPTIONS

pytestmark = pytest.mark.e2e


def test_the_refused_options_are_sglangs_and_no_other_option_begins_one_of_them():
    """Else a name here would refuse nothing, or an allowed option would be taken
    for a refused one."""
    program = (
        "import argparse\n"
        "from sglang.srt.server_args import ServerArgs\n"
        "parser = argparse.ArgumentParser()\n"
        "ServerArgs.add_cli_args(parser)\n"
        "print('OPTIONS', *parser._option_string_actions)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("OPTIONS ")]
    options = set(line.split()[1:])
    assert options >= REFUSED_OPTIONS.keys()
    allowed = options - REFUSED_OPTIONS.keys()
    assert not {name for name in allowed for whole in REFUSED_OPTIONS if name != "-h" and whole.startswith(name)}
