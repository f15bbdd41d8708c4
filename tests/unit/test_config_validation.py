"""Keys that contradict each other are refused before anything starts, all at once."""

import pytest

from megatron_dapo.checks.run_checks import validate
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.loader import load_config
from tests.config_overrides import mistakes
from tests.model_json import MODEL_JSON

pytestmark = pytest.mark.unit

# Each row: overrides that make one mistake,
# and words its one sentence must hold (keys, values, the cure).
OVERLONG_ON = "overlong.enable=true"
MAXRL = "algorithm.adv_estimator=maxrl"
SAMPLING_ON = "sampling.enable=true"
SPREAD = "sampling.enable=true sampling.filter_mode=acc"
CONTRADICTIONS = [
    ("data.train_batch_size=100 actor.ppo_mini_batch_size=64", ["train_batch_size is 100", "ppo_mini_batch_size 64"]),
    ("data.train_batch_size=1 actor.ppo_mini_batch_size=1 trainer.n_procs_per_node=3",
     ["8 samples", "3 data-parallel ranks"]),
    ("trainer.n_procs_per_node=6 trainer.nnodes=2 tp=4 pp=2",
     ["world size is 12", "not a multiple of 8"]),
    ("data.gen_batch_size=1024", ["gen_batch_size is 1024", "dynamic sampling"]),
    ("data.gen_batch_size=64", ["gen_batch_size is 64", "train_batch_size 512", "set it to null"]),
    (f"{SAMPLING_ON} sampling.filter_mode=none data.gen_batch_size=1024", ["gen_batch_size is 1024", "filter_mode"]),
    (f"{SAMPLING_ON} data.gen_batch_size=10 sampling.max_num_gen_batches=51",
     ["can never fill data.train_batch_size 512"]),
    ("actor.max_tokens_per_microbatch=3071", ["max_tokens_per_microbatch is 3071", "3072 tokens"]),
    ("rollout.server.max_total_tokens=100", ["max_total_tokens is 100"]),
    ("data.truncation=left", ["data.truncation is left", "filter_overlong_prompts"]),
    ("trainer.save_interval=0", ["save_interval is 0", "1 or more", "-1"]),
    ("trainer.keep_every=10", ["keep_every is 10", "keep_last"]),
    ("trainer.accept_changes=[actor_rollout_ref.actor.optim.lrr]", ["optim.lrr", "nearest is actor_rollout_ref.actor"]),
    ("trainer.resume=never trainer.accept_changes=[trainer.seed]", ["accept_changes is given", "resume is never"]),
    ("megatron.sequence_parallel=true", ["sequence_parallel is true", "tensor_model_parallel_size is 1"]),
    ("vpp=2", ["virtual_pipeline_model_parallel_size is 2"]),
    ("trainer.n_procs_per_node=2 pp=2 vpp=2 megatron.pipeline_layers=[6,6]",
     ["pipeline_layers is [6, 6], but there are 4 chunks", "size 2 x virtual_pipeline_model_parallel_size 2"]),
    ("trainer.n_procs_per_node=4 pp=4 megatron.pipeline_layers=[6,0,6,0]", ["pipeline_layers is [6, 0, 6, 0]", "head"]),
    ("megatron.overlap_param_gather=true", ["overlap_param_gather is true", "overlap_grad_reduce is false"]),
    ("megatron.context_parallel_size=2 trainer.n_procs_per_node=3",
     ["world size is 3", "not a multiple of 2", "context_parallel_size 2"]),
    ("megatron.context_parallel_size=2 trainer.n_procs_per_node=2 megatron.use_transformer_engine=off",
     ["context_parallel_size is 2", "use_transformer_engine is off", "set it to auto"]),
    ("megatron.context_parallel_size=2 trainer.n_procs_per_node=2 "
     "actor_rollout_ref.model.use_remove_padding=false",
     ["context_parallel_size is 2", "use_remove_padding is false", "set it to true"]),
    ("megatron.optimizer_offload_fraction=0.5 megatron.use_distributed_optimizer=false",
     ["optimizer_offload_fraction is 0.5, but use_distributed_optimizer is false", "set it to true"]),
    ("megatron.exp_avg_dtype=bfloat16 megatron.dtype=float32",
     ["exp_avg_dtype is bfloat16, but dtype is float32", "set it to bfloat16"]),
    ("megatron.exp_avg_dtype=bfloat16 megatron.use_transformer_engine=off",
     ["exp_avg_dtype is bfloat16, but use_transformer_engine is off", "set it to auto"]),
    ("megatron.optimizer_offload_fraction=1 megatron.exp_avg_dtype=bfloat16",
     ["exp_avg_dtype is bfloat16, but optimizer_offload_fraction is 1", "stepped in float32"]),
    ("megatron.exp_avg_sq_dtype=bfloat16",  # Adam's own 0.999
     ["exp_avg_sq_dtype is bfloat16", "actor.optim.betas has 0.999", "never falls", "below 0.996"]),
    ("megatron.fp8=hybrid megatron.use_transformer_engine=off",
     ["fp8 is hybrid", "use_transformer_engine is off", "fp8 to none"]),
    ("megatron.fp8=e4m3 megatron.dtype=float32", ["fp8 is e4m3", "dtype is float32", "bfloat16"]),
    ("megatron.fp8_recipe=mxfp8", ["fp8_recipe is mxfp8", "fp8 is none"]),
    ("megatron.fp8=hybrid megatron.fp8_recipe=blockwise data.max_response_length=2000 "
     "actor.max_tokens_per_microbatch=3024", ["max_tokens_per_microbatch is 3024", "3072 tokens", "padded for"]),
    ("pp=2 trainer.n_procs_per_node=2 vpp=1",
     ["virtual_pipeline_model_parallel_size is 1"]),
    ("actor.clip_ratio=1.0", ["actor.clip_ratio is 1", "below 1"]),
    ("actor.use_dapo=true actor.clip_ratio_low=1.0 actor.clip_ratio_high=1.2", ["clip_ratio_low is 1", "below 1"]),
    ("actor.use_dapo=true actor.clip_ratio_high=0.1", ["clip_ratio_high is 0.1", "clip_ratio_low 0.2"]),
    ("actor.clip_ratio_c=1.2", ["clip_ratio_c is 1.2", "1.2"]),
    ("actor.use_dapo=true actor.clip_ratio_c=1.28", ["clip_ratio_c is 1.28", "ends at 1.28"]),
    ("actor.clip_ratio_high=0.3", ["clip_ratio_high is 0.3", "use_dapo is false"]),
    (f"{SAMPLING_ON} rollout.n=1", ["rollout.n is 1", "2 or more"]),
    ("sampling.form=mask", ["form is mask", "dynamic_sampling.enable is false"]),
    (f"{SAMPLING_ON} sampling.filter_mode=none sampling.form=mask", ["form is mask", "filter_mode"]),
    (f"{SAMPLING_ON} sampling.form=mask data.gen_batch_size=1024", ["gen_batch_size is 1024", "resample"]),
    ("sampling.filter_mode=remove_all_correct", ["filter_mode is remove_all_correct", "enable is false"]),
    ("sampling.on_exhausted=train_partial", ["on_exhausted is train_partial", "dynamic_sampling.enable is false"]),
    (f"{SPREAD} rollout.n=1", ["rollout.n is 1", "dynamic_sampling.enable is true"]),
    ("sampling.filter_mode=score", ["filter_mode is score", "dynamic_sampling.enable is false"]),
    ("sampling.max_num_gen_batches=0", ["max_num_gen_batches is 0", "dynamic_sampling.enable is false"]),
    (f"{SPREAD} data.gen_batch_size=51", ["51 x algorithm.dynamic_sampling.max_num_gen_batches 10", "512"]),
    ("rollout.max_staleness=2", ["rollout.max_staleness is 2", "rollout_correction.rollout_is is none", "to token"]),
    ("weight_sync.pause_mode=in_place", ["pause_mode is in_place", "max_staleness is 0"]),
    ("weight_sync.verify=true rollout.server.tensor_model_parallel_size=4 rollout.server.extra_args=[--ep-size,'2']",
     ["weight_sync.verify is true", "extra_args", "one of 2 parts", "set verify to false"]),
    ("weight_sync.verify=true rollout.server.tensor_model_parallel_size=4 "
     "rollout.server.extra_args=[--moe-a2a-backend=deepep]", ["verify is true", "one of 4 parts"]),
    ("rollout.max_staleness=2 rc.rollout_token_veto_threshold=1e-4", ["rollout_is is none", "to token"]),
    ("rollout.max_staleness=1 algorithm.rollout_correction.rollout_is=token rollout.max_concurrency=65 "
     "rollout.server.max_running_requests=64", ["max_concurrency is 65", "max_running_requests 64", "to 64 or less"]),
    ("actor.use_dapo=true actor.clip_ratio_low=null actor.clip_ratio_high=null actor.clip_ratio=1.5 "
     "actor.clip_ratio_c=null", ["actor.clip_ratio is 1.5", "below 1"]),
    ("actor.use_dapo=true actor.clip_ratio=0.1", ["clip_ratio is 0.1", "low to null", "high to null"]),
    ("buffer=10", ["buffer_len is 10", "enable is false"]),
    ("overlong.filter_truncated=true", ["filter_truncated is true", "enable is false"]),
    ("overlong.truncation_penalty=-0.3", ["truncation_penalty is -0.3", "enable is false"]),
    ("overlong.soft_penalty_mode=cap", ["soft_penalty_mode is cap", "enable is false"]),
    (f"{OVERLONG_ON} overlong.penalty_factor=0.5", ["penalty_factor is 0.5", "buffer_len is 0"]),
    (f"{OVERLONG_ON} buffer=48 overlong.truncation_penalty=-0.3", ["truncation_penalty is -0.3", "buffer_len is 48"]),
    (f"{OVERLONG_ON} buffer=48 overlong.soft_penalty_mode=cap", ["soft_penalty_mode is cap", "buffer_len to 0"]),
    (f"{OVERLONG_ON} buffer=2048", ["buffer_len is 2048", "max_response_length 2048"]),
    (f"{OVERLONG_ON} buffer=48 overlong.expected_len=2001", ["expected_len 2001", "buffer_len 48", "2048"]),
    (f"{OVERLONG_ON} overlong.expected_len=100", ["expected_len is 100", "buffer_len is 0"]),
    (f"{OVERLONG_ON} buffer=48 overlong.penalty_factor=0", ["penalty_factor is 0", "buffer_len 48"]),
    (f"{OVERLONG_ON} overlong.truncation_penalty=0", ["truncation_penalty is 0", "nothing would happen"]),
    (f"{OVERLONG_ON} overlong.truncation_penalty=0.5", ["truncation_penalty is 0.5", "make it negative"]),
    (f"{OVERLONG_ON} overlong.filter_truncated=true", ["filter_truncated is true", "truncation_penalty"]),
    ("algorithm.gamma=0.9", ["algorithm.gamma is 0.9", "adv_estimator is grpo", "gae or reinforce_plus_plus"]),
    ("algorithm.adv_estimator=reinforce_plus_plus algorithm.lam=0.95", ["lam is 0.95", "plus_plus", "to gae"]),
    ("algorithm.adv_estimator=remax algorithm.norm_adv_by_std_in_grpo=false", ["is false", "adv_estimator is remax"]),
    ("algorithm.adv_estimator=rloo rollout.n=1", ["adv_estimator is rloo", "rollout.n is 1"]),
    ("algorithm.adv_estimator=maxrl rollout.n=1", ["adv_estimator is maxrl", "rollout.n is 1"]),
    (f"{MAXRL} algorithm.kl_ctrl.kl_coef=0.1", ["kl_coef is 0.1", "adv_estimator is maxrl", "set kl_coef to 0"]),
    (f"{MAXRL} {OVERLONG_ON} buffer=48", ["overlong_reward_shaping.enable is true", "maxrl", "set enable to false"]),
    (f"{MAXRL} {OVERLONG_ON}", ["overlong_reward_shaping.enable is true", "adv_estimator to grpo or rloo or remax"]),
    (f"{MAXRL} reward.model.path=/models/judge", ["reward.model.path is /models/judge", "maxrl", "set path to null"]),
    ("actor.use_kl_loss=true", ["use_kl_loss is true", "kl_loss_coef is 0"]),
    ("actor.kl_loss_coef=0.01", ["kl_loss_coef is 0.01", "use_kl_loss is false"]),
    ("algorithm.use_kl_in_reward=true", ["use_kl_in_reward is true", "kl_coef is 0"]),
    ("algorithm.use_kl_in_reward=false algorithm.kl_ctrl.kl_coef=0.01",
     ["kl_coef is 0.01", "use_kl_in_reward is false"]),
    ("actor.kl_loss_type=full", ["kl_loss_type is full", "use_kl_loss is false"]),
    ("algorithm.kl_penalty=full", ["kl_penalty is full", "kl_coef is 0"]),
    ("algorithm.kl_ctrl.target_kl=0.1", ["target_kl is 0.1", "type is fixed", "adaptive"]),
    ("algorithm.kl_ctrl.type=adaptive", ["type is adaptive", "kl_coef is 0"]),
    (
        "algorithm.rollout_correction.rollout_is_threshold=3",
        ["rollout_is_threshold is 3", "rollout_is is none", "set rollout_is to token"],
    ),
    ("rc.rollout_is=token rc.rollout_is_threshold=much", ["threshold is much", "0.5_5.0"]),
    ("rc.rollout_is=token rc.rollout_is_threshold=0.9", ["threshold is 0.9", "at least 1"]),
    ("rc.rollout_is=token rc.rollout_is_threshold=0.5_1_2", ["threshold is 0.5_1_2", "lower < 1 < upper"]),
    ("rc.rollout_is=sequence rc.rollout_is_threshold=1.5_5", ["threshold is 1.5_5", "lower < 1 < upper"]),
    ("rc.rollout_is=token rc.rollout_is_threshold=0.5_nan", ["threshold is 0.5_nan", "lower < 1 < upper"]),
    ("rc.rollout_rs_threshold=0.01", ["rollout_rs_threshold is 0.01", "rollout_rs is none"]),
    ("rc.rollout_rs=token_k1", ["rollout_rs_threshold is null", "token_k1 needs bounds lower_upper"]),
    ("rc.rollout_rs=seq_mean_k1 rc.rollout_rs_threshold=0.9", ["threshold is 0.9", "lower < 1 < upper"]),
    ("rc.rollout_rs=seq_mean_k3 rc.rollout_rs_threshold=0.9_1.1", ["threshold is 0.9_1.1", "one upper bound"]),
    ("rc.bypass_mode=true rc.rollout_is=token", ["bypass_mode is true", "rollout_is token", "would be 1"]),
    (
        "rc.bypass_mode=true rc.rollout_rs=token_k1 rc.rollout_rs_threshold=2",
        ["bypass_mode is true", "rollout_rs token_k1", "to none"],
    ),
    ("rc.bypass_mode=true rc.rollout_token_veto_threshold=1e-4", ["bypass_mode is true", "veto_threshold 0.0001"]),
    ("actor.loss_function=a.b:c rc.bypass_mode=true", ["bypass_mode is true", "loss_function"]),
    ("ref.path=other", ["ref.path is other", "no KL coefficient"]),
    ("actor.optim.min_lr=1e-5", ["min_lr is 1e-05", "lr 1e-06"]),
    ("actor.optim.lr_warmup_steps=100", ["lr_warmup_steps is 100", "total_training_steps 100"]),
    ("rollout.top_k=0", ["top_k is 0", "-1"]),
    ("data.prompt_template=Question", ["prompt_template is 'Question'", "put {prompt}"]),
    ("rollout.val_n=4", ["val_n is 4", "val_temperature 0"]),
    ("rollout.request_timeout_s=8000", ["request_timeout_s is 8000", "step_timeout_s 7200"]),
    ("rollout.server_urls=[localhost:30000]", ["'localhost:30000'", "http://host:port"]),
    ("rollout.server_urls=[http://a:99999]", ["'http://a:99999'"]),
    ("rollout.server_urls=['http://[::1:3000']", ["'http://[::1:3000'"]),
    ("rollout.server_urls=[http://a:1,http://a:1]", ["http://a:1 2 times"]),
    ("rollout.server_urls=[http://a:1] rollout.server_urls_file=f", ["server_urls_file 'f'", "one of them"]),
    ("rollout.server.nnodes=2 rollout.server.num_servers=3", ["num_servers is 3", "server.nnodes 2"]),
    ("trainer.test_freq=0", ["test_freq is 0"]),
    ("trainer.test_freq=5 data.val_files=[]", ["test_freq is 5", "val_files is empty"]),
    ("data.val_files=[train.jsonl]", ["train.jsonl", "not held out"]),
]  # fmt: skip


