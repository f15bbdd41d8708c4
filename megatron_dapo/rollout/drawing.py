"""What a run has drawn: its prompts, the queue of their groups, the pool of experiences; saved and restored as one."""

import logging
from collections.abc import Callable

from megatron_dapo.common.errors import UserError
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.prompt_cursor import make_cursor
from megatron_dapo.data.prompt_dataset import PromptDataset
from megatron_dapo.data.samples import Prompt, Sample
from megatron_dapo.queue.experience_replay import make_pool
from megatron_dapo.queue.group_filter import make_queue
from megatron_dapo.queue.prompt_draws import PromptDraws
from megatron_dapo.queue.step_statistics import RolloutStep
from megatron_dapo.rollout.verdicts import VerdictCheck

log = logging.getLogger(__name__)


class Drawing:
    """Draws prompts, and decides which of their groups are trained on.

    `begin` -> `next_prompt` and the queue's methods, and `decide` as groups are finished -> `take`. Where too few
    responses got a verdict, it goes back to where it was after the last step.
    """

    def __init__(self, config: Config, dataset: PromptDataset, last_traceback: Callable[[], str]) -> None:
        """Start at the first prompt. last_traceback: of the reward function, for the error that tells of it."""
        self._prompts = dataset.prompts
        self._reward = config.reward
        self._last_traceback = last_traceback
        self.queue = make_queue(config)
        self.pool = make_pool(config)
        self._cursor = make_cursor(config.data, dataset)
        self._draws = PromptDraws(self._cursor, self.pool, self.queue.limits.gen_batch_size)
        self._verdict_check: VerdictCheck | None = None
        # after the last step, or as it was loaded; without the samples of open groups, which it would keep alive when
        # they are dropped
        self._state_before_step: dict | None = None

    def begin(self, step: int, weight_version: int) -> None:
        """Say that this step is asked for, with these weights; again after a push."""
        if self._state_before_step is None:
            self._state_before_step = self._state_of_draws(with_open_samples=False)
            self._forget_without_verdicts(step)
        self.queue.begin(step, weight_version)

    def next_prompt(self) -> tuple[Prompt, Sample | None]:
        """Return the next prompt, and the trajectory that its group borrows, if any."""
        number, replayed = self._draws.next()
        return self._prompts[number], replayed

    def metrics(self) -> dict[str, float]:
        """Return how often the prompts were drawn by now, of the files of a mixture each."""
        return {f"data/{name}": epochs for name, epochs in self._cursor.passes().items()}

    def decide(self, is_waited_for: bool) -> None:
        """Have the queue decide on finished groups. is_waited_for: the trainer waits for the step.

        While too few of their responses got a verdict it is not decided on them, so that a saved state can sample them
        again; further ones show whether it is the function. Raises UserError where it is still so for a whole wave, or
        for as many groups as a step has: what was drawn since the last step is drawn again once the function is
        corrected.
        """
        check = self._verdict_check
        assert check is not None, "begin() comes first"
        seen = check.after(self.queue.finished_head)
        if seen.are_too_few():
            limits = self.queue.limits
            if seen.num_groups >= limits.train_batch_size or not limits.max_staleness:
                self._go_back()
                seen.check(self._last_traceback())
            if self.queue.num_unfinished or not is_waited_for:
                return
        groups = self.queue.decide()
        for group in groups:
            written = [sample.correct for sample in group.samples if not sample.exp_mask]
            if written:
                self._cursor.note_rate(group.prompt.index, sum(written) / len(written))
        self._verdict_check = check.after(groups)
        if self.pool is not None:
            self.pool.record(groups)

    def take(self) -> RolloutStep:
        """End the step that is ready, and return it."""
        step = self.queue.take()
        self._state_before_step = self._state_of_draws(with_open_samples=False)
        self._renew_verdict_check(step.number + 1)
        if self.pool is not None:
            self.pool.end_step(self._draws.replayed_later)
        return step

    def state_dict(self, with_samples: bool = True) -> dict:
        """Return plain data: the place in the prompts, the groups that are ready or open, the experiences.

        with_samples: False leaves out what was sampled ahead of the trainer; the prompts of it are sampled again.
        """
        pool = {} if self.pool is None else {"experiences": self.pool.state_dict()}
        return {**self._state_of_draws(with_samples), **pool}

    def load_state_dict(self, state: dict) -> None:
        """Go on where a saved drawing stood. Raises UserError for the state of a run with trainer.replay, which has no
        prompts."""
        if "replay" in state:
            raise UserError(
                f"the checkpoint is of a replay of {state['replay']}, which drew no prompts to go on from; resume it "
                f"with trainer.replay, or from a checkpoint of a run with servers."
            )
        self._draws.load_state_dict(state)
        self.queue.load_state_dict(state["queue"])
        if self.pool is not None and "experiences" in state:
            self.pool.load_state_dict(state["experiences"])
        self._state_before_step = None
        self._verdict_check = None

    def _state_of_draws(self, with_samples: bool = True, with_open_samples: bool = True) -> dict:
        return {**self._draws.state_dict(), "queue": self.queue.state_dict(with_samples, with_open_samples)}

    def _go_back(self) -> None:
        """Be as after the last step. What the pool took in was decided on before that."""
        assert self._state_before_step is not None, "begin() comes first"
        self.load_state_dict(self._state_before_step)
        if self.pool is not None:
            self.pool.forget_step(self._draws.replayed_later)

    def _renew_verdict_check(self, step: int) -> None:
        """Count verdicts anew once there were those of a whole step; a few responses say little of the function."""
        if self._verdict_check is None or self._verdict_check.num_groups >= self.queue.limits.train_batch_size:
            self._verdict_check = VerdictCheck(self._reward, "")
        self._verdict_check.what = f"rollout step {step}"

    def _forget_without_verdicts(self, step: int) -> None:
        """Sample the open groups of a saved state again where too few of their responses got a verdict: the run was
        perhaps stopped for it, and the function corrected."""
        self._renew_verdict_check(step)
        if VerdictCheck(self._reward, "").after(self.queue.open_groups).are_too_few():
            log.warning(
                "rollout step %d: too few responses of the saved state's groups got a verdict; the groups are sampled "
                "again",
                step,
            )
            self.queue.forget_samples()
