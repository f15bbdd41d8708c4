"""The choice of prompts over time: mixtures of files, bands of pass rates,
easy ones first; resumable."""

import json
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.prompt_choice import order
from megatron_dapo.checkpointing.state_file import from_bytes, to_bytes
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.loader import load_config
from megatron_dapo.data.prompt_cursor import MixtureCursor, PromptCursor, make_cursor, short_names
from megatron_dapo.rollout.build_rollout import load_train_prompts
from tests.fake_rollout import WRONG, Script, prompt_numbers, rollout_folder, run_in_folder
from tests.unit.test_prompts import CharTokenizer

pytestmark = pytest.mark.unit

sizes_and_weights = st.lists(
    st.tuples(st.integers(1, 12), st.floats(0.01, 100.0)), min_size=1, max_size=5
).map(lambda pairs: tuple(zip(*pairs, strict=True)))  # fmt: skip


def mixture(sizes, weights, seed=1):
    return MixtureCursor([PromptCursor(size, seed) for size in sizes], sizes, weights)


def files_of(numbers, sizes):
    places = [file for file, size in enumerate(sizes) for _ in range(size)]
    return [places[number] for number in numbers]


@given(sizes_and_weights, st.integers(1, 200))
def test_every_file_has_its_share_of_all_first_draws(sizes_and_weights, num_draws):
    """At each moment less than one draw per further file from its share."""
    sizes, weights = sizes_and_weights
    counts = Counter()
    for number, file in enumerate(files_of(mixture(sizes, weights).next(num_draws), sizes), 1):
        counts[file] += 1
        for place, weight in enumerate(weights):
            share = Fraction(weight) / sum(map(Fraction, weights)) * number
            assert -(len(sizes) - 1) - 1e-9 <= counts[place] - share < 1 + 1e-9


@given(sizes_and_weights, st.integers(1, 120))
def test_a_file_is_drawn_epoch_by_epoch_whatever_the_others_do(sizes_and_weights, num_draws):
    sizes, weights = sizes_and_weights
    numbers = mixture(sizes, weights).next(num_draws)
    start = 0
    for file, size in enumerate(sizes):
        own = [number - start for number in numbers if start <= number < start + size]
        assert own == PromptCursor(size, 1).next(len(own)), file
        start += size


@given(sizes_and_weights, st.lists(st.integers(0, 30), max_size=4), st.integers(0, 30))
def test_a_mixture_goes_on_where_it_was_saved(sizes_and_weights, before, after):
    sizes, weights = sizes_and_weights
    cursor = mixture(sizes, weights)
    for count in before:
        cursor.next(count)
    resumed = mixture(sizes, weights)
    resumed.load_state_dict(from_bytes(to_bytes(cursor.state_dict())))
    assert resumed.next(after) == cursor.next(after) and resumed.state_dict() == cursor.state_dict()


def test_an_order_of_other_weights_or_of_none_cannot_go_on():
    mixed, plain = mixture((3, 4), (1, 2)), PromptCursor(7, 1)
    mixture((3, 4), (2, 4)).load_state_dict(mixed.state_dict())
    for cursor, state, words in (
        (mixture((3, 4), (1, 1)), mixed.state_dict(), "data.mixture was .0.333"),
        (mixture((3, 4), (1, 2)), plain.state_dict(), "data.mixture was empty"),
        (plain, mixed.state_dict(), "data.mixture was set .* and is empty now"),
        (PromptCursor(7, 1, difficulties=(1.0,) * 7), plain.state_dict(), "data.curriculum.* was none"),
        (plain, PromptCursor(7, 1, is_measured=True).state_dict(), "data.curriculum.* was measured .* is none now"),
    ):
        with pytest.raises(UserError, match=words):
            cursor.load_state_dict(state)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.integers(0, 9))
def test_each_epoch_goes_from_easy_to_hard_and_the_seed_orders_those_that_are_equal(difficulties, seed):
    cursor = PromptCursor(len(difficulties), seed, difficulties=tuple(map(float, difficulties)))
    for _ in range(2):
        epoch = cursor.next(len(difficulties))
        assert sorted(epoch) == list(range(len(difficulties)))
        assert [difficulties[number] for number in epoch] == sorted(difficulties)


