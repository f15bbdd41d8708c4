"""One rank's part of a model: Megatron's GPTModel, whose last stage answers a task in place of giving logits."""

from contextlib import nullcontext

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_dapo.models.expert_load import ChunkLoad
from megatron_dapo.models.log_prob_head import HeadLoss, LossTask, Scores, ScoreTask
from megatron_dapo.models.router_replay import ChunkReplay, RouterPass


class ModelChunk(GPTModel):
    """Megatron's layers as they are. On the last stage a head of ours is in the place of `output_layer`.

    router_replay: of its routers, where their choices are replayed. expert_load: what they do is counted there.
    embedding_scale: what embeddings are multiplied by.
    """

    router_replay: ChunkReplay | None = None
    expert_load: ChunkLoad | None = None
    embedding_scale: float = 1.0

    def forward(
        self,
        tokens: Tensor,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        task: ScoreTask | LossTask | None = None,
        router_pass: RouterPass | None = None,
        is_token: Tensor | None = None,
    ) -> Tensor | Scores | HeadLoss:
        """Run this part of the model on one micro-batch.

        Args:
            tokens: [B, S] int64, on the first stage; the others get the stage before's hidden states by Megatron's
                `set_input_tensor`.
            packed_seq_params: where the segments of a packed micro-batch begin.
            task: what the last stage's log-prob head is asked; a critic's head and the other stages take none.
            router_pass: what the routers do with the micro-batch; a model without `router_replay` does not look at it.
            is_token: [B, S] bool, false in the padding: the load of experts is counted in this pass.

        Returns:
            What the head answers; before the last stage the hidden states [S (/ tp), B, H] for the next one.
        """
        with (
            nullcontext() if self.router_replay is None else self.router_replay.during(router_pass),
            nullcontext() if self.expert_load is None else self.expert_load.during(self._rows(is_token)),
        ):
            embedded = self._embedded(tokens) if self.pre_process else None
            hidden = super().forward(tokens, None, None, embedded, packed_seq_params=packed_seq_params)
        if not self.post_process:
            return hidden
        tied = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self.output_layer(hidden, tied, task)

    def _embedded(self, tokens: Tensor) -> Tensor:
        """Return the first layer's input [S (/ tp), B, H], with the strides of its shape.

        Of a micro-batch of one row Megatron leaves those of a transposed tensor, with which torch multiplies a frozen
        weight token by token, slowly and with other roundings than one that is trained.
        """
        embedded = self.embedding(input_ids=tokens, position_ids=None)  # rotary: no ids
        if self.embedding_scale != 1:
            embedded = embedded * self.embedding_scale
        return embedded.flatten(0, 1).view(embedded.shape)

    def _rows(self, is_token: Tensor | None) -> Tensor | None:
        """Return the part of [B, S] that this rank's routers meet, flat in Megatron's order s * B + b."""
        if is_token is None:
            return None
        rows = is_token.T.reshape(-1)
        group = self.pg_collection.tp
        return rows.chunk(group.size())[group.rank()] if self.config.sequence_parallel else rows

    def _postprocess(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Leave the hidden states as they are: the head comes after Megatron's forward, with its task."""
        return hidden_states
