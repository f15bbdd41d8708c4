"""The plan of a Slurm job: roles, nodes, ports and exact command lines."""

import json
import re

import pytest

from launch.slurm.__main__ import main
from launch.slurm.notice import notice_line, rest_of_a_step
from launch.slurm.plan import PREFLIGHT, SERVERS, TRAINER, Allocation, JobPlan, make_plan, own_overrides
from launch.slurm.progress import Progress
from launch.slurm.servers import wait_for_servers
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.config import Config
from megatron_dapo.storage.lease import Holder, Lease, LeaseFolder
from megatron_dapo.storage.run_folder import RunFolder
from tests.helpers import REPOSITORY
from tests.model_json import QWEN2_5_32B
from tests.unit.test_first_look import save

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("short_simulation")]

SERVER = "actor_rollout_ref.rollout.server"


def config(*overrides: str) -> Config:
    """Two trainer nodes of four ranks, one server node with two servers of two GPUs."""
    sizes = ["trainer.nnodes=2", "trainer.n_procs_per_node=4", f"{SERVER}.nnodes=1", f"{SERVER}.num_servers=2"]
    return load_config(None, [*sizes, f"{SERVER}.tensor_model_parallel_size=2", "trainer.run_dir=/run", *overrides])


def allocation(*nodes: str, **variables: str) -> Allocation:
    return Allocation.of({"SLURM_JOB_ID": "4711"} | variables, nodes or ("a1", "a2", "b1"))


def refusals(*overrides: str, nodes: Allocation | None = None) -> list[str]:
    with pytest.raises(UserError) as error:
        make_plan(config(*overrides), nodes or allocation())
    return error.value.sentences


def test_the_command_line_of_each_role_is_this_one():
    plan, logs = make_plan(config(), allocation()), "/run/logs/attempt-4711-0"
    assert plan.command(PREFLIGHT, "a1", "python") == [
        *("python", "-m", "launch.preflight", "--config", f"{logs}/config.yaml", "--shared", "/run"),
        *("--role", "trainer", "--node-index", "0", "--num-nodes", "3", "--rendezvous", "a1:23297"),
        *("--node-names", "a1,a2,b1", "--server-hosts", "b1", "--http-port", "23304", "--ports", "23296"),
    ]
    assert plan.command(PREFLIGHT, "b1", "python") == [
        *("python", "-m", "launch.preflight", "--config", f"{logs}/config.yaml", "--shared", "/run"),
        *("--role", "server", "--node-index", "2", "--num-nodes", "3", "--rendezvous", "a1:23297"),
        *("--node-names", "a1,a2,b1", "--server-hosts", "b1", "--http-port", "23304"),
    ]
    assert plan.command(SERVERS, "b1", "python") == [
        *("python", "-m", "launch.sglang_server", "--config", f"{logs}/config.yaml", "--node", "b1"),
        *("--first-port", "23304", "--log-dir", logs),
    ]
    assert plan.command(TRAINER, "a2", "python") == [
        *("python", "-m", "launch.torchrun", "--nnodes=2", "--node-rank=1", "--nproc-per-node=4", "--max-restarts=0"),
        *("--master-addr=a1", "--master-port=23296", "-m", "launch.rank", "--log-dir", logs),
        *("megatron_dapo", "train", "--config", f"{logs}/config.yaml"),
    ]


def test_the_body_gets_the_folders_and_sruns_arguments_of_each_role():
    assert (
        make_plan(config(), allocation(SLURM_RESTART_COUNT="2")).shell()
        == """\
RUN=/run
LOGS=/run/logs/attempt-4711-2
HEAD_NODE=a1
NUM_SERVER_NODES=1
PREFLIGHT_STEP=(--job-name=preflight --nodes=3 --ntasks=3 --ntasks-per-node=1 --nodelist=a1,a2,b1 \
--overlap --mem=0 --cpu-bind=none --mpi=none --input=none --wait=0 \
--kill-on-bad-exit=1 --output=/run/logs/attempt-4711-2/preflight-%N.log)
SERVERS_STEP=(--job-name=servers --nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist=b1 \
--overlap --mem=0 --cpu-bind=none --mpi=none --input=none --wait=0 \
--kill-on-bad-exit=0 --output=/run/logs/attempt-4711-2/servers-%N.log)
TRAINER_STEP=(--job-name=trainer --nodes=2 --ntasks=2 --ntasks-per-node=1 --nodelist=a1,a2 \
--overlap --mem=0 --cpu-bind=none --mpi=none --input=none --wait=0 \
--kill-on-bad-exit=1 --output=/run/logs/attempt-4711-2/trainer-%N.log)
"""
    )