@given(
    st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), min_size=2, max_size=24),
    st.integers(0, 23),
    st.integers(0, 30),
)
def test_measured_rates_order_the_next_epoch_and_survive_a_resume(rates, num_unknown, more):
    num = len(rates)
    cursor = PromptCursor(num, 3, is_measured=True)
    assert cursor.next(num) == PromptCursor(num, 3).next(num)
    for number in range(num_unknown, num):  # also the last draw: the next order is not made yet
        cursor.note_rate(number, rates[number])
    resumed = PromptCursor(num, 3, is_measured=True)
    resumed.load_state_dict(from_bytes(to_bytes(cursor.state_dict())))
    second = cursor.next(num)
    known = [0.5 if number < num_unknown else rates[number] for number in second]
    telling = [rate for rate in known if 0 < rate < 1]
    assert telling == sorted(telling, reverse=True) and sorted(second) == list(range(num))
    share = 1 - len(telling) / num
    for size in range(1, num + 1):  # prompts without signal: every part of the epoch has its share
        assert abs(sum(rate in (0, 1) for rate in known[:size]) - share * size) <= 1
    assert resumed.next(num + more) == second + cursor.next(more)


def test_a_mixture_of_which_one_file_changed_stays_as_it_is():
    saved = mixture((3, 4), (1, 2))
    saved.next(5)
    other = MixtureCursor([PromptCursor(3, 1), PromptCursor(4, 2)], (3, 4), (1, 2))
    before = other.state_dict()
    with pytest.raises(UserError, match="data.seed was 1"):
        other.load_state_dict(saved.state_dict())
    assert other.state_dict() == before


