"""The ladder of acceptance: verdicts follow from exit codes and files;
the first red rung is the last."""

import json
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import launch.acceptance.__main__ as command
from launch import local
from launch.acceptance.__main__ import climb, main
from launch.acceptance.ladder import LADDER
from launch.acceptance.report import GREEN, NOT_REACHED, RED, SKIPPED
from launch.acceptance.rung import Attempt, Inputs, Red, Rung, RungVerdict
from launch.acceptance.server_kills import KillAsleep, ServerKills, was_left_out
from launch.acceptance.sizes import Layout, Sizes, measured, sizes_of
from launch.preflight.machine import REPOSITORY
from launch.preflight.nodes import NodeFinding
from megatron_dapo.common import nvidia_driver
from megatron_dapo.common.signals import StopSignals
from megatron_dapo.config.derived import num_optimizer_steps_per_rollout_step
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.config import Config
from megatron_dapo.storage.lease import Holder, LeaseFolder

pytestmark = pytest.mark.unit

SIZES = Sizes(0, Layout(), Layout(), Layout(), num_servers=1)


def green(attempt: Attempt) -> RungVerdict:
    return RungVerdict("well", {"speed": 7.0, "kind": "a|b"})


def red(attempt: Attempt) -> RungVerdict:
    attempt.log.parent.mkdir(exist_ok=True)
    attempt.log.write_text("the cause\n")
    attempt.commands.append("python -m something")
    raise Red("it broke")


def rung(name: str, climb=green, limit_s: float = 30.0, **more) -> Rung:
    return Rung(name, f"Is {name} well?", limit_s, climb, **more)


@pytest.fixture
def inputs(tmp_path) -> Inputs:
    return Inputs(SIZES, tmp_path)


def report(inputs: Inputs) -> dict:
    return json.loads((inputs.folder / "report.json").read_text())


def test_the_first_red_rung_is_the_last_and_the_report_names_its_log(inputs, capsys):
    results = climb([rung("a"), rung("b", red), rung("c")], inputs)
    assert [result.state for result in results] == [GREEN, RED, NOT_REACHED]
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [["green", "a"], ["red", "b"]]
    content = report(inputs)
    assert not content["is_accepted"] and content["summary"].startswith("RED at b after 0 s: it broke; its log is ")
    assert [each["state"] for each in content["rungs"]] == [GREEN, RED, NOT_REACHED]
    assert content["rungs"][0]["numbers"] == {"speed": 7.0, "kind": "a|b"}
    page = (inputs.folder / "report.md").read_text()
    assert "    the cause\n" in page and "    python -m something\n" in page and "| c | not reached |" in page


def test_a_rung_that_this_machine_cannot_have_is_skipped_with_its_reason(inputs):
    results = climb([rung("a", red, needs=lambda inputs: "there is no GPU"), rung("b")], inputs)
    assert [(result.state, result.text) for result in results] == [(SKIPPED, "there is no GPU"), (GREEN, "well")]
    assert report(inputs)["is_accepted"] and report(inputs)["summary"] == "ACCEPTED in 0 s; skipped: a"


def test_a_climb_that_starts_higher_up_accepts_nothing(inputs):
    results = climb([rung("a", red), rung("b"), rung("c")], inputs, start="b")
    assert [result.state for result in results] == [NOT_REACHED, GREEN, GREEN]
    assert not report(inputs)["is_accepted"]
    assert report(inputs)["summary"] == "GREEN from b on in 0 s, not a whole acceptance: without a"


@pytest.mark.parametrize(
    ("start", "code", "verdict"), [("a", 0, "ACCEPTED"), ("b", 0, "GREEN from b"), ("c", 1, "RED")]
)
def test_the_exit_code_is_of_the_rungs_from_the_first_on(start, code, verdict, monkeypatch, capsys, tmp_path):
    ladder = (rung("a"), rung("b"), rung("c", red if start == "c" else green))
    monkeypatch.setattr(command, "LADDER", ladder)
    assert main(["--start", start, "--output", str(tmp_path / "new")]) == code
    assert capsys.readouterr().out.splitlines()[-2].startswith(verdict)


