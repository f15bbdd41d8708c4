"""The command `eval`: finds model, prompts and config, and adds the missing answers."""

import argparse
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from megatron_dapo.checks.run_checks import load_for_evaluation
from megatron_dapo.common.bounded import read_json
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.exit_codes import FAILED_EXIT_CODE
from megatron_dapo.common.files import remove_folder, write_whole
from megatron_dapo.common.standard_streams import print_line
from megatron_dapo.config.derived import starts_reward_model, starts_servers
from megatron_dapo.config.loader import to_yaml
from megatron_dapo.config.recipes import add_config_arguments
from megatron_dapo.config.schema.actor_rollout_ref import RolloutConfig
from megatron_dapo.config.schema.config import Config
from megatron_dapo.storage.model_folder import ModelFolder
from megatron_dapo.storage.run_folder import RunFolder, make_folder

_ROLLOUT = "actor_rollout_ref.rollout"
# keys of a run's config that apply only to that run
_RESET = (
    f"{_ROLLOUT}.server_urls=[]",
    f"{_ROLLOUT}.server_urls_file=null",
    f"{_ROLLOUT}.server_api_key_file=null",
    f"{_ROLLOUT}.server.nnodes=0",
    f"{_ROLLOUT}.server.nodes_per_server=1",
    f"{_ROLLOUT}.max_staleness=0",
    "reward.model.url=null",
    "reward.model.api_key_file=null",
    "trainer.log_dir=null",
    "trainer.replay=null",
    "trainer.synthetic_batch=false",
)
_LINE_EVERY_S = 30.0  # without a terminal for a progress bar
_INTERRUPTED_EXIT_CODE = 130


