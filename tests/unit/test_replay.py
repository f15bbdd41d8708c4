"""Dumped batches: the controller writes a replay's training data, and a damaged file is named."""

import asyncio
import gzip
import inspect
import json
from dataclasses import fields, is_dataclass, replace
from typing import get_args, get_origin, get_type_hints

import numpy as np
import pytest

from launch.local import main as launch_local
from megatron_dapo.__main__ import main
from megatron_dapo.checkpointing.state_file import from_bytes, to_bytes
from megatron_dapo.checks.run_checks import validate
from megatron_dapo.commands.plan.process_plan import process_plan
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.loader import load_config
from megatron_dapo.data.samples import Group, RolloutBatch, Sample
from megatron_dapo.queue.group_queue import GroupQueue, QueueLimits
from megatron_dapo.queue.plain_data import draw_to_plain, group_to_plain
from megatron_dapo.rollout.batch_files import read_batch, write_batch
from megatron_dapo.rollout.batch_replay import BatchReplay
from megatron_dapo.rollout.batch_source import BatchSource
from megatron_dapo.rollout.controller import Controller
from megatron_dapo.rollout.handle import RolloutHandle
from megatron_dapo.rollout.start import start_rollout
from megatron_dapo.rollout.synthetic_batches import SyntheticBatches
from megatron_dapo.storage.run_folder import batch_file
from tests.fake_rollout import FakeServer, Script, make_config
from tests.synthetic import synthetic_groups

pytestmark = pytest.mark.unit


def batch(seed: int = 0) -> RolloutBatch:
    metrics = {"reward/mean": 0.1 + 0.2, "tiny": 5e-324, "gone": float("inf")}
    return RolloutBatch(tuple(synthetic_groups(64, seed=seed)), metrics)


def test_a_batch_is_read_back_number_for_number(tmp_path):
    for step in (1, 1_000_000):
        write_batch(tmp_path, step, batch(step))
        assert read_batch(tmp_path, step) == batch(step)


def filled(kind: type, name: str = "") -> object:
    """A value of a type; of a data class one in which no field has its default."""
    origin, arguments = get_origin(kind), [each for each in get_args(kind) if each not in (type(None), Ellipsis)]
    if kind is np.ndarray:
        return [7]  # becomes an array of the field's dtype
    if is_dataclass(kind):
        types, defaults = get_type_hints(kind), {field.name: field.default for field in fields(kind)}
        made = {name: filled(types[name], name) for name in defaults}
        return kind(**made | {name: not value for name, value in defaults.items() if isinstance(value, bool)})
    if origin in (tuple, list):
        return origin([filled(arguments[0], name)])
    if arguments and origin is not dict:
        return filled(arguments[0], name)
    return {int: 7, float: 0.1, str: name, bool: True}.get(kind, {name: [None, {"deep": 0.1}]})


def test_no_field_of_a_group_is_lost_in_a_dump_or_in_a_checkpoint(tmp_path):
    """For every field. Only an open group has partial responses, a finished one a baseline."""
    group = replace(filled(Group), partials=())
    draw = replace(filled(Group), uid="drawn", baseline_reward=None, keep=True)
    assert draw.partials
    with_default = [field for field in fields(Sample) if field.name not in Sample.ARRAYS]
    assert all(getattr(group.samples[0], field.name) != field.default for field in with_default)
    write_batch(tmp_path, 1, RolloutBatch((group,), {}))
    assert read_batch(tmp_path, 1).groups == (group,)

    first = GroupQueue(QueueLimits(1, 1), lambda samples: None)
    second = GroupQueue(QueueLimits(1, 1), lambda samples: None)
    state = first.state_dict() | {
        "num_drawn": 2,
        "kept": [group_to_plain(group)],
        "open": [{"uid": "finished"}, draw_to_plain(draw)],
        "finished": [group_to_plain(replace(group, uid="finished"))],
    }
    first.load_state_dict(state)
    assert first._batches == [[group]]
    assert first.open_groups == [replace(group, uid="finished"), draw]
    second.load_state_dict(from_bytes(to_bytes(first.state_dict())))
    assert vars(second) | {"_filter_reason": None} == vars(first) | {"_filter_reason": None}


def test_equal_batches_make_equal_files_and_nothing_else_is_left(tmp_path):
    for folder in ("a", "b"):
        write_batch(tmp_path / folder, 1, batch(1))
        write_batch(tmp_path / folder, 1, batch())  # the step again, after a resume
    assert batch_file(tmp_path / "a", 1).read_bytes() == batch_file(tmp_path / "b", 1).read_bytes()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["step_000001.json.gz"]


def test_a_write_that_fails_leaves_the_batch_that_was_there(tmp_path):
    write_batch(tmp_path, 1, batch())
    groups = synthetic_groups(64)
    with pytest.raises(AttributeError):
        write_batch(tmp_path, 1, RolloutBatch((*groups[:2], None), {}))
    assert read_batch(tmp_path, 1) == batch() and len(list(tmp_path.iterdir())) == 1


