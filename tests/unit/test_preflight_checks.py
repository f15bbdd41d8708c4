"""The preflight's conclusions: the node behind a slow network or a failed request,
a driver's answers.

Also the room that checkpoints need.
"""

import itertools
import json
import os
import socket
import sys
import sysconfig
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest

from launch.preflight import all_reduce, gpus, http, machine
from launch.preflight.nodes import NodeFinding, PreflightError, PreflightNodes
from launch.preflight.report import table
from megatron_dapo.commands.plan.process_plan import process_plan
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.derived import starts_servers
from megatron_dapo.config.loader import load_config
from megatron_dapo.platform.transformer_engine import EngineHere
from tests.helpers import REPOSITORY

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("count", range(2, 18))
def test_in_a_tournament_everybody_meets_everybody_once_and_one_at_a_time(count):
    rounds = list(all_reduce.pairings(count))
    assert len(rounds) == count - 1 + count % 2
    for pairs in rounds:
        met = [node for pair in pairs for node in pair]
        assert len(set(met)) == len(met) == count - count % 2
    assert sorted(pair for pairs in rounds for pair in pairs) == list(itertools.combinations(range(count), 2))


@pytest.mark.parametrize("count", range(3, 18))
def test_a_few_rounds_of_pairs_find_one_node_with_a_bad_network(count):
    rounds = list(all_reduce.pairings(count))[: all_reduce.num_fork_rounds(count) - 1]
    for bad in range(count):
        speeds = {pair: 0.0 if bad in pair else 10.0 for pairs in rounds for pair in pairs}
        assert all_reduce.find_culprits(speeds, floor=5.0) == [bad]


def test_where_the_pairs_are_fast_or_all_slow_nobody_stands_out():
    assert all_reduce.find_culprits({(0, 1): 10.0, (1, 2): 10.0, (0, 2): 10.0}, 5.0) == [0, 1, 2]
    assert all_reduce.find_culprits({(0, 1): 1.0, (1, 2): 1.0, (0, 2): 1.0}, 5.0) == [0, 1, 2]


SERVER = "actor_rollout_ref.rollout.server"
GIVEN, FROM_FILE = "actor_rollout_ref.rollout.server_urls=[http://a:1]", "actor_rollout_ref.rollout.server_urls_file=f"
REPLAY, SERVER_NODE = "trainer.replay=batches", f"{SERVER}.nnodes=1"


@pytest.mark.parametrize(
    ("overrides", "starts"),
    [((), True), ((SERVER_NODE,), True)]
    + [((reason, *node), False) for reason in (GIVEN, FROM_FILE, REPLAY) for node in ((), (SERVER_NODE,))],
)
def test_a_run_starts_servers_unless_they_are_given_or_replaced_by_dumped_batches(overrides, starts):
    assert starts_servers(demo(*overrides)) == starts


@pytest.mark.parametrize(
    ("overrides", "is_told"),
    [((), True), ((GIVEN, SERVER_NODE), False), ((REPLAY, FROM_FILE, SERVER_NODE), False)]
    + [((FROM_FILE, SERVER_NODE), True)],  # as a Slurm job names its own
)
def test_the_plan_tells_the_memory_of_the_servers_that_the_run_starts(overrides, is_told):
    assert ("server: weights" in process_plan(demo(*overrides))) == is_told


@pytest.mark.parametrize(
    ("failed", "blamed"),
    [
        ({(0, 2), (1, 2)}, {2}),  # no trainer reaches server 2
        ({(1, 2), (1, 3)}, {1}),  # only trainer 1 does not
        ({(0, 2), (1, 2), (1, 3)}, {1, 2}),
        (set(), set()),
    ],
)
def test_a_server_that_no_trainer_reaches_is_blamed_and_else_the_trainer(failed, blamed):
    assert http.find_culprits(failed, trainers=[0, 1], servers=[2, 3]) == blamed


def test_one_trainer_that_reaches_none_of_several_servers_is_blamed_itself():
    assert http.find_culprits({(0, 1), (0, 2)}, trainers=[0], servers=[1, 2]) == {0}
    assert http.find_culprits({(0, 1)}, trainers=[0], servers=[1]) == {1}