def test_a_report_is_there_after_every_rung(inputs):
    def look(attempt: Attempt) -> RungVerdict:
        assert [each["state"] for each in report(inputs)["rungs"]] == [GREEN, NOT_REACHED]
        assert not report(inputs)["is_accepted"]
        assert report(inputs)["summary"] == "NOT ACCEPTED after 0 s: green so far, without b"
        return RungVerdict("")

    assert climb([rung("a"), rung("b", look)], inputs)[1].state == GREEN


@pytest.mark.parametrize("error", [KeyError("actor/loss"), TypeError("must be real number"), RuntimeError("no idea")])
def test_a_rung_that_cannot_be_judged_is_red_and_its_log_has_the_traceback(error, inputs):
    def judge(attempt: Attempt) -> RungVerdict:
        raise error

    (result,) = climb([rung("a", judge)], inputs)
    assert result.state == RED and result.text.startswith(f"it could not be judged ({type(error).__name__}: ")
    assert "Traceback" in Path(result.log).read_text() and report(inputs)["summary"].startswith("RED at a ")


@pytest.fixture
def modules(tmp_path, monkeypatch) -> Path:
    """A folder with modules that can be the rungs' programs."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_a_program_that_fails_makes_its_rung_red_and_its_output_is_kept(inputs, modules):
    (modules / "failing.py").write_text("import sys; print('out', sys.argv[1]); sys.exit(3)")
    (result,) = climb([rung("a", lambda attempt: attempt.module("failing", "of it"))], inputs)
    assert result.state == RED and result.text.startswith("failing ended with exit code 3; its log is ")
    assert Path(result.log).read_text() == "$ python -m failing 'of it'\nout of it\n"


def test_a_program_that_does_not_end_is_ended_at_the_rungs_limit(inputs, modules):
    (modules / "sleeping.py").write_text("import time; time.sleep(600)")
    (result,) = climb([rung("a", lambda attempt: attempt.module("sleeping"), limit_s=0.2)], inputs)
    assert result.text.startswith("sleeping had not ended after the rung's 0.2 s")


ASKING = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(600)"


def test_a_signal_ends_the_program_and_the_report_names_the_rung(inputs, modules):
    (modules / "asking.py").write_text(ASKING)
    with StopSignals([signal.SIGTERM]) as stop:
        results = climb([rung("a"), rung("b", lambda attempt: attempt.module("asking")), rung("c")], inputs, stop=stop)
    assert [result.state for result in results] == [GREEN, RED, NOT_REACHED]
    words = "asking was ended, since the ladder was asked to stop by SIGTERM"
    assert report(inputs)["summary"].startswith("RED at b") and words in report(inputs)["summary"]


def test_the_exit_code_tells_of_the_signal(monkeypatch, tmp_path, modules):
    (modules / "asking.py").write_text(ASKING)
    monkeypatch.setattr(command, "LADDER", (rung("a", lambda attempt: attempt.module("asking")),))
    assert main(["--output", str(tmp_path / "new")]) == 143


def test_a_program_and_its_children_are_killed_at_the_requested_moment(inputs, modules):
    started = modules / "started"
    child = f"open({str(started)!r}, 'w').close(); import time; time.sleep(600)"
    (modules / "parent.py").write_text(
        f"import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        f"open({str(modules / 'pid')!r}, 'w').write(str(child.pid))\nchild.wait()\nprint('it goes on')\n"
    )
    attempt = Attempt(rung("a"), inputs)
    attempt.module_killed("parent", when=started.exists)
    status = Path(f"/proc/{(modules / 'pid').read_text()}/status")
    assert not status.exists() or "State:\tZ" in status.read_text()
    assert "it goes on" not in attempt.log.read_text()


def test_a_program_that_ends_before_it_is_killed_shows_nothing(inputs, modules):
    (modules / "short.py").write_text("")
    with pytest.raises(Red, match="short ended with exit code 0 before it could be killed"):
        Attempt(rung("a"), inputs).module_killed("short", when=lambda: False)


def test_a_program_must_refuse_a_setting_that_it_must_not_have(inputs, modules):
    (modules / "refusing.py").write_text("import os, sys; sys.exit({'red': 2}.get(os.environ['COLOUR'], 0))")
    attempt = Attempt(rung("a"), inputs)
    attempt.module("refusing", "--it", setting="COLOUR=red", code=2)
    assert attempt.commands == ["COLOUR=red python -m refusing --it"]
    with pytest.raises(Red, match="refusing ended with exit code 0, not 2, with COLOUR=blue"):
        attempt.module("refusing", setting="COLOUR=blue", code=2)


def test_something_is_done_while_a_program_runs(inputs, modules):
    (modules / "waiting.py").write_text(
        f"import pathlib, time\nwhile not pathlib.Path({str(modules / 'go')!r}).exists(): time.sleep(0.01)"
    )
    Attempt(rung("a"), inputs).module("waiting", meanwhile=(modules / "go").touch)


JOINED = "init custom process group: rank=2\n"
LEFT_OUT = "weight sync: left out http://h:1; the push is repeated. send: ConnectionError\n"


class LostServers:
    """Two processes that stand for the servers of a run of two stages, and the run's files."""

    def __init__(self, inputs: Inputs) -> None:
        self.run, self.log = inputs.run("lost_servers"), inputs.folder / "program.log"
        self.run.logs.mkdir(parents=True)
        self.kills = ServerKills(self.run, self.log, num_servers=2, num_groups=2)
        self.servers: dict[int, subprocess.Popen] = {}
        self.steps: list[int] = []

    def start(self, number: int) -> None:
        self.servers[number] = subprocess.Popen(["sleep", "600"])
        with self.log.open("a") as log:
            log.write(f"server-{number} starts at http://h:{number} (pid {self.servers[number].pid}, log x)\n")

    def join(self, times: int) -> None:
        with self.run.log("server-1").open("a") as log:
            log.write(JOINED * times)

    def tell(self, line: str) -> None:
        with self.run.log("trainer-rank-0").open("a") as log:
            log.write(line)

    def step(self, num_servers: int) -> None:
        self.steps.append(num_servers)
        lines = [{"step": step, "weight_sync/num_servers": number} for step, number in enumerate(self.steps, 1)]
        self.run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def ask(self) -> list[bool]:
        """Have the kills done that are due; return which servers live."""
        assert not self.kills.are_over()
        for number in {int(each.url[-1]) for each in self.kills.killed if each.pid in self.pids()}:
            self.servers[number].wait(10)
        return [server.poll() is None for _, server in sorted(self.servers.items())]

    def pids(self) -> list[int]:
        return [server.pid for server in self.servers.values()]

    def urls(self) -> list[str]:
        return [each.url for each in self.kills.killed]