def damaged(content: bytes) -> dict[str, bytes]:
    middle = len(content) // 2
    other_format = json.loads(gzip.decompress(content)) | {"format": 99}
    return {
        "truncated": content[:-9],
        "cut in the middle": content[:middle],
        "a flipped bit": content[:middle] + bytes([content[middle] ^ 8]) + content[middle + 1 :],
        "no gzip": b"{}",
        "no batch": gzip.compress(b"{}"),
        "another format": gzip.compress(json.dumps(other_format).encode()),
        "empty": b"",
    }


@pytest.mark.parametrize("kind", damaged(gzip.compress(b"{}")))
def test_a_damaged_batch_is_named(tmp_path, kind):
    write_batch(tmp_path, 3, batch())
    path = batch_file(tmp_path, 3)
    path.write_bytes(damaged(path.read_bytes())[kind])
    with pytest.raises(UserError, match="step_000003.json.gz cannot be read"):
        BatchReplay(tmp_path, 64).next_batch(3, 2)


def test_a_batch_under_another_steps_name_is_refused(tmp_path):
    write_batch(tmp_path, 3, batch())
    batch_file(tmp_path, 3).rename(batch_file(tmp_path, 4))
    with pytest.raises(UserError, match="it is of step 3"):
        read_batch(tmp_path, 4)


def test_a_missing_batch_is_named_beside_those_that_are_there(tmp_path):
    for step in (1, 2, 4):
        write_batch(tmp_path, step, batch())
    with pytest.raises(UserError, match="step_000003.json.gz to replay; .* has those of steps 1 to 4 but for 1"):
        BatchReplay(tmp_path, 64).next_batch(3, 2)


@pytest.mark.parametrize("source", [RolloutHandle, BatchReplay, SyntheticBatches])
def test_every_source_of_batches_takes_the_calls_of_the_trainer(source):
    calls = {name for name, _ in inspect.getmembers(BatchSource, inspect.isfunction) if not name.startswith("_")}
    assert len(calls) == 10
    for name in calls:
        assert inspect.signature(getattr(source, name)) == inspect.signature(getattr(BatchSource, name)), name


def test_the_controller_dumps_what_it_hands_to_the_trainer_and_a_replay_needs_no_server(folder):
    async def main() -> list[RolloutBatch]:
        server = await FakeServer(Script()).start()
        controller = Controller(make_config(folder, [server], "trainer.dump_batches=true"))
        try:
            await controller.start()
            return [await controller.next_batch(step, 1) for step in (1, 2)]
        finally:
            await controller.close()
            await server.stop()

    handed_out = asyncio.run(main())
    assert all(len(batch.groups) == 4 for batch in handed_out) and handed_out[0] != handed_out[1]
    replay = start_rollout(
        load_config(None, [f"trainer.replay={folder}/run/batches", f"actor_rollout_ref.model.path={folder}"])
    )
    replay.wait_ready()
    assert [replay.next_batch(step, step - 1) for step in (1, 2)] == handed_out
    assert replay.evaluate(2, 2) == {}
    replay.load_state_dict(replay.state_dict())
    replay.close()


def test_without_the_key_nothing_is_dumped(folder):
    async def main() -> None:
        server = await FakeServer(Script()).start()
        controller = Controller(make_config(folder, [server]))
        try:
            await controller.start()
            await controller.next_batch(1, 1)
        finally:
            await controller.close()
            await server.stop()

    asyncio.run(main())
    assert not (folder / "run" / "batches").exists()


def test_a_run_with_servers_does_not_go_on_from_a_replays_state(folder):
    controller = Controller(make_config(folder, ["http://127.0.0.1:9"]))
    with pytest.raises(UserError, match="replay of here, which drew no prompts"):
        controller.load_state_dict(BatchReplay("here", 64).state_dict())


def mistakes(*overrides: str) -> list[str]:
    with pytest.raises(UserError) as error:
        validate(load_config(None, [*overrides, "trainer.total_training_steps=3"]), None)
    return [sentence for sentence in error.value.sentences if "trainer.replay" in sentence or "train_files" in sentence]


def test_mistakes_about_a_replay_are_told_before_anything_starts(tmp_path):
    replay, other = f"trainer.replay={tmp_path}/batches", f"trainer.run_dir={tmp_path}/other"
    assert "holds no step_NNNNNN.json.gz" in mistakes(replay, other)[0]
    for step in (1, 2):
        write_batch(tmp_path / "batches", step, batch())
    assert "last batch is that of step 2, but trainer.total_training_steps is 3" in mistakes(replay, other)[0]
    write_batch(tmp_path / "batches", 3, batch())
    assert mistakes(replay, other) == []  # no prompt files are asked for
    assert "a run folder of its own" in mistakes(replay, f"trainer.run_dir={tmp_path}")[0]


def test_the_plan_of_a_replay_has_no_servers():
    plan = process_plan(load_config(None, ["trainer.replay=some/batches"]))
    assert "replay of some/batches" in plan and "server" not in plan.replace("no servers", "")


def test_both_commands_take_the_folder_as_an_option(tmp_path, capsys):
    for words, command in ((["train"], main), ([], launch_local)):
        command([*words, "--replay", f"{tmp_path}/batches", "--dry-run", f"trainer.run_dir={tmp_path}/run"])
        assert f"replay of {tmp_path}/batches" in capsys.readouterr().out
