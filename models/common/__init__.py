"""What every model shares: files, text, data sets, adapters, checkpoints and logs."""
