"""The CPU device: host code through LLVM, a thread pool and pooled memory."""
