"""The bytes that the codec and the checkpoint code agree on."""
