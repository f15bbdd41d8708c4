"""Code of the user's own at the places of docs/extend.md: the page's examples do as it says,
and each mistake is one sentence with its key."""

import re
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_dapo.checkpointing.checkpoint_hook import load_hook
from megatron_dapo.checkpointing.state_file import from_bytes, to_bytes
from megatron_dapo.checks.known_mistakes import known_mistakes
from megatron_dapo.checks.machine_checks import MACHINE_CHECKS
from megatron_dapo.checks.run_checks import validate
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.own_function import OwnFunction
from megatron_dapo.config.key_names import SAMPLING
from megatron_dapo.config.keys import known_keys
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.actor_rollout_ref import OptimConfig
from megatron_dapo.config.schema.critic_config import CriticOptimConfig
from megatron_dapo.config.schema.run import DataConfig
from megatron_dapo.data.batching import assemble
from megatron_dapo.data.own_order import OwnOrder
from megatron_dapo.data.packing import collate
from megatron_dapo.data.prompt_cursor import make_cursor
from megatron_dapo.data.samples import Group, Prompt
from megatron_dapo.queue.group_filter import by_own
from megatron_dapo.rewards.shaping import reshaped
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.telemetry.telemetry import Telemetry
from megatron_dapo.training.optimizer import _lr_schedule
from tests.fake_rollout import Script, run_in_folder
from tests.synthetic import synthetic_groups, with_branches
from tests.unit.test_batching import make_group
from tests.unit.test_docs_blocks import text_of

pytestmark = pytest.mark.unit

DECAY = "actor_rollout_ref.actor.optim.lr_decay_style"
EXAMPLES = {
    "algorithm.adv_estimator": "advantages",
    f"{SAMPLING}.filter_mode": "has_signal",
    "reward.shaping": "shaped",
    "data.curriculum": "Order",
    "trainer.logger": "Lines",
    "trainer.checkpoint_hook": "saved",
    DECAY: "decay",
}
OLDER = {  # texts with a check of their own
    "reward.function",
    "actor_rollout_ref.rollout.multi_turn.environment",
    "actor_rollout_ref.rollout.agent.function",
    "actor_rollout_ref.rollout.agent.credit",
}


@pytest.fixture(scope="module", autouse=True)
def page(tmp_path_factory):
    """The page's examples as the module my_run."""
    folder = tmp_path_factory.mktemp("page")
    blocks = re.findall(r"(?s)```python\n(.*?)```", text_of("extend.md"))
    assert len(blocks) == len(EXAMPLES) and max(block.count("\n") for block in blocks) <= 20
    (folder / "my_run.py").write_text("\n\n".join(blocks))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder


@pytest.fixture
def own(tmp_path, monkeypatch, request):
    """Return the import path of a function of one argument or more with this body."""
    monkeypatch.syspath_prepend(tmp_path)

    test = re.sub(r"\W", "_", request.node.name)
    names = (f"own_{test}_{number}" for number in count())

    def made(body: str) -> str:
        name = next(names)
        (tmp_path / f"{name}.py").write_text(f"def f(given, *others):\n    {body}\n")
        return f"{name}:f"

    return made


def refused(call, *arguments) -> str:
    with pytest.raises(UserError) as error:
        call(*arguments)
    [sentence] = error.value.sentences
    return sentence


# --------------------------------------------------------------------------------- all keys


def test_the_table_has_every_key_that_names_code():
    rows = re.findall(r"(?m)^\| ((?:`[a-z_.]+`,? ?)+)", text_of("extend.md"))
    keys = {key for row in rows for key in re.findall(r"`([a-z_.]+\.[a-z_.]+)`", row)}
    assert keys == {key.name for key in known_keys().values() if key.takes_import_path} | OLDER


def on(key: str, path: str) -> list[str]:
    enable = [f"{SAMPLING}.enable=true"] if key.startswith(SAMPLING) else []
    return [*enable, f"{key}=[jsonl, {path}]" if key == "trainer.logger" else f"{key}={path}"]


@pytest.mark.parametrize("key", EXAMPLES)
def test_a_dry_run_finds_the_example_and_no_other_name(key):
    config = load_config(None, on(key, f"my_run:{EXAMPLES[key]}"))
    validate(config, None, check_files=False)
    assert not [said for said in known_mistakes(MACHINE_CHECKS, config) if "my_run" in said]
    wrong = load_config(None, on(key, f"my_run:{EXAMPLES[key]}s"))
    [said] = [said for said in known_mistakes(MACHINE_CHECKS, wrong) if "my_run" in said]
    assert said.startswith(f"{key} is my_run:") and f"the nearest is {EXAMPLES[key]}." in said


