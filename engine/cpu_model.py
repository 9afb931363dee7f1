"""Makes a loaded model run on our CPU kernels."""

import logging

import torch

from engine.fused import fuse
from engine.kernels import load_kernels
from engine.layer import fuse_layers
from engine.linear import swap_linears

logger = logging.getLogger(__name__)


def use_kernels(model: torch.nn.Module) -> None:
    """Replaces modules of `model`, which is on the CPU in evaluation mode, by ones that compute the same
    faster. Where the kernels cannot be had it stays as it is. A second call changes nothing."""
    if not load_kernels():
        return
    with torch.inference_mode():
        num_fused, num_linears, num_layers = fuse(model), swap_linears(model), fuse_layers(model)
    logger.info(
        "%d linear layers packed, %d other places and %d whole layers fused",
        num_linears,
        num_fused,
        num_layers,
    )
