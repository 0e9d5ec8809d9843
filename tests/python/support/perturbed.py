"""Models of transformers with weights of their own."""

import copy

import torch


def make_model(cases, case, dtype=torch.float32):
    """The model of cases[case] = (class, config), with the same weights in each call, none of which is zero or one."""
    model_type, config = cases[case]
    torch.manual_seed(list(cases).index(case) + 1)
    model = model_type(copy.deepcopy(config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.to(dtype)
