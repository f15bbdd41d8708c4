"""A run ahead of its servers' tokens, stopped and killed again and again while they write:
its promises."""

import json
import signal
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_dapo.checks.run_checks import load_and_validate
from megatron_dapo.common.exit_codes import SAVED_EXIT_CODE
from megatron_dapo.config.schema.config import Config
from megatron_dapo.rollout.batch_files import read_batch
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.telemetry.closing_table import read_metrics
from tests.distributed.lives import Checkpoint, Life, Lives, random_moments, stand_ins
from tests.elastic import check_accounts, fingerprints
from tests.proofs import amount
from tests.tiny_models import CHARACTERS, SPECIAL_TOKENS, make_tiny

pytestmark = pytest.mark.distributed

NUM_LIVES, SEED, LONGEST = amount(6, 20), 3, 900
N, SIZE, MAX_STALENESS = 3, 4, 2
PROMPT_LENGTH, LIMIT = 4, 32  # tokens; a prompt is the number of its draw
ZERO, EQUALS = (len(SPECIAL_TOKENS) + CHARACTERS.index(character) for character in "0=")  # tokens

Tokens = tuple[int, ...]


def make_config(folder: Path, urls: list[str], *overrides: str) -> Config:
    """More slots than possible requests, so that everything allowed is asked for. A checkpoint
    after each step."""
    make_tiny(folder / "model", "qwen2", layers=2)
    rows = [{"prompt": f"{number:03d}=", "label": "0", "data_source": "any"} for number in range(1000)]
    (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    rollout = "actor_rollout_ref.rollout"
    return load_and_validate(
        None,
        [
            f"actor_rollout_ref.model.path={folder}/model",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={SIZE}",
            f"data.train_files=[{folder}/prompts.jsonl]",
            "data.apply_chat_template=false",
            "data.shuffle=false",
            f"data.train_batch_size={SIZE}",
            "data.gen_batch_size=6",
            f"data.max_prompt_length={PROMPT_LENGTH}",
            f"data.max_response_length={LIMIT}",
            f"{rollout}.n={N}",
            f"{rollout}.max_staleness={MAX_STALENESS}",
            f"{rollout}.server_urls=[{','.join(urls)}]",
            # a stand-in's log-probs are no model's
            "algorithm.rollout_correction.max_mismatch=null",
            "algorithm.rollout_correction.rollout_is=token",
            "algorithm.dynamic_sampling.enable=true",
            "algorithm.dynamic_sampling.max_num_gen_batches=20",
            "reward.function=tests.scripted_reward:even_length",
            "reward.num_workers=1",
            "trainer.total_training_steps=1000",
            "trainer.save_interval=1",
            "trainer.keep_last=2",
            "trainer.dump_batches=true",
            "trainer.logger=[jsonl]",
            f"trainer.run_dir={folder}/run",
            *overrides,
        ],
    )


@dataclass(frozen=True)
class History:
    """A run of NUM_LIVES ended lives, and a last one ending by itself, four steps later."""

    config: Config
    lives: list[Life]

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        assert self.lives[-1].after is not None
        return self.lives[-1].after.step


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    folder = tmp_path_factory.mktemp("lives")
    with stand_ins(2) as (urls, events):
        config = make_config(folder, urls)
        run = Lives(config, events)
        lives = []
        for moment in random_moments(NUM_LIVES, SEED, LONGEST):
            lives.append(run.live(moment))
            print(in_words(lives[-1]))
        newest = lives[-1].after
        assert newest is not None, "none of them saved anything"
        lives.append(run.live(None, f"trainer.total_training_steps={newest.step + 4}"))
        print(in_words(lives[-1]))
        assert lives[-1].code == 0, run.tails()
        return History(config, lives)


def in_words(life: Life) -> str:
    steps = [checkpoint.step if checkpoint else None for checkpoint in (life.before, life.after)]
    requests = f"{len(life.requests)} requests, {life.num_in_flight} of them in flight at the end"
    return f"{life.moment or 'to its end'}: step {steps[0]} -> {steps[1]}, {requests}"


@pytest.fixture(scope="module")
def batches(history: History) -> list[list]:
    """The groups of each step, from the first on."""
    folder = RunFolder.of(history.config.trainer).batches
    return [list(read_batch(folder, step).groups) for step in range(1, history.num_steps + 1)]


def number_of(uid: str) -> int:
    """Of a draw; prompts are drawn in the order of the file."""
    number, _, prompt = uid.partition("-")
    assert int(number) == int(prompt), f"draw {number} is of prompt {prompt}"
    return int(number)


# ---------------------------------------------------------------------------------------- the lives


def test_every_life_goes_on_from_the_newest_checkpoint_and_ends_as_it_is_told(history):
    codes = {signal.SIGTERM: SAVED_EXIT_CODE, signal.SIGKILL: -signal.SIGKILL}
    for life in history.lives:
        assert life.code == (codes[life.moment.signal] if life.moment else 0), in_words(life)
        assert life.resumed_after == (life.before.step if life.before else None), in_words(life)
    assert sum(life.num_in_flight > 0 for life in history.lives) > NUM_LIVES // 2


def test_no_draw_is_asked_for_that_is_done_and_none_more_than_it_lacks(history):
    """Each life asks for the rest of its checkpoint's open draws, and for new draws, in full."""
    for life in history.lives:
        lacking = lacking_requests(life.before)
        num_drawn = life.before.rollout["queue"]["num_drawn"] if life.before else 0
        asked = requests_by_draw(life)
        for number, requests in asked.items():
            expected = lacking.get(number, Counter()) if number < num_drawn else Counter({prompt_of(number): N})
            assert requests <= expected, f"{in_words(life)}: draw {number}"


# ----------------------------------------------------------------------------------------- accounts


def test_every_draw_is_in_one_place_in_every_checkpoint_that_a_life_left(history, batches):
    """Trained, filtered, waiting or open: counted in batches, metrics and the saved queue,
    each by itself."""
    records = read_metrics(RunFolder.of(history.config.trainer).metrics)
    for life in history.lives:
        if life.after is None:
            continue
        step, queue = life.after.step, life.after.rollout["queue"]
        trained = [number_of(group.uid) for groups in batches[:step] for group in groups]
        waiting, still_open = ([number_of(group["uid"]) for group in queue[part]] for part in ("kept", "open"))
        placed = [*trained, *waiting, *still_open]
        assert placed == sorted(set(placed)), f"{in_words(life)}: not in the order of the draws, or one came twice"
        num_filtered = sum(record["dapo/num_filtered_groups"] for record in records[:step])
        steps = [each for each in (queue["step"], *queue["steps_ahead"]) if each]
        num_filtered += sum(sum(each["filtered"].values()) for each in steps)
        assert max(placed) < queue["num_drawn"] == len(placed) + num_filtered, f"{in_words(life)}: one is lost"
        assert Counter(queue["gone"]) == Counter(handed=len(trained), filtered=int(num_filtered)), in_words(life)


def test_every_step_trains_on_groups_of_its_own_that_are_not_too_old(history, batches):
    accounts = check_accounts(history.config, history.num_steps)  # ages too
    print(accounts)
    assert accounts.num_trained == history.num_steps * SIZE > NUM_LIVES // 2 * SIZE and accounts.num_filtered > 0
    steps = [record["step"] for record in read_metrics(RunFolder.of(history.config.trainer).metrics)]
    assert steps == list(range(1, history.num_steps + 1))
    numbers = [number_of(group.uid) for groups in batches for group in groups]
    assert numbers == sorted(set(numbers))


def test_every_token_was_written_by_the_weights_of_its_version(history):
    """Those of the run in the end: a version undone by a kill had other weights."""
    by_version = fingerprints(history.config, history.num_steps)
    assert all(len(values) == 1 for values in by_version.values()), "a label is wrong"
    assert len(set.union(*by_version.values())) == len(by_version) > NUM_LIVES // 2, (
        "the weights changed with every version"
    )


