"""The benchmarks run and tell the truth: memory counted by hand, the report's form, their purpose.

The purpose: the training head needs a sixth of the memory of a plain one.
"""

import json
import math

import pytest
import torch

from benchmarks import bench_head, bench_loss
from benchmarks.bench_weight_sync import RAW
from benchmarks.head_case import make_case
from benchmarks.head_providers import PROVIDERS
from benchmarks.measure import in_turns, ratio_of
from benchmarks.memory import peak_bytes
from benchmarks.shapes import GPU_SHAPES, SHAPES, Shape
from tests.helpers import REPOSITORY

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
KIB = 1024


def test_peak_is_the_most_that_is_held_at_once():
    def work():
        a = torch.zeros(KIB)  # 4 KiB held
        b = a + 1  # 8
        del a  # 4
        c = torch.cat([b, b])  # 4 + 8
        del b, c  # 0
        return torch.zeros(2 * KIB)  # 8

    assert peak_bytes(work) == 12 * KIB


def test_peak_sees_what_autograd_keeps_and_temporaries_inside_operators():
    x = torch.ones(KIB, requires_grad=True)

    def keeps():  # exp saves its result: y, its square and the sum's 4 bytes are held together
        y = x.exp()
        return (y * y).sum()

    assert peak_bytes(keeps) == 2 * 4 * KIB + 4
    # sort's own scratch is invisible from Python: more is held than its two results
    values = torch.rand(KIB)
    assert peak_bytes(lambda: torch.sort(values, stable=True)) >= (4 + 8) * KIB


# every term grows with them alike; at the documents' 32768 this would take four times as long
COLUMNS = 8192


def peak_of_training(name: str, num_tokens: int) -> int:
    """A small hidden size: the products, which are quick then, hold nothing of the size [T, V]."""
    shape = Shape("", num_tokens, hidden_size=8, vocab_size=COLUMNS, about="")
    case = make_case(shape, CPU, torch.float32, with_entropy=True)
    provider = next(p for p in PROVIDERS if p.name == name)
    head = provider.make()
    return peak_bytes(lambda: bench_head.one_pass(provider, head, case))


def test_training_head_needs_at_most_a_sixth_of_the_memory_of_log_softmax_and_entropy():
    """At 8192 tokens. The plain head holds five [T, V] tensors of float32, measured for fewer
    tokens and drawn out."""
    few, more, between = (peak_of_training("naive", num_tokens) for num_tokens in (64, 320, 192))
    assert between == (few + more) / 2, "its memory is a line over the number of tokens"
    plain = few + (more - few) * (8192 - 64) // (320 - 64)
    assert 5 * 8192 * COLUMNS * 4 <= plain < 5.1 * 8192 * COLUMNS * 4  # as docs/kernels.md says
    assert peak_of_training("ours fused", 8192) <= plain / 6


