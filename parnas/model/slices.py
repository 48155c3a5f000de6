"""Linear maps that are slices of larger ones, so that small candidates share the weights of large ones.

AutoFormer (Chen et al. 2021, arXiv 2107.00651) calls this weight entanglement: in a SuperNet, `f:d_inner=256` uses the
first 256 inner features of `f`, and `s:heads=2` the first two heads of `s`. A step that trains one trains a part of the
other.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Ranges = Sequence[tuple[int, int]]
"""Parts of a dimension: first index and the one after the last."""


class SlicedLinear(nn.Module):
    """A linear map whose weights are rows and columns of another's; gradients flow to the other's weights.

    It has no parameters of its own. Its state has the sliced values, so that a discrete network with a plain linear map
    can load them; loading a state into it changes nothing, since the other map loads its own.
    """

    def __init__(
        self, whole: "nn.Linear | SlicedLinear", outputs: Ranges | None = None, inputs: Ranges | None = None
    ) -> None:
        """Slice `whole` [out, in]; `None` takes all outputs or all inputs."""
        super().__init__()
        self._whole = (whole,)  # in a tuple, so that its parameters belong to one module only
        self.outputs, self.inputs = outputs, inputs

    @property
    def weight(self) -> Tensor:
        """The weights, a part of those of the other map."""
        (whole,) = self._whole
        return _take(_take(whole.weight, self.outputs, 0), self.inputs, 1)

    @property
    def bias(self) -> Tensor | None:
        """The biases, a part of those of the other map; `None` if it has none."""
        (whole,) = self._whole
        return None if whole.bias is None else _take(whole.bias, self.outputs, 0)

    @property
    def in_features(self) -> int:
        """Number of inputs."""
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        """Number of outputs."""
        return self.weight.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        """Map the last dimension of `x`."""
        return F.linear(x, self.weight, self.bias)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, value in (("weight", self.weight), ("bias", self.bias)):
            if value is not None:  # a copy: a checkpoint would take a view for the whole weight
                destination[prefix + name] = value if keep_vars else value.detach().clone()

    def _load_from_state_dict(self, *_: Any) -> None:
        """Load nothing."""


def _take(weight: Tensor, ranges: Ranges | None, dim: int) -> Tensor:
    """Return the given ranges of a dimension, one after the other."""
    if ranges is None:
        return weight
    parts = [weight.narrow(dim, start, stop - start) for start, stop in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