# ---------------------------------------------------------------------------------- partial answers


def test_no_request_exceeds_the_context(history):
    for life in history.lives:
        for request in life.requests:
            assert len(request["input_ids"]) + request["sampling_params"]["max_new_tokens"] == PROMPT_LENGTH + LIMIT
            assert request["sampling_params"]["max_new_tokens"] > 0


def test_what_a_stop_cut_off_is_asked_for_again_with_its_tokens(history):
    num_continued = 0
    for life in history.lives[:-1]:
        asked = requests_by_draw(life)
        num_continued += sum(len(tokens) > PROMPT_LENGTH for requests in asked.values() for tokens in requests)
        if life.before and life.after and life.after.step > life.before.step:  # it had time to ask
            for number, requests in lacking_requests(life.before).items():
                assert asked[number] == requests, f"{in_words(life)}: draw {number}"
    print(f"{num_continued} requests go on with tokens")
    assert num_continued > NUM_LIVES


def test_tokens_of_before_a_stop_keep_their_log_probs_and_versions(history, batches):
    """As long as no kill comes between: that costs the tokens of unfinished answers."""
    num_kept = 0
    for life, following in zip(history.lives, history.lives[1:], strict=False):
        if following.code == -signal.SIGKILL or life.after is None:
            continue
        answers = answers_by_draw(following.after, batches)
        for draw in life.after.rollout["queue"]["open"]:
            number = number_of(draw["uid"])
            if number not in answers:  # filtered
                continue
            for partial in draw.get("partials", ()):
                assert any(goes_on(answer, partial) for answer in answers[number]), f"{in_words(following)}: {partial}"
                num_kept += 1
    print(f"{num_kept} answers went on")
    assert num_kept > NUM_LIVES