@pytest.mark.parametrize("key", EXAMPLES)
def test_another_name_is_refused_with_the_form_of_a_path(key):
    said = refused(load_config, None, on(key, "my_run"))
    assert said.startswith(f"{key} is ") and "package.module:name" in said


@pytest.mark.parametrize(
    ("key", "head", "said"),
    [
        ("algorithm.adv_estimator", "f()", "f() is called with 1 argument; correct it."),
        ("algorithm.adv_estimator", "f(group, *, scale)", "f(group, *, scale) is called with 1 argument; correct it."),
        (f"{SAMPLING}.filter_mode", "f(samples, prompt)", "f(samples, prompt) is called with 1 argument; correct it."),
        ("reward.shaping", "f(sample)", "f(sample) is called with 2 arguments; correct it."),
        ("trainer.logger", "f(config, run_folder)", "f(config, run_folder) is called with 3 arguments; correct it."),
        ("data.curriculum", "f(prompts)", "f(prompts) is called with 2 arguments; correct it."),
        ("reward.shaping", "f(sample, prompt, weight=1.0)", None),
        ("trainer.checkpoint_hook", "f(*folders)", None),
        (DECAY, "f(progress, *, last=0.2)", None),
    ],
)
def test_a_dry_run_counts_the_arguments_of_a_function(tmp_path, monkeypatch, key, head, said):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_call.py").write_text(f"def {head}:\n    return 1.0\n")
    config = load_config(None, on(key, "own_call:f"))
    assert [each for each in known_mistakes(MACHINE_CHECKS, config) if "own_call" in each] == (
        [f"{key} is own_call:f, but {said}"] if said else []
    )


def test_a_mistake_tells_its_line_and_a_call_of_exit_ends_no_process(tmp_path, own):
    shaping = OwnFunction.load("reward.shaping", own("pass\n    raise SystemExit(3)"))
    with pytest.raises(UserError) as error:
        reshaped(shaping, groups_of()[0].samples[0], None)
    assert "(SystemExit: 3); it must return a finite number" in error.value.sentences[0]
    assert ", line 3, in " in error.value.details


# ------------------------------------------------------------------------------- advantages


def groups_of(weight: float = 2.0) -> list[Group]:
    [group] = synthetic_groups(67, num_groups=1, n=3)
    return [replace(group, prompt=replace(group.prompt, extra_info={"weight": weight}))]


def test_the_advantages_of_the_page_weigh_each_token_by_its_surprise():
    groups = groups_of()
    rows = assemble(groups, estimator="my_run:advantages")
    samples = groups[0].samples
    for sample, row in zip(samples, rows, strict=True):
        others = np.mean([each.reward for each in samples if each is not sample])
        surprise = 1 - np.exp(sample.rollout_log_probs) * np.array(sample.loss_mask)
        start = len(sample.prompt_tokens) - 1
        np.testing.assert_allclose(row.advantage[start:-1], 2.0 * (sample.reward - others) * surprise, rtol=1e-5)
        assert not row.advantage[:start].any() and row.advantage[-1] == 0
    batch = collate(rows, pad_multiple=4)
    joined = np.concatenate([row.advantage for row in rows])
    np.testing.assert_array_equal(batch.advantages.reshape(-1)[: len(joined)].numpy(), joined)


def test_a_built_in_estimator_by_its_path_is_the_built_in_one():
    groups = synthetic_groups(67, num_groups=3)
    by_path = assemble(groups, estimator="megatron_dapo.algorithms.estimators:rloo")
    assert [row.advantage for row in by_path] == [row.advantage for row in assemble(groups, estimator="rloo")]


def test_branches_get_the_advantages_of_their_own_tokens(own):
    groups = with_branches(synthetic_groups(67, num_groups=1))
    path = own("return [lp + 5 for lp in given.log_probs]")
    rows = iter(assemble(groups, estimator=path, credit=lambda sample: [2.0] * len(sample.branches)))
    for branch in (branch for sample in groups[0].samples for branch in sample.branches):
        start = len(branch.prompt_tokens) - 1
        expected = 2 * (np.array(branch.rollout_log_probs) + 5)
        np.testing.assert_allclose(next(rows).advantage[start:-1], expected, rtol=1e-5)


