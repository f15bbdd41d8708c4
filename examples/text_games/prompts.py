"""Write a prompt file of text games.

python -m examples.text_games.prompts household --size 1000 --output train.jsonl
python -m examples.text_games.prompts alfworld --games $ALFWORLD_DATA/json_2.1.1/train --output train.jsonl
"""

import argparse
import sys
from pathlib import Path

from examples.text_games import alfworld, household
from megatron_dapo.envs.prompts import write_prompt_file


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    return write_prompt_file(options.output, lambda: _ROWS[options.game](options))


_ROWS = {
    "household": lambda options: [household.row(options.seed + index) for index in range(options.size)],
    "alfworld": lambda options: alfworld.rows(options.games),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.text_games.prompts", description=__doc__.splitlines()[0])
    games = parser.add_subparsers(dest="game", required=True)
    small = games.add_parser("household")
    small.add_argument("--size", type=int, required=True, help="number of games")
    small.add_argument("--seed", type=int, default=1, help="of the first game; default 1")
    large = games.add_parser("alfworld")
    large.add_argument("--games", type=Path, required=True, help="folder of ALFWorld's data")
    for game in (small, large):
        game.add_argument("--output", type=Path, required=True, help="the .jsonl file")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
