"""Published silent numerical bugs of other projects,
each as a change of our source for a test to find.

`make mutation ARGS=published` puts every bug into a copy of the tree and runs the tests named with
it. A word behind it (`ARGS='published experts'`) chooses the bugs with it in their names.
docs/exactness.md tells their story.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("megatron_dapo", "tests", "configs", "examples", "checkpoints_tools", "launch", "benchmarks", "slurm", "docs")


@dataclass(frozen=True)
class PublishedBug:
    """before stands in `path` exactly once; with `after` in its place the program has the bug.

    name: as docs/exactness.md gives it. test: a node of pytest that must fail. base: the other case
    of a comparison of layouts; only these two cases are run.
    """

    name: str
    path: str
    before: str
    after: str
    test: str
    base: str = ""

    def source(self) -> str:
        """Return the changed file. Raises ValueError unless the text to change occurs once."""
        original = (ROOT / self.path).read_text()
        if original.count(self.before) != 1:
            raise ValueError(f"{self.name}: its text stands {original.count(self.before)} times in {self.path}")
        return original.replace(self.before, self.after)

    @property
    def cases(self) -> list[str]:
        """Return the layouts that the test needs; none if it compares none."""
        return [*re.findall(r"\[(.*)\]", self.test), self.base] if self.base else []


LAYOUTS = "tests/distributed/test_layouts.py"
OF_LAYOUTS = f"{LAYOUTS}::test_loss_metrics_gradients_and_weights_are_those_of_one_process"
OF_MIXTURES = f"{LAYOUTS}::test_a_mixture_of_experts_gets_the_gradients_of_all_tokens_wherever_its_experts_are"
OF_FAMILIES = f"{LAYOUTS}::test_layers_of_other_families_give_the_same_in_every_layout"
OF_SHARED = f"{LAYOUTS}::test_dense_layers_and_shared_experts_get_the_gradients_of_one_process_and_biases_stay"
OF_TIED = f"{LAYOUTS}::test_a_tied_model_gets_the_gradients_of_both_uses_of_its_weight"
LORA = "tests/distributed/test_lora.py"
OF_ADAPTERS = f"{LORA}::test_loss_gradients_of_adapters_and_merged_weights_are_those_of_one_process"

LAYERS, OPTIMIZER = "megatron_dapo/models/layers.py", "megatron_dapo/training/optimizer.py"
BUILD, ADAPTERS = "megatron_dapo/models/build.py", "megatron_dapo/models/lora.py"
STATISTICS, SCHEDULE = "megatron_dapo/kernels/statistics.py", "megatron_dapo/training/schedule.py"
DELTA_NET = "megatron_dapo/models/attention/delta_net.py"
TRAJECTORY = "megatron_dapo/rollout/trajectory.py"

MERGED = "    return merge(gathered)\n"
FINALIZED = "    model.config.finalize_model_grads_func = finalize_model_grads\n"
MARKED_EXPERTS = "mark(parameter, allreduce=False, tensor_model_parallel=True, sequence_parallel=False)"
FINISHED = "                return finish(answer, batch)\n"

BUGS = (
    PublishedBug(
        "local-vocabulary",
        STATISTICS,
        MERGED,
        "    return merge(stats_N4[None])\n",
        f"{OF_LAYOUTS}[tp2/token-mean/padded]",
        "tp1/token-mean/whole",
    ),
    PublishedBug(
        "logits-as-shards",
        STATISTICS,
        MERGED,
        "    return merge(torch.cat([gathered, gathered]))\n",
        f"{OF_LAYOUTS}[tp2/token-mean/padded]",
        "tp1/token-mean/whole",
    ),
    PublishedBug(
        "sinks-not-in-the-norm",
        BUILD,
        "        _mark_sinks(chunk)\n",
        "",
        f"{OF_SHARED}[tp2_sp_ep2/gpt_oss_small]",
        "tp1/gpt_oss_whole",
    ),
    PublishedBug(
        "partial-norm-gradient",
        OPTIMIZER,
        FINALIZED,
        f"    model.config.qk_layernorm = False\n{FINALIZED}",
        f"{OF_LAYOUTS}[tp2/token-mean/padded]",
        "tp1/token-mean/whole",
    ),
    PublishedBug(
        "partial-gated-norm-gradient",
        DELTA_NET,
        "copy_to_tensor_model_parallel_region(self.weight, group=self._group)",
        "self.weight",
        f"{OF_FAMILIES}[tp2/qwen3_5/small]",
        "tp1/qwen3_5/whole",
    ),
    PublishedBug(
        "decays-not-in-the-norm",
        DELTA_NET,
        "set_tensor_model_parallel_attributes(parameter, True, 0, 1)",
        "set_tensor_model_parallel_attributes(parameter, False, 0, 1)",
        f"{OF_FAMILIES}[tp2_sp/qwen3_5/small]",
        "tp1/qwen3_5/whole",
    ),
    PublishedBug(
        "local-layer-names",
        "megatron_dapo/models/weight_map.py",
        '{"l": layer.layer_number - 1}',
        '{"l": int(local)}',
        f"{OF_LAYOUTS}[pp2/token-mean/padded]",
        "tp1/token-mean/whole",
    ),
    PublishedBug(
        "experts-not-in-the-norm",
        BUILD,
        MARKED_EXPERTS,
        MARKED_EXPERTS.replace("parallel=True", "parallel=False"),
        f"{OF_MIXTURES}[tp2_sp_ep2/small]",
        "tp1/whole",
    ),
    PublishedBug(
        "experts-summed-over-the-wrong-ranks",
        BUILD,
        MARKED_EXPERTS,
        MARKED_EXPERTS.replace("allreduce=False", "allreduce=True"),
        f"{OF_MIXTURES}[tp2_sp/small]",
        "tp1/whole",
    ),
    PublishedBug(
        "sinks-dropped-by-context-parallelism",
        LAYERS,
        "        if self.softmax_offset is not None:\n            query, key",
        "        if self.softmax_offset is not None and self._context_group is None:\n            query, key",
        f"{OF_SHARED}[cp2_ep2/gpt_oss_small]",
        "tp1/gpt_oss_whole",
    ),
    PublishedBug(
        "window-dropped-by-context-parallelism",
        LAYERS,
        "has_window = 0 <= self._num_before < key.size(2) - 1",
        "has_window = self._context_group is None and 0 <= self._num_before < key.size(2) - 1",
        f"{OF_FAMILIES}[cp2/gemma3/small]",
        "tp1/gemma3/whole",
    ),
    PublishedBug(
        "replicated-weight-counted-tp-times",
        "megatron_dapo/models/attention/latent_attention.py",
        "mark(self.weight, sequence_parallel=config.sequence_parallel)",
        "mark(self.weight, sequence_parallel=config.sequence_parallel, tensor_model_parallel=True)",
        f"{OF_SHARED}[tp2_sp_ep2/deepseek_v3_small]",
        "tp1/deepseek_v3_whole",
    ),
    PublishedBug(
        "replicated-norm-counted-tp-times",
        LAYERS,
        "mark(self.weight, sequence_parallel=config.sequence_parallel)",
        "mark(self.weight, sequence_parallel=config.sequence_parallel, tensor_model_parallel=True)",
        f"{OF_LAYOUTS}[tp2_sp/token-mean/padded]",
        "tp1/token-mean/whole",
    ),
    PublishedBug(
        "hidden-gradient-not-summed",
        "megatron_dapo/kernels/fused_head.py",
        "elif self._group is not None and self._group.size() > 1:",
        "elif False:",
        f"{OF_LAYOUTS}[tp2/token-mean/padded]",
        "tp1/token-mean/whole",
    ),
    PublishedBug(
        "tied-gradient-not-summed",
        OPTIMIZER,
        FINALIZED,
        "    import sys\n\n    finalizing = sys.modules['megatron.core.distributed.finalize_model_grads']\n"
        f"    finalizing._allreduce_word_embedding_grads = lambda *args, **kwargs: None\n{FINALIZED}",
        f"{OF_TIED}[pp2/small]",
        "tp1/whole",
    ),
    PublishedBug(
        "adapter-gradient-not-summed",
        ADAPTERS,
        "sequence_parallel=self._layout.sp",
        "sequence_parallel=False",
        f"{OF_ADAPTERS}[tp2_sp/small]",
        "tp1/whole",
    ),
    PublishedBug(
        "expert-adapter-partial",
        ADAPTERS,
        'if self.entry.expert is None or (self._cut, kind) not in ((0, "A"), (1, "B")):',
        "if True:",
        f"{LORA}::test_adapters_of_experts_get_the_gradients_of_all_their_tokens[tp2_sp_etp2/small]",
        "tp1/whole",
    ),
    PublishedBug(
        "reference-with-adapters",
        ADAPTERS,
        "        adapter.is_on = False\n",
        "        adapter.is_on = True\n",
        f"{LORA}::test_the_reference_is_the_model_without_adapters",
        "tp1/kl",
    ),
    PublishedBug(
        "mean-of-micro-batch-means",
        SCHEDULE,
        FINISHED,
        "                result = finish(answer, batch)\n"
        "                if forward_only:\n"
        "                    return result\n"
        "                count = result[1].clamp(min=1)\n"
        "                return result[0] / count, count // count, result[2]\n",
        f"{OF_LAYOUTS}[tp2_sp/rejected_k3/small]",
        "tp1/rejected_k3/whole",
    ),
    PublishedBug(
        "mean-of-rank-means",
        OPTIMIZER,
        FINALIZED,
        """
    def finalize(chunks, num_tokens=None, **options):
        ranks = torch.distributed.get_world_size()
        for chunk in chunks:
            chunk.scale_gradients(1.0 / (float(num_tokens) * ranks))
        finalize_model_grads(chunks, None, **options)

    model.config.finalize_model_grads_func = finalize