def test_a_masked_group_has_advantages_of_0(own):
    [group] = groups_of()
    for body in ("return given.rewards + 1", "return [lp + 5 for lp in given.log_probs]"):
        rows = assemble([replace(group, keep=False)], estimator=own(body))
        assert not any(np.any(row.advantage) for row in rows)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "return 1 / 0",
            "failed for group group0 (ZeroDivisionError: division by zero); it must return 3 finite",
        ),
        ("return given.rewards[:2]", "must return 3 finite numbers or arrays (a number per token: "),
        ("return [[0.0]] * 3", "must return 3 finite"),
        ("return given.rewards * float('nan')", "must return 3 finite"),
        ("return ['a'] * 3", "it returned ['a', 'a', 'a']"),
        ("return None", "it returned None"),
        ("return {1, 2, 3}", "must return 3 finite"),
        ("return {0: 0.5, 1: 0.5, 2: 0.5}", "must return 3 finite"),
        ("return '123'", "must return 3 finite"),
        ("return ['1', '2', '3']", "must return 3 finite"),
        ("return [0.5, 0.5, float('inf')]", "must return 3 finite"),
        ("return [1e39] * 3", "must return 3 finite"),  # infinity to the loss
    ],
)
def test_other_advantages_are_told_in_one_sentence(own, body, said):
    path = own(body)
    sentence = refused(lambda: assemble(groups_of(), estimator=path))
    assert sentence.startswith(f"algorithm.adv_estimator: {path} ") and said in sentence


def test_a_kl_in_the_reward_is_refused_beside_an_estimator_of_ones_own():
    keys = ["algorithm.adv_estimator=my_run:advantages", "algorithm.kl_ctrl.kl_coef=0.1"]
    said = refused(lambda: validate(load_config(None, keys), None, check_files=False))
    assert said.startswith("algorithm.kl_ctrl.kl_coef is 0.1") and "use_kl_loss to true" in said


# ------------------------------------------------------------------------ rewards and groups


def test_the_controller_draws_shapes_and_filters_by_the_code_of_the_page(folder):
    """Of four responses two are right: signal; of the first prompt's none."""

    async def scenario(controller, servers):
        batch = await controller.next_batch(1, 1)
        rewards = {(sample.raw_reward, round(sample.reward, 3)) for sample in batch.groups[0].samples}
        assert rewards == {(1.0, 0.999), (0.0, 0.0)}  # two tokens of a budget of 1000
        assert batch.metrics["dapo/filtered_own"] >= 1 and len(batch.groups) == 4
        assert controller.state_dict()["cursor"]["state"]["turns"][:3] == [2.0, 1.0, 1.0]  # never solved: later

    keys = [
        "data.curriculum=my_run:Order",
        "reward.shaping=my_run:shaped",
        f"{SAMPLING}.filter_mode=my_run:has_signal",
        "actor_rollout_ref.rollout.n=4",
    ]
    run_in_folder(folder, scenario, Script({0: ("wrong",)}), overrides=keys)


@pytest.mark.parametrize("key", ["reward.shaping", f"{SAMPLING}.filter_mode"])
def test_a_failure_in_the_controller_is_the_users_mistake_and_its_state_can_be_saved(folder, own, key):
    path = own("return 1 / 0")

    async def scenario(controller, servers):
        with pytest.raises(UserError, match=f"{key}: {path} failed for .*ZeroDivisionError"):
            await controller.next_batch(1, 1)
        to_bytes(controller.state_dict())

    run_in_folder(folder, scenario, overrides=[f"{key}={path}"])


@pytest.mark.parametrize(
    "body", ["return 1 / 0", "return float('nan')", "return '1'", "return b'1'", "return None", "return [1, 2]"]
)
def test_another_reward_is_told_in_one_sentence(own, body):
    path = own(body)
    [group] = groups_of()
    said = refused(reshaped, OwnFunction.load("reward.shaping", path), group.samples[0], group.prompt)
    assert said.startswith(f"reward.shaping: {path} ") and "a finite number" in said and "group group0" in said


def test_an_exception_is_told_with_its_place_in_the_users_file(own):
    path = own("return [each.rewards for each in others][3]")
    with pytest.raises(UserError) as error:
        by_own(path)(make_group("a", [1.0, 0.0]).samples)
    assert f'{path.partition(":")[0]}.py", line 2' in error.value.report()