def test_what_the_shell_reads_of_a_folder_with_a_blank_is_quoted():
    assert "\nLOGS='/a run/logs/attempt-4711-0'\n" in make_plan(config("trainer.run_dir=/a run"), allocation()).shell()


def test_servers_have_one_url_each_on_their_own_nodes():
    plan = make_plan(config(f"{SERVER}.nnodes=2", f"{SERVER}.num_servers=4"), allocation("a", "b", "c", "d"))
    assert plan.trainer_nodes == ("a", "b") and plan.server_nodes == ("c", "d")
    assert plan.server_urls == ["http://c:23304", "http://c:23305", "http://d:23304", "http://d:23305"]


def test_jobs_in_a_row_have_ports_of_their_own_below_those_of_outgoing_connections():
    def ports(job: int) -> set[int]:
        plan = JobPlan(job, 0, ("a",), ("b",), 1, 1, "/run", "/run/logs", 1)
        return {plan.port(i) for i in range(32)}

    in_a_row = [ports(job) for job in range(10_000_000, 10_000_384)]
    assert len(set.union(*in_a_row)) == 384 * 32
    assert min(map(min, in_a_row)) >= 20000 and max(map(max, in_a_row)) < 32768


def test_processes_get_absolute_folders_and_servers_that_others_reach():
    plan = make_plan(config(), allocation(SLURM_RESTART_COUNT="1"))
    assert own_overrides(plan, config("trainer.resume=never")) == [
        'trainer.run_dir="/run"',
        'trainer.log_dir="/run/logs/attempt-4711-1"',
        'actor_rollout_ref.rollout.server_urls_file="/run/servers.txt"',
        'actor_rollout_ref.rollout.server_api_key_file="/run/.server_key"',
        f'{SERVER}.host="0.0.0.0"',
        'trainer.resume="auto"',
    ]
    assert f'{SERVER}.host="0.0.0.0"' not in own_overrides(plan, config(f"{SERVER}.host=10.0.0.7"))


@pytest.mark.parametrize(
    "override",
    ["actor_rollout_ref.rollout.server_urls=[http://x:1]", "trainer.replay=/batches"],
    ids=["urls", "replay"],
)
def test_where_the_job_starts_no_servers_it_has_no_server_nodes(override):
    plan = make_plan(config(override), allocation("a1", "a2"))
    assert plan.server_nodes == () and plan.server_urls == [] and "SERVERS_STEP" not in plan.shell()
    server_overrides = [text for text in own_overrides(plan, config(override)) if "server" in text]
    assert server_overrides == [f"{SERVER}.nnodes=0"], "no process of the job counts the recipe's server nodes"


def test_a_wrong_node_count_is_refused_with_both_numbers():
    (sentence,) = refusals(nodes=allocation("a1", "a2"))
    assert "Slurm gave 2 nodes (a1 a2)" in sentence and "nnodes 2 + " in sentence and "sbatch --nodes=3" in sentence
    (sentence,) = refusals(f"{SERVER}.nnodes=0")
    assert "server.nnodes is 0" in sentence and "launch.local" in sentence


def test_the_gpus_that_slurm_counted_must_do():
    trainer, servers = refusals(nodes=allocation(SLURM_GPUS_ON_NODE="3"))
    assert "n_procs_per_node is 4, but Slurm gave 3 GPUs" in trainer
    assert "2 servers x 2 GPUs" in servers and "need 4 GPUs" in servers
    make_plan(config(), allocation(SLURM_GPUS_ON_NODE="4"))  # enough
    make_plan(config(), allocation())  # no GRES: the preflight counts them


MODEL = "reward.model.path=/models/judge"