@pytest.fixture
def lost(inputs) -> Iterator[LostServers]:
    lost = LostServers(inputs)
    yield lost
    for server in lost.servers.values():
        server.kill()
        server.wait(10)


def test_servers_are_killed_in_their_first_push_and_between_two_when_the_first_is_back(lost):
    assert lost.ask() == []
    lost.start(0)
    lost.start(1)
    lost.join(1)
    assert lost.ask() == [True, True]  # it has joined one of two groups
    lost.join(1)
    assert lost.ask() == [True, False] and lost.urls() == ["http://h:1"]
    lost.tell(LEFT_OUT)
    for number in (1, 1):
        lost.step(number)
        assert lost.ask() == [True, False]
    lost.step(2)
    assert lost.ask() == [False, False] and lost.urls() == ["http://h:1", "http://h:0"]
    for number in (2, 1):  # the first push had begun before
        lost.step(number)
        lost.ask()
    lost.step(2)
    assert lost.kills.are_over() and len(lost.kills.away_s) == 2 and lost.kills.in_push == lost.kills.killed[0]


def test_a_server_that_outlived_its_push_is_killed_again_when_it_is_back_until_one_left_it_out(lost):
    lost.start(0)
    lost.start(1)
    lost.join(2)
    assert lost.ask() == [True, False]
    lost.step(2)  # the kill came after the push
    lost.tell(LEFT_OUT.replace("sync: left out http://h:1;", "sync: pause: left out http://h:1,"))
    lost.step(1)
    assert lost.ask() == [True, False] and lost.kills.missed().startswith("; server-1 was killed 1 times")
    lost.start(1)
    assert lost.ask() == [True, True]
    lost.join(1)
    assert lost.ask() == [True, True]  # joins of its former life do not count
    lost.join(1)
    assert lost.ask() == [True, False] and lost.urls() == ["http://h:1"] * 2
    lost.tell(LEFT_OUT)
    lost.step(1)
    assert lost.ask() == [True, False] and lost.kills.in_push == lost.kills.killed[1] and not lost.kills.missed()
    lost.start(1)
    lost.join(2)
    assert lost.ask() == [True, True]  # from here on it is left in peace
    lost.step(2)
    assert lost.ask() == [False, True] and lost.urls()[2:] == ["http://h:0"]