@pytest.mark.parametrize("body", ["return 1 / 0", "return 'all_right'", "return None", "return 0.5"])
def test_another_answer_of_a_filter_is_told_in_one_sentence(own, body):
    path = own(body)
    said = refused(by_own(path), make_group("a", [1.0, 0.0]).samples)
    assert said.startswith(f"{SAMPLING}.filter_mode: {path} ") and "true or false" in said and "group a" in said


# ---------------------------------------------------------------------------------- prompts


def order_of(path: str, num_prompts: int = 3) -> OwnOrder:
    prompts = [Prompt(number, str(number), (1,), "", "test", "") for number in range(num_prompts)]
    return make_cursor(DataConfig(curriculum=path), SimpleNamespace(prompts=prompts, report=[], difficulties=()))


def test_the_order_of_the_page_goes_on_where_it_was_saved():
    order = order_of("my_run:Order")
    assert order.next(4) == [0, 1, 2, 0] and order.passes() == {"epoch": 4 / 3}
    order.note_rate(1, 0.0)
    order.note_rate(2, 0.5)
    saved = from_bytes(to_bytes(order.state_dict()))
    expected = order.next(3)
    assert expected == [2, 0, 1]
    other = order_of("my_run:Order")
    other.load_state_dict(saved)
    assert other.next(3) == expected
    order.load_state_dict(saved)  # a step that is drawn again
    assert order.next(3) == expected and order.passes() == other.passes()


def test_another_order_or_other_prompts_are_refused_on_resume():
    saved, plain = order_of("my_run:Order").state_dict(), order_of("none").state_dict()
    for state, cursor in ((plain, order_of("my_run:Order")), (saved, order_of("my_run:Order", num_prompts=4))):
        assert "is my_run:Order, but the checkpoint was written with another order" in refused(
            cursor.load_state_dict, state
        )
    assert refused(order_of("none").load_state_dict, saved).startswith("data.curriculum was my_run:Order ")


def test_an_order_beside_a_mixture_is_refused():
    config = load_config(None, ["data.curriculum=my_run:Order", "data.train_files=[a, b]", "data.mixture=[1, 2]"])
    assert "leave one out" in refused(lambda: validate(config, None, check_files=False))


@pytest.mark.parametrize("answer", ["1 / 0", "3", "-1", "0.0", "None", "next(iter(()))"])
def test_another_number_of_a_prompt_is_told_in_one_sentence(tmp_path, own, answer):
    path = own("return Own()")
    rest = "note_rate = state_dict = load_state_dict = print"
    (tmp_path / f"{path.partition(':')[0]}.py").open("a").write(
        f"class Own:\n    {rest}\n    def __next__(self):\n        return {answer}\n"
    )
    said = refused(order_of(path).next, 1)
    assert said.startswith(f"data.curriculum: {path}.__next__ ") and "a number from 0 to 2" in said


def test_a_state_other_than_json_and_a_class_without_methods_are_refused(own):
    assert "must return an object with __next__, note_rate, state_dict" in refused(order_of, own("return object()"))
    order = order_of("my_run:Order")
    own_object = order._methods["state_dict"].function.__self__
    for own_object.turns in ({1, 2}, [{1: 2}], [float("nan")], np.zeros(1)):  # a file would give [{"1": 2}]
        assert "my_run:Order.state_dict must return values of JSON (keys are" in refused(order.state_dict)
    own_object.turns = [(1, {"a": None})]
    assert order.state_dict()["state"] == {"turns": [[1, {"a": None}]]}


def test_an_order_that_cannot_take_its_state_back_is_refused_at_the_start(tmp_path, own):
    path = own("return Own()")
    (tmp_path / f"{path.partition(':')[0]}.py").open("a").write(
        "class Own:\n    __next__ = note_rate = print\n"
        "    def state_dict(self):\n        return {'seen': []}\n"
        "    def load_state_dict(self, state):\n        self.seen = state['sen']\n"
    )
    said = refused(order_of, path)
    assert said.startswith(f"data.curriculum: {path}.load_state_dict failed for ") and "KeyError: 'sen'" in said


def test_an_order_of_ones_own_beside_no_shuffling_is_refused():
    config = load_config(None, ["data.curriculum=my_run:Order", "data.shuffle=false"])
    assert "data.shuffle is false, but has no effect" in refused(lambda: validate(config, None, check_files=False))


def test_an_order_cannot_move_the_prompts_under_their_numbers(own):
    assert "has no attribute 'sort'" in refused(order_of, own("given.sort()"))