def test_a_reward_model_is_served_by_the_first_server_node_behind_the_others():
    sizes = (f"{SERVER}.nnodes=2", f"{SERVER}.num_servers=4", f"{SERVER}.tensor_model_parallel_size=1")
    plan = make_plan(config(*sizes, MODEL), allocation("a", "b", "c", "d"))
    assert plan.command(SERVERS, "c", "python")[-2:] == ["--serve", "both"]
    assert "--serve" not in plan.command(SERVERS, "d", "python")
    assert plan.command(PREFLIGHT, "c", "python")[-1] == "--reward-model"
    assert "--reward-model" not in plan.command(PREFLIGHT, "d", "python")
    assert plan.server_urls[:2] == ["http://c:23304", "http://c:23305"] and plan.reward_model_url == "http://c:23306"
    overrides = own_overrides(plan, config(*sizes, MODEL))
    assert (
        'reward.model.url="http://c:23306"' in overrides and 'reward.model.api_key_file="/run/.server_key"' in overrides
    )
    assert "1 server of the reward model on c" in plan.text()
    planned = make_plan(config(*sizes, MODEL, "reward.model.url=http://x:1"), allocation("a", "b", "c", "d"))
    assert planned.reward_model_url is None and "--serve" not in planned.command(SERVERS, "c", "python")


def test_the_gpus_of_the_reward_model_are_counted_on_its_node():
    fits = config(MODEL, "reward.model.tensor_model_parallel_size=4")
    make_plan(fits, allocation(SLURM_GPUS_ON_NODE="8"))
    [sentence] = refusals(MODEL, "reward.model.tensor_model_parallel_size=4", nodes=allocation(SLURM_GPUS_ON_NODE="7"))
    assert "2 servers x 2 GPUs" in sentence and "and 4 of the reward model" in sentence and "need 8 GPUs" in sentence


def test_a_job_without_server_nodes_must_be_given_a_server_of_the_reward_model():
    url = "actor_rollout_ref.rollout.server_urls=[http://x:1]"
    [sentence] = refusals(MODEL, url, nodes=allocation("a1", "a2"))
    assert "reward.model.path is given without reward.model.url" in sentence and "--serve reward-model" in sentence
    assert make_plan(config(MODEL, "trainer.replay=/batches"), allocation("a1", "a2")).reward_model_url is None


def test_all_servers_are_waited_for_the_reward_models_too():
    plan = make_plan(config(MODEL), allocation())
    asked = []
    assert wait_for_servers(plan, lambda url: asked.append(url) or True) is None
    assert asked == [*plan.server_urls, plan.reward_model_url]


OVER_TWO = (f"{SERVER}.nodes_per_server=2", f"{SERVER}.tensor_model_parallel_size=8")


def test_neighbouring_server_nodes_make_servers_and_the_first_of_them_has_the_urls():
    made = config(*OVER_TWO, f"{SERVER}.nnodes=4", f"{SERVER}.num_servers=4")
    plan = make_plan(made, allocation("a", "b", "c", "d", "e", "f"))
    assert plan.server_nodes == ("c", "d", "e", "f") and plan.servers_per_node == 2
    assert plan.server_urls == ["http://c:23304", "http://c:23305", "http://e:23304", "http://e:23305"]
    for node, group in (("c", "c,d"), ("d", "c,d"), ("e", "e,f"), ("f", "e,f")):
        words = plan.command(SERVERS, node, "python")
        assert words[-4:] == ["--server-nodes", group, "--meeting-port", "23298"]
        assert words[words.index("--node") + 1] == node
    assert "2 servers on each of 2 groups of 2 nodes: c d e f" in plan.text()
    checked = [plan.command(PREFLIGHT, node, "python") for node in plan.nodes]
    assert [words[words.index("--ports") + 1] if "--ports" in words else None for words in checked] == [
        *("23296", None, "23298,23299", None, "23298,23299", None),
    ], "the trainer's, and those at which the servers' processes meet"
    asked = []
    assert wait_for_servers(plan, lambda url: asked.append(url) or True) is None and asked == plan.server_urls