def test_memory_table_of_the_docs_is_that_of_the_shapes():
    """float32 copies are 4 bytes per logit, plain ones are five;
    a chunk of the fused head has 4 + 2."""
    lines = (REPOSITORY / "docs/kernels.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    table = {row[0].strip("`"): row[1:] for row in rows if len(row) == 7}
    assert table.keys() == set(GPU_SHAPES)
    for name, cells in table.items():
        shape = SHAPES[name]
        column, copy = shape.vocab_size / 2**30, 4 * shape.num_tokens * shape.vocab_size / 2**30
        sizes = [copy, 5 * copy, 6 * 4096 * column, 6 * 1024 * column]
        assert [int(cell) for cell in cells[:2]] == [shape.num_tokens, shape.vocab_size]
        for cell, size in zip(cells[2:], sizes, strict=True):
            assert float(cell.removesuffix(" GiB")) == pytest.approx(size, abs=0.05 if size > 10 else 0.005)


def test_committed_results_keep_the_promise_and_are_those_of_the_docs():
    """At 8192 tokens and 32768 columns, in one run on a CPU: memory, and time over plain products
    and plain head."""
    report = json.loads((REPOSITORY / "benchmarks/results/head_cpu.json").read_text())
    check_report(report, "head")
    (result,) = [r for r in report["results"] if r["shape"]["num_tokens"] == 8192 and r["shape"]["vocab_size"] == 32768]
    rows = {row["provider"]: row for row in result["rows"]}
    ours, plain = rows["ours fused"], rows["naive"]
    assert ours["peak_bytes"] <= plain["peak_bytes"] / 6
    assert ours["ratios"]["naive"] <= 0.7 and ours["ratios"]["G3"] <= 1.25
    shown = [
        f"| {name} | {row['ratios']['G3']:.2f} | {row['ratios']['naive']:.2f} | {row['peak_bytes'] / 2**20:.0f} MiB |"
        for name, row in rows.items()
    ]
    lines = (REPOSITORY / "docs/kernels.md").read_text().splitlines()
    assert all(line in lines for line in shown), "\n".join(shown)


BENCHMARKS = {"head": bench_head, "loss": bench_loss}


def check_report(report: dict, name: str) -> None:
    assert report["schema"] == 1 and report["benchmark"] == name
    assert report["date"].startswith("20") and report["date"].endswith("+00:00")
    assert report["hardware"].keys() >= {"device", "cpu", "threads"} and report["versions"].keys() >= {
        "torch",
        "python",
    }
    for result in report["results"]:
        assert result["shape"].keys() >= {"name", "num_tokens", "hidden_size", "vocab_size"}
        assert result["yardsticks"].keys() >= {"G1", "G3", "G4"}
        assert all(seconds > 0 for seconds in result["yardsticks"].values())
        for row in result["rows"]:
            assert row["failure"] is None, row
            assert row["ratios"].keys() >= {"G1", "G3", "G4"}
            numbers = [row["forward_s"], row["total_s"], row["peak_bytes"], *row["ratios"].values()]
            assert all(number > 0 and math.isfinite(number) for number in numbers), row
            assert row["errors"] and all(value < 1e-4 for value in row["errors"].values()), row
    assert all(left_out.keys() == {"provider", "reason"} for left_out in report["skipped"])


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_quick_benchmark_reports_finite_ratios(name, tmp_path, capsys):
    bench, path = BENCHMARKS[name], tmp_path / "results" / "quick.json"
    ours = [p.name for p in bench.PROVIDERS if p.ours]
    bench.main(["--quick", "--device", "cpu", "--providers", ",".join(ours), "--json", str(path)])
    report = json.loads(path.read_text())
    check_report(report, name)
    assert [row["provider"] for row in report["results"][0]["rows"]] == ours
    table = capsys.readouterr().out
    assert all(word in table for word in (*ours, "/ G3", "peak", "error"))


def test_ratios_are_taken_within_a_round():
    """A machine three times slower in one round changes no ratio."""
    speeds = iter([1.0, 1.0, 3.0, 3.0, 1.0, 1.0])
    samplers = {"yard": lambda: {"G1": next(speeds)}, "ours": lambda: {"total": 2 * next(speeds)}}
    samples = in_turns(samplers, rounds=3, warm_up=0)
    assert ratio_of(samples["ours"], "total", samples["yard"], "G1") == 2.0


def test_the_pages_have_the_committed_figures_of_hand_over_and_push():
    (whole,) = [row for row in _results("hand_over") if row["share_of_recipe"] == 1]
    text = " ".join((REPOSITORY / "docs/rollout.md").read_text().split())
    assert f"takes {whole['to_rank_0_s']:.2f} s to rank 0, {whole['to_ranks_s']:.2f} s to all ranks" in text
    lines = (REPOSITORY / "docs/weight_sync.md").read_text().splitlines()
    pushes = [row for row in _results("weight_sync") if row["receiver"] == "SGLang"]
    assert len(pushes) == 4
    for row in pushes:
        shares = " | ".join(f"{row['share_of_raw'][f'raw, {into}']:.0%}".replace("%", " %") for into in RAW)
        name = f"SGLang, {row['num_bytes'] / 1e6:.0f} MB"
        assert f"| {name} | {row['num_buckets']} | {row['seconds']['push']:.3f} s | {shares} |" in lines


def _results(name: str) -> list[dict]:
    return json.loads((REPOSITORY / "benchmarks" / "results" / f"{name}_cpu.json").read_text())["results"]
