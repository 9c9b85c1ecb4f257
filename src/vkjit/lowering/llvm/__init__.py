"""LLVM text for CPU targets."""
