"""Every primitive, all its rules in one class; a file per family."""