# ---------------------------------------------------------------------------------- loggers


def logging_to(path: str, folder: Path) -> Telemetry:
    return Telemetry(load_config(None, [f"trainer.logger=[jsonl, {path}]"]), RunFolder(folder))


def test_the_logger_of_the_page_writes_a_line_per_step(tmp_path):
    log = logging_to("my_run:Lines", tmp_path)
    log.log_validation(0, {"val/accuracy": 0.5})
    for step in (1, 2):
        log.log(step, {"reward/mean": step / 4})
    log.close()
    assert (tmp_path / "rewards.txt").read_text() == "1 0.25\n2 0.5\n"


def test_a_logger_that_fails_ends_no_run_and_is_told_once(tmp_path, own, caplog):
    path = own("return Failing()")
    (tmp_path / f"{path.partition(':')[0]}.py").open("a").write(
        "class Failing:\n    def write(self, record):\n        {}['no']\n    close = write\n"
    )
    log = logging_to(path, tmp_path)
    for step in (1, 2):
        log.log(step, {"reward/mean": 0.5})
    log.close()
    assert len(RunFolder(tmp_path).metrics.read_text().splitlines()) == 2
    [warning] = [text for text in caplog.messages if path in text]
    assert "(KeyError: 'no'); training goes on" in warning


@pytest.mark.parametrize("body", ["return 1 / 0", "return object()", "return None"])
def test_a_class_that_is_no_logger_is_refused_at_the_start(tmp_path, own, body):
    path = own(body)
    said = refused(logging_to, path, tmp_path)
    assert said.startswith(f"trainer.logger: {path} ") and "an object with write and close" in said


# ---------------------------------------------------------------------------- learning rate


def rates(style: str, warmup: int = 0, num_steps: int = 10) -> list[float]:
    groups = [{"lr": 0.0, "max_lr": 1.0, "min_lr": 0.1, "default_config": True}]
    optim = OptimConfig(lr=1.0, min_lr=0.1, lr_warmup_steps=warmup, lr_decay_style=style)
    schedule = _lr_schedule(SimpleNamespace(param_groups=groups), optim, num_steps)
    seen = [groups[0]["lr"]]
    for _ in range(num_steps + 1):
        schedule.step(increment=1)
        seen.append(groups[0]["lr"])
    return seen


def test_the_decay_of_the_page_is_linear_over_the_last_fifth():
    assert rates("my_run:decay") == pytest.approx([1.0] * 9 + [0.55, 0.1, 0.1])
    assert rates("my_run:decay", warmup=2)[:3] == [0.0, 0.5, 1.0]


def test_the_built_in_shapes_written_as_such_functions_are_the_built_in_ones(own):
    assert rates(own("return 1 - given"), warmup=3) == pytest.approx(rates("linear", warmup=3))


@pytest.mark.parametrize("body", ["return 1 / 0", "return float('nan')", "return -0.5", "return None"])
def test_another_share_is_told_in_one_sentence(own, body):
    path = own(body)
    said = refused(rates, path)
    assert said.startswith(f"{DECAY}: {path} ") and "progress 0" in said


def test_a_decay_that_fails_at_the_end_is_told_at_the_start_with_its_key(own):
    groups = SimpleNamespace(param_groups=[])
    path = own("return 1 / (1 - given)")
    for optim, key in (
        (OptimConfig(lr_decay_style=path), DECAY),
        (CriticOptimConfig(lr_decay_style=path), "critic.optim.lr_decay_style"),
    ):
        assert refused(_lr_schedule, groups, optim, 10).startswith(f"{key}: {path} failed for progress 1 (Zero")


# ------------------------------------------------------------------------------ checkpoints


def test_the_hook_of_the_page_is_called_with_each_checkpoint(tmp_path):
    hook = load_hook("my_run:saved", print)
    for name in ("step_000001", "step_000002"):
        hook(tmp_path / "checkpoints" / name)
    assert (tmp_path / "saved.txt").read_text() == "step_000001\nstep_000002\n"


def test_a_hook_that_fails_is_told_and_no_more(tmp_path, own):
    lines: list[str] = []
    load_hook(own("raise LookupError('no bucket')"), lines.extend)(tmp_path)
    [line] = lines
    assert line.startswith("trainer.checkpoint_hook: ") and "LookupError: no bucket" in line
    assert line.endswith("Training goes on.")
