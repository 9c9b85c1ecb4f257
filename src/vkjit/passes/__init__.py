"""Program to program: differentiation, batching and clean-up; each pass a plain function."""
