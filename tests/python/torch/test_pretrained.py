"""sluice.torch.from_pretrained() and wrap(weights=...) beside transformers' own from_pretrained(): the same bits."""

import json
import warnings

import peft
import pytest
import torch
import transformers as t
from safetensors.torch import load_file, save_file
from support import fake_gpu
from support.wrapped_models import on_meta, values_of

import sluice
import sluice.torch

LLAMA = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=256, pad_token_id=0)
BERT = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=256)
EXPERTS = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=256)


def bert():
    """A small BERT whose norms do not have their first values."""
    model = t.BertForMaskedLM(t.BertConfig(**BERT))
    for name, p in model.named_parameters():
        if "LayerNorm" in name:
            torch.nn.init.uniform_(p, 0.5, 1.5)
    return model


def t5():
    return t.T5ForConditionalGeneration(
        t.T5Config(d_model=64, d_ff=128, num_layers=2, num_heads=2, d_kv=32, vocab_size=256, decoder_start_token_id=0)
    )


def mixtral():
    """A small Mixtral. An expert is three tensors in files, and all of a layer are two in the model. (10 sorts after 9.)"""
    return t.MixtralForCausalLM(t.MixtralConfig(**EXPERTS, intermediate_size=96, num_local_experts=11, pad_token_id=0))


def qwen_of_experts():
    config = t.Qwen3MoeConfig(
        **EXPERTS, intermediate_size=96, moe_intermediate_size=32, head_dim=16, num_experts=4, num_experts_per_tok=2
    )
    return t.Qwen3MoeForCausalLM(config)


def vit():
    return t.ViTForImageClassification(
        t.ViTConfig(**{**BERT, "intermediate_size": 64, "image_size": 32, "patch_size": 8})
    )


def old_norms(folder):
    """The names in BERT's first files."""
    file = folder / "model.safetensors"
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = load_file(file)
    for new, old in names.items():
        tensors = {key.replace(new, old): value for key, value in tensors.items()}
    save_file(tensors, file, {"format": "pt"})


def same_model(made, expected):
    ours, theirs = made.state_dict(), expected.state_dict()
    assert [*ours] == [*theirs]
    buffers = dict(expected.named_buffers())
    for name, tensor in [*values_of(made).items(), *made.named_buffers()]:
        other = buffers[name] if name in buffers else expected.get_parameter(name)
        assert tensor.dtype == other.dtype, name
        assert torch.equal(tensor, other), name
    assert made.config.to_dict() == expected.config.to_dict()


KINDS = {
    "llama": (lambda: t.LlamaForCausalLM(t.LlamaConfig(**LLAMA)), {}, None),
    "llama in bf16": (lambda: t.LlamaForCausalLM(t.LlamaConfig(**LLAMA)).bfloat16(), {}, None),
    "llama to bf16": (lambda: t.LlamaForCausalLM(t.LlamaConfig(**LLAMA)), {"dtype": torch.bfloat16}, None),
    "llama to f32": (lambda: t.LlamaForCausalLM(t.LlamaConfig(**LLAMA)).bfloat16(), {"dtype": torch.float32}, None),
    "t5": (t5, {}, None),
    "t5 in f16, with f32 inside": (t5, {"dtype": torch.float16}, None),
    "mixtral": (mixtral, {}, None),
    "qwen of experts": (qwen_of_experts, {}, None),
    "vit": (vit, {}, None),
    "bert": (bert, {}, None),
    "bert of old": (bert, {}, old_norms),
}