def write(path, *rows):
    lines = [{"prompt": f"{path.stem}{number}", "label": "1", **row} for number, row in enumerate(rows)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def load(*keys):
    return load_train_prompts(load_config(None, ["data.apply_chat_template=false", *keys]), CharTokenizer())


def test_only_prompts_in_the_band_of_pass_rates_are_trained_on(tmp_path):
    file = write(tmp_path / "p.jsonl", *({"pass_rate": rate} for rate in (0, 0.05, 0.5, 1, None)))
    dataset = load(f"data.train_files=[{file}]", "data.pass_rate=[0.05, 0.95]")
    assert [prompt.text for prompt in dataset.prompts] == ["p1", "p2"]
    assert str(dataset.report[0]).endswith("2 prompts of 5 rows, 3 outside data.pass_rate")
    with pytest.raises(UserError, match="outside data.pass_rate"):
        load(f"data.train_files=[{file}]", "data.pass_rate=[0.6, 0.7]")


@pytest.mark.parametrize(
    ("value", "expected", "keys"),
    [
        *((value, "a number from 0 to 1", "pass_rate") for value in ("missing", "0.5", True, 1.5, -0.1)),
        *((value, "a number", "difficulty") for value in ("missing", None, "hard", True)),
    ],
)
def test_what_a_prompt_is_chosen_by_is_named_by_file_row_and_column(tmp_path, value, expected, keys):
    file = write(tmp_path / "p.jsonl", {"own": 0.5}, {} if value == "missing" else {"own": value})
    use = "data.pass_rate=[0, 1]" if keys == "pass_rate" else "data.curriculum=column"
    with pytest.raises(UserError, match=rf"p.jsonl, row 2, column 'own': expected {expected}, .*{keys}_key"):
        load(f"data.train_files=[{file}]", use, f"data.{keys}_key=own")


def test_the_files_of_a_config_are_mixed_and_ordered_as_it_says(tmp_path):
    few = write(tmp_path / "few.jsonl", *({"level": level} for level in (3, 1, 2)))
    many = write(tmp_path / "many.jsonl", *({"level": 9 - level} for level in range(6)))
    keys = [
        f"data.train_files=[{few},{many}]",
        "data.mixture=[1, 3]",
        "data.curriculum=column",
        "data.difficulty_key=level",
    ]
    config = load_config(None, keys)
    dataset = load(*keys)
    drawn = [dataset.prompts[number].text for number in make_cursor(config.data, dataset).next(8)]
    assert drawn == ["many5", "few1", "many4", "many3", "many2", "few2", "many1", "many0"]


def test_a_file_of_a_mixture_must_have_prompts(tmp_path):
    good = write(tmp_path / "good.jsonl", {"pass_rate": 0.5})
    bad = write(tmp_path / "bad.jsonl", {"pass_rate": 0.0})
    keys = [f"data.train_files=[{good},{bad}]", "data.mixture=[1, 1]", "data.pass_rate=[0.1, 1.0]"]
    with pytest.raises(UserError, match="bad.jsonl has no prompts for data.mixture"):
        make_cursor(load_config(None, keys).data, load(*keys))


def test_files_have_short_names_that_tell_them_apart():
    assert short_names(["x/math.parquet", "x/code.jsonl"]) == ["math", "code"]
    assert short_names(["/d/math/train.jsonl", "/d/code/train.jsonl"]) == ["math.train", "code.train"]
    assert short_names(["train.jsonl", "x/train.jsonl"]) == ["train", "x.train"]
    assert short_names(["a.jsonl", "a.jsonl"]) == ["a.0", "a.1"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """For a controller; with files of the prompts p1, p3 ...
    and p0, p2 ..., each a data source of its own."""
    for made in rollout_folder(tmp_path, monkeypatch):
        for name, numbers in (("odd", range(1, 40, 2)), ("even", range(0, 40, 2))):
            rows = [{"prompt": f"p{number}", "label": "right", "data_source": name} for number in numbers]
            (made / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        yield made


def test_a_step_says_what_became_of_each_source(folder):
    """The file of odd numbers has three quarters of the draws;
    its prompts 1 and 3 have no signal."""

    async def scenario(controller, servers):
        batch = await controller.next_batch(1, 1)
        assert prompt_numbers(batch) == [0, 5, 7, 2]
        expected = {
            "data/odd/share": 6 / 8, "data/even/share": 2 / 8, "data/odd/filter_ratio": 2 / 6,
            "data/even/filter_ratio": 0, "data/odd/response_length": 2, "reward/odd/accuracy": 4 / 12,
            "data/even/truncation_ratio": 0, "data/odd/epoch": 6 / 20, "data/even/epoch": 2 / 20,
        }  # fmt: skip
        assert {name: batch.metrics.get(name) for name in expected} == pytest.approx(expected)

    files = f"data.train_files=[{folder}/even.jsonl,{folder}/odd.jsonl]"
    script = Script({1: WRONG, 3: WRONG})
    run_in_folder(folder, scenario, script, overrides=[files, "data.mixture=[1, 3]", "data.gen_batch_size=4"])


@pytest.mark.parametrize("curriculum", ["none", "column", "measured"])
def test_a_resumed_run_draws_what_the_run_would_have_drawn(folder, curriculum):
    """A mixture, through the controller's state as a checkpoint holds it,
    in the second epoch of one file."""
    for name in ("odd", "even"):
        rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        rows = [row | {"difficulty": (7 * number) % 5} for number, row in enumerate(rows)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = [
        f"data.train_files=[{folder}/even.jsonl,{folder}/odd.jsonl]", "data.mixture=[1, 3]", "data.shuffle=true",
        f"data.curriculum={curriculum}", "algorithm.dynamic_sampling.enable=false",
    ]  # fmt: skip

    def steps(first, last, state=None):
        async def scenario(controller, servers):
            if state is not None:
                controller.load_state_dict(from_bytes(state))
            drawn = [prompt_numbers(await controller.next_batch(step, 1)) for step in range(first, last)]
            return drawn, to_bytes(controller.state_dict())

        always = {number: WRONG if number % 3 else ("right", "right") for number in range(0, 40, 4)}
        return run_in_folder(folder, scenario, Script(always), overrides=keys)

    whole, _ = steps(1, 13)
    before, state = steps(1, 9)
    after, _ = steps(9, 13, state)
    assert before + after == whole


def test_the_example_draws_as_its_titles_say(tmp_path):
    files = order.write_files(tmp_path)
    plain, mixed, banded, easy = (order.first_draws(files, keys) for keys in order.CHOICES.values())
    assert sorted(plain) == sorted(prompt for prompt, *_ in (*order.SUMS, *order.PRODUCTS))
    assert sum("*" in prompt for prompt in mixed) == 6
    assert not {"1+1=", "96+87="} & set(banded)
    assert easy == ["1+1=", "2+7=", "2*3=", "17+5=", "7*8=", "12*12=", "48+76=", "96+87="]