def add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_config_arguments(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", metavar="DIR", help="a Hugging Face checkpoint, such as RUN/model")
    which.add_argument("--checkpoint", metavar="DIR", help="a checkpoint of training: RUN/checkpoints/step_N")
    parser.add_argument(
        "--server", metavar="URL", action="append", help="a server that runs already; again for each further one"
    )
    parser.add_argument(
        "--data", metavar="FILE", action="append", help="prompts, .jsonl or .parquet; again for each further file"
    )
    parser.add_argument("--output", metavar="DIR", help="folder of the answers; default: evals/MODEL-DATA")
    parser.add_argument(
        "--compare", nargs=2, metavar=("A", "B"), help="compare two evaluations, or two files of kept answers"
    )


def evaluate(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Run the command, and return the exit code. Raises UserError."""
    if arguments.compare:
        return _compare(arguments.compare)
    config = _config_of(arguments, overrides)
    output = RunFolder.of(config.trainer)
    if output.checkpoints.exists() or output.metrics.exists():
        raise UserError(
            f"{output.path} is the folder of a run, which answers would be mixed with; choose another --output."
        )
    folder = make_folder(output.path, "--output")
    from megatron_dapo.checkpointing.run_lock import RunLock

    lock = RunLock(RunFolder(folder).lock)
    lock.acquire(patience_s=0.0)
    try:
        return _Evaluation(config, arguments, overrides, folder).run()
    finally:
        lock.release()


class _Evaluation:
    """One evaluation in its folder: config.yaml, settings.json, answers.jsonl, results.json,
    logs/."""

    def __init__(self, config: Config, arguments: argparse.Namespace, overrides: list[str], folder: Path) -> None:
        from megatron_dapo.commands.evaluation.answer_file import AnswerFile
        from megatron_dapo.data.tokenizer import load_tokenizer
        from megatron_dapo.rollout.build_rollout import load_dataset

        self._config = config
        self._arguments = arguments
        self._overrides = overrides
        self._folder = folder
        self._named = Path(config.actor_rollout_ref.model.path)
        self._tokenizer = load_tokenizer(ModelFolder.of(self._named).hf)
        dataset = load_dataset(config.data.val_files, config, self._tokenizer)
        self._prompts, self._files = dataset.prompts, dataset.report
        self._answers = AnswerFile(folder / "answers.jsonl")
        self._answers.check_numbers(len(self._prompts), config.actor_rollout_ref.rollout.val_n)
        self._num_answers = len(self._prompts) * config.actor_rollout_ref.rollout.val_n

    def run(self) -> int:
        for file in self._files:
            if file.num_kept < file.num_rows or file.num_truncated:
                print_line(str(file))
        settings = _settings(self._config, self._named, self._prompts)
        before = _read_json(self._folder / "settings.json")
        self._check_settings(before, {"weight_version": before.get("weight_version"), **settings})
        speed: dict[str, float] | None = None
        has_servers = not starts_servers(self._config)
        if has_servers or len(self._answers.records) < self._num_answers:
            # servers: is it still their model?
            write_whole(self._folder / "config.yaml", to_yaml(self._config))
            speed, code = self._answer(partial(self._note_version, settings, has_servers, before))
            if speed is None:
                return code
        self._report(speed)
        return 0

    def _check_settings(self, before: dict[str, Any], settings: dict[str, Any]) -> None:
        if not self._answers.records:
            return
        changed = [name for name in {**before, **settings} if before.get(name) != settings.get(name)]
        if changed:
            words = ", ".join(f"{name} was {before.get(name)!r} and is {settings.get(name)!r}" for name in changed)
            raise UserError(f"{self._folder} has the answers of another evaluation ({words}); choose another --output.")

    def _note_version(self, settings: dict[str, Any], has_servers: bool, before: dict[str, Any], version: int) -> None:
        """Write the settings; of servers that others feed, with the version of their weights."""
        known = {**settings, **({"weight_version": version} if has_servers else {})}
        self._check_settings(before, known)
        write_whole(self._folder / "settings.json", json.dumps(known, indent=2) + "\n")

    def _answer(self, on_start: Callable[[int], None]) -> tuple[dict[str, float] | None, int]:
        """Have the missing answers given. Return the speed and 0, or None and an exit code, after
        saying why."""
        import asyncio

        from megatron_dapo.commands.evaluation import answering
        from megatron_dapo.common.rollout_errors import RolloutError, ServersMissing
        from megatron_dapo.rewards.worker_pool import WorkerLost
        from megatron_dapo.servers.server_error import ServerError
        from megatron_dapo.servers.supervisor import ServerFailure

        step = _step_of(self._named)
        with _log_to(RunFolder.of(self._config.trainer).log("eval")), self._shown_progress() as on_answer:

            async def ask(config: Config) -> answering.Work:
                return await answering.answer(
                    config, self._prompts, self._tokenizer, self._answers, step, on_start, on_answer
                )

            async def ask_started(named: list[str]) -> answering.Work:
                return await ask(_config_of(self._arguments, [*self._overrides, *named]))

            try:
                if starts_servers(self._config) or starts_reward_model(self._config):
                    served = self._served_config()
                    answers = answering.beside_servers(served, RunFolder.of(served.trainer).logs, ask_started)
                    work = asyncio.run(answering.until_signal(answers))
                else:
                    work = asyncio.run(answering.until_signal(ask(self._config)))
            except (RolloutError, ServerFailure, ServerError, WorkerLost, OSError) as error:
                if isinstance(error, ServersMissing) and not starts_servers(self._config):
                    raise _missing(self._config.actor_rollout_ref.rollout) from error
                why, code = f"The evaluation failed: {error}", FAILED_EXIT_CODE
            except (KeyboardInterrupt, asyncio.CancelledError):
                why, code = "Stopped", _INTERRUPTED_EXIT_CODE
            else:
                if not work.num_tokens:
                    return {}, 0
                return {"tokens_per_s": work.num_tokens / work.seconds, "seconds": work.seconds}, 0
        done = len(self._answers.records)
        print(
            f"{why}\n{done} of {self._num_answers} answers are in {self._answers.path}; the same command goes on.",
            file=sys.stderr,
            flush=True,
        )
        return None, code

    def _served_config(self) -> Config:
        """Return the config with a Hugging Face checkpoint for the servers to load; weights of ours
        are converted."""
        if ModelFolder.of(self._named).megatron is None:
            return self._config
        if any((self._named / "hf").glob("*.safetensors")):
            return _with_model(self._config, self._named / "hf")
        return _with_model(self._config, _converted(self._named, self._folder))

    @contextmanager
    def _shown_progress(self) -> Iterator[Callable[[], None]]:
        from megatron_dapo.telemetry.console import duration, progress

        num_before = len(self._answers.records)
        if num_before:
            print_line(f"{num_before} of {self._num_answers} answers are there already")
        began = last = time.monotonic()
        if sys.stdout is not None and sys.stdout.isatty():
            bar = progress(self._num_answers, "answers")
            try:
                bar.update(bar.task_ids[0], completed=num_before)
                yield lambda: bar.advance(bar.task_ids[0])
            finally:
                bar.stop()
            return

        def note() -> None:
            nonlocal last
            now = time.monotonic()
            if now - last < _LINE_EVERY_S:
                return
            last = now
            num = len(self._answers.records)
            left = (self._num_answers - num) * (now - began) / (num - num_before)
            print_line(f"{num} of {self._num_answers} answers, about {duration(left)} left")

        yield note

    def _report(self, speed: dict[str, float] | None) -> None:
        from megatron_dapo.commands.evaluation.score_table import figures, plain_figures, table
        from megatron_dapo.rollout.evaluation import verdicts_of
        from megatron_dapo.rollout.verdicts import TooFewVerdicts

        try:
            verdicts_of(self._answers.records, self._config).check("")
        except TooFewVerdicts:
            self._answers.drop_failed()
            raise
        path = self._folder / "results.json"
        by_name = figures(self._answers.records)
        before = _read_json(path)
        if not speed and all(isinstance(before.get(name), float) for name in ("tokens_per_s", "seconds")):
            speed = {name: before[name] for name in ("tokens_per_s", "seconds")}
        speed = speed or {}
        num_answers = self._config.actor_rollout_ref.rollout.val_n
        files = [{**asdict(file), "num_kept": file.num_kept} for file in self._files]
        results = {"num_answers_per_prompt": num_answers, **speed, "files": files, "figures": plain_figures(by_name)}
        write_whole(path, json.dumps(results, indent=2) + "\n")
        print_line(table(by_name))
        if speed:
            print_line(f"{speed['tokens_per_s']:.0f} tokens/s, since the last start of the command")
        print_line(f"answers: {self._answers.path}\nfigures: {path}")


def _missing(rollout: RolloutConfig) -> UserError:
    """Return the error of servers that others were to start."""
    return UserError(
        f"--server names {', '.join(rollout.server_urls) or rollout.server_urls_file}, not all of them healthy within "
        f"{rollout.server.startup_timeout_s:g} s ({_ROLLOUT}.server.startup_timeout_s); start them, or name others."
    )


def _compare(folders: Sequence[str]) -> int:
    from megatron_dapo.commands.evaluation.answer_file import read_answers
    from megatron_dapo.commands.evaluation.score_table import comparison

    first, second = (read_answers(Path(folder)) for folder in folders)
    print_line(comparison(first, second, folders))
    return 0


def _config_of(arguments: argparse.Namespace, overrides: Sequence[str]) -> Config:
    """Return the checked config: the option's, else that of the model's run. Raises UserError."""
    model = arguments.model or arguments.checkpoint
    run = RunFolder.holding(model) if model else None
    path = arguments.config or (str(run.config) if run else None)
    named = [f"actor_rollout_ref.model.path={model}"] if model else []
    if arguments.data:
        named.append(f"data.val_files={json.dumps(arguments.data)}")
    if arguments.server:
        named.append(f"{_ROLLOUT}.server_urls={json.dumps(arguments.server)}")
    config = load_for_evaluation(path, [*_RESET, *named, "trainer.run_dir=null", *overrides])
    output = arguments.output or _default_output(config)
    # nothing trains beside it: its servers have all GPUs to themselves, and read the checkpoint as it is
    rollout = config.actor_rollout_ref.rollout.model_copy(update={"quantization": None})
    config = _with(config, "actor_rollout_ref", hybrid_engine=False, rollout=rollout)
    return _with(config, "trainer", run_dir=str(output))


def _default_output(config: Config) -> Path:
    path = Path(config.actor_rollout_ref.model.path).resolve()
    run = RunFolder.holding(path)
    model = f"{run.path.name}-{path.name}" if run else path.name
    return Path("evals") / "-".join([model, *(Path(name).stem for name in config.data.val_files)])


def _with_model(config: Config, path: Path) -> Config:
    rollout = config.actor_rollout_ref
    changed = rollout.model_copy(update={"model": rollout.model.model_copy(update={"path": str(path)})})
    return config.model_copy(update={"actor_rollout_ref": changed})


def _with(config: Config, section: str, **values: Any) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def _converted(checkpoint: Path, output: Path) -> Path:
    """Return one of our checkpoints in Hugging Face's format, in the folder of its answers. A copy
    of another one, or of an earlier state of this one, is replaced."""
    converted, note = output / "model", output / "model_source.json"
    source = {"checkpoint": str(checkpoint.resolve()), "newest_change": _newest_change(checkpoint)}
    if (converted / "config.json").is_file() and _read_json(note) == source:
        return converted
    note.unlink(missing_ok=True)
    remove_folder(converted)
    options = ("--checkpoint", str(checkpoint), "--output", str(converted))
    done = subprocess.run([sys.executable, "-m", "checkpoints_tools.megatron_to_hf", *options], check=False)
    if done.returncode:
        raise UserError(f"{checkpoint} could not be converted, as said above; give another --checkpoint.")
    write_whole(note, json.dumps(source, indent=2) + "\n")
    return converted


def _settings(config: Config, model: Path, prompts: Sequence[Any]) -> dict[str, Any]:
    """Return the settings that determine the answers: evaluations with different settings have
    different folders.

    servers: running ones; None: started for the evaluation.
    """
    from megatron_dapo.data.prompt_cursor import content_of
    from megatron_dapo.servers.server_list import ServerList

    rollout = config.actor_rollout_ref.rollout
    return {
        "servers": None if starts_servers(config) else sorted(ServerList.of_config(rollout).read()),
        "model": str(model.resolve()),
        "model_files": _newest_change(model),
        "prompts": content_of(prompts),
        "data.max_response_length": config.data.max_response_length,
        "data.apply_chat_template": config.data.apply_chat_template,
        **{
            f"{_ROLLOUT}.{name}": getattr(rollout, name)
            for name in ("val_n", "val_temperature", "val_top_p", "stop_token_ids")
        },
        f"{_ROLLOUT}.multi_turn": rollout.multi_turn.model_dump(mode="json") if rollout.multi_turn.enable else None,
        **({f"{_ROLLOUT}.agent": rollout.agent.model_dump(mode="json")} if rollout.agent.enable else {}),
        "reward.function": config.reward.function,
        "reward.kwargs": config.reward.kwargs,
        **_settings_of_scorers(config),
    }


def _settings_of_scorers(config: Config) -> dict[str, Any]:
    reward = config.reward
    names = {"model": ("path", "weight"), "judge": ("url", "model", "prompt", "pattern", "weight", "temperature")}
    is_used = {"model": reward.model.path, "judge": reward.judge.url}
    settings = {
        f"reward.{scorer}.{name}": getattr(getattr(reward, scorer), name)
        for scorer in names
        if is_used[scorer]
        for name in names[scorer]
    }
    return settings | ({"reward.combine": reward.combine} if settings else {})


def _newest_change(model: Path) -> int:
    """Return when a file of the model was last written, in nanoseconds: a model that was trained on
    is another one."""
    files = (path for path in model.rglob("*") if path.suffix in (".safetensors", ".distcp"))
    return max((path.stat().st_mtime_ns for path in files), default=0)


def _step_of(model: Path) -> int | None:
    """Return the steps that a checkpoint of a run has learned from, as its folder's name says."""
    prefix, _, number = model.name.rpartition("_")
    return int(number) if prefix == "step" and number.isdigit() else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


@contextmanager
def _log_to(path: Path) -> Iterator[None]:
    """Append log messages to a file during the block."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("megatron_dapo")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        handler.close()
