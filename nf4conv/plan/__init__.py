"""Plans the complete output: every tensor, its shard, its offset and its size. Reads no weights."""
