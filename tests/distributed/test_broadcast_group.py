"""The trainer's end of a weight group, with real processes as the servers:
the rest after one dies."""

from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist

from megatron_dapo.weight_sync.broadcast_group import BroadcastGroup
from tests.forked_ranks import fork_server

pytestmark = pytest.mark.distributed

WAIT_S = 60.0  # far above the time of a breaking connection
NUM_BYTES = 4 << 20


def receive(rank: int, port: int, pipe: Connection) -> None:
    """Join as SGLang's helper of torch does, and receive when told to; report the outcome."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=10 * WAIT_S)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=limit)
    for prefix in ("weights", "weights/", "cpu/"):
        store = dist.PrefixStore(prefix, store)
    backend = dist.ProcessGroupGloo(store, rank, 3, limit)
    pipe.send("joined")
    while True:
        pipe.recv()
        options = dist.BroadcastOptions()
        options.rootRank = 0
        try:
            backend.broadcast([torch.empty(NUM_BYTES, dtype=torch.uint8)], options).wait()
            pipe.send("received")
        except RuntimeError:
            pipe.send("broken")


@pytest.mark.parametrize("dead", [1, 2])
def test_a_group_that_broke_lets_go_of_its_members_while_its_error_is_kept(dead: int):
    """The handler of an error keeps it, with the frames of its traceback. Members waiting for the
    next broadcast learn of its absence only by the end of the connection."""
    group = BroadcastGroup("weights", "127.0.0.1", 3, torch.device("cpu"), WAIT_S)
    context = fork_server()
    pipes, processes = {}, {}
    for rank in (1, 2):
        pipes[rank], far = context.Pipe()
        processes[rank] = context.Process(target=receive, args=(rank, group.port, far), daemon=True)
        processes[rank].start()
    try:
        group.ready.result(WAIT_S)
        assert all(pipe.recv() == "joined" for pipe in pipes.values())
        processes[dead].kill()
        processes[dead].join()

        sent = group.broadcast([torch.zeros(NUM_BYTES, dtype=torch.uint8)], 10 * WAIT_S)
        kept = sent.exception(WAIT_S)
        assert isinstance(kept, RuntimeError)
        group.close()

        living = pipes[3 - dead]
        answers = []
        # gloo may have sent to the living one before it met the dead one
        while "broken" not in answers:
            assert len(answers) < 2
            living.send("receive")
            assert living.poll(WAIT_S), "it waits for a group that was given up"
            answers.append(living.recv())
    finally:
        for process in processes.values():
            process.kill()
            process.join()