@pytest.mark.parametrize("make, options, change", KINDS.values(), ids=[name.replace(" ", "-") for name in KINDS])
def test_a_folder_gives_what_transformers_gives(make, options, change, tmp_path):
    torch.manual_seed(0)
    model = make()
    model.save_pretrained(tmp_path, max_shard_size="50MB" if change else "100KB")
    if change:
        change(tmp_path)
    expected = type(model).from_pretrained(tmp_path, **options)
    given = fake_gpu.placed(True, memory="4GiB", reserve="256MiB")
    made, _ = sluice.torch.from_pretrained(tmp_path, disk=tmp_path, place="disk", **given, **options)
    same_model(made, expected)
    sluice.torch.close(made)

    model = on_meta(lambda: type(expected)._from_config(expected.config, dtype=options.get("dtype", expected.dtype)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sluice.torch.wrap(model, weights=tmp_path, **given)
    for name, p in values_of(model).items():
        assert torch.equal(p, expected.get_parameter(name).to(p.dtype)), name


@pytest.mark.parametrize("make, targets", [(mixtral, ["q_proj"]), (vit, ["q_proj"]), (bert, ["query"])])
def test_a_model_with_adapters_is_streamed_likewise(make, targets, tmp_path):
    plain = make()
    plain.save_pretrained(tmp_path)
    with torch.device("meta"):
        base = type(plain)._from_config(plain.config)
        model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=targets))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        sluice.torch.wrap(model, sluice.AdamW(), **fake_gpu.placed(True, memory="4GiB", reserve="256MiB", weights=tmp_path))
    values = {name.replace(".base_layer", ""): p for name, p in values_of(model.get_base_model()).items()}
    for name, p in plain.named_parameters():
        assert torch.equal(values[name], p), name


def test_what_the_files_lack_is_told(tmp_path):
    plain = bert()
    plain.save_pretrained(tmp_path)
    with pytest.raises(sluice.NotFoundError, match=r"'bert.pooler.*and 3 more.*'cls.predictions.*give the folder to wrap"):
        given = fake_gpu.placed(True, memory="4GiB")
        sluice.torch.from_pretrained(tmp_path, model_class=t.BertForSequenceClassification, **given)
    model = on_meta(lambda: t.BertForSequenceClassification(plain.config))
    with pytest.warns(UserWarning, match="'bert.pooler.*first values by the model's own rules; 'cls.predictions"):
        sluice.torch.wrap(model, **fake_gpu.placed(True, memory="4GiB", weights=tmp_path))
    found = values_of(model.bert)
    for name, p in plain.bert.named_parameters():
        assert torch.equal(p, found[name]), name


def llama(tied, layers=2):
    return t.LlamaConfig(**{**LLAMA, "num_hidden_layers": layers, "tie_word_embeddings": tied, "architectures": ["LlamaForCausalLM"]})


def test_a_tied_parameter_that_the_files_have_twice(tmp_path):
    """Equal values are one parameter. Different ones are refused, and with the advice followed are those of transformers."""
    plain = t.LlamaForCausalLM(llama(False))
    plain.save_pretrained(tmp_path)
    llama(True).save_pretrained(tmp_path)
    given = fake_gpu.placed(True, memory="4GiB")
    match = r"'model.embed_tokens.weight' and 'lm_head.weight' are one parameter.*different values.*tie_word_embeddings to false"
    with pytest.raises(sluice.InvalidArgumentError, match=match):
        sluice.torch.from_pretrained(tmp_path, **given)
    model = on_meta(lambda: t.LlamaForCausalLM(llama(True)))
    with pytest.raises(sluice.InvalidArgumentError, match=match):
        sluice.torch.wrap(model, **fake_gpu.placed(True, memory="4GiB", weights=tmp_path))
    llama(False).save_pretrained(tmp_path)
    made, _ = sluice.torch.from_pretrained(tmp_path, **given)
    same_model(made, t.LlamaForCausalLM.from_pretrained(tmp_path))
    sluice.torch.close(made)

    plain.lm_head.weight.data.copy_(plain.model.embed_tokens.weight)
    plain.save_pretrained(tmp_path)
    assert "lm_head.weight" in load_file(tmp_path / "model.safetensors")
    llama(True).save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        made, _ = sluice.torch.from_pretrained(tmp_path, **given)
    assert made.lm_head.weight is made.model.embed_tokens.weight
    same_model(made, t.LlamaForCausalLM.from_pretrained(tmp_path))


def test_tensors_that_are_left_over_are_told(tmp_path):
    t.LlamaForCausalLM(llama(False, layers=3)).save_pretrained(tmp_path)
    llama(False).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"has more than the model: all is found; 'model.layers.2.*and 8 more.*none of the model's"):
        made, _ = sluice.torch.from_pretrained(tmp_path, **fake_gpu.placed(True, memory="4GiB"))
    same_model(made, t.LlamaForCausalLM.from_pretrained(tmp_path))
    model = on_meta(lambda: t.LlamaModel(llama(False, layers=3)))
    with pytest.warns(UserWarning, match="has more than the model.*'lm_head.weight' is there"):
        sluice.torch.wrap(model, **fake_gpu.placed(True, memory="4GiB", weights=tmp_path))