def test_all_servers_are_killed_asleep_after_the_steps(lost):
    """Nothing dies while servers or memory are on the way."""
    lease = LeaseFolder(lost.run.lease)
    kill = KillAsleep(lost.run, lost.log, num_steps=2)
    lost.start(0)
    lost.start(1)
    for num_steps, holder in ((1, Holder.TRAINER), (2, Holder.MOVING), (2, Holder.SERVERS), (2, Holder.TRAINER)):
        assert not kill.are_killed
        records = [{"step": 0, "val/accuracy": 1}, *({"step": 1 + i, "actor/loss": 0.5} for i in range(num_steps))]
        lost.run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
        lease.write(holder)
        kill.look()
    assert kill.are_killed
    assert [server.wait(10) for server in lost.servers.values()] == 2 * [-signal.SIGKILL]
    lost.start(0)
    kill.look()
    assert lost.servers[0].poll() is None, "once"


def test_a_server_died_in_a_push_only_if_that_was_repeated_without_it(tmp_path):
    log = tmp_path / "trainer-rank-0.log"
    assert not was_left_out(log, "http://h:1")
    for line, was in (
        (LEFT_OUT, True),
        (LEFT_OUT.replace("http://h:1;", "http://h:1, http://h:2;"), True),
        (LEFT_OUT.replace("http://h:1;", "http://h:2, http://h:1;"), True),
        (LEFT_OUT.replace("h:1", "h:12"), False),
        (LEFT_OUT.replace("h:1", "h:2") + "the server http://h:1, of h; the push is repeated\n", False),
        (LEFT_OUT.replace("sync: left", "sync: commit: left"), False),
        (LEFT_OUT.replace("repeated", "over, without a server"), False),
    ):
        log.write_text(line)
        assert was_left_out(log, "http://h:1") == was, line


def test_the_sizes_fit_the_gpus():
    for num_gpus in (1, 2, 3, 4, 8, 16):
        sizes = sizes_of(num_gpus)
        assert sizes.num_sharing * sizes.server_tp == sizes.resumed.num_ranks
        if num_gpus == 1:
            assert sizes.whole == sizes.resumed == Layout()
            continue
        beside = sizes.beside_servers.num_ranks + sizes.num_servers * sizes.server_tp
        assert max(sizes.whole.num_ranks, sizes.resumed.num_ranks, beside) <= sizes.num_gpus <= num_gpus
    for sizes in (sizes_of(0), sizes_of(8)):
        assert (sizes.whole, sizes.num_servers) == (Layout(2, 2, 2), 2)


