"""Sections `data`, `reward`, `weight_sync` and `trainer`: a run's inputs and its course."""

from typing import Annotated, Literal

from megatron_dapo.config.built_ins import estimators_with
from megatron_dapo.config.schema.base import (
    BoundedInt,
    Fraction,
    ImportPath,
    Megabytes,
    NonNegativeFloat,
    NonNegativeInt,
    NumProcesses,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Section,
)
from megatron_dapo.config.schema.rules import ActsIf, Is, IsNot, MayChangeOnResume


class DataConfig(Section):
    train_files: list[str] = []
    """Prompt files (.jsonl or .parquet, verl's DAPO-Math-17k schema); with `sft.enable` files of conversations."""
    mixture: list[PositiveFloat] = []
    """Weights of `train_files`, one per file: what share of the draws comes from each; empty = all prompts are drawn as
    those of one file."""
    val_files: MayChangeOnResume[list[str]] = []
    """Held-out prompt files, answered before the first step, every `trainer.test_freq` steps and after the last; with
    `sft.enable` conversations, whose loss is computed then."""
    prompt_key: str = "prompt"
    """Column with the prompt: a list of chat messages, or a string."""
    answer_key: str | None = None
    """Column with the answer; null = reward_model.ground_truth, or label."""
    prompt_template: str = "{prompt}"
    """What is asked, with the text of the prompt's column in place of {prompt}."""
    data_source: str = ""
    """Data source of rows that name none."""
    train_batch_size: PositiveInt = 512
    """Groups (prompts that carry signal) in one rollout step; with `sft.enable` conversations in one optimizer step."""
    gen_batch_size: PositiveInt | None = None
    """The most prompts that are drawn at once, and the unit of `max_num_gen_batches`; null = `train_batch_size`."""
    max_prompt_length: PositiveInt = 1024
    """Prompt tokens; longer prompts are dropped, or cut from the left with `truncation: left`."""
    max_response_length: PositiveInt = 2048
    """Response tokens; a response that reaches it is truncated."""
    filter_overlong_prompts: bool = True
    """Drop prompts over `max_prompt_length` when the files are read. With false, `truncation` says what happens."""
    truncation: Literal["error", "left"] = "error"
    """What to do with an over-long prompt that was not filtered: stop, or keep its last tokens."""
    dedup: bool = True
    """Keep one of several prompts with the same content (public DAPO-Math-17k repeats each about 100 times)."""
    conflicting_answers: Literal["error", "drop", "keep"] = "error"
    """What to do with prompts that occur with several answers: stop, naming their rows; drop them; or train on each of
    them. Not asked in multi-turn rollouts, where the answer may be a task of its own."""
    shuffle: Annotated[bool, ActsIf(Is("curriculum", "none", "column", "measured"))] = True
    """Draw prompts in an order fixed by `seed` and the epoch."""
    seed: int = 1
    """Seed of the order of prompts."""
    pass_rate: list[Fraction] | None = None
    """[lowest, highest]: train only on rows whose measured pass rate is within; null = on all."""
    pass_rate_key: Annotated[str, ActsIf(IsNot("pass_rate", None))] = "pass_rate"
    """Column with the pass rate; `checkpoints_tools.score_dataset` writes it."""
    curriculum: Literal["none", "column", "measured"] | ImportPath = "none"
    """Easy prompts first in every epoch: by `difficulty_key`, or from the second epoch on by the share of right
    responses that the run itself saw. Or the order of a class of your own (docs/extend.md)."""
    difficulty_key: Annotated[str, ActsIf(Is("curriculum", "column"))] = "difficulty"
    """Column with a number that is higher for harder prompts."""
    apply_chat_template: bool = True
    """Render chat messages with the tokenizer's chat template; with false their contents are joined as they are."""


class RewardModelConfig(Section):
    path: str | None = None
    """A sequence classifier with one label (Hugging Face), or a critic's value-head checkpoint, that scores responses;
    null = none does."""
    url: Annotated[MayChangeOnResume[str | None], ActsIf(IsNot("path", None))] = None
    """A running SGLang server of it; null = `launch.local` and `eval` start one."""
    api_key_file: Annotated[MayChangeOnResume[str | None], ActsIf(IsNot("url", None))] = None
    """File with the key of that server; null = it demands none."""
    weight: Annotated[float, ActsIf(IsNot("path", None))] = 1.0
    """Factor of its scores."""
    tensor_model_parallel_size: Annotated[MayChangeOnResume[PositiveInt], ActsIf(IsNot("path", None))] = 1
    """GPUs of the server that is started."""


JUDGE_PROMPT = """\
A question, its reference answer and a response follow. How good is the response, from 0 to 10?
End with a line "Score: " and the number.

Question: {question}

Reference answer: {ground_truth}

Response: {response}"""