def prompt_of(number: int) -> Tokens:
    return tuple(ZERO + int(digit) for digit in f"{number:03d}") + (EQUALS,)


def requests_by_draw(life: Life) -> dict[int, Counter[Tokens]]:
    """The tokens that servers were to go on from."""
    by_draw: dict[int, Counter[Tokens]] = defaultdict(Counter)
    for request in life.requests:
        tokens = tuple(request["input_ids"])
        number = int("".join(str(token - ZERO) for token in tokens[: PROMPT_LENGTH - 1]))
        assert tokens[:PROMPT_LENGTH] == prompt_of(number)
        by_draw[number][tokens] += 1
    return by_draw


def lacking_requests(checkpoint: Checkpoint | None) -> dict[int, Counter[Tokens]]:
    """The requests needed to finish the open draws, by draw."""
    lacking = {}
    finished = {group["uid"] for group in checkpoint.rollout["queue"]["finished"]} if checkpoint else set()
    for draw in checkpoint.rollout["queue"]["open"] if checkpoint else ():
        if draw["uid"] in finished:
            continue
        number = number_of(draw["uid"])
        begun = [tuple(partial["tokens"]) for partial in draw["partials"]]
        begun += [()] * (N - len(draw["samples"]) - len(begun))
        lacking[number] = Counter((*prompt_of(number), *tokens) for tokens in begun)
    return lacking


def answers_by_draw(checkpoint: Checkpoint, batches: list[list]) -> dict[int, list[dict]]:
    """All existing parts of answers, as plain data with tokens, log_probs and weight_versions."""
    answers: dict[int, list[dict]] = defaultdict(list)
    queue = checkpoint.rollout["queue"]
    samples = [
        (group.uid, vars(sample))
        for groups in batches[: checkpoint.step]
        for group in groups
        for sample in group.samples
    ]
    for group in (*queue["kept"], *queue["finished"], *queue["open"]):
        samples += [(group["uid"], sample) for sample in group.get("samples", ())]
        answers[number_of(group["uid"])] += group.get("partials", ())
    for uid, sample in samples:
        names = {"tokens": "response_tokens", "log_probs": "rollout_log_probs", "weight_versions": "weight_versions"}
        answers[number_of(uid)].append({name: sample[field] for name, field in names.items()})
    return answers


def goes_on(answer: dict, partial: dict) -> bool:
    """It may be cut off once more, which costs a token."""
    number = min(len(partial["tokens"]), len(answer["tokens"]))
    begins_alike = all(
        list(answer[name][:number]) == list(partial[name][:number])
        for name in ("tokens", "log_probs", "weight_versions")
    )
    return begins_alike and number >= len(partial["tokens"]) - 1
