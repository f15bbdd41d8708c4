"""`python -m megatron_dapo report`: a page about runs, as a file or served while they go on."""

import argparse
from pathlib import Path

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.files import write_whole
from megatron_dapo.common.sizes import format_bytes
from megatron_dapo.common.standard_streams import print_line

_PORT = 8765


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="folder of a run (runs/demo) or of runs")
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, default=Path("report.html"), help="the page to write; report.html"
    )
    parser.add_argument(
        "--watch", action="store_true", help="write nothing: serve the page on this machine, and follow"
    )
    parser.add_argument("--port", type=int, default=_PORT, help=f"of --watch; {_PORT}, 0 = a free one")


def report(arguments: argparse.Namespace) -> None:
    """Write the page, or serve it until Ctrl-C. Raises UserError."""
    if arguments.watch:
        from megatron_dapo.commands.report.watch import watch

        watch(arguments.runs, arguments.port)
        return
    write_report(arguments.runs, arguments.output)
    print_line(f"{arguments.output} ({format_bytes(arguments.output.stat().st_size)}): open it in a browser.")


def write_report(runs: list[Path], output: Path) -> None:
    """Write the page of these runs. Raises UserError if one is no run, or the page cannot be
    written."""
    # templates and charts, for this command only
    from megatron_dapo.commands.report.page import whole_page

    page = whole_page(runs)
    try:
        write_whole(output, page.encode("utf-8", "replace"))  # a folder's name may be no text
    except OSError as error:
        raise UserError(f"{output} cannot be written ({error.strerror}); choose another -o.") from error
