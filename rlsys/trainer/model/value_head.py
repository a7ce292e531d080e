"""The value layer, which a policy has besides its output layer, and a critic in place of it."""

from __future__ import annotations

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor


class ValueLayer(torch.nn.Linear):
    """Linear layer from hidden states to one value per token.

    Its weights are initially 0, so that the first advantages are the rewards alone.
    """

    def __init__(self, module: GPTModel) -> None:
        super().__init__(module.config.hidden_size, 1, dtype=module.config.params_dtype)
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)
        self._sequence_parallel = module.config.sequence_parallel
        for parameter in self.parameters():
            # Under sequence parallelism, a rank's gradient covers only its own tokens: Megatron sums the gradients.
            parameter.sequence_parallel = self._sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `[P / c or P / (c tp), 1, H]` to `[P / c, 1, 1]`."""
        out = super().forward(hidden)
        if self._sequence_parallel:
            out = gather_from_sequence_parallel_region(out, tensor_parallel_output_grad=False)
        return out

    def values(self, hidden: Tensor) -> Tensor:
        """Return the expected return after each token, `[P / c]` float32.

        Args:
            hidden: The last hidden states, `[P / c or P / (c tp), 1, H]`.
        """
        values: Tensor = self(hidden)[:, 0, 0].float()
        return values
