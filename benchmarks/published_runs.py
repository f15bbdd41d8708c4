"""Published runs of other programs beside our estimates of them, to show how far the estimates may
be trusted.

A row has only its page's facts; missing ones are the same for all rows (`SIGMA`, `PROMPT`,
`Efficiency`, `server_time`). Their servers are vLLM's and their trainers are not ours, so this
compares the arithmetic.
"""

from dataclasses import dataclass, replace
from typing import Any

from megatron_dapo.commands.plan.server_time import ServerLayout, push_s, server_speed
from megatron_dapo.commands.plan.simulation import Recipe
from megatron_dapo.commands.plan.step_time import MEASURED_STEPS, PhaseTimes, step_time
from megatron_dapo.commands.plan.training_time import Efficiency, TrainerLayout, TrainingWork, training_time
from megatron_dapo.config.derived import ParallelSizes
from megatron_dapo.data.lengths import Lengths
from megatron_dapo.estimates.hardware import HARDWARE
from megatron_dapo.estimates.model_shapes import MODEL_SHAPES
from megatron_dapo.huggingface.spec_reader import model_spec

NEMO_05 = "docs.nvidia.com/nemo/rl/0.5.0/about/performance-summary.html"
NEMO_06 = "docs.nvidia.com/nemo/rl/0.6.0/about/performance-summary.html"
NEMO_04 = "github.com/NVIDIA-NeMo/RL, docs/about/performance-summary.md at 06beed91 (v0.4)"
VERL = "github.com/verl-project/verl, docs/advance/one_step_off.md"

SIGMA = 0.9  # no page publishes the spread
PROMPT = 170  # mean prompt tokens of DAPO-Math-17k in a log of verl's issue 816
BUCKET_MB = 1024  # of their weight transfers: large, so that answers cost nothing
# vLLM decodes at most so many requests at once by itself, on large GPUs (max_num_seqs of its V1
# engine)
SLOTS = 1024


@dataclass(frozen=True)
class PublishedRun:
    """A row of a page: groups x n samples per step, in mini_batches optimizer steps."""

    name: str
    source: str
    model: str
    hardware: str
    total_length: float | None
    """Mean tokens of a sample with its prompt. None if the page does not say: then the length that
    makes the estimate of `score` right, so that this part is no check."""
    longest: int
    """Of a response."""
    groups: int
    n: int
    mini_batches: int
    trainer_gpus: int
    """Of a colocated run the same as its servers': the parts then follow each other."""
    tp: int
    pp: int
    ep: int
    recompute: float
    server_gpus: int
    server_tp: int
    is_colocated: bool
    published: dict[str, float]
    """Seconds by part: step, sampling, score, update."""
    num_scores: int = 2
    """Passes for log-probs, the reference's included."""
    max_tokens: int = 4096
    gpus_per_node: int = 8


def _nemo(name: str, model: str, length: float, step: float, **facts: Any) -> PublishedRun:
    """GRPO of NeMo RL: 64 prompts x 32 responses, four optimizer steps, 4096 tokens with the
    prompt. The reference's log-probs come besides the old ones (its default KL penalty);
    micro-batches are packed to 4096 tokens."""
    defaults: dict[str, Any] = dict(
        source=NEMO_05,
        hardware="h100",
        longest=4096 - PROMPT,
        groups=64,
        n=32,
        mini_batches=4,
        pp=1,
        ep=1,
        recompute=0.0,
    )
    return PublishedRun(name, model=model, total_length=length, published={"step": step}, **{**defaults, **facts})


def _llama(name: str, length: float, step: float, **facts: Any) -> PublishedRun:
    return _nemo(name, "llama-3.1-8b", length, step, **{"tp": 1, "recompute": 1.0, "server_tp": 1, **facts})


def _qwen(name: str, length: float, step: float, **facts: Any) -> PublishedRun:
    return _nemo(name, "qwen3-32b", length, step, **{"tp": 4, "pp": 4, "server_tp": 4, **facts})


def _moe(name: str, length: float, step: float, **facts: Any) -> PublishedRun:
    return _nemo(name, "qwen3-30b-a3b", length, step, **{"tp": 1, "ep": 8, "server_tp": 2, **facts})


def _large_moe(name: str, length: float, step: float, **facts: Any) -> PublishedRun:
    """The same of Qwen3-235B-A22B with 16 prompts in one optimizer step, 8192 tokens with the
    prompt, all layers recomputed
    (examples/configs/recipes/llm/performance/grpo-qwen3-235b-32n8g-async-1off.yaml beside the
    page)."""
    layout = {"tp": 4, "pp": 8, "ep": 16, "recompute": 1.0, "server_tp": 8}
    work = {"groups": 16, "mini_batches": 1, "longest": 8192 - PROMPT, "max_tokens": 8192}
    return _nemo(name, "qwen3-235b-a22b", length, step, **{**layout, **work, **facts})


def _verl(name: str, **facts: Any) -> PublishedRun:
    """DAPO of verl with Megatron: 512 prompts x 16 responses, 16 optimizer steps, TP 2, PP 2, two
    samples per micro-batch. Source: shell/dapo_7b_math_megatron_colocate.sh beside the page's code,
    also for 2 nodes of 8. The page does not tell the length of responses."""
    return PublishedRun(
        name,
        VERL,
        "qwen2.5-7b",
        "h20",
        total_length=None,
        longest=8192,
        groups=512,
        n=16,
        mini_batches=16,
        tp=2,
        pp=2,
        ep=1,
        recompute=0.0,
        server_tp=2,
        num_scores=1,
        **facts,
    )