def test_a_sound_config_passes():
    assert mistakes("") == []


@pytest.mark.parametrize(("text", "words"), CONTRADICTIONS, ids=[row[0] for row in CONTRADICTIONS])
def test_a_contradiction_is_one_sentence_with_keys_and_values(text, words):
    (sentence,) = mistakes(text)
    assert all(word in sentence for word in words), sentence


@pytest.mark.parametrize(
    "text",
    [
        f"{SAMPLING_ON} data.gen_batch_size=1536",
        f"{SAMPLING_ON} data.gen_batch_size=64",
        f"{SAMPLING_ON} sampling.filter_mode=none rollout.n=1",
        f"{SAMPLING_ON} sampling.form=mask sampling.max_num_gen_batches=3 sampling.on_exhausted=train_partial",
        f"{SAMPLING_ON} sampling.filter_mode=seq_final_reward data.gen_batch_size=1024",
        f"{SAMPLING_ON} sampling.filter_mode=seq_final_reward algorithm.use_kl_in_reward=true "
        "algorithm.kl_ctrl.kl_coef=0.01",
        "rollout.max_staleness=2 rc.rollout_is=token rc.rollout_is_threshold=0.5_5.0",
        "rollout.max_staleness=2 rc.bypass_mode=true",
        "rollout.max_staleness=2 rc.rollout_rs=token_k1 rc.rollout_rs_threshold=2 rc.rollout_token_veto_threshold=1e-4",
        "rollout.max_staleness=1 rc.rollout_is=token weight_sync.pause_mode=in_place",
        "rc.rollout_is=token rc.rollout_is_threshold=1",
        "rc.rollout_is=token rc.rollout_is_threshold='2.0'",  # a text
        "rc.rollout_rs=seq_mean_k3 rc.rollout_rs_threshold='0.01'",
        "rc.rollout_is=sequence rc.rollout_rs=seq_mean_k1 rc.rollout_rs_threshold=0.999_1.001",
        "rc.rollout_rs=seq_mean_k1 rc.rollout_rs_threshold=1.01",
        "rc.rollout_rs=seq_mean_k3 rc.rollout_rs_threshold=0.01",
        "rollout.max_staleness=2 algorithm.rollout_correction.rollout_is=token",
        "rollout.max_staleness=2 algorithm.rollout_correction.rollout_is=token rollout.max_concurrency=64 "
        "rollout.server.max_running_requests=64",
        "rollout.max_concurrency=65 rollout.server.max_running_requests=64",
        f"{SPREAD} sampling.max_num_gen_batches=0 data.gen_batch_size=1",
        f"{SPREAD} sampling.form=mask",
        "sampling.enable=false sampling.filter_mode=remove_all_correct",
        "overlong.enable=false buffer=10 overlong.penalty_factor=0.5",
        "algorithm.dapo.enable=false sampling.enable=true overlong.enable=true buffer=10",
        "algorithm.filter_groups.enable=false algorithm.filter_groups.metric=score",
        "actor.use_dapo=false actor.clip_ratio_high=0.3",
        "actor.clip_ratio_low=null actor.clip_ratio_high=null",
        "actor.use_dapo=true actor.clip_ratio_low=null actor.clip_ratio=0.1",
        f"{OVERLONG_ON} buffer=512 overlong.filter_truncated=true",
        f"{OVERLONG_ON} buffer=48 overlong.expected_len=2000",
        f"{OVERLONG_ON} overlong.soft_penalty_mode=cap overlong.truncation_penalty=0.1",
        "actor.use_kl_loss=true actor.kl_loss_coef=0.01 ref.path=other",
        "algorithm.use_kl_in_reward=true algorithm.kl_ctrl.kl_coef=0.01 algorithm.kl_ctrl.type=adaptive",
        "algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=5",
        "actor.clip_ratio_c=null actor.use_dapo=true actor.clip_ratio_high=0.5",
        "data.filter_overlong_prompts=false data.truncation=left",
        "rollout.top_p=0.9 rollout.top_k=50 rollout.temperature=0.7",
        "rollout.server_urls=[http://127.0.0.1:30000,'https://[::1]:30001',http://host.example:80/]",
        "reward.function=my_package.rewards:score",
        "trainer.n_procs_per_node=4 tp=2 pp=2 vpp=3 megatron.sequence_parallel=true",
        # 12 layers: embedding and head have stages of their own
        "trainer.n_procs_per_node=14 pp=14",
        "trainer.n_procs_per_node=5 pp=5 megatron.recompute_granularity=full",
        "trainer.n_procs_per_node=2 pp=2 vpp=2 megatron.pipeline_layers=[0,5,7,0]",
        "rollout.server.tensor_model_parallel_size=12",
        "megatron.overlap_grad_reduce=true megatron.use_distributed_optimizer=false",
        "megatron.fp8=hybrid megatron.fp8_recipe=delayed trainer.n_procs_per_node=2 tp=2",
    ],
)
def test_what_makes_sense_is_allowed(text):
    assert mistakes(text) == []


def test_all_contradictions_are_reported_together():
    text = "data.train_batch_size=100 megatron.sequence_parallel=true trainer.test_freq=0 rollout.top_k=0"
    assert len(mistakes(f"{text} reward.function=x")) == 5


def test_the_number_of_processes_started_must_be_the_world_size():
    (sentence,) = mistakes("", num_processes=4)
    assert "started 4 processes" in sentence and "n_procs_per_node 1" in sentence
    assert mistakes("trainer.nnodes=2 trainer.n_procs_per_node=2", num_processes=4) == []


@pytest.mark.parametrize("key", ["reward.pass_env", "actor_rollout_ref.rollout.multi_turn.pass_env"])
def test_a_value_among_the_names_of_variables_is_refused_and_not_shown(key):
    multi_turn = [
        f"actor_rollout_ref.rollout.multi_turn.{word}" for word in ("enable=true", "environment=reasoning_gym")
    ]
    with pytest.raises(UserError) as caught:
        validate(load_config(None, [*multi_turn, f"{key}=[JUDGE_API_KEY=sk-12345]"]), MODEL_JSON)
    assert f"{key}[0]" in str(caught.value) and "sk-12345" not in str(caught.value)