JUDGE_VALUES = ("question", "ground_truth", "response")
"""Words of a judge's prompt in braces, each replaced by its value."""
_JUDGED = ActsIf(IsNot("url", None))


class JudgeConfig(Section):
    url: str | None = None
    """Base URL of an OpenAI-compatible endpoint, such as http://host:port/v1; null = there is no judge."""
    model: Annotated[str, _JUDGED] = "default"
    """Name of the model there."""
    prompt: Annotated[str, _JUDGED] = JUDGE_PROMPT
    """What the judge is asked, with {question}, {ground_truth} and {response} in it; another word in braces is refused,
    unless it is the argument of a command of LaTeX."""
    pattern: Annotated[str, _JUDGED] = r"(?i)score:[\s*]*+(-?\d+(?:\.\d+)?|yes|no)"
    """Regular expression whose last match has the score as its first group: a number, or yes or no (1 or 0). It is
    searched in the last 65,536 characters of an answer, for 2 s at most."""
    weight: Annotated[float, _JUDGED] = 0.1
    """Factor of its scores."""
    temperature: Annotated[NonNegativeFloat, _JUDGED] = 0.0
    """Of its answers."""
    max_tokens: Annotated[PositiveInt, _JUDGED] = 1024
    """Of its answers."""
    api_key_env: Annotated[MayChangeOnResume[str | None], _JUDGED] = None
    """Environment variable with the key; null = none, or `api_key_file`."""
    api_key_file: Annotated[MayChangeOnResume[str | None], _JUDGED] = None
    """File with the key, which its owner alone may read."""
    max_concurrency: Annotated[MayChangeOnResume[PositiveInt], _JUDGED] = 64
    """Questions under way at once."""
    timeout_s: Annotated[MayChangeOnResume[Seconds], _JUDGED] = 60.0
    """Of one question."""
    max_retries: Annotated[MayChangeOnResume[NonNegativeInt], _JUDGED] = 4
    """Of a question that failed, or was refused for being one too many."""
    max_requests: Annotated[MayChangeOnResume[PositiveInt | None], _JUDGED] = None
    """Questions from one start of the run to its end; then responses have no verdict, and the run stops; null = as many
    as it takes."""


class RewardConfig(Section):
    function: str = "by_data_source"
    """math_dapo, math_verify, exact_match, reasoning_gym, code_tests, environment (it, or the agent, gives the reward),
    none (`reward.model` alone scores), `package.module:function`, or by_data_source (each prompt's own)."""
    kwargs: dict[str, str | int | float | bool] = {}
    """Keyword arguments of the reward function."""
    shaping: ImportPath | None = None
    """A function of your own that returns a response's reward, after overlong shaping (docs/extend.md); null = none."""
    num_workers: MayChangeOnResume[NumProcesses] = 2
    """Reward processes."""
    timeout_s: MayChangeOnResume[Seconds] = 5.0
    """Hard limit of one call of the reward function; then the worker is killed and the sample counts as wrong."""
    max_concurrency: MayChangeOnResume[PositiveInt] = 256
    """Calls of an `async def` reward function that are under way at once, in all reward processes together."""
    batch_size: MayChangeOnResume[PositiveInt] = 64
    """Responses per call of a reward function that takes a batch, at most."""
    memory_limit_mb: MayChangeOnResume[Megabytes] = 2048
    """Address space of a reward process."""
    pass_env: MayChangeOnResume[list[str]] = []
    """Names of environment variables that reward processes get though they look like secrets, such as the API key of a
    judge; docs/rewards.md says which do."""
    allow_unsandboxed: Annotated[MayChangeOnResume[bool], ActsIf(Is("function", "code_tests", "by_data_source"))] = (
        False
    )
    """Where no sandbox can be made, run the model's programs without one, with the rights of this user."""
    model: RewardModelConfig = RewardModelConfig()
    """A model that scores responses, beside the function or alone."""
    judge: JudgeConfig = JudgeConfig()
    """A language model that is asked about responses, beside the function or alone."""
    combine: Annotated[
        Literal["sum", "model"], ActsIf(IsNot("reward.model.path", None), IsNot("reward.judge.url", None))
    ] = "sum"
    """sum: the scores of function, model and judge are added. model: without that of the function, which still says
    what is correct."""
    max_error_share: MayChangeOnResume[Fraction] = 0.5
    """Largest share of a step's responses that may get no verdict: the function raised, ran out of time, or its process
    ended. Above it, and where none got one, the run stops, saved, and shows a traceback of the function."""


PauseMode = Literal["retract", "in_place"]


