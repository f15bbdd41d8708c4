"""The rungs, from the bottom: each is a function that runs programs and has their files judged."""

import json
from collections.abc import Sequence
from operator import attrgetter

from launch.acceptance import verdicts
from launch.acceptance.rung import Attempt, Inputs, Red, Rung, RungVerdict
from launch.acceptance.server_kills import KillAsleep, ServerKills
from launch.acceptance.sizes import MIN_GPU_BANDWIDTH, SYNTHETIC
from launch.preflight.machine import REPOSITORY
from megatron_dapo.checkpointing.folders import newest_first
from megatron_dapo.common.exit_codes import USER_ERROR_EXIT_CODE
from megatron_dapo.config.schema.config import Config

DEMO = ("--config", str(REPOSITORY / "configs" / "demo.yaml"))
MODEL = REPOSITORY / "examples" / "arithmetic" / "base"
NUM_STEPS = 4
# of trainer and servers on the same GPUs; in the last but one all servers die asleep
NUM_TURNS, NUM_GPU_TURNS = 6, 22
_ALL_TENSORS = 10_000
_ENDLESS = 10_000  # steps of a run ended as soon as it has proved its point
_KILLED_AFTER = 1  # its checkpoint is whole: later steps are trained again
# small enough for two cores, large enough for every rank to have samples
_SMALL = (
    f"actor_rollout_ref.model.path={MODEL}",
    f"trainer.total_training_steps={NUM_STEPS}",
    "trainer.logger=[jsonl]",
    "data.train_batch_size=4",
    "data.gen_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
    # of two optimizer steps: in the second the ratio is not 1
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
)
# the demo's are for a warm machine: GPUs compile kernels and capture graphs first, so there the
# program's own
_TIMEOUTS = (
    "actor_rollout_ref.actor.megatron.timeout_s",
    "actor_rollout_ref.rollout.request_timeout_s",
    "actor_rollout_ref.rollout.step_timeout_s",
    "actor_rollout_ref.rollout.server.startup_timeout_s",
    "weight_sync.timeout_s",
)
# If the ratio moves as far as on the CPU, rounding to bfloat16 decides the clipping of a token with
# most of the gradient's norm (measured: the norm doubled).
_GPU_LEARNING_RATE = "actor_rollout_ref.actor.optim.lr=1e-5"
_HEAD, _LOSS = "ours fused,ours composable", "ours (c)"


def _environment(attempt: Attempt) -> RungVerdict:
    file = attempt.inputs.folder / "environment.json"
    attempt.module("launch.acceptance.environment", str(file))
    return verdicts.environment(json.loads(file.read_text()), attempt.inputs.sizes.num_gpus)


def _node(attempt: Attempt) -> RungVerdict:
    inputs = attempt.inputs
    file = inputs.folder / "preflight.json"
    gb_s = inputs.min_bandwidth
    if gb_s is None and inputs.sizes.num_gpus:
        gb_s = MIN_GPU_BANDWIDTH
    floor = [] if gb_s is None else ["--min-bandwidth", f"{gb_s:g}"]
    attempt.module(
        "launch.preflight",
        *(*DEMO, "--report", str(file), *floor),
        *_small_run(inputs, "layout", SYNTHETIC, *inputs.sizes.whole.overrides()),
    )
    return verdicts.node(json.loads(file.read_text()))


def _kernels(attempt: Attempt) -> RungVerdict:
    quick = [] if attempt.inputs.sizes.num_gpus else ["--quick"]
    contents = []
    for name, providers in (("bench_head", _HEAD), ("bench_loss", _LOSS)):
        file = attempt.inputs.folder / f"{name}.json"
        attempt.module(f"benchmarks.{name}", "--providers", providers, "--json", str(file), *quick)
        contents.append(json.loads(file.read_text()))
    return verdicts.kernels(*contents)


def _gpu_tests(attempt: Attempt) -> RungVerdict:
    tests, file = REPOSITORY / "tests/gpu", attempt.inputs.folder / "gpu_tests.xml"
    attempt.module("pytest", "-q", "-c", str(tests / "pytest.ini"), f"--junitxml={file}", str(tests))
    return verdicts.gpu_tests(file)


