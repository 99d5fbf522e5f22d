"""One 2-D convolution as oneDNN sees it: sizes, and the paddings it derives from them."""

from __future__ import annotations

from dataclasses import dataclass

from pipefit.meter.workspace.ledger import round_up

FLOAT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Sizes of a convolution in float; channels are totals over all groups, dilation is one where there is none."""

    images: int
    in_channels: int
    out_channels: int
    groups: int
    in_size: tuple[int, int]
    out_size: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    bias: bool
    channels_last: bool
    threads: int
    lanes: int

    @property
    def in_group(self) -> int:
        """Input channels of one group."""
        return self.in_channels // self.groups

    @property
    def out_group(self) -> int:
        """Output channels of one group."""
        return self.out_channels // self.groups

    @property
    def extent(self) -> tuple[int, int]:
        """Rows and columns that the dilated kernel spans."""
        return (
            (self.kernel[0] - 1) * self.dilation[0] + 1,
            (self.kernel[1] - 1) * self.dilation[1] + 1,
        )

    @property
    def end_padding(self) -> tuple[int, int]:
        """Rows and columns that the last application reaches past the input; negative if some input is unused."""
        return self.end_padding_for(self.out_size)

    def end_padding_for(self, out_size: tuple[int, int]) -> tuple[int, int]:
        """`end_padding` of a smaller output."""
        extent = self.extent
        return (
            (out_size[0] - 1) * self.stride[0] + extent[0] - self.in_size[0] - self.padding[0],
            (out_size[1] - 1) * self.stride[1] + extent[1] - self.in_size[1] - self.padding[1],
        )

    @property
    def kernel_outside(self) -> bool:
        """Whether some application of the kernel touches nothing but padding."""
        end, extent = self.end_padding, self.extent
        return any(extent[d] <= self.padding[d] or extent[d] <= end[d] for d in (0, 1))

    @property
    def depthwise(self) -> bool:
        """One input and one output channel per group."""
        return self.groups > 1 and self.in_group == self.out_group == 1

    @property
    def pixels(self) -> int:
        """Pixels of one output image."""
        return self.out_size[0] * self.out_size[1]

    @property
    def taps(self) -> int:
        """Elements of the kernel in one channel."""
        return self.kernel[0] * self.kernel[1]

    @property
    def strided(self) -> bool:
        """A stride above one."""
        return self.stride != (1, 1)

    @property
    def dilated(self) -> bool:
        """A dilation above one."""
        return self.dilation != (1, 1)

    @property
    def pointwise(self) -> bool:
        """A 1x1 kernel without padding, whose stride, if any, divides the input."""
        strides_divide = all(self.out_size[d] * self.stride[d] == self.in_size[d] for d in (0, 1))
        return self.groups == 1 and self.kernel == (1, 1) and self.padding == (0, 0) and strides_divide

    def source(self, block: int) -> int:
        """Bytes of the input with the channels of each group padded to `block`."""
        channels = self.groups * round_up(self.in_group, block)
        return self.images * channels * self.in_size[0] * self.in_size[1] * FLOAT

    def destination(self, block: int) -> int:
        """Bytes of the output with the channels of each group padded to `block`."""
        return self.images * self.groups * round_up(self.out_group, block) * self.pixels * FLOAT

    def weights(self, in_block: int, out_block: int) -> int:
        """Bytes of the weights with both channel counts of each group padded."""
        return self.groups * round_up(self.in_group, in_block) * round_up(self.out_group, out_block) * self.taps * FLOAT

    def depthwise_source(self, block: int) -> int:
        """Bytes of the input of a depthwise convolution, its channels padded over groups."""
        return self.images * round_up(self.groups, block) * self.in_size[0] * self.in_size[1] * FLOAT

    def depthwise_destination(self, block: int) -> int:
        """Bytes of the output of a depthwise convolution, its channels padded over groups."""
        return self.images * round_up(self.groups, block) * self.pixels * FLOAT

    def depthwise_weights(self, block: int) -> int:
        """Bytes of depthwise weights, padded over groups."""
        return round_up(self.groups, block) * self.taps * FLOAT
