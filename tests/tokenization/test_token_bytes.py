"""The bytes of single tokens, for any kind of tokenizer."""

from __future__ import annotations

from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models

from bough.simulation.tokenizer import END_TOKEN, simulated_tokenizer
from bough.tokenization.tokenizer import Tokenizer
from bough.tokenization.vocabulary import TokenizerFiles


def test_bytes_of_byte_level_tokens_join_to_the_text() -> None:
    tokenizer = Tokenizer(simulated_tokenizer())
    for text in (" kakaka lo", "naïve ☃\n\t\x00", "".join(map(chr, range(0x100)))):
        token_ids = tokenizer.encode(text)
        assert b"".join(map(tokenizer.token_bytes, token_ids)) == text.encode()
    assert tokenizer.token_bytes(END_TOKEN) == b"<|end|>"
    assert tokenizer.token_bytes(-1) == tokenizer.token_bytes(10**6) == b""


def test_bytes_of_sentencepiece_tokens_join_to_the_text() -> None:
    vocab = {"<unk>": 0, "</s>": 1, "<0xE2>": 2, "\u2581sky": 3, "é": 4}
    backend = HfTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["</s>"])
    tokenizer = Tokenizer(TokenizerFiles(backend.to_str().encode(), "", (1,)))
    assert [tokenizer.token_bytes(token) for token in range(1, 5)] == [b"</s>", b"\xe2", b" sky", "é".encode()]