def _converters(attempt: Attempt) -> RungVerdict:
    folder = attempt.inputs.folder
    megatron, back = folder / "megatron", folder / "back"
    attempt.module("checkpoints_tools.hf_to_megatron", "--hf-model", str(MODEL), "--output", str(megatron))
    attempt.module("checkpoints_tools.megatron_to_hf", "--checkpoint", str(megatron), "--output", str(back))
    return verdicts.round_trip(MODEL, back)


def _layout(attempt: Attempt) -> RungVerdict:
    inputs = attempt.inputs
    whole = inputs.sizes.whole
    lines = []
    for name, layout in (("layout", whole), ("one_process", type(whole)())):
        attempt.module("launch.local", *DEMO, *_small_run(inputs, name, *_synthetic(inputs), *layout.overrides()))
        lines.append(verdicts.records(inputs.run(name).metrics, NUM_STEPS))
    verdict = verdicts.layout(lines[0], lines[1], inputs.sizes.num_gpus > 0)
    return RungVerdict(f"{whole} and one process: {verdict.text}", verdict.numbers)


def _servers(attempt: Attempt) -> RungVerdict:
    inputs = attempt.inputs
    sizes = inputs.sizes
    attempt.module("launch.local", *DEMO, *_small_run(inputs, "servers", *_with_servers(attempt)))
    lines = verdicts.records(inputs.run("servers").metrics, NUM_STEPS)
    return verdicts.servers(lines, sizes.num_servers, sizes.num_gpus > 0)


def _shared_gpus(attempt: Attempt) -> RungVerdict:
    inputs = attempt.inputs
    sizes = inputs.sizes
    keys = (*_problems(attempt), f"weight_sync.verify_num_tensors={_ALL_TENSORS}", *sizes.sharing())
    num_turns = NUM_GPU_TURNS if sizes.num_gpus else NUM_TURNS
    run = inputs.run("shared_gpus")
    command = (*DEMO, *_small_run(inputs, run.path.name, *keys, f"trainer.total_training_steps={num_turns}"))
    if sizes.num_gpus:  # on a CPU it means nothing; the same command without it is accepted below
        segments = "PYTORCH_ALLOC_CONF=expandable_segments:True"
        attempt.module("launch.local", "--dry-run", *command, setting=segments, code=USER_ERROR_EXIT_CODE)
    kill = KillAsleep(run, attempt.log, num_turns - 2)
    attempt.module("launch.local", *command, meanwhile=kill.look)
    lines = verdicts.records(run.metrics, num_turns)
    return verdicts.shared_gpus(lines, sizes.num_sharing, sizes.resumed.num_ranks, sizes.num_gpus > 0)


def _lost_servers(attempt: Attempt) -> RungVerdict:
    inputs = attempt.inputs
    sizes = inputs.sizes
    run = inputs.run("lost_servers")
    kills = ServerKills(run, attempt.log, sizes.num_servers, num_groups=sizes.beside_servers.pp)
    keys = (*_with_servers(attempt), f"trainer.total_training_steps={_ENDLESS}", "trainer.save_interval=-1")
    try:
        attempt.module_killed("launch.local", *DEMO, *_small_run(inputs, run.path.name, *keys), when=kills.are_over)
    except Red as red:
        raise Red(f"{red}{kills.missed()}") from None
    lines = verdicts.records(run.metrics, None)
    log, num_kills = run.log("trainer-rank-0"), len(kills.killed) - 1
    return verdicts.lost_servers(lines, log, kills.in_push, num_kills, kills.away_s, sizes.num_gpus > 0)


def _resume(attempt: Attempt) -> RungVerdict:
    inputs = attempt.inputs
    keys = (*_synthetic(inputs), "trainer.save_interval=1", *inputs.sizes.resumed.overrides())
    killed = inputs.run("killed")

    def is_saved() -> bool:
        return len(newest_first(killed.checkpoints)) >= _KILLED_AFTER

    attempt.module("launch.local", *DEMO, *_small_run(inputs, "whole", *keys))
    attempt.module_killed("launch.local", *DEMO, *_small_run(inputs, "killed", *keys), when=is_saved)
    saved = verdicts.saved_before_the_kill(killed.checkpoints, NUM_STEPS)
    attempt.module("launch.local", *DEMO, *_small_run(inputs, "killed", "trainer.resume=required", *keys))
    verdicts.resumed_after(killed.log("checkpoints"), saved)
    after, whole = (verdicts.records(run.metrics, NUM_STEPS) for run in (killed, inputs.run("whole")))
    return verdicts.resumed(after, whole, saved, inputs.sizes.num_gpus > 0)


