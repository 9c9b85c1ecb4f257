"""Models and the trainer: pure functions of (params, batch) on the public ``vkjit`` package."""
