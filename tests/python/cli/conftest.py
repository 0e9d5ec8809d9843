"""The folder that tests of whole runs share: making it takes seconds, so it is made once."""

import pytest
import torch
from kill_campaign import lesson
from support.perturbed import gpt2, llama
from transformers import GPT2LMHeadModel, LlamaForCausalLM


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """A folder with text, a folder on the disk, and two small models that the presets do not cover."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(lesson())
    (folder / "disk").mkdir()
    torch.manual_seed(5)
    # This model's blocks have more than one chunk, its head is not tied, and it has dropout (0.1, the default).
    _, wide = gpt2(n_positions=32, n_embd=256, tie_word_embeddings=False, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    _, tied = llama(vocab_size=256, hidden_size=64, intermediate_size=112, num_hidden_layers=3, tie_word_embeddings=True)
    GPT2LMHeadModel(wide).save_pretrained(folder / "wide-untied")
    LlamaForCausalLM(tied).save_pretrained(folder / "llama-tied")
    return folder
