"""One rank's part of a model: Megatron's GPTModel, with an answer to a task in place of logits."""

from contextlib import nullcontext

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_dapo.models.expert_load import ChunkLoad
from megatron_dapo.models.log_prob_head import HeadLoss, LossTask, Scores, ScoreTask
from megatron_dapo.models.router_replay import ChunkReplay, RouterPass


class ModelChunk(GPTModel):
    """Megatron's layers as they are, with our head as the last stage's `output_layer`."""

    router_replay: ChunkReplay | None = None  # if the routers' choices are replayed
    expert_load: ChunkLoad | None = None  # counts the routers' choices
    embedding_scale: float = 1.0  # factor of the embeddings

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
            tokens: [B, S] int64, on the first stage; the others get the previous stage's hidden
                states by Megatron's `set_input_tensor`.
            packed_seq_params: beginnings of the segments of a packed micro-batch.
            task: for the last stage's log-prob head; a critic's head and the other stages take
                none.
            router_pass: the routers' task in the micro-batch; ignored without `router_replay`.
            is_token: [B, S] bool, false in the padding; if given, this pass counts the load
                of experts.

        Returns:
            The head's answer; before the last stage, the hidden states [S (/ tp), B, H] for the
                next one.
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

        For a micro-batch of one row, Megatron leaves the strides of a transposed tensor. With
        these, torch multiplies a frozen weight token by token: slowly, and with other roundings
        than a trained one.
        """
        embedded = self.embedding(input_ids=tokens, position_ids=None)  # rotary: no ids
        if self.embedding_scale != 1:
            embedded = embedded * self.embedding_scale
        return embedded.flatten(0, 1).view(embedded.shape)

    def _rows(self, is_token: Tensor | None) -> Tensor | None:
        """Return the rows of [B, S] met by this rank's routers, flat in the order s * B + b."""
        if is_token is None:
            return None
        rows = is_token.T.reshape(-1)
        group = self.pg_collection.tp
        return rows.chunk(group.size())[group.rank()] if self.config.sequence_parallel else rows

    def _postprocess(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Leave the hidden states as they are: the head comes after Megatron's forward."""
        return hidden_states
