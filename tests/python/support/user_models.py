"""Small models of the kinds that users have, and a step of each."""

import dataclasses
from collections.abc import Callable

import torch
import transformers
from support.wrapped_models import small_gpt2

STEPS = 3


def drawn(step, *shape, below=None):
    generator = torch.Generator().manual_seed(step)
    if below is not None:
        return torch.randint(below, shape, generator=generator)
    return torch.randn(shape, generator=generator)


def small_llama(hidden_size=64, intermediate_size=128, num_hidden_layers=3):
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=256, hidden_size=hidden_size, intermediate_size=intermediate_size, num_hidden_layers=num_hidden_layers,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        )
    )  # fmt: skip


def small_mixtral(hidden_size=64, intermediate_size=96):
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=256, hidden_size=hidden_size, intermediate_size=intermediate_size, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True,
        )
    )  # fmt: skip


def small_bert():
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=256, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128,
            max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def small_t5():
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=256, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )  # fmt: skip


def small_vit():
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128, image_size=32,
            patch_size=8, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def small_resnet():
    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(
            embedding_size=16, hidden_sizes=[16, 32, 48], depths=[1, 2, 1], layer_type="basic", num_labels=10
        )
    )


class Vgg16(torch.nn.Module):
    """VGG-16, an eighth as wide."""

    def __init__(self):
        super().__init__()
        layers, inputs = [], 3
        for width, convolutions in ((8, 2), (16, 2), (32, 3), (64, 3), (64, 3)):
            for _ in range(convolutions):
                layers += [torch.nn.Conv2d(inputs, width, 3, padding=1), torch.nn.ReLU(inplace=True)]
                inputs = width
            layers.append(torch.nn.MaxPool2d(2, 2))
        self.features = torch.nn.Sequential(*layers)
        self.classifier = torch.nn.Sequential(
            torch.nn.Linear(64, 128), torch.nn.ReLU(inplace=True), torch.nn.Dropout(), torch.nn.Linear(128, 10)
        )
        for layer in self.features:  # PyTorch's own rule would make the gradients of 13 layers as small as 1e-6
            if isinstance(layer, torch.nn.Conv2d):
                torch.nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    def forward(self, images):
        return self.classifier(torch.flatten(self.features(images), 1))


def text_loss(model, step):
    ids = drawn(step, 2, 24, below=256)
    return model(input_ids=ids, labels=ids).loss


def image_loss(side):
    def loss(model, step):
        torch.manual_seed(step)  # for dropout
        output = model(drawn(step, 4, 3, side, side))
        logits = output if isinstance(output, torch.Tensor) else output.logits
        return torch.nn.functional.cross_entropy(logits, drawn(step, 4, below=10))

    return loss


@dataclasses.dataclass
class Shown:
    make: Callable[[], torch.nn.Module]
    loss: Callable[[torch.nn.Module, int], torch.Tensor] = text_loss
    rows: int = 48  # tokens or pixels for which a step uses a layer's weights


SHOWN = {
    "gpt2": Shown(small_gpt2),
    "llama": Shown(small_llama),
    "bert": Shown(small_bert),
    "t5": Shown(small_t5),
    "mixtral": Shown(small_mixtral),
    "vit": Shown(small_vit, image_loss(32), 4 * 32**2),
    "resnet": Shown(small_resnet, image_loss(32), 4 * 32**2),
    "vgg16": Shown(Vgg16, image_loss(32), 4 * 32**2),
}