""",
        f"{OF_LAYOUTS}[dp2/token-mean/small]",
        "tp1/token-mean/whole",
    ),
    PublishedBug(
        "divided-by-the-micro-batches-too",
        SCHEDULE,
        FINISHED,
        "                result = finish(answer, batch)\n"
        "                return result if forward_only else (result[0] / len(batches), *result[1:])\n",
        f"{OF_LAYOUTS}[tp2_sp/rejected_k3/small]",
        "tp1/rejected_k3/whole",
    ),
    PublishedBug(
        "count-not-told-to-megatron",
        SCHEDULE,
        FINISHED,
        "                result = finish(answer, batch)\n"
        "                return result if forward_only else (result[0], result[2])\n",
        f"{OF_LAYOUTS}[tp2_sp/rejected_k3/small]",
        "tp1/rejected_k3/whole",
    ),
    PublishedBug(
        "metric-is-a-mean-of-means",
        "megatron_dapo/training/metric_sums.py",
        "torch.stack([part.sums for part in aligned]).sum(0)",
        "torch.stack([part.sums / part.sums[:, 1:].clamp_min(1.0) for part in aligned]).sum(0)",
        f"{OF_LAYOUTS}[tp2_sp/token-mean/small]",
        "tp1/token-mean/whole",
    ),
    PublishedBug(
        "prefixes-of-older-weights",
        "megatron_dapo/servers/server_slots.py",
        'return f"{self._salt}-{self.version}" if self._salt else None',
        "return self._salt",
        "tests/unit/test_cache_salts.py::test_a_salt_keeps_new_requests_from_prefixes_that_older_weights_read",
    ),
    PublishedBug(
        "cache-not-flushed",
        "megatron_dapo/weight_sync/sender.py",
        "flush_cache=last and self._flushes",
        "flush_cache=False",
        "tests/unit/test_weight_sync_sender.py"
        "::test_a_server_has_no_version_between_first_and_last_bucket_and_flushes_only_with_the_last",
    ),
    PublishedBug(
        "turns-tokenized-again",
        TRAJECTORY,
        "            trajectory.add_model_turn(generation)\n            budget.num_routed",
        "            again = self.tokenizer._encode(self.tokenizer.decode(generation.tokens, False))\n"
        "            again = (again + again)[: len(generation.tokens)]\n"
        "            trajectory.add_model_turn(replace(generation, tokens=np.array(again, dtype=TOKEN)))\n"
        "            budget.num_routed",
        "tests/unit/test_trajectory.py::test_the_server_is_sent_the_very_tokens_it_wrote",
    ),
    PublishedBug(
        "log-probs-of-the-next-token",
        TRAJECTORY,
        "self._add(generation.tokens, generation.log_probs, 1, generation.weight_versions)",
        "self._add(generation.tokens, np.roll(generation.log_probs, -1), 1, generation.weight_versions)",
        "tests/unit/test_trajectory.py::test_the_server_is_sent_the_very_tokens_it_wrote",
    ),
    PublishedBug(
        "end-token-without-loss",
        TRAJECTORY,
        "        # with those of an environment's tokens before it\n",
        "        self.loss_mask = np.append(self.loss_mask[:-1], np.zeros(1, MASK))\n",
        "tests/unit/test_trajectory.py::test_the_server_is_sent_the_very_tokens_it_wrote",
    ),
    PublishedBug(
        "return-ends-at-an-observation",
        "megatron_dapo/algorithms/gae.py",
        "decay = torch.where(counted, gamma * lam * goes_on, 1)",
        "decay = torch.where(counted, gamma * lam * goes_on, 0)",
        "tests/unit/test_algorithms_gae.py::test_reinforce_plus_plus_discounts_what_is_still_to_come",
    ),
    PublishedBug(
        "moments-not-restored",
        "megatron_dapo/checkpointing/torch_dist/loading.py",
        "    planner = SliceLoadPlanner(slices, [generators_name(layout)] if is_same_layout else [])\n",
        '    slices = [each for each in slices if "exp_avg" not in each.name]\n'
        "    planner = SliceLoadPlanner(slices, [generators_name(layout)] if is_same_layout else [])\n",
        "tests/unit/test_optimizer_state.py::test_checkpoints_go_from_the_host_to_the_gpu_and_back",
    ),
    PublishedBug(
        "groups-by-position",
        "megatron_dapo/data/batching.py",
        "members.setdefault(earned.uid, [])",
        "members.setdefault(str(sample_id // 2), [])",
        "tests/unit/test_batching.py::test_advantages_compare_within_the_group_only",
    ),
    PublishedBug(
        "segments-see-each-other",
        LAYERS,
        "segments_by_length(tuple(packed_seq_params.cu_seqlens_q.tolist()), query.device, padded=True)",
        "segments_by_length((0, query.size(0)), query.device, padded=True)",
        "tests/unit/test_packed_attention.py::test_packed_segments_are_single_runs_bit_for_bit",
    ),
    PublishedBug(
        "temperature-not-applied",
        "megatron_dapo/models/log_prob_head.py",
        "return Head(weight, self._linear[0].tp_group, self._vocab_size, task.temperature)",
        "return Head(weight, self._linear[0].tp_group, self._vocab_size, 1.0)",
        "tests/unit/test_training_checks.py::test_other_layers_would_be_noticed",
    ),
    PublishedBug(
        "key-without-effect",
        "megatron_dapo/training/loss_config.py",
        "entropy_coef=actor.entropy_coef,",
        "entropy_coef=0.0,",
        "tests/unit/test_seed_options.py::test_clipping_and_the_entropy_bonus",
    ),
)


def run(parts: Sequence[str] = ()) -> int:
    """Put in every bug with one of the parts in its name, and return the number no test notices.

    Raises RuntimeError if a test fails in the unchanged tree,
    or cannot be run: then its failure means nothing.
    """
    bugs = [bug for bug in BUGS if not parts or any(part in bug.name for part in parts)]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="published-") as name:
        tree = Path(name)
        for each in COPIED:
            shutil.copytree(ROOT / each, tree / each, ignore=shutil.ignore_patterns("__pycache__"))
        for each in (*ROOT.glob("*.toml"), *ROOT.glob("*.md"), ROOT / "Makefile"):
            shutil.copy(each, tree)
        if not _pass(tree, bugs):
            raise RuntimeError("the tests fail in the unchanged tree")
        unnoticed = 0
        for bug in bugs:
            path = tree / bug.path
            original = path.read_text()
            path.write_text(bug.source())
            survives = _pass(tree, [bug])
            path.write_text(original)
            unnoticed += survives
            print(f"{'SURVIVES' if survives else 'noticed '}  {bug.name}  {bug.test}", flush=True)
    print(f"{len(bugs)} published bugs, {unnoticed} unnoticed; {time.monotonic() - started:.0f} s")
    return unnoticed


def _pass(tree: Path, bugs: Sequence[PublishedBug]) -> bool:
    """Return whether the tests of the bugs pass, in processes that import the tree."""
    cases = " ".join(sorted({case for bug in bugs for case in bug.cases}))
    tests = dict.fromkeys(bug.test for bug in bugs)
    command = [sys.executable, "-B", "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", *tests]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(tree),
        "PROOFS": "1",
    }
    done = subprocess.run(
        command, cwd=tree, env=environment | {"LAYOUT_CASES": cases}, capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
    return done.returncode == 0