def test_one_gpu_climbs_all_rungs_but_those_that_need_a_second_one(tmp_path):
    inputs = Inputs(sizes_of(1), tmp_path)
    left_out = {rung.name for rung in LADDER if rung.needs(inputs) and rung.name != "throughput"}
    assert left_out == {"layout", "servers", "lost_servers"}


class RecordingAttempt:
    """Stands for an Attempt: remembers the arguments of each program,
    and writes the programs' files."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.log = inputs.folder / "a.log"
        self.arguments: list[tuple[str, ...]] = []

    def module(self, name: str, *arguments: str, meanwhile=None, setting: str = "", code: int = 0) -> None:
        if setting:
            self.refused = (arguments, setting, code)
            return
        self.arguments.append(arguments)
        if name == "launch.preflight":
            finding = asdict(NodeFinding("n1", "all-reduce", "300 GB/s"))
            (self.inputs.folder / "preflight.json").write_text(json.dumps([finding]))

    def module_killed(self, name: str, *arguments: str, when) -> None:
        self.arguments.append(arguments)


def recorded(name: str, inputs: Inputs) -> RecordingAttempt:
    """Climb a rung, which gets no further than its first file."""
    (rung,) = [rung for rung in LADDER if rung.name == name]
    attempt = RecordingAttempt(inputs)
    try:
        rung.climb(attempt)
    except (OSError, Red):
        assert name != "node"
    return attempt


def climbed(name: str, inputs: Inputs) -> list[tuple[str, ...]]:
    """Return the arguments of the programs of a rung."""
    return recorded(name, inputs).arguments


def test_the_command_with_expandable_segments_is_refused_where_there_is_a_gpu(inputs, tmp_path, monkeypatch, capsys):
    """It ends as the rung wants it, on a machine with a driver; the rung of a CPU has none."""
    assert not hasattr(recorded("shared_gpus", inputs), "refused")
    arguments, setting, code = recorded("shared_gpus", replace(inputs, sizes=sizes_of(1))).refused
    (tmp_path / "version").touch()
    monkeypatch.setattr(nvidia_driver, "VERSION_FILE", tmp_path / "version")
    monkeypatch.setenv(*setting.split("="))
    assert local.main([*arguments]) == code == 2
    assert f"{setting.replace('=', ' is ')}, but with" in capsys.readouterr().err


def test_gpus_of_one_node_must_add_faster_than_they_could_without_nvlink(inputs):
    """PCIe 5.0 x16 carries 64 GB/s in a direction; an A100's NVLink 300."""
    on_gpus = replace(inputs, sizes=sizes_of(8))

    def floor(inputs: Inputs) -> float | None:
        (arguments,) = climbed("node", inputs)
        place = arguments.index("--min-bandwidth") if "--min-bandwidth" in arguments else None
        return None if place is None else float(arguments[place + 1])

    assert floor(inputs) is None and 2 * 64 < floor(on_gpus) < 300
    assert floor(replace(on_gpus, min_bandwidth=5.0)) == 5.0 and floor(replace(on_gpus, min_bandwidth=0.0)) == 0.0


def config_of(arguments: tuple[str, ...]) -> Config:
    place = arguments.index("--config")
    assert arguments[:place] == ()
    return load_config(arguments[place + 1], arguments[place + 2 :])


def test_the_compared_runs_take_two_optimizer_steps_so_that_old_log_probs_count(inputs):
    for name in ("layout", "resume"):
        assert num_optimizer_steps_per_rollout_step(config_of(climbed(name, inputs)[0])) == 2


