"""Hyper-connections: how a branch reads from, and adds to, the residual streams.

Source: model-spec section 3.2.
"""

from flax import linen as nn

from hipjax.ffi import ops
from hipjax.model.config import ModelConfig
from hipjax.model.layers import StreamNorm, Weight
from hipjax.typing import Array, Float


class HyperConnection(nn.Module):
    """Mixes the streams into one input, for a branch or for the output matrix.

    Attributes:
      config: the model's configuration.
      inject: whether a branch's output is added back; False at the end of the trunk and
        of the MTP head.
    """

    config: ModelConfig
    inject: bool = True

    def setup(self) -> None:
        c = self.config
        normal = nn.initializers.normal(c.initializer_range)
        self.hc_norm = StreamNorm(c.streams_size, c.rms_norm_eps)
        self.input_mix_weight_down = Weight((c.hc_lowrank, c.streams_size), normal)
        self.input_mix_weight_up = Weight((c.streams_size, c.hc_lowrank), normal)
        if self.inject:
            self.block_inject_weight = Weight((c.hc_count, c.streams_size), normal)

    def mix(self, streams: Float[Array, "*rows C H"]) -> Float[Array, "*rows H"]:
        """The mixed input alone."""
        down, up = self.input_mix_weight_down(), self.input_mix_weight_up()
        return ops.hyper_mix(self.hc_norm(streams), down, up)[0]

    def __call__(
        self, streams: Float[Array, "*rows C H"]
    ) -> tuple[Float[Array, "*rows H"], Float[Array, "*rows C"]]:
        """The mixed input, and how strongly each stream takes the branch's output up."""
        down, up = self.input_mix_weight_down(), self.input_mix_weight_up()
        normed = self.hc_norm(streams)
        mixed, strength = ops.hyper_mix(normed, down, up, self.block_inject_weight())
        assert strength is not None
        return mixed, strength
