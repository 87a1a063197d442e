"""Text to token shards: where books come from, how they become tokens, and excerpts."""

from smat.data.shards import DATA_VARIABLE, TokenSplit, data_folder, open_split, prepare_tokens
from smat.data.tokens import Encoder, byte_encoder, make_encoder

__all__ = [
    "DATA_VARIABLE",
    "Encoder",
    "TokenSplit",
    "byte_encoder",
    "data_folder",
    "make_encoder",
    "open_split",
    "prepare_tokens",
]
