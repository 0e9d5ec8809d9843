"""The reference for sluice.Muon: torch.optim's own Muon beside its AdamW."""

import pytest
import torch


class MuonWithAdamW:
    """Steps parameter groups: matrices by Muon, but for those named in `others`, which AdamW updates. The iteration of
    torch.optim.Muon is in bfloat16, or, with `exact`, in the parameters' type."""

    def __init__(self, groups, others=(), exact=True, adamw_lr=None, **settings):
        kinds = ([], [])
        for group in groups:
            for own, muons in zip(kinds, (True, False), strict=True):
                params = [p for p in group["params"] if (p.dim() == 2 and all(p is not o for o in others)) == muons]
                own += [{**group, "params": params}] if params else []
        lr = settings["lr"] if adamw_lr is None else adamw_lr
        self.both = torch.optim.Muon(kinds[0], **settings), torch.optim.AdamW(kinds[1], lr=lr)
        self.exact = exact

    def zero_grad(self):
        for optimizer in self.both:
            optimizer.zero_grad()

    def step(self):
        with pytest.MonkeyPatch.context() as patch:
            if self.exact:
                patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
            for optimizer in self.both:
                optimizer.step()