@pytest.mark.parametrize("in_config", [True, False])
def test_types_are_those_of_transformers(tmp_path, in_config):
    t.LlamaForCausalLM(llama(False)).half().save_pretrained(tmp_path)
    if not in_config:
        config = json.loads((tmp_path / "config.json").read_text())
        del config["dtype"]
        (tmp_path / "config.json").write_text(json.dumps(config))
    for options in ({}, {"dtype": "auto"}, {"dtype": "bfloat16"}, {"dtype": torch.float32}):
        made, _ = sluice.torch.from_pretrained(tmp_path, **options, **fake_gpu.placed(True, memory="4GiB"))
        assert made.dtype == t.LlamaForCausalLM.from_pretrained(tmp_path, **options).dtype, options


def test_what_is_no_type(tmp_path):
    t.LlamaForCausalLM(llama(False)).save_pretrained(tmp_path)
    for wrong in ("half-precision", "load", 3):
        with pytest.raises(sluice.InvalidArgumentError, match="dtype is .*its name, or 'auto'"):
            sluice.torch.from_pretrained(tmp_path, dtype=wrong, memory="4GiB")
    with pytest.raises(TypeError, match=r"from_pretrained\(\) got an unexpected keyword argument 'memroy'; did you mean 'memory'"):
        sluice.torch.from_pretrained(tmp_path, memroy="4GiB")
    with pytest.raises(TypeError, match=r"from_pretrained\(\) got an unexpected keyword argument 'torch_dtype'; did you mean 'dtype'"):
        sluice.torch.from_pretrained("nowhere", memory="1GiB", torch_dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"plan\(\) got an unexpected keyword argument 'weight'; did you mean 'weights'"):
        sluice.torch.plan(torch.nn.Linear(2, 2), memory="4GiB", weight="x")
    for call, says in [
        (lambda: sluice.torch.wrap(torch.nn.Linear(2, 2), sluice.AdamW(), memory="4GiB", memroy="x"), r"wrap\(\).*'memroy'; did you mean 'memory'"),
        (lambda: sluice.Options(memory="4GiB", reserve=0), r"Options\(\).*'reserve'; did you mean 'reserved'"),
        (lambda: sluice.Unit(nme="u", parameters=[]), r"Unit\(\).*'nme'; did you mean 'name'"),
        (lambda: sluice.Engine([], option=None), r"Engine\(\).*'option'; did you mean 'options'"),
        (lambda: sluice.Engine.save(None, "out", kep=1), r"save\(\).*'kep'; did you mean 'keep'"),
        (lambda: sluice.torch.close(None, value=False), r"close\(\).*'value'; did you mean 'values'"),
        (lambda: sluice.torch.estimate(None, None, trian=True), r"estimate\(\).*'trian'; did you mean 'train'"),
        (lambda: sluice.torch.full_parameters(None, write_back=False), r"full_parameters\(\).*'write_back'; did you mean 'writeback'"),
    ]:  # fmt: skip
        with pytest.raises(TypeError, match=says):
            call()
    with pytest.raises(TypeError, match=r"AdamW\(\) got an unexpected keyword argument 'learning_rate'; it has betas, eps, lr, weight_decay"):
        sluice.AdamW(learning_rate=1e-3)


def test_what_would_have_to_be_computed_is_refused(tmp_path, monkeypatch):
    from transformers import conversion_mapping, core_model_loading

    bert().save_pretrained(tmp_path)
    chunks = core_model_loading.WeightConverter("query.weight", ["query.weight", "other.weight"], [core_model_loading.Chunk(0)])
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda model: [chunks])
    with pytest.raises(sluice.InvalidArgumentError, match=r"query.weight'.*Chunk.*save_original_format=False"):
        sluice.torch.from_pretrained(tmp_path, **fake_gpu.placed(True, memory="4GiB"))


def test_experts_whose_shapes_do_not_fit(tmp_path):
    mixtral().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("experts.3.w1.weight"))
    tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(sluice.InvalidArgumentError, match="experts.gate_up_proj' is put together.*do not fit"):
        sluice.torch.from_pretrained(tmp_path, **fake_gpu.placed(True, memory="4GiB"))