class Nvml:
    """The driver's library as far as it is asked; a question
    with a missing answer is not supported."""

    class NVMLError(Exception): ...

    class NVMLError_NotSupported(NVMLError): ...

    class NVMLError_NoPermission(NVMLError): ...

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    nvmlClocksThrottleReasonHwThermalSlowdown, nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 64, 128

    def __init__(self, **answers: object) -> None:
        self._answers = answers

    def __getattr__(self, question: str):
        def answer(*_: object) -> object:
            if question not in self._answers:
                raise self.NVMLError_NotSupported
            return self._answers[question]

        return answer


HEALTHY = {
    "nvmlDeviceGetTotalEccErrors": 0,
    "nvmlDeviceGetRemappedRows": (1, 0, 0, 0),
    "nvmlDeviceGetComputeRunningProcesses": [],
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80e9, free=79.4e9),
    "nvmlDeviceGetCurrentClocksThrottleReasons": 4,
}


@pytest.mark.parametrize(
    ("answers", "fault"),
    [
        ({"nvmlDeviceGetTotalEccErrors": 3}, "3 uncorrected memory errors"),
        ({"nvmlDeviceGetRemappedRows": (0, 1, 1, 0)}, "remapped at the next reset"),
        ({"nvmlDeviceGetRemappedRows": (0, 1, 1, 1)}, "could not remap"),
        ({"nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=77)]}, "used by process 77"),
        ({"nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80e9, free=30e9)}, "50 GB in use"),
        ({"nvmlDeviceGetCurrentClocksThrottleReasons": 64}, "temperature"),
        ({"nvmlDeviceGetCurrentClocksThrottleReasons": 128}, "power"),
    ],
)
def test_an_unfit_gpu_is_told_from_a_fit_one(answers, fault):
    faults = list(gpus.faults_of(Nvml(**HEALTHY | answers), None))
    assert len(faults) == 1 and fault in faults[0]
    assert list(gpus.faults_of(Nvml(**HEALTHY), None)) == []
    assert list(gpus.faults_of(Nvml(), None)) == []  # an old GPU, which answers nothing


def test_the_gpus_that_a_node_needs_follow_from_its_role():
    sizes = ["trainer.n_procs_per_node=8", f"{SERVER}.num_servers=8", f"{SERVER}.nnodes=4"]
    sizes.append(f"{SERVER}.tensor_model_parallel_size=4")

    def needed(*more: str) -> list[int]:
        return [gpus.needed(load_config(None, [*sizes, *more]), role) for role in ("trainer", "server", "both")]

    assert needed() == [8, 8, 16]
    assert needed(FROM_FILE) == [8, 8, 8]  # as a Slurm job's server nodes read it
    assert needed(GIVEN)[2] == needed(REPLAY)[2] == 8


def test_the_reward_models_gpus_are_needed_on_its_node():
    def needed(role: str, *more: str, **options: bool) -> int:
        sizes = ["trainer.n_procs_per_node=4", "reward.model.path=m", "reward.model.tensor_model_parallel_size=2"]
        return gpus.needed(load_config(None, [*sizes, *more]), role, **options)

    url = "reward.model.url=http://x:1"  # as a Slurm job's nodes read it
    assert (needed("both"), needed("both", url), needed("both", REPLAY)) == (7, 5, 4)
    assert (needed("server", url), needed("server", url, has_reward_model=True), needed("trainer")) == (1, 3, 4)


def test_a_late_node_is_waited_for_but_not_a_faulty_one():
    def meet(other: Callable[[PreflightNodes], object]) -> list | PreflightError:
        """The knowledge of node 0, the first."""
        first = PreflightNodes(0, "a", ["a", "b"], "127.0.0.1:0", timeout_s=0.05, meeting_timeout_s=60.0)
        learned = []

        def wait() -> None:
            try:
                learned.append(first.meet(0))
            except PreflightError as error:
                learned.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        waiting.join(0.1)  # longer than all other waits may take
        other(PreflightNodes(1, "b", ["a", "b"], f"127.0.0.1:{first.address[1]}", timeout_s=10.0))
        waiting.join(30.0)
        return learned[0]

    assert meet(lambda late: late.meet(1)) == [0, 1]
    assert str(meet(lambda faulty: faulty.stop("b", "broken"))) == "b: broken"


def test_nodes_compare_the_versions_of_the_packages_of_layers_and_optimizer(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", {"transformer-engine": "2.20.2"}.__getitem__)
    monkeypatch.setattr("importlib.metadata.PackageNotFoundError", KeyError)
    versions = machine.versions()
    assert versions["transformer-engine"] == "2.20.2" and versions["apex"] == versions["flash-attn"] == "none"


STAND_IN_TORCH = """
class Sum:
    def __add__(self, other): return self
    def sum(self): return self
    def item(self): return 16
def ones(size, device):
    {body}
    return Sum()
"""


@pytest.mark.parametrize(
    ("body", "driver", "expected"),
    [
        ("pass", "580.65.06", None),
        ("raise RuntimeError('The driver is too old (found version 12040).\\nUpdate')", "550.54.14",
         ["GPU 0: The driver is too old (found version 12040).", "driver 550.54.14", "580 or newer"]),
        ("assert device != 'cuda:1', 'it fell off'", "590.1", ["GPU 1: it fell off", "nvidia-smi"]),
        ("import time; time.sleep(60)", "590.1", ["within 1 s", "take the node out"]),
        ("import os; os._exit(7)", "590.1", ["exit code 7"]),
    ],
)  # fmt: skip
def test_gpus_that_the_driver_counts_and_torch_cannot_use_are_reported(body, driver, expected, tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text(STAND_IN_TORCH.format(body=body))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    fault = gpus.probe(2, driver, timeout_s=1.0 if "sleep" in body else 60.0)
    assert isinstance(fault, EngineHere) if expected is None else all(words in fault for words in expected), fault


def test_a_node_with_a_driver_too_old_for_torch_is_named_in_every_role(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text(STAND_IN_TORCH.format(body="raise RuntimeError('The driver is too old')"))
    nvml = Nvml(**HEALTHY, nvmlInit=None, nvmlDeviceGetHandleByIndex=0, nvmlDeviceGetName="H100")
    nvml.nvmlSystemGetDriverVersion = lambda: "550.54.14"
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    config = load_config(REPOSITORY / "configs" / "dapo_7b.yaml")
    for role in ("trainer", "server"):
        result = gpus.check(config, role)
        assert "driver 550.54.14" in result.found and "580 or newer" in result.problem


def test_gpus_that_slurm_gives_to_a_torch_of_the_cpu_are_a_problem(monkeypatch):
    config = load_config(REPOSITORY / "configs" / "dapo_7b.yaml")
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
    assert gpus.check(config, "trainer").problem is None
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    assert "make setup PLATFORM=cuda" in gpus.check(config, "trainer").problem


def test_a_node_that_compiles_like_triton_passes(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    if gpus.shutil.which("gcc") is None or not headers().is_file():
        pytest.skip("needs gcc and Python's headers")
    result = gpus.compiler(uses_gpus=True)
    assert (result.found, result.problem) == (gpus.shutil.which("gcc"), None)


@pytest.mark.parametrize(
    ("compiler", "expected"),
    [
        (None, "has no C compiler"),
        ("/nowhere/gcc", "cannot run /nowhere/gcc"),
        ("exit 1", "does not compile (exit code 1)"),
        ("echo note >&2; echo cannot find crt1.o >&2; exit 1", "does not compile (cannot find crt1.o)"),
    ],
)
def test_an_unfit_compiler_is_reported_with_the_cure(compiler, expected, tmp_path, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").touch()
    monkeypatch.setattr(gpus.sysconfig, "get_paths", lambda **_: {"include": str(tmp_path / "include")})
    if compiler and compiler.startswith("/"):
        monkeypatch.setenv("CC", compiler)
    elif compiler:
        script(tmp_path / "gcc", compiler)
    problem = gpus.compiler(uses_gpus=True).problem
    assert expected in problem and problem.endswith(".") and "set CC" in problem


def test_missing_headers_are_reported_with_their_package(tmp_path, monkeypatch):
    monkeypatch.setattr(gpus.sysconfig, "get_paths", lambda **_: {"include": str(tmp_path)})
    monkeypatch.setenv("CC", script(tmp_path / "cc", "exit 1"))
    problem = gpus.compiler(uses_gpus=True).problem
    assert f"has no {tmp_path}/Python.h" in problem and "-dev (or -devel)" in problem


@pytest.mark.parametrize("place", ["CUDA_HOME", "CUDA_PATH", "PATH"])
def test_the_cuda_compiler_is_sglangs_and_is_tried(place, tmp_path, monkeypatch):
    """SGLang asks for it in this order, and compiles C++20 with it."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "bin").mkdir()
    nvcc = script(tmp_path / "bin" / "nvcc", f'echo "$@" > {tmp_path}/asked')
    monkeypatch.setenv(place, str(tmp_path if place != "PATH" else tmp_path / "bin"))
    assert (gpus.cuda_compiler().found, gpus.cuda_compiler().problem) == (nvcc, None)
    asked = (tmp_path / "asked").read_text()
    assert "-std=c++20" in asked and f"-L{tmp_path}/lib64 -lcudart" in asked and "probe.cu" in asked


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (None, "has no "),
        ("echo nvcc warning : old >&2; echo fatal error: concepts: no such file >&2; exit 1", "(fatal error: concepts"),
        ("echo ld: cannot find -lcudart >&2; echo error: ld returned 1 >&2; exit 1", "(ld: cannot find -lcudart)"),
        ("exit 3", "(exit code 3)"),
    ],
)
def test_a_node_without_a_working_cuda_compiler_is_named_before_its_servers_fail(line, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    (tmp_path / "bin").mkdir()
    if line:
        script(tmp_path / "bin" / "nvcc", line)
    problem = gpus.cuda_compiler().problem
    assert (
        expected in problem and f"{tmp_path}/bin/nvcc" in problem and "CUDA_HOME" in problem and problem.endswith(".")
    )


def script(file: Path, line: str) -> str:
    file.write_text(f"#!/bin/sh\n{line}\n")
    file.chmod(0o755)
    return str(file)


def headers() -> Path:
    return Path(sysconfig.get_paths()["include"], "Python.h")


def demo(*overrides: str):
    return load_config(
        REPOSITORY / "configs/demo.yaml",
        [f"actor_rollout_ref.model.path={REPOSITORY}/examples/arithmetic/base", *overrides],
    )


def test_the_size_of_a_checkpoint_follows_from_the_model():
    """In float32: the weights and Adam's two moments. The file has the weights in half of that."""
    weights = (REPOSITORY / "examples/arithmetic/base/model.safetensors").stat().st_size
    config = demo("actor_rollout_ref.actor.megatron.dtype=float32")
    assert machine.checkpoints_bytes(config)[0] == pytest.approx(3 * 2 * weights, rel=0.01)


@pytest.mark.parametrize(
    ("overrides", "count"),
    [
        ((), 1),  # at a stop on request
        (("trainer.save_interval=10",), 4),
        (("trainer.save_interval=10", "trainer.keep_last=2"), 3),  # with the one under way
        (("trainer.save_interval=1", "trainer.keep_last=2", "trainer.keep_every=20"), 5),
    ],
)
def test_room_is_asked_for_all_checkpoints_that_are_there_at_once(overrides, count):
    one, number = machine.checkpoints_bytes(demo("trainer.total_training_steps=40", *overrides))
    assert number == count and one > 0


def test_a_full_disk_is_named_with_free_and_needed_bytes(tmp_path, monkeypatch):
    assert machine.disk(demo(), tmp_path / "run" / "not yet").problem is None
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: SimpleNamespace(free=5 * 10**8))
    problem = machine.disk(demo(), tmp_path).problem
    assert f"{tmp_path} has 500.00 MB free" in problem and "trainer.keep_last" in problem


def test_a_taken_port_is_named_with_its_holder():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        problem = machine.ports("127.0.0.1", [port]).problem
        assert f"port {port} " in problem and f"process {os.getpid()}" in problem
    assert machine.ports("127.0.0.1", [port]).problem is None


def test_the_ports_and_the_host_of_gateways_are_tried():
    def found(*overrides):
        return machine.gateways(load_config(None, [f"actor_rollout_ref.rollout.agent.{text}" for text in overrides]))

    assert found("enable=true") == machine.Result("chosen at start")
    assert "set actor_rollout_ref.rollout.agent.host to an address" in found("enable=true", "host=192.0.2.1").problem
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        first = port - 1 if port > 1024 else port
        assert f"port {port} of 127.0.0.1" in found("enable=true", f"port={first}", "num_gateways=2").problem


def test_too_few_open_files_are_reported_with_the_curing_command(monkeypatch):
    config = demo("actor_rollout_ref.rollout.max_concurrency=4096")
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (1024, 4096))
    assert "`ulimit -n 8704`" in machine.limits(config, uses_gpus=False).problem


def test_a_folder_that_cannot_be_written_is_said_before_anybody_waits(tmp_path):
    (tmp_path / "file").touch()
    assert "cannot write" in machine.SharedFolder(tmp_path / "file" / "run", "t").write()


def without_sandbox(monkeypatch):
    def find_way():
        raise UserError("reward.function: code_tests needs a sandbox, and bwrap is not installed; install it.")

    monkeypatch.setattr(machine, "find_way", find_way)


def test_a_missing_sandbox_is_a_problem_unless_programs_may_run_without_one(monkeypatch):
    keys = ["reward.function=code_tests"]
    without_sandbox(monkeypatch)
    assert "bwrap is not installed" in machine.sandbox(load_config(None, keys)).problem
    allowed = machine.sandbox(load_config(None, [*keys, "reward.allow_unsandboxed=true"]))
    assert allowed.problem is None and "as reward.allow_unsandboxed says" in allowed.found
    monkeypatch.setattr(machine, "find_way", lambda: SimpleNamespace(name="a user namespace"))
    assert machine.sandbox(load_config(None, keys)) == machine.Result("a user namespace")


def test_a_sandbox_for_programs_of_a_reward_is_not_enough_for_agents(monkeypatch):
    def check_sandbox():
        raise UserError("a command's sandbox (rollout.agent.sandbox) cannot be made here.")

    monkeypatch.setattr(machine, "find_way", lambda: SimpleNamespace(name="a user namespace"))
    monkeypatch.setattr(machine, "check_sandbox", check_sandbox)
    agent = [f"actor_rollout_ref.rollout.agent.{words}" for words in ("enable=true", "command=[sh]", "sandbox=true")]
    result = machine.sandbox(load_config(None, [*agent, "reward.allow_unsandboxed=true"]))
    assert "rollout.agent.sandbox" in result.problem


@pytest.mark.parametrize(
    ("sources", "keys", "runs"),
    [
        (["math", "taco"], [], True),
        (["math", None], [], False),
        (["unknown"], [], False),
        ([None], ["data.data_source=apps"], True),
        (["taco"], ["reward.function=math_verify"], False),
        (["math"], ["reward.function=code_tests"], True),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_sandbox_is_required_if_some_prompts_are_scored_by_programs(sources, keys, runs, kind, tmp_path):
    rows = [{"prompt": "p", "label": "1"} | ({"data_source": source} if source else {}) for source in sources]
    file = tmp_path / f"p.{kind}"
    if kind == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    assert machine.runs_programs(load_config(None, [f"data.train_files=[{file}]", *keys])) == runs


def test_missing_files_are_named(tmp_path):
    config = demo("data.train_files=[/nowhere/train.jsonl]")
    assert "/nowhere/train.jsonl" in machine.files(config).problem
    config = demo("actor_rollout_ref.model.path=/nowhere/model")
    assert "/nowhere/model" in machine.files(config).problem


def test_nodes_that_found_the_same_share_a_line():
    names = [f"node{index}" for index in range(9)]
    findings = [NodeFinding(name, "GPUs", "8 x H100") for name in names]
    findings[3] = replace(findings[3], found="7 of 8", problem="has lost one")
    lines = table(findings, names).splitlines()
    assert lines[0] == "Preflight of 9 nodes"
    assert lines[1].split() == "ok GPUs node0, node1, node2, node4 and 4 more 8 x H100".split()
    assert lines[2].split() == "FAIL GPUs node3 7 of 8".split()
    assert lines[1].index("8 x H100") == lines[2].index("7 of 8")