def _nodes(trainer: int, servers: int) -> dict[str, Any]:
    """Return the GPUs of a run with separate GPUs for trainer and servers: one step off-policy."""
    return {"trainer_gpus": trainer, "server_gpus": servers, "is_colocated": False}


def _colocated(gpus: int) -> dict[str, Any]:
    """Return the GPUs of a run that samples and trains on the same ones in turns."""
    return {"trainer_gpus": gpus, "server_gpus": gpus, "is_colocated": True}


_V04: dict[str, Any] = {"source": NEMO_04}
_GB200: dict[str, Any] = {"hardware": "gb200", "gpus_per_node": 4}
_NVL72: dict[str, Any] = {"hardware": "gb200", "gpus_per_node": 72}
RUNS = (
    _llama("Llama 3.1 8B, 8 + 8 H100", 1123, 64.8, **_nodes(8, 8)),
    _llama("Llama 3.1 8B, 8 + 8 H100, v0.4", 1129, 74.6, pp=2, **_V04, **_nodes(8, 8)),
    _qwen("Qwen3 32B, 32 + 32 H100", 3252, 200, **_nodes(32, 32)),
    _qwen("Qwen3 32B, 32 + 32 H100, v0.4", 3207, 215, **_V04, **_nodes(32, 32)),
    _moe("Qwen3 30B-A3B, 16 + 16 H100", 3201, 154, pp=2, **_nodes(16, 16)),
    _moe("Qwen3 30B-A3B, 16 + 16 H100, v0.4", 3158, 244, pp=2, **_V04, **_nodes(16, 16)),
    _large_moe("Qwen3 235B-A22B, 128 + 128 H100, v0.6", 5721, 231, source=NEMO_06, **_nodes(128, 128)),
    _large_moe("Qwen3 235B-A22B, 128 + 128 H100, v0.4", 5691, 241, **_V04, **_nodes(128, 128)),
    _llama("Llama 3.1 8B, 4 + 4 GB200", 1107, 71.1, **_GB200, **_nodes(4, 4)),
    _qwen("Qwen3 32B, 16 + 16 GB200", 3258, 210, tp=2, pp=1, server_tp=1, **_GB200, **_nodes(16, 16)),
    _moe("Qwen3 30B-A3B, 16 + 16 GB200", 3204, 136, ep=16, server_tp=1, **_NVL72, **_nodes(16, 16)),
    _llama("Llama 3.1 8B, 16 H100", 1019, 92.8, pp=2, **_colocated(16)),
    _qwen("Qwen3 32B, 32 H100", 3251, 376, **_colocated(32)),
    _moe("Qwen3 30B-A3B, 32 H100", 3196, 198, **_colocated(32)),
    _verl(
        "Qwen2.5-Math 7B, 16 H20",
        published={"step": 699, "sampling": 162, "score": 119, "update": 344},
        **_colocated(16),
    ),
    _verl("Qwen2.5-Math 7B, 12 + 4 H20", published={"step": 566, "score": 120, "update": 347}, **_nodes(12, 4)),
)


def _phase_times_of(run: PublishedRun) -> tuple[PhaseTimes, Lengths]:
    """Return the phase times of a published run's step, and the lengths of its responses."""
    if run.total_length is None:
        return _phase_times_of(replace(run, total_length=_length_that_scores(run)))
    spec = model_spec(MODEL_SHAPES[run.model])
    hardware = HARDWARE[run.hardware]
    efficiency = Efficiency()
    responses = Lengths.with_mean(run.total_length - PROMPT, SIGMA, run.longest)
    sizes = ParallelSizes(run.tp, run.pp, None, run.trainer_gpus, run.ep)
    layout = TrainerLayout(sizes, run.gpus_per_node, run.tp > 1, run.recompute, run.max_tokens)
    work = TrainingWork(run.groups * run.n, responses, PROMPT, run.mini_batches)
    training = training_time(spec, layout, work, hardware, efficiency)
    server = server_speed(spec, ServerLayout(run.server_tp, SLOTS), responses, PROMPT, hardware, efficiency)
    parts = PhaseTimes(
        server=server,
        num_servers=run.server_gpus // run.server_tp,
        server_tp=run.server_tp,
        training=training,
        score=training.score,
        reference=training.score * (run.num_scores - 1),
        critic=0.0,
        hand_over=0.0,
        push=push_s(spec, BUCKET_MB, hardware.network_bandwidth * efficiency.link),
        prefill_s=0.0,  # they keep their caches, or have no request in flight, when weights come
    )
    return parts, responses


def _length_that_scores(run: PublishedRun) -> float:
    """Return the mean length that gives a pass for log-probs its published time.

    By bisection.
    """
    low, high = PROMPT + 1.0, PROMPT + 0.99 * run.longest
    while high - low > 1:
        middle = (low + high) / 2
        parts, _ = _phase_times_of(replace(run, total_length=middle))
        low, high = (middle, high) if parts.score < run.published["score"] else (low, middle)
    return low


def planned(run: PublishedRun) -> dict[str, float]:
    """Return the estimate of a published run, by part, in seconds."""
    parts, responses = _phase_times_of(run)
    if run.is_colocated:
        recipe = Recipe(run.groups, run.groups, run.n, max_staleness=0, num_steps=2, warm_up=1)
    else:
        recipe = Recipe(run.groups, run.groups, run.n, max_staleness=1, num_steps=MEASURED_STEPS, warm_up=3)
    step = step_time(parts, recipe, responses, acceptance=1.0)
    return {"step": step.step, "sampling": step.sampling, "score": parts.score, "update": parts.training.update}
