"""Text to token shards: where books come from, how they become tokens, and excerpts."""