class WeightSyncConfig(Section):
    bucket_size_mb: Megabytes = 256
    """Size of a flat bucket in MiB; on a CPU at most 64."""
    timeout_s: Seconds = 300.0
    """Deadline of one weight push. A server that is lost meanwhile is left out; an error names the server or rank."""
    pause_mode: Annotated[PauseMode, ActsIf(IsNot("actor_rollout_ref.rollout.max_staleness", 0))] = "retract"
    """How servers go on with responses that a push interrupts: retract reads them again with the new weights; in_place
    keeps what the old weights made of them, which is faster, and makes the log-probs of later tokens inexact."""
    verify: bool = False
    """After each push compare a sample of tensors on every server with the trainer's, bit for bit."""
    verify_num_tensors: PositiveInt = 8
    """Tensors compared per push (a different sample each time)."""


class TrainerConfig(Section):
    experiment_name: MayChangeOnResume[str] = "run"
    """Name of the run folder, below runs/."""
    run_dir: MayChangeOnResume[str | None] = None
    """Run folder; null = runs/EXPERIMENT_NAME."""
    log_dir: MayChangeOnResume[str | None] = None
    """Folder of the processes' log files; null = logs/ of the run folder."""
    nnodes: MayChangeOnResume[NumProcesses] = 1
    """Trainer nodes."""
    n_procs_per_node: MayChangeOnResume[NumProcesses] = 1
    """Trainer processes (GPUs) per node."""
    gpu_memory_gb: MayChangeOnResume[PositiveFloat] = 80.0
    """Memory of one GPU, which the plan compares its estimate with."""
    gpu_reserve_gb: MayChangeOnResume[NonNegativeFloat | None] = None
    """Memory of a trainer GPU that the plan keeps free for CUDA, NCCL and workspaces; null = 2, or 6 with several
    trainer ranks. With `hybrid_engine` what a rank keeps while servers sample; null = 1.5, or 9 with several ranks, 11
    with experts."""
    total_training_steps: PositiveInt = 100
    """Rollout steps of the run."""
    critic_warmup: Annotated[
        NonNegativeInt, ActsIf(Is("algorithm.adv_estimator", *estimators_with(needs_critic=True)))
    ] = 0
    """Rollout steps at the beginning in which the critic alone is updated."""
    test_freq: MayChangeOnResume[BoundedInt] = -1
    """Rollout steps between held-out evaluations; -1 = only before and after (where val_files are given)."""
    logger: MayChangeOnResume[list[Literal["console", "jsonl", "tensorboard", "wandb", "mlflow"] | ImportPath]] = [
        "console",
        "jsonl",
        "tensorboard",
    ]
    """Where metrics go; a class of your own too (docs/extend.md)."""
    seed: int = 1
    """Seed of mini-batches, of the generators of ranks, reward functions and environments, and, with
    `rollout.deterministic`, of responses."""
    save_interval: MayChangeOnResume[BoundedInt] = -1
    """Rollout steps between checkpoints, with one after the last step; -1 = only when the run is asked to stop."""
    keep_last: MayChangeOnResume[PositiveInt | None] = None
    """Newest checkpoints that are kept, older ones are deleted; null = all."""
    keep_every: MayChangeOnResume[Annotated[PositiveInt | None, ActsIf(IsNot("keep_last", None))]] = None
    """Checkpoints of steps that are a multiple of this are kept as well."""
    checkpoint_hook: MayChangeOnResume[ImportPath | None] = None
    """A function of your own that is called with each finished checkpoint (docs/extend.md); null = none."""
    async_save: MayChangeOnResume[bool] = True
    """Train on while the files of a checkpoint are written."""
    save_hf: MayChangeOnResume[bool] = False
    """Write the model into each checkpoint's folder hf/ as a Hugging Face checkpoint too."""
    resume: MayChangeOnResume[Literal["auto", "required", "never"]] = "auto"
    """Go on from the newest complete checkpoint of the run folder: where there is one, always, or never."""
    accept_changes: MayChangeOnResume[list[str]] = []
    """Keys that may differ from the run that wrote the checkpoint, although they matter to what is learned."""
    accept_missing: MayChangeOnResume[list[Literal["optimizer", "controller", "critic"]]] = []
    """Parts that a checkpoint may lack: the optimizer's state; the prompt cursor with the groups that wait, which also
    may be of other prompts and then begins anew; the critic, which then starts from critic.model.path."""
    dump_batches: MayChangeOnResume[bool] = False
    """Write every batch that servers sampled to batches/step_NNNNNN.json.gz of the run folder, for `replay`."""
    replay: MayChangeOnResume[str | None] = None
    """Folder of dumped batches to train on, without servers, rewards or weight sync (`train --replay DIR`)."""
    synthetic_batch: bool = False
    """Train on random tokens and rewards, as long as responses are, without servers, reward processes or weight sync:
    to measure the trainer alone. The tokens follow from `seed` and step, whatever the layout."""
