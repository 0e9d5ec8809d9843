#!/usr/bin/env python3
"""Tests whether two builds compute the same bits: runs each of twelve small trainings with both, and compares every loss and
every file of the last checkpoint, byte by byte.

    scripts/compare_builds.py FOLDER [FOLDER]

FOLDER is a build folder: the program is FOLDER/bin/sluice. Without a second FOLDER the second build is build/. Families,
types, optimizers, recomputation, accumulation and placements are combined so that each is in several runs. The exit status is
1 where the builds differ, or one of them fails."""
import argparse
import json
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "campaigns"))
from kill_campaign import PLACES, SOURCE, short_training  # noqa: E402

STEPS = 4
LLAMA = {"model_type": "llama", "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": 256}
FAMILIES = {
    "gpt2": None,
    "llama": {**LLAMA, "tie_word_embeddings": False},
    "llama tied": {**LLAMA, "tie_word_embeddings": True},
}
RUNS = [
    ("gpt2", "memory", "--optimizer adamw"),
    ("gpt2", "disk", "--optimizer adamw --accumulate 3 --group 2"),
    ("gpt2", "disk", "--optimizer adamw --state 8bit --dtype bf16 --clip 0"),
    ("gpt2", "memory", "--optimizer adafactor --dtype bf16 --master none --recompute full"),
    ("gpt2", "disk", "--optimizer muon --state bf16 --accumulate 2"),
    ("gpt2", "chosen", "--optimizer sgd --momentum 0.9 --dtype f16 --clip-value 0.01"),
    ("llama", "memory", "--optimizer lion --state 8bit"),
    ("llama", "disk", "--optimizer adafactor --beta1 0.9 --accumulate 2"),
    ("llama", "disk", "--optimizer adamw --dtype bf16 --master none --state bf16 --recompute full"),
    ("llama tied", "disk", "--optimizer muon --dtype bf16 --clip 0"),
    ("llama tied", "memory", "--optimizer adam --dtype f16 --accumulate 3"),
    ("llama tied", "chosen", "--optimizer adamw --clip 0 --clip-value 0.1"),
]


def model_of(folder, family):
    if FAMILIES[family] is None:
        return "tiny"
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(FAMILIES[family]))
    return model


def run(build, folder, family, place, settings):
    """Returns the losses, and the files of the last checkpoint by name. Raises where the program fails."""
    folder.mkdir()
    done, result = short_training(build / "bin" / "sluice", folder, "out", STEPS, "--model", model_of(folder, family), "--tokens",
                                  "bytes", "--threads", "2", *PLACES[place], *settings.split())
    if result is None:
        raise RuntimeError(f"{build}: {done.stderr.strip()}")
    return result


def differences(first, second):
    """Describes each difference in words."""
    found = [f"loss of step {i}" for i, (a, b) in enumerate(zip(first[0], second[0], strict=True), 1) if a != b]
    return found + [name for name in sorted(first[1].keys() | second[1].keys()) if first[1].get(name) != second[1].get(name)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("builds", metavar="FOLDER", type=pathlib.Path, nargs="+")
    a = parser.parse_args()
    if len(a.builds) > 2:
        parser.error("more than two builds are given; name one or two")
    builds = [build.resolve() for build in (*a.builds, SOURCE / "build")][:2]
    wrong = 0
    for number, (family, place, settings) in enumerate(RUNS, 1):
        with tempfile.TemporaryDirectory() as name:
            try:
                found = differences(*(run(build, pathlib.Path(name) / str(i), family, place, settings) for i, build in enumerate(builds)))
            except RuntimeError as error:
                found = [str(error)]
        wrong += bool(found)
        print(f"{number}/{len(RUNS)}: {family}, {place}, {settings}: {'differ: ' + ', '.join(found) if found else 'the same bits'}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
