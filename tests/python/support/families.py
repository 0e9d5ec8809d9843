"""A small causal model of each family of transformers that docs/guide/pipelines.md names, with its own default for sharing the table of
embedding and head, and without dropout."""

import functools

import transformers

HIDDEN, BLOCKS, HEADS, VOCABULARY, LENGTH = 32, 4, 4, 128, 64
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
COMMON = {"vocab_size": VOCABULARY, **NO_TOKENS}
# As GPT-2's configuration names them, and as Llama's does.
OLD = COMMON | {"n_embd": HIDDEN, "n_layer": BLOCKS, "n_head": HEADS, "n_positions": LENGTH, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
NEW = COMMON | {
    "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": BLOCKS, "num_attention_heads": HEADS, "max_position_embeddings": LENGTH,
}  # fmt: skip
GROUPED = NEW | {"num_key_value_heads": 2}
WINDOW = {"sliding_window": 4}  # shorter than the sequences


def of(kind, **settings):
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **settings))


def llama_with_lora():
    import peft  # which other models need not wait for

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(of("llama", **GROUPED), config)


FAMILIES = {
    "BLOOM": functools.partial(
        of, "bloom", hidden_size=HIDDEN, n_layer=BLOCKS, n_head=HEADS, hidden_dropout=0.0, attention_dropout=0.0, **COMMON
    ),
    "DeepSeek V3": functools.partial(
        of, "deepseek_v3", num_key_value_heads=HEADS, moe_intermediate_size=16, n_routed_experts=8, n_shared_experts=1, n_group=2, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, **NEW
    ),
    "Falcon": functools.partial(
        of, "falcon", hidden_size=HIDDEN, num_hidden_layers=BLOCKS, num_attention_heads=HEADS, hidden_dropout=0.0, attention_dropout=0.0, **COMMON
    ),
    "Gemma 2": functools.partial(of, "gemma2", head_dim=8, **GROUPED, **WINDOW),
    "Gemma 3": functools.partial(of, "gemma3_text", head_dim=8, **GROUPED, **WINDOW),
    "GPT-2": functools.partial(of, "gpt2", **OLD),
    "GPT-J": functools.partial(of, "gptj", rotary_dim=4, **OLD),
    "GPT-Neo": functools.partial(
        of, "gpt_neo", hidden_size=HIDDEN, num_layers=BLOCKS, num_heads=HEADS, attention_types=[[["global", "local"], BLOCKS // 2]], window_size=4,
        max_position_embeddings=LENGTH, **COMMON
    ),
    "GPT-NeoX": functools.partial(of, "gpt_neox", **NEW),
    "Granite": functools.partial(of, "granite", **GROUPED),
    "Llama": functools.partial(of, "llama", **GROUPED),
    "Llama with LoRA": llama_with_lora,
    "Mistral": functools.partial(of, "mistral", **GROUPED, **WINDOW),
    "Mixtral": functools.partial(of, "mixtral", num_local_experts=4, num_experts_per_tok=2, **GROUPED),
    "OLMo 2": functools.partial(of, "olmo2", **GROUPED),
    "OPT": functools.partial(
        of, "opt", hidden_size=HIDDEN, ffn_dim=48, num_hidden_layers=BLOCKS, num_attention_heads=HEADS, max_position_embeddings=LENGTH, dropout=0.0,
        word_embed_proj_dim=HIDDEN, **COMMON
    ),
    "Phi": functools.partial(of, "phi", **GROUPED),
    "Qwen2": functools.partial(of, "qwen2", **GROUPED),
    "Qwen3": functools.partial(of, "qwen3", head_dim=8, **GROUPED),
}  # fmt: skip
