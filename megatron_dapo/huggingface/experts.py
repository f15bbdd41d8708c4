"""Reads the mixture of experts from a Hugging Face config.json; names everything unsupported."""

from dataclasses import dataclass, replace
from typing import Any, Literal

SHARED_MOE_SIZES = ("n_routed_experts", "n_shared_experts", "n_group", "topk_group", "intermediate_size")
"""Further fields of a mixture with shared experts: whole numbers above 0."""

SHARED_EXPERT = "shared_expert_intermediate_size"
"""Field with the width of a shared expert with a gate."""


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts (MoE) in the place of the layers' MLP.

    A sigmoid router adds a bias per expert to its scores for the choice, not to the weights
    (aux-loss-free balancing, arXiv 2408.15664). Its groups of experts are DeepSeek-V3's (arXiv
    2412.19437, section 2.1.2).
    """

    num_experts: int
    experts_per_token: int
    norm_topk_prob: bool
    """Whether the weights of a token's experts are divided by their sum."""
    num_dense_layers: int = 0  # first layers, with an MLP
    dense_ffn_size: int = 0  # width of that MLP
    shared_ffn_size: int = 0  # width of the shared experts together, every token's
    shared_gate: bool = False  # a sigmoid per token multiplies the output of the shared experts
    score: Literal["softmax", "sigmoid"] = "softmax"  # function of the router's logits
    scaling_factor: float = 1.0  # of a sigmoid router's weights
    num_groups: int = 1  # a sigmoid router's groups of experts
    groups_per_token: int = 1  # chosen by the largest scores

    @property
    def has_bias(self) -> bool:
        """Return whether the routers choose with a bias per expert."""
        return self.score == "sigmoid"

    @property
    def bytes_per_choice(self) -> int:
        """Return the bytes for the number of an expert."""
        return 1 if self.num_experts <= 256 else 2


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def num_experts_of(hf: dict) -> Any:
    """Return the number of experts in a parsed config.json, of any type; None without one.

    Versions of transformers, and families, write it under different names.
    """
    return next((hf[key] for key in _EXPERTS if hf.get(key) is not None), None)


def read_experts(hf: dict, source: str, has_shared_experts: bool) -> tuple[MoEConfig | None, list[str]]:
    """Return the experts, and the faults found. The types are checked already.

    has_shared_experts: as in `family.Family`.
    """
    num_experts: int | None = num_experts_of(hf)
    per_token: int | None = hf.get("num_experts_per_tok")
    norm = bool(hf.get("norm_topk_prob"))
    if num_experts is None or per_token is None:
        name = "n_routed_experts" if has_shared_experts else "num_experts"
        values = {name: num_experts, "num_experts_per_tok": per_token}
        return None, [f"{source}: `{key}` is missing" for key, value in values.items() if value is None]
    if not 1 <= per_token <= num_experts:
        return None, [f"{source}: `num_experts_per_tok: {per_token}` is not between 1 and num_experts {num_experts}"]
    if per_token == 1 and norm:
        return None, [
            f"{source}: `norm_topk_prob: true` with num_experts_per_tok 1 is not supported: every weight is 1"
        ]
    if not has_shared_experts:
        shared = hf.get(SHARED_EXPERT) or 0  # 0 unless the family has a gated one
        return MoEConfig(num_experts, per_token, norm, shared_ffn_size=shared, shared_gate=shared > 0), []
    return _moe_with_shared_experts(hf, source, MoEConfig(num_experts, per_token, norm, score="sigmoid"))


def _moe_with_shared_experts(hf: dict, source: str, moe: MoEConfig) -> tuple[MoEConfig | None, list[str]]:
    """Return the mixture with dense layers, shared experts and router, and the faults found."""
    fields = (*SHARED_MOE_SIZES[1:], "first_k_dense_replace", "routed_scaling_factor")
    if problems := [f"{source}: `{key}` is missing" for key in fields if hf.get(key) is None]:
        return None, problems
    groups, taken, dense = hf["n_group"], hf["topk_group"], hf["first_k_dense_replace"]
    if moe.num_experts % groups or taken > groups:
        problems.append(f"{source}: `n_group: {groups}`, `topk_group: {taken}` do not fit {moe.num_experts} experts")
    elif groups > 1 and moe.num_experts // groups < 2:
        problems.append(
            f"{source}: `n_group: {groups}` leaves {moe.num_experts} experts in groups of one, which is not supported: "
            "a group is scored by its best two experts"
        )
    elif groups > 1 and 2 * taken != moe.experts_per_token:
        # Megatron-core scores a group by its num_experts_per_tok / topk_group best experts
        problems.append(
            f"{source}: `topk_group: {taken}` is not supported with num_experts_per_tok {moe.experts_per_token}: a "
            f"group is scored by its best two experts, so it must be half of it"
        )
    if not moe.norm_topk_prob and moe.experts_per_token > 1:  # Megatron-core always divides
        problems.append(f"{source}: `norm_topk_prob: false` is not supported with a sigmoid router")
    if dense >= (hf.get("num_hidden_layers") or dense + 1):
        problems.append(f"{source}: `first_k_dense_replace: {dense}` leaves no layer with experts")
    return replace(
        moe,
        num_dense_layers=dense,
        dense_ffn_size=hf["intermediate_size"],
        shared_ffn_size=hf["n_shared_experts"] * (hf.get("moe_intermediate_size") or 0),
        scaling_factor=float(hf["routed_scaling_factor"]),
        num_groups=groups,
        groups_per_token=taken,
    ), problems