def test_the_gpus_and_ports_of_servers_over_nodes_are_counted_on_each_node():
    make_plan(config(*OVER_TWO, f"{SERVER}.nnodes=2"), allocation("a", "b", "c", "d", SLURM_GPUS_ON_NODE="8"))
    sizes = (*OVER_TWO, f"{SERVER}.nnodes=2")
    (sentence,) = refusals(*sizes, nodes=allocation("a", "b", "c", "d", SLURM_GPUS_ON_NODE="7"))
    assert "2 servers x 4 GPUs per server node" in sentence and "need 8 GPUs" in sentence
    (sentence,) = refusals(*sizes, f"{SERVER}.num_servers=7", nodes=allocation("a", "b", "c", "d"))
    assert "7 servers on the same 2 nodes" in sentence and "6 ports" in sentence and "use fewer" in sentence


def test_a_reward_model_is_served_by_a_leader():
    sizes = (*OVER_TWO, f"{SERVER}.nnodes=2", f"{SERVER}.num_servers=1", MODEL)
    plan = make_plan(config(*sizes), allocation("a", "b", "c", "d"))
    assert plan.command(SERVERS, "c", "python")[-2:] == ["--serve", "both"]
    assert "--serve" not in plan.command(SERVERS, "d", "python") and plan.reward_model_url == "http://c:23305"


def test_a_plan_that_was_written_is_read_again(tmp_path):
    plan = make_plan(config(f"trainer.run_dir={tmp_path}"), allocation(), start=Progress(7))
    plan.write()
    assert JobPlan.read(f"{plan.logs}/plan.json") == plan