@pytest.mark.parametrize(("train", "mini", "prompts"), [(512, 32, 64), (480, 48, 96), (512, 512, 512), (16, 8, 16)])
def test_a_measured_step_has_64_prompts_or_the_whole_mini_batches_nearest_to_that(train, mini, prompts):
    sizes = [f"data.train_batch_size={train}", f"actor_rollout_ref.actor.ppo_mini_batch_size={mini}"]
    small = load_config(None, [*sizes, *measured(load_config(None, sizes))])
    assert (small.data.train_batch_size, small.data.gen_batch_size) == (prompts, None) and small.trainer.synthetic_batch


def test_the_command_of_the_documentation_measures_a_recipe_that_has_server_nodes(monkeypatch, tmp_path):
    """As docs/acceptance.md has it, but with a model from here,
    cut for fewer ranks and shorter texts."""
    words = (REPOSITORY / "docs" / "acceptance.md").read_text().partition("--config ")[2].partition("\n")[0].split()
    assert words[0] == "configs/dapo_7b.yaml" and words[1].startswith("actor_rollout_ref.model.path=")
    (rung,) = [rung for rung in LADDER if rung.name == "throughput"]
    seen = []

    def look(attempt: Attempt) -> RungVerdict:
        seen.append(attempt.inputs.recipe)
        return green(attempt)

    monkeypatch.setattr(command, "LADDER", (replace(rung, climb=look),))
    here = [
        f"actor_rollout_ref.model.path={REPOSITORY / 'examples' / 'arithmetic' / 'base'}",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
        "actor_rollout_ref.actor.megatron.context_parallel_size=1",
        "actor_rollout_ref.actor.megatron.use_transformer_engine=off",
        "actor_rollout_ref.actor.megatron.recompute_granularity=none",
        "data.max_prompt_length=8",
        "data.max_response_length=40",
        "algorithm.overlong_reward_shaping.buffer_len=10",
    ]
    recipe = str(REPOSITORY / words[0])
    assert main(["--config", recipe, *here, "--output", str(tmp_path / "new")]) == 0
    config = config_of(seen[0])
    assert config.data.train_batch_size == 64 and config.actor_rollout_ref.rollout.server.nnodes == 1


def test_a_machine_with_gpus_is_not_accepted_by_a_torch_that_knows_none(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr(nvidia_driver, "VERSION_FILE", tmp_path)
    monkeypatch.setattr(command, "LADDER", (rung("a"),))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert main(["--output", str(tmp_path / "new")]) == 2
    assert "is built for CPUs only; run make setup PLATFORM=cuda" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["--output", str(tmp_path / "new")]) == 0


def test_without_a_run_to_measure_there_is_no_speed(inputs):
    (rung,) = [rung for rung in LADDER if rung.name == "throughput"]
    assert "neither --config nor the rung `layout`" in rung.needs(inputs)
    assert rung.needs(replace(inputs, recipe=("--config", "my.yaml"))) is None
    inputs.run("layout").path.mkdir(parents=True)
    inputs.run("layout").metrics.touch()
    assert rung.needs(inputs) is None


def test_the_list_has_every_rung_and_starts_nothing(capsys, tmp_path):
    assert main(["--list", "--output", str(tmp_path / "new")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [rung.name for rung in LADDER] and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["trainer.seed=2"], "trainer.seed=2 sets a key of the recipe to measure; name that with --config FILE."),
        (["--output", "FOLDER"], "is not empty; give a new folder"),
        (["--config-name", "dapo_7b"], "actor_rollout_ref.model.path is"),
        (["--config-name", "dapo_7b", "trainer.sed=1"], "nearest known key is trainer.seed"),
    ],
)
def test_a_mistake_is_reported_before_anything_starts(words, sentence, capsys, tmp_path):
    (tmp_path / "file").touch()
    assert main([str(tmp_path) if word == "FOLDER" else word for word in words]) == 2
    assert sentence in capsys.readouterr().err


def test_every_rung_has_a_limit_and_a_name_of_its_own_for_its_log():
    assert len({rung.name for rung in LADDER}) == len(LADDER)
    assert all(rung.limit_s > 0 for rung in LADDER)
