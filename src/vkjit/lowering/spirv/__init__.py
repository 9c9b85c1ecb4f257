"""Kernels as SPIR-V words for Vulkan compute pipelines."""