def recipe(tmp_path, *overrides: str) -> list[str]:
    """Arguments of `plan` with a config of existing files."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1=", "label": "2", "data_source": "math"}\n')
    words = ["trainer.nnodes=1", f"{SERVER}.nnodes=1", f"data.train_files=[{tmp_path}/prompts.jsonl]"]
    words += ["data.max_prompt_length=8", "data.max_response_length=40", f"trainer.run_dir={tmp_path}/run"]
    words += ["actor_rollout_ref.model.path=examples/arithmetic/base", "data.apply_chat_template=false"]
    return ["plan", *words, *overrides]


def test_planning_writes_the_attempt_s_folder_and_names_it_last(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    save(recipe(tmp_path)[1:], tmp_path, step=12)
    for restart in ("0", "1"):
        monkeypatch.setenv("SLURM_RESTART_COUNT", restart)
        assert main([*recipe(tmp_path), "--nodes", "a,b"]) == 0
    logs = tmp_path / "run" / "logs"
    attempt = logs / "attempt-5-1"
    assert capsys.readouterr().out.splitlines()[-1] == str(attempt)
    assert (logs / "latest").resolve() == attempt and sorted(path.name for path in logs.iterdir()) == [
        *("attempt-5-0", "attempt-5-1", "latest"),
    ]
    assert (tmp_path / "run" / "servers.txt").read_text() == "http://b:20168\n"
    read = load_config(attempt / "config.yaml", [])
    assert read.trainer.log_dir == str(attempt) and read.actor_rollout_ref.rollout.server.host == "0.0.0.0"
    assert (
        "launch.torchrun" in (attempt / "plan.txt").read_text() and JobPlan.read(attempt / "plan.json").start_step == 12
    )


def test_a_requeued_job_resumes_its_own_checkpoint_despite_the_first_attempts_options(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    arguments = [*recipe(tmp_path, "trainer.resume=never"), "--nodes", "a,b"]
    save(recipe(tmp_path)[1:], tmp_path, step=12)
    for restart, code in (("0", 2), ("1", 0)):
        monkeypatch.setenv("SLURM_RESTART_COUNT", restart)
        assert main(arguments) == code


def test_mistakes_end_with_one_line_and_leave_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    assert main([*recipe(tmp_path, "trainer.sed=1"), "--nodes", "a,b"]) == 2
    assert capsys.readouterr().out.splitlines()[-1].startswith("FAILED (2): Unknown key trainer.sed")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "21")
    assert main([*recipe(tmp_path), "--nodes", "a,b", "--max-restarts", "20"]) == 13
    assert capsys.readouterr().out == "FAILED (13): requeued 21 times, but MAX_RESTARTS is 20\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("damage", ["", "\0\0\0\n", '{"step": 9, "rew'])
def test_a_finished_run_leaves_nothing_for_the_next_job_of_a_chain(damage, tmp_path, monkeypatch, capsys):
    """Even if its metrics end in the remains of a full disk or a lost one."""
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 8}\n{"step": 9}\n' + damage)
    command = [*recipe(tmp_path, "trainer.total_training_steps=9"), "--nodes", "a,b"]
    assert main(command) == 76
    assert capsys.readouterr().out.startswith(f"DONE: step 9 of 9 in {tmp_path}/run already")
    assert main([*command, "trainer.total_training_steps=10"]) == 0


def sized(folder, model: dict, *overrides: str) -> Config:
    """The reference run of a model with these sizes."""
    (folder / "config.json").write_text(json.dumps(model))
    path = f"actor_rollout_ref.model.path={folder}"
    return load_config(REPOSITORY / "configs" / "dapo_32b.yaml", [path, *overrides])


def test_the_plan_compares_the_notice_with_the_rest_of_a_step(tmp_path):
    """8192 samples of 22528 tokens with 32.8e9 parameters on 64 GPUs, by hand. With only products,
    8 N T FLOPs (update and old log-probs) at 0.3 x 989.5e12 per GPU are 2550 s. Attention over
    22528 tokens adds a quarter or so."""
    made = sized(tmp_path, QWEN2_5_32B)
    by_hand = 8 * 32.8e9 * 8192 * 22528 / (64 * 0.3 * 989.5e12)
    assert 1.1 * by_hand < rest_of_a_step(made) - 600 < 1.5 * by_hand
    assert notice_line(made, 7200).startswith("7200 s before the time limit; update and save")
    line = notice_line(made, 1800)
    assert "IS TOO SHORT" in line and (enough := int(line.rpartition("@")[2])) >= rest_of_a_step(made)
    assert "TOO SHORT" not in notice_line(made, enough)
    assert "evaluation that follows a step" in line
    assert "evaluation" not in notice_line(sized(tmp_path, QWEN2_5_32B, "trainer.test_freq=-1"), 1800)
    half = sized(tmp_path, QWEN2_5_32B, "data.train_batch_size=256")
    assert rest_of_a_step(half) - 600 == pytest.approx((rest_of_a_step(made) - 600) / 2)


def test_an_unknown_notice_or_model_has_no_line(tmp_path):
    assert notice_line(sized(tmp_path, QWEN2_5_32B), None) is None
    assert notice_line(config("actor_rollout_ref.model.path=/nowhere"), 7200) is None


@pytest.mark.parametrize("name", ["dapo_32b", "dapo_7b"])
def test_a_script_tells_the_plan_the_notice_that_it_asks_of_slurm(name):
    text = (REPOSITORY / "slurm" / f"{name}.sh").read_text()
    asked, passed_on = re.search(r"--signal=B:USR1@(\d+)", text)[1], re.search(r"NOTICE_S:-(\d+)", text)[1]
    assert asked == passed_on


def test_without_nodes_it_is_a_dry_run(tmp_path, monkeypatch, capsys):
    assert main(recipe(tmp_path, "trainer.nnodes=4")) == 0
    shown = capsys.readouterr().out
    for words in ("1 rank on each of 4: node1 node2 node3 node4", "1 server on each of 1: node5", "Process plan"):
        assert words in shown
    assert not (tmp_path / "run").exists()


def dry_run_of(name: str, *overrides: str) -> list[str]:
    return ["plan", "--config", str(REPOSITORY / "configs" / f"{name}.yaml"), *overrides]


def test_a_dry_run_on_a_laptop_estimates_memory_by_the_published_shape(capsys):
    assert main(dry_run_of("dapo_32b")) == 2
    shown = capsys.readouterr().out
    assert "not estimated" not in shown
    assert "of the published shape of qwen2.5-32b, since models/Qwen2.5-32B is not here" in shown
    assert "server: weights 8.2 GB per GPU" in shown  # 65.5 GB over 8 GPUs
    assert main(dry_run_of("dapo_32b", "actor_rollout_ref.model.path=models/our-own")) == 2
    assert "not estimated: the model's config.json is not in models/our-own" in capsys.readouterr().out


def test_a_dry_run_names_the_mistakes_of_job_files_model_and_memory_together(capsys):
    wrong = ("trainer.gpu_memory_gb=10", f"{SERVER}.nnodes=0", "data.val_files=[]", "trainer.test_freq=-1")
    assert main(dry_run_of("dapo_32b", *wrong)) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("5 mistakes to correct:")
    for words in (
        "in a Slurm job servers have nodes of their own or share",
        "data.train_files holds",
        "models/Qwen2.5-32B, which is not a folder here",
        "A trainer GPU would need",
        "A server GPU would have",
    ):
        assert words in printed
    assert main(dry_run_of("dapo_32b", "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=16")) == 2
    assert "tensor_model_parallel_size is 16, but does not divide the model's num_attention_heads 40" in (
        capsys.readouterr().err
    )


SHARED = ("actor_rollout_ref.hybrid_engine=true", f"{SERVER}.nnodes=0", f"{SERVER}.num_servers=4")


def test_servers_that_share_the_trainers_gpus_are_on_all_of_its_nodes():
    plan = make_plan(config(*SHARED), allocation("a1", "a2", SLURM_GPUS_ON_NODE="4"))
    assert plan.trainer_nodes == plan.server_nodes == plan.nodes == ("a1", "a2") and plan.servers_per_node == 2
    assert plan.server_urls == ["http://a1:23304", "http://a1:23305", "http://a2:23304", "http://a2:23305"]
    assert "--nodelist=a1,a2" in plan.step(SERVERS) and "--nodelist=a1,a2" in plan.step(TRAINER)
    for node, index in (("a1", "0"), ("a2", "1")):
        words = plan.command(PREFLIGHT, node, "python")
        assert words[words.index("--role") + 1] == "both" and words[words.index("--node-index") + 1] == index
        assert words[words.index("--num-nodes") + 1] == "2" and words[words.index("--server-hosts") + 1] == "a1,a2"
        assert "launch.sglang_server" in plan.command(SERVERS, node, "python")
    texts = own_overrides(plan, config(*SHARED))
    assert 'actor_rollout_ref.rollout.server_urls_file="/run/servers.txt"' in texts
    assert f'{SERVER}.host="0.0.0.0"' in texts and not [text for text in texts if "server.nnodes" in text]
    assert len(Allocation.imagined(config(*SHARED)).nodes) == 2


def test_a_job_with_shared_gpus_has_no_nodes_for_servers_alone_and_no_servers_of_others():
    (sentence,) = refusals(*SHARED)
    assert "Slurm gave 3 nodes" in sentence and "sbatch --nodes=2" in sentence
    url = "actor_rollout_ref.rollout.server_urls=[http://x:1]"
    (sentence,) = refusals(*SHARED, url, nodes=allocation("a1", "a2"))
    assert "server_urls is http://x:1" in sentence and "remove server_urls" in sentence


def test_a_new_attempt_forgets_the_lease_and_the_servers_starts_of_the_last_one(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    lease = LeaseFolder(RunFolder(tmp_path / "run").lease)
    lease.write(Holder.TRAINER)
    starts = RunFolder(tmp_path / "run").server_starts
    (starts / "server-a-0").mkdir(parents=True)
    shared = ["actor_rollout_ref.hybrid_engine=true", f"{SERVER}.nnodes=0"]
    assert main([*recipe(tmp_path, *shared), "--nodes", "a"]) == 0
    assert lease.read() == Lease() and not starts.exists()
    assert (tmp_path / "run" / "servers.txt").read_text() == "http://a:20168\n"


def test_a_job_with_given_servers_leaves_their_starts_to_them(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    starts = RunFolder(tmp_path / "run").server_starts / "server-a-0"
    starts.mkdir(parents=True)
    assert main([*recipe(tmp_path, "actor_rollout_ref.rollout.server_urls=[http://x:1]"), "--nodes", "a"]) == 0
    assert starts.exists()
