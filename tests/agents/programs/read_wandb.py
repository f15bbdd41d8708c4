"""The records of an offline run of Weights & Biases: read_wandb.py FILE."""

import json
import struct
import sys
import time
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record

BLOCK = 32768  # of the file, which is a LevelDB log


def records(file: Path) -> list:
    """The records of an offline run's file."""
    content = file.read_bytes()
    at, parts, parsed = 7, b"", []  # behind the file's own head
    while len(content) - at > 7:
        if (left := BLOCK - at % BLOCK) < 7:  # too little for a head: filled up
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, at)
        if at + 7 + size > len(content):  # it is still being written
            break
        parts += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part of one
            parsed.append(Record.FromString(parts))
            parts = b""
    return parsed


def whole(file: Path) -> list:
    """The same, when all is there: another process writes the file, a record of the end last."""
    deadline = time.monotonic() + 30
    while "exit" not in [record.WhichOneof("record_type") for record in records(file)]:
        assert time.monotonic() < deadline, "the client never ended"
        time.sleep(0.05)
    return records(file)


def main(file: str) -> None:
    all_records = whole(Path(file))
    history = [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in all_records
        if record.WhichOneof("record_type") == "history"
    ]
    metrics = [record.metric for record in all_records if record.WhichOneof("record_type") == "metric"]
    print(json.dumps({"history": history, "axes": [[each.glob_name, each.step_metric] for each in metrics]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
