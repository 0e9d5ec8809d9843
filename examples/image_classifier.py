#!/usr/bin/env python3
"""Trains a ResNet to tell circles, squares and crosses apart, in the memory that is stated.

python image_classifier.py --memory 2GiB --disk /nvme
"""

import argparse

import torch
import transformers

import sluice
import sluice.torch

SHAPES = ("circle", "square", "cross")


def images(count, size):
    """Noisy pictures of shapes at random places, and which shape each shows."""
    labels = torch.randint(0, len(SHAPES), (count,))
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    pictures = 0.3 * torch.randn(count, 3, size, size)
    for picture, label in zip(pictures, labels.tolist(), strict=True):
        radius = int(torch.randint(size // 8, size // 4, ()))
        dx, dy = ((axis - int(torch.randint(radius, size - radius, ()))).abs() for axis in (x, y))
        inside = {
            "circle": dx**2 + dy**2 <= radius**2,
            "square": torch.maximum(dx, dy) <= radius,
            "cross": (torch.minimum(dx, dy) <= 1) & (torch.maximum(dx, dy) <= radius),
        }[SHAPES[label]]
        picture += inside
    return pictures, labels


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", default="2GiB", help="of the whole process")
    parser.add_argument("--disk", help="a folder for what does not fit in memory")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=48, help="of an image, in pixels")
    parser.add_argument("--steps", type=int, default=60)
    a = parser.parse_args()

    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        embedding_size=32, hidden_sizes=[32, 64, 128], depths=[1, 1, 1], layer_type="basic", num_labels=len(SHAPES)
    )
    model, optimizer = sluice.torch.wrap(
        transformers.ResNetForImageClassification(config),
        sluice.AdamW(lr=2e-3),
        memory=a.memory,
        disk=a.disk,
        reserve="512MiB",
    )
    for step in range(a.steps):
        pictures, labels = images(a.batch, a.size)
        loss = model(pixel_values=pictures, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step + 1 == a.steps:
            print(f"step {step + 1}/{a.steps}: loss {loss.item():.4f}")
    model.eval()
    with torch.no_grad():
        pictures, labels = images(100, a.size)
        right = (model(pixel_values=pictures).logits.argmax(1) == labels).float().mean()
    print(f"{100 * right:.0f}% of 100 new images are told right")


if __name__ == "__main__":
    main()
