"""Llama-shaped language models (SmolLM2, Llama) with low-rank adapters."""
