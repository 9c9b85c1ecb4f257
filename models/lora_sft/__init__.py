"""Supervised fine-tuning of a Llama-shaped model with low-rank adapters."""