def _throughput(attempt: Attempt) -> RungVerdict:
    inputs = attempt.inputs
    if not inputs.recipe:  # without servers this run exists already
        lines = verdicts.records(inputs.run("layout").metrics, NUM_STEPS)
        return verdicts.throughput(lines, "the demo's model")
    run = inputs.run("recipe")
    keys = (
        f"trainer.total_training_steps={NUM_STEPS}",
        "trainer.logger=[jsonl]",
        "trainer.save_interval=-1",
    )
    attempt.module("launch.local", *inputs.recipe, *keys, f"trainer.run_dir={run.path}")
    return verdicts.throughput(verdicts.records(run.metrics, NUM_STEPS), inputs.recipe[1])


def _with_servers(attempt: Attempt) -> Sequence[str]:
    """Make the problems, and return the keys of a run on them with servers beside it."""
    sizes = attempt.inputs.sizes
    return (*_problems(attempt), *sizes.beside_servers.overrides(), *sizes.servers())


def _problems(attempt: Attempt) -> Sequence[str]:
    """Make the problems, and return the keys of a run on them with weights verified to the bit."""
    data = attempt.inputs.folder / "data"
    attempt.module("examples.arithmetic.problems", str(data))
    return (f"data.train_files=[{data / 'train.jsonl'}]", "weight_sync.verify=true")


def _small_run(inputs: Inputs, name: str, *more: str) -> Sequence[str]:
    timeouts = _default_timeouts() if inputs.sizes.num_gpus else ()
    return (*_SMALL, *timeouts, f"trainer.run_dir={inputs.run(name).path}", *more)


def _synthetic(inputs: Inputs) -> Sequence[str]:
    return (SYNTHETIC, _GPU_LEARNING_RATE) if inputs.sizes.num_gpus else (SYNTHETIC,)


def _default_timeouts() -> Sequence[str]:
    defaults = Config()
    return [f"{key}={attrgetter(key)(defaults):g}" for key in _TIMEOUTS]


def _no_gpus(inputs: Inputs) -> str | None:
    return None if inputs.sizes.num_gpus else "there is no GPU"


def _one_gpu(inputs: Inputs) -> str | None:
    return "there is only one GPU; tests/gpu had two ranks share it" if inputs.sizes.num_gpus == 1 else None


def _one_server(inputs: Inputs) -> str | None:
    return None if inputs.sizes.num_servers > 1 else "there is only one server"


def _no_run(inputs: Inputs) -> str | None:
    has_run = inputs.recipe or inputs.run("layout").metrics.exists()
    return None if has_run else "neither --config nor the rung `layout` gives a run to measure"


LADDER = (
    Rung("environment", "Do all packages import, and does every GPU compute?", 600, _environment),
    Rung("node", "Is the machine fit, and how fast do its ranks add?", 600, _node),
    Rung("kernels", "Do the fused kernels agree with float64?", 1200, _kernels),
    Rung("gpu_tests", "Do the tests of kernels and layers pass on a GPU?", 3600, _gpu_tests, needs=_no_gpus),
    Rung("converters", "Does a model come back from Megatron's format byte for byte?", 600, _converters),
    Rung("layout", "Do a parallel layout and one process compute the same?", 900, _layout, needs=_one_gpu),
    Rung(
        "servers",
        "Do servers start, take the weights, and agree with the trainer in training?",
        1800,
        _servers,
        needs=_one_gpu,
    ),
    Rung("shared_gpus", "Do trainer and servers take turns on the same GPUs?", 1800, _shared_gpus),
    Rung(
        "lost_servers", "Does a run survive a server's death, also in a push?", 2400, _lost_servers, needs=_one_server
    ),
    Rung("resume", "Does a killed run resume with the same numbers?", 1200, _resume),
    Rung("throughput", "How fast does the trainer train?", 3600, _throughput, needs=_no_run),
)
