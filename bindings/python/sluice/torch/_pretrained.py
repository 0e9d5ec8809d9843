"""Models of transformers, streamed from a folder."""

from __future__ import annotations

import os
import re
from typing import Any, Optional, Union

import torch

from ..errors import InvalidArgumentError, NotFoundError
from ..model import Path
from ..optimizers import Optimizer as Settings
from ._optimizer import Optimizer
from ._safetensors import tensors_of_model
from ._weights import stored_of
from ._wrap import check_known, wrap_with


def from_pretrained(
    folder: Path,
    optimizer: Optional[Settings] = None,
    *,
    model_class: Any = None,
    dtype: Union[torch.dtype, str, None] = None,
    **options: Any,
) -> tuple[torch.nn.Module, Optional[Optimizer]]:
    """Streams a model of transformers from a folder (config.json, *.safetensors) and wraps it; it may be larger than memory.
    It is as from_pretrained() of transformers returns it: in eval() mode (call model.train() to train; Trainer does), with
    the folder's settings for generation, and in f32 where the model keeps f32. All parameters must be in the files: for a
    new head see wrap(weights=...).

    model_class: a class of transformers, also AutoModelFor...; None: the one that config.json names. dtype: a type or its name;
    "auto" or None: the type that config.json names, else that of the first values in the files. options: those of wrap().
    """
    check_known(from_pretrained, options)
    import transformers

    name = os.fspath(folder)
    if not os.path.isfile(os.path.join(name, "config.json")):
        what = "has no config.json" if os.path.isdir(name) else "does not exist"
        raise NotFoundError(
            f"the folder '{name}' {what}; give one that save_pretrained() of transformers wrote, or that was downloaded as a "
            "whole (huggingface_hub.snapshot_download() returns the folder of a model of the Hub)"
        )
    config = transformers.AutoConfig.from_pretrained(name, local_files_only=True)
    model = _build(model_class or _class_of(config, name), config, _type_of(dtype, config, folder))
    if model.can_generate() and os.path.isfile(os.path.join(name, "generation_config.json")):
        model.generation_config = transformers.GenerationConfig.from_pretrained(name, local_files_only=True)
    model.train(optimizer is not None)  # the estimate is made for this mode
    wrapped, made = wrap_with(model, optimizer, lambda: stored_of(model, folder, partly=False), **options)
    return wrapped.eval(), made


def _class_of(config: Any, folder: str) -> Any:
    import transformers

    names = getattr(config, "architectures", None) or []
    found = getattr(transformers, names[0], None) if names else None
    if found is None:
        raise InvalidArgumentError(
            f"'{folder}/config.json' names {names or 'no architecture'}, which transformers does not have; give model_class"
        )
    return found


def _type_of(dtype: Union[torch.dtype, str, None], config: Any, folder: Path) -> torch.dtype:
    if dtype is None or dtype == "auto":
        dtype = getattr(config, "dtype", None) or _first_type(folder)
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise InvalidArgumentError(f"dtype is {dtype!r:.80}; it is a type such as torch.bfloat16, its name, or 'auto'")
    return found


def _first_type(folder: Path) -> torch.dtype:
    types = (there.dtype for there in tensors_of_model(folder).values())
    return next((each for each in types if each is not None and each.is_floating_point), torch.float32)


def _build(model_class: Any, config: Any, dtype: torch.dtype) -> Any:
    """Builds the model on the meta device, with parameters of the type from the start: a cast would reach buffers, too, such
    as the frequencies of rotary embeddings, which are always f32."""
    make = getattr(model_class, "from_config", None) or model_class._from_config
    with torch.device("meta"):
        model = make(config, dtype=dtype)
    kept = [re.compile(pattern.replace("*", ".*")) for pattern in model._get_dtype_plan(dtype)]
    for name, p in model.named_parameters():
        if any(pattern.search(name) for pattern in kept):
            p.data = p.data.to(torch.float32)
    return model
