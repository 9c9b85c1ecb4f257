"""What the templates of all targets share: bodies at a point, buffers, cost."""
