"""Wraps an existing PyTorch model, so that it trains in the memory that is stated.

    import sluice.torch

    model, optimizer = sluice.torch.wrap(model, sluice.AdamW(lr=1e-4), memory="4GiB", disk="/nvme")

The loop stays as it was: forward, loss.backward(), clip_grad_norm_, optimizer.step(), zero_grad().
"""

import torch

from .._library import check_version

check_version(torch, __name__)  # before the modules below, whose import an older version would fail

from ._estimate import Estimate, estimate
from ._gradients import Gradient
from ._optimizer import Optimizer
from ._prepare import sgemm, team
from ._reproducible import MicroBatches
from ._safetensors import save_file
from ._stage_threads import Pipeline
from ._wrap import close, engine_of, from_pretrained, full_parameters, plan, wrap

__all__ = [
    "Estimate",
    "Gradient",
    "MicroBatches",
    "Optimizer",
    "Pipeline",
    "close",
    "engine_of",
    "estimate",
    "from_pretrained",
    "full_parameters",
    "plan",
    "save_file",
    "sgemm",
    "team",
    "wrap",
]
