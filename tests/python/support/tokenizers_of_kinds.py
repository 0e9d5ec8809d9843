"""Small tokenizers of all kinds, trained here on text of this repository."""

import functools

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from support.sluice_process import SOURCE

WORDS_OF_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
END = "<|endoftext|>"
KINDS = ["gpt2", "prefix-space", "llama3", "llama2", "metaspace", "wordpiece", "unigram"]


@functools.cache
def lesson():
    files = [*sorted((SOURCE / "docs").glob("*.md")), *sorted((SOURCE / "tests" / "python").glob("*.py"))]
    return [file.read_text() for file in files]


def byte_level(add_prefix_space, trim_offsets):
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    made.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    made.decoder = decoders.ByteLevel()
    return made


def empty(kind):
    if kind == "gpt2":
        return byte_level(add_prefix_space=False, trim_offsets=False)
    if kind == "prefix-space":
        return byte_level(add_prefix_space=True, trim_offsets=True)
    if kind == "llama3":
        made = byte_level(add_prefix_space=False, trim_offsets=False)
        words = pre_tokenizers.Split(Regex(WORDS_OF_LLAMA_3), "isolated")
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_])
        return made
    if kind == "llama2":  # this kind sees the whole text as one word
        made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        return made
    if kind == "metaspace":
        made = Tokenizer(models.BPE(unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        return made
    if kind == "wordpiece":
        made = Tokenizer(models.WordPiece(unk_token="<unk>"))
        made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        return made
    made = Tokenizer(models.Unigram())
    made.normalizer, made.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    return made


@functools.cache
def make_tokenizer(kind, vocabulary=600):
    made = empty(kind)
    common = dict(vocab_size=vocabulary, special_tokens=["<unk>", END], show_progress=False)
    if isinstance(made.model, models.WordPiece):
        trainer = trainers.WordPieceTrainer(**common)
    elif isinstance(made.model, models.Unigram):
        trainer = trainers.UnigramTrainer(unk_token="<unk>", **common)
    elif isinstance(made.decoder, decoders.ByteLevel):
        trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **common)
    else:
        trainer = trainers.BpeTrainer(**common)
    words = " ".join(lesson()).split() if kind == "llama2" else lesson()
    made.train_from_iterator(words, trainer)
    return made
