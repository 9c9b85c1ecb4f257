"""Qwen3.5-shaped hybrid language models: gated delta nets with attention at every few layers."""
