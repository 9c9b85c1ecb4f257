"""The transformations that users call: jit, derivatives, batching, inspection."""
