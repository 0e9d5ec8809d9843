"""The folder that tests of whole runs share: making it takes seconds, so it is made once."""

import pytest
import torch
from kill_campaign import lesson
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """A folder with text, a folder on the disk, and two small models that the presets do not cover."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(lesson())
    (folder / "disk").mkdir()
    torch.manual_seed(5)
    # This model's blocks have more than one chunk, its head is not tied, and it has dropout (0.1, the default).
    special = dict(bos_token_id=0, eos_token_id=0)
    wide = GPT2Config(
        vocab_size=256, n_positions=32, n_embd=256, n_layer=2, n_head=4, tie_word_embeddings=False, **special
    )
    GPT2LMHeadModel(wide).save_pretrained(folder / "wide-untied")
    tied = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        **special,
    )
    LlamaForCausalLM(tied).save_pretrained(folder / "llama-tied")
    return folder
