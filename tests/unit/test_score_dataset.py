"""score_dataset: every row gets its prompt's share of right answers; the rest of the file stays."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from checkpoints_tools.score_dataset import main
from tests.fake_rollout import RIGHT, WORDS, WRONG, Script, rollout_folder, server_in_thread
from tests.model_json import MODEL_JSON

pytestmark = pytest.mark.unit

ROLLOUT = "actor_rollout_ref.rollout"
WORDS_OF = {0: ("right", "wrong", "wrong", "wrong"), 1: RIGHT, 2: WRONG}
# p1 twice, and one longer than max_prompt_length, never answered
ROWS = [
    {"prompt": prompt, "label": "right", "data_source": "fake", "number": number}
    for number, prompt in enumerate(("p0", "p1", "p2", "p1", " ".join(["p3"] * 9)))
]
RATES = [0.25, 1.0, 0.0, 1.0, None]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for made in rollout_folder(tmp_path, monkeypatch):
        (made / "config.json").write_text(json.dumps({**MODEL_JSON, "vocab_size": len(WORDS)}))
        yield made


def arguments(folder, server, name, *more):
    return [
        "--data", str(folder / name), "--output", str(folder / f"scored.{name.partition('.')[2]}"), *more,
        f"--model={folder}", f"--server={server.url if server else 'http://127.0.0.1:9'}",
        "data.apply_chat_template=false", "data.max_prompt_length=4", "data.max_response_length=8",
        "--num-answers=4", f"{ROLLOUT}.server.startup_timeout_s=20.0",
        "reward.function=fake_rewards:score", "reward.num_workers=1",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["data.jsonl", "data.parquet"])
def test_each_row_gets_its_rate_and_stays_as_it_is(folder, name, capsys):
    if name.endswith("jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / name)
    with server_in_thread(Script(WORDS_OF)) as server:
        assert main(arguments(folder, server, name)) == 0
    assert "4 of 5 rows have a pass rate" in capsys.readouterr().out
    if name.endswith("jsonl"):
        scored = [json.loads(line) for line in (folder / "scored.jsonl").read_text().splitlines()]
    else:
        scored = pyarrow.parquet.read_table(folder / "scored.parquet").to_pylist()
    assert scored == [{**row, "pass_rate": rate} for row, rate in zip(ROWS, RATES, strict=True)]
    with server_in_thread() as server:  # a second time it is refused before anybody is asked
        assert main(arguments(folder, server, name)) == 2 and not server.requests
    assert "exists already" in capsys.readouterr().err


def test_mistakes_are_one_sentence_and_leave_no_file(folder, capsys):
    (folder / "data.jsonl").write_text(json.dumps({**ROWS[0], "pass_rate": 0.5}) + "\n")
    with server_in_thread(Script(WORDS_OF)) as server:
        assert main(arguments(folder, server, "data.jsonl")) == 2 and not server.requests
        assert "has a column 'pass_rate' already" in capsys.readouterr().err
        assert main([*arguments(folder, server, "data.jsonl"), "--column=rate"]) == 0
    assert json.loads((folder / "scored.jsonl").read_text()) == {**ROWS[0], "pass_rate": 0.5, "rate": 0.25}
    for options, words in (
        (["--output", str(folder / "x.parquet")], "is of another kind"),
        (["--output", str(folder / "no" / "x.jsonl")], "there is no folder"),
        (["--data", str(folder / "none.jsonl"), "--output", str(folder / "y.jsonl")], "which is not a file here"),
    ):
        assert main([*arguments(folder, None, "data.jsonl"), *options]) == 2
        assert words in capsys.readouterr().err
    assert sorted(path.name for path in folder.glob("[xy]*.jsonl")) == []
