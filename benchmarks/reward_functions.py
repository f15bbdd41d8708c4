"""Reward functions for bench_rewards.py: one of each form, in a module without imports."""


def plain(data_source, response, ground_truth, extra_info):
    return "sum" in response


async def coroutine(data_source, response, ground_truth, extra_info):
    return "sum" in response


def group(data_source, responses, ground_truth, extra_info):
    return ["sum" in response for response in responses]


def batched(data_sources, responses, ground_truths, extra_infos):
    return ["sum" in response for response in responses]
